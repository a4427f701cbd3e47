# SPDX-License-Identifier: Apache-2.0
"""Read a saved state for another number of replicas, and reshard it."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from boostax._core import trees
from boostax._core.replicas import is_per_replica, shares, spread_anew

PyTree = Any


def as_saved(target: PyTree, saved: Mapping[str, Mapping[str, Any]]) -> PyTree:
    """Return the types of ``target``, with as many replicas in per-replica leaves as were saved.

    Args:
      target: arrays, or their types with shardings.
      saved: for each leaf, by the name of its path, at least its ``shape``.

    Returns:
      A tree of ``jax.ShapeDtypeStruct``. Where the old replicas do not divide evenly among the
      devices, every device reads all of them.
    """

    def per_replica(path: Any, leaf: Any) -> Any:
        name = trees.path_name(path)
        shape = tuple(saved[name]["shape"]) if name in saved else leaf.shape
        if not shape or not leaf.shape or shape[1:] != leaf.shape[1:] or shape == leaf.shape:
            return typed(leaf)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=_readable(leaf.sharding, shape))

    def node(path: Any, part: Any) -> Any:
        if not is_per_replica(part):
            return typed(part)
        return jax.tree_util.tree_map_with_path(lambda p, x: per_replica((*path, *p), x), part)

    return jax.tree_util.tree_map_with_path(node, target, is_leaf=is_per_replica)


def typed(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the type of a leaf with its sharding; by default that of the first device."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def resharded(state: PyTree, target: PyTree) -> PyTree:
    """Reshard ``state`` as ``reshard_state`` does, to the replicas and shardings of ``target``."""

    summed = shares(state)

    def node(old: Any, new: Any) -> Any:
        if not is_per_replica(old):
            return old
        leaves = jax.tree.leaves(new)
        shapes = [x.shape for x in jax.tree.leaves(old)]
        if shapes == [x.shape for x in leaves]:
            return old
        # The rule is compiled, so each device computes only the part that it keeps.
        rule = jax.jit(
            lambda x: spread_anew(x, leaves[0].shape[0], any(old is part for part in summed)),
            out_shardings=jax.tree.map(lambda x: typed(x).sharding, new),
        )
        return rule(old)

    return jax.tree.map(node, state, target, is_leaf=is_per_replica)


def _readable(sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
    if not isinstance(sharding, NamedSharding):
        return sharding
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))
    return sharding
