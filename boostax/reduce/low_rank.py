# SPDX-License-Identifier: Apache-2.0
"""The low-rank reduction: of every matrix, two thin factors travel, in turn."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from boostax._core import axes, checks
from boostax._core.gate import branch
from boostax._core.layouts import LayoutName, named
from boostax.reduce.codec import Arrays, Codec, Message, PerLeaf, packed, staged, unpacked, unsent
from boostax.reduce.feedback import Dense, compress

PyTree = Any


class Factors(NamedTuple):
    """What the replicas have in common.

    Attributes:
      uses: for each matrix an i32 scalar, how often it was sent.
      side: for each matrix an i32 scalar, what was sent last: 0 for the left factor, 1 the right.
      left: for each matrix ``(rows, rank)``, the last left factor.
      right: for each matrix ``(columns, rank)``, the last right one.
    """

    uses: PerLeaf
    side: PerLeaf
    left: PerLeaf
    right: PerLeaf


@dataclasses.dataclass(frozen=True)
class PowerSgd(Codec):
    """A step of the power method at each call, warm-started, one side after the other.

    With an orthonormal basis ``Q`` of the columns that all know, ``P = mean(M) Q`` travels and
    ``P Q^T`` is the result. The next call takes a basis of ``P`` and sends ``mean(M)^T`` times it.

    Attributes:
      rank: of the approximation.
      seed: of the first basis.
      outputs: the dimension of the outputs of a kernel, the first or the last.
    """

    rank: int
    seed: int
    outputs: int = -1

    whole = True
    lossy = True

    def serves(self, leaf: Any) -> bool:
        """Real matrices of which two factors are at most half."""
        if leaf.ndim < 2 or jnp.iscomplexobj(leaf):
            return False
        rows, columns = sides(leaf.shape, self.outputs)
        return 2 * self.rank * (rows + columns) <= rows * columns

    def init(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> Factors:
        """Random factors, the same on all replicas."""
        key = jax.random.PRNGKey(self.seed)

        def drawn(i: int, leaf: jax.ShapeDtypeStruct, side: int) -> jax.Array:
            lengths = sides(leaf.shape, self.outputs)
            shape = (lengths[side], min(self.rank, *lengths))
            return jax.random.normal(jax.random.fold_in(key, 2 * i + side), shape, leaf.dtype)

        left, right = ([drawn(i, x, side) for i, x in enumerate(leaves)] for side in (0, 1))
        counts, ones = ([jnp.full((), n, jnp.int32) for _ in leaves] for n in (0, 1))
        return Factors(PerLeaf(counts), PerLeaf(ones), PerLeaf(left), PerLeaf(right))

    def reduce(self, leaves: Arrays, state: Factors, names: tuple[str, ...]) -> Message:
        """Send one side."""
        # In the leaves' own dimensions: XLA would gather a sharded one to make a matrix of it.
        cuts = [_cut(x.ndim, self.outputs) for x in leaves]

        def send(left: bool) -> tuple[Any, Any, Factors]:
            flat = self._bases((state.right if left else state.left).values, leaves)
            split = list(zip(leaves, flat, cuts, strict=True))
            bases = [q.reshape(*(x.shape[c:] if left else x.shape[:c]), -1) for x, q, c in split]
            own = [_contracted(x, q, c, left) for (x, _, c), q in zip(split, bases, strict=True)]
            # By one all-reduce of all factors.
            factors = unpacked(lax.pmean(packed(own), names), own)
            side = "left" if left else "right"
            new = state._replace(**{side: _stored(factors, getattr(state, side))})
            span = lambda x: _spanned(x, bases) if left else _spanned(bases, x)  # noqa: E731
            return span(factors), span(own), new

        # All send the same side, so that one reduction of one shape suffices: the other one than
        # the matrix sent last that is here most seldom. Others may be left out now and then, in
        # every second step for instance, and with the steps counted would never see both sides.
        uses, side = jnp.stack(state.uses.values), jnp.stack(state.side.values)
        left = side[uses.argmin()] == 1
        means, sent, state = branch(left, lambda: send(True), lambda: send(False))
        counts = PerLeaf([optax.safe_increment(n) for n in state.uses.values])
        last = PerLeaf([jnp.where(left, 0, 1).astype(jnp.int32) for _ in leaves])
        return Message(means, unsent(leaves, sent), state._replace(uses=counts, side=last))

    def _bases(self, factors: list[jax.Array], like: Arrays) -> list[jax.Array]:
        """Orthonormal columns. Of zeros too: QR then completes them, and nothing becomes a NaN."""
        ranks = [min(self.rank, *sides(x.shape, self.outputs)) for x in like]
        return [jnp.linalg.qr(f[:, :r])[0] for f, r in zip(factors, ranks, strict=True)]


def sides(shape: tuple[int, ...], outputs: int = -1) -> tuple[int, int]:
    """The leaf as a matrix, (rows, columns); outputs are columns unless they come first."""
    cut = _cut(len(shape), outputs)
    return math.prod(shape[:cut]), math.prod(shape[cut:])


def _cut(ndim: int, outputs: int) -> int:
    """How many leading dimensions are the matrix's rows."""
    return ndim - 1 if outputs else 1


def _contracted(x: jax.Array, basis: jax.Array, cut: int, last: bool) -> jax.Array:
    """The product over the dimensions from ``cut`` on, or those before it."""
    dims = range(cut, x.ndim) if last else range(cut)
    return _product(x, basis, (tuple(dims), tuple(range(len(dims)))))


def _product(a: jax.Array, b: jax.Array, dims: Any) -> jax.Array:
    """Over these dimensions of each, or so many last ones of one and first ones of the other."""
    return jnp.tensordot(a, b, dims, precision=lax.Precision.HIGHEST)


def _spanned(left: list[jax.Array], right: list[jax.Array]) -> list[jax.Array]:
    """What two factors stand for, in the shape of the leaf."""
    return [_product(a, jnp.moveaxis(b, -1, 0), 1) for a, b in zip(left, right, strict=True)]


def _stored(factors: list[jax.Array], old: PerLeaf) -> PerLeaf:
    """In place of the first columns; a later stage of a warm-up may have more."""
    flat = [f.reshape(-1, f.shape[-1]) for f in factors]
    pairs = zip(flat, old.values, strict=True)
    return PerLeaf([f if f.shape == o.shape else o.at[:, : f.shape[1]].set(f) for f, o in pairs])


def power_sgd_reduce(
    axis_name: axes.AxisName | None = None,
    rank: int | Mapping[int, int] = 2,
    *,
    seed: int = 0,
    layout: LayoutName | None = None,
    error_feedback: bool = True,
    dense: Dense = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Send a low-rank approximation of every matrix.

    .. math::
      P = \tfrac1n \sum_i M_i Q, \quad u = P Q^\top \ \text{(even steps)}; \qquad
      R = \tfrac1n \sum_i M_i^\top U, \quad u = U R^\top \ \text{(odd steps)}

    over the replicas :math:`i`. ``Q`` is an orthonormal basis of the columns of the last ``R``, and
    ``U`` one of those of the last ``P``: a step of the power method on what the gradients have in
    common from step to step. One all-reduce per step, where sending both factors takes two, one
    waiting for the other. All matrices send the same side. Where ``scheduled_freeze`` leaves some
    out, the one that was sent in the fewest steps decides: the side that it did not send last.

    A leaf of more than two dimensions is a matrix of its outputs, the last dimension in Flax's
    layout, and all others. Vectors, and leaves of which two factors would be more than half, take a
    plain mean.

    Args:
      axis_name: mesh axis, or a tuple of axes.
      rank: of the approximation, or a warm-up of it, ``{0: 8, 500: 2}``.
      seed: of the first basis.
      layout: ``"equinox"`` or ``"torch"`` where kernels have their outputs first, ``(out, in, H,
        W)``. With Flax's layout such a convolution would hardly shrink.
      error_feedback: keep what was not sent. Without it most of a gradient is never seen.
      dense: leaves that take a plain mean besides those.

    Returns:
      A transformation with a ``CompressedState``. Cost: for a matrix of ``m x k`` a payload of
      ``4 rank (m + k) / 2`` bytes on average, times ``2 (n-1)/n`` on a ring; three products with
      its basis and a QR of that; a residual per replica, both factors; two sums of 4 bytes.

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
      >>> mean = jax.vmap(two_steps, axis_name="data")(grads)
      >>> bool(jnp.allclose(mean, grads, rtol=1e-5))
      True

    References:
      Vogels et al., PowerSGD, https://arxiv.org/abs/1905.13727, 2019; alternating as its authors'
      later code does.
    """
    who = "power_sgd_reduce"

    def check(who: str, argument: str, value: Any) -> None:
        checks.positive_int(who, argument, value, "1, 2 or 4 are usual.")

    outputs = named(who, layout).outputs
    codec = staged(who, "rank", rank, lambda r: PowerSgd(r, seed, outputs), check)
    return compress(codec, axis_name, error_feedback=error_feedback, dense=dense, name=who)
