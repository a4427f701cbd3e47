# SPDX-License-Identifier: Apache-2.0
"""The only interpreter of jaxprs: a table of equations with programs inside, and four walks.

Code that reads or replays a jaxpr is a rule for one of the walks. Only this module knows JAX's
names of calls, loops and branches, and maps the operands of an equation to the inputs of its
*bodies*, the programs inside.

- ``equations`` lists all equations, also those in bodies, each with a context.
- ``evaluate`` replays a program on arrays, or on any values in place of arrays.
- ``flow`` carries facts of a lattice forward through all bodies, to a fixed point in loops.
- ``rewrite`` replaces equations in place, so that nothing is traced again.

No walk skips an unknown equation. An equation with a body that is not in the table goes to the
caller's rule, which must assume that the body may do anything.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from boostax._core import checks, jaxprs
from boostax._core.types import PyTree

Operand = TypeVar("Operand")
Fact = TypeVar("Fact")
Enter = Callable[[Any, Any], Iterable[Any]]

# The errors that would go unnoticed if a program were misread.
_MISSED = "What is computed inside would be missed."
_MIXED = "Constants would be taken for what is carried."


# All names that JAX has used for each kind of equation.
JIT = ("jit", "pjit")
CALLS = (*JIT, "call", "closed_call", "core_call")
CHECKPOINT = ("checkpoint", "remat", "remat2")
CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_OTHERS = ("shard_map", "custom_vmap_call", "custom_partitioning", "composite")
# The body of each of these equations takes its operands and returns its results.
THROUGH = (*CALLS, *CHECKPOINT, *CUSTOM, *_OTHERS)


def body_of(eqn: jaxprs.JaxprEqn) -> jaxprs.ClosedJaxpr:
    """Return the body of an equation in ``THROUGH``."""
    kinds, sizes = (jaxprs.ClosedJaxpr, jaxprs.Jaxpr), (len(eqn.invars), len(eqn.outvars))
    found = [x for x in eqn.params.values() if isinstance(x, kinds)]
    closed = [x if isinstance(x, kinds[0]) else jaxprs.ClosedJaxpr(x, ()) for x in found]
    fitting = [x for x in closed if (len(x.jaxpr.invars), len(x.jaxpr.outvars)) == sizes]
    what, allowed = f"the parameters of {eqn.primitive.name}", "one program of its operands"
    jaxprs.require(what, allowed, sorted(eqn.params), bool(fitting), _MISSED)
    return fitting[0]


def scan_operands(
    scan: jaxprs.JaxprEqn, operands: Sequence[Operand]
) -> tuple[list[Operand], list[Operand], list[Operand]]:
    """Split a scan's operands into constants, initial carry and scanned inputs (``xs``)."""
    params, given = scan.params, list(operands)
    sizes: list[int] = []
    if "num_consts" in params and "num_carry" in params:
        sizes = [params["num_consts"], params["num_carry"]]
        sizes.append(len(given) - sum(sizes))
    elif hasattr(params.get("ft_in"), "unpack"):
        sizes = [len(part) for part in params["ft_in"].unpack()]
    fits = len(sizes) == 3 and min(sizes) >= 0 and sum(sizes) == len(given)
    what, allowed = "the parameters of scan", "num_consts and num_carry, or ft_in"
    jaxprs.require(what, allowed, sorted(params), fits, _MIXED)
    consts, carry, _ = sizes
    return given[:consts], given[consts : consts + carry], given[consts + carry :]


def bodies(eqns: Iterable[jaxprs.JaxprEqn]) -> list[list[jaxprs.Jaxpr]]:
    """Return the programs inside an equation: a called program, branches, or parts of a loop."""
    kinds = jaxprs.Jaxpr, jaxprs.ClosedJaxpr
    values = (jax.tree.leaves([*eqn.params.values()]) for eqn in eqns)
    found: Any = [[getattr(x, "jaxpr", x) for x in y if isinstance(x, kinds)] for y in values]
    return found


def equations(
    program: jaxprs.Jaxpr | Sequence[Any], context: Any = None, enter: Enter | None = None
) -> Iterator[tuple[jaxprs.JaxprEqn, Any]]:
    """Yield all equations of a program in order, each before the equations of its bodies.

    Args:
      program: a program, or some equations.
      context: the context that is yielded with each equation of ``program``.
      enter: ``enter(eqn, context)`` returns the contexts of the bodies; ``None`` keeps ``context``.
    """
    eqns = program.eqns if isinstance(program, jaxprs.Jaxpr) else program
    for eqn, programs in zip(eqns, bodies(eqns), strict=True):
        yield eqn, context
        inside = itertools.repeat(context) if enter is None else enter(eqn, context)
        for body, inner in zip(programs, inside, strict=False):
            yield from equations(body, inner, enter)


def evaluate(
    program: jaxprs.ClosedJaxpr,
    args: Sequence[Any],
    rule: Callable[[Any, list[Any]], Sequence[Any]],
    constant: Callable[[Any, Any], Any] = lambda value, aval: value,
    inline: Sequence[str] = (),
) -> list[Any]:
    """Return the results of a program, equation by equation.

    Args:
      program: a traced program.
      args: its inputs, arrays or values that represent arrays.
      rule: ``rule(eqn, operands)`` returns the results of an equation; ``replay`` is JAX's own.
      constant: ``constant(value, aval)`` returns the value that represents a constant.
      inline: names in ``THROUGH`` whose bodies replace their equations.
    """
    jaxpr, avals = program.jaxpr, [var.aval for var in program.jaxpr.constvars]
    consts = map(constant, program.consts, avals)
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return constant(atom.val, atom.aval) if isinstance(atom, jaxprs.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in inline:
            found = evaluate(body_of(eqn), operands, rule, constant, inline)
        else:
            found = rule(eqn, operands)
        values.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def replay(eqn: jaxprs.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Return the results of an equation as JAX evaluates it, with its names and contexts."""
    name = jaxprs.gensym()
    # Literals become inputs, because the caller may pass other values in their place.
    given: Any = [name(atom.aval) for atom in eqn.invars]
    return jaxprs.jaxpr_as_fun(excerpt(given, eqn.outvars, [eqn.replace(invars=given)]))(*operands)


def excerpt(inputs: Sequence[Any], outputs: Sequence[Any], eqns: Any) -> jaxprs.ClosedJaxpr:
    """Make a program from some equations of a program."""
    empty = _nothing()
    names = {"arg_names": ("",) * len(inputs), "result_paths": ("",) * len(outputs)}
    debug_info = empty.debug_info._replace(**names)
    effects: Any = set().union(*(eqn.effects for eqn in eqns))
    parts: dict[str, Any] = {"invars": list(inputs), "outvars": list(outputs), "eqns": list(eqns)}
    return jaxprs.ClosedJaxpr(empty.replace(**parts, effects=effects, debug_info=debug_info), ())


@functools.cache
def _nothing() -> Any:
    """Make an empty program, a template for ``replace``.

    The constructor's arguments differ between versions of JAX; ``replace`` works in all versions.
    """
    return jax.make_jaxpr(lambda: ())().jaxpr


def flow(
    program: jaxprs.ClosedJaxpr,
    inputs: Sequence[Fact],
    transfer: Callable[[Any, list[Fact]], Sequence[Fact]],
    join: Callable[[Sequence[Fact]], Fact],
    nothing: Fact,
    *,
    once: bool = False,
    constant: Callable[[Any, Any], Fact] | None = None,
) -> list[Fact]:
    """Return facts about the results of a program, from facts about its inputs.

    Args:
      program: a traced program.
      inputs: a fact for each of its inputs.
      transfer: ``transfer(eqn, facts)`` returns facts about the results of an equation without a
        body, or with an unknown body, for which it must assume the worst.
      join: ``join(facts)`` returns the fact about a value that depends on a choice between several.
      nothing: the fact about constants.
      once: run each loop body once, without a fixed point, and ignore branch indices and loop
        conditions. Otherwise a loop ends only if ascending chains of facts are finite.
      constant: ``constant(value, aval)`` returns the fact about a constant; by default ``nothing``.
    """

    def run(body: jaxprs.ClosedJaxpr, facts: Sequence[Fact]) -> list[Fact]:
        return evaluate(body, facts, rule, constant or (lambda value, aval: nothing))

    def looped(turn: Callable[[list[Fact]], list[Fact]], carry: list[Fact]) -> list[Fact]:
        while True:
            found = turn(carry)
            if once:
                return found
            grown = [join(pair) for pair in zip(carry, found, strict=False)]
            if grown == carry:
                return [*carry, *found[len(carry) :]]
            carry = grown

    def rule(eqn: jaxprs.JaxprEqn, facts: list[Fact]) -> Sequence[Fact]:
        name, params = eqn.primitive.name, eqn.params
        if name in THROUGH:
            return run(body_of(eqn), facts)
        if name == "cond":
            results = [run(branch, facts[1:]) for branch in params["branches"]]
            deciding = [] if once else facts[:1]
            return [join([*deciding, *each]) for each in zip(*results, strict=True)]
        if name == "scan":
            consts, carry, xs = scan_operands(eqn, facts)
            return looped(lambda carry: run(params["jaxpr"], [*consts, *carry, *xs]), carry)
        if name == "while":
            first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            consts, body = facts[first:second], params["body_jaxpr"]
            carry = looped(lambda carry: run(body, [*consts, *carry]), facts[second:])
            deciding = [] if once else run(params["cond_jaxpr"], [*facts[:first], *carry])
            return [join([*deciding, x]) for x in carry]
        return transfer(eqn, facts)

    return run(program, inputs)


def rewrite(value: Any, rule: Callable[[Any], Sequence[Any] | None]) -> Any:
    """Replace equations in a program, or in programs among an equation's parameters.

    Args:
      value: a program, open or closed, a tuple or list of programs, or anything else.
      rule: ``rule(eqn)`` returns the equations that replace ``eqn``, or ``None`` to rewrite its
        bodies.
    """
    if type(value) in (tuple, list):
        return type(value)(rewrite(item, rule) for item in value)
    # From jax 0.11 on, open and closed programs are one class, and this case keeps the consts.
    if isinstance(value, jaxprs.Jaxpr):
        return value.replace(eqns=[new for eqn in value.eqns for new in _replaced(eqn, rule)])
    if isinstance(value, jaxprs.ClosedJaxpr):
        return value.replace(jaxpr=rewrite(value.jaxpr, rule))
    return value


def _replaced(eqn: Any, rule: Callable[[Any], Sequence[Any] | None]) -> Sequence[Any]:
    found = rule(eqn)
    if found is not None:
        return found
    return [eqn.replace(params={name: rewrite(x, rule) for name, x in eqn.params.items()})]


def of_data(
    who: str, fn: Callable[..., Any], fixed: PyTree, data: tuple[Any, Any], allowed: str, hint: str
) -> tuple[jaxprs.ClosedJaxpr, int]:
    """Trace ``fn(fixed, args, kwargs)``; return the program, and the number of arrays in the data.

    The program's inputs are the leaves of ``fixed``, then the arrays in ``data``, a pair of
    ``args`` and ``kwargs``. Leaves that are not arrays are passed unchanged. It raises if ``data``
    has no array.
    """
    leaves, treedef = jax.tree.flatten(data)
    arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")}
    checks.require(bool(arrays), who, "args", got=data, allowed=allowed, hint=hint)

    def call(fixed: PyTree, arrays: dict[int, Any]) -> list[jax.Array]:
        given, named = treedef.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
        # Results may contain names, None and Python numbers.
        return [x for x in jax.tree.leaves(fn(fixed, given, named)) if isinstance(x, jax.Array)]

    return jax.make_jaxpr(call)(fixed, arrays), len(arrays)
