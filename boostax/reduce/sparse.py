# SPDX-License-Identifier: Apache-2.0
"""Sparse reductions: a few elements of every leaf travel, the rest waits."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from boostax._core import axes, checks, trees
from boostax.reduce import elements, exchange, selection
from boostax.reduce.codec import Codec, Message, packed, padded, staged, switched, unpacked, unsent
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

    def reduce(self, leaves: Sequence[jax.Array], state: PyTree, names: tuple[str, ...]) -> Message:
        """Gather everybody's choice, and add up."""
        least = [self.cut.least(x) for x in leaves]
        buckets = self._buckets(leaves)
        arrays = [self._bucket(leaves, least, bucket) for bucket in buckets]
        views = [self._view(x.shape) for x, _ in arrays]
        chosen = [view.largest(x) for view, (x, _) in zip(views, arrays, strict=True)]
        places = [i for i, _ in chosen]
        values = [
            self.cut.coded(view.taken(x, i), t)
            for view, (x, t), i in zip(views, arrays, places, strict=True)
        ]
        everyones = zip(views, _gathered(values, names), _gathered(places, names), strict=True)
        # Written as it is: what reads it would be moved before the transposition by a TPU's
        # compiler, and every result written too.
        totals = [
            lax.optimization_barrier(view.leaf(elements.added(view, v, i)))
            for view, v, i in everyones
        ]
        masks = _apart(leaves, buckets, [mask for _, mask in chosen])
        sent = [
            jnp.where(mask, self.cut.coded(x, t).astype(x.dtype), 0)
            for x, t, mask in zip(leaves, least, masks, strict=True)
        ]
        means = [
            (total / axes.size(names)).astype(x.dtype)
            for total, x in zip(_apart(leaves, buckets, totals), leaves, strict=True)
        ]
        return Message(means, unsent(leaves, sent), state)

    def over(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """i32: how many elements have to be sent and have no place, at a bucket's first leaf."""
        least = [self.cut.least(x) for x in leaves]
        found = [axes.unify(jnp.zeros((), jnp.int32), x) for x in leaves]
        for bucket in self._buckets(leaves):
            x, t = self._bucket(leaves, least, bucket)
            view = self._view(x.shape)
            reached = view.rows(self.cut.reach(x, t))
            # By row in f32, which is exact there: XLA:CPU adds up integers with a copy.
            found[bucket[0]] = view.over(reached.astype(jnp.float32).sum(1).astype(jnp.int32))
        return found

    def _buckets(self, leaves: Sequence[jax.Array]) -> list[list[int]]:
        """Indices of the leaves from which is chosen together; they have one dtype."""
        if self.bucket_bytes is None:
            return [[i] for i in range(len(leaves))]
        found: list[list[int]] = []
        for kind in exchange.kinds(leaves):
            fused = exchange.fused([4 * leaves[i].size for i in kind], self.bucket_bytes)
            found += [[kind[i] for i in bucket] for bucket in fused]
        return found

    def _bucket(
        self, leaves: Sequence[jax.Array], least: Sequence[jax.Array | float], bucket: list[int]
    ) -> tuple[jax.Array, jax.Array | float]:
        """A leaf and its threshold; or several in a vector without what is below theirs, and 0."""
        if len(bucket) == 1:
            return leaves[bucket[0]], least[bucket[0]]
        reaching = lambda x, t: jnp.where(jnp.abs(x) >= t, x, 0)  # noqa: E731
        return packed([reaching(leaves[i], least[i]) for i in bucket]), 0.0

    def _view(self, shape: tuple[int, ...]) -> elements.Runs:
        size = math.prod(shape)
        if self.block is None and size > SMALL:
            grid = Grid.of((1, *shape), size, selection.BITS)
            return elements.Whole(grid, min(self.count(size), size))
        block = min(self.block or size, size)
        own = Grid.of((1, *shape), block, 1)
        runs = size // shape[-1] * own.parts if shape else 1
        # Of short runs more is sent, as every one sends its share rounded up.
        if not own.own or runs * self.count(own.width) > 1.1 * size / block * self.count(block):
            own = Grid((1, *shape), False, 1, block, 1)
        return elements.Runs(own, min(self.count(own.width), own.width))


@dataclasses.dataclass(frozen=True)
class Reaching(Codec):
    """What reaches a threshold, as a plain mean in which the rest is zero.

    Attributes:
      cut: the threshold.
      lossy: see ``Codec``.
    """

    cut: Cut
    lossy: bool = True

    def reduce(self, leaves: Sequence[jax.Array], state: PyTree, names: tuple[str, ...]) -> Message:
        """Average."""
        sent = [self.cut.coded(x, self.cut.least(x)).astype(x.dtype) for x in leaves]
        return Message([lax.pmean(x, names) for x in sent], unsent(leaves, sent), state)


@dataclasses.dataclass(frozen=True)
class Ladder(Codec):
    """The elements that reach a threshold, by the least capacity that has a place for all of them.

    Shapes are static, so every capacity is a branch with shapes of its own, and the replicas agree
    on one before anything is sent. Where even the last has too few places the largest go.

    Attributes:
      capacities: shares of a leaf, ascending.
      codecs: one for each: ``Largest``, or ``Reaching`` for a share of one.
      cut: the threshold, of all of them.
      lossy: see ``Codec``.
      counts_over: what has no place is counted, in the largest share below one.
      chooses: whether there are several.
    """

    capacities: tuple[float, ...]
    codecs: tuple[Codec, ...]
    cut: Cut
    lossy: bool = True
    counts_over: bool = True
    chooses: bool = True

    def reduce(self, leaves: Sequence[jax.Array], state: PyTree, names: tuple[str, ...]) -> Message:
        """By the capacity of this step."""
        if not self.chooses:
            message = self.codecs[0].reduce(leaves, state, names)
            # In the pass that writes what is held: a count by itself is a copy more on XLA:CPU.
            reach = [self.cut.reach(x, self.cut.least(x)) for x in leaves]
            held = zip(reach, leaves, message.held, strict=True)
            return message._replace(
                over=[jnp.sum(r & (x == h), dtype=jnp.float32) for r, x, h in held]
            )
        over = [codec.over(leaves) for codec in self.codecs if isinstance(codec, Largest)]
        # Of each but the last, whether there is a place for all, everywhere.
        fits = [jnp.stack(counts).max() == 0 for counts in over[: len(self.codecs) - 1]]
        lacking = ~axes.agree(jnp.stack(fits), names)
        rung = jnp.cumprod(lacking.astype(jnp.int32)).sum(dtype=jnp.int32)
        message = switched(rung, self.codecs, leaves, state, names)
        capacity = jnp.asarray(self.capacities, jnp.float32)[rung]
        return message._replace(over=over[-1], capacity=capacity)


@dataclasses.dataclass(frozen=True)
class Random(Codec):
    """The same elements of every replica, chosen by chance, so that their places need not be sent.

    Of a large leaf whole rows, spread evenly from a random beginning; of the others, packed,
    elements of each run in the same way. Each element has the same chance, and one all-reduce of
    the values is all that travels.

    Attributes:
      density: the share.
      unbiased: whether the mean is divided by the chance of an element.
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
        key, now = jax.random.split(state)
        own = [self._is_own(x.shape) for x in leaves]
        small = [x for x, alone in zip(leaves, own, strict=True) if not alone]
        views = [x.reshape(1, -1, x.shape[-1]) for x, o in zip(leaves, own, strict=True) if o]
        if small:
            flat = packed(small)
            width = min(max(1000, round(1 / self.density)), flat.size)
            views.append(padded(flat, width).reshape(-1, width, 1))
        # One draw for all, which compiles faster.
        runs, lengths = zip(*(x.shape[:2] for x in views), strict=True)
        begin = jax.random.randint(now, (sum(runs), 1), 0, np.repeat(lengths, runs)[:, None])
        begins = jnp.split(begin, np.cumsum(runs)[:-1])
        places = [self._places(x.shape, begin) for x, begin in zip(views, begins, strict=True)]
        taken = zip(views, places, strict=True)
        values = [elements.taken(x, i) for x, i in taken]
        summed = unpacked(lax.pmean(packed(values), names), values)
        means, held = [], []
        for x, i, mean in zip(views, places, summed, strict=True):
            chance = i.shape[1] / x.shape[1] if self.unbiased else 1
            means.append(elements.put(x.shape, mean / chance, i))
            chosen = elements.at(axes.unify(jnp.zeros(x.shape[:2], bool), i), i).set(True)
            held.append(jnp.where(chosen[..., None], 0, x))
        as_leaves = functools.partial(_spread, leaves, own)
        return Message(as_leaves(means), as_leaves(held), key)

    def _is_own(self, shape: tuple[int, ...]) -> bool:
        """Whether rows of it are chosen: it is large, and some of its rows are near the density."""
        wanted = self.density * math.prod(shape[:-1])
        return math.prod(shape) > SMALL and abs(max(1, round(wanted)) - wanted) <= 0.1 * wanted

    def _places(self, shape: tuple[int, ...], begin: jax.Array) -> jax.Array:
        """``(runs, count)``, ascending: every place has the chance ``count / length``."""
        length, single = shape[1], shape[2] == 1
        count = share(self.density, length) if single else round(self.density * length)
        whole, rest = np.divmod(np.arange(count) * length, count)
        return jnp.asarray(whole, jnp.int32) + (rest.astype(np.int32) + begin) // count


def _spread(
    leaves: Sequence[jax.Array], own: list[bool], views: list[jax.Array]
) -> list[jax.Array]:
    """The leaves again: those by themselves first, the others from the last."""
    small = [x for x, alone in zip(leaves, own, strict=True) if not alone]
    rest = iter(unpacked(views[-1].ravel(), small) if small else [])
    alone = iter(views)
    return [
        next(alone).reshape(x.shape).astype(x.dtype) if o else next(rest)
        for x, o in zip(leaves, own, strict=True)
    ]


def _apart(
    leaves: Sequence[jax.Array], buckets: list[list[int]], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """What there is of each leaf, in its shape, from what there is of each bucket."""
    found: dict[int, jax.Array] = {}
    for bucket, array in zip(buckets, arrays, strict=True):
        ends = np.cumsum([leaves[i].size for i in bucket])
        parts = jnp.split(array, ends[:-1]) if len(bucket) > 1 else [array]
        for i, part in zip(bucket, parts, strict=True):
            found[i] = part.reshape(leaves[i].shape)
    return [found[i] for i in range(len(leaves))]


def share(density: float, of: int) -> int:
    """``ceil(density * of)``, at least one, not misled by rounding."""
    return max(1, min(of, math.ceil(density * of - 1e-6)))


def _gathered(arrays: Sequence[jax.Array], names: tuple[str, ...]) -> list[jax.Array]:
    """``(replicas, *shape)`` of each, with one collective for each dtype."""
    result: dict[int, jax.Array] = {}
    for dtype in sorted({x.dtype for x in arrays}, key=str):
        index = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        own = [arrays[i] for i in index]
        flat = packed(own)
        # A TPU's compiler makes an all-reduce of what does not end with a tile: twice the bytes.
        flat = padded(flat, TILE) if flat.size >= 32 * TILE else flat
        result |= zip(index, unpacked(axes.gather(flat, names), own), strict=True)
    return [result[i] for i in range(len(arrays))]


Density = float | Mapping[int, float]


def top_k_reduce(
    axis_name: axes.AxisName,
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

    def largest(counter: Callable[[int], int]) -> Codec:
        return Largest(counter, block, Cut(value_dtype=wire), bucket_bytes)

    if count is None:
        codec = staged(
            who, "density", density, lambda d: largest(lambda size: share(d, size)), _check_density
        )
    else:
        checks.positive_int(who, "count", count, "It is a number of elements; density is a share.")
        codec = largest(lambda size: count)
    feedback: Any = {"error_feedback": error_feedback, "momentum": momentum}
    return compress(codec, axis_name, **feedback, dense=dense, name=who)


def threshold_reduce(
    axis_name: axes.AxisName,
    threshold: float = 0.05,
    *,
    capacity: float | Sequence[float] = (0.01, 0.05, 1.0),
    relative: bool = False,
    block: int | None = None,
    bucket_bytes: int | None = 2**16,
    value_dtype: Any = None,
    error_feedback: bool = True,
    dense: Dense = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Send the elements of every leaf that reach a threshold, however many they are.

    .. math:: u = \tfrac1n \sum_r a_r \, [\, |a_r| \ge t \,], \qquad a_r = g_r + e_r

    Shapes are static, so there is a ladder of capacities, each compiled with shapes of its own. At
    every step the replicas count what reaches the threshold and agree on the first capacity in
    which all of it has a place, in every leaf of every replica. A last capacity of 1.0 is a plain
    mean of what reaches the threshold, so nothing is lost, with error feedback or without.

    Args:
      axis_name: mesh axis, or a tuple of axes.
      threshold: magnitude from which an element is sent.
      capacity: shares of each leaf that have a place on the wire, ascending; or one, for a fixed
        size. Without 1.0 among them, of more elements than the last has places for the largest
        go, and the others wait, or are lost without ``error_feedback``.
      relative: take the threshold in units of the root mean square of gradient plus residual, so
        that less is sent the more is held back.
      block: see ``top_k_reduce``.
      bucket_bytes: leaves share their places as in ``top_k_reduce``, or a short one that is full
        would make a step dense. What is sent is the same. ``None`` for places of each leaf.
      value_dtype: see ``top_k_reduce``; a dense step sends such values in f32.
      error_feedback: keep what was not sent.
      dense: leaves that take a plain mean.

    Returns:
      A transformation with a ``CompressedState``. Cost by the capacity ``c`` of a step: below one
      as ``top_k_reduce(density=c)``, on a ring ``8 (n-1) c N`` bytes; at 1.0 those of a mean,
      ``8 (n-1)/n N``; before it 4 bytes for each capacity but the last, and one reading of the
      gradients. ``boostax.metrics`` has ``capacity``, that of the last step where there are
      several, and ``over_capacity``, the elements without a place in the largest below 1.0.

    Raises:
      ValueError, TypeError: as ``top_k_reduce``.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> tx = boostax.reduce.threshold_reduce("data", 0.5, capacity=(0.25, 1.0))
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
    capacities = _capacities(who, capacity)
    block, bucket_bytes, wire = _checked(who, block, bucket_bytes, value_dtype)
    cut = Cut(threshold, relative, wire)

    def rung(capacity: float) -> Codec:
        if capacity == 1:
            return Reaching(cut)
        return Largest(functools.partial(share, capacity), block, cut, bucket_bytes)

    codec = Ladder(capacities, tuple(map(rung, capacities)), cut, chooses=len(capacities) > 1)
    return compress(codec, axis_name, error_feedback=error_feedback, dense=dense, name=who)


def random_k_reduce(
    axis_name: axes.AxisName,
    density: Density = 0.01,
    *,
    seed: int = 0,
    error_feedback: bool = True,
    dense: Dense = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Send elements chosen by chance, the same on all replicas; of a large leaf whole rows.

    .. math:: u = \tfrac1n \sum_r m \odot a_r, \qquad m \text{ common to all, new at each step}

    No places travel, and the values are added up on the way: bytes fall with the density at any
    number of replicas, and there is next to nothing to compute. It needs more steps than top-k.

    Args:
      axis_name: mesh axis, or a tuple of axes.
      density: share that travels, or a warm-up of it as in ``top_k_reduce``.
      seed: of the choice.
      error_feedback: keep what was not sent, which then comes ``1 / density`` steps late. Without
        it what is sent is divided by its chance: right on average, with a large variance, and at
        times the better of the two.
      dense: leaves that take a plain mean.

    Returns:
      A transformation with a ``CompressedState``. Cost: one all-reduce of ``density * N`` values, a
      residual per replica, two sums of 4 bytes.

    Raises:
      ValueError, TypeError: as ``top_k_reduce``.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> tx = boostax.reduce.random_k_reduce("data", density=0.5)
      >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data")
      >>> mean, state = step(jnp.ones((2, 4)))
      >>> mean[0].sum().item(), state.residual.local[0].sum().item()
      (2.0, 2.0)

    References:
      Stich et al., Sparsified SGD with Memory, https://arxiv.org/abs/1809.07599, 2018.
    """
    who = "random_k_reduce"

    def codec(d: float) -> Codec:
        return Random(d, unbiased=not error_feedback, seed=seed)

    chosen = staged(who, "density", density, codec, _check_density)
    return compress(chosen, axis_name, error_feedback=error_feedback, dense=dense, name=who)


def _checked(
    who: str, block: int | None, bucket_bytes: int | None, value_dtype: Any
) -> tuple[int | None, int | None, np.dtype[Any] | None]:
    """The arguments of elements with places, if they are sound."""
    if block is not None:
        block = checks.positive_int(who, "block", block, "Try 1000.")
    bucket_bytes = exchange.check_bytes(who, bucket_bytes)
    wire = None if value_dtype is None else checks.floating_dtype(who, "value_dtype", value_dtype)
    return block, bucket_bytes, wire


def _check_density(who: str, argument: str, value: Any) -> None:
    hint = "0.01 sends one element in a hundred."
    checks.number(who, argument, value, "in (0, 1]", lambda x: 0 < x <= 1, hint)


def _capacities(who: str, value: Any) -> tuple[float, ...]:
    """One share, or several in ascending order."""
    one = not isinstance(value, Sequence) or isinstance(value, str)
    shares: tuple[Any, ...] = (value,) if one else tuple(value)
    for each in shares:
        _check_density(who, "capacity", each)
    if not shares or list(shares) != sorted(set(shares)):
        allowed, hint = "ascending shares", "(0.01, 0.05, 1.0) sends all, in the least that fits."
        raise ValueError(checks.message(who, "capacity", allowed, value, hint))
    return shares
