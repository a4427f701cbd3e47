# SPDX-License-Identifier: Apache-2.0
"""Migrate a saved optimizer state to a changed chain.

An optimizer state is a tree of NamedTuples. Each NamedTuple is the state of a part, and every array
belongs to the innermost state around it. States are matched by class, and arrays are matched by
their paths within the state. Arrays that belong together, such as the moments of a param, are all
kept or all dropped.
"""

import dataclasses
import itertools
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, GetAttrKey

from boostax import states
from boostax._core import axes, checks, norms, trees
from boostax._core.describe import Holds, variants_of
from boostax._core.replicas import PerReplica, spread_anew
from boostax._core.types import PyTree
from boostax.accumulate.window import AccumulateState
from boostax.config.refusals import require
from boostax.precision.store import StoreState, narrowed, widened
from boostax.reduce.by_shape import ByShapeState
from boostax.train.state import TrainState

Tx: TypeAlias = optax.GradientTransformation
Notes: TypeAlias = list[str]
Path: TypeAlias = tuple[Any, ...]
_WHO = "migrate_state"
# The meaning of the states of Optax and other libraries, and the texts of a report's notes.
_DATA = checks.table("boostax.config", "migrate")
_HOLDS = {name: Holds(**fields) for name, fields in _DATA["holds"].items()}
_BECOMES = {name: pkgutil.resolve_name(row["is"]) for name, row in _DATA["becomes"].items()}


@dataclasses.dataclass(frozen=True)
class MigrationReport:
    """A report on each part of a migrated state; ``print`` shows the report as text.

    Attributes:
      kept: the states that were kept: each state, its fields, and the old and the new path.
      anew: the states that ``new_tx.init`` made, without saved values.
      dropped: the parts of the old state that have no counterpart in the new state.
      notes: choices of the migration, and saved values that override arguments of ``new_tx``.
    """

    kept: tuple[str, ...]
    anew: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        titles = ("kept", "initialized", "dropped", *["notes"] * bool(self.notes))
        parts = zip(titles, dataclasses.astuple(self), strict=False)
        return "\n".join("\n  ".join((f"{t}:", *(lines or ("nothing",)))) for t, lines in parts)


@checks.arguments
def migrate_state(
    old_state: PyTree, new_tx: Tx, params: PyTree, *, replicas: int | None = None,
    count: int | None = None,
) -> tuple[PyTree, MigrationReport]:  # fmt: skip
    """Migrate an optimizer state to a chain in which parts were added, removed or moved.

    The result has the structure of ``new_tx.init(params)``. A new state gets the arrays of an old
    state of the same class. The old state may be inside a scaler, a window, ``optax.masked``,
    ``partition`` or ``inject_hyperparams``. If a class has several states, the pair of an old and a
    new state that fits best is matched first. Among equal fits, the k-th old state is matched to
    the k-th new state, outermost first. An array is kept if path, shape and dtype agree, so newly
    masked or newly trained leaves do not affect other leaves. If only the precision differs, the
    array is cast, and the report has a note. The moments of a leaf are all kept or all dropped. The
    counts of a state with moments are kept only if moments of the state are kept. The arrays of a
    trajectory or a basis are kept only together.

    A state with an open window is refused. Moments and residuals are refused if another loss scale
    multiplies their gradients in the new chain.

    The states of ``optax.MultiSteps`` (in both directions) and of ``optax.apply_if_finite`` are
    translated. Flax's ``DynamicScale`` and jmp's ``DynamicLossScale`` and ``StaticLossScale`` are
    translated anywhere in the tree: ``migrate_state((opt_state, dynamic_scale), new_tx, params)``.

    A saved loss scale, hyperparameter (``inject_hyperparams``) or basis overrides the argument of
    ``new_tx``, and the report notes the difference.

    Args:
      old_state: the saved state, or an NNX optimizer. In a ``TrainState``, per-replica state has a
        leading dimension of replicas. If a serialiser converted the state to dicts and lists, the
        classes in the state are recognised by the names of their fields, including the names of
        boostax 0.3.
      new_tx: the transformation that continues the run, which may be a result of
        ``boostax.on_mesh``.
      params: the trained params; pass ``TrainState.params`` unchanged.
      replicas: the number of replicas, if ``new_tx`` has per-replica state and the old state has
        none.
      count: the number of steps so far, from which schedules that are new in ``new_tx`` continue.
        The learning rate of call ``k`` after the migration, with ``k`` from 0, is
        ``schedule(count + k)``. With ``None``, new schedules begin at step 0. ``count`` has no
        effect on counts that are kept, or on the counts with which new moments correct their bias.

    Returns:
      The new state, with the dtypes and the placement of ``new_tx.init(params)`` and in new
      buffers, and a ``MigrationReport``. With a ``TrainStep``, place the state with
      ``jax.device_put(state, step.shardings(state))``. Cost: an ``init`` and one copy of the state,
      outside ``jit``.

    Raises:
      ValueError: an open window; params whose shapes differ from ``old_state`` (the error names the
        leaf); different numbers of replicas; moments whose gradients another loss scale multiplied;
        a value beyond the range of a narrower dtype.
      TypeError: ``new_tx`` is not a transformation, or ``old_state`` is a whole ``TrainState``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> params = jnp.zeros(3)
      >>> old_state = optax.chain(optax.clip(1.0), optax.scale_by_adam()).init(params)
      >>> new_tx = boostax.static_loss_scale(optax.scale_by_adam(), 8.0)
      >>> state, report = boostax.migrate_state(old_state, new_tx, params)
      >>> print(report)
      kept:
        ScaleByAdamState count, mu, nu: 1 -> inner_state
      initialized:
        LossScaleState scale, clean_steps, tolerance, applied, skipped, \
skipped_in_a_row, growths, backoffs, floor_hits: the root
      dropped:
        nothing
    """
    checks.transformation(_WHO, "new_tx", new_tx)
    require(not isinstance(old_state, TrainState), "train_state", "TrainState", TypeError)
    old_state, params = trees.arrays(old_state), trees.arrays(params)
    trees.require_order(_WHO, "migrate_state(state, tx, params)", state=old_state, params=params)
    checks.positive_int(_WHO, "replicas", 1 if replicas is None else replicas, _DATA["hint"])
    checks.natural(_WHO, "count", 0 if count is None else count, _DATA["steps"])
    if isinstance(params, PerReplica):
        replicas = replicas or jax.tree.leaves(params)[0].shape[0]
        params = jax.tree.map(lambda x: x[0], params.local)
    with axes.binding((axes.UNNAMED,)):
        first = new_tx.init(params)
    classed = _classed(old_state, first)
    same = jax.tree.structure(classed) == jax.tree.structure(old_state)
    notes: Notes = [] if same else [_DATA["notes"]["classes"]]
    _require_readable(classed)
    # Moments are converted to f32 before the migration, whatever dtype stores them.
    fresh, old_state = widened(first), widened(classed)
    news = _read(fresh, params)
    classes = dict.fromkeys(type(y.state) for y in news)
    olds = _read(_translated(old_state, {*classes}), params)
    # The first state of ``on_mesh`` already has the dimension of replicas.
    news, stacked = _stacked(news, None)
    olds, size = _stacked(olds, stacked or replicas)
    _require_same_params(olds, news, old_state, first)
    matched = (_matched(_of_class(olds, cls), _of_class(news, cls), notes) for cls in classes)
    matches = {path: x for some in matched for path, x in some.items()}
    _require_same_scales(olds, news, matches)
    matches = {y.path: _cast(y, matches[y.path], notes) for y in news if y.path in matches}
    sources = matches | ({} if count is None else _starts(news, matches, count, notes))
    values = {y.path: _placed(y, sources.get(y.path), size) for y in news}
    state = narrowed(first, jax.tree.map_with_path(lambda path, _: values[path], fresh))
    if (variants := variants_of(new_tx)) is not None:
        # The next depth comes from the new schedule and the number of applied steps.
        depth = variants.plan(params).at(variants.find(state).steps)
        new = optax.tree.set(state, next_depth=depth)
        depth, was = (variants.find(x).next_variant() for x in (new, state))
        if int(depth) != int(was):
            notes.append(_DATA["notes"]["depth"].format(depth, was))
        state = jax.tree.map(lambda x, old: old if x is old else _copy(x, old), new, state)
    return state, _report(olds, news, matches, notes)


def _classed(tree: PyTree, like: PyTree) -> PyTree:
    """Restore the classes of a state that a serialiser converted to dicts.

    If the keys of a dict are the fields of a class in ``like``, in boostax or in Optax, the dict
    becomes an instance of the class. The fields may have the names that they had in boostax 0.3.
    """
    known = [*map(type, trees.nodes(like)), *vars(states).values(), *vars(optax).values()]
    fields = {frozenset(x._fields): x for x in reversed(known) if getattr(x, "_fields", ())}

    def visit(x: Any) -> Any:
        if type(x) in (list, tuple):
            return type(x)(map(visit, x))
        inside = {key: visit(y) for key, y in x.items()} if type(x) is dict else {}
        if inside and inside.keys() == {*map(str, range(len(inside)))}:
            # Flax converts tuples to dicts with the keys "0", "1", ...
            return tuple(inside[str(i)] for i in range(len(inside)))
        now = {_DATA["renamed"].get(key, key): y for key, y in inside.items()}
        cls = fields.get(frozenset(inside), fields.get(frozenset(now)))
        return cls(*((now | inside)[field] for field in cls._fields)) if cls else inside or x

    return visit(tree)


def holds(cls: type) -> Holds:
    """Return the meaning of a state class's fields, from its ``holds`` or the table ``_HOLDS``."""
    known = cls.__module__.startswith(("optax.", "builtins"))
    return getattr(cls, "holds", _HOLDS.get(cls.__name__ if known else "", Holds()))


class Leaf(NamedTuple):
    """An array of a state.

    Attributes:
      path: the path of the array in the tree.
      rel: the path of the array within its state.
      value: the array.
      at: the path of the state.
      state: the innermost state around the array; ``None`` if there is no NamedTuple.
      name: the name of the state's class.
      field: the field of the state that contains the array.
      holds: the meaning of the state's fields.
      bound: whether the array has a meaning only together with other arrays of its state.
      owner: the path of the param that the array belongs to, if any.
      like: the shape of the param.
      replicas: ``None`` if the array is the same on all replicas; else the size of the leading
        dimension of replicas, or 0 without this dimension.
    """

    path: Path
    rel: Path
    value: jax.Array
    at: Path
    state: Any
    name: str
    field: str
    holds: Holds
    bound: bool
    owner: Path | None
    like: tuple[int, ...] | None
    replicas: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape on one replica."""
        return self.value.shape[1 if self.replicas else 0 :]


# The arrays of a state by path, or old arrays by the paths of the new arrays that they replace.
Leaves: TypeAlias = dict[Path, Leaf]


def _read(tree: PyTree, params: PyTree) -> list[Leaf]:
    """Return the arrays of all states, outermost first; containers of params are not states."""
    containers = set(map(type, trees.state_nodes(params)))
    owners: Any = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
    by_state: dict[Path, list[Leaf]] = {(): []}

    def visit(x: Any, path: Path, rel: Path, at: Path, state: Any, replicas: int | None) -> None:
        if jax.tree_util.all_leaves([x]):
            x = jnp.asarray(x)
            field = trees.path_name(rel if state is None else rel[:1])
            owner = next((rel[i:] for i in range(len(rel) + 1) if rel[i:] in owners), None)
            # If the params are a single array, its path is empty, and every path ends with the
            # empty path. So the shape decides whether a leaf belongs to the array.
            owner = None if owner == () and owners[()] not in (x.shape, x.shape[1:]) else owner
            known = holds(type(state))
            # If a loss has terms, the sums of its window have an additional first dimension for the
            # terms.
            window = getattr(state, "window", None)
            weight = getattr(getattr(window, "local", window), "weight", None)
            terms = (len(weight),) if isinstance(weight, dict) else ()
            like = None if owner is None else (*terms, *owners[owner])
            about = (field, known, field in (known.bound or ()), owner, like, replicas)
            whose = "no state" if state is None else type(state).__name__
            by_state[at].append(Leaf(path, rel, x, at, state, whose, *about))
            return
        # A NamedTuple within a state, such as a ``Window``, is not a state itself.
        name = type(x).__name__
        is_boostax = type(x).__module__.startswith("boostax.")
        is_wrapper = name in ("MaskedNode", "WrappedScheduleState")
        node = not name.endswith("State") if is_boostax else is_wrapper
        if hasattr(x, "_fields") and not node and type(x) not in containers:
            rel, at, state = (), path, x
            by_state[path] = []
        inside = isinstance(x, PerReplica)
        replicas = 0 if inside else replicas
        for (key,), child in jax.tree_util.tree_flatten_with_path(x, lambda y: y is not x)[0]:
            visit(child, (*path, key), rel if inside else (*rel, key), at, state, replicas)

    visit(tree, (), (), (), None, None)
    return [leaf for leaves in by_state.values() for leaf in leaves]


def _spot(path: Path) -> str:
    """Return the text of a path in a state."""
    return trees.path_name(path) or "the root"


def _require_readable(tree: PyTree) -> None:
    """Refuse the states of parts that boostax no longer has, and open windows.

    The sums of an open window have a meaning only in the chain that opened it.
    """
    for node, cls in ((x, type(x)) for x in trees.nodes(tree)):
        known = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
        low = jax.tree.leaves(node.low) if isinstance(node, StoreState) else []
        kahan = jnp.bfloat16 in [x.dtype for x in low]
        name = f"{cls.__module__}.{cls.__name__}"
        valid = not name.startswith("boostax.") or (known and not kahan)
        require(valid, "gone", name + " of params='kahan'" * kahan)
        field = holds(cls).opened
        steps = np.max(getattr(node, field, 0), initial=0)
        hint = _DATA["flush"] if isinstance(node, AccumulateState) else _DATA["go on"]
        got = f"an open window of {steps} micro-steps in {cls.__name__}"
        require(not steps, "open", got, hint=hint.format(field))


def _translated(tree: PyTree, classes: set[type]) -> PyTree:
    """Replace states of other libraries by the equivalent states in ``classes``."""
    becomes = {name: cls for name, cls in _BECOMES.items() if cls in classes}

    def translate(x: Any) -> Any:
        cls = becomes.get(type(x).__name__)
        if cls is None:
            return x
        names = _DATA["becomes"][type(x).__name__]["fields"]
        values = {ours: getattr(x, theirs) for ours, theirs in names.items()}
        for name in _DATA["numbers"].keys() & names:
            values[name] = jnp.asarray(values[name], _DATA["numbers"][name]).reshape(())
        return _translated(cls(**dict.fromkeys(cls._fields) | values), classes)

    return jax.tree.map(
        translate, tree, is_leaf=lambda x: type(x) not in classes and type(x).__name__ in becomes
    )


def _require_same_params(olds: list[Leaf], news: list[Leaf], before: PyTree, after: PyTree) -> None:
    """Refuse a state for params of other shapes or, in ``by_shape``, of other names."""
    by_place = {(type(x.state), x.rel): x for x in olds}
    shapes = {(x.owner, x.shape) for x in olds}
    for new in news:
        old = by_place.get((type(new.state), new.rel), new)
        # Optimizers store an array of one element in place of moments that they do not need.
        same = old.shape in (new.shape, (1,)) or (new.owner, new.shape) in shapes
        got = f"{trees.path_name(new.owner or ()) or 'a leaf'} of {new.shape}"
        require(same or new.shape != new.like, "shapes", got, shape=old.shape, path=_spot(old.path))
    # ``by_shape`` distributes moments in the order of the params' names.
    orders = [trees.find(x, ByShapeState) for x in (before, after)]
    for both in zip(*orders, strict=False):
        for x, y in zip(*(state.order for state in both), strict=False):
            require(x.shape != y.shape or np.array_equal(x, y), "dealt", "others by name")


def _stacked(leaves: list[Leaf], asked: int | None) -> tuple[list[Leaf], int]:
    """Set the size of the replica dimension in the arrays; return the arrays and the size.

    The size is 0 if no array has this dimension.
    """
    shapes = [(x.value.shape, x.like) for x in leaves if x.replicas is not None]
    counts = {0 if x == like else x[0] for x, like in shapes if like in (x, x[1:])}
    counts |= set[int]() if asked is None else {asked}
    require(len(counts) <= 1, "replicas", " and ".join(sorted(str(x or "no") for x in counts)))
    count = max(counts, default=0)
    return [x if x.replicas is None else x._replace(replicas=count) for x in leaves], count


def _of_class(leaves: list[Leaf], cls: type) -> dict[Path, Leaves]:
    """Return the arrays of the states of a class."""
    paths = dict.fromkeys(x.at for x in leaves if type(x.state) is cls)
    return {at: {x.rel: x for x in leaves if x.at == at} for at in paths}


def _fitting(old: Leaves, new: Leaves) -> Leaves:
    """Return the arrays of an old state that can replace arrays of a new state.

    The precision may differ.
    """
    fitting: Leaves = {}
    for x, y in ((x, new[rel]) for rel, x in old.items() if rel in new):
        before, after = x.value, y.value
        floats = trees.is_inexact(before.dtype) and trees.is_inexact(after.dtype)
        floats &= jnp.iscomplexobj(before) == jnp.iscomplexobj(after)
        shared = y.replicas is None and (x.replicas or 1) > 1
        if x.shape == y.shape and (before.dtype == after.dtype or floats) and not shared:
            fitting[y.path] = x
    return fitting


def _matched(olds: dict[Path, Leaves], news: dict[Path, Leaves], notes: Notes) -> Leaves:
    """Match the old states of a class to the new states: the best fit first, then in order.

    An old state may become several new states. Several old states may become one state if each has
    the moments of different params, or if the states are translated and have different fields.
    """
    matches: Leaves = {}
    primary: dict[Path, Path] = {}
    pairs = list(itertools.product(olds, news))
    fitting = {(old, new): _fitting(olds[old], news[new]) for old, new in pairs}

    def score(pair: tuple[Path, Path]) -> tuple[int, ...]:
        """Count fitting arrays, equal dtypes, surplus arrays (negative) and equal labels."""
        labels = [{key for key in path if isinstance(key, DictKey)} for path in pair]
        good = len(fitting[pair])
        dtypes = {y.path: y.value.dtype for y in news[pair[1]].values()}
        equal = sum(x.value.dtype == dtypes[path] for path, x in fitting[pair].items())
        return good, equal, good - len(olds[pair[0]]), len(labels[0] & labels[1])

    for old, new in sorted(pairs, key=score, reverse=True):
        if fitting[old, new] and new not in primary and old not in primary.values():
            primary[new] = old
            matches |= fitting[old, new]
    first = next(iter(next(iter(news.values())).values()))
    for old, new in pairs if first.holds.bound is None else ():
        used = {x.path for x in matches.values() if x.owner is not None}
        free = {y: x for y, x in fitting[old, new].items() if not (y in matches or x.path in used)}
        if any(x.owner is not None for x in free.values()):
            if primary.setdefault(new, old) != old:
                notes.append(_DATA["notes"]["also"].format(first.name, _spot(new), _spot(old)))
        matches |= free if new in primary else {}
    chosen = [(primary[new], new) for new in news if new in primary]
    if len(pairs) > 1 and chosen != [*itertools.zip_longest(olds, news)]:
        words = ", ".join(f"{_spot(old)} -> {_spot(new)}" for old, new in chosen) or "none fits"
        notes.append(_DATA["notes"]["several"].format(first.name, len(olds), len(news), words))
    for at, new in news.items():
        for path in _incomplete(olds[primary[at]] if at in primary else new, new, matches):
            matches.pop(path, None)
    return matches


def _incomplete(old: Leaves, new: Leaves, matches: Leaves) -> list[Path]:
    """Return the arrays of a state that would be wrong without other, missing arrays."""
    lacks = {rel for rel, y in new.items() if y.path not in matches}
    if next(iter(new.values())).holds.bound is not None:
        bound, before = ({rel for rel, x in state.items() if x.bound} for state in (new, old))
        return [new[rel].path for rel in bound if bound != before or lacks & bound]
    owned = {rel: y.owner for rel, y in new.items() if y.owner is not None}
    # A new second moment is zero. An old first moment, divided by the root of this zero, would be a
    # huge step.
    broken = {owned[rel] for rel in lacks & owned.keys() & old.keys()}
    wrong = {rel for rel, owner in owned.items() if owner in broken}
    # Counts without their moments would make the bias correction wrong.
    moments = bool(owned) or any(GetAttrKey("by_shape") in rel for rel in lacks)
    return [new[rel].path for rel in (new if moments and owned.keys() <= wrong | lacks else wrong)]


def _require_same_scales(olds: list[Leaf], news: list[Leaf], matches: Leaves) -> None:
    """Refuse moments and residuals if another loss scale multiplied their gradients.

    A scaler divides the gradients only for the states inside the scaler.
    """
    before, after = ([x for x in y if x.field == x.holds.scale != ""] for y in (olds, news))

    def outside(at: Path, scalers: list[Leaf]) -> list[Any]:
        # A scaler whose inner state is ``None`` does not divide the optimizer's gradients.
        around = (x for x in scalers if getattr(x.state, "inner_state", ()) is not None)
        leaves = [matches.get(x.path, x) for x in around if at[: len(x.at)] != x.at]
        return [np.unique(x.value).tolist() for x in leaves]

    for y in (y for y in news if y.path in matches and trees.is_inexact(y.value.dtype)):
        # If the only param is a scalar, every scalar of a state looks like an array of the param.
        owned = y.owner is not None and not y.owner == y.shape == ()
        other = y.holds.params or y.holds.opened
        at = matches[y.path].at
        scales = outside(at, before), outside(y.at, after)
        words = f"{y.name} of gradients scaled by {scales[0]} at {_spot(at)}, but by {scales[1]}"
        require(other or not owned or scales[0] == scales[1], "unit", f"{words} at {_spot(y.at)}")


def _cast(new: Leaf, old: Leaf, notes: Notes) -> Leaf:
    """Return an old array in the dtype of the new array."""
    dtype = new.value.dtype
    if dtype == old.value.dtype:
        return old
    where = f"{new.field} of {new.name} at {_spot(new.at)}"
    notes.append(_DATA["notes"]["cast"].format(where, old.value.dtype, dtype))
    value = old.value.astype(dtype)
    require(norms.stays_finite(old.value, value), "range", f"{dtype} at {_spot(new.path)}")
    return old._replace(value=value)


def _starts(news: list[Leaf], matches: Leaves, count: int, notes: Notes) -> Leaves:
    """Return the counts that new schedules read, by their paths, with the value ``count``."""
    fresh = [y for y in news if y.path not in matches and y.holds.steps]
    counts = [y for y in fresh if trees.path_name(y.rel[-1:]) == y.holds.steps]
    words = _DATA["notes"]["start" if counts else "no start"]
    notes += [words.format(trees.path_name(y.path), count) for y in counts] or [words.format(count)]
    return {y.path: y._replace(value=jnp.full_like(y.value, count)) for y in counts}


def _placed(leaf: Leaf, old: Leaf | None, replicas: int) -> jax.Array:
    """Return a new buffer for an array of the new state."""
    x = (old or leaf).value
    leads = old and old.replicas
    if leaf.replicas is None:
        return _copy(x[0] if leads else x, leaf.value)
    if leads is not None or (leaf.replicas and old is None):
        # Without a mesh, the new state's array is not placed yet, so the placement of the old array
        # applies.
        return _copy(x, leaf.value if leaf.replicas else x)
    x = spread_anew(PerReplica(x[None]), replicas, False).local if replicas else x
    return _copy(x, x if replicas and not leaf.replicas else leaf.value)


def _copy(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return ``x`` in a new buffer, strongly typed, placed as ``like``."""
    if like.committed or jnp.issubdtype(like.dtype, jax.dtypes.extended):
        return jax.device_put(jnp.array(x, like.dtype, copy=True), like.sharding)
    # The copy goes through the host, because a copy of a committed array would be committed.
    return jnp.array(np.asarray(x), like.dtype, copy=True) if x.is_fully_replicated else x.copy()


def _report(olds: list[Leaf], news: list[Leaf], matches: Leaves, notes: Notes) -> MigrationReport:
    """Report which arrays of each state were kept, newly made or dropped."""
    used = {old.path for old in matches.values()}
    rows = [("kept" if y.path in matches else "anew", matches.get(y.path, y).at, y) for y in news]
    rows += [("dropped", x.at, x) for x in olds if x.path not in used]
    groups: dict[tuple[str, Path, Path], list[Leaf]] = {}
    for what, at, x in rows:
        groups.setdefault((what, at, x.at), []).append(x)
    lines: dict[str, list[str]] = {"kept": [], "anew": [], "dropped": []}
    for (what, old, new), some in groups.items():
        path = _spot(new) if old == new else f"{_spot(old)} -> {_spot(new)}"
        fields: list[str] = []
        for field in dict.fromkeys(x.field for x in some):
            names = [trees.path_name(x.rel) for x in some if x.field == field]
            state = [x for x in (olds if what == "dropped" else news) if x.at == some[0].at]
            complete = len(names) == sum(x.field == field for x in state)
            fields += [field] if complete else [*names[:4], *["..."] * (len(names) > 4)]
        lines[what].append(f"{some[0].name} {', '.join(fields)}: {path}")
    notes += [x for y in news if y.path in matches for x in _saved_wins(y, matches[y.path].value)]
    return MigrationReport(*map(tuple, [*lines.values(), dict.fromkeys(notes)]))


def _saved_wins(leaf: Leaf, saved: jax.Array) -> Iterator[str]:
    """Yield a note for each saved number that differs from the new chain's argument."""
    is_argument = leaf.field != "" and leaf.field in (leaf.holds.scale, leaf.holds.basis)
    if leaf.field == "hyperparams":
        is_argument = leaf.rel[1].key not in getattr(leaf.state, "hyperparams_states", {})
    if is_argument and saved.shape == leaf.value.shape and not np.array_equal(saved, leaf.value):
        words = "the saved one" if saved.ndim else f"{saved!s}, not {leaf.value!s}"
        yield f"{trees.path_name(leaf.path)} is {words}: the saved value replaces the argument."
