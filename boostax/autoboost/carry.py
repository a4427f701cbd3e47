"""Which array of an old optimizer state goes where in a new one."""

import dataclasses
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
      taken: for the path of an array in the new state, its source in the old one.
      notes: choices that were made.
    """

    taken: dict[Path, Taken]
    notes: list[str]


def carry(olds: list[Node], news: list[Node], params: PyTree, replicas: int | None) -> Carried:
    """Match states by class, k-th to k-th where they fit alike, and their arrays by path.

    Args:
      olds: states of the old tree.
      news: states of what ``init`` made, without a dimension of replicas.
      params: the params of one replica.
      replicas: how many the old per-replica arrays lead with; ``None`` if they do not.
    """
    owners = dict(jax.tree_util.tree_leaves_with_path(params))
    carried = Carried({}, [])
    primary: dict[Node, Node] = {}
    matched: set[Node] = set()
    for cls in dict.fromkeys(new.cls for new in news):
        mine = [node for node in olds if node.cls is cls]
        target = [node for node in news if node.cls is cls]
        _require_same_params(mine, target, olds, owners, replicas)
        pairs = _paired(mine, target, replicas)
        for old, new in pairs:
            primary[new] = old
            matched.update((old, new))
            _take(carried, old, new, replicas)
        if cls is not None and cls not in _BOUND:
            _share(carried, mine, target, primary, owners, replicas)
        if len(mine) > 1 or len(target) > 1:
            chosen = [(primary[new], new) for new in target if new in primary]
            _note_choice(carried, mine, target, chosen)
    _translate(carried, olds, news, matched, primary, replicas)
    for new, old in primary.items():
        _settle(carried, old, new, owners)
    return carried


def fits(old: Leaf, new: Leaf, replicas: int | None) -> bool:
    """Whether an old array can stand for a new one."""
    shape, dtype = shape_dtype(old.value)
    if dtype != shape_dtype(new.value)[1]:
        return False
    wanted: tuple[int, ...] = new.value.shape
    if not old.own or replicas is None:
        return shape == wanted
    return shape == (replicas, *wanted) and (new.own or replicas == 1)


def _score(old: Node, new: Node, replicas: int | None) -> tuple[int, int, int]:
    both = [rel for rel in new.leaves if rel in old.leaves]
    good = sum(fits(old.leaves[rel], new.leaves[rel], replicas) for rel in both)
    return good, good - len(old.leaves), len(old.labels & new.labels)


def _paired(olds: list[Node], news: list[Node], replicas: int | None) -> list[tuple[Node, Node]]:
    """The best fit first; of equal ones those of the lowest numbers."""
    ranked = sorted(
        (tuple(-x for x in _score(old, new, replicas)), i, j)
        for i, old in enumerate(olds)
        for j, new in enumerate(news)
    )
    pairs: list[tuple[int, int]] = []
    for score, i, j in ranked:
        free = all(i != a and j != b for a, b in pairs)
        if free and score[0] < 0:
            pairs.append((i, j))
    return [(olds[i], news[j]) for i, j in sorted(pairs)]


def _take(carried: Carried, old: Node, new: Node, replicas: int | None) -> None:
    for rel, leaf in new.leaves.items():
        if rel in old.leaves and fits(old.leaves[rel], leaf, replicas):
            carried.taken[leaf.path] = Taken(old, old.leaves[rel])


def _share(
    carried: Carried,
    olds: list[Node],
    news: list[Node],
    primary: dict[Node, Node],
    owners: dict[Path, Any],
    replicas: int | None,
) -> None:
    """One state that became several, or several that became one, by what belongs to a param.

    A state that gets moments so and has no source of its own takes their counts as well.
    """
    used = {taken.leaf.path for taken in carried.taken.values()}
    for new in news:
        for rel, leaf in new.leaves.items():
            if leaf.path in carried.taken or owner(rel, leaf.value, owners) is None:
                continue
            for old in olds:
                other = old.leaves.get(rel)
                if other and other.path not in used and fits(other, leaf, replicas):
                    carried.taken[leaf.path] = Taken(old, other)
                    used.add(other.path)
                    if new not in primary:
                        primary[new] = old
                        _take_counts(carried, old, new, owners, replicas)
                    elif primary[new] is not old:
                        _note_merge(carried, old, new)
                    break


def _take_counts(
    carried: Carried, old: Node, new: Node, owners: dict[Path, Any], replicas: int | None
) -> None:
    for rel, leaf in new.leaves.items():
        if owner(rel, leaf.value, owners) is None and rel in old.leaves:
            if fits(old.leaves[rel], leaf, replicas):
                carried.taken[leaf.path] = Taken(old, old.leaves[rel])


def _note_merge(carried: Carried, old: Node, new: Node) -> None:
    note = f"{new.source} at {spot(new.path)} also takes moments from {spot(old.path)}, not counts."
    if note not in carried.notes:
        carried.notes.append(note)


def _translate(
    carried: Carried,
    olds: list[Node],
    news: list[Node],
    matched: set[Node],
    primary: dict[Node, Node],
    replicas: int | None,
) -> None:
    """States of other libraries to those of boostax that have no source."""
    free = [node for node in news if node not in matched]
    seen: dict[tuple[str, Any], int] = {}
    for old in olds:
        made = translated(old) if old not in matched else None
        if made is None:
            continue
        number = seen.get((old.source, made.cls), 0)
        seen[old.source, made.cls] = number + 1
        places = [node for node in free if node.cls is made.cls]
        if number < len(places):
            new = places[number]
            made = cast(made, new)
            # Several may feed one: a scale from here, the skipped steps from there.
            primary.setdefault(new, made)
            _take(carried, made, new, replicas)
            if old.source == "MultiStepsState" and int(old.value.mini_step):
                carried.notes.append(
                    f"acc_grads of MultiStepsState at {spot(old.path)} is taken as a mean over "
                    f"{int(old.value.mini_step)} micro-steps (use_grad_mean=True)."
                )


def _settle(carried: Carried, old: Node, new: Node, owners: dict[Path, Any]) -> None:
    """Give up what would be wrong without the rest of it."""
    taken = carried.taken

    def drop(rels: list[Path]) -> None:
        for rel in rels:
            taken.pop(new.leaves[rel].path, None)

    if new.cls in _BOUND:
        bound = _BOUND[new.cls]
        mine = [rel for rel in new.leaves if rel[0].name in bound]
        theirs = {rel for rel in old.leaves if rel[0].name in bound}
        if theirs != set(mine) or any(new.leaves[rel].path not in taken for rel in mine):
            drop(mine)
            count = next((x.value for rel, x in old.leaves.items() if str(rel[0]) == _OPEN), 0)
            if new.cls is AccumulateState and int(count):
                carried.notes.append(
                    f"The open window of {int(count)} micro-steps does not fit and is dropped."
                )
        return
    groups: dict[Path, list[Path]] = {}
    for rel, leaf in new.leaves.items():
        belongs = owner(rel, leaf.value, owners)
        if belongs is not None:
            groups.setdefault(belongs, []).append(rel)
    for rels in groups.values():
        # A second moment of zero beside an old first one would make a huge step.
        if any(new.leaves[rel].path not in taken and rel in old.leaves for rel in rels):
            drop(rels)
    moments = [rel for rels in groups.values() for rel in rels]
    if moments and not any(new.leaves[rel].path in taken for rel in moments):
        # Counts without their moments: the bias correction would be wrong.
        drop(list(new.leaves))


_OPEN = ".micro_step"


def _note_choice(
    carried: Carried, olds: list[Node], news: list[Node], pairs: list[tuple[Node, Node]]
) -> None:
    plain = len(olds) == len(news) == len(pairs) and all(
        pair == both for pair, both in zip(pairs, zip(olds, news, strict=True), strict=True)
    )
    if plain or not olds:
        return
    chosen = ", ".join(f"{spot(old.path)} -> {spot(new.path)}" for old, new in pairs) or "none fits"
    carried.notes.append(
        f"{news[0].source}: {len(olds)} in the old state, {len(news)} in the new one; {chosen}."
    )


def _require_same_params(
    olds: list[Node],
    news: list[Node],
    every: list[Node],
    owners: dict[Path, Any],
    replicas: int | None,
) -> None:
    """Refuse a state that was made for params of other shapes."""
    for new in news:
        for rel, leaf in new.leaves.items():
            belongs = owner(rel, leaf.value, owners)
            if belongs is None or leaf.value.shape != owners[belongs].shape:
                continue
            shape: tuple[int, ...] = leaf.value.shape
            same = [old.leaves[rel] for old in olds if rel in old.leaves]
            found = [_local_shape(x, replicas) for x in same]
            # Arrays of one entry stand in for what an optimizer does without.
            odd = [x for x, at in zip(same, found, strict=True) if at not in (shape, (1,))]
            if odd and not _has_shape(every, belongs, shape, replicas):
                got, path = _local_shape(odd[0], replicas), trees.path_name(odd[0].path)
                raise ValueError(
                    f"{WHO}: params must be of the shapes that old_state was made for, got "
                    f"{trees.path_name(belongs) or 'a leaf'!r} of {shape}, where old_state has "
                    f"{got} at {path!r}. A changed layer needs a new state: mask it out, or use "
                    "new_tx.init(params)."
                )


def _local_shape(leaf: Leaf, replicas: int | None) -> tuple[int, ...]:
    shape = shape_dtype(leaf.value)[0]
    return shape[1:] if leaf.own and replicas is not None else shape


def _has_shape(
    nodes: list[Node], belongs: Path, shape: tuple[int, ...], replicas: int | None
) -> bool:
    return any(
        leaf.path[len(leaf.path) - len(belongs) :] == belongs
        and _local_shape(leaf, replicas) == shape
        for node in nodes
        for leaf in node.leaves.values()
    )


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
