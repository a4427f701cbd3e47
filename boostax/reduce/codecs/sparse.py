"""What sparse reductions send: a few entries of every leaf, chosen by magnitude or by chance."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import axes, trees
from boostax.reduce.codecs.base import Message, packed, padded, unpacked, unsent

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Largest:
    """The entries of largest magnitude of every leaf, with their places.

    Attributes:
      count: of so many entries, how many are sent.
      block: choose from each run of so many entries by itself; ``None`` for a leaf as a whole.
      threshold: what is smaller is not sent, though its place on the wire is taken; or ``None``.
      relative: whether the threshold is in units of the leaf's root mean square.
      value_dtype: of the values on the wire; ``None`` for their own.
    """

    count: Callable[[int], int]
    block: int | None = None
    threshold: float | None = None
    relative: bool = False
    value_dtype: np.dtype[Any] | None = None

    def init(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> PyTree:
        """Nothing to keep."""
        del leaves
        return None

    def reduce(self, leaves: Sequence[jax.Array], state: PyTree, names: tuple[str, ...]) -> Message:
        """Gather everybody's choice, and add up."""
        rows = [self._rows(x) for x in leaves]
        places = [self._places(x) for x in rows]
        chosen = zip(rows, places, leaves, strict=True)
        values = [self._values(x, i, leaf.size) for x, i, leaf in chosen]
        all_values, all_places = _gathered(values, names), _gathered(places, names)
        sent = [_put(x.shape, v, i) for x, v, i in zip(rows, values, places, strict=True)]
        means = [
            _added(x.shape, v, i) / axes.size(names)
            for x, v, i in zip(rows, all_values, all_places, strict=True)
        ]
        cut = lambda x, leaf: x.ravel()[: leaf.size].reshape(leaf.shape).astype(leaf.dtype)  # noqa: E731
        return Message(
            [cut(x, leaf) for x, leaf in zip(means, leaves, strict=True)],
            unsent(leaves, [cut(x, leaf) for x, leaf in zip(sent, leaves, strict=True)]),
            state,
        )

    def _rows(self, x: jax.Array) -> jax.Array:
        width = x.size if self.block is None else min(self.block, x.size)
        return padded(x.ravel(), width).reshape(-1, width)

    def _places(self, rows: jax.Array) -> jax.Array:
        """``(blocks, k)``, all different."""
        width = rows.shape[1]
        places = lax.top_k(jnp.abs(rows), min(self.count(width), width))[1]
        return places.astype(jnp.uint16 if width <= 2**16 else jnp.int32)

    def _values(self, rows: jax.Array, places: jax.Array, size: int) -> jax.Array:
        values = jnp.take_along_axis(rows, places.astype(jnp.int32), 1)
        if self.threshold is not None:
            unit = jnp.sqrt(jnp.sum(rows * rows) / size) if self.relative else 1
            values = jnp.where(jnp.abs(values) >= self.threshold * unit, values, 0)
        return values if self.value_dtype is None else trees.saturate(values, self.value_dtype)


@dataclasses.dataclass(frozen=True)
class Random:
    """The same entries of every replica, chosen by chance, so that their places need not be sent.

    Every run of 1000 entries or more gives its share, spread evenly from a random beginning: each
    entry has the same chance, and one all-reduce of the values is all that travels.

    Attributes:
      density: the share.
      unbiased: whether the mean is divided by the chance of an entry.
      seed: of the choice.
    """

    density: float
    unbiased: bool
    seed: int

    def init(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> jax.Array:
        """The key, the same on all replicas."""
        del leaves
        return jax.random.PRNGKey(self.seed)

    def reduce(
        self, leaves: Sequence[jax.Array], state: jax.Array, names: tuple[str, ...]
    ) -> Message:
        """Reduce the chosen ones."""
        flat = packed(leaves)
        width = min(max(1000, round(1 / self.density)), flat.size)
        count = share(self.density, width)
        rows = padded(flat, width).reshape(-1, width)
        key, now = jax.random.split(state)
        begin = jax.random.randint(now, (len(rows), 1), 0, width)
        places = (begin + np.arange(count) * width // count) % width
        values = jnp.take_along_axis(rows, places, 1)
        mean = lax.pmean(values, names) * (width / count if self.unbiased else 1)
        return Message(
            unpacked(_put(rows.shape, mean, places).ravel(), leaves),
            unsent(leaves, unpacked(_put(rows.shape, values, places).ravel(), leaves)),
            key,
        )


def share(density: float, of: int) -> int:
    """``ceil(density * of)``, at least one, not misled by rounding."""
    return max(1, min(of, math.ceil(density * of - 1e-6)))


def _gathered(arrays: Sequence[jax.Array], names: tuple[str, ...]) -> list[jax.Array]:
    """``(replicas, *shape)`` of each, with one collective for each dtype."""
    result: dict[int, jax.Array] = {}
    for dtype in sorted({x.dtype for x in arrays}, key=str):
        index = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        whole = axes.gather(packed([arrays[i] for i in index]), names)
        ends = np.cumsum([arrays[i].size for i in index])
        for i, end in zip(index, ends, strict=True):
            part = whole[:, end - arrays[i].size : end]
            result[i] = part.reshape(-1, *arrays[i].shape)
    return [result[i] for i in range(len(arrays))]


def _at(x: jax.Array, places: jax.Array) -> Any:
    """The entries of each row at its places; a flat index would not fit i32 in a large model."""
    return x.at[jnp.arange(len(x), dtype=jnp.int32)[:, None], places.astype(jnp.int32)]


def _put(shape: tuple[int, ...], values: jax.Array, places: jax.Array) -> jax.Array:
    zeros = _zeros(shape, values)
    return _at(zeros, places).set(values.astype(zeros.dtype), unique_indices=True)


def _added(shape: tuple[int, ...], values: jax.Array, places: jax.Array) -> jax.Array:
    """The sum over the replicas, one after the other.

    All at once would leave the order of equal places to the hardware, and the replicas would drift
    apart by rounding.
    """

    def add(total: jax.Array, theirs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        v, i = theirs
        return _at(total, i).add(v.astype(total.dtype), unique_indices=True), None

    return lax.scan(add, _zeros(shape, values), (values, places))[0]


def _zeros(shape: tuple[int, ...], values: jax.Array) -> jax.Array:
    """In f32 or wider, and varying over the axes over which the values do."""
    return axes.unify(jnp.zeros(shape, jnp.promote_types(values.dtype, jnp.float32)), values)
