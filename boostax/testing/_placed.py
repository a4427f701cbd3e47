# SPDX-License-Identifier: Apache-2.0
"""Laws of params that XLA shards: whatever their placement, a step means the same."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from boostax._core.replicas import PerReplica, stack_replicas, without
from boostax.testing._case import Carry, Case, applied, even_params, follow, laws_in
from boostax.testing._mapped import AXIS, assert_like, replica_grads, skips, train
from boostax.train.on_mesh import on_mesh

PyTree = Any
_OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Placed:
    """A placement of ``even_params``.

    Attributes:
      name: as people call it.
      specs: of the params.
      mesh: the replica axis first, and perhaps another one.
      shard_optimizer: see ``on_mesh``.
    """

    name: str
    specs: dict[str, PartitionSpec]
    mesh: Mesh
    shard_optimizer: bool

    @property
    def replicas(self) -> int:
        """Their number."""
        return self.mesh.shape[AXIS]

    @property
    def others(self) -> int:
        """Shards of a replica's gradient."""
        return self.mesh.shape.get(_OTHER, 1)

    def place(self, params: PyTree) -> PyTree:
        """A tree like the params, on the mesh."""
        where = lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec))  # noqa: E731
        return jax.tree.map(where, params, self.specs)

    def stack(self, stacked: PerReplica) -> PyTree:
        """What every replica has of a tree like the params, on the mesh."""
        lead = lambda spec: PartitionSpec(AXIS, *without(spec, (AXIS,)))  # noqa: E731
        where = lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, lead(spec)))  # noqa: E731
        return jax.tree.map(where, stacked.local, self.specs)

    def cut(self, name: str) -> int:
        """The dimension of a param that is sharded within a replica."""
        spec = without(self.specs[name], (AXIS,))
        return next((i for i, element in enumerate(spec) if element == _OTHER), 0)

    def shard(self, tree: PyTree, index: int, before: int = 0) -> PyTree:
        """One of the shards of a replica; of arrays with so many dimensions before."""
        part = lambda name, x: jnp.split(x, self.others, before + self.cut(name))[index]  # noqa: E731
        return {name: part(name, x) for name, x in tree.items()}


def placements(replicas: int, others: int, kind: AxisType) -> list[Placed]:
    """Over so many replicas, by an axis of so many devices or without one."""
    whole = {"w": PartitionSpec(), "b": PartitionSpec()}
    over = lambda axis: {"w": PartitionSpec(axis), "b": PartitionSpec(axis)}  # noqa: E731
    columns = {"w": PartitionSpec(None, _OTHER), "b": PartitionSpec(_OTHER)}
    both = {"w": PartitionSpec(AXIS, _OTHER), "b": PartitionSpec((AXIS, _OTHER))}
    flat = jax.make_mesh((replicas * others,), (AXIS,), axis_types=(kind,))
    grid = jax.make_mesh((replicas, others), (AXIS, _OTHER), axis_types=(kind,) * 2)
    return [
        Placed("replicated", whole, flat, False),
        Placed("ZeRO-1", whole, flat, True),
        Placed("FSDP", over(AXIS), flat, False),
        Placed("HSDP", over(_OTHER), grid, False),
        Placed("tensor parallel", columns, grid, False),
        Placed("tensor parallel, ZeRO-1", columns, grid, True),
        Placed("tensor parallel, FSDP", both, grid, False),
    ]


def run(case: Case, placed: Placed, windows: list[PyTree]) -> Carry:
    """Train in plain ``jit`` on stacked local gradients; all stays where it was."""
    params = placed.place(even_params())
    tx = on_mesh(case.mapped(AXIS), params, axis_name=AXIS, shard_optimizer=placed.shard_optimizer)
    state = tx.init(params)
    if case.own_params:
        params = PerReplica(
            placed.stack(stack_replicas(PerReplica(even_params()), placed.replicas))
        )
    where = jax.tree.map(lambda x: x.sharding, (params, state))
    step = jax.jit(applied(tx), donate_argnums=(0, 1))
    grads = [PerReplica(placed.stack(PerReplica(each))) for each in windows]
    params, state = follow(step, (params, state), grads)
    for x, sharding in zip(jax.tree.leaves((params, state)), jax.tree.leaves(where), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), f"{x.sharding}, not {sharding}"
    return params, state


def reference(case: Case, placed: Placed, windows: list[PyTree]) -> PyTree:
    """The params of every replica where they are whole, by ``vmap`` with a name."""
    last = lambda *given: train(case.mapped(AXIS), *given)[0]  # noqa: E731
    mapped = jax.jit(jax.vmap(last, in_axes=(None, 0), axis_name=AXIS))
    if not case.by_shard:
        return mapped(even_params(), windows)
    found = [
        mapped(placed.shard(even_params(), i), [placed.shard(g, i, 1) for g in windows])
        for i in range(placed.others)
    ]
    dims = {name: 1 + placed.cut(name) for name in placed.specs}
    return {name: jnp.concatenate([x[name] for x in found], dims[name]) for name in dims}


def any_placement_means_the_same(case: Case) -> None:
    """Promise 11: replicated, ZeRO, FSDP, HSDP, tensor parallel: as where params are whole."""
    _means_the_same(case, AxisType.Auto)


def any_placement_means_the_same_on_an_explicit_mesh(case: Case) -> None:
    """Promise 11: the same where JAX types every array by its sharding."""
    _means_the_same(case, AxisType.Explicit)


def _means_the_same(case: Case, kind: AxisType) -> None:
    for placed in placements(jax.device_count() // 2, 2, kind):
        windows = [replica_grads(seed, placed.replicas) for seed in range(2 * case.calls)]
        params, _ = run(case, placed, windows)
        assert_like(case, params, reference(case, placed, windows), placed.name, 2e-6)


def skip_is_agreed_in_any_placement(case: Case) -> None:
    """Promise 11: one NaN in one shard of one replica skips the step everywhere."""
    for placed in placements(jax.device_count() // 2, 2, AxisType.Auto)[-2:]:
        skips(case, functools.partial(run, case, placed), placed.replicas, placed.name)


PLACED_LAWS = laws_in(globals())
