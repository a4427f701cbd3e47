# SPDX-License-Identifier: Apache-2.0
"""A leaf of which some elements are chosen, taken at their places, and put back: array kernels."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from boostax._core import axes
from boostax.reduce import selection
from boostax.reduce.rows import Grid


def at(x: jax.Array, places: jax.Array) -> Any:
    """The elements of each row at its places; a flat index would not fit i32 in a large model."""
    return x.at[jnp.arange(len(x), dtype=jnp.int32)[:, None], places.astype(jnp.int32)]


# Traced once for each shape: a large model has hundreds of leaves, and a few shapes.
_once = functools.partial(jax.jit, inline=True)


_taken = _once(lambda x, places: at(x, places).get(mode="promise_in_bounds"))
_marked = _once(lambda x, places: at(x, places).set(True, unique_indices=True))
_plus = _once(lambda x, places, values: at(x, places).add(values, unique_indices=True))


def _narrow(places: jax.Array, size: int) -> jax.Array:
    return places.astype(jnp.uint16 if size <= 2**16 else jnp.uint32)


class Runs(NamedTuple):
    """A leaf from whose rows some elements each are chosen.

    Attributes:
      grid: its rows.
      sent: how many of each.
    """

    grid: Grid
    sent: int

    @property
    def shape(self) -> tuple[int, ...]:
        """In which places are indices."""
        return self.grid.one

    def largest(self, leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Places ``(rows, count)``, all of a row different; and bools like the leaf."""
        rows = jnp.abs(self.rows(leaf))
        places = _narrow(lax.top_k(rows, self.sent)[1], self.grid.width)
        mask = _marked(axes.unify(jnp.zeros(rows.shape, bool), rows), places)
        return places, self.leaf(mask)

    def taken(self, leaf: jax.Array, places: jax.Array) -> jax.Array:
        """The elements at their places."""
        return _taken(self.rows(leaf), places)

    def put(self, into: jax.Array, values: jax.Array, places: jax.Array) -> jax.Array:
        """Added to an array."""
        return _plus(into, places, values.astype(into.dtype))

    def rows(self, leaf: jax.Array) -> jax.Array:
        """A leaf, or what has its shape, as rows."""
        return self.grid.rows(leaf[None])[0]

    def leaf(self, array: jax.Array) -> jax.Array:
        """Such an array in the leaf's shape."""
        return self.grid.slices(array[None])[0]

    def lacking(self, counts: jax.Array) -> jax.Array:
        """Return how many elements have no place, of so many in each row."""
        return jnp.maximum(counts - self.sent, 0).sum(dtype=jnp.int32)


class Whole(Runs):
    """A leaf of all whose elements some are chosen."""

    @property
    def shape(self) -> tuple[int, ...]:
        """In which places are indices, one after the other."""
        return selection.shape(self.grid.one)

    def largest(self, leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Places ``(count,)``, ascending; and bools like the leaf."""
        places, mask = selection.largest(self.rows(leaf), self.sent)
        return _narrow(places, math.prod(self.grid.one)), super().leaf(mask)

    def taken(self, leaf: jax.Array, places: jax.Array) -> jax.Array:
        """The elements at their places."""
        word, column, bit = selection.at(places, self.grid.width)
        spot = self.rows(leaf).at[word * selection.BITS + bit, column]
        return spot.get(mode="promise_in_bounds")

    def put(self, into: jax.Array, values: jax.Array, places: jax.Array) -> jax.Array:
        """Added to an array."""
        spot = into.at[selection.at(places, self.grid.width)]
        # Sorted, or a TPU's compiler sorts them.
        return spot.add(values.astype(into.dtype), unique_indices=True, indices_are_sorted=True)

    def leaf(self, array: jax.Array) -> jax.Array:
        """Such an array in the leaf's shape."""
        return super().leaf(selection.rows(array))

    def lacking(self, counts: jax.Array) -> jax.Array:
        """Return how many elements have no place, of so many in each row."""
        return super().lacking(counts.sum(dtype=jnp.int32))


def added(view: Runs, values: jax.Array, places: jax.Array) -> jax.Array:
    """The sum over the replicas, one after the other.

    All at once would leave the order of equal places to the hardware, and the replicas would drift
    apart by rounding.
    """

    def add(total: jax.Array, theirs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return view.put(total, *theirs), None

    zeros = jnp.zeros(view.shape, jnp.promote_types(values.dtype, jnp.float32))
    return lax.scan(add, axes.unify(zeros, values), (values, places))[0]
