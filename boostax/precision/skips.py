"""What every loss scaler keeps of its skips, and how it closes a window inside it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any


def count(counter: jax.Array, happened: jax.Array) -> jax.Array:
    """One more where it happened, and never past the largest i32."""
    return jnp.where(happened, optax.safe_increment(counter), counter)


def decided(state: Any, ok: jax.Array, inner_state: Any) -> Any:
    """A scaler's state after a step that ran (``ok``) or was skipped."""
    return state._replace(
        last_finite=ok,
        skipped_steps=count(state.skipped_steps, ~ok),
        skipped_in_a_row=jnp.where(ok, 0, count(state.skipped_in_a_row, ~ok)),
        inner_state=inner_state,
    )
