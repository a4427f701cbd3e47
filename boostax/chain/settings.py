# SPDX-License-Identifier: Apache-2.0
"""What is wrong in a chain or a train step beside the order of its parts."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from boostax.chain.orders import Finding, nestings, sequences
from boostax.chain.roles import CLIPS, MEMORIES, REDUCTIONS, UNKNOWN, number, sign
from boostax.chain.rows import Row

_REDUCING = (*REDUCTIONS, "delta", "own params", "subspace")


def findings(found: Sequence[Row], step: Any = None) -> list[Finding]:
    """All that is in wrong order or does not fit, of a chain and of the train step around it."""
    checks = (sequences, nestings, freezing, agreements, reach, windows, directions, feedback)
    of_chain = [finding for check in checks for finding in check(found)]
    return of_chain if step is None else of_chain + list(of_step(found, step))


def freezing(found: Sequence[Row]) -> Iterator[Finding]:
    """Where freezing saves nothing."""
    for row in found:
        if row.role == "freeze" and (row.holders or row.routes):
            yield Finding(
                f"{row.part.name} inside the chain",
                "the whole backward pass is paid for, and nothing is saved.",
                "Put it outermost: scheduled_freeze(tx, ...).",
                certain=True,
            )
        if row.role == "zero" and row.sides:
            yield Finding(
                f"{row.part.name} in a partition",
                "its gradients are computed all the same, and reduced by what stands before.",
                "boostax.scheduled_freeze(tx, groups, depth) leaves it out of the backward pass.",
            )


def agreements(found: Sequence[Row]) -> Iterator[Finding]:
    """Gates that decide for each replica of a reduction inside them alone."""
    for row in found:
        if row.role not in ("scaler", "window", "carry"):
            continue
        # A clip's axes are those of shards, which a gate sees by their types.
        inside = (other for other in found if other.inside(row) and other.role not in CLIPS)
        inner = {axis for other in inside for axis in other.axes}
        missing = inner - set(row.axes)
        if missing:
            words = ", ".join(repr(x) for x in sorted(missing))
            yield Finding(
                f"{row.part.name} without the axis {words}",
                "its replicas do not agree on what to skip or to carry, or share one window.",
                f"Give it axis_name= as the reduction inside has it: {words}.",
                certain=True,
            )


def reach(found: Sequence[Row]) -> Iterator[Finding]:
    """Gates that see only some of the params."""
    for row in found:
        if row.role not in ("scaler", "window", "peer window", "hold") or not row.masks:
            continue
        mask, name = row.masks[-1], row.part.name
        why = "the params that it does not see move at every call, skipped or not."
        if row.role == "scaler":
            why = "the loss is multiplied by its scale as a whole, and only a part of it divided."
        mend = f"Put {name} around {mask}: {name}(optax.{mask}(...), ...)."
        yield Finding(f"{name} in {mask}", why, mend, certain=row.role == "scaler")


def windows(found: Sequence[Row]) -> Iterator[Finding]:
    """What asks for the loss of a window, whose last call knows only its own."""
    for row in found:
        held = any(holder.role in ("window", "peer window") for holder in row.holders)
        if held and row.role == "check" and row.part.settings.get("by") == "loss":
            name = row.part.name
            yield Finding(
                f"{name} by the loss in a window",
                "the loss that it sees is that of the last call, not of the window.",
                f"Put {name} around the window, or take by='gradient'.",
                certain=True,
            )


def directions(found: Sequence[Row]) -> Iterator[Finding]:
    """Where the sign turns: params must go down, and decay comes before."""
    if any(row.sides for row in found):
        return
    # But for an optimizer of what a subspace leaves over.
    line = [row for row in found if all(holder.role != "subspace" for holder in row.holders)]
    signs = [sign(row.part) for row in line]
    for i, row in enumerate(line):
        if math.prod(signs[:i]) != -1 or math.prod(signs[i:]) != 1:
            continue
        if row.role == "decay" and number(row.part.settings.get("weight_decay")) > 0:
            yield Finding(
                f"{row.part.name} after the learning rate",
                "it is added to what will be added to the params: weights grow by it.",
                "Put it before the learning rate, as optax.adamw does.",
            )
        if row.role in CLIPS:
            yield Finding(
                f"{row.part.name} after the learning rate",
                "it bounds steps, not gradients: the bound means more the smaller the rate.",
                "Put it before the optimizer.",
            )
    several = -1 in signs
    if math.prod(signs) == 1 and (several or any(row.role in MEMORIES for row in line)):
        cause = "the sign turns twice" if several else "nothing turns the sign"
        mend = "End the chain with optax.scale_by_learning_rate(...)."
        why = f"{cause}: the loss is climbed."
        yield Finding("the whole chain", why, "Leave one learning rate out." if several else mend)


def feedback(found: Sequence[Row]) -> Iterator[Finding]:
    """Compressed reductions that lose for good what they do not send."""
    for row in found:
        if row.part.description is not None and row.part.description.lossy:
            yield Finding(
                f"{row.part.name} without error feedback",
                "what it does not send is lost at every step, and the same again at the next.",
                "error_feedback=True keeps it for later, in one more copy of the gradients.",
            )


def of_step(found: Sequence[Row], step: Any) -> Iterator[Finding]:
    """What the chain lacks for the step that it is in."""
    scales = any(row.role == "scaler" for row in found)
    if step.policy is not None and step.policy.compute_dtype == jnp.float16 and not scales:
        yield Finding(
            "a policy that computes in float16, and no loss scale",
            "small gradients vanish, and a large one makes everything NaN.",
            "Wrap the optimizer: boostax.dynamic_loss_scale(tx).",
        )
    if any(row.role == UNKNOWN for row in found):
        return
    reduced = {axis for row in found if row.role in _REDUCING for axis in row.axes}
    for name in step.names:
        if name not in reduced:
            yield Finding(
                f"nothing that reduces over the axis {name!r}",
                "each replica takes a step of its own, and their params part.",
                f"Put boostax.all_reduce({name!r}) first in the chain.",
                certain=True,
            )
