# SPDX-License-Identifier: Apache-2.0
"""Carry a saved optimizer state over to a chain that has changed since.

States are matched by class, arrays by their paths within the state. Arrays that belong together (an
open window, the moments of a param) are carried together or not at all.

A scaler divides gradients for what is inside it. A state around it, or before it in a chain, sees
gradients times its scale. The sums of such a state have this scale as their unit.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from boostax import states
from boostax._core import axes, checks, mismatch, norms, trees
from boostax._core.describe import variants_of
from boostax._core.gate import Pending
from boostax._core.replicas import PerReplica, spread_anew
from boostax.accumulate.window import AccumulateState
from boostax.config.leaves import WHO, Leaf, Path, Sources, States, named, read, spot, translated
from boostax.precision.store import narrowed, widened
from boostax.train.state import TrainState

PyTree: TypeAlias = Any
_FLUSH = "boostax.flush(old_tx, state, params)"
# Scales by the path of their scaler; "" for the product of those that apply to every gradient.
Unit: TypeAlias = dict[str, Any]
Notes: TypeAlias = list[str]


@dataclasses.dataclass(frozen=True)
class MigrationReport:
    """A report on each part of a migrated state. ``print`` gives it in words.

    Attributes:
      kept: the states that were carried over: each state, its fields, and the old and the new path.
      anew: the states that stay as ``new_tx.init`` made them.
      dropped: the parts of the old state that have no counterpart in the new one.
      notes: choices that were made, and saved values that replace new arguments.
    """

    kept: tuple[str, ...]
    anew: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        titles = ("kept", "made anew", "dropped", *["notes"] * bool(self.notes))
        parts = zip(titles, dataclasses.astuple(self), strict=False)
        return "\n".join("\n  ".join((f"{t}:", *(lines or ("nothing",)))) for t, lines in parts)


@checks.arguments
def migrate_state(
    old_state: PyTree,
    new_tx: optax.GradientTransformation,
    params: PyTree,
    *,
    replicas: int | None = None,
) -> tuple[PyTree, MigrationReport]:
    """Carry an optimizer state over to a chain in which something was added, removed or moved.

    ``new_tx.init(params)`` gives the structure. Its states take the arrays of old states of the
    same class, which may be inside a scaler, a window, ``optax.masked``, ``partition`` or
    ``inject_hyperparams``. If a class has several states, the best fit is matched first; among
    equal fits, the k-th old state goes to the k-th new one, counted from outside. An array of a
    state is kept if path, shape and dtype agree, so newly masked or newly trained leaves do not
    affect the others. The moments of a leaf are kept together or not at all, counts only with
    moments, and a trajectory and a basis only as a whole.

    A state around a loss scaler, or before it, sums up gradients times the scale. If the scaler
    moves, or is added or removed, open windows, residuals and momentum are multiplied by the new
    scale over the old one, and a note says so. An open window continues in any precision. It is
    refused if ``new_tx`` has no place for it, and dropped with a note if the old scaler would have
    skipped it (not finite, or beyond 2**48).

    Some states of other libraries are translated: ``optax.MultiSteps``, in both directions,
    ``optax.apply_if_finite``, and, anywhere in the tree, Flax's ``DynamicScale`` and jmp's
    ``DynamicLossScale`` and ``StaticLossScale``:
    ``migrate_state((opt_state, dynamic_scale), new_tx, params)``.

    A saved value wins over a new argument if the state holds it: loss scales,
    ``inject_hyperparams`` and bases. The report notes the differences.

    Args:
      old_state: the saved state, that of an NNX optimizer included, with a dimension of replicas
        if it comes from a ``TrainState``. It is not changed. If a serialiser has made dicts and
        lists of it, its classes are found by the names of their fields.
      new_tx: the transformation that continues the run, that of ``boostax.on_mesh`` included.
      params: the params that it trains; ``TrainState.params`` unchanged.
      replicas: the number of replicas, if ``new_tx`` has per-replica state and the old state has
        none. If the replicas add up an open window, each of them gets a part of it.

    Returns:
      The new state, which shares no buffer with ``old_state`` or ``params``, with the dtypes and
      the placement of ``new_tx.init(params)``; and a ``MigrationReport``. With a ``TrainStep``,
      place it by ``jax.device_put(state, step.shardings(state))``. Cost: an ``init`` and one copy
      of the state; call it on the host.

    Raises:
      ValueError: params of other shapes than those of ``old_state`` (it names the leaf); numbers of
        replicas that differ; an open window that does not fit; moments of scaled gradients, or
        scales by group, that the new position of a scaler makes wrong.
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
    hint = "Pass state.opt_state and state.params, and put the result back with _replace."
    got, fits = type(old_state).__name__, not isinstance(old_state, TrainState)
    checks.require(WHO, "old_state", got, "an optimizer state", fits, hint, TypeError)
    old_state, params = trees.arrays(old_state), trees.arrays(params)
    mismatch.require_order(WHO, "migrate_state(state, tx, params)", state=old_state, params=params)
    if replicas is not None:
        checks.positive_int(WHO, "replicas", replicas, "It is the size of the replica axis.")
    if isinstance(params, PerReplica):
        replicas = replicas or jax.tree.leaves(params)[0].shape[0]
        params = jax.tree.map(lambda x: x[0], params.local)
    with axes.binding(axes.UNNAMED):
        first, notes = new_tx.init(params), list[str]()
    # Moments are carried over in f32, whatever dtype stores them.
    saved, old_state = old_state, _classed(old_state, first)
    if jax.tree.structure(saved) != jax.tree.structure(old_state):
        notes.append("old_state has no classes: they are found by the names of its fields.")
    fresh, old_state = widened(first), widened(old_state)
    news = read(fresh, params)
    wanted = dict.fromkeys(type(y.state) for y in news)
    olds = read(translated(old_state, {*wanted}, notes), params)
    # The state of on_mesh leads with the replicas already.
    stacked = _count_replicas(news, None)
    count = _count_replicas(olds, stacked or replicas)
    olds = [x if x.replicas is None else x._replace(replicas=count) for x in olds]
    news = [x if x.replicas is None else x._replace(replicas=stacked) for x in news]
    _require_same_params(olds, news)
    found = Sources()
    for cls in wanted:
        found |= _matched(_of_class(olds, cls), _of_class(news, cls), notes)
    before, after, opened = _units(olds, {}), _units(news, found), _windows(news, found)
    _settle_windows(olds, found, before, {y.path for y in news if after[y.at]}, notes)
    for y in (y for y in news if y.path in found):
        unit, stale = before[found[y.path].at], opened.get(y.at) == 0
        found[y.path] = _converted(y, found[y.path], unit, after[y.at], stale, notes)
    values = {y.path: _placed(y, found.get(y.path), count, opened) for y in news}
    state = jax.tree_util.tree_map_with_path(lambda path, _: values[path], fresh)
    state = _scheduled(narrowed(first, state), new_tx, params, notes)
    return state, _report(olds, news, found, notes)


def _classed(tree: PyTree, like: PyTree) -> PyTree:
    """Return a state that a serialiser has made dicts of in its classes.

    A dict whose keys are the fields of a class in ``like``, of boostax or of Optax becomes one.
    """
    known = [*map(type, trees.nodes(like)), *vars(states).values(), *vars(optax).values()]
    fields = {frozenset(x._fields): x for x in reversed(known) if getattr(x, "_fields", ())}

    def visit(x: Any) -> Any:
        if type(x) in (list, tuple):
            return type(x)(map(visit, x))
        inside = {key: visit(y) for key, y in x.items()} if type(x) is dict else {}
        if inside and inside.keys() == {*map(str, range(len(inside)))}:  # Flax writes tuples so.
            return tuple(inside[str(i)] for i in range(len(inside)))
        cls = fields.get(frozenset(inside))
        return cls(**inside) if cls else inside or x

    return visit(tree)


def _require_same_params(olds: list[Leaf], news: list[Leaf]) -> None:
    """Refuse a state that was made for params of other shapes."""
    before = {(type(x.state), x.rel): x for x in olds}
    kept = {(x.owner, x.shape) for x in olds}
    for leaf in news:
        old = before.get((type(leaf.state), leaf.rel), leaf)
        # An optimizer keeps an array of one element as a placeholder for a state that it does not
        # need.
        odd = leaf.shape == leaf.like and old.shape not in (leaf.shape, (1,))
        got = f"{trees.path_name(leaf.owner or ()) or 'a leaf'} of {leaf.shape}"
        allowed = f"as old_state has them, {old.shape} at {spot(old.path)!r}"
        hint = "A changed layer needs a new state: mask it out, or use new_tx.init(params)."
        fit = not odd or (leaf.owner, leaf.shape) in kept
        checks.require(WHO, "params", got, allowed, fit, hint)


def _count_replicas(olds: list[Leaf], asked: int | None) -> int:
    """Return the size of the dimension of replicas of the old state; 0 if it has none."""
    known = [(x.value.shape, x.like) for x in olds if x.replicas is not None]
    known = [(got, like) for got, like in known if like in (got, got[1:])]
    counts: set[Any] = {0 if got == like else got[0] for got, like in known} | {asked} - {None}
    got = " and ".join(sorted(str(count or "no") for count in counts))
    hint = "boostax.reshard_state(old_state, replicas) takes it to another number first."
    checks.require(WHO, "replicas", got, "the same everywhere", len(counts) <= 1, hint)
    return max(counts, default=0)


def _of_class(leaves: list[Leaf], cls: type) -> States:
    """Return the arrays of the states of a class."""
    paths = dict.fromkeys(x.at for x in leaves if type(x.state) is cls)
    return {at: {x.rel: x for x in leaves if x.at == at} for at in paths}


def _fits(old: Leaf, new: Leaf) -> bool:
    """Return whether an old array can replace a new one; in a window, in another precision too."""
    kinds, dtypes = (jnp.floating, jnp.complexfloating), (old.value.dtype, new.value.dtype)
    alike = any(all(jnp.issubdtype(x, kind) for x in dtypes) for kind in kinds)
    if dtypes[0] != dtypes[1] and not (new.holds.opened and alike):
        return False
    return old.shape == new.shape and (new.replicas is not None or (old.replicas or 1) == 1)


def _matched(olds: States, news: States, notes: Notes) -> Sources:
    """Find the sources of the states of a class: the best fit first, then in order.

    One old state may become several, and several may become one if each holds the moments of
    different params. Several translated states may also become one, which takes its scale from one
    of them and its skipped steps from another.
    """
    found, primary, pairs = Sources(), dict[Path, Path](), list(itertools.product(olds, news))
    fitting: dict[tuple[Path, Path], Sources] = {}
    for old, new in pairs:
        both = ((x, news[new][rel]) for rel, x in olds[old].items() if rel in news[new])
        fitting[old, new] = {y.path: x for x, y in both if _fits(x, y)}

    def score(pair: tuple[Path, Path]) -> tuple[int, int, int]:
        """Count what fits, what has no place, and the names by which ``partition`` tells parts."""
        labels = [{key for key in path if isinstance(key, DictKey)} for path in pair]
        good = len(fitting[pair])
        return good, good - len(olds[pair[0]]), len(labels[0] & labels[1])

    for old, new in sorted(pairs, key=score, reverse=True):
        if fitting[old, new] and new not in primary and old not in primary.values():
            primary[new] = old
            found |= fitting[old, new]
    first = next(iter(next(iter(news.values())).values()))
    for old, new in pairs if first.holds.bound is None else ():
        used = {x.path for x in found.values() if x.owner is not None}
        free = {y: x for y, x in fitting[old, new].items() if not (y in found or x.path in used)}
        if any(x.owner is not None for x in free.values()):
            if primary.setdefault(new, old) != old:
                also = f"also takes moments from {spot(old)}, not counts."
                notes.append(f"{named(first)} at {spot(new)} {also}")
        found |= free if new in primary else {}
    chosen = [(primary[new], new) for new in news if new in primary]
    if len(pairs) > 1 and chosen != [*itertools.zip_longest(olds, news)]:
        words = ", ".join(f"{spot(old)} -> {spot(new)}" for old, new in chosen) or "none fits"
        counts = f"{len(olds)} in the old state, {len(news)} in the new one"
        notes.append(f"{named(first)}: {counts}; {words}.")
    for at, new in news.items():
        for path in _incomplete(olds[primary[at]] if at in primary else new, new, found):
            found.pop(path, None)
    return found


def _incomplete(old: dict[Path, Leaf], new: dict[Path, Leaf], found: Sources) -> list[Path]:
    """Return the arrays of a state that would be wrong without other, missing arrays."""
    lacks = {rel for rel, y in new.items() if y.path not in found}
    if next(iter(new.values())).holds.bound is not None:
        bound, before = ({rel for rel, x in state.items() if x.bound} for state in (new, old))
        return [new[rel].path for rel in bound if bound != before or lacks & bound]
    owned = {rel: y.owner for rel, y in new.items() if y.owner is not None}
    # An old first moment divided by the root of a new, zero second moment would make a huge step.
    broken = {owned[rel] for rel in lacks & owned.keys() & old.keys()}
    wrong = {rel for rel, owner in owned.items() if owner in broken}
    # Counts without their moments would make the bias correction wrong.
    return [new[rel].path for rel in (new if owned and owned.keys() <= wrong | lacks else wrong)]


def _units(leaves: list[Leaf], found: Sources) -> dict[Path, Unit]:
    """Return the scales that multiply the gradients of each state.

    Args:
      leaves: the arrays of all states of the tree.
      found: the old arrays that these arrays are copied from, if any.

    Returns:
      A unit for each state. ``""`` is the product of the scales that apply to all of its gradients,
      if there are any. Scales of groups, and of scalers in one part of a ``partition`` or
      ``named_chain``, stand under their paths: they can only be compared, not multiplied.
    """
    seen: dict[Path, Unit] = {x.at: {} for x in leaves}
    scalers = [x for x in leaves if x.holds.scale == x.field != ""]
    # A scaler that was kept beside the optimizer does not divide these gradients.
    scalers = [x for x in scalers if getattr(x.state, "inner_state", ()) is not None]
    for (at, unit), x in itertools.product(seen.items(), scalers):
        scale = np.asarray(found.get(x.path, x).value, np.float64)
        scale = 2.0 ** (np.frexp(scale)[1] - 1.0) if x.holds.powers else scale
        path = _path_to_scaler(at, x.at)
        if path == "" and np.all(scale == scale.flat[0]):
            unit[""] = unit.get("", 1.0) * float(scale.flat[0])
        elif path is not None:
            unit[path or "the groups"] = scale.tolist()
    return seen


def _path_to_scaler(at: Path, scaler: Path) -> str | None:
    """Return the path on which gradients of a state reach a scaler; ``""`` if all gradients do.

    The result is ``None`` if no gradient does.
    """
    shared = max(i for i in range(len(at) + 1) if at[:i] == scaler[:i])
    here: Any = next(iter(at[shared:]), None)
    there = scaler[shared:]
    behind = isinstance(here, SequenceKey) and there != () and there[0].idx < here.idx
    if not there or behind or isinstance(here, GetAttrKey):
        return None
    partial = isinstance(here, DictKey) or GetAttrKey("inner_states") in there
    return trees.path_name(there) if partial else ""


def _words(unit: Unit) -> str:
    rest = (f"{scale} of {path}" for path, scale in unit.items() if path)
    return " and ".join([f"{unit.get('', 1.0):g}", *rest])


def _measured(leaf: Leaf) -> str | None:
    """Return how an array depends on the scale of the gradients that its state sees.

    Returns:
      ``None`` if it does not; ``"sum"`` if it is proportional to the scale, ``"moment"`` if it goes
      by another power of it, ``"unknown"`` for states that nothing is known about.
    """
    known, cls = leaf.holds, type(leaf.state)
    if known.sums:
        return "sum" if trees.path_name(leaf.rel).startswith(known.sums) else None
    # If the only param is a scalar, every scalar of a state seems to belong to it.
    number = leaf.owner == () and not leaf.shape
    real = jnp.issubdtype(leaf.value.dtype, jnp.inexact)
    if leaf.owner is None or number or known.params or not real:
        return None
    moments = cls.__module__.startswith("optax.") and cls.__name__.startswith("ScaleBy")
    return "moment" if moments else "unknown"


def _windows(leaves: list[Leaf], found: Sources) -> dict[Path, int]:
    """Return the micro-steps in the window of each state that has one; 0 if it is closed."""
    counts = [x for x in leaves if x.holds.opened == x.field != ""]
    return {x.at: int(found.get(x.path, x).value) for x in counts}


def _settle_windows(
    olds: list[Leaf], found: Sources, before: dict[Path, Unit], scaled: set[Path], notes: Notes
) -> None:
    """Drop open windows that the old chain would have skipped, and refuse to lose any other."""
    for at, count in _windows(olds, {}).items():
        sums = [x for x in olds if x.at == at and x.bound and count]
        takers = [y for y, x in found.items() if x.at == at and x.bound]
        if sums and not takers:
            hint = f"Apply them before: {_FLUSH}."
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


def _converted(new: Leaf, old: Leaf, before: Unit, after: Unit, stale: bool, notes: Notes) -> Leaf:
    """Return an old array in the dtype and in the units of its new position."""
    kind, one, factor = _measured(new), {"": 1.0}, 1.0
    if kind and not stale and one | before != one | after:
        words = f"{named(new)} at {spot(old.at)} of gradients times {_words(before)}"
        words += f", which at {spot(new.at)} come times {_words(after)}"
        if kind == "moment" or before | one != after | one:
            hint = "Put the loss scaler where it was, around the whole optimizer at best."
            hint = f"Apply the window before: {_FLUSH}." if new.holds.opened else hint
            allowed = "of gradients that the loss scale multiplies alike in new_tx"
            raise ValueError(f"{WHO}: old_state must be {allowed}, got {words}. {hint}")
        notes.append(f"{words}: {'converted' if kind == 'sum' else 'kept unchanged'}.")
        factor = after.get("", 1.0) / before.get("", 1.0) if kind == "sum" else 1.0
    x, dtype = old.value, new.value.dtype
    if factor == 1 and dtype == x.dtype:
        return old
    value = (trees.at_least_float32(x) * np.float32(factor)).astype(dtype)
    got, hint = f"{dtype} at {trees.path_name(new.path)}", "accumulator_dtype='float32' holds it."
    allowed = f"able to hold the open window, times {factor:g}"
    checks.require(WHO, "new_tx", got, allowed, stale or bool(norms.stays_finite(x, value)), hint)
    return old._replace(value=value)


def _placed(leaf: Leaf, old: Leaf | None, replicas: int, opened: Mapping[Path, int]) -> jax.Array:
    """Return a new buffer for an array of the new state."""
    x, leads = (old or leaf).value, old and old.replicas
    if leaf.replicas is not None and (leads is not None or (leaf.replicas and old is None)):
        # Without a mesh the new state's array is not placed yet; only the old one is.
        return _copy(x, leaf.value if leaf.replicas else x)
    value = _copy(x[0] if leads else x, x if leaf.replicas else leaf.value)
    if leaf.replicas is None:
        return value
    summed = isinstance(leaf.state, AccumulateState) and bool(leaf.state.shares())
    lost = not replicas and summed and old is not None and opened[leaf.at]
    hint = "Replicas add up their windows: each gets a part of the open one."
    checks.require(WHO, "replicas", None, "given", not lost, hint)
    if not replicas:
        return value
    spread = spread_anew(PerReplica(value[None]), replicas, summed).local
    return _copy(spread, leaf.value) if leaf.replicas else spread


def _copy(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return ``x`` in a new buffer, strongly typed, placed as ``like``."""
    if like.committed or jnp.issubdtype(like.dtype, jax.dtypes.extended):
        return jax.device_put(jnp.array(x, like.dtype, copy=True), like.sharding)
    if not x.is_fully_replicated:
        return x.copy()
    # It goes through the host, because a copy of a committed array would be committed.
    return jnp.array(np.asarray(x), like.dtype, copy=True)


def _scheduled(state: PyTree, tx: Any, params: PyTree, notes: Notes) -> PyTree:
    """Set the next depth to the new schedule's depth after the steps taken so far."""
    variants = variants_of(tx)
    new = state if variants is None else variants.resumed(params, state)
    if new is state or int(new.coming()) == int(state.coming()):
        return state
    words = f"next_depth is {int(new.coming())}, not {int(state.coming())}"
    notes.append(f"{words}: the schedule's own.")
    return jax.tree.map(lambda x, old: old if x is old else _copy(x, old), new, state)


def _report(olds: list[Leaf], news: list[Leaf], found: Sources, notes: Notes) -> MigrationReport:
    """Report for each state whether it was kept, made anew or dropped."""
    used = {old.path for old in found.values()}
    rows = [("kept" if y.path in found else "anew", found.get(y.path, y).at, y) for y in news]
    rows += [("dropped", x.at, x) for x in olds if x.path not in used]
    groups: dict[tuple[str, Path, Path], list[Leaf]] = {}
    for what, at, x in rows:
        groups.setdefault((what, at, x.at), []).append(x)
    lines: dict[str, list[str]] = {"kept": [], "anew": [], "dropped": []}
    for (what, old, new), some in groups.items():
        state = [x for x in (olds if what == "dropped" else news) if x.at == new]
        path = spot(new) if old == new else f"{spot(old)} -> {spot(new)}"
        fields = ", ".join(_fields(some, state))
        lines[what].append(f"{named(some[0])} {fields}: {path}")
    notes += [note for y in news if y.path in found for note in _saved_wins(y, found[y.path].value)]
    return MigrationReport(*map(tuple, [*lines.values(), dict.fromkeys(notes)]))


def _fields(some: list[Leaf], state: list[Leaf]) -> Iterable[str]:
    """Yield the names of fields, or of single arrays if some arrays of a field are missing."""
    for field in dict.fromkeys(x.field for x in some):
        names = [trees.path_name(x.rel) for x in some if x.field == field]
        whole = len(names) == sum(x.field == field for x in state)
        yield from [field] if whole else [*names[:4], *["..."] * (len(names) > 4)]


def _saved_wins(leaf: Leaf, saved: jax.Array) -> Iterator[str]:
    """Yield a note on a saved number that differs from the one that the new chain was given."""
    given = leaf.field != "" and leaf.field in (leaf.holds.scale, leaf.holds.basis)
    if leaf.field == "hyperparams":
        given = leaf.rel[1].key not in getattr(leaf.state, "hyperparams_states", {})
    if given and saved.shape == leaf.value.shape and not np.array_equal(saved, leaf.value):
        words = "the saved one" if saved.ndim else f"{saved!s}, not {leaf.value!s}"
        yield f"{trees.path_name(leaf.path)} is {words}: the saved value stays."
