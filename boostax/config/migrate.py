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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from boostax._core import axes, checks, trees
from boostax._core.describe import Holds, variants_of
from boostax._core.gate import Pending
from boostax._core.replicas import PerReplica, spread_anew
from boostax._core.trees import stays_finite
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
        titles = ("kept", "made anew", "dropped", *["notes"] * bool(self.notes))
        parts = zip(titles, dataclasses.astuple(self), strict=False)
        return "\n".join("\n  ".join((f"{t}:", *(lines or ("nothing",)))) for t, lines in parts)


class Leaf(NamedTuple):
    """Hold an array of a state.

    Attributes:
      path: its path in the whole tree.
      rel: its path in its state.
      value: the array.
      at: path of its state.
      state: the innermost state around it; ``None`` for what is in no NamedTuple.
      field: the field of the state in which it is.
      holds: what the fields of that state are.
      bound: whether it means something together with others alone.
      owner: path of the param to which it belongs, if it belongs to one.
      like: the shape of that param.
      replicas: ``None`` if it is the same on all replicas; else how many it leads with, 0 for one
        without that dimension.
    """

    path: Path
    rel: Path
    value: Any
    at: Path
    state: Any
    field: str
    holds: Holds
    bound: bool
    owner: Path | None
    like: tuple[int, ...] | None
    replicas: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on one replica."""
        return self.value.shape[1 if self.replicas else 0 :]


# The arrays of each state by their paths in it; old arrays by the paths of the new ones that they
# become.
States: TypeAlias = dict[Path, dict[Path, Leaf]]
Sources: TypeAlias = dict[Path, Leaf]


def states(leaves: list[Leaf], cls: type) -> States:
    """Return the arrays of the states of a class."""
    places = dict.fromkeys(x.at for x in leaves if type(x.state) is cls)
    return {at: {x.rel: x for x in leaves if x.at == at} for at in places}


def read(tree: PyTree, params: PyTree) -> list[Leaf]:
    """Return the arrays of all states, the outermost first. Containers of params are no states."""
    containers = set(map(type, trees.find(params, lambda _: True)))
    owners: Any = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
    found: dict[Path, list[Leaf]] = {(): []}

    def visit(x: Any, path: Path, rel: Path, at: Path, state: Any, replicas: int | None) -> None:
        _require_known(x)
        if jax.tree_util.all_leaves([x]):
            value, field = jnp.asarray(x), trees.path_name(rel if state is None else rel[:1])
            owner, known = _owner(rel, value.shape, owners), holds(type(state))
            about = (field, known, field in (known.bound or ()), owner, owners.get(owner), replicas)
            found[at].append(Leaf(path, rel, value, at, state, *about))
            return
        if _is_state(x) and type(x) not in containers:
            rel, at, state, found[path] = (), path, x, []
        for (key,), child in jax.tree_util.tree_flatten_with_path(x, lambda y: y is not x)[0]:
            if isinstance(x, PerReplica):
                visit(child, (*path, key), rel, at, state, 0)
            else:
                visit(child, (*path, key), (*rel, key), at, state, replicas)

    visit(tree, (), (), (), None, None)
    return list(itertools.chain(*found.values()))


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


def _owner(path: Path, shape: Any, owners: dict[Path, Any]) -> Path | None:
    """Return the path of the param to which an array belongs: the one that ends its own.

    A lone param has an empty path, which ends every other: there the shape decides.
    """
    found = next((path[i:] for i in range(len(path) + 1) if path[i:] in owners), None)
    return None if found == () and owners[()] not in (shape, shape[1:]) else found


def _from_multi_steps(x: Any) -> dict[str, Any]:
    """Return the window of ``accumulate``, which holds a sum; ``MultiSteps`` holds a mean."""
    sums = jax.tree.map(lambda g: g * x.mini_step, trees.at_least_float32(x.acc_grads))
    closed = (x.gradient_step > 0) & (x.mini_step == 0)
    counts = {"micro_step": x.mini_step, "optimizer_steps": x.gradient_step, "applied": closed}
    return {**counts, "window": Window(sums, None), "inner_state": x.inner_opt_state}


def _to_multi_steps(x: Any) -> dict[str, Any]:
    """Return the window of ``MultiSteps``; it has none for weights."""
    grads = x.window.grads if isinstance(x.window, Window) and x.window.weight is None else None
    means = jax.tree.map(lambda g: g / jnp.maximum(x.micro_step, 1), trees.at_least_float32(grads))
    counts = {"mini_step": x.micro_step, "gradient_step": x.optimizer_steps}
    return {**counts, "acc_grads": means, "inner_opt_state": x.inner_state}


def _from_apply_if_finite(x: Any) -> dict[str, Any]:
    counts = {"skipped_in_a_row": x.notfinite_count, "skipped_steps": x.total_notfinite}
    return {**counts, "last_finite": x.last_finite, "inner_state": x.inner_state}


def _scale(scale: Any, **counts: Any) -> dict[str, Any]:
    found = {name: jnp.asarray(x, jnp.int32) for name, x in counts.items()}
    return {**found, "scale": jnp.asarray(scale, jnp.float32).reshape(())}


# By class other libraries' states: the class that does their work, and its fields that they know.
# Flax's and jmp's are named, so that neither is imported.
TRANSLATIONS: dict[str, tuple[type, Callable[[Any], dict[str, Any]]]] = {
    "MultiStepsState": (AccumulateState, _from_multi_steps),
    "AccumulateState": (optax.MultiStepsState, _to_multi_steps),
    "ApplyIfFiniteState": (LossScaleState, _from_apply_if_finite),
    "DynamicScale": (LossScaleState, lambda x: _scale(x.scale, clean_steps=x.fin_steps)),
    "DynamicLossScale": (LossScaleState, lambda x: _scale(x.loss_scale, clean_steps=x.counter)),
    "StaticLossScale": (LossScaleState, lambda x: _scale(x.loss_scale)),
}


def translated(tree: PyTree, wanted: set[type], notes: list[str]) -> PyTree:
    """Return the state, other libraries' as those that do their work where these are wanted."""

    def strange(x: Any) -> bool:
        return type(x) not in wanted and TRANSLATIONS.get(type(x).__name__, "?")[0] in wanted

    def translate(x: Any) -> Any:
        if not strange(x):
            return x
        cls, fields = TRANSLATIONS[type(x).__name__]
        if fields is _from_multi_steps:
            notes.append("acc_grads of MultiStepsState is taken as a mean (use_grad_mean=True).")
        return translated(cls(**dict.fromkeys(cls._fields) | fields(x)), wanted, notes)

    return jax.tree.map(translate, tree, is_leaf=strange)


def fits(old: Leaf, new: Leaf) -> bool:
    """Return whether an old array can stand for a new one; in a window, in another precision."""
    kinds, dtypes = (jnp.floating, jnp.complexfloating), (old.value.dtype, new.value.dtype)
    alike = any(all(jnp.issubdtype(x, kind) for x in dtypes) for kind in kinds)
    if dtypes[0] != dtypes[1] and not (new.holds.opened and alike):
        return False
    return old.shape == new.shape and (new.replicas is not None or (old.replicas or 1) == 1)


def matched(olds: States, news: States, notes: list[str]) -> Sources:
    """Give the states of a class their sources, the best fit first, then the lowest numbers.

    By what belongs to a param one state may become several, or several one. Several translated ones
    may feed one: a scale from here, the skipped steps from there.
    """
    found, primary, every = Sources(), dict[Path, Path](), list(itertools.product(olds, news))
    fitting: dict[tuple[Path, Path], Sources] = {}
    for old, new in every:
        both = ((x, news[new][rel]) for rel, x in olds[old].items() if rel in news[new])
        fitting[old, new] = {y.path: x for x, y in both if fits(x, y)}

    def score(pair: tuple[Path, Path]) -> tuple[int, int, int]:
        """Count what fits, what has no place, and the names by which ``partition`` tells parts."""
        labels = [{key for key in path if isinstance(key, DictKey)} for path in pair]
        good = len(fitting[pair])
        return good, good - len(olds[pair[0]]), len(labels[0] & labels[1])

    some = next(iter(next(iter(news.values())).values()))
    attempts = [(True, *pair) for pair in sorted(every, key=score, reverse=True)]
    attempts += [(False, *pair) for pair in every if some.holds.bound is None]
    for alone, old, new in attempts:
        if alone and (new in primary or old in primary.values()):
            continue
        used = {x.path for x in found.values() if x.owner is not None}
        free = {y: x for y, x in fitting[old, new].items() if not (y in found or x.path in used)}
        moments = any(x.owner is not None for x in free.values())
        if moments and new in primary:
            also = f"also takes moments from {spot(old)}, not counts."
            notes.append(f"{named(some)} at {spot(new)} {also}")
        if moments or (alone and free):
            primary.setdefault(new, old)
        found |= free if new in primary else {}
    pairs = [(primary[new], new) for new in news if new in primary]
    if len(every) > 1 and pairs != [*itertools.zip_longest(olds, news)]:
        chosen = ", ".join(f"{spot(old)} -> {spot(new)}" for old, new in pairs)
        counts = f"{len(olds)} in the old state, {len(news)} in the new one"
        notes.append(f"{named(some)}: {counts}; {chosen or 'none fits'}.")
    for at, new in news.items():
        for path in incomplete(olds[primary[at]] if at in primary else new, new, found):
            found.pop(path, None)
    return found


def incomplete(old: dict[Path, Leaf], new: dict[Path, Leaf], found: Sources) -> list[Path]:
    """Return what would be wrong without the rest of it."""
    lacks = {rel for rel, y in new.items() if y.path not in found}
    bound, before = ({rel for rel, x in state.items() if x.bound} for state in (new, old))
    owned = {rel: y.owner for rel, y in new.items() if y.owner is not None}
    # A second moment of zero beside an old first one would make a huge step.
    broken = {owned[rel] for rel in lacks & owned.keys() & old.keys()}
    wrong = {rel for rel, owner in owned.items() if owner in broken}
    # Counts without their moments: the bias correction would be wrong.
    wrong = {*new} if owned and owned.keys() <= wrong | lacks else wrong
    if next(iter(new.values())).holds.bound is not None:
        wrong = bound if bound != before or lacks & bound else set[Path]()
    return [new[rel].path for rel in wrong]


def units(leaves: list[Leaf], found: Sources) -> dict[Path, dict[str, Any]]:
    """Return by what the gradients that each state sees are multiplied.

    Args:
      leaves: the arrays of all states of the tree.
      found: the sources of those that have one.

    Returns:
      Per state by ``""`` the product of the scales that are known to apply to all of them, if there
      are any; by their names scales of groups, and of scalers in one part of a ``partition`` or
      ``named_chain``: it can only be said whether they are the same elsewhere.
    """
    seen: dict[Path, dict[str, Any]] = {x.at: {} for x in leaves}
    # A scaler that was kept beside the optimizer divides nothing.
    scales = [x for x in leaves if x.holds.scale == x.field != ""]
    scales = [x for x in scales if getattr(x.state, "inner_state", ()) is not None]
    for (at, unit), x in itertools.product(seen.items(), scales):
        scale = np.asarray(found.get(x.path, x).value, np.float64)
        scale = 2.0 ** (np.frexp(scale)[1] - 1.0) if x.holds.powers else scale
        way = _way(at, x.at)
        if way == "" and np.all(scale == scale.flat[0]):
            unit[""] = unit.get("", 1.0) * float(scale.flat[0])
        elif way is not None:
            unit[way or "the groups"] = scale.tolist()
    return seen


def _way(path: Path, scaler: Path) -> str | None:
    """Return how gradients come from a state to a scaler: ``None`` if none do, "" if all do."""
    shared = max(i for i in range(len(path) + 1) if path[:i] == scaler[:i])
    here: Any = next(iter(path[shared:]), None)
    there = scaler[shared:]
    behind = isinstance(here, SequenceKey) and there != () and there[0].idx < here.idx
    if not there or behind or isinstance(here, GetAttrKey):
        return None
    parts = isinstance(here, DictKey) or GetAttrKey("inner_states") in there
    return trees.path_name(there) if parts else ""


def _words(unit: dict[str, Any]) -> str:
    rest = (f"{found} of {way}" for way, found in unit.items() if way)
    return " and ".join([f"{unit.get('', 1.0):g}", *rest])


def measured(leaf: Leaf) -> str | None:
    """Return what an array is in terms of the gradients that its state sees.

    Returns:
      ``None`` for what has nothing to do with their scale; ``"sum"`` for what is proportional to
      it, ``"moment"`` for other powers, ``"unknown"`` for states of which nothing is known.
    """
    known, cls = leaf.holds, type(leaf.state)
    if known.sums:
        return "sum" if trees.path_name(leaf.rel).startswith(known.sums) else None
    number = leaf.owner == () and not leaf.shape  # To a lone scalar all scalars seem to belong.
    real = jnp.issubdtype(leaf.value.dtype, jnp.inexact)
    if leaf.owner is None or number or known.params or not real:
        return None
    named = cls.__module__.startswith("optax.") and cls.__name__.startswith("ScaleBy")
    return "moment" if named else "unknown"


def windows(leaves: list[Leaf], found: Sources) -> dict[Path, int]:
    """Return the number of micro-steps in each window, 0 in a closed one, by its state."""
    counts = [x for x in leaves if x.holds.opened == x.field != ""]
    return {x.at: int(found.get(x.path, x).value) for x in counts}


def settle_windows(
    olds: list[Leaf], found: dict[Path, Leaf], before: Any, scaled: set[Path], notes: list[str]
) -> None:
    """Drop open windows that the old chain would have skipped, and refuse to lose any other."""
    for at, count in windows(olds, {}).items():
        sums = [x for x in olds if x.at == at and x.bound and count]
        takers = [y for y, x in found.items() if x.at == at and x.bound]
        if sums and not takers:
            hint = f"Apply them before: {FLUSH}."
            if any(x.replicas is not None for x in sums):
                hint += " Or make one window of all: boostax.reshard_state(old_state, 1)."
            got = f"one of {count} micro-steps at {spot(at)}"
            allowed = "have no open window that does not fit new_tx"
            raise ValueError(f"{WHO}: old_state must {allowed}, got {got}. {hint}")
        pending = Pending([x.value for x in sums], (jnp.float32(1 / before[at].get("", 1.0)),))
        if before[at] and not scaled & {*takers} and not pending.usable():
            words = "cannot be used and is dropped, as its loss scaler would have done"
            notes.append(f"The open window at {spot(at)} {words}.")
            for y in takers:
                del found[y]


def converted(new: Leaf, old: Leaf, before: Any, after: Any, stale: bool, notes: list[str]) -> Leaf:
    """Return an old array in the units of the gradients at its new place, and in its dtype."""
    how, one, factor = measured(new), {"": 1.0}, 1.0
    if how and not stale and one | before != one | after:
        words = (
            f"{named(new)} at {spot(old.at)} of gradients times {_words(before)}, which at "
            f"{spot(new.at)} come times {_words(after)}"
        )
        if how == "moment" or before | one != after | one:
            hint = "Put the loss scaler where it was, around the whole optimizer at best."
            hint = f"Apply the window before: {FLUSH}." if new.holds.opened else hint
            allowed = "of gradients that the loss scale multiplies alike in new_tx"
            raise ValueError(f"{WHO}: old_state must be {allowed}, got {words}. {hint}")
        notes.append(f"{words}: {'converted' if how == 'sum' else 'kept as it is'}.")
        factor = after.get("", 1.0) / before.get("", 1.0) if how == "sum" else 1.0
    x, dtype = old.value, new.value.dtype
    if factor == 1 and dtype == x.dtype:
        return old
    value = (trees.at_least_float32(x) * np.float32(factor)).astype(dtype)
    got, hint = f"{dtype} at {trees.path_name(new.path)}", "accumulator_dtype='float32' holds it."
    allowed = f"able to hold the open window, times {factor:g}"
    checks.require(WHO, "new_tx", got, allowed, stale or bool(stays_finite(x, value)), hint)
    return old._replace(value=value)


def require_same_params(olds: list[Leaf], news: list[Leaf]) -> None:
    """Refuse a state that was made for params of other shapes."""
    before = {(type(x.state), x.rel): x for x in olds}
    kept = {(x.owner, x.shape) for x in olds}
    for leaf in news:
        old = before.get((type(leaf.state), leaf.rel), leaf)
        # Arrays of one element stand in for what an optimizer does without.
        odd = leaf.shape == leaf.like and old.shape not in (leaf.shape, (1,))
        got = f"{trees.path_name(leaf.owner or ()) or 'a leaf'} of {leaf.shape}"
        allowed = f"as old_state has them, {old.shape} at {spot(old.path)!r}"
        hint = "A changed layer needs a new state: mask it out, or use new_tx.init(params)."
        fit = not odd or (leaf.owner, leaf.shape) in kept
        checks.require(WHO, "params", got, allowed, fit, hint)


def count_replicas(olds: list[Leaf], asked: int | None) -> int:
    """Return how many replicas the old per-replica arrays lead with; 0 if they do not."""
    known = [(x.value.shape, x.like) for x in olds if x.replicas is not None]
    known = [(got, like) for got, like in known if like in (got, got[1:])]
    counts: set[Any] = {0 if got == like else got[0] for got, like in known} | {asked} - {None}
    got = " and ".join(sorted(str(count or "no") for count in counts))
    hint = "boostax.reshard_state(old_state, replicas) takes it to another number first."
    checks.require(WHO, "replicas", got, "the same everywhere", len(counts) <= 1, hint)
    return max(counts, default=0)


def named(leaf: Leaf) -> str:
    """Return the name of the state of an array."""
    return "no state" if leaf.state is None else type(leaf.state).__name__


def spot(path: Path) -> str:
    """Return a place in a state as people write it."""
    return trees.path_name(path) or "the root"


def placed(leaf: Leaf, old: Leaf | None, replicas: int, opened: Any) -> jax.Array:
    """Return a buffer of its own for an array of the new state."""
    x, leads = (old or leaf).value, old and old.replicas
    if leaf.replicas is not None and leads is not None:
        # Only the old one knows how it lies on the replicas; the others lie on none yet.
        return _copy(x, x)
    value = _copy(x[0] if leads else x, leaf.value)
    if leaf.replicas is None:
        return value
    summed = isinstance(leaf.state, AccumulateState) and bool(leaf.state.shares())
    if not replicas:
        hint = "They add up their windows: of the open one each gets a part."
        lost = summed and old is not None and opened[leaf.at]
        checks.require(WHO, "replicas", None, "given", not lost, hint)
        return value
    return spread_anew(PerReplica(value[None]), replicas, summed).local


def _copy(x: Any, like: Any) -> jax.Array:
    """Return ``x`` in a new buffer, strongly typed, placed as ``like``."""
    if like.committed or jnp.issubdtype(like.dtype, jax.dtypes.extended):
        return jax.device_put(jnp.array(x, like.dtype, copy=True), like.sharding)
    if not x.is_fully_replicated:
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


def saved_wins(leaf: Leaf, saved: Any) -> Iterator[str]:
    """Yield a note on a saved number that differs from the one that the new chain was given."""
    given = leaf.field != "" and leaf.field in (leaf.holds.scale, leaf.holds.basis)
    if leaf.field == "hyperparams":
        given = leaf.rel[1].key not in getattr(leaf.state, "hyperparams_states", {})
    if given and saved.shape == leaf.value.shape and not np.array_equal(saved, leaf.value):
        words = "the saved one" if saved.ndim else f"{saved!s}, not {leaf.value!s}"
        yield f"{trees.path_name(leaf.path)} is {words}: the saved value stays."


def report(olds: list[Leaf], news: list[Leaf], found: Sources, notes: list[str]) -> Any:
    """Say what became of each state."""
    used = {old.path for old in found.values()}
    rows = [("kept" if y.path in found else "anew", found.get(y.path, y).at, y) for y in news]
    rows += [("dropped", x.at, x) for x in olds if x.path not in used]
    groups: dict[tuple[str, Path, Path], list[Leaf]] = {}
    for what, at, x in rows:
        groups.setdefault((what, at, x.at), []).append(x)
    lines: dict[str, list[str]] = {"kept": [], "anew": [], "dropped": []}
    for (what, old, new), some in groups.items():
        every = [x for x in (olds if what == "dropped" else news) if x.at == new]
        way = spot(new) if old == new else f"{spot(old)} -> {spot(new)}"
        lines[what].append(f"{_fields(some, every)}: {way}")
    notes += [note for y in news if y.path in found for note in saved_wins(y, found[y.path].value)]
    return MigrationReport(*map(tuple, [*lines.values(), dict.fromkeys(notes)]))


def _fields(some: list[Leaf], every: list[Leaf]) -> str:
    """Return the name of a state and its fields, by their arrays where not every one is there."""
    words: list[str] = []
    for field in dict.fromkeys(x.field for x in some):
        names = [trees.path_name(x.rel) for x in some if x.field == field]
        whole = len(names) == sum(x.field == field for x in every)
        words += [field] if whole else [*names[:4], *["..."] * (len(names) > 4)]
    return f"{named(some[0])} {', '.join(words)}"


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
    if isinstance(params, PerReplica):
        replicas = replicas or jax.tree.leaves(params)[0].shape[0]
        params = jax.tree.map(lambda x: x[0], params.local)
    with axes.saying(axes.LATER):
        first, notes = new_tx.init(params), list[str]()
    # Whatever they are stored in, moments are carried over in f32.
    fresh, old_state = widened(first), widened(old_state)
    news = read(fresh, params)
    wanted = dict.fromkeys(type(y.state) for y in news)
    olds = read(translated(old_state, {*wanted}, notes), params)
    count = count_replicas(olds, replicas)
    olds = [x if x.replicas is None else x._replace(replicas=count) for x in olds]
    require_same_params(olds, news)
    found = Sources()
    for cls in wanted:
        found |= matched(states(olds, cls), states(news, cls), notes)
    before, after, opened = units(olds, {}), units(news, found), windows(news, found)
    settle_windows(olds, found, before, {y.path for y in news if after[y.at]}, notes)
    for y in (y for y in news if y.path in found):
        unit, stale = before[found[y.path].at], opened.get(y.at) == 0
        found[y.path] = converted(y, found[y.path], unit, after[y.at], stale, notes)
    values = {y.path: placed(y, found.get(y.path), count, opened) for y in news}
    state = jax.tree_util.tree_map_with_path(lambda path, _: values[path], fresh)
    state = _scheduled(narrowed(first, state), new_tx, params, notes)
    return state, report(olds, news, found, notes)
