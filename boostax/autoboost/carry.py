"""Which array of an old optimizer state goes where in a new one."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from boostax._core import checks, trees
from boostax.accumulate.window import AccumulateState
from boostax.autoboost.nodes import Leaf, Node, Path, cast, owner, shape_dtype, translated
from boostax.freeze.scheduled import ScheduledFreezeState
from boostax.precision.group_state import GroupLossScaleState
from boostax.reduce.feedback import CompressedState
from boostax.subspace.coordinates import SubspaceParamsState
from boostax.subspace.dim_reduce import DimReduceState
from boostax.subspace.trajectory import TrajectoryState

PyTree = Any
WHO = "migrate_state"

# Fields that mean something together alone: kept if all of them fit, or none.
_BOUND: dict[type, tuple[str, ...]] = {
    AccumulateState: ("micro_step", "window"),
    TrajectoryState: ("recorded", "snapshots", "gram"),
    DimReduceState: ("basis", "explained", "memory", "to_mean"),
    SubspaceParamsState: ("basis", "coordinates"),
    ScheduledFreezeState: ("depth", "next_depth", "schedule_state"),
    GroupLossScaleState: (
        *("table", "measured", "largest", "nonfinite", "underflow", "entries"),
        *("until_count", "overflow_group", "backoffs", "floor_hits"),
    ),
    # Each of its fields stands for itself.
    CompressedState: (),
}


class Taken(NamedTuple):
    """Where an array of the new state comes from."""

    node: Node
    leaf: Leaf


@dataclasses.dataclass
class Carried:
    """What is carried over.

    Attributes:
      owners: the params of one replica, by path.
      replicas: how many the old per-replica arrays lead with; ``None`` if they do not.
      taken: for the path of an array in the new state, its source in the old one.
      primary: for a new state, the old one from which its counts are.
      notes: choices that were made.
    """

    owners: dict[Path, Any]
    replicas: int | None
    taken: dict[Path, Taken] = dataclasses.field(default_factory=dict[Path, Taken])
    primary: dict[Node, Node] = dataclasses.field(default_factory=dict[Node, Node])
    notes: list[str] = dataclasses.field(default_factory=list[str])

    def owner(self, rel: Path, leaf: Leaf) -> Path | None:
        """The param to which an array of a state belongs."""
        return owner(rel, leaf.value, self.owners)

    def fits(self, old: Leaf, new: Leaf) -> bool:
        """Whether an old array can stand for a new one."""
        shape, dtype = shape_dtype(old.value)
        if dtype != shape_dtype(new.value)[1]:
            return False
        wanted: tuple[int, ...] = new.value.shape
        if not old.own or self.replicas is None:
            return shape == wanted
        return shape == (self.replicas, *wanted) and (new.own or self.replicas == 1)

    def pairs(self, olds: list[Node], news: list[Node]) -> list[tuple[Node, Node]]:
        """The best fit first; of equal ones those of the lowest numbers."""
        ranked = sorted(
            (tuple(-x for x in self._score(old, new)), i, j)
            for i, old in enumerate(olds)
            for j, new in enumerate(news)
        )
        pairs: list[tuple[int, int]] = []
        for score, i, j in ranked:
            free = all(i != a and j != b for a, b in pairs)
            if free and score[0] < 0:
                pairs.append((i, j))
        return [(olds[i], news[j]) for i, j in sorted(pairs)]

    def _score(self, old: Node, new: Node) -> tuple[int, int, int]:
        both = [rel for rel in new.leaves if rel in old.leaves]
        good = sum(self.fits(old.leaves[rel], new.leaves[rel]) for rel in both)
        return good, good - len(old.leaves), len(old.labels & new.labels)

    def take(self, old: Node, new: Node, counts_alone: bool = False) -> None:
        """Every array that fits, or those that belong to no param."""
        for rel, leaf in new.leaves.items():
            other = old.leaves.get(rel)
            if other is None or not self.fits(other, leaf):
                continue
            if not counts_alone or self.owner(rel, leaf) is None:
                self.taken[leaf.path] = Taken(old, other)

    def share(self, olds: list[Node], news: list[Node]) -> None:
        """One state that became several, or several that became one, by what belongs to a param.

        A state that gets moments so and has no source of its own takes their counts as well.
        """
        used = {taken.leaf.path for taken in self.taken.values()}
        for new in news:
            for rel, leaf in new.leaves.items():
                if leaf.path in self.taken or self.owner(rel, leaf) is None:
                    continue
                for old in olds:
                    other = old.leaves.get(rel)
                    if other and other.path not in used and self.fits(other, leaf):
                        self.taken[leaf.path] = Taken(old, other)
                        used.add(other.path)
                        if new not in self.primary:
                            self.primary[new] = old
                            self.take(old, new, counts_alone=True)
                        elif self.primary[new] is not old:
                            self._note_merge(old, new)
                        break

    def _note_merge(self, old: Node, new: Node) -> None:
        origin = f"{spot(old.path)}, not counts."
        note = f"{new.source} at {spot(new.path)} also takes moments from {origin}"
        if note not in self.notes:
            self.notes.append(note)

    def translate(self, olds: list[Node], news: list[Node]) -> None:
        """States of other libraries to those of boostax that have no source."""
        seen: dict[tuple[str, Any], int] = {}
        for old in olds:
            made = translated(old)
            if made is None:
                continue
            number = seen.get((old.source, made.cls), 0)
            seen[old.source, made.cls] = number + 1
            places = [node for node in news if node.cls is made.cls]
            if number < len(places):
                new = places[number]
                made = cast(made, new)
                # Several may feed one: a scale from here, the skipped steps from there.
                self.primary.setdefault(new, made)
                self.take(made, new)
                if old.source == "MultiStepsState" and int(old.value.mini_step):
                    self.notes.append(
                        f"acc_grads of MultiStepsState at {spot(old.path)} is taken as a mean over "
                        f"{int(old.value.mini_step)} micro-steps (use_grad_mean=True)."
                    )

    def settle(self, old: Node, new: Node) -> None:
        """Give up what would be wrong without the rest of it."""
        groups: dict[Path, list[Path]] = {}
        for rel, leaf in new.leaves.items():
            belongs = self.owner(rel, leaf)
            if belongs is not None:
                groups.setdefault(belongs, []).append(rel)
        for rels in groups.values():
            # A second moment of zero beside an old first one would make a huge step.
            if any(new.leaves[rel].path not in self.taken and rel in old.leaves for rel in rels):
                self._drop(new, rels)
        moments = [rel for rels in groups.values() for rel in rels]
        if moments and not any(new.leaves[rel].path in self.taken for rel in moments):
            # Counts without their moments: the bias correction would be wrong.
            self._drop(new, new.leaves)

    def settle_bound(self, old: Node, new: Node, bound: tuple[str, ...]) -> None:
        """Give up all of what means something together alone, unless all of it fits."""
        mine = [rel for rel in new.leaves if rel[0].name in bound]
        theirs = {rel: leaf for rel, leaf in old.leaves.items() if rel[0].name in bound}
        if theirs.keys() == set(mine) and all(new.leaves[rel].path in self.taken for rel in mine):
            return
        self._drop(new, mine)
        if new.cls is AccumulateState:
            count = sum(int(x.value) for rel, x in theirs.items() if rel[0].name == "micro_step")
            if count:
                self.notes.append(
                    f"The open window of {count} micro-steps does not fit and is dropped."
                )

    def _drop(self, new: Node, rels: Iterable[Path]) -> None:
        for rel in rels:
            self.taken.pop(new.leaves[rel].path, None)

    def note_choice(self, olds: list[Node], news: list[Node]) -> None:
        """Say which of several states went where, if it is not each to its own place."""
        pairs = [(self.primary[new], new) for new in news if new in self.primary]
        plain = len(olds) == len(news) and pairs == list(zip(olds, news, strict=True))
        if plain or not olds:
            return
        chosen = ", ".join(f"{spot(old.path)} -> {spot(new.path)}" for old, new in pairs)
        counts = f"{len(olds)} in the old state, {len(news)} in the new one"
        self.notes.append(f"{news[0].source}: {counts}; {chosen or 'none fits'}.")

    def require_same_params(self, olds: list[Node], news: list[Node], every: list[Node]) -> None:
        """Refuse a state that was made for params of other shapes."""
        for new in news:
            for rel, leaf in new.leaves.items():
                belongs = self.owner(rel, leaf)
                if belongs is None or leaf.value.shape != self.owners[belongs].shape:
                    continue
                shape: tuple[int, ...] = leaf.value.shape
                same = [old.leaves[rel] for old in olds if rel in old.leaves]
                # Arrays of one entry stand in for what an optimizer does without.
                odd = [x for x in same if self._local_shape(x) not in (shape, (1,))]
                if odd and not self._has_shape(every, belongs, shape):
                    got, path = self._local_shape(odd[0]), trees.path_name(odd[0].path)
                    raise ValueError(
                        f"{WHO}: params must be of the shapes that old_state was made for, got "
                        f"{trees.path_name(belongs) or 'a leaf'!r} of {shape}, where old_state has "
                        f"{got} at {path!r}. A changed layer needs a new state: mask it out, or "
                        "use new_tx.init(params)."
                    )

    def _local_shape(self, leaf: Leaf) -> tuple[int, ...]:
        shape = shape_dtype(leaf.value)[0]
        return shape[1:] if leaf.own and self.replicas is not None else shape

    def _has_shape(self, nodes: list[Node], belongs: Path, shape: tuple[int, ...]) -> bool:
        return any(
            leaf.path[len(leaf.path) - len(belongs) :] == belongs
            and self._local_shape(leaf) == shape
            for node in nodes
            for leaf in node.leaves.values()
        )


def carry(olds: list[Node], news: list[Node], params: PyTree, replicas: int | None) -> Carried:
    """Match states by class, k-th to k-th where they fit alike, and their arrays by path.

    Args:
      olds: states of the old tree.
      news: states of what ``init`` made, without a dimension of replicas.
      params: the params of one replica.
      replicas: how many the old per-replica arrays lead with; ``None`` if they do not.
    """
    carried = Carried(dict(jax.tree_util.tree_leaves_with_path(params)), replicas)
    matched: set[Node] = set()
    for cls in dict.fromkeys(new.cls for new in news):
        mine = [node for node in olds if node.cls is cls]
        target = [node for node in news if node.cls is cls]
        carried.require_same_params(mine, target, olds)
        for old, new in carried.pairs(mine, target):
            carried.primary[new] = old
            matched.update((old, new))
            carried.take(old, new)
        if cls is not None and cls not in _BOUND:
            carried.share(mine, target)
        if len(mine) > 1 or len(target) > 1:
            carried.note_choice(mine, target)
    rest = [[node for node in nodes if node not in matched] for nodes in (olds, news)]
    carried.translate(*rest)
    for new, old in carried.primary.items():
        if new.cls in _BOUND:
            carried.settle_bound(old, new, _BOUND[new.cls])
        else:
            carried.settle(old, new)
    return carried


def count_replicas(olds: list[Node], news: list[Node], params: PyTree, asked: int | None) -> Any:
    """How many replicas the old per-replica arrays lead with; ``None`` if they do not."""
    owners = dict(jax.tree_util.tree_leaves_with_path(params))
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for old in olds:
        for rel, leaf in old.leaves.items():
            if not leaf.own:
                continue
            belongs = owner(leaf.path, leaf.value, owners)
            likes = [owners[belongs].shape] if belongs is not None else []
            likes += [x.leaves[rel].value.shape for x in news if rel in x.leaves]
            shapes += [(shape_dtype(leaf.value)[0], tuple(like)) for like in likes[:1]]
    counts = {shape[0] for shape, like in shapes if shape[1:] == like and shape}
    counts |= {None for shape, like in shapes if shape == like}
    if asked is not None:
        counts.add(asked)
    if len(counts) > 1:
        got = " and ".join(sorted(str(count or "no") for count in counts))
        hint = "boostax.reshard_state(old_state, replicas) takes it to another number first."
        raise ValueError(checks.message(WHO, "replicas", "the same everywhere", got, hint))
    return counts.pop() if counts else None


def spot(path: Path) -> str:
    """A place in a state as people write it."""
    return trees.path_name(path) or "the root"
