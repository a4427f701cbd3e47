# SPDX-License-Identifier: Apache-2.0
"""The factories that a configuration names, in the recommended order, and their arguments as data.

A configuration can give a factory the arguments in its signature, except those that the chain
supplies: the optimizer inside, the replica axes and the params. Arguments that are not data (a
schedule, a tree of labels) are made from data by functions of this module.
"""

import contextlib
import dataclasses
import functools
import glob
import inspect
import itertools
import math
import pkgutil
import types
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeAlias

import optax

import boostax
from boostax import subspace
from boostax._core import axes, checks
from boostax.chain.parts import CLIPS, opened, read, rows
from boostax.config.refusals import require
from boostax.subspace import files
from boostax.subspace.basis import saved_basis
from boostax.subspace.dim_reduce import RULES

Factory: TypeAlias = Callable[..., Any]
Tx: TypeAlias = optax.GradientTransformation
Data: TypeAlias = dict[str, Any]
DATA = checks.table("boostax.config", "order")
# The factories of each key by kind; a key with a single factory has the kind "".
PARTS: dict[str, dict[str, Factory]] = {
    key: {kind: pkgutil.resolve_name(name) for kind, name in kinds.items()}
    for key, kinds in (DATA["order"] | DATA["beside"]).items()
}
# The key of the part that a user's part of this role replaces or follows.
PLACES: dict[str, str] = {role: key for key, roles in DATA["places"].items() for role in roles}
# The key and the kind of each factory; the factory's name is also a key.
NAMED = {f.__name__: (key, kind) for key, kinds in PARTS.items() for kind, f in kinds.items()}
KEYS = tuple(dict.fromkeys((*PARTS, "microbatches", *NAMED)))
# With one of these arguments dim_reduce starts at the first step.
FILES = ("weight_load_dir", "pca_mat_path")
# Stands for the params while a configuration is checked.
_LATER = object()


def _axes(options: types.SimpleNamespace) -> dict[str, Any]:
    """Exclude the normalized head of LessBN from centralization, as MindSpore does."""
    head, rules = getattr(options.less_bn, "head", None), options.axes
    if head is None or callable(rules):
        return {}
    return {"axes": {glob.escape(head): None} | ({} if isinstance(rules, str) else dict(rules))}


def _groups(options: types.SimpleNamespace) -> Any:
    """Cut the params into a number of groups, by layers or in the buckets of MindSpore.

    Groups that are given by patterns or names are returned unchanged.
    """
    cut, groups, tree = options.cut, options.groups, options.tree
    checks.choice("", "cut", cut, ("layers", "mindspore"), "MindSpore cuts buckets of params.")
    if groups and isinstance(groups, (tuple, Mapping)):
        return groups
    checks.positive_int("", "groups", groups, DATA["hints"]["groups"])
    require(tree is not None, "groups", tree, groups=groups)
    if tree is _LATER:
        return {"any": 0}
    if cut == "layers":
        return boostax.freeze.prefix_groups(tree, groups, order=options.order, level=options.level)
    require(options.level is None, "level", options.level)
    removed = options.less_bn.removed if options.less_bn else ()
    return boostax.freeze.mindspore_groups(tree, groups, order=options.order, removed=removed)


def _schedule(options: types.SimpleNamespace) -> dict[str, Any]:
    """Make a schedule from its name or a function; return a sequence of depths unchanged."""
    _, *names = inspect.signature(boostax.freeze.freeze_schedule).parameters
    kind, steps = options.kind, {name: getattr(options, name) for name in names}
    groups = _groups(options)
    if isinstance(kind, tuple):
        for name, value in steps.items():
            require(value is None, "depths", value, name=name)
        return {"groups": groups, "schedule": kind, "repeat": True}
    # The other two kinds freeze for good and need an end; MindSpore's default is 65536.
    if options.total_steps is None and kind not in ("progressive", "ramp"):
        steps["total_steps"] = 65536
    schedule = boostax.freeze.freeze_schedule(kind, **steps)
    return {"groups": groups, "schedule": schedule, "repeat": kind in ("interval", "continuous")}


def _finish(options: types.SimpleNamespace) -> dict[str, Any]:
    """Look up a rule by name, and use SGD outside of the span if no optimizer is given."""
    rate, momentum = options.residual_rate, options.residual_momentum
    checks.choice("", "rule", options.rule, tuple(RULES), checks.nearest(options.rule, RULES))
    search = {x: y for x in ("shrink", "slope") if (y := getattr(options, x)) is not None}
    for name, value in (search | ({"residual_momentum": momentum} if momentum else {})).items():
        checks.number("", name, value, "in (0, 1)", lambda x: 0 < x < 1, "Or leave it out.")
    outside = options.residual
    if outside is None and rate is not None:
        checks.number("", "residual_rate", rate, "positive", lambda x: x > 0, "Or leave it out.")
        outside = optax.sgd(rate, momentum or None)
    if outside is not None and options.axis_name is not None:
        outside = optax.chain(boostax.all_reduce(options.axis_name), outside)
    rule = dataclasses.replace(RULES[options.rule], **search)
    return {"basis": _basis(options), "residual": outside, "rule": rule}


def _basis(options: types.SimpleNamespace) -> Any:
    """Read a basis from a source; without a source, return the recorder of snapshots, if any."""
    source, count, tree = options.source, options.n_components, options.tree
    folder, matrix = options.weight_load_dir, options.pca_mat_path
    checks.positive_int("", "n_components", count, "It counts directions.")
    require(folder is None or matrix is None, "two_files", folder)
    given = folder is not None or matrix is not None
    if source is None:
        if given or options.every is None:
            return None
        return subspace.record_trajectory(count + 1, every=options.every, start=options.start)
    if source is not FILES:
        found = isinstance(source, subspace.Basis)
        return source if found else subspace.trajectory_basis(source, count, params=tree)
    require(given, "no_files", None)
    require(tree is not None, "files", tree)
    if matrix is not None:
        return saved_basis(matrix, tree, count)
    return subspace.pca_basis(files.snapshots(options.weight_load_dir, tree), count)


# For each factory, the function that makes its arguments that are not data.
_MADE: dict[str, Factory] = {
    "accumulate": lambda _: {},
    "centralize_gradients": _axes,
    "dim_reduce": _finish,
    "group_loss_scale": lambda options: {"labels": _groups(options)},
    "scheduled_freeze": _schedule,
}


@functools.cache
def takes(factory: Factory) -> Data:
    """Return the arguments of a factory that plain data can express, with their defaults."""
    about = DATA["made"].get(factory.__name__, {"make": (), "data": ()})
    instead = {name: next(iter(default), None) for name, *default in about["data"]}
    parameters = inspect.signature(factory).parameters.items()
    plain = {x: p.default for x, p in parameters if x not in (*DATA["supplied"], *about["make"])}
    return instead | plain | instead


def layer(factory: Factory, given: Mapping[str, Any], parts: list[Tx], **place: Any) -> list[Tx]:
    """Put the transformation of a factory in front of a chain, or around it.

    Args:
      factory: any factory.
      given: its arguments as data.
      parts: the chain so far.
      **place: the replica axes (``axis_name``), the params or their shapes (``tree``) and the
        changes that LessBN made to the model (``less_bn``); for ``Boost.finish`` also the
        ``source`` of the basis and an optimizer outside of the span (``residual``).
    """
    who, options = factory.__name__, place | {x: sequences(y, tuple) for x, y in given.items()}
    if options.get("dense") == "vectors":
        # A sparse message of norms and biases costs more than it saves.
        options["dense"] = lambda _, leaf: leaf.ndim < 2
    if isinstance(within := options.get("within"), str):  # The axis of the fast links.
        names = axes.canonical(who, place["axis_name"])
        options["axis_name"] = tuple(name for name in names if name != within)
        require(0 < len(options["axis_name"]) < len(names), "within", within, who=who, names=names)
    if factory is boostax.reduce.adasum_delta and isinstance(within, int):
        return _by_servers(given, parts, place)
    if who in _MADE:
        options = dict.fromkeys(DATA["place"]) | takes(factory) | options
        with speaking_of(who, DATA["renamed"]):
            options |= _MADE[who](types.SimpleNamespace(**options))
    if factory is boostax.dim_reduce and "source" not in place:  # Without a source it only records.
        return [*filter(None, [options["basis"]]), *parts]
    names = inspect.signature(factory).parameters
    options = {name: x for name, x in options.items() if name in names}
    if "inner" in names:
        return [factory(chained(parts), **options)]
    tx = factory(**options)
    return [_after_decay(tx, chained(parts))] if given.get("after_decay") else [tx, *parts]


def mesh_of_servers(count: int, devices: int | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the sizes and names of a mesh whose last axis has the devices of a server."""
    if devices is None or count <= devices:
        return (count,), ("data",)
    require(count % devices == 0, "devices", count, devices=devices)
    return (count // devices, devices), ("server", "data")


def _by_servers(given: Mapping[str, Any], parts: list[Tx], place: Any) -> list[Tx]:
    """Put ``adasum_delta`` around a chain, or a mean in front of it if there is one replica axis.

    When it is traced, the chain refuses replica axes other than those of ``mesh_of_servers``.
    """
    delta = boostax.reduce.adasum_delta
    names, devices = axes.canonical("adasum_delta", place["axis_name"]), given["within"]
    checks.positive_int("adasum_delta", "within", devices, "It is the devices of a server.")
    if len(names) == 1:
        tx, *rest = boostax.all_reduce(names), *parts
    else:
        tx, *rest = layer(delta, {**given, "within": names[-1]}, parts, **place)

    @functools.wraps(tx.update)
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        sizes = [axes.size((name,)) for name in names]
        fits = sizes[-1] == devices or (len(sizes) == 1 and sizes[0] < devices)
        mesh = "" if fits else f"jax.make_mesh{mesh_of_servers(math.prod(sizes), devices)}"
        require(fits, "servers", sizes, devices=devices, mesh=mesh)
        return tx.update(updates, state, params, **extra)

    return [optax.GradientTransformationExtraArgs(tx.init, update), *rest]


def chained(parts: list[Tx]) -> Tx:
    """Return a chain of the parts as one transformation."""
    return parts[0] if len(parts) == 1 else optax.chain(*parts)


def _after_decay(centralize: Tx, inner: Tx) -> Tx:
    """Put centralization after coupled weight decay, as MindSpore does."""
    parts = opened(inner)
    # The decay may be inside a mask that excludes norms, which has no row.
    kinds = ({row.role for row in rows(read(tx))} for tx in parts)
    before = [*itertools.takewhile(lambda x: x <= {"decay", *CLIPS}, kinds)]
    position = max((i + 1 for i, kind in enumerate(before) if "decay" in kind), default=0)
    return optax.chain(*parts[:position], centralize, *parts[position:])


def part(name: str, value: Any, before: Any = None, user: Any = None, build: bool = False) -> Data:
    """Read a value of a configuration as the plain arguments of a factory.

    Args:
      name: a key, or the name of a factory.
      value: a dictionary of arguments, ``True`` for no arguments, or the first argument alone.
      before: arguments that apply unless ``value`` sets them, if the kind is the same.
      user: the factory, if a user wrote it.
      build: whether to call the factory, so that it refuses values out of range.

    Returns:
      The arguments; for a key with several kinds, ``"kind"`` first.
    """
    key, kind = NAMED.get(name, (name, ""))
    kinds, before = PARTS[key] if user is None else {"": user}, before or {}
    choose = kind not in kinds
    first = "kind" if choose else next(iter(takes(kinds[kind])), None)
    given: Any = {} if value is True else value
    given = {first: value} if first and not isinstance(given, Mapping) else given
    require(isinstance(given, Mapping), "dictionary", value, TypeError, what=name)
    given = {x: sequences(y, list) for x, y in given.items()}
    if choose:
        kind = given.pop("kind", before.get("kind", next(iter(kinds))))
        meant = kind if isinstance(kind, str) else type(kind).__name__
        hint = DATA["hints"].get(meant, checks.nearest(kind, kinds))
        checks.choice("auto", f"{name}.kind", kind, tuple(kinds), hint)
    factory, chosen = kinds[kind], {"kind": kind} if kind else {}
    who = factory.__name__
    known(given, takes(factory), f"arguments of {who}")
    given = (before if chosen.items() <= before.items() else {}) | given
    for x, default in takes(factory).items():
        there = x in given or default is not inspect.Parameter.empty
        require(there, "given", None, who=who, what=x)
        if isinstance(default, bool) and x in given:
            flag(who, x, given[x])
    if build and key != "less_bn":  # LessBN needs a model.
        within = given.get("within")
        names = ("axis", within) if isinstance(within, str) else ("axis", "another")
        layer(factory, given, [optax.identity()], axis_name=names, tree=_LATER)
    return chosen | given


def known(data: Any, allowed: Iterable[str], what: str, who: str = "auto") -> None:
    """Refuse anything but a dictionary, and unknown keys with the nearest known one."""
    require(isinstance(data, Mapping), "keys", data, TypeError, who=who, what=what)
    words = {"who": who, "what": what, "allowed": ", ".join(map(repr, allowed))}
    for key in data:
        near = checks.replacement(f"{what.split()[-1]}({key}=)") or checks.nearest(key, allowed)
        require(key in allowed, "key", key, near=near, **words)


def flag(who: str, name: str, value: object) -> None:
    """Refuse anything but a bool."""
    require(isinstance(value, bool), "flag", value, TypeError, who=who, what=name)


@contextlib.contextmanager
def speaking_of(who: str, renamed: Mapping[str, str]) -> Generator[None]:
    """Put ``who`` and the configuration's key into the text of an error raised in this context."""
    try:
        yield
    except (ValueError, TypeError) as error:
        argument, _, rest = (str(error).partition(": ")[2] or str(error)).partition(" ")
        raise type(error)(f"{who}: {renamed.get(argument, argument)} {rest}") from error


def sequences(value: Any, kind: Callable[[Iterable[Any]], Any]) -> Any:
    """Convert all lists and tuples of plain data to one of the two."""
    if isinstance(value, Mapping):
        return {key: sequences(x, kind) for key, x in value.items()}
    return kind(sequences(x, kind) for x in value) if isinstance(value, (list, tuple)) else value
