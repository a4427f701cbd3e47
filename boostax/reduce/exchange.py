# SPDX-License-Identifier: Apache-2.0
"""How leaves travel: each replica receives its slice of everyone's, combines, and gathers the rest.

An all-to-all and an all-gather together send the bytes of a ring all-reduce, and between the two
each replica holds one slice of every replica's gradient, so that any sum of them can be computed in
f32 while half precision, or codes, travel.

A leaf is cut along a dimension of its own: to flatten it is to write it anew in another tiling on a
TPU, which takes many times the cycles of the reduction. Only small leaves are packed together,
which saves messages.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import axes, checks, trees
from boostax.reduce.codec import Arrays, Names
from boostax.reduce.pairwise import Bucket, Owners, Rows, exponent_of, grown, leafwise, power_of_two

# Leaves of fewer bytes are packed, up to so many together; and of fewer in each slice, 4 KiB being
# a tile of a TPU.
SMALL, TOGETHER = 2**16, 2**23
SMALL_SLICE, SLICE_TOGETHER = 2**12, 2**16
# What a leaf may grow by to be cut evenly in its own shape; else it is cut flat.
PADDING = 1.01
# The longest block of columns of a pack.
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Alone:
    """A leaf that travels in its own shape.

    Attributes:
      index: which of the leaves.
      shape: its shape, real.
      dim: the dimension that is cut, padded to equal slices.
      slices: their number.
    """

    index: int
    shape: tuple[int, ...]
    dim: int
    slices: int

    @property
    def owners(self) -> Owners:
        """Of every block, the leaf that it belongs to: there is one block."""
        return np.array([self.index])

    def array(self, leaves: Arrays) -> jax.Array:
        """What is cut."""
        return padded(leaves[self.index], self.dim, self.slices)

    def leaves(self, array: jax.Array) -> dict[int, jax.Array]:
        """The leaf again, by its index."""
        return {self.index: lax.slice_in_dim(array, 0, self.shape[self.dim], axis=self.dim)}


@dataclasses.dataclass(frozen=True)
class Packed:
    """Small leaves that travel together, as ``(slices, columns)``.

    Every slice holds the same columns of every leaf. Leaves begin at whole blocks of columns, so
    that what is summed by leaf is summed by blocks first, in a few operations however many leaves
    there are.

    Attributes:
      indices: which of the leaves.
      shapes: their shapes, real.
      slices: their number.
      block: columns in a block.
      widths: columns of each leaf, whole blocks.
    """

    indices: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    slices: int
    block: int
    widths: tuple[int, ...]

    dim = 0

    @property
    def owners(self) -> Owners:
        """Of every block of columns, the leaf that it belongs to."""
        return np.repeat(self.indices, [width // self.block for width in self.widths])

    def array(self, leaves: Arrays) -> jax.Array:
        """What is cut."""
        parts = [
            padded(leaves[i].ravel(), 0, self.slices * width).reshape(self.slices, width)
            for i, width in zip(self.indices, self.widths, strict=True)
        ]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1)

    def leaves(self, array: jax.Array) -> dict[int, jax.Array]:
        """The leaves again, by index."""
        columns = jnp.split(array, np.cumsum(self.widths)[:-1], 1)
        each = zip(self.indices, self.shapes, columns, strict=True)
        return {i: x.ravel()[: math.prod(shape)].reshape(shape) for i, shape, x in each}


Parcel = Alone | Packed
Divide = Literal["before", "after", "never"]
# A half dtype; ``None`` sends f32.
Wire = np.dtype[Any] | None


def real(x: jax.Array) -> jax.Array:
    """In f32 or wider; complex numbers as pairs."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], -1)
    return trees.at_least_float32(x)


def like(x: jax.Array, leaf: jax.Array) -> jax.Array:
    """Back in the dtype of a leaf, saturating."""
    whole = lax.complex(x[..., 0], x[..., 1]) if jnp.iscomplexobj(leaf) else x
    return trees.saturate(whole, leaf.dtype)


def alike(x: jax.Array) -> Any:
    """Return what leaves have in common that may be packed together.

    They have one dtype, and vary over the same axes as far as JAX knows: a concatenation varies
    over all of them.
    """
    return x.dtype, axes.varying(x)


def kinds(leaves: Arrays, key: Callable[[jax.Array], Any] = alike) -> list[list[int]]:
    """Return the indices of the leaves of each kind; those without elements are in none."""
    found: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        if x.size:
            found.setdefault(key(x), []).append(i)
    return list(found.values())


def by_kind(
    leaves: Arrays, reduce: Callable[[list[jax.Array]], list[jax.Array]]
) -> list[jax.Array]:
    """The leaves reduced, real ones of a kind together; those without elements are not sent."""
    result = [jnp.zeros(x.shape, x.dtype) for x in leaves]
    for kind in kinds(leaves):
        for i, x in zip(kind, reduce([real(leaves[i]) for i in kind]), strict=True):
            result[i] = like(x, leaves[i])
    return result


def parcels(
    leaves: Arrays, slices: int, bucket_bytes: int | None = None, *, by_leaf: bool = True
) -> list[Parcel]:
    """What travels together, of leaves of one kind.

    Args:
      leaves: real arrays.
      slices: into how many each is cut.
      bucket_bytes: leaves of fewer bytes of f32 are packed, up to so many together; ``None`` for
        those of less than 64 KiB, up to 8 MiB, or 4 KiB and 64 KiB in a slice if that is more.
      by_leaf: whether leaves begin at whole blocks.
    """
    small, together = bucket_bytes, bucket_bytes
    if small is None or together is None:
        small = max(SMALL, SMALL_SLICE * slices)
        together = max(TOGETHER, SLICE_TOGETHER * slices)
    result: list[Parcel] = []
    rest: dict[int, int] = {}
    for i, x in enumerate(leaves):
        # Cut along the first dimension that needs next to no padding.
        fits = [d for d, n in enumerate(x.shape) if n + -n % slices <= PADDING * n]
        if x.ndim > 1 and 4 * x.size >= small and fits:
            result.append(Alone(i, x.shape, fits[0], slices))
        else:
            rest[i] = 4 * x.size
    for pack in packs(rest, together):
        shapes = tuple(leaves[i].shape for i in pack)
        columns = [math.ceil(math.prod(shape) / slices) for shape in shapes]
        block = block_size(columns) if by_leaf else 1
        widths = tuple(n + -n % block for n in columns)
        result.append(Packed(tuple(pack), shapes, slices, block, widths))
    return result


def packs(sizes: Mapping[int, int], most: int) -> list[list[int]]:
    """Which neighbours travel together: up to so many bytes, or a larger one alone."""
    found: list[list[int]] = []
    room = -1
    for i, size in sizes.items():
        if size > room:
            found.append([])
            room = most
        found[-1].append(i)
        room -= size
    return found


def fused(sizes: dict[int, int], most: int) -> list[list[int]]:
    """Which of the items stand together, from the last to the first, as gradients come.

    They are added until they are more than ``most``; an item that is larger stands alone.
    """
    found: list[list[int]] = []
    small: list[int] = []
    for i in reversed(sizes):
        if sizes[i] > most:
            found.append([i])
            continue
        small.append(i)
        if sum(sizes[j] for j in small) > most:
            found.append(small)
            small = []
    return [*found, small] if small else found


def block_size(widths: Sequence[int]) -> int:
    """The longest blocks of columns that add no more than 0.4% of padding."""
    spare = max(sum(widths) // 256, 64)
    fits = lambda block: sum(-width % block for width in widths) <= spare  # noqa: E731
    return next(filter(fits, (BLOCK >> i for i in range(BLOCK.bit_length()))))


def cut(x: jax.Array, slices: int, dim: int) -> jax.Array:
    """``(slices, *slice)``: a dimension cut into equal parts, which lead."""
    shape = (*x.shape[:dim], slices, x.shape[dim] // slices, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0)


def joined(x: jax.Array, dim: int) -> jax.Array:
    """The inverse of ``cut``."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def exchange(
    sent: Sequence[Parcel],
    arrays: Arrays,
    names: Names,
    wire: Wire = None,
    common: Sequence[Names] = (),
    by_leaf: bool = True,
) -> Rows:
    """This replica's slice of what everyone has.

    Args:
      sent: what travels together.
      arrays: that, whole or the slices of an earlier exchange.
      names: axes of the replicas.
      wire: a half dtype, or ``None``. In f16 every leaf goes with a power of two of its own.
      common: further axes over which a leaf is spread: its power of two is the same on all.
      by_leaf: whether the powers of two are asked for on any wire.
    """
    near_one, count = _is_narrow(wire), axes.size(names)
    exponents, each = jnp.zeros(1, jnp.int32), jnp.zeros((count, 1), jnp.int32)
    if near_one or by_leaf:
        exponents = _exponents(sent, arrays)
        if not near_one:
            # A reciprocal that is halved at each level of a tree of replicas is to stay normal.
            exponents = jnp.minimum(exponents, 100)
        for over in filter(None, common):
            exponents = axes.largest(exponents, over)
        each = axes.gather(exponents, names)
    buckets: list[Bucket] = []
    for parcel, x in zip(sent, arrays, strict=True):
        x = _shrunk(x, exponents, parcel.owners) if near_one else x
        received = axes.exchange(cut(_half(x, wire), count, parcel.dim), names)
        rows = [received[i].astype(x.dtype) for i in range(count)]
        buckets.append(Bucket(rows, parcel.owners))
    return Rows(buckets, each, near_one)


def mean(rows: Rows, divide: Divide) -> list[jax.Array]:
    """The mean of the rows of every parcel, divided before the sum or after it; or the sum."""
    count = len(rows.exponents)
    units = rows.exponents.max(0)
    result: list[jax.Array] = []
    for bucket in rows.buckets:
        x = jnp.stack(bucket.rows)
        if rows.near_one:
            x = _shrunk(x, units - rows.exponents, bucket.owners)
        x = x / count if divide == "before" else x
        x = x.sum(0)
        x = x / count if divide == "after" else x
        result.append(grown(x, units, bucket.owners) if rows.near_one else x)
    return result


def delivered(
    sent: Sequence[Parcel], parts: Arrays, levels: Sequence[Names], wire: Wire, leaves: Arrays
) -> list[jax.Array]:
    """The leaves again, whole and equal everywhere, from every replica's slice of each.

    Args:
      sent: what travels together.
      parts: this replica's slices.
      levels: axes to gather over, one group after the other; the first varies fastest.
      wire: a half dtype, or ``None``.
      leaves: what was sent; those without elements are handed on.
    """

    def along(x: jax.Array, dim: int) -> jax.Array:
        for names in levels:
            x = axes.gather_along(x, names, dim)
        return x

    near_one = bool(sent) and _is_narrow(wire)
    # Each leaf of each slice has a power of two of its own, which travels too.
    exponents = _exponents(sent, parts) if near_one else jnp.zeros(1, jnp.int32)
    each = along(exponents[None], 0) if near_one else exponents
    arrays: list[jax.Array] = []
    for parcel, x in zip(sent, parts, strict=True):
        own = _shrunk(x, exponents, parcel.owners) if near_one else x
        whole = along(_half(own, wire), parcel.dim).astype(x.dtype)
        if near_one:
            slices = cut(whole, len(each), parcel.dim)
            whole = joined(grown(slices, each, parcel.owners), parcel.dim)
        arrays.append(whole)
    return unwrapped(sent, arrays, leaves)


def unwrapped(sent: Sequence[Parcel], arrays: Arrays, leaves: Arrays) -> list[jax.Array]:
    """Return the leaves that are in the arrays of parcels, in the dtypes of ``leaves``."""
    found: dict[int, jax.Array] = {}
    for parcel, array in zip(sent, arrays, strict=True):
        found |= parcel.leaves(array)
    return [found[i].astype(x.dtype) for i, x in enumerate(leaves)]


def _exponents(sent: Sequence[Parcel], arrays: Arrays) -> jax.Array:
    """i32 ``(leaves,)``: the power of two just above the largest element of each."""
    largest: dict[int, jax.Array] = {}
    for parcel, x in zip(sent, arrays, strict=True):
        if len(parcel.owners) == 1:
            largest[int(parcel.owners[0])] = jnp.abs(x).max()
            continue
        blocks = jnp.abs(x).reshape(len(x), len(parcel.owners), -1).max((0, 2))
        ends = np.flatnonzero(np.diff(parcel.owners, append=-1)) + 1
        for end, part in zip(ends, jnp.split(blocks, ends[:-1]), strict=True):
            largest[int(parcel.owners[end - 1])] = part.max()
    none = jnp.zeros((), arrays[0].dtype)
    return exponent_of(jnp.stack([largest.get(i, none) for i in range(max(largest) + 1)]))


def _shrunk(x: jax.Array, exponents: jax.Array, owners: Owners) -> jax.Array:
    """``x / 2**exponents`` by leaf."""
    blocks, powers = leafwise(x, 1 / power_of_two(exponents, x.dtype), owners)
    return (blocks * powers).reshape(x.shape)


def _is_narrow(wire: Wire) -> bool:
    """Whether it holds fewer magnitudes than f32, as f16 does and bf16 does not."""
    return wire is not None and jnp.finfo(wire).maxexp < jnp.finfo(jnp.float32).maxexp


def _half(x: jax.Array, wire: Wire) -> jax.Array:
    return x if wire is None else trees.saturate(x, wire)


def padded(x: jax.Array, dim: int, multiple: int) -> jax.Array:
    """Append zeros along a dimension, up to a multiple."""
    missing = -x.shape[dim] % multiple
    return jnp.pad(x, [(0, missing * (i == dim)) for i in range(x.ndim)]) if missing else x


def check_bytes(who: str, bucket_bytes: Any) -> int | None:
    """A positive number of bytes, or ``None`` for the default."""
    if bucket_bytes is None:
        return None
    return checks.positive_int(who, "bucket_bytes", bucket_bytes, "2**23 is 8 MiB.")
