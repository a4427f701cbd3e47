"""What every loss scaler keeps of its skips, and how it closes a window inside it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from boostax._core import trees
from boostax._core.gate import flush_inner, passed

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


def flush_of(tx: optax.GradientTransformationExtraArgs) -> Callable[..., tuple[PyTree, Any]]:
    """The ``flush`` of a scaler around ``tx``."""

    def flush_fn(state: Any, params: PyTree, **extra: Any) -> tuple[PyTree, Any]:
        windows = trees.find(state.inner_state, lambda x: callable(getattr(x, "held", None)))
        held = functools.reduce(jnp.logical_or, [x.held() for x in windows], jnp.asarray(False))
        params, inner_state = flush_inner(tx, state.inner_state, params, extra)
        # A window that was closed now ran, whatever became of the last gradient.
        ran = state.last_finite | (held & passed(inner_state))
        return params, state._replace(last_finite=ran, inner_state=inner_state)

    return flush_fn
