# SPDX-License-Identifier: Apache-2.0
"""The largest elements of an array, without sorting it.

Counting finds the magnitude of the last one chosen, two bits in each reading of the array. A word
of 32 bits says for 32 rows of a column which elements are chosen; running sums of the words' ones
lead from the place in the choice back to the element. Nothing of the array's size is written.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import axes

# Rows to a word.
BITS = 32


def largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest magnitudes: where they are.

    Args:
      x: real, ``(rows, columns)``, rows a multiple of ``BITS``.
      count: how many, up to all.

    Returns:
      Places, u32 ``(count,)``, ascending, which ``at`` reads; and bools like ``x``. Of equal
      magnitudes the first; subnormal ones are equal where a device takes them for zero.
    """
    size, least = jnp.abs(x), _last(x, count)
    above, equal = _words(size > least, size == least)
    # Of those that equal the last one, what stands before a place.
    cut = _cut(equal, count - _ones(above).sum())
    word = lax.iota(jnp.uint32, above.size).reshape(above.shape)
    part = (np.uint32(1) << cut % BITS) - np.uint32(1)
    part = jnp.where(word == cut // BITS, part, 0)
    chosen = above | equal & jnp.where(word < cut // BITS, ~np.uint32(0), part)
    ends = _running(chosen).ravel()
    slots = lax.iota(jnp.int32, count)
    words = jnp.searchsorted(ends, slots, side="right").astype(jnp.int32)
    ones = chosen.ravel()[words]
    bit = _one(ones, slots - (ends[words] - _ones(ones)))
    # Not from the words, which XLA would write out for each of their bits.
    row, column = (lax.broadcasted_iota(jnp.uint32, x.shape, dim) for dim in (0, 1))
    place = (row // BITS * np.uint32(x.shape[1]) + column) * BITS + row % BITS
    mask = (size > least) | ((size == least) & (place < cut))
    return words.astype(jnp.uint32) * BITS + bit, mask


def shape(x: tuple[int, int]) -> tuple[int, int, int]:
    """``(words, columns, BITS)``, of an array that ``at`` indexes by ascending places."""
    return x[0] // BITS, x[1], BITS


def rows(cells: jax.Array) -> jax.Array:
    """An array of that shape as ``(rows, columns)``."""
    return cells.transpose(0, 2, 1).reshape(-1, cells.shape[1])


def at(places: jax.Array, columns: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of places, which word, column and bit."""
    places = places.astype(jnp.uint32)
    words = places // BITS
    return words // columns, words % columns, places % BITS


def _last(x: jax.Array, count: int) -> jax.Array:
    """The magnitude that so many reach and no larger one: its bits, from the first."""
    unsigned = {4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    bits = 8 * x.dtype.itemsize
    # Without their signs, floats are in the order of their bits.
    as_float = lambda found: lax.bitcast_convert_type(found, x.dtype)  # noqa: E731

    def narrower(i: jax.Array, found: jax.Array) -> jax.Array:
        unit = jnp.ones((), unsigned) << (bits - 2 - 2 * i).astype(unsigned)
        more = [found + step * unit for step in (1, 2, 3)]
        # The first bit is the sign.
        fits = [(_reaching(x, as_float(m)) >= count) & (m >> (bits - 1) == 0) for m in more]
        return found + unit * sum(fit.astype(unsigned) for fit in fits)

    zero = axes.unify(jnp.zeros((), unsigned), x)
    return as_float(lax.fori_loop(0, bits // 2, narrower, zero))


def _reaching(x: jax.Array, least: jax.Array) -> jax.Array:
    """How many are of that magnitude or larger."""
    # Not of the absolute values, of which XLA would write an array before the loop.
    reached = (x >= least) | (x <= -least)
    # By row in f32, which is exact there: XLA:CPU adds up integers with a copy of the array.
    return reached.astype(jnp.float32).sum(1).astype(jnp.int32).sum()


def _words(*chosen: jax.Array) -> list[jax.Array]:
    """u32 ``(rows / BITS, columns)`` of bools ``(rows, columns)``, of all in one reading."""
    bit = (np.uint32(1) << np.arange(BITS, dtype=np.uint32)).reshape(BITS, 1)
    bits = [jnp.where(x.reshape(-1, BITS, x.shape[1]), bit, np.uint32(0)) for x in chosen]
    merge = lambda a, b: tuple(map(lax.bitwise_or, a, b))  # noqa: E731
    return lax.reduce(bits, [np.uint32(0)] * len(bits), merge, (1,))


def _ones(words: jax.Array) -> jax.Array:
    return lax.population_count(words).astype(jnp.int32)


def _running(words: jax.Array) -> jax.Array:
    """Ones up to the end of each word, row by row."""
    along = jnp.cumsum(_ones(words), 1)
    rows = along[:, -1]
    return along + (jnp.cumsum(rows) - rows)[:, None]


def _cut(words: jax.Array, count: jax.Array) -> jax.Array:
    """The place of the first one after so many; behind all, if there is none."""
    ends = _running(words)
    word = (ends <= count).sum()
    ones = words.ravel()[word]
    rank = count - (ends.ravel()[word] - _ones(ones))
    return word.astype(jnp.uint32) * BITS + jnp.where(word < words.size, _one(ones, rank), 0)


def _one(words: jax.Array, rank: jax.Array) -> jax.Array:
    """Which bit of a word is its one of this rank; halves, the one of it, and so on."""
    rank, place = rank.astype(jnp.uint32), jnp.zeros_like(words)
    half = BITS // 2
    while half:
        low = lax.population_count(words & np.uint32(2**half - 1))
        up = rank >= low
        rank = jnp.where(up, rank - low, rank)
        words = jnp.where(up, words >> np.uint32(half), words)
        place += jnp.where(up, np.uint32(half), np.uint32(0))
        half //= 2
    return place
