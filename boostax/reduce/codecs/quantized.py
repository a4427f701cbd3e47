"""What quantised reductions send: every entry, in 16 bits, 8 or a single one."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from boostax._core import axes
from boostax.reduce.codecs.base import Message, packed, padded, unpacked

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Int8:
    """Two shots of blocks of int8 with a scale each: everyone's to who adds up, and the sum to all.

    What the second rounding loses is known to the one who did it only, and goes into that replica's
    residual, times the number of replicas: the mean then loses nothing.

    Attributes:
      block: entries that share a scale.
      stochastic: round up or down by chance, right on average, instead of to the nearest.
      seed: of the chance.
    """

    block: int
    stochastic: bool
    seed: int

    def init(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> PyTree:
        """The key, the same on all replicas, if there is any chance."""
        del leaves
        return jax.random.PRNGKey(self.seed) if self.stochastic else None

    def reduce(self, leaves: Sequence[jax.Array], state: PyTree, names: tuple[str, ...]) -> Message:
        """All-to-all, sum in f32, all-gather."""
        replicas = axes.size(names)
        first = second = None
        if self.stochastic:
            state, now = jax.random.split(state)
            first, second = jax.random.split(jax.random.fold_in(now, axes.index(names)))
        flat = packed(leaves)
        blocks = padded(flat, replicas * self.block).reshape(replicas, -1, self.block)
        codes, scales = quantize(blocks, first)
        received = axes.exchange(codes, names), axes.exchange(scales, names)
        mean = dequantize(*received, flat.dtype).mean(0)
        codes_of_mean, scales_of_mean = quantize(mean, second)
        whole = dequantize(
            axes.gather(codes_of_mean, names), axes.gather(scales_of_mean, names), flat.dtype
        )
        lost = mean - dequantize(codes_of_mean, scales_of_mean, flat.dtype)
        sent = _charged(dequantize(codes, scales, flat.dtype), lost, names)
        return Message(unpacked(whole.ravel(), leaves), unpacked(sent.ravel(), leaves), state)


@dataclasses.dataclass(frozen=True)
class Int16:
    """A sum of integers with a scale per leaf that is common to the replicas.

    Each replica uses ``32767 // n`` levels, so the sum cannot wrap; being of integers, it is the
    same in any order. It goes as an all-to-all and an all-gather, which keep 16 bits everywhere:
    XLA:GPU widens an all-reduce of them to 32.
    """

    def init(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> PyTree:
        """Nothing to keep."""
        del leaves
        return None

    def reduce(self, leaves: Sequence[jax.Array], state: PyTree, names: tuple[str, ...]) -> Message:
        """Agree on the scales, exchange, add up, gather."""
        replicas = axes.size(names)
        levels = 32767 // replicas
        # A maximum over replicas has no derivative in JAX, and the scale needs none.
        tops = lax.stop_gradient(jnp.stack([jnp.abs(x).max() for x in leaves]))
        largest = axes.largest(tops, names)
        units = [_unit(top.astype(x.dtype), levels) for top, x in zip(largest, leaves, strict=True)]
        codes = [
            _rounded(x, unit, levels, jnp.int16) for x, unit in zip(leaves, units, strict=True)
        ]
        rows = padded(packed(codes), replicas).reshape(replicas, -1)
        summed = axes.exchange(rows, names).sum(0, dtype=jnp.int32).astype(jnp.int16)
        sums = unpacked(axes.gather(summed, names).ravel(), codes)
        means = [
            s.astype(x.dtype) * (unit / replicas)
            for s, unit, x in zip(sums, units, leaves, strict=True)
        ]
        sent = [c.astype(x.dtype) * unit for c, unit, x in zip(codes, units, leaves, strict=True)]
        return Message(means, sent, state)


@dataclasses.dataclass(frozen=True)
class Sign:
    """A bit per entry: its sign.

    Attributes:
      form: ``"mean"`` of signs times the mean magnitude of their block, or ``"majority"``: the sign
        of most, times one.
      two_shot: the sums go to who adds up and back, as bits again; else everyone's bits to all.
      block: entries that share a magnitude.
    """

    form: Literal["mean", "majority"]
    two_shot: bool
    block: int

    def init(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> PyTree:
        """Nothing to keep."""
        del leaves
        return None

    def reduce(self, leaves: Sequence[jax.Array], state: PyTree, names: tuple[str, ...]) -> Message:
        """Send bits, and a magnitude per block if they are wanted."""
        replicas = axes.size(names)
        flat = packed(leaves)
        blocks = padded(flat, replicas * self.block).reshape(replicas, -1, self.block)
        bits, sizes = self._encode(blocks)
        own = self._decode(bits, sizes, flat.dtype)
        if self.two_shot:
            mean = self._combine(axes.exchange(bits, names), self._exchanged(sizes, names), flat)
            bits_of_mean, sizes_of_mean = self._encode(mean)
            lost = mean - self._decode(bits_of_mean, sizes_of_mean, flat.dtype)
            whole_sizes = None if sizes_of_mean is None else axes.gather(sizes_of_mean, names)
            whole = self._decode(axes.gather(bits_of_mean, names), whole_sizes, flat.dtype)
            own = _charged(own, lost, names)
        else:
            all_sizes = None if sizes is None else axes.gather(sizes, names)
            whole = self._combine(axes.gather(bits, names), all_sizes, flat)
        return Message(unpacked(whole.ravel(), leaves), unpacked(own.ravel(), leaves), state)

    def _exchanged(self, sizes: jax.Array | None, names: tuple[str, ...]) -> jax.Array | None:
        return None if sizes is None else axes.exchange(sizes, names)

    def _encode(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        bits = jnp.packbits(blocks >= 0, axis=-1)
        return bits, jnp.abs(blocks).mean(-1) if self.form == "mean" else None

    def _decode(self, bits: jax.Array, sizes: jax.Array | None, dtype: Any) -> jax.Array:
        signs = jnp.unpackbits(bits, axis=-1).astype(dtype) * 2 - 1
        return signs if sizes is None else signs * sizes[..., None]

    def _combine(self, bits: jax.Array, sizes: jax.Array | None, like: jax.Array) -> jax.Array:
        """Over the replicas, in the first dimension."""
        if sizes is not None:
            return self._decode(bits, sizes, like.dtype).mean(0)
        votes = jnp.unpackbits(bits, axis=-1).sum(0, dtype=jnp.int32)
        return jnp.sign(2 * votes - bits.shape[0]).astype(like.dtype)


def quantize(blocks: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """``(codes, scales)``: int8 of the shape of the blocks, and an f32 scale for each block."""
    scales = _unit(jnp.abs(blocks).max(-1), 127)
    codes = _rounded(blocks, scales[..., None], 127, jnp.int8, key)
    return codes, scales.astype(jnp.float32)


def dequantize(codes: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """The numbers that the codes stand for."""
    return codes.astype(dtype) * scales.astype(dtype)[..., None]


def _unit(largest: jax.Array, levels: int) -> jax.Array:
    """The size of a step, so that the largest takes ``levels``; of zeros, any.

    No smaller than a normal number: its reciprocal is finite.
    """
    return jnp.maximum(largest / levels, jnp.finfo(jnp.float32).tiny)


def _rounded(
    x: jax.Array, unit: jax.Array, levels: int, dtype: Any, key: jax.Array | None = None
) -> jax.Array:
    scaled = x / unit
    if key is not None:
        scaled = jnp.floor(scaled + jax.random.uniform(key, x.shape, x.dtype))
    else:
        scaled = jnp.round(scaled)
    return jnp.clip(scaled, -levels, levels).astype(dtype)


def _charged(sent: jax.Array, lost: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """What was sent, less what was lost of this replica's slice of the mean, for all replicas."""
    replicas = axes.size(names)
    own = axes.index(names)
    charged = lax.dynamic_index_in_dim(sent, own, 0, keepdims=False) - replicas * lost
    return lax.dynamic_update_index_in_dim(sent, charged, own, 0)
