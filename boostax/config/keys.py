# SPDX-License-Identifier: Apache-2.0
"""Factories that a configuration names, in their one order, and their arguments as data.

A factory's signature says what a configuration can give it; the chain supplies the optimizer
inside, the replica axes and the params. Arguments that are no data (a schedule, a tree of labels)
are made by a function here, from data that stand in their place.
"""

import contextlib
import dataclasses
import difflib
import functools
import glob
import inspect
import operator
import tomllib
import types
from collections.abc import Callable, Generator, Iterable, Mapping
from importlib.resources import files
from typing import Any, TypeAlias

import optax

import boostax
from boostax import freeze, subspace
from boostax._core import axes, checks
from boostax.chain.parts import opened, read
from boostax.chain.roles import role
from boostax.subspace.basis import saved_basis
from boostax.subspace.dim_reduce import RULES

Factory: TypeAlias = Callable[..., Any]
Chain: TypeAlias = list[optax.GradientTransformation]


def table(name: str) -> dict[str, Any]:
    """Return a file of this package."""
    return tomllib.loads(files("boostax.config").joinpath(f"{name}.toml").read_text("utf8"))


_DATA = table("order")
# By key its factories, by kind: those of a chain from the optimizer outwards, and all of them.
ORDER, PARTS = (
    {
        key: {kind: operator.attrgetter(name)(boostax) for kind, name in kinds.items()}
        for key, kinds in listed.items()
    }
    for listed in (_DATA["order"], _DATA["order"] | _DATA["beside"])
)
# By its role the key in whose place, or behind which, a part of a user's own stands.
PLACES: dict[str, str] = {role: key for key, roles in _DATA["places"].items() for role in roles}
# Each factory is a key by its own name, too.
NAMED = {f.__name__: (key, kind) for key, kinds in PARTS.items() for kind, f in kinds.items()}
KEYS = tuple(dict.fromkeys((*PARTS, "microbatches", *NAMED)))
# Arguments that a chain gives; ``tree`` are the params.
_PLACE = ("inner", "module", "args", "kwargs", "axis_name", "tree", "less_bn")
# With one of these dim_reduce begins at once.
FILES = ("weight_load_dir", "pca_mat_path")
# Names of a configuration's for arguments of the functions that make arguments.
_RENAMED = {"n": "groups", "directory": FILES[0], "path": FILES[1]}
# Stands for the params while a configuration is checked.
_LATER = object()
# What the functions below are told where a chain does not say it.
_NOWHERE: Any = dict.fromkeys(("axis_name", "tree", "less_bn", "source", "residual"))
_GROUPS = {"groups": 4, "order": None, "level": None, "cut": "layers"}
_STEPS = {"total_steps": None, "frozen_fraction": None, "seed": None, "freeze_p": None}
_FINISH = {
    **{"n_components": 20, "every": 10, "start": 0, "weight_load_dir": None, "pca_mat_path": None},
    **{"residual_rate": None, "residual_momentum": 0.0},
    **{"rule": "boostax", "shrink": None, "slope": None},
}


def _window(told: Any) -> dict[str, Any]:
    """Let ``drop`` say what an overflow takes with it: itself, or all of its window."""
    hint = "'window' puts the scaler inside."
    checks.choice("", "drop", told.drop, ("micro-batch", "window"), hint)
    return {}


def _axes(told: Any) -> dict[str, Any]:
    """Leave the normalized head of LessBN alone, as MindSpore does."""
    if told.less_bn is None or told.less_bn.head is None or callable(told.axes):
        return {}
    rules: Any = {} if isinstance(told.axes, str) else dict(told.axes)
    return {"axes": {glob.escape(told.less_bn.head): None} | rules}


def _groups(told: Any) -> Any:
    """Cut a number of groups by layers, or in MindSpore's buckets; patterns and names pass."""
    cut, groups, tree = told.cut, told.groups, told.tree
    checks.choice("", "cut", cut, ("layers", "mindspore"), "MindSpore cuts buckets of params.")
    if groups and isinstance(groups, (tuple, Mapping)):
        return groups
    hint = "4 cuts the layers into quarters; ['embed', 'block_*'] names groups by patterns."
    checks.positive_int("", "groups", groups, hint)
    allowed = f"given where groups is a number, {groups}"
    checks.require("", "params", tree, allowed, tree is not None, "Or name them by patterns.")
    if tree is _LATER:
        return {"any": 0}
    if cut == "layers":
        return freeze.prefix_groups(tree, groups, order=told.order, level=told.level)
    hint = "Its buckets are of params."
    checks.absent("", "level", told.level, "left out with cut 'mindspore'", hint)
    removed = told.less_bn.removed if told.less_bn else ()
    return freeze.mindspore_groups(tree, groups, order=told.order, removed=removed)


def _schedule(told: Any) -> dict[str, Any]:
    """Make a schedule by its name or a function; a sequence of depths is one."""
    kind, options = told.kind, {name: getattr(told, name) for name in _STEPS}
    found = {"groups": _groups(told)}
    if isinstance(kind, tuple):
        for name, value in options.items():
            checks.absent("", name, value, "left out with depths", "They start anew at their end.")
        return found | {"schedule": kind, "repeat": True}
    # The other two freeze for good, and want to know when; 65536 is MindSpore's default.
    if told.total_steps is None and kind not in ("progressive", "ramp"):
        options["total_steps"] = 65536
    anew = kind in ("interval", "continuous")
    return found | {"schedule": freeze.freeze_schedule(kind, **options), "repeat": anew}


def _finish(told: Any) -> dict[str, Any]:
    """Take a rule by its name, and an SGD outside the span if no optimizer is given."""
    rule, rate, momentum = told.rule, told.residual_rate, told.residual_momentum
    checks.choice("", "rule", rule, tuple(RULES), nearest(rule, RULES))
    search = {x: getattr(told, x) for x in ("shrink", "slope") if getattr(told, x) is not None}
    for name, value in (search | ({"residual_momentum": momentum} if momentum else {})).items():
        checks.number("", name, value, "in (0, 1)", lambda x: 0 < x < 1, "Or leave it out.")
    outside = told.residual
    if outside is None and rate is not None:
        checks.number("", "residual_rate", rate, "positive", lambda x: x > 0, "Or leave it out.")
        outside = optax.sgd(rate, momentum or None)
    if outside is not None and told.axis_name is not None:
        outside = optax.chain(boostax.all_reduce(told.axis_name), outside)
    rule = dataclasses.replace(RULES[rule], **search)
    return {"basis": _basis(told), "residual": outside, "rule": rule}


def _basis(told: Any) -> Any:
    """Read a basis from a source; without one return the recorder of its snapshots, if any."""
    count, tree = told.n_components, told.tree
    checks.positive_int("", "n_components", count, "It counts directions.")
    files = [x for x in (told.weight_load_dir, told.pca_mat_path) if x is not None]
    fits, hint = len(files) < 2, "The one or the other makes the basis."
    checks.require("", FILES[0], told.weight_load_dir, "left out with pca_mat_path", fits, hint)
    if told.source is None:
        if files or told.every is None:
            return None
        return subspace.record_trajectory(count + 1, every=told.every, start=told.start)
    if told.source is not FILES:
        found = isinstance(told.source, subspace.Basis)
        return told.source if found else subspace.trajectory_basis(told.source, count, params=tree)
    allowed, hint = "given where there is no run before", "boost.finish(basis, params) takes any."
    checks.require("", " or ".join(FILES), None, allowed, len(files) > 0, hint)
    allowed, hint = "given where files are read", "They name what is to be in them."
    checks.require("", "params", tree, allowed, tree is not None, hint)
    if told.pca_mat_path is not None:
        return saved_basis(told.pca_mat_path, tree, count)
    return subspace.pca_basis(subspace.checkpoint_snapshots(files[0], tree), count)


_CENTRALIZE = {"multiple_of": None, "axes": "auto", "after_decay": False}
# By factory the function that makes arguments, their names, and what a configuration says instead.
_MADE: dict[str, tuple[Factory, str, dict[str, Any]]] = {
    "accumulate": (_window, "", {"every": 1, "drop": "micro-batch"}),
    "centralize_gradients": (_axes, "", _CENTRALIZE),
    "dim_reduce": (_finish, "basis residual rule", _FINISH),
    "group_loss_scale": (lambda told: {"labels": _groups(told)}, "labels", _GROUPS),
    "local_updates": (lambda told: {}, "outer reduction", {}),
    "scheduled_freeze": (_schedule, "schedule repeat", {"kind": "interval", **_GROUPS, **_STEPS}),
}


@functools.cache
def takes(factory: Factory) -> dict[str, Any]:
    """Return what data can say to a factory, with the defaults."""
    _, made, instead = _MADE.get(factory.__name__, (None, "", {}))
    theirs = inspect.signature(factory).parameters
    own = {x: p.default for x, p in theirs.items() if x not in _PLACE and x not in made.split()}
    return instead | {x: default for x, default in own.items() if x not in instead}


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
        allowed, fits = f"one of several axes, {names}", 0 < len(told["axis_name"]) < len(names)
        checks.require(who, "within", within, allowed, fits, "Its links are the fast ones.")
    if who in _MADE:
        make, _, instead = _MADE[who]
        with speaking_of(who, _RENAMED):
            told = {**instead, **told}
            told |= make(types.SimpleNamespace(**{**_NOWHERE, **told}))
    names = inspect.signature(factory).parameters
    told = {name: x for name, x in told.items() if name in names}
    if factory is boostax.dim_reduce and "source" not in place:  # It records during the run.
        return [*filter(None, [told["basis"]]), *parts]
    if "inner" in names:
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
    for x, default in takes(factory).items():
        there = x in given or default is not inspect.Parameter.empty
        checks.require(who, x, None, "given", there, "It has no default.")
        if isinstance(default, bool) and x in given:
            flag(who, x, given[x])
    if key != "less_bn":  # It wants a model.
        replicas = ("axis", *([given["within"]] if isinstance(given.get("within"), str) else []))
        layer(factory, given, [optax.identity()], axis_name=replicas, tree=_LATER)
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
