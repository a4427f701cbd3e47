# SPDX-License-Identifier: Apache-2.0
"""Factories that a configuration names, in their one order, and their arguments as data.

A factory's signature says what a configuration can give it; the chain supplies the optimizer
inside, the replica axes and the params. An argument that is no data (a schedule, a tree of labels)
is made by a function here, whose own arguments a configuration then has.
"""

import contextlib
import dataclasses
import difflib
import functools
import glob
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeAlias

import optax

import boostax
from boostax import freeze, model, precision, reduce, subspace
from boostax._core import axes, checks
from boostax.chain.parts import opened, read
from boostax.chain.roles import role
from boostax.subspace.basis import saved_basis
from boostax.subspace.quasi_newton import RULES

Factory: TypeAlias = Callable[..., Any]
Chain: TypeAlias = list[optax.GradientTransformation]

# From the optimizer outwards: each stands in front of all before it, or around. "kind" chooses one
# of several factories.
ORDER: dict[str, dict[str, Factory]] = {
    "count_lost_updates": {"": precision.count_lost_updates},
    "check_updates": {"": precision.check_updates},
    "clip": {"": model.clip_by_global_norm},
    "adagc": {"": model.adagc},
    "centralize": {"": boostax.centralize_gradients},
    "reduce": {
        "mean": boostax.all_reduce,
        "adasum": boostax.adasum,
        "adasum-delta": reduce.adasum_delta,
        "top-k": boostax.top_k_reduce,
        "threshold": reduce.threshold_reduce,
        "int8": boostax.int8_reduce,
        "power-sgd": reduce.power_sgd_reduce,
        "partial": reduce.partial_average,
        "local": reduce.local_updates,
    },
    "dim_reduce": {"": boostax.dim_reduce},
    "store": {"": precision.store},
    "average_params": {"": model.average_params},
    "skip_spikes": {"": precision.skip_spikes},
    "accumulate": {"": boostax.accumulate},
    "loss_scale": {
        "dynamic": boostax.dynamic_loss_scale,
        "static": boostax.static_loss_scale,
        "group": precision.group_loss_scale,
    },
    "carry": {"": boostax.carry},
    "freeze": {"": boostax.scheduled_freeze},
}
PARTS = {**ORDER, "policy": {"": boostax.policy}, "less_bn": {"": boostax.less_bn}}
# Each factory is a key by its own name, too.
NAMED = {f.__name__: (key, kind) for key, kinds in PARTS.items() for kind, f in kinds.items()}
KEYS = tuple(dict.fromkeys((*PARTS, "microbatches", *NAMED)))
# Arguments that a chain gives (``tree`` are the params), and what is a transformation itself.
_PLACE = {"inner", "module", "args", "kwargs", "axis_name", "tree", "less_bn", "source", "residual"}
_PLACE |= {"outer", "reduction"}
# With one of these dim_reduce begins at once.
FILES = ("weight_load_dir", "pca_mat_path")
# Names of a configuration's for arguments of the functions that make arguments.
_RENAMED = {"n": "groups", "directory": FILES[0], "path": FILES[1]}
# Stands for the params while a configuration is checked.
_LATER = object()


def _every(every: Any = 1, drop: str = "micro-batch") -> Any:
    """Let ``drop`` say what an overflow takes with it: itself, or all of its window."""
    checks.choice("", "drop", drop, ("micro-batch", "window"), "'window' puts the scaler inside.")
    return every


def _axes(axes: Any = "auto", after_decay: bool = False, less_bn: Any = None) -> Any:
    """Leave the normalized head of LessBN alone, as MindSpore does."""
    del after_decay  # of the layer
    if less_bn is None or less_bn.head is None or callable(axes):
        return axes
    return {glob.escape(less_bn.head): None} | ({} if isinstance(axes, str) else dict(axes))


def _groups(
    groups: Any = 4,
    order: Any = None,
    level: int | None = None,
    cut: str = "layers",
    tree: Any = None,
    less_bn: Any = None,
) -> Any:
    """Cut a number of groups by layers, or in MindSpore's buckets; patterns and names pass."""
    checks.choice("", "cut", cut, ("layers", "mindspore"), "MindSpore cuts buckets of params.")
    if groups and isinstance(groups, (tuple, Mapping)):
        return groups
    hint = "4 cuts the layers into quarters; ['embed', 'block_*'] names groups by patterns."
    count = checks.positive_int("", "groups", groups, hint)
    allowed = f"given where groups is a number, {groups}"
    checks.require("", "params", tree, allowed, tree is not None, "Or name them by patterns.")
    if tree is _LATER:
        return {"any": 0}
    if cut == "layers":
        return freeze.prefix_groups(tree, count, order=order, level=level)
    checks.absent("", "level", level, "left out with cut 'mindspore'", "Its buckets are of params.")
    removed = less_bn.removed if less_bn else ()
    return freeze.mindspore_groups(tree, count, order=order, removed=removed)


def _schedule(
    kind: Any = "interval",
    total_steps: int | None = None,
    frozen_fraction: float | None = None,
    seed: int | None = None,
    freeze_p: float | None = None,
) -> Any:
    """Make a schedule by its name or a function; a sequence of depths is one."""
    options: Any = {"frozen_fraction": frozen_fraction, "seed": seed, "freeze_p": freeze_p}
    if isinstance(kind, tuple):
        for name, value in {**options, "total_steps": total_steps}.items():
            checks.absent("", name, value, "left out with depths", "They start anew at their end.")
        return kind
    # The two that freeze for good want to know when; the others take MindSpore's default.
    steps: Any = total_steps or (None if kind in ("progressive", "ramp") else 65536)
    return freeze.freeze_schedule(kind, total_steps=steps, **options)


def _starts_anew(kind: Any = "interval") -> bool:
    return isinstance(kind, tuple) or kind in ("interval", "continuous")


def _basis(
    n_components: int = 20,
    every: Any = 10,
    start: int = 0,
    weight_load_dir: str | None = None,
    pca_mat_path: str | None = None,
    tree: Any = None,
    source: Any = None,
) -> Any:
    """Read a basis from a source; without one return the recorder of its snapshots, if any."""
    count = checks.positive_int("", "n_components", n_components, "It counts directions.")
    files = [x for x in (weight_load_dir, pca_mat_path) if x is not None]
    fits, hint = len(files) < 2, "The one or the other makes the basis."
    checks.require("", FILES[0], weight_load_dir, "left out with pca_mat_path", fits, hint)
    if source is None:
        none = files or every is None
        return None if none else subspace.record_trajectory(count + 1, every=every, start=start)
    if isinstance(source, subspace.Basis):
        return source
    if source is not FILES:
        return subspace.trajectory_basis(source, count, params=tree)
    allowed, hint = "given where there is no run before", "boost.finish(basis, params) takes any."
    checks.require("", " or ".join(FILES), None, allowed, len(files) > 0, hint)
    allowed, hint = "given where files are read", "They name what is to be in them."
    checks.require("", "params", tree, allowed, tree is not None, hint)
    if pca_mat_path is not None:
        return saved_basis(pca_mat_path, tree, count)
    return subspace.pca_basis(subspace.checkpoint_snapshots(files[0], tree), count)


def _residual(
    residual_rate: Any = None,
    residual_momentum: Any = 0.0,
    residual: Any = None,
    axis_name: Any = None,
) -> Any:
    """Make the optimizer of what lies outside the span: an SGD, if none is given."""
    if residual is None and residual_rate is not None:
        residual = optax.sgd(residual_rate, residual_momentum or None)
    if residual is None or axis_name is None:
        return residual
    return optax.chain(boostax.all_reduce(axis_name), residual)


def _rule(rule: str = "boostax", shrink: Any = None, slope: Any = None) -> Any:
    """Take a rule by its name, with another line search if one is asked for."""
    checks.choice("", "rule", rule, tuple(RULES), nearest(rule, RULES))
    search = {name: x for name, x in (("shrink", shrink), ("slope", slope)) if x is not None}
    for name, value in search.items():
        checks.number("", name, value, "in (0, 1)", lambda x: 0 < x < 1, "Or leave it out.")
    return dataclasses.replace(RULES[rule], **search)


# Arguments that are no data, by the functions that make them.
_MADE: dict[tuple[str, str], Factory] = {
    ("accumulate", "every"): _every,
    ("centralize_gradients", "axes"): _axes,
    ("dim_reduce", "basis"): _basis,
    ("dim_reduce", "residual"): _residual,
    ("dim_reduce", "rule"): _rule,
    ("group_loss_scale", "labels"): _groups,
    ("scheduled_freeze", "groups"): _groups,
    ("scheduled_freeze", "schedule"): _schedule,
    ("scheduled_freeze", "repeat"): _starts_anew,
}


@functools.cache
def _signature(factory: Factory) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(factory).parameters)


@functools.cache
def takes(factory: Factory) -> dict[str, inspect.Parameter]:
    """Return what data can say to a factory; a ``kind`` comes first."""
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in _signature(factory).items():
        make = _MADE.get((factory.__name__, name))
        found |= _signature(make) if make else {name: parameter}
    data = {name: p for name, p in found.items() if name not in _PLACE}
    return dict(sorted(data.items(), key=lambda item: item[0] != "kind"))


def layer(factory: Factory, given: Mapping[str, Any], parts: Chain, **place: Any) -> Chain:
    """Put what a factory makes in front of a chain, or around it.

    Args:
      factory: any.
      given: arguments as data.
      parts: the chain so far.
      **place: replica axes (``axis_name``), the params or their shapes (``tree``), the changes that
        LessBN made to the model (``less_bn``); and of a finish the ``source`` of its basis and an
        optimizer outside the span (``residual``).
    """
    who, told = factory.__name__, place | {name: sequences(x, tuple) for name, x in given.items()}
    if told.get("dense") == "vectors":
        # Thinned out, norms and biases cost more than they save.
        told["dense"] = lambda _, leaf: leaf.ndim < 2
    if isinstance(within := told.get("within"), str):  # The axis of the fast links.
        names = axes.canonical(who, place["axis_name"])
        told["axis_name"] = tuple(name for name in names if name != within)
    with speaking_of(who, _RENAMED):
        made = {
            name: make(**{key: told[key] for key in _signature(make) if key in told})
            for name in _signature(factory)
            if (make := _MADE.get((who, name)))
        }
    told = {name: x for name, x in (told | made).items() if name in _signature(factory)}
    if factory is boostax.dim_reduce and "source" not in place:  # It records during the run.
        return [*filter(None, [told["basis"]]), *parts]
    if "inner" in _signature(factory):
        return [factory(chained(parts), **told)]
    tx = factory(**told)
    return [_after_decay(tx, chained(parts))] if given.get("after_decay") else [tx, *parts]


def chained(parts: Chain) -> optax.GradientTransformation:
    """Return one transformation."""
    return parts[0] if len(parts) == 1 else optax.chain(*parts)


def _after_decay(
    centralize: optax.GradientTransformation, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Put centralization behind the decay that an optimizer's moments take in, as MindSpore."""
    parts, place = opened(inner), 0
    for i, tx in enumerate(parts):
        found = read(tx)
        while found.name == "masked":  # A decay that spares norms.
            ((_, found),) = found.inner
        what = role(found)
        if what == "decay":
            place = i + 1
        elif what not in ("clip", "norm clip"):
            break
    return optax.chain(*parts[:place], centralize, *parts[place:])


def chosen(key: str, options: Mapping[str, Any]) -> tuple[Factory, dict[str, Any]]:
    """Return the factory of a key, and its own arguments."""
    told, kinds = dict(options), PARTS[key]
    return kinds["" if "" in kinds else told.pop("kind")], told


def part(
    name: str, value: Any, before: Mapping[str, Any] | None = None, own: Factory | None = None
) -> dict[str, Any]:
    """Read a value of a configuration as the plain arguments of a factory, and check them.

    Args:
      name: a key, or the name of a factory.
      value: a dictionary of arguments, ``True`` for none, or the first argument alone.
      before: arguments that hold where ``value`` says nothing, if the kind is the same.
      own: the factory, where it is a user's.

    Returns:
      The arguments; of a key with several kinds, ``"kind"`` first.
    """
    key, kind = NAMED.get(name, (name, ""))
    kinds, before = PARTS[key] if own is None else {"": own}, before or {}
    choose = kind not in kinds
    first = "kind" if choose else next(iter(takes(kinds[kind])), None)
    given: Any = {} if value is True else value
    given = {first: value} if first and not isinstance(given, Mapping) else given
    hint, fits = "It takes no arguments: true or false.", isinstance(given, Mapping)
    checks.require("auto", name, value, "a dictionary", fits, hint, TypeError)
    given = {x: sequences(y, list) for x, y in given.items()}
    if choose:
        kind = given.pop("kind", before.get("kind", next(iter(kinds))))
        checks.choice("auto", f"{name}.kind", kind, tuple(kinds), nearest(kind, kinds))
    factory, told = kinds[kind], {"kind": kind} if kind else {}
    who = factory.__name__
    known(given, takes(factory), f"arguments of {who}")
    if told.items() <= before.items():
        given = {x: y for x, y in before.items() if x not in told} | given
    for x, parameter in takes(factory).items():
        there = x in given or parameter.default is not parameter.empty
        checks.require(who, x, None, "given", there, "It has no default.")
        if isinstance(parameter.default, bool) and x in given:
            flag(who, x, given[x])
    if key != "less_bn":  # It wants a model.
        layer(factory, given, [optax.identity()], axis_name="axis", tree=_LATER)
    return told | given


def known(data: Any, allowed: Iterable[str], what: str, who: str = "auto") -> None:
    """Refuse anything but a dictionary, and keys that are not allowed, with the nearest one."""
    fits, hint = isinstance(data, Mapping), "It is a dictionary."
    checks.require(who, what, data, "those of a dictionary", fits, hint, TypeError)
    words = "among " + ", ".join(map(repr, allowed))
    for key in data:
        checks.require(who, what, key, words, key in allowed, nearest(key, allowed))


def flag(who: str, name: str, value: Any) -> None:
    """Refuse anything but a bool."""
    fits, hint = isinstance(value, bool), "JSON: true or false."
    checks.require(who, name, value, "True or False", fits, hint, TypeError)


def nearest(word: Any, words: Iterable[str]) -> str:
    """Return a hint that names the word that was perhaps meant."""
    found = difflib.get_close_matches(str(word), list(words), 1, 0.5)
    return f"Did you mean {found[0]!r}?" if found else "Nothing there is close to it."


@contextlib.contextmanager
def speaking_of(who: str, renamed: Mapping[str, str]) -> Generator[None]:
    """Let an error inside speak of ``who``, and of the names that a configuration has."""
    try:
        yield
    except (ValueError, TypeError) as error:
        argument, _, rest = (str(error).partition(": ")[2] or str(error)).partition(" ")
        raise type(error)(f"{who}: {renamed.get(argument, argument)} {rest}") from error


def sequences(value: Any, kind: Callable[[Iterable[Any]], Any]) -> Any:
    """Make all lists and tuples of plain data one of the two."""
    if isinstance(value, Mapping):
        return {key: sequences(x, kind) for key, x in value.items()}
    return kind(sequences(x, kind) for x in value) if isinstance(value, (list, tuple)) else value
