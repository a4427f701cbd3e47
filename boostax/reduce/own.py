# SPDX-License-Identifier: Apache-2.0
"""What transformations share whose params are each replica's own.

Between calls such params stand in a ``PerReplica`` and lead with the replicas; inside the mapped
function each replica has its own, typed as varying.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, trees
from boostax._core.gate import Pending, gate_of, has_gate, run
from boostax._core.replicas import PerReplica

PyTree = Any


class Own(NamedTuple):
    """An inner optimizer that each replica has for its own params.

    Attributes:
      who: the transformation around it, for errors.
      names: the axes of the replicas.
      tx: the optimizer.
    """

    who: str
    names: tuple[str, ...]
    tx: optax.GradientTransformationExtraArgs

    @classmethod
    def of(cls, who: str, inner: Any, axis_name: axes.AxisName) -> "Own":
        """From the arguments, if they are sound."""
        tx = checks.transformation(who, "inner", inner)
        if gate_of(inner) is not None:
            _refuse_gate(who)
        return cls(who, axes.required(who, axis_name), tx)

    def init(self, params: PyTree) -> PerReplica:
        """Its state, in f32 or wider, each replica's own."""
        state = self.tx.init(trees.at_least_float32(params))
        if has_gate(state):
            _refuse_gate(self.who)
        return PerReplica(axes.to_varying(state, self.names))

    def step(
        self, grads: Pending, state: PerReplica, params: PyTree, extra: dict[str, Any]
    ) -> tuple[PyTree, PyTree, PerReplica]:
        """A replica's params, the updates from its own gradients, and the new state."""
        trees.require_gradients(grads.raw, self.who)
        axes.require_local(grads.raw, self.names, self.who)
        trees.require_params(params, self.who, "They are what is averaged.")
        own = axes.to_varying(params, self.names)
        # What the wide params get is wide: they may be the start of a sum in f32.
        wide = trees.at_least_float32(own)
        updates, new = run(self.tx, grads, state.local, wide, apply=False, extra=extra)
        new = axes.unify(trees.cast_like(new, state.local), state.local)
        return own, axes.unify(updates, own), PerReplica(new)

    def enter(self, params: PyTree) -> PyTree:
        """A replica's params, where the axes are bound."""
        axes.require_bound(self.names, self.who)
        return axes.to_varying(params, self.names)


def _refuse_gate(who: str) -> None:
    raise ValueError(
        f"{who}: inner must be an optimizer without a gate (loss scaler, accumulation window, "
        "another of its kind) in it, got one: replicas could take its steps at different times. "
        f"Put the gate outside: dynamic_loss_scale({who}(...), axis_name=...)."
    )


def stepped(own: PyTree, value: PyTree, apply: bool) -> PyTree:
    """A replica's params after its own step; ``value`` is them (``apply``) or the updates."""
    return value if apply else optax.apply_updates(own, value)


def result(new: PyTree, own: PyTree, value: PyTree, apply: bool) -> PyTree:
    """``new`` params (``apply``), or the updates that lead to them, in the types of ``value``."""
    if not apply:
        new = jax.tree.map(jnp.subtract, trees.at_least_float32(new), trees.at_least_float32(own))
    return axes.unify(trees.cast_like(new, value), value)
