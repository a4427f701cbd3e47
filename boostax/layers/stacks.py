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
from boostax.train.oracle import applied

Path = tuple[Any, ...]
Arrays = list[jax.Array]
Weights = Literal["once", "by layer"]
# The scope by which ``audit`` recognises collectives that are repeated in each layer.
BY_LAYER = "by_layer"
# The dimensions of a layer's array that are sharded over replica axes, and the axes.
Cut = Sequence[tuple[int, tuple[str, ...]]]


@dataclasses.dataclass(frozen=True)
class Stacked:
    """The fields of ``boostax.train.Layers``, and which params belong to its stacks."""

    path: str | tuple[str, ...] = "layers"
    weights: Weights = "by layer"
    release: bool = False

    def __post_init__(self) -> None:
        hint = "'by layer' holds one layer's weights, 'once' sends them once."
        checks.choice("Layers", "weights", self.weights, Weights, hint)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the stacks."""
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)

    @property
    def once(self) -> bool:
        """Whether weights are gathered once."""
        return self.weights == "once" and not self.release

    def stack_of(self, name: str) -> str | None:
        """Return the path of the stack to which the param of a name belongs, or ``None``."""
        return next((x for x in self.paths if f"{name}/".startswith(f"{x}/")), None)

    def split(self, params: PyTree) -> tuple[PyTree, dict[str, list[Any]]]:
        """Return the params without the stacks, and the leaves of each stack."""
        stacks: dict[str, list[Any]] = {name: [] for name in self.paths}

        def head(path: Path, x: Any) -> Any:
            name = self.stack_of(trees.path_name(path))
            if name is None:
                return x
            stacks[name].append(x)
            return optax.MaskedNode()

        return jax.tree_util.tree_map_with_path(head, params), stacks

    def joined(self, head: PyTree, stacks: Mapping[str, Sequence[Any]]) -> PyTree:
        """Put back the leaves of stacks that ``split`` took out; other leaves are unchanged."""
        left = {name: iter(leaves) for name, leaves in stacks.items()}

        def whole(path: Path, x: Any) -> Any:
            name = self.stack_of(trees.path_name(path))
            return x if name is None else next(left.get(name, iter(())), x)

        return jax.tree_util.tree_map_with_path(whole, head, is_leaf=trees.is_masked)

    def alone(self, params: PyTree, name: str, leaves: Sequence[Any]) -> PyTree:
        """Return a tree like the params with only one stack's leaves, at their paths."""
        return self.joined(masked(self.split(params)[0]), {name: leaves})

    def require_stacked(self, params: PyTree) -> None:
        """Refuse params without a stack at one of the paths."""
        for name, leaves in self.split(params)[1].items():
            counts = {x.shape[:1] for x in leaves}
            allowed = "one of stacked params, all [layers, ...] of one number of layers"
            hint = f"The params are {', '.join(trees.names(params)[:6])}, ..."
            fits = len(counts) == 1 and () not in counts
            checks.require(fits, "Layers", "path", got=name, allowed=allowed, hint=hint)

    def first_states(
        self, tx: optax.GradientTransformation, params: PyTree, names: tuple[str, ...]
    ) -> dict[str, PyTree]:
        """Return for each stack its layers' first states, ``[layers, ...]``."""

        def first(name: str, leaves: Arrays) -> PyTree:
            return gate.init_inner(tx, self.alone(params, name, leaves))

        stacks = self.split(params)[1]
        with axes.binding(names, averaged=True, partial=True):
            return {k: jax.vmap(functools.partial(first, k))(x) for k, x in stacks.items()}


def masked(tree: PyTree) -> PyTree:
    """Return a tree with every leaf masked."""
    return jax.tree.map(lambda _: optax.MaskedNode(), tree)


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
        """The replica axes."""
        return () if self.place is None else self.place.names

    @functools.cached_property
    def stacks(self) -> dict[str, list[Any]]:
        """The types of the params of each stack."""
        return self.layers.split(self.types)[1]

    @functools.cached_property
    def cuts(self) -> dict[str, list[Cut]]:
        """The sharding over the replicas of a layer's params, for each stack."""
        found: dict[str, list[Cut]] = {name: [] for name in self.layers.paths}
        for path, _ in jax.tree_util.tree_leaves_with_path(self.types):
            name = self.layers.stack_of(trees.path_name(path))
            if name is not None:
                spec = self.place.spec(path) if self.place else None
                cut = cut_of(spec or PartitionSpec(), self.names)
                allowed = f"whole along the layers over {', '.join(self.names)}"
                got, hint = f"{spec} at {trees.path_name(path)}", "Shard another dimension."
                fits = all(dim >= 0 for dim, _ in cut)
                checks.require(fits, "Layers", "params", got=got, allowed=allowed, hint=hint)
                found[name].append(cut)
        return found

    @functools.cached_property
    def state_cuts(self) -> dict[str, list[Cut]]:
        """The sharding over the replicas of a layer's state, for each stack, if it is gathered."""
        empty = lambda: jax.tree.map(zeros, self.types)  # noqa: E731
        states = jax.eval_shape(lambda: self.layers.first_states(self.tx, empty(), self.names))
        specs = self.specs(states)
        return {k: [cut_of(x, self.names) for x in jax.tree.leaves(s)] for k, s in specs.items()}

    @functools.cached_property
    def gathers_state(self) -> dict[str, bool]:
        """Whether the optimizer needs a gathered layer of sharded params, for each stack."""
        layer = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)  # noqa: E731
        alone = lambda k, x: self.layers.alone(self.types, k, [*map(layer, x)])  # noqa: E731
        return {
            k: any(self.cuts[k]) and not _by_entry(self.tx, alone(k, x), self.names)
            for k, x in self.stacks.items()
        }

    @functools.cached_property
    def dtypes(self) -> dict[str, list[Any]]:
        """The dtypes in which the loss gets the params of each stack."""
        cast = lambda x: x if self.policy is None else self.policy.cast_params(x)  # noqa: E731
        stacks = self.layers.split(jax.eval_shape(cast, self.types))[1]
        return {k: [x.dtype for x in xs] for k, xs in stacks.items()}

    def specs(self, tree: PyTree) -> PyTree:
        """Return the specs of a state or of params, over the replica axes only."""
        assert self.place is not None
        leaves = jax.tree_util.tree_leaves_with_path(self.types)
        owners = {path: (x.shape, self.place.spec(path) or PartitionSpec()) for path, x in leaves}
        specs = replicas.specs_like(owners, tree, self.names, sizes=self.place.mesh.shape)
        others = [x for x in self.place.mesh.axis_names if x not in self.names]
        return jax.tree.map(lambda spec: replicas.without(spec, others), specs)

    def sent(self, name: str, leaves: Arrays, stacked: bool = False) -> Arrays:
        """Gather the weights of one layer, or of all layers, in the dtype on the wire."""

        def one(x: jax.Array, cut: Cut, dtype: Any) -> jax.Array:
            return joined(x.astype(self.wire or dtype), cut, stacked) if cut else x

        with jax.named_scope("at_once" if stacked else BY_LAYER):
            return list(map(one, leaves, self.cuts[name], self.dtypes[name]))

    def cast(self, name: str, leaves: Arrays) -> Arrays:
        """Cast weights to the dtypes in which the loss gets them."""
        return [x.astype(dtype) for x, dtype in zip(leaves, self.dtypes[name], strict=True)]

    def reduced(self, name: str, grads: Arrays) -> Arrays:
        """Average a layer's gradients over the replicas, in f32, into the params' shards."""

        def one(g: jax.Array, cut: Cut) -> jax.Array:
            g, left = g.astype(trees.wide_dtype(g)), list(self.names)
            for dim, over in cut:
                parts = g.reshape(*g.shape[:dim], axes.size(over), -1, *g.shape[dim + 1 :])
                g = lax.psum_scatter(jnp.moveaxis(parts, dim, 0), over)
                left = [x for x in left if x not in over]
            g = lax.psum(g, tuple(left)) if left else g
            return g / axes.size(self.names) if self.names else g

        with jax.named_scope(BY_LAYER):
            return list(map(one, grads, self.cuts[name]))

    def updated(
        self, name: str, grads: Arrays, state: PyTree, params: Arrays
    ) -> tuple[Arrays, PyTree]:
        """Return new params and state of a layer, from its mean gradient.

        An optimizer that is not elementwise gets the gathered layer on each replica.
        """
        leaves, treedef = jax.tree.flatten(state)
        if self.gathers_state[name]:
            grads, params = (list(map(joined, x, self.cuts[name])) for x in (grads, params))
            state = treedef.unflatten(map(joined, leaves, self.state_cuts[name]))
        tree = functools.partial(self.layers.alone, self.types, name)
        with axes.binding(self.names, averaged=True, partial=True):
            new, state = applied(self.tx, tree(grads), state, tree(params), {})
        if not self.gathers_state[name]:
            return jax.tree.leaves(new), state
        params = list(map(_own, jax.tree.leaves(new), self.cuts[name]))
        return params, treedef.unflatten(map(_own, jax.tree.leaves(state), self.state_cuts[name]))


def zeros(x: Any) -> jax.Array:
    """Return zeros of a shape and dtype."""
    return jnp.zeros(x.shape, x.dtype)


def cut_of(spec: PartitionSpec, names: tuple[str, ...]) -> Cut:
    """Return how a layer is sharded over the replicas, from the spec of a stack of layers."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    over = [tuple(x for x in entry if x in names) for entry in entries]
    return [(dim - 1, names) for dim, names in enumerate(over) if names]


def joined(x: jax.Array, cut: Cut, stacked: bool = False) -> jax.Array:
    """Gather the shards of an array, or of a stack of arrays.

    The shards are gathered on a leading dimension, because for a gather along the sharded dimension
    XLA would change the layout of the whole stack.
    """
    for dim, over in cut:
        at = dim + stacked
        parts = jnp.moveaxis(lax.all_gather(x, over), 0, at)
        x = parts.reshape(*x.shape[:at], -1, *x.shape[at + 1 :])
    return x


def _own(x: jax.Array, cut: Cut) -> jax.Array:
    """Return this replica's shard of a gathered array."""
    for dim, over in cut:
        size = x.shape[dim] // axes.size(over)
        x = lax.dynamic_slice_in_dim(x, axes.index(over) * size, size, dim)
    return x


def _by_entry(tx: optax.GradientTransformation, layer: PyTree, names: tuple[str, ...]) -> bool:
    """Return whether an optimizer is elementwise in a layer's params."""
    with axes.binding(names, averaged=True, partial=True):
        state = jax.eval_shape(lambda: gate.init_inner(tx, jax.tree.map(zeros, layer)))
        program = jax.make_jaxpr(lambda g, s, w: applied(tx, g, s, w, {}))(layer, state, layer)

    # 0 for a value that all elements share, 1 for an array of elements, 2 for anything else.
    def each(eqn: Any, facts: list[int]) -> list[int]:
        shapes = {x.aval.shape for x in (*eqn.invars, *eqn.outvars)} - {()}
        fits = eqn.primitive.name in BY_ELEMENT and len(shapes) <= 1
        fits |= eqn.primitive.name == "broadcast_in_dim" and facts == [0]
        return [max(facts, default=0) if fits or not any(facts) else 2] * len(eqn.outvars)

    join = lambda facts: max(facts, default=0)  # noqa: E731
    ranks = [min(1, len(x.shape)) for x in program.in_avals]
    return join(interpret.flow(program, ranks, each, join, 0)) < 2
