# SPDX-License-Identifier: Apache-2.0
"""Collectives of reductions: slices that move between replicas, also under ``jax.vmap``."""

import jax
from jax import lax

from boostax._core import axes


def exchange(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Exchange rows by an all-to-all: replica ``k`` receives row ``k`` of each replica, in order.

    ``x`` and the result have one row per replica.
    """
    if not axes.vmapped(names):
        if len(x) == 2:
            # A TPU's all-to-all would send both rows, although one row remains on the replica.
            other = 1 - axes.index(names)
            row = lax.ppermute(lax.dynamic_slice_in_dim(x, other, 1), names, [(0, 1), (1, 0)])
            return lax.dynamic_update_slice_in_dim(x, row, other, 0)
        return lax.all_to_all(x, names, 0, 0, tiled=True)
    # vmap has no rule for several axes at once, so rows are exchanged along one axis at a time.
    blocks = x.reshape(*(lax.axis_size(name) for name in names), *x.shape[1:])
    for dim, name in enumerate(names):
        blocks = lax.all_to_all(blocks, name, dim, dim, tiled=True)
    return blocks.reshape(x.shape)


def gather_along(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """Join the slices of all replicas along a dimension; the type of the result is unvarying."""
    if not axes.vmapped(names):
        return lax.all_gather(x, names, axis=dim, tiled=True, to="invarying")
    return axes.gather(x, names, dim).reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def scatter(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """Sum over the replicas, and return this replica's slice of the sum."""
    # vmap has no rule for several axes at once, so the sum is over one axis at a time.
    for over in names if axes.vmapped(names) else (names,):
        x = lax.psum_scatter(x, over, scatter_dimension=dim, tiled=True)
    return x


def ring(x: jax.Array, name: str) -> jax.Array:
    """Sum rows ``[replicas, ...]`` over the replicas; return the row of this replica.

    In each of ``n - 1`` steps, every replica sends the partial sum of a row to the next replica.
    All steps together send half the bytes of an all-reduce. ``lax.psum_scatter`` may send as many
    bytes as an all-reduce, depending on the backend.
    """
    count = lax.axis_size(name)
    replica = lax.axis_index(name)
    to_next = [(k, (k + 1) % count) for k in range(count)]

    def row(distance: jax.typing.ArrayLike) -> jax.Array:
        return lax.dynamic_index_in_dim(x, (replica - distance) % count, keepdims=False)

    with jax.named_scope("ring_reduce_scatter"):
        return lax.fori_loop(
            1, count, lambda i, total: lax.ppermute(total, name, to_next) + row(i + 1), row(1)
        )
