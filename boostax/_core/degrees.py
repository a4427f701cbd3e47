# SPDX-License-Identifier: Apache-2.0
"""Compute the degree of homogeneity of each result of a program in some of its inputs.

A loss scale multiplies every cotangent by ``s``, and the gradients are divided by ``s``. The two
factors cancel if the computation between them is homogeneous of degree 1: ``f(s g) = s f(g)`` for
``s > 0``. So each value of a program has a degree: 1 for a cotangent, and 0 for values that do not
depend on cotangents. A product adds degrees, a square root halves a degree, and a sum has the
degree that its terms share (``degrees.toml``). A clip at a fixed bound, noise and a division by a
norm have no degree, or a degree other than 1. Rounding relative to the largest element is of degree
1.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from boostax._core import checks, interpret, jaxprs
from boostax._core.types import PyTree

# A degree is a number or one of five marks. ``ANY`` is the degree of zeros and infinities.
# ``GUARD`` is the degree of a small positive constant that only prevents a division by zero; a sum
# ignores such a term. ``FREE`` is the degree of an input that may have any degree; in a product,
# such an input counts as a constant. ``NONE`` means that a value has no degree, and ``UNKNOWN``
# that its degree is unknown.
Degree = float | str
ANY, GUARD, FREE, NONE, UNKNOWN = "any", "guard", "free", "none", "unknown"
_LARGEST_GUARD = 1e-6


@functools.cache
def _kinds() -> Mapping[str, Degree]:
    """Return the effect of each operation on degrees: a power, or a keyword of ``degrees.toml``."""
    table = checks.table("boostax._core", "degrees")
    words = {kind: names.split() for kind, names in table.items() if kind != "powers"}
    return table["powers"] | {x: kind for kind, names in words.items() for x in names}


def degrees(program: jaxprs.ClosedJaxpr, known: Sequence[Degree]) -> list[Degree]:
    """Return the degrees of the results; inputs after those in ``known`` are cotangents."""
    inputs = [*known, *[1.0] * (len(program.in_avals) - len(known))]
    inputs = [x if is_inexact(y) else ANY for x, y in zip(inputs, program.in_avals, strict=True)]
    # If the branches of a condition or the iterations of a loop give a value different degrees,
    # ``_shared`` returns ``UNKNOWN``.
    return interpret.flow(program, inputs, _transfer, _shared, 0.0, constant=_of_constant)


def is_inexact(x: PyTree) -> bool:
    """Return whether an array has a floating or complex dtype."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _of_constant(value: PyTree, aval: PyTree) -> Degree:
    if not is_inexact(aval) or isinstance(value, Tracer):
        return UNKNOWN if is_inexact(aval) else ANY
    array: PyTree = np.asarray(value)
    size = np.abs(array).astype(np.float64)
    # The largest number of a dtype represents infinity, as in jnp.nan_to_num.
    if np.all((size == 0) | ~(size < float(jnp.finfo(aval.dtype).max))):
        return ANY
    return GUARD if np.all((size <= _LARGEST_GUARD) & (array.real > 0)) else 0.0


def _shared(degrees: Sequence[Degree], otherwise: str = UNKNOWN) -> Degree:
    """Return the degree that all values share, or ``otherwise``."""
    different = set(degrees) - {ANY, GUARD} or ({GUARD} if GUARD in degrees else {ANY})
    if FREE in different:
        return FREE if different <= {FREE, 0.0} else UNKNOWN
    return different.pop() if len(different) == 1 else otherwise


def _transfer(eqn: jaxprs.JaxprEqn, operands: list[Degree]) -> list[Degree]:
    """Return the degrees of the results of an equation."""
    name = eqn.primitive.name
    types: list[PyTree] = [var.aval for var in eqn.outvars]
    kind = _kinds().get(name)
    if name == "convert_element_type" and not is_inexact(eqn.invars[0].aval):
        kind = "invariant"
    elif name == "convert_element_type" and jnp.issubdtype(types[0].dtype, jnp.integer):
        kind = "absolute"
    if kind != "place" or len(operands) != len(types):
        operands = [_degree(eqn, kind, operands)] * len(types)
    # An integer or a bool has the degree ``ANY``, because no gradient depends on it. Only the
    # degrees ``NONE`` and ``UNKNOWN`` are kept, because then the loss scale may change the value.
    pairs = zip(operands, types, strict=True)
    return [x if is_inexact(aval) or x in (NONE, UNKNOWN) else ANY for x, aval in pairs]


def _degree(eqn: jaxprs.JaxprEqn, kind: Degree | None, operands: list[Degree]) -> Degree:
    if UNKNOWN in operands or NONE in operands:
        return UNKNOWN if UNKNOWN in operands else NONE
    if kind in ("place", "sum"):
        return _shared(operands, NONE if kind == "sum" else UNKNOWN)
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
