"""How leaves are cut into one slice per device, and gathered into buckets.

A leaf becomes ``(slices, columns)``: padded, so that every slice of a bucket holds the same,
statically known part of every leaf. Buckets make the number of collectives independent of the
number of leaves, and bound the memory that is taken at once. Within a bucket leaves begin at whole
blocks of columns, so that what is summed by leaf is summed by blocks first, in a few operations
whatever the number of leaves.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import axes, trees

BLOCK = 256


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


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which columns of which leaves travel together.

    Attributes:
      buckets: the pieces in each.
      block: every piece begins and ends at a multiple of so many columns.
    """

    buckets: list[list[Piece]]
    block: int

    def owners(self, bucket: Sequence[Piece]) -> np.ndarray[Any, Any]:
        """Of every block of columns, the leaf it belongs to."""
        widths = [(piece.stop - piece.start) // self.block for piece in bucket]
        return np.repeat([piece.leaf for piece in bucket], widths)


def starts(owners: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The first block of every leaf in a bucket."""
    return np.flatnonzero(np.diff(owners, prepend=-1))


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


def block_size(widths: Sequence[int]) -> int:
    """The longest blocks of up to ``BLOCK`` columns that add no more than 0.4% of padding."""
    spare = max(sum(widths) // 256, 64)
    block = BLOCK
    while block > 1 and sum(-width % block for width in widths) > spare:
        block //= 2
    return block


def plan(widths: Sequence[int], capacity: float, block: int = 1) -> Plan:
    """Buckets of up to ``capacity`` columns, leaves in order.

    A leaf that fits into a bucket is not divided; a larger one is, evenly. With a capacity of 0
    every leaf has a bucket of its own.
    """
    buckets: list[list[Piece]] = []
    room = 0.0
    for leaf, width in enumerate(widths):
        if capacity and width > capacity:
            count = math.ceil(width / capacity)
            ends = [width // block * i // count * block for i in range(count + 1)]
            buckets += [[Piece(leaf, *ends[i : i + 2])] for i in range(count)]
            room = 0
            continue
        if width > room:
            buckets.append([])
            room = capacity
        buckets[-1].append(Piece(leaf, 0, width))
        room -= width
    return Plan(buckets, block)


def real_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The real dtype, f32 or wider, in which a leaf is reduced; complex ones as pairs of it."""
    return np.dtype(jnp.promote_types(jnp.finfo(dtype).dtype, jnp.float32))


def columns(leaf: Leaf, slices: int) -> int:
    """How many columns a leaf has at least: the real numbers in a slice of it."""
    return math.ceil(math.prod(leaf.shape) * math.prod(_pair(leaf)) / slices)


def cut(x: jax.Array, leaf: Leaf, slices: int, block: int = 1) -> jax.Array:
    """``(*lead, slices, columns)`` from ``(*lead, *leaf.shape)``, real and f32 or wider."""
    lead = x.ndim - len(leaf.shape)
    batch = x.shape[:lead]
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], -1)
    x = x.astype(real_dtype(x.dtype))
    if leaf.dim is not None:
        parts = jnp.moveaxis(x, lead + leaf.dim, lead).reshape(*batch, slices, -1)
        return _padded(parts, block)
    flat = _padded(x.reshape(*batch, -1), slices * block)
    return flat.reshape(*batch, slices, -1)


def join(parts: jax.Array, leaf: Leaf, slices: int) -> jax.Array:
    """The whole leaf from all its slices ``(slices, columns)``, or one slice from ``(columns,)``.

    Only a leaf with a ``dim`` has single slices that mean something.
    """
    shape, pair = leaf.shape, _pair(leaf)
    if leaf.dim is None:
        flat = parts.ravel()[: math.prod(shape) * math.prod(pair)]
        return _as_dtype(flat.reshape(*shape, *pair), leaf, 0)
    length = shape[leaf.dim] // (slices if parts.ndim == 1 else 1)
    rest = (*shape[: leaf.dim], *shape[leaf.dim + 1 :])
    parts = parts[..., : columns(leaf, slices)]
    return _as_dtype(parts.reshape(length, *rest, *pair), leaf, leaf.dim)


def packed(cuts: Sequence[jax.Array], bucket: Sequence[Piece]) -> jax.Array:
    """The columns of a bucket side by side."""
    parts = [cuts[piece.leaf][..., piece.start : piece.stop] for piece in bucket]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    padding = -x.shape[-1] % multiple
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]) if padding else x


def _pair(leaf: Leaf) -> tuple[int, ...]:
    return (2,) if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else ()


def _as_dtype(x: jax.Array, leaf: Leaf, dim: int) -> jax.Array:
    if _pair(leaf):
        x = jax.lax.complex(x[..., 0], x[..., 1])
    return trees.saturate(jnp.moveaxis(x, 0, dim) if dim else x, leaf.dtype)
