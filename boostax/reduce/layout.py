"""How leaves are cut into one slice per device, and gathered into buckets.

A leaf becomes ``(slices, m)``: padded to a multiple of the number of slices, so that every slice of
a bucket holds the same, statically known part of every leaf. Buckets make the number of collectives
independent of the number of leaves, and bound the memory that is taken at once.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import axes


class Leaf(NamedTuple):
    """What a leaf was before it was cut: ``dim`` is the dimension along which, or ``None``."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    dim: int | None


class Piece(NamedTuple):
    """Columns ``start:stop`` of a leaf; ``leaf`` counts the leaves that go together."""

    leaf: int
    start: int
    stop: int


def kinds(leaves: Sequence[jax.Array], abouts: Sequence[Leaf]) -> list[list[int]]:
    """Indices of the leaves that may share a bucket; those without entries are in none.

    They have one dtype to compute in, vary over the same axes as far as JAX knows (a concatenation
    varies over all of them), and either all come back whole or all stay cut.
    """
    found: dict[Any, list[int]] = {}
    for i, (leaf, about) in enumerate(zip(leaves, abouts, strict=True)):
        if leaf.size:
            kind = (real_dtype(leaf.dtype), axes.varying(leaf), about.dim is None)
            found.setdefault(kind, []).append(i)
    return list(found.values())


def plan(widths: Sequence[int], capacity: float) -> list[list[Piece]]:
    """Buckets of up to ``capacity`` columns, leaves in order.

    A leaf that fits into a bucket is not divided; a larger one is, evenly. With a capacity of 0
    every leaf has a bucket of its own.
    """
    buckets: list[list[Piece]] = []
    room = 0.0
    for leaf, width in enumerate(widths):
        if capacity and width > capacity:
            count = math.ceil(width / capacity)
            ends = [width * i // count for i in range(count + 1)]
            buckets += [[Piece(leaf, *ends[i : i + 2])] for i in range(count)]
            room = 0
            continue
        if width > room:
            buckets.append([])
            room = capacity
        buckets[-1].append(Piece(leaf, 0, width))
        room -= width
    return buckets


def real_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The real dtype, f32 or wider, in which a leaf is reduced; complex ones as pairs of it."""
    return np.dtype(jnp.promote_types(jnp.finfo(dtype).dtype, jnp.float32))


def cut(x: jax.Array, slices: int, dim: int | None, lead: int = 0) -> jax.Array:
    """``(*lead, slices, m)`` from ``(*lead, *shape)``, real and f32 or wider."""
    batch = x.shape[:lead]
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], -1)
    x = x.astype(real_dtype(x.dtype))
    if dim is not None:
        return jnp.moveaxis(x, lead + dim, lead).reshape(*batch, slices, -1)
    flat = x.reshape(*batch, -1)
    padding = -flat.shape[-1] % slices
    if padding:
        flat = jnp.pad(flat, [(0, 0)] * lead + [(0, padding)])
    return flat.reshape(*batch, slices, -1)


def join(parts: jax.Array, leaf: Leaf) -> jax.Array:
    """The whole leaf from all its slices ``(slices, m)``, or a slice of it from one ``(m,)``."""
    shape = leaf.shape
    if leaf.dim is not None:
        slices = 1 if parts.ndim > 1 else _slices(parts.size, leaf)
        moved = (shape[leaf.dim] // slices, *_without(shape, leaf.dim))
        return _as_dtype(parts.reshape(*moved, *_pair(leaf)), leaf, leaf.dim)
    flat = parts.ravel()[: math.prod(shape) * math.prod(_pair(leaf))]
    return _as_dtype(flat.reshape(*shape, *_pair(leaf)), leaf, 0)


def _slices(size: int, leaf: Leaf) -> int:
    return math.prod(leaf.shape) * math.prod(_pair(leaf)) // size


def _pair(leaf: Leaf) -> tuple[int, ...]:
    return (2,) if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else ()


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _as_dtype(x: jax.Array, leaf: Leaf, dim: int) -> jax.Array:
    if _pair(leaf):
        x = jax.lax.complex(x[..., 0], x[..., 1])
    return saturate(jnp.moveaxis(x, 0, dim) if dim else x, leaf.dtype)


def saturate(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """A cast that does not overflow: what is finite stays finite, what is not stays so."""
    if jnp.iscomplexobj(x) or jnp.finfo(dtype).max >= jnp.finfo(x.dtype).max:
        return x.astype(dtype)
    largest = jnp.finfo(dtype).max.astype(x.dtype)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(dtype)
