# SPDX-License-Identifier: Apache-2.0
"""Arrays in fewer bits: bf16, and 8 bits by blocks, linear or logarithmic; rounded at random.

A number between two neighbours of a format is rounded to one of them, with the probabilities that
keep its mean. So many small changes add up and are not lost. The noise is a hash of the element's
index and of a seed. It needs no state and no array of random bits, and is the same on every mesh.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import trees

# The least number of elements that share a scale.
BLOCK = 128
_HALF = 0x8000
_MOST = float(jnp.finfo(jnp.float32).max)
# An octave has six levels of log8; these are their ratios to the first.
_SIXTHS = tuple(2.0 ** (i / 6) for i in range(6))
# The ratio of two levels that are 128 levels apart, such as those of the codes 127 and 255.
_HALF_DOWN = 2.0 ** (-128 / 6)


def fold(seed: jax.Array | int, number: jax.Array | int) -> jax.Array:
    """Make a u32 seed from a seed and a number, such as a count of steps."""
    return _hash(_u32(seed) * jnp.uint32(0x9E3779B9) + _u32(number))


def seed_of(steps: jax.Array, path: tuple[Any, ...]) -> jax.Array:
    """Return the seed of a leaf in a step, by the leaf's path, which freezing does not change."""
    return fold(zlib.crc32(trees.path_name(path).encode()), steps)


def _u32(number: jax.Array | int) -> jax.Array:
    return jnp.uint32(number) if isinstance(number, int) else number.astype(jnp.uint32)


def bits(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Return u32 noise: a hash of each element's index and the seed."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        # Indices are taken modulo 2**32, so the noise of a larger array repeats.
        along = lax.broadcasted_iota(jnp.uint32, shape, dim)
        index, stride = index + along * jnp.uint32(stride % 2**32), stride * shape[dim]
    return _hash(index ^ seed)


def _hash(x: jax.Array) -> jax.Array:
    """Mix the bits so that each depends on all bits of ``x`` (C. Wellons' lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _uniform(shape: tuple[int, ...], seed: jax.Array | None) -> jax.Array:
    """Draw f32 from [0, 1), in steps of 2**-24; without a seed return 0.5, to round to nearest."""
    if seed is None:
        return jnp.full(shape, 0.5)
    return (bits(shape, seed) >> 8).astype(jnp.float32) * 2.0**-24


@jax.custom_jvp
def to_bfloat16(x: jax.Array, seed: jax.Array) -> jax.Array:
    """Round f32 to bf16, up or down at random; finite stays finite, infinite and NaN stay so."""
    most = float(jnp.finfo(jnp.bfloat16).max)
    noise = bits(x.shape, seed) >> 16
    inside = lax.bitcast_convert_type(jnp.clip(x, -most, most), jnp.uint32)
    drawn = lax.bitcast_convert_type((inside + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), drawn, x).astype(jnp.bfloat16)


@to_bfloat16.defjvp
def _through(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    """Pass the tangent through unchanged, because rounding keeps the mean."""
    return to_bfloat16(*primals), tangents[0].astype(jnp.bfloat16)


def nearest(x: jax.Array) -> jax.Array:
    """Return the bf16 nearest to f32 ``x``; with the ``rest``, ``joined`` restores every number.

    A tie is rounded to the bf16 of larger magnitude, because the distance must fit in an i16. NaN
    stays NaN, with another payload: adding to its bits would carry over into the sign or end at
    infinity.
    """
    whole = lax.bitcast_convert_type(x, jnp.int32)
    upper = lax.bitcast_convert_type(((whole + _HALF) >> 16) << 16, jnp.float32)
    return jnp.where(jnp.isnan(x), x, upper).astype(jnp.bfloat16)


def rest(x: jax.Array, high: jax.Array) -> jax.Array:
    """Return the bits of f32 ``x`` minus those of ``high``, as i16; 0 if they are too far apart."""
    whole = lax.bitcast_convert_type(x, jnp.int32)
    distance = whole - lax.bitcast_convert_type(high.astype(jnp.float32), jnp.int32)
    near = (distance >= -_HALF) & (distance < _HALF)
    return jnp.where(near, distance, 0).astype(jnp.int16)


def joined(high: jax.Array, low: jax.Array) -> jax.Array:
    """Return the f32 of which ``high`` is the ``nearest`` bf16 and ``low`` the ``rest``."""
    whole = lax.bitcast_convert_type(high.astype(jnp.float32), jnp.int32)
    return lax.bitcast_convert_type(whole + low.astype(jnp.int32), jnp.float32)


def block_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a block: whole dimensions, and a divisor of one dimension's size.

    A block has at least ``BLOCK`` elements, and as few more as possible; all blocks are equal.
    The last dimension but one is cut first, because TPU tiles are cut along it without moving data.
    """
    dims = list(reversed(range(len(shape))))
    block, wanted = [1] * len(shape), BLOCK
    for dim in [*dims[1:2], *dims[:1], *dims[2:]]:
        size = shape[dim]
        block[dim] = next((x for x in range(wanted, size) if size % x == 0), size)
        wanted = math.ceil(wanted / block[dim])
        if wanted <= 1:
            break
    return tuple(block)


def blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an array ``[a, b, ...]`` in blocks: ``[a / p, p, b / q, q, ...]``."""
    pairs = [(n // b, b) for n, b in zip(shape, block_of(shape), strict=True)]
    return tuple(x for pair in pairs for x in pair)


def _spread(scales: jax.Array) -> jax.Array:
    """Reshape an array of one number per block so that it broadcasts over the elements."""
    return jnp.expand_dims(scales, tuple(range(1, 2 * scales.ndim, 2)))


def _extremes(parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest magnitude and the least value of each block.

    It is one reduction with two results, because XLA:CPU hands a reduction with one result to a
    library, which needs its operand in memory.
    """
    both = lambda a, b: (jnp.maximum(a[0], b[0]), jnp.minimum(a[1], b[1]))  # noqa: E731
    zero, inside = jnp.zeros((), parts.dtype), tuple(range(1, parts.ndim, 2))
    return tuple(lax.reduce((jnp.abs(parts), parts), (zero, zero), both, inside))


def _bfloat16(x: jax.Array, seed: jax.Array) -> tuple[jax.Array, None]:
    return to_bfloat16(x, seed), None


def _from_bfloat16(codes: jax.Array, _: None) -> jax.Array:
    return codes.astype(jnp.float32)


def _int8(x: jax.Array, seed: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    parts = x.reshape(blocks(x.shape))
    most, least = _extremes(parts)
    # This changes nothing, but XLA would remove an unused result from the reduction.
    most = jnp.maximum(most, -least)
    steps = (parts * _spread(127 / jnp.where(most > 0, most, 1))).reshape(x.shape)
    drawn = jnp.clip(jnp.floor(steps + _uniform(x.shape, seed)), -127, 127)
    return drawn.astype(jnp.int8), most / 127


def _from_int8(codes: jax.Array, scales: jax.Array) -> jax.Array:
    parts = codes.astype(jnp.float32).reshape(blocks(codes.shape))
    return (parts * _spread(scales)).reshape(codes.shape)


def _log8(x: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encode each element as zero or as a level ``2**((k - top) / 6)`` of its block's maximum.

    A block with signs stores the sign in the code, and has the levels k = 1 ... 127. A block
    without signs, such as one of second moments, has 255 levels and a negative scale. In such a
    block a value below the lowest level is rounded up to it, never to zero, because optimizers
    divide by second moments.

    The levels are found by integer operations, because XLA:CPU writes the results of exp and log to
    memory. They depend on a single number per block, because XLA:TPU writes each such number to
    memory once for every element.
    """
    parts = x.reshape(blocks(x.shape))
    most, least = _extremes(parts)
    scales = jnp.where(least < 0, most, -most)
    # The share is multiplied by four, because the inverse of the largest f32 numbers would be
    # subnormal.
    shares = parts * _spread(jnp.clip(4 / jnp.where(most > 0, scales, 1), -_MOST, _MOST))
    # A negative scale has flipped each element's sign, so a second number per block is not needed.
    before, after = (lax.bitcast_convert_type(y, jnp.int32) for y in (parts, shares))
    signed = (before ^ after) >= 0
    share = jnp.minimum(jnp.abs(shares), 4)
    # Exponent and mantissa tell the level below the share; ``times`` is the share over that level.
    whole = lax.bitcast_convert_type(share, jnp.int32)
    mantissa = lax.bitcast_convert_type((whole & 0x7FFFFF) | (127 << 23), jnp.float32)
    level = jnp.where(signed, 127, 255) - 6 * (129 - (whole >> 23))
    inverse = jnp.float32(1)
    for sixth in _SIXTHS[1:]:
        reached = mantissa >= sixth
        level = level + reached.astype(jnp.int32)
        inverse = jnp.where(reached, 1 / sixth, inverse)
    times = mantissa * inverse
    # In a block with signs, a value below the lowest level becomes that level or zero.
    chance = jnp.where(level > 0, (times - 1) / (_SIXTHS[1] - 1), share * 2.0**19)
    up = chance > _uniform(x.shape, seed).reshape(parts.shape)
    level = jnp.maximum(level, 0) + up.astype(jnp.int32)
    level = jnp.where(parts != 0, jnp.maximum(level, jnp.where(signed, 0, 1)), 0)
    # Zero must not have a sign, because code 128 is a level of blocks without signs.
    codes = level | jnp.where((parts < 0) & (level > 0), 128, 0)
    return codes.astype(jnp.uint8).reshape(x.shape), scales


def _from_log8(codes: jax.Array, scales: jax.Array) -> jax.Array:
    parts = codes.astype(jnp.int32).reshape(blocks(codes.shape))
    # Levels below the block's maximum, for signed blocks and for codes >= 128 of unsigned ones.
    down = (255 - parts) & 127
    octaves = (down * 171) >> 10
    part = down - 6 * octaves
    power = lax.bitcast_convert_type((127 - octaves) << 23, jnp.float32)
    inverse = jnp.float32(1)
    for i in range(1, 6):
        inverse = jnp.where(part == i, 1 / _SIXTHS[i], inverse)
    # Code 0 is zero, or NaN if the block's maximum was not finite.
    value = jnp.where(parts > 0, power * inverse, 0) * _spread(scales)
    # In a signed block the scale is positive, and codes >= 128 are negative numbers. In an unsigned
    # block it is negative, and codes < 128 are 128 levels further down.
    value = jnp.where(parts >= 128, -value, jnp.maximum(value, value * -_HALF_DOWN))
    return value.reshape(codes.shape)


class Format(NamedTuple):
    """A format in which f32 arrays are stored.

    Attributes:
      dtype: dtype of the codes, which have the shape of the array; no two formats share one.
      scaled: whether there are scales, f32, one per block.
      encode: ``encode(x, seed) -> (codes, scales)``; 8-bit formats round to nearest without a seed.
      decode: ``decode(codes, scales) -> x``.
    """

    dtype: np.dtype[Any]
    scaled: bool
    encode: Callable[[jax.Array, Any], tuple[jax.Array, Any]]
    decode: Callable[[jax.Array, Any], jax.Array]


FORMATS = {
    "bfloat16": Format(jnp.dtype(jnp.bfloat16), False, _bfloat16, _from_bfloat16),
    "int8": Format(jnp.dtype(jnp.int8), True, _int8, _from_int8),
    "log8": Format(jnp.dtype(jnp.uint8), True, _log8, _from_log8),
}
