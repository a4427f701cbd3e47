# SPDX-License-Identifier: Apache-2.0
"""What ``scheduled_freeze`` refuses, and why."""

from typing import Any

import jax
import optax

from boostax._core import checks, trees
from boostax._core.gate import has_gate
from boostax._core.replicas import owns_params
from boostax.freeze.plan import Plan

PyTree = Any
_WHO = "scheduled_freeze"


def check_inner(states: tuple[Any, ...], plan: Plan, moments: str) -> None:
    """Refuse what would not be held as it is while frozen."""
    changes = len(plan.drawn) > 1
    if moments == "per_group" and has_gate(states):
        raise ValueError(
            f"{_WHO}: inner must be an optimizer without a loss scaler or a window for "
            "moments='per_group', got one: they would be kept once for each depth. Use "
            "moments='shared'."
        )
    if moments == "per_group" and changes and plan.known(0) is None:
        raise ValueError(
            f"{_WHO}: moments must be 'shared' with freeze_on_plateau, got 'per_group': each depth "
            "would have signals of its own."
        )
    if changes and owns_params(states):
        raise ValueError(
            f"{_WHO}: inner must keep params equal on all replicas for a schedule that changes, "
            "got local_updates or partial_average: what is frozen between two meetings would stay "
            "different everywhere. A single depth freezes with them."
        )
    if changes and trees.find(states, lambda node: callable(getattr(node, "whole_params", None))):
        raise ValueError(
            f"{_WHO}: inner must not keep whole params for a schedule that changes, got "
            "record_trajectory or average_params: what is frozen would be missing from them. "
            f"boostax.subspace.HostTrajectory records outside; in a step of your own put "
            f"average_params around {_WHO}."
        )
    if changes and trees.find(states, lambda node: isinstance(node, optax.MultiStepsState)):
        raise ValueError(
            f"{_WHO}: inner must not be optax.MultiSteps for a schedule that changes, got one: the "
            "depth would change within its window. Use boostax.accumulate."
        )


def drawn(depth: Any, plan: Plan) -> int:
    """The depth as an integer; refuse one that the schedule never draws."""
    allowed = f"a depth that the schedule draws, one of {list(plan.drawn)}, as a Python integer"
    hint = "Make it a static argument of your jitted step."
    number = checks.integer(_WHO, "depth", depth, allowed, hint)
    if number not in plan.drawn:
        raise ValueError(checks.message(_WHO, "depth", allowed, depth, hint))
    return number


def require_params(params: PyTree) -> None:
    """Refuse an update without params."""
    if params is None:
        raise ValueError(
            f"{_WHO}: params must be given to update, got None. They say which leaves there are."
        )


def require_present(grads: PyTree, active: PyTree, depth: int) -> None:
    """Refuse gradients that were masked for another depth than this one."""
    leaves, treedef = jax.tree.flatten(active)
    try:
        given = treedef.flatten_up_to(grads)
    except ValueError as error:
        raise ValueError(
            f"{_WHO}: gradients must be a tree like the params, got {jax.tree.structure(grads)}. "
            "A leaf that is frozen may be an optax.MaskedNode."
        ) from error
    masked = [isinstance(node, optax.MaskedNode) for node in given]
    lacking = [keep and hidden for keep, hidden in zip(leaves, masked, strict=True)]
    if any(lacking):
        raise ValueError(
            f"{_WHO}: gradients must hold every leaf that depth {depth} trains, got masked ones. "
            "Pass the same depth to apply_gradients as to tx.active(params, depth)."
        )
