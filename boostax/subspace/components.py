# SPDX-License-Identifier: Apache-2.0
"""Read the directions of a subspace: the two products in which they are used, and their checks.

Both products go leaf by leaf, so that no leaf loses its sharding and nothing is flattened. Narrow
storage is decoded inside the sum that reads it: XLA fuses the two, and no wide copy exists.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax._core import axes, checks, trees
from boostax.subspace import algebra
from boostax.subspace.basis import Basis

PyTree = Any


def project(
    components: PyTree, tree: PyTree, shard_axes: tuple[str, ...] = (), who: str = "project"
) -> jax.Array:
    """Return coordinates ``(k,)`` of a tree like the params: its products with the components.

    Cost: one read of the components; of sharded leaves ``4k`` bytes are summed over the devices.
    """

    def part(p: jax.Array, g: Any) -> jax.Array:
        wide, rows = algebra.wide(p), algebra.wide(g)[None]
        if p.dtype == wide.dtype:
            return algebra.dot(wide, rows)[:, 0]
        product = wide * rows.conj()
        return product.real.sum(tuple(range(1, product.ndim)))

    parts = jax.tree.leaves(jax.tree.map(part, components, tree))
    return axes.shard_total(parts, shard_axes, who) if parts else jnp.zeros(1)


def lift(components: PyTree, coefficients: jax.Array) -> PyTree:
    """Return the tree like the params, f32 or wider, that has those coordinates.

    Coefficients of ``(k, c)`` give ``c`` sums at once, in leaves of ``(c, *leaf.shape)``. Cost: one
    read of the components; nothing crosses the devices.
    """
    columns = coefficients.reshape(coefficients.shape[0], -1)

    def total(p: jax.Array) -> jax.Array:
        wide = algebra.wide(p)
        if p.dtype == wide.dtype:
            sums = algebra.mix(columns, wide)
        else:
            each = columns.T.astype(wide.dtype)
            sums = jnp.stack([(algebra.along_rows(c, wide) * wide).sum(0) for c in each])
        return sums[0] if coefficients.ndim == 1 else sums

    return jax.tree.map(total, components)


def random_basis(params: PyTree, n_components: int, *, seed: int = 0) -> PyTree:
    """Draw orthonormal components at random: a basis must be better to be of use.

    Args:
      params: a tree of arrays.
      n_components: how many directions, at most the number of params.
      seed: of the draws.

    Returns:
      A tree of ``(n_components, *leaf.shape)``. Cost: twice as many params.

    Raises:
      ValueError, TypeError: ``n_components`` out of range.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> boostax.subspace.random_basis({"w": jnp.zeros((3, 4))}, 2)["w"].shape
      (2, 3, 4)
    """
    who, hint = "random_basis", "It is the dimension of the subspace; 32 to 40 are usual."
    checks.positive_int(who, "n_components", n_components, hint)
    leaves, treedef = jax.tree.flatten(params)
    size = sum(np.size(x) for x in leaves)
    if n_components > size:
        allowed = f"at most the number of params, {size}"
        raise ValueError(checks.message(who, "n_components", allowed, n_components, hint))
    key = jax.random.key(seed)

    def draw(i: int, x: Any) -> jax.Array:
        shape, dtype = (n_components, *np.shape(x)), algebra.compute_dtype(x)
        return jax.random.normal(jax.random.fold_in(key, i), shape, dtype)

    rows = [draw(i, x) for i, x in enumerate(leaves)]
    return algebra.orthonormal(jax.tree.unflatten(treedef, rows))


def opened(basis: Any) -> tuple[PyTree, Any, PyTree]:
    """Return the components, the share of the variance in their span and the mean.

    The last two are ``None`` if nobody said.
    """
    if isinstance(basis, Basis):
        return basis.components, jnp.sum(basis.explained), basis.mean
    return basis, None, None


def kept(who: str, basis: Any, params: PyTree, dtype: Any) -> tuple[PyTree, Any, PyTree]:
    """Return the same of what a caller calls a basis, with a copy of the components as stored.

    Raises:
      ValueError: they do not fit the params.
    """
    if not jax.tree.leaves(params):
        # optax.tree.map_params asks with no params for the structure of the state.
        return params, opened(None if callable(basis) else basis)[1], None
    rows, explained, mean = opened(basis(params) if callable(basis) else basis)
    hidden = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    if any(map(hidden, jax.tree.leaves(params, is_leaf=hidden))):
        cut = lambda p, x: p if hidden(p) else x  # noqa: E731
        rows = jax.tree.map(cut, params, rows, is_leaf=hidden)
        mean = mean and jax.tree.map(cut, params, mean, is_leaf=hidden)
    require_fit(who, rows, params)
    return algebra.stored(rows, dtype), explained, mean


def require_fit(who: str, components: PyTree, params: PyTree) -> None:
    """Refuse components that do not fit the params."""
    hint = "boostax.subspace.pca_basis(snapshots, k) of the same params is one."
    got, wanted = jax.tree.structure(components), jax.tree.structure(params)
    if got != wanted:
        raise ValueError(
            f"{who}: basis must be a tree like the params, got {got} for {wanted}. {hint}"
        )
    k = next((np.shape(rows)[:1] for rows in jax.tree.leaves(components)), ())
    for (name, rows), leaf in zip(trees.named(components), jax.tree.leaves(params), strict=True):
        shape = f"({k[0] if k else 'k'}, {', '.join(map(str, np.shape(leaf)))})"
        if not k or np.shape(rows) != (*k, *np.shape(leaf)):
            raise ValueError(
                f"{who}: basis must have the shape {shape} at {name or 'the root'!r}, got "
                f"{np.shape(rows)}. {hint}"
            )
