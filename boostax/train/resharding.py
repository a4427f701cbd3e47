# SPDX-License-Identifier: Apache-2.0
"""Read a state that was saved for another number of replicas, and reshard this state."""

from collections.abc import Mapping

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from boostax._core import protocols, trees
from boostax._core.replicas import PerReplica, distributed_items, is_per_replica, spread_anew
from boostax._core.types import PyTree


def as_saved(target: PyTree, saved: Mapping[str, Mapping[str, PyTree]]) -> PyTree:
    """Return the types of ``target``, with the saved number of replicas in per-replica leaves.

    Args:
      target: arrays, or their types with shardings.
      saved: a dict from the name of each leaf's path to a dict with its ``shape``. A leaf that is
        missing here has its shape in ``target``.

    Returns:
      A tree of ``jax.ShapeDtypeStruct``.
    """
    parts = trees.find(target, PerReplica)
    # These leading dimensions may differ: the replicas, and the items of each replica.
    items = distributed_items(target)
    local = {id(x): 1 + (id(part) in items) for part in parts for x in jax.tree.leaves(part)}
    leaves, tree = jax.tree_util.tree_flatten_with_path(target)
    types: list[jax.ShapeDtypeStruct] = []
    for path, leaf in leaves:
        shape = tuple(saved.get(trees.path_name(path), {}).get("shape", ()))
        free = local.get(id(leaf), 0)
        alike = free and min(len(shape), leaf.ndim) >= free and shape[free:] == leaf.shape[free:]
        types.append(typed(leaf, shape if alike else leaf.shape))
    return tree.unflatten(types)


def typed(leaf: PyTree, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Return a leaf's type with another shape; a leaf without a sharding is on the first device.

    If the number of devices does not divide the number of replicas, every device reads all
    replicas.
    """
    sharding: PyTree = getattr(leaf, "sharding", None)
    sharding = sharding or SingleDeviceSharding(jax.local_devices()[0])
    try:
        sharding.shard_shape(shape)
    except ValueError:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def resharded(state: PyTree, target: PyTree) -> PyTree:
    """Reshard ``state`` like ``reshard_state``, to the replicas and shardings of ``target``."""
    summed = [x for y in trees.telling(state, protocols.HasSummedParts) for x in y.summed_parts()]
    items = distributed_items(state)

    def node(old: PyTree, new: PyTree) -> PyTree:
        old_shapes, new_shapes = ([x.shape for x in jax.tree.leaves(tree)] for tree in (old, new))
        if not is_per_replica(old) or old_shapes == new_shapes:
            return old
        rule = new_shapes[0][0], any(old is part for part in summed), items.get(id(old))
        # The rule is compiled, so that each device computes only its part.
        shardings = jax.tree.map(lambda x: typed(x, x.shape).sharding, new)
        return jax.jit(lambda x: spread_anew(x, *rule), out_shardings=shardings)(old)

    return jax.tree.map(node, state, target, is_leaf=is_per_replica)
