# SPDX-License-Identifier: Apache-2.0
"""Check whether the updates of an optimizer are finite.

A loss scaler checks only gradients. From finite gradients, an optimizer can still compute an
infinity or a NaN, for example an update beyond the range of the params' dtype, 0/0 with a norm of
zero, or a product with an infinite param.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, bound_axis, checks, gate, norms, replicas, trees
from boostax._core.describe import Stepped, describe
from boostax._core.types import PyTree


class CheckUpdatesState(NamedTuple):
    """State of ``check_updates``.

    Attributes:
      applied: bool, whether the last result was applied; False before the first call.
      skipped: i32, calls since the start whose result was not applied; a flush counts as a call.
      inner_state: state of the inner transformation.
    """

    applied: jax.Array  # [] bool
    skipped: jax.Array  # [] int32
    inner_state: optax.OptState

    inner_ran = gate.flag

    def gradient_used(self) -> jax.Array:
        """Return whether the last gradient was applied or added to a window."""
        return self.applied & gate.outermost_passed(self.inner_state)


@bound_axis.gate
def check_updates(
    inner: optax.GradientTransformation, *, axis_name: axes.AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Run ``inner``, and apply its result only if every finite number remains finite.

    For params :math:`p` and inner state :math:`m`, a step is as follows, element by element. The
    sum :math:`p + u` is computed in the dtype of the params:

    .. math::
      u, m' = \text{inner}(g, m, p), \qquad
      \text{ok} = \text{all}\bigl(\text{finite}(p + u, m') \text{ or not } \text{finite}(p, m)\bigr)

    A step that is not ok is skipped: no bit of params, moments and schedules changes, and
    ``skipped`` counts the step. An element that was already infinite, such as an element of a mask
    or the first value of a best loss, does not cause a skip.

    A scaler checks the gradients before ``inner``, and reads the gradients once. ``check_updates``
    checks the results of ``inner``. During this check, memory contains both the results and the old
    values. Use ``check_updates`` if ``inner`` can divide by zero, or if params are stored in f16.
    Place ``check_updates`` directly around the optimizer, inside scalers and windows:
    ``dynamic_loss_scale(accumulate(check_updates(adamw), 8))``. A skip by ``check_updates`` does
    not lower the loss scale, because a lower scale would not help.

    Args:
      inner: the optimizer, which receives gradients and params in f32 or wider.
      axis_name: replica axis (or axes) over which replicas agree whether to skip a step; required
        if ``inner`` has state or params that differ per replica. With ``None``, a train step
        supplies its axis if ``inner`` has a reduction; outside a train step, no axis is used.

    Returns:
      A transformation with a ``CheckUpdatesState``. Cost: 5 bytes of state; a temporary copy of the
      params and the inner state, written and read; one read of the old values; with ``axis_name``,
      an all-reduce of 4 bytes. On CPU, TPU v5e and H100, the memory traffic is 2.2 to 2.6 times the
      memory traffic of Adam.

    Raises:
      ValueError, TypeError: ``inner`` is not a transformation; at ``init``, state per replica
        without ``axis_name``; at trace time, an unbound axis, or a predicate that may differ per
        replica.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.precision.check_updates(optax.sgd(1.0))
      >>> w = jnp.float16(1.0)
      >>> w, state = boostax.apply_gradients(tx, jnp.float32(1e6), tx.init(w), w)
      >>> float(w), int(boostax.metrics(state)["skipped"])
      (1.0, 1)
    """
    who = "check_updates"
    tx = checks.transformation(who, "inner", inner)
    names = axes.canonical(who, axis_name)

    def init_fn(params: PyTree) -> CheckUpdatesState:
        inner_state = gate.init_inner(tx, params)
        is_valid = bool(names) or not trees.find(inner_state, replicas.PerReplica)
        allowed = "the replica axis around an optimizer whose state differs per replica"
        hint = 'Replicas must skip together: tx = check_updates(inner, axis_name="data").'
        checks.require(is_valid, who, "axis_name", axis_name, allowed, hint)
        return CheckUpdatesState(jnp.asarray(False), jnp.zeros((), jnp.int32), inner_state)

    def checked(new: Stepped, state: CheckUpdatesState, params: PyTree, apply: bool) -> Stepped:
        """Return the result of a step; skip the step if a finite value became infinite or NaN."""
        value = new[0]
        old = state.inner_state
        before = jax.tree.map(jnp.zeros_like, value) if params is None else params
        after = value if apply or params is None else trees.applied(params, value)
        new = value, trees.cast_like(new[1], old)
        ok = norms.stays_finite((before, old), (after, new[1]))
        ok = axes.agree(axes.to_varying(ok, names), names)
        value, inner_state = gate.run_or_hold(ok, lambda: new, params, old, apply=apply, who=who)
        return value, CheckUpdatesState(ok, gate.counted(state.skipped, ~ok), inner_state)

    @describe(who, "check", names, inner={"inner_state": tx})
    def step_fn(
        grads: gate.Pending, state: CheckUpdatesState, params: PyTree, *, apply: bool, **extra: Any
    ) -> Stepped:
        axes.require_bound(names, who)
        new = gate.call(tx, grads, state.inner_state, params, apply=apply, extra=extra)
        return checked(new, state, params, apply)

    def flush_fn(state: CheckUpdatesState, params: PyTree, **extra: Any) -> Stepped:
        new = gate.flush_inner(tx, state.inner_state, params, extra)
        return (params, state) if new[1] is state.inner_state else checked(new, state, params, True)

    return gate.gated(init_fn, step_fn, flush_fn)
