# SPDX-License-Identifier: Apache-2.0
"""A backward pass that ends where the schedule says, decided in the program and compiled once.

What the gradients of the later groups need is a part of what those of the earlier ones need. So the
operations of the whole backward pass fall into stages, each needed by all depths up to its own, and
each stage is a branch of its own: an operation is compiled once, where a switch over whole backward
passes would compile it for every depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from boostax._core import axes, jaxprs
from boostax._core.gate import branch
from boostax._core.interpret import JIT, NEVER, demand, evaluate, excerpt, replay

PyTree = Any


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


class _Stage(NamedTuple):
    """What is needed just as long: the variables that it takes and gives, and its operations."""

    inputs: list[Any]
    outputs: list[Any]
    operations: list[Any]


def staged(
    fn: Callable[[], Sequence[jax.Array]],
    levels: Sequence[int],
    index: jax.Array,
    otherwise: Sequence[jax.Array] | None = None,
) -> list[jax.Array]:
    """The results of ``fn()``, where they are wanted; what only the others need is not run.

    Args:
      fn: what would compute them all.
      levels: for each result the largest index at which it is wanted, or ``NEVER``.
      index: i32 scalar, the same on all replicas.
      otherwise: what stands in the place of those that are not wanted, of the same types; without
        it zeros, or what had to be computed anyway.
    """
    traced, types = jax.make_jaxpr(fn, return_shape=True)()
    # Operations one by one, not calls of jitted functions: a loss may be one.
    closed = jax.make_jaxpr(lambda: evaluate(traced, (), replay, inline=JIT))()
    jaxpr: Any = closed.jaxpr
    olds: Sequence[jax.Array | None] = [None] * len(levels) if otherwise is None else otherwise
    stages = _stages(jaxpr, levels)
    # What the branch of a stage gives in the place of results that are wanted just as long.
    made = {var: level for level, stage in stages.items() for var in stage.outputs}
    held: dict[Any, jax.Array | None] = {}
    for var, level, old in zip(jaxpr.outvars, levels, olds, strict=True):
        if not isinstance(var, jaxprs.Literal) and made.get(var) == level:
            held.setdefault(var, old)
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    for level, stage in sorted(stages.items(), reverse=True):
        run = jaxprs.jaxpr_as_fun(excerpt(*stage))
        given, instead = [values[var] for var in stage.inputs], map(held.get, stage.outputs)
        # What is needed at every depth stands outside.
        last = level == max(levels)
        found = run(*given) if last else _branch(index <= level, run, given, instead)
        values.update(zip(stage.outputs, found, strict=True))

    def result(var: Any, level: int, kind: Any, old: jax.Array | None) -> jax.Array:
        if level == NEVER:
            return axes.zeros(kind) if old is None else old
        literal = isinstance(var, jaxprs.Literal)
        found = jnp.asarray(var.val, kind.dtype) if literal else values[var]
        if old is None or level == max(levels) or (not literal and held.get(var) is old):
            return found
        return jnp.where(index <= level, found, old)

    return [result(*each) for each in zip(jaxpr.outvars, levels, types, olds, strict=True)]


def is_seen(eqn: Any) -> bool:
    """Whether an operation does something besides its results, such as printing."""
    # That a collective names an axis is an effect to JAX, but nobody sees it.
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def _branch(
    predicate: jax.Array,
    run: Callable[..., Sequence[jax.Array]],
    given: list[jax.Array],
    instead: Iterable[jax.Array | None],
) -> Sequence[jax.Array]:
    held = [
        axes.zeros(kind) if old is None else axes.unify(old, kind)
        for old, kind in zip(instead, jax.eval_shape(run, *given), strict=True)
    ]
    return branch(predicate, lambda: axes.unify(list(run(*given)), held), lambda: held)


def _stages(jaxpr: Any, levels: Sequence[int]) -> dict[int, _Stage]:
    """The stages of a program by the largest index at which they are needed."""
    operations: dict[int, list[Any]] = {}

    def needed(eqn: Any, level: int) -> int:
        # There is no zero of what is not a number, and an effect is wanted whatever comes of it.
        special = any(jnp.issubdtype(var.aval.dtype, jax.dtypes.extended) for var in eqn.outvars)
        if is_seen(eqn) or (special and level > NEVER):
            level = max(levels)
        if level > NEVER:
            operations.setdefault(level, []).insert(0, eqn)
        return level

    demand(jaxpr, levels, needed)
    made = {level: [x for eqn in eqns for x in eqn.outvars] for level, eqns in operations.items()}
    taken: dict[int, dict[Any, None]] = {}
    for level, eqns in operations.items():
        own = set(made[level])
        used = (x for eqn in eqns for x in eqn.invars if not isinstance(x, jaxprs.Literal))
        taken[level] = dict.fromkeys(x for x in used if x not in own)
    # Results that nobody wants are not handed on.
    wanted = zip(jaxpr.outvars, levels, strict=True)
    results = {x for x, level in wanted if level > NEVER and not isinstance(x, jaxprs.Literal)}
    handed_on = results.union(*taken.values())
    return {
        level: _Stage(list(taken[level]), [x for x in made[level] if x in handed_on], eqns)
        for level, eqns in operations.items()
    }
