# SPDX-License-Identifier: Apache-2.0
"""Carry a saved optimizer state over to a chain that has changed since.

An optimizer state is a tree of states, which are NamedTuples, and each array belongs to the
innermost one around it. States are matched by class, arrays by their path within the state, and
what belongs together (an open window, the moments of a param) is carried whole or not at all.

A scaler divides gradients for what is inside it. A state around it, or before it in a chain, sees
gradients times its scale, and so is what that state sums up: its unit.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from boostax._core import checks, trees
from boostax._core.describe import Holds
from boostax._core.finite import usable
from boostax._core.gate import Pending
from boostax._core.replicas import PerReplica, is_per_replica, spread_anew
from boostax._core.variants import variants_of
from boostax.accumulate.window import AccumulateState, Window
from boostax.precision.loss_scale import LossScaleState
from boostax.precision.store import StoreState, narrowed, widened
from boostax.train.state import TrainState

PyTree = Any
Path = tuple[Any, ...]
WHO = "migrate_state"
FLUSH = "boostax.flush(old_tx, state, params)"
# What states of Optax hold, and arrays in no state at all.
HOLDS: dict[type, Holds] = {
    optax.MultiStepsState: Holds(("mini_step", "acc_grads"), "mini_step", ("acc_grads",)),
    optax.TraceState: Holds(sums=("trace",)),
    optax.contrib.ScheduleFreeState: Holds(params=True),
    type(None): Holds(params=True),
}


def holds(cls: type) -> Holds:
    """Return what the fields of a state class are: its own ``holds``, or what is known of it."""
    return getattr(cls, "holds", HOLDS.get(cls, Holds()))


@dataclasses.dataclass(frozen=True)
class MigrationReport:
    """Say what became of an optimizer state. ``print`` gives it in words.

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
        texts = ("\n  ".join((f"{t}:", *(lines or ("nothing",)))) for t, lines in parts.items())
        return "\n".join(texts)


@dataclasses.dataclass(eq=False)
class Leaf:
    """Hold an array of a state.

    Attributes:
      path: where it lies in the whole tree.
      rel: where it lies in its state.
      value: the array.
      replicas: ``None`` if it is the same on all replicas; else how many it leads with, 0 for one
        without that dimension.
      node: the state in which it is.
      owner: path of the param to which it belongs, if it belongs to one.
      source: the old array that a new one takes its value from.
    """

    path: Path
    rel: Path
    value: Any
    replicas: int | None
    node: "Node"
    owner: Path | None
    source: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on one replica."""
        return np.shape(self.value)[1 if self.replicas else 0 :]

    @property
    def saved(self) -> Any:
        """The value that it goes on with."""
        return self.value if self.source is None else self.source.value


@dataclasses.dataclass(eq=False)
class Node:
    """Hold a state within an optimizer state.

    Attributes:
      path: where it lies.
      value: the state itself; ``None`` for what is in no NamedTuple.
      leaves: its arrays by their paths in it, without those of states inside it.
      primary: the old state from which a new one has its counts.
    """

    path: Path
    value: Any
    leaves: dict[Path, Leaf] = dataclasses.field(default_factory=dict[Path, Leaf])
    primary: "Node | None" = None

    def __str__(self) -> str:
        return "no state" if self.value is None else type(self.value).__name__

    @property
    def holds(self) -> Holds:
        """What its fields are."""
        return holds(type(self.value))

    def bound(self) -> list[Path]:
        """Return the paths of the arrays that mean something together alone."""
        return [rel for rel in self.leaves if rel[0].name in (self.holds.bound or ())]

    def drop(self, rels: Iterable[Path]) -> None:
        """Let arrays be as ``init`` made them after all."""
        for rel in rels:
            self.leaves[rel].source = None

    def opened(self) -> int:
        """Return the number of micro-steps in its open window; 0 for one that has none."""
        leaf = self.leaves.get((GetAttrKey(self.holds.opened),))
        return 0 if leaf is None else int(leaf.saved)


def arrays(nodes: Iterable[Node]) -> list[Leaf]:
    """Return the arrays of all these states."""
    return [leaf for node in nodes for leaf in node.leaves.values()]


def read(tree: PyTree, params: PyTree) -> list[Node]:
    """Return the states of a tree, outermost first. The containers of the params are none."""
    containers = set(map(type, trees.find(params, lambda _: True)))
    owners = dict(jax.tree_util.tree_leaves_with_path(params))
    found = [Node((), None)]

    def visit(path: Path, x: Any, node: Node, rel: Path, replicas: int | None) -> None:
        _require_known(x)
        if isinstance(x, PerReplica):
            visit((*path, GetAttrKey("local")), x.local, node, rel, 0)
        elif jax.tree_util.all_leaves([x]):
            value = x if hasattr(x, "dtype") else jnp.asarray(x)
            node.leaves[rel] = Leaf(path, rel, value, replicas, node, _owner(rel, value, owners))
        else:
            if _is_state(x) and type(x) not in containers:
                node, rel = Node(path, x), ()
                found.append(node)
            pairs = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]
            for (key,), child in pairs:
                visit((*path, key), child, node, (*rel, key), replicas)

    visit((), tree, found[0], (), None)
    return [node for node in found if node.leaves]


def _is_state(x: Any) -> bool:
    """Return whether ``x`` is a state, and not one of the parts of which a state is made."""
    name, ours = type(x).__name__, type(x).__module__.startswith("boostax.")
    part = not name.endswith("State") if ours else name in ("MaskedNode", "WrappedScheduleState")
    return hasattr(x, "_fields") and not part


def _require_known(x: Any) -> None:
    """Refuse the state of a part that boostax no longer has."""
    cls, name = type(x), f"{type(x).__module__}.{type(x).__name__}"
    gone = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is not cls
    if isinstance(x, StoreState) and any(y.dtype == jnp.bfloat16 for y in jax.tree.leaves(x.low)):
        gone, name = True, f"{name} of params='kahan'"
    hint = "Take that part out of the chain with the version of boostax that saved it."
    fine = not (gone and name.startswith("boostax."))
    checks.require(WHO, "old_state", name, "of parts that boostax has", fine, hint)


def _owner(path: Path, x: Any, params: dict[Path, Any]) -> Path | None:
    """Return the path of the param to which an array belongs: the one that ends its own.

    A lone param has an empty path, which ends every other: there the shape decides.
    """
    found = next((path[i:] for i in range(len(path) + 1) if path[i:] in params), None)
    other = found == () and params[()].shape not in (np.shape(x), np.shape(x)[1:])
    return None if other else found


def _from_multi_steps(x: Any) -> AccumulateState:
    """Return the window of ``accumulate``, which holds a sum; ``MultiSteps`` holds a mean."""
    sums = jax.tree.map(lambda g: g * x.mini_step, trees.at_least_float32(x.acc_grads))
    closed = (x.gradient_step > 0) & (x.mini_step == 0)
    window, unknown = Window(sums, None), cast("jax.Array", None)
    return AccumulateState(x.mini_step, x.gradient_step, unknown, closed, window, x.inner_opt_state)


def _to_multi_steps(x: Any) -> optax.MultiStepsState:
    """Return the window of ``MultiSteps``; it has none for weights."""
    grads = x.window.grads if isinstance(x.window, Window) and x.window.weight is None else None
    share = lambda g: g / jnp.maximum(x.micro_step, 1)  # noqa: E731
    means = jax.tree.map(share, trees.at_least_float32(grads))
    return optax.MultiStepsState(x.micro_step, x.optimizer_steps, x.inner_state, means, ())


def _scaler(scale: Any = None, clean_steps: Any = None, **fields: Any) -> LossScaleState:
    """Return a scaler's state with what another library knows of it."""
    if scale is not None:
        fields |= {"scale": jnp.asarray(scale, jnp.float32).reshape(())}
    if clean_steps is not None:
        fields |= {"clean_steps": jnp.asarray(clean_steps, jnp.int32)}
    unknown: dict[str, Any] = dict.fromkeys(LossScaleState._fields)
    return LossScaleState(**unknown | fields)


def _from_apply_if_finite(x: Any) -> LossScaleState:
    skipped = {"skipped_in_a_row": x.notfinite_count, "skipped_steps": x.total_notfinite}
    return _scaler(last_finite=x.last_finite, inner_state=x.inner_state, **skipped)


# Other libraries' states as those that do their work, with ``None`` for what they do not know.
# Flax's and jmp's by their names, so that neither is imported.
TRANSLATIONS: dict[Any, tuple[type, Callable[[Any], Any]]] = {
    optax.MultiStepsState: (AccumulateState, _from_multi_steps),
    AccumulateState: (optax.MultiStepsState, _to_multi_steps),
    optax.ApplyIfFiniteState: (LossScaleState, _from_apply_if_finite),
    "DynamicScale": (LossScaleState, lambda x: _scaler(x.scale, x.fin_steps)),
    "DynamicLossScale": (LossScaleState, lambda x: _scaler(x.loss_scale, x.counter)),
    "StaticLossScale": (LossScaleState, lambda x: _scaler(x.loss_scale)),
}


def translated(tree: PyTree, wanted: set[type], notes: list[str]) -> PyTree:
    """Return the state, other libraries' as those that do their work where these are wanted."""

    def form_of(x: Any) -> Any:
        cls, form = TRANSLATIONS.get(type(x), TRANSLATIONS.get(type(x).__name__, (None, None)))
        return form if cls in wanted and type(x) not in wanted else None

    def translate(x: Any) -> Any:
        form = form_of(x)
        if form is _from_multi_steps:
            notes.append("acc_grads of MultiStepsState is taken as a mean (use_grad_mean=True).")
        return x if form is None else translated(form(x), wanted, notes)

    return jax.tree.map(translate, tree, is_leaf=lambda x: form_of(x) is not None)


def unit_at(path: Path, nodes: list[Node]) -> dict[str, Any]:
    """Return what the gradients that a state sees are multiplied by.

    Args:
      path: that of the state.
      nodes: all states of the tree.

    Returns:
      By ``""`` the product of the scales that are known to apply to all of them, if there are any;
      by their names scales of groups, and of scalers in one part of a ``partition`` or
      ``named_chain``: it can only be said whether they are the same elsewhere.
    """
    unit: dict[str, Any] = {}
    for node in nodes:
        leaf, way = node.leaves.get((GetAttrKey(node.holds.scale),)), _way(path, node.path)
        # One that was kept beside the optimizer divides nothing.
        if leaf is None or way is None or getattr(node.value, "inner_state", ()) is None:
            continue
        found = np.asarray(leaf.saved, np.float64)
        found = 2.0 ** (np.frexp(found)[1] - 1.0) if node.holds.powers else found
        if way == "" and np.all(found == found.flat[0]):
            unit[""] = unit.get("", 1.0) * float(found.flat[0])
        else:
            unit[way or "the groups"] = found.tolist()
    return unit


def _way(path: Path, scaler: Path) -> str | None:
    """Return how gradients come from a state to a scaler: ``None`` if none do, "" if all do."""
    pairs = enumerate(zip(path, scaler, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(path), len(scaler)))
    here, there = path[shared : shared + 1], scaler[shared:]
    if not there:
        return None
    if here and isinstance(here[0], SequenceKey):
        return "" if here[0].idx < there[0].idx else None
    parts = isinstance(here[0], DictKey) if here else GetAttrKey("inner_states") in there
    return trees.path_name(there) if parts else None if here else ""


def _words(unit: dict[str, Any]) -> str:
    rest = (f"{found} of {way}" for way, found in unit.items() if way)
    return " and ".join([f"{unit.get('', 1.0):g}", *rest])


def measured(leaf: Leaf) -> str | None:
    """Return what an array is in terms of the gradients that its state sees.

    Returns:
      ``None`` for what has nothing to do with their scale; ``"sum"`` for what is proportional to
      it, ``"moment"`` for other powers, ``"unknown"`` for states of which nothing is known.
    """
    known, cls = leaf.node.holds, type(leaf.node.value)
    if known.sums:
        return "sum" if trees.path_name(leaf.rel).startswith(known.sums) else None
    number = leaf.owner == () and not leaf.shape  # To a lone scalar all scalars seem to belong.
    real = jnp.issubdtype(leaf.value.dtype, jnp.inexact)
    if leaf.owner is None or number or known.params or not real:
        return None
    named = cls.__module__.startswith("optax.") and cls.__name__.startswith("ScaleBy")
    return "moment" if named else "unknown"


def fits(old: Leaf, new: Leaf) -> bool:
    """Return whether an old array can stand for a new one; in a window, in another precision."""
    kinds, dtypes = (jnp.floating, jnp.complexfloating), (old.value.dtype, new.value.dtype)
    alike = any(all(jnp.issubdtype(x, kind) for x in dtypes) for kind in kinds)
    if dtypes[0] != dtypes[1] and not (new.node.holds.opened and alike):
        return False
    return old.shape == new.shape and (new.replicas is not None or (old.replicas or 1) == 1)


def score(old: Node, new: Node) -> tuple[int, int, int]:
    """Return how well two states fit, also by the names by which ``partition`` tells parts."""
    good = sum(fits(old.leaves[rel], new.leaves[rel]) for rel in old.leaves.keys() & new.leaves)
    labels = [{key for key in node.path if isinstance(key, DictKey)} for node in (old, new)]
    return good, good - len(old.leaves), len(labels[0] & labels[1])


def match(olds: list[Node], news: list[Node], notes: list[str]) -> None:
    """Give the states of a class their sources, the best fit first, then the lowest numbers.

    By what belongs to a param one state may become several, or several one. Several translated ones
    may feed one: a scale from here, the skipped steps from there.
    """
    scores = {(old, new): score(old, new) for old in olds for new in news}
    for old, new in sorted(scores, key=scores.__getitem__, reverse=True):
        if scores[old, new][0] and not new.primary and old not in [x.primary for x in news]:
            new.primary = old
    pairs = [(new.primary, new) for new in news if new.primary]
    shared = itertools.product(olds, news) if news[0].holds.bound is None else ()
    for old, new in [*pairs, *shared]:
        used = {leaf.source for leaf in arrays(news)}
        free = {
            rel: source
            for rel, source in old.leaves.items()
            if (leaf := new.leaves.get(rel)) and not leaf.source and fits(source, leaf)
        }
        moments = {rel: x for rel, x in free.items() if x.owner is not None and x not in used}
        if moments and new.primary not in (None, old):
            place = f"{new} at {spot(new.path)}"
            notes.append(f"{place} also takes moments from {spot(old.path)}, not counts.")
        if moments and new.primary is None:
            new.primary = old
        known = new.primary.leaves if new.primary and new.primary is not old else ()
        alone = {rel: x for rel, x in free.items() if x.owner is None and rel not in known}
        for rel, source in (moments | (alone if new.primary else {})).items():
            new.leaves[rel].source = source
    pairs = [(new.primary, new) for new in news if new.primary]
    several = olds and max(len(olds), len(news)) > 1
    if several and pairs != list(itertools.zip_longest(olds, news)):
        chosen = ", ".join(f"{spot(old.path)} -> {spot(new.path)}" for old, new in pairs)
        counts = f"{len(olds)} in the old state, {len(news)} in the new one"
        notes.append(f"{news[0]}: {counts}; {chosen or 'none fits'}.")


def settle(new: Node) -> None:
    """Give up what would be wrong without the rest of it."""
    lacks = {rel for rel, leaf in new.leaves.items() if leaf.source is None}
    old, bound = new.primary or new, new.bound()
    if new.holds.bound is not None:
        if {*bound} != {*old.bound()} or lacks & {*bound}:
            new.drop(bound)
        return
    owned = {rel: leaf.owner for rel, leaf in new.leaves.items() if leaf.owner is not None}
    # A second moment of zero beside an old first one would make a huge step.
    broken = {owned[rel] for rel in lacks & owned.keys() & old.leaves.keys()}
    if owned and all(owned[rel] in broken or rel in lacks for rel in owned):
        # Counts without their moments: the bias correction would be wrong.
        new.drop(new.leaves)
    new.drop(rel for rel, owner in owned.items() if owner in broken)


def convert(olds: list[Node], news: list[Node], notes: list[str]) -> set[Path]:
    """Multiply what is a sum of gradients by what makes it one of those at its new place.

    Returns:
      Where windows stood that are dropped, as the old chain would have skipped them.
    """
    before, spoilt = {node.path: unit_at(node.path, olds) for node in olds}, set[Path]()
    for new in news:
        after, stale = unit_at(new.path, news), bool(new.holds.opened) and not new.opened()
        sums = (new.leaves[rel].source for rel in new.bound())
        window = [x for x in sums if x and new.opened()]
        unit = before[window[0].node.path] if window else {}
        factor = jnp.float32(1 / unit.get("", 1.0))
        if unit and not after and not all(usable(Pending(x.value, (factor,))) for x in window):
            place = window[0].node.path
            new.drop(new.bound())
            spoilt.add(place)
            words = "cannot be used and is dropped, as its loss scaler would have done"
            notes.append(f"The open window at {spot(place)} {words}.")
        for leaf in new.leaves.values():
            if leaf.source is not None:
                unit = before[leaf.source.node.path]
                factor = 1.0 if stale else ratio(leaf, unit, after, notes)
                leaf.source = _multiplied(leaf, leaf.source, factor, stale)
    return spoilt


def ratio(leaf: Leaf, before: Any, after: Any, notes: list[str]) -> float:
    """Return the new loss scale in the old one, for what is proportional to it."""
    how, path, one = measured(leaf), leaf.source.node.path, {"": 1.0}
    if how is None or one | before == one | after:
        return 1.0
    words = (
        f"{leaf.node} at {spot(path)} of gradients times {_words(before)}, which at "
        f"{spot(leaf.node.path)} come times {_words(after)}"
    )
    if how == "moment" or before | one != after | one:
        hint = "Put the loss scaler where it was, around the whole optimizer at best."
        hint = f"Apply the window before: {FLUSH}." if leaf.node.holds.opened else hint
        allowed = "of gradients that the loss scale multiplies alike in new_tx"
        raise ValueError(f"{WHO}: old_state must be {allowed}, got {words}. {hint}")
    notes.append(f"{words}: {'converted' if how == 'sum' else 'kept as it is'}.")
    return after.get("", 1.0) / before.get("", 1.0) if how == "sum" else 1.0


def _multiplied(like: Leaf, source: Leaf, factor: float, stale: bool) -> Leaf:
    """Return an array times a factor in the dtype of another, unchanged if that changes nothing."""
    x, dtype = source.value, like.value.dtype
    if factor == 1 and dtype == x.dtype:
        return source
    value = (trees.at_least_float32(x) * np.float32(factor)).astype(dtype)
    fit = stale or bool(jnp.isfinite(value).all() | ~jnp.isfinite(x).all())
    got, hint = f"{dtype} at {trees.path_name(like.path)}", "accumulator_dtype='float32' holds it."
    allowed = f"able to hold the open window, times {factor:g}"
    checks.require(WHO, "new_tx", got, allowed, fit, hint)
    return dataclasses.replace(source, value=value)


def require_windows(olds: list[Node], news: list[Node], spoilt: set[Path]) -> None:
    """Refuse to lose what an open window holds."""
    used = {leaf.source.path for leaf in arrays(news) if leaf.source}
    for old in olds:
        sums, count = [old.leaves[rel] for rel in old.bound()], old.opened()
        if count and old.path not in spoilt and not any(leaf.path in used for leaf in sums):
            hint = f"Apply them before: {FLUSH}."
            if any(leaf.replicas is not None for leaf in sums):
                hint += " Or make one window of all: boostax.reshard_state(old_state, 1)."
            allowed = "have no open window that does not fit new_tx"
            got = f"one of {count} micro-steps at {spot(old.path)}"
            raise ValueError(f"{WHO}: old_state must {allowed}, got {got}. {hint}")


def require_same_params(olds: list[Node], news: list[Node], params: PyTree) -> None:
    """Refuse a state that was made for params of other shapes."""
    shapes = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
    before = {(type(leaf.node.value), leaf.rel): leaf for leaf in arrays(olds)}
    kept = {(leaf.owner, leaf.shape) for leaf in arrays(olds)}
    for leaf in arrays(news):
        old = before.get((type(leaf.node.value), leaf.rel), leaf)
        own = leaf.owner is not None and leaf.shape == shapes[leaf.owner]
        # Arrays of one element stand in for what an optimizer does without.
        odd = own and old.shape not in (leaf.shape, (1,)) and (leaf.owner, leaf.shape) not in kept
        got = f"{trees.path_name(leaf.owner or ()) or 'a leaf'} of {leaf.shape}"
        allowed = f"as old_state has them, {old.shape} at {spot(old.path)!r}"
        hint = "A changed layer needs a new state: mask it out, or use new_tx.init(params)."
        checks.require(WHO, "params", got, allowed, not odd, hint)


def count_replicas(olds: list[Node], params: PyTree, asked: int | None) -> int:
    """Return how many replicas the old per-replica arrays lead with; 0 if they do not."""
    shapes = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
    own = [leaf for leaf in arrays(olds) if leaf.replicas is not None]
    likes = [(x.shape, shapes[x.owner]) for x in own if x.owner is not None]
    counts = {0 if got == like else got[0] for got, like in likes if like in (got, got[1:])}
    counts |= set() if asked is None else {asked}
    got = " and ".join(sorted(str(count or "no") for count in counts))
    hint = "boostax.reshard_state(old_state, replicas) takes it to another number first."
    checks.require(WHO, "replicas", got, "the same everywhere", len(counts) <= 1, hint)
    for leaf in own:
        leaf.replicas = max(counts, default=0)
    return max(counts, default=0)


def spot(path: Path) -> str:
    """Return a place in a state as people write it."""
    return trees.path_name(path) or "the root"


def placed(leaf: Leaf, replicas: int) -> jax.Array:
    """Return a buffer of its own for an array of the new state."""
    x, old, state = leaf.saved, leaf.source, leaf.node.value
    if old is not None and old.replicas is not None and leaf.replicas is not None:
        # Only the old one knows how it lies on the replicas; the others lie on none yet.
        return _copy(x, x)
    value = _copy(x[0] if old is not None and old.replicas else x, leaf.value)
    if leaf.replicas is None:
        return value
    summed = isinstance(state, AccumulateState) and bool(state.shares())
    if not replicas:
        hint = "They add up their windows: of the open one each gets a part."
        lost = summed and old is not None and leaf.node.opened()
        checks.require(WHO, "replicas", None, "given", not lost, hint)
        return value
    return spread_anew(PerReplica(value[None]), replicas, summed).local


def _copy(x: Any, like: Any) -> jax.Array:
    """Return ``x`` in a new buffer, strongly typed, placed as ``like``."""
    if like.committed or jnp.issubdtype(like.dtype, jax.dtypes.extended):
        return jax.device_put(jnp.array(x, like.dtype, copy=True), like.sharding)
    if isinstance(x, jax.Array) and not x.is_fully_replicated:
        return x.copy()
    # By way of the host: a copy of a committed array would be committed.
    return jnp.array(np.asarray(x), like.dtype, copy=True)


def _scheduled(state: PyTree, tx: Any, params: PyTree, notes: list[str]) -> PyTree:
    """Return the state with the next depth of the new schedule, after the steps that were taken."""
    variants = variants_of(tx)
    new = state if variants is None else variants.resumed(params, state)
    if new is state or int(new.coming()) == int(state.coming()):
        return state
    words = f"next_depth is {int(new.coming())}, not {int(state.coming())}"
    notes.append(f"{words}: the schedule's own.")
    return jax.tree.map(lambda x, old: old if x is old else _copy(x, old), new, state)


def saved_wins(news: list[Node]) -> Iterator[str]:
    """Yield notes on saved numbers that differ from those that the new chain was given."""
    for leaf in arrays(news):
        name, node = trees.path_name(leaf.rel[:1]), leaf.node
        given = name in (node.holds.scale, node.holds.basis)
        if name == "hyperparams":
            given = leaf.rel[1].key not in getattr(node.value, "hyperparams_states", {})
        saved, anew = leaf.saved, leaf.value
        if given and np.shape(saved) == anew.shape and not np.array_equal(saved, anew):
            words = "the saved one" if np.ndim(saved) else f"{saved!s}, not {anew!s}"
            yield f"{trees.path_name(leaf.path)} is {words}: the saved value stays."


def report(olds: list[Node], news: list[Node], notes: list[str]) -> MigrationReport:
    """Say what became of each state."""
    kept, anew, used = list[str](), list[str](), set[Path]()
    for new in news:
        parts: dict[Path | None, set[Path]] = {}
        for rel, leaf in new.leaves.items():
            parts.setdefault(leaf.source and leaf.source.node.path, set()).add(rel)
            used |= {leaf.source.path} if leaf.source else set()
        for path, rels in parts.items():
            way = (
                spot(new.path) if path in (None, new.path) else f"{spot(path)} -> {spot(new.path)}"
            )
            (anew if path is None else kept).append(f"{_fields(new, rels)}: {way}")
    rest = [(old, {rel for rel, x in old.leaves.items() if x.path not in used}) for old in olds]
    dropped = [f"{_fields(old, rels)}: {spot(old.path)}" for old, rels in rest if rels]
    every = (kept, anew, dropped, dict.fromkeys([*notes, *saved_wins(news)]))
    return MigrationReport(*map(tuple, every))


def _fields(node: Node, chosen: set[Path]) -> str:
    """Return the name of a state, its fields that are chosen, and arrays of those in part."""
    fields: dict[str, list[Path]] = {}
    for rel in node.leaves:
        field = trees.path_name(rel if node.value is None else rel[:1])
        fields.setdefault(field, []).append(rel)
    words: list[str] = []
    for field, rels in fields.items():
        some = [trees.path_name(rel) for rel in rels if rel in chosen]
        words += [field] if len(some) == len(rels) else [*some[:4], *["..."] * (len(some) > 4)]
    return f"{node} {', '.join(words)}"


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
    if any(map(is_per_replica, jax.tree.leaves(params, is_leaf=is_per_replica))):
        replicas = replicas or jax.tree.leaves(params)[0].shape[0]
        entered = jax.tree.map(lambda x: getattr(x, "local", x), params, is_leaf=is_per_replica)
        params = jax.tree.map(lambda x: x[0], entered)
    first, notes = new_tx.init(params), list[str]()
    # Whatever they are stored in, moments are carried over in f32.
    fresh, old_state = widened(first), widened(old_state)
    news = read(fresh, params)
    olds = read(translated(old_state, {type(new.value) for new in news}, notes), params)
    count = count_replicas(olds, params, replicas)
    require_same_params(olds, news, params)
    for cls in dict.fromkeys(type(new.value) for new in news):
        old, new = ([x for x in nodes if type(x.value) is cls] for nodes in (olds, news))
        match(old, new, notes)
    for new in news:
        settle(new)
    require_windows(olds, news, convert(olds, news, notes))
    values = {leaf.path: placed(leaf, count) for leaf in arrays(news)}
    state = jax.tree_util.tree_map_with_path(lambda path, _: values[path], fresh)
    state = _scheduled(narrowed(first, state), new_tx, params, notes)
    return state, report(olds, news, notes)
