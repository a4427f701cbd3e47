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
    """Rows of several leaves, or pieces of leaves, each with a power of two of its own.

    Attributes:
      arrays: one array ``(rows, ...)`` per piece, in f32 or wider.
      exponents: i32 ``(rows, pieces)``, the same for all pieces of a leaf.
      near_one: whether the arrays have been divided by their powers of two. Otherwise they are the
        values themselves.
    """

    arrays: list[jax.Array]
    exponents: jax.Array
    near_one: bool = False

    def __getitem__(self, rows: slice) -> "Segments":
        return Segments([x[rows] for x in self.arrays], self.exponents[rows], self.near_one)

    def __len__(self) -> int:
        return len(self.exponents)

    def only_row(self) -> list[jax.Array]:
        """The values of a single row."""
        if not self.near_one:
            return [x[0] for x in self.arrays]
        return [grown(x[0], e) for x, e in zip(self.arrays, self.exponents[0], strict=True)]


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


def grown(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """``x * 2**exponent``; finite stays finite, though rounding may have led beyond the range."""
    largest = jnp.finfo(x.dtype).max
    product = x * power_of_two(exponent, x.dtype)
    return jnp.where(jnp.isfinite(x), jnp.clip(product, -largest, largest), product)


def combine_replicas(
    segments: Segments, groups: Sequence[int], total: Total
) -> tuple[list[jax.Array], jax.Array]:
    """AdaSum of the rows.

    Args:
      segments: a row per replica; a device may hold a part of every row.
      groups: for each piece, the group whose dot products it belongs to, counted from 0: its leaf
        for AdaSum by leaf, the same for all for AdaSum by the whole tree.
      total: adds partial sums over the devices that hold the other parts of the rows; called once
        per level of the tree, with one array.

    Returns:
      The values of a single row; and an array ``(2, pieces)`` that tells how parallel the
      rows were: squared norm of their sum and sum of their squared norms, in units of
      ``4**exponents.max(0)``.
    """
    members = [[i for i, g in enumerate(groups) if g == group] for group in range(max(groups) + 1)]
    left, right, odd = (_near_one(rows) for rows in _pairs(segments))
    units = segments.exponents.max(0)
    summed = _squares_of_sum(segments, units)
    if len(segments) == 1:
        return segments.only_row(), total(jnp.stack([summed, summed]))
    alignment: jax.Array | None = None
    while True:
        products = _products(left, right)
        tops = Tops(_tops(left, members), _tops(right, members))
        parts = jnp.concatenate([x.ravel() for x in _group(products, left, right, tops, members)])
        if alignment is None:
            norms = _sum_of_squares(products, left, right, odd, units)
            both = total(jnp.concatenate([parts, summed, norms]))
            parts, alignment = both[: parts.size], both[parts.size :].reshape(2, -1)
        else:
            parts = total(parts)
        combined = _combine(left, right, tops, parts.reshape(4, -1, len(members)), groups)
        rows = _concatenate(combined, odd) if len(odd) else combined
        if len(rows) == 1:
            return rows.only_row(), alignment
        left, right, odd = _pairs(rows)


def beside(parts: Sequence[Segments]) -> Segments:
    """The leaves of several buckets as one."""
    arrays = [x for part in parts for x in part.arrays]
    exponents = jnp.concatenate([part.exponents for part in parts], 1)
    return Segments(arrays, exponents, parts[0].near_one)


def _pairs(rows: Segments) -> tuple[Segments, Segments, Segments]:
    even = len(rows) // 2 * 2
    return rows[0:even:2], rows[1:even:2], rows[even:]


def _near_one(rows: Segments) -> Segments:
    """Divided by the powers of two."""
    if rows.near_one:
        return rows
    # Done to the paired rows: a factor per row before they are paired took XLA:CPU 5 times as long.
    powers = _powers(rows.exponents, rows)
    return Segments(_times(rows, jnp.ones_like(powers), powers), rows.exponents, True)


def _powers(exponents: jax.Array, like: Segments) -> jax.Array:
    return power_of_two(exponents, like.arrays[0].dtype)


def _times(rows: Segments, above: jax.Array, below: jax.Array) -> list[jax.Array]:
    """Rows times ``above / below``, each ``(rows, pieces)``.

    The division is the last thing done to a factor before it meets its rows: XLA:CPU computes a
    division once, where it computes anything cheaper anew for every entry (4 to 8 times as long).
    """
    columns = zip(rows.arrays, above.T, below.T, strict=True)
    return [x * _column(high.astype(x.dtype) / low.astype(x.dtype), x) for x, high, low in columns]


def _column(factors: jax.Array, like: jax.Array) -> jax.Array:
    return factors.reshape(-1, *(1,) * (like.ndim - 1))


def _tops(rows: Segments, members: list[list[int]]) -> jax.Array:
    if len(members) == len(rows.arrays):
        return rows.exponents
    return jnp.stack([rows.exponents[:, np.array(m)].max(1) for m in members], 1)


class Products(NamedTuple):
    """What one reading of the pairs tells.

    Attributes:
      dots: ``(3, pairs, pieces or groups)``: a.a, a.b and b.b.
      apart: ``(pairs, pieces or groups)``: 0 where both rows are the same, bit for bit.
    """

    dots: jax.Array
    apart: jax.Array


def _products(left: Segments, right: Segments) -> Products:
    pairs = zip(left.arrays, right.arrays, strict=True)
    sums = jnp.stack([_inner_products(a, b) for a, b in pairs], 2)
    return Products(sums[:3], sums[3] + (left.exponents != right.exponents))


def _inner_products(a: jax.Array, b: jax.Array) -> jax.Array:
    """``(4, pairs)`` from two arrays ``(pairs, ...)``: a.a, a.b, b.b and the sum of abs(a - b).

    One reduction with several results reads the rows once; three sums, or one over a stack, took
    XLA:CPU 2 to 5 times as long. It adds in sequence, so it goes by blocks: the error then does
    not grow with the length.
    """
    length = a.shape[-1]
    whole = length - length % BLOCK
    sums = jnp.zeros((4, len(a)), a.dtype)
    if whole:
        blocks = (*a.shape[:-1], -1, BLOCK)
        sums += _reduce(a[..., :whole].reshape(blocks), b[..., :whole].reshape(blocks))
    return sums + _reduce(a[..., whole:], b[..., whole:]) if whole < length else sums


def _reduce(a: jax.Array, b: jax.Array) -> jax.Array:
    zero = jnp.zeros((), a.dtype)
    add = lambda x, y: tuple(p + q for p, q in zip(x, y, strict=True))  # noqa: E731
    operands = (a * a, a * b, b * b, jnp.abs(a - b))
    sums = jnp.stack(lax.reduce(operands, (zero,) * 4, add, (a.ndim - 1,)))
    return sums.sum(tuple(range(2, sums.ndim)))


def _group(
    products: Products, left: Segments, right: Segments, tops: Tops, members: list[list[int]]
) -> Products:
    """Of whole groups, the dot products in units of their tops."""
    if len(members) == len(left.arrays):
        return products
    dots: list[jax.Array] = []
    for group, pieces in enumerate(members):
        index = np.array(pieces)
        low = left.exponents[:, index] - tops.left[:, group, None]
        high = right.exponents[:, index] - tops.right[:, group, None]
        units = _powers(jnp.stack([2 * low, low + high, 2 * high]), left)
        dots.append((products.dots[:, :, index] * units).sum(2))
    apart = [products.apart[:, np.array(pieces)].sum(1) for pieces in members]
    return Products(jnp.stack(dots, 2), jnp.stack(apart, 1))


def _combine(
    left: Segments, right: Segments, tops: Tops, sums: jax.Array, groups: Sequence[int]
) -> Segments:
    index = np.array(groups)
    aa, ab, bb, apart = (x[:, index] for x in sums)
    # The dot products are in the groups' units: the difference of the tops makes them fit a and b.
    lead = (tops.right - tops.left)[:, index]
    own_a, own_b = left.exponents, right.exponents
    cross_a, cross_b = own_a + lead, own_b - lead
    units = jnp.maximum(jnp.maximum(own_a, own_b), jnp.maximum(cross_a, cross_b))
    same = apart == 0
    weight_a = _weight(ab, aa, own_a - units, cross_a - units, same)
    weight_b = _weight(ab, bb, own_b - units, cross_b - units, same)
    weighted = zip(_times(left, *weight_a), _times(right, *weight_b), strict=True)
    return Segments([a + b for a, b in weighted], units, True)


def _weight(
    dot: jax.Array, norm: jax.Array, own: jax.Array, cross: jax.Array, same: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``2**own - 2**cross * dot / (2 * norm)`` as a quotient.

    Of a zero row it is ``2**own``, of equal rows half of that.

    The dot products of equal rows may differ in their last bit, because XLA contracts some of them
    to fused multiply-adds. Written so that a NaN is never taken for a zero.
    """
    own, cross = power_of_two(own, dot.dtype), power_of_two(cross, dot.dtype)
    zero = norm <= jnp.finfo(dot.dtype).tiny
    weight = jnp.where(same, own - cross / 2, 2 * norm * own - cross * dot)
    return jnp.where(zero, own, weight), jnp.where(zero | same, 1, 2 * norm)


def _concatenate(first: Segments, second: Segments) -> Segments:
    arrays = [jnp.concatenate(pair) for pair in zip(first.arrays, second.arrays, strict=True)]
    return Segments(arrays, jnp.concatenate([first.exponents, second.exponents]), True)


def _squares_of_sum(rows: Segments, units: jax.Array) -> jax.Array:
    """``(pieces,)``: the squared norm of the sum of all rows, in units of ``4**units``."""
    if rows.near_one:
        powers = _powers(units - rows.exponents, rows)
        sums = [_added(x) for x in _times(rows, jnp.ones_like(powers), powers)]
    else:
        # Not from rows near one: a second kind of reader made XLA:CPU write those to memory.
        columns = zip(rows.arrays, _powers(units, rows), strict=True)
        sums = [_added(x) * (1 / power.astype(x.dtype)) for x, power in columns]
    return jnp.stack([jnp.sum(x * x) for x in sums])


def _added(rows: jax.Array) -> jax.Array:
    # As a product: a reduction over the first dimension took XLA:CPU up to 8 times as long.
    return jnp.tensordot(jnp.ones(len(rows), rows.dtype), rows, 1, precision=lax.Precision.HIGHEST)


def _sum_of_squares(
    products: Products, left: Segments, right: Segments, odd: Segments, units: jax.Array
) -> jax.Array:
    """``(pieces,)``: the sum of the squared norms of all rows, in units of ``4**units``."""
    scaled = lambda x, rows: x * _powers(2 * (rows.exponents - units), rows)  # noqa: E731
    norms = scaled(products.dots[0], left).sum(0) + scaled(products.dots[2], right).sum(0)
    if len(odd):
        norms += scaled(jnp.stack([jnp.sum(x * x) for x in odd.arrays])[None], odd)[0]
    return norms
