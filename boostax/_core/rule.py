# SPDX-License-Identifier: Apache-2.0
"""A gate with a custom rule, which computes from the gradients whether to run a step."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, bound_axis, checks, trees
from boostax._core import gate as gates
from boostax._core.describe import describe
from boostax._core.types import PyTree


class GateState(NamedTuple):
    """State of ``gate``.

    Attributes:
      rule_state: the state of the rule.
      applied: bool, whether the last call ran the inner transformation.
      skipped: i32, calls that were skipped since the start.
      inner_state: state of the inner transformation.
    """

    rule_state: PyTree  # the types that the rule returns
    applied: jax.Array  # [] bool
    skipped: jax.Array  # [] int32
    inner_state: PyTree

    inner_ran = gradient_used = gates.flag


Rule = Callable[[gates.Pending, PyTree, PyTree], tuple[jax.Array, PyTree]]


@bound_axis.gate
def gate(
    inner: optax.GradientTransformation,
    rule: Rule,
    *,
    init: Callable[[PyTree], PyTree] = lambda params: (),
    axis_name: axes.AxisName | None = None,
    name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Run ``inner`` in the calls that your rule accepts; skip all other calls.

    A skipped call changes no bit of params, moments and schedules. Like every gate of boostax, this
    gate compiles to one branch around the update and its application. The branch writes donated
    buffers in place.

    Args:
      inner: the optimizer.
      rule: ``rule(grads, rule_state, params) -> (run, rule_state)``. ``grads`` is a ``Pending``;
        the gradients are ``grads.value()``, in f32 or wider. ``run`` is a bool scalar, and the
        types of ``rule_state`` must not change. With ``axis_name``, the gradients are local,
        ``rule_state`` must be equal on all replicas, and the step runs only if ``run`` is True on
        every replica.
      init: a function that makes the first state of the rule from the params.
      axis_name: mesh axis or axes over which a part inside reduces; needed with local gradients.
        With ``None``, a train step supplies its own axis if a part inside reduces; outside a train
        step, no axis is used.
      name: the transformation's name in errors, traces and ``explain``; by default the name of the
        rule.

    Returns:
      A transformation with a ``GateState``. Cost: the rule and its state, and 5 bytes of state; an
      all-reduce of 4 bytes with ``axis_name``. A pure ``update`` needs one more copy of the params
      than ``boostax.apply_gradients``.

    Raises:
      TypeError: ``inner`` is not a transformation, or ``run`` is not a bool scalar.
      ValueError: at trace time, gradients are already summed over ``axis_name``, a part inside
        reduces over other axes, or the rule changes the shapes of its state.

    Example:
      Skip steps whose gradient norm is more than four times its running mean:

      >>> import boostax, jax.numpy as jnp, optax
      >>> def no_spikes(grads, mean, params):
      ...   norm = optax.tree.norm(grads.value())
      ...   run = norm < 4 * mean
      ...   return run, jnp.where(run, 0.9 * mean + 0.1 * norm, mean)
      >>> tx = boostax.gate(optax.sgd(1.0), no_spikes, init=lambda params: jnp.float32(1.0))
      >>> w, state = jnp.float32(0.0), tx.init(jnp.float32(0.0))
      >>> for g in (1.0, 100.0, 1.0):
      ...   w, state = boostax.apply_gradients(tx, jnp.float32(g), state, w)
      >>> float(w), int(boostax.metrics(state)["skipped"])
      (-2.0, 1)
    """
    who = name or getattr(rule, "__name__", "gate")
    names = axes.canonical(who, axis_name)
    tx = checks.transformation(who, "inner", inner)

    def init_fn(params: PyTree) -> GateState:
        # The arrays are copied, because donation refuses a buffer that two fields share.
        rule_state = jax.tree.map(jnp.array, init(params))
        inner_state = gates.init_inner(tx, params)
        return GateState(rule_state, jnp.asarray(False), jnp.zeros((), jnp.int32), inner_state)

    @describe(who, "check", names, inner={"inner_state": tx})
    def step_fn(
        grads: gates.Pending, state: GateState, params: PyTree, *, apply: bool, **extra: PyTree
    ) -> tuple[PyTree, GateState]:
        axes.require_local(grads.raw, names, who)
        ok, rule_state = rule(grads, state.rule_state, params)
        is_valid = jnp.issubdtype(jnp.result_type(ok), jnp.bool_) and not jnp.shape(ok)
        hint = "Return a bool, such as optax.tree.norm(grads.value()) < 10."
        checks.require_type(is_valid, who, "run", ok, "a bool scalar", hint)
        ok = axes.agree(ok, names)
        hint = "A rule must not change the shapes of its state."
        trees.require_shapes(who, "rule_state", state.rule_state, rule_state, hint)
        moved = state._replace(rule_state=trees.cast_like(rule_state, state.rule_state))
        ok, moved = gates.skip_if_empty(ok, moved, state, grads)
        inner = state.inner_state
        heavy = functools.partial(gates.call, tx, grads, inner, params, apply=apply, extra=extra)
        value, new = gates.run_or_hold(ok, heavy, params, inner, apply=apply, who=who, names=names)
        return value, gates.applied_or_skipped(moved, ok, new)

    return gates.gated(init_fn, step_fn, gates.flush_of(tx))
