"""Programs that are much alike, as one: what they have in common is there once.

The optimizer's step at one depth is that at another, but for leaves that are missing and for what
is summed over leaves: scalars, such as a global norm. So the leaves of all depths come out of one
program, in which those scalars are chosen by the depth.
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
from boostax.freeze.stages import seen

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
      types: of its results.
      inputs: whose results it takes.
      compute: its results, by those of its inputs and by the index.
      eqn: the equation that it stems from, if it does.
    """

    types: tuple[Any, ...]
    inputs: tuple[Atom, ...]
    compute: Callable[[Sequence[Any], jax.Array], Sequence[Any]]
    eqn: Any = None


class Joined:
    """The operations of several programs, each of them once."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._known: dict[Any, int] = {}
        self._found: dict[tuple[Atom, ...], Atom | None] = {}

    def add(self, closed: jaxprs.ClosedJaxpr, given: Sequence[Any]) -> list[Atom]:
        """The results of a program applied to ``given``, arrays told apart by identity.

        Raises:
          Unlike: it does more than its results say; who would do it once for all programs?
        """

        def operation(eqn: Any, inputs: Sequence[Atom]) -> list[Atom]:
            if seen(eqn):
                raise Unlike
            node = self._operation(eqn, tuple(inputs))
            return [Atom(node, place) for place in range(len(eqn.outvars))]

        atoms = [self._given(x, jax.typeof(x)) for x in given]
        return evaluate(closed, atoms, operation, self._given, inline=JIT)

    def common(self, atoms: tuple[Atom, ...]) -> Atom:
        """What is the atom of a place when the index is that place.

        Raises:
          Unlike: it would be a choice among what is no scalar.
        """
        if len(set(atoms)) == 1:
            return atoms[0]
        if atoms not in self._found:
            self._found[atoms] = self._common(atoms)
        found = self._found[atoms]
        if found is None:
            raise Unlike
        return found

    def run(self, wanted: Sequence[Atom], index: jax.Array) -> list[Any]:
        """The values of atoms, with what else they need."""
        needed = {atom.node for atom in wanted}
        for number in reversed(range(len(self._nodes))):
            if number in needed:
                needed |= {atom.node for atom in self._nodes[number].inputs}
        values: dict[int, Sequence[Any]] = {}
        # Inputs were there before what uses them.
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

    def _given(self, x: Any, aval: Any) -> Atom:
        key: Any = id(x)
        # Arrays of JAX may lie elsewhere, or be those of a trace.
        if not isinstance(x, jax.Array) and aval.size <= _SMALL:
            # By their bits: zeros have a sign.
            key = str(aval), np.asarray(x, aval.dtype).tobytes()
        return Atom(self._node(("given", key), _Node((aval,), (), lambda inputs, index: [x])))

    def _operation(self, eqn: Any, inputs: tuple[Atom, ...]) -> int:
        types = tuple(var.aval for var in eqn.outvars)
        compute = lambda inputs, index: replay(eqn, inputs)  # noqa: E731
        return self._node((_sort(eqn), inputs), _Node(types, inputs, compute, eqn))

    def _common(self, atoms: tuple[Atom, ...]) -> Atom | None:
        nodes = [self._nodes[atom.node] for atom in atoms]
        types = [node.types[atom.place] for node, atom in zip(nodes, atoms, strict=True)]
        if len({(kind.shape, kind.dtype) for kind in types}) > 1:
            return None
        if types[0].shape == ():
            return Atom(self._node(("choice", atoms), _Node((types[0],), atoms, _at_index)))
        if any(node.eqn is None for node in nodes):
            return None
        sorts = {(*_sort(node.eqn), atom.place) for node, atom in zip(nodes, atoms, strict=True)}
        if len(sorts) > 1:
            return None
        columns = zip(*(node.inputs for node in nodes), strict=True)
        try:
            inputs = tuple(map(self.common, columns))
        except Unlike:
            return None
        return Atom(self._operation(nodes[0].eqn, inputs), atoms[0].place)


def _at_index(scalars: Sequence[Any], index: jax.Array) -> Sequence[Any]:
    """Selects the scalar at ``index``, the last beyond them."""
    # Not selections: XLA would put all of them into every operation that uses the scalar.
    last = jnp.minimum(index, len(scalars) - 1)
    return [lax.switch(last, [lambda x=x: jnp.asarray(x) for x in scalars])]


def _sort(eqn: Any) -> tuple[Any, Any]:
    """By which operations are the same."""
    params: Any = tuple(sorted(eqn.params.items()))
    try:
        hash(params)
    except TypeError:
        params = id(eqn)
    return eqn.primitive, params
