# SPDX-License-Identifier: Apache-2.0
"""Update and apply in one call, so that a skipped step writes no params."""

from typing import Any

import jax
import optax

from boostax._core import axes, checks, mismatch, trees, types
from boostax._core.describe import PyTree
from boostax._core.gate import Pending, gate_of
from boostax._core.replicas import is_per_replica
from boostax.accumulate.window import require_weighted
from boostax.train.oracle import Gradients


@checks.arguments
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: PyTree,
    opt_state: types.State,
    params: types.Params,
    **extra_args: Any,
) -> tuple[types.Params, types.State]:
    """Run ``tx.update`` and ``optax.apply_updates`` in one call, which skips by a branch.

    A skipped step, or a micro-step inside an accumulation window, writes no params: with donated
    buffers the compilers for CPU, TPU v5e and H100 leave params in place. A gate that is hidden
    inside an Optax wrapper such as ``optax.chain`` is not found; then ``update`` and
    ``apply_updates`` are called one after the other.

    Args:
      tx: any Optax transformation; only gates of boostax that are outermost skip without writing.
      grads: gradients as ``tx`` needs them: scaled if ``tx`` unscales, local if ``tx`` reduces.
      opt_state: state of ``tx``.
      params: the params; a leaf without a gradient (``None``), such as a function in an Equinox
        module, is returned unchanged.
      **extra_args: passed to ``tx.update``: ``weight=``, ``value=``, ...

    Returns:
      ``(params, opt_state)``; params keep their dtypes.

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
        require_weighted(opt_state, extra_args.get("weight"))
        return applied(tx, grads, opt_state, params, extra_args)


def applied(
    tx: Any,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    extra_args: dict[str, Any],
    counted: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
    """Apply gradients like ``apply_gradients``, without its explanations of errors.

    ``counted`` is described in ``Pending``.
    """
    like, own = grads.local if isinstance(grads, Gradients) else grads, params
    like = like.local if is_per_replica(like) and not is_per_replica(params) else like
    holes = any(map(trees.is_none, jax.tree.leaves(like, is_leaf=trees.is_none)))
    if holes:
        # Equinox's filters leave None for the gradient of a function in a module.
        ends = lambda node: node is None or isinstance(node, optax.MaskedNode)  # noqa: E731
        pick = lambda g, p: None if g is None else p  # noqa: E731
        own = jax.tree.map(pick, like, params, is_leaf=ends)
    if (gate := gate_of(tx)) is not None:
        pending = Pending(grads, counted=counted)
        new, opt_state = gate.step(pending, opt_state, own, apply=True, **extra_args)
    else:
        tx = optax.with_extra_args_support(tx)
        updates, opt_state = tx.update(grads, opt_state, own, **extra_args)
        new = trees.applied(own, updates)
    new = axes.placed_like(new, own)
    return (trees.put_back(new, params) if holes else new), opt_state
