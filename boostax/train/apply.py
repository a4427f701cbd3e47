# SPDX-License-Identifier: Apache-2.0
"""Update and apply in one call; the metrics of an optimizer state."""

import itertools
from typing import Any

import jax
import optax

from boostax._core import axes, checks, mismatch, trees
from boostax._core.gate import Pending, gate_of
from boostax._core.replicas import is_per_replica

PyTree = Any


@checks.arguments
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
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


def applied(
    tx: Any, grads: PyTree, opt_state: PyTree, params: PyTree, extra_args: dict[str, Any]
) -> tuple[PyTree, PyTree]:
    """Do the work of ``apply_gradients``, for callers that explain errors themselves."""
    peers = trees.find(opt_state, lambda node: isinstance(node, optax.MultiStepsState))
    weight = extra_args.get("weight") if peers else None
    hint = "It weighs all micro-steps alike: use boostax.accumulate(..., normalize='weight')."
    checks.absent("apply_gradients", "weight", weight, "left out around optax.MultiSteps", hint)
    apart = is_per_replica(grads) and not is_per_replica(params)
    like, own = grads.local if apart else grads, params
    holes = any(map(trees.is_none, jax.tree.leaves(like, is_leaf=trees.is_none)))
    if holes:
        # Equinox's filters leave None for the gradient of a function in a module.
        ends = lambda node: node is None or isinstance(node, optax.MaskedNode)  # noqa: E731
        pick = lambda g, p: None if g is None else p  # noqa: E731
        own = jax.tree.map(pick, like, params, is_leaf=ends)
    gate = gate_of(tx)
    if gate is not None:
        new, opt_state = gate.step(Pending(grads), opt_state, own, apply=True, **extra_args)
    else:
        tx = optax.with_extra_args_support(tx)
        updates, opt_state = tx.update(grads, opt_state, own, **extra_args)
        new = trees.applied(own, updates)
    new = axes.placed_like(new, own)
    return (trees.put_back(new, params) if holes else new), opt_state


def metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """Return the named scalars of every boostax state in an optimizer state, in one dictionary.

    Args:
      opt_state: any tree. A node takes part by a method ``metrics()`` that returns a dict.

    Returns:
      ``{"loss_scale": ..., "skipped_steps": ...}``; where two parts report the same name, the
      second and later ones get ``_1``, ``_2`` in the order of the chain. Cost: nothing is computed.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.accumulate(optax.sgd(0.1), every=4)
      >>> sorted(boostax.metrics(tx.init(jnp.zeros(3))))
      ['dropped_windows', 'micro_step', 'optimizer_steps']
    """
    found: dict[str, jax.Array] = {}
    for node in trees.telling(opt_state, "metrics"):
        for name, scalar in node.metrics().items():
            numbered = (f"{name}_{number}" for number in itertools.count(1))
            unique = (x for x in itertools.chain((name,), numbered) if x not in found)
            found[next(unique)] = scalar
    return found
