# SPDX-License-Identifier: Apache-2.0
"""A change of a tree, one leaf after the other, so that what is in between is that of one leaf.

XLA orders the operations of an optimizer as it likes. XLA:CPU and TPU begin with those of all
leaves, and hold what each has in between until all are written. Behind a condition of its own,
which always holds, the change of a leaf begins and ends at once, and is written in place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from boostax._core import axes, costs, jaxprs, trees
from boostax._core.gate import branch
from boostax._core.interpret import JIT, evaluate, excerpt, replay, within

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


class _Equation(NamedTuple):
    eqn: jaxprs.JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class _Graph:
    """The equations of a program, the values between them numbered.

    Attributes:
      constants: literals and the like.
      known: arrays that were given or have been computed.
      inputs: the numbers of the program's inputs.
      outputs: the numbers of its results.
    """

    def __init__(self, program: jaxprs.ClosedJaxpr, given: Sequence[Any]):
        self.constants: dict[int, Any] = {}
        self.known: dict[int, Any] = {}
        self._eqns: list[_Equation] = []
        self._count = 0
        self.inputs = [self._new() for _ in given]
        self.known.update(zip(self.inputs, given, strict=True))
        self.outputs = evaluate(program, self.inputs, self._add, self._constant, inline=JIT)

    def _new(self) -> int:
        self._count += 1
        return self._count

    def _constant(self, value: Any, aval: Any = None) -> int:
        del aval
        number = self._new()
        self.constants[number] = value
        return number

    def _add(self, eqn: jaxprs.JaxprEqn, operands: list[int]) -> tuple[int, ...]:
        outputs = tuple(self._new() for _ in eqn.outvars)
        self._eqns.append(_Equation(eqn, tuple(operands), outputs))
        return outputs

    def common(self, wanted: dict[int, list[int]], of: dict[int, int]) -> list[int]:
        """Return shared values that several leaves want; ``of`` has the leaves of inputs."""
        sources = {number: {leaf} for number, leaf in of.items()}
        for each in self._eqns:
            found = set[int]().union(*(sources.get(x, set()) for x in each.inputs))
            sources.update(dict.fromkeys(each.outputs, found))
        askers: dict[int, set[int]] = {}
        for leaf, numbers in wanted.items():
            for number in numbers:
                askers.setdefault(number, set()).add(leaf)
        for each in reversed(self._eqns):
            found = set[int]().union(*(askers.get(x, set()) for x in each.outputs))
            for number in each.inputs:
                askers.setdefault(number, set()).update(found)

        def shared(number: int, each: _Equation) -> bool:
            asking, leaves = askers.get(number, set()), sources[number] - {COMMON}
            several = len(asking) > 1 and len(leaves) != 1 and bool(sources[number])
            return several or (bool(asking) and _sends(each.eqn))

        return [x for each in self._eqns for x in each.outputs if shared(x, each)]

    def needs(self, wanted: Iterable[int]) -> tuple[list[_Equation], list[int]]:
        """Return the equations that lead from known values to these, and those values."""
        needed, eqns = set(wanted), list[_Equation]()
        for each in reversed(self._eqns):
            if any(x in needed and x not in self.known for x in each.outputs):
                eqns.append(each)
                needed.update(each.inputs)
        return eqns[::-1], sorted(needed & self.known.keys())

    def learn(self, numbers: Sequence[int]) -> None:
        """Compute values and keep them."""
        eqns, _ = self.needs(numbers)
        found = _run(eqns, self.constants | self.known, numbers)
        self.known.update(zip(numbers, found, strict=True))


def _seen(values: list[jax.Array]) -> jax.Array:
    """Make a bool that depends on the first of some arrays; False if all are empty."""
    for x in values:
        if x.size and any(jax.typeof(x).sharding.spec):
            # Of one shard no element can be taken where types say how arrays are sharded.
            return (x != 0).any()
        if x.size:
            return x[(0,) * x.ndim] != 0
    return jnp.asarray(False)


def _sends(eqn: jaxprs.JaxprEqn) -> bool:
    """Whether devices exchange something in it: XLA joins such equations, if it can."""
    given = [x for x in eqn.invars if not isinstance(x, jaxprs.Literal)]
    islands = any(x.primitive.name in ("shard_map", "custom_vmap_call") for x, _ in within(eqn))
    return islands or bool(costs.axes_of(excerpt(given, eqn.outvars, [eqn])))


def _run(eqns: Sequence[_Equation], known: dict[int, Any], wanted: Sequence[int]) -> list[Any]:
    values = dict(known)
    for each in eqns:
        found = replay(each.eqn, [values[x] for x in each.inputs])
        values.update(zip(each.outputs, found, strict=True))
    return [values[x] for x in wanted]


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
    places: dict[tuple[int, int], list[int]] = {}
    wanted: dict[int, list[int]] = {}
    for place, turn in enumerate(when[: len(leaves)]):
        places.setdefault((turn.leaf, turn.place), []).append(place)
        wanted.setdefault(turn.leaf, []).append(graph.outputs[place])
    leaf_of = {number: turn.leaf for number, turn in zip(graph.inputs, when, strict=True)}
    graph.learn(graph.common(wanted, leaf_of))
    graph.learn(wanted.get(COMMON, []))
    new = {i: graph.known.get(number) for i, number in enumerate(graph.outputs)}
    for (leaf, _), here in sorted(places.items()):
        if leaf == COMMON:
            continue
        outputs = [graph.outputs[i] for i in here]
        eqns, needed = graph.needs(outputs)

        def work(mine: list[Any], given: list[Any], go: jax.Array, made: Any) -> Any:
            eqns, needed, outputs = made
            known = graph.constants | dict(zip(needed, given, strict=True))
            found = _run(eqns, known, outputs)
            # Whether the next one runs is a result of this one, so that it has to wait.
            return axes.unify(found, mine), go | _seen(found)

        mine, given = [leaves[i] for i in here], [graph.known[x] for x in needed]
        run = functools.partial(work, made=(eqns, needed, outputs))
        replay, types = trees.trace_once(run, mine, given, always)
        hold = lambda mine, given, go, types=types: axes.unify((mine, go), types)  # noqa: E731
        again = lambda *given, replay=replay: replay(*given)  # noqa: E731
        values, always = branch(always, again, hold, mine, given, always)
        new.update(zip(here, values, strict=True))
    return jax.tree.unflatten(jax.tree.structure(old), [new[i] for i in range(len(leaves))])
