# SPDX-License-Identifier: Apache-2.0
"""Refuse a wrong order of parts, or warn of it, wherever boostax gets a chain or its state.

Optax is not patched, so each function of boostax checks what it gets. A chain is read part by part.
The state of a chain has the states of the parts, in the order of the parts. A chain is refused if a
finding makes every run wrong. Any other finding is reported by one warning.
"""

import re
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import optax

from boostax._core.describe import once
from boostax._core.types import PyTree
from boostax.order import parts
from boostax.order.findings import Finding, finding, findings, orders, scales

# The findings in states of a structure.
_OF_STATES: dict[PyTree, list[Finding]] = {}
# Findings of which the user was warned, each with the structure of the state or ``None``.
_WARNED: set[tuple[str, PyTree]] = set()


def of_chain(
    who: str,
    tx: optax.GradientTransformation,
    names: tuple[str, ...] = (),
    opt_state: PyTree = None,
) -> None:
    """Refuse a chain that is wrong in every run, and warn of its other findings.

    Args:
      who: the function that got the chain.
      tx: the chain.
      names: the replica axes that ``who`` binds.
      opt_state: the state in a loop, for which each warning is given once; or ``None``.
    """
    found, _ = once(tx.update, names, lambda: read(tx, names))
    report(who, "tx", found, None if opt_state is None else jax.tree.structure(opt_state))


def of_state(who: str, opt_state: PyTree) -> None:
    """Check the order of the states in a loop whose chain is not known."""
    structure = jax.tree.structure(opt_state)
    if structure not in _OF_STATES:
        _OF_STATES[structure] = [*orders(parts.rows(parts.of_state(opt_state)), bound=True)]
    report(who, "opt_state", _OF_STATES[structure], structure)


def read(
    tx: optax.GradientTransformation, names: tuple[str, ...], step: Any = None
) -> tuple[list[Finding], bool]:
    """Return the findings in a chain, and whether the chain scales the loss.

    If the chain scales the loss, a nonlinear backward
    rule is wrong. ``step`` is the train step around
    the chain, if there is one.
    """
    return findings(parts.rows(parts.read(tx)), step, bool(names)), scales(tx)


def of_rules(who: str, known: set[str], rules: list[str]) -> None:
    """Warn of each nonlinear backward rule once, although a loss may be traced several times."""
    new = sorted(set(rules) - known)
    known.update(rules)
    for rule in new:
        warnings.warn(f"{who}: {finding('not_linear', rule=rule)}", stacklevel=2)


def report(
    who: str, argument: str, found: Iterable[Finding], structure: PyTree = None, stacklevel: int = 5
) -> None:
    """Raise the first certain finding; warn of other findings, in a loop once per ``structure``."""
    for item in sorted(found, key=lambda x: not x.certain):
        if item.certain:
            allowed = "a chain whose parts fit each other" + " and the step" * (structure is None)
            allowed = f"the state of {allowed}" if argument == "opt_state" else allowed
            raise ValueError(f"{who}: {argument} must be {allowed}, got {item}")
        # The state of a scaler does not show which factory made it, so warnings about all factories
        # are compared by one name.
        text = re.sub(r"\w+_loss_scale", "loss_scale", str(item))
        if structure is None or not {(text, None), (text, structure)} & _WARNED:
            warnings.warn(f"{who}: {item}", stacklevel=stacklevel)
        _WARNED.add((text, structure))
