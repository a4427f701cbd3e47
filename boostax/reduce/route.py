"""How rows travel: each device receives one slice of every row, and gives one slice back.

Between the two, all arithmetic is in f32 or wider on whole rows. An all-to-all and an all-gather
together send the bytes of a ring all-reduce. Three routes: over named axes (``shard_map``,
``pmap``, ``vmap``); by sharding constraints (plain jit), where XLA puts in the collectives; and
the all-reduce itself, for what is no more than a sum.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from boostax._core import axes
from boostax.reduce.pairwise import Segments, exponent_of, power_of_two

Divide = Literal["before", "after", "never"]


class Route(Protocol):
    """The slices' way to the devices and back."""

    @property
    def slices(self) -> int:
        """Into how many slices a leaf is cut."""
        ...

    def send(self, blocks: Sequence[jax.Array]) -> Segments:
        """From ``(slices, m)`` of every leaf of a bucket to this device's slice of every row.

        The values come as they are, with the exponents that would bring each row near one.
        """
        ...

    def total(self, partial: jax.Array) -> jax.Array:
        """Add over the slices."""
        ...

    def deliver(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """From this device's slice of every leaf to ``(slices, m)``, equal everywhere."""
        ...


@dataclasses.dataclass(frozen=True)
class DenseRoute:
    """A plain all-reduce over named axes: a single row, whole on every device.

    Attributes:
      names: the axes.
      divide: by their size: before the sum, after it, or never.
    """

    names: tuple[str, ...]
    divide: Divide = "after"

    @property
    def slices(self) -> int:
        """A leaf stays whole."""
        return 1

    def send(self, blocks: Sequence[jax.Array]) -> Segments:
        """Add up a bucket over the replicas."""
        replicas = axes.size(self.names)
        bucket = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, 1)
        summed = lax.psum(bucket / replicas if self.divide == "before" else bucket, self.names)
        rows = split(
            summed / replicas if self.divide == "after" else summed, [x.shape[1] for x in blocks]
        )
        return Segments(rows, jnp.zeros((1, len(blocks)), jnp.int32))

    def total(self, partial: jax.Array) -> jax.Array:
        """Nothing is missing."""
        return partial

    def deliver(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """Everything is here."""
        return [x[None] for x in parts]


@dataclasses.dataclass(frozen=True)
class NamedRoute:
    """Over named axes.

    Attributes:
      across: axes whose replicas are the rows.
      within: axes over which each row is first averaged, every device keeping a part of it.
      shards: axes over which leaves are sharded: their dot products add up.
      wire_dtype: of what is sent, or ``None`` for the dtype of the arithmetic.
      divide: by the size of ``within``: before the sum, after it, or never.
    """

    across: tuple[str, ...]
    within: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    wire_dtype: np.dtype[Any] | None = None
    divide: Divide = "before"

    @property
    def slices(self) -> int:
        """How many slices a leaf has."""
        return axes.size(self.across + self.within)

    @property
    def rows(self) -> int:
        """How many rows are combined."""
        return axes.size(self.across)

    def send(self, blocks: Sequence[jax.Array]) -> Segments:
        """Exchange the slices of a bucket."""
        dtype = blocks[0].dtype
        exponents = self._exponents(blocks)
        if self.wire_dtype is not None:
            blocks = _shrunk(blocks, exponents)
        bucket = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, 1)
        if self.within:
            bucket = self._sum_within(bucket)
        if self.across:
            bucket = self._exchange(bucket, self.across)
            exponents = axes.gather(exponents, self.across)
        else:
            exponents = exponents[None]
        rows = split(bucket.astype(dtype), [block.shape[1] for block in blocks])
        if self.wire_dtype is not None:
            rows = _grown(rows, exponents)
        return Segments(rows, exponents)

    def total(self, partial: jax.Array) -> jax.Array:
        """Add over the slices."""
        return axes.total(partial, self.across + self.within + self.shards)

    def deliver(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """Gather the slices."""
        widths = [x.shape[0] for x in parts]
        if self.wire_dtype is None:
            return split(self._gather(jnp.concatenate(parts)), widths)
        # Each slice has a power of two of its own, which travels with it: a whole number up to 256
        # in magnitude, exact even in bf16.
        exponents = exponent_of(jnp.stack([_largest(x) for x in parts]))
        packed = jnp.concatenate([*_shrunk(parts, exponents), exponents.astype(parts[0].dtype)])
        whole = self._gather(packed.astype(self.wire_dtype)).astype(packed.dtype)
        return _grown(split(whole, widths), whole[:, -len(widths) :].astype(jnp.int32))

    def _exponents(self, blocks: Sequence[jax.Array]) -> jax.Array:
        if self.rows == 1 and self.wire_dtype is None:
            return jnp.zeros(len(blocks), jnp.int32)
        exponents = exponent_of(jnp.stack([_largest(block) for block in blocks]))
        common = self.within + self.shards
        return axes.largest(exponents, common) if common else exponents

    def _exchange(self, bucket: jax.Array, names: tuple[str, ...]) -> jax.Array:
        wire = bucket.dtype if self.wire_dtype is None else self.wire_dtype
        return axes.exchange(bucket.astype(wire), names)

    def _sum_within(self, bucket: jax.Array) -> jax.Array:
        """``(rows, m)``: this device's part of the sum (or mean) over ``within``."""
        replicas = axes.size(self.within)
        parts = bucket.reshape(self.rows, replicas, -1)
        if self.divide == "before":
            parts = parts / replicas
        if self.wire_dtype is None:
            summed = lax.psum_scatter(parts, self.within, scatter_dimension=1)
        else:
            received = self._exchange(jnp.moveaxis(parts, 1, 0), self.within)
            summed = received.astype(bucket.dtype).sum(0)
        return summed / replicas if self.divide == "after" else summed

    def _gather(self, part: jax.Array) -> jax.Array:
        """First over ``across``: only a slice of a slice goes that way."""
        whole = axes.gather(part, self.across) if self.across else part[None]
        whole = axes.gather(whole, self.within, 1) if self.within else whole
        return whole.reshape(-1, part.shape[0])


@dataclasses.dataclass(frozen=True)
class StackedRoute:
    """By sharding constraints: leaves carry their replica in the first dimension.

    Attributes:
      across: axes of the mesh over which that dimension is sharded.
      mesh: the mesh, or ``None`` where all is on one device.
    """

    across: tuple[str, ...] = ()
    mesh: Mesh | None = None

    @property
    def slices(self) -> int:
        """How many slices a leaf has."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[x] for x in self.across)

    def send(self, blocks: Sequence[jax.Array]) -> Segments:
        """Exchange the slices of a bucket."""
        # Pinned on both sides, XLA moves the bucket as a whole: one all-to-all.
        bucket = self._place(jnp.concatenate(blocks, 2), PartitionSpec(self.across))
        rows = split(
            self._place(bucket, PartitionSpec(None, self.across)),
            [block.shape[2] for block in blocks],
        )
        return Segments(rows, exponent_of(jnp.stack([jnp.abs(x).max((1, 2)) for x in rows], 1)))

    def total(self, partial: jax.Array) -> jax.Array:
        """Add over the slices."""
        return partial

    def deliver(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """Gather the slices."""
        whole = self._place(jnp.concatenate(parts, 1), PartitionSpec())
        return split(whole, [x.shape[1] for x in parts])

    def _place(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        if self.mesh is None:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def split(x: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    """Cut the last dimension; what is beyond the widths is left."""
    ends = np.cumsum(widths)
    return [x[..., end - width : end] for end, width in zip(ends, widths, strict=True)]


def _largest(x: jax.Array) -> jax.Array:
    return jnp.abs(x).max()


def _shrunk(parts: Sequence[jax.Array], exponents: jax.Array) -> list[jax.Array]:
    """Each divided by its ``2**exponent``."""
    columns = zip(parts, exponents, strict=True)
    return [x * (1 / power_of_two(e, x.dtype)) for x, e in columns]


def _grown(parts: Sequence[jax.Array], exponents: jax.Array) -> list[jax.Array]:
    """Each row ``r`` of leaf ``i`` times ``2**exponents[r, i]``."""
    columns = zip(parts, exponents.T, strict=True)
    return [x * power_of_two(e, x.dtype)[:, None] for x, e in columns]
