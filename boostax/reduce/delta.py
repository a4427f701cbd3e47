"""AdaSum of the updates of independent optimizers, one on each replica."""

from typing import Any, NamedTuple

import optax

from boostax._core import axes, checks, trees
from boostax._core.describe import describe
from boostax._core.replicas import PerReplica, require_like
from boostax.reduce.adasum import Scope, adasum

PyTree = Any


class AdasumDeltaState(NamedTuple):
    """State of ``adasum_delta``.

    Attributes:
      inner_state: a ``PerReplica`` of the inner optimizer's state: each replica's own.
      adasum: the ``AdasumState`` of the updates.
    """

    inner_state: PerReplica
    adasum: Any


def adasum_delta(
    inner: optax.GradientTransformation,
    axis_name: axes.AxisName,
    *,
    within: axes.AxisName | None = None,
    shard_axes: axes.AxisName | None = None,
    scope: Scope = "leaf",
    wire_dtype: Any = None,
    bucket_bytes: int | None = None,
    leaf_metrics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Run ``inner`` on every replica's own gradients, and combine the updates by AdaSum.

    .. math::
      \delta_r = \text{inner}_r(g_r), \qquad u = \operatorname{AdaSum}(\delta_1, \dots, \delta_n)

    Where ``chain(adasum("data"), adam)`` has one Adam for the combined gradient, here each replica
    has an Adam of its own, moments included: Horovod's ``DistributedOptimizer(op=Adasum)`` and
    MindSpore's ``AdaSumByDeltaWeightWrapCell``. Stands last, around everything that makes an
    update: ``adasum_delta(chain(clip, adamw(schedule)), "data")``. In short runs with momentum it
    is the weaker of the two, because the replicas' momenta never agree: see
    ``docs/cards/adasum.md``.

    Args:
      inner: an optimizer without collectives over ``axis_name``, as a single replica would use it.
      axis_name: mesh axis, or a tuple of axes, whose replicas are combined.
      within: axes over which the updates are averaged first.
      shard_axes: axes over which leaves are sharded.
      scope: as in ``adasum``, as are the rest.
      wire_dtype: of what travels.
      bucket_bytes: of what travels together.
      leaf_metrics: record the orthogonality of each leaf too.

    Returns:
      A transformation with an ``AdasumDeltaState``; its inner state leads with the replicas
      outside the mapped function (``stack_replicas``, ``state_specs``). Cost: as ``adasum``; the
      inner state is on every replica as without it, and cannot be sharded over the replicas.

    Raises:
      ValueError, TypeError: as ``adasum``.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.reduce.adasum_delta(optax.sgd(0.5), "data")
      >>> combine = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")
      >>> combine(jnp.array([[1.0, 0.0], [0.0, 1.0]]))[0].tolist()
      [-0.5, -0.5]

    References:
      Maleki et al., Scaling Distributed Training with Adaptive Summation,
      https://arxiv.org/abs/2006.02924, 2020.
    """
    who = "adasum_delta"
    checks.transformation(who, "inner", inner)
    tx = optax.with_extra_args_support(inner)
    combine = adasum(
        axis_name,
        within=within,
        shard_axes=shard_axes,
        scope=scope,
        wire_dtype=wire_dtype,
        bucket_bytes=bucket_bytes,
        leaf_metrics=leaf_metrics,
    )
    names = axes.canonical(who, axis_name) + axes.canonical(who, within)

    def init_fn(params: PyTree) -> AdasumDeltaState:
        own = tx.init(trees.at_least_float32(params))
        return AdasumDeltaState(PerReplica(axes.to_varying(own, names)), combine.init(params))

    @describe(who, "delta", names, inner={"inner_state": tx})
    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, AdasumDeltaState]:
        trees.require_gradients(updates, who)
        axes.require_local(updates, names, who)
        # As inside a gate: the inner optimizer was initialised with, and computes in, f32 or wider.
        own = None if params is None else axes.to_varying(trees.at_least_float32(params), names)
        wide = trees.at_least_float32(updates)
        deltas, inner_state = tx.update(wide, state.inner_state.local, own, **extra_args)
        kept, given = (state.inner_state.local, deltas), (inner_state, updates)
        require_like(who, "the moment", kept, given)
        inner_state = trees.cast_like(inner_state, state.inner_state.local)
        inner_state = axes.unify(inner_state, state.inner_state.local)
        deltas = axes.unify(trees.cast_like(deltas, updates), updates)
        combined, adasum_state = combine.update(deltas, state.adasum, **extra_args)
        return combined, AdasumDeltaState(PerReplica(inner_state), adasum_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
