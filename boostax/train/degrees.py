# SPDX-License-Identifier: Apache-2.0
"""Find backward rules (``jax.custom_vjp``) that are not linear in the cotangent, from their traces.

A loss scale multiplies every cotangent by ``s``, and the gradients are divided by ``s``. The two
factors cancel if each rule is homogeneous of degree 1: ``f(s g) = s f(g)`` for ``s > 0``. So each
value in the trace of a rule gets a degree: 1 for the cotangent, 0 for values that do not depend on
the cotangent. A product adds degrees, a square root halves them, and a sum keeps the degree that
its terms share (``degrees.toml``). A rule that clips at a fixed bound, adds noise or divides by a
norm is reported; a rule that quantises relative to the largest element of its cotangent has degree
1.

A rule whose trace cannot be read, such as a rule with a kernel, is not reported.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from boostax._core import checks, interpret, jaxprs

# A degree is a number or one of four marks: any degree (zeros and infinities), a small positive
# constant that only guards a division and is ignored next to other terms, no degree, or unknown.
ANY, GUARD, NONE, UNKNOWN = "any", "guard", "none", "unknown"
_LARGEST_GUARD = 1e-6


def nonlinear(program: Any, sure: bool) -> list[str]:
    """Return the name and source line of each nonlinear rule in a loss.

    Args:
      program: the trace of the loss.
      sure: whether nothing in the loss is multiplied by the scale.
    """
    judged: dict[Any, bool] = {}
    for eqn, _ in interpret.equations(program.jaxpr):
        if eqn.primitive.name == interpret.CUSTOM[1]:
            # Rules made by one factory share a source line, but have different functions.
            place = interpret.body_of(eqn).jaxpr.debug_info.func_src_info
            key = place, id(getattr(eqn.params.get("bwd"), "f", None))
            judged[key] = judged[key] if key in judged else _is_nonlinear(eqn, sure)
    return list(dict.fromkeys(place for (place, _), wrong in judged.items() if wrong))


def _is_nonlinear(eqn: Any, sure: bool) -> bool:
    inputs, results = ([var.aval for var in atoms] for atoms in (eqn.invars, eqn.outvars))

    def backward(operands: list[Any], cotangents: list[Any]) -> list[Any]:
        run = lambda *xs: [*filter(_inexact, interpret.replay(eqn, xs))]  # noqa: E731
        return [*filter(_inexact, jax.vjp(run, *operands)[1](cotangents))]

    try:
        program = jax.make_jaxpr(backward)(inputs, [*filter(_inexact, results)])
    except Exception:  # A rule may close over values of a trace that has ended.
        return False
    found = degrees(program, [0.0 if sure else UNKNOWN] * len(inputs))
    return any(x not in (1.0, ANY, UNKNOWN) for x in found)


def degrees(program: Any, known: Sequence[Any]) -> list[Any]:
    """Return the degrees of the results; inputs after the ``known`` ones are cotangents."""
    given = [*known, *[1.0] * (len(program.in_avals) - len(known))]
    given = [x if _inexact(y) else ANY for x, y in zip(given, program.in_avals, strict=True)]
    # A loop that runs until convergence need not have a degree.
    join = functools.partial(_shared, otherwise=UNKNOWN)
    return interpret.flow(program, given, _transfer, join, 0.0, constant=_of_constant)


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _of_constant(value: Any, aval: Any) -> Any:
    if not _inexact(aval) or isinstance(value, Tracer):
        return UNKNOWN if _inexact(aval) else ANY
    array: Any = np.asarray(value)
    size = np.abs(array).astype(np.float64)
    # The largest number of a dtype represents infinity, as in jnp.nan_to_num.
    if np.all((size == 0) | ~(size < float(jnp.finfo(aval.dtype).max))):
        return ANY
    return GUARD if np.all((size <= _LARGEST_GUARD) & (array.real > 0)) else 0.0


def _shared(facts: Sequence[Any], otherwise: str) -> Any:
    """Return the degree that all facts share, or ``otherwise``."""
    found = set(facts) - {ANY, GUARD} or ({GUARD} if GUARD in facts else {ANY})
    return found.pop() if len(found) == 1 else otherwise


@functools.cache
def _kinds() -> dict[str, Any]:
    said = checks.table("boostax.train", "degrees")
    return said.pop("powers") | {x: kind for kind, names in said.items() for x in names.split()}


def _transfer(eqn: Any, facts: list[Any]) -> list[Any]:
    """Return the degrees of the results of an equation."""
    name, types = eqn.primitive.name, [var.aval for var in eqn.outvars]
    kind = _kinds().get(name)
    if name == "convert_element_type" and not _inexact(eqn.invars[0].aval):
        kind = "invariant"
    elif name == "convert_element_type" and jnp.issubdtype(types[0].dtype, jnp.integer):
        kind = "absolute"
    each = kind == "place" and len(facts) == len(types)
    found = facts if each else [_degree(eqn, kind, facts)] * len(types)
    # An integer or a bool that no scale changes decides nothing, so it has any degree.
    pairs = zip(found, types, strict=True)
    return [x if _inexact(aval) or x in (NONE, UNKNOWN) else ANY for x, aval in pairs]


def _degree(eqn: Any, kind: Any, facts: list[Any]) -> Any:
    if UNKNOWN in facts or NONE in facts:
        return UNKNOWN if UNKNOWN in facts else NONE
    if kind in ("place", "sum"):
        return _shared(facts, NONE if kind == "sum" else UNKNOWN)
    name, numbers = eqn.primitive.name, [x if isinstance(x, float) else 0.0 for x in facts]
    if name == "pow" and isinstance(eqn.invars[1], jaxprs.Literal):
        kind = float(eqn.invars[1].val)
    power = 1.0 if kind == "product" else eqn.params.get("y", kind)
    if isinstance(power, int | float):
        return ANY if ANY in facts else sum(numbers) * power
    if name == "div" and facts[1] != ANY:
        return ANY if facts[0] == ANY else numbers[0] - numbers[1]
    if kind == "invariant" or not any(numbers):
        return 0.0
    return NONE if kind == "absolute" else UNKNOWN
