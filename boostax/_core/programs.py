"""Traced programs: which function an equation calls."""

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
