# SPDX-License-Identifier: Apache-2.0
"""Find what is wrong in a chain or a train step beside the order of its parts."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from boostax._core.axes import LATER
from boostax.chain.orders import Finding, orders
from boostax.chain.roles import CLIPS, MEMORIES, REDUCTIONS, UNKNOWN, number, sign
from boostax.chain.rows import Row

_REDUCING = (*REDUCTIONS, "delta", "own params", "subspace")


def findings(found: Sequence[Row], step: Any = None) -> list[Finding]:
    """Return all that is in wrong order or does not fit, of a chain and of a step around it."""
    bound = step is not None and bool(step.names)
    checks = (orders, freezing, functools.partial(agreements, bound), reach, directions, feedback)
    of_chain = [finding for check in checks for finding in check(found)]
    return of_chain if step is None else of_chain + list(of_step(found, step))


def freezing(found: Sequence[Row]) -> Iterator[Finding]:
    """Yield where freezing saves nothing."""
    for row in found:
        if row.role == "freeze" and (row.holders or row.routes):
            why = "the whole backward pass is paid for, and nothing is saved."
            mend = "Put it outermost: scheduled_freeze(tx, ...)."
            yield Finding(f"{row.part.name} inside the chain", why, mend, certain=True)
        if row.role == "zero" and row.sides:
            why = "its gradients are computed all the same, and reduced by what stands before."
            mend = "boostax.scheduled_freeze(tx, groups, depth) leaves it out of the backward pass."
            yield Finding(f"{row.part.name} in a partition", why, mend)


def agreements(bound: bool, found: Sequence[Row]) -> Iterator[Finding]:
    """Yield gates that decide for each replica of a reduction inside them alone.

    A step binds its axis for a gate that names none (``bound``).
    """
    for row in found:
        # A clip's axes are those of shards, which a gate sees by their types.
        inside = (other for other in found if other.inside(row) and other.role not in CLIPS)
        missing = {axis for other in inside for axis in other.axes} - {*row.axes, *LATER}
        named = bool(row.axes) or not bound
        if missing and named and row.role in ("scaler", "window", "carry"):
            words = ", ".join(repr(x) for x in sorted(missing))
            why = "its replicas do not agree on what to skip or to carry, or share one window."
            mend = f"Give it axis_name= as the reduction inside has it: {words}; in a step of "
            mend += "make_train_step or on_mesh leave it out, and the step's axis is bound."
            yield Finding(f"{row.part.name} without the axis {words}", why, mend, certain=True)


def reach(found: Sequence[Row]) -> Iterator[Finding]:
    """Yield gates that see only some of the params."""
    for row in found:
        if row.role not in ("scaler", "window", "peer window", "hold") or not row.masks:
            continue
        mask, name, scales = row.masks[-1], row.part.name, row.role == "scaler"
        why = "the params that it does not see move at every call, skipped or not."
        if scales:
            why = "the loss is multiplied by its scale as a whole, and only a part of it divided."
        mend = f"Put {name} around {mask}: {name}(optax.{mask}(...), ...)."
        yield Finding(f"{name} in {mask}", why, mend, certain=scales)


def directions(found: Sequence[Row]) -> Iterator[Finding]:
    """Yield where the sign turns: params must go down, and decay comes before."""
    if any(row.sides for row in found):
        return
    # An optimizer of what a subspace leaves over has a sign of its own.
    line = [row for row in found if all(holder.role != "subspace" for holder in row.holders)]
    signs = [sign(row.part) for row in line]
    for i, row in enumerate(line):
        if math.prod(signs[:i]) != -1 or math.prod(signs[i:]) != 1:
            continue
        what = f"{row.part.name} after the learning rate"
        if row.role == "decay" and number(row.part.settings.get("weight_decay")) > 0:
            why = "it is added to what will be added to the params: weights grow by it."
            yield Finding(what, why, "Put it before the learning rate, as optax.adamw does.")
        if row.role in CLIPS:
            why = "it bounds steps, not gradients: the bound means more the smaller the rate."
            yield Finding(what, why, "Put it before the optimizer.")
    several = -1 in signs
    if math.prod(signs) == 1 and (several or any(row.role in MEMORIES for row in line)):
        cause = "the sign turns twice" if several else "nothing turns the sign"
        mend = "End the chain with optax.scale_by_learning_rate(...)."
        why = f"{cause}: the loss is climbed."
        yield Finding("the whole chain", why, "Leave one learning rate out." if several else mend)


def feedback(found: Sequence[Row]) -> Iterator[Finding]:
    """Yield compressed reductions that lose for good what they do not send."""
    for row in found:
        if row.part.description is not None and row.part.description.lossy:
            why = "what it does not send is lost at every step, and the same again at the next."
            mend = "error_feedback=True keeps it for later, in one more copy of the gradients."
            yield Finding(f"{row.part.name} without error feedback", why, mend)


def of_step(found: Sequence[Row], step: Any) -> Iterator[Finding]:
    """Yield what the chain lacks for the step that it is in."""
    scales = any(row.role == "scaler" for row in found)
    if step.policy is not None and step.policy.compute_dtype == jnp.float16 and not scales:
        what = "a policy that computes in float16, and no loss scale"
        why = "small gradients vanish, and a large one makes everything NaN."
        yield Finding(what, why, "Wrap the optimizer: boostax.dynamic_loss_scale(tx).")
    if any(row.role == UNKNOWN for row in found):
        return
    reduced = {axis for row in found if row.role in _REDUCING for axis in row.axes}
    reduced |= set(step.names) if LATER[0] in reduced else set()
    for name in (name for name in step.names if name not in reduced):
        what = f"nothing that reduces over the axis {name!r}"
        why = "each replica takes a step of its own, and their params part."
        mend = "Put boostax.all_reduce() first in the chain."
        if reduced:
            what += f" of the step, but over {', '.join(map(repr, sorted(reduced)))}"
            mend = "Leave axis_name out of the parts: the step's is bound."
        yield Finding(what, why, mend, certain=True)
