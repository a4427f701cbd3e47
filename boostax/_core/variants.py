# SPDX-License-Identifier: Apache-2.0
"""Find the variants of a step that is compiled once for each static choice of what it does.

``scheduled_freeze`` has them: a variant is the depth, the number of frozen groups, a Python integer
that is given to ``update`` by the keyword ``depth``. Its state has a method ``coming()``: the
variant of the next call, an i32 scalar. A train step asks the ``variants`` of its transformation's
``update``, a ``boostax.freeze.scheduled.Freezing``, and knows nothing else of freezing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax

from boostax._core import trees

PyTree = Any


def variants_of(tx: optax.GradientTransformation) -> Any:
    """Return its variants; ``None`` if a step of it is compiled once."""
    return getattr(tx.update, "variants", None)


class Pruning(NamedTuple):
    """Says how a state for fewer params lies within the state for all of them.

    What ``init`` makes of fewer params says it: a leaf that is missing there belongs to a param
    that is missing. That holds through every wrapper, and whatever shape a state leaf has.

    Attributes:
      whole: structure of the larger state.
      part: structure of the smaller one.
      places: of its leaves, in order, the numbers that they have in the larger one.
    """

    whole: Any
    part: Any
    places: tuple[int, ...]

    def take(self, state: PyTree) -> PyTree:
        """Take the smaller state out of the larger one; nothing is copied."""
        return self.take_of(self.whole.flatten_up_to(state))

    def take_of(self, leaves: Sequence[Any]) -> PyTree:
        """Do the same with the larger one's leaves."""
        return self.part.unflatten([leaves[place] for place in self.places])

    def put(self, state: PyTree, part: PyTree) -> PyTree:
        """Return the larger state with the smaller one's leaves in it."""
        return self.put_among(self.whole.flatten_up_to(state), part)

    def put_among(self, leaves: list[Any], part: PyTree) -> PyTree:
        """Do the same with the larger one's leaves, which change."""
        for place, leaf in zip(self.places, self.part.flatten_up_to(part), strict=True):
            leaves[place] = leaf
        return self.whole.unflatten(leaves)


def pruning(tx: optax.GradientTransformation, params: PyTree, fewer: PyTree, who: str) -> Pruning:
    """Find where the state of ``tx`` for ``fewer`` params, the others masked, lies in that for all.

    Raises:
      ValueError: ``tx`` keeps something whose shape or place depends on which params there are.
    """
    # Shapes alone: an init may refuse params that differ from replica to replica.
    bare = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)  # noqa: E731
    whole, structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(tx.init, bare(params)))
    there = {path: (place, leaf) for place, (path, leaf) in enumerate(whole)}
    state = jax.eval_shape(tx.init, bare(fewer))
    places: list[int] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        place, found = there.get(path, (-1, None))
        if found is None or (found.shape, found.dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(
                f"{who}: inner must keep its state leaf by leaf, got one whose "
                f"{trees.path_name(path) or 'only leaf'!r} depends on which leaves there are. A "
                "flattened optimizer cannot be frozen in part: use it on the leaves."
            )
        places.append(place)
    return Pruning(structure, jax.tree.structure(state), tuple(places))
