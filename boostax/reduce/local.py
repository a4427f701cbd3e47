# SPDX-License-Identifier: Apache-2.0
"""Local SGD and DiLoCo: replicas train on their own and synchronize every few steps."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, trees
from boostax._core.describe import Stepped, first_line
from boostax._core.gate import Pending, run, run_or_hold
from boostax._core.replicas import PerReplica
from boostax.reduce.mean import all_reduce
from boostax.reduce.own import Own, through

PyTree = Any


class LocalUpdatesState(NamedTuple):
    """State of ``local_updates``.

    Attributes:
      since_sync: i32, steps since the last synchronization.
      syncs: i32, the number of synchronizations.
      anchor: tree like the params, in their dtypes: the params after the last synchronization.
      reduction_state: state of the reduction.
      outer_state: state of the outer optimizer, the same on all replicas.
      inner_state: a ``PerReplica`` of the inner optimizer's state: each replica's own.
    """

    since_sync: jax.Array
    syncs: jax.Array
    anchor: PyTree
    reduction_state: optax.OptState
    outer_state: optax.OptState
    inner_state: PerReplica | None

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        return {"since_sync": self.since_sync, "syncs": self.syncs}

    def own_params(self) -> None:
        """Mark a state whose params differ per replica."""


def local_updates(
    inner: optax.GradientTransformation,
    axis_name: axes.AxisName,
    every: int,
    outer: optax.GradientTransformation = optax.sgd(1.0),
    *,
    reduction: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Train every replica on its own for ``every`` steps, then synchronize: local SGD, DiLoCo.

    From a common anchor :math:`a` each replica takes :math:`H` steps of ``inner`` on its own
    gradients. The mean distance of the replicas from the anchor is the gradient of ``outer``:

    .. math::
      \Delta = \tfrac1n \sum_{r=1}^{n} (a - p_r), \qquad
      a \leftarrow a + \text{outer}(\Delta), \qquad p_r \leftarrow a .

    ``outer=optax.sgd(1.0)`` averages the params (local SGD, the default);
    ``optax.sgd(0.7, momentum=0.9, nesterov=True)`` is DiLoCo. The state of ``inner`` is never
    averaged.

    Params differ per replica: see ``docs/cards/local_updates.md`` for the loop. The transformation
    stands outermost, inside gates only: ``dynamic_loss_scale(local_updates(...), axis_name=...)``.
    Only applied steps count. ``boostax.flush`` synchronizes the replicas at once.

    Args:
      inner: an optimizer without collectives over ``axis_name`` and without a gate of boostax.
      axis_name: mesh axis, or a tuple of axes, of the surrounding ``shard_map`` or ``pmap``.
      every: steps from one synchronization to the next; 1 synchronizes at each step.
      outer: an optimizer for the anchor, without collectives; it computes in f32 or wider.
      reduction: computes :math:`\Delta`: ``all_reduce(axis_name, dtype="bfloat16")``,
        ``adasum(axis_name)``, ...; ``None`` for ``all_reduce(axis_name)``.

    Returns:
      A transformation with a ``LocalUpdatesState``. Through ``boostax.apply_gradients`` the params
      become bit-equal to the anchor. The pure ``update`` returns differences, so ``params +
      updates`` is off by a rounding of the larger of old and new value; this error reaches the
      anchor only as a part of the next :math:`\Delta`. Cost: one all-reduce of the params in f32
      or wider per ``every`` steps and no other collective; a copy of the params and the outer
      state.

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
    every = checks.positive_int(who, "every", every, "It counts steps between synchronizations.")
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

    def synced(state: LocalUpdatesState, local: PyTree) -> Stepped:
        away = lambda a, p: trees.at_least_float32(a) - trees.at_least_float32(p)  # noqa: E731
        drift = jax.tree.map(away, axes.unify(state.anchor, local), local)
        drift, reduced = reduce.update(drift, state.reduction_state)
        before = Pending(drift), state.outer_state, state.anchor
        anchor, outer_state = run(outer_tx, *before, apply=True, extra={})
        syncs = jnp.asarray(optax.safe_increment(state.syncs))
        since = jnp.zeros_like(state.since_sync)
        return anchor, LocalUpdatesState(since, syncs, anchor, reduced, outer_state, None)

    def average(state: LocalUpdatesState, own: PyTree, value: PyTree, apply: bool) -> Stepped:
        state = state._replace(since_sync=state.since_sync + 1)
        heavy = functools.partial(through, functools.partial(synced, state), own, value, apply)
        return run_or_hold(state.since_sync >= every, heavy, value, state, apply=True, who=who)

    def close(state: LocalUpdatesState, own: PyTree) -> Stepped:
        heavy = functools.partial(through, functools.partial(synced, state), own, own, True)
        return run_or_hold(state.since_sync > 0, heavy, own, state, apply=True, who=who)

    return replica.gated(first_line(local_updates), init_fn, average, close)


def _copy(p: Any) -> Any:
    is_type = isinstance(p, jax.ShapeDtypeStruct)
    return p if is_type else jnp.array(p, dtype=jnp.result_type(p), copy=True)


def _require_common(params: PyTree, names: tuple[str, ...], who: str) -> None:
    if any(kind & frozenset(names) for kind in axes.types(params)):
        raise ValueError(
            f"{who}: init must be given params that are equal on all replicas, got some that vary "
            f"over {', '.join(names)}. Call it outside the mapped function, or before the params "
            "become each replica's own."
        )
