"""Traced programs: which functions an equation calls."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def called(eqn: JaxprEqn) -> Jaxpr | None:
    """The body of an equation that does nothing but call it: a jit, a checkpoint, a custom rule.

    Such a body takes the equation's own operands and gives its results; ``None`` of all others.
    """
    for body in eqn.params.values():
        body = body.jaxpr if isinstance(body, ClosedJaxpr) else body
        if (
            isinstance(body, Jaxpr)
            and len(body.invars) == len(eqn.invars)
            and len(body.outvars) == len(eqn.outvars)
        ):
            return body
    return None


def bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """All programs inside an equation: what it calls, its branches, the parts of a loop."""
    return _inside(eqn.params.values())


def _inside(values: Any) -> Iterator[Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _inside(value)
