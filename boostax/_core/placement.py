# SPDX-License-Identifier: Apache-2.0
"""Where arrays live on a mesh, and how what is written for one replica runs on global arrays.

In plain ``jit`` the gradients that are local to a replica are a ``PerReplica`` of stacked arrays,
``[n, ...]``, sharded over the replica axes. ``Placement.each`` maps code for one replica over that
dimension by ``jax.vmap``: what differs per replica is batched, everything else is an ordinary
global array, however XLA shards it. A sum over the replicas becomes a sum over the first dimension,
which XLA makes an all-reduce or a reduce-scatter; a predicate that was agreed on is not batched, so
a branch stays a branch. What exchanges more than sums leaves the mapping again and sees the shards
of each device (``on_shards``).
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from boostax._core import axes, checks, trees
from boostax._core.axes import Groups, in_group
from boostax._core.replicas import PerReplica, is_per_replica, specs_like, without

PyTree = Any
Path = tuple[Any, ...]

_HERE: contextvars.ContextVar["Placement | None"] = contextvars.ContextVar("here", default=None)


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """A mesh, its replica axes, and how the params are sharded over the others.

    Attributes:
      mesh: all its devices.
      names: the replica axes, over which the batch is split.
      specs: of each param by its plain path.
      own: whether each replica has params of its own.
    """

    mesh: Mesh
    names: tuple[str, ...]
    specs: Mapping[tuple[str, ...], PartitionSpec]
    own: bool = False

    @property
    def replicas(self) -> int:
        """Their number."""
        return math.prod(self.mesh.shape[name] for name in self.names)

    @functools.cached_property
    def auto_mesh(self) -> Mesh:
        """The same devices with all sharding left to XLA."""
        kinds = (AxisType.Auto,) * len(self.mesh.axis_names)
        return Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=kinds)

    def each(self, fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
        """``fn`` for every replica at once, with the replica axes as named axes.

        Args:
          fn: sees every ``PerReplica`` in its arguments as one replica has it, all else whole, and
            marks what of its result differs from replica to replica in the same way.
          *args: global arrays.

        Returns:
          The result, its ``PerReplica`` stacked.

        Raises:
          ValueError: what is not marked differs from replica to replica.
        """
        stacked, shared, tree = _apart(args)
        found: list[Any] = []

        def one(stacked: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
            with _at(self), axes.saying(self.names):
                local, common, result = _apart(fn(*_joined(stacked, shared, tree)))
            _require_common(common)
            found.append(result)
            return local, common

        one = axes.keyed(one, self.names)
        sizes = [self.mesh.shape[name] for name in self.names]
        for name, size in reversed([*zip(self.names, sizes, strict=True)]):
            one = jax.vmap(one, (0, None), (0, None), axis_name=name, axis_size=size)
        split = lambda x: x.reshape(*sizes, *x.shape[1:])  # noqa: E731
        merged = lambda x: x.reshape(-1, *x.shape[len(sizes) :])  # noqa: E731
        local, common = one(jax.tree.map(split, stacked), shared)
        return _joined(jax.tree.map(merged, local), common, found[-1])

    def spec(self, path: Path) -> PartitionSpec | None:
        """Of the param at a path; ``None`` if there is none."""
        return self.specs.get(trees.plain_path(path))

    def shards(self, path: Path, who: str) -> PartitionSpec:
        """How the gradient of a param is sharded within a replica."""
        if len(self.names) == len(self.mesh.axis_names):
            return PartitionSpec()
        spec = self.spec(path)
        if spec is None:
            raise ValueError(
                f"{who}: gradients must have the params' paths where a mesh has axes besides "
                f"{', '.join(self.names)}, got one at {trees.path_name(path)!r}. Put the reduction "
                "outside whatever renames or flattens them."
            )
        return without(spec, self.names)

    def pinned(self, fn: Callable[..., PyTree], specs: PyTree) -> Callable[..., PyTree]:
        """``fn`` on arrays whose sharding is XLA's, with results that are sharded as said.

        On an Explicit mesh code that knows nothing of shardings does not pass JAX's typing.
        """
        if AxisType.Explicit not in self.mesh.axis_types:
            here = lambda spec: NamedSharding(self.mesh, spec)  # noqa: E731
            put = lambda spec, x: lax.with_sharding_constraint(x, here(spec))  # noqa: E731
            return lambda *args: _map_specs(put, specs, fn(*args))
        return jax.sharding.auto_axes(fn, out_sharding=self.shardings(specs))

    def shardings(self, specs: PyTree) -> PyTree:
        """Of arrays with these specs."""
        return _map_specs(lambda spec: NamedSharding(self.mesh, spec), specs)


def settled(params: PyTree) -> PyTree:
    """New params where the old ones are, said where they are computed.

    In a branch, so that what an optimizer's sharded state has cut is gathered by a step that moves
    the params, and by no other.
    """
    here = _HERE.get()
    if here is None:
        return params

    def settle(path: Path, x: jax.Array) -> jax.Array:
        spec = here.spec(path)
        if spec is None:
            return x
        spec = without(spec, here.names) if here.own else spec
        return lax.with_sharding_constraint(x, NamedSharding(here.auto_mesh, spec))

    return jax.tree_util.tree_map_with_path(settle, params)


def local_alone(grads: PyTree, names: tuple[str, ...], who: str) -> PyTree:
    """Return gradients; refuse those that are equal on all replicas, where that can be seen.

    Some leaves may be: zeros in the place of gradients.
    """
    here = _HERE.get()
    if here is None or set(names) != set(here.names) or not jax.tree.leaves(grads):
        return grads

    @custom_vmap
    def look(mark: jax.Array, grads: PyTree) -> PyTree:
        return grads

    @look.def_vmap
    def rule(size: int, batched: Any, mark: jax.Array, grads: PyTree) -> tuple[PyTree, PyTree]:
        if not any(jax.tree.leaves(batched[1])):
            raise ValueError(
                f"{who}: gradients must be local to each replica, got some that are already equal "
                f"over {', '.join(names)}. Leave out what reduces them before."
            )
        return grads, batched[1]

    for name in names:
        # The index differs on all replicas, so that the rule is asked; within a gate's branch,
        # which is traced first, when the trace is mapped.
        grads = look(lax.axis_index(name), grads)
    return grads


def on_shards(
    who: str, names: tuple[str, ...], update: Callable[..., tuple[PyTree, PyTree]]
) -> Callable[..., tuple[PyTree, PyTree]]:
    """A reduction's ``update`` that runs on the shards of every device.

    In a named-axis region it is ``update`` itself. Within ``Placement.each`` it leaves the mapping,
    as ``jax.shard_map`` over all axes of the mesh: nothing is gathered, and what it sends are
    shards. Its updates have the types of the gradients, its state the types of the old one.
    """

    @functools.wraps(update)
    def placed(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        here = _HERE.get()
        if here is None:
            return update(updates, state, params, **extra)
        hint = "One reduction serves all of them; adasum has within= for two levels."
        allowed, fits = f"all replica axes {here.names}", set(names) == set(here.names)
        checks.require(who, "axis_name", names, allowed, fits, hint)
        leaves = jax.tree_util.tree_leaves_with_path(updates)
        owners = {path: (x.shape, here.shards(path, who)) for path, x in leaves}
        structure = jax.tree.structure(updates)
        specs = structure.unflatten([spec for _, spec in owners.values()])
        own, shared, tree = _apart(state)
        own_specs, shared_specs, _ = _apart(specs_like(owners, state, here.names))

        def named(local: PyTree, shared: PyTree) -> tuple[PyTree, PyTree, PyTree]:
            grads, own, _ = local
            with _at(None):
                means, new = update(grads, _joined(own, shared, tree))
            return means, *_apart(new)[:2]

        def mapped(local: PyTree, shared: PyTree) -> tuple[PyTree, PyTree, PyTree]:
            grads, own = jax.tree.map(lambda x: x[0], local)
            # XLA would add up in the stacked shape what a replica computes in the leaf's own, and
            # on a TPU no longer fuse the two.
            own = jax.tree.map(lax.optimization_barrier, own)
            means, own, shared = named((grads, own, ()), shared)
            return means, jax.tree.map(lambda x: x[None], own), shared

        lead = lambda spec: PartitionSpec(here.names, *spec)  # noqa: E731
        taken = (_map_specs(lead, specs), own_specs), shared_specs
        handed = specs, own_specs, shared_specs
        island = jax.shard_map(mapped, mesh=here.auto_mesh, in_specs=taken, out_specs=handed)

        def stacked(local: PyTree, shared: PyTree) -> tuple[PyTree, PyTree, PyTree]:
            rank = len(here.names)
            merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[rank:]), local[:2])
            means, own, shared = island(merged, shared)
            sizes = [here.mesh.shape[name] for name in here.names]
            return means, jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), own), shared

        # What differs over every axis, so that each hands over its stacked arguments in turn.
        marks = [lax.axis_index(name) for name in here.names]
        run = _lifted(list(reversed(here.names)), named, stacked, who)
        means, own, shared = run((updates, own, marks), shared)
        return means, _joined(own, shared, tree)

    return placed


def mean_of_group(x: jax.Array, groups: Groups) -> jax.Array:
    """The mean over this replica's group, a run of neighbours, under ``jax.vmap``.

    On global arrays a sum over a dimension that XLA shards, as all sums are there.
    """
    if _HERE.get() is None:
        return in_group(x, groups).mean(0)

    def stacked(local: PyTree, shared: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        rows = local[1].reshape(*groups.members.shape, *x.shape)
        means = jnp.broadcast_to(rows.mean(1, keepdims=True), rows.shape)
        return (), means.reshape(local[1].shape), shared

    named = lambda local, shared: ((), local[1], shared)  # noqa: E731
    marks = [lax.axis_index(name) for name in groups]
    return _lifted([*reversed(groups)], named, stacked, "mean_of_group")(((), x, marks), ())[1]


Run = Callable[[PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]


def _lifted(names: list[str], named: Run, stacked: Run, who: str) -> Run:
    """``stacked`` of what all replicas have, called where each has its own.

    Every ``jax.vmap``, the innermost first, hands its stacked arguments to the rule.
    """
    if not names:
        return stacked
    name, *rest = names

    @custom_vmap
    def call(local: PyTree, shared: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        return named(local, shared)

    in_axes = (0, 0, None), None
    outer = jax.vmap(named, in_axes=in_axes, out_axes=(None, 0, None), axis_name=name)

    @call.def_vmap
    def rule(size: int, batched: Any, local: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
        (grads, own, _), common = batched
        for path, differs in jax.tree_util.tree_leaves_with_path(grads):
            if not differs:
                raise ValueError(
                    f"{who}: gradients must be local to each replica, but the leaf "
                    f"{trees.path_name(path)!r} is already equal over the axis {name!r}. Leave out "
                    "what reduces it before."
                )
        assert not any(jax.tree.leaves(common)), "what replicas share differs"
        whole = lambda x, b: x if b else jnp.broadcast_to(x[None], (size, *x.shape))  # noqa: E731
        local = (local[0], jax.tree.map(whole, local[1], own), local[2])
        means, own, shared = _lifted(rest, outer, stacked, who)(local, shared)
        same = lambda tree, mark: jax.tree.map(lambda _: mark, tree)  # noqa: E731
        return (means, own, shared), (same(means, False), same(own, True), same(shared, False))

    return call


def _map_specs(fn: Callable[..., Any], specs: PyTree, *others: PyTree) -> PyTree:
    return jax.tree.map(fn, specs, *others, is_leaf=lambda x: isinstance(x, PartitionSpec))


@contextlib.contextmanager
def _at(placement: Placement | None) -> Generator[None]:
    token = _HERE.set(placement)
    try:
        yield
    finally:
        _HERE.reset(token)


def _apart(tree: PyTree) -> tuple[list[PyTree], list[PyTree], Any]:
    """What every ``PerReplica`` holds, all other leaves, and how they belong together."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_marked)
    own = [x.local if is_per_replica(x) else None for x in leaves]
    return own, [None if is_per_replica(x) else x for x in leaves], structure


def _marked(node: Any) -> bool:
    return is_per_replica(node) or isinstance(node, PartitionSpec)


def _joined(own: list[PyTree], shared: list[PyTree], structure: Any) -> PyTree:
    pairs = zip(own, shared, strict=True)
    return structure.unflatten([PerReplica(a) if b is None else b for a, b in pairs])


def _require_common(shared: list[PyTree]) -> None:
    """Refuse what differs from replica to replica and does not say so."""
    for x in jax.tree.leaves(shared):
        if _differs(x):
            raise ValueError(
                "on_mesh: params and updates must be the same on all replicas, got some that "
                f"differ (shape {x.shape}). Put a reduction, such as boostax.all_reduce, first in "
                "the innermost chain, and give every scaler and window around it the axis_name "
                "(optax.MultiSteps has none: boostax.accumulate takes its place)."
            )


def _differs(x: Any) -> bool:
    """Whether a value is batched where it stands."""
    seen: list[bool] = []

    @custom_vmap
    def look(x: jax.Array) -> jax.Array:
        return x

    @look.def_vmap
    def rule(size: int, batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
        del size
        seen.append(batched[0])
        return x, batched[0]

    look(x)
    return any(seen)
