r"""What AdaSum computes: the pairwise operator, and the tree of pairs over the replicas.

.. math::
  A(a, b) = \Bigl(1 - \frac{a \cdot b}{2 \|a\|^2}\Bigr) a
          + \Bigl(1 - \frac{a \cdot b}{2 \|b\|^2}\Bigr) b

Orthogonal gradients add, parallel ones average. The operator is not associative, so the order is
part of the definition: neighbours first, ((0,1),(2,3)), then neighbours of those; an odd one out
passes up as it is. Only arrays here; how they travel is the subject of ``route.py``.

Every row has a power of two of its own, ``value = row * 2**exponent`` with the largest entry of the
row just below one. Products with powers of two are exact, so nothing over- or underflows in f32,
whatever the magnitude of the gradients, and even where one replica's are 1e30 times another's.

References:
  Maleki et al., Scaling Distributed Training with Adaptive Summation,
  https://arxiv.org/abs/2006.02924, 2020.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Total = Callable[[jax.Array], jax.Array]
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Segments:
    """Rows of several leaves: ``value = arrays[i][r] * 2**exponents[r, i]``.

    Attributes:
      arrays: one array ``(rows, ...)`` per leaf, in f32 or wider.
      exponents: i32 ``(rows, leaves)``.
    """

    arrays: list[jax.Array]
    exponents: jax.Array

    def __getitem__(self, rows: slice) -> "Segments":
        return Segments([x[rows] for x in self.arrays], self.exponents[rows])

    def __len__(self) -> int:
        return len(self.exponents)


class Tops(NamedTuple):
    """The largest exponent of each pair's group of leaves: i32 ``(pairs, groups)`` each."""

    left: jax.Array
    right: jax.Array


def exponent_of(largest: jax.Array) -> jax.Array:
    """The power of two just above a magnitude, where both it and its reciprocal are normal."""
    low, high = (-100, 126) if largest.dtype == jnp.float32 else (-250, 250)
    return jnp.clip(jnp.frexp(largest)[1], low, high)


def power_of_two(exponent: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``2**exponent``, exactly; below the normal numbers, the smallest of them."""
    limits = jnp.finfo(dtype)
    biased = jnp.clip(exponent, limits.minexp, limits.maxexp - 1) + (limits.maxexp - 1)
    # The bits themselves: exact on every backend, where exp2 and pow are not.
    bits = biased.astype(jnp.int32 if limits.bits == 32 else jnp.int64) << limits.nmant
    return lax.bitcast_convert_type(bits, dtype)


def combine_replicas(
    segments: Segments, groups: Sequence[int], total: Total
) -> tuple[list[jax.Array], jax.Array]:
    """AdaSum of the rows.

    Args:
      segments: a row per replica; a device may hold a part of every row. Here the arrays are the
        values themselves, and the exponents say by which powers of two to divide them.
      groups: for each leaf, the group whose dot products it belongs to, counted from 0: one of its
        own for AdaSum by leaf, the same for all for AdaSum by the whole tree.
      total: adds partial sums over the devices that hold the other parts of the rows; called once
        per level of the tree, with one array.

    Returns:
      A single row, the values themselves; and an array ``(2, leaves)`` that tells how parallel the
      rows were: squared norm of their sum and sum of their squared norms, in units of
      ``4**exponents.max(0)``.
    """
    members = [[i for i, g in enumerate(groups) if g == group] for group in range(max(groups) + 1)]
    left, right, odd = (_normalised(rows) for rows in _pairs(segments))
    summed = _squares_of_sum(segments)
    if len(segments) == 1:
        return [x[0] for x in segments.arrays], total(jnp.stack([summed, summed]))
    alignment: jax.Array | None = None
    while True:
        products = _products(left, right)
        tops = Tops(_tops(left, members), _tops(right, members))
        dots = _group(products, left, right, tops, members)
        if alignment is None:
            norms = _sum_of_squares(products, left, right, odd, segments.exponents.max(0))
            both = total(jnp.concatenate([dots.ravel(), summed, norms]))
            dots, alignment = both[: dots.size].reshape(dots.shape), both[dots.size :]
        else:
            dots = total(dots)
        combined = _combine(left, right, tops, dots, groups)
        rows = _concatenate(combined, odd) if len(odd) else combined
        if len(rows) == 1:
            columns = zip(rows.arrays, rows.exponents[0], strict=True)
            values = [x[0] * power_of_two(e, x.dtype) for x, e in columns]
            return values, alignment.reshape(2, -1)
        left, right, odd = _pairs(rows)


def beside(parts: Sequence[Segments]) -> Segments:
    """The leaves of several buckets as one."""
    arrays = [x for part in parts for x in part.arrays]
    return Segments(arrays, jnp.concatenate([part.exponents for part in parts], 1))


def _pairs(rows: Segments) -> tuple[Segments, Segments, Segments]:
    even = len(rows) // 2 * 2
    return rows[0:even:2], rows[1:even:2], rows[even:]


def _normalised(rows: Segments) -> Segments:
    # After the rows are paired: XLA:CPU took 5 times as long for a factor per row before that.
    columns = zip(rows.arrays, rows.exponents.T, strict=True)
    # A quotient, which XLA:CPU computes once and not anew for every entry.
    arrays = [x * _column(1 / power_of_two(e, x.dtype), x) for x, e in columns]
    return Segments(arrays, rows.exponents)


def _column(factors: jax.Array, like: jax.Array) -> jax.Array:
    """One factor per row."""
    return factors.reshape(-1, *(1,) * (like.ndim - 1))


def _tops(rows: Segments, members: list[list[int]]) -> jax.Array:
    if len(members) == len(rows.arrays):
        return rows.exponents
    return jnp.stack([rows.exponents[:, np.array(m)].max(1) for m in members], 1)


def _products(left: Segments, right: Segments) -> jax.Array:
    """``(3, pairs, leaves)``: a.a, a.b and b.b of every pair."""
    pairs = zip(left.arrays, right.arrays, strict=True)
    return jnp.stack([_inner_products(a, b) for a, b in pairs], 2)


def _inner_products(a: jax.Array, b: jax.Array) -> jax.Array:
    """``(3, pairs)`` from two arrays ``(pairs, ...)``.

    One reduction with three results reads the rows once, and equal rows give equal sums; three
    sums, or one over a stack, took XLA:CPU 2 to 5 times as long. It adds in sequence, so it goes
    by blocks: the error then does not grow with the length.
    """
    length = a.shape[-1]
    whole = length - length % BLOCK
    sums = jnp.zeros((3, len(a)), a.dtype)
    if whole:
        blocks = (*a.shape[:-1], -1, BLOCK)
        sums += _reduce(a[..., :whole].reshape(blocks), b[..., :whole].reshape(blocks))
    return sums + _reduce(a[..., whole:], b[..., whole:]) if whole < length else sums


def _reduce(a: jax.Array, b: jax.Array) -> jax.Array:
    zero = jnp.zeros((), a.dtype)
    add = lambda x, y: tuple(p + q for p, q in zip(x, y, strict=True))  # noqa: E731
    sums = jnp.stack(lax.reduce((a * a, a * b, b * b), (zero,) * 3, add, (a.ndim - 1,)))
    return sums.sum(tuple(range(2, sums.ndim)))


def _group(
    products: jax.Array, left: Segments, right: Segments, tops: Tops, members: list[list[int]]
) -> jax.Array:
    """``(3, pairs, groups)``: the dot products of whole groups, in units of their tops."""
    if len(members) == len(left.arrays):
        return products
    columns: list[jax.Array] = []
    for group, leaves in enumerate(members):
        index = np.array(leaves)
        low = left.exponents[:, index] - tops.left[:, group, None]
        high = right.exponents[:, index] - tops.right[:, group, None]
        units = power_of_two(jnp.stack([2 * low, low + high, 2 * high]), products.dtype)
        columns.append((products[:, :, index] * units).sum(2))
    return jnp.stack(columns, 2)


def _combine(
    left: Segments, right: Segments, tops: Tops, dots: jax.Array, groups: Sequence[int]
) -> Segments:
    index = np.array(groups)
    aa, ab, bb = (x[:, index] for x in dots)
    # The dot products are in the groups' units: the difference of the tops makes them fit a and b.
    lead = (tops.right - tops.left)[:, index]
    own_a, own_b = left.exponents, right.exponents
    cross_a, cross_b = own_a + lead, own_b - lead
    units = jnp.maximum(jnp.maximum(own_a, own_b), jnp.maximum(cross_a, cross_b))
    weight_a = _weight(ab, aa, own_a - units, cross_a - units)
    weight_b = _weight(ab, bb, own_b - units, cross_b - units)
    arrays = [
        _column(weight_a[:, i], a) * a + _column(weight_b[:, i], b) * b
        for i, (a, b) in enumerate(zip(left.arrays, right.arrays, strict=True))
    ]
    return Segments(arrays, units)


def _weight(dot: jax.Array, norm: jax.Array, own: jax.Array, cross: jax.Array) -> jax.Array:
    """``2**own - 2**cross * dot / (2 * norm)``; of a zero row, ``2**own``.

    Written so that a NaN is never taken for a zero, and as a quotient: see ``_normalised``.
    """
    own, cross = power_of_two(own, dot.dtype), power_of_two(cross, dot.dtype)
    zero = norm <= jnp.finfo(dot.dtype).tiny
    return jnp.where(zero, own, 2 * norm * own - cross * dot) / jnp.where(zero, 1, 2 * norm)


def _concatenate(first: Segments, second: Segments) -> Segments:
    arrays = [jnp.concatenate(pair) for pair in zip(first.arrays, second.arrays, strict=True)]
    return Segments(arrays, jnp.concatenate([first.exponents, second.exponents]))


def _squares_of_sum(rows: Segments) -> jax.Array:
    """``(leaves,)``: the squared norm of the sum of all rows, in units of ``4**top``."""
    tops = rows.exponents.max(0)
    columns = zip(rows.arrays, tops, strict=True)
    sums = [x.sum(0) * (1 / power_of_two(top, x.dtype)) for x, top in columns]
    return jnp.stack([jnp.sum(x * x) for x in sums])


def _sum_of_squares(
    products: jax.Array, left: Segments, right: Segments, odd: Segments, tops: jax.Array
) -> jax.Array:
    """``(leaves,)``: the sum of the squared norms of all rows, in units of ``4**top``."""
    in_units = lambda x, rows: x * power_of_two(2 * (rows.exponents - tops), x.dtype)  # noqa: E731
    norms = in_units(products[0], left).sum(0) + in_units(products[2], right).sum(0)
    if len(odd):
        norms += in_units(jnp.stack([jnp.sum(x * x) for x in odd.arrays])[None], odd)[0]
    return norms
