# SPDX-License-Identifier: Apache-2.0
"""A change of a tree, one leaf after the other, so that what is in between is that of one leaf.

XLA orders the operations of an optimizer as it likes. XLA:CPU and TPU begin with those of all
leaves, and hold what each has in between until all are written. Behind a condition of its own,
which always holds, the change of a leaf begins and ends at once, and is written in place.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from boostax._core import axes, jaxprs, trees
from boostax._core.gate import branch
from boostax._core.interpret import JIT, equations, evaluate, excerpt, replay

PyTree = Any
# What belongs to no leaf: counts, rates.
COMMON = -1


@dataclasses.dataclass(frozen=True)
class Turn:
    """When an array is written.

    Attributes:
      leaf: the number of the leaf that it belongs to, or ``COMMON``.
      place: among the arrays of the leaf.
    """

    leaf: int
    place: int = 0


class _Graph:
    """A program without calls, and the values that have been computed of it.

    Attributes:
      inputs: the variables of its arguments.
      outputs: those of its results, or literals.
      known: arrays by their variables: constants, arguments, and what was computed.
    """

    def __init__(self, program: jaxprs.ClosedJaxpr, given: Sequence[Any]):
        flat = jax.make_jaxpr(lambda *args: evaluate(program, args, replay, inline=JIT))(*given)
        self._eqns = [eqn for eqn, _ in equations(flat.jaxpr, enter=lambda *_: ())]
        self.inputs: list[Any] = flat.jaxpr.invars
        self.outputs: list[Any] = flat.jaxpr.outvars
        names = [*flat.jaxpr.constvars, *self.inputs]
        self.known = dict[Any, Any](zip(names, [*flat.consts, *given], strict=True))

    def common(self, wanted: dict[int, list[Any]], of: dict[Any, int]) -> list[Any]:
        """Return shared values that several leaves want; ``of`` has the leaves of inputs."""
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

        def shared(var: Any, eqn: Any) -> bool:
            leaves = sources[var] - {COMMON}
            several = len(askers[var]) > 1 and len(leaves) != 1 and bool(sources[var])
            return several or (bool(askers[var]) and _sends(eqn))

        return [x for eqn in self._eqns for x in eqn.outvars if shared(x, eqn)]

    def program(self, wanted: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """Return what leads from known values to wanted ones, and those known values."""
        needed, eqns = set(_variables(wanted)), list[Any]()
        for eqn in reversed(self._eqns):
            if any(x in needed and x not in self.known for x in eqn.outvars):
                eqns.insert(0, eqn)
                needed.update(_variables(eqn.invars))
        inputs = [x for x in self.known if x in needed]
        given = [self.known[x] for x in inputs]
        return jaxprs.jaxpr_as_fun(excerpt(inputs, wanted, eqns)), given

    def learn(self, wanted: Sequence[Any]) -> list[Any]:
        """Compute values and keep them."""
        run, given = self.program(wanted)
        found = run(*given)
        pairs = zip(wanted, found, strict=True)
        self.known.update((x, value) for x, value in pairs if _variables([x]))
        return found


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [x for x in atoms if not isinstance(x, jaxprs.Literal)]


def _seen(values: list[jax.Array]) -> jax.Array:
    """Make a bool that depends on the first of some arrays; False if all are empty."""
    for x in values:
        if x.size and any(jax.typeof(x).sharding.spec):
            # Of one shard no element can be taken where types say how arrays are sharded.
            return (x != 0).any()
        if x.size:
            return x[(0,) * x.ndim] != 0
    return jnp.asarray(False)


def _sends(eqn: Any) -> bool:
    """Whether devices exchange something in it: XLA joins such equations, if it can."""
    islands = any(
        x.primitive.name in ("shard_map", "custom_vmap_call") for x, _ in equations([eqn])
    )
    sent = axes.of_program(excerpt(_variables(eqn.invars), eqn.outvars, [eqn]))
    return islands or bool(sent)


def leaf_by_leaf(
    fn: Callable[..., PyTree],
    always: jax.Array,
    old: PyTree,
    args: tuple[PyTree, ...],
    turns: PyTree,
) -> PyTree:
    """``fn(old, *args)``, one leaf after the other, and of a leaf one array after the other.

    What several leaves want and is of several, such as a global norm, is computed before; what is
    of one leaf, as often as it is wanted. What is computed from an array and written before it
    finds it as it was; after it, XLA keeps a copy.

    Args:
      fn: returns a tree of the types of ``old``.
      always: True, but not a constant.
      old: a tree, written in place where it is donated.
      args: what else ``fn`` takes.
      turns: a tree like ``(old, args)``, a ``Turn`` for each array.
    """
    whole, _ = trees.trace_once(fn, old, *args)
    leaves = jax.tree.leaves(old)
    graph = _Graph(whole.program, jax.tree.leaves((old, args)))
    when: list[Turn] = jax.tree.leaves(turns)
    places: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    wanted: dict[int, list[Any]] = collections.defaultdict(list)
    for place, turn in enumerate(when[: len(leaves)]):
        places[turn.leaf, turn.place].append(place)
        wanted[turn.leaf].append(graph.outputs[place])
    of = {var: turn.leaf for var, turn in zip(graph.inputs, when, strict=True)}
    graph.learn(graph.common(wanted, of))
    new = dict(enumerate(leaves))
    for (leaf, _), here in sorted(places.items()):
        outputs = [graph.outputs[i] for i in here]
        if leaf == COMMON:
            new.update(zip(here, graph.learn(outputs), strict=True))
            continue
        run, given = graph.program(outputs)

        def work(mine: list[Any], given: list[Any], go: jax.Array, run: Any = run) -> Any:
            found = run(*given)
            # Whether the next one runs is a result of this one, so that it has to wait.
            return axes.unify(found, mine), go | _seen(found)

        mine = [leaves[i] for i in here]
        once, types = trees.trace_once(work, mine, given, always)
        hold = lambda mine, given, go, types=types: axes.unify((mine, go), types)  # noqa: E731
        again = lambda *given, once=once: once(*given)  # noqa: E731
        values, always = branch(always, again, hold, mine, given, always)
        new.update(zip(here, values, strict=True))
    return jax.tree.unflatten(jax.tree.structure(old), [new[i] for i in range(len(leaves))])
