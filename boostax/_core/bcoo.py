# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients: rows of an embedding, or single elements, as a ``BCOO`` of JAX's.

Its data are a gradient, its indices are not: data alone are scaled and judged. A dense array is
made where one is first needed: in the sum of a window, in the mean over replicas, or directly
before an optimizer. There rows of the same index are added, and those out of range dropped.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from boostax._core import axes

PyTree = Any


def is_sparse(node: Any) -> bool:
    """A leaf test for ``jax.tree`` functions: whether a node is one of JAX's sparse arrays."""
    # Whoever has one has imported it.
    module = sys.modules.get("jax.experimental.sparse")
    return module is not None and isinstance(node, module.JAXSparse)


def require(tree: PyTree, who: str, *, what: str = "gradients", taken: bool = False) -> None:
    """Refuse sparse leaves; if they are ``taken``, those that are no ``BCOO`` of single rows."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse):
        single = taken and type(x).__name__ == "BCOO" and x.n_batch == 0 and x.n_sparse > 0
        if not is_sparse(x) or single:
            continue
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "the root"
        allowed = "dense arrays or BCOO with n_batch=0" if taken else "dense arrays"
        hint = "Convert with .todense()"
        if what == "gradients" and not taken:
            hint += ", or put a loss scaler, accumulate or all_reduce before it: these take BCOO"
        raise TypeError(
            f"{who}: {what} must be {allowed}, got {type(x).__name__} at {name!r}. {hint}."
        )


def types(tree: PyTree) -> PyTree:
    """The tree with the type of the dense array in the place of each sparse one."""
    return _map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def dense(tree: PyTree) -> PyTree:
    """The tree with dense arrays."""
    # Not x.todense(), which does not say over which axes its result varies.
    return _map(lambda x: added(jnp.zeros(x.shape, x.dtype), x.data, x.indices), tree)


def map_data(fn: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    """``fn`` of each array, of a sparse one of its data alone."""

    def of_data(x: Any) -> Any:
        (data, *indices), structure = jax.tree.flatten(x)
        return structure.unflatten([fn(data), *indices])

    return jax.tree.map(lambda x: of_data(x) if is_sparse(x) else fn(x), tree, is_leaf=is_sparse)


def added(buffer: jax.Array, data: jax.Array, indices: jax.Array) -> jax.Array:
    """``buffer`` plus what a sparse array holds: a scatter, which XLA:CPU writes in place."""
    buffer = axes.to_varying(buffer, axes.varying(data) | axes.varying(indices))
    return buffer.at[tuple(indices.T)].add(data)


def coalesced(data: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As many rows and their indices: those of one index added, the others that are left zero."""
    each, place = jnp.unique(indices, axis=0, return_inverse=True, size=len(data))
    return jnp.zeros_like(data).at[place.reshape(-1)].add(data), each


def _map(fn: Callable[[Any], Any], tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: fn(x) if is_sparse(x) else x, tree, is_leaf=is_sparse)
