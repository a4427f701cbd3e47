"""How rows travel: each device receives one slice of every row, and gives one slice back.

Between the two, all arithmetic is in f32 or wider on whole rows. An all-to-all and an all-gather
together send the bytes of a ring all-reduce. Two routes: over named axes (``shard_map``,
``pmap``, ``vmap``); and by sharding constraints (plain jit), where XLA puts in the collectives.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from boostax._core import axes
from boostax.reduce.layout import Plan, packed, starts
from boostax.reduce.pairwise import (
    NO_OWNERS,
    Bucket,
    Owners,
    Rows,
    exponent_of,
    grown,
    power_of_two,
)

Divide = Literal["before", "after", "never"]


class Route(Protocol):
    """The slices' way to the devices and back."""

    @property
    def slices(self) -> int:
        """Into how many slices a leaf is cut."""
        ...

    @property
    def by_blocks(self) -> bool:
        """Whether leaves must begin at whole blocks, so that something can be done by leaf."""
        ...

    def send(self, cuts: Sequence[jax.Array], plan: Plan) -> Rows:
        """From ``(slices, columns)`` of every leaf to this device's slice of every row."""
        ...

    def deliver(self, part: jax.Array, owners: Callable[[], Owners]) -> jax.Array:
        """From this device's slice of a bucket to ``(slices, columns)``, equal everywhere."""
        ...


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

    @property
    def by_blocks(self) -> bool:
        """Rows are combined by leaf, and every leaf has powers of two of its own on a narrow wire.

        Not so with a plain sum over ``within``.
        """
        return self.rows > 1 or self.wire_dtype is not None

    def send(self, cuts: Sequence[jax.Array], plan: Plan) -> Rows:
        """Exchange the slices."""
        dtype = cuts[0].dtype
        exponents = self._exponents(cuts)
        if self.wire_dtype is not None:
            columns = zip(cuts, exponents, strict=True)
            cuts = [x * (1 / power_of_two(e, dtype)) for x, e in columns]
        buckets: list[Bucket] = []
        for bucket in plan.buckets:
            moved = packed(cuts, bucket)
            if self.within:
                moved = self._sum_within(moved)
            if self.across:
                moved = self._exchange(moved, self.across)
            rows = [moved[row].astype(dtype) for row in range(self.rows)]
            # Rows of one replica are combined by leaf as well; a plain sum is not.
            by_leaf = self.across or self.wire_dtype is not None
            buckets.append(Bucket(rows, plan.owners(bucket) if by_leaf else NO_OWNERS))
        each = axes.gather(exponents, self.across) if self.across else exponents[None]
        return Rows(buckets, each, near_one=self.wire_dtype is not None)

    def total(self, partial: jax.Array) -> jax.Array:
        """Add over the slices."""
        return axes.total(partial, self.across + self.within + self.shards)

    def deliver(self, part: jax.Array, owners: Callable[[], Owners]) -> jax.Array:
        """Gather the slices."""
        if self.wire_dtype is None:
            return self._gather(part)
        # Each leaf of each slice has a power of two of its own, which travels with it: a whole
        # number up to 256 in magnitude, exact even in bf16.
        leaves = owners()
        begin = starts(leaves)
        runs = np.repeat(np.arange(len(begin)), np.diff(begin, append=len(leaves)))
        blocks = part.reshape(len(leaves), -1)
        largest = jnp.split(jnp.abs(blocks).max(1), begin[1:])
        exponents = exponent_of(jnp.stack([x.max() for x in largest]))
        near_one = blocks * (1 / power_of_two(exponents, part.dtype))[runs, None]
        sent = jnp.concatenate([near_one.ravel(), exponents.astype(part.dtype)])
        whole = self._gather(_half(sent, self.wire_dtype)).astype(part.dtype)
        values, each = whole[:, : part.size], whole[:, part.size :].astype(jnp.int32)
        return jax.vmap(lambda x, e: grown(x, e, runs))(values, each)

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

    @property
    def by_blocks(self) -> bool:
        """Rows are combined by leaf."""
        return True

    def send(self, cuts: Sequence[jax.Array], plan: Plan) -> Rows:
        """Let XLA exchange the slices."""
        buckets: list[Bucket] = []
        largest: list[list[jax.Array]] = [[] for _ in cuts]
        for bucket in plan.buckets:
            # Pinned on both sides, a bucket moves as a whole: one all-to-all.
            moved = self._place(packed(cuts, bucket), PartitionSpec(self.across))
            moved = self._place(moved, PartitionSpec(None, self.across))
            ends = np.cumsum([piece.stop - piece.start for piece in bucket])[:-1]
            for piece, x in zip(bucket, jnp.split(moved, ends, 2), strict=True):
                largest[piece.leaf].append(jnp.abs(x).max((1, 2)))
            buckets.append(Bucket(list(moved), plan.owners(bucket)))
        by_leaf = jnp.stack([jnp.stack(parts).max(0) for parts in largest], 1)
        return Rows(buckets, exponent_of(by_leaf))

    def total(self, partial: jax.Array) -> jax.Array:
        """XLA has done so: a sum over a sharded dimension is whole."""
        return partial

    def deliver(self, part: jax.Array, owners: Callable[[], Owners]) -> jax.Array:
        """Gather the slices."""
        del owners
        return self._place(part, PartitionSpec())

    def _place(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        if self.mesh is None:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def _largest(x: jax.Array) -> jax.Array:
    return jnp.abs(x).max()


def _half(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """A cast of numbers near one, and of exponents, that never rounds the largest ones up.

    The largest floats are just below 4 near one, and 4 would grow to infinity.
    """
    limits = jnp.finfo(dtype)
    below = (4 * (1 - limits.epsneg)).astype(x.dtype)
    return jnp.where(jnp.abs(x) < 4, jnp.clip(x, -below, below), x).astype(dtype)
