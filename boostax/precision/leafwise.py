# SPDX-License-Identifier: Apache-2.0
"""Change a tree leaf by leaf, so that temporaries exist for only one leaf at a time.

XLA is free to order the operations of an optimizer. XLA:CPU and XLA:TPU start the operations of all
leaves, and keep the temporaries of each until all leaves are written. So the change of each leaf
stands in a separate branch, whose condition is always true: it begins and ends at once, and is
written in place.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from boostax._core import axes, gate, jaxprs, trees
from boostax._core.interpret import JIT, equations, evaluate, excerpt, replay

PyTree = Any
# The leaf number of arrays that belong to no leaf: counts, rates.
COMMON = -1


@dataclasses.dataclass(frozen=True, order=True)
class Turn:
    """The turn in which an array is written.

    Attributes:
      leaf: number of the leaf to which the array belongs, or ``COMMON``.
      place: position among the arrays of the leaf.
    """

    leaf: int
    place: int = 0


class _Graph:
    """A program without calls, and the values of it that are computed so far.

    Attributes:
      inputs: variables of the arguments.
      outputs: variables of the results, or literals.
      known: arrays by their variables: constants, arguments, and computed values.
    """

    def __init__(self, program: jaxprs.ClosedJaxpr, given: Sequence[Any]):
        flat = jax.make_jaxpr(lambda *args: evaluate(program, args, replay, inline=JIT))(*given)
        self._eqns = [eqn for eqn, _ in equations(flat.jaxpr, enter=lambda *_: ())]
        self.inputs: list[Any] = flat.jaxpr.invars
        self.outputs: list[Any] = flat.jaxpr.outvars
        names = [*flat.jaxpr.constvars, *self.inputs]
        self.known = dict[Any, Any](zip(names, [*flat.consts, *given], strict=True))

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
            several = len(askers[var]) > 1 and len(leaves) != 1 and bool(sources[var])
            return several or (bool(askers[var]) and _sends(eqn))

        return [x for eqn in self._eqns for x in eqn.outvars if shared(x, eqn)]

    def program(self, wanted: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """Return the program that computes ``wanted`` from known values, and these values."""
        needed, eqns = set(_variables(wanted)), list[Any]()
        for eqn in reversed(self._eqns):
            if any(x in needed and x not in self.known for x in eqn.outvars):
                eqns.insert(0, eqn)
                needed.update(_variables(eqn.invars))
        inputs = [x for x in self.known if x in needed]
        given = [self.known[x] for x in inputs]
        return jaxprs.jaxpr_as_fun(excerpt(inputs, wanted, eqns)), given

    def learn(self, wanted: Sequence[Any]) -> list[Any]:
        """Compute the values of ``wanted``, and add them to ``known``."""
        run, given = self.program(wanted)
        found = run(*given)
        self.known.update(x for x in zip(wanted, found, strict=True) if _variables(x[:1]))
        return found


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [x for x in atoms if not isinstance(x, jaxprs.Literal)]


def _seen(values: list[jax.Array]) -> jax.Array:
    """Make a bool that depends on the first array with elements; False if there is none."""
    x = next((x for x in values if x.size), None)
    if x is None:
        return jnp.asarray(False)
    # On an Explicit mesh JAX refuses to take one element of a sharded array.
    sharded = any(jax.typeof(x).sharding.spec)
    return (x != 0).any() if sharded else x[(0,) * x.ndim] != 0


def _sends(eqn: jaxprs.JaxprEqn) -> bool:
    """Return whether devices communicate in ``eqn``; XLA can combine such equations."""
    inside = {x.primitive.name for x, _ in equations([eqn])}
    sent = axes.of_program(excerpt(_variables(eqn.invars), eqn.outvars, [eqn]))
    return bool(sent) or not inside.isdisjoint({"shard_map", "custom_vmap_call"})


def leaf_by_leaf(
    fn: Callable[..., PyTree], always: jax.Array, old: PyTree, args: tuple[Any, ...], turns: PyTree
) -> PyTree:
    """Return ``fn(old, *args)``, computed leaf by leaf, and array by array within a leaf.

    A value that several leaves share and that comes from several leaves, such as a global norm, is
    computed first. A value that comes from one leaf is computed again wherever it is used. XLA
    copies an array that is read after it is overwritten, so order the turns to avoid this.

    Args:
      fn: returns a tree of the types of ``old``.
      always: True, but not a constant.
      old: a tree, written in place if it is donated.
      args: the other arguments of ``fn``.
      turns: a tree like ``(old, args)`` with a ``Turn`` for each array.
    """
    program = trees.trace_once(fn, old, *args)[0].program
    leaves = jax.tree.leaves(old)
    graph = _Graph(program, jax.tree.leaves((old, args)))
    order: list[Turn] = jax.tree.leaves(turns)
    positions: dict[Turn, list[int]] = collections.defaultdict(list)
    wanted: dict[int, list[Any]] = collections.defaultdict(list)
    for i, turn in enumerate(order[: len(leaves)]):
        positions[turn].append(i)
        wanted[turn.leaf].append(graph.outputs[i])
    of = {var: turn.leaf for var, turn in zip(graph.inputs, order, strict=True)}
    graph.learn(graph.common(wanted, of))
    new = dict(enumerate(leaves))
    for turn, here in sorted(positions.items()):
        outputs = [graph.outputs[i] for i in here]
        if turn.leaf == COMMON:
            new.update(zip(here, graph.learn(outputs), strict=True))
            continue
        run, given = graph.program(outputs)

        def work(mine: list[Any], given: list[Any], go: jax.Array, run: Any = run) -> Any:
            found = run(*given)
            # The next branch's condition is a result of this one, so the next branch must wait.
            return axes.unify(found, mine), go | _seen(found)

        mine = [leaves[i] for i in here]
        once, types = trees.trace_once(work, mine, given, always)
        hold = lambda mine, given, go, types=types: axes.unify((mine, go), types)  # noqa: E731
        again = lambda *given, once=once: once(*given)  # noqa: E731
        values, always = gate.branch(always, again, hold, mine, given, always)
        new.update(zip(here, values, strict=True))
    return jax.tree.unflatten(jax.tree.structure(old), [new[i] for i in range(len(leaves))])
