# SPDX-License-Identifier: Apache-2.0
"""The low-rank reduction: approximate a matrix by two thin factors, and send one per step."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from boostax._core import axes, checks, gate, layouts
from boostax.reduce.codec import Arrays, Codec, Message, PerLeaf, packed, staged, unpacked, unsent
from boostax.reduce.feedback import Dense, compress

_product = functools.partial(jnp.tensordot, precision=lax.Precision.HIGHEST)


class Factors(NamedTuple):
    """The factors, which are equal on all replicas.

    Attributes:
      uses: for each matrix an i32 scalar, how often the matrix was sent.
      side: for each matrix an i32 scalar, the factor sent last: 0 for the left one, 1 the right.
      left: for each matrix ``(rows, rank)``, the last left factor.
      right: for each matrix ``(columns, rank)``, the last right factor.
    """

    uses: PerLeaf
    side: PerLeaf
    left: PerLeaf
    right: PerLeaf


@dataclasses.dataclass(frozen=True)
class PowerSgd(Codec):
    """A warm-started step of the power method at each call, for alternating sides.

    With an orthonormal basis ``Q`` of the last right factor, ``P = mean(M) Q`` is sent and ``P
    Q^T`` is the result. The next call computes a basis ``U`` of ``P`` and sends ``mean(M)^T U``.

    Attributes:
      rank: rank of the approximation.
      seed: seed of the first basis.
      outputs: the dimension of the outputs of a kernel, the first or the last.
    """

    rank: int
    seed: int
    outputs: int = -1

    whole = True
    lossy = True

    def serves(self, leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
        """Return whether a leaf is a real matrix whose two factors have at most half its size."""
        if leaf.ndim < 2 or jnp.iscomplexobj(leaf):
            return False
        rows, columns = sides(leaf.shape, self.outputs)
        return 2 * self.rank * (rows + columns) <= rows * columns

    def init(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> Factors:
        """Return random factors, the same on all replicas."""
        key = jax.random.PRNGKey(self.seed)

        def drawn(i: int, leaf: jax.ShapeDtypeStruct, side: int) -> jax.Array:
            lengths = sides(leaf.shape, self.outputs)
            shape = (lengths[side], min(self.rank, *lengths))
            return jax.random.normal(jax.random.fold_in(key, 2 * i + side), shape, leaf.dtype)

        left, right = ([drawn(i, x, side) for i, x in enumerate(leaves)] for side in (0, 1))
        uses, side = ([jnp.full((), n, jnp.int32) for _ in leaves] for n in (0, 1))
        return Factors(*map(PerLeaf, (uses, side, left, right)))

    def reduce(self, leaves: Arrays, state: Factors, names: tuple[str, ...]) -> Message:
        """Send one factor of each matrix."""
        # Leaves keep their dimensions, because XLA would gather a sharded leaf to reshape it to a
        # matrix.
        cuts = [_cut(x.ndim, self.outputs) for x in leaves]
        ranks = [min(self.rank, *sides(x.shape, self.outputs)) for x in leaves]

        def send(left: bool) -> tuple[Any, Any, Factors]:
            old = (state.right if left else state.left).values
            # QR completes zero columns to a basis, so no NaN arises.
            flat = [jnp.linalg.qr(f[:, :r])[0] for f, r in zip(old, ranks, strict=True)]
            split = list(zip(leaves, flat, cuts, strict=True))
            bases = [q.reshape(*(x.shape[c:] if left else x.shape[:c]), -1) for x, q, c in split]
            local = [_contracted(x, q, c, left) for (x, _, c), q in zip(split, bases, strict=True)]
            # One all-reduce sends all factors.
            factors = unpacked(lax.pmean(packed(local), names), local)
            side = "left" if left else "right"
            new = state._replace(**{side: _stored(factors, getattr(state, side))})
            span = lambda x: _spanned(x, bases) if left else _spanned(bases, x)  # noqa: E731
            return span(factors), span(local), new

        # All matrices send the same side, so one reduction of one shape suffices. The matrix that
        # was sent in the fewest steps decides: it sends the side that it did not send last. A
        # matrix may take part only in every second step. If the step number decided, such a matrix
        # would always send the same side.
        uses, side = jnp.stack(state.uses.values), jnp.stack(state.side.values)
        left = side[uses.argmin()] == 1
        means, sent, state = gate.branch(left, lambda: send(True), lambda: send(False))
        counts = PerLeaf([optax.safe_increment(n) for n in state.uses.values])
        last = PerLeaf([jnp.where(left, 0, 1).astype(jnp.int32) for _ in leaves])
        return Message(means, unsent(leaves, sent), state._replace(uses=counts, side=last))


def sides(shape: tuple[int, ...], outputs: int = -1) -> tuple[int, int]:
    """Return rows and columns of a leaf as a matrix; outputs are columns unless they come first."""
    cut = _cut(len(shape), outputs)
    return math.prod(shape[:cut]), math.prod(shape[cut:])


def _cut(ndim: int, outputs: int) -> int:
    """Return how many leading dimensions are the matrix's rows."""
    return ndim - 1 if outputs else 1


def _contracted(x: jax.Array, basis: jax.Array, cut: int, last: bool) -> jax.Array:
    """Multiply ``x`` by ``basis``, summed over the dimensions from, or before, ``cut``."""
    dims = range(cut, x.ndim) if last else range(cut)
    return _product(x, basis, (tuple(dims), tuple(range(len(dims)))))


def _spanned(left: list[jax.Array], right: list[jax.Array]) -> list[jax.Array]:
    """Return the product of two factors, in the shape of the leaf."""
    return [_product(a, jnp.moveaxis(b, -1, 0), 1) for a, b in zip(left, right, strict=True)]


def _stored(factors: list[jax.Array], old: PerLeaf) -> PerLeaf:
    """Write factors into the first columns of the old factors, which may have more columns."""
    flat = [f.reshape(-1, f.shape[-1]) for f in factors]
    pairs = zip(flat, old.values, strict=True)
    return PerLeaf([f if f.shape == o.shape else o.at[:, : f.shape[1]].set(f) for f, o in pairs])


def power_sgd_reduce(
    axis_name: axes.AxisName | None = None,
    rank: int | Mapping[int, int] = 2,
    *,
    seed: int = 0,
    layout: layouts.LayoutName | None = None,
    error_feedback: bool = True,
    decay: float = 1.0,
    dense: Dense = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Send a low-rank approximation of every matrix.

    .. math::
      P = \tfrac1n \sum_i M_i Q, \quad u = P Q^\top \ \text{(even steps)}; \qquad
      R = \tfrac1n \sum_i M_i^\top U, \quad u = U R^\top \ \text{(odd steps)}

    for the replicas :math:`i`. ``Q`` is an orthonormal basis of the columns of the last ``R``, and
    ``U`` is an orthonormal basis of the columns of the last ``P``. This is a step of the power
    method on the part that the gradients of successive steps share. It takes one all-reduce per
    step, while sending both factors takes two in sequence. All matrices send the same side. If
    ``scheduled_freeze`` leaves some matrices out, the matrix that was sent in the fewest steps
    decides: it sends the side that it did not send last.

    A leaf of more than two dimensions is treated as a matrix: the output dimension (the last one in
    Flax's layout) by all other dimensions together. Vectors, and leaves whose two factors would
    have more than half the leaf's size, are averaged plainly.

    Args:
      axis_name: mesh axis, or a tuple of axes. ``None`` means the axis of the surrounding
        ``make_train_step`` or ``on_mesh``.
      rank: rank of the approximation, or a warm-up of the rank, ``{0: 8, 500: 2}``.
      seed: seed of the first basis.
      layout: ``"equinox"`` or ``"torch"`` if kernels have their outputs first, ``(out, in, H, W)``.
        Read in Flax's layout, such a convolution would hardly be compressed.
      error_feedback: whether to keep the part that was not sent; otherwise most of a gradient is
        lost.
      decay: factor of the residual at each step; see ``boostax.reduce.compress``.
      dense: further leaves that are averaged without compression.

    Returns:
      A transformation with a ``CompressedState``. Cost: for a matrix of ``m x k`` a payload of ``4
      rank (m + k) / 2`` bytes on average, times ``2 (n-1)/n`` on a ring; three products with the
      basis and a QR of the basis; a residual per replica and both factors; two all-reduces of 8
      bytes.

    Raises:
      ValueError, TypeError: as ``top_k_reduce``.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> tx = boostax.reduce.power_sgd_reduce("data", rank=1)
      >>> rows, columns = jnp.arange(1.0, 9.0), jnp.arange(1.0, 7.0)
      >>> grads = jnp.stack([jnp.outer(rows, columns)] * 2)  # of rank one
      >>> def two_steps(g):
      ...   _, state = tx.update(g, tx.init(g))
      ...   return tx.update(g, state._replace(residual=tx.init(g).residual))[0]
      >>> mean = jax.jit(jax.vmap(two_steps, axis_name="data"))(grads)
      >>> bool(jnp.allclose(mean, grads, rtol=1e-5))
      True

    References:
      Vogels et al., PowerSGD, https://arxiv.org/abs/1905.13727, 2019; the alternation follows the
      authors' later code.
    """
    who = "power_sgd_reduce"

    check = functools.partial(checks.positive_int, hint="1, 2 or 4 are usual.")
    outputs = layouts.named(who, layout).outputs
    codec = staged(who, "rank", rank, lambda r: PowerSgd(r, seed, outputs), check)
    feedback: Any = {"error_feedback": error_feedback, "decay": decay}
    return compress(codec, axis_name, **feedback, dense=dense, name=who)
