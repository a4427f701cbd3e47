# SPDX-License-Identifier: Apache-2.0
"""Count the updates that are lost by rounding, in params of low precision.

A bf16 number has 8 significant bits. An update of less than half a unit in the last place leaves
the number unchanged. Late in training, or at a small learning rate, most of a bf16 tensor may stop
learning in this way, while loss and gradients look healthy.

References:
  Zamirai et al., Revisiting BFloat16 Training, https://arxiv.org/abs/2010.06192, 2020.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, gate, placement, trees
from boostax._core.describe import Stepped, describe

PyTree = Any

_WHO = "count_lost_updates"


class LostUpdatesState(NamedTuple):
    """State of ``count_lost_updates``.

    Attributes:
      lost: f32 scalar, the share at the last applied step; 0 before the first.
      inner_state: state of the inner transformation.
    """

    lost: jax.Array
    inner_state: optax.OptState

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        return {"lost_updates": self.lost}


def count_lost_updates(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    r"""Count the updates that are lost by rounding, in bf16 and f16 params.

    The share is taken over all elements that are stored in less than 32 bits,

    .. math::
      \text{lost} = \frac{\#\{u \ne 0,\ \mathrm{round}(p + u) = p\}}{\#\{u \ne 0\}},

    and is reported as ``lost_updates`` in ``boostax.metrics``. A share near 1 means that training
    has stopped in the stored precision; f32 params (``policy(..., "params=float32")``) or a larger
    learning rate restart it.

    Put it directly around the optimizer, inside all gates, which compute in f32 and would hide the
    stored dtype: ``dynamic_loss_scale(count_lost_updates(adamw(1e-3)))``.

    Args:
      inner: the optimizer, without gates.

    Returns:
      A gate that never holds a step back, with a ``LostUpdatesState``. Cost: 4 bytes; nothing more
      if all params are f32. XLA:CPU does not count in the loop that writes the params: inside a
      scaler, an applied step of bf16 params moves 2.3 times (SGD) or 1.6 times (AdamW) the bytes,
      and holds one copy of the bf16 params (SGD) or three (AdamW).

    Raises:
      ValueError, TypeError: ``inner`` is no transformation, or has a gate.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.precision.count_lost_updates(optax.sgd(1.0))
      >>> w = jnp.bfloat16([1.0, 1.0, 1.0, 1.0])
      >>> grads = jnp.float32([0.0, 0.5, 1e-3, 1e-4])
      >>> w, state = boostax.apply_gradients(tx, grads, tx.init(w), w)
      >>> round(float(boostax.metrics(state)["lost_updates"]), 3)
      0.667
    """
    tx = checks.transformation(_WHO, "inner", inner)

    def init_fn(params: PyTree) -> LostUpdatesState:
        inner_state = gate.init_optimizer(_WHO, tx, params)
        return LostUpdatesState(jnp.zeros((), jnp.float32), inner_state)

    @describe(_WHO, "watch", inner={"inner_state": tx})
    def step_fn(
        grads: gate.Pending, state: LostUpdatesState, params: PyTree, *, apply: bool, **extra: Any
    ) -> Stepped:
        trees.require_params(params, _WHO, "Call tx.update(grads, state, params).")
        wide = trees.at_least_float32(params)
        updates, inner_state = tx.update(grads.value(), state.inner_state, wide, **extra)
        new = optax.apply_updates(params, updates)
        state = LostUpdatesState(_lost(params, updates, new), inner_state)
        return (placement.settled(new) if apply else trees.as_updates(updates, params)), state

    return gate.gated(init_fn, step_fn, gate.nothing_held)


def _lost(params: PyTree, updates: PyTree, new: PyTree) -> jax.Array:
    """Return the share of nonzero updates that changed no bit of a bf16 or f16 param."""
    triples = zip(*map(jax.tree.leaves, (params, updates, new)), strict=True)
    low = [triple for triple in triples if trees.wide_dtype(triple[0]) != triple[0].dtype]
    parts = [trees.counts((u != 0) & (new == p), u != 0) for p, u, new in low]
    if not parts:
        return jnp.zeros((), jnp.float32)
    lost, all_of_them = axes.sum_over_shards(parts)
    return lost / jnp.maximum(all_of_them, 1)
