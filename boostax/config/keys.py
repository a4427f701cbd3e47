# SPDX-License-Identifier: Apache-2.0
"""The factories that a configuration names, in the recommended order, and their arguments as data.

A configuration can pass any argument of a factory, except the arguments that the chain supplies:
the inner optimizer, the replica axes and the params. Functions of this module make the arguments
that are not data, such as a schedule or a tree of labels, from data.
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
from boostax._core.describe import Stepped
from boostax._core.types import PyTree
from boostax.config.refusals import require
from boostax.order.parts import CLIPS, opened, read, rows
from boostax.subspace import files
from boostax.subspace.basis import saved_basis
from boostax.subspace.dim_reduce import RULES

Factory: TypeAlias = Callable[..., Any]
Tx: TypeAlias = optax.GradientTransformation
Data: TypeAlias = dict[str, Any]
DATA = checks.table("boostax.config", "order")
# For each key, its factories by kind. A key with a single factory has only the kind "".
PARTS: dict[str, dict[str, Factory]] = {
    key: {kind: pkgutil.resolve_name(name) for kind, name in kinds.items()}
    for key, kinds in (DATA["order"] | DATA["beside"]).items()
}
# For each role, the key of the part that a user's part of this role replaces or follows.
PLACES: dict[str, str] = {role: key for key, roles in DATA["places"].items() for role in roles}
# For the name of each factory, its key and kind. A configuration may use this name as a key, too.
NAMED = {f.__name__: (key, kind) for key, kinds in PARTS.items() for kind, f in kinds.items()}
KEYS = tuple(dict.fromkeys((*PARTS, "microbatches", *NAMED)))
# With one of these arguments, dim_reduce starts at the first step.
FILES = ("weight_load_dir", "pca_mat_path")
# A placeholder for the params, because a configuration is checked without params.
_LATER = object()


def _axes(options: types.SimpleNamespace) -> Data:
    """Exclude the normalized head of LessBN from centralization, as MindSpore does."""
    head = getattr(options.less_bn, "head", None)
    rules = options.axes
    if head is None or callable(rules):
        return {}
    return {"axes": {glob.escape(head): None} | ({} if isinstance(rules, str) else dict(rules))}


def _groups(options: types.SimpleNamespace) -> PyTree:
    """Divide the params into a number of groups, by layers or in the buckets of MindSpore.

    Groups that are given as patterns or names are returned unchanged.
    """
    groups = options.groups
    tree = options.tree
    checks.choice("", "cut", options.cut, ("layers", "mindspore"), "MindSpore cuts into buckets.")
    if groups and isinstance(groups, (tuple, Mapping)):
        return groups
    checks.positive_int("", "groups", groups, DATA["hints"]["groups"])
    require(tree is not None, "groups", tree, groups=groups)
    if tree is _LATER:
        return {"any": 0}
    if options.cut == "layers":
        return boostax.freeze.prefix_groups(tree, groups, order=options.order, level=options.level)
    require(options.level is None, "level", options.level)
    removed = options.less_bn.removed if options.less_bn else ()
    return boostax.freeze.mindspore_groups(tree, groups, order=options.order, removed=removed)


def _schedule(options: types.SimpleNamespace) -> Data:
    """Return the arguments of ``scheduled_freeze``; a sequence of depths is itself the schedule."""
    _, *names = inspect.signature(boostax.freeze.freeze_schedule).parameters
    kind = options.kind
    arguments = {name: getattr(options, name) for name in names}
    groups = _groups(options)
    if isinstance(kind, tuple):
        for name, value in arguments.items():
            require(value is None, "depths", value, name=name)
        return {"groups": groups, "schedule": kind, "repeat": True}
    # ``progressive`` and ``ramp`` freeze permanently, and need an explicit ``total_steps``.
    # Schedules of other kinds have MindSpore's default length, 65536.
    if options.total_steps is None and kind not in ("progressive", "ramp"):
        arguments["total_steps"] = 65536
    schedule = boostax.freeze.freeze_schedule(kind, **arguments)
    return {"groups": groups, "schedule": schedule, "repeat": kind in ("interval", "continuous")}


def _finish(options: types.SimpleNamespace) -> Data:
    """Return the arguments of ``dim_reduce``; ``residual_rate`` sets SGD as ``residual``."""
    rate, momentum = options.residual_rate, options.residual_momentum
    checks.choice("", "rule", options.rule, tuple(RULES), checks.nearest(options.rule, RULES))
    search = {x: y for x in ("shrink", "slope") if (y := getattr(options, x)) is not None}
    for name, value in (search | ({"residual_momentum": momentum} if momentum else {})).items():
        checks.number("", name, value, "in (0, 1)", f"Or leave {name} out.", above=0, below=1)
    outside = options.residual
    if outside is None and rate is not None:
        checks.number("", "residual_rate", rate, "positive", "Or omit the rate.", above=0)
        outside = optax.sgd(rate, momentum or None)
    if outside is not None and options.axis_name is not None:
        outside = optax.chain(boostax.all_reduce(options.axis_name), outside)
    rule = dataclasses.replace(RULES[options.rule], **search)
    return {"basis": _basis(options), "residual": outside, "rule": rule}


def _basis(options: types.SimpleNamespace) -> PyTree:
    """Read a basis from a source; without a source, return the recorder of snapshots, if any."""
    n = checks.positive_int("", "n_components", options.n_components, "Pass a direction count.")
    paths = [x for x in (options.weight_load_dir, options.pca_mat_path) if x is not None]
    require(len(paths) < 2, "two_files", options.weight_load_dir)
    if options.source is None:
        if paths or options.every is None:
            return None
        return subspace.record_trajectory(n + 1, every=options.every, start=options.start)
    if isinstance(options.source, subspace.Basis):
        return options.source
    if options.source is not FILES:
        return subspace.trajectory_basis(options.source, n, params=options.tree)
    require(paths, "no_files", None)
    require(options.tree is not None, "files", options.tree)
    if options.pca_mat_path is not None:
        return saved_basis(options.pca_mat_path, options.tree, n)
    return subspace.pca_basis(files.snapshots(options.weight_load_dir, options.tree), n)


# For each factory, a function that makes the arguments that plain data cannot express.
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


def layer(factory: Factory, arguments: Data, parts: list[Tx], **place: PyTree) -> list[Tx]:
    """Put the transformation of a factory in front of a chain, or around the chain.

    Args:
      factory: any factory.
      arguments: its arguments as data.
      parts: the chain so far.
      **place: the replica axes (``axis_name``), the params or their shapes (``tree``) and the
        changes that LessBN made to the model (``less_bn``); for ``Boost.finish`` also the
        ``source`` of the basis and an optimizer for gradients outside of its span (``residual``).
    """
    who = factory.__name__
    options = place | {name: sequences(x, tuple) for name, x in arguments.items()}
    if options.get("dense") == "vectors":
        # A sparse message of norms and biases costs more than it saves.
        options |= {"dense": lambda _, leaf: leaf.ndim < 2}
    if isinstance(within := options.get("within"), str):  # The axis of the fast links.
        names = axes.canonical(who, place["axis_name"])
        options["axis_name"] = tuple(name for name in names if name != within)
        require(0 < len(options["axis_name"]) < len(names), "within", within, who=who, names=names)
    if factory is boostax.reduce.adasum_delta and isinstance(within, int):
        return _by_servers(factory, arguments, parts, place)
    if who in _MADE:
        options = dict.fromkeys(DATA["place"]) | takes(factory) | options
        with speaking_of(who, DATA["renamed"]):
            options |= _MADE[who](types.SimpleNamespace(**options))
    if factory is boostax.dim_reduce and "source" not in place:
        # Without a source of the basis, the chain has at most a recorder of snapshots, and no
        # ``dim_reduce``.
        return [*filter(None, [options["basis"]]), *parts]
    names = inspect.signature(factory).parameters
    options = {name: x for name, x in options.items() if name in names}
    if "inner" in names:
        return [factory(chained(parts), **options)]
    tx = factory(**options)
    if not arguments.get("after_decay"):
        return [tx, *parts]
    # MindSpore centralizes after coupled weight decay. The decay may be inside ``optax.masked``,
    # which has no ``Row``. So the roles are read from the rows inside each part.
    parts = opened(chained(parts))
    kinds = ({row.role for row in rows(read(x))} for x in parts)
    before = [*itertools.takewhile(lambda x: x <= {"decay", *CLIPS}, kinds)]
    position = max((i + 1 for i, kind in enumerate(before) if "decay" in kind), default=0)
    return [optax.chain(*parts[:position], tx, *parts[position:])]


def mesh_of_servers(count: int, devices: object) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return sizes and names of a mesh's axes; the devices of a server are along the last axis."""
    if not isinstance(devices, int) or count <= devices:
        return (count,), ("data",)
    require(count % devices == 0, "devices", count, devices=devices)
    return (count // devices, devices), ("server", "data")


def _by_servers(factory: Factory, arguments: Data, parts: list[Tx], place: Data) -> list[Tx]:
    """Put ``adasum_delta`` around a chain; with one replica axis, put a mean in front of the chain.

    During a trace, the chain refuses replica axes with sizes other than those of
    ``mesh_of_servers``.
    """
    names = axes.canonical("adasum_delta", place["axis_name"])
    devices = arguments["within"]
    checks.positive_int("adasum_delta", "within", devices, "Pass how many devices a server has.")
    if len(names) == 1:
        parts = [boostax.all_reduce(names), *parts]
    else:
        parts = layer(factory, {**arguments, "within": names[-1]}, parts, **place)
    tx = parts[0]

    @functools.wraps(tx.update)
    def update(*args: PyTree, **extra: PyTree) -> Stepped:
        sizes = [axes.size((name,)) for name in names]
        is_valid = sizes[-1] == devices or (len(sizes) == 1 and sizes[0] < devices)
        mesh = "" if is_valid else f"jax.make_mesh{mesh_of_servers(math.prod(sizes), devices)}"
        require(is_valid, "servers", sizes, devices=devices, mesh=mesh)
        return tx.update(*args, **extra)

    return [optax.GradientTransformationExtraArgs(tx.init, update), *parts[1:]]


def chained(parts: list[Tx]) -> Tx:
    """Return a chain of the parts as one transformation."""
    return parts[0] if len(parts) == 1 else optax.chain(*parts)


def part(name: str, value: Any, before: Any = None, user: Any = None, build: bool = False) -> Data:
    """Read a value of a configuration as the plain arguments of a factory.

    Args:
      name: a key, or the name of a factory.
      value: a dictionary of arguments, ``True`` for no arguments, or only the first argument.
      before: arguments of an earlier value; they apply if ``value`` does not set them and has the
        same kind.
      user: the factory, if a user wrote the factory.
      build: whether to call the factory, which then refuses values out of range.

    Returns:
      The arguments; for a key with several kinds, ``"kind"`` first.
    """
    key, kind = NAMED.get(name, (name, ""))
    kinds = PARTS[key] if user is None else {"": user}
    before = before or {}
    has_kinds = kind not in kinds
    first = "kind" if has_kinds else next(iter(takes(kinds[kind])), None)
    data = {} if value is True else value
    data = {first: value} if first and not isinstance(data, Mapping) else data
    require(isinstance(data, Mapping), "dictionary", value, TypeError, what=name)
    arguments = {x: sequences(y, list) for x, y in data.items()}
    if has_kinds:
        kind = arguments.pop("kind", before.get("kind", next(iter(kinds))))
        word = kind if isinstance(kind, str) else type(kind).__name__
        hint = DATA["hints"].get(word, checks.nearest(kind, kinds))
        checks.choice("auto", f"{name}.kind", kind, tuple(kinds), hint)
    factory = kinds[kind]
    chosen = {"kind": kind} if kind else {}
    who = factory.__name__
    known(arguments, takes(factory), f"arguments of {who}")
    arguments = (before if chosen.items() <= before.items() else {}) | arguments
    for x, default in takes(factory).items():
        value = arguments.get(x, default)
        require(value is not inspect.Parameter.empty, "given", None, who=who, what=x)
        is_valid = isinstance(value, bool) or not isinstance(default, bool)
        require(is_valid, "flag", value, TypeError, who=who, what=x)
    if build and key != "less_bn":  # LessBN needs a model.
        within = arguments.get("within")
        names = ("axis", within if isinstance(within, str) else "another")
        layer(factory, arguments, [optax.identity()], axis_name=names, tree=_LATER)
    return chosen | arguments


def known(data: Any, allowed: Iterable[str], what: str, who: str = "auto") -> None:
    """Refuse a value that is no dictionary, and unknown keys; errors name the nearest key."""
    require(isinstance(data, Mapping), "keys", data, TypeError, who=who, what=what)
    words = {"who": who, "what": what, "allowed": ", ".join(map(repr, allowed))}
    for key in data:
        near = checks.replacement(f"{what.split()[-1]}({key}=)") or checks.nearest(key, allowed)
        require(key in allowed, "key", key, near=near, **words)


@contextlib.contextmanager
def speaking_of(who: str, renamed: Mapping[str, str]) -> Generator[None]:
    """Let the text of an error in the context begin with ``who`` and the configuration's key."""
    try:
        yield
    except (ValueError, TypeError) as error:
        argument, _, text = (str(error).partition(": ")[2] or str(error)).partition(" ")
        raise type(error)(f"{who}: {renamed.get(argument, argument)} {text}") from error


def sequences(value: PyTree, kind: Callable[[Iterable[PyTree]], PyTree]) -> PyTree:
    """Convert all lists and tuples in plain data to ``kind``, which is ``list`` or ``tuple``."""
    if isinstance(value, Mapping):
        return {key: sequences(x, kind) for key, x in value.items()}
    return kind(sequences(x, kind) for x in value) if isinstance(value, (list, tuple)) else value
