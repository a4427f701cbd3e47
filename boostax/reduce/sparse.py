"""Sparse reductions: a few entries of every leaf travel, the rest waits."""

from collections.abc import Callable, Mapping
from typing import Any

import optax

from boostax._core import axes, checks
from boostax.reduce.codecs.base import Codec, staged
from boostax.reduce.codecs.sparse import Largest, Random, share
from boostax.reduce.feedback import Dense, compressed

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
    r"""Send the entries of largest magnitude of every leaf; the rest waits.

    .. math::
      a_r = g_r + e_r, \quad u = \tfrac1n \sum_r \operatorname{top}_k(a_r), \quad
      e_r \leftarrow a_r - \operatorname{top}_k(a_r)

    Stands first in the inner chain, in the place of ``all_reduce``. What is sent is exact, so
    nothing is lost: sent and held back add up bit for bit.

    Args:
      axis_name: mesh axis, or a tuple of axes.
      density: share of each leaf that travels, ``ceil(density * size)`` entries; or a warm-up of
        it, ``{0: 0.25, 200: 0.05, 400: 0.01}``, by calls that were not skipped.
      count: so many entries of each leaf (or block) instead.
      block: choose among each run of so many entries by itself, along the last dimension where it
        is long. Places take 2 bytes; keeps 87 to 99% of the energy. Try 1000. Runs are sorted,
        whole leaves are not: on a TPU leave it out.
      momentum: correct for the momentum of the optimizer (DGC): momentum is applied here, before
        the choice, and stops where an entry has been sent. The optimizer then goes without.
      value_dtype: of values on the wire, such as ``"bfloat16"``; ``None`` for f32. Rounding stays
        in the residual.
      error_feedback: keep what was not sent. Without it most entries never move.
      dense: leaves that take a plain mean: ``lambda path, leaf: leaf.ndim < 2`` for norms and
        biases, or a tree of bools.

    Returns:
      A transformation with a ``CompressedState``. Cost: 8 bytes an entry sent (6 where a leaf or
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
    if momentum is not None:
        _check_momentum(who, momentum, error_feedback)
    wire = None if value_dtype is None else checks.floating_dtype(who, "value_dtype", value_dtype)

    def largest(counter: Callable[[int], int]) -> Codec:
        return Largest(counter, block, value_dtype=wire)

    if count is None:
        codec = staged(
            who, "density", density, lambda d: largest(lambda size: share(d, size)), _check_density
        )
    else:
        checks.positive_int(who, "count", count, "It is a number of entries; density is a share.")
        codec = largest(lambda size: count)
    return compressed(
        who, axis_name, codec, error_feedback=error_feedback, dense=dense, momentum=momentum
    )


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
    r"""Send the entries of every leaf that reach a threshold, as far as they fit.

    .. math:: u = \tfrac1n \sum_r a_r \, [\, |a_r| \ge t \,], \qquad a_r = g_r + e_r

    Shapes are static: ``capacity`` is what travels, used or not. Of more entries than that the
    largest go, and the others wait, or are lost without ``error_feedback``;
    ``boostax.metrics`` counts them as ``over_capacity``. It costs what
    ``top_k_reduce(density=capacity)`` costs; it differs in sending nothing small.

    Args:
      axis_name: mesh axis, or a tuple of axes.
      threshold: magnitude from which an entry is sent.
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
      >>> tx = boostax.threshold_reduce("data", 0.5, capacity=0.5)
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
    codec = Largest(lambda size: share(capacity, size), block, threshold, relative, wire)
    return compressed(
        who, axis_name, codec, error_feedback=error_feedback, dense=dense, overflows=True
    )


def random_k_reduce(
    axis_name: axes.AxisName,
    density: Density = 0.01,
    *,
    seed: int = 0,
    error_feedback: bool = True,
    dense: Dense = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Send entries chosen by chance, the same on all replicas; of a large leaf whole rows.

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
      >>> tx = boostax.random_k_reduce("data", density=0.5)
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

    return compressed(
        who,
        axis_name,
        staged(who, "density", density, codec, _check_density),
        error_feedback=error_feedback,
        dense=dense,
    )


def _check_density(who: str, argument: str, value: Any) -> None:
    hint = "0.01 sends one entry in a hundred."
    checks.number(who, argument, value, "in (0, 1]", lambda x: 0 < x <= 1, hint)


def _check_momentum(who: str, momentum: float, error_feedback: bool) -> None:
    hint = "That of the optimizer, which then goes without: try 0.9."
    checks.number(who, "momentum", momentum, "in [0, 1)", lambda x: 0 <= x < 1, hint)
    if not error_feedback:
        raise ValueError(
            f"{who}: momentum must be None without error_feedback, got {momentum!r}. It is "
            "corrected for what the residual delays; without one, give it to the optimizer."
        )
