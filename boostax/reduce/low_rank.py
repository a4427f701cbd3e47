"""The low-rank reduction: of every matrix, two thin factors travel, in turn."""

from collections.abc import Mapping
from typing import Any

import optax

from boostax._core import axes, checks
from boostax._core.layouts import LayoutName, named
from boostax.reduce.codecs.base import staged
from boostax.reduce.codecs.low_rank import PowerSgd, worth_it
from boostax.reduce.feedback import Dense, compressed


def power_sgd_reduce(
    axis_name: axes.AxisName,
    rank: int | Mapping[int, int] = 2,
    *,
    seed: int = 0,
    layout: LayoutName | None = None,
    error_feedback: bool = True,
    dense: Dense = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Send a low-rank approximation of every matrix.

    .. math::
      P = \tfrac1n \sum_r M_r Q, \quad u = P Q^\top \ \text{(even steps)}; \qquad
      R = \tfrac1n \sum_r M_r^\top U, \quad u = U R^\top \ \text{(odd steps)}

    with ``Q`` an orthonormal basis of the last ``R`` and ``U`` one of the last ``P``: a step of the
    power method on what the gradients have in common from step to step. One all-reduce per step,
    where sending both factors takes two, one waiting for the other. Where ``scheduled_freeze``
    leaves matrices out, the side is the one that the least used of those present needs.

    A leaf of more than two dimensions is a matrix of its outputs, the last dimension in Flax's
    layout, and all others. Vectors, and leaves of which two factors would be half or more, take a
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
      A transformation with a ``CompressedState``. Cost: for a matrix of ``m x k`` on average
      ``4 (n-1)/n * rank (m + k)`` bytes, at any number of replicas; three products with its basis
      and a QR of that; a residual per replica, both factors; two sums of 4 bytes.

    Raises:
      ValueError, TypeError: as ``top_k_reduce``.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> tx = boostax.power_sgd_reduce("data", rank=1)
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
    widest = max(rank.values()) if isinstance(rank, Mapping) else rank
    rule = worth_it(widest, outputs)
    return compressed(
        who,
        axis_name,
        codec,
        error_feedback=error_feedback,
        dense=dense,
        also_dense=rule,
        whole=True,
    )
