# SPDX-License-Identifier: Apache-2.0
"""An optimizer state as a list of the states in it, each with the arrays that are its own.

An array of a saved state is measured in the loss scale that its gradients still bear: a scaler
divides gradients for what is inside it. What stands around it, or before it in a chain, sees them
multiplied by its scale, and so is what it sums up or holds back.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from boostax._core import trees
from boostax._core.replicas import PerReplica
from boostax.accumulate.window import AccumulateState
from boostax.config.states import EQUIVALENTS, Holds, holds

PyTree = Any
Path = tuple[Any, ...]


class Leaf(NamedTuple):
    """An array of a state.

    Attributes:
      path: where it lies in the whole tree.
      value: the array, or a number in its place.
      own: whether each replica has one to itself.
      node: the state in which it is.
      owner: path of the param to which it belongs, if it belongs to one.
    """

    path: Path
    value: Any
    own: bool
    node: "Node"
    owner: Path | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array, with the dimension of replicas if it has one."""
        return np.shape(self.value)

    @property
    def dtype(self) -> Any:
        """Of the array, or of the one that a number stands for."""
        return getattr(self.value, "dtype", None) or jnp.result_type(self.value)


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A state within an optimizer state.

    Attributes:
      cls: its class; ``None`` for what belongs to no NamedTuple.
      path: where it lies.
      leaves: its arrays by their paths in it; not those of states inside it.
      value: the state itself.
      source: name of the class that it was made from.
    """

    cls: type | None
    path: Path
    leaves: dict[Path, Leaf]
    value: Any
    source: str

    @property
    def labels(self) -> frozenset[str]:
        """The names on the way to it, by which ``partition`` and ``named_chain`` tell parts."""
        return frozenset(str(key.key) for key in self.path if isinstance(key, DictKey))

    @property
    def holds(self) -> Holds:
        """What its fields are."""
        return holds(self.cls)

    def opened(self, values: Mapping[Path, Any]) -> int:
        """How many micro-steps are in its open window; 0 for one that has none.

        Args:
          values: arrays that stand in the place of its own, by their paths.
        """
        leaf = self.leaves.get((GetAttrKey(self.holds.opened),))
        return 0 if leaf is None else int(values.get(leaf.path, leaf.value))


def read(tree: PyTree, params: PyTree) -> list[Node]:
    """The states of a tree, outermost first.

    A state is a NamedTuple. The containers of the params are none, nor are the parts of which
    boostax's own states are made, nor Optax's ``MaskedNode`` and ``WrappedScheduleState``.
    """
    containers = set(map(type, trees.find(params, lambda _: True)))
    owners = dict(jax.tree_util.tree_leaves_with_path(params))
    rest = Node(None, (), {}, None, "no state")
    found = [rest]

    def visit(path: Path, x: Any, node: Node, rel: Path, own: bool) -> None:
        other = None if isinstance(x, tuple) else EQUIVALENTS.get(type(x).__name__)
        if other is not None and all(hasattr(x, name) for name in other.fields):
            # One of Flax's or jmp's scalers, which are no NamedTuples.
            scaler = Node(type(x), path, {}, x, type(x).__name__)
            for key in map(GetAttrKey, other.fields):
                value = getattr(x, key.name)
                scaler.leaves[(key,)] = Leaf((*path, key), value, False, scaler, None)
            found.append(scaler)
            return
        if isinstance(x, PerReplica):
            visit((*path, GetAttrKey("local")), x.local, node, rel, True)
            return
        children = _children(x)
        if children is None:
            node.leaves[rel] = Leaf(path, x, own, node, _owner(rel, x, owners))
            return
        if _is_state(x) and type(x) not in containers:
            node, rel = Node(type(x), path, {}, x, type(x).__name__), ()
            found.append(node)
        for key, child in children:
            visit((*path, key), child, node, (*rel, key), own)

    visit((), tree, rest, (), False)
    return [node for node in found if node.leaves]


def _children(x: Any) -> list[tuple[Any, Any]] | None:
    """Keys and children of a node, ``None`` for a leaf."""
    if x is None:
        return []
    pairs = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]
    if len(pairs) == 1 and not pairs[0][0]:
        return None
    return [(path[0], child) for path, child in pairs]


def _is_state(x: Any) -> bool:
    if not (isinstance(x, tuple) and hasattr(x, "_fields")):
        return False
    name, module = type(x).__name__, type(x).__module__
    if module.startswith("boostax."):
        return name.endswith("State")
    return name not in ("MaskedNode", "WrappedScheduleState")


def translated(node: Node) -> Node | None:
    """A state of another library as the one of boostax that does its work, or ``None``.

    A window of boostax as that of ``MultiSteps``, which has no weights. That holds the mean of the
    gradients so far, ``accumulate`` their sum.
    """
    found = EQUIVALENTS.get(node.source)
    if found is None:
        return None
    count, ours = node.opened({}), node.cls is AccumulateState
    weighted = ours and (GetAttrKey("window"), GetAttrKey("weight")) in node.leaves
    leaves: dict[Path, Leaf] = {}
    for old, new in found.fields.items():
        place, length = tuple(map(GetAttrKey, new.split("/"))), old.count("/") + 1
        for rel, leaf in node.leaves.items():
            if trees.path_name(rel[:length]) != old:
                continue
            if old in node.holds.sums:
                if weighted:
                    continue
                x = trees.at_least_float32(leaf.value)
                leaf = leaf._replace(value=x / max(count, 1) if ours else x * count)
            leaves[(*place, *rel[length:])] = leaf
            if new == "optimizer_steps":
                closed = jnp.asarray(leaf.value > 0 and not count)
                leaves[(GetAttrKey("applied"),)] = leaf._replace(value=closed)
    return dataclasses.replace(node, cls=found.cls, leaves=leaves)


def _owner(path: Path, x: Any, params: dict[Path, Any]) -> Path | None:
    """The param to which an array belongs: the one whose path ends its own.

    A lone param has an empty path, which ends every other: there the shape decides.
    """
    found = next((path[i:] for i in range(len(path) + 1) if path[i:] in params), None)
    if found == () and params[()].shape not in (np.shape(x), np.shape(x)[1:]):
        return None
    return found


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
