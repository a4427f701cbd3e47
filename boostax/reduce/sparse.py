# SPDX-License-Identifier: Apache-2.0
"""Sparse reductions: send a few elements of every leaf, and keep the rest in the residual.

``Runs`` chooses elements, reads them, and adds them at their positions. A position is an index into
a run, in the order of ``selection.py``.
"""

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
from jax.typing import DTypeLike

from boostax._core import axes, checks, norms, trees
from boostax._core.types import PyTree
from boostax.reduce import exchange, selection
from boostax.reduce.codec import Arrays, Codec, Message, Staged, packed, switched, unpacked
from boostax.reduce.feedback import Dense, compress

# Leaves of up to SMALL elements may be copied, so their elements are cut into rows in order.
SMALL = 2**14
TILE = 2048
Magnitude = jax.Array | float
# The first bit of each of the four codes in a byte.
SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)


@dataclasses.dataclass(frozen=True)
class Cut:
    """The rule that selects elements, and their form on the wire.

    Attributes:
      threshold: smaller magnitudes are not sent; ``None`` allows any.
      relative: whether the threshold is in units of the leaf's root mean square.
      wire_dtype: dtype of values on the wire; ``None`` for the values' own dtype.
      bits: 2 to send ``two_bits`` of each value; ``None`` to send ``wire_dtype``.
    """

    threshold: float | None = None
    relative: bool = False
    wire_dtype: exchange.Wire = None
    bits: int | None = None

    def least(self, leaf: jax.Array) -> Magnitude:
        """Return the smallest magnitude that is sent."""
        if self.threshold is None or not self.relative:
            return self.threshold or 0.0
        return self.threshold * norms.root(norms.square_sums([leaf])[0] / leaf.size)

    def coded(self, values: jax.Array, least: Magnitude) -> jax.Array:
        """Return the values as sent, zero below the threshold."""
        if self.threshold is not None:
            values = jnp.where(jnp.abs(values) >= least, values, 0)
        return values if self.wire_dtype is None else trees.saturate(values, self.wire_dtype)


def two_bits(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return u8 codes ``(..., ceil(count / 4))`` and u16 ``(..., 2)``: two magnitudes of each row.

    The first bit is the sign, the second says whether a magnitude is above the mean of its row.
    Elements above the mean are sent as the mean of their magnitudes, and likewise elements below,
    truncated to bfloat16. The truncation works on integers, because XLA may remove a rounding that
    is followed by a widening.
    """
    sizes = jnp.abs(values)
    large = sizes > (sizes / sizes.shape[-1]).sum(-1, keepdims=True)
    # Each element is divided before the sum, because the sum could overflow.
    pairs = ((x, jnp.maximum(x.sum(-1, keepdims=True), 1)) for x in (~large, large))
    parts = [jnp.where(x, sizes / count, 0) for x, count in pairs]
    means = trees.saturate(jnp.stack([x.sum(-1) for x in parts], -1), np.dtype(np.float32))
    magnitudes = (lax.bitcast_convert_type(means, jnp.uint32) >> 16).astype(jnp.uint16)
    codes = (values < 0).astype(jnp.uint8) + 2 * large.astype(jnp.uint8)
    fours = exchange.padded(codes, codes.ndim - 1, 4).reshape(*codes.shape[:-1], -1, 4)
    return (fours << SHIFTS).sum(-1, dtype=jnp.uint8), magnitudes


def of_two_bits(codes: jax.Array, magnitudes: jax.Array) -> jax.Array:
    """Invert ``two_bits``: return f32 values, and up to three more at the end of each row."""
    codes = ((codes[..., None] >> SHIFTS) & 3).reshape(*codes.shape[:-1], -1)
    means = lax.bitcast_convert_type(magnitudes.astype(jnp.uint32) << 16, jnp.float32)
    sizes = jnp.where(codes >= 2, means[..., 1:], means[..., :1])
    return jnp.where(codes % 2 == 1, -sizes, sizes)


class Runs(NamedTuple):
    """A leaf in which elements are chosen from each run of elements, or from the whole leaf.

    Attributes:
      grid: its rows.
      cells: ``(runs, rows, columns)``, the array from which ``selection.py`` chooses.
      sent: how many elements are chosen from each run.
    """

    grid: exchange.Grid
    cells: tuple[int, int, int]
    sent: int

    @classmethod
    def of(cls, shape: tuple[int, ...], block: int | None, count: Callable[[int], int]) -> "Runs":
        """Cut a leaf into runs of up to ``block`` elements; ``None`` does not cut a large leaf."""
        size = math.prod(shape)
        if block is None and size > SMALL:
            grid = exchange.Grid.of((1, *shape), size, selection.BITS)
            return cls(grid, (1, grid.height, grid.width), min(count(size), size))
        block = min(block or size, size)
        grid = exchange.Grid.of((1, *shape), block, 1)
        most = 1.1 * size / block * count(block)
        # Every run rounds its share up, so short runs send more.
        if grid.shape[-1] < exchange.LANES or grid.height * count(grid.width) > most:
            grid = exchange.Grid((1, *shape), 1, math.ceil(size / block), block, 1)
        columns = math.ceil(grid.width / selection.BITS)
        return cls(grid, (grid.height, selection.BITS, columns), min(count(grid.width), grid.width))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the arrays that ``add_at`` adds to."""
        return self.cells[0], *selection.shape(self.cells[1:])

    def largest(self, leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return positions ``(runs, count)``, ascending in each run, and bools like the leaf."""
        positions, mask = _largest(self.sent)(self.rows(leaf))
        narrow = math.prod(self.cells[1:]) <= 2**16
        return positions.astype(jnp.uint16 if narrow else jnp.uint32), self.leaf(mask)

    def rows(self, leaf: jax.Array) -> jax.Array:
        """Return an array in the leaf's shape in the shape ``cells``."""
        rows = self.grid.rows(leaf[None])[0]
        return exchange.padded(rows, 1, math.prod(self.cells) // len(rows)).reshape(self.cells)

    def leaf(self, cells: jax.Array) -> jax.Array:
        """Invert ``rows``."""
        return self.grid.slices(cells.reshape(1, self.grid.height, -1)[..., : self.grid.width])[0]


def _of_runs(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Map ``fn`` over the runs; trace once per shape, because a large model has few shapes."""

    def mapped(*arrays: jax.Array) -> PyTree:
        if len(arrays[0]) > 1:
            return jax.vmap(fn)(*arrays)
        # A TPU's compiler would copy a whole leaf for the dimension of a single run.
        return jax.tree.map(lambda x: x[None], fn(*(x[0] for x in arrays)))

    return jax.jit(mapped, inline=True)


@functools.cache
def _largest(count: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    return _of_runs(functools.partial(selection.largest, count=count))


cells = _of_runs(selection.rows)


@_of_runs
def elements_at(rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the elements at positions."""
    word, column, bit = selection.at(positions, rows.shape[1])
    return rows.at[word * selection.BITS + bit, column].get(mode="promise_in_bounds")


@_of_runs
def add_at(into: jax.Array, positions: jax.Array, values: jax.Array) -> jax.Array:
    """Add values to an array in the shape ``Runs.shape`` at positions."""
    chosen = into.at[selection.at(positions, into.shape[1])]
    # A TPU's compiler sorts indices unless ``indices_are_sorted`` is set.
    return chosen.add(values, unique_indices=True, indices_are_sorted=True)


def added(view: Runs, values: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the sum over the replicas, added one after the other.

    In a single scatter-add the hardware would choose the order in which equal positions are summed,
    and the replicas would diverge by rounding.
    """

    def add(total: jax.Array, sent: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return add_at(total, sent[1], sent[0].astype(total.dtype)), None

    zeros = jnp.zeros(view.shape, trees.wide_dtype(values))
    return lax.scan(add, axes.unify(zeros, values), (values, positions))[0]


class _Bucket(NamedTuple):
    """Leaves that share one choice of elements.

    Attributes:
      leaves: their indices.
      array: the leaf, or for several leaves a vector that is zero below each leaf's threshold.
      least: the threshold of the array.
      view: its rows.
    """

    leaves: list[int]
    array: jax.Array
    least: Magnitude
    view: Runs


@dataclasses.dataclass(frozen=True)
class Largest(Codec):
    """Send the elements of largest magnitude of every leaf, or bucket of leaves, and positions.

    Attributes:
      count: returns how many of a number of elements are sent.
      block: the length of the runs from which elements are chosen; ``None`` chooses from a whole
        leaf.
      cut: see ``Cut``.
      bucket_bytes: bytes of f32 up to which several leaves share one choice.
      lossy: see ``Codec``.
    """

    count: Callable[[int], int]
    block: int | None = None
    cut: Cut = Cut()
    bucket_bytes: int | None = None

    lossy: bool = True

    def reduce(self, leaves: Arrays, state: PyTree, names: tuple[str, ...]) -> Message:
        """Gather the chosen elements of all replicas, and add them up."""
        least = [self.cut.least(x) for x in leaves]
        buckets = self._buckets(leaves, least)
        positions, masks = zip(*(x.view.largest(x.array) for x in buckets), strict=True)
        chosen = zip(buckets, positions, strict=True)
        values = [self.cut.coded(elements_at(x.view.rows(x.array), i), x.least) for x, i in chosen]
        wires = [two_bits(x) if self.cut.bits else (x,) for x in values]
        arrays, structure = jax.tree.flatten((wires, positions))
        summed = self._summed(buckets, *structure.unflatten(_gathered(arrays, names)))
        # With the barrier the sums are written once. A TPU's compiler would otherwise move their
        # readers before the transposition, and also write the result of each reader.
        totals = [lax.optimization_barrier(x) for x in summed]
        trios = zip(leaves, least, _split_buckets(leaves, buckets, masks), strict=True)
        sent = [jnp.where(mask, self.cut.coded(x, t).astype(x.dtype), 0) for x, t, mask in trios]
        if self.cut.bits:
            local = jax.tree.map(lambda x: x[None], (wires, positions))
            decoded = _split_buckets(leaves, buckets, self._summed(buckets, *local))
            sent = [x.astype(leaf.dtype) for x, leaf in zip(decoded, leaves, strict=True)]
        pairs = zip(leaves, _split_buckets(leaves, buckets, totals), strict=True)
        means = [(total / axes.size(names)).astype(x.dtype) for x, total in pairs]
        return Message(means, list(map(jnp.subtract, leaves, sent)), state)

    def _summed(self, buckets: Sequence[_Bucket], wires: PyTree, positions: Arrays) -> Arrays:
        """Return the sum over the replicas in ``wires`` and ``positions``, for each bucket."""
        sums: list[jax.Array] = []
        for x, wire, at in zip(buckets, wires, positions, strict=True):
            values = of_two_bits(*wire)[..., : x.view.sent] if self.cut.bits else wire[0]
            sums.append(x.view.leaf(cells(added(x.view, values, at))))
        return sums

    def has_slots(self, leaves: Arrays) -> jax.Array:
        """Return whether all selected elements have slots, in every bucket."""
        lacking = jnp.zeros((), jnp.int32)
        for bucket in self._buckets(leaves, [self.cut.least(x) for x in leaves]):
            # Zeros are never sent.
            reached = (jnp.abs(bucket.array) >= bucket.least) & (bucket.array != 0)
            # Rows are summed in f32, exactly here, because XLA:CPU sums integers with a copy.
            by_row = bucket.view.rows(reached).astype(jnp.float32).sum(2).astype(jnp.int32)
            excess = jnp.maximum(by_row.sum(1) - bucket.view.sent, 0).sum(dtype=jnp.int32)
            lacking = jnp.maximum(lacking, excess)
        return lacking == 0

    def _buckets(self, leaves: Arrays, least: Sequence[Magnitude]) -> list[_Bucket]:
        """Return a bucket for each leaf, or for each group of leaves of one dtype."""
        groups = [[i] for i in range(len(leaves))]
        if self.bucket_bytes is not None:
            sizes = ({i: 4 * leaves[i].size for i in kind} for kind in exchange.kinds(leaves))
            groups = [group for kind in sizes for group in exchange.fused(kind, self.bucket_bytes)]
        buckets: list[_Bucket] = []
        for i, *others in groups:
            array = leaves[i]
            if others:
                pairs = [(leaves[k], least[k]) for k in (i, *others)]
                array = packed([jnp.where(jnp.abs(x) >= bound, x, 0) for x, bound in pairs])
            view = Runs.of(array.shape, self.block, self.count)
            buckets.append(_Bucket([i, *others], array, 0.0 if others else least[i], view))
        return buckets


@dataclasses.dataclass(frozen=True)
class Threshold(Codec):
    """Send the elements that reach a threshold: sparse if they have slots, else as a dense mean.

    Shapes are static, so both forms are branches with their own shapes, and the replicas agree on a
    branch before they send.

    Attributes:
      capacity: share of a leaf that has slots on the sparse wire; 1 is always dense.
      sparse: the codec that sends that share.
      lossy: see ``Codec``.
    """

    capacity: float
    sparse: Largest
    lossy: bool = True
    chooses: bool = True

    def reduce(self, leaves: Arrays, state: PyTree, names: tuple[str, ...]) -> Message:
        """Send by the branch of this step."""
        if self.capacity == 1:
            return self._dense(leaves, state, names)._replace(capacity=jnp.ones((), jnp.float32))
        forms = self.sparse.reduce, self._dense
        sends = [functools.partial(send, leaves, state, names) for send in forms]
        branch = jnp.where(axes.agree(self.sparse.has_slots(leaves), names), 0, 1).astype(jnp.int32)
        message = switched(branch, sends, names)
        return message._replace(capacity=jnp.asarray((self.capacity, 1), jnp.float32)[branch])

    def _dense(self, leaves: Arrays, state: PyTree, names: tuple[str, ...]) -> Message:
        """Average the leaves with all elements below the threshold set to zero."""
        cut = self.sparse.cut
        sent = [cut.coded(x, cut.least(x)).astype(x.dtype) for x in leaves]
        means = [lax.pmean(x, names) for x in sent]
        return Message(means, list(map(jnp.subtract, leaves, sent)), state)


def _split_buckets(leaves: Arrays, buckets: Sequence[_Bucket], arrays: Arrays) -> list[jax.Array]:
    """Split each bucket's array into the bucket's leaves."""
    by_index: dict[int, jax.Array] = {}
    for bucket, array in zip(buckets, arrays, strict=True):
        ends = np.cumsum([leaves[i].size for i in bucket.leaves])
        parts = jnp.split(array, ends[:-1]) if len(ends) > 1 else [array]
        by_index |= zip(bucket.leaves, parts, strict=True)
    return [by_index[i].reshape(x.shape) for i, x in enumerate(leaves)]


def share(density: float, of: int) -> int:
    """Return ``ceil(density * of)``, at least one, robust to rounding."""
    return max(1, min(of, math.ceil(density * of - 1e-6)))


def _gathered(arrays: Arrays, names: tuple[str, ...]) -> list[jax.Array]:
    """Return ``(replicas, *shape)`` of each array, with one collective for each dtype."""
    result: dict[int, jax.Array] = {}
    for kind in exchange.kinds(arrays):
        part = [arrays[i] for i in kind]
        flat = packed(part)
        # A TPU's compiler compiles a gather that does not end with a tile to an all-reduce, with
        # twice the bytes.
        flat = exchange.padded(flat, 0, TILE) if flat.size >= 32 * TILE else flat
        result |= zip(kind, unpacked(axes.gather(flat, names), part), strict=True)
    return [result[i] for i in range(len(arrays))]


Density = float | Mapping[int, float]


@checks.arguments
def top_k_reduce(
    axis_name: axes.AxisName | None = None,
    density: Density = 0.01,
    *,
    count: int | None = None,
    block: int | None = None,
    bucket_bytes: int | None = None,
    momentum: float | None = None,
    wire_dtype: DTypeLike | None = None,
    bits: int | None = None,
    error_feedback: bool = True,
    decay: float = 1.0,
    dense: Dense = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Send the elements of largest magnitude of every leaf; keep the rest for later steps.

    .. math::
      a_r = g_r + e_r, \quad u = \tfrac1n \sum_r \operatorname{top}_k(a_r), \quad
      e_r \leftarrow a_r - \operatorname{top}_k(a_r)

    Put ``top_k_reduce`` first in the inner chain, instead of ``all_reduce``. The sent elements are
    exact, so the sum of the sent and the kept part equals ``a_r`` bit for bit.

    Args:
      axis_name: mesh axis, or a tuple of axes. ``None``: the axis of the step around it
        (``make_train_step``, ``on_mesh``).
      density: share of each leaf that is sent, ``ceil(density * size)`` elements; or a warm-up of
        the share, ``{0: 0.25, 200: 0.05, 400: 0.01}``, by the number of applied steps.
      count: number of elements per leaf (or block), instead of ``density``.
      block: choose from each run of this many elements, along the last dimension if it is long.
        Positions then take 2 bytes, and the chosen elements have 87 to 99% of the energy of the
        best choice. Try 1024; other lengths are padded to a multiple of 32.
      bucket_bytes: choose from several leaves together. Leaves are fused from the last to the first
        until they exceed this many bytes (of f32); a larger leaf has its own choice. The number of
        sent elements stays the same, but leaves with larger elements send more. This costs one copy
        of the fused leaves. ``2**23`` is SINGA's default. ``None`` chooses from every leaf.
      momentum: coefficient of momentum correction (DGC), which applies momentum before the choice,
        and resets it for sent elements. The optimizer must then have no momentum.
      wire_dtype: dtype of values on the wire, such as ``"bfloat16"``; ``None`` for f32. Rounding
        errors stay in the residual.
      bits: 2 sends the sign of a value, and whether its magnitude is above the mean of its block
        (or leaf). The mean magnitudes above and below take 4 bytes a block. Errors stay in the
        residual. ``None`` sends values in ``wire_dtype``.
      error_feedback: whether to keep the elements that were not sent; otherwise most params never
        change.
      decay: factor of the residual at each step; see ``boostax.reduce.compress``.
      dense: leaves that are averaged without compression: ``lambda path, leaf: leaf.ndim < 2`` for
        norms and biases, or a tree of bools.

    Returns:
      A transformation with a ``CompressedState``. Cost: 8 bytes for each element sent (6 in a leaf
      or block of up to 65536 elements, 4 if also ``wire_dtype`` is half, 2.25 with ``bits=2``),
      gathered from all replicas. With k elements per replica a ring takes ``(n-1) k`` times these
      bytes, less than a mean's ``8 (n-1)/n N`` only if ``density < 1/n``. One residual of the size
      of the f32 gradients per replica (two with ``momentum``); two all-reduces of 8 bytes.

    Raises:
      ValueError, TypeError: an argument out of range; at trace time, an unbound axis, already
        reduced or integer gradients.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> tx = boostax.top_k_reduce("data", density=0.25)
      >>> step = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data"))
      >>> mean, state = step(jnp.array([[4.0, 1.0, 0.0, 0.0], [0.0, 1.0, -2.0, 0.0]]))
      >>> mean[0].tolist(), state.residual.local.tolist()
      ([2.0, 0.0, -1.0, 0.0], [[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])

    References:
      Aji and Heafield, Sparse Communication for Distributed Gradient Descent,
      https://arxiv.org/abs/1704.05021, 2017. Lin et al., Deep Gradient Compression,
      https://arxiv.org/abs/1712.01887, 2018. Apache SINGA's ``backward_and_sparse_update``, whose
      comparison truncates magnitudes to integers, so below one it takes the first k elements.
    """
    who = "top_k_reduce"
    block, bucket_bytes, wire = _checked(who, block, bucket_bytes, wire_dtype)
    hint = "Or leave it out, for wire_dtype."
    checks.require(bits in (None, 2), who, "bits", got=bits, allowed="2", hint=hint)
    both = wire_dtype if bits else None
    checks.absent(who, "wire_dtype", both, "left out with bits", "Both set the format of a value.")
    if count is not None:
        checks.positive_int(who, "count", count, "It is a number of elements; density is a share.")
    largest = Largest(lambda size: count or 0, block, Cut(wire_dtype=wire, bits=bits), bucket_bytes)
    codec = _by_density(who, density, largest) if count is None else largest
    feedback: Any = {"error_feedback": error_feedback, "momentum": momentum, "decay": decay}
    return compress(codec, axis_name=axis_name, **feedback, dense=dense, name=who)


@checks.arguments
def threshold_reduce(
    axis_name: axes.AxisName | None = None,
    threshold: float = 0.05,
    *,
    capacity: float = 0.05,
    relative: bool = False,
    block: int | None = None,
    bucket_bytes: int | None = 2**16,
    wire_dtype: DTypeLike | None = None,
    error_feedback: bool = True,
    decay: float = 1.0,
    dense: Dense = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Send all elements of every leaf that reach a threshold.

    .. math:: u = \tfrac1n \sum_r a_r \, [\, |a_r| \ge t \,], \qquad a_r = g_r + e_r

    Shapes are static, so a share of each leaf has slots on a sparse wire. At every step the
    replicas count the elements that reach the threshold. If all these elements have slots, in every
    leaf of every replica, they are sent with their positions; otherwise they are sent as a plain
    mean in which all other elements are zero. So every element that reaches the threshold is sent,
    with error feedback or without.

    Args:
      axis_name: mesh axis, or a tuple of axes. ``None``: the axis of the step around it
        (``make_train_step``, ``on_mesh``).
      threshold: magnitude from which an element is sent.
      capacity: share of each leaf that has slots on the sparse wire, which sends fewer bytes than
        the mean if ``capacity < 1/n``; 1.0 always sends the mean.
      relative: whether the threshold is in units of the root mean square of gradient plus residual,
        so that a larger residual raises the threshold.
      block: see ``top_k_reduce``.
      bucket_bytes: bytes up to which leaves share their slots, as in ``top_k_reduce``. The same
        elements are sent, but fewer steps are dense because one leaf lacks slots. ``None`` gives
        each leaf its own slots.
      wire_dtype: see ``top_k_reduce``; a dense step sends f32.
      error_feedback: keep the elements that were not sent.
      decay: factor of the residual at each step; see ``boostax.reduce.compress``.
      dense: leaves that take a plain mean.

    Returns:
      A transformation with a ``CompressedState``. Cost: a sparse step sends the bytes of
      ``top_k_reduce(density=capacity)``, on a ring ``8 (n-1) capacity N``; a dense step sends the
      bytes of a mean, ``8 (n-1)/n N``. The agreement before sending takes 4 bytes and one read of
      the gradients. ``boostax.metrics`` has ``capacity``, the share of elements with slots at the
      last step, 1.0 for a dense step.

    Raises:
      ValueError, TypeError: as ``top_k_reduce``.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> tx = boostax.reduce.threshold_reduce("data", 0.5, capacity=0.25)
      >>> step = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data"))
      >>> mean, state = step(jnp.array([[1.0, 0.4, 0.0, 0.0]]))
      >>> mean.tolist(), state.metrics()["capacity"].item()
      ([[1.0, 0.0, 0.0, 0.0]], 0.25)
      >>> mean, state = step(jnp.array([[1.0, 0.4, 1.0, 1.0]]))
      >>> mean.tolist(), state.metrics()["capacity"].item()
      ([[1.0, 0.0, 1.0, 1.0]], 1.0)

    References:
      Strom, Scalable distributed DNN training using commodity GPU cloud computing, 2015. Apache
      SINGA's ``backward_and_sparse_update(topK=False)``, which pads to the largest count of any
      replica at each step, so its shapes are not static.
    """
    who = "threshold_reduce"
    checks.number(who, "threshold", threshold, "0 or more", lambda x: x >= 0, "SINGA's is 0.05.")
    _check_share(who, "capacity", capacity)
    block, most, wire = _checked(who, block, bucket_bytes, wire_dtype)
    cut = Cut(threshold, relative, wire)
    codec = Threshold(capacity, Largest(functools.partial(share, capacity), block, cut, most))
    feedback: Any = {"error_feedback": error_feedback, "decay": decay}
    return compress(codec, axis_name=axis_name, **feedback, dense=dense, name=who)


def _checked(
    who: str, block: int | None, bucket_bytes: int | None, wire_dtype: DTypeLike | None
) -> tuple[int | None, int | None, exchange.Wire]:
    """Check the arguments of elements with positions."""
    block = None if block is None else checks.positive_int(who, "block", block, "Try 1000.")
    wire = None if wire_dtype is None else checks.floating_dtype(who, "wire_dtype", wire_dtype)
    return block, exchange.check_bytes(who, bucket_bytes), wire


def _by_density(who: str, density: Density, codec: Largest) -> Codec:
    """Let a codec send a share of the elements, or a share of each stage of a warm-up."""
    if not isinstance(density, Mapping):
        _check_share(who, "density", density)
        return dataclasses.replace(codec, count=functools.partial(share, density))
    starts = tuple(sorted(density))
    is_valid = bool(starts) and starts[0] == 0 and not any(isinstance(x, bool) for x in starts)
    allowed = "a mapping from steps, beginning with 0, to values"
    hint = "Try {0: 0.25, 200: 0.01}."
    checks.require(is_valid, who, "density", got=dict(density), allowed=allowed, hint=hint)
    for start in starts:
        _check_share(who, f"density[{start}]", density[start])
    shares = [functools.partial(share, density[start]) for start in starts]
    return Staged(starts, tuple(dataclasses.replace(codec, count=count) for count in shares))


def _check_share(who: str, argument: str, value: float) -> None:
    checks.number(who, argument, value, "in (0, 1]", lambda x: 0 < x <= 1, "0.01 sends 1%.")
