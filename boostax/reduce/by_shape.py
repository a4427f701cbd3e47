# SPDX-License-Identifier: Apache-2.0
"""An optimizer of matrices that runs on each matrix once: on one replica, not on all of them."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from boostax._core import axes, bound_axis, checks, gate, placement, trees
from boostax._core.describe import Stepped, describe
from boostax._core.replicas import PerReplica
from boostax.reduce.codec import Arrays, Names, PyTree
from boostax.reduce.mean import all_reduce

_WHO = "by_shape"
_PARTS = "value_fn", "obj_fn", "grad"


class Dealt(NamedTuple):
    """The tree that the inner optimizer of ``by_shape`` sees on a replica, and moments like it.

    Attributes:
      by_shape: for each shape the matrices that the replica owns; in a state a ``PerReplica`` of
        them, stacked.
      rest: the other leaves at their own paths, with ``optax.MaskedNode`` for the matrices.
    """

    by_shape: tuple[Any, ...]
    rest: PyTree


class ByShapeState(NamedTuple):
    """State of ``by_shape``.

    Attributes:
      order: for each shape, i32 ``[matrices]``, their order as they are dealt: matrix ``i`` is in
        slot ``i % slots`` of replica ``i // slots``.
      inner_state: the state of the inner optimizer. Where it has moments like the params, they are
        a ``Dealt``, with arrays ``[slots, ...]`` of the matrices that the replica owns.
    """

    order: tuple[jax.Array, ...]
    inner_state: PyTree

    def dealt(self) -> list[tuple[PerReplica, int]]:
        """Return the parts that are dealt and the number of their items, for ``reshard_state``."""
        parts = [x.by_shape for x in trees.find(self.inner_state, _is_dealt)]
        counts = [len(order) for order in self.order]
        return [pair for each in parts for pair in zip(each, counts, strict=True)]


class _Shape(NamedTuple):
    """The matrices of one shape, and the replicas that share them.

    Attributes:
      indices: their indices among the leaves.
      names: the replica axes; empty where they are not bound, for a single replica.
    """

    indices: list[int]
    names: Names

    @property
    def slots(self) -> int:
        """The number of matrices that a replica owns, the same for all."""
        return -(-len(self.indices) // self.replicas)

    @property
    def replicas(self) -> int:
        return axes.size(self.names) if self.names else 1

    @property
    def few(self) -> bool:
        """Whether padding to all slots would more than double the bytes."""
        return 2 * len(self.indices) < self.slots * self.replicas

    def chosen(self, leaves: Arrays) -> Arrays:
        """Select the matrices that this replica owns of those that all replicas have."""
        if self.replicas == 1:
            return leaves
        here, leaves = axes.index(self.names), axes.to_varying(leaves, self.names)
        last, slots = len(leaves) - 1, self.slots
        owners = [[min(r * slots + s, last) for r in range(self.replicas)] for s in range(slots)]
        return [lax.select_n(here, *[leaves[i] for i in order]) for order in owners]

    def means(self, paths: Sequence[Any], leaves: Arrays) -> Arrays:
        """Return the means of the matrices that this replica owns."""
        if self.few:
            return self.chosen([lax.pmean(x, self.names) for x in leaves])
        path = paths[self.indices[0]]
        return list(placement.to_rows(_WHO, self.names, path, self._scattered, leaves))

    def _scattered(self, leaves: Arrays) -> jax.Array:
        spare = self.slots * self.replicas - len(leaves)
        stack = jnp.stack([*leaves, *[jnp.zeros_like(leaves[0])] * spare])
        return axes.scatter(stack, self.names, 0) / self.replicas

    def gathered(self, paths: Sequence[Any], rows: Arrays, leaves: Arrays) -> Arrays:
        """Return all matrices, equal on all replicas, from those that each replica owns."""
        dtype = jnp.result_type(*leaves)
        rows = [x.astype(dtype) for x in rows]
        if self.few:
            here = axes.index(self.names)
            mine = [jnp.where(here == i, rows[0], 0) for i in range(len(leaves))]
            return [lax.psum(x, self.names) for x in mine]
        path = paths[self.indices[0]]
        return placement.from_rows(_WHO, path, self._joined, jnp.stack(rows))

    def _joined(self, rows: jax.Array) -> Arrays:
        return list(axes.gather_along(rows, self.names, 0)[: len(self.indices)])


def _is_dealt(node: Any) -> bool:
    return isinstance(node, Dealt)


def _shapes(leaves: Arrays, names: Names) -> list[_Shape]:
    """Group the matrices by shape and dtype; a shape with a single matrix is not dealt."""
    found: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        if jnp.ndim(x) == 2 and x.size and jnp.issubdtype(x.dtype, jnp.floating):
            found.setdefault((x.shape, trees.wide_dtype(x)), []).append(i)
    return [_Shape(x, names) for x in found.values() if len(x) > 1]


def _rest(tree: PyTree, shapes: Sequence[_Shape]) -> PyTree:
    """Return the leaves that are not dealt."""
    leaves, treedef = jax.tree.flatten(tree)
    taken = {i for shape in shapes for i in shape.indices}
    return treedef.unflatten([optax.MaskedNode() if i in taken else x for i, x in enumerate(leaves)])


def _chosen(tree: PyTree, shapes: Sequence[_Shape]) -> Dealt:
    """Return what this replica owns of a tree that is equal on all of them, and the rest."""
    leaves = jax.tree.leaves(tree)
    owned = [tuple(x.chosen([leaves[i] for i in x.indices])) for x in shapes]
    return Dealt(tuple(owned), _rest(tree, shapes))


def _packed(state: PyTree) -> PyTree:
    """Stack what belongs to the matrices of one shape."""

    def pack(node: Any) -> Any:
        if not _is_dealt(node):
            return node
        stack = lambda *slots: jnp.stack(slots)  # noqa: E731
        return node._replace(by_shape=tuple(PerReplica(jax.tree.map(stack, *x)) for x in node.by_shape))

    return jax.tree.map(pack, state, is_leaf=_is_dealt)


def _unpacked(state: PyTree, shapes: Sequence[_Shape]) -> PyTree:
    """Invert ``_packed``; refuse a state for another number of replicas."""

    def unpack(node: Any) -> Any:
        if not _is_dealt(node):
            return node
        slots = [shape.slots for shape in shapes]
        got = [[len(x) for x in jax.tree.leaves(part)] for part in node.by_shape]
        fits = len(got) == len(slots) and all({*g} <= {n} for g, n in zip(got, slots, strict=True))
        hint = "stack_replicas(tx.init(params), n) deals it, boostax.reshard_state(state, n) anew."
        allowed = f"one with {slots} matrices of each shape on a replica"
        checks.require(_WHO, "state", got, allowed, fits, hint)
        pairs = zip(node.by_shape, slots, strict=True)
        one = lambda part, i: jax.tree.map(lambda x: x[i], part.local)  # noqa: E731
        return node._replace(by_shape=tuple(tuple(one(x, i) for i in range(n)) for x, n in pairs))

    return jax.tree.map(unpack, state, is_leaf=_is_dealt)


@bound_axis.reduction
def by_shape(
    inner: optax.GradientTransformation, axis_name: axes.AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Run ``inner`` on each matrix once, on the replica that owns it; reduce the rest by a mean.
    """
    tx = checks.transformation(_WHO, "inner", inner)
    gate.refuse_gates(_WHO, [gate.gate_of(inner)])
    names = axes.canonical(_WHO, axis_name)

    def init_fn(params: PyTree) -> ByShapeState:
        leaves = jax.tree.leaves(params)
        shapes = _shapes(leaves, names if axes.are_bound(names) else ())
        view = _chosen(trees.at_least_float32(params), shapes)
        state = _packed(gate.init_optimizer(_WHO, tx, view))
        order = [jnp.arange(len(shape.indices), dtype=jnp.int32) for shape in shapes]
        return ByShapeState(tuple(order), state)

    @describe(_WHO, "delta", names, inner={"inner_state": tx})
    def update_fn(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Stepped:
        axes.require_local(updates, names, _WHO)
        named, treedef = jax.tree_util.tree_flatten_with_path(updates)
        paths, leaves = [path for path, _ in named], [x for _, x in named]
        shapes = _shapes(leaves, names)
        wide = trees.at_least_float32(updates)
        means = all_reduce(names).update(_rest(wide, shapes), optax.EmptyState())[0]
        flat = jax.tree.leaves(wide)
        owned = [tuple(x.means(paths, [flat[i] for i in x.indices])) for x in shapes]
        own = None if params is None else _chosen(trees.at_least_float32(params), shapes)
        extra = {name: x for name, x in extra.items() if name not in _PARTS}
        kept = _unpacked(state.inner_state, shapes)
        made, new = tx.update(Dealt(tuple(owned), means), kept, own, **extra)
        new = axes.unify(trees.cast_like(new, kept), kept)
        found = dict(enumerate(jax.tree.leaves(made.rest, is_leaf=trees.is_masked)))
        for shape, rows in zip(shapes, made.by_shape, strict=True):
            whole = shape.gathered(paths, list(rows), [leaves[i] for i in shape.indices])
            found |= zip(shape.indices, whole, strict=True)
        result = treedef.unflatten([found[i] for i in range(len(leaves))])
        return trees.cast_like(result, updates), ByShapeState(state.order, _packed(new))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
