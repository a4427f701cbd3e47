# SPDX-License-Identifier: Apache-2.0
"""Schedules: how many of the first groups are frozen at each step.

A schedule is a table that is known before the first step and equal on every host. So a program can
be compiled for each depth in the table, and replicas agree on the next depth without communication.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import checks, gate
from boostax._core.types import PyTree
from boostax.order import findings

Kind = Literal["interval", "continuous", "progressive", "ramp"]
Depths: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]

_WHO = "freeze_schedule"
_WRAPPER = "scheduled_freeze"


@dataclasses.dataclass(frozen=True)
class FreezeSchedule:
    """The depth of every optimizer step, made by ``freeze_schedule``.

    Two schedules are equal if they were made from equal arguments (a callable equals only itself).

    Attributes:
      kind: ``"interval"``, ``"continuous"``, ``"progressive"``, ``"ramp"`` or a callable.
      total_steps: number of optimizer steps.
      frozen_fraction: share of the steps on which any group is frozen; ``None`` for a callable, and
        with ``freeze_p``.
      seed: seed of the draws of ``"interval"``; ``None`` for other kinds.
      freeze_p: MindSpore's share of the steps that train all groups; ``None`` if not given.
    """

    kind: Kind | Callable[[int], int]
    total_steps: int
    frozen_fraction: float | None
    seed: int | None
    freeze_p: float | None = None
    _tables: dict[int, Depths] = dataclasses.field(
        default_factory=dict[int, Depths], init=False, repr=False, compare=False
    )

    def depths(self, groups: int) -> Depths:
        """Return the depth of every step for a network with this number of groups.

        At depth ``d`` the groups ``0..d-1``, in forward order, are frozen and ``d..groups-1``
        train. Depth 0 trains all groups, and the last group always trains.

        Args:
          groups: number of groups.

        Returns:
          ``i32[total_steps]`` (longer with ``freeze_p``) with elements in ``[0, groups)``,
          read-only. Cost: 4 bytes per step on the host, built once per number of groups; 65536
          steps take about 10 ms.

        Raises:
          ValueError, TypeError: ``groups`` is not a positive integer; with ``"continuous"``,
            ``frozen_fraction`` is above ``(groups - 1) / groups``, or ``freeze_p`` is 1; a callable
            returned an invalid depth.

        Example:
          >>> import boostax
          >>> schedule = boostax.freeze_schedule("progressive", total_steps=10, frozen_fraction=0.6)
          >>> schedule.depths(4).tolist()
          [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]
        """
        hint = "Pass the number of groups that freeze one after the other."
        groups = checks.positive_int("FreezeSchedule.depths", "groups", groups, hint)
        if groups not in self._tables:
            self._tables[groups] = _table(self, groups)
            self._tables[groups].flags.writeable = False
        return self._tables[groups]


def _table(schedule: FreezeSchedule, groups: int) -> Depths:
    kind = schedule.kind
    length = schedule.total_steps
    if callable(kind):
        hint = "Depth d freezes groups 0 to d-1, and the last group always trains."
        depths = (_below(groups, f"the depth at step {i}", kind(i), hint) for i in range(length))
        return np.fromiter(depths, np.int32, length)
    exact = schedule.freeze_p is not None
    fraction = schedule.frozen_fraction
    freeze_p: Any = schedule.freeze_p if fraction is None else 1.0 - fraction
    # MindSpore's sequence is a hundredth longer than the run, and extends to the end of a cycle.
    length = int(length * 1.01) if exact else length
    if groups == 1 or (freeze_p == 1 and not exact):
        return np.zeros(length, np.int32)
    if kind == "interval":
        return _interval(groups, freeze_p, length, schedule.seed)
    if kind == "continuous":
        return _continuous(groups, freeze_p, fraction, length)
    # Each group freezes permanently at one step. The ``power``-th roots of these steps are evenly
    # spaced.
    power = 3 if kind == "ramp" else 1
    times = np.linspace(freeze_p ** (1 / power), 1.0, groups)[:-1] ** power
    begins = np.maximum(np.floor(length * times + 0.5), 1)
    return np.searchsorted(begins, np.arange(length), side="right").astype(np.int32)


def _continuous(groups: int, freeze_p: float, fraction: float | None, length: int) -> Depths:
    """Repeat cycles of some steps at depth 0 and one step at each other depth, ascending."""
    allowed = "below 1 with kind 'continuous' (MindSpore's freeze_type 0)"
    hint = "A cycle would never end. Use 'interval', which freezes nothing with freeze_p=1."
    checks.require(freeze_p < 1, _WHO, "freeze_p", freeze_p, allowed, hint)
    # The number of steps in a cycle that train all groups, rounded as in MindSpore.
    unfrozen = int(freeze_p * (groups - 1) // (1 - freeze_p))
    if fraction is None:
        cycle = unfrozen + groups - 1
        length = -(-length // cycle) * cycle
    else:
        most = (groups - 1) / groups
        allowed = f"at most {most:.4g} with kind 'continuous' and {groups} groups"
        hint = "Each cycle has a step that trains all groups. Use 'interval' to freeze more often."
        checks.number(_WHO, "frozen_fraction", fraction, allowed, hint, most=most)
        # In floating point 1 - 0.9 < 0.1, so for ten groups ``unfrozen`` is rounded down to 0.
        unfrozen = min(max(1, unfrozen), length)
    cycle = unfrozen + groups - 1
    return np.maximum(np.arange(length) % cycle - unfrozen + 1, 0).astype(np.int32)


def _interval(groups: int, freeze_p: float, length: int, seed: int | None) -> Depths:
    """Freeze in a step if the share of frozen steps before that step is below ``1 - freeze_p``."""
    frozen, count = [False], 0
    for step in range(1, length):
        frozen.append(count / step < 1 - freeze_p)
        count += frozen[-1]
    # RandomState.choice draws by the same computation, so the depths equal MindSpore's.
    cdf = (np.arange(1, groups) / (groups * (groups - 1) // 2)).cumsum()
    cdf /= cdf[-1]
    draws = np.random.RandomState(seed).random_sample(count)
    depths = np.zeros(length, np.int32)
    depths[np.array(frozen)] = groups - 1 - cdf.searchsorted(draws, side="right")
    return depths


def _below(limit: int, argument: str, value: object, hint: str) -> int:
    """Return an integer of Python, NumPy or JAX from 0 to below ``limit``; refuse a bool."""
    allowed = f"an integer in [0, {limit})"
    number = checks.natural(_WHO, argument, value, hint, allowed)
    checks.require(number < limit, _WHO, argument, value, allowed, hint)
    return number


def freeze_schedule(
    kind: Kind | Callable[[int], int],
    *,
    total_steps: int,
    frozen_fraction: float | None = None,
    seed: int | None = None,
    freeze_p: float | None = None,
) -> FreezeSchedule:
    r"""Make a schedule: for every optimizer step, how many of the first groups are frozen.

    With ``T`` steps, ``G`` groups in forward order and ``f = frozen_fraction``, depth ``d`` freezes
    the groups ``0..d-1`` and trains ``d..G-1``; the last group always trains. The named kinds train
    all groups on the first step:

    - ``"interval"``: frozen steps are spread evenly, each at a random depth, :math:`P(d) = (G - d)
      \big/ \tfrac12 G (G - 1)`, so small depths are most frequent. Every group is trained at some
      steps until the end. The share of frozen steps differs from ``f`` by at most ``1/T``.
    - ``"continuous"``: cycles of ``z`` steps that train all groups and one step at each depth
      ``1..G-1``, :math:`z = \lfloor (1 - f)(G - 1) / f \rfloor`. Over complete cycles the share of
      frozen steps is between ``f`` and ``f (G-1) / (G-1-f)``. A training run of fewer than ``z``
      steps freezes nothing.
    - ``"progressive"`` and ``"ramp"``: group ``i - 1`` freezes permanently at step

      .. math::
        \lfloor T c_i^k + \tfrac12 \rfloor \ge 1, \qquad
        c_i = c_1 + \tfrac{i - 1}{G - 1} (1 - c_1), \qquad c_1 = (1 - f)^{1/k},
        \qquad i = 1 \dots G - 1,

      with ``k = 1`` for ``"progressive"`` (evenly spaced) and ``k = 3`` for ``"ramp"`` (FreezeOut's
      cubic schedule: early groups freeze at short intervals, late groups at long ones). By this
      formula the last group would freeze at step ``T``. The share of frozen steps differs from
      ``f`` by at most ``1/T``, and every depth occurs if :math:`T (c_2^k - c_1^k) \ge 2`. FreezeOut
      also anneals the learning rate of each layer until the layer freezes; ``freeze_schedule`` does
      not change the learning rate.

    ``"interval"`` and ``"continuous"`` are the first ``T`` steps of MindSpore's freeze types 1 and
    0 with ``freeze_p = 1 - f``. With one group, or with ``f = 0``, no group is ever frozen. If
    ``freeze_p`` is given instead of ``f``, the schedule is exactly MindSpore's sequence of
    ``int(1.01 T)`` steps. With ``"continuous"``, the sequence is extended to the end of a cycle.
    With ``freeze_p < 1 / G`` a cycle has no step that trains all groups.

    Args:
      kind: one of the four names above; or a callable from the step, a Python int, to the depth, an
        integer in ``[0, G)``; the callable is called once per step and per number of groups.
      total_steps: number of applied optimizer steps, not of micro-steps.
      frozen_fraction: share of the steps on which any group is frozen, in ``[0, 1)``; ``None``
        means 0.3. Not with a callable.
      seed: seed of the draws of ``"interval"``, in ``[0, 2**32)``; ``None`` means 0. Other kinds
        ignore it. Not with a callable. The draws equal MindSpore's after ``np.random.seed(seed)``,
        but NumPy's global generator is not used.
      freeze_p: share of the steps that train *all* groups, in ``[0, 1]``; MindSpore's default is
        0.7. Only for ``"interval"`` and ``"continuous"``. With 0, only the first step of
        ``"interval"`` trains all groups. ``"continuous"`` refuses 1, for which MindSpore divides by
        zero.

    Returns:
      A ``FreezeSchedule``. Cost: none before ``depths``; nothing on the device.

    Raises:
      ValueError, TypeError: an argument out of range; with a callable, an argument that only the
        named kinds use.

    Example:
      >>> import boostax
      >>> schedule = boostax.freeze_schedule("interval", total_steps=16, frozen_fraction=0.5)
      >>> schedule.depths(4).tolist()
      [0, 1, 0, 1, 0, 1, 0, 1, 0, 2, 0, 1, 0, 2, 0, 1]
      >>> boostax.freeze_schedule("interval", total_steps=8, freeze_p=0.0).depths(4).tolist()
      [0, 1, 1, 1, 1, 2, 1, 2]
      >>> warm_up = boostax.freeze_schedule(lambda step: 2 if step < 3 else 0, total_steps=5)
      >>> warm_up.depths(4).tolist()
      [2, 2, 2, 0, 0]

    References:
      MindSpore 2.10, ``mindspore.boost.GradientFreeze``.
      Brock et al., FreezeOut, https://arxiv.org/abs/1706.04983, 2017.
    """
    hint = "Pass the number of optimizer steps in the whole training run."
    total_steps = checks.positive_int(_WHO, "total_steps", total_steps, hint)
    if callable(kind):
        hint = "A callable receives only the step."
        settings = {"frozen_fraction": frozen_fraction, "seed": seed, "freeze_p": freeze_p}
        for argument, value in settings.items():
            checks.absent(_WHO, argument, value, "left out with a callable kind", hint)
        return FreezeSchedule(kind, total_steps, None, None)
    hint = "Or pass a function from the step to the depth."
    checks.choice(_WHO, "kind", kind, Kind, hint)
    hint = "The same seed draws the same depths on all hosts."
    seed = _below(2**32, "seed", 0 if seed is None else seed, hint)
    seed = seed if kind == "interval" else None
    if freeze_p is not None:
        hint = "MindSpore has no other kinds."
        checks.choice(_WHO, "kind with freeze_p", kind, get_args(Kind)[:2], hint)
        hint = "freeze_p is the share of steps that train all groups, 1 - frozen_fraction."
        checks.absent(_WHO, "frozen_fraction", frozen_fraction, "left out with freeze_p", hint)
        hint = "0.7 trains all groups on about 70% of steps, and freezes a prefix on other steps."
        share = checks.number(_WHO, "freeze_p", freeze_p, "in [0, 1]", hint, least=0, most=1)
        return FreezeSchedule(kind, total_steps, None, seed, float(share))
    fraction = 0.3 if frozen_fraction is None else frozen_fraction
    hint = "0.3 freezes a prefix on about 30% of steps."
    checks.number(_WHO, "frozen_fraction", fraction, "in [0, 1)", hint, least=0, below=1)
    return FreezeSchedule(kind, total_steps, float(fraction), seed)


class Plan:
    """A schedule for the params of a run: the depth of every step, and the group of each leaf.

    Args:
      labels: a tree of ints like the params: the group of each leaf.
      groups: number of groups.
      schedule: the depth of every step.
      repeat: whether the schedule starts again at its end.

    Attributes:
      groups: number of groups.
      depths: i32 ``[steps]``, the depth of every step.
      drawn: the depths that occur, ascending.
      changes: the steps at which the depth changes, and at the end the number of steps.
    """

    def __init__(self, labels: PyTree, groups: int, schedule: FreezeSchedule, repeat: bool):
        self.groups = groups
        self.depths = schedule.depths(groups)
        self.drawn = tuple(int(depth) for depth in np.unique(self.depths))
        self._labels, self._repeat = labels, repeat
        # The end of the table counts as a change: if the schedule repeats, the first depth follows,
        # which may differ from the last depth.
        self.changes = np.append(np.flatnonzero(np.diff(self.depths)) + 1, len(self.depths))

    def active(self, depth: int) -> PyTree:
        """Return a tree of bools that are True for the leaves trained at this depth."""
        return jax.tree.map(lambda group: group >= depth, self._labels)

    def index(self, depth: jax.Array) -> jax.Array:
        """Return the position of a depth in ``drawn`` as a traced integer."""
        return jnp.searchsorted(jnp.asarray(self.drawn, jnp.int32), depth).astype(jnp.int32)

    def at(self, steps: jax.Array) -> jax.Array:
        """Return the depth after ``steps`` applied steps, traced; after the end, the last depth."""
        length = len(self.depths)
        index = steps % length if self._repeat else jnp.minimum(steps, length - 1)
        # The table is a constant of the program, one byte per step.
        compact = self.depths.astype(np.min_scalar_type(self.drawn[-1]))
        return jnp.asarray(compact)[index].astype(jnp.int32)

    def report_idle(self, steps: int, state: PyTree) -> None:
        """Report a schedule that freezes no group after ``steps`` applied steps."""
        start = 0 if self._repeat else min(steps, len(self.depths) - 1)
        is_schedule = len(self.depths) > 1 and jax.tree.leaves(self._labels)
        if is_schedule and not self.depths[start:].any():
            findings.of_part(_WRAPPER, "never_frozen", state)

    def known(self, steps: int) -> int:
        """Return the depth after ``steps`` applied steps as a Python int; raise after the end."""
        length = len(self.depths)
        got = f"a schedule of {length} steps for a longer run"
        allowed = "at least as long as the run"
        hint = "Make total_steps the length of the run, or pass repeat=True."
        checks.require(steps < length or self._repeat, _WRAPPER, "schedule", got, allowed, hint)
        return int(self.depths[steps % length])


class HostDepth:
    """The depth of each call of a run, computed on the host with few reads from the device.

    A call applies at most one step. If the schedule has the same depth for ``n`` more steps, the
    depth is the same in the next ``n`` calls, and the count of steps on the device need not be
    read. Without a gate every call applies a step, and the count is read only once. If the state of
    a call is not the state that the previous call returned, the count is read again.

    Args:
      plan: the schedule.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._last: jax.Array | None = None
        self._most = self._until = self._depth = 0

    def __call__(self, state: Any) -> int:
        """Return the depth of a call with this state.

        Raises:
          ValueError: the schedule has ended.
        """
        unknown = state.steps is not self._last
        if unknown or self._most >= self._until:
            if unknown or gate.gates_in(state.inner_state):
                self._most = int(state.steps)
            self._depth = self._plan.known(self._most)
            if unknown:
                self._plan.report_idle(self._most, state)
            # The next count of applied steps at which the depth may change.
            changes = self._plan.changes
            start = self._most - self._most % int(changes[-1])
            place = np.searchsorted(changes, self._most - start, "right")
            self._until = start + int(changes[place])
            # From now on, the depth follows this state.
            self._last = state.steps
        return self._depth

    def follow(self, state: Any) -> None:
        """Record the state that the call returned."""
        self._last = state.steps
        self._most += 1


def as_schedule(schedule: Any, repeat: bool) -> tuple[FreezeSchedule, bool]:
    """Convert a user's schedule of any form, and return whether the schedule repeats."""
    if isinstance(schedule, FreezeSchedule):
        return schedule, repeat
    if callable(schedule):
        # MindSpore's default length of a schedule is 65536.
        return freeze_schedule(cast(Callable[[int], int], schedule), total_steps=65536), repeat
    hint = "Pass boostax.freeze_schedule(...). schedule=2 always freezes the first two groups."
    allowed = "a FreezeSchedule, a function of the step, a depth, or a sequence of depths"
    try:
        listed = list(schedule) if isinstance(schedule, Iterable) else schedule
        depths = [operator.index(depth) for depth in np.atleast_1d(listed)]
    except (TypeError, ValueError) as error:
        raise TypeError(checks.message(_WRAPPER, "schedule", allowed, schedule, hint)) from error
    checks.require(min(depths, default=-1) >= 0, _WRAPPER, "schedule", schedule, allowed, hint)
    return freeze_schedule(depths.__getitem__, total_steps=len(depths)), repeat or len(depths) == 1
