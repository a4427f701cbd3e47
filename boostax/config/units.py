# SPDX-License-Identifier: Apache-2.0
"""The units of saved sums: the loss scales that multiply the gradients that a state sees.

A scaler divides gradients for what is inside it. A state around it, or before it in a chain, sees
gradients times its scale, and so does whatever that state sums up. An open window goes on only in
the units in which it began.
"""

import itertools
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from boostax._core import checks, trees
from boostax._core.finite import stays_finite, usable
from boostax._core.gate import Pending
from boostax.config.leaves import WHO, Leaf, Path, Sources, named, spot

FLUSH = "boostax.flush(old_tx, state, params)"
# Scales by the path of their scaler; "" for the product of those that apply to every gradient.
Unit: TypeAlias = dict[str, Any]


def units(leaves: list[Leaf], found: Sources) -> dict[Path, Unit]:
    """Return the scales that multiply the gradients of each state.

    Args:
      leaves: the arrays of all states of the tree.
      found: the sources of those that have one.

    Returns:
      A unit for each state. ``""`` is the product of the scales that apply to all of its gradients,
      if there are any. Scales of groups, and of scalers in one part of a ``partition`` or
      ``named_chain``, stand under their paths: they can only be compared, not multiplied.
    """
    seen: dict[Path, Unit] = {x.at: {} for x in leaves}
    # A scaler that was kept beside the optimizer divides nothing.
    scalers = [
        x
        for x in leaves
        if x.holds.scale == x.field != "" and getattr(x.state, "inner_state", ()) is not None
    ]
    for (at, unit), x in itertools.product(seen.items(), scalers):
        scale = np.asarray(found.get(x.path, x).value, np.float64)
        scale = 2.0 ** (np.frexp(scale)[1] - 1.0) if x.holds.powers else scale
        path = _path_to_scaler(at, x.at)
        if path == "" and np.all(scale == scale.flat[0]):
            unit[""] = unit.get("", 1.0) * float(scale.flat[0])
        elif path is not None:
            unit[path or "the groups"] = scale.tolist()
    return seen


def _path_to_scaler(at: Path, scaler: Path) -> str | None:
    """Return the path on which gradients of a state reach a scaler: ``""`` if all of them do.

    ``None`` if none of them do.
    """
    shared = max(i for i in range(len(at) + 1) if at[:i] == scaler[:i])
    here: Any = next(iter(at[shared:]), None)
    there = scaler[shared:]
    behind = isinstance(here, SequenceKey) and there != () and there[0].idx < here.idx
    if not there or behind or isinstance(here, GetAttrKey):
        return None
    partial = isinstance(here, DictKey) or GetAttrKey("inner_states") in there
    return trees.path_name(there) if partial else ""


def _words(unit: Unit) -> str:
    rest = (f"{scale} of {path}" for path, scale in unit.items() if path)
    return " and ".join([f"{unit.get('', 1.0):g}", *rest])


def _measured(leaf: Leaf) -> str | None:
    """Return how an array depends on the scale of the gradients that its state sees.

    Returns:
      ``None`` if it does not; ``"sum"`` if it is proportional to the scale, ``"moment"`` if it goes
      by another power of it, ``"unknown"`` for states that nothing is known about.
    """
    known, cls = leaf.holds, type(leaf.state)
    if known.sums:
        return "sum" if trees.path_name(leaf.rel).startswith(known.sums) else None
    number = leaf.owner == () and not leaf.shape  # Every scalar seems to belong to a lone scalar.
    real = jnp.issubdtype(leaf.value.dtype, jnp.inexact)
    if leaf.owner is None or number or known.params or not real:
        return None
    moments = cls.__module__.startswith("optax.") and cls.__name__.startswith("ScaleBy")
    return "moment" if moments else "unknown"


def windows(leaves: list[Leaf], found: Sources) -> dict[Path, int]:
    """Return the micro-steps in the window of each state that has one; 0 if it is closed."""
    counts = [x for x in leaves if x.holds.opened == x.field != ""]
    return {x.at: int(found.get(x.path, x).value) for x in counts}


def settle_windows(
    olds: list[Leaf], found: Sources, before: dict[Path, Unit], scaled: set[Path], notes: list[str]
) -> None:
    """Drop open windows that the old chain would have skipped, and refuse to lose any other."""
    for at, count in windows(olds, {}).items():
        sums = [x for x in olds if x.at == at and x.bound and count]
        takers = [y for y, x in found.items() if x.at == at and x.bound]
        if sums and not takers:
            hint = f"Apply them before: {FLUSH}."
            if any(x.replicas is not None for x in sums):
                hint += " Or make one window of all: boostax.reshard_state(old_state, 1)."
            got = f"one of {count} micro-steps at {spot(at)}"
            allowed = "have no open window that does not fit new_tx"
            raise ValueError(f"{WHO}: old_state must {allowed}, got {got}. {hint}")
        pending = Pending([x.value for x in sums], (jnp.float32(1 / before[at].get("", 1.0)),))
        if before[at] and not scaled & {*takers} and not usable(pending):
            words = "cannot be used and is dropped, as its loss scaler would have done"
            notes.append(f"The open window at {spot(at)} {words}.")
            for y in takers:
                del found[y]


def converted(
    new: Leaf, old: Leaf, before: Unit, after: Unit, stale: bool, notes: list[str]
) -> Leaf:
    """Return an old array in the dtype and in the units of its new position."""
    kind, one, factor = _measured(new), {"": 1.0}, 1.0
    if kind and not stale and one | before != one | after:
        words = (
            f"{named(new)} at {spot(old.at)} of gradients times {_words(before)}, which at "
            f"{spot(new.at)} come times {_words(after)}"
        )
        if kind == "moment" or before | one != after | one:
            hint = "Put the loss scaler where it was, around the whole optimizer at best."
            hint = f"Apply the window before: {FLUSH}." if new.holds.opened else hint
            allowed = "of gradients that the loss scale multiplies alike in new_tx"
            raise ValueError(f"{WHO}: old_state must be {allowed}, got {words}. {hint}")
        notes.append(f"{words}: {'converted' if kind == 'sum' else 'kept unchanged'}.")
        factor = after.get("", 1.0) / before.get("", 1.0) if kind == "sum" else 1.0
    x, dtype = old.value, new.value.dtype
    if factor == 1 and dtype == x.dtype:
        return old
    value = (trees.at_least_float32(x) * np.float32(factor)).astype(dtype)
    got, hint = f"{dtype} at {trees.path_name(new.path)}", "accumulator_dtype='float32' holds it."
    allowed = f"able to hold the open window, times {factor:g}"
    checks.require(WHO, "new_tx", got, allowed, stale or bool(stays_finite(x, value)), hint)
    return old._replace(value=value)
