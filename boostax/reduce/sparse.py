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
from boostax.reduce import selection
from boostax.reduce.codec import Codec, Message, packed, padded, staged, unpacked, unsent
from boostax.reduce.feedback import Dense, compress
from boostax.reduce.rows import Grid

PyTree = Any
# Leaves of so many elements may be written anew, and sorted.
SMALL = 2**14
TILE = 2048


@dataclasses.dataclass(frozen=True)
class Largest(Codec):
    """The elements of largest magnitude of every leaf, with their places.

    Attributes:
      count: of so many entries, how many are sent.
      block: choose from each run of so many elements by itself; ``None`` for a leaf as a whole.
      threshold: what is smaller is not sent, though its place on the wire is taken; or ``None``.
      relative: whether the threshold is in units of the leaf's root mean square.
      value_dtype: of the values on the wire; ``None`` for their own.
      lossy: see ``Codec``.
      counts_over: what reaches the threshold may have no place, and is counted.
    """

    count: Callable[[int], int]
    block: int | None = None
    threshold: float | None = None
    relative: bool = False
    value_dtype: np.dtype[Any] | None = None

    lossy: bool = True
    counts_over: bool = False

    def reduce(self, leaves: Sequence[jax.Array], state: PyTree, names: tuple[str, ...]) -> Message:
        """Gather everybody's choice, and add up."""
        views = [self._view(x.shape) for x in leaves]
        chosen = [view.largest(x) for view, x in zip(views, leaves, strict=True)]
        places = [i for i, _ in chosen]
        least = [self._least(x) for x in leaves]
        sent = [
            jnp.where(mask, self._coded(x, t).astype(x.dtype), 0)
            for x, t, (_, mask) in zip(leaves, least, chosen, strict=True)
        ]
        values = [
            self._coded(view.taken(x, i), t)
            for view, x, t, i in zip(views, leaves, least, places, strict=True)
        ]
        everyones = zip(views, _gathered(values, names), _gathered(places, names), strict=True)
        # Written as it is: what reads it would be moved before the transposition by a TPU's
        # compiler, and every result written too.
        totals = [
            lax.optimization_barrier(view.leaf(_added(view, v, i))) for view, v, i in everyones
        ]
        means = [
            (total / axes.size(names)).astype(x.dtype)
            for total, x in zip(totals, leaves, strict=True)
        ]
        over = []
        if self.counts_over:
            over = [
                jnp.sum((jnp.abs(x) >= t) & ~mask, dtype=jnp.float32)
                for x, t, (_, mask) in zip(leaves, least, chosen, strict=True)
            ]
        return Message(means, unsent(leaves, sent), state, over=over)

    def _view(self, shape: tuple[int, ...]) -> "_Runs | _Whole":
        size = math.prod(shape)
        if self.block is None and size > SMALL:
            grid = Grid.of((1, *shape), size, selection.BITS)
            return _Whole(grid, min(self.count(size), size))
        block = min(self.block or size, size)
        own = Grid.of((1, *shape), block, 1)
        runs = size // shape[-1] * own.parts if shape else 1
        # Of short runs more is sent, as every one sends its share rounded up.
        if not own.own or runs * self.count(own.width) > 1.1 * size / block * self.count(block):
            own = Grid((1, *shape), False, 1, block, 1)
        return _Runs(own, min(self.count(own.width), own.width))

    def _least(self, leaf: jax.Array) -> jax.Array | float:
        """The smallest magnitude that is sent."""
        if self.threshold is None or not self.relative:
            return self.threshold or 0.0
        return self.threshold * jnp.sqrt(jnp.sum(leaf * leaf) / leaf.size)

    def _coded(self, values: jax.Array, least: jax.Array | float) -> jax.Array:
        if self.threshold is not None:
            values = jnp.where(jnp.abs(values) >= least, values, 0)
        return values if self.value_dtype is None else trees.saturate(values, self.value_dtype)


class _Runs(NamedTuple):
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
        rows = jnp.abs(self.grid.rows(leaf[None])[0])
        places = _narrow(lax.top_k(rows, self.sent)[1], self.grid.width)
        mask = _at(axes.unify(jnp.zeros(rows.shape, bool), rows), places)
        return places, self.leaf(mask.set(True, unique_indices=True))

    def taken(self, leaf: jax.Array, places: jax.Array) -> jax.Array:
        """The elements at their places."""
        return _at(self.grid.rows(leaf[None])[0], places).get(mode="promise_in_bounds")

    def put(self, into: jax.Array, values: jax.Array, places: jax.Array) -> jax.Array:
        """Added to an array."""
        return _at(into, places).add(values.astype(into.dtype), unique_indices=True)

    def leaf(self, array: jax.Array) -> jax.Array:
        """Such an array in the leaf's shape."""
        return self.grid.slices(array[None])[0]


class _Whole(NamedTuple):
    """A leaf of whose elements some are chosen.

    Attributes:
      grid: its rows.
      sent: how many.
    """

    grid: Grid
    sent: int

    @property
    def shape(self) -> tuple[int, ...]:
        """In which places are indices, one after the other."""
        return selection.shape(self.grid.one)

    def largest(self, leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Places ``(count,)``, ascending; and bools like the leaf."""
        places, mask = selection.largest(self.grid.rows(leaf[None])[0], self.sent)
        return _narrow(places, math.prod(self.grid.one)), self.grid.slices(mask[None])[0]

    def taken(self, leaf: jax.Array, places: jax.Array) -> jax.Array:
        """The elements at their places."""
        word, column, bit = selection.at(places, self.grid.width)
        rows = self.grid.rows(leaf[None])[0]
        return rows.at[word * selection.BITS + bit, column].get(mode="promise_in_bounds")

    def put(self, into: jax.Array, values: jax.Array, places: jax.Array) -> jax.Array:
        """Added to an array."""
        spot = into.at[selection.at(places, self.grid.width)]
        # Sorted, or a TPU's compiler sorts them.
        return spot.add(values.astype(into.dtype), unique_indices=True, indices_are_sorted=True)

    def leaf(self, array: jax.Array) -> jax.Array:
        """Such an array in the leaf's shape."""
        return self.grid.slices(selection.rows(array)[None])[0]


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
        values = [_at(x, i).get(mode="promise_in_bounds") for x, i in taken]
        summed = unpacked(lax.pmean(packed(values), names), values)
        means, held = [], []
        for x, i, mean in zip(views, places, summed, strict=True):
            chance = i.shape[1] / x.shape[1] if self.unbiased else 1
            means.append(_put(x.shape, mean / chance, i))
            chosen = _at(axes.unify(jnp.zeros(x.shape[:2], bool), i), i).set(True)
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


def share(density: float, of: int) -> int:
    """``ceil(density * of)``, at least one, not misled by rounding."""
    return max(1, min(of, math.ceil(density * of - 1e-6)))


def _gathered(arrays: Sequence[jax.Array], names: tuple[str, ...]) -> list[jax.Array]:
    """``(replicas, *shape)`` of each, with one collective for each dtype."""
    result: dict[int, jax.Array] = {}
    for dtype in sorted({x.dtype for x in arrays}, key=str):
        index = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        flat = packed([arrays[i] for i in index])
        # A TPU's compiler makes an all-reduce of what does not end with a tile: twice the bytes.
        flat = padded(flat, TILE) if flat.size >= 32 * TILE else flat
        whole = axes.gather(flat, names)
        ends = np.cumsum([arrays[i].size for i in index])
        for i, end in zip(index, ends, strict=True):
            part = whole[:, end - arrays[i].size : end]
            result[i] = part.reshape(-1, *arrays[i].shape)
    return [result[i] for i in range(len(arrays))]


def _at(x: jax.Array, places: jax.Array) -> Any:
    """The elements of each row at its places; a flat index would not fit i32 in a large model."""
    return x.at[jnp.arange(len(x), dtype=jnp.int32)[:, None], places.astype(jnp.int32)]


def _put(shape: tuple[int, ...], values: jax.Array, places: jax.Array) -> jax.Array:
    zeros = _zeros(shape, values)
    return _at(zeros, places).set(values.astype(zeros.dtype), unique_indices=True)


def _added(view: _Runs | _Whole, values: jax.Array, places: jax.Array) -> jax.Array:
    """The sum over the replicas, one after the other.

    All at once would leave the order of equal places to the hardware, and the replicas would drift
    apart by rounding.
    """

    def add(total: jax.Array, theirs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return view.put(total, *theirs), None

    return lax.scan(add, _zeros(view.shape, values), (values, places))[0]


def _narrow(places: jax.Array, size: int) -> jax.Array:
    return places.astype(jnp.uint16 if size <= 2**16 else jnp.uint32)


def _zeros(shape: tuple[int, ...], values: jax.Array) -> jax.Array:
    """In f32 or wider, and varying over the axes over which the values do."""
    return axes.unify(jnp.zeros(shape, jnp.promote_types(values.dtype, jnp.float32)), values)


Density = float | Mapping[int, float]


def top_k_reduce(
    axis_name: axes.AxisName,
    density: Density = 0.01,
    *,
    count: int | None = None,
    block: int | None = None,
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
    if block is not None:
        block = checks.positive_int(who, "block", block, "Try 1000.")
    wire = None if value_dtype is None else checks.floating_dtype(who, "value_dtype", value_dtype)

    def largest(counter: Callable[[int], int]) -> Codec:
        return Largest(counter, block, value_dtype=wire)

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
    capacity: float = 0.05,
    relative: bool = False,
    block: int | None = None,
    value_dtype: Any = None,
    error_feedback: bool = True,
    dense: Dense = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Send the elements of every leaf that reach a threshold, as far as they fit.

    .. math:: u = \tfrac1n \sum_r a_r \, [\, |a_r| \ge t \,], \qquad a_r = g_r + e_r

    Shapes are static: ``capacity`` is what travels, used or not. Of more elements than that the
    largest go, and the others wait, or are lost without ``error_feedback``;
    ``boostax.metrics`` counts them as ``over_capacity``. It costs what
    ``top_k_reduce(density=capacity)`` costs; it differs in sending nothing small.

    Args:
      axis_name: mesh axis, or a tuple of axes.
      threshold: magnitude from which an element is sent.
      capacity: share of each leaf that has a place on the wire; at 1.0 all that reaches the
        threshold travels.
      relative: take the threshold in units of the root mean square of gradient plus residual, so
        that less is sent the more is held back.
      block: see ``top_k_reduce``.
      value_dtype: see ``top_k_reduce``.
      error_feedback: keep what was not sent.
      dense: leaves that take a plain mean.

    Returns:
      A transformation with a ``CompressedState``; cost as ``top_k_reduce``, and 4 bytes for the
      count.

    Raises:
      ValueError, TypeError: as ``top_k_reduce``.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> tx = boostax.reduce.threshold_reduce("data", 0.5, capacity=0.5)
      >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data")
      >>> step(jnp.array([[1.0, 0.4, 0.0, 0.0]]))[0].tolist()
      [[1.0, 0.0, 0.0, 0.0]]

    References:
      Strom, Scalable distributed DNN training using commodity GPU cloud computing, 2015. Apache
      SINGA's ``backward_and_sparse_update(topK=False)``, which pads to the largest count of any
      replica at each step and so cannot be compiled.
    """
    who = "threshold_reduce"
    hint = "SINGA's default is 0.05."
    checks.number(who, "threshold", threshold, "0 or more", lambda x: x >= 0, hint)
    _check_density(who, "capacity", capacity)
    if block is not None:
        block = checks.positive_int(who, "block", block, "Try 1000.")
    wire = None if value_dtype is None else checks.floating_dtype(who, "value_dtype", value_dtype)
    count = lambda size: share(capacity, size)  # noqa: E731
    codec = Largest(count, block, threshold, relative, wire, counts_over=True)
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


def _check_density(who: str, argument: str, value: Any) -> None:
    hint = "0.01 sends one element in a hundred."
    checks.number(who, argument, value, "in (0, 1]", lambda x: 0 < x <= 1, hint)
