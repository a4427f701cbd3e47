"""A gated transformation: leave out steps whose gradients are far larger than usual."""

from typing import Any

import jax.numpy as jnp
import optax
from jax import lax

import boostax


def drop_spikes(inner: Any, factor: float = 8.0, *, axis_name: Any = None) -> Any:
    """Skip a step of which the norm is so many times its running mean, or not finite."""

    def rule(grads: boostax.Pending, mean: Any, params: Any) -> Any:
        del params
        norm = optax.tree.norm(grads.value())
        if axis_name is not None:
            norm = lax.pmean(norm, axis_name)
        usual = norm < factor * mean
        new = jnp.where(jnp.isinf(mean), norm, 0.9 * mean + 0.1 * norm)
        return usual, jnp.where(usual, new, mean)

    first = lambda params: jnp.float32(jnp.inf)  # noqa: E731
    return boostax.gate(inner, rule, init=first, axis_name=axis_name, name="drop_spikes")
