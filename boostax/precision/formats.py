# SPDX-License-Identifier: Apache-2.0
"""Arrays in fewer bits: bf16, and 8 bits by blocks, linear or logarithmic; rounded at random.

A number between two that a format has becomes the one or the other with the probability that keeps
its mean, so that what is small and comes often is not lost. The noise is a hash of the element's
index and of a seed: no state, no array of random bits, and the same wherever the array lives.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from boostax._core import trees

# Elements that share a scale, at least; shorter arrays are not worth one.
BLOCK = 128
_HALF = 0x8000
_MOST = float(jnp.finfo(jnp.float32).max)
# Of the levels of log8 in an octave the ratios to its first.
_SIXTHS = tuple(2.0 ** (i / 6) for i in range(6))
# What 128 levels down are, as code 127 is below 255.
_HALF_DOWN = 2.0 ** (-128 / 6)


def fold(seed: jax.Array | int, number: jax.Array | int) -> jax.Array:
    """Make a u32 seed from another one and a number, such as a count of steps or a leaf's."""
    return _hash(_u32(seed) * jnp.uint32(0x9E3779B9) + _u32(number))


def seed_of(steps: jax.Array, path: tuple[Any, ...]) -> jax.Array:
    """Return the seed of a leaf in a step, by its path: numbers change where others freeze."""
    return fold(zlib.crc32(trees.path_name(path).encode()), steps)


def _u32(number: jax.Array | int) -> jax.Array:
    return jnp.uint32(number) if isinstance(number, int) else number.astype(jnp.uint32)


def bits(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """u32 noise: a hash of each element's index and the seed."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        # Modulo 2**32, in which a larger array repeats itself.
        place = lax.broadcasted_iota(jnp.uint32, shape, dim)
        index, stride = index + place * jnp.uint32(stride % 2**32), stride * shape[dim]
    return _hash(index ^ seed)


def _hash(x: jax.Array) -> jax.Array:
    """Every bit of the result depends on every bit of x (C. Wellons' lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _uniform(shape: tuple[int, ...], seed: jax.Array | None) -> jax.Array:
    """f32 in [0, 1), in steps of 2**-24; without a seed a half: to the nearest."""
    if seed is None:
        return jnp.full(shape, 0.5)
    return (bits(shape, seed) >> 8).astype(jnp.float32) * 2.0**-24


@jax.custom_jvp
def to_bfloat16(x: jax.Array, seed: jax.Array) -> jax.Array:
    """f32 to bf16, up or down at random; what is not finite stays so, what is finite too."""
    most = float(jnp.finfo(jnp.bfloat16).max)
    noise = bits(x.shape, seed) >> 16
    inside = lax.bitcast_convert_type(jnp.clip(x, -most, most), jnp.uint32)
    drawn = lax.bitcast_convert_type((inside + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), drawn, x).astype(jnp.bfloat16)


@to_bfloat16.defjvp
def _through(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    """Right on average, as rounding to the nearest is."""
    return to_bfloat16(*primals), tangents[0].astype(jnp.bfloat16)


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f32 as the bf16 next to it and the 16 bits that this lacks, ``joined`` bit for bit.

    Of two bf16 equally near the larger in magnitude, as the distance must fit in an i16.
    """
    whole = lax.bitcast_convert_type(x, jnp.int32)
    upper = ((whole + _HALF) >> 16) << 16
    high = lax.bitcast_convert_type(upper, jnp.float32).astype(jnp.bfloat16)
    return high, rest(x, high)


def rest(x: jax.Array, high: jax.Array) -> jax.Array:
    """i16: the bits of f32 ``x`` less those of a bf16 next to it; 0 of one that is further off."""
    whole = lax.bitcast_convert_type(x, jnp.int32)
    distance = whole - lax.bitcast_convert_type(high.astype(jnp.float32), jnp.int32)
    near = (distance >= -_HALF) & (distance < _HALF)
    return jnp.where(near, distance, 0).astype(jnp.int16)


def joined(high: jax.Array, low: jax.Array) -> jax.Array:
    """f32 of its two halves."""
    whole = lax.bitcast_convert_type(high.astype(jnp.float32), jnp.int32)
    return lax.bitcast_convert_type(whole + low.astype(jnp.int32), jnp.float32)


def block_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the block of an array: whole dimensions, and a divisor of the size of one.

    Of the least number of elements that is not less than ``BLOCK``, so no block is cut short; along
    the last dimension but one first, as a TPU's tiles are cut there without moving anything.
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


class Blocks(NamedTuple):
    """How an array ``[a, b, ...]`` is cut in blocks: ``[a / p, p, b / q, q, ...]``.

    Attributes:
      sizes: those.
      inside: the dimensions within a block.
    """

    sizes: tuple[int, ...]
    inside: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> "Blocks":
        """Make the blocks of an array of this shape."""
        pairs = [(n // b, b) for n, b in zip(shape, block_of(shape), strict=True)]
        return cls(tuple(x for pair in pairs for x in pair), tuple(range(1, 2 * len(shape), 2)))

    def spread(self, scales: jax.Array) -> jax.Array:
        """One number of each block, before its elements."""
        return jnp.expand_dims(scales, self.inside)


def _extremes(parts: jax.Array, inside: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the largest magnitude and the least value of each block.

    One reduction with two results: XLA:CPU gives one with a single result to a library, which wants
    its operand in memory.
    """
    both = lambda a, b: (jnp.maximum(a[0], b[0]), jnp.minimum(a[1], b[1]))  # noqa: E731
    zero = jnp.zeros((), parts.dtype)
    most, least = lax.reduce((jnp.abs(parts), parts), (zero, zero), both, inside)
    return most, least


def _int8(x: jax.Array, seed: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    blocks = Blocks.of(x.shape)
    parts = x.reshape(blocks.sizes)
    most, least = _extremes(parts, blocks.inside)
    # The same again; a result that nobody reads is taken out of the reduction.
    most = jnp.maximum(most, -least)
    steps = (parts * blocks.spread(127 / jnp.where(most > 0, most, 1))).reshape(x.shape)
    drawn = jnp.clip(jnp.floor(steps + _uniform(x.shape, seed)), -127, 127)
    return drawn.astype(jnp.int8), most / 127


def _from_int8(codes: jax.Array, scales: jax.Array) -> jax.Array:
    blocks = Blocks.of(codes.shape)
    parts = codes.astype(jnp.float32).reshape(blocks.sizes)
    return (parts * blocks.spread(scales)).reshape(codes.shape)


def _log8(x: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Levels ``2**((k - top) / 6)`` of the largest magnitude, k = 1 ... top, and zero.

    A block with signs has them in the codes and 127 levels; one without, as of second moments, has
    255, and says so by the sign of its scale. What is less than the lowest level of such a block is
    that level, never zero: one divides by second moments.

    By integer operations, as XLA:CPU writes to memory what it has called exp or log for; and from
    one number of each block, as XLA:TPU writes to memory each that is spread over the elements.
    """
    blocks = Blocks.of(x.shape)
    parts = x.reshape(blocks.sizes)
    most, least = _extremes(parts, blocks.inside)
    scales = jnp.where(least < 0, most, -most)
    # Four times the share: the inverse of the largest numbers that there are would be subnormal.
    shares = parts * blocks.spread(jnp.clip(4 / jnp.where(most > 0, scales, 1), -_MOST, _MOST))
    # Told by each element, whose sign the scale has turned or not: it needs no second number.
    before, after = (lax.bitcast_convert_type(y, jnp.int32) for y in (parts, shares))
    signed = (before ^ after) >= 0
    share = jnp.minimum(jnp.abs(shares), 4)
    # The level below is as many sixths of an octave down as its exponent and mantissa say, and the
    # share so many times as large.
    whole = lax.bitcast_convert_type(share, jnp.int32)
    mantissa = lax.bitcast_convert_type((whole & 0x7FFFFF) | (127 << 23), jnp.float32)
    level = jnp.where(signed, 127, 255) - 6 * (129 - (whole >> 23))
    inverse = jnp.float32(1)
    for sixth in _SIXTHS[1:]:
        reached = mantissa >= sixth
        level = level + reached.astype(jnp.int32)
        inverse = jnp.where(reached, 1 / sixth, inverse)
    times = mantissa * inverse
    # Below the lowest level of a block with signs, 126 sixths down: that or zero.
    chance = jnp.where(level > 0, (times - 1) / (_SIXTHS[1] - 1), share * 2.0**19)
    up = chance > _uniform(x.shape, seed).reshape(blocks.sizes)
    level = jnp.maximum(level, 0) + up.astype(jnp.int32)
    level = jnp.where(parts != 0, jnp.maximum(level, jnp.where(signed, 0, 1)), 0)
    # Zero has no sign: with it, it would be a level of a block without signs.
    codes = level | jnp.where((parts < 0) & (level > 0), 128, 0)
    return codes.astype(jnp.uint8).reshape(x.shape), scales


def _from_log8(codes: jax.Array, scales: jax.Array) -> jax.Array:
    blocks = Blocks.of(codes.shape)
    parts = codes.astype(jnp.int32).reshape(blocks.sizes)
    # In levels from the largest, of blocks with signs and of the upper codes of those without.
    down = (255 - parts) & 127
    octaves = (down * 171) >> 10
    part = down - 6 * octaves
    power = lax.bitcast_convert_type((127 - octaves) << 23, jnp.float32)
    inverse = jnp.float32(1)
    for i in range(1, 6):
        inverse = jnp.where(part == i, 1 / _SIXTHS[i], inverse)
    # Zero, but NaN where the largest was not finite.
    value = jnp.where(parts > 0, power * inverse, 0) * blocks.spread(scales)
    # With signs the scale is positive and upper codes are negative; without, it is negative, and
    # lower codes are 128 levels further down.
    value = jnp.where(parts >= 128, -value, jnp.maximum(value, value * -_HALF_DOWN))
    return value.reshape(codes.shape)


class Format(NamedTuple):
    """How f32 arrays are stored.

    Attributes:
      dtype: of the codes, which have the shape of the array; each format has its own.
      scaled: whether there are scales, f32, one for each block.
      encode: ``encode(x, seed) -> (codes, scales)``; those of 8 bits without a seed to the nearest.
      decode: ``decode(codes, scales) -> x``.
    """

    dtype: Any
    scaled: bool
    encode: Callable[[jax.Array, Any], tuple[jax.Array, Any]]
    decode: Callable[[jax.Array, Any], jax.Array]


FORMATS = {
    "bfloat16": Format(
        jnp.dtype(jnp.bfloat16),
        False,
        lambda x, seed: (to_bfloat16(x, seed), None),
        lambda codes, scales: codes.astype(jnp.float32),
    ),
    "int8": Format(jnp.dtype(jnp.int8), True, _int8, _from_int8),
    "log8": Format(jnp.dtype(jnp.uint8), True, _log8, _from_log8),
}


def format_of(codes: jax.Array) -> Format | None:
    """Return the format of stored codes by their dtype; ``None`` for what is not stored."""
    return next((x for x in FORMATS.values() if x.dtype == codes.dtype), None)
