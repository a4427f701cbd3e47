# SPDX-License-Identifier: Apache-2.0
"""Low-bit formats with random rounding: bf16, and 8-bit codes in blocks, linear or logarithmic.

A number between two neighbouring values of a format is rounded to one of these values, with
probabilities that preserve the mean. So many small changes accumulate instead of being lost. The
noise is a hash of the element's index and a seed, so the noise needs no state and no array of
random bits, and is the same on every mesh.

A format encodes and decodes element by element, given the scale of the element's block. The
functions compute on the bits of f32 as i32, because vector units of CPU, GPU and TPU all support
i32.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import trees

# At least 128 elements share a scale, as many as are in a row of a TPU's vector register.
BLOCK = 128
_HALF = 0x8000
# Bits of f32: a mask of all bits but the sign, infinity, and the step between powers of two.
_SIZE, _INFINITE, _OCTAVE = 0x7FFFFFFF, 0x7F800000, 1 << 23
# A sixth of ``_OCTAVE``, rounded down to an integer.
_SIXTH = _OCTAVE // 6
_bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
_float = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)


@jax.jit
def fold(seed: jax.Array | int, number: jax.Array | int) -> jax.Array:
    """Make an i32 seed from a seed and a number, such as a count of steps."""
    return _hash(jnp.asarray(int32(seed)) * int32(0x9E3779B9) + int32(number))


def seed_of(steps: jax.Array, path: tuple[Any, ...]) -> jax.Array:
    """Return a leaf's seed in a step, from the leaf's path, because freezing changes no paths."""
    return fold(int32(zlib.crc32(trees.path_name(path).encode())), steps)


def int32(number: jax.Array | int) -> Any:
    """Return a number as i32, modulo ``2**32``."""
    wraps = isinstance(number, int)
    return np.uint32(number % 2**32).view(np.int32) if wraps else number.astype(jnp.int32)


def strides_of(shape: tuple[int, ...]) -> list[int]:
    """Return the row-major stride of each dimension, in elements."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def index_in(shape: tuple[int, ...], strides: Sequence[int] | None = None) -> jax.Array:
    """Return the i32 index of each element modulo 2**32, by default in row-major order."""
    index = jnp.zeros(shape, jnp.int32)
    for dim, stride in enumerate(strides_of(shape) if strides is None else strides):
        index = index + lax.broadcasted_iota(jnp.int32, shape, dim) * int32(stride)
    return index


def _hash(x: jax.Array) -> jax.Array:
    """Mix bits so that each bit of the result depends on all bits of ``x`` (Wellons' lowbias32)."""
    x = (x ^ _shifted(x, 16)) * int32(0x7FEB352D)
    x = (x ^ _shifted(x, 15)) * int32(0x846CA68B)
    return x ^ _shifted(x, 16)


def _shifted(x: jax.Array, count: int) -> jax.Array:
    """Shift bits to the right, and fill with zeros."""
    return lax.shift_right_logical(x, np.int32(count))


def to_bfloat16(x: jax.Array, seed: jax.Array) -> jax.Array:
    """Round f32 to bf16, up or down at random.

    Infinity and NaN are unchanged, and finite values stay finite.
    """
    return _bfloat16(x, None, boostax_draw(seed, x.shape))


def nearest(x: jax.Array) -> jax.Array:
    """Return the bf16 nearest to f32 ``x``; ``joined`` adds the ``remainder`` to restore ``x``.

    A tie is rounded to the bf16 of larger magnitude, because ``remainder`` must fit in an i16. A
    NaN is returned with another payload, because an addition to the bits of a NaN could change the
    sign or result in infinity.
    """
    return jnp.where(jnp.isnan(x), x, _float(((_bits(x) + _HALF) >> 16) << 16)).astype(jnp.bfloat16)


def remainder(x: jax.Array, high: jax.Array) -> jax.Array:
    """Return the i16 difference of the bits of f32 ``x`` and of ``high``; 0 if it does not fit."""
    distance = _bits(x) - _bits(high.astype(jnp.float32))
    return jnp.where((distance >= -_HALF) & (distance < _HALF), distance, 0).astype(jnp.int16)


def joined(high: jax.Array, low: jax.Array) -> jax.Array:
    """Return the f32 whose ``nearest`` bf16 is ``high`` and whose ``remainder`` is ``low``."""
    return _float(_bits(high.astype(jnp.float32)) + low.astype(jnp.int32))


def block_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a block; each size divides the size of the array's dimension.

    If ``BLOCK`` divides the last dimension, a block has ``BLOCK`` elements of this dimension, like
    a TPU vector. Otherwise a block has at least ``BLOCK`` elements, as few as possible. Its
    elements come from the second to last dimension first, then from the last dimension, and then
    from the other dimensions. All blocks of an array have the same shape.
    """
    dims = list(reversed(range(len(shape))))
    block = [1] * len(shape)
    missing = BLOCK
    rows = bool(shape) and shape[-1] % BLOCK == 0
    for dim in dims if rows else [*dims[1:2], *dims[:1], *dims[2:]]:
        size = shape[dim]
        block[dim] = next((x for x in range(missing, size) if size % x == 0), size)
        missing = math.ceil(missing / block[dim])
        if missing <= 1:
            break
    return tuple(block)


def scales_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of an array: the number of blocks along each dimension."""
    return tuple(n // b for n, b in zip(shape, block_of(shape), strict=True))


def blocked(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of an array that is cut into blocks, and the dimensions inside a block.

    The shape of an array ``[a, b]`` with blocks ``(1, q)`` is ``[a, b / q, q]``.
    """
    sizes, inside = list[int](), list[int]()
    for size, block in zip(shape, block_of(shape), strict=True):
        if block == 1 or block < size:
            sizes.append(size // block)
        if block > 1:
            inside.append(len(sizes))
            sizes.append(block)
    return tuple(sizes), tuple(inside)


@jax.custom_jvp
def _bfloat16(x: jax.Array, _: None, noise: jax.Array) -> jax.Array:
    bits = _bits(x)
    size = bits & _SIZE
    most = _INFINITE - 1
    drawn = jnp.minimum(size + _shifted(noise, 16), most) & ~0xFFFF
    # ``astype`` converts a NaN without random rounding, and returns NaN for every payload.
    return jnp.where(size <= most, _float(drawn | (bits & ~_SIZE)), x).astype(jnp.bfloat16)


# The tangent is the tangent of the identity, because stochastic rounding preserves the mean.
_bfloat16.defjvp(lambda primals, tangents: (_bfloat16(*primals), tangents[0].astype(jnp.bfloat16)))


def _int8(x: jax.Array, scales: jax.Array, noise: jax.Array) -> jax.Array:
    inverse = 1 / jnp.maximum(scales, float(jnp.finfo(jnp.float32).tiny))
    chance = _shifted(noise, 8).astype(jnp.float32) * 2.0**-24
    drawn = jnp.floor(x * inverse + chance)
    return jnp.clip(drawn, -127.0, 127.0).astype(jnp.int32).astype(jnp.int8)


def _log8_scale(most: jax.Array, least: jax.Array) -> jax.Array:
    """Return the smallest level of a block, negated if no element of the block has a sign bit."""
    octave = _bits(most) & _INFINITE
    signed = least < 0
    lowest = jnp.maximum(octave - jnp.where(signed, 20 * _OCTAVE, 41 * _OCTAVE), _OCTAVE)
    finite = octave < _INFINITE
    return jnp.where(signed & finite, 1, -1) * _float(jnp.where(finite, lowest, octave))


def _log8(x: jax.Array, scales: jax.Array, noise: jax.Array) -> jax.Array:
    """Encode each element as zero or as a level of its block.

    Each octave has six equally spaced levels, so the bits of an f32 number determine the level
    below the number, and the other bits are the probability of rounding up. The code of an element
    is the index of its level. The level that equals the scale has the index 1. Indices reach 127 in
    a block with signs, whose codes have a sign bit, or 253 in a block without signs. In a block
    without signs, such as second moments, a nonzero value below the lowest level is rounded up to
    that level, never to zero, because optimizers divide by second moments. If an element of a block
    is not finite, the scale of the block is not finite.
    """
    lowest = _bits(scales)
    bits = _bits(x)
    signs = (lowest >> 31) + 1
    lowest = lowest & _SIZE
    # The bound is the largest number that is still finite after rounding up.
    size = jnp.minimum(bits & _SIZE, _INFINITE - _SIXTH - 2)
    above = (size - lowest) * 6 + _OCTAVE
    below = _bits(_float(size) + _float(lowest)) - lowest
    level = (jnp.where(size >= lowest, above, below) + _shifted(noise, 9)) >> 23
    level = jnp.maximum(level, 1 - signs)
    # Zero has no sign bit, because code 128 is a level in blocks without signs.
    sign = _shifted(bits & -level, 24) & (signs << 7)
    return jnp.where(size > 0, level | sign, 0).astype(jnp.uint8)


def _from_log8(codes: jax.Array, scales: jax.Array) -> jax.Array:
    lowest = _bits(scales)
    numbers = codes.astype(jnp.int32)
    sign = ((lowest >> 31) + 1) << 7
    level = numbers & (255 - sign)
    bits = (lowest & _SIZE) - _SIXTH + level * _SIXTH + ((level * 171) >> 9)
    return _float(jnp.where(level > 0, bits | ((numbers & sign) << 24), 0))


@dataclasses.dataclass(frozen=True, eq=False)
class Format:
    """A format in which f32 arrays are stored.

    Attributes:
      name: the key of the format in ``FORMATS``.
      dtype: dtype of the codes, which have the shape of the array; no two formats share a dtype.
      code: ``code(x, scales, noise) -> codes``, element by element, rounded with 32 bits of noise.
      value: ``value(codes, scales) -> x``, element by element.
      scale: ``scale(most, least) -> scales`` of blocks, f32, from the two ``extremes`` of each
        block; ``None`` if the format has no scales.
    """

    name: str
    dtype: jnp.dtype
    code: Callable[..., jax.Array]
    value: Callable[..., jax.Array]
    scale: Callable[[jax.Array, jax.Array], jax.Array] | None = None

    def encode(
        self, x: jax.Array, noise: jax.Array | None, salt: str = ""
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the codes of an array and the scales of its blocks.

        Args:
          x: an f32 array.
          noise: 32 bits for each element, from ``draw``; with ``None``, the nearest code is chosen.
          salt: a name; arrays with the same noise and different names are rounded independently.
        """
        if noise is None:
            noise = jnp.full(x.shape, np.int32(-(2**31)))
        scales = None if self.scale is None else codec("measure", self.name)(x)
        operands = (x, noise) if scales is None else (x, scales, noise)
        return codec("encode", self.name, salt)(*operands), scales

    def decode(self, codes: jax.Array, scales: jax.Array | None) -> jax.Array:
        """Return the array that ``codes`` and ``scales`` encode."""
        return codec("decode", self.name)(*((codes,) if scales is None else (codes, scales)))


_BITS = Format("bfloat16", jnp.dtype(jnp.bfloat16), _bfloat16, lambda x, _: x.astype(jnp.float32))
_LINEAR = Format(
    "int8", jnp.dtype(jnp.int8), _int8, lambda x, y: x.astype(jnp.float32) * y, lambda y, _: y / 127
)
_LEVELS = Format("log8", jnp.dtype(jnp.uint8), _log8, _from_log8, _log8_scale)
FORMATS = {x.name: x for x in (_BITS, _LINEAR, _LEVELS)}


class Codec(NamedTuple):
    """A step of encoding or decoding, which is recognised in a traced program by name.

    Attributes:
      work: "decode", "measure", "encode" or "draw".
      compute: the step, element by element, with scales that broadcast; "measure" receives the
        extremes of blocks, and "draw" receives the index of each element.
    """

    work: str
    compute: Callable[..., jax.Array]


def extremes(x: jax.Array, inside: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the largest magnitude, and a number that is negative if an element has a sign bit.

    One reduction returns both results, because XLA:CPU passes a reduction with one result to a
    library, which needs the operand in memory. The reduction compares the bits as integers, because
    all vector units can compare integers.
    """
    bits = _bits(x)
    zeros = (np.int32(0), np.int32(0))
    ends = lax.reduce(
        (bits & _SIZE, bits), zeros, lambda a, b: (lax.max(a[0], b[0]), lax.min(a[1], b[1])), inside
    )
    most, least = (jnp.expand_dims(y, inside) for y in ends)
    # The maximum always equals ``most``. int8 does not use ``least``, so without the maximum XLA
    # would remove ``least`` from the reduction.
    return _float(jnp.maximum(most, least)), least


@functools.cache
def codec(work: str, kind: str, salt: str = "") -> Callable[..., jax.Array]:
    """Return a step on complete arrays; its name in a traced program is a key of ``CODECS``."""
    form = FORMATS[kind]
    factor = int32(zlib.crc32(salt.encode()) | 1)

    def compute(x: jax.Array, *operands: jax.Array) -> jax.Array:
        if work == "measure" and form.scale is not None:
            return form.scale(x, *operands)
        if work == "decode":
            return form.value(x, *(operands or [None]))
        *scales, noise = operands
        return form.code(x, *(scales or [None]), noise * factor if salt else noise)

    def on_array(x: jax.Array, *operands: jax.Array) -> jax.Array:
        sizes, inside = blocked(x.shape)
        # Scales are reshaped so that each scale broadcasts over its block.
        wide = [1 if dim in inside else size for dim, size in enumerate(sizes)]
        first, *others = (y.reshape(sizes if y.shape == x.shape else wide) for y in (x, *operands))
        if work == "measure":
            return compute(*extremes(first, inside)).reshape(scales_of(x.shape))
        return compute(first, *others).reshape(x.shape)

    on_array.__name__ = f"boostax_{work}_{kind}_{salt}"
    CODECS[on_array.__name__] = Codec(work, compute)
    return jax.jit(on_array)


def boostax_draw(seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return 32 random bits for each element of an array, as i32."""
    return _hash(index_in(shape) ^ seed)


draw = jax.jit(boostax_draw, static_argnums=1)
# The codec of each step, by the name of the step's calls in a traced program.
CODECS = {"boostax_draw": Codec("draw", lambda index, seed: _hash(index ^ seed))}
