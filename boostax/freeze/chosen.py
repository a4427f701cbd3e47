"""One of several changes to parts of a whole, decided in the program."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from boostax._core import axes, trees
from boostax._core.gate import branch
from boostax.freeze.joined import Joined, Unlike
from boostax.freeze.stages import staged

PyTree = Any
Change = Callable[[PyTree], PyTree]


class Part(NamedTuple):
    """Where a part lies in a whole.

    Attributes:
      take: the part of a tree like the whole; nothing is copied.
      put: the whole with a new part in it.
    """

    take: Callable[[PyTree], PyTree]
    put: Callable[[PyTree, PyTree], PyTree]


def chosen(
    index: jax.Array, changes: Sequence[Change], parts: Sequence[Part], whole: PyTree, alike: bool
) -> PyTree:
    """The whole after the change of that index to the part of that index; the rest in place.

    Args:
      index: i32 scalar, the same on all replicas.
      changes: from a part to a part of the same structure and types.
      parts: of each change the part.
      whole: a tree of arrays.
      alike: whether the changes may differ in nothing but scalars, and what one part has in common
        with the last, all between have. If they turn out to, all are compiled as one.
    """
    if alike:
        try:
            return _at_once(index, changes, parts, whole)
        except Unlike:
            pass
    return _in_turn(index, changes, parts, whole)


def _in_turn(
    index: jax.Array, changes: Sequence[Change], parts: Sequence[Part], whole: PyTree
) -> PyTree:
    """A condition for each: written in place, where XLA:CPU and XLA:GPU copy what a switch returns.

    What one of the parts has does not pass through the others' conditions.
    """
    for place, (change, part) in enumerate(zip(changes, parts, strict=True)):
        old = part.take(whole)
        replay, types = trees.trace_once(change, old)
        # Either may vary over axes over which the other does not.
        new = branch(
            index == place,
            lambda given, replay=replay: axes.unify(replay(given), given),
            lambda given, types=types: axes.unify(given, types),
            old,
        )
        whole = part.put(whole, new)
    return whole


def _at_once(
    index: jax.Array, changes: Sequence[Change], parts: Sequence[Part], whole: PyTree
) -> PyTree:
    """One program for all, of which runs what the part at the index needs.

    Raises:
      Unlike: the changes differ in more than scalars, or do more than to compute.
    """
    leaves, treedef = jax.tree.flatten(whole)
    numbers = treedef.unflatten(range(len(leaves)))
    joined, found = Joined(), {}
    for change, part in zip(changes, parts, strict=True):
        places, structure = jax.tree.flatten(part.take(numbers))
        given = [leaves[place] for place in places]
        flat = lambda *args, c=change, s=structure: jax.tree.leaves(c(s.unflatten(args)))  # noqa: E731
        atoms = joined.add(jax.make_jaxpr(flat)(*given), given)
        for place, atom in zip(places, atoms, strict=True):
            found.setdefault(place, []).append(atom)
    wanted = [joined.common(tuple(atoms)) for atoms in found.values()]
    levels = [len(atoms) - 1 for atoms in found.values()]
    old = [leaves[place] for place in found]
    for place, new in zip(
        found, staged(lambda: joined.run(wanted, index), levels, index, old), strict=True
    ):
        leaves[place] = new
    return treedef.unflatten(leaves)
