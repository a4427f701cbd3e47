# SPDX-License-Identifier: Apache-2.0
"""The cases that laws test: a transformation, its properties, and training steps."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from boostax._core.axes import AxisName
from boostax._core.gate import gate_of, gated
from boostax._core.handshake import assume_scaled
from boostax._core.replicas import PerReplica, is_per_replica, stack_replicas
from boostax._core.types import PyTree
from boostax.reduce.mean import all_reduce
from boostax.testing import _arrays as arrays
from boostax.train.apply import apply_gradients

Carry = tuple[PyTree, PyTree]
Chain = optax.GradientTransformationExtraArgs


@dataclasses.dataclass(frozen=True)
class Case:
    """A transformation that must keep the contract.

    Attributes:
      name: the name of the case in tests.
      make: ``make(inner, axis_name)`` builds the transformation around the optimizer ``inner``, or
        chains it before ``inner``; ``axis_name`` is ``None`` on a single device.
      reduces: whether the transformation expects local gradients and reduces them.
      own_params: whether the params differ per replica.
      skips: whether a step is skipped if its gradients contain a number from ``bad``.
      distributed: whether the transformation can be used inside a mapped function.
      by_shard: whether each shard of a leaf is treated as a leaf.
      calls: the number of calls per change of the params.
      skip_calls: the number of calls from a bad gradient to the decision to skip.
      skip_view: a function that returns the part of the state that a skip must not change.
      scaled: ``scaled(grads, state)`` multiplies the gradients by the scales of the loss, if a
        loss has several scales.
      bad_arguments: functions that must raise an error, each with a part of the error's message.
      compresses: whether ``inner`` receives in every call only the part of local gradients that a
        codec sends, while a residual stores the other part.
      bad: numbers that make a gradient bad: NaN, infinity, and a number whose square overflows.
    """

    name: str
    make: Callable[[Any, AxisName | None], optax.GradientTransformation]
    reduces: bool = False
    own_params: bool = False
    skips: bool = False
    distributed: bool = True
    by_shard: bool = False
    calls: int = 1
    skip_calls: int = 1
    skip_view: Callable[[PyTree], PyTree] = lambda state: state.inner_state
    scaled: Callable[[PyTree, PyTree], PyTree] | None = None
    bad_arguments: tuple[tuple[Callable[[], object], str], ...] = ()
    compresses: bool = False
    bad: tuple[float, ...] = (math.nan, math.inf, -math.inf, 1e36)

    def single(self, inner: Any = None) -> Chain:
        """Make the transformation for one device."""
        return drawn(self.make(optimizer() if inner is None else inner, None))

    def mapped(self, axis_name: AxisName, inner: Any = None) -> Chain:
        """Make the transformation for mapped functions; unless it reduces, a mean precedes it."""
        inner = optimizer() if inner is None else inner
        inner = inner if self.reduces else optax.chain(all_reduce(axis_name), inner)
        return drawn(self.make(inner, axis_name))


def drawn(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Let a transformation accept a test's gradients as if a loss scale had multiplied them.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.testing.drawn(boostax.static_loss_scale(optax.sgd(1.0), 8.0))
      >>> w = jnp.float32(1.0)
      >>> float(jax.jit(tx.update)(jnp.float32(2.0), tx.init(w), w)[0])
      -0.25
    """

    gate = gate_of(tx)
    call = optax.with_extra_args_support(tx).update if gate is None else gate.step

    def marked(updates: PyTree, state: PyTree, *args: Any, **kwargs: Any) -> Carry:
        return call(assume_scaled(updates, state), state, *args, **kwargs)

    if gate is None:
        return optax.GradientTransformationExtraArgs(tx.init, marked)
    return gated(tx.init, marked, gate.flush)


Law = Callable[..., None]


def laws_in(names: dict[str, Any]) -> dict[str, Law]:
    """Return the laws of a module in order: functions of a case, or of a case and a seed."""
    functions = {name: value for name, value in names.items() if inspect.isfunction(value)}
    local = {name: f for name, f in functions.items() if f.__module__ == names["__name__"]}
    takes = {name: list(inspect.signature(f).parameters) for name, f in local.items()}
    return {name: f for name, f in local.items() if takes[name] in (["case"], ["case", "seed"])}


def optimizer() -> optax.GradientTransformationExtraArgs:
    """Make an optimizer with moments, a schedule and decay, which a skip must not change."""
    rate = optax.linear_schedule(1e-1, 1e-3, 20)
    return optax.chain(optax.clip_by_global_norm(10.0), optax.adamw(rate, weight_decay=1e-2))


def raises(fn: Callable[[], object], *parts: str) -> None:
    """Require an error whose message contains these texts."""
    text = "nothing raised"
    try:
        fn()
    except (TypeError, ValueError) as error:
        text = str(error)
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"


def applied(tx: optax.GradientTransformation) -> Callable[..., Carry]:
    """Return a step that calls ``apply_gradients`` and returns the new params and state.

    Inside a mapped function, per-replica params stay in their ``PerReplica``.
    """

    def step(params: PyTree, state: PyTree, grads: PyTree) -> Carry:
        per_replica = is_per_replica(params)
        new, state = apply_gradients(tx, grads, state, params.local if per_replica else params)
        return (PerReplica(new) if per_replica else new), state

    return step


def start(case: Case, tx: optax.GradientTransformation, replicas: int | None) -> Carry:
    """Make the first params and state in the form that they have outside of a mapped function."""
    params = arrays.even_params()
    carry = (PerReplica(params) if case.own_params and replicas else params, tx.init(params))
    return carry if replicas is None else stack_replicas(carry, replicas)


def follow(step: Callable[..., Carry], carry: Carry, grads: Sequence[PyTree]) -> Carry:
    """Run one step for each of these gradients, in order."""
    return functools.reduce(lambda carry, grad: step(*carry, grad), grads, carry)


def train(tx: optax.GradientTransformation, params: PyTree, grads: Sequence[PyTree]) -> Carry:
    """Train on these gradients with ``apply_gradients``, starting from ``params``."""
    return follow(applied(tx), (params, tx.init(params)), grads)


def steps(tx: optax.GradientTransformation, params: PyTree, grads: Sequence[PyTree]) -> Carry:
    """Train with ``update`` and ``apply_updates`` instead of ``apply_gradients``."""

    @jax.jit
    def step(params: PyTree, state: PyTree, grads: PyTree) -> Carry:
        updates, state = drawn(tx).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return follow(step, (params, tx.init(params)), grads)
