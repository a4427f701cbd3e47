"""Traced programs: which functions an equation calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from boostax._core import jaxprs


def called(eqn: jaxprs.JaxprEqn) -> jaxprs.Jaxpr | None:
    """The body of an equation that does nothing but call it: a jit, a checkpoint, a custom rule.

    Such a body takes the equation's own operands and gives its results; ``None`` of all others.
    """
    for body in eqn.params.values():
        body = body.jaxpr if isinstance(body, jaxprs.ClosedJaxpr) else body
        if (
            isinstance(body, jaxprs.Jaxpr)
            and len(body.invars) == len(eqn.invars)
            and len(body.outvars) == len(eqn.outvars)
        ):
            return body
    return None


def bodies(eqn: jaxprs.JaxprEqn) -> Iterator[jaxprs.Jaxpr]:
    """All programs inside an equation: what it calls, its branches, the parts of a loop."""
    return _inside(eqn.params.values())


def _inside(values: Any) -> Iterator[jaxprs.Jaxpr]:
    for value in values:
        if isinstance(value, jaxprs.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, jaxprs.Jaxpr):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _inside(value)
