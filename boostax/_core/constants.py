# SPDX-License-Identifier: Apache-2.0
"""Leaves of a model that are no arrays: activations, names, numbers that ``jit`` left alone."""

from typing import Any

import jax
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


def aside(params: PyTree) -> PyTree:
    """Params in which what is no array is no leaf any more.

    A Python number is one of them beside traced arrays alone: as an argument it would be traced,
    and where nothing is traced it is trained, as ``jax.grad`` trains it.
    """
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(params))

    def constant(x: Any) -> bool:
        return not hasattr(x, "dtype") and (traced or not isinstance(x, (int, float, complex)))

    return jax.tree.map(lambda x: _Aside(x) if constant(x) else x, params)


def restored(params: PyTree) -> PyTree:
    """The params as they were, for the model."""
    return _each(params, lambda node: node.leaf)


def dropped(tree: PyTree) -> PyTree:
    """``None`` in the place of what is aside: it has no gradient."""
    return _each(tree, lambda node: None)


def arrays_alone(params: PyTree) -> PyTree:
    """``None`` in the place of what has no shape, as ``equinox.filter`` leaves it."""
    return jax.tree.map(lambda x: x if hasattr(x, "shape") else None, params)


def _each(tree: PyTree, fn: Any) -> PyTree:
    is_aside = lambda node: isinstance(node, _Aside)  # noqa: E731
    return jax.tree.map(lambda x: fn(x) if is_aside(x) else x, tree, is_leaf=is_aside)
