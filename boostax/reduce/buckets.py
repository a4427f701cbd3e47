"""From the leaves of a gradient to buckets under way, and back."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from boostax._core import checks
from boostax._core.replicas import split_dim
from boostax.reduce import layout
from boostax.reduce.pairwise import Segments
from boostax.reduce.route import Route

DEFAULT_BYTES = 2**23


@dataclasses.dataclass(frozen=True)
class Parcel:
    """Leaves of one kind, whose slices have been exchanged.

    Attributes:
      leaves: their indices.
      plan: the pieces in each bucket.
      rows: for each piece, this device's slice of every row.
    """

    leaves: list[int]
    plan: list[list[layout.Piece]]
    rows: Segments

    @property
    def owners(self) -> list[int]:
        """For each piece, which of the leaves it belongs to."""
        return [piece.leaf for bucket in self.plan for piece in bucket]


@dataclasses.dataclass(frozen=True)
class Sent:
    """A whole gradient under way.

    Attributes:
      route: how it travels.
      abouts: what each leaf was.
      parcels: leaves of one kind each.
    """

    route: Route
    abouts: list[layout.Leaf]
    parcels: list[Parcel]

    def finish(self, results: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """The leaves again, from this device's slice of each piece of each parcel."""
        # What has no entries was not sent, and is the same everywhere.
        leaves = [jnp.zeros(about.shape, about.dtype) for about in self.abouts]
        for parcel, result in zip(self.parcels, results, strict=True):
            whole = self.abouts[parcel.leaves[0]].dim is None
            pieces = _deliver(self.route, parcel.plan, result) if whole else result
            for i, x in zip(parcel.leaves, _glued(pieces, parcel.plan), strict=True):
                leaves[i] = layout.join(x, self.abouts[i])
        return leaves


def send(
    leaves: Sequence[jax.Array],
    route: Route,
    *,
    bucket_bytes: int | None,
    scatter: bool = False,
    lead: int = 0,
) -> Sent:
    """Exchange the slices of all leaves, a bucket at a time.

    Args:
      leaves: arrays.
      route: how they travel.
      bucket_bytes: of a bucket, in the dtype of the arithmetic; 0 for a bucket per leaf, ``None``
        for as few as there are kinds of leaves.
      scatter: cut leaves along a dimension where they have one, to be kept cut in the end.
      lead: how many dimensions of a leaf stand before its own shape.
    """
    slices = route.slices
    abouts: list[layout.Leaf] = []
    for x in leaves:
        shape = x.shape[lead:]
        dim = split_dim(shape, slices) if scatter and slices > 1 else None
        abouts.append(layout.Leaf(shape, x.dtype, dim))
    parcels: list[Parcel] = []
    for kind in layout.kinds(leaves, abouts):
        cuts = [layout.cut(leaves[i], slices, abouts[i].dim, lead) for i in kind]
        plan = _plan(cuts, slices, bucket_bytes)
        parcels.append(Parcel(kind, plan, route.send(cuts, plan)))
    return Sent(route, abouts, parcels)


def gather(route: Route, parts: Sequence[jax.Array], bucket_bytes: int | None) -> list[jax.Array]:
    """``(slices, m)`` of every leaf from this device's ``(m,)``, a bucket at a time."""
    plan = _plan(parts, route.slices, bucket_bytes)
    pieces = [parts[x.leaf][x.start : x.stop] for bucket in plan for x in bucket]
    return _glued(_deliver(route, plan, pieces), plan)


def _plan(
    parts: Sequence[jax.Array], slices: int, bucket_bytes: int | None
) -> list[list[layout.Piece]]:
    column = slices * parts[0].dtype.itemsize
    capacity = math.inf if bucket_bytes is None else bucket_bytes / column
    return layout.plan([x.shape[-1] for x in parts], max(capacity, 1) if bucket_bytes else capacity)


def _deliver(
    route: Route, plan: Sequence[Sequence[layout.Piece]], parts: Sequence[jax.Array]
) -> list[jax.Array]:
    rest = iter(parts)
    buckets = [route.deliver([next(rest) for _ in bucket]) for bucket in plan]
    return [x for bucket in buckets for x in bucket]


def _glued(pieces: Sequence[jax.Array], plan: Sequence[Sequence[layout.Piece]]) -> list[jax.Array]:
    """The leaves from their pieces, which stand in order."""
    leaves: dict[int, list[jax.Array]] = {}
    for piece, x in zip((x for bucket in plan for x in bucket), pieces, strict=True):
        leaves.setdefault(piece.leaf, []).append(x)
    return [x[0] if len(x) == 1 else jnp.concatenate(x, -1) for x in leaves.values()]


def check_bytes(who: str, bucket_bytes: Any) -> int | None:
    """A positive number of bytes, or ``None`` for no limit."""
    if bucket_bytes is None:
        return None
    return checks.positive_int(who, "bucket_bytes", bucket_bytes, "2**23 is 8 MiB.")
