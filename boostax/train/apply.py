# SPDX-License-Identifier: Apache-2.0
"""Update and apply in one call, so that a skipped step writes no params."""

import optax

from boostax._core import checks, mismatch, types
from boostax._core.types import PyTree
from boostax.accumulate.window import require_weighted
from boostax.order import check
from boostax.train.oracle import applied


@checks.arguments
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: PyTree,
    opt_state: types.State,
    params: types.Params,
    **extra_args: PyTree,
) -> tuple[types.Params, types.State]:
    """Run ``tx.update`` and ``optax.apply_updates`` in one call, with a branch for skipped steps.

    A skipped step, or a micro-step inside an accumulation window, writes no params. With donated
    buffers, the compilers for CPU, TPU v5e and H100 do not copy the params. A gate inside an Optax
    wrapper, such as ``optax.chain``, is not found. In this case, ``update`` and ``apply_updates``
    are called one after the other.

    Args:
      tx: any Optax transformation. A skipped step writes no params only if the gate of boostax is
        outermost.
      grads: the gradients that ``tx`` needs: scaled if ``tx`` has a loss scaler, local to the
        replica if ``tx`` has a reduction.
      opt_state: state of ``tx``.
      params: the params. A leaf without a gradient (``None``), such as a function in an Equinox
        module, is returned unchanged.
      **extra_args: arguments of ``tx.update``, such as ``weight=`` and ``value=``.

    Returns:
      ``(params, opt_state)``; the dtypes of the params do not change.

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
        check.of_chain(who, tx, (), opt_state)
        require_weighted(opt_state, extra_args.get("weight"))
        return applied(tx, grads, opt_state, params, extra_args)
