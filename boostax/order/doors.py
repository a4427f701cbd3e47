# SPDX-License-Identifier: Apache-2.0
"""Refuse a wrong order of parts, or warn of it, wherever boostax gets a chain or its state.

Optax is not patched, so each function of boostax checks what it gets. A chain is read part by part.
The state of a chain has the states of the parts, in the order of the parts. A chain is refused if a
finding makes every run wrong. Any other finding is reported by one warning.
"""

import re
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import jax
import optax

from boostax._core.types import PyTree
from boostax.order import parts
from boostax.order.findings import Finding, findings, orders, scales

# For the ``update`` of each chain, by axes and policy: the findings in the chain, and whether the
# chain scales the loss.
_KNOWN = weakref.WeakKeyDictionary[PyTree, dict[PyTree, tuple[list[Finding], bool]]]()
# The findings in states of a structure.
_OF_STATES: dict[PyTree, list[Finding]] = {}
# Findings of which the user was warned, each with the structure of the state or ``None``.
_WARNED: set[tuple[str, PyTree]] = set()


def of_chain(
    who: str, tx: optax.GradientTransformation, names: tuple[str, ...] = (), step: Any = None
) -> bool:
    """Refuse a chain that is wrong in every run, and warn of its other findings.

    Args:
      who: the function that got the chain.
      tx: the chain.
      names: the replica axes that ``who`` binds.
      step: the train step around the chain, if there is one.

    Returns:
      Whether a nonlinear backward rule would be wrong under the chain's loss scale.
    """
    new, is_scaled = _known(tx, names, step)
    _report(who, "tx", new, None)
    return is_scaled


def of_loop(who: str, opt_state: PyTree, tx: optax.GradientTransformation | None = None) -> None:
    """Check the chain of a loop, or the order of the states if the chain is not known."""
    structure = jax.tree.structure(opt_state)
    if tx is None and structure not in _OF_STATES:
        _OF_STATES[structure] = [*orders(parts.rows(parts.of_state(opt_state)), bound=True)]
    new = _OF_STATES[structure] if tx is None else _known(tx)[0]
    _report(who, "opt_state" if tx is None else "tx", new, structure)


def _known(
    tx: optax.GradientTransformation, names: tuple[str, ...] = (), step: Any = None
) -> tuple[list[Finding], bool]:
    try:
        known = _KNOWN.setdefault(tx.update, {})
    except TypeError:  # a callable that has no weak references, or no hash
        known = {}
    key = names, getattr(step, "policy", None), step is None
    if key not in known:
        known[key] = findings(parts.rows(parts.read(tx)), step, bool(names)), scales(tx)
    return known[key]


def _report(who: str, argument: str, new: Iterable[Finding], structure: PyTree) -> None:
    """Raise the first certain finding; warn of other findings, in a loop once per ``structure``."""
    for item in sorted(new, key=lambda x: not x.certain):
        if item.certain:
            allowed = "a chain whose parts fit each other" + " and the step" * (structure is None)
            allowed = f"the state of {allowed}" if argument == "opt_state" else allowed
            raise ValueError(f"{who}: {argument} must be {allowed}, got {item}")
        # The state of a scaler does not show which factory made it, so warnings about all factories
        # are compared by one name.
        text = re.sub(r"\w+_loss_scale", "loss_scale", str(item))
        if structure is None or not {(text, None), (text, structure)} & _WARNED:
            warnings.warn(f"{who}: {item}", stacklevel=5)
        _WARNED.add((text, structure))
