# SPDX-License-Identifier: Apache-2.0
"""The inner optimizer that each replica runs on params of its own.

Between calls such params stand in a ``PerReplica`` and have a leading axis of replicas. Inside the
mapped function each replica has its own params, typed as varying.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, trees
from boostax._core.describe import Stepped, describe
from boostax._core.gate import Pending, gate_of, gated, has_gate, run
from boostax._core.replicas import PerReplica

PyTree = Any
# Both take a state without the inner one. ``Average`` takes the last arguments of ``through``, and
# ``Close`` a replica's params; both return a value and the new state.
Average = Callable[[Any, PyTree, PyTree, bool], Stepped]
Close = Callable[[Any, PyTree], Stepped]
Init = Callable[[PyTree], optax.OptState]
Extended = optax.GradientTransformationExtraArgs


class Own(NamedTuple):
    """The inner optimizer and the replicas that run it.

    Attributes:
      who: the transformation around it, for errors.
      names: the axes of the replicas.
      tx: the optimizer.
    """

    who: str
    names: tuple[str, ...]
    tx: Extended

    @classmethod
    def of(cls, who: str, inner: optax.GradientTransformation, axis_name: axes.AxisName) -> "Own":
        """Check the arguments of a factory."""
        tx = checks.transformation(who, "inner", inner)
        if gate_of(inner) is not None:
            _refuse_gate(who)
        return cls(who, axes.required(who, axis_name), tx)

    def init(self, params: PyTree) -> PerReplica:
        """Return the optimizer's first state, per replica and in f32 or wider."""
        state = self.tx.init(trees.at_least_float32(params))
        if has_gate(state):
            _refuse_gate(self.who)
        return PerReplica(axes.to_varying(state, self.names))

    def gated(self, what: str, init: Init, average: Average, close: Close) -> Extended:
        """Return the transformation that averages after each step of the inner optimizer.

        Args:
          what: one line for ``explain``.
          init: returns a state with the ``inner_state`` of ``Own.init``.
          average: averages the params after a step, or leaves them.
          close: averages the params for ``boostax.flush``.
        """
        who, names = self.who, self.names

        @describe(who, "own params", names, inner={"inner_state": self.tx}, what=what)
        def step_fn(
            grads: Pending, state: Any, params: PyTree, *, apply: bool, **extra: Any
        ) -> Stepped:
            trees.require_gradients(grads.raw, who)
            axes.require_local(grads.raw, names, who)
            trees.require_params(params, who, "They are what is averaged.")
            own, old = axes.to_varying(params, names), state.inner_state.local
            # Wide params get wide updates, which may be the first term of a sum in f32.
            wide = trees.at_least_float32(own)
            updates, inner = run(self.tx, grads, old, wide, apply=False, extra=extra)
            inner = PerReplica(axes.unify(trees.cast_like(inner, old), old))
            value = axes.unify(updates, own)
            value = optax.apply_updates(own, value) if apply else value
            # The inner state need not pass the branch that averages.
            value, new = average(state._replace(inner_state=None), own, value, apply)
            return trees.as_updates(value, own), new._replace(inner_state=inner)

        def flush_fn(state: Any, params: PyTree, **extra: Any) -> Stepped:
            del extra
            axes.require_bound(names, who)
            own = axes.to_varying(params, names)
            value, new = close(state._replace(inner_state=None), own)
            return value, new._replace(inner_state=state.inner_state)

        return gated(init, step_fn, flush_fn)


def _refuse_gate(who: str) -> None:
    raise ValueError(
        f"{who}: inner must be an optimizer without a gate (loss scaler, accumulation window, "
        "another of its kind) in it, got one: replicas could take its steps at different times. "
        f"Put the gate outside: dynamic_loss_scale({who}(...), axis_name=...)."
    )


def through(
    average: Callable[[PyTree], Stepped], own: PyTree, value: PyTree, apply: bool
) -> Stepped:
    """Return ``value`` after an average of the params that it stands for, and its state.

    Args:
      average: takes params after a step; returns averaged ones and a state.
      own: a replica's params before the step.
      value: the params after the step (``apply``), or the updates to them.
      apply: see ``value``.
    """
    new, state = average(value if apply else optax.apply_updates(own, value))
    if not apply:
        new = jax.tree.map(jnp.subtract, trees.at_least_float32(new), trees.at_least_float32(own))
    return axes.unify(trees.cast_like(new, value), value), state
