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
from boostax.reduce.layout import Piece
from boostax.reduce.pairwise import Segments, exponent_of, grown, power_of_two

Divide = Literal["before", "after", "never"]
Plan = Sequence[Sequence[Piece]]


class Route(Protocol):
    """The slices' way to the devices and back."""

    @property
    def slices(self) -> int:
        """Into how many slices a leaf is cut."""
        ...

    def send(self, cuts: Sequence[jax.Array], plan: Plan) -> Segments:
        """From ``(slices, m)`` of every leaf to this device's slice of every row, by pieces."""
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

    def send(self, cuts: Sequence[jax.Array], plan: Plan) -> Segments:
        """Add up over the replicas."""
        replicas = axes.size(self.names)
        rows: list[jax.Array] = []
        for bucket in plan:
            packed = _packed(cuts, bucket)
            packed = packed / replicas if self.divide == "before" else packed
            summed = lax.psum(packed, self.names)
            summed = summed / replicas if self.divide == "after" else summed
            rows += _unpacked(summed, bucket)
        return Segments(rows, jnp.zeros((1, len(rows)), jnp.int32))

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

    def send(self, cuts: Sequence[jax.Array], plan: Plan) -> Segments:
        """Exchange the slices."""
        dtype = cuts[0].dtype
        exponents = self._exponents(cuts)
        if self.wire_dtype is not None:
            cuts = _shrunk(cuts, exponents)
        rows: list[jax.Array] = []
        for bucket in plan:
            packed = _packed(cuts, bucket)
            if self.within:
                packed = self._sum_within(packed)
            if self.across:
                packed = self._exchange(packed, self.across)
            rows += _unpacked(packed.astype(dtype), bucket)
        each = axes.gather(exponents, self.across) if self.across else exponents[None]
        return Segments(rows, each[:, _owners(plan)], near_one=self.wire_dtype is not None)

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
        whole = self._gather(_half(packed, self.wire_dtype)).astype(packed.dtype)
        return _grown(split(whole, widths), whole[:, -len(widths) :].astype(jnp.int32))

    def _exponents(self, cuts: Sequence[jax.Array]) -> jax.Array:
        if self.rows == 1 and self.wire_dtype is None:
            return jnp.zeros(len(cuts), jnp.int32)
        exponents = exponent_of(jnp.stack([_largest(x) for x in cuts]))
        common = self.within + self.shards
        return axes.largest(exponents, common) if common else exponents

    def _exchange(self, bucket: jax.Array, names: tuple[str, ...]) -> jax.Array:
        wire = bucket if self.wire_dtype is None else _half(bucket, self.wire_dtype)
        return axes.exchange(wire, names)

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

    def send(self, cuts: Sequence[jax.Array], plan: Plan) -> Segments:
        """Let XLA exchange the slices."""
        rows: list[jax.Array] = []
        for bucket in plan:
            # Pinned on both sides, a bucket moves as a whole: one all-to-all.
            packed = self._place(_packed(cuts, bucket), PartitionSpec(self.across))
            rows += _unpacked(self._place(packed, PartitionSpec(None, self.across)), bucket)
        owners = _owners(plan)
        largest = [jnp.abs(x).max((1, 2)) for x in rows]
        by_leaf = [
            jnp.stack([largest[i] for i in np.flatnonzero(owners == leaf)]).max(0)
            for leaf in range(len(cuts))
        ]
        return Segments(rows, exponent_of(jnp.stack(by_leaf, 1))[:, owners])

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


def _packed(cuts: Sequence[jax.Array], bucket: Sequence[Piece]) -> jax.Array:
    """The columns of a bucket side by side."""
    parts = [cuts[piece.leaf][..., piece.start : piece.stop] for piece in bucket]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)


def _unpacked(packed: jax.Array, bucket: Sequence[Piece]) -> list[jax.Array]:
    return split(packed, [piece.stop - piece.start for piece in bucket])


def _owners(plan: Plan) -> np.ndarray[Any, Any]:
    return np.array([piece.leaf for bucket in plan for piece in bucket])


def _shrunk(parts: Sequence[jax.Array], exponents: jax.Array) -> list[jax.Array]:
    """Each divided by its ``2**exponent``."""
    columns = zip(parts, exponents, strict=True)
    return [x * (1 / power_of_two(e, x.dtype)) for x, e in columns]


def _half(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """A cast of numbers near one, and of exponents, that never rounds the largest ones up.

    The largest floats are just below 4 near one, and 4 would grow to infinity.
    """
    limits = jnp.finfo(dtype)
    below = (4 * (1 - limits.epsneg)).astype(x.dtype)
    return jnp.where(jnp.abs(x) < 4, jnp.clip(x, -below, below), x).astype(dtype)


def _grown(parts: Sequence[jax.Array], exponents: jax.Array) -> list[jax.Array]:
    """Each row ``r`` of leaf ``i`` times ``2**exponents[r, i]``."""
    return [grown(x, e[:, None]) for x, e in zip(parts, exponents.T, strict=True)]
