"""What the arrays of a saved state are measured in: the loss scale that its gradients still bear.

A scaler divides gradients for what is inside it. What stands around it, or before it in a chain,
sees them multiplied by its scale, and so is what it sums up or holds back.
"""

import itertools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from boostax._core import trees
from boostax.autoboost.nodes import Leaf, Node, Path


class Unit(NamedTuple):
    """What gradients are multiplied by at a place in a chain.

    Attributes:
      scale: the product of the scales that are known to apply to all of them.
      rest: scales of groups, and of scalers in one part of a ``partition`` or ``named_chain``: it
        can only be said whether they are the same elsewhere.
      scalers: how many there are.
    """

    scale: float
    rest: tuple[Any, ...]
    scalers: int

    def __str__(self) -> str:
        return " and ".join([f"{self.scale:g}", *(f"{found} of {way}" for way, found in self.rest)])


def unit_at(path: Path, nodes: list[Node], values: Mapping[Path, Any]) -> Unit:
    """The unit of the gradients that a state sees, from the scalers that come after it.

    Args:
      path: of the state.
      nodes: all states of the tree.
      values: arrays that stand in the place of those of ``nodes``, by their paths.
    """
    scale, rest, scalers = 1.0, list[Any](), 0
    for node in nodes:
        name, way = node.holds.scale, _way(path, node.path)
        if not name or way is None:
            continue
        scalers += 1
        leaf = node.leaves[(GetAttrKey(name),)]
        found = np.asarray(values.get(leaf.path, leaf.value), np.float64)
        if node.holds.powers:
            found = 2.0 ** (np.frexp(found)[1] - 1.0)
        if way == "" and np.all(found == found.flat[0]):
            scale *= float(found.flat[0])
        else:
            rest.append((way or "the groups", found.tolist()))
    return Unit(scale, tuple(rest), scalers)


def measured(rel: Path, leaf: Leaf) -> Literal["sum", "moment", "unknown"] | None:
    """What an array of a state is in terms of the gradients that the state sees.

    Args:
      rel: its path in the state.
      leaf: the array.

    Returns:
      ``None`` for what has nothing to do with their scale; ``"sum"`` for what is proportional to
      it, ``"moment"`` for other powers, ``"unknown"`` for states of which nothing is known.
    """
    node = leaf.node
    if node.holds.sums:
        return "sum" if trees.path_name(rel).startswith(node.holds.sums) else None
    number = leaf.owner == () and not leaf.shape  # To a lone scalar all scalars seem to belong.
    real = jnp.issubdtype(leaf.dtype, jnp.inexact)
    if leaf.owner is None or number or node.holds.params or not real:
        return None
    ours = node.cls.__module__.startswith("optax.") and node.source.startswith("ScaleBy")
    return "moment" if ours else "unknown"


def _way(path: Path, scaler: Path) -> str | None:
    """How gradients come from a state to a scaler: ``None`` if they do not, empty if all do."""
    shared = next((i for i, (a, b) in enumerate(zip(path, scaler, strict=False)) if a != b), None)
    if shared is None:
        if len(path) >= len(scaler):
            return None
        inside = scaler[len(path) :]
        parts = itertools.pairwise(inside)
        branches = any(a == GetAttrKey("inner_states") and isinstance(b, DictKey) for a, b in parts)
        return trees.path_name(inside) if branches else ""
    mine, other = path[shared], scaler[shared]
    if isinstance(mine, SequenceKey) and isinstance(other, SequenceKey):
        return "" if mine.idx < other.idx else None
    if isinstance(mine, DictKey):
        return trees.path_name(scaler[shared:])
    return None
