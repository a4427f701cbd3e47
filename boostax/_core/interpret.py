# SPDX-License-Identifier: Apache-2.0
"""The only interpreter of jaxprs: a table of the equations that contain programs, and four walks.

Code that reads or replays a jaxpr passes a rule to one of the walks. Only this module uses JAX's
names of calls, loops and branches, and maps the operands of an equation to the inputs of the
equation's *bodies*, which are the programs inside.

- ``equations`` lists all equations, also those in bodies, each with a context.
- ``evaluate`` replays a program on arrays, or on any values in place of arrays.
- ``flow`` carries facts of a lattice forward through all bodies, to a fixed point in loops.
- ``rewrite`` replaces equations in place, so that nothing is traced again.

No walk skips an unknown equation. If an equation has a body and is not in the table, it goes to the
caller's rule, which must assume that the body may do anything.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from boostax._core import checks, jaxprs
from boostax._core.types import PyTree

if TYPE_CHECKING:
    Atoms = Sequence[jaxprs.Atom]
    Eqns = Sequence[jaxprs.JaxprEqn]
    Enter = Callable[[jaxprs.JaxprEqn, Any], Iterable[Any]]

Operand = TypeVar("Operand")
Fact = TypeVar("Fact")

# If a version of JAX changes the parameters of an equation, boostax could misread the program. Only
# the errors with these hints would show this, so the hints name the consequence.
_TESTED = "Install tested versions in a checkout: pip install -c constraints.txt ."
_MISSED = f"Without this error, boostax would ignore the program inside this equation. {_TESTED}"
_MIXED = f"Without this error, boostax would mistake constants for the carry. {_TESTED}"


# All names that JAX has used for each kind of equation.
JIT = ("jit", "pjit")
CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_CALLS = ("call", "closed_call", "core_call", "checkpoint", "remat", "remat2")
_OTHERS = ("shard_map", "custom_vmap_call", "custom_partitioning", "composite")
# The operands and results of an equation with one of these names are the inputs and results of its
# body.
THROUGH = (*JIT, *_CALLS, *CUSTOM, *_OTHERS)


def body_of(eqn: jaxprs.JaxprEqn) -> jaxprs.ClosedJaxpr:
    """Return the body of an equation in ``THROUGH``."""
    kinds = (jaxprs.ClosedJaxpr, jaxprs.Jaxpr)
    programs = [x for x in eqn.params.values() if isinstance(x, kinds)]
    closed = [x if isinstance(x, kinds[0]) else jaxprs.ClosedJaxpr(x, ()) for x in programs]
    sizes = (len(eqn.invars), len(eqn.outvars))
    matching = [x for x in closed if (len(x.jaxpr.invars), len(x.jaxpr.outvars)) == sizes]
    what = f"the parameters of {eqn.primitive.name} of JAX {jax.__version__}"
    allowed = "one program of the operands"
    checks.require(bool(matching), "boostax", what, [*eqn.params], allowed, _MISSED, RuntimeError)
    return matching[0]


def scan_operands(
    scan: jaxprs.JaxprEqn, operands: Sequence[Operand]
) -> tuple[list[Operand], list[Operand], list[Operand]]:
    """Split the operands of a scan into constants, initial carry and scanned inputs (``xs``)."""
    params = scan.params
    sizes: list[int] = []
    if "num_consts" in params and "num_carry" in params:
        sizes = [params["num_consts"], params["num_carry"]]
        sizes.append(len(operands) - sum(sizes))
    elif hasattr(params.get("ft_in"), "unpack"):
        sizes = [len(part) for part in params["ft_in"].unpack()]
    is_valid = len(sizes) == 3 and min(sizes) >= 0 and sum(sizes) == len(operands)
    what = f"the parameters of scan of JAX {jax.__version__}"
    allowed = "num_consts and num_carry, or ft_in"
    checks.require(is_valid, "boostax", what, [*params], allowed, _MIXED, RuntimeError)
    remaining = iter(operands)
    consts, carry, xs = ([*itertools.islice(remaining, size)] for size in sizes)
    return consts, carry, xs


def equations(
    program: jaxprs.Jaxpr | Eqns, context: Any = None, enter: Enter | None = None
) -> list[tuple[jaxprs.JaxprEqn, Any]]:
    """Return all equations of a program in order, each before the equations of its bodies.

    Args:
      program: a program, or some equations.
      context: the context that is returned with each equation of ``program``.
      enter: ``enter(eqn, context)`` returns the contexts of the bodies; by default, all bodies have
        the context of ``eqn``.
    """
    kinds = (jaxprs.Jaxpr, jaxprs.ClosedJaxpr)
    pairs: list[tuple[jaxprs.JaxprEqn, Any]] = []
    for eqn in program.eqns if isinstance(program, jaxprs.Jaxpr) else program:
        pairs.append((eqn, context))
        # The programs in an equation are a called program, branches, or parts of a loop.
        values = jax.tree.leaves([*eqn.params.values()])
        bodies: Any = [getattr(x, "jaxpr", x) for x in values if isinstance(x, kinds)]
        inside = itertools.repeat(context) if enter is None else enter(eqn, context)
        for body, inner in zip(bodies, inside, strict=False):
            pairs += equations(body, inner, enter)
    return pairs


def evaluate(
    program: jaxprs.ClosedJaxpr,
    args: Sequence[Any],
    rule: Callable[[jaxprs.JaxprEqn, list[Any]], Sequence[Any]],
    constant: Callable[[Any, Any], Any] = lambda value, aval: value,
    inline: Sequence[str] = (),
) -> list[Any]:
    """Evaluate a program equation by equation, and return its results.

    Args:
      program: a traced program.
      args: its inputs, arrays or values that represent arrays.
      rule: ``rule(eqn, operands)`` returns the results of an equation; the rule ``replay`` is JAX's
        own evaluation.
      constant: ``constant(value, aval)`` returns the value that represents a constant.
      inline: names, among those in ``THROUGH``, of equations that are replaced by their bodies.
    """
    jaxpr = program.jaxpr
    consts = [constant(x, var.aval) for x, var in zip(program.consts, jaxpr.constvars, strict=True)]
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: jaxprs.Atom) -> Any:
        return constant(atom.val, atom.aval) if isinstance(atom, jaxprs.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in inline:
            results = evaluate(body_of(eqn), operands, rule, constant, inline)
        else:
            results = rule(eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def replay(eqn: jaxprs.JaxprEqn, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Evaluate an equation by JAX's own rule, with the equation's names and contexts."""
    name = jaxprs.gensym()
    # Literals become inputs, because the caller may pass other values in their place.
    args: list[jaxprs.Atom] = [name(atom.aval) for atom in eqn.invars]
    return jaxprs.jaxpr_as_fun(excerpt(args, eqn.outvars, [eqn.replace(invars=args)]))(*operands)


def excerpt(inputs: Atoms, outputs: Atoms, eqns: Eqns) -> jaxprs.ClosedJaxpr:
    """Make a program from some equations of a program."""
    empty = _empty().jaxpr
    names = {"arg_names": ("",) * len(inputs), "result_paths": ("",) * len(outputs)}
    debug_info = empty.debug_info._replace(**names)
    effects = set().union(*(eqn.effects for eqn in eqns))
    parts = {"invars": list(inputs), "outvars": list(outputs), "eqns": list(eqns)}
    return jaxprs.ClosedJaxpr(empty.replace(**parts, effects=effects, debug_info=debug_info), ())


def of_trace(eqn: Any) -> jaxprs.JaxprEqn:
    """Convert an equation that a trace has recorded to an equation of a program."""
    names = ("outvars", "primitive", "params", "effects", "source_info", "ctx")
    fields = {name: getattr(eqn, name) for name in names}
    return _template(0.0).eqns[0].replace(invars=[x.val for x in eqn.in_tracers], **fields)


# An empty program, from which ``replace`` makes other programs. ``replace`` works in all versions
# of JAX, but the arguments of the constructor differ between versions.
_empty: Callable[[], Any] = functools.cache(jax.make_jaxpr(lambda: ()))
_template: Callable[[float], Any] = functools.cache(jax.make_jaxpr(jax.numpy.negative))


def flow(
    program: jaxprs.ClosedJaxpr,
    inputs: Sequence[Fact],
    transfer: Callable[[jaxprs.JaxprEqn, list[Fact]], Sequence[Fact]] | None,
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
        body, or with an unknown body, for which ``transfer`` must assume the worst. With ``None``,
        the operands' facts are joined.
      join: ``join(facts)`` returns the fact about a value that is chosen among several values.
      nothing: the fact about constants.
      once: whether to evaluate each loop body once, without a fixed point, and to ignore branch
        indices and loop conditions. With ``once=False``, the walk ends only if ascending chains of
        facts are finite.
      constant: ``constant(value, aval)`` returns the fact about a constant; by default ``nothing``.
    """

    def looped(body: Any, consts: list[Fact], carry: list[Fact], xs: list[Fact]) -> list[Fact]:
        while True:
            results = through(body, [*consts, *carry, *xs])
            if once:
                return results
            joined = [join(pair) for pair in zip(carry, results, strict=False)]
            if joined == carry:
                return [*carry, *results[len(carry) :]]
            carry = joined

    def rule(eqn: jaxprs.JaxprEqn, facts: list[Fact]) -> Sequence[Fact]:
        name = eqn.primitive.name
        params = eqn.params
        if name == "cond":
            results = [through(branch, facts[1:]) for branch in params["branches"]]
            deciding = [] if once else facts[:1]
            return [join([*deciding, *alternatives]) for alternatives in zip(*results, strict=True)]
        if name == "scan":
            return looped(params["jaxpr"], *scan_operands(eqn, facts))
        if name == "while":
            count = params["cond_nconsts"]
            start = count + params["body_nconsts"]
            carry = looped(params["body_jaxpr"], facts[count:start], facts[start:], [])
            deciding = [] if once else through(params["cond_jaxpr"], [*facts[:count], *carry])
            return [join([*deciding, x]) for x in carry]
        return transfer(eqn, facts) if transfer else [join(facts)] * len(eqn.outvars)

    constants = constant or (lambda value, aval: nothing)
    through = functools.partial(evaluate, rule=rule, constant=constants, inline=THROUGH)
    return through(program, inputs)


def rewrite(value: Any, rule: Callable[[jaxprs.JaxprEqn], Eqns | None]) -> Any:
    """Replace equations in a program, or in programs among an equation's parameters.

    Args:
      value: a program, open or closed; a tuple or list of programs; anything else is returned
        unchanged.
      rule: ``rule(eqn)`` returns the equations that replace ``eqn``, or ``None`` to rewrite its
        bodies.
    """
    if type(value) in (tuple, list):
        return type(value)(rewrite(item, rule) for item in value)
    # From jax 0.11 on, open and closed programs are one class. ``value.replace`` preserves the
    # consts of a closed program.
    if isinstance(value, jaxprs.Jaxpr):
        eqns: list[jaxprs.JaxprEqn] = []
        for eqn in value.eqns:
            if (new := rule(eqn)) is None:
                new = [eqn.replace(params={k: rewrite(x, rule) for k, x in eqn.params.items()})]
            eqns += new
        return value.replace(eqns=eqns)
    if isinstance(value, jaxprs.ClosedJaxpr):
        return value.replace(jaxpr=rewrite(value.jaxpr, rule))
    return value


def of_data(
    who: str, fn: Callable[..., PyTree], fixed: PyTree, data: PyTree, allowed: str, hint: str
) -> tuple[jaxprs.ClosedJaxpr, int]:
    """Trace ``fn(fixed, *args, **kwargs)``; return the program, and how many arrays ``data`` has.

    ``data`` is a pair of ``args`` and ``kwargs``. The program's inputs are the leaves of ``fixed``,
    then the arrays in ``data``. Leaves that are not arrays are passed unchanged. A ``data`` without
    an array is refused.
    """
    leaves, treedef = jax.tree.flatten(data)
    arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")}
    checks.require(bool(arrays), who, "args", data, allowed, hint)

    def call(fixed: PyTree, arrays: dict[int, jax.Array]) -> list[jax.Array]:
        args, kwargs = treedef.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
        # Only arrays are returned, because results may also contain names, None and Python numbers.
        return [x for x in jax.tree.leaves(fn(fixed, *args, **kwargs)) if isinstance(x, jax.Array)]

    return jax.make_jaxpr(call)(fixed, arrays), len(arrays)
