"""What a traced program sends, counted from the jaxpr, and what it computes beside that.

The compiled text is no measure of bytes: XLA's CPU compiler widens bf16 collectives to f32 and
merges the reductions of several leaves into one.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Bytes that one device sends on a ring, per byte of operand, for n devices.
_RING: dict[str, Callable[[int], float]] = {
    "psum": lambda n: 2 * (n - 1) / n,
    "pmax": lambda n: 2 * (n - 1) / n,
    "pmin": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1,
}

# Calls whose body takes the place of the equation, by the parameter that holds it.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "shard_map": "jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_CASTS = ("pvary", "pcast")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a traced program.

    Attributes:
      primitive: ``psum``, ``pmin``, ``all_gather``, ...
      axes: mesh axes it runs over.
      replicas: number of devices over those axes.
      bytes: operand bytes per device and execution, in the declared dtype.
      count: executions per call of the program (the lengths of the surrounding scans).
      conditional: whether it stands in a branch of a cond.
      branches: the branches it stands in, outermost first: ``(cond, branch)``, both numbers, so
        that alternatives of one cond can be told from conds that follow each other.
    """

    primitive: str
    axes: tuple[str, ...]
    replicas: int
    bytes: int
    count: int
    conditional: bool
    branches: tuple[tuple[int, int], ...] = ()

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per call, by the formula of a ring."""
        return self.bytes * self.count * _RING[self.primitive](self.replicas)


def collectives(fn: Callable[..., Any] | ClosedJaxpr, *args: Any) -> list[Collective]:
    """All collectives of a function, or of a jaxpr, in program order.

    A ``while`` body counts once: its trips are not known.
    """
    jaxpr = fn if isinstance(fn, ClosedJaxpr) else jax.make_jaxpr(fn)(*args)
    return list(_walk(jaxpr.jaxpr, {}, 1, (), itertools.count()))


def wire_bytes(found: list[Collective], *, conditional: bool | None = None) -> float:
    """Bytes on the wire per device and call: all of them, or only those in branches (or not).

    Alternatives of one cond add up: see ``expected``.
    """
    return sum(c.wire_bytes for c in found if conditional is None or c.conditional == conditional)


def expected(
    found: Sequence[Collective],
    of: Callable[[Collective], float] = lambda c: c.wire_bytes,
    *,
    conditional: bool | None = None,
) -> float:
    """Bytes (or another number ``of`` each collective) of a call that sends, alternatives apart.

    Of the branches of a cond one runs: they count as the mean of those that have a collective. A
    branch without is a hold, such as that of a skipped step, and not a call that sends.
    """
    chosen = [c for c in found if conditional is None or c.conditional == conditional]
    return _expected(chosen, of, 0)


def _kind(primitive: str) -> str:
    return primitive.removesuffix("_invariant")


def _expected(found: Sequence[Collective], of: Callable[[Collective], float], depth: int) -> float:
    conds: dict[int, dict[int, list[Collective]]] = {}
    for c in found:
        if len(c.branches) > depth:
            cond, branch = c.branches[depth]
            conds.setdefault(cond, {}).setdefault(branch, []).append(c)
    always = sum(of(c) for c in found if len(c.branches) == depth)
    return always + sum(
        sum(_expected(branch, of, depth + 1) for branch in branches.values()) / len(branches)
        for branches in conds.values()
    )


def _walk(
    jaxpr: Jaxpr,
    sizes: dict[str, int],
    count: int,
    branches: tuple[tuple[int, int], ...],
    conds: Iterator[int],
) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        name = _kind(eqn.primitive.name)
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        if name in _RING and axes is not None:
            names = tuple(x for x in (axes if isinstance(axes, tuple) else (axes,)) if x in sizes)
            nbytes = sum(_bytes(v.aval) for v in eqn.invars)
            replicas = math.prod(sizes[x] for x in names)
            yield Collective(name, names, replicas, nbytes, count, bool(branches), branches)
        inner_sizes = sizes
        if eqn.primitive.name == "shard_map":
            inner_sizes = {**sizes, **dict(eqn.params["mesh"].shape)}
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        cond = next(conds) if eqn.primitive.name == "cond" else None
        for i, inner in enumerate(_bodies(eqn.params.values())):
            within = branches if cond is None else (*branches, (cond, i))
            yield from _walk(inner, inner_sizes, count * trips, within, conds)


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def _bodies(values: Any) -> Iterator[Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _bodies(value)


def run_alone(traced: ClosedJaxpr, args: Sequence[Any], real: jax.Array) -> list[Any]:
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


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], real: jax.Array) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, args, strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else env[v]  # noqa: E731
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
    if _kind(name) in _RING:
        return [_received(x, v.aval, real) for x, v in zip(args, eqn.outvars, strict=True)]
    if name in _CALLS:
        inner, consts = _open(params[_CALLS[name]])
        kinds: list[Any] = [v.aval for v in inner.invars]
        fitted = [fit(x, kind.shape) for x, kind in zip(args, kinds, strict=True)]
        return _run(inner, consts, fitted, real)
    if name == "cond":
        branches = [_as_function(branch, real) for branch in params["branches"]]
        return lax.switch(args[0], branches, *args[1:])
    if name == "scan":
        return _scan(params, args, real)
    if name == "while":
        return _while(params, args, real)
    outs = eqn.primitive.bind(*args, **params)
    return outs if eqn.primitive.multiple_results else [outs]


def _scan(params: dict[str, Any], args: list[Any], real: jax.Array) -> Sequence[Any]:
    consts, carried = params["num_consts"], params["num_consts"] + params["num_carry"]
    body = _as_function(params["jaxpr"], real)

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body(*args[:consts], *carry, *x)
        return outs[: params["num_carry"]], outs[params["num_carry"] :]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(step, args[consts:carried], args[carried:], **options)
    return [*carry, *stacked]


def _while(params: dict[str, Any], args: list[Any], real: jax.Array) -> Sequence[Any]:
    test_consts, consts = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    test, body = (_as_function(params[name], real) for name in ("cond_jaxpr", "body_jaxpr"))
    return lax.while_loop(
        lambda carry: test(*args[:test_consts], *carry)[0],
        lambda carry: body(*args[test_consts:consts], *carry),
        args[consts:],
    )


def _as_function(closed: ClosedJaxpr, real: jax.Array) -> Callable[..., list[Any]]:
    return lambda *args: _run(closed.jaxpr, closed.consts, args, real)


def _open(body: ClosedJaxpr | Jaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    return (body.jaxpr, body.consts) if isinstance(body, ClosedJaxpr) else (body, [])


def _received(x: jax.Array, aval: Any, real: jax.Array) -> jax.Array:
    """What a collective brings: its operand, as often as it takes to fill the shape."""
    copies = lambda: jnp.resize(x, aval.shape)  # noqa: E731
    return lax.cond(real, copies, lambda: jnp.zeros(aval.shape, aval.dtype))
