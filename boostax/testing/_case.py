# SPDX-License-Identifier: Apache-2.0
"""What a law needs to know of a transformation, and the steps that laws take with it."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from boostax._core.axes import AxisName
from boostax._core.gate import gate_of, gated
from boostax._core.handshake import assume_scaled
from boostax._core.replicas import PerReplica, is_per_replica, stack_replicas
from boostax.reduce.mean import all_reduce
from boostax.testing import _arrays as arrays
from boostax.train.apply import apply_gradients

PyTree = Any
Carry = tuple[PyTree, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A transformation to hold to the contract.

    Attributes:
      name: for test names.
      make: ``make(inner, axis_name)`` builds it around (or chains it before) the optimizer
        ``inner``; ``axis_name`` is ``None`` on a single device.
      reduces: it takes local gradients and returns reduced ones itself.
      own_params: it keeps params of its own on every replica.
      skips: it skips steps whose gradients are not finite.
      distributed: it has a meaning inside a mapped function.
      by_shard: it treats each shard of a leaf as a leaf by itself.
      calls: calls per change of the params.
      skip_calls: calls from a bad gradient to the moment when the skip is decided.
      skip_view: the part of the state that a skip must leave bit for bit alone.
      scaled: ``scaled(grads, state)`` multiplies gradients as its loss would, for scales other
        than one for all.
      bad_arguments: functions that must raise, each with a part of its message.
      compresses: at every call it hands ``inner`` what a codec sends of local gradients, and keeps
        the rest in a residual.
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
    skip_view: Callable[[Any], PyTree] = lambda state: state.inner_state
    scaled: Callable[[PyTree, Any], PyTree] | None = None
    bad_arguments: tuple[tuple[Callable[[], Any], str], ...] = ()
    compresses: bool = False

    def single(self, inner: Any = None) -> optax.GradientTransformationExtraArgs:
        """The transformation on one device."""
        return drawn(self.make(optimizer() if inner is None else inner, None))

    def mapped(self, axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
        """The transformation inside a mapped function, with a mean over replicas if it has none."""
        inner = optimizer()
        if not self.reduces:
            inner = optax.chain(all_reduce(axis_name), inner)
        return drawn(self.make(inner, axis_name))


def drawn(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """A transformation for gradients that a test draws: a scaler takes them as scaled.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.testing.drawn(boostax.static_loss_scale(optax.sgd(1.0), 8.0))
      >>> w = jnp.float32(1.0)
      >>> float(jax.jit(tx.update)(jnp.float32(2.0), tx.init(w), w)[0])
      -0.25
    """
    gate = gate_of(tx)
    if gate is not None:

        def step(grads: Any, state: Any, *args: Any, **kwargs: Any) -> Carry:
            return gate.step(assume_scaled(grads, state), state, *args, **kwargs)

        return gated(tx.init, step, gate.flush)

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Carry:
        given = assume_scaled(updates, state)
        return optax.with_extra_args_support(tx).update(given, state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


Law = Callable[..., None]


def laws_in(names: dict[str, Any]) -> dict[str, Law]:
    """The laws that a module states: its functions of a case, or of one and a seed, in order."""
    return {
        name: value
        for name, value in names.items()
        if inspect.isfunction(value)
        and value.__module__ == names["__name__"]
        and list(inspect.signature(value).parameters) in (["case"], ["case", "seed"])
    }


def optimizer() -> optax.GradientTransformationExtraArgs:
    """Every kind of thing that a skipped step must leave alone: moments, schedule, decay, clip."""
    return optax.chain(
        optax.clip_by_global_norm(10.0),
        optax.adamw(optax.linear_schedule(1e-1, 1e-3, 20), weight_decay=1e-2),
    )


def raises(fn: Callable[[], Any], *parts: str) -> None:
    """An error of whose message these are parts."""
    try:
        fn()
    except (TypeError, ValueError) as error:
        for part in parts:
            assert part in str(error), f"{part!r} is not in {str(error)!r}"
    else:
        raise AssertionError(f"nothing raised for {parts[0]!r}")


def applied(tx: optax.GradientTransformation) -> Callable[..., Carry]:
    """A step of ``apply_gradients``: from params, state and gradients to params and state."""
    return lambda params, state, grads: apply_gradients(tx, grads, state, params)


def of_replica(tx: optax.GradientTransformation) -> Callable[..., Carry]:
    """Return a step within a map, where the params may be the replica's own."""

    def step(params: PyTree, state: Any, grads: PyTree) -> Carry:
        own = is_per_replica(params)
        new, state = apply_gradients(tx, grads, state, params.local if own else params)
        return (PerReplica(new) if own else new), state

    return step


def start(case: Case, tx: optax.GradientTransformation, replicas: int | None) -> Carry:
    """Return params and state as they are outside of a map."""
    params = arrays.even_params()
    carry = PerReplica(params) if case.own_params and replicas else params, tx.init(params)
    return carry if replicas is None else stack_replicas(carry, replicas)


def follow(step: Callable[..., Carry], carry: Carry, grads: Sequence[PyTree]) -> Carry:
    """A step for each of these gradients."""
    return functools.reduce(lambda carry, each: step(*carry, each), grads, carry)


def train(tx: optax.GradientTransformation, params: PyTree, grads: Sequence[PyTree]) -> Carry:
    """Return params and state after a step for each of these gradients."""
    return follow(applied(tx), (params, tx.init(params)), grads)


def steps(tx: optax.GradientTransformation, params: PyTree, grads: Sequence[PyTree]) -> Carry:
    """Run jitted ``update`` and ``apply_updates`` once for each of these gradients."""

    @jax.jit
    def step(params: PyTree, state: Any, grads: PyTree) -> Carry:
        updates, state = drawn(tx).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return follow(step, (params, tx.init(params)), grads)
