# SPDX-License-Identifier: Apache-2.0
"""Look at what an optimizer makes of good gradients, and hold it back if that is not finite.

A loss scaler looks at gradients. An optimizer can make infinities and NaN of finite ones: an update
that the params' dtype cannot hold, the 0/0 of a norm that is zero, a product with a param or a
weight decay that is infinite already.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, gate, said, trees
from boostax._core.describe import Stepped, describe
from boostax._core.finite import stays_finite
from boostax._core.replicas import is_per_replica

PyTree = Any


class CheckUpdatesState(NamedTuple):
    """State of ``check_updates``.

    Attributes:
      last_update_finite: bool, whether the last result was taken; False before the first.
      held_updates: i32, results that were held back since the start.
      inner_state: state of the inner transformation.
    """

    last_update_finite: jax.Array
    held_updates: jax.Array
    inner_state: Any

    def passed(self) -> jax.Array:
        """Whether the last result of the inner transformation was taken."""
        return self.last_update_finite

    def taken(self) -> jax.Array:
        """Whether the last gradient was taken in."""
        return self.last_update_finite & gate.outermost_passed(self.inner_state)

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        return {"last_update_finite": self.last_update_finite, "held_updates": self.held_updates}


@said.gate
def check_updates(
    inner: optax.GradientTransformation, *, axis_name: axes.AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Run ``inner``, and take its result only if all that was finite stays so.

    With params :math:`p` and inner state :math:`m`, element by element, :math:`p + u` in the dtype
    of the params,

    .. math::
      u, m' = \text{inner}(g, m, p), \qquad
      \text{ok} = \text{all}\bigl(\text{finite}(p + u, m') \text{ or not } \text{finite}(p, m)\bigr)

    and what is not ok is as if it had never been: params, moments, schedules and decay stay bit for
    bit, and ``held_updates`` counts. An element that is infinite before (a mask, the best loss so
    far) holds nothing back.

    A scaler looks at gradients, before ``inner``, for one read of them. This looks at the result,
    and has to keep it beside the old one meanwhile: take it where ``inner`` can divide by zero, or
    where params are stored in f16. Put it directly around the optimizer, inside scalers and
    windows: ``dynamic_loss_scale(accumulate(check_updates(adamw), 8))``. The scale stays as it is:
    a lower one would not help.

    Args:
      inner: the optimizer; it sees f32 (or wider) gradients and params.
      axis_name: replica axis (or axes) over which to agree, if ``inner`` keeps state or params that
        differ per replica.

    Returns:
      A transformation with a ``CheckUpdatesState``. Cost: 5 bytes; a temporary copy of the params
      and of the inner state, written and read, and a read of the old ones, on CPU, TPU v5e and
      H100: 2.2 to 2.6 times the traffic of Adam; one 4-byte collective with ``axis_name``.

    Raises:
      ValueError, TypeError: no transformation; at ``init``, state per replica and no ``axis_name``;
        at trace time, an unbound axis, or a decision that replicas could take differently.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.precision.check_updates(optax.sgd(1.0))
      >>> w = jnp.float16(1.0)
      >>> w, state = boostax.apply_gradients(tx, jnp.float32(1e6), tx.init(w), w)
      >>> float(w), int(boostax.metrics(state)["held_updates"])
      (1.0, 1)
    """
    who = "check_updates"
    tx = checks.transformation(who, "inner", inner)
    names = axes.canonical(who, axis_name)

    def init_fn(params: PyTree) -> CheckUpdatesState:
        inner_state = gate.init_inner(tx, params)
        if not names and trees.find(inner_state, is_per_replica):
            allowed = "the replica axis around an optimizer with state per replica"
            hint = 'Replicas must hold back together: check_updates(inner, axis_name="data").'
            raise ValueError(checks.message(who, "axis_name", allowed, axis_name, hint))
        return CheckUpdatesState(jnp.asarray(False), jnp.zeros((), jnp.int32), inner_state)

    def judged(
        value: PyTree, inner_state: Any, state: CheckUpdatesState, params: PyTree, apply: bool
    ) -> Stepped:
        """Take the new params (``apply``) or the updates, and the new inner state, or neither."""
        old = state.inner_state
        new = trees.cast_like(inner_state, old)
        if apply:
            before, after = params, value
        elif params is None:
            before, after = jax.tree.map(jnp.zeros_like, value), value
        else:
            before, after = params, optax.apply_updates(params, value)
        ok = stays_finite((before, old), (after, new))
        ok = axes.agree(axes.to_varying(ok, names), names)
        kept = lambda: (value, new)  # noqa: E731
        value, inner_state = gate.run_or_hold(ok, kept, params, old, apply=apply, who=who)
        return value, CheckUpdatesState(ok, gate.counted(state.held_updates, ~ok), inner_state)

    @describe(who, "check", names, inner={"inner_state": tx})
    def step_fn(
        grads: gate.Pending, state: CheckUpdatesState, params: PyTree, *, apply: bool, **extra: Any
    ) -> Stepped:
        axes.require_bound(names, who)
        value, new = gate.run(tx, grads, state.inner_state, params, apply=apply, extra=extra)
        return judged(value, new, state, params, apply)

    def flush_fn(state: CheckUpdatesState, params: PyTree, **extra: Any) -> Stepped:
        value, new = gate.flush_inner(tx, state.inner_state, params, extra)
        same = new is state.inner_state
        return (params, state) if same else judged(value, new, state, params, True)

    return gate.gated(init_fn, step_fn, flush_fn)
