# SPDX-License-Identifier: Apache-2.0
"""The optimizers of all depths as one program, in which what they have in common is there once.

The optimizer's step at one depth is that at another, but for leaves that are missing and for what
is summed over leaves: scalars, such as a global norm. So each leaf is computed once, from scalars
that are chosen by the depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import jaxprs
from boostax._core.interpret import JIT, evaluate, replay
from boostax.freeze.stages import is_seen, staged

PyTree = Any
Change = Callable[..., tuple[PyTree, ...]]
# Up to so many elements constants of NumPy are the same if they are equal; all else if it is one
# object.
_SMALL = 4096


class Unlike(Exception):
    """The programs differ in more than scalars, or do more than to compute."""


class Atom(NamedTuple):
    """A result of a node."""

    node: int
    place: int = 0


class _Node(NamedTuple):
    """What is computed once, in however many programs it stands.

    Attributes:
      sort: what it does, by which nodes are the same; ``None`` of what is given or chosen.
      inputs: whose results it takes.
      types: of its own results.
      compute: these, by those of its inputs and by the index.
    """

    sort: Any
    inputs: tuple[Atom, ...]
    types: Sequence[Any]
    compute: Callable[[Sequence[Any], jax.Array], Sequence[Any]]


class Joined:
    """The operations of several programs, each of them once."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._known: dict[Any, int] = {}
        self._common: dict[tuple[Atom, ...], Atom] = {}

    def add(self, program: jaxprs.ClosedJaxpr, given: Sequence[Any]) -> list[Atom]:
        """The results of a program applied to ``given``, arrays told apart by identity.

        Raises:
          Unlike: it does more than its results say; who would do it once for all programs?
        """

        def operation(eqn: Any, inputs: Sequence[Atom]) -> list[Atom]:
            if is_seen(eqn):
                raise Unlike
            params: Any = tuple(sorted(eqn.params.items()))
            try:
                hash(params)
            except TypeError:
                params = id(eqn)
            types = [var.aval for var in eqn.outvars]
            compute = lambda inputs, index: replay(eqn, inputs)  # noqa: E731
            node = self._operation(_Node((eqn.primitive, params), tuple(inputs), types, compute))
            return [Atom(node, place) for place in range(len(types))]

        atoms = [self._given(x, jax.typeof(x)) for x in given]
        return evaluate(program, atoms, operation, self._given, inline=JIT)

    def common(self, atoms: tuple[Atom, ...]) -> Atom:
        """What is the atom of a place when the index is that place.

        Raises:
          Unlike: it would be a choice among what is no scalar.
        """
        if len(set(atoms)) == 1:
            return atoms[0]
        if atoms not in self._common:
            self._common[atoms] = self._chosen(atoms)
        return self._common[atoms]

    def _chosen(self, atoms: tuple[Atom, ...]) -> Atom:
        nodes = [self._nodes[atom.node] for atom in atoms]
        types = [node.types[atom.place] for node, atom in zip(nodes, atoms, strict=True)]
        if len({(kind.shape, kind.dtype) for kind in types}) > 1:
            raise Unlike
        if types[0].shape == ():
            return Atom(self._node(("choice", atoms), _Node(None, atoms, types[:1], _at_index)))
        sorts = {(node.sort, atom.place) for node, atom in zip(nodes, atoms, strict=True)}
        if len(sorts) > 1 or nodes[0].sort is None:
            raise Unlike
        columns = zip(*(node.inputs for node in nodes), strict=True)
        inputs = tuple(map(self.common, columns))
        return Atom(self._operation(nodes[0]._replace(inputs=inputs)), atoms[0].place)

    def run(self, wanted: Sequence[Atom], index: jax.Array) -> list[Any]:
        """The values of atoms, by the nodes that they need: of each program there are all."""
        needed = {atom.node for atom in wanted}
        for number in reversed(range(len(self._nodes))):
            if number in needed:
                needed |= {atom.node for atom in self._nodes[number].inputs}
        values: dict[int, Sequence[Any]] = {}
        for number in sorted(needed):
            node = self._nodes[number]
            inputs = [values[atom.node][atom.place] for atom in node.inputs]
            values[number] = node.compute(inputs, index)
        return [values[atom.node][atom.place] for atom in wanted]

    def _node(self, key: Any, node: _Node) -> int:
        if key not in self._known:
            self._known[key] = len(self._nodes)
            self._nodes.append(node)
        return self._known[key]

    def _operation(self, node: _Node) -> int:
        return self._node((node.sort, node.inputs), node)

    def _given(self, x: Any, aval: Any) -> Atom:
        key: Any = id(x)
        # Arrays of JAX may lie elsewhere, or be those of a trace.
        if not isinstance(x, jax.Array) and aval.size <= _SMALL:
            # By their bits: zeros have a sign.
            key = str(aval), np.asarray(x, aval.dtype).tobytes()
        return Atom(self._node(key, _Node(None, (), (aval,), lambda inputs, index: [x])))


def _at_index(scalars: Sequence[Any], index: jax.Array) -> Sequence[Any]:
    """Selects the scalar at ``index``, the last beyond them."""
    # Not selections: XLA would put all of them into every operation that uses the scalar.
    last = jnp.minimum(index, len(scalars) - 1)
    return [lax.switch(last, [lambda x=x: jnp.asarray(x) for x in scalars])]


def at_once(
    index: jax.Array, changes: Sequence[tuple[Change, Change]], whole: tuple[PyTree, ...]
) -> Any:
    """The whole after the change of that index, written in place; nothing else of it is run.

    Args:
      index: i32 scalar, the same on all replicas.
      changes: for each index what takes a part of the whole, and what changes it, keeping its
        structure and types; what one part has in common with the last, all between have.
      whole: trees of arrays.

    Raises:
      Unlike: the changes differ in more than scalars, or do more than to compute.
    """
    leaves, treedef = jax.tree.flatten(whole)
    numbers = treedef.unflatten(range(len(leaves)))
    joined, found = Joined(), dict[int, list[Atom]]()
    for take, change in changes:
        part = take(*numbers)
        program = jax.make_jaxpr(change)(*jax.tree.map(lambda place: leaves[place], part))
        places = jax.tree.leaves(part)
        atoms = joined.add(program, [leaves[place] for place in places])
        for place, atom in zip(places, atoms, strict=True):
            found.setdefault(place, []).append(atom)
    wanted = [joined.common(tuple(atoms)) for atoms in found.values()]
    levels = [len(atoms) - 1 for atoms in found.values()]
    old = [leaves[place] for place in found]
    new = staged(lambda: joined.run(wanted, index), levels, index, old)
    for place, leaf in zip(found, new, strict=True):
        leaves[place] = leaf
    return treedef.unflatten(leaves)
