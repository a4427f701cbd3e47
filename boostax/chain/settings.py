# SPDX-License-Identifier: Apache-2.0
"""Find wrong settings of a chain or a train step."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from boostax._core.axes import UNNAMED
from boostax.chain.orders import Finding, orders, words
from boostax.chain.roles import CLIPS, MEMORIES, REDUCTIONS, UNKNOWN, number, sign
from boostax.chain.rows import Row

_REDUCING = (*REDUCTIONS, "delta", "own params", "subspace")


def findings(found: Sequence[Row], step: Any = None) -> list[Finding]:
    """Return all findings of a chain, its orders included, and of a step around it."""
    bound = step is not None and bool(step.names)
    checks = (orders, freezing, functools.partial(agreements, bound), reach, directions, feedback)
    of_chain = [finding for check in checks for finding in check(found)]
    return of_chain if step is None else of_chain + list(of_step(found, step))


def _finding(setting: str, **names: str) -> Finding:
    """Return the finding for a setting in the words of ``orders.toml``."""
    said = words()["settings"][setting]
    texts = {field: said[field].format(**names) for field in ("what", "why", "mend")}
    return Finding(**texts, certain=said.get("certain", False))


def freezing(found: Sequence[Row]) -> Iterator[Finding]:
    """Yield freezing that saves nothing."""
    for row in found:
        if row.role == "freeze" and (row.holders or row.routes):
            yield _finding("freeze_inside", name=row.part.name)
        if row.role == "zero" and row.sides:
            yield _finding("zero_in_partition", name=row.part.name)


def agreements(bound: bool, found: Sequence[Row]) -> Iterator[Finding]:
    """Yield gates that decide on each replica alone although a reduction is inside.

    A step binds its axis for a gate that names none (``bound``).
    """
    for row in found:
        # A clip's axes are axes of shards; a gate learns those from the types of the gradients.
        inside = (other for other in found if other.inside(row) and other.role not in CLIPS)
        missing = {axis for other in inside for axis in other.axes} - {*row.axes, *UNNAMED}
        named = bool(row.axes) or not bound
        if missing and named and row.role in ("scaler", "window", "carry"):
            axes = ", ".join(repr(x) for x in sorted(missing))
            yield _finding("without_axis", name=row.part.name, axes=axes)


def reach(found: Sequence[Row]) -> Iterator[Finding]:
    """Yield gates that see only some of the params."""
    for row in found:
        if row.role in ("scaler", "window", "peer window", "hold") and row.masks:
            setting = "scaler_in_mask" if row.role == "scaler" else "gate_in_mask"
            yield _finding(setting, name=row.part.name, mask=row.masks[-1])


def directions(found: Sequence[Row]) -> Iterator[Finding]:
    """Yield parts on the wrong side of the learning rate's sign, and chains with a wrong sign."""
    if any(row.sides for row in found):
        return
    # The optimizer outside of a subspace flips the sign itself.
    line = [row for row in found if all(holder.role != "subspace" for holder in row.holders)]
    signs = [sign(row.part) for row in line]
    for i, row in enumerate(line):
        if math.prod(signs[:i]) != -1 or math.prod(signs[i:]) != 1:
            continue
        if row.role == "decay" and number(row.part.settings.get("weight_decay")) > 0:
            yield _finding("decay_after_rate", name=row.part.name)
        if row.role in CLIPS:
            yield _finding("clip_after_rate", name=row.part.name)
    if math.prod(signs) == 1 and -1 in signs:
        yield _finding("two_signs")
    elif math.prod(signs) == 1 and any(row.role in MEMORIES for row in line):
        yield _finding("no_sign")


def feedback(found: Sequence[Row]) -> Iterator[Finding]:
    """Yield compressed reductions that discard what they do not send."""
    for row in found:
        if row.part.description is not None and row.part.description.lossy:
            yield _finding("lossy", name=row.part.name)


def of_step(found: Sequence[Row], step: Any) -> Iterator[Finding]:
    """Yield findings for settings that a step needs and its chain lacks."""
    scales = any(row.role == "scaler" for row in found)
    if step.policy is not None and step.policy.compute_dtype == jnp.float16 and not scales:
        yield _finding("half_without_scaler")
    if all(row.role != UNKNOWN for row in found):
        reduced = {axis for row in found if row.role in _REDUCING for axis in row.axes}
        reduced |= set(step.names) if UNNAMED[0] in reduced else set()
        others = ", ".join(map(repr, sorted(reduced)))
        for axis in (axis for axis in step.names if axis not in reduced):
            setting = "reduced_over_others" if reduced else "not_reduced"
            yield _finding(setting, axis=repr(axis), others=others)
