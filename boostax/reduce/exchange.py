# SPDX-License-Identifier: Apache-2.0
"""Exchange leaves: each replica receives its slice of all leaves, combines slices, and gathers.

An all-to-all and an all-gather together send the bytes of a ring all-reduce. After the all-to-all
each replica has one slice of every replica's gradient, so it can compute any combination of them in
f32 while half precision, or codes, are sent.

A leaf is cut along one of its dimensions, because a flat copy has another tiling on a TPU, and
writing the copy takes many times the cycles of the reduction. Only small leaves are packed
together, which saves messages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import axes, checks, trees
from boostax.reduce import collectives
from boostax.reduce.codec import Arrays, Names
from boostax.reduce.pairwise import Bucket, Rows, grown, leafwise, power_of_two

# Leaves below SMALL bytes are packed, up to TOGETHER bytes. Leaves below SMALL_SLICE bytes in each
# slice are also packed, because 4 KiB is a tile of a TPU.
SMALL = 2**16
TOGETHER = 2**23
# Bytes of a pack between processes on CPUs. With several packs, one is sent while another is
# written.
MESSAGE = 2**20
SMALL_SLICE = 2**12
SLICE_TOGETHER = 2**16
# A leaf is cut in its own shape if padding makes it no larger than this factor; else it is packed.
PADDING = 1.01
# The maximum of columns in a block of a pack.
BLOCK = 256
# The number of lanes of a TPU's vector register; narrower rows are replaced by rows of consecutive
# elements.
LANES = 128
WIDTH = 256


class Alone(NamedTuple):
    """A leaf that is sent in its own shape.

    Attributes:
      leaf: index of the leaf.
      shape: its real shape.
      dim: the dimension that is cut, padded to equal slices.
      slices: number of slices.
      owners: the leaf of every block of columns; this chunk has a single block.
    """

    leaf: int
    shape: tuple[int, ...]
    dim: int
    slices: int
    owners: np.ndarray

    def array(self, leaves: Arrays) -> jax.Array:
        """Return the padded leaf."""
        return padded(leaves[self.leaf], self.dim, self.slices)

    def leaves(self, array: jax.Array) -> dict[int, jax.Array]:
        """Return the leaf in ``array``, by its index."""
        return {self.leaf: lax.slice_in_dim(array, 0, self.shape[self.dim], axis=self.dim)}


class Packed(NamedTuple):
    """A pack of small leaves that are sent together, as an array ``(slices, columns)``.

    Every slice has the same columns of every leaf. Leaves begin at block boundaries, so a sum per
    leaf is computed from sums per block, with few operations for any number of leaves.

    Attributes:
      indices: indices of the leaves.
      shapes: their real shapes.
      slices: number of slices.
      block: columns in a block.
      widths: columns of each leaf, a multiple of ``block``.
    """

    indices: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    slices: int
    block: int
    widths: tuple[int, ...]

    dim = 0

    @property
    def owners(self) -> np.ndarray:
        """Return the leaf of every block of columns."""
        # A new array at each call: JAX would merge equal constants of one array in the program.
        return np.repeat(self.indices, [width // self.block for width in self.widths])

    def array(self, leaves: Arrays) -> jax.Array:
        """Return the packed leaves."""
        pairs = zip(self.indices, self.widths, strict=True)
        parts = [padded(leaves[i].ravel(), 0, self.slices * n).reshape(-1, n) for i, n in pairs]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1)

    def leaves(self, array: jax.Array) -> dict[int, jax.Array]:
        """Return the leaves in ``array``, by index."""
        columns = jnp.split(array, np.cumsum(self.widths)[:-1], 1)
        trios = zip(self.indices, self.shapes, columns, strict=True)
        return {i: x.ravel()[: math.prod(shape)].reshape(shape) for i, shape, x in trios}


Chunk = Alone | Packed
Chunks = Sequence[Chunk]
When = Literal["before", "after"]
Divide = Literal[When, "never"]
# A half dtype; ``None`` sends f32.
Wire = np.dtype | None


def real(x: jax.Array) -> jax.Array:
    """Return ``x`` in f32 or wider, with complex numbers as pairs."""
    return trees.at_least_float32(jnp.stack([x.real, x.imag], -1) if jnp.iscomplexobj(x) else x)


def like(x: jax.Array, leaf: jax.Array) -> jax.Array:
    """Invert ``real``: return ``x`` in the dtype of a leaf, saturating."""
    numbers = lax.complex(x[..., 0], x[..., 1]) if jnp.iscomplexobj(leaf) else x
    return trees.saturate(numbers, leaf.dtype)


def kinds(leaves: Arrays, key: Callable[[jax.Array], object] | None = None) -> list[list[int]]:
    """Return the indices of the leaves of each kind, without the empty leaves.

    Leaves of one kind have the same key. By default they may be packed together: they have the same
    dtype and varying axes (if JAX tracks them), because a concatenation varies over the axes of all
    its parts.
    """
    indices: dict[object, list[int]] = {}
    for i, x in enumerate(leaves):
        if x.size:
            indices.setdefault(key(x) if key else (x.dtype, axes.varying(x)), []).append(i)
    return list(indices.values())


def by_kind(leaves: Arrays, reduce: Callable[[Arrays], Arrays]) -> list[jax.Array]:
    """Reduce the leaves of each kind together, as real arrays; empty leaves are not sent."""
    result = [jnp.zeros(x.shape, x.dtype) for x in leaves]
    for kind in kinds(leaves):
        for i, x in zip(kind, reduce([real(leaves[i]) for i in kind]), strict=True):
            result[i] = like(x, leaves[i])
    return result


def chunks(
    leaves: Arrays, slices: int, bucket_bytes: int | None = None, *, by_leaf: bool = True
) -> list[Chunk]:
    """Choose the leaves that are sent alone, and pack the other leaves.

    Args:
      leaves: real arrays of one kind.
      slices: number of slices of each leaf.
      bucket_bytes: leaves of fewer bytes of f32 are packed, up to this many bytes together.
        ``None`` packs leaves below 64 KiB up to 8 MiB together, or below 4 KiB per slice up to 64
        KiB per slice if that is more; if each leaf would be its own message, ``None`` packs all
        leaves below 1 MiB.
      by_leaf: whether leaves begin at whole blocks.
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
            result.append(Alone(i, x.shape, dims[0], slices, np.array([i])))
        else:
            sizes[i] = 4 * x.size
    for pack in packs(sizes, together):
        shapes = tuple(leaves[i].shape for i in pack)
        columns = [math.ceil(math.prod(shape) / slices) for shape in shapes]
        # The longest block of columns that adds no more than 0.4% of padding.
        most = max(sum(columns) // 256, 64)
        blocks = (BLOCK >> i for i in range(BLOCK.bit_length() if by_leaf else 0))
        block = next((n for n in blocks if sum(-width % n for width in columns) <= most), 1)
        widths = tuple(n + -n % block for n in columns)
        result.append(Packed(tuple(pack), shapes, slices, block, widths))
    return result


def packs(sizes: Mapping[int, int], most: int) -> list[list[int]]:
    """Group neighbouring items of up to ``most`` bytes together; a larger item is alone."""
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

    A group is closed once it has more than ``most`` bytes, so a larger item forms a group by
    itself.
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
    """Cut a dimension into equal parts and return them stacked: ``(slices, *slice)``."""
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
      arrays: the chunks' arrays, or their slices from an earlier exchange.
      names: axes of the replicas.
      wire: a half dtype, or ``None``. In f16 every leaf is sent with its own power of two.
      common: further axes over which a leaf is sharded; its power of two must be equal over these
        axes.
      by_leaf: whether to compute powers of two for every wire dtype.
    """
    near_one = _is_narrow(wire)
    count = axes.size(names)
    exponents = jnp.zeros(1, jnp.int32)
    gathered = jnp.zeros((count, 1), jnp.int32)
    if near_one or by_leaf:
        exponents = _exponents(sent, arrays)
        # The reciprocal is halved at each level of the tree of replicas and must stay normal.
        exponents = exponents if near_one else jnp.minimum(exponents, 100)
        exponents = axes.largest(exponents, common) if common else exponents
        gathered = axes.gather(exponents, names)
    buckets: list[Bucket] = []
    for chunk, x in zip(sent, arrays, strict=True):
        x = _shrunk(x, exponents, chunk.owners) if near_one else x
        # A TPU rounds where the gradient is computed, unless XLA moves the cut before the rounding.
        message = x if wire is None else jax.lax.optimization_barrier(_half(x, wire))
        received = _arrived(collectives.exchange(cut(message, count, chunk.dim), names))
        buckets.append(Bucket([received[i].astype(x.dtype) for i in range(count)], chunk.owners))
    return Rows(buckets, gathered, near_one)


def mean(rows: Rows, divide: Divide) -> list[jax.Array]:
    """Return the mean of every chunk's rows, divided before or after the sum, or the sum."""
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
      levels: groups of axes to gather over, one group after the other; the first group varies
        fastest.
      wire: a half dtype, or ``None``.
      leaves: the leaves that were sent, for dtypes.
    """

    def along(x: jax.Array, dim: int) -> jax.Array:
        for names in levels:
            x = collectives.gather_along(x, names, dim)
        return x

    near_one = bool(sent) and _is_narrow(wire)
    # Each leaf of each slice has its own power of two, which is also sent.
    exponents = _exponents(sent, parts) if near_one else jnp.zeros(1, jnp.int32)
    gathered = along(exponents[None], 0) if near_one else exponents
    arrays: list[jax.Array] = []
    for chunk, x in zip(sent, parts, strict=True):
        part = _shrunk(x, exponents, chunk.owners) if near_one else x
        array = _arrived(along(_half(part, wire), chunk.dim)).astype(x.dtype)
        if near_one:
            slices = cut(array, len(gathered), chunk.dim)
            array = joined(grown(slices, gathered, chunk.owners), chunk.dim)
        arrays.append(array)
    return unwrapped(sent, arrays, leaves)


def unwrapped(sent: Chunks, arrays: Arrays, leaves: Arrays) -> list[jax.Array]:
    """Return the leaves in the arrays of chunks, in the dtypes of ``leaves``."""
    by_index = {i: x for c, a in zip(sent, arrays, strict=True) for i, x in c.leaves(a).items()}
    return [by_index[i].astype(x.dtype) for i, x in enumerate(leaves)]


def _exponents(sent: Chunks, arrays: Arrays) -> jax.Array:
    """Return i32 ``(leaves,)``: the power of two just above the largest element of each leaf."""
    largest: dict[int, jax.Array] = {}
    for chunk, x in zip(sent, arrays, strict=True):
        if isinstance(chunk, Alone):
            largest[chunk.leaf] = jnp.abs(x).max()
            continue
        blocks = jnp.abs(x).reshape(len(x), len(chunk.owners), -1).max((0, 2))
        ends = np.cumsum([width // chunk.block for width in chunk.widths])[:-1]
        largest |= zip(chunk.indices, map(jnp.max, jnp.split(blocks, ends)), strict=True)
    by_leaf = jnp.stack([largest[i] for i in range(len(largest))])
    # Exponents are limited to normal numbers.
    limits = (-100, 126) if by_leaf.dtype == jnp.float32 else (-250, 250)
    return jnp.clip(jnp.frexp(by_leaf)[1], *limits)


def _shrunk(x: jax.Array, exponents: jax.Array, owners: np.ndarray) -> jax.Array:
    """Return ``x / 2**exponents``, with one exponent per leaf."""
    blocks, powers = leafwise(x, 1 / power_of_two(exponents, x.dtype), owners)
    return (blocks * powers).reshape(x.shape)


def _is_narrow(wire: Wire) -> bool:
    """Return whether a wire dtype has a smaller range than f32, as f16 has."""
    return wire is not None and jnp.finfo(wire).maxexp < jnp.finfo(jnp.float32).maxexp


def _half(x: jax.Array, wire: Wire) -> jax.Array:
    """Return ``x`` as it is sent."""
    half = x if wire is None else trees.saturate(x, wire)
    # XLA:CPU would send bf16 as f32; a TPU would not.
    as_integers = wire == jnp.bfloat16 and axes.sent_apart()
    return lax.bitcast_convert_type(half, jnp.uint16) if as_integers else half


def _arrived(x: jax.Array) -> jax.Array:
    """Return the received result of ``_half`` in the wire dtype."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def padded(x: jax.Array, dim: int, multiple: int) -> jax.Array:
    """Append zeros along a dimension, up to a multiple."""
    missing = -x.shape[dim] % multiple
    return jnp.pad(x, [(0, missing * (i == dim)) for i in range(x.ndim)]) if missing else x


class Grid(NamedTuple):
    """The rule by which slices of a leaf are cut into rows.

    Attributes:
      shape: ``(slices, *shape of one)``.
      lines: the number of lines of a slice that are cut into rows: the lines along the leaf's last
        dimension, or a single line of all elements in order.
      parts: the number of rows of each line.
      width: elements of a row.
      multiple: the number of rows is padded to a multiple of this.
    """

    shape: tuple[int, ...]
    lines: int
    parts: int
    width: int
    multiple: int

    @classmethod
    def of(cls, shape: tuple[int, ...], block: int, multiple: int) -> "Grid":
        """Choose rows of up to ``block`` elements, and of up to 1024 if elements are in order."""
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
        """Return the number of a slice's rows."""
        return math.ceil(self.lines * self.parts / self.multiple) * self.multiple

    def rows(self, x: jax.Array) -> jax.Array:
        """Return ``(slices, rows, width)``, padded with zeros."""
        lines = padded(x.reshape(len(x), self.lines, -1), 2, self.parts * self.width)
        return padded(lines.reshape(len(x), -1, self.width), 1, self.multiple)

    def slices(self, rows: jax.Array) -> jax.Array:
        """Invert ``rows`` for any number of slices."""
        length = math.prod(self.shape[1:]) // self.lines
        # Rows of padding after a single line are cut off with the line's own padding.
        x = rows[:, : self.lines * self.parts] if self.lines > 1 else rows
        return x.reshape(len(x), self.lines, -1)[..., :length].reshape(len(x), *self.shape[1:])


def check_bytes(who: str, n: int | None) -> int | None:
    """Return the argument ``bucket_bytes``, a positive number, or ``None`` for the default."""
    return None if n is None else checks.positive_int(who, "bucket_bytes", n, "2**23 is 8 MiB.")
