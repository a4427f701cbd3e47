"""From the leaves of a gradient to buckets under way, and back."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from boostax._core import checks
from boostax._core.replicas import split_dim
from boostax.reduce import layout
from boostax.reduce.pairwise import Segments
from boostax.reduce.route import Route

DEFAULT_BYTES = 2**25


@dataclasses.dataclass(frozen=True)
class Sent:
    """Leaves whose slices have been exchanged.

    Attributes:
      route: how they travel.
      abouts: what each leaf was.
      buckets: indices of the leaves in each bucket.
      rows: for each bucket, this device's slice of every row.
    """

    route: Route
    abouts: list[layout.Leaf]
    buckets: list[list[int]]
    rows: list[Segments]

    def finish(self, slices: Sequence[list[jax.Array]]) -> list[jax.Array]:
        """The leaves again, from this device's slice of each leaf of each bucket."""
        # What has no entries was not sent, and is the same everywhere.
        result = [jnp.zeros(about.shape, about.dtype) for about in self.abouts]
        for bucket, parts in zip(self.buckets, slices, strict=True):
            if self.abouts[bucket[0]].dim is None:
                parts = self.route.deliver(parts)
            for i, part in zip(bucket, parts, strict=True):
                result[i] = layout.join(part, self.abouts[i])
        return result


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
      bucket_bytes: see ``layout.plan``.
      scatter: cut leaves along a dimension where they have one, to be kept cut in the end.
      lead: how many dimensions of a leaf stand before its own shape.
    """
    slices = route.slices
    abouts: list[layout.Leaf] = []
    for x in leaves:
        shape = x.shape[lead:]
        dim = split_dim(shape, slices) if scatter and slices > 1 else None
        abouts.append(layout.Leaf(shape, x.dtype, dim))
    plan = layout.plan(leaves, abouts, bucket_bytes)
    rows = [
        route.send([layout.cut(leaves[i], slices, abouts[i].dim, lead) for i in bucket])
        for bucket in plan
    ]
    return Sent(route, abouts, plan, rows)


def check_bytes(who: str, bucket_bytes: Any) -> int | None:
    """A positive number of bytes, or ``None`` for no limit."""
    if bucket_bytes is None:
        return None
    return checks.positive_int(who, "bucket_bytes", bucket_bytes, "2**25 is 32 MiB.")
