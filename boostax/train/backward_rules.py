# SPDX-License-Identifier: Apache-2.0
"""Find backward rules (``jax.custom_vjp``) that are not linear in the cotangent, from their traces.

A loss scale multiplies every cotangent by ``s``, and the gradients are divided by ``s``. The two
factors cancel if each rule is homogeneous of degree 1 (``_core/degrees.py``). A rule that clips at
a fixed bound, adds noise or divides by a norm is reported. A rule that quantises relative to the
largest element of its cotangent has degree 1, and is not reported. A rule whose trace cannot be
read, such as a rule with a custom kernel, is not reported, either.
"""

from __future__ import annotations

import jax

from boostax._core import degrees, interpret, jaxprs


def nonlinear(program: jaxprs.ClosedJaxpr, sure: bool) -> list[str]:
    """Return the name and source line of each nonlinear rule in a loss.

    Args:
      program: the trace of the loss.
      sure: whether it is certain that no input of the loss is multiplied by the scale.
    """
    rules: dict[tuple[str, int], bool] = {}
    for eqn, _ in interpret.equations(program.jaxpr):
        if eqn.primitive.name == interpret.CUSTOM[1]:
            # Rules made by one factory share a source line, but have different functions.
            place = interpret.body_of(eqn).jaxpr.debug_info.func_src_info
            key = place, id(getattr(eqn.params.get("bwd"), "f", None))
            rules[key] = rules[key] if key in rules else _is_nonlinear(eqn, sure)
    return list(dict.fromkeys(place for (place, _), is_nonlinear in rules.items() if is_nonlinear))


def _is_nonlinear(eqn: jaxprs.JaxprEqn, sure: bool) -> bool:
    inputs = [var.aval for var in eqn.invars]
    cotangents = [var.aval for var in eqn.outvars if degrees.is_inexact(var.aval)]

    def backward(operands: list[jax.Array], cotangents: list[jax.Array]) -> list[jax.Array]:
        _, pull = jax.vjp(
            lambda *x: [*filter(degrees.is_inexact, interpret.replay(eqn, x))], *operands
        )
        return [*filter(degrees.is_inexact, pull(cotangents))]

    try:
        program = jax.make_jaxpr(backward)(inputs, cotangents)
    except Exception:  # A rule may close over values of a trace that has ended.
        return False
    results = degrees.degrees(program, [0.0 if sure else degrees.UNKNOWN] * len(inputs))
    return any(degree not in (1.0, degrees.ANY, degrees.UNKNOWN) for degree in results)
