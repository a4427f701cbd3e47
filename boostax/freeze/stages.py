# SPDX-License-Identifier: Apache-2.0
"""End a backward pass where the schedule says, decided in the program and compiled once.

What the gradients of the later groups need is a part of what those of the earlier ones need. So the
operations of the whole backward pass fall into stages, each needed by all depths up to its own, and
each stage is a branch of its own: an operation is compiled once, where a switch over whole backward
passes would compile it for every depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from boostax._core import axes, jaxprs
from boostax._core.gate import branch
from boostax._core.interpret import JIT, NEVER, demand, evaluate, excerpt, replay

PyTree = Any
# The variables that operations needed just as long take and give, and these operations.
_Stage: TypeAlias = tuple[list[Any], list[Any], list[Any]]


class Choice(NamedTuple):
    """Holds sets of active leaves, of which the program chooses one.

    Attributes:
      at: i32 scalar, which of the options holds.
      options: trees of bools like the params; what one of them leaves out, later ones do too.
    """

    at: jax.Array
    options: tuple[PyTree, ...]

    def levels(self) -> list[int]:
        """Return for each leaf the last option in which it is active, or ``NEVER``."""
        columns = zip(*map(jax.tree.leaves, self.options), strict=True)
        return [sum(column) + NEVER for column in columns]


def staged(
    fn: Callable[[], Sequence[jax.Array]], levels: Sequence[int], index: jax.Array
) -> list[jax.Array]:
    """Return the results of ``fn()`` where they are wanted; what only the others need is not run.

    Args:
      fn: what would compute them all.
      levels: for each result the largest index at which it is wanted, or ``NEVER``. Beyond it the
        result is zeros, or what had to be computed anyway.
      index: i32 scalar, the same on all replicas.
    """
    traced, types = jax.make_jaxpr(fn, return_shape=True)()
    # Operations one by one, not calls of jitted functions: a loss may be one.
    closed = jax.make_jaxpr(lambda: evaluate(traced, (), replay, inline=JIT))()
    jaxpr: Any = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    for level, (inputs, outputs, operations) in _stages(jaxpr, levels):
        run = jaxprs.jaxpr_as_fun(excerpt(inputs, outputs, operations))
        arguments = [values[var] for var in inputs]
        # What is needed at every depth stands outside.
        last = level == max(levels)
        found = run(*arguments) if last else _or_zeros(index <= level, run, arguments)
        values.update(zip(outputs, found, strict=True))

    def result(var: Any, level: int, kind: Any) -> jax.Array:
        if level == NEVER:
            return axes.zeros(kind)
        return jnp.asarray(var.val, kind.dtype) if isinstance(var, jaxprs.Literal) else values[var]

    return [result(*each) for each in zip(jaxpr.outvars, levels, types, strict=True)]


def _or_zeros(
    predicate: jax.Array, run: Callable[..., Sequence[jax.Array]], arguments: list[jax.Array]
) -> Sequence[jax.Array]:
    zeros = [axes.zeros(kind) for kind in jax.eval_shape(run, *arguments)]
    return branch(predicate, lambda: axes.unify(list(run(*arguments)), zeros), lambda: zeros)


def _stages(jaxpr: Any, levels: Sequence[int]) -> list[tuple[int, _Stage]]:
    """Return the stages of a program by the largest index at which they are needed, descending."""
    operations: dict[int, list[Any]] = {}

    def needed(eqn: Any, level: int) -> int:
        # There is no zero of what is not a number, and an effect is wanted whatever comes of it.
        # That a collective names an axis is an effect to JAX, but nobody sees it.
        seen = any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)
        special = any(jnp.issubdtype(var.aval.dtype, jax.dtypes.extended) for var in eqn.outvars)
        if seen or (special and level > NEVER):
            level = max(levels)
        if level > NEVER:
            operations.setdefault(level, []).insert(0, eqn)
        return level

    demand(jaxpr, levels, needed)
    # Results that nobody wants are not handed on.
    pairs = zip(jaxpr.outvars, levels, strict=True)
    wanted = {x for x, level in pairs if level > NEVER and not isinstance(x, jaxprs.Literal)}
    stages: list[tuple[int, _Stage]] = []
    for level, eqns in sorted(operations.items()):
        made = dict.fromkeys(x for eqn in eqns for x in eqn.outvars)
        used = (x for eqn in eqns for x in eqn.invars if not isinstance(x, jaxprs.Literal))
        taken = list(dict.fromkeys(x for x in used if x not in made))
        # A stage takes of earlier ones, which are needed longer and so come later here.
        stages.insert(0, (level, (taken, [x for x in made if x in wanted], eqns)))
        wanted.update(taken)
    return stages
