"""Laws of params that XLA shards: whatever their placement, a step means the same."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from boostax._core.replicas import PerReplica, stack_replicas
from boostax.testing._case import Case, even_params
from boostax.testing._mapped import AXIS
from boostax.train.apply import apply_gradients
from boostax.train.on_mesh import on_mesh

PyTree = Any
_OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Placed:
    """A placement of ``even_params``.

    Attributes:
      name: as people call it.
      specs: of the params.
      sizes: of the mesh's axes: replicas first, the other one if there is one.
      shard_optimizer: see ``on_mesh``.
      kind: of all axes of the mesh.
    """

    name: str
    specs: PyTree
    sizes: tuple[int, ...]
    shard_optimizer: bool
    kind: AxisType

    @property
    def mesh(self) -> Mesh:
        """Of the first devices."""
        names, kinds = (AXIS, _OTHER)[: len(self.sizes)], (self.kind,) * len(self.sizes)
        devices = jax.devices()[: int(np.prod(self.sizes))]
        return jax.make_mesh(self.sizes, names, axis_types=kinds, devices=devices)

    def place(self, tree: PyTree) -> PyTree:
        """A tree like the params, on the mesh."""
        where = lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec))  # noqa: E731
        return jax.tree.map(where, tree, self.specs)

    @property
    def cut(self) -> bool:
        """Whether a replica's gradients are in shards."""
        return any(_OTHER in spec for spec in self.specs.values())


def placements(replicas: int, others: int) -> list[Placed]:
    """Of a mesh of so many replicas, by another axis of some devices."""
    whole = {"w": PartitionSpec(), "b": PartitionSpec()}
    over = lambda axis: {"w": PartitionSpec(axis), "b": PartitionSpec(axis)}  # noqa: E731
    columns = {"w": PartitionSpec(None, _OTHER), "b": PartitionSpec(_OTHER)}
    both = {"w": PartitionSpec(AXIS, _OTHER), "b": PartitionSpec((AXIS, _OTHER))}
    flat, grid = (replicas * others,), (replicas, others)
    return [
        Placed(name, specs, sizes, zero, kind)
        for kind in (AxisType.Auto, AxisType.Explicit)
        for name, specs, sizes, zero in (
            ("replicated", whole, flat, False),
            ("zero-1", whole, flat, True),
            ("fsdp", over(AXIS), flat, False),
            ("hsdp", over(_OTHER), grid, False),
            ("tensor-parallel", columns, grid, False),
            ("tensor-parallel zero-1", columns, grid, True),
            ("tensor-parallel fsdp", both, grid, False),
        )
    ]


def run(case: Case, placed: Placed, windows: list[PyTree]) -> tuple[PyTree, Any]:
    """Train in plain ``jit`` on stacked local gradients."""
    mesh, params = placed.mesh, placed.place(even_params())
    tx = on_mesh(case.mapped(AXIS), params, axis_name=AXIS, shard_optimizer=placed.shard_optimizer)
    state = tx.init(params)
    where = jax.tree.map(lambda x: x.sharding, (params, state))
    if case.own_params:
        lead = lambda x: NamedSharding(mesh, _stacked(x.sharding.spec))  # noqa: E731
        stacked = stack_replicas(PerReplica(jax.tree.map(np.asarray, params)), placed.sizes[0])
        params = PerReplica(
            jax.tree.map(lambda x, p: jax.device_put(x, lead(p)), stacked.local, params)
        )
        where = jax.tree.map(lambda x: x.sharding, (params, state))

    def step(params: PyTree, state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        return apply_gradients(tx, PerReplica(grads), state, params)

    step = jax.jit(step, donate_argnums=(0, 1))
    for grads in windows:
        stacked = {
            k: jax.device_put(g, NamedSharding(mesh, _stacked(placed.specs[k])))
            for k, g in grads.items()
        }
        params, state = step(params, state, stacked)
    for x, sharding in zip(jax.tree.leaves((params, state)), jax.tree.leaves(where), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), f"{x.sharding}, not {sharding}"
    return params, state


def _stacked(spec: PartitionSpec) -> PartitionSpec:
    from boostax._core.replicas import without

    return PartitionSpec(AXIS, *without(spec, (AXIS,)))


def reference(case: Case, placed: Placed, windows: list[PyTree]) -> PyTree:
    """The params of every replica where they are whole, by ``vmap`` with a name."""
    tx = case.mapped(AXIS)

    def train(params: PyTree, grads: list[PyTree]) -> PyTree:
        state = tx.init(params)
        for g in grads:
            params, state = apply_gradients(tx, g, state, params)
        return params

    mapped = jax.jit(jax.vmap(train, in_axes=(None, 0), axis_name=AXIS))
    if not (placed.cut and case.by_shard):
        return mapped(even_params(), windows)
    dims = {
        k: list(spec).index(_OTHER) if _OTHER in spec else 0 for k, spec in placed.specs.items()
    }
    part = lambda x, dim, i: jnp.split(x, placed.sizes[1], dim)[i]  # noqa: E731
    parts = [
        mapped(
            {k: part(x, dims[k], i) for k, x in even_params().items()},
            [{k: part(x, 1 + dims[k], i) for k, x in g.items()} for g in windows],
        )
        for i in range(placed.sizes[1])
    ]
    return {k: jnp.concatenate([x[k] for x in parts], 1 + dims[k]) for k in parts[0]}
