# SPDX-License-Identifier: Apache-2.0
"""Leaves of a model that are no arrays: activations, names, numbers that ``jit`` left alone."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.core import Tracer
from jax.tree_util import register_pytree_node

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
