"""A backward pass that ends where the schedule says, decided in the program and compiled once.

What the gradients of the later groups need is a part of what those of the earlier ones need. So the
operations of the whole backward pass fall into stages, each needed by all depths up to its own, and
each stage is a branch of its own: an operation is compiled once, where a switch over whole backward
passes would compile it for every depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from boostax._core import axes, jaxprs

PyTree = Any
NEVER = -1
_CALLS = ("jit", "pjit")


class Choice(NamedTuple):
    """Which leaves are active, to be decided in the program.

    Attributes:
      at: i32 scalar, which of the options holds.
      options: trees of bools like the params; what one of them leaves out, later ones do too.
    """

    at: jax.Array
    options: tuple[PyTree, ...]

    def levels(self) -> list[int]:
        """For each leaf the last option in which it is active, or ``NEVER``."""
        columns = zip(*map(jax.tree.leaves, self.options), strict=True)
        return [sum(column) + NEVER for column in columns]


def staged(
    fn: Callable[[], Sequence[jax.Array]], levels: Sequence[int], index: jax.Array
) -> list[jax.Array]:
    """The results of ``fn()``, where they are wanted; what only the others need is not run.

    In the place of those stands zero, or what had to be computed anyway.

    Args:
      fn: what would compute them all.
      levels: for each result the largest index at which it is wanted, or ``NEVER``.
      index: i32 scalar, the same on all replicas.
    """
    closed, types = jax.make_jaxpr(fn, return_shape=True)()
    closed = jax.make_jaxpr(lambda: _inlined(closed.jaxpr, closed.consts))()
    jaxpr: Any = closed.jaxpr
    stages = _stages(jaxpr, levels)
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    for level in sorted(stages, reverse=True):
        inputs, outputs = _boundary(jaxpr, stages, levels, level)
        run = jaxprs.jaxpr_as_fun(
            jaxprs.ClosedJaxpr(_part(jaxpr, inputs, outputs, stages[level]), ())
        )
        given = [values[var] for var in inputs]
        # What is needed at every depth stands outside.
        found = run(*given) if level == max(levels) else _branch(index <= level, run, given)
        values.update(zip(outputs, found, strict=True))

    def result(var: Any, level: int, kind: Any) -> jax.Array:
        if level == NEVER:
            return axes.unify(jnp.zeros_like(kind), kind)
        return jnp.asarray(var.val, kind.dtype) if isinstance(var, jaxprs.Literal) else values[var]

    return [
        result(var, level, kind)
        for var, level, kind in zip(jaxpr.outvars, levels, types, strict=True)
    ]


def _inlined(jaxpr: Any, consts: Sequence[Any], *given: Any) -> list[Any]:
    """The same operations one by one, not as calls of jitted functions: a loss may be one."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, given, strict=True))
    read = lambda atom: atom.val if isinstance(atom, jaxprs.Literal) else values[atom]  # noqa: E731
    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in _CALLS:
            inner = eqn.params["jaxpr"]
            found = _inlined(inner.jaxpr, inner.consts, *inputs)
        else:
            atoms = list(dict.fromkeys(_variables(eqn.invars)))
            part = _part(jaxpr, atoms, list(eqn.outvars), [eqn])
            found = jaxprs.jaxpr_as_fun(jaxprs.ClosedJaxpr(part, ()))(
                *[read(atom) for atom in atoms]
            )
        values.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _part(jaxpr: Any, inputs: list[Any], outputs: list[Any], eqns: list[Any]) -> jaxprs.Jaxpr:
    """Some of the operations of a program as a program."""
    told = jaxpr.debug_info._replace(
        arg_names=("",) * len(inputs), result_paths=("",) * len(outputs)
    )
    return jaxprs.Jaxpr((), inputs, outputs, eqns, jaxpr.effects, told)


def _branch(
    predicate: jax.Array, run: Callable[..., Sequence[jax.Array]], given: list[jax.Array]
) -> Sequence[jax.Array]:
    types = jax.eval_shape(run, *given)
    zeros = [axes.unify(jnp.zeros_like(kind), kind) for kind in types]
    return lax.cond(predicate, lambda: list(run(*given)), lambda: zeros)


def _stages(jaxpr: Any, levels: Sequence[int]) -> dict[int, list[Any]]:
    """The operations by the largest index at which they are needed, in their order."""
    wanted: dict[Any, int] = {}

    def want(var: Any, level: int) -> None:
        if not isinstance(var, jaxprs.Literal):
            wanted[var] = max(level, wanted.get(var, NEVER))

    for var, level in zip(jaxpr.outvars, levels, strict=True):
        want(var, level)
    stages: dict[int, list[Any]] = {}
    for eqn in reversed(jaxpr.eqns):
        level = max((wanted.get(var, NEVER) for var in eqn.outvars), default=NEVER)
        # There is no zero of what is not a number, and an effect is wanted whatever comes of it.
        special = any(jnp.issubdtype(var.aval.dtype, jax.dtypes.extended) for var in eqn.outvars)
        # That a collective names an axis is an effect to JAX, but nobody sees it.
        seen = any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)
        if seen or (special and level > NEVER):
            level = max(levels)
        if level > NEVER:
            stages.setdefault(level, []).insert(0, eqn)
            for var in eqn.invars:
                want(var, level)
    return stages


def _boundary(
    jaxpr: Any, stages: dict[int, list[Any]], levels: Sequence[int], level: int
) -> tuple[list[Any], list[Any]]:
    """What a stage takes from before, and what it makes for later or for the result."""
    made = dict.fromkeys(var for eqn in stages[level] for var in eqn.outvars)
    used = dict.fromkeys(var for eqn in stages[level] for var in _variables(eqn.invars))
    later = {
        var
        for other, eqns in stages.items()
        if other < level
        for eqn in eqns
        for var in _variables(eqn.invars)
    }
    kept = zip(jaxpr.outvars, levels, strict=True)
    later |= {var for var, wanted in kept if wanted > NEVER and not isinstance(var, jaxprs.Literal)}
    return [var for var in used if var not in made], [var for var in made if var in later]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, jaxprs.Literal)]
