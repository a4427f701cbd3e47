# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients: the rows of an embedding, or single elements, as a ``BCOO`` of JAX's.

``describe`` makes them dense before any transformation of boostax sees them. Rows of the same index
are added, those out of range dropped.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp

from boostax._core import axes

PyTree = Any


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
            _refuse(who, "gradients", "dense arrays or BCOO with n_batch=0", path, x)
        # Not x.todense(), which does not say over which axes its result varies. In f32 or wider:
        # rows of one index are rounded once, with their sum.
        zeros = jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
        zeros = axes.to_varying(zeros, axes.varying(x.data) | axes.varying(x.indices))
        return zeros.at[tuple(x.indices.T)].add(x.data).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(on_leaf, tree, is_leaf=_is_sparse)


def require(tree: PyTree, who: str, what: str = "gradients") -> None:
    """Refuse sparse leaves."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_sparse):
        if _is_sparse(x):
            _refuse(who, what, "dense arrays", path, x)


def _refuse(who: str, what: str, allowed: str, path: Any, x: Any) -> None:
    name = jax.tree_util.keystr(path, simple=True, separator="/") or "the root"
    raise TypeError(
        f"{who}: {what} must be {allowed}, got {type(x).__name__} at {name!r}. Convert with "
        ".todense()."
    )
