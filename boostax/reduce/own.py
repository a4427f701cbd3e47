"""What transformations share whose params are each replica's own.

Between calls such params stand in a ``PerReplica`` and lead with the replicas; inside the mapped
function each replica has its own, typed as varying.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, trees
from boostax._core.gate import Pending, gate_of, has_gate, run
from boostax._core.replicas import PerReplica

PyTree = Any


def check(who: str, inner: Any, axis_name: axes.AxisName) -> tuple[str, ...]:
    """The axes, if the arguments that both have are sound."""
    checks.transformation(who, "inner", inner)
    if gate_of(inner) is not None:
        _refuse_gate(who)
    names = axes.required(who, axis_name)
    return names


def _refuse_gate(who: str) -> None:
    raise ValueError(
        f"{who}: inner must be an optimizer without a gate (loss scaler, accumulation window, "
        "another of its kind) in it, got one: replicas could take its steps at different times. "
        f"Put the gate outside: dynamic_loss_scale({who}(...), axis_name=...)."
    )


def init_own(
    tx: optax.GradientTransformation, params: PyTree, names: tuple[str, ...], who: str
) -> PerReplica:
    """The state of the inner optimizer, in f32 or wider, each replica's own."""
    state = tx.init(trees.at_least_float32(params))
    if has_gate(state):
        _refuse_gate(who)
    return PerReplica(axes.to_varying(state, names))


def step_own(
    tx: optax.GradientTransformationExtraArgs,
    grads: Pending,
    state: PerReplica,
    params: PyTree,
    names: tuple[str, ...],
    who: str,
    extra: dict[str, Any],
) -> tuple[PyTree, PyTree, PerReplica]:
    """A replica's params, the updates from its own gradients, and its optimizer's new state."""
    trees.require_gradients(grads.raw, who)
    axes.require_local(grads.raw, names, who)
    if params is None:
        raise ValueError(
            f"{who}: params must be given to update, got None. They are what is averaged."
        )
    own = axes.to_varying(params, names)
    # What the wide params get is wide: they may be the start of a sum in f32.
    wide = trees.at_least_float32(own)
    updates, new = run(tx, grads, state.local, wide, apply=False, extra=extra)
    new = axes.unify(trees.cast_like(new, state.local), state.local)
    return own, axes.unify(updates, own), PerReplica(new)


def stepped(own: PyTree, value: PyTree, apply: bool) -> PyTree:
    """A replica's params after its own step; ``value`` is them (``apply``) or the updates."""
    return value if apply else optax.apply_updates(own, value)


def result(new: PyTree, own: PyTree, value: PyTree, apply: bool) -> PyTree:
    """``new`` params (``apply``), or the updates that lead to them, in the types of ``value``."""
    if not apply:
        new = jax.tree.map(jnp.subtract, trees.at_least_float32(new), trees.at_least_float32(own))
    return axes.unify(trees.cast_like(new, value), value)
