# SPDX-License-Identifier: Apache-2.0
"""Local SGD and DiLoCo: replicas train on their own, and meet now and then."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, said, trees
from boostax._core.describe import Stepped, describe
from boostax._core.gate import Pending, gated, run, run_or_hold
from boostax._core.replicas import PerReplica
from boostax.reduce.mean import all_reduce
from boostax.reduce.own import Own, result, stepped

PyTree = Any


class LocalUpdatesState(NamedTuple):
    """State of ``local_updates``.

    Attributes:
      since_sync: i32, steps since the replicas last met.
      syncs: i32, how often they met.
      anchor: tree like the params, in their dtypes: what all held then.
      reduction_state: state of the reduction.
      outer_state: state of the outer optimizer, the same on all replicas.
      inner_state: a ``PerReplica`` of the inner optimizer's state: each replica's own.
    """

    since_sync: jax.Array
    syncs: jax.Array
    anchor: PyTree
    reduction_state: Any
    outer_state: Any
    inner_state: PerReplica

    def metrics(self) -> dict[str, jax.Array]:
        """Named scalars for ``boostax.metrics``."""
        return {"since_sync": self.since_sync, "syncs": self.syncs}

    def own_params(self) -> None:
        """Marks a state whose params are each replica's own."""


@said.reduction
def local_updates(
    inner: optax.GradientTransformation,
    axis_name: axes.AxisName | None,
    every: int,
    outer: optax.GradientTransformation = optax.sgd(1.0),
    *,
    reduction: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Train every replica on its own for ``every`` steps, then let them meet: local SGD, DiLoCo.

    From a common anchor :math:`a` each replica makes :math:`H` steps of ``inner`` on its own
    gradients. How far they came, on average, is the gradient of ``outer``:

    .. math::
      \Delta = \tfrac1n \sum_{r=1}^{n} (a - p_r), \qquad
      a \leftarrow a + \text{outer}(\Delta), \qquad p_r \leftarrow a .

    ``outer=optax.sgd(1.0)`` averages the params (local SGD, the default);
    ``optax.sgd(0.7, momentum=0.9, nesterov=True)`` is DiLoCo. The state of ``inner`` is never
    averaged.

    Params are each replica's own: see ``docs/cards/local_updates.md`` for the loop. Stands
    outermost but for the gates, ``dynamic_loss_scale(local_updates(...), axis_name=...)``. Only
    applied steps count. ``boostax.flush`` lets the replicas meet before their time.

    Args:
      inner: an optimizer without collectives over ``axis_name`` and without a gate of boostax.
      axis_name: mesh axis, or a tuple of axes, of the surrounding ``shard_map`` or ``pmap``.
      every: steps from one meeting to the next; 1 meets at each.
      outer: an optimizer for the anchor, without collectives; it computes in f32 or wider.
      reduction: how :math:`\Delta` comes about: ``all_reduce(axis_name, dtype="bfloat16")``,
        ``adasum(axis_name)``, ...; ``None`` for ``all_reduce(axis_name)``.

    Returns:
      A transformation with a ``LocalUpdatesState``. Through ``boostax.apply_gradients`` the params
      become bit-equal to the anchor; the pure ``update`` returns differences, and ``params +
      updates`` is off by a rounding of the larger of old and new value, which the anchor never
      sees but as a part of the next :math:`\Delta`. Cost: one all-reduce of the params in f32 or
      wider per ``every`` steps and no other collective; a copy of the params and the outer state.

    Raises:
      ValueError, TypeError: an argument out of range; ``init`` with params that differ per
        replica; at trace time, an unbound axis, already reduced or integer gradients, no params.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.reduce.local_updates(optax.sgd(1.0), "data", every=2)
      >>> def train(grads, w):
      ...   state = tx.init(w)
      ...   for g in grads:
      ...     w, state = boostax.apply_gradients(tx, g, state, w)
      ...   return w
      >>> grads = jnp.array([[1.0, 1.0], [2.0, 4.0]])  # two replicas, two steps
      >>> jax.vmap(train, (0, None), axis_name="data")(grads, jnp.float32(0.0)).tolist()
      [-4.0, -4.0]

    References:
      Stich, Local SGD Converges Fast and Communicates Little, https://arxiv.org/abs/1805.09767,
      2019. Douillard et al., DiLoCo, https://arxiv.org/abs/2311.08105, 2023.
    """
    who = "local_updates"
    replica = Own.of(who, inner, axis_name)
    names = replica.names
    every = checks.positive_int(who, "every", every, "It counts steps between meetings.")
    outer_tx = checks.transformation(who, "outer", outer)
    reduction = all_reduce(names) if reduction is None else reduction
    reduce = checks.transformation(who, "reduction", reduction)

    def init_fn(params: PyTree) -> LocalUpdatesState:
        _require_common(params, names, who)
        wide = trees.at_least_float32(params)
        since, syncs = (jnp.zeros((), jnp.int32) for _ in range(2))
        anchor, outer_state = jax.tree.map(_copy, params), outer_tx.init(wide)
        own = replica.init(params)
        return LocalUpdatesState(since, syncs, anchor, reduce.init(wide), outer_state, own)

    def meet(state: LocalUpdatesState, own: PyTree, value: PyTree, apply: bool) -> Stepped:
        local = stepped(own, value, apply)
        away = lambda a, p: trees.at_least_float32(a) - trees.at_least_float32(p)  # noqa: E731
        drift = jax.tree.map(away, axes.unify(state.anchor, local), local)
        drift, reduced = reduce.update(drift, state.reduction_state)
        before = Pending(drift), state.outer_state, state.anchor
        anchor, outer_state = run(outer_tx, *before, apply=True, extra={})
        syncs: Any = optax.safe_increment(state.syncs)
        since = jnp.zeros_like(state.since_sync)
        held = LocalUpdatesState(since, syncs, anchor, reduced, outer_state, state.inner_state)
        return result(anchor, own, value, apply), held

    @describe(who, "own params", names, inner={"inner_state": replica.tx})
    def step_fn(
        grads: Pending, state: LocalUpdatesState, params: PyTree, *, apply: bool, **extra: Any
    ) -> Stepped:
        own, updates, inner_state = replica.step(grads, state.inner_state, params, extra)
        value = optax.apply_updates(own, updates) if apply else updates
        # The inner state need not pass the gate.
        held = state._replace(since_sync=state.since_sync + 1, inner_state=None)
        heavy = functools.partial(meet, held, own, value, apply)
        value, new = run_or_hold(held.since_sync >= every, heavy, value, held, apply=True, who=who)
        return trees.as_updates(value, own), new._replace(inner_state=inner_state)

    def flush_fn(state: LocalUpdatesState, params: PyTree, **extra: Any) -> Stepped:
        del extra
        own, held = replica.enter(params), state._replace(inner_state=None)
        heavy = functools.partial(meet, held, own, own, True)
        value, new = run_or_hold(state.since_sync > 0, heavy, own, held, apply=True, who=who)
        return value, new._replace(inner_state=state.inner_state)

    return gated(init_fn, step_fn, flush_fn)


def _copy(p: Any) -> Any:
    types = isinstance(p, jax.ShapeDtypeStruct)
    return p if types else jnp.array(p, dtype=jnp.result_type(p), copy=True)


def _require_common(params: PyTree, names: tuple[str, ...], who: str) -> None:
    if any(kind & frozenset(names) for kind in axes.types(params)):
        raise ValueError(
            f"{who}: init must be given params that are equal on all replicas, got some that vary "
            f"over {', '.join(names)}. Call it outside the mapped function, or before the params "
            "become each replica's own."
        )
