# SPDX-License-Identifier: Apache-2.0
"""Read from a trace what was done to gradients after the backward pass.

A scaler divides gradients by the loss scale, so everything between the backward pass and the scaler
must be homogeneous of degree 1 in the gradients (``degrees.py``): casts, products with constants
and means over replicas have degree 1, but a clip, a weight decay or a sign has not. JAX names the
equations of a backward pass, and keeps the equation that made each traced array until the trace
ends. Nothing is refused where these equations cannot be read: outside a trace, for gradients of
another ``jax.jit``, and for gradients that no backward pass of JAX computed.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer

from boostax._core import checks, degrees, interpret, jaxprs
from boostax._core.types import PyTree


def require_linear(who: str, grads: PyTree, params: PyTree) -> None:
    """Refuse gradients that are certainly not of degree 1 in the results of the backward pass.

    Args:
      who: the function that gets the gradients of a scaled loss.
      grads: gradients, traced or not.
      params: params in the same trace, which a weight decay may have added to the gradients; or
        ``None``.
    """
    got = "gradients that were clipped, decayed or changed otherwise"
    allowed = "gradients of the backward pass changed only by casts, constant factors and means"
    hint = (
        "The loss scale still multiplies these gradients, so a bound depends on the scale. Clip "
        "inside the scaler: dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), ...))."
    )
    checks.require(not _is_nonlinear(grads, params), who, "gradients", got, allowed, hint)


def _is_nonlinear(grads: PyTree, params: PyTree) -> bool:
    leaves, constants = _recorded(grads), {x.val for x in _recorded(params)}
    eqns, backward, free = _between(leaves, constants)
    changed = set(backward)
    for eqn in eqns:
        if any(x in changed for x in eqn.invars if isinstance(x, jaxprs.Var)):
            changed.update(eqn.outvars)
    results = [x.val for x in leaves if x.val in changed.difference(backward)]
    if not results:
        return False
    program = interpret.excerpt([*free, *backward], results, eqns)
    known = [0.0 if x in constants else degrees.FREE for x in free]
    accepted = (1.0, degrees.ANY, degrees.FREE, degrees.UNKNOWN)
    return any(x not in accepted for x in degrees.degrees(program, known))


def _recorded(tree: PyTree) -> list[Any]:
    """Return the recorded arrays behind the traced arrays of a tree, without the constants."""
    recorded = list[Any]()
    for x in jax.tree.leaves(tree):
        while isinstance(x, Tracer) and not hasattr(x, "parent"):
            x = getattr(x, "val", getattr(x, "primal", None))
        if isinstance(x, Tracer) and isinstance(getattr(x, "val", None), jaxprs.Var):
            recorded.append(x)
    return recorded


def _is_backward(eqn: Any) -> bool:
    """Return whether an equation is part of a backward pass, or contains one."""
    stacks = (getattr(x.source_info.name_stack, "stack", ()) for x, _ in interpret.equations([eqn]))
    return any(x.name == "transpose" for stack in stacks for x in stack)


def _between(
    leaves: list[Any], constants: set[Any]
) -> tuple[list[jaxprs.JaxprEqn], list[Any], list[Any]]:
    """Return the equations after the backward pass, the results of this pass, and other inputs."""
    eqns: list[jaxprs.JaxprEqn] = []
    inputs: dict[Any, bool] = {}
    seen: set[int] = set()
    stack = [(x, False) for x in reversed(leaves)]
    while stack:
        tracer, is_done = stack.pop()
        eqn = tracer.parent
        if isinstance(tracer.val, jaxprs.Literal):
            continue
        if is_done:
            eqns.append(interpret.of_trace(eqn))
        elif eqn is None or tracer.val in constants or _is_backward(eqn):
            inputs.setdefault(tracer.val, eqn is not None and tracer.val not in constants)
        elif id(eqn) not in seen:
            seen.add(id(eqn))
            stack += [(tracer, True), *((x, False) for x in eqn.in_tracers)]
    backward = [x for x, is_backward in inputs.items() if is_backward]
    return eqns, backward, [x for x, is_backward in inputs.items() if not is_backward]
