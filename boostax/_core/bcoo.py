# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients: JAX's ``BCOO`` of rows of an embedding, or of single elements.

``describe`` converts sparse gradients to dense arrays before a transformation of boostax gets them.
The conversion adds rows with the same index, and drops rows out of range.
"""

import sys

import jax
import jax.numpy as jnp

from boostax._core import axes, checks, trees
from boostax._core.types import PyTree

# A program that has a sparse array has imported this module, so boostax need not import it.
MODULE = "jax.experimental.sparse"
DENSE = "Convert gradients by .todense()."


def is_sparse(node: object) -> bool:
    return MODULE in sys.modules and isinstance(node, sys.modules[MODULE].JAXSparse)


def dense(tree: PyTree, who: str) -> PyTree:
    """Return the tree with a dense array in place of each ``BCOO`` of rows or elements."""

    def on_leaf(path: jax.tree_util.KeyPath, x: PyTree) -> PyTree:
        if not is_sparse(x):
            return x
        got = type(x).__name__, trees.path_name(path)
        valid = got[0] == "BCOO" and not x.n_batch and x.n_sparse > 0
        checks.require_type(valid, who, "gradients", got, "dense or BCOO with n_batch=0", DENSE)
        # ``x.todense()`` would lose the varying axes in the type of ``x``. Rows with the same index
        # are added in f32 or wider, so that their sum is rounded only once.
        zeros = jnp.zeros(x.shape, trees.wide_dtype(x))
        zeros = axes.to_varying(zeros, axes.varying(x.data) | axes.varying(x.indices))
        return zeros.at[tuple(x.indices.T)].add(x.data).astype(x.dtype)

    return jax.tree.map_with_path(on_leaf, tree, is_leaf=is_sparse)
