# SPDX-License-Identifier: Apache-2.0
"""Reductions on the shards of each device, outside of the ``vmap`` over the replicas."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from boostax._core import axes, checks
from boostax._core.describe import Stepped
from boostax._core.placement import (
    HERE,
    Path,
    Placement,
    joined,
    outside_vmap,
    placed_here,
    seen,
    split,
)
from boostax._core.replicas import specs_like
from boostax._core.types import PyTree
from boostax.reduce.codec import Names

# An ``OnDevice`` function maps gradients, per-replica values and shared values to means, new
# per-replica values and new shared values.
Parts = tuple[PyTree, PyTree, PyTree]
OnDevice = Callable[[PyTree, PyTree, PyTree], Parts]


def to_owners(
    who: str, dims: Mapping[Path, int], leaves: list[jax.Array], send: Callable[..., PyTree]
) -> list[jax.Array]:
    """Average leaves over the replicas, and return to each replica the slices that it owns.

    The reduction runs outside of the ``vmap`` over the replica axis. Leaves that are equal on all
    replicas are unchanged.

    Args:
      who: the reduction.
      dims: the path of each leaf, and the dimension along which replicas own slices of the leaf.
      leaves: gradients of a replica.
      send: ``send(dims, leaves)`` returns the means in the shards of one device.
    """
    placement = placed_here()
    assert placement is not None
    (name,) = placement.names
    specs = [[*placement.shards(path, who)] for path in dims]

    mean = custom_vmap(lambda index, leaves: [lax.pmean(x, name) for x in leaves])

    @mean.def_vmap
    def rule(size: int, differs: PyTree, index: jax.Array, leaves: list[jax.Array]) -> Stepped:
        local = [i for i, is_local in enumerate(differs[1]) if is_local]
        local_dims = [[*dims.values()][i] for i in local]
        pairs = [(specs[i], dim) for i, dim in zip(local, local_dims, strict=True)]
        owned = [PartitionSpec(*x[:d], *[None] * (d - len(x)), name, *x[d + 1 :]) for x, d in pairs]

        def on_shard(stacked: list[jax.Array]) -> list[jax.Array]:
            return send(local_dims, [x[0] for x in stacked])

        means = dict(enumerate(leaves))
        if local:
            rows = ([PartitionSpec(name, *specs[i]) for i in local],)
            call = jax.shard_map(on_shard, mesh=placement.auto_mesh, in_specs=rows, out_specs=owned)
            means |= zip(local, call([leaves[i] for i in local]), strict=True)
        return [*means.values()], [False] * len(leaves)

    # ``vmap`` maps the index of the replica, so JAX always calls the rule of ``mean``.
    return mean(lax.axis_index(name), leaves)


def local_alone(grads: PyTree, names: Names, who: str) -> PyTree:
    """Return gradients; refuse gradients if ``vmap`` shows that all are equal on all replicas.

    Some of the leaves may be equal on all replicas, such as zeros for frozen params.
    """
    placement = placed_here()
    if placement is None or set(names) != set(placement.names) or not jax.tree.leaves(grads):
        return grads

    def require_local(differs: PyTree) -> None:
        valid = any(jax.tree.leaves(differs[1]))
        got = f"equal gradients over {', '.join(names)}"
        hint = f"Remove the reduction before {who}."
        checks.require(valid, who, "gradients", got=got, allowed="local to each replica", hint=hint)

    for name in names:
        # ``vmap`` maps the index of the replica, so JAX always calls ``require_local``.
        _, grads = seen((lax.axis_index(name), grads), require_local)
    return grads


def on_shards(who: str, names: Names, update: Callable[..., Stepped]) -> Callable[..., Stepped]:
    """Return a function that runs a reduction's ``update`` on the shards of every device.

    In a function that is mapped over named axes, the returned function equals ``update``. Inside
    ``Placement.map_replicas``, the returned function runs outside of the ``vmap``, in a
    ``jax.shard_map`` over all axes of the mesh, so that shards are sent without a gather. Updates
    have the types of the gradients, and the new state has the types of the old state.
    """

    @functools.wraps(update)
    def placed(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Stepped:
        placement = placed_here()
        if placement is None:
            return update(updates, state, params, **extra)
        leaves = jax.tree_util.tree_leaves_with_path(updates)
        owners = {path: (x.shape, placement.shards(path, who)) for path, x in leaves}
        specs = jax.tree.structure(updates).unflatten([spec for _, spec in owners.values()])
        local, shared, structure = split(state)
        state_specs = specs_like(owners, state, placement.names, sizes=placement.mesh.shape)
        specs = (specs, *split(state_specs)[:2])

        def on_device(grads: PyTree, local: PyTree, shared: PyTree) -> Parts:
            means, new = update(grads, joined(local, shared, structure))
            return means, *split(new)[:2]

        call = _by_device(placement, who, names, on_device, specs, specs)
        means, local, shared = call(updates, local, shared)
        return means, joined(local, shared, structure)

    return placed


def _by_device(
    placement: Placement, who: str, axis: Names, call: OnDevice, in_specs: Parts, out_specs: Parts
) -> OnDevice:
    """Return ``call`` on the shards of each device, outside of the ``vmap``, as in ``on_shards``.

    Args:
      placement: the placement of the arrays.
      who: the reduction.
      axis: the axes of the reduction, which must be all replica axes of the mesh.
      call: per-device code with the replica axes as named axes.
      in_specs: specs of the arguments. Specs of gradients do not have the replica axes, and specs
        of per-replica values begin with the replica axes.
      out_specs: specs of the results, in the same form.
    """
    names = placement.names
    allowed = f"all replica axes {names}"
    hint = "A reduction is always over all replica axes. For two levels, use adasum(within=...)."
    checks.require(set(axis) == set(names), who, "axis_name", got=axis, allowed=allowed, hint=hint)

    def on_replica(local: PyTree, shared: PyTree) -> Parts:
        with axes.during(HERE, None):
            return call(local[0], local[1], shared)

    def on_device(local: PyTree, shared: PyTree) -> Parts:
        grads, state = jax.tree.map(lambda x: x[0], local)
        # Without the barrier, XLA would add arrays in the stacked shape. The arrays are computed in
        # the leaf's shape, so a TPU could not fuse the addition.
        state = jax.tree.map(lax.optimization_barrier, state)
        means, state, shared = on_replica((grads, state, ()), shared)
        return means, jax.tree.map(lambda x: x[None], state), shared

    stacked = jax.tree.map(lambda spec: PartitionSpec(names, *spec), in_specs[0])
    specs = (stacked, in_specs[1]), in_specs[2]
    mapped = jax.shard_map(on_device, mesh=placement.auto_mesh, in_specs=specs, out_specs=out_specs)

    def on_all_replicas(local: PyTree, shared: PyTree) -> Parts:
        means, state, shared = mapped(placement.reshaped(local[:2], by_axis=False), shared)
        return means, placement.reshaped(state, by_axis=True), shared

    # JAX calls the rule of a ``custom_vmap`` only if an argument is mapped. The index of an axis is
    # always mapped.
    indices = [lax.axis_index(name) for name in names]
    outside = outside_vmap([*reversed(names)], on_replica, on_all_replicas, who)
    return lambda grads, state, shared: outside((grads, state, indices), shared)


def on_rows(
    who: str, names: Names, path: Path, call: Callable[..., PyTree], arrays: PyTree, scatter: bool
) -> PyTree:
    """Run ``call`` on each device, to distribute leaves of one shape, or to gather such leaves.

    Args:
      who: the reduction.
      names: the axes of the reduction.
      path: the path of a leaf, whose spec is used for all leaves.
      call: the per-device function.
      arrays: local leaves, or the rows ``[rows, *shape]`` that a replica owns.
      scatter: whether ``call`` computes rows from leaves; otherwise, ``call`` computes leaves,
        equal on all replicas, from rows.
    """
    placement = placed_here()
    if placement is None:
        return call(arrays)
    spec: PyTree = placement.shards(path, who)
    leaves = spec, (), ()
    rows = (), PartitionSpec(placement.names, None, *spec), ()
    if scatter:
        on_device = _by_device(placement, who, names, lambda x, *_: ((), call(x), ()), leaves, rows)
        return on_device(arrays, (), ())[1]
    on_device = _by_device(placement, who, names, lambda x, y, z: (call(y), (), ()), rows, leaves)
    return on_device((), arrays, ())[0]
