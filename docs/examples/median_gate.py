"""A gate that skips a step whose gradient norm is far above the median of earlier norms.

The gate records the norms of accepted steps alone, so a spike does not raise the limit for the
next one. The median moves little even if nearly half of the recorded norms are large.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import boostax


class Norms(NamedTuple):
    """State of the rule.

    Attributes:
      last: f32 ``[window]``, the last accepted norms; zero in unused slots.
      count: i32, number of accepted norms.
    """

    last: jax.Array
    count: jax.Array


def median(values: jax.Array, count: jax.Array) -> jax.Array:
    """Return the median of the first ``count`` values; of none it is infinite."""
    used = jnp.arange(values.size) < count
    ordered = jnp.sort(jnp.where(used, values, jnp.inf))
    last = jnp.clip(count, 1, values.size) - 1
    return (ordered[last // 2] + ordered[(last + 1) // 2]) / 2


def median_gate(
    inner: optax.GradientTransformation,
    k: float = 6.0,
    window: int = 128,
    axis_name: Any = None,
) -> optax.GradientTransformation:
    """Skip a step whose norm exceeds median + k * max(1.4826 * deviation, median / 100)."""

    def rule(grads: boostax.Pending, norms: Norms, params: Any) -> tuple[jax.Array, Norms]:
        square = optax.tree.norm(grads.value(), squared=True)
        if axis_name is not None:
            square = jax.lax.pmean(square, axis_name)  # the state must be equal on all replicas
        norm = jnp.sqrt(square)
        center = median(norms.last, norms.count)
        deviation = median(jnp.abs(norms.last - center), norms.count)
        limit = center + k * jnp.maximum(1.4826 * deviation, center / 100)
        is_usual = jnp.isfinite(norm) & ((norms.count < window // 2) | (norm <= limit))
        recorded = norms.last.at[norms.count % window].set(norm)
        return is_usual, Norms(jnp.where(is_usual, recorded, norms.last), norms.count + is_usual)

    def init(params: Any) -> Norms:
        return Norms(jnp.zeros(window), jnp.zeros((), jnp.int32))

    return boostax.gate(inner, rule, init=init, axis_name=axis_name, name="median_gate")
