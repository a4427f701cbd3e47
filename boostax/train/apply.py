# SPDX-License-Identifier: Apache-2.0
"""Update and apply in one call."""

from typing import Any

import optax

from boostax._core import checks, mismatch, types
from boostax._core.gate import PyTree, applied


@checks.arguments
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: PyTree,
    opt_state: types.State,
    params: types.Params,
    **extra_args: Any,
) -> tuple[types.Params, types.State]:
    """Run ``tx.update`` and ``optax.apply_updates`` in one call, which skips by a branch.

    A skipped step, or a micro-step inside an accumulation window, writes no parameter: with donated
    buffers the compilers for CPU, TPU v5e and H100 leave params where they are. A gate inside an
    Optax wrapper such as ``optax.chain`` cannot be seen from here; then the function makes those
    two calls.

    Args:
      tx: any Optax transformation; the gain is with boostax's gates outermost.
      grads: gradients as ``tx`` needs them: scaled if it unscales, local if it reduces.
      opt_state: state of ``tx``.
      params: the params; a leaf without a gradient (``None``), such as a function in an Equinox
        module, is returned unchanged.
      **extra_args: handed to ``tx.update``: ``weight=``, ``value=``, ...

    Returns:
      ``(params, opt_state)``, params in their own dtypes.

    Raises:
      ValueError: a ``weight`` for ``optax.MultiSteps``, which weighs all micro-steps alike.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.static_loss_scale(optax.sgd(0.5), 2.0)
      >>> w = jnp.float32(1.0)
      >>> w, state = boostax.apply_gradients(tx, jnp.float32(2.0), tx.init(w), w)
      >>> float(w)
      0.5
    """
    who, call = "apply_gradients", "boostax.apply_gradients(tx, grads, opt_state, params)"
    with mismatch.explaining(mismatch.require_state, who, call, tx, opt_state, params, grads):
        return applied(tx, grads, opt_state, params, extra_args)
