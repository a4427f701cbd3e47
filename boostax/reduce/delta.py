# SPDX-License-Identifier: Apache-2.0
"""AdaSum of the updates of independent optimizers, one on each replica or server of replicas."""

from typing import Any, NamedTuple

import optax

from boostax._core import axes, checks, said, trees
from boostax._core.describe import Stepped, describe
from boostax._core.placement import on_shards
from boostax._core.replicas import PerReplica, require_like
from boostax.reduce.adasum import Levels, Options, Scope, combined
from boostax.reduce.mean import server_mean

PyTree = Any


class AdasumDeltaState(NamedTuple):
    """State of ``adasum_delta``.

    Attributes:
      inner_state: a ``PerReplica`` of the inner optimizer's state: each replica's own, or that of
        its server.
      adasum: the ``AdasumState`` of the updates.
    """

    inner_state: PerReplica
    adasum: Any

    def servers(self) -> list[PerReplica]:
        """What is the same on all devices of a server, for ``reshard_state``."""
        return [self.inner_state]


@said.reduction
def adasum_delta(
    inner: optax.GradientTransformation,
    axis_name: axes.AxisName | None = None,
    *,
    within: axes.AxisName | int | None = None,
    shard_axes: axes.AxisName | None = None,
    scope: Scope = "leaf",
    wire_dtype: Any = None,
    bucket_bytes: int | None = None,
    leaf_metrics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Run ``inner`` on every replica's own gradients, and combine the updates by AdaSum.

    .. math::
      \delta_s = \text{inner}_s\Bigl(\tfrac1w \sum_{r \in s} g_r\Bigr), \qquad
      u = \operatorname{AdaSum}(\delta_1, \dots, \delta_n)

    Where ``chain(adasum("data"), adam)`` has one Adam for the combined gradient, here each replica
    has an Adam of its own, moments included: Horovod's ``DistributedOptimizer(op=Adasum)``. With
    ``within`` each server has one, for the mean gradient of its w devices: MindSpore's
    ``boost.adasum`` with ``device_number``. Stands last, around everything that makes an update:
    ``adasum_delta(chain(clip, adamw(schedule)), "data")``. In short runs with momentum it is the
    weaker of the two, because the replicas' momenta never agree: see ``docs/cards/adasum.md``.

    Args:
      inner: an optimizer without collectives over the axes, as a single replica would use it.
      axis_name: mesh axis, or a tuple of axes, whose replicas, or servers, are combined.
      within: the devices of a server, over which gradients are averaged before ``inner``: axes of
        their own (``adasum_delta(adam, "nodes", within="cores")``), or how many neighbours of
        ``axis_name`` make a server (``within=8``; an axis of no more is one server).
      shard_axes: axes over which leaves are sharded.
      scope: as in ``adasum``, as are the rest.
      wire_dtype: of the updates that travel.
      bucket_bytes: of what travels together.
      leaf_metrics: record the orthogonality of each leaf too.

    Returns:
      A transformation with an ``AdasumDeltaState``; its inner state leads with the replicas
      outside the mapped function (``stack_replicas``, ``state_specs``), the devices of a server
      with copies of the same. Cost: as ``adasum``; the inner state is on every replica as without
      it, and cannot be sharded over the replicas. With ``within``, of w devices in each of n
      servers, every device sends for N bytes of f32 gradients ``2 N (w-1)/w`` inside its server (an
      all-reduce; with a number, a reduce-scatter and an all-gather), ``N/w (n-1)/n`` between
      servers, and as much of the gather of the result. With axes of its own the gather goes over
      the servers first, ``N/w (n-1)/n``, then inside, ``N (w-1)/w``; with a number it is one over
      all, ``N (nw-1)/(nw)``: JAX has no type for a gather over groups that is equal on all.

    Raises:
      ValueError, TypeError: as ``adasum``; at trace time, a number of replicas that ``within`` does
        not divide.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.reduce.adasum_delta(optax.sgd(0.5), "data")
      >>> combine = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")
      >>> combine(jnp.array([[1.0, 0.0], [0.0, 1.0]]))[0].tolist()
      [-0.5, -0.5]
      >>> tx = boostax.reduce.adasum_delta(optax.sgd(0.5), "data", within=2)  # two servers of two
      >>> combine(jnp.array([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 4.0]]))[0].tolist()
      [-1.0, -1.5]

    References:
      Maleki et al., Scaling Distributed Training with Adaptive Summation,
      https://arxiv.org/abs/2006.02924, 2020. MindSpore 2.10, ``mindspore/boost/adasum.py``.
    """
    who = "adasum_delta"
    tx = checks.transformation(who, "inner", inner)
    replicas = axes.required(who, axis_name)
    if isinstance(within, int):
        checks.positive_int(who, "within", within, "It is the number of devices of a server.")
        inside, what = (), f"Run inner on the mean gradient of every {within} neighbours"
    else:
        inside = axes.canonical(who, within, "within")
        what = f"Run inner on the mean gradient over {', '.join(inside)}" if inside else ""
    names = replicas + inside
    how = shard_axes, scope, wire_dtype, bucket_bytes, leaf_metrics
    wanted = Options(*how).checked(who, names)

    def levels() -> Levels:
        if isinstance(within, int):
            return Levels(*axes.servers(replicas, within, who), averaged=True)
        return Levels(replicas, inside, averaged=bool(inside))

    def init_fn(params: PyTree) -> AdasumDeltaState:
        own = tx.init(trees.at_least_float32(params))
        return AdasumDeltaState(PerReplica(axes.to_varying(own, replicas)), wanted.init(params))

    @describe("adasum", "adasum", names)
    def combine(deltas: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        del state, params
        return combined(deltas, levels(), wanted)

    what = what and f"{what}, and combine the updates by AdaSum"

    @describe(who, "delta", names, inner={"inner_state": tx}, what=what)
    def update_fn(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Stepped:
        trees.require_gradients(updates, who)
        axes.require_local(updates, names, who)
        axes.require_bound(wanted.shards, who, "shard_axes")
        kept, server = state.inner_state.local, levels().inside
        # A state of one copy for each server makes updates that are typed equal inside it.
        varies = frozenset[str]().union(*axes.types(kept))
        over = (*replicas, *(name for name in inside if name in varies))
        # As inside a gate: the inner optimizer was initialised with, and computes in, f32 or wider.
        own = None if params is None else axes.to_varying(trees.at_least_float32(params), over)
        wide = trees.at_least_float32(updates)
        wide = axes.to_varying(server_mean(wide, server), over) if server else wide
        deltas, inner_state = tx.update(wide, kept, own, **extra)
        require_like(who, "the moment", (kept, deltas), (inner_state, updates))
        inner_state = axes.unify(trees.cast_like(inner_state, kept), kept)
        deltas = axes.unify(trees.cast_like(deltas, updates), updates)
        deltas = axes.to_each(deltas, names) if server else deltas
        result, adasum_state = on_shards(who, names, combine)(deltas, state.adasum)
        return result, AdasumDeltaState(PerReplica(inner_state), adasum_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
