# SPDX-License-Identifier: Apache-2.0
"""Change a tree leaf by leaf, so that temporaries exist for only one leaf at a time.

XLA is free to order the operations of an optimizer. XLA:CPU and XLA:TPU start the operations of all
leaves, and keep the temporaries of each until all leaves are written. So a leaf that changes
element by element is one primitive, which each compiler writes in place (``entries``). The arrays
of any other leaf are changed in separate branches, whose conditions are always true, because the
temporaries of a branch are freed at its end, and its results are written in place.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from boostax._core import axes, gate, jaxprs, trees
from boostax._core.interpret import JIT, body_of, equations, evaluate, excerpt
from boostax._core.types import PyTree
from boostax.precision import entries

Cut = entries.Cut
# The leaf numbers of arrays that belong to no leaf, such as counts, and of small params.
COMMON, SMALL = -1, 0


@dataclasses.dataclass(frozen=True, order=True)
class Turn:
    """The turn in which an array is written.

    Attributes:
      leaf: number of the leaf to which the array belongs, or ``COMMON``.
      place: position of the array among the arrays of the leaf.
      cut: the mesh and the spec of the leaf, if they are known.
    """

    leaf: int
    place: int = 0
    cut: Cut = dataclasses.field(default=None, compare=False)


class _Graph:
    """A program, and its values that are computed so far.

    Calls with one result, such as the calls of a format, are not inlined.

    Attributes:
      inputs: variables of the arguments.
      outputs: variables of the results, or literals.
      known: arrays by their variables: constants, arguments, and computed values.
    """

    def __init__(self, program: jaxprs.ClosedJaxpr, given: Sequence[Any]):
        name = jaxprs.gensym()
        self._eqns = list[Any]()
        self.inputs = [name(x.aval) for x in program.jaxpr.invars]
        self.known = dict[Any, Any](zip(self.inputs, given, strict=True))

        def constant(value: Any, aval: Any) -> Any:
            if not aval.shape and not isinstance(value, jax.Array):
                return jaxprs.Literal(value, aval)
            var = name(aval)
            self.known[var] = value
            return var

        def rule(eqn: jaxprs.JaxprEqn, operands: list[Any]) -> list[Any]:
            if eqn.primitive.name in JIT and len(eqn.outvars) > 1:
                return evaluate(body_of(eqn), operands, rule, constant)
            results: Any = [name(x.aval) for x in eqn.outvars]
            self._eqns.append(eqn.replace(invars=operands, outvars=results))
            return results

        self.outputs = evaluate(program, self.inputs, rule, constant)
        self._makers = {x: i for i, eqn in enumerate(self._eqns) for x in eqn.outvars}

    def common(self, wanted: dict[int, list[Any]], of: dict[Any, int]) -> list[Any]:
        """Return the variables that several leaves share; ``of`` maps inputs to their leaves."""
        sources = {var: {leaf} for var, leaf in of.items()}
        for eqn in self._eqns:
            found = set[int]().union(*(sources.get(x, set()) for x in _variables(eqn.invars)))
            sources.update(dict.fromkeys(eqn.outvars, found))
        askers: dict[Any, set[int]] = collections.defaultdict(set)
        for leaf, results in wanted.items():
            for var in _variables(results):
                askers[var].add(leaf)
        for eqn in reversed(self._eqns):
            for var in _variables(eqn.invars):
                askers[var] |= set[int]().union(*(askers[x] for x in eqn.outvars))

        def shared(var: Any, eqn: jaxprs.JaxprEqn) -> bool:
            leaves = sources[var] - {COMMON}
            if not askers[var] or (not leaves and not var.aval.shape):
                return bool(askers[var])
            several = len(askers[var]) > 1 and len(leaves) != 1 and bool(sources[var])
            return several or _sends(eqn)

        return [x for eqn in self._eqns for x in eqn.outvars if shared(x, eqn)]

    def program(
        self, wanted: Sequence[Any], first: Sequence[Any] = ()
    ) -> tuple[jaxprs.ClosedJaxpr, list[Any]]:
        """Return the program that computes ``wanted`` from known values, and the known values.

        The values of ``first`` come first.
        """
        found, inputs, ahead = set[int](), dict.fromkeys(first), [*_variables(wanted)]
        while ahead:
            var = ahead.pop()
            if var in self.known:
                inputs[var] = None
            elif self._makers[var] not in found:
                found.add(self._makers[var])
                ahead.extend(_variables(self._eqns[self._makers[var]].invars))
        program = excerpt([*inputs], wanted, [self._eqns[i] for i in sorted(found)])
        return program, [self.known[x] for x in inputs]

    def learn(self, wanted: Sequence[Any]) -> list[Any]:
        """Compute the values of ``wanted``, and add them to ``known``."""
        program, given = self.program(wanted)
        found = jaxprs.jaxpr_as_fun(program)(*given)
        self.known.update(x for x in zip(wanted, found, strict=True) if _variables(x[:1]))
        return found

    def change(self, here: Sequence[int], cut: Cut, always: jax.Array) -> list[Any] | None:
        """Return new arrays computed element by element, or ``None`` if that is impossible."""
        program, given = self._writing(here)
        return entries.change(program, cut, always, given) if entries.fits(program) else None

    def branch(self, here: Sequence[int], always: jax.Array) -> tuple[list[Any], jax.Array]:
        """Return new arrays, computed in a branch, and the condition of the next branch."""
        program, given = self._writing(here)

        def work(go: jax.Array, *given: jax.Array) -> Any:
            found = jaxprs.jaxpr_as_fun(program)(*given)
            # The next branch's condition is a result of this branch, so the next branch must wait.
            return axes.unify(found, [*given[: len(here)]]), go | _seen(found)

        once, types = trees.trace_once(work, always, *given)
        hold = lambda go, *old: axes.unify(([*old[: len(here)]], go), types)  # noqa: E731
        return gate.branch(always, lambda *given: once(*given), hold, always, *given)

    def _writing(self, here: Sequence[int]) -> tuple[jaxprs.ClosedJaxpr, list[Any]]:
        """Return a program whose results are written into its first arguments' buffers."""
        return self.program([self.outputs[i] for i in here], [self.inputs[i] for i in here])


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [x for x in atoms if not isinstance(x, jaxprs.Literal)]


def _seen(values: list[jax.Array]) -> jax.Array:
    """Make a bool that depends on the first array with elements; False if there is none."""
    x = next((x for x in values if x.size), None)
    if x is None:
        return jnp.asarray(False)
    # On an Explicit mesh JAX refuses to take one element of a sharded array.
    return (x != 0).any() if any(jax.typeof(x).sharding.spec) else x[(0,) * x.ndim] != 0


def _sends(eqn: jaxprs.JaxprEqn) -> bool:
    """Return whether devices communicate in ``eqn``; XLA may combine such equations."""
    inside = [x for x, _ in equations([eqn])]
    named = any(isinstance(name, str) for x in inside for name in axes.sent_over(x))
    return named or any(x.primitive.name in ("shard_map", "custom_vmap_call") for x in inside)


def leaf_by_leaf(
    fn: Callable[..., PyTree], always: jax.Array, old: PyTree, args: tuple[Any, ...], turns: PyTree
) -> PyTree:
    """Return ``fn(old, *args)``, computed leaf by leaf, and array by array within a leaf.

    A value that is computed from several leaves and used for several, such as a global norm, is
    computed first. A value from one leaf is computed again wherever it is used. XLA copies an array
    that is read after it is overwritten, so choose an order in ``turns`` without such reads.

    Args:
      fn: returns a tree of the types of ``old``.
      always: True, but not a constant.
      old: a tree, written in place if it is donated.
      args: the other arguments of ``fn``.
      turns: a tree like ``(old, args)`` with a ``Turn`` for each array.
    """
    leaves = jax.tree.leaves(old)
    graph = _Graph(trees.trace_once(fn, old, *args)[0].program, jax.tree.leaves((old, args)))
    order: list[Turn] = jax.tree.leaves(turns)
    positions: dict[int, dict[int, list[int]]] = collections.defaultdict(dict)
    wanted: dict[int, list[Any]] = collections.defaultdict(list)
    for i, turn in enumerate(order[: len(leaves)]):
        positions[turn.leaf].setdefault(turn.place, []).append(i)
        wanted[turn.leaf].append(graph.outputs[i])
    cuts = {turn.leaf: turn.cut for turn in order}
    of = {var: turn.leaf for var, turn in zip(graph.inputs, order, strict=True)}
    graph.learn(graph.common(wanted, of))
    new = dict[int, Any]()
    for leaf, places in sorted(positions.items()):
        groups = [places[place] for place in sorted(places)]
        whole = [i for group in groups for i in group]
        if leaf in (COMMON, SMALL):
            values = graph.learn([graph.outputs[i] for i in whole])
        else:
            values = graph.change(whole, cuts[leaf], always)
        new.update(zip(whole, values or (), strict=False))
        for here in groups if values is None else ():
            found = graph.change(here, cuts[leaf], always)
            if found is None:
                found, always = graph.branch(here, always)
            new.update(zip(here, found, strict=True))
    return jax.tree.unflatten(jax.tree.structure(old), [new[i] for i in range(len(leaves))])
