# SPDX-License-Identifier: Apache-2.0
"""Find backward rules (``jax.custom_vjp``) that are not linear in the cotangent, from their traces.

A loss scale multiplies every cotangent by ``s``, and the gradients are divided by ``s``. The two
factors cancel if each rule is homogeneous of degree 1: ``f(s g) = s f(g)`` for ``s > 0``. So each
value in the trace of a rule has a degree: 1 for the cotangent, 0 for values that do not depend on
the cotangent. A product adds degrees, a square root halves a degree, and a sum has the degree that
its terms share (``degrees.toml``). A rule that clips at a fixed bound, adds noise or divides by a
norm is reported. A rule that quantises relative to the largest element of its cotangent has degree
1 and is not reported.

A rule whose trace cannot be read, such as a rule with a kernel, is not reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from boostax._core import checks, interpret, jaxprs
from boostax._core.types import PyTree

# A degree is a number or one of five marks: any degree (zeros and infinities), a guard (a small
# positive constant that only guards a division, and is ignored next to other terms), free (an input
# of any degree, which counts as a constant in products), no degree, or an unknown degree.
Degree = float | str
ANY, GUARD, FREE, NONE, UNKNOWN = "any", "guard", "free", "none", "unknown"
_LARGEST_GUARD = 1e-6
_TABLE = checks.table("boostax._core", "degrees")
_POWERS: dict[str, Degree] = _TABLE.pop("powers")
# The effect of an operation on degrees: a power, or a word of the table.
_KINDS = _POWERS | {name: kind for kind, names in _TABLE.items() for name in names.split()}


def nonlinear(program: jaxprs.ClosedJaxpr, sure: bool) -> list[str]:
    """Return the name and source line of each nonlinear rule in a loss.

    Args:
      program: the trace of the loss.
      sure: whether nothing in the loss is multiplied by the scale.
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
    cotangents = [var.aval for var in eqn.outvars if is_inexact(var.aval)]

    def backward(operands: list[jax.Array], cotangents: list[jax.Array]) -> list[jax.Array]:
        _, pull = jax.vjp(lambda *x: [*filter(is_inexact, interpret.replay(eqn, x))], *operands)
        return [*filter(is_inexact, pull(cotangents))]

    try:
        program = jax.make_jaxpr(backward)(inputs, cotangents)
    except Exception:  # A rule may close over values of a trace that has ended.
        return False
    results = degrees(program, [0.0 if sure else UNKNOWN] * len(inputs))
    return any(degree not in (1.0, ANY, UNKNOWN) for degree in results)


def degrees(program: jaxprs.ClosedJaxpr, known: Sequence[Degree]) -> list[Degree]:
    """Return the degrees of the results; inputs after the ``known`` ones are cotangents."""
    inputs = [*known, *[1.0] * (len(program.in_avals) - len(known))]
    inputs = [x if is_inexact(y) else ANY for x, y in zip(inputs, program.in_avals, strict=True)]
    # The values of a loop that runs until convergence may share no degree.
    return interpret.flow(program, inputs, transfer, shared, 0.0, constant=of_constant)


def is_inexact(x: PyTree) -> bool:
    """Return whether an array is real or complex."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def of_constant(value: PyTree, aval: PyTree) -> Degree:
    """Return the degree of a constant."""
    if not is_inexact(aval) or isinstance(value, Tracer):
        return UNKNOWN if is_inexact(aval) else ANY
    array: PyTree = np.asarray(value)
    size = np.abs(array).astype(np.float64)
    # The largest number of a dtype represents infinity, as in jnp.nan_to_num.
    if np.all((size == 0) | ~(size < float(jnp.finfo(aval.dtype).max))):
        return ANY
    return GUARD if np.all((size <= _LARGEST_GUARD) & (array.real > 0)) else 0.0


def shared(degrees: Sequence[Degree], otherwise: str = UNKNOWN) -> Degree:
    """Return the degree that all values share, or ``otherwise``."""
    different = set(degrees) - {ANY, GUARD} or ({GUARD} if GUARD in degrees else {ANY})
    if FREE in different:
        return FREE if different <= {FREE, 0.0} else UNKNOWN
    return different.pop() if len(different) == 1 else otherwise


def transfer(eqn: jaxprs.JaxprEqn, operands: list[Degree]) -> list[Degree]:
    """Return the degrees of the results of an equation."""
    name = eqn.primitive.name
    types: list[PyTree] = [var.aval for var in eqn.outvars]
    kind = _KINDS.get(name)
    if name == "convert_element_type" and not is_inexact(eqn.invars[0].aval):
        kind = "invariant"
    elif name == "convert_element_type" and jnp.issubdtype(types[0].dtype, jnp.integer):
        kind = "absolute"
    if kind != "place" or len(operands) != len(types):
        operands = [_degree(eqn, kind, operands)] * len(types)
    # An integer or a bool that no scale changes has any degree: no gradient depends on it.
    pairs = zip(operands, types, strict=True)
    return [x if is_inexact(aval) or x in (NONE, UNKNOWN) else ANY for x, aval in pairs]


def _degree(eqn: jaxprs.JaxprEqn, kind: Degree | None, operands: list[Degree]) -> Degree:
    if UNKNOWN in operands or NONE in operands:
        return UNKNOWN if UNKNOWN in operands else NONE
    if kind in ("place", "sum"):
        return shared(operands, NONE if kind == "sum" else UNKNOWN)
    name, numbers = eqn.primitive.name, [x if isinstance(x, float) else 0.0 for x in operands]
    constant = FREE if FREE in operands else 0.0
    if name == "pow" and isinstance(eqn.invars[1], jaxprs.Literal):
        kind = float(eqn.invars[1].val)
    power = 1.0 if kind == "product" else eqn.params.get("y", kind)
    if isinstance(power, int | float):
        return ANY if ANY in operands else sum(numbers) * power or constant
    if name == "div" and operands[1] != ANY:
        return ANY if operands[0] == ANY else numbers[0] - numbers[1] or constant
    if kind == "invariant" or not any(numbers):
        return constant
    return NONE if kind == "absolute" else UNKNOWN
