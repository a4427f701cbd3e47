"""Traced programs: by which names JAX writes what has a program inside, and what that is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax import lax

from boostax._core import checks, jaxprs, proof

Operand = TypeVar("Operand")

# All names that JAX has had for each.
JIT = ("jit", "pjit")
CALLS = (*JIT, "closed_call", "core_call")
CHECKPOINT = ("checkpoint", "remat", "remat2")
CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_OTHERS = (("scan",), ("while",), ("cond",), ("shard_map",))


def body_of(eqn: jaxprs.JaxprEqn) -> jaxprs.ClosedJaxpr:
    """The program that one of ``CALLS``, ``CHECKPOINT``, ``CUSTOM`` or a ``shard_map`` calls."""
    found = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if isinstance(found, jaxprs.ClosedJaxpr):
        return found
    if isinstance(found, jaxprs.Jaxpr):
        return jaxprs.ClosedJaxpr(found, ())
    what = f"the parameter of {eqn.primitive.name} that holds its program"
    got, danger = sorted(eqn.params), "What it computes would be missed."
    raise proof.unreadable(what, "jaxpr or call_jaxpr", got, danger)


def scan_operands(
    scan: jaxprs.JaxprEqn, operands: Sequence[Operand]
) -> tuple[list[Operand], list[Operand], list[Operand]]:
    """The operands of a scan (or what is known of each): constants, carry, what it goes through."""
    params, given = scan.params, list(operands)
    sizes: list[int] = []
    if "num_consts" in params and "num_carry" in params:
        sizes = [params["num_consts"], params["num_carry"]]
        sizes.append(len(given) - sum(sizes))
    elif hasattr(params.get("ft_in"), "unpack"):
        sizes = [len(part) for part in params["ft_in"].unpack()]
    if len(sizes) != 3 or min(sizes) < 0 or sum(sizes) != len(given):
        allowed = "num_consts and num_carry, or ft_in"
        danger = "Constants would be taken for what is carried."
        raise proof.unreadable("the parameters of scan", allowed, sorted(params), danger)
    consts, carry, _ = sizes
    return given[:consts], given[consts : consts + carry], given[consts + carry :]


def of_data(
    who: str,
    fn: Callable[[Any, Any, Any], Any],
    fixed: Any,
    data: tuple[Any, Any],
    allowed: str,
    hint: str,
) -> tuple[jaxprs.Jaxpr, int]:
    """The program of ``fn(fixed, args, kwargs)``, and how many arrays are among its data.

    Its inputs are the leaves of ``fixed``, then the arrays of ``data``, which are ``args`` and
    ``kwargs``; what else is in them is handed on as it is. Without an array ``who`` refuses them.
    """
    leaves, treedef = jax.tree.flatten(data)
    arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")}
    if not arrays:
        raise ValueError(checks.message(who, "args", allowed, data, hint))

    def call(fixed: Any, arrays: dict[int, Any]) -> list[jax.Array]:
        given, named = treedef.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
        # A result may hold what is no array: a name, None, a Python number.
        return [x for x in jax.tree.leaves(fn(fixed, given, named)) if isinstance(x, jax.Array)]

    return jax.make_jaxpr(call)(fixed, arrays).jaxpr, len(arrays)


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


@functools.cache
def require_readable() -> None:
    """Raise unless this JAX writes calls, loops and branches as all that walks programs expects."""
    with proof.apart() as mesh:
        traced = jax.make_jaxpr(_all_kinds(mesh))(jax.ShapeDtypeStruct((2,), "float32"))
    found = {eqn.primitive.name: eqn for eqn in traced.jaxpr.eqns}
    for names in (JIT, CHECKPOINT, *((name,) for name in CUSTOM), *_OTHERS):
        eqn = next((found[name] for name in names if name in found), None)
        inside = [] if eqn is None else [x.primitive.name for b in bodies(eqn) for x in b.eqns]
        if eqn is None or "sin" not in inside:
            danger = "What it computes would be missed."
            raise proof.unreadable(f"the name of {names[0]}", " or ".join(names), [*found], danger)
    scanned = found["scan"]
    parts = scan_operands(scanned, [x.aval.shape for x in scanned.invars])
    if parts != ([(2,)], [()], [(3,)]):
        danger = "Constants would be taken for what is carried."
        raise proof.unreadable("the operands of scan", "constants, carry, xs", parts, danger)


def _all_kinds(mesh: Any) -> Callable[[jax.Array], Any]:
    """A function with one equation of each kind, and a sine in the body of each."""
    by_jvp, by_vjp = jax.custom_jvp(lax.sin), jax.custom_vjp(lax.sin)
    by_jvp.defjvp(lambda primals, tangents: (lax.sin(*primals), *tangents))
    by_vjp.defvjp(lambda x: (lax.sin(x), None), lambda _, cotangent: (cotangent,))

    def every(x: jax.Array) -> Any:
        step = lambda carry, each: (carry + each + lax.sin(x)[0], each)  # noqa: E731
        return (
            jax.jit(lax.sin)(x),
            jax.checkpoint(lax.sin)(x),
            by_jvp(x),
            by_vjp(x),
            lax.scan(step, x[0], lax.full((3,), 1.0, x.dtype)),
            lax.while_loop(lambda carry: carry[0] < 1, lax.sin, x),
            lax.cond(x[0] < 1, lax.sin, lax.cos, x),
            jax.shard_map(lax.sin, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())(x),
        )

    return every
