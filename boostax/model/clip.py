# SPDX-License-Identifier: Apache-2.0
"""Clip by the global norm, also of sharded leaves, or by the running norm of each leaf."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, gate, norms, trees
from boostax._core.describe import Stepped, describe
from boostax._core.types import PyTree


def clip_by_global_norm(
    max_norm: float, *, shard_axes: axes.AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Clip by the global norm like ``optax.clip_by_global_norm``, also if leaves are sharded.

    .. math:: u = g \cdot \min\left(1, \frac{c}{\lVert g \rVert}\right), \quad
              \lVert g \rVert^2 = \sum_{\text{leaves, shards}} \lVert g_s \rVert^2

    Inside ``jax.shard_map`` Optax's clip would compute the norm of one device's shards, and every
    device would clip by a different factor. ``boostax.model.clip_by_global_norm`` sums squares over
    the axes that a leaf is sharded over, and counts unsharded leaves once. Put this clip after the
    reduction, whose result is equal on all replicas. In plain ``jit`` Optax's own clip is correct
    for any sharding.

    Args:
      max_norm: the largest norm that is not clipped.
      shard_axes: axes over which leaves are sharded (FSDP, tensor parallel); needs JAX's tracking
        of varying types (``check_vma``).

    Returns:
      A stateless transformation. Without shards, the updates equal those of Optax bit for bit.
      Cost: one all-reduce of a scalar for each set of axes over which leaves are sharded.

    Raises:
      ValueError, TypeError: ``max_norm`` is not greater than 0; at trace time, an unbound axis.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> tx = boostax.model.clip_by_global_norm(1.0)
      >>> g = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> [x.tolist() for x in tx.update(g, tx.init(g))[0].values()]
      [[0.6000000238418579], [0.800000011920929]]
    """
    who = "clip_by_global_norm"
    checks.number(who, "max_norm", max_norm, "greater than 0", "1.0 is usual.", above=0)
    names = axes.canonical(who, shard_axes)

    @describe(who, "norm clip", names)
    def update_fn(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Stepped:
        trees.require_gradients(updates, who)
        squares = [jnp.sum((g * g.conj()).real) for g in jax.tree.leaves(updates)]
        norm = jnp.sqrt(axes.shard_total(squares, names, who))

        def clipped(g: jax.Array) -> jax.Array:
            scaled = (g / norm.astype(g.dtype)) * max_norm
            # A norm that is not finite makes every leaf not finite, as in Optax.
            return jnp.where(norm < max_norm, g, scaled).astype(g.dtype)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


class AdaGCState(NamedTuple):
    """State of ``adagc``.

    Attributes:
      steps: i32, finite gradients so far.
      norms: tree like the params, f32 scalars: the running norm of each leaf's clipped gradient;
        infinite before the first finite gradient.
    """

    steps: jax.Array  # [] int32
    norms: PyTree  # [] float32 for each leaf


def adagc(
    factor: float = 1.05, *, decay: float = 0.98, warmup: int = 100, max_norm: float = 1.0
) -> optax.GradientTransformationExtraArgs:
    r"""Clip each leaf of the gradient to a multiple of its running norm.

    After the warm-up, with the running norm :math:`\gamma_i` of leaf :math:`i`,

    .. math::
      u_i = g_i \min\Bigl(1, \frac{\lambda \gamma_i}{\lVert g_i \rVert}\Bigr), \qquad
      \gamma_i \leftarrow \beta \gamma_i + (1 - \beta) \lVert u_i \rVert.

    In the first ``warmup`` steps the whole gradient is clipped by its global norm, :math:`u = g
    \min(1, c / \lVert g \rVert)`, and :math:`\gamma_i` is the least :math:`\lVert u_i \rVert` so
    far. A leaf whose running norm is zero is not clipped. In a loop over layers
    (``boostax.train.Layers``), the warm-up clips each layer's leaf to the norm :math:`c`.

    Put ``adagc`` after the reduction, and inside a gate that skips gradients that are not finite.
    Without a gate, ``adagc`` returns such gradients, and its state stays unchanged. In plain
    ``jit`` the norms are of global arrays, for any sharding. In our benchmark of a text model, the
    loss is 0.055 nats higher with ``adagc`` than with a clip by the global norm.

    Args:
      factor: :math:`\lambda`, >= 1.
      decay: :math:`\beta`, in (0, 1).
      warmup: steps of global clipping, at least 1.
      max_norm: :math:`c`, the largest global norm in the warm-up.

    Returns:
      A transformation with an ``AdaGCState``. Updates have the dtypes of the gradients. Cost: a
      state of 4 bytes for each leaf, and 4 bytes more; two reads of the gradients; no collective.

    Raises:
      ValueError, TypeError: an argument out of range.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> tx = boostax.model.adagc(warmup=1)
      >>> state = tx.init({"w": jnp.zeros(2)})
      >>> for g in (jnp.array([0.6, 0.8]), jnp.array([60.0, 80.0])):
      ...   updates, state = tx.update({"w": g}, state)
      >>> print(f"{jnp.linalg.norm(updates['w']):.3f}")
      1.050

    References:
      Wang et al., AdaGC: Enhancing LLM Pretraining Stability via Adaptive Gradient Clipping,
      https://arxiv.org/abs/2502.11034, 2025.
    """
    who = "adagc"
    checks.number(who, "factor", factor, "at least 1", "1.05 is the default.", least=1)
    checks.number(who, "decay", decay, "in (0, 1)", "0.98 is the default.", above=0, below=1)
    checks.positive_int(who, "warmup", warmup, "warmup is a number of steps; 100 is the default.")
    checks.number(who, "max_norm", max_norm, "greater than 0", "1.0 is usual.", above=0)

    def init_fn(params: PyTree) -> AdaGCState:
        return AdaGCState(jnp.int32(0), jax.tree.map(lambda _: jnp.float32(jnp.inf), params))

    @describe(who, "norm clip")
    def update_fn(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Stepped:
        trees.require_gradients(updates, who)
        sizes = jax.tree.map(lambda g: jnp.float32(norms.root(norms.square_sums([g])[0])), updates)
        early = state.steps < warmup
        global_norm = norms.root(sum(norms.square_sums(jax.tree.leaves(sizes)), jnp.zeros(2)))

        def clipped(g: jax.Array, size: jax.Array, past: jax.Array) -> Stepped:
            # In a step with ``layers=``, the gradients of other leaves may not exist yet, so the
            # leaf's norm replaces the global norm.
            total = size if axes.bound().partial else global_norm
            finite = jnp.isfinite(total)
            by_total = jnp.where(total > max_norm, size * (max_norm / total), size)
            by_leaf = jnp.where(past > 0, jnp.minimum(size, factor * past), size)
            limit = jnp.where(early, by_total, by_leaf)
            share = jnp.where(size > limit, limit / size, 1.0).astype(trees.wide_dtype(g))
            moved = jnp.where(early, jnp.minimum(past, limit), decay * past + (1 - decay) * limit)
            return (g.astype(share.dtype) * share).astype(g.dtype), jnp.where(finite, moved, past)

        both = jax.tree.map(clipped, updates, sizes, state.norms)
        new, running = (jax.tree.map(lambda _, x, i=i: x[i], updates, both) for i in (0, 1))
        return new, AdaGCState(gate.counted(state.steps, jnp.isfinite(global_norm)), running)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
