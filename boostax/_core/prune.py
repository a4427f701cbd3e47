"""The part of an optimizer's state that belongs to some of the params, and back."""

from typing import Any, NamedTuple

import jax
import optax

from boostax._core import trees

PyTree = Any
Path = tuple[Any, ...]


class Pruning(NamedTuple):
    """How a state for fewer params lies within the state for all of them.

    What ``init`` makes of fewer params says it: a leaf that is missing there belongs to a param
    that is missing. That holds through every wrapper, and whatever shape a state leaf has.

    Attributes:
      structure: of the smaller state.
      paths: of its leaves, in order.
    """

    structure: Any
    paths: tuple[Path, ...]

    def take(self, state: PyTree) -> PyTree:
        """The smaller state out of the larger one; nothing is copied."""
        leaves = dict(jax.tree_util.tree_leaves_with_path(state))
        return self.structure.unflatten([leaves[path] for path in self.paths])

    def put(self, state: PyTree, part: PyTree) -> PyTree:
        """The larger state with the smaller one's leaves in it."""
        new = dict(zip(self.paths, jax.tree.leaves(part), strict=True))
        return jax.tree_util.tree_map_with_path(lambda path, old: new.get(path, old), state)


def pruning(tx: optax.GradientTransformation, params: PyTree, fewer: PyTree, who: str) -> Pruning:
    """Where the state of ``tx`` for ``fewer`` params, the others masked, lies in that for all.

    Raises:
      ValueError: ``tx`` keeps something whose shape or place depends on which params there are.
    """
    # Shapes alone: an init may refuse params that differ from replica to replica.
    bare = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)  # noqa: E731
    whole = dict(jax.tree_util.tree_leaves_with_path(jax.eval_shape(tx.init, bare(params))))
    state = jax.eval_shape(tx.init, bare(fewer))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for path, leaf in leaves:
        there = whole.get(path)
        if there is None or (there.shape, there.dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(
                f"{who}: inner must keep its state leaf by leaf, got one whose "
                f"{trees.path_name(path) or 'only leaf'!r} depends on which leaves there are. A "
                "flattened optimizer cannot be frozen in part: use it on the leaves."
            )
    return Pruning(jax.tree.structure(state), tuple(path for path, _ in leaves))
