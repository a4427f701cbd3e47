# SPDX-License-Identifier: Apache-2.0
r"""The computation of AdaSum: the pairwise operator, and the tree of pairs over the replicas.

.. math::
  A(a, b) = \Bigl(1 - \frac{a \cdot b}{2 \|a\|^2}\Bigr) a
          + \Bigl(1 - \frac{a \cdot b}{2 \|b\|^2}\Bigr) b

Orthogonal gradients are added, and parallel gradients are averaged. The operator is not
associative, so the order is part of the definition: neighbours first, ((0,1),(2,3)), then
neighbouring pairs. A *row* is the gradient of one replica. A row without a partner moves up
unchanged. This file computes with arrays, and ``exchange.py`` sends arrays.

``_read`` computes the dot products of all pairs. From these products, ``_weight`` computes the
factors ``1 - a.b / 2|a|**2`` and ``1 - a.b / 2|b|**2``. A *node* of the tree is the AdaSum of
several rows. ``_combine`` multiplies the factors of the rows in a node by the factor of the node.
``_tree`` multiplies each row by its factors of all levels, and sums the rows.

Every row is stored with a power of two, ``value = row * 2**exponent``, so that the largest element
of ``row`` is just below one. So no value over- or underflows in f32, even if the gradients of one
replica are 1e30 times those of another replica. Products with powers of two are exact.

References:
  Maleki et al., Scaling Distributed Training with Adaptive Summation,
  https://arxiv.org/abs/2006.02924, 2020.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import trees
from boostax.reduce.codec import Arrays, packed, unpacked

# A long sequential sum loses digits, so runs of this many elements are summed first.
RUN = 256


class Bucket(NamedTuple):
    """The same columns of the rows of all replicas.

    Attributes:
      rows: an array ``(..., columns)`` for each replica, in f32 or wider.
      owners: the leaf of every block of columns, or of all columns together.
      copies: the number of devices that have the same part of the rows, among all devices over
        which a sum is computed.
    """

    rows: list[jax.Array]
    owners: np.ndarray
    copies: int = 1


class Rows(NamedTuple):
    """A row per replica, or this device's part of every row.

    Attributes:
      buckets: the columns.
      exponents: i32 ``(rows, leaves)``: the exponents of two for every row and leaf.
      near_one: whether the rows have been divided by their powers of two.
    """

    buckets: list[Bucket]
    exponents: jax.Array
    near_one: bool = False

    def factors(self, exponents: jax.Array) -> "Factors":
        """Return factors that convert the rows to units of ``2**exponents``."""
        dtype = jnp.result_type(*(bucket.rows[0] for bucket in self.buckets))
        ones = jnp.ones(self.exponents.shape, dtype)
        if self.near_one:
            return Factors(power_of_two(self.exponents - exponents, dtype), ones)
        return Factors(ones, ones * power_of_two(exponents, dtype))


class Factors(NamedTuple):
    """Factors ``above / below``, each ``(rows, leaves)``.

    The division comes directly before the product with a row. XLA:CPU computes a division once, but
    repeats any cheaper operation for every element, which takes 4 to 8 times as long.
    """

    above: jax.Array
    below: jax.Array


class Nodes(NamedTuple):
    """A level of the tree.

    Attributes:
      level: a node combines up to ``2**level`` rows.
      exponents: i32 ``(nodes, leaves)``: the powers of two of the nodes.
      factors: the factors of the rows; a node is the sum of the products of its rows and their
        factors.
    """

    level: int
    exponents: jax.Array
    factors: Factors

    @property
    def pairs(self) -> tuple[jax.Array, jax.Array]:
        """Return the exponents of the left and right nodes of the next pairs."""
        even = len(self.exponents) // 2 * 2
        return self.exponents[0:even:2], self.exponents[1:even:2]


def power_of_two(exponent: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return ``2**exponent`` exactly, but at least the smallest normal number."""
    limits = jnp.finfo(dtype)
    biased = jnp.clip(exponent, limits.minexp, limits.maxexp - 1) + (limits.maxexp - 1)
    # The number is built from its bits, because exp2 and pow are not exact on every backend.
    bits = biased.astype(jnp.int32 if limits.bits == 32 else jnp.int64) << limits.nmant
    return lax.bitcast_convert_type(bits, dtype)


def grown(x: jax.Array, exponents: jax.Array, owners: np.ndarray) -> jax.Array:
    """Return ``x * 2**exponents``, with one exponent per leaf; finite values remain finite."""
    blocks, powers = leafwise(x, power_of_two(exponents, x.dtype), owners)
    return (trees.clip_finite(blocks, jnp.finfo(x.dtype).max / powers) * powers).reshape(x.shape)


def leafwise(x: jax.Array, values: jax.Array, owners: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return ``x`` in blocks of columns, and ``values`` broadcast to the blocks.

    ``values`` has the shape ``(*lead, leaves)``, and ``x`` has the same leading dimensions
    ``lead``.
    """
    if len(owners) == 1:
        by_leaf = values[..., owners[0]]
        return x, by_leaf.reshape(*by_leaf.shape, *[1] * (x.ndim - by_leaf.ndim))
    blocks = x.reshape(*x.shape[:-1], len(owners), -1)
    by_block = values[..., owners[:1] if (owners == owners[0]).all() else owners]
    *lead, last = by_block.shape
    return blocks, by_block.reshape(*lead, *[1] * (blocks.ndim - 2 - len(lead)), last, 1)


def combine_replicas(
    rows: Rows, total: Callable[[jax.Array], jax.Array], *, together: bool = False
) -> tuple[list[jax.Array], jax.Array]:
    """Compute the AdaSum of rows.

    Args:
      rows: the rows; a device may have only a part of every row.
      total: a function that sums partial sums over the devices with the other parts of the rows.
        ``total`` is called once per level of the tree, with one array.
      together: whether dot products are sums over all leaves, as in AdaSum of the complete tree.

    Returns:
      The combined row, as an array for each bucket, and an array ``(2, leaves)`` that measures how
      parallel the rows were. The array has the squared norm of the rows' sum, and the sum of the
      rows' squared norms, in units of ``4**exponents.max(0)``.
    """
    units = rows.exponents.max(0)
    if len(rows.exponents) == 1:
        factors = rows.factors(units)
        norms = _sums(rows, lambda bucket: [_tree(bucket, factors, 0)[0] ** 2])[0]
        row = [bucket.rows[0] for bucket in rows.buckets]
        if rows.near_one:
            row = [grown(b.rows[0], rows.exponents[0], b.owners) for b in rows.buckets]
        return row, total(jnp.stack([norms, norms]))
    nodes = Nodes(0, rows.exponents, rows.factors(rows.exponents))
    alignment: list[jax.Array] = []
    while len(nodes.exponents) > 1:
        dots, difference, of_sum = _read(rows, nodes, units)
        # The dot products of a leaf have units, whose exponents are in ``nodes.pairs``. With
        # ``together``, all leaves share each dot product, and its units have the largest exponents
        # of all leaves.
        tops = tuple(x.max(1, keepdims=True) if together else x for x in nodes.pairs)
        partial = [dots, difference]
        if together:
            low, high = (x - top for x, top in zip(nodes.pairs, tops, strict=True))
            powers = power_of_two(jnp.stack([2 * low, low + high, 2 * high]), dots.dtype)
            partial = [(dots * powers).sum(2, keepdims=True), difference.sum(1, keepdims=True)]
        if not nodes.level:
            partial.append(_sum_of_squares(rows, nodes, dots, units))
        partial += of_sum
        dots, difference, *norms = unpacked(total(packed(partial)), partial)
        alignment += norms
        nodes = _combine(nodes, tops, dots, difference)
    row = []
    for bucket in rows.buckets:
        value = _tree(bucket, nodes.factors, nodes.level)[0].reshape(bucket.rows[0].shape)
        row.append(grown(value, nodes.exponents[0], bucket.owners))
    return row, jnp.stack(alignment[::-1])


def join_rows(parts: Sequence[Rows], copies: Sequence[int]) -> Rows:
    """Join the buckets of several ``Rows``; ``copies`` has ``Bucket.copies`` for each ``Rows``."""
    buckets: list[Bucket] = []
    leaves = 0
    for part, count in zip(parts, copies, strict=True):
        buckets += [Bucket(x.rows, x.owners + leaves, count) for x in part.buckets]
        leaves += part.exponents.shape[1]
    return Rows(buckets, jnp.concatenate([part.exponents for part in parts], 1), parts[0].near_one)


def _tree(bucket: Bucket, factors: Factors, level: int) -> list[jax.Array]:
    """Return the nodes of a level, summed as a tree, so that the result of equal rows is exact.

    The rows are separate arrays, which are added in pairs, so XLA:CPU reads the rows of the
    exchange without a copy.
    """
    is_single = (bucket.owners == bucket.owners[0]).all()
    above, below = (x[:, bucket.owners[:1] if is_single else bucket.owners] for x in factors)
    weights = above / below
    n = len(bucket.owners)
    shape = () if n == 1 else (weights.shape[1], 1)
    # A leaf that is not packed keeps its own shape, because other shapes have other tilings on a
    # TPU.
    blocks = (x if n == 1 else x.reshape(*x.shape[:-1], n, -1) for x in bucket.rows)
    nodes = [x * w.astype(x.dtype).reshape(shape) for w, x in zip(weights, blocks, strict=True)]
    for _ in range(level):
        odd = nodes[len(nodes) // 2 * 2 :]
        nodes = [a + b for a, b in zip(nodes[0::2], nodes[1::2], strict=False)] + odd
    return nodes


def _sums(rows: Rows, terms_of: Callable[[Bucket], Arrays]) -> jax.Array:
    """Return ``(terms, leaves)``: the sum of each result of ``terms_of`` over each leaf's elements.

    One reduction with many results reads its operands once. Several reductions, or one reduction of
    a stack, took XLA:CPU 2 to 5 times as long.
    """
    by_leaf: dict[int, jax.Array] = {}
    for bucket in rows.buckets:
        owners = bucket.owners
        terms = tuple(terms_of(bucket))
        last = terms[0].ndim - 1
        dims = tuple(range(last)) if len(owners) == 1 else (last,)
        if len(owners) == 1 and terms[0].size == terms[0].shape[-1]:
            # A sum over a single line crashes XLA:CPU of jaxlib 0.10.0.
            lines = [jnp.pad(x.ravel(), (0, -x.size % RUN)) for x in terms]
            terms = tuple(x.reshape(1, -1, RUN) for x in lines)
            dims = (0, 1)
        zeros = (jnp.zeros((), terms[0].dtype),) * len(terms)
        sums = jnp.stack(lax.reduce(terms, zeros, lambda x, y: tuple(map(lax.add, x, y)), dims))
        sums = sums if bucket.copies == 1 else sums / bucket.copies
        if len(owners) == 1:
            padded = jnp.pad(sums, [(0, 0), (0, -sums.shape[1] % RUN)])
            by_leaf[owners[0]] = padded.reshape(len(sums), -1, RUN).sum(2).sum(1)
            continue
        begin = np.flatnonzero(np.diff(owners, prepend=-1))
        for i, j in zip(begin, [*begin[1:], len(owners)], strict=True):
            by_leaf[owners[i]] = sums[..., i:j].reshape(len(sums), -1).sum(1)
    return jnp.stack([by_leaf[leaf] for leaf in range(len(by_leaf))], 1)


def _read(
    rows: Rows, nodes: Nodes, units: jax.Array
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Return the products of the pairs, from one reading of the rows.

    The first result has the products a.a, a.b and b.b of each pair, ``(3, pairs, leaves)``. The
    second result is the sum of ``|a - b|``, ``(pairs, leaves)``, which is 0 only if a and b are
    equal bit for bit. At the last pair of the tree, the third result is the squared norm of the sum
    of all rows, ``(leaves,)``, in units of ``4**units``.
    """
    left, right = nodes.pairs
    last = len(nodes.exponents) == 2
    common = rows.factors(units)

    def of_pairs(bucket: Bucket) -> list[jax.Array]:
        values = _tree(bucket, nodes.factors, nodes.level)
        terms: list[jax.Array] = []
        for a, b in zip(values[0::2], values[1::2], strict=False):
            terms += [a * a, a * b, b * b, jnp.abs(a - b)]
        return [*terms, _tree(bucket, common, nodes.level + 1)[0] ** 2] if last else terms

    by_leaf = _sums(rows, of_pairs)
    pairs = by_leaf[: 4 * len(left)].reshape(len(left), 4, -1)
    dots = jnp.moveaxis(pairs[:, :3], 0, 1)
    return dots, pairs[:, 3] + (left != right), [by_leaf[4]] if last else []


def _sum_of_squares(rows: Rows, nodes: Nodes, dots: jax.Array, units: jax.Array) -> jax.Array:
    """Return ``(leaves,)``: the sum of all rows' squared norms, in units of ``4**units``."""
    left, right = nodes.pairs
    of_left = dots[0] * power_of_two(2 * (left - units), dots.dtype)
    norms = (of_left + dots[2] * power_of_two(2 * (right - units), dots.dtype)).sum(0)
    if len(nodes.exponents) % 2:
        # The last row has no partner.
        of_last = _sums(rows, lambda bucket: [_tree(bucket, nodes.factors, 0)[-1] ** 2])[0]
        norms += of_last * power_of_two(2 * (nodes.exponents[-1] - units), dots.dtype)
    return norms


def _combine(nodes: Nodes, tops: Arrays, dots: jax.Array, difference: jax.Array) -> Nodes:
    """Return the next level: each pair becomes a node, and the factors of its rows are updated."""
    aa, ab, bb = dots
    # The units are ``4**tops[0]`` for ``a.a``, ``4**tops[1]`` for ``b.b``, and ``2**sum(tops)`` for
    # ``a.b``. So the unit of ``a.b / a.a`` is ``2**lead``, and the unit of ``a.b / b.b`` is
    # ``2**-lead``.
    lead = tops[1] - tops[0]
    left, right = nodes.pairs
    cross_left = left + lead
    cross_right = right - lead
    units = jnp.maximum(jnp.maximum(left, right), jnp.maximum(cross_left, cross_right))
    same = difference == 0
    of_a = _weight(ab, aa, left - units, cross_left - units, same)
    of_b = _weight(ab, bb, right - units, cross_right - units, same)
    odd = nodes.exponents[2 * len(units) :]
    ones = jnp.ones(odd.shape, ab.dtype)
    shape = len(units), 2, units.shape[1]
    # For each row, the index of the node that contains the row.
    node = np.arange(len(nodes.factors.above)) >> nodes.level
    pairs = (jnp.broadcast_to(jnp.stack(x, 1), shape) for x in zip(of_a, of_b, strict=True))
    above, below = (jnp.concatenate([x.reshape(-1, shape[2]), ones]) for x in pairs)
    factors = Factors(nodes.factors.above / nodes.factors.below * above[node], below[node])
    return Nodes(nodes.level + 1, jnp.concatenate([units, odd]), factors)


def _weight(
    dot: jax.Array, norm: jax.Array, unit: jax.Array, cross: jax.Array, same: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the numerator and the denominator of ``1 - a.b / 2|a|**2``, the factor of ``a``.

    To compute the factor of ``b``, exchange ``a`` and ``b``. With powers of two, the factor of
    ``a`` is ``2**unit - 2**cross * dot / (2 * norm)``, where ``dot`` is ``a.b`` and ``norm`` is
    ``|a|**2``. The factor of a zero row is ``2**unit``. The factor of two equal rows is half of
    ``2**unit``.

    ``same`` is needed because the dot products of equal rows may differ in their last bit: XLA
    contracts some products to fused multiply-adds. If a value is NaN, the row is neither zero nor
    equal to the other row, so the factor is NaN.
    """
    unit = power_of_two(unit, dot.dtype)
    cross = power_of_two(cross, dot.dtype)
    zero = norm <= jnp.finfo(dot.dtype).tiny
    weight = jnp.where(same, unit - cross / 2, 2 * norm * unit - cross * dot)
    return jnp.where(zero, unit, weight), jnp.where(zero | same, 1, 2 * norm)
