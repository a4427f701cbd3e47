"""An optimizer state as a list of the states in it, each with the arrays that are its own."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, GetAttrKey

from boostax._core import trees
from boostax._core.replicas import PerReplica
from boostax.accumulate.window import AccumulateState
from boostax.precision.loss_scale import LossScaleState

PyTree = Any
Path = tuple[Any, ...]
# States that hold an open window, and where they count its micro-steps.
WINDOWS: dict[Any, str] = {AccumulateState: "micro_step", optax.MultiStepsState: "mini_step"}


class Leaf(NamedTuple):
    """An array of a state.

    Attributes:
      path: where it lies in the whole tree.
      value: the array, or a number in its place.
      own: whether each replica has one to itself.
    """

    path: Path
    value: Any
    own: bool


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


def read(tree: PyTree, params: PyTree) -> list[Node]:
    """The states of a tree, outermost first.

    A state is a NamedTuple. The containers of the params are none, nor are the parts of which
    boostax's own states are made, nor Optax's ``MaskedNode`` and ``WrappedScheduleState``.
    """
    containers = set(map(type, trees.find(params, lambda _: True)))
    rest = Node(None, (), {}, None, "no state")
    found = [rest]

    def visit(path: Path, x: Any, node: Node, rel: Path, own: bool) -> None:
        made = _foreign_scaler(path, x)
        if made is not None:
            found.append(made)
            return
        if isinstance(x, PerReplica):
            visit((*path, GetAttrKey("local")), x.local, node, rel, True)
            return
        children = _children(x)
        if children is None:
            node.leaves[rel] = Leaf(path, x, own)
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


# By name and fields, so that neither Flax nor jmp is imported: what they call what is ours.
_SCALERS: dict[str, dict[str, str]] = {
    "DynamicScale": {"scale": "scale", "fin_steps": "clean_steps"},
    "DynamicLossScale": {"loss_scale": "scale", "counter": "clean_steps"},
    "StaticLossScale": {"loss_scale": "scale"},
}
_IF_FINITE = {
    "notfinite_count": "skipped_in_a_row",
    "total_notfinite": "skipped_steps",
    "last_finite": "last_finite",
}


def _foreign_scaler(path: Path, x: Any) -> Node | None:
    fields = _SCALERS.get(type(x).__name__)
    if fields is None or not all(hasattr(x, name) for name in fields):
        return None
    keys = [GetAttrKey(name) for name in fields]
    leaves = {(key,): Leaf((*path, key), getattr(x, key.name), False) for key in keys}
    return Node(type(x), path, leaves, x, type(x).__name__)


def translated(node: Node) -> Node | None:
    """A state of another library as the one of boostax that does its work, or ``None``.

    A window of boostax as that of ``MultiSteps``, which has no weights.
    """
    name, renamed = node.source, _SCALERS.get(node.source)
    if name == "ApplyIfFiniteState":
        renamed = _IF_FINITE
    if renamed is not None:
        leaves = {
            (GetAttrKey(renamed[rel[0].name]),): leaf
            for rel, leaf in node.leaves.items()
            if rel[0].name in renamed
        }
        return dataclasses.replace(node, cls=LossScaleState, leaves=leaves)
    if name == "MultiStepsState":
        return dataclasses.replace(node, cls=AccumulateState, leaves=_window(node))
    if node.cls is AccumulateState:
        return dataclasses.replace(node, cls=optax.MultiStepsState, leaves=_means(node))
    return None


def _window(node: Node) -> dict[Path, Leaf]:
    """``MultiSteps`` holds the mean of the gradients so far, ``accumulate`` their sum."""
    state = node.value
    leaves: dict[Path, Leaf] = {}
    for rel, leaf in node.leaves.items():
        name = rel[0].name
        if name == "acc_grads":
            total = trees.at_least_float32(leaf.value) * state.mini_step
            place = (GetAttrKey("window"), GetAttrKey("grads"), *rel[1:])
            leaves[place] = leaf._replace(value=total)
        elif name == "mini_step":
            leaves[(GetAttrKey("micro_step"),)] = leaf
        elif name == "gradient_step":
            leaves[(GetAttrKey("optimizer_steps"),)] = leaf
            closed = jnp.logical_and(state.mini_step == 0, state.gradient_step > 0)
            leaves[(GetAttrKey("applied"),)] = leaf._replace(value=closed)
    return leaves


def _means(node: Node) -> dict[Path, Leaf]:
    """The other way: the mean of what ``accumulate`` has summed up without weights."""
    leaves: dict[Path, Leaf] = {}
    for rel, leaf in node.leaves.items():
        names = [trees.path_name((key,)) for key in rel[:2]]
        if (
            names == ["window", "grads"]
            and (GetAttrKey("window"), GetAttrKey("weight")) not in node.leaves
        ):
            mean = trees.at_least_float32(leaf.value) / jnp.maximum(node.value.micro_step, 1)
            leaves[(GetAttrKey("acc_grads"), *rel[2:])] = leaf._replace(value=mean)
        elif names == ["micro_step"]:
            leaves[(GetAttrKey("mini_step"),)] = leaf
        elif names == ["optimizer_steps"]:
            leaves[(GetAttrKey("gradient_step"),)] = leaf
    return leaves


def opened(node: Node, values: Mapping[Path, Any]) -> int:
    """How many micro-steps are in the open window of a state; 0 for one that has none.

    Args:
      node: the state.
      values: arrays that stand in the place of its own, by their paths.
    """
    leaf = node.leaves.get((GetAttrKey(WINDOWS.get(node.cls, "")),))
    return 0 if leaf is None else int(values.get(leaf.path, leaf.value))


def shape_dtype(x: Any) -> tuple[tuple[int, ...], Any]:
    """Of an array, or of the array that a number stands for."""
    return np.shape(x), getattr(x, "dtype", None) or jnp.result_type(x)


def cast(node: Node, like: Node) -> Node:
    """The arrays of a translated state in the dtypes of the one that they are for."""
    leaves = {
        rel: leaf._replace(value=jnp.asarray(leaf.value).astype(like.leaves[rel].value.dtype))
        for rel, leaf in node.leaves.items()
        if rel in like.leaves
    }
    return dataclasses.replace(node, leaves=node.leaves | leaves)


def owner(path: Path, x: Any, params: dict[Path, Any]) -> Path | None:
    """The param to which an array belongs: the one whose path ends its own.

    A lone param has an empty path, which ends every other: there the shape decides.
    """
    found = next((path[i:] for i in range(len(path) + 1) if path[i:] in params), None)
    if found == () and params[()].shape not in (np.shape(x), np.shape(x)[1:]):
        return None
    return found


def fields(node: Node, wanted: Callable[[Leaf], bool]) -> str:
    """The fields whose arrays are all wanted, and of the others those that are."""
    name = trees.path_name
    groups: dict[str, list[tuple[Path, bool]]] = {}
    for rel, leaf in node.leaves.items():
        head = name(rel[:1]) if node.cls is not None else name(rel)
        groups.setdefault(head, []).append((rel, wanted(leaf)))
    words: list[str] = []
    for head, members in groups.items():
        chosen = [rel for rel, yes in members if yes]
        if len(chosen) == len(members):
            words.append(head)
        elif chosen:
            more = f" and {len(chosen) - 4} more" if len(chosen) > 4 else ""
            words.append(", ".join(name(rel) for rel in chosen[:4]) + more)
    return ", ".join(words)
