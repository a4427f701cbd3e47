# SPDX-License-Identifier: Apache-2.0
"""A saved optimizer state for a chain that has changed since: which array goes where."""

import dataclasses
from collections.abc import Callable, Container, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from boostax._core import checks, trees
from boostax._core.finite import usable
from boostax._core.gate import Pending
from boostax._core.replicas import is_per_replica
from boostax._core.variants import variants_of
from boostax.accumulate.window import AccumulateState
from boostax.config.nodes import Leaf, Node, Path, Unit, measured, read, translated, unit_at
from boostax.config.states import holds
from boostax.precision.store import narrowed, widened
from boostax.train.state import TrainState

PyTree = Any
Values = dict[Path, Any]
WHO = "migrate_state"


@dataclasses.dataclass(frozen=True)
class MigrationReport:
    """What became of an optimizer state. ``print`` gives it in words.

    Attributes:
      kept: what was carried over, by state: fields, and from where to where.
      anew: what is as ``new_tx.init`` made it.
      dropped: what the old state held and the new one has no place for.
      notes: choices that were made, and saved values that stand in the place of new arguments.
    """

    kept: tuple[str, ...]
    anew: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        parts = {"kept": self.kept, "made anew": self.anew, "dropped": self.dropped}
        parts |= {"notes": self.notes} if self.notes else {}
        return "\n".join(
            "\n  ".join((f"{title}:", *(lines or ("nothing",)))) for title, lines in parts.items()
        )


@dataclasses.dataclass
class Carried:
    """What is carried over.

    Attributes:
      owners: the params of one replica, by path.
      replicas: how many the old per-replica arrays lead with; ``None`` if they do not.
      taken: for the path of an array in the new state, its source in the old one.
      primary: for a new state, the old one from which its counts are.
      notes: choices that were made.
      spoilt: where windows stood that the old chain would have skipped.
    """

    owners: dict[Path, Any]
    replicas: int | None
    taken: dict[Path, Leaf] = dataclasses.field(default_factory=dict[Path, Leaf])
    primary: dict[Node, Node] = dataclasses.field(default_factory=dict[Node, Node])
    notes: list[str] = dataclasses.field(default_factory=list[str])
    spoilt: set[Path] = dataclasses.field(default_factory=set[Path])

    def fits(self, old: Leaf, new: Leaf, casts: bool = False) -> bool:
        """Whether an old array can stand for a new one, in another precision if it ``casts``."""
        # Both real, or both complex, in whatever precision.
        kinds, dtypes = (jnp.floating, jnp.complexfloating), (old.dtype, new.dtype)
        alike = any(all(jnp.issubdtype(x, kind) for x in dtypes) for kind in kinds)
        if old.dtype != new.dtype and not (casts and alike):
            return False
        if not old.own or self.replicas is None:
            return old.shape == new.shape
        return old.shape == (self.replicas, *new.shape) and (new.own or self.replicas == 1)

    def pairs(self, olds: list[Node], news: list[Node]) -> list[tuple[Node, Node]]:
        """The best fit first; of equal ones those of the lowest numbers."""
        ranked = sorted(
            (tuple(-x for x in self._score(old, new)), i, j)
            for i, old in enumerate(olds)
            for j, new in enumerate(news)
        )
        partner: dict[int, int] = {}
        for score, i, j in ranked:
            if score[0] < 0 and i not in partner and j not in partner.values():
                partner[i] = j
        return [(olds[i], news[j]) for i, j in sorted(partner.items())]

    def _score(self, old: Node, new: Node) -> tuple[int, int, int]:
        both = [rel for rel in new.leaves if rel in old.leaves]
        casts = bool(new.holds.opened)
        good = sum(self.fits(old.leaves[rel], new.leaves[rel], casts) for rel in both)
        return good, good - len(old.leaves), len(old.labels & new.labels)

    def take(self, old: Node, new: Node, counts_alone: bool = False) -> None:
        """Every array that fits, or those that belong to no param."""
        for rel, leaf in new.leaves.items():
            other = old.leaves.get(rel)
            if other is None or not self.fits(other, leaf, bool(new.holds.opened)):
                continue
            if not counts_alone or leaf.owner is None:
                self.taken[leaf.path] = other

    def share(self, olds: list[Node], news: list[Node]) -> None:
        """One state that became several, or several that became one, by what belongs to a param.

        A state that gets moments so and has no source of its own takes their counts as well.
        """
        used = {taken.path for taken in self.taken.values()}
        for new in news:
            for rel, leaf in new.leaves.items():
                if leaf.path in self.taken or leaf.owner is None:
                    continue
                found = (old.leaves[rel] for old in olds if rel in old.leaves)
                free = (x for x in found if x.path not in used and self.fits(x, leaf))
                source = next(free, None)
                if source is None:
                    continue
                self.taken[leaf.path] = source
                used.add(source.path)
                if new not in self.primary:
                    self.primary[new] = source.node
                    self.take(source.node, new, counts_alone=True)
                elif self.primary[new] is not source.node:
                    origin = f"{spot(source.node.path)}, not counts."
                    place = f"{new.source} at {spot(new.path)}"
                    self._note(f"{place} also takes moments from {origin}")

    def translate(self, olds: list[Node], news: list[Node]) -> None:
        """States of other libraries to those of boostax that have no source; windows back, too."""
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
                made = made if made.holds.opened else _cast(made, new)
                # Several may feed one: a scale from here, the skipped steps from there.
                self.primary.setdefault(new, made)
                self.take(made, new)
                if count := old.opened({}):
                    peer, more = (old, "")
                    if old.cls is AccumulateState:
                        peer, more = (new, f"; its windows must be longer than {count}")
                    self.notes.append(
                        f"acc_grads of MultiStepsState at {spot(peer.path)} is taken as a mean "
                        f"over {count} micro-steps (use_grad_mean=True){more}."
                    )

    def settle(self, old: Node, new: Node) -> None:
        """Give up what would be wrong without the rest of it."""
        bound = new.holds.bound
        if bound is not None:
            mine = [rel for rel in new.leaves if rel[0].name in bound]
            theirs = {rel for rel in old.leaves if rel[0].name in bound}
            if theirs != set(mine) or not all(new.leaves[rel].path in self.taken for rel in mine):
                self._drop(new, mine)
            return
        groups: dict[Path, list[Path]] = {}
        for rel, leaf in new.leaves.items():
            if leaf.owner is not None:
                groups.setdefault(leaf.owner, []).append(rel)
        for rels in groups.values():
            # A second moment of zero beside an old first one would make a huge step.
            if any(new.leaves[rel].path not in self.taken and rel in old.leaves for rel in rels):
                self._drop(new, rels)
        moments = [rel for rels in groups.values() for rel in rels]
        if moments and not any(new.leaves[rel].path in self.taken for rel in moments):
            # Counts without their moments: the bias correction would be wrong.
            self._drop(new, new.leaves)

    def measure(self, olds: list[Node], news: list[Node]) -> None:
        """Multiply what is a sum of gradients by what makes it one of those at its new place."""
        values: Values = {path: source.value for path, source in self.taken.items()}
        for new in news:
            found = ((rel, self.taken.get(leaf.path)) for rel, leaf in new.leaves.items())
            sources = {rel: source for rel, source in found if source is not None}
            old_paths = {source.node.path for source in sources.values()}
            before = {path: unit_at(path, olds, {}) for path in old_paths}
            after, count = unit_at(new.path, news, values), new.opened(values)
            if count and self._spoilt(new, sources, before, after):
                continue
            closed = bool(new.holds.opened) and not count
            for rel, source in sources.items():
                leaf, factor = new.leaves[rel], 1.0
                if not closed:
                    factor = self._ratio(new, rel, source, before[source.node.path], after)
                    spreads = leaf.own and not source.own and new.cls is AccumulateState
                    if spreads and new.value.shares():
                        hint = "They add up their windows: of the open one each gets a part."
                        known = self.replicas is not None
                        checks.require(WHO, "replicas", None, "given", known, hint)
                        factor /= self.replicas or 1
                self.taken[leaf.path] = _multiplied(source, leaf, factor, stale=closed)

    def _ratio(self, new: Node, rel: Path, source: Leaf, before: Unit, after: Unit) -> float:
        """Of the loss scales in which an array is to be measured, and was."""
        how = measured(rel, new.leaves[rel])
        if how is None or (before.scale, before.rest) == (after.scale, after.rest):
            return 1.0
        words = (
            f"{new.source} at {spot(source.node.path)} of gradients times {before}, which at "
            f"{spot(new.path)} come times {after}"
        )
        if how == "moment" or before.rest != after.rest:
            hint = "Put the loss scaler where it was, around the whole optimizer at best."
            if new.holds.opened:
                hint = "Apply the window before: boostax.flush(old_tx, state, params)."
            allowed = "of gradients that the loss scale multiplies alike in new_tx"
            raise ValueError(f"{WHO}: old_state must be {allowed}, got {words}. {hint}")
        self._note(f"{words}: {'converted' if how == 'sum' else 'kept as it is'}.")
        return after.scale / before.scale if how == "sum" else 1.0

    def _spoilt(
        self, new: Node, sources: dict[Path, Leaf], before: dict[Path, Unit], after: Unit
    ) -> bool:
        """Drop a window that cannot be used, as a scaler would have, where none does any more."""
        bound = {rel: x for rel, x in sources.items() if rel[0].name in (new.holds.bound or ())}
        paths = {source.node.path for source in bound.values()}
        guarded = any(before[path].scalers for path in paths) and not after.scalers
        scaled = ((x.value, jnp.float32(1 / before[x.node.path].scale)) for x in bound.values())
        if not guarded or all(usable(Pending(x, (factor,))) for x, factor in scaled):
            return False
        self._drop(new, bound)
        self.spoilt |= paths
        where = ", ".join(map(spot, paths))
        self._note(
            f"The open window at {where} cannot be used and is dropped, as its loss scaler would "
            "have done."
        )
        return True

    def require_windows(self, olds: list[Node]) -> None:
        """Refuse to lose what an open window holds."""
        used = {source.path for source in self.taken.values()}
        for old in olds:
            count, bound = old.opened({}), old.holds.bound or ()
            sums = [leaf for rel, leaf in old.leaves.items() if count and rel[0].name in bound]
            if not count or old.path in self.spoilt or any(leaf.path in used for leaf in sums):
                continue
            hint = "Apply them before: boostax.flush(old_tx, state, params)."
            if any(leaf.own for leaf in sums):
                hint += " Or make one window of all: boostax.reshard_state(old_state, 1)."
            raise ValueError(
                f"{WHO}: old_state must have no open window that does not fit new_tx, got one of "
                f"{count} micro-steps at {spot(old.path)}. {hint}"
            )

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

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
        kept = {
            (leaf.owner, self._local_shape(leaf)) for node in every for leaf in node.leaves.values()
        }
        for new in news:
            for rel, leaf in new.leaves.items():
                if leaf.owner is None or leaf.shape != self.owners[leaf.owner].shape:
                    continue
                same = [old.leaves[rel] for old in olds if rel in old.leaves]
                # Arrays of one element stand in for what an optimizer does without.
                odd = [x for x in same if self._local_shape(x) not in (leaf.shape, (1,))]
                if odd and (leaf.owner, leaf.shape) not in kept:
                    got, path = self._local_shape(odd[0]), trees.path_name(odd[0].path)
                    raise ValueError(
                        f"{WHO}: params must be of the shapes that old_state was made for, got "
                        f"{trees.path_name(leaf.owner) or 'a leaf'!r} of {leaf.shape}, where "
                        f"old_state has {got} at {path!r}. A changed layer needs a new state: mask "
                        "it out, or use new_tx.init(params)."
                    )

    def _local_shape(self, leaf: Leaf) -> tuple[int, ...]:
        return leaf.shape[1:] if leaf.own and self.replicas is not None else leaf.shape


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
        if cls is not None and holds(cls).bound is None:
            carried.share(mine, target)
        if len(mine) > 1 or len(target) > 1:
            carried.note_choice(mine, target)
    rest = [[node for node in nodes if node not in matched] for nodes in (olds, news)]
    carried.translate(*rest)
    for new, old in carried.primary.items():
        carried.settle(old, new)
    carried.measure(olds, news)
    carried.require_windows(olds)
    return carried


def _cast(node: Node, like: Node) -> Node:
    """The arrays of a translated state in the dtypes of the one that they are for.

    What has one element there and is a scalar here becomes one, such as a scale of shape ``(1,)``.
    """
    leaves: dict[Path, Leaf] = {}
    for rel, leaf in node.leaves.items():
        if rel in like.leaves:
            x = jnp.asarray(leaf.value).astype(like.leaves[rel].dtype)
            one = x.size == 1 and like.leaves[rel].shape == ()
            leaves[rel] = leaf._replace(value=x.reshape(()) if one else x)
    return dataclasses.replace(node, leaves=node.leaves | leaves)


def _multiplied(source: Leaf, like: Leaf, factor: float, stale: bool) -> Leaf:
    """An array times a factor, in the dtype of another; as it is where nothing changes."""
    x, dtype = source.value, like.dtype
    if factor == 1 and dtype == source.dtype:
        return source
    value = (trees.at_least_float32(x) * np.float32(factor)).astype(dtype)
    fits = stale or bool(jnp.isfinite(value).all() | ~jnp.isfinite(x).all())
    got, hint = f"{dtype} at {trees.path_name(like.path)}", "accumulator_dtype='float32' holds it."
    allowed = f"able to hold the open window, times {factor:g}"
    checks.require(WHO, "new_tx", got, allowed, fits, hint)
    return source._replace(value=value)


def count_replicas(olds: list[Node], news: list[Node], params: PyTree, asked: int | None) -> Any:
    """How many replicas the old per-replica arrays lead with; ``None`` if they do not."""
    owners = dict(jax.tree_util.tree_leaves_with_path(params))
    counts: set[int | None] = set() if asked is None else {asked}
    for rel, leaf in ((rel, x) for old in olds for rel, x in old.leaves.items() if x.own):
        likes = [x.leaves[rel] for x in news if rel in x.leaves]
        for like in likes[:1] if leaf.owner is None else [owners[leaf.owner]]:
            counts |= {leaf.shape[0]} if leaf.shape and leaf.shape[1:] == like.shape else set()
            counts |= {None} if leaf.shape == like.shape else set()
    got = " and ".join(sorted(str(count or "no") for count in counts))
    hint = "boostax.reshard_state(old_state, replicas) takes it to another number first."
    checks.require(WHO, "replicas", got, "the same everywhere", len(counts) <= 1, hint)
    return counts.pop() if counts else None


def spot(path: Path) -> str:
    """A place in a state as people write it."""
    return trees.path_name(path) or "the root"


def migrate_state(
    old_state: PyTree,
    new_tx: optax.GradientTransformation,
    params: PyTree,
    *,
    replicas: int | None = None,
) -> tuple[PyTree, MigrationReport]:
    """Carry an optimizer state over to a chain in which something was added, removed or moved.

    ``new_tx.init(params)`` gives the form. Its states take the arrays of the old ones of the same
    class, wherever those stand: inside a scaler, a window, ``optax.masked``, ``partition`` or
    ``inject_hyperparams``. Of several of a class the best fit comes first and, among equal fits,
    the k-th goes to the k-th, the outermost first. Within a state an array is kept where path,
    shape and dtype agree, so that leaves that are newly masked or trained change nothing for the
    others. The moments of a leaf are kept together or not at all, counts only with moments, and
    a trajectory and a basis only whole.

    What stands around a loss scaler, or before it, sums up gradients times the scale. Where the
    scaler moves, comes or goes, open windows, residuals and momentum are multiplied by the new
    scale over the old one, and a note says so. An open window goes on in any precision; one for
    which ``new_tx`` has no place is refused. One that the old scaler would have skipped (not
    finite, or beyond 2**48) is dropped, with a note.

    Some states of others are understood: ``optax.MultiSteps``, in both directions,
    ``optax.apply_if_finite``, and, anywhere in the tree, Flax's ``DynamicScale`` and jmp's
    ``DynamicLossScale`` and ``StaticLossScale``:
    ``migrate_state((opt_state, dynamic_scale), new_tx, params)``.

    The saved value wins over a new argument wherever the state holds it: loss scales,
    ``inject_hyperparams`` and bases. The report notes where they differ.

    Args:
      old_state: the state as it was saved: in its own classes, with its dimension of replicas if it
        is one of a ``TrainState``. It is only read.
      new_tx: the transformation that goes on.
      params: the params that it trains; ``TrainState.params`` as they are.
      replicas: their number, for a ``new_tx`` with per-replica state where the old state has none.
        They share an open window out among them where they will add it up.

    Returns:
      The new state, no buffer of it shared with ``old_state`` or ``params``, in the dtypes and
      placed as ``new_tx.init(params)`` is; and a ``MigrationReport``. With a ``TrainStep``, place
      it by ``jax.device_put(state, step.shardings(state))``. Cost: an ``init`` and one copy of the
      state; call it on the host.

    Raises:
      ValueError: params of other shapes than those of ``old_state`` (it names the leaf); numbers of
        replicas that differ; an open window that does not fit; moments of scaled gradients, or
        scales by group, that the new place of a scaler makes wrong.
      TypeError: ``new_tx`` is no transformation, or ``old_state`` is a whole ``TrainState``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> params = jnp.zeros(3)
      >>> old_state = optax.chain(optax.clip(1.0), optax.scale_by_adam()).init(params)
      >>> new_tx = boostax.static_loss_scale(optax.scale_by_adam(), 8.0)
      >>> state, report = boostax.migrate_state(old_state, new_tx, params)
      >>> print(report)
      kept:
        ScaleByAdamState count, mu, nu: 1 -> inner_state
      made anew:
        LossScaleState scale, clean_steps, tolerance, last_finite, skipped_steps, \
skipped_in_a_row, growths, backoffs, floor_hits: the root
      dropped:
        nothing
    """
    checks.transformation(WHO, "new_tx", new_tx)
    if isinstance(old_state, TrainState):
        hint = "Pass state.opt_state and state.params, and put the result back with _replace."
        got = type(old_state).__name__
        raise TypeError(checks.message(WHO, "old_state", "an optimizer state", got, hint))
    if replicas is not None:
        checks.positive_int(WHO, "replicas", replicas, "It is the size of the replica axis.")
    local = params
    if any(map(is_per_replica, jax.tree.leaves(params, is_leaf=is_per_replica))):
        leading = {x.shape[0] for x in jax.tree.leaves(params)}
        replicas = leading.pop() if replicas is None else replicas
        entered = jax.tree.map(lambda x: getattr(x, "local", x), params, is_leaf=is_per_replica)
        local = jax.tree.map(lambda x: x[0], entered)
    first = new_tx.init(local)
    # Whatever they are stored in, moments are carried over in f32.
    old_state, fresh = widened(old_state), widened(first)
    olds, news = read(old_state, local), read(fresh, local)
    count = count_replicas(olds, news, local, replicas)
    carried = carry(olds, news, local, count)
    axis = _replica_sharding(olds)
    placed = {
        leaf.path: _placed(leaf, carried.taken.get(leaf.path), count, axis)
        for node in news
        for leaf in node.leaves.values()
    }
    state = jax.tree_util.tree_map_with_path(lambda path, _: placed[path], fresh)
    state = narrowed(first, state)
    notes = [*carried.notes, *_saved_wins(carried, news)]
    state = _scheduled(state, new_tx, local, notes)
    return state, _report(carried, olds, news, notes)


def _placed(leaf: Leaf, source: Leaf | None, replicas: int | None, axis: Any) -> jax.Array:
    """A buffer of its own for an array of the new state."""
    like = leaf.value
    if source is None:
        value = _copy(like, like)
    elif leaf.own and source.own:
        # Only the old one knows how it lies on the replicas.
        return _copy(source.value, source.value)
    else:
        given = source.value
        value = _copy(given[0] if source.own and replicas else given, like)
    if leaf.own and replicas is not None:
        value = jnp.broadcast_to(value[None], (replicas, *value.shape)).copy()
        value = value if axis is None else jax.device_put(value, axis)
    return value


def _copy(x: Any, like: Any) -> jax.Array:
    """``x`` in a new buffer, strongly typed, placed as ``like``."""
    if jnp.issubdtype(like.dtype, jax.dtypes.extended):
        return jax.device_put(x.copy(), like.sharding)
    if like.committed:
        return jax.device_put(jnp.array(x, like.dtype, copy=True), like.sharding)
    if isinstance(x, jax.Array) and not x.is_fully_replicated:
        return x.copy()
    # By way of the host: a copy of a committed array would be committed.
    return jnp.array(np.asarray(x), like.dtype, copy=True)


def _replica_sharding(olds: list[Node]) -> Any:
    """How the old per-replica arrays lie on the mesh, by their first dimension."""
    own = (leaf.value for node in olds for leaf in node.leaves.values() if leaf.own)
    known = (getattr(value, "sharding", None) for value in own)
    named = (x for x in known if isinstance(x, NamedSharding) and len(x.spec))
    return next((NamedSharding(x.mesh, PartitionSpec(x.spec[0])) for x in named), None)


def _scheduled(state: PyTree, tx: Any, params: PyTree, notes: list[str]) -> PyTree:
    """The next depth as the new schedule has it, after the steps that were taken."""
    variants = variants_of(tx)
    new = state if variants is None else variants.resumed(params, state)
    if new is state or int(new.coming()) == int(state.coming()):
        return state
    notes.append(
        f"next_depth is {int(new.coming())}, not {int(state.coming())}: the schedule's own."
    )
    return jax.tree.map(lambda x, old: old if x is old else _copy(x, old), new, state)


def _saved_wins(carried: Carried, news: list[Node]) -> list[str]:
    """Saved numbers that differ from those that the new transformation was given."""
    notes: list[str] = []
    for node in news:
        for rel, leaf in node.leaves.items():
            source, name = carried.taken.get(leaf.path), trees.path_name(rel[:1])
            given = name in {node.holds.scale, node.holds.basis}
            if name == "hyperparams":
                given = rel[1].key not in getattr(node.value, "hyperparams_states", {})
            if source is None or not given:
                continue
            saved, anew = np.asarray(source.value), np.asarray(leaf.value)
            if saved.shape == anew.shape and not np.array_equal(saved, anew):
                words = f"{saved!s}, not {anew!s}" if not saved.ndim else "the saved one"
                notes.append(f"{trees.path_name(leaf.path)} is {words}: the saved value stays.")
    return notes


def _report(
    carried: Carried, olds: list[Node], news: list[Node], notes: list[str]
) -> MigrationReport:
    origins = {path: source.node.path for path, source in carried.taken.items()}
    kept: list[str] = []
    for node in news:
        sources = [carried.taken.get(leaf.path) for leaf in node.leaves.values()]
        # A dict, for its order; nodes are told apart by where they lie.
        places = dict.fromkeys((x.node.path, x.node.source) for x in sources if x is not None)
        for path, source in places:
            words = _fields(node, lambda leaf, path=path: origins.get(leaf.path) == path)
            origin = "" if source == node.source else f" from {source}"
            way = spot(path) if path == node.path else f"{spot(path)} -> {spot(node.path)}"
            kept.append(f"{node.source} {words}{origin}: {way}")
    used = {source.path for source in carried.taken.values()}
    anew, dropped = _without(origins, news), _without(used, olds)
    return MigrationReport(tuple(kept), anew, dropped, tuple(notes))


def _fields(node: Node, wanted: Callable[[Leaf], bool]) -> str:
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


def _without(paths: Container[Path], nodes: list[Node]) -> tuple[str, ...]:
    """What of each state is not among these arrays."""
    found = [(node, _fields(node, lambda leaf: leaf.path not in paths)) for node in nodes]
    return tuple(f"{node.source} {words}: {spot(node.path)}" for node, words in found if words)
