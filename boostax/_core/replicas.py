# SPDX-License-Identifier: Apache-2.0
"""State that differs per replica: the marker ``PerReplica``, partition specs, and resharding.

Outside a mapped function, the arrays in a ``PerReplica`` have a leading dimension of size
``replicas``, sharded over the replica axis. Inside a mapped function, each replica has its own
arrays without that dimension.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.tree_util import KeyPath

from boostax._core import checks, protocols, transfer, trees, types
from boostax._core.types import PyTree


class ByBlock(NamedTuple):
    """A part of a state with one scale for each block of elements of the params.

    Attributes:
      scales: a tree like the params.
    """

    scales: PyTree


class PerReplica(NamedTuple):
    """A part of an optimizer state that differs per replica.

    ``PerReplica`` is a NamedTuple, so Optax wrappers, ``optax.tree_map_params``, donation, Flax's
    serialization and orbax handle it like any other node.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> boostax.PerReplica(local=jnp.zeros(3)).local.shape
      (3,)
    """

    local: PyTree  # arrays [replicas, ...]; without the first dimension in a mapped function


_MARKED = PerReplica, ByBlock
# ``jax.tree`` functions call ``is_per_replica`` for every node, so it is a C function, which is
# faster than a Python function.
is_per_replica: Callable[[object], bool] = PerReplica.__instancecheck__


def distributed_items(opt_state: PyTree) -> dict[int, int]:
    """Return the number of items by the ``id`` of a part; see ``protocols.HasDistributedItems``."""
    states = trees.telling(opt_state, protocols.HasDistributedItems)
    return {id(part): items for state in states for part, items in state.distributed_items()}


def require_replicas(who: str, state: PyTree, replicas: int) -> None:
    """Refuse a state whose per-replica parts are for another number of replicas."""
    others = [(path, x.shape) for path, x in _local_arrays(state) if x.shape[:1] != (replicas,)]
    allowed = f"a state whose arrays that differ per replica have a first dimension of {replicas}"
    hint = "Use boostax.reshard_state(state, n), or stack_replicas(tx.init(params), n)."
    hint = "A step without mesh= has one replica. Pass the mesh. " * (replicas == 1) + hint
    got = [(trees.path_name(path), shape) for path, shape in others[:6]]
    checks.require(not others, who, "state", got=got, allowed=allowed, hint=hint)


def require_stacked(who: str, state: PyTree) -> None:
    """Refuse arrays that differ per replica although their sharding is replicated.

    If devices have different values of one array (``out_axes=None``, unchecked out_specs), JAX
    reads the first device's value, and the other values would be lost.
    """
    for path, x in _local_arrays(state):
        is_opaque = isinstance(x, Tracer) or transfer.is_key(x)
        if is_opaque or not getattr(x, "is_fully_replicated", False):
            continue
        first, *others = (np.asarray(shard.data) for shard in x.addressable_shards)
        if any(not np.array_equal(first, other, equal_nan=True) for other in others):
            allowed = "a state whose arrays that differ per replica have a dimension of replicas"
            got = f"different values of {trees.path_name(path)!r} on two devices"
            hint = "Use jax.pmap with in_axes=0, out_axes=0, or shard_map with states.state_specs."
            raise ValueError(checks.message(who, "state", allowed, got, hint))


def _local_arrays(state: PyTree) -> Iterator[tuple[KeyPath, jax.Array]]:
    """Yield the arrays that differ per replica, with their paths."""
    for path, node in jax.tree.leaves_with_path(state, is_leaf=is_per_replica):
        for inner, x in jax.tree.leaves_with_path(node) if is_per_replica(node) else ():
            yield (*path, *inner), x


def require_like(who: str, what: str, arrays: PyTree, grads: PyTree) -> None:
    """Refuse a state whose arrays have other shapes than the gradients, and would broadcast."""
    hint = "For one replica, use boostax.states.enter_replica(state). For all, use stack_replicas."
    if any(map(is_per_replica, jax.tree.leaves(grads, is_leaf=is_per_replica))):
        hint = f"Put {who} inside on_mesh: on_mesh({who}(chain(...)), params)."
    arrays = jax.tree.unflatten(jax.tree.structure(grads), jax.tree.leaves(arrays))
    trees.require_shapes(who, what, arrays, grads, hint)


def owns_params(opt_state: PyTree) -> bool:
    """Return whether each replica has its own params; see ``protocols.OwnsParams``."""
    return any(x.owns_params() for x in trees.telling(opt_state, protocols.OwnsParams))


def stack_replicas(opt_state: PyTree, replicas: int) -> PyTree:
    """Add the leading dimension to the per-replica parts of a state from ``tx.init``.

    Args:
      opt_state: the state of one replica.
      replicas: the number of replicas, the size of the replica axis.

    Returns:
      The state for use outside a mapped function: every array inside a ``PerReplica`` has shape
      ``(replicas, *shape)``; all other arrays are unchanged. The matrices of ``by_shape`` are
      distributed over the replicas.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> boostax.states.stack_replicas(boostax.PerReplica(jnp.zeros(3)), 8).local.shape
      (8, 3)
    """
    items = distributed_items(opt_state)
    nodes, structure = jax.tree.flatten(opt_state, is_leaf=is_per_replica)
    for i, node in enumerate(nodes):
        if id(node) in items:
            part = jax.tree.map(lambda x: x[None], node)
            nodes[i] = spread_anew(part, replicas, False, items[id(node)])
        elif is_per_replica(node):
            leaves, inner = jax.tree.flatten(node)
            for j, x in enumerate(leaves):
                # For a NumPy array, NumPy makes a view, which needs no copy.
                library = np if isinstance(x, np.ndarray) else jnp
                leaves[j] = library.broadcast_to(x[None], (replicas, *x.shape))
            nodes[i] = inner.unflatten(leaves)
    return structure.unflatten(nodes)


def specs_like(
    owners: Mapping[KeyPath, tuple[tuple[int, ...], P]],
    state: PyTree,
    names: tuple[str, ...],
    shared_out: int = 0,
    *,
    sizes: Mapping[str, int] | None = None,
) -> PyTree:
    """Return the specs of one replica's state from the params' specs; see ``states.state_specs``.

    Args:
      owners: the shape and spec of each param, by its path.
      state: a state from ``tx.init``, or its types.
      names: the replica axes.
      shared_out: the number of replicas, if state that is equal on all replicas is to be sharded;
        otherwise 0.
      sizes: the sizes of the mesh axes; needed to shard scales along dimensions that are divided
        into blocks.
    """

    def owner_spec(path: KeyPath, leaf: jax.Array, in_blocks: bool = False) -> P | None:
        for shape, spec in (owners[path[i:]] for i in range(len(path) + 1) if path[i:] in owners):
            if in_blocks:
                if len(shape) == leaf.ndim:
                    return scales_spec(shape, spec, leaf.shape)
            elif shape == leaf.shape:
                return spec
            elif shape == leaf.shape[1:]:
                # A compiled step returns specs in this form; another form would cause a
                # recompilation.
                return P(None, *spec) if any(spec) else P()
        return None

    def scales_spec(shape: tuple[int, ...], spec: P, blocks: tuple[int, ...]) -> P:
        """Return the spec of block scales, without axes that would split a block."""
        entries: list[tuple[str, ...] | None] = []
        spec = shared_by(spec, shape, names, shared_out)
        for entry, size, count in zip(spec, shape, blocks, strict=False):
            axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
            divides = sizes is not None and not count % math.prod(sizes[x] for x in axes)
            entries.append(entry if size == count or divides else None)
        return P(*entries) if any(entries) else P()

    def spec_of(path: KeyPath, node: PyTree) -> PyTree:
        if isinstance(node, ByBlock):
            return jax.tree.map_with_path(
                lambda i, x: owner_spec((*path, *i), x, in_blocks=True) or P(), node
            )
        if is_per_replica(node):
            return jax.tree.map_with_path(
                lambda i, x: P(names, *without(owner_spec(i, x) or P(), names)), node
            )
        spec = owner_spec(path, node)
        # Integers without the spec of a param are counts, which are not sharded. Quantized codes
        # have the spec of their param.
        if not shared_out or (spec is None and not trees.is_inexact(node.dtype)):
            return spec or P()
        return shared_by(spec or P(), node.shape, names, shared_out)

    return jax.tree.map_with_path(spec_of, state, is_leaf=lambda x: isinstance(x, _MARKED))


def shared_by(spec: P, shape: tuple[int, ...], names: tuple[str, ...], replicas: int) -> P:
    """Shard the first unsharded dimension that ``replicas`` divides; if ``replicas`` is 0, none."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    pairs = zip(entries, shape, strict=True) if replicas and spec == without(spec, names) else ()
    for i, (entry, size) in enumerate(pairs):
        if entry is None and size > 0 and size % replicas == 0:
            return P(*entries[:i], names, *entries[i + 1 :])
    return spec


def without(spec: P, names: Sequence[str]) -> P:
    """Return a spec without some axes."""
    entries = [tuple(n for n in x if n not in names) if isinstance(x, tuple) else x for x in spec]
    return P(*(None if entry in names else entry for entry in entries))


@checks.arguments
def reshard_state(state: types.State, replicas: int, *, within: int = 1) -> types.State:
    r"""Return a state for another number of replicas.

    The old replicas divide the unit interval evenly, and so do the new replicas. A new replica gets
    the mean of the old replicas, weighted by the overlap of the two intervals. The mean over the
    replicas is unchanged:

    .. math:: \tfrac1m \sum_{j=1}^{m} y_j = \tfrac1n \sum_{i=1}^{n} x_i

    So if the number of replicas doubles, each state is copied to two replicas; if the number
    halves, each new replica gets the mean of two neighbours. Arrays that are summed over the
    replicas (in an open window with ``normalize="weight"``, or before ``all_reduce(op="sum")``) are
    also multiplied by ``n / m``, so that their sum is unchanged. A new replica copies integers,
    booleans and PRNG keys from the old replica whose interval contains the start of the new
    replica's interval. Arrays outside a ``PerReplica`` are unchanged. The matrices of ``by_shape``
    are distributed over the new replicas, and are not rounded.

    In your own state class, a method ``summed_parts()`` returns the ``PerReplica`` parts whose sum
    must not change. A reduction by ``jax.lax.psum`` is not recognised. Close a window around such a
    reduction before you change the number of replicas.

    Args:
      state: an optimizer state (also of an NNX optimizer) or a ``TrainState``, outside a mapped
        function. Pass the whole state, because a part of a state does not show the reduction
        inside a window.
      replicas: the new number of replicas.
      within: the new number of devices per server, for ``adasum_delta(within=...)``, whose state is
        equal on all devices of a server. Each server gets the mean over the server's interval.

    Returns:
      The same tree, with per-replica arrays of shape ``(replicas, *shape)``. Place the result with
      ``jax.device_put(state, step.shardings(state))``. Cost: a read of the per-replica arrays.

    Raises:
      ValueError, TypeError: ``replicas`` is not a positive integer, or not a multiple of
        ``within``; devices have different values of a replicated array.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> state = boostax.PerReplica(jnp.array([[1.0], [3.0], [5.0], [7.0]]))
      >>> boostax.reshard_state(state, 2).local.tolist()
      [[2.0], [6.0]]
    """
    checks.positive_int("reshard_state", "replicas", replicas, "Pass the new number.")
    checks.positive_int("reshard_state", "within", within, "Pass how many devices a server has.")
    allowed = f"a multiple of within={within}"
    hint = "Each replica is a device, and within is the number of devices of a server."
    checks.require(not replicas % within, "reshard_state", "replicas", replicas, allowed, hint)
    state = trees.arrays(state)
    trees.require_order("reshard_state", "reshard_state(state, replicas)", state=state)
    require_stacked("reshard_state", state)
    summed = [x for y in trees.telling(state, protocols.HasSummedParts) for x in y.summed_parts()]
    items = distributed_items(state)
    servers = [x for y in trees.telling(state, protocols.HasServerParts) for x in y.server_parts()]

    def resharded(node: PyTree) -> PyTree:
        if not is_per_replica(node):
            return node
        if any(node is part for part in servers):
            part = spread_anew(node, replicas // within, False)
            return jax.tree.map(lambda x: jnp.repeat(x, within, 0) if within > 1 else x, part)
        return spread_anew(node, replicas, any(node is x for x in summed), items.get(id(node)))

    return jax.tree.map(resharded, state, is_leaf=is_per_replica)


def spread_anew(
    part: PerReplica, replicas: int, summed: bool, items: int | None = None
) -> PerReplica:
    """Return a per-replica part for another number of replicas, by the rule of ``reshard_state``.

    If the part distributes ``items``, the value of each item is unchanged.
    """

    def spread(x: jax.Array) -> jax.Array:
        # A traced array has no attribute ``sharding``, but its type has a sharding with mesh axes.
        sharding = getattr(x, "sharding", None) or jax.typeof(x).sharding
        if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
            # JAX cannot index a dimension whose type is sharded, so each device gets the values of
            # all replicas.
            x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, P(None, *sharding.spec[1:])))
        old = x.shape[0]
        if items is not None:
            # Each replica has ``slots`` items. If there are too few items, the last item is
            # repeated.
            slots = -(-items // replicas)
            order = np.minimum(np.arange(replicas * slots), items - 1).reshape(replicas, slots)
            return x.reshape(-1, *x.shape[2:])[order]
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[np.arange(replicas) * old // replicas]
        new_ends = np.arange(replicas + 1) / replicas
        old_ends = np.arange(old + 1) / old
        low = np.maximum(new_ends[:-1, None], old_ends[:-1])
        means: list[jax.Array] = []
        for weights in np.maximum(np.minimum(new_ends[1:, None], old_ends[1:]) - low, 0) * replicas:
            # A weight below 1e-9 is a rounding error. The ``x[i]`` with this weight is left out,
            # because a NaN in this ``x[i]`` would make the mean NaN.
            first, *others = np.flatnonzero(weights > 1e-9)
            parts = [x[i] * jnp.asarray(weights[i], x.real.dtype) for i in (first, *others)]
            means.append(sum(parts[1:], parts[0]) if others else x[first])
        result = jnp.stack(means)
        return result * jnp.asarray(old / replicas, x.real.dtype) if summed else result

    return jax.tree.map(spread, part)
