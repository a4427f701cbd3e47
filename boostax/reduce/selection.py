# SPDX-License-Identifier: Apache-2.0
"""The largest elements of an array, without a sort.

The smallest chosen magnitude is computed by counting larger elements: each read of the array
determines two bits of this magnitude. The 32 bits of a word show which elements of a column are
chosen in 32 rows. A running sum of the number of 1-bits in each word gives the position of the k-th
chosen element. No array of the input's size is written.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import axes

# The number of rows whose bools are packed into one word.
BITS = 32


def largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the positions of the largest magnitudes.

    Args:
      x: real, ``(rows, columns)``; the number of rows is a multiple of ``BITS``.
      count: number of elements to choose, at most the number of all elements.

    Returns:
      Positions, u32 ``(count,)``, ascending, in the form that ``at`` accepts; and bools like ``x``,
      True for chosen elements. Among equal magnitudes, the first elements are chosen. A device that
      flushes subnormal numbers to zero treats subnormal numbers as equal.
    """
    size = jnp.abs(x)
    least = _last(x, count)
    # Bools ``(rows, columns)`` are packed into words ``(rows / BITS, columns)`` in one read.
    bit = (np.uint32(1) << np.arange(BITS, dtype=np.uint32)).reshape(BITS, 1)
    masks = (mask.reshape(-1, BITS, x.shape[1]) for mask in (size > least, size == least))
    terms = [jnp.where(mask, bit, np.uint32(0)) for mask in masks]
    zeros = [np.uint32(0)] * len(terms)
    above, equal = lax.reduce(terms, zeros, lambda a, b: tuple(map(lax.bitwise_or, a, b)), (1,))
    # Elements of magnitude ``least`` are chosen only before this position.
    cut = _cut(equal, count - _ones(above).sum())
    word = lax.iota(jnp.uint32, above.size).reshape(above.shape)
    part = jnp.where(word == cut // BITS, (np.uint32(1) << cut % BITS) - np.uint32(1), 0)
    chosen = above | equal & jnp.where(word < cut // BITS, ~np.uint32(0), part)
    ends = _running(chosen).ravel()
    slots = lax.iota(jnp.int32, count)
    words = jnp.searchsorted(ends, slots, side="right").astype(jnp.int32)
    ones = chosen.ravel()[words]
    bits = _one(ones, slots - (ends[words] - _ones(ones)))
    # If the mask were computed from the words, XLA would write the words once for each bit.
    row, column = (lax.broadcasted_iota(jnp.uint32, x.shape, dim) for dim in (0, 1))
    position = (row // BITS * np.uint32(x.shape[1]) + column) * BITS + row % BITS
    mask = (size > least) | ((size == least) & (position < cut))
    return words.astype(jnp.uint32) * BITS + bits, mask


def at(positions: jax.Array, columns: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return indices of word, column and bit, which are ascending if positions are ascending."""
    positions = positions.astype(jnp.uint32)
    words = positions // BITS
    return words // columns, words % columns, positions % BITS


def _last(x: jax.Array, count: int) -> jax.Array:
    """Return the largest magnitude that ``count`` elements reach; compute two bits at a time."""
    unsigned = {4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    bits = 8 * x.dtype.itemsize

    def narrower(i: jax.Array, word: jax.Array) -> jax.Array:
        unit = jnp.ones((), unsigned) << (bits - 2 - 2 * i).astype(unsigned)
        larger: list[jax.Array] = []
        for y in [word + step * unit for step in (1, 2, 3)]:
            # Nonnegative floats are ordered like their bits.
            least = lax.bitcast_convert_type(y, x.dtype)
            # There is no ``abs``, because XLA would write an array of absolute values before the
            # loop.
            reached = (x >= least) | (x <= -least)
            # Each row is summed in f32, because XLA:CPU would copy the array to sum integers. The
            # sum is exact, because the count of a row is small.
            number = reached.astype(jnp.float32).sum(1).astype(jnp.int32).sum()
            # A word with the sign bit is not a magnitude.
            larger.append((number >= count) & (y >> (bits - 1) == 0))
        return word + unit * sum(is_reached.astype(unsigned) for is_reached in larger)

    word = lax.fori_loop(0, bits // 2, narrower, axes.unify(jnp.zeros((), unsigned), x))
    return lax.bitcast_convert_type(word, x.dtype)


def _ones(words: jax.Array) -> jax.Array:
    return lax.population_count(words).astype(jnp.int32)


def _running(words: jax.Array) -> jax.Array:
    """Return, for each word in row-major order, the number of 1-bits up to the end of the word."""
    along = jnp.cumsum(_ones(words), 1)
    rows = along[:, -1]
    return along + (jnp.cumsum(rows) - rows)[:, None]


def _cut(words: jax.Array, count: jax.Array) -> jax.Array:
    """Return the position of the first 1-bit after ``count`` 1-bits; the end if there is none."""
    ends = _running(words)
    word = (ends <= count).sum()
    ones = words.ravel()[word]
    rank = count - (ends.ravel()[word] - _ones(ones))
    return word.astype(jnp.uint32) * BITS + jnp.where(word < words.size, _one(ones, rank), 0)


def _one(words: jax.Array, rank: jax.Array) -> jax.Array:
    """Return the position of the 1-bit number ``rank`` (from 0) in each word, by bisection."""
    rank = rank.astype(jnp.uint32)
    position = jnp.zeros_like(words)
    half = BITS // 2
    while half:
        low = lax.population_count(words & np.uint32(2**half - 1))
        up = rank >= low
        rank = jnp.where(up, rank - low, rank)
        words = jnp.where(up, words >> np.uint32(half), words)
        position += jnp.where(up, np.uint32(half), np.uint32(0))
        half //= 2
    return position
