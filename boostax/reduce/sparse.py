# SPDX-License-Identifier: Apache-2.0
"""Sparse reductions: a few elements of every leaf travel, the rest waits."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from boostax._core import axes, checks, trees
from boostax.reduce import elements, exchange, selection
from boostax.reduce.codec import Arrays, Codec, Message, packed, staged, switched, unpacked, unsent
from boostax.reduce.feedback import Dense, compress
from boostax.reduce.rows import Grid

PyTree = Any
# Leaves of so many elements may be written anew, and sorted.
SMALL = 2**14
TILE = 2048


@dataclasses.dataclass(frozen=True)
class Cut:
    """Which elements are sent at all, and as what.

    Attributes:
      threshold: smaller magnitudes are not sent; ``None`` sends any.
      relative: whether the threshold is in units of the leaf's root mean square.
      value_dtype: of the values on the wire; ``None`` for their own.
    """

    threshold: float | None = None
    relative: bool = False
    value_dtype: np.dtype[Any] | None = None

    def least(self, leaf: jax.Array) -> jax.Array | float:
        """The smallest magnitude that is sent."""
        if self.threshold is None or not self.relative:
            return self.threshold or 0.0
        return self.threshold * jnp.sqrt(jnp.sum(leaf * leaf) / leaf.size)

    def reach(self, values: jax.Array, least: jax.Array | float) -> jax.Array:
        """Which are to be sent; zeros need no place."""
        return (jnp.abs(values) >= least) & (values != 0)

    def coded(self, values: jax.Array, least: jax.Array | float) -> jax.Array:
        """What is sent of the values."""
        if self.threshold is not None:
            values = jnp.where(jnp.abs(values) >= least, values, 0)
        return values if self.value_dtype is None else trees.saturate(values, self.value_dtype)


class _Bucket(NamedTuple):
    """Leaves from which is chosen together.

    Attributes:
      leaves: their indices.
      array: the leaf; of several a vector, without what is below the threshold of its leaf.
      least: the threshold of the array.
      view: its rows.
    """

    leaves: list[int]
    array: jax.Array
    least: jax.Array | float
    view: elements.Runs


@dataclasses.dataclass(frozen=True)
class Largest(Codec):
    """The elements of largest magnitude of every leaf, or bucket of leaves, with their places.

    Attributes:
      count: of so many elements, how many are sent.
      block: choose from each run of so many elements by itself; ``None`` for a leaf as a whole.
      cut: what is below it is not sent, though its place on the wire is taken.
      bucket_bytes: see ``top_k_reduce``.
      lossy: see ``Codec``.
    """

    count: Callable[[int], int]
    block: int | None = None
    cut: Cut = Cut()
    bucket_bytes: int | None = None

    lossy: bool = True

    def reduce(self, leaves: Arrays, state: PyTree, names: tuple[str, ...]) -> Message:
        """Gather everybody's choice, and add up."""
        least = [self.cut.least(x) for x in leaves]
        buckets = self._buckets(leaves, least)
        places, masks = zip(*(bucket.view.largest(bucket.array) for bucket in buckets), strict=True)
        chosen = zip(buckets, places, strict=True)
        values = [self.cut.coded(x.view.taken(x.array, i), x.least) for x, i in chosen]
        everyones = zip(buckets, _gathered(values, names), _gathered(places, names), strict=True)
        summed = [x.view.leaf(elements.added(x.view, v, i)) for x, v, i in everyones]
        # Written as it is: what reads it would be moved before the transposition by a TPU's
        # compiler, and every result written too.
        totals = [lax.optimization_barrier(x) for x in summed]
        trios = zip(leaves, least, _apart(leaves, buckets, masks), strict=True)
        coded = self.cut.coded
        sent = [jnp.where(mask, coded(x, t).astype(x.dtype), 0) for x, t, mask in trios]
        pairs = zip(leaves, _apart(leaves, buckets, totals), strict=True)
        means = [(total / axes.size(names)).astype(x.dtype) for x, total in pairs]
        return Message(means, unsent(leaves, sent), state)

    def fits(self, leaves: Arrays) -> jax.Array:
        """Return whether all elements that are to be sent have places, in every bucket."""
        lacking = jnp.zeros((), jnp.int32)
        for bucket in self._buckets(leaves, [self.cut.least(x) for x in leaves]):
            reached = bucket.view.rows(self.cut.reach(bucket.array, bucket.least))
            # By row in f32, which is exact there: XLA:CPU adds up integers with a copy.
            counts = reached.astype(jnp.float32).sum(1).astype(jnp.int32)
            lacking = jnp.maximum(lacking, bucket.view.lacking(counts))
        return lacking == 0

    def _buckets(self, leaves: Arrays, least: Sequence[jax.Array | float]) -> "list[_Bucket]":
        """Return a bucket of each leaf, or of each few leaves of one dtype."""
        groups = [[i] for i in range(len(leaves))]
        if self.bucket_bytes is not None:
            kinds = ({i: 4 * leaves[i].size for i in kind} for kind in exchange.kinds(leaves))
            groups = [own for kind in kinds for own in exchange.fused(kind, self.bucket_bytes)]
        found: list[_Bucket] = []
        for own in groups:
            array, bound = leaves[own[0]], least[own[0]]
            if len(own) > 1:
                reaching = [jnp.where(jnp.abs(leaves[i]) >= least[i], leaves[i], 0) for i in own]
                array, bound = packed(reaching), 0.0
            found.append(_Bucket(own, array, bound, self._view(array.shape)))
        return found

    def _view(self, shape: tuple[int, ...]) -> elements.Runs:
        size = math.prod(shape)
        if self.block is None and size > SMALL:
            grid = Grid.of((1, *shape), size, selection.BITS)
            return elements.Whole(grid, min(self.count(size), size))
        block = min(self.block or size, size)
        own = Grid.of((1, *shape), block, 1)
        most = 1.1 * size / block * self.count(block)
        # Of short runs more is sent, as every one sends its share rounded up.
        if not own.own or own.one[0] * self.count(own.width) > most:
            own = Grid((1, *shape), False, 1, block, 1)
        return elements.Runs(own, min(self.count(own.width), own.width))


@dataclasses.dataclass(frozen=True)
class Threshold(Codec):
    """The elements that reach a threshold: sparse if they have places, else a dense mean.

    Shapes are static, so both are branches with shapes of their own, and the replicas agree on one
    before anything is sent.

    Attributes:
      capacity: share of a leaf that has places on the sparse wire; 1 is always dense.
      sparse: sends that share.
      lossy: see ``Codec``.
    """

    capacity: float
    sparse: Largest
    lossy: bool = True
    chooses: bool = True

    def reduce(self, leaves: Arrays, state: PyTree, names: tuple[str, ...]) -> Message:
        """Send by the branch of this step."""
        if self.capacity == 1:
            message = self._dense(leaves, state, names)
            return message._replace(capacity=jnp.ones((), jnp.float32))
        fits = axes.agree(self.sparse.fits(leaves), names)
        rung = jnp.where(fits, 0, 1).astype(jnp.int32)
        forms = (self.sparse.reduce, self._dense)
        sends = [functools.partial(form, leaves, state, names) for form in forms]
        message = switched(rung, sends, names)
        return message._replace(capacity=jnp.asarray((self.capacity, 1), jnp.float32)[rung])

    def _dense(self, leaves: Arrays, state: PyTree, names: tuple[str, ...]) -> Message:
        """Send what reaches the threshold, as a plain mean in which the rest is zero."""
        cut = self.sparse.cut
        sent = [cut.coded(x, cut.least(x)).astype(x.dtype) for x in leaves]
        return Message([lax.pmean(x, names) for x in sent], unsent(leaves, sent), state)


def _apart(leaves: Arrays, buckets: Sequence[_Bucket], arrays: Arrays) -> list[jax.Array]:
    """Split each bucket's array back into its leaves."""
    found: dict[int, jax.Array] = {}
    for bucket, array in zip(buckets, arrays, strict=True):
        ends = np.cumsum([leaves[i].size for i in bucket.leaves])
        parts = jnp.split(array, ends[:-1]) if len(ends) > 1 else [array]
        found |= zip(bucket.leaves, parts, strict=True)
    return [found[i].reshape(x.shape) for i, x in enumerate(leaves)]


def share(density: float, of: int) -> int:
    """``ceil(density * of)``, at least one, not misled by rounding."""
    return max(1, min(of, math.ceil(density * of - 1e-6)))


def _gathered(arrays: Arrays, names: tuple[str, ...]) -> list[jax.Array]:
    """``(replicas, *shape)`` of each, with one collective for each dtype."""
    result: dict[int, jax.Array] = {}
    for index in exchange.kinds(arrays):
        own = [arrays[i] for i in index]
        flat = packed(own)
        # A TPU's compiler makes an all-reduce of what does not end with a tile: twice the bytes.
        flat = exchange.padded(flat, 0, TILE) if flat.size >= 32 * TILE else flat
        result |= zip(index, unpacked(axes.gather(flat, names), own), strict=True)
    return [result[i] for i in range(len(arrays))]


Density = float | Mapping[int, float]


def top_k_reduce(
    axis_name: axes.AxisName | None = None,
    density: Density = 0.01,
    *,
    count: int | None = None,
    block: int | None = None,
    bucket_bytes: int | None = None,
    momentum: float | None = None,
    value_dtype: Any = None,
    error_feedback: bool = True,
    dense: Dense = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Send the elements of largest magnitude of every leaf; the rest waits.

    .. math::
      a_r = g_r + e_r, \quad u = \tfrac1n \sum_r \operatorname{top}_k(a_r), \quad
      e_r \leftarrow a_r - \operatorname{top}_k(a_r)

    Stands first in the inner chain, in the place of ``all_reduce``. What is sent is exact, so
    nothing is lost: sent and held back add up bit for bit.

    Args:
      axis_name: mesh axis, or a tuple of axes.
      density: share of each leaf that travels, ``ceil(density * size)`` elements; or a warm-up of
        it, ``{0: 0.25, 200: 0.05, 400: 0.01}``, by calls that were not skipped.
      count: so many elements of each leaf (or block) instead.
      block: choose among each run of so many elements by itself, along the last dimension where it
        is long. Places take 2 bytes; keeps 87 to 99% of the energy. Try 1000. Runs are sorted,
        whole leaves are not: on a TPU leave it out.
      bucket_bytes: choose among several leaves together. From the last leaf to the first they are
        fused until they have more than so many bytes (of f32); a leaf of more is chosen from by
        itself. The same number of elements travels, from where they are largest, for one copy of
        the leaves that are fused. ``2**23`` is SINGA's default. ``None`` chooses from every leaf.
      momentum: correct for the momentum of the optimizer (DGC): momentum is applied here, before
        the choice, and stops where an element has been sent. The optimizer then goes without.
      value_dtype: of values on the wire, such as ``"bfloat16"``; ``None`` for f32. Rounding stays
        in the residual.
      error_feedback: keep what was not sent. Without it most elements never move.
      dense: leaves that take a plain mean: ``lambda path, leaf: leaf.ndim < 2`` for norms and
        biases, or a tree of bools.

    Returns:
      A transformation with a ``CompressedState``. Cost: 8 bytes an element sent (6 where a leaf or
      block has up to 65536, 4 with a half ``value_dtype`` too), gathered from all: on a ring
      ``(n-1) k`` of them, which is less than a mean's ``8 (n-1)/n N`` bytes only while
      ``density < 1/n``; one residual of the size of the gradients in f32 per replica (two with
      ``momentum``); two sums of 4 bytes.

    Raises:
      ValueError, TypeError: an argument out of range; at trace time, an unbound axis, already
        reduced or integer gradients.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> tx = boostax.top_k_reduce("data", density=0.25)
      >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data")
      >>> mean, state = step(jnp.array([[4.0, 1.0, 0.0, 0.0], [0.0, 1.0, -2.0, 0.0]]))
      >>> mean[0].tolist(), state.residual.local.tolist()
      ([2.0, 0.0, -1.0, 0.0], [[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])

    References:
      Aji and Heafield, Sparse Communication for Distributed Gradient Descent,
      https://arxiv.org/abs/1704.05021, 2017. Lin et al., Deep Gradient Compression,
      https://arxiv.org/abs/1712.01887, 2018. Apache SINGA's ``backward_and_sparse_update``, whose
      comparison truncates magnitudes to integers and so takes the first k below one.
    """
    who = "top_k_reduce"
    block, bucket_bytes, wire = _checked(who, block, bucket_bytes, value_dtype)
    how = block, Cut(value_dtype=wire), bucket_bytes
    if count is None:
        largest = lambda d: Largest(functools.partial(share, d), *how)  # noqa: E731
        codec = staged(who, "density", density, largest, _check_share)
    else:
        checks.positive_int(who, "count", count, "It is a number of elements; density is a share.")
        codec = Largest(lambda size: count, *how)
    feedback: Any = {"error_feedback": error_feedback, "momentum": momentum}
    return compress(codec, axis_name, **feedback, dense=dense, name=who)


def threshold_reduce(
    axis_name: axes.AxisName | None = None,
    threshold: float = 0.05,
    *,
    capacity: float = 0.05,
    relative: bool = False,
    block: int | None = None,
    bucket_bytes: int | None = 2**16,
    value_dtype: Any = None,
    error_feedback: bool = True,
    dense: Dense = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Send the elements of every leaf that reach a threshold, however many they are.

    .. math:: u = \tfrac1n \sum_r a_r \, [\, |a_r| \ge t \,], \qquad a_r = g_r + e_r

    Shapes are static, so a share of each leaf has places on a sparse wire. At every step the
    replicas count what reaches the threshold. If all of it has a place, in every leaf of every
    replica, it travels with its places; otherwise as a plain mean in which the rest is zero. So
    nothing that reaches the threshold is lost, with error feedback or without.

    Args:
      axis_name: mesh axis, or a tuple of axes.
      threshold: magnitude from which an element is sent.
      capacity: share of each leaf that has places on the sparse wire, which sends fewer bytes than
        the mean while ``capacity < 1/n``; 1.0 always sends the mean.
      relative: take the threshold in units of the root mean square of gradient plus residual, so
        that less is sent the more is held back.
      block: see ``top_k_reduce``.
      bucket_bytes: leaves share their places as in ``top_k_reduce``, or a short one that is full
        would make a step dense. What is sent is the same. ``None`` for places of each leaf.
      value_dtype: see ``top_k_reduce``; a dense step sends such values in f32.
      error_feedback: keep what was not sent.
      dense: leaves that take a plain mean.

    Returns:
      A transformation with a ``CompressedState``. Cost: a sparse step sends what
      ``top_k_reduce(density=capacity)`` sends, on a ring ``8 (n-1) capacity N`` bytes; a dense one
      what a mean sends, ``8 (n-1)/n N``; before it 4 bytes, and one reading of the gradients.
      ``boostax.metrics`` has ``capacity``, the share that had places at the last step: 1.0 for a
      dense one.

    Raises:
      ValueError, TypeError: as ``top_k_reduce``.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> tx = boostax.reduce.threshold_reduce("data", 0.5, capacity=0.25)
      >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data")
      >>> mean, state = step(jnp.array([[1.0, 0.4, 0.0, 0.0]]))
      >>> mean.tolist(), state.metrics()["capacity"].item()
      ([[1.0, 0.0, 0.0, 0.0]], 0.25)
      >>> mean, state = step(jnp.array([[1.0, 0.4, 1.0, 1.0]]))
      >>> mean.tolist(), state.metrics()["capacity"].item()
      ([[1.0, 0.0, 1.0, 1.0]], 1.0)

    References:
      Strom, Scalable distributed DNN training using commodity GPU cloud computing, 2015. Apache
      SINGA's ``backward_and_sparse_update(topK=False)``, which pads to the largest count of any
      replica at each step and so cannot be compiled.
    """
    who = "threshold_reduce"
    hint = "SINGA's default is 0.05."
    checks.number(who, "threshold", threshold, "0 or more", lambda x: x >= 0, hint)
    _check_share(who, "capacity", capacity)
    block, bucket_bytes, wire = _checked(who, block, bucket_bytes, value_dtype)
    how = block, Cut(threshold, relative, wire), bucket_bytes
    codec = Threshold(capacity, Largest(functools.partial(share, capacity), *how))
    return compress(codec, axis_name, error_feedback=error_feedback, dense=dense, name=who)


def _checked(
    who: str, block: int | None, bucket_bytes: int | None, value_dtype: Any
) -> tuple[int | None, int | None, np.dtype[Any] | None]:
    """The arguments of elements with places, if they are sound."""
    if block is not None:
        block = checks.positive_int(who, "block", block, "Try 1000.")
    bucket_bytes = exchange.check_bytes(who, bucket_bytes)
    wire = None if value_dtype is None else checks.floating_dtype(who, "value_dtype", value_dtype)
    return block, bucket_bytes, wire


def _check_share(who: str, argument: str, value: Any) -> None:
    hint = "0.01 sends one element in a hundred."
    checks.number(who, argument, value, "in (0, 1]", lambda x: 0 < x <= 1, hint)
