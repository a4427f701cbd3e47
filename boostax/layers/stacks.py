# SPDX-License-Identifier: Apache-2.0
"""The stacks of layers of a step: their params, shardings, gathers and reductions."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from boostax._core import axes, checks, gate, interpret, replicas, trees
from boostax._core.placement import Placement
from boostax._core.types import PyTree
from boostax.precision.entries import BY_ELEMENT
from boostax.precision.policy import Policy
from boostax.train.apply import applied

Path = tuple[Any, ...]
Arrays = list[jax.Array]
Weights = Literal["once", "by layer"]
# The scope by which ``audit`` recognises collectives that are repeated in each layer.
BY_LAYER = "by_layer"
# The dimensions of a layer's array that are sharded over replica axes, each with these axes.
ShardedDims = Sequence[tuple[int, tuple[str, ...]]]


@dataclasses.dataclass(frozen=True)
class Stacked:
    """The fields of ``boostax.train.Layers``, and methods that find the params of its stacks."""

    path: str | tuple[str, ...] = "layers"
    weights: Weights = "by layer"
    release: bool = False

    def __post_init__(self) -> None:
        hint = "'by layer' stores one gathered layer at a time; 'once' stores all gathered layers."
        checks.choice("Layers", "weights", self.weights, Weights, hint)

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths of the stacks."""
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)

    @property
    def once(self) -> bool:
        """Return whether weights are gathered once."""
        return self.weights == "once" and not self.release

    def stack_of(self, name: str) -> str | None:
        """Return the path of the stack that contains the param of this name, or ``None``."""
        return next((x for x in self.paths if f"{name}/".startswith(f"{x}/")), None)

    def split(self, params: PyTree) -> tuple[PyTree, dict[str, list[Any]]]:
        """Return the params without the stacks, and the leaves of each stack."""
        stacks: dict[str, list[Any]] = {name: [] for name in self.paths}
        leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
        head: list[PyTree] = []
        for path, leaf in leaves:
            name = self.stack_of(trees.path_name(path))
            if name is not None:
                stacks[name].append(leaf)
            head.append(leaf if name is None else optax.MaskedNode())
        return treedef.unflatten(head), stacks

    def joined(self, head: PyTree, stacks: Mapping[str, Sequence[Any]]) -> PyTree:
        """Insert the leaves of stacks into a tree from ``split``; other leaves are unchanged."""
        leaves = {name: iter(stack) for name, stack in stacks.items()}
        nodes, treedef = jax.tree_util.tree_flatten_with_path(head, is_leaf=trees.is_masked)
        result: list[PyTree] = []
        for path, leaf in nodes:
            name = self.stack_of(trees.path_name(path))
            result.append(next(leaves[name], leaf) if name in leaves else leaf)
        return treedef.unflatten(result)

    def alone(self, params: PyTree, stacks: Mapping[str, Sequence[Any]]) -> PyTree:
        """Return a tree like the params with only the leaves of these stacks, at their paths."""
        return self.joined(jax.tree.map(lambda _: optax.MaskedNode(), params), stacks)

    def require_stacked(self, params: PyTree) -> None:
        """Refuse params that have no stack of layers at one of ``paths``."""
        for name, leaves in self.split(params)[1].items():
            counts = {x.shape[:1] for x in leaves}
            got = None if len(counts) == 1 and () not in counts else name
            allowed = "the path of stacked params [layers, ...] with the same number of layers"
            hint = f"The paths of the params are {', '.join(trees.names(params)[:6])}, ..."
            checks.absent("Layers", "path", got, allowed, hint)

    def first_states(
        self, tx: optax.GradientTransformation, params: PyTree, names: tuple[str, ...]
    ) -> dict[str, PyTree]:
        """Return the initial states of each stack's layers, as arrays ``[layers, ...]``."""
        with axes.binding(names, averaged=True, partial=True):
            return {
                k: jax.vmap(lambda x, k=k: gate.init_inner(tx, self.alone(params, {k: x})))(leaves)
                for k, leaves in self.split(params)[1].items()
            }


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The layers of a step on its mesh.

    Attributes:
      layers: see ``boostax.train.Layers``.
      tx: the optimizer, for ``release``.
      policy: the precision policy.
      place: the placement of the params; ``None`` without a mesh.
      wire: the dtype in which weights are gathered, if it differs from the compute dtype.
      types: the types of the params.
    """

    layers: Stacked
    tx: optax.GradientTransformation
    policy: Policy | None = None
    place: Placement | None = None
    wire: str | None = None
    types: PyTree = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the replica axes."""
        return () if self.place is None else self.place.names

    @functools.cached_property
    def sharded_dims(self) -> dict[str, list[ShardedDims]]:
        """Return how the params of a layer are sharded over the replicas, for each stack."""
        stacks: dict[str, list[ShardedDims]] = {name: [] for name in self.layers.paths}
        for path, _ in jax.tree_util.tree_leaves_with_path(self.types):
            name = self.layers.stack_of(trees.path_name(path))
            if name is not None:
                spec = self.place.spec(path) if self.place else None
                dims = sharded_dims(spec or PartitionSpec(), self.names)
                got = f"{spec} at {trees.path_name(path)}" if any(i < 0 for i, _ in dims) else None
                allowed = f"unsharded over {', '.join(self.names)} in the dimension of the layers"
                checks.absent("Layers", "params", got, allowed, "Shard another dimension.")
                stacks[name].append(dims)
        return stacks

    @functools.cached_property
    def sharded_state(self) -> dict[str, PyTree]:
        """Return how a layer's state is sharded over the replicas, as a tree for each stack."""
        first_states = functools.partial(self.layers.first_states, self.tx, names=self.names)
        # Only shapes and dtypes matter here. So the types have no shardings, which JAX would check
        # on an Explicit mesh.
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.types)
        specs = self.specs(jax.eval_shape(first_states, params))
        return jax.tree.map(lambda spec: sharded_dims(spec, self.names), specs)

    @functools.cached_property
    def gathers_state(self) -> dict[str, bool]:
        """Return for each stack whether its optimizer needs gathered params, not shards."""
        stacks = self.layers.split(self.types)[1]
        layers = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacks)
        return {
            name: any(self.sharded_dims[name]) and not self.is_elementwise(name, layer)
            for name, layer in layers.items()
        }

    def is_elementwise(self, name: str, layer: Arrays) -> bool:
        """Return whether the optimizer is elementwise in the params of a stack's layer."""
        params = self.layers.alone(self.types, {name: layer})
        with axes.binding(self.names, averaged=True, partial=True):
            args = params, jax.eval_shape(lambda x: gate.init_inner(self.tx, x), params), params
            program = jax.make_jaxpr(lambda g, s, w: applied(self.tx, g, s, w, {}))(*args)
        highest = functools.partial(max, default=0)

        # A fact is 0 for a value that all elements share. It is 1 for an array in which each
        # element depends only on the elements of the inputs at the same position. Otherwise, the
        # fact is 2.
        def facts_of(eqn: Any, facts: list[int]) -> list[int]:
            shapes = {x.aval.shape for x in (*eqn.invars, *eqn.outvars)} - {()}
            is_elementwise = eqn.primitive.name in BY_ELEMENT and len(shapes) <= 1
            is_elementwise |= eqn.primitive.name == "broadcast_in_dim" and facts == [0]
            return [highest(facts) if is_elementwise or not any(facts) else 2] * len(eqn.outvars)

        ranks = [min(1, len(x.shape)) for x in program.in_avals]
        return highest(interpret.flow(program, ranks, facts_of, highest, 0)) < 2

    @functools.cached_property
    def dtypes(self) -> dict[str, list[jnp.dtype]]:
        """Return the dtypes in which the loss gets the params of each stack."""
        # Inside a ``shard_map``, JAX refuses types with shardings over Explicit axes.
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.types)
        types = jax.eval_shape(self.policy.cast_params, types) if self.policy else types
        return {k: [x.dtype for x in leaves] for k, leaves in self.layers.split(types)[1].items()}

    def specs(self, tree: PyTree) -> PyTree:
        """Return the specs of a state or of params, with only the replica axes."""
        assert self.place is not None
        leaves = jax.tree_util.tree_leaves_with_path(self.types)
        owners = {path: (x.shape, self.place.spec(path) or PartitionSpec()) for path, x in leaves}
        specs = replicas.specs_like(owners, tree, self.names, sizes=self.place.mesh.shape)
        others = [x for x in self.place.mesh.axis_names if x not in self.names]
        return jax.tree.map(lambda spec: replicas.without(spec, others), specs)

    def gathered(self, name: str, leaves: Arrays, stacked: bool = False) -> Arrays:
        """Gather the weights of one layer, or of all layers, in ``wire`` or the compute dtype."""
        weights = zip(leaves, self.sharded_dims[name], self.dtypes[name], strict=True)
        with jax.named_scope("at_once" if stacked else BY_LAYER):
            return [
                _unsharded(x.astype(self.wire or dtype), dims, stacked) if dims else x
                for x, dims, dtype in weights
            ]

    def read(self, name: str, leaves: Arrays) -> Arrays:
        """Return a layer's weights, gathered and in the dtypes in which the loss gets them."""
        leaves = leaves if self.layers.once else self.gathered(name, leaves)
        return [x.astype(dtype) for x, dtype in zip(leaves, self.dtypes[name], strict=True)]

    def reduced(self, name: str, grads: Arrays) -> Arrays:
        """Average a layer's gradients over replicas in f32; return shards like those of params."""

        def average(grad: jax.Array, dims: ShardedDims) -> jax.Array:
            others = tuple(x for x in self.names if not any(x in over for _, over in dims))
            grad = grad.astype(trees.wide_dtype(grad))
            for dim, over in dims:
                parts = grad.reshape(*grad.shape[:dim], axes.size(over), -1, *grad.shape[dim + 1 :])
                grad = lax.psum_scatter(jnp.moveaxis(parts, dim, 0), over)
            grad = lax.psum(grad, others) if others else grad
            return grad / axes.size(self.names) if self.names else grad

        with jax.named_scope(BY_LAYER):
            return jax.tree.map(average, grads, self.sharded_dims[name])

    def updated(
        self, name: str, grads: Arrays, state: PyTree, params: Arrays
    ) -> tuple[Arrays, PyTree]:
        """Return new params and state of a layer, from its mean gradient.

        If the optimizer is not elementwise, each replica computes the update of a gathered layer.
        """
        dims = self.sharded_dims[name]
        if self.gathers_state[name]:
            grads, params = (jax.tree.map(_unsharded, x, dims) for x in (grads, params))
            state = jax.tree.map(_unsharded, state, self.sharded_state[name])
        grads, params = (self.layers.alone(self.types, {name: x}) for x in (grads, params))
        with axes.binding(self.names, averaged=True, partial=True):
            params, state = applied(self.tx, grads, state, params, {})
        leaves = jax.tree.leaves(params)
        if self.gathers_state[name]:
            leaves = jax.tree.map(_local_shard, leaves, dims)
            state = jax.tree.map(_local_shard, state, self.sharded_state[name])
        return leaves, state


def sharded_dims(spec: PartitionSpec, names: tuple[str, ...]) -> ShardedDims:
    """Return how a layer is sharded over the replicas, from the spec of a stack of layers."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    over = [tuple(x for x in entry if x in names) for entry in entries]
    return [(dim - 1, names) for dim, names in enumerate(over) if names]


def _unsharded(x: jax.Array, dims: ShardedDims, stacked: bool = False) -> jax.Array:
    """Gather the shards of an array, or of a stack of arrays.

    The shards are gathered along a new leading dimension, because for a gather along the sharded
    dimension XLA would change the layout of all layers of the stack.
    """
    for dim, over in dims:
        at = dim + stacked
        parts = jnp.moveaxis(lax.all_gather(x, over), 0, at)
        x = parts.reshape(*x.shape[:at], -1, *x.shape[at + 1 :])
    return x


def _local_shard(x: jax.Array, dims: ShardedDims) -> jax.Array:
    """Return this replica's shard of a gathered array."""
    for dim, over in dims:
        size = x.shape[dim] // axes.size(over)
        x = lax.dynamic_slice_in_dim(x, axes.index(over) * size, size, dim)
    return x
