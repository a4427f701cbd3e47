"""A bound on attention logits: MuonClip's rule around an optimizer.

With S the largest logit of a head in the forward pass and gamma = min(1, tau / S), the query and
key weights of this head are multiplied by sqrt(gamma) after the update.

The loss returns the largest logits as aux, and the loop passes them to ``update``::

    (loss, maxima), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
    updates, state = tx.update(grads, state, params, max_logits=maxima)

With micro-batches and windows, pass the largest over all of them.

Reference: Kimi Team, Kimi K2 (MuonClip), https://arxiv.org/abs/2507.20534, 2025.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def head_factors(maxima: jax.Array, layer: dict[str, jax.Array], axis: int, tau: float) -> Any:
    """Return the factors of a layer's heads, in a shape that multiplies its weights."""
    query, key, heads = layer["query"], layer["key"], maxima.size
    if query.shape != key.shape or query.shape[axis] != heads:
        raise ValueError(
            f"bound_logits: query and key must have {heads} heads of equal size on axis {axis}, "
            f"got {query.shape} and {key.shape}. Reshape them to [..., {heads}, head_dim]."
        )
    exceeds = jnp.isfinite(maxima) & (maxima > tau)
    factors = jnp.sqrt(jnp.where(exceeds, tau / maxima, 1))
    return jnp.expand_dims(factors, [i for i in range(query.ndim) if i != axis % query.ndim])


def bound_logits(
    inner: optax.GradientTransformation, tau: float = 100.0, axis: int = -2
) -> optax.GradientTransformationExtraArgs:
    """Run ``inner``, then scale heads of which a logit exceeded ``tau``.

    ``max_logits`` maps the name of each attention layer in params to an array ``[heads]``; the
    layer's weights are ``query`` and ``key``, with the heads on ``axis``.
    """
    inner = optax.with_extra_args_support(inner)

    def update(grads: Any, state: Any, params: Any, *, max_logits: Any, **extra: Any) -> Any:
        updates, state = inner.update(grads, state, params, **extra)
        updates = dict(updates)
        for name, maxima in max_logits.items():
            factors = head_factors(maxima, params[name], axis, tau)
            scaled = dict(updates[name])
            for part in ("query", "key"):
                p, u = params[name][part], scaled[part]
                scaled[part] = (u + (factors - 1) * (p + u)).astype(u.dtype)
            updates[name] = scaled
        return updates, state

    return optax.GradientTransformationExtraArgs(inner.init, update)
