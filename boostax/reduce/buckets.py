"""From the leaves of a gradient to buckets under way, and back."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from boostax._core import checks
from boostax._core.replicas import split_dim
from boostax.reduce import layout
from boostax.reduce.pairwise import Rows
from boostax.reduce.route import Route

DEFAULT_BYTES = 2**23


@dataclasses.dataclass(frozen=True)
class Parcel:
    """Leaves of one kind, whose slices have been exchanged.

    Attributes:
      leaves: their indices.
      plan: the pieces in each bucket.
      rows: this device's slice of every row of every bucket.
    """

    leaves: list[int]
    plan: layout.Plan
    rows: Rows


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
        """The leaves again, from this device's slice of each bucket of each parcel."""
        # What has no entries was not sent, and is the same everywhere.
        leaves = [jnp.zeros(about.shape, about.dtype) for about in self.abouts]
        for parcel, result in zip(self.parcels, results, strict=True):
            whole = self.abouts[parcel.leaves[0]].dim is None
            columns = (
                _deliver(self.route, parcel.plan, result)
                if whole
                else _unpacked(result, parcel.plan.buckets)
            )
            for i, x in zip(parcel.leaves, columns, strict=True):
                leaves[i] = layout.join(x, self.abouts[i], self.route.slices)
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
        widths = [layout.columns(abouts[i], slices) for i in kind]
        block = layout.block_size(widths) if route.by_blocks else 1
        cuts = [layout.cut(leaves[i], abouts[i], slices, block) for i in kind]
        plan = _plan(cuts, slices, bucket_bytes, block)
        parcels.append(Parcel(kind, plan, route.send(cuts, plan)))
    return Sent(route, abouts, parcels)


def _plan(
    parts: Sequence[jax.Array], slices: int, bucket_bytes: int | None, block: int
) -> layout.Plan:
    capacity: float = math.inf
    if bucket_bytes is not None:
        capacity = bucket_bytes / (slices * parts[0].dtype.itemsize)
        # Not less than a block: there would be a collective for every few numbers.
        capacity = max(capacity, layout.BLOCK) if bucket_bytes else 0
    return layout.plan([x.shape[-1] for x in parts], capacity, block)


def _deliver(route: Route, plan: layout.Plan, parts: Sequence[jax.Array]) -> list[jax.Array]:
    """``(slices, columns)`` of every leaf from this device's ``(columns,)`` of every bucket."""
    joined: list[tuple[list[layout.Piece], list[jax.Array]]] = []
    for bucket, x in zip(plan.buckets, parts, strict=True):
        if bucket[0].start:
            # What is left of a divided leaf: gathered whole, it needs no copy to become one.
            joined[-1][0].append(bucket[0])
            joined[-1][1].append(x)
        else:
            joined.append((list(bucket), [x]))
    # Owners are an entry for each block, of one column where nothing is done by leaf.
    arrays = [
        route.deliver(_glued(x), functools.partial(plan.owners, bucket)) for bucket, x in joined
    ]
    return _unpacked(arrays, [bucket for bucket, _ in joined])


def _unpacked(
    arrays: Sequence[jax.Array], buckets: Sequence[Sequence[layout.Piece]]
) -> list[jax.Array]:
    """The columns of each leaf, whose pieces stand in order."""
    leaves: dict[int, list[jax.Array]] = {}
    for x, bucket in zip(arrays, buckets, strict=True):
        start = 0
        for piece in bucket:
            stop = start + piece.stop - piece.start
            leaves.setdefault(piece.leaf, []).append(x[..., start:stop])
            start = stop
    return [_glued(x) for x in leaves.values()]


def _glued(x: Sequence[jax.Array]) -> jax.Array:
    return x[0] if len(x) == 1 else jnp.concatenate(x, -1)


def check_bytes(who: str, bucket_bytes: Any) -> int | None:
    """A positive number of bytes, or ``None`` for no limit."""
    if bucket_bytes is None:
        return None
    return checks.positive_int(who, "bucket_bytes", bucket_bytes, "2**23 is 8 MiB.")
