# SPDX-License-Identifier: Apache-2.0
"""Freezing as the run goes: a group is frozen when its gradients have settled."""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, trees
from boostax._core.describe import describe
from boostax._core.groups import leaf_groups
from boostax.freeze.plan import Plan

PyTree = Any
_SLOWER = 4


class GroupSignalState(NamedTuple):
    """State of ``group_signal``.

    Attributes:
      fast: f32 ``[groups]``, moving average of the norm of the group's gradient, not debiased.
      slow: the same over a horizon four times as long.
    """

    fast: jax.Array
    slow: jax.Array


def group_signal(groups: PyTree, *, horizon: int = 100) -> optax.GradientTransformationExtraArgs:
    r"""Record the gradient norm of each group, for ``freeze_on_plateau``; change nothing.

    For each group :math:`k` with gradient :math:`g_k`, two moving averages of :math:`\|g_k\|`, over
    :math:`h` and :math:`4h` steps. Put it behind the reduction and before clipping:
    ``chain(all_reduce("data"), group_signal(groups), clip, adamw)``. A frozen group's stay.

    Args:
      groups: a tree of integers like the params, or a prefix of one: see ``prefix_groups``.
      horizon: h, in applied steps.

    Returns:
      A transformation with a ``GroupSignalState``. Cost: 8 bytes for each group; one read of the
      gradients; no collective.

    Raises:
      ValueError, TypeError: an argument out of range.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> tx = boostax.freeze.group_signal({"a": 0, "b": 1}, horizon=1)
      >>> _, state = tx.update({"a": jnp.array([3.0, 4.0]), "b": jnp.ones(1)}, tx.init({}))
      >>> state.fast.tolist()
      [5.0, 1.0]
    """
    who = "group_signal"
    horizon = checks.positive_int(who, "horizon", horizon, "100 averages over a hundred steps.")
    hint = "boostax.freeze.prefix_groups makes them."
    try:
        labels = [operator.index(label) for label in jax.tree.leaves(groups)]
    except TypeError as error:
        allowed = "a tree of integers"
        raise TypeError(checks.message(who, "groups", allowed, groups, hint)) from error
    if not labels or set(labels) != set(range(max(labels) + 1)):
        allowed = "a tree of the integers 0, 1, ... without a gap"
        raise ValueError(checks.message(who, "groups", allowed, groups, hint))
    number = max(labels) + 1
    rates = 1 / horizon, 1 / (_SLOWER * horizon)

    def init_fn(params: PyTree) -> GroupSignalState:
        del params
        zeros = functools.partial(jnp.zeros, number, jnp.float32)
        return GroupSignalState(zeros(), zeros())

    @describe(who, "watch")
    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, GroupSignalState]:
        del params, extra
        trees.require_gradients(updates, "group_signal")
        hint = "Its norms are those of whole leaves, behind the reduction."
        axes.require_whole(updates, (), "group_signal", hint)
        squares: list[list[jax.Array]] = [[] for _ in range(number)]
        numbers, _ = leaf_groups(who, groups, updates)
        for k, leaf in zip(numbers, jax.tree.leaves(trees.at_least_float32(updates)), strict=True):
            squares[k].append(jnp.sum(jnp.real(leaf * jnp.conj(leaf))).astype(jnp.float32))
        seen = jnp.asarray([bool(found) for found in squares])
        norms = jnp.sqrt(jnp.stack([sum(found, jnp.float32(0)) for found in squares]))
        new = [
            jnp.where(seen, old + rate * (norms - old), old)
            for old, rate in zip(state, rates, strict=True)
        ]
        return updates, GroupSignalState(*new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@dataclasses.dataclass(frozen=True)
class FreezeOnPlateau:
    """What ``freeze_on_plateau`` returns; its arguments."""

    tolerance: float
    every: int
    patience: int
    start: int

    def summary(self, groups: int) -> str:
        """In a few words."""
        looks = f"{self.every} optimizer step" + ("" if self.every == 1 else "s")
        return f"plateau, {groups} groups, a look every {looks}"

    def plan(self, who: str, groups: int) -> Plan:
        """For so many groups."""
        return _Plateau(self, who, groups)


class _Plateau(Plan):
    """Looks at the signals now and then."""

    def __init__(self, settings: FreezeOnPlateau, who: str, groups: int):
        self.drawn = tuple(range(groups))
        self._settings, self._who = settings, who

    def init(self) -> PyTree:
        return jnp.zeros((), jnp.int32)

    def follow(
        self, kept: PyTree, steps: jax.Array, depth: jax.Array, inner_state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        found = trees.find(inner_state, lambda node: isinstance(node, GroupSignalState))
        if len(found) != 1 or found[0].fast.size != len(self.drawn):
            raise ValueError(
                f"{self._who}: inner must hold one group_signal(groups) of the same groups for "
                f"freeze_on_plateau, got {len(found)}. Put it behind the reduction: "
                "chain(all_reduce('data'), group_signal(groups), adamw)."
            )
        fast, slow = (average[depth] for average in found[0])
        axes_of = axes.varying(fast)
        if axes_of:
            raise ValueError(
                f"{self._who}: group_signal must see gradients that are equal on all replicas, got "
                f"ones that differ over {', '.join(sorted(axes_of))}. Put it behind the reduction; "
                "leaves that are sharded over further axes it cannot measure."
            )
        settings = self._settings
        # Debiased, both would be averages of what was seen so far: too alike in the beginning.
        ready = (steps >= max(settings.start, 1)) & (steps % settings.every == 0)
        settled = jnp.abs(fast - slow) <= settings.tolerance * slow
        looks = jnp.where(ready, jnp.where(settled, kept + 1, 0), kept)
        freezes = (looks >= settings.patience) & (depth < self.drawn[-1])
        return jnp.where(freezes, depth + 1, depth), jnp.where(freezes, 0, looks)

    def known(self, steps: int) -> None:
        return None

    def until(self, steps: int) -> int:
        return steps - steps % self._settings.every + self._settings.every


def freeze_on_plateau(
    *, tolerance: float = 0.05, every: int = 100, patience: int = 3, start: int = 0
) -> FreezeOnPlateau:
    r"""A schedule that freezes the first active group once its gradient norm has settled.

    Every ``every`` applied steps it compares the two averages of ``group_signal`` for the first
    group that still trains: :math:`|\text{fast} - \text{slow}| \le \text{tolerance} \cdot
    \text{slow}` at ``patience`` such looks in a row freezes it, and the next one is watched. The
    last group always trains, and nothing thaws.

    Args:
      tolerance: largest relative difference of the averages that counts as settled, > 0.
      every: applied steps from one look to the next; the host asks the device that often.
      patience: looks in a row.
      start: applied steps before the first look.

    Returns:
      A ``schedule`` for ``scheduled_freeze``. Cost: 4 bytes in its state.

    Raises:
      ValueError, TypeError: an argument out of range; at trace time, no ``group_signal`` inside.

    Example:
      >>> import boostax, optax
      >>> groups = {"body": 0, "head": 1}
      >>> inner = optax.chain(boostax.freeze.group_signal(groups), optax.adamw(1e-3))
      >>> tx = boostax.scheduled_freeze(inner, groups, boostax.freeze.freeze_on_plateau(every=200))

    References:
      After Liu et al., AutoFreeze, https://arxiv.org/abs/2102.01386, 2021, which compares gradient
      norms too.
    """
    who = "freeze_on_plateau"
    hint = "0.05 is five per cent."
    checks.number(who, "tolerance", tolerance, "greater than 0", lambda x: x > 0, hint)
    every = checks.positive_int(who, "every", every, "It counts applied steps.")
    patience = checks.positive_int(who, "patience", patience, "1 freezes at the first look.")
    if start != 0:
        start = checks.positive_int(who, "start", start, "0 looks from the beginning.")
    return FreezeOnPlateau(tolerance, every, patience, start)
