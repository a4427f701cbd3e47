# SPDX-License-Identifier: Apache-2.0
"""Sparse reductions: send a few elements of every leaf, and keep the rest in the residual.

``Runs`` chooses elements of a leaf. ``elements_at`` and ``add_at`` read and add elements at their
positions. A position is an index into a run, in the order of ``selection.py``.
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
from boostax.reduce.mean import check_bytes

# A leaf of up to SMALL elements may be copied, so the elements of the flat leaf are cut into rows.
SMALL = 2**14
TILE = 2048
Magnitude = jax.Array | float
# The position of the first bit of each of the four codes in a byte.
SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)


@dataclasses.dataclass(frozen=True)
class Cut:
    """The rule that selects elements, and the form in which they are sent.

    Attributes:
      threshold: the smallest magnitude that is sent; ``None`` allows any magnitude.
      relative: whether the threshold is multiplied by the root mean square of the leaf.
      wire_dtype: dtype of values on the wire; ``None`` for the dtype of the values.
      bits: 2 to send ``two_bits`` of each value; ``None`` to send values in ``wire_dtype``.
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
        """Return the values in the dtype in which they are sent, with zeros below the threshold."""
        if self.threshold is not None:
            values = jnp.where(jnp.abs(values) >= least, values, 0)
        return values if self.wire_dtype is None else trees.saturate(values, self.wire_dtype)


def two_bits(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return u8 codes ``(..., ceil(count / 4))``, and two magnitudes of each row, u16 ``(..., 2)``.

    Each value has a code of two bits. The first bit is the sign. The second bit is 1 if the
    magnitude is above the mean magnitude of its row. One magnitude of a row is the mean over the
    elements above this mean, and the other is the mean over all other elements, both truncated to
    bfloat16. The bits are truncated as integers, because XLA may remove a cast to bfloat16 that is
    followed by a cast to f32.
    """
    sizes = jnp.abs(values)
    large = sizes > (sizes / sizes.shape[-1]).sum(-1, keepdims=True)
    # Each element is divided before the sum, because a sum of undivided elements could overflow.
    pairs = ((x, jnp.maximum(x.sum(-1, keepdims=True), 1)) for x in (~large, large))
    parts = [jnp.where(x, sizes / count, 0) for x, count in pairs]
    means = trees.saturate(jnp.stack([x.sum(-1) for x in parts], -1), np.dtype(np.float32))
    magnitudes = (lax.bitcast_convert_type(means, jnp.uint32) >> 16).astype(jnp.uint16)
    codes = (values < 0).astype(jnp.uint8) + 2 * large.astype(jnp.uint8)
    fours = exchange.padded(codes, codes.ndim - 1, 4).reshape(*codes.shape[:-1], -1, 4)
    return (fours << SHIFTS).sum(-1, dtype=jnp.uint8), magnitudes


class Runs(NamedTuple):
    """A leaf that is split into runs; elements are chosen from each run. A leaf may be one run.

    Attributes:
      grid: the rows of the leaf.
      cells: ``(runs, rows, columns)``, the shape of the array from which ``selection.py`` chooses.
      sent: the number of elements that are chosen from each run.
    """

    grid: exchange.Grid
    cells: tuple[int, int, int]
    sent: int

    @classmethod
    def of(cls, shape: tuple[int, ...], block: int | None, count: Callable[[int], int]) -> "Runs":
        """Split a leaf into runs of up to ``block`` elements; ``None`` splits no large leaf."""
        size = math.prod(shape)
        if block is None and size > SMALL:
            grid = exchange.Grid.of((1, *shape), size, selection.BITS)
            return cls(grid, (1, grid.height, grid.width), min(count(size), size))
        block = min(block or size, size)
        grid = exchange.Grid.of((1, *shape), block, 1)
        most = 1.1 * size / block * count(block)
        # The count is rounded up in every run, so short runs send more elements.
        if grid.shape[-1] < exchange.LANES or grid.height * count(grid.width) > most:
            grid = exchange.Grid((1, *shape), 1, math.ceil(size / block), block, 1)
        columns = math.ceil(grid.width / selection.BITS)
        return cls(grid, (grid.height, selection.BITS, columns), min(count(grid.width), grid.width))

    def largest(self, leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return positions ``(runs, count)``, ascending in each run, and a mask like the leaf."""
        positions, mask = _largest(self.rows(leaf), count=self.sent)
        narrow = math.prod(self.cells[1:]) <= 2**16
        return positions.astype(jnp.uint16 if narrow else jnp.uint32), self.leaf(mask)

    def rows(self, leaf: jax.Array) -> jax.Array:
        """Reshape an array in the leaf's shape to the shape ``cells``."""
        rows = self.grid.rows(leaf[None])[0]
        return exchange.padded(rows, 1, math.prod(self.cells) // len(rows)).reshape(self.cells)

    def leaf(self, cells: jax.Array) -> jax.Array:
        """Invert ``rows``."""
        return self.grid.slices(cells.reshape(1, self.grid.height, -1)[..., : self.grid.width])[0]


def _of_runs(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Map ``fn`` over the runs; trace ``fn`` once per shape, because models have few shapes."""

    def mapped(*arrays: jax.Array, **count: int) -> PyTree:
        if len(arrays[0]) > 1:
            return jax.vmap(functools.partial(fn, **count))(*arrays)
        # A single run is not mapped, because a TPU's compiler would copy the leaf to add a
        # dimension of size 1.
        return jax.tree.map(lambda x: x[None], fn(*(x[0] for x in arrays), **count))

    return jax.jit(mapped, static_argnames="count", inline=True)


_largest = _of_runs(selection.largest)
# Reshape the result of ``add_at`` to the rows and columns of each run.
cells = _of_runs(lambda x: x.transpose(0, 2, 1).reshape(-1, x.shape[1]))


@_of_runs
def elements_at(rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the elements at positions."""
    word, column, bit = selection.at(positions, rows.shape[1])
    return rows.at[word * selection.BITS + bit, column].get(mode="promise_in_bounds")


@_of_runs
def add_at(into: jax.Array, positions: jax.Array, values: jax.Array) -> jax.Array:
    """Add ``values`` at ``positions`` to an array ``(runs, rows / BITS, columns, BITS)``."""
    chosen = into.at[selection.at(positions, into.shape[1])]
    # A TPU's compiler sorts indices unless ``indices_are_sorted`` is set.
    return chosen.add(values, unique_indices=True, indices_are_sorted=True)


class _Bucket(NamedTuple):
    """Leaves from which elements are chosen together, or a single leaf.

    Attributes:
      leaves: the indices of the leaves.
      array: the leaf; or the vector of several leaves, with zeros for elements below the threshold
        of their leaf.
      least: the threshold of the array.
      view: the runs of the array.
    """

    leaves: list[int]
    array: jax.Array
    least: Magnitude
    view: Runs


@dataclasses.dataclass(frozen=True)
class Largest(Codec):
    """Send the largest elements of every leaf, or of several leaves together, with their positions.

    Attributes:
      count: a function from a number of elements to the number of elements that are sent.
      block: the length of the runs from which elements are chosen; ``None`` chooses from a leaf as
        one run.
      cut: see ``Cut``.
      bucket_bytes: bytes of f32 up to which elements are chosen from several leaves together.
      lossy: see ``Codec``.
    """

    count: Callable[[int], int]
    block: int | None = None
    cut: Cut = Cut()
    bucket_bytes: int | None = None

    lossy: bool = True

    def reduce(self, leaves: Arrays, state: PyTree, names: tuple[str, ...]) -> Message:
        """Gather the chosen elements of all replicas, and sum them."""
        least = [self.cut.least(x) for x in leaves]
        buckets = self._buckets(leaves, least)
        positions, masks = zip(*(x.view.largest(x.array) for x in buckets), strict=True)
        chosen = zip(buckets, positions, strict=True)
        values = [self.cut.coded(elements_at(x.view.rows(x.array), i), x.least) for x, i in chosen]
        wires = [two_bits(x) if self.cut.bits else (x,) for x in values]
        arrays, structure = jax.tree.flatten((wires, positions))
        summed = self._summed(buckets, *structure.unflatten(_gathered(arrays, names)))
        # With the barrier, the sums are written once. Otherwise, a TPU's compiler would put the
        # operations that read the sums ahead of the transposition in ``cells``, and would also
        # write the results of these operations.
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
        """Return, for each bucket, the sum of the elements in ``wires`` over the replicas."""
        sums: list[jax.Array] = []
        for x, wire, at in zip(buckets, wires, positions, strict=True):
            values = wire[0]
            if self.cut.bits:
                # This is the inverse of ``two_bits``. A row may end with codes of padding.
                codes = ((wire[0][..., None] >> SHIFTS) & 3).reshape(*wire[0].shape[:-1], -1)
                means = lax.bitcast_convert_type(wire[1].astype(jnp.uint32) << 16, jnp.float32)
                sizes = jnp.where(codes >= 2, means[..., 1:], means[..., :1])
                values = jnp.where(codes % 2 == 1, -sizes, sizes)[..., : x.view.sent]
            runs, rows, columns = x.view.cells
            # For an array of this shape, ``selection.at`` returns ascending indices.
            shape = runs, rows // selection.BITS, columns, selection.BITS
            zeros = axes.unify(jnp.zeros(shape, trees.wide_dtype(values)), values)
            # The elements of the replicas are added replica by replica. In a single scatter-add,
            # the hardware would choose the order of the elements at equal positions. The sums of
            # different replicas would then differ by rounding.
            total, _ = lax.scan(
                lambda total, sent: (add_at(total, sent[1], sent[0].astype(total.dtype)), None),
                zeros,
                (values, at),
            )
            sums.append(x.view.leaf(cells(total)))
        return sums

    def has_slots(self, leaves: Arrays) -> jax.Array:
        """Return whether the sparse message has room for all selected elements, in every bucket."""
        lacking = jnp.zeros((), jnp.int32)
        for bucket in self._buckets(leaves, [self.cut.least(x) for x in leaves]):
            # Zeros are never sent.
            reached = (jnp.abs(bucket.array) >= bucket.least) & (bucket.array != 0)
            # Each row is summed in f32, because XLA:CPU would copy the array to sum integers. The
            # sum is exact, because the count of a row is small.
            by_row = bucket.view.rows(reached).astype(jnp.float32).sum(2).astype(jnp.int32)
            excess = jnp.maximum(by_row.sum(1) - bucket.view.sent, 0).sum(dtype=jnp.int32)
            lacking = jnp.maximum(lacking, excess)
        return lacking == 0

    def _buckets(self, leaves: Arrays, least: Sequence[Magnitude]) -> list[_Bucket]:
        """Return a bucket per leaf, or with ``bucket_bytes`` for several leaves of one dtype."""
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
    """Send the elements that reach a threshold: sparse if the message has room, else a dense mean.

    Shapes are static, so a sparse message has room for a fixed share of each leaf. The sparse form
    and the dense form are branches of one program. The replicas agree on a branch before they send.

    Attributes:
      capacity: share of each leaf for which a sparse message has room; with 1, every step is dense.
      sparse: the codec that sends this share.
      lossy: see ``Codec``.
    """

    capacity: float
    sparse: Largest
    lossy: bool = True
    chooses: bool = True

    def reduce(self, leaves: Arrays, state: PyTree, names: tuple[str, ...]) -> Message:
        """Send a sparse message if it has room for all elements; otherwise send the dense mean."""
        if self.capacity == 1:
            return self._dense(leaves, state, names)._replace(capacity=jnp.ones((), jnp.float32))
        forms = self.sparse.reduce, self._dense
        branch = jnp.where(axes.agree(self.sparse.has_slots(leaves), names), 0, 1).astype(jnp.int32)
        message = switched(branch, forms, leaves, state, names)
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
    """Return ``ceil(density * of)``, but at least 1, and without an effect of rounding errors."""
    return max(1, min(of, math.ceil(density * of - 1e-6)))


def _gathered(arrays: Arrays, names: tuple[str, ...]) -> list[jax.Array]:
    """Gather each array, as ``(replicas, *shape)``, with one collective for each dtype."""
    result: dict[int, jax.Array] = {}
    for kind in exchange.kinds(arrays):
        part = [arrays[i] for i in kind]
        flat = packed(part)
        # If the size is not a multiple of ``TILE``, a TPU's compiler replaces the all-gather by an
        # all-reduce, which sends twice the bytes.
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

    Put ``top_k_reduce`` first in the chain, instead of ``all_reduce``. By default, the sent
    elements are exact, so the sum of the sent part and the residual equals ``a_r`` bit for bit.

    Args:
      axis_name: mesh axis, or a tuple of axes. ``None`` means the axis of the surrounding
        ``make_train_step`` or ``on_mesh``.
      density: share of each leaf that is sent, ``ceil(density * size)`` elements. A dictionary from
        numbers of applied steps to shares is a warm-up: ``{0: 0.25, 200: 0.05, 400: 0.01}``.
      count: number of elements per leaf (or block) that are sent, instead of ``density``.
      block: number of elements in a run, if elements are chosen from each run of a leaf. Use 1024.
        Runs are along the last dimension if it is long. With runs, a position needs only 2 bytes.
        The sum of squares of the chosen elements is 87 to 99% of the sum of squares of the largest
        elements of the leaf. Runs are padded to a multiple of 32.
      bucket_bytes: number of bytes (of f32) up to which elements are chosen from several leaves
        together. Leaves are fused, from the last to the first, until the fused size exceeds this
        number. The elements of a larger leaf are chosen separately. The number of sent elements is
        the same, but leaves with larger elements send more. The cost is one copy of the fused
        leaves. ``2**23`` is SINGA's default. ``None`` chooses from every leaf separately.
      momentum: coefficient of momentum correction (DGC), which applies momentum before elements are
        chosen, and resets the momentum of sent elements. The optimizer must then have no momentum.
      wire_dtype: dtype of values on the wire, such as ``"bfloat16"``; ``None`` for f32. Rounding
        errors remain in the residual.
      bits: 2 sends two bits of each value: the sign, and whether the magnitude is above the mean
        magnitude of the block (or leaf). The mean magnitudes above and below this mean need 4 bytes
        per block. Rounding errors remain in the residual. ``None`` sends values in ``wire_dtype``.
      error_feedback: whether to keep the elements that were not sent. Without error feedback, most
        params never change.
      decay: factor of the residual at each step; see ``boostax.reduce.compress``.
      dense: leaves that are averaged without compression: ``lambda path, leaf: leaf.ndim < 2`` for
        norms and biases, or a tree of bools.

    Returns:
      A transformation with a ``CompressedState``. Cost: 8 bytes for each sent element, gathered
      from all replicas. In a leaf or block of up to 65536 elements, each sent element needs only 6
      bytes, or 4 bytes with a half ``wire_dtype``, or 2.25 bytes with ``bits=2``. If each replica
      sends k elements of 8 bytes, a ring sends ``8 (n-1) k`` bytes, less than the ``8 (n-1)/n N``
      bytes of a mean of N elements only if ``density < 1/n``. Each replica has a residual of the
      size of the f32 gradients, and with ``momentum`` a velocity of the same size. Each step also
      has two all-reduces of 8 bytes.

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
      comparison truncates magnitudes to integers. So if all magnitudes are below one, SINGA sends
      the first k elements.
    """
    who = "top_k_reduce"
    cut = Cut(bits=bits)
    largest = _checked(who, Largest(lambda size: count or 0, block, cut, bucket_bytes), wire_dtype)
    hint = "Omit bits to send values in wire_dtype."
    checks.require(bits in (None, 2), who, "bits", got=bits, allowed="2", hint=hint)
    both = wire_dtype if bits else None
    checks.absent(who, "wire_dtype", both, "left out with bits", "bits already sets the format.")
    if count is not None:
        checks.positive_int(who, "count", count, "count is in elements; density is a share.")
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

    Shapes are static, so a sparse message has room for a fixed share of each leaf, ``capacity``. At
    every step, the replicas count the elements that reach the threshold. If the messages have room
    for all these elements, in every leaf of every replica, these elements are sent with their
    positions. Otherwise, the replicas compute a plain mean, in which elements below the threshold
    are zero. So every element that reaches the threshold is sent, with or without error feedback.

    Args:
      axis_name: mesh axis, or a tuple of axes. ``None`` means the axis of the surrounding
        ``make_train_step`` or ``on_mesh``.
      threshold: the smallest magnitude that is sent.
      capacity: share of each leaf for which a sparse message has room. Sparse messages have fewer
        bytes than a mean if ``capacity < 1/n``. With 1.0, every step sends the mean.
      relative: whether the threshold is in units of the root mean square of gradient plus residual,
        so that a larger residual raises the threshold.
      block: see ``top_k_reduce``.
      bucket_bytes: number of bytes up to which leaves share the room of a message, as in
        ``top_k_reduce``. The same elements are sent, but a single leaf with too many elements makes
        fewer steps dense. With ``None``, leaves do not share room.
      wire_dtype: see ``top_k_reduce``; a dense step sends f32.
      error_feedback: whether to keep the elements that were not sent.
      decay: factor of the residual at each step; see ``boostax.reduce.compress``.
      dense: leaves that are averaged without compression.

    Returns:
      A transformation with a ``CompressedState``. Cost: a sparse step sends the bytes of
      ``top_k_reduce(density=capacity)``, on a ring ``8 (n-1) capacity N``; a dense step sends the
      bytes of a mean, ``8 (n-1)/n N``. Before they send, the replicas agree on one of the two
      forms, which costs an all-reduce of 4 bytes and one read of the gradients. ``boostax.metrics``
      has ``capacity``: the share of elements for which the messages of the last step had room, 1.0
      for a dense step.

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
      SINGA's ``backward_and_sparse_update(topK=False)``, which pads at each step to the largest
      count of any replica, so shapes are not static.
    """
    who = "threshold_reduce"
    checks.number(who, "threshold", threshold, "0 or more", "SINGA's is 0.05.", least=0)
    _check_share(who, "capacity", capacity)
    cut = Cut(threshold, relative)
    largest = Largest(functools.partial(share, capacity), block, cut, bucket_bytes)
    codec = Threshold(capacity, _checked(who, largest, wire_dtype))
    feedback: Any = {"error_feedback": error_feedback, "decay": decay}
    return compress(codec, axis_name=axis_name, **feedback, dense=dense, name=who)


def _checked(who: str, codec: Largest, wire_dtype: DTypeLike | None) -> Largest:
    """Check the arguments of a codec, and set the dtype of its values on the wire."""
    if (block := codec.block) is not None:
        block = checks.positive_int(who, "block", block, "Pass a length such as 1000.")
    wire = None if wire_dtype is None else checks.floating_dtype(who, "wire_dtype", wire_dtype)
    cut = dataclasses.replace(codec.cut, wire_dtype=wire)
    bucket_bytes = check_bytes(who, codec.bucket_bytes)
    return dataclasses.replace(codec, block=block, cut=cut, bucket_bytes=bucket_bytes)


def _by_density(who: str, density: Density, codec: Largest) -> Codec:
    """Return a codec that sends a share of the elements, or a share for each stage of a warm-up."""
    if not isinstance(density, Mapping):
        _check_share(who, "density", density)
        return dataclasses.replace(codec, count=functools.partial(share, density))
    starts = tuple(sorted(density))
    is_valid = bool(starts) and starts[0] == 0 and not any(isinstance(x, bool) for x in starts)
    allowed = "a mapping from steps, beginning with 0, to shares"
    hint = "{0: 0.25, 200: 0.01} sends 1% after a warm-up of 200 steps."
    checks.require(is_valid, who, "density", got=dict(density), allowed=allowed, hint=hint)
    for start in starts:
        _check_share(who, f"density[{start}]", density[start])
    shares = [functools.partial(share, density[start]) for start in starts]
    return Staged(starts, tuple(dataclasses.replace(codec, count=count) for count in shares))


def _check_share(who: str, argument: str, value: float) -> None:
    checks.number(who, argument, value, "in (0, 1]", "0.01 sends 1%.", above=0, most=1)
