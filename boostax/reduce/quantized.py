# SPDX-License-Identifier: Apache-2.0
"""The quantised reduction: every element is sent in 8 bits.

The reduction consists of two collectives (*two shots*). An all-to-all sends codes of each slice to
the replica that sums the slice. An all-gather returns the sums, quantised again.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from boostax._core import axes, checks
from boostax._core.types import PyTree
from boostax.reduce import collectives, exchange
from boostax.reduce.codec import Arrays, Codec, Late, Message, Names, packed, unpacked
from boostax.reduce.feedback import Dense, compress

Rounding = Literal["nearest", "stochastic"]
LEVELS = 127


@dataclasses.dataclass(frozen=True)
class Int8(Codec):
    """A mean in two shots of int8 codes, with a scale for each row.

    The replica that rounds a mean multiplies the error of this second rounding by the number of
    replicas, and adds the product to its residual. A later mean divides by the number of replicas,
    so it compensates for the error.

    Attributes:
      block: the maximum number of elements in a row; ``None`` for 256, or 4096 on a TPU.
      stochastic: whether to round up or down at random, which preserves the expected value, instead
        of to the nearest code.
      seed: seed of the rounding.
    """

    block: int | None
    stochastic: bool
    seed: int

    def init(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> PyTree:
        """Return the key of stochastic rounding, the same on all replicas, or ``None``."""
        return jax.random.PRNGKey(self.seed) if self.stochastic else None

    def reduce(self, leaves: Arrays, state: PyTree, names: Names) -> Message:
        """Send codes by an all-to-all, sum in f32, and gather the codes of the sums."""
        first = second = None
        if self.stochastic:
            state, now = jax.random.split(state)
            first, second = jax.random.split(jax.random.fold_in(now, axes.index(names)))
        # The surrounding mesh may have devices of a platform that this machine does not have.
        device: Any = jax.sharding.get_abstract_mesh().abstract_device
        kind: str = jax.default_backend() if device is None else device.device_kind
        # On a TPU, shorter rows would need a copy in another tiling.
        block = self.block or (4096 if "tpu" in kind.lower() else 256)
        replicas = axes.size(names)
        sent = exchange.chunks(leaves, replicas, by_leaf=False)
        cuts = [exchange.cut(chunk.array(leaves), replicas, chunk.dim) for chunk in sent]
        grids = [exchange.Grid.of(x.shape, block, 1) for x in cuts]
        rows = [grid.rows(x) for grid, x in zip(grids, cuts, strict=True)]
        slices = _Slices(leaves, sent, grids)
        codes, scales = quantize(rows, first)
        received = [collectives.exchange(x, names) for x in codes]
        # The scales of all leaves are sent as one message.
        theirs = unpacked(collectives.exchange(packed(scales, 1), names), scales, 1)
        means = [x.mean(0) for x in dequantize(received, theirs, rows)]
        mean_codes, mean_scales = quantize(means, second)
        gathered = [collectives.gather_along(x, names, 0).reshape(-1, *x.shape) for x in mean_codes]
        of_means = unpacked(axes.gather(packed(mean_scales), names), mean_scales)
        decoded = dequantize(gathered, of_means, means)
        errors = list(map(jnp.subtract, rows, dequantize(codes, scales, rows)))
        mean_errors = list(map(jnp.subtract, means, dequantize(mean_codes, mean_scales, means)))
        residuals, late = slices.corrected(errors, mean_errors, names)
        return Message(slices.joined(decoded), residuals, state, late)


class _Slices(NamedTuple):
    """Leaves that are split into a slice for each replica; the slices are split into rows.

    Rows are along a leaf's last dimension. If the last dimension is longer than a block, it is
    split into equal rows. If the last dimension is shorter than a TPU's vector, or if the leaf is
    packed with other leaves, a row has consecutive elements of the flat array.

    Attributes:
      leaves: the leaves.
      sent: the chunks of the leaves.
      grids: the grid of each chunk, which splits slices into rows.
    """

    leaves: Arrays
    sent: list[exchange.Chunk]
    grids: list[exchange.Grid]

    def joined(self, rows: Arrays) -> list[jax.Array]:
        """Return the leaves, from the rows of all slices."""
        trios = zip(self.sent, self.grids, rows, strict=True)
        arrays = [exchange.joined(grid.slices(x), chunk.dim) for chunk, grid, x in trios]
        pairs = zip(self.sent, arrays, strict=True)
        by_index = {i: x for chunk, array in pairs for i, x in chunk.leaves(array).items()}
        return [by_index[i].astype(x.dtype) for i, x in enumerate(self.leaves)]

    def corrected(self, errors: Arrays, mean_errors: Arrays, names: Names) -> PyTree:
        """Return ``residuals`` and ``late`` of a message, from the errors of both roundings.

        In this replica's slice, the error of the mean is multiplied by the number of replicas, and
        added to the error of the first rounding.
        """
        replica = axes.index(names)
        late: list[Late | None] = [None] * len(self.leaves)
        rows = [*errors]
        for k, (chunk, grid) in enumerate(zip(self.sent, self.grids, strict=True)):
            more = axes.size(names) * mean_errors[k]
            leaf = chunk.indices[0]
            if chunk.block is None and not chunk.shapes[0][chunk.dim] % chunk.slices:
                more = exchange.joined(grid.slices(more[None]), chunk.dim)
                # Leaves of different dtypes were computed in their widest dtype, so ``more`` is
                # cast to the dtype of its leaf.
                late[leaf] = chunk.dim, more.astype(self.leaves[leaf].dtype)
            else:
                more += lax.dynamic_index_in_dim(errors[k], replica, 0, keepdims=False)
                rows[k] = lax.dynamic_update_index_in_dim(errors[k], more, replica, 0)
        return self.joined(rows), late


def quantize(blocks: Arrays, key: jax.Array | None) -> tuple[Arrays, Arrays]:
    """Return int8 codes in the shapes of the blocks, and an f32 scale for each row."""
    # A scale is at least the smallest normal number, which has a finite reciprocal.
    least = jnp.finfo(jnp.float32).tiny
    units = [jnp.maximum(jnp.abs(x).max(-1, keepdims=True) / LEVELS, least) for x in blocks]
    levels: list[jax.Array] = []
    for i, (x, unit) in enumerate(zip(blocks, units, strict=True)):
        if key is None:
            levels.append(jnp.round(x / unit))
        else:
            chance = jax.random.uniform(jax.random.fold_in(key, i), x.shape, x.dtype)
            levels.append(jnp.floor(x / unit + chance))
    codes = [jnp.clip(x, -LEVELS, LEVELS).astype(jnp.int8) for x in levels]
    return codes, [unit.astype(jnp.float32) for unit in units]


def dequantize(codes: Arrays, scales: Arrays, like: Arrays) -> list[jax.Array]:
    """Invert ``quantize``, in the widest dtype of ``like``."""
    dtype = jnp.result_type(*(x.dtype for x in like))
    return [c.astype(dtype) * s.astype(dtype) for c, s in zip(codes, scales, strict=True)]


def int8_reduce(
    axis_name: axes.AxisName | None = None,
    *,
    block: int | None = None,
    rounding: Rounding = "nearest",
    seed: int = 0,
    error_feedback: bool = True,
    decay: float = 1.0,
    dense: Dense = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Send every element as int8, with an f32 scale for each row, in two shots.

    .. math:: q = \operatorname{round}(a / s), \qquad s = \max_{\text{row}} |a| / 127

    An all-to-all sends the codes of each slice of a leaf to the replica that sums this slice in
    f32. An all-gather returns the sums, quantised again. The two collectives send a quarter of a
    mean's bytes for any number of replicas. With eight or more replicas, a single all-gather of all
    codes would send at least the bytes of a mean.

    A leaf is split along one of its dimensions, and rows are along its last dimension, so most
    leaves are not flattened. Three kinds of leaves are flattened, and split into rows of 256
    elements, or up to 1024 on a TPU: small leaves; leaves in which no dimension is a multiple of
    the number of replicas, up to 1% padding; and leaves whose rows have fewer than 128 elements.

    Args:
      axis_name: mesh axis, or a tuple of axes. ``None`` means the axis of the surrounding
        ``make_train_step`` or ``on_mesh``.
      block: the maximum number of elements that share a scale; longer rows are split into equal
        parts. ``None`` means 256, or 4096 on a TPU, where shorter rows need a copy in another
        tiling.
      rounding: ``"nearest"``, or ``"stochastic"`` for up or down at random, which preserves the
        expected value.
      seed: seed of stochastic rounding.
      error_feedback: whether to keep the errors of both roundings for the next step.
      decay: factor of the residual at each step; see ``boostax.reduce.compress``.
      dense: leaves that are averaged without compression.

    Returns:
      A transformation with a ``CompressedState``. Cost: ``2 (n-1)/n (1 + 4 / row)`` bytes an
      element; an all-to-all and an all-gather of each leaf, of each pack of small leaves, and of
      all scales together; a residual per replica; two all-reduces of 8 bytes. A train step with 67
      M params, compiled for TPU v5e, takes 1.94 times the cycles of the step with the f32 mean.

    Raises:
      ValueError, TypeError: as ``top_k_reduce``.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> tx = boostax.int8_reduce("data")
      >>> step = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data"))
      >>> step(jnp.array([[127.0, 3.0], [127.0, -1.0]]))[0].tolist()
      [127.0, 1.0]

    References:
      Seide et al., 1-bit stochastic gradient descent, 2014, for the feedback; EQuARX,
      https://arxiv.org/abs/2506.17615, for the two shots.
    """
    who = "int8_reduce"
    if block is not None:
        checks.positive_int(who, "block", block, "block=None means 4096 on a TPU, else 256.")
    checks.choice(
        who, "rounding", rounding, Rounding, "Error feedback corrects errors of either rounding."
    )
    codec = Int8(block, rounding == "stochastic", seed)
    feedback: Any = {"error_feedback": error_feedback, "decay": decay}
    return compress(codec, axis_name=axis_name, **feedback, dense=dense, name=who)
