# SPDX-License-Identifier: Apache-2.0
"""Change a tree leaf by leaf, so that temporaries exist for only one leaf at a time.

XLA chooses the order of the operations of an optimizer. XLA:CPU and XLA:TPU start the operations of
all leaves, and free the temporaries of a leaf only when all leaves are written. So a leaf that
changes element by element is one primitive, which each compiler writes in place (see ``entries``).
The arrays of any other leaf are changed in separate branches whose conditions are always true. XLA
frees the temporaries of a branch when the branch ends, and writes the results of a branch in place.
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

# The number of the leaf for arrays that belong to no leaf, such as counts, and for all small
# params.
COMMON, SMALL = -1, 0


@dataclasses.dataclass(frozen=True, order=True)
class Order:
    """The position of an array in the order of writing.

    Attributes:
      leaf: number of the leaf to which the array belongs, or ``COMMON``.
      place: position of the array among the arrays of the leaf.
      sharding: the mesh and the spec of the leaf, or ``None`` if unknown.
    """

    leaf: int
    place: int = 0
    sharding: entries.Sharding = dataclasses.field(default=None, compare=False)


class _Graph:
    """A program, and its values that are already computed.

    Calls with one result, such as calls that encode or decode, are not inlined.

    Attributes:
      inputs: variables of the arguments.
      outputs: variables of the results, or literals.
      known: arrays by their variables: constants, arguments, and computed values.
    """

    def __init__(self, program: jaxprs.ClosedJaxpr, args: Sequence[jax.Array]):
        name = jaxprs.gensym()
        self._eqns: list[jaxprs.JaxprEqn] = []
        self.inputs = [name(aval) for aval in program.in_avals]
        self.known: dict[jaxprs.Var, jax.Array] = dict(zip(self.inputs, args, strict=True))

        def constant(value: Any, aval: Any) -> jaxprs.Atom:
            if not aval.shape and not isinstance(value, jax.Array):
                return jaxprs.Literal(value, aval)
            var = name(aval)
            self.known[var] = value
            return var

        def rule(eqn: jaxprs.JaxprEqn, operands: list[jaxprs.Atom]) -> list[jaxprs.Var]:
            if eqn.primitive.name in JIT and len(eqn.outvars) > 1:
                return evaluate(body_of(eqn), operands, rule, constant)
            results = [name(x.aval) for x in eqn.outvars]
            self._eqns.append(eqn.replace(invars=operands, outvars=results))
            return results

        self.outputs: list[jaxprs.Atom] = evaluate(program, self.inputs, rule, constant)
        self._makers = {x: i for i, eqn in enumerate(self._eqns) for x in eqn.outvars}

    def common(self, order: Sequence[Order]) -> list[jaxprs.Var]:
        """Return the variables that several leaves share; ``order`` has an entry for each input."""
        sources = {var: {x.leaf} for var, x in zip(self.inputs, order, strict=True)}
        for eqn in self._eqns:
            leaves = set[int]().union(*(sources.get(x, set()) for x in _variables(eqn.invars)))
            sources.update(dict.fromkeys(eqn.outvars, leaves))
        readers: dict[jaxprs.Var, set[int]] = collections.defaultdict(set)
        for result, x in zip(self.outputs, order, strict=False):
            for var in _variables([result]):
                readers[var].add(x.leaf)
        for eqn in reversed(self._eqns):
            leaves = set[int]().union(*(readers[x] for x in eqn.outvars))
            for var in _variables(eqn.invars):
                readers[var] |= leaves
        shared: list[jaxprs.Var] = []
        for eqn in self._eqns:
            # Communication belongs to no leaf, so that XLA may combine the collectives.
            inside = [x for x, _ in equations([eqn])]
            sends = bool(axes.named(inside))
            sends |= any(x.primitive.name in ("shard_map", "custom_vmap_call") for x in inside)
            for var in filter(readers.get, eqn.outvars):
                leaves = sources[var] - {COMMON}
                several = len(readers[var]) > 1 and len(leaves) != 1 and bool(sources[var])
                if sends or several or not (leaves or entries.aval_shape(var)):
                    shared.append(var)
        return shared

    def program(
        self, results: Sequence[jaxprs.Atom], first: Sequence[jaxprs.Var] = ()
    ) -> tuple[jaxprs.ClosedJaxpr, list[jax.Array]]:
        """Return the program that computes ``results`` from known values, and the known values.

        The first inputs of the program are ``first``.
        """
        numbers, inputs = set[int](), dict.fromkeys(first)
        pending = _variables(results)
        while pending:
            var = pending.pop()
            if var in self.known:
                inputs[var] = None
            elif self._makers[var] not in numbers:
                numbers.add(self._makers[var])
                pending.extend(_variables(self._eqns[self._makers[var]].invars))
        program = excerpt([*inputs], results, [self._eqns[i] for i in sorted(numbers)])
        return program, [self.known[x] for x in inputs]

    def learn(self, atoms: Sequence[jaxprs.Atom]) -> list[jax.Array]:
        """Compute the values of ``atoms``, and add them to ``known``."""
        program, args = self.program(atoms)
        values = jaxprs.jaxpr_as_fun(program)(*args)
        pairs = zip(atoms, values, strict=True)
        self.known.update((var, x) for atom, x in pairs for var in _variables([atom]))
        return values

    def change(
        self, indices: Sequence[int], sharding: entries.Sharding, always: jax.Array, branches: bool
    ) -> tuple[list[jax.Array] | None, jax.Array]:
        """Return the new arrays of a leaf, and the condition of the next branch.

        The arrays are computed element by element if possible, and otherwise in a branch. The new
        arrays are written into the buffers of the old arrays. With ``branches=False``, the result
        is ``None`` in place of arrays that need a branch.
        """
        old = [self.inputs[i] for i in indices]
        program, args = self.program([self.outputs[i] for i in indices], old)
        if entries.is_elementwise(program):
            new = entries.primitive().bind(always, *args, program=program, sharding=sharding)
            return new, always
        if not branches:
            return None, always

        def work(condition: jax.Array, *args: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            new = jaxprs.jaxpr_as_fun(program)(*args)
            unified = axes.unify(new, [*args[: len(old)]])
            # The condition of the next branch is a result of this branch, so that the next branch
            # must wait for this branch. The condition depends on the first array that has elements.
            x = next((x for x in new if x.size), jnp.asarray(False))
            # On an Explicit mesh, JAX refuses to read one element of a sharded array.
            is_sharded = any(jax.typeof(x).sharding.spec)
            return unified, condition | ((x != 0).any() if is_sharded else x[(0,) * x.ndim] != 0)

        replay = trees.Replay(*jax.make_jaxpr(work, return_shape=True)(always, *args))
        return gate.branch(
            always,
            lambda *args: replay(*args),
            lambda condition, *args: axes.unify(([*args[: len(old)]], condition), replay.types),
            always,
            *args,
        )


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [x for x in atoms if not isinstance(x, jaxprs.Literal)]


def leaf_by_leaf(
    fn: Callable[..., PyTree], always: jax.Array, old: PyTree, args: tuple[Any, ...], order: PyTree
) -> PyTree:
    """Return ``fn(old, *args)``, computed leaf by leaf, and array by array within a leaf.

    A value that is computed from several leaves and used for several leaves, such as a global norm,
    is computed first. A value that is computed from one leaf is computed again for each use. XLA
    copies an array that is read after it is overwritten, so choose an ``order`` without such reads.

    Args:
      fn: returns a tree of the types of ``old``.
      always: an array that is True, but not a constant of the program.
      old: a tree, written in place if it is donated.
      args: the other arguments of ``fn``.
      order: a tree like ``(old, args)`` with an ``Order`` for each array.
    """
    leaves, treedef = jax.tree.flatten(old)
    graph = _Graph(jax.make_jaxpr(fn)(old, *args), jax.tree.leaves((old, args)))
    positions: list[Order] = jax.tree.leaves(order)
    graph.learn(graph.common(positions))
    # For each leaf and each ``Order.place``, the numbers of the arrays that are written together.
    groups: dict[int, dict[int, list[int]]] = collections.defaultdict(dict)
    for i, x in enumerate(positions[: len(leaves)]):
        groups[x.leaf].setdefault(x.place, []).append(i)
    shardings = {x.leaf: x.sharding for x in positions}
    new = dict[int, jax.Array]()
    for leaf, places in sorted(groups.items()):
        parts = [places[place] for place in sorted(places)]
        indices = sum(parts, list[int]())
        if leaf in (COMMON, SMALL):
            values = graph.learn([graph.outputs[i] for i in indices])
        else:
            values, always = graph.change(indices, shardings[leaf], always, branches=False)
        new.update(zip(indices, values or (), strict=False))
        for part in parts if values is None else ():
            values, always = graph.change(part, shardings[leaf], always, branches=True)
            new.update(zip(part, values or (), strict=True))
    return jax.tree.unflatten(treedef, [new[i] for i in range(len(leaves))])
