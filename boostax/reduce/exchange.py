# SPDX-License-Identifier: Apache-2.0
"""Combine a slice of all leaves on each replica, and gather the results.

An all-to-all and an all-gather together send the bytes of a ring all-reduce. After the all-to-all,
each replica has one slice of every replica's gradient. So the replica can compute any combination
of the slices in f32, although the slices are sent in half precision or as codes.

A leaf is split along one of its dimensions. A flat copy of the leaf would have another tiling on a
TPU, and writing this copy would take many times the cycles of the reduction. Only small leaves are
packed together, which saves messages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import axes, trees
from boostax.reduce import collectives
from boostax.reduce.codec import Arrays, Names
from boostax.reduce.pairwise import Bucket, Rows, grown, leafwise, power_of_two

# Leaves below SMALL bytes are packed, up to TOGETHER bytes in a pack. Leaves below SMALL_SLICE
# bytes in each slice are also packed, because 4 KiB is a tile of a TPU.
SMALL = 2**16
TOGETHER = 2**23
# The size in bytes of a pack that is sent between processes on CPUs. If there are several packs,
# one pack is sent while another pack is written.
MESSAGE = 2**20
SMALL_SLICE = 2**12
SLICE_TOGETHER = 2**16
# A leaf is cut into slices in its own shape if padding enlarges the leaf by at most this factor.
# Other leaves are packed.
PADDING = 1.01
# The columns of packed leaves are divided into blocks of at most this many columns; see ``Chunk``.
BLOCK = 256
# The number of lanes in a TPU's vector register. A leaf with shorter rows is cut into rows of
# consecutive elements.
LANES = 128
WIDTH = 256


class Chunk(NamedTuple):
    """Leaves that are sent together: a single leaf in its own shape, or a pack of small leaves.

    A pack is an array ``(slices, columns)``. Each leaf has the same columns in every slice. Each
    leaf begins with a new block of columns, so the sum over a leaf is the sum of the sums over its
    blocks. A few operations then compute the sums of any number of leaves.

    Attributes:
      indices: indices of the leaves.
      shapes: shapes of the leaves, as real arrays.
      slices: number of slices.
      dim: the dimension that is padded and split into equal slices; 0 in a pack.
      blocks: number of blocks of each leaf; 1 for a leaf in its own shape.
      block: number of columns in a block; ``None`` for a leaf in its own shape.
    """

    indices: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    slices: int
    dim: int
    blocks: tuple[int, ...] = (1,)
    block: int | None = None

    @property
    def owners(self) -> np.ndarray:
        """Return, for every block of columns, the index of its leaf."""
        # Each call returns a new array, because JAX would merge constants that are the same array.
        return np.repeat(self.indices, self.blocks)

    def array(self, leaves: Arrays) -> jax.Array:
        """Return the padded leaf, or the packed leaves."""
        if self.block is None:
            return padded(leaves[self.indices[0]], self.dim, self.slices)
        parts: list[jax.Array] = []
        for i, blocks in zip(self.indices, self.blocks, strict=True):
            width = blocks * self.block
            parts.append(padded(leaves[i].ravel(), 0, self.slices * width).reshape(-1, width))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1)

    def leaves(self, array: jax.Array) -> dict[int, jax.Array]:
        """Return the leaves in ``array``, with the leaves' indices as the keys."""
        if self.block is None:
            length = self.shapes[0][self.dim]
            return {self.indices[0]: lax.slice_in_dim(array, 0, length, axis=self.dim)}
        columns = jnp.split(array, np.cumsum(self.blocks)[:-1] * self.block, 1)
        trios = zip(self.indices, self.shapes, columns, strict=True)
        return {i: x.ravel()[: math.prod(shape)].reshape(shape) for i, shape, x in trios}


Chunks = Sequence[Chunk]
When = Literal["before", "after"]
Divide = Literal[When, "never"]
# A half dtype; ``None`` sends f32.
Wire = np.dtype | None


def real(x: jax.Array) -> jax.Array:
    """Return ``x`` in f32 or wider, with complex numbers as pairs."""
    return trees.at_least_float32(jnp.stack([x.real, x.imag], -1) if jnp.iscomplexobj(x) else x)


def like(x: jax.Array, leaf: jax.Array) -> jax.Array:
    """Invert ``real``: return ``x`` in the dtype of a leaf, with saturation."""
    numbers = lax.complex(x[..., 0], x[..., 1]) if jnp.iscomplexobj(leaf) else x
    return trees.saturate(numbers, leaf.dtype)


def kinds(leaves: Arrays, key: Callable[[jax.Array], object] | None = None) -> list[list[int]]:
    """Return the indices of the leaves of each kind, without the empty leaves.

    Leaves of one kind have the same key. By default, the key is the leaf's dtype and its varying
    axes, if JAX tracks varying axes. Leaves with equal default keys may be packed together. If
    leaves with different varying axes were packed, the pack would vary over the axes of all these
    leaves.
    """
    indices: dict[object, list[int]] = {}
    for i, x in enumerate(leaves):
        if x.size:
            indices.setdefault(key(x) if key else (x.dtype, axes.varying(x)), []).append(i)
    return list(indices.values())


def chunks(
    leaves: Arrays, slices: int, bucket_bytes: int | None = None, *, by_leaf: bool = True
) -> list[Chunk]:
    """Choose the leaves that are sent separately, and pack the other leaves.

    Args:
      leaves: real arrays of one kind.
      slices: number of slices of each leaf.
      bucket_bytes: leaves below this size in bytes of f32 are packed, up to this size in a pack.
        ``None`` packs leaves below ``max(64 KiB, 4 KiB * slices)``, up to ``max(8 MiB, 64 KiB *
        slices)`` in a pack. Between CPU processes, where XLA does not merge messages, ``None``
        packs leaves below 1 MiB, up to 1 MiB in a pack.
      by_leaf: whether each leaf in a pack begins with a new block.
    """
    if bucket_bytes is None and not axes.sent_apart():
        small = max(SMALL, SMALL_SLICE * slices)
        together = max(TOGETHER, SLICE_TOGETHER * slices)
    else:
        small = together = MESSAGE if bucket_bytes is None else bucket_bytes
    result: list[Chunk] = []
    sizes: dict[int, int] = {}
    for i, x in enumerate(leaves):
        # The leaf is cut along the first dimension that needs almost no padding.
        dims = [d for d, n in enumerate(x.shape) if n + -n % slices <= PADDING * n]
        if x.ndim > 1 and 4 * x.size >= small and dims:
            result.append(Chunk((i,), (x.shape,), slices, dims[0]))
        else:
            sizes[i] = 4 * x.size
    for pack in packs(sizes, together):
        shapes = tuple(leaves[i].shape for i in pack)
        columns = [math.ceil(math.prod(shape) / slices) for shape in shapes]
        # The longest block of columns that adds at most 0.4% of padding is chosen.
        most = max(sum(columns) // 256, 64)
        blocks = (BLOCK >> i for i in range(BLOCK.bit_length() if by_leaf else 0))
        block = next((n for n in blocks if sum(-width % n for width in columns) <= most), 1)
        numbers = tuple(math.ceil(width / block) for width in columns)
        result.append(Chunk(tuple(pack), shapes, slices, 0, numbers, block))
    return result


def packs(sizes: Mapping[int, int], most: int) -> list[list[int]]:
    """Group neighbouring items up to ``most`` bytes; a larger item is a group by itself."""
    groups: list[list[int]] = []
    room = -1
    for i, size in sizes.items():
        if size > room:
            groups.append([])
            room = most
        groups[-1].append(i)
        room -= size
    return groups


def fused(sizes: Mapping[int, int], most: int) -> list[list[int]]:
    """Group items from the last to the first, the order in which gradients are computed.

    A group ends with the item that makes the group larger than ``most`` bytes. An item of more than
    ``most`` bytes is a group by itself.
    """
    groups: list[list[int]] = [[]]
    for i in reversed(list(sizes)):
        if sizes[i] > most:
            groups.insert(-1, [i])
            continue
        groups[-1].append(i)
        if sum(sizes[j] for j in groups[-1]) > most:
            groups.append([])
    return [group for group in groups if group]


def cut(x: jax.Array, slices: int, dim: int) -> jax.Array:
    """Split a dimension into equal slices; return a stack ``(slices, *shape of a slice)``."""
    return jnp.moveaxis(x.reshape(*x.shape[:dim], slices, -1, *x.shape[dim + 1 :]), dim, 0)


def joined(x: jax.Array, dim: int) -> jax.Array:
    """Invert ``cut``."""
    return jnp.moveaxis(x, 0, dim).reshape(*x.shape[1 : dim + 1], -1, *x.shape[dim + 2 :])


def exchange(
    sent: Chunks, arrays: Arrays, names: Names, wire: Wire, common: Names = (), by_leaf: bool = True
) -> Rows:
    """Return this replica's slice of every replica's chunks.

    Args:
      sent: the chunks.
      arrays: the chunks' arrays, or slices of the arrays from an earlier exchange.
      names: axes of the replicas.
      wire: a half dtype, or ``None``. In f16, every leaf is divided by its own power of two before
        it is sent.
      common: further axes over which leaves are sharded. The power of two of a leaf must be equal
        over these axes.
      by_leaf: whether to compute powers of two for the leaves with every wire dtype, not only f16.
    """
    near_one = _is_narrow(wire)
    count = axes.size(names)
    exponents = jnp.zeros(1, jnp.int32)
    gathered = jnp.zeros((count, 1), jnp.int32)
    if near_one or by_leaf:
        exponents = _exponents(sent, arrays)
        # The reciprocal of each power of two is halved at each level of the tree of replicas, and
        # must remain a normal number.
        exponents = exponents if near_one else jnp.minimum(exponents, 100)
        exponents = axes.largest(exponents, common) if common else exponents
        gathered = axes.gather(exponents, names)
    buckets: list[Bucket] = []
    for chunk, x in zip(sent, arrays, strict=True):
        x = _shrunk(x, exponents, chunk.owners) if near_one else x
        # The barrier keeps ``cut`` after the rounding, so that a TPU rounds each gradient where the
        # gradient is computed.
        message = x if wire is None else jax.lax.optimization_barrier(_half(x, wire))
        received = _arrived(collectives.exchange(cut(message, count, chunk.dim), names))
        buckets.append(Bucket([received[i].astype(x.dtype) for i in range(count)], chunk.owners))
    return Rows(buckets, gathered, near_one)


def mean(rows: Rows, divide: Divide) -> list[jax.Array]:
    """Return the mean of every chunk's rows, or their sum if ``divide`` is ``"never"``."""
    count = len(rows.exponents)
    units = rows.exponents.max(0)
    result: list[jax.Array] = []
    for bucket in rows.buckets:
        x = jnp.stack(bucket.rows)
        if rows.near_one:
            x = _shrunk(x, units - rows.exponents, bucket.owners)
        x = (x / count if divide == "before" else x).sum(0)
        x = x / count if divide == "after" else x
        result.append(grown(x, units, bucket.owners) if rows.near_one else x)
    return result


def delivered(
    sent: Chunks, parts: Arrays, levels: Sequence[Names], wire: Wire, leaves: Arrays
) -> list[jax.Array]:
    """Gather complete leaves, equal on all replicas, from every replica's slices.

    Args:
      sent: the chunks.
      parts: this replica's slices.
      levels: groups of axes to gather over, one group after the other. If two replicas differ only
        in the indices of the first group, their slices are neighbours in a leaf.
      wire: a half dtype, or ``None``.
      leaves: the leaves that were sent, which have the dtypes of the result.
    """
    near_one = bool(sent) and _is_narrow(wire)
    # Each replica also sends a power of two for its slice of each leaf.
    exponents = _exponents(sent, parts) if near_one else jnp.zeros(1, jnp.int32)
    gathered = exponents[None] if near_one else exponents
    for names in levels if near_one else ():
        gathered = collectives.gather_along(gathered, names, 0)
    arrays: list[jax.Array] = []
    for chunk, x in zip(sent, parts, strict=True):
        array = _half(_shrunk(x, exponents, chunk.owners) if near_one else x, wire)
        for names in levels:
            array = collectives.gather_along(array, names, chunk.dim)
        array = _arrived(array).astype(x.dtype)
        if near_one:
            slices = cut(array, len(gathered), chunk.dim)
            array = joined(grown(slices, gathered, chunk.owners), chunk.dim)
        arrays.append(array)
    by_index = {i: x for c, a in zip(sent, arrays, strict=True) for i, x in c.leaves(a).items()}
    return [by_index[i].astype(x.dtype) for i, x in enumerate(leaves)]


def _exponents(sent: Chunks, arrays: Arrays) -> jax.Array:
    """Return i32 ``(leaves,)``: the exponent of a power of two above the elements of each leaf."""
    largest: dict[int, jax.Array] = {}
    for chunk, x in zip(sent, arrays, strict=True):
        if chunk.block is None:
            largest[chunk.indices[0]] = jnp.abs(x).max()
            continue
        blocks = jnp.abs(x).reshape(len(x), len(chunk.owners), -1).max((0, 2))
        parts = jnp.split(blocks, np.cumsum(chunk.blocks)[:-1])
        largest |= zip(chunk.indices, map(jnp.max, parts), strict=True)
    by_leaf = jnp.stack([largest[i] for i in range(len(largest))])
    # The limits keep the powers of two in the range of normal numbers.
    limits = (-100, 126) if by_leaf.dtype == jnp.float32 else (-250, 250)
    return jnp.clip(jnp.frexp(by_leaf)[1], *limits)


def _shrunk(x: jax.Array, exponents: jax.Array, owners: np.ndarray) -> jax.Array:
    """Return ``x / 2**exponents``, with one exponent per leaf."""
    blocks, powers = leafwise(x, 1 / power_of_two(exponents, x.dtype), owners)
    return (blocks * powers).reshape(x.shape)


def _is_narrow(wire: Wire) -> bool:
    """Return whether a wire dtype, such as f16, has a smaller range than f32."""
    return wire is not None and jnp.finfo(wire).maxexp < jnp.finfo(jnp.float32).maxexp


def _half(x: jax.Array, wire: Wire) -> jax.Array:
    """Return ``x`` in the form in which it is sent."""
    half = x if wire is None else trees.saturate(x, wire)
    # XLA:CPU, unlike a TPU, would send bf16 as f32, so the bits are sent as integers.
    as_integers = wire == jnp.bfloat16 and axes.sent_apart()
    return lax.bitcast_convert_type(half, jnp.uint16) if as_integers else half


def _arrived(x: jax.Array) -> jax.Array:
    """Return the received result of ``_half`` in the wire dtype."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def padded(x: jax.Array, dim: int, multiple: int) -> jax.Array:
    """Append zeros along a dimension, until its length is a multiple of ``multiple``."""
    missing = -x.shape[dim] % multiple
    return jnp.pad(x, [(0, missing * (i == dim)) for i in range(x.ndim)]) if missing else x


class Grid(NamedTuple):
    """The rule by which slices of a leaf are split into rows.

    Attributes:
      shape: ``(slices, *shape of a slice)``.
      lines: the number of lines in a slice. Lines are along the leaf's last dimension, or a single
        line has all elements of the slice in order. Each line is split into rows.
      parts: the number of rows in each line.
      width: the number of elements in a row.
      multiple: padding makes the number of rows a multiple of this number.
    """

    shape: tuple[int, ...]
    lines: int
    parts: int
    width: int
    multiple: int

    @classmethod
    def of(cls, shape: tuple[int, ...], block: int, multiple: int) -> "Grid":
        """Choose rows of up to ``block`` elements, or ``min(block, 1024)`` with a single line."""
        size = math.prod(shape[1:])
        last = shape[-1]
        parts = math.ceil(last / block)
        height = size // last * parts
        if last >= LANES and 16 * (-height % multiple) <= height:
            return cls(shape, size // last, parts, math.ceil(last / parts), multiple)
        most = min(block, 4 * WIDTH)
        width = min(WIDTH, most)
        while 2 * width <= most and size >= 64 * multiple * width:
            width *= 2
        return cls(shape, 1, math.ceil(size / width), width, multiple)

    @property
    def height(self) -> int:
        """Return the number of rows in a slice, with padding."""
        return math.ceil(self.lines * self.parts / self.multiple) * self.multiple

    def rows(self, x: jax.Array) -> jax.Array:
        """Return the rows of all slices, ``(slices, rows, width)``, padded with zeros."""
        lines = padded(x.reshape(len(x), self.lines, -1), 2, self.parts * self.width)
        return padded(lines.reshape(len(x), -1, self.width), 1, self.multiple)

    def slices(self, rows: jax.Array) -> jax.Array:
        """Invert ``rows``, for any number of slices."""
        length = math.prod(self.shape[1:]) // self.lines
        # This slicing removes rows of padding. With a single line, ``[..., :length]`` below removes
        # all padding.
        x = rows[:, : self.lines * self.parts] if self.lines > 1 else rows
        return x.reshape(len(x), self.lines, -1)[..., :length].reshape(len(x), *self.shape[1:])
