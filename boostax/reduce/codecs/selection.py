"""The largest elements of an array, without sorting it.

Counting finds the magnitude of the last one chosen, two bits in each reading of the array. A word of
32 bits says for 32 rows of a column which elements are chosen; running sums of the words' ones lead
from the place in the choice back to the element. Nothing of the array's size is written but words.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import axes

# Rows to a word.
BITS = 32


def largest(x: jax.Array, count: int) -> jax.Array:
    """Places of the largest magnitudes.

    Args:
      x: real, ``(rows, columns)``, rows a multiple of ``BITS``.
      count: how many, up to all.

    Returns:
      u32 ``(count,)``, ascending; ``at`` says where they are. Of equal magnitudes the first.
    """
    unsigned = {4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    # Without their signs, floats are in the order of their bits.
    sizes = lax.bitcast_convert_type(jnp.abs(x), unsigned)
    least = _last(sizes, count)
    above, equal = _words(sizes > least), _words(sizes == least)
    chosen = above | _first(equal, count - _ones(above).sum())
    ends = _running(chosen)
    slots = np.arange(count, dtype=np.int32)
    cells = jnp.searchsorted(ends.ravel(), slots, side="right").astype(jnp.int32)
    words = chosen.ravel()[cells]
    rank = slots - (ends.ravel()[cells] - _ones(words))
    return cells.astype(jnp.uint32) * BITS + _one(words, rank)


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


def _last(sizes: jax.Array, count: int) -> jax.Array:
    """The largest number that so many are not below."""
    bits = 8 * sizes.dtype.itemsize
    zero = axes.unify(jnp.zeros((), sizes.dtype), sizes)

    def narrower(i: jax.Array, found: jax.Array) -> jax.Array:
        unit = jnp.ones((), sizes.dtype) << (bits - 2 - 2 * i).astype(sizes.dtype)
        fits = [_reaching(sizes, found + step * unit) >= count for step in (1, 2, 3)]
        return found + unit * sum(fit.astype(sizes.dtype) for fit in fits)

    return lax.fori_loop(0, bits // 2, narrower, zero)


def _reaching(sizes: jax.Array, least: jax.Array) -> jax.Array:
    """How many are not below."""
    # By row in f32, which is exact there: XLA:CPU adds up integers with a copy of the array.
    return (sizes >= least).astype(jnp.float32).sum(1).astype(jnp.int32).sum()


def _words(chosen: jax.Array) -> jax.Array:
    """u32 ``(rows / BITS, columns)`` of bools ``(rows, columns)``."""
    bit = (np.uint32(1) << np.arange(BITS, dtype=np.uint32)).reshape(BITS, 1)
    bits = jnp.where(chosen.reshape(-1, BITS, chosen.shape[1]), bit, np.uint32(0))
    return lax.reduce(bits, np.uint32(0), lax.bitwise_or, (1,))


def _ones(words: jax.Array) -> jax.Array:
    return lax.population_count(words).astype(jnp.int32)


def _running(words: jax.Array) -> jax.Array:
    """Ones up to the end of each word, row by row."""
    along = jnp.cumsum(_ones(words), 1)
    rows = along[:, -1]
    return along + (jnp.cumsum(rows) - rows)[:, None]


def _first(words: jax.Array, count: jax.Array) -> jax.Array:
    """The words with no more than so many of all their ones."""
    ones = _ones(words)
    left = jnp.clip(count - (_running(words) - ones), 0, ones)
    below = (np.uint32(1) << _one(words, left)) - np.uint32(1)
    return jnp.where(left == ones, words, words & below)


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
