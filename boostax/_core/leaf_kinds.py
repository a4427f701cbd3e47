# SPDX-License-Identifier: Apache-2.0
"""Leaves that are no dense arrays: constants of a model, and sparse gradients.

Constants are activations, names, numbers that ``jit`` left alone. Sparse gradients are the rows of
an embedding, or single elements, as a ``BCOO`` of JAX's: ``describe`` makes them dense before any
transformation of boostax sees them. Rows of the same index are added, those out of range dropped.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.tree_util import register_pytree_node

from boostax._core import axes

PyTree = Any


class _Aside:
    """Holds such a leaf where transformations of JAX see none."""

    def __init__(self, leaf: Any):
        self.leaf = leaf

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Aside) and self.leaf is other.leaf

    def __hash__(self) -> int:
        return id(self.leaf)


register_pytree_node(_Aside, lambda node: ((), node), lambda node, _: node)


def is_array(leaf: Any) -> bool:
    """Whether a leaf has a shape and a dtype of its own; ``jnp.float32`` has neither."""
    return not isinstance(leaf, type) and hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_none(node: Any) -> bool:
    """A leaf test for ``jax.tree`` functions."""
    return node is None


def aside(params: PyTree) -> PyTree:
    """Params in which what is no array is no leaf any more.

    A Python integer or bool is one of them beside arrays, a float beside traced ones alone: as an
    argument it would be traced, and where nothing is traced it is trained, as ``jax.grad`` does.
    """
    leaves = jax.tree.leaves(params)
    arrays, traced = any(map(is_array, leaves)), any(isinstance(x, Tracer) for x in leaves)

    def constant(x: Any) -> bool:
        if isinstance(x, int):
            return arrays
        return not is_array(x) and (traced or not isinstance(x, (float, complex)))

    return jax.tree.map(lambda x: _Aside(x) if constant(x) else x, params)


def restored(params: PyTree) -> PyTree:
    """The params as they were, for the model."""
    return _each(params, lambda node: node.leaf)


def without_gradient(grads: PyTree, active: PyTree) -> PyTree:
    """``None`` in the place of what is aside; ``optax.MaskedNode`` where it is not active.

    Args:
      grads: like the params that ``aside`` made.
      active: a bool, or a tree of them like the params before.
    """
    if isinstance(active, bool):
        return _each(grads, lambda node: None)
    stop = lambda node: isinstance(node, (_Aside, optax.MaskedNode))  # noqa: E731
    gone = lambda keep: None if keep else optax.MaskedNode()  # noqa: E731
    kept = lambda g, keep: gone(keep) if isinstance(g, _Aside) else g  # noqa: E731
    return jax.tree.map(kept, grads, active, is_leaf=stop)


def of_arrays(tree: PyTree, params: PyTree) -> PyTree:
    """A tree like params before ``aside``, like those after it."""
    stop = lambda node: isinstance(node, _Aside)  # noqa: E731
    return jax.tree.map(lambda p, x: p if stop(p) else x, params, tree, is_leaf=stop)


def arrays_alone(params: PyTree) -> PyTree:
    """``None`` in the place of what is no array, as ``equinox.filter`` leaves it."""
    return jax.tree.map(lambda x: x if is_array(x) else None, params)


def put_back(new: PyTree, params: PyTree) -> PyTree:
    """New params, with the old ones where there is ``None``."""
    return jax.tree.map(lambda n, p: p if n is None else n, new, params, is_leaf=is_none)


def _each(tree: PyTree, fn: Callable[[_Aside], Any]) -> PyTree:
    stop = lambda node: isinstance(node, _Aside)  # noqa: E731
    return jax.tree.map(lambda x: fn(x) if stop(x) else x, tree, is_leaf=stop)


# Whoever has a sparse array has imported it.
MODULE = "jax.experimental.sparse"


def _is_sparse(node: Any) -> bool:
    return MODULE in sys.modules and isinstance(node, sys.modules[MODULE].JAXSparse)


def dense(tree: PyTree, who: str) -> PyTree:
    """Return the tree with a dense array in place of each ``BCOO`` of single rows."""

    def on_leaf(path: Any, x: Any) -> Any:
        if not _is_sparse(x):
            return x
        if type(x).__name__ != "BCOO" or x.n_batch or not x.n_sparse:
            _refuse_sparse(who, "gradients", "dense arrays or BCOO with n_batch=0", path, x)
        # Not x.todense(), which does not say over which axes its result varies. In f32 or wider:
        # rows of one index are rounded once, with their sum.
        zeros = jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
        zeros = axes.to_varying(zeros, axes.varying(x.data) | axes.varying(x.indices))
        return zeros.at[tuple(x.indices.T)].add(x.data).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(on_leaf, tree, is_leaf=_is_sparse)


def require_dense(tree: PyTree, who: str, what: str = "gradients") -> None:
    """Refuse sparse leaves."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_sparse):
        if _is_sparse(x):
            _refuse_sparse(who, what, "dense arrays", path, x)


def _refuse_sparse(who: str, what: str, allowed: str, path: Any, x: Any) -> None:
    name = jax.tree_util.keystr(path, simple=True, separator="/") or "the root"
    raise TypeError(
        f"{who}: {what} must be {allowed}, got {type(x).__name__} at {name!r}. Convert with "
        ".todense()."
    )
