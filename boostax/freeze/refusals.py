# SPDX-License-Identifier: Apache-2.0
"""Refuse what ``scheduled_freeze`` cannot freeze."""

from typing import Any

import jax
import optax

from boostax._core import checks, trees
from boostax._core.gate import has_gate
from boostax._core.replicas import owns_params

PyTree = Any
_WHO = "scheduled_freeze"
_CHANGES = "for a schedule that changes, got"


def check_inner(states: tuple[Any, ...], drawn: tuple[int, ...], moments: str) -> None:
    """Refuse inner states that would not keep their bits while frozen."""
    changes = len(drawn) > 1
    whole = trees.find(states, lambda node: callable(getattr(node, "whole_params", None)))
    windows = trees.find(states, lambda node: isinstance(node, optax.MultiStepsState))
    refusals = (
        (
            moments == "per_group" and has_gate(states),
            "be an optimizer without a loss scaler or a window for moments='per_group', got one: "
            "they would be kept once for each depth. Use moments='shared'.",
        ),
        (
            changes and owns_params(states),
            f"keep params equal on all replicas {_CHANGES} local_updates or partial_average: what "
            "is frozen would stay different everywhere. A single depth freezes with them.",
        ),
        (
            changes and whole,
            f"not keep whole params {_CHANGES} record_trajectory or average_params: what is frozen "
            "would be missing from them. boostax.subspace.pca_basis takes a list of snapshots, "
            f"jax.device_get(params) between steps; average_params may stand around {_WHO}.",
        ),
        (
            changes and windows,
            f"not be optax.MultiSteps {_CHANGES} one: the depth would change within its window. "
            "Use boostax.accumulate.",
        ),
    )
    for refused, must in refusals:
        if refused:
            raise ValueError(f"{_WHO}: inner must {must}")


def require_drawn(depth: Any, drawn: tuple[int, ...]) -> int:
    """Return the depth as an integer; refuse one that the schedule never draws."""
    allowed = f"a depth that the schedule draws, one of {list(drawn)}, as a Python integer"
    hint = "Make it a static argument of your jitted step."
    number = checks.integer(_WHO, "depth", depth, allowed, hint)
    checks.require(_WHO, "depth", depth, allowed, number in drawn, hint)
    return number


def require_present(grads: PyTree, active: PyTree, depth: int) -> None:
    """Refuse gradients that were masked for another depth than this one."""
    leaves, treedef = jax.tree.flatten(active)
    try:
        found = treedef.flatten_up_to(grads)
    except ValueError as error:
        allowed, hint = "a tree like the params", "A frozen leaf may be an optax.MaskedNode."
        got = jax.tree.structure(grads)
        raise ValueError(checks.message(_WHO, "gradients", allowed, got, hint)) from error
    if any(keep and isinstance(x, optax.MaskedNode) for keep, x in zip(leaves, found, strict=True)):
        raise ValueError(
            f"{_WHO}: gradients must hold every leaf that depth {depth} trains, got masked ones. "
            "Pass the same depth to apply_gradients as to tx.active(params, depth)."
        )
