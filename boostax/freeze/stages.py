# SPDX-License-Identifier: Apache-2.0
"""End a backward pass at a depth that the program chooses, and compile each operation once.

The gradients of earlier groups need all operations that compute the gradients of later groups, and
more. So the operations of the backward pass form stages, and a stage is needed at all depths up to
the stage's own depth. Each stage is a branch, so an operation is compiled once; a switch over
complete backward passes would compile an operation once per depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from boostax._core import axes, gate, interpret, jaxprs
from boostax._core.interpret import JIT, evaluate, excerpt, replay
from boostax._core.types import PyTree

# The level of an unused value.
NEVER = -1

# The inputs, the outputs and the operations of a stage.
_Stage: TypeAlias = "tuple[list[jaxprs.Var], list[jaxprs.Var], list[jaxprs.JaxprEqn]]"


class Choice(NamedTuple):
    """Sets of active leaves; the program chooses one set.

    Attributes:
      at: i32 scalar, the index of the chosen option.
      options: trees of bools like the params; a leaf that is False in one option is False in all
        later options.
    """

    at: jax.Array
    options: tuple[PyTree, ...]

    def levels(self) -> list[int]:
        """Return the index of the last option in which each leaf of the first option is active."""
        columns = zip(*map(jax.tree.leaves, self.options), strict=True)
        return [sum(column) + NEVER for column in columns if column[0]]


def staged(fn: Callable[[], PyTree], levels: Sequence[int], index: jax.Array) -> list[jax.Array]:
    """Return the results of ``fn()`` that ``index`` needs; run no operations for other results.

    Args:
      fn: a function that computes all results.
      levels: the largest index that needs each result, or ``NEVER``. For larger indices, the result
        is zeros, or a value that another result needs.
      index: i32 scalar, equal on all replicas.
    """
    traced, types = jax.make_jaxpr(fn, return_shape=True)()
    # Calls of jitted functions are inlined, because the whole loss may be one such call.
    closed = jax.make_jaxpr(lambda: evaluate(traced, (), replay, inline=JIT))()
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    for level, (inputs, outputs, operations) in _stages(jaxpr, levels):
        stage = jaxprs.jaxpr_as_fun(excerpt(inputs, outputs, operations))
        arguments = [values[var] for var in inputs]
        # A stage that every index needs is not put into a branch.
        is_last = level == max(levels)
        results = stage(*arguments) if is_last else _or_zeros(index <= level, stage, arguments)
        values.update(zip(outputs, results, strict=True))

    def result(var: jaxprs.Atom, level: int, kind: jax.ShapeDtypeStruct) -> jax.Array:
        if level == NEVER:
            return axes.zeros(kind)
        return jnp.asarray(var.val, kind.dtype) if isinstance(var, jaxprs.Literal) else values[var]

    return [result(*x) for x in zip(jaxpr.outvars, levels, types, strict=True)]


def _or_zeros(predicate: jax.Array, stage: Callable[..., PyTree], arguments: PyTree) -> PyTree:
    zeros = [axes.zeros(kind) for kind in jax.eval_shape(stage, *arguments)]
    return gate.branch(predicate, lambda: axes.unify([*stage(*arguments)], zeros), lambda: zeros)


def _stages(jaxpr: jaxprs.Jaxpr, levels: Sequence[int]) -> list[tuple[int, _Stage]]:
    """Return the stages of a program, in descending order of the largest index that needs them."""
    operations: dict[int, list[jaxprs.JaxprEqn]] = {}
    # The level of a value is the highest level of its consumers.
    known: dict[jaxprs.Atom, int] = {}

    def need(atoms: Sequence[jaxprs.Atom], levels: Sequence[int]) -> None:
        for atom, level in zip(atoms, levels, strict=True):
            if not isinstance(atom, jaxprs.Literal):
                known[atom] = max(known.get(atom, NEVER), level)

    need(jaxpr.outvars, levels)
    # Results with the level ``NEVER`` are not outputs of a stage.
    used = {x for x, level in known.items() if level > NEVER}
    # An equation with a body has one level, so bodies are not searched.
    for eqn, _ in reversed(interpret.equations(jaxpr, enter=lambda eqn, context: ())):
        level = max((known.get(x, NEVER) for x in eqn.outvars), default=NEVER)
        # Operations with effects always run. Operations on PRNG keys run too, because keys have no
        # zero. JAX counts the axis name of a collective as an effect, but this effect is not
        # visible to users.
        visible = any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)
        avals: Any = [var.aval for var in eqn.outvars]
        special = any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in avals)
        if visible or (special and level > NEVER):
            level = max(levels)
        if level > NEVER:
            operations.setdefault(level, []).insert(0, eqn)
        need(eqn.invars, [level] * len(eqn.invars))
    stages: list[tuple[int, _Stage]] = []
    for level, eqns in sorted(operations.items()):
        made = dict.fromkeys(x for eqn in eqns for x in eqn.outvars)
        read = (x for eqn in eqns for x in eqn.invars if not isinstance(x, jaxprs.Literal))
        inputs = list(dict.fromkeys(x for x in read if x not in made))
        # The inputs of a stage are outputs of stages with higher levels, which this loop reaches
        # later.
        stages.insert(0, (level, (inputs, [x for x in made if x in used], eqns)))
        used.update(inputs)
    return stages
