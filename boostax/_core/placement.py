# SPDX-License-Identifier: Apache-2.0
"""The placement of arrays on a mesh, and calls of per-replica code on global arrays.

In plain ``jit`` the local gradients of all replicas are a ``PerReplica`` of stacked arrays, ``[n,
...]``, sharded over the replica axes. ``Placement.each`` maps per-replica code over that dimension
by ``jax.vmap``: a value that differs per replica is batched, and any other value is an ordinary
global array in any sharding. A sum over the replicas becomes a sum over the first dimension, which
XLA compiles to an all-reduce or a reduce-scatter. A predicate on which the replicas agreed is not
batched, so a branch stays a branch. A reduction that sends more than sums leaves the ``vmap`` and
runs on the shards of each device (``on_shards``).

The placement inside ``Placement.each`` is a context variable, ``_HERE``, because ``jax.vmap``
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
from boostax._core.describe import PyTree, Stepped
from boostax._core.replicas import PerReplica, is_per_replica, shared_by, specs_like, without

Path = tuple[Any, ...]
Update = Callable[..., Stepped]

_HERE: contextvars.ContextVar["Placement | None"] = contextvars.ContextVar("here", default=None)


def placed_here() -> "Placement | None":
    """Return the placement of the surrounding ``Placement.each``.

    Closures must call this function, because a context variable in a closure cannot be pickled.
    """
    return _HERE.get()


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
        stacked, shared, tree = _apart(args)
        found: list[Any] = []

        def one(stacked: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
            with axes.during(_HERE, self), axes.binding(self.names):
                local, common, result = _apart(fn(*_joined(stacked, shared, tree)))
            _require_common(common)
            found.append(result)
            return local, common

        for name in reversed(self.names):
            size = self.mesh.shape[name]
            one = jax.vmap(one, (0, None), (0, None), axis_name=name, axis_size=size)
        local, common = one(self.by_axis(stacked), shared)
        return _joined(self.by_replica(local), common, found[-1])

    def by_axis(self, tree: PyTree) -> PyTree:
        """Split the dimension of replicas into one dimension per replica axis."""
        sizes = [self.mesh.shape[name] for name in self.names]
        return jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), tree)

    def by_replica(self, tree: PyTree) -> PyTree:
        """Merge the dimensions of the replica axes into one dimension."""
        rank = len(self.names)
        return jax.tree.map(lambda x: x.reshape(self.replicas, *x.shape[rank:]), tree)

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


def to_owners(
    who: str, dims: Mapping[Path, int], leaves: list[jax.Array], send: Callable[..., Any]
) -> list[jax.Array]:
    """Reduce leaves to their means in the shards that each replica owns.

    The reduction runs outside of the ``vmap`` over the one replica axis. Leaves that are equal on
    all replicas stay unchanged.

    Args:
      who: the reduction.
      dims: for the path of each leaf, the dimension along which the leaf is owned.
      leaves: gradients of a replica.
      send: ``send(dims, leaves)`` returns the means in one device's shards.
    """
    here = placed_here()
    assert here is not None
    (name,) = here.names
    given = [here.shards(path, who) for path in dims]

    @custom_vmap
    def mean(mark: jax.Array, leaves: list[jax.Array]) -> list[jax.Array]:
        return [lax.pmean(x, name) for x in leaves]

    @mean.def_vmap
    def rule(size: int, differs: Any, mark: jax.Array, leaves: list[jax.Array]) -> tuple[Any, Any]:
        local = [i for i, apart in enumerate(differs[1]) if apart]
        along = [[*dims.values()][i] for i in local]
        lead = [PartitionSpec(name, *given[i]) for i in local]
        shards: list[PartitionSpec] = []
        for i, dim in zip(local, along, strict=True):
            entries = [*given[i], *[None] * (dim + 1 - len(given[i]))]
            shards.append(PartitionSpec(*entries[:dim], name, *entries[dim + 1 :]))
        one = lambda xs: send(along, [x[0] for x in xs])  # noqa: E731
        island = jax.shard_map(one, mesh=here.auto_mesh, in_specs=(lead,), out_specs=shards)
        found = dict(enumerate(leaves))
        found |= zip(local, island([leaves[i] for i in local]) if local else (), strict=True)
        return [*found.values()], [False] * len(leaves)

    # The index is batched, so the rule is always called.
    return mean(lax.axis_index(name), leaves)


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

    The gather runs outside of the ``vmap``, like ``on_shards``.
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
        pairs = zip(stacks, dims, strict=True)
        return [flat(jnp.moveaxis(x, 0, dim), dim) for x, dim in pairs]

    for found in kinds.values():
        dims, specs = map(list, zip(*found.values(), strict=True))
        how: Any = {"in_specs": (specs,), "out_specs": [without(x, here.names) for x in specs]}
        send = functools.partial(joined, dims)
        island = jax.shard_map(send, mesh=here.auto_mesh, check_vma=False, **how)
        leave = lambda local, shared, island=island: ((), (), island(shared))  # noqa: E731
        stay = lambda local, shared: ((), (), shared)  # noqa: E731
        marks = [lax.axis_index(name) for name in here.names]
        run = lifted([*reversed(here.names)], stay, leave, "settled")
        new = run(((), (), marks), [leaves[i] for i in found])[2]
        for i, x in zip(found, new, strict=True):
            leaves[i] = x
    return treedef.unflatten(leaves)


def outside(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return ``fn`` in a form that a line search may call inside the mapped region.

    ``fn`` itself runs outside of that region. Its params must be equal on all replicas.
    """
    called = custom_vmap(fn)

    @called.def_vmap
    def rule(size: int, batched: Any, *args: PyTree) -> Any:
        allowed, hint = "given params that are the same on all replicas", "Reduce the gradients."
        raise ValueError(
            checks.message("value_and_grad", "loss_at", allowed, "some that differ", hint)
        )

    return called


def differentiable(value: Any, gradient: Any, args: tuple[Any, ...]) -> Callable[..., jax.Array]:
    """Return a function of params that has the given gradient.

    JAX does not transpose a ``custom_vmap``, and without checking it sums the cotangents of a
    ``psum`` once more.
    """

    @jax.custom_jvp
    def loss(params: PyTree) -> jax.Array:
        return value(params, *args)

    @loss.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        slopes = jax.tree.leaves(gradient(*primals, *args))
        moves = zip(slopes, jax.tree.leaves(tangents), strict=True)
        change = sum(jnp.sum((g * move).real) for g, move in moves)
        out = value(*primals, *args)
        return out, jnp.asarray(change, out.dtype)

    return loss


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


def local_alone(grads: PyTree, names: tuple[str, ...], who: str) -> PyTree:
    """Return gradients; refuse them if ``vmap`` shows that they are equal on all replicas.

    Some leaves may be equal, such as zeros for frozen params.
    """
    here = placed_here()
    if here is None or set(names) != set(here.names) or not jax.tree.leaves(grads):
        return grads

    def judge(differs: Any) -> None:
        local, got = any(jax.tree.leaves(differs[1])), f"equal gradients over {', '.join(names)}"
        hint = "Remove the reduction before it."
        checks.require(local, who, "gradients", got=got, allowed="local to each replica", hint=hint)

    for name in names:
        # The index is batched, so the rule is called.
        _, grads = _seen((lax.axis_index(name), grads), judge)
    return grads


def _seen(values: PyTree, judge: Callable[[Any], None]) -> PyTree:
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


def on_shards(who: str, names: tuple[str, ...], update: Update) -> Update:
    """Make the ``update`` of a reduction that runs on the shards of every device.

    In a function that is mapped over named axes the result is ``update`` itself. Inside
    ``Placement.each`` it leaves the ``vmap`` by a ``jax.shard_map`` over all axes of the mesh, so
    that shards are sent without a gather. Updates have the types of the gradients, and the state
    keeps its types.
    """

    @functools.wraps(update)
    def placed(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Stepped:
        here = placed_here()
        if here is None:
            return update(updates, state, params, **extra)
        _require_all_axes(here, who, names)
        leaves = jax.tree_util.tree_leaves_with_path(updates)
        owners = {path: (x.shape, here.shards(path, who)) for path, x in leaves}
        structure = jax.tree.structure(updates)
        specs = structure.unflatten([spec for _, spec in owners.values()])
        own, shared, tree = _apart(state)
        of_state = specs_like(owners, state, here.names, sizes=here.mesh.shape)
        own_specs, shared_specs, _ = _apart(of_state)

        def on_device(grads: PyTree, own: PyTree, shared: PyTree) -> tuple[PyTree, PyTree, PyTree]:
            means, new = update(grads, _joined(own, shared, tree))
            return means, *_apart(new)[:2]

        places = specs, own_specs, shared_specs
        run = _island(here, who, on_device, places, places)
        means, own, shared = run(updates, own, shared)
        return means, _joined(own, shared, tree)

    return placed


def _require_all_axes(here: Placement, who: str, names: tuple[str, ...]) -> None:
    hint = "One reduction serves all of them; adasum has within= for two levels."
    allowed, fits = f"all replica axes {here.names}", set(names) == set(here.names)
    checks.require(fits, who, "axis_name", got=names, allowed=allowed, hint=hint)


# From gradients, per-replica values and shared values: means, and the new values of the two.
OnDevice = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]
Specs = tuple[PyTree, PyTree, PyTree]


def _island(here: Placement, who: str, call: OnDevice, taken: Specs, handed: Specs) -> OnDevice:
    """Return ``call`` on the shards of each device, outside of the ``vmap``, as in ``on_shards``.

    Args:
      here: the placement.
      who: the reduction.
      call: per-device code with the replica axes as named axes.
      taken: specs of its arguments: of gradients without the replica axes, of per-replica values
        with the replica axes in front.
      handed: specs of its results, in the same form.
    """

    def named(local: PyTree, shared: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        with axes.during(_HERE, None):
            return call(local[0], local[1], shared)

    def mapped(local: PyTree, shared: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        grads, own = jax.tree.map(lambda x: x[0], local)
        # Without the barrier, XLA would add arrays in the stacked shape although they are computed
        # in the leaf's shape, and would not fuse the addition on a TPU.
        own = jax.tree.map(lax.optimization_barrier, own)
        means, own, shared = named((grads, own, ()), shared)
        return means, jax.tree.map(lambda x: x[None], own), shared

    rows = jax.tree.map(lambda spec: PartitionSpec(here.names, *spec), taken[0])
    inside: Any = {"in_specs": ((rows, taken[1]), taken[2]), "out_specs": handed}
    island = jax.shard_map(mapped, mesh=here.auto_mesh, **inside)

    def stacked(local: PyTree, shared: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        means, own, shared = island(here.by_replica(local[:2]), shared)
        return means, here.by_axis(own), shared

    # Each vmap passes stacked arguments only if an argument differs over its axis.
    marks = [lax.axis_index(name) for name in here.names]
    run = lifted(list(reversed(here.names)), named, stacked, who)
    return lambda grads, own, shared: run((grads, own, marks), shared)


def on_rows(
    who: str, names: tuple[str, ...], path: Path, call: Callable[..., Any], given: Any, deal: bool
) -> Any:
    """Run ``call`` per device, to deal leaves of one shape, or to gather them.

    Args:
      who: the reduction.
      names: its axes.
      path: the path of one of the leaves, whose spec is used for all.
      call: the per-device function.
      given: local leaves, or the rows ``[rows, *shape]`` that a replica owns.
      deal: True if ``call`` returns rows from leaves; False if it returns leaves, equal on all
        replicas, from rows.
    """
    here = placed_here()
    if here is None:
        return call(given)
    _require_all_axes(here, who, names)
    spec: PyTree = here.shards(path, who)
    leaves, rows = (spec, (), ()), ((), PartitionSpec(here.names, None, *spec), ())
    if deal:
        scatter: OnDevice = lambda leaves, own, shared: ((), call(leaves), ())  # noqa: E731
        return _island(here, who, scatter, leaves, rows)(given, (), ())[1]
    gather: OnDevice = lambda leaves, own, shared: (call(own), (), ())  # noqa: E731
    return _island(here, who, gather, rows, leaves)((), given, ())[0]


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


def _apart(tree: PyTree) -> tuple[list[PyTree], list[PyTree], Any]:
    """Split a tree into the contents of each ``PerReplica``, other leaves, and a structure."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_per_replica)
    own = [x.local if is_per_replica(x) else None for x in leaves]
    return own, [None if is_per_replica(x) else x for x in leaves], structure


def _joined(own: list[PyTree], shared: list[PyTree], structure: Any) -> PyTree:
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
        _seen(leaves, judge)
