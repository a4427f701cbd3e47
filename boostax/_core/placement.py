# SPDX-License-Identifier: Apache-2.0
"""The placement of arrays on a mesh, and calls of per-replica code on global arrays.

In plain ``jit`` the local gradients of all replicas are a ``PerReplica`` of stacked arrays, ``[n,
...]``, sharded over the replica axes. ``Placement.each`` maps per-replica code over that dimension
by ``jax.vmap``: a value that differs per replica is batched, and any other value is an ordinary
global array in any sharding. A sum over the replicas becomes a sum over the first dimension, which
XLA compiles to an all-reduce or a reduce-scatter. A predicate on which the replicas agreed is not
batched, so a branch stays a branch. A reduction that sends more than sums leaves the ``vmap`` and
runs on the shards of each device (``reduce/on_shards.py``).

The placement inside ``Placement.each`` is a context variable, ``HERE``, because ``jax.vmap``
passes only arrays, and the mapped code calls transformations of other libraries.
"""

import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from boostax._core import axes, checks, trees
from boostax._core.replicas import PerReplica, is_per_replica, shared_by, without
from boostax._core.types import PyTree

Path = tuple[Any, ...]

HERE: contextvars.ContextVar["Placement | None"] = contextvars.ContextVar("here", default=None)


def placed_here() -> "Placement | None":
    """Return the placement of the surrounding ``Placement.each``.

    Closures must call this function, because a context variable in a closure cannot be pickled.
    """
    return HERE.get()


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """A mesh, its replica axes, and the sharding of the params over the other axes.

    Attributes:
      mesh: the mesh.
      names: the replica axes, over which the batch is split.
      specs: the spec of each param, by its plain path.
      own: whether each replica has its own params.
      shared_out: whether optimizer state that is equal on all replicas is sharded over the
        replicas.
    """

    mesh: Mesh
    names: tuple[str, ...]
    specs: Mapping[tuple[str, ...], PartitionSpec]
    own: bool = False
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

    def each(self, fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
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
        stacked, shared, tree = apart(args)
        found: list[Any] = []

        def one(stacked: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
            with axes.during(HERE, self), axes.binding(self.names):
                local, common, result = apart(fn(*joined(stacked, shared, tree)))
            _require_common(common)
            found.append(result)
            return local, common

        for name in reversed(self.names):
            size = self.mesh.shape[name]
            one = jax.vmap(one, (0, None), (0, None), axis_name=name, axis_size=size)
        local, common = one(self.by_axis(stacked), shared)
        return joined(self.by_replica(local), common, found[-1])

    def by_axis(self, tree: PyTree) -> PyTree:
        """Split the dimension of replicas into one dimension per replica axis."""
        sizes = [self.mesh.shape[name] for name in self.names]
        return jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), tree)

    def by_replica(self, tree: PyTree) -> PyTree:
        """Merge the dimensions of the replica axes into one dimension."""
        return jax.tree.map(lambda x: x.reshape(self.replicas, *x.shape[len(self.names) :]), tree)

    def spec(self, path: Path) -> PartitionSpec | None:
        """Return the spec of the param at a path; ``None`` if there is no such param."""
        return self.specs.get(trees.plain_path(path))

    def shards(self, path: Path, who: str) -> PartitionSpec:
        """Return the spec of the gradient of a param within a replica."""
        if len(self.names) == len(self.mesh.axis_names):
            return PartitionSpec()
        spec = self.spec(path)
        allowed = f"at the params' paths where a mesh has axes besides {', '.join(self.names)}"
        hint = "Put the reduction outside whatever renames or flattens them."
        got = trees.path_name(path)
        checks.require(spec is not None, who, "gradients", got=got, allowed=allowed, hint=hint)
        return without(spec or PartitionSpec(), self.names)

    def pinned(self, fn: Callable[..., PyTree], specs: PyTree) -> Callable[..., PyTree]:
        """Return ``fn`` with Auto axes inside, and with results of these specs.

        On an Explicit mesh JAX cannot type code without shardings.
        """
        if AxisType.Explicit not in self.mesh.axis_types:
            # The specs are a tree prefix of the results.
            return lambda *args: lax.with_sharding_constraint(fn(*args), self.shardings(specs))
        return jax.sharding.auto_axes(fn, out_sharding=self.shardings(specs))

    def shardings(self, specs: PyTree) -> PyTree:
        """Return the shardings of arrays with these specs."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)


def cut(path: Path, shape: tuple[int, ...]) -> tuple[Mesh, PartitionSpec] | None:
    """Return the mesh, and the spec of the optimizer state of the param at a path."""
    here = placed_here()
    spec = None if here is None else here.spec(path)
    if here is None or spec is None:
        return None
    if here.shared_out:
        spec = shared_by(spec, shape, here.names, here.replicas)
    return here.auto_mesh, spec


def owned(path: Path, shape: tuple[int, ...]) -> int | None:
    """Return the dimension along which each replica owns a shard of a param or its state.

    The result is -1 for unsharded or empty arrays, and ``None`` for other shardings.
    """
    here, found = placed_here(), cut(path, shape)
    if here is None or found is None or 0 in shape:
        return -1
    entries = [x if isinstance(x, tuple) else (x,) for x in found[1]]
    if len(here.names) == 1 and here.names in entries:
        return entries.index(here.names)
    return None if any(map(any, entries)) else -1


def settled(params: PyTree) -> PyTree:
    """Give new params the placement of the old params, in the branch that computes them.

    So new params that are sharded like an optimizer's state are gathered only in steps that change
    them.
    """
    here = placed_here()
    if here is None:
        return params
    if here.shared_out and axes.sent_apart():
        params = _gathered(here, params)

    def settle(path: Path, x: jax.Array) -> jax.Array:
        spec = here.spec(path)
        if spec is None:
            return x
        spec = without(spec, here.names) if here.own else spec
        return lax.with_sharding_constraint(x, NamedSharding(here.auto_mesh, spec))

    return jax.tree_util.tree_map_with_path(settle, params)


def _gathered(here: Placement, params: PyTree) -> PyTree:
    """Gather new params that are sharded like an optimizer's state, one message per dtype.

    The gather runs outside of the ``vmap``, like ``reduce/on_shards.py``.
    """
    named, treedef = jax.tree_util.tree_flatten_with_path(params)
    leaves = [x for _, x in named]
    kinds = dict[Any, dict[int, tuple[int, PartitionSpec]]]()
    for i, (path, x) in enumerate(named):
        spec, dim = here.spec(path) or PartitionSpec(), owned(path, x.shape)
        if spec == without(spec, here.names) and dim is not None and dim >= 0:
            sharded = shared_by(spec, x.shape, here.names, here.replicas)
            kinds.setdefault(x.dtype, {})[i] = dim, sharded

    def joined(dims: list[int], shards: list[jax.Array]) -> list[jax.Array]:
        rows = lax.all_gather(jnp.concatenate([x.ravel() for x in shards]), here.names)
        parts = jnp.split(rows, np.cumsum([x.size for x in shards])[:-1], 1)
        stacks = [part.reshape(-1, *x.shape) for part, x in zip(parts, shards, strict=True)]
        flat = lambda x, dim: x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])  # noqa: E731
        return [flat(jnp.moveaxis(x, 0, dim), dim) for x, dim in zip(stacks, dims, strict=True)]

    for found in kinds.values():
        dims, specs = map(list, zip(*found.values(), strict=True))
        how: Any = {"in_specs": (specs,), "out_specs": [without(x, here.names) for x in specs]}
        send = functools.partial(joined, dims)
        island = jax.shard_map(send, mesh=here.auto_mesh, check_vma=False, **how)
        new = on_shared(here, ([leaves[i] for i in found],), island, lambda x: x, "settled")
        for i, x in zip(found, new, strict=True):
            leaves[i] = x
    return treedef.unflatten(leaves)


def gathered(
    mesh: Any, names: tuple[str, ...], tree: PyTree, rows: PartitionSpec = PartitionSpec()
) -> PyTree:
    """Gather params over the replica axes; split a batch's ``rows`` over the replicas.

    On an Auto mesh XLA does this itself; an Explicit mesh needs a ``reshard``.
    """
    if is_per_replica(tree) or AxisType.Explicit not in mesh.axis_types:
        return tree
    rest = lambda x: without(jax.typeof(x).sharding.spec, names)[len(rows) :]  # noqa: E731
    spec = lambda x: NamedSharding(mesh, PartitionSpec(*rows, *rest(x)))  # noqa: E731
    return jax.tree.map(lambda x: jax.sharding.reshard(x, spec(x)), tree)


def seen(values: PyTree, judge: Callable[[Any], None]) -> PyTree:
    """Return values unchanged; each surrounding ``jax.vmap`` that maps a value calls ``judge``.

    The argument of ``judge`` is a tree of bools that are True for the values that differ. Inside
    the branch of a gate, ``judge`` is called when the branch's trace is mapped.
    """

    @custom_vmap
    def look(values: PyTree) -> PyTree:
        return values

    @look.def_vmap
    def rule(size: int, differs: Any, values: PyTree) -> tuple[PyTree, Any]:
        judge(differs[0])
        # A value that this vmap does not map may be mapped by an outer vmap.
        return look(values), differs[0]

    return look(values)


Run = Callable[[PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]


def lifted(names: list[str], named: Run, stacked: Run, who: str) -> Run:
    """Return a function of one replica's arrays that calls ``stacked`` with all replicas' arrays.

    Each ``jax.vmap``, the innermost first, passes its stacked arguments to the rule.
    """
    if not names:
        return stacked
    name, *rest = names

    @custom_vmap
    def call(local: PyTree, shared: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        return named(local, shared)

    @call.def_vmap
    def rule(size: int, batched: Any, local: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
        (grads, own, _), common = batched
        equal = [path for path, differs in trees.named(grads) if not differs]
        hint = f"These leaves are equal over the axis {name!r}: leave out what reduces them before."
        allowed = "local to each replica"
        checks.require(not equal, who, "gradients", got=equal[:6], allowed=allowed, hint=hint)
        assert not any(jax.tree.leaves(common)), "what replicas share differs"
        whole = lambda x, b: x if b else jnp.broadcast_to(x[None], (size, *x.shape))  # noqa: E731
        local = (local[0], jax.tree.map(whole, local[1], own), local[2])
        how: Any = {"in_axes": ((0, 0, None), None), "out_axes": (None, 0, None)}
        outer = jax.vmap(named, axis_name=name, axis_size=size, **how)
        means, own, shared = lifted(rest, outer, stacked, who)(local, shared)
        same = lambda tree, mark: jax.tree.map(lambda _: mark, tree)  # noqa: E731
        return (means, own, shared), (same(means, False), same(own, True), same(shared, False))

    return call


def on_shared(here: Placement, shared: tuple[Any, ...], fn: Any, inside: Any, who: str) -> Any:
    """Return ``fn(*shared)``, called outside of the ``vmap``; ``inside(*shared)`` has its types."""
    leave = lambda local, shared: ((), (), fn(*shared))  # noqa: E731
    stay = lambda local, shared: ((), (), inside(*shared))  # noqa: E731
    marks = [lax.axis_index(name) for name in here.names]
    return lifted([*reversed(here.names)], stay, leave, who)(((), (), marks), shared)[2]


def apart(tree: PyTree) -> tuple[list[PyTree], list[PyTree], Any]:
    """Split a tree into the contents of each ``PerReplica``, other leaves, and a structure."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_per_replica)
    own = [x.local if is_per_replica(x) else None for x in leaves]
    return own, [None if is_per_replica(x) else x for x in leaves], structure


def joined(own: list[PyTree], shared: list[PyTree], structure: Any) -> PyTree:
    pairs = zip(own, shared, strict=True)
    return structure.unflatten([PerReplica(a) if b is None else b for a, b in pairs])


def _require_common(shared: list[PyTree]) -> None:
    """Refuse arrays that differ per replica outside a ``PerReplica``."""
    leaves = jax.tree.leaves(shared)

    def judge(differs: list[bool]) -> None:
        shapes = sorted({x.shape for x, apart in zip(leaves, differs, strict=True) if apart})
        hint = (
            "Arrays of these shapes differ. Put a reduction, such as boostax.all_reduce, first in "
            "the innermost chain, and give every scaler and window around it the axis_name "
            "(optax.MultiSteps and optax.apply_if_finite have none: boostax.accumulate and "
            "boostax.skip_bad_steps take their places)."
        )
        what, allowed = "params and updates", "the same on all replicas"
        checks.require(not shapes, "on_mesh", what, got=shapes, allowed=allowed, hint=hint)

    if leaves:
        seen(leaves, judge)
