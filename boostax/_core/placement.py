# SPDX-License-Identifier: Apache-2.0
"""The placement of arrays on a mesh, and calls of per-replica code on global arrays.

The file has four parts: ``Placement``, whose ``map_replicas`` calls per-replica code; the sharding
of params and optimizer state; gathers of params; and calls that run outside of the ``vmap`` of
``map_replicas``.

In plain ``jit``, the local gradients of all replicas are a ``PerReplica`` of arrays ``[n, ...]``,
sharded over the replica axes. ``Placement.map_replicas`` maps per-replica code over that dimension
by ``jax.vmap``: a value that differs per replica is batched, and any other value is an ordinary
global array in any sharding. A sum over the replicas becomes a sum over the first dimension, which
XLA compiles to an all-reduce or a reduce-scatter. A predicate on which the replicas agreed is not
batched, so JAX does not turn its branch into a select. A reduction that sends more than sums runs
outside of the ``vmap``, on the shards of each device (``reduce/on_shards.py``).

As an example of a call outside of the ``vmap``, take replica axes ``("host", "chip")`` of sizes 2
and 4, and a gradient with shape ``[5]`` on each replica. ``Placement.map_replicas`` maps over
"chip" inside a map over "host". ``outside_vmap(["chip", "host"], by_name, stacked, who)`` wraps
``by_name``, the code of one replica, in a ``custom_vmap``, whose rule replaces the mapped code:

1. The map over "chip" calls the rule with ``Local.grads`` of shape ``[4, 5]``. The rule also adds a
   first dimension to state that is equal on all chips, and makes ``by_name`` a function of 4
   replicas by a ``vmap`` over "chip". The rule wraps this function for the next axis, "host", and
   calls the wrapped function.
2. The map over "host" calls the rule with gradients of shape ``[2, 4, 5]``. No axis is left, so the
   rule calls ``stacked``, which gets all replicas' arrays in one global call.
3. ``stacked`` returns a tuple: means of shape ``[5]``, state ``[2, 4, ...]``, and shared values
   without dimensions of replicas. Each call of the rule reports to JAX that only the state is
   mapped.

Inside ``Placement.map_replicas`` the placement is in the context variable ``HERE``, because
``jax.vmap`` passes only arrays, and the mapped code calls transformations of other libraries.
"""

import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, Mesh, NamedSharding

from boostax._core import axes, checks, trees
from boostax._core.replicas import PerReplica, distributed_items, is_per_replica, shared_by, without
from boostax._core.types import PyTree, Structure

Path = jax.tree_util.KeyPath
Call = Callable[..., PyTree]

HERE: contextvars.ContextVar["Placement | None"] = contextvars.ContextVar("here", default=None)


def placed_here() -> "Placement | None":
    """Return the placement of the surrounding ``Placement.map_replicas``.

    Closures must call this function instead of ``HERE.get``, because a context variable in a
    closure cannot be pickled.
    """
    return HERE.get()


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """A mesh, its replica axes, and the sharding of the params over the other axes.

    Attributes:
      mesh: the mesh.
      names: the replica axes, over which the batch is split.
      specs: the spec of each param, by its plain path.
      owns_params: whether each replica has its own params.
      shared_out: whether optimizer state that is equal on all replicas is sharded over the
        replicas.
    """

    mesh: Mesh
    names: tuple[str, ...]
    specs: Mapping[tuple[str, ...], P]
    owns_params: bool = False
    shared_out: bool = False

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return math.prod(self.mesh.shape[name] for name in self.names)

    @functools.cached_property
    def auto_mesh(self) -> Mesh:
        """The same mesh with axes of type Auto, so that XLA shards all arrays."""
        kinds = (AxisType.Auto,) * len(self.mesh.axis_names)
        return Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=kinds)

    def map_replicas(self, fn: Call, *args: PyTree) -> PyTree:
        """Call ``fn`` for all replicas at once, with the replica axes as named axes.

        Args:
          fn: a function of one replica: each ``PerReplica`` in its arguments has one replica's
            arrays, and its result has a ``PerReplica`` around all arrays that differ per replica.
          *args: global arrays.

        Returns:
          The result, with stacked arrays in each ``PerReplica``.

        Raises:
          ValueError: an array outside a ``PerReplica`` differs per replica.
        """
        stacked, shared, tree = split(args)
        results: list[Structure] = []

        def require_equal(differs: list[bool], leaves: list[jax.Array]) -> None:
            shapes = sorted(
                {x.shape for x, is_local in zip(leaves, differs, strict=True) if is_local}
            )
            hint = (
                "Arrays of these shapes differ between replicas. Put a reduction such as "
                "boostax.all_reduce first in the innermost chain, and pass axis_name to every "
                "scaler and window around the reduction. Use boostax.accumulate and skip_bad_steps "
                "instead of optax.MultiSteps and apply_if_finite, which have no axis_name."
            )
            allowed = "the same on all replicas"
            checks.require(not shapes, "on_mesh", "params and updates", shapes, allowed, hint)

        def mapped(stacked: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
            with axes.during(HERE, self), axes.binding(self.names):
                local, common, result = split(fn(*joined(stacked, shared, tree)))
            if leaves := jax.tree.leaves(common):
                seen(leaves, functools.partial(require_equal, leaves=leaves))
            results.append(result)
            return local, common

        for name, size in [(x, self.mesh.shape[x]) for x in reversed(self.names)]:
            mapped = jax.vmap(mapped, (0, None), (0, None), axis_name=name, axis_size=size)
        local, common = mapped(self.reshaped(stacked, by_axis=True), shared)
        return joined(self.reshaped(local, by_axis=False), common, results[-1])

    def reshaped(self, tree: PyTree, by_axis: bool) -> PyTree:
        """Reshape stacked arrays to one dimension per replica axis, or to one dimension for all."""
        sizes = [self.mesh.shape[name] for name in self.names] if by_axis else [self.replicas]
        first = 1 if by_axis else len(self.names)
        return jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[first:]), tree)

    def spec(self, path: Path) -> P | None:
        """Return the spec of the param at a path; ``None`` if there is no such param."""
        return self.specs.get(trees.plain_path(path))

    def shards(self, path: Path, who: str) -> P:
        """Return the spec of the gradient of a param within a replica."""
        if len(self.names) == len(self.mesh.axis_names):
            return P()
        spec = self.spec(path)
        allowed = f"at the params' paths if the mesh has axes other than {', '.join(self.names)}"
        hint = "Put the reduction outside of the wrapper that renames or flattens the gradients."
        checks.require(spec is not None, who, "gradients", trees.path_name(path), allowed, hint)
        return without(spec or P(), self.names)

    @staticmethod
    def has_copies(params: PyTree, names: tuple[str, ...]) -> bool:
        """Return whether two devices, or two replicas over ``names``, have the same shard."""
        if (placed := placed_here()) is None:
            sizes, sharded = {name: axes.size(name) for name in names}, axes.types(params)
        else:
            sizes, paths = placed.mesh.shape, jax.tree_util.tree_leaves_with_path(params)
            sharded = [jax.tree.leaves(tuple(placed.spec(path) or ())) for path, _ in paths]
        wide = {name for name, size in sizes.items() if size > 1}
        return any(wide.difference(x) for x in sharded)

    def keeps_whole(self, state: PyTree, specs: PyTree) -> bool:
        """Return whether no array of a state that replicas share is sharded over the replicas."""
        leaves, by_leaf = (jax.tree.leaves(x, is_leaf=is_per_replica) for x in (state, specs))
        common = [x for x in zip(leaves, by_leaf, strict=True) if not is_per_replica(x[0])]
        # Counts and scalars are never sharded.
        arrays = [spec for x, spec in common if x.ndim and trees.is_inexact(x.dtype)]
        is_shardable = bool(arrays) and not distributed_items(state)
        return is_shardable and all(x == without(x, self.names) for x in arrays)

    def pinned(self, fn: Call, specs: PyTree) -> Call:
        """Return ``fn`` with Auto axes inside, and with results of these specs.

        On an Explicit mesh, JAX cannot infer the types of code without shardings.
        """
        shardings = self.shardings(specs)
        if AxisType.Explicit in self.mesh.axis_types:
            # A line search calls ``fn`` in a context in which the axes are Auto.
            around = jax.sharding.get_abstract_mesh()
            if around.empty or AxisType.Explicit in around.axis_types:
                return jax.sharding.auto_axes(fn, out_sharding=shardings)
            shardings = jax.tree.map(lambda x: NamedSharding(self.auto_mesh, x.spec), shardings)
        # The specs are a tree prefix of the results.
        return lambda *args: lax.with_sharding_constraint(fn(*args), shardings)

    def shardings(self, specs: PyTree) -> PyTree:
        """Return the shardings of arrays with these specs."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)


def cut(path: Path, shape: tuple[int, ...]) -> tuple[Mesh, P] | None:
    """Return the mesh, and the spec of the optimizer state of the param at a path."""
    placement = placed_here()
    if placement is None or (spec := placement.spec(path)) is None:
        return None
    count = placement.replicas * placement.shared_out
    return placement.auto_mesh, shared_by(spec, shape, placement.names, count)


def owned(path: Path, shape: tuple[int, ...]) -> int | None:
    """Return the dimension along which each replica owns a shard of a param or its state.

    The result is -1 for unsharded or empty arrays, and ``None`` for other shardings.
    """
    placement = placed_here()
    sharding = cut(path, shape)
    if placement is None or sharding is None or 0 in shape:
        return -1
    entries = [x if isinstance(x, tuple) else (x,) for x in sharding[1]]
    if len(placement.names) == 1 and placement.names in entries:
        return entries.index(placement.names)
    return None if any(map(any, entries)) else -1


def settled(params: PyTree) -> PyTree:
    """Place new params like the old params, in the branch that computes the new params.

    New params that are sharded like an optimizer's state are then gathered only in steps that
    change the params.
    """
    placement = placed_here()
    if placement is None:
        return params
    if placement.shared_out and axes.sent_apart():
        params = _gathered(placement, params)
    named, treedef = jax.tree.flatten_with_path(params)
    leaves = [x for _, x in named]
    for i, (path, x) in enumerate(named):
        if (spec := placement.spec(path)) is not None:
            spec = without(spec, placement.names) if placement.owns_params else spec
            leaves[i] = lax.with_sharding_constraint(x, NamedSharding(placement.auto_mesh, spec))
    return treedef.unflatten(leaves)


def _gathered(placement: Placement, params: PyTree) -> PyTree:
    """Gather new params that are sharded like an optimizer's state, one message per dtype.

    The gather runs outside of the ``vmap``, like the reductions in ``reduce/on_shards.py``.
    """
    named, treedef = jax.tree.flatten_with_path(params)
    leaves = [x for _, x in named]
    # For each dtype, a list with the index, the sharded dimension and the spec of each leaf.
    by_dtype: dict[np.dtype, list[tuple[int, int, P]]] = {}
    for i, (path, x) in enumerate(named):
        spec = placement.spec(path) or P()
        dim = owned(path, x.shape)
        if spec == without(spec, placement.names) and dim is not None and dim >= 0:
            sharded = shared_by(spec, x.shape, placement.names, placement.replicas)
            by_dtype.setdefault(x.dtype, []).append((i, dim, sharded))

    def unsharded(dims: list[int], shards: list[jax.Array]) -> list[jax.Array]:
        rows = lax.all_gather(jnp.concatenate([x.ravel() for x in shards]), placement.names)
        parts = jnp.split(rows, np.cumsum([x.size for x in shards])[:-1], 1)
        stacks = [part.reshape(-1, *x.shape) for part, x in zip(parts, shards, strict=True)]
        pairs = zip(stacks, dims, strict=True)
        return [lax.collapse(jnp.moveaxis(x, 0, dim), dim, dim + 2) for x, dim in pairs]

    mesh = placement.auto_mesh
    for triples in by_dtype.values():
        indices, dims, specs = map(list, zip(*triples, strict=True))
        to = [without(spec, placement.names) for spec in specs]
        mapped = jax.shard_map(mesh=mesh, in_specs=(specs,), out_specs=to, check_vma=False)
        gather = mapped(functools.partial(unsharded, dims))
        new = on_shared(placement, ([leaves[i] for i in indices],), gather, lambda x: x, "settled")
        for i, x in zip(indices, new, strict=True):
            leaves[i] = x
    return treedef.unflatten(leaves)


def gathered(mesh: Mesh, names: tuple[str, ...], tree: PyTree, rows: P = P()) -> PyTree:
    """Gather params over the replica axes; split a batch's ``rows`` over the replicas.

    On an Auto mesh, XLA gathers and splits arrays itself; an Explicit mesh needs a ``reshard``.
    """
    if is_per_replica(tree) or AxisType.Explicit not in mesh.axis_types:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    for i, x in enumerate(leaves):
        others = without(jax.typeof(x).sharding.spec, names)[len(rows) :]
        leaves[i] = jax.sharding.reshard(x, NamedSharding(mesh, P(*rows, *others)))
    return structure.unflatten(leaves)


def seen(values: PyTree, check: Callable[[PyTree], None]) -> PyTree:
    """Return values unchanged; each surrounding ``jax.vmap`` that maps a value calls ``check``.

    The argument of ``check`` is a tree of bools, which are True for values that differ per replica.
    Inside the branch of a gate, ``check`` is called when ``jax.vmap`` maps the trace of the branch.
    """
    unchanged = custom_vmap(lambda values: values)

    @unchanged.def_vmap
    def rule(size: int, differs: Sequence[PyTree], values: PyTree) -> tuple[PyTree, PyTree]:
        check(differs[0])
        # An outer vmap may map a value that this vmap does not map, so ``unchanged`` is called
        # again.
        return unchanged(values), differs[0]

    return unchanged(values)


class Local(NamedTuple):
    """The arguments of a reduction that differ per replica.

    Attributes:
      grads: a leaf that is equal on all replicas is refused.
      state: leaves may be equal on all replicas.
      indices: the index of the replica on each axis, in a list. The index always differs per
        replica, so ``jax.vmap`` calls the rule even if nothing else differs.
    """

    grads: PyTree
    state: PyTree
    indices: PyTree


# A function that reduces a ``Local`` and shared values. It returns the means, the new
# ``Local.state`` and the new shared values. Only ``Local.state`` differs per replica.
Run = Callable[[PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]


def outside_vmap(names: Sequence[str], by_name: Run, stacked: Run, who: str) -> Run:
    """Return a function of one replica's arrays that calls ``stacked`` with all replicas' arrays.

    The docstring of this module has an example.

    Args:
      names: the axes of the surrounding ``jax.vmap``, innermost first.
      by_name: code of one replica with named axes, which decides the types of the results.
      stacked: code of all replicas; arguments that differ per replica have a leading dimension for
        each axis.
      who: the reduction, for errors.
    """
    name, *outer = names
    call = custom_vmap(by_name)

    @call.def_vmap
    def rule(size: int, differs: PyTree, local: Local, shared: PyTree) -> tuple[PyTree, PyTree]:
        equal = [path for path, is_local in trees.named(differs[0].grads) if not is_local]
        hint = f"These leaves are equal over the axis {name!r}. Remove the reduction before {who}."
        checks.require(not equal, who, "gradients", equal[:6], "local to each replica", hint)
        assert not any(jax.tree.leaves(differs[1])), "what replicas share differs"
        state = jax.tree.map(
            lambda x, is_local: x if is_local else jnp.broadcast_to(x[None], (size, *x.shape)),
            local.state,
            differs[0].state,
        )
        in_axes = Local(0, 0, None), None
        mapped = jax.vmap(by_name, in_axes, (None, 0, None), axis_name=name, axis_size=size)
        call_outer = outside_vmap(outer, mapped, stacked, who) if outer else stacked
        reduced = call_outer(local._replace(state=state), shared)
        return reduced, jax.tree.broadcast((False, True, False), reduced)

    return lambda local, shared: call(Local(*local), shared)


def on_shared(placement: Placement, shared: PyTree, fn: Call, inside: Call, who: str) -> PyTree:
    """Return ``fn(*shared)``, called outside of the ``vmap``; ``inside`` returns the same types."""
    call = outside_vmap(
        placement.names[::-1],
        lambda local, shared: ((), (), inside(*shared)),
        lambda local, shared: ((), (), fn(*shared)),
        who,
    )
    return call(Local((), (), [lax.axis_index(name) for name in placement.names]), shared)[2]


def split(tree: PyTree) -> tuple[list[PyTree], list[PyTree], Structure]:
    """Split a tree into the content of each ``PerReplica``, the other leaves, and a structure."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_per_replica)
    local = [x.local if is_per_replica(x) else None for x in leaves]
    return local, [None if is_per_replica(x) else x for x in leaves], structure


def joined(local: list[PyTree], shared: list[PyTree], structure: Structure) -> PyTree:
    """Join the results of ``split``."""
    pairs = zip(local, shared, strict=True)
    return structure.unflatten([PerReplica(a) if b is None else b for a, b in pairs])
