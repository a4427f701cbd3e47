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
from boostax._core.placement import HERE, Path, Placement, apart, joined, lifted, placed_here, seen
from boostax._core.replicas import specs_like
from boostax._core.types import PyTree

Update = Callable[..., Stepped]

# From gradients, per-replica values and shared values: means, and the new values of the two.
OnDevice = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]
Specs = tuple[PyTree, PyTree, PyTree]


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
        _, grads = seen((lax.axis_index(name), grads), judge)
    return grads


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
        specs = jax.tree.structure(updates).unflatten([spec for _, spec in owners.values()])
        own, shared, tree = apart(state)
        of_state = specs_like(owners, state, here.names, sizes=here.mesh.shape)
        own_specs, shared_specs, _ = apart(of_state)

        def on_device(grads: PyTree, own: PyTree, shared: PyTree) -> tuple[PyTree, PyTree, PyTree]:
            means, new = update(grads, joined(own, shared, tree))
            return means, *apart(new)[:2]

        places = specs, own_specs, shared_specs
        means, own, shared = _island(here, who, on_device, places, places)(updates, own, shared)
        return means, joined(own, shared, tree)

    return placed


def _require_all_axes(here: Placement, who: str, names: tuple[str, ...]) -> None:
    hint = "One reduction serves all of them; adasum has within= for two levels."
    allowed, fits = f"all replica axes {here.names}", set(names) == set(here.names)
    checks.require(fits, who, "axis_name", got=names, allowed=allowed, hint=hint)


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
        with axes.during(HERE, None):
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
    """Run ``call`` per device, to distribute leaves of one shape, or to gather them.

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
