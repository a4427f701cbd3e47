"""What one device of a mapped program computes: the program, run without its network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from boostax._core import jaxprs
from boostax._core.costs import RING, kind
from boostax._core.programs import CALLS, CHECKPOINT, CUSTOM, body_of, scan_operands

# Their body takes the place of the equation.
_CALLS = (*CALLS, *CHECKPOINT, *CUSTOM, "shard_map")
_CASTS = ("pvary", "pcast")


def run_alone(traced: jaxprs.ClosedJaxpr, args: Sequence[Any], real: jax.Array) -> list[Any]:
    """What one device of a ``shard_map`` computes, a local copy in the place of what it receives.

    The arguments, and so the results, may have the shapes they have inside the mapped function;
    ``fit`` gives them.

    Args:
      traced: of a function mapped over devices that need not exist.
      args: its arguments, flat.
      real: true, and an argument of what is compiled: the compiler can then neither see through
        what is received nor drop what is sent.
    """
    return _run(traced.jaxpr, traced.consts, args, real)


def fit(x: Any, shape: tuple[int, ...]) -> Any:
    """One device's part of a value that has the shape outside the mapped function, or has it."""
    if jnp.shape(x) == shape:
        return x
    return x[None] if (1, *x.shape) == shape else x[tuple(slice(d) for d in shape)]


def _run(
    jaxpr: jaxprs.Jaxpr, consts: Sequence[Any], args: Sequence[Any], real: jax.Array
) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, args, strict=True))
    read = lambda v: v.val if isinstance(v, jaxprs.Literal) else env[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        outs = _equation(eqn, [read(v) for v in eqn.invars], real)
        env |= dict(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, args: list[Any], real: jax.Array) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in _CASTS:
        return args
    if name == "axis_index":
        return [jnp.where(real, 0, 1).astype(jnp.int32)]
    if kind(name) in RING:
        return [_received(x, v.aval, real) for x, v in zip(args, eqn.outvars, strict=True)]
    if name in _CALLS:
        inner = body_of(eqn)
        kinds: list[Any] = [v.aval for v in inner.jaxpr.invars]
        fitted = [fit(x, kind.shape) for x, kind in zip(args, kinds, strict=True)]
        return _run(inner.jaxpr, inner.consts, fitted, real)
    if name == "cond":
        branches = [_as_function(branch, real) for branch in params["branches"]]
        return lax.switch(args[0], branches, *args[1:])
    if name == "scan":
        return _scan(eqn, args, real)
    if name == "while":
        return _while(params, args, real)
    outs = eqn.primitive.bind(*args, **params)
    return outs if eqn.primitive.multiple_results else [outs]


def _scan(eqn: Any, args: list[Any], real: jax.Array) -> Sequence[Any]:
    consts, carry, xs = scan_operands(eqn, args)
    body = _as_function(eqn.params["jaxpr"], real)

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body(*consts, *carry, *x)
        return outs[: len(carry)], outs[len(carry) :]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(step, carry, xs, **options)
    return [*carry, *stacked]


def _while(params: dict[str, Any], args: list[Any], real: jax.Array) -> Sequence[Any]:
    test_consts, consts = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    test, body = (_as_function(params[name], real) for name in ("cond_jaxpr", "body_jaxpr"))
    return lax.while_loop(
        lambda carry: test(*args[:test_consts], *carry)[0],
        lambda carry: body(*args[test_consts:consts], *carry),
        args[consts:],
    )


def _as_function(closed: jaxprs.ClosedJaxpr, real: jax.Array) -> Callable[..., list[Any]]:
    return lambda *args: _run(closed.jaxpr, closed.consts, args, real)


def _received(x: jax.Array, aval: Any, real: jax.Array) -> jax.Array:
    """What a collective brings: its operand, as often as it takes to fill the shape."""
    copies = lambda: jnp.resize(x, aval.shape)  # noqa: E731
    return lax.cond(real, copies, lambda: jnp.zeros(aval.shape, aval.dtype))
