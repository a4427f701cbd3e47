# SPDX-License-Identifier: Apache-2.0
"""The factories that a configuration names, in their one order, and their arguments as data.

A factory's signature says what a configuration can say to it. Left out is what a chain alone knows:
the optimizer inside, the replica axes, the params. An argument that no data can say (a schedule, a
tree of labels) is made by a function here, and the function's arguments stand in its place.
"""

import contextlib
import dataclasses
import difflib
import functools
import glob
import inspect
import typing
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

REDUCTIONS: dict[str, Factory] = {
    "mean": boostax.all_reduce,
    "adasum": boostax.adasum,
    "adasum-delta": reduce.adasum_delta,
    "top-k": boostax.top_k_reduce,
    "threshold": reduce.threshold_reduce,
    "int8": boostax.int8_reduce,
    "power-sgd": reduce.power_sgd_reduce,
    "partial": reduce.partial_average,
    "local": reduce.local_updates,
}
LOSS_SCALES: dict[str, Factory] = {
    "dynamic": boostax.dynamic_loss_scale,
    "static": boostax.static_loss_scale,
    "group": precision.group_loss_scale,
}
# From the optimizer outwards: each stands in front of all before it, or around. Of a key with
# several factories "kind" chooses one.
ORDER: dict[str, dict[str, Factory]] = {
    "count_lost_updates": {"": precision.count_lost_updates},
    "check_updates": {"": precision.check_updates},
    "clip": {"": model.clip_by_global_norm},
    "adagc": {"": model.adagc},
    "centralize": {"": boostax.centralize_gradients},
    "reduce": REDUCTIONS,
    "dim_reduce": {"": boostax.dim_reduce},
    "store": {"": precision.store},
    "average_params": {"": model.average_params},
    "skip_spikes": {"": precision.skip_spikes},
    "accumulate": {"": boostax.accumulate},
    "loss_scale": LOSS_SCALES,
    "carry": {"": boostax.carry},
    "freeze": {"": boostax.scheduled_freeze},
}
PARTS = {**ORDER, "policy": {"": boostax.policy}, "less_bn": {"": boostax.less_bn}}
# Each factory is a key by its own name, too.
NAMED = {f.__name__: (key, kind) for key, kinds in PARTS.items() for kind, f in kinds.items()}
KEYS = tuple(dict.fromkeys((*PARTS, "microbatches", *NAMED)))
# Arguments that a place in a chain gives; ``tree`` are the params.
_PLACE = ("inner", "module", "axis_name", "tree", "less_bn")
# The dtype in which values travel.
_WIRE = ("dtype", "value_dtype", "wire_dtype")
# With one of these dim_reduce begins at once.
FILES = ("weight_load_dir", "pca_mat_path")
# Stands for the params while a configuration is checked.
_LATER = object()


def _dense(dense: Any = None) -> Any:
    """Read ``"vectors"`` as norms and biases: thinned out they cost more than they save."""
    return (lambda _, leaf: leaf.ndim < 2) if dense == "vectors" else dense


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


def _other_axes(axis_name: Any, within: str | int | None = None) -> Any:
    """Take the axis of the mean before AdaSum out of the axes of a configuration."""
    if not isinstance(within, str):
        return axis_name
    names = axes.canonical("auto", axis_name)
    others = tuple(name for name in names if name != within)
    allowed, hint = f"one of several axes, {names}", "It is the axis of the fast links."
    checks.require("", "within", within, allowed, 0 < len(others) < len(names), hint)
    return others


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
    """Make a schedule by its name or a function; a depth or a sequence of depths is one."""
    options: Any = {"frozen_fraction": frozen_fraction, "seed": seed, "freeze_p": freeze_p}
    if isinstance(kind, (int, tuple)):
        for name, value in {**options, "total_steps": total_steps}.items():
            checks.absent("", name, value, "left out with depths", "They start anew at their end.")
        hint = "It counts the groups that are frozen."
        return kind if isinstance(kind, tuple) else (checks.natural("", "kind", kind, hint),)
    allowed = f"the optimizer steps of the run for {kind!r}"
    hint = "It freezes for good: without them nobody knows when."
    needs = total_steps is None and kind in ("progressive", "ramp")
    checks.require("", "total_steps", None, allowed, not needs, hint)
    # MindSpore's default, for what starts anew at its end.
    steps = 65536 if total_steps is None else total_steps
    return freeze.freeze_schedule(kind, total_steps=steps, **options)


def _starts_anew(kind: Any = "interval") -> bool:
    return isinstance(kind, (int, tuple)) or kind in ("interval", "continuous")


def _recorder(
    n_components: int = 20,
    every: int | None = 10,
    start: int = 0,
    weight_load_dir: str | None = None,
    pca_mat_path: str | None = None,
) -> Any:
    """Make the recorder of the snapshots of a basis; ``None`` if that comes from elsewhere."""
    size = 1 + checks.positive_int("", "n_components", n_components, "It counts directions.")
    files, name = (weight_load_dir, pca_mat_path), "weight_load_dir"
    hint = "The one or the other makes the basis."
    checks.require("", name, files[0], "left out with pca_mat_path", None in files, hint)
    if every is None or files != (None, None):
        return None
    return subspace.record_trajectory(size, every=every, start=start)


def basis_of_files(finish: Mapping[str, Any], params: Any) -> Any:
    """Read the basis of a finish that begins at once, by the arguments of ``dim_reduce``."""
    directory, path = finish.get(FILES[0]), finish.get(FILES[1])
    who, count = "dim_reduce", finish.get("n_components", 20)
    hint, fits = "Or boost.finish(basis, params) takes any basis.", (directory or path) is not None
    checks.require(who, " or ".join(FILES), None, "given where there is no run before", fits, hint)
    hint, fits = "They name what is to be in them.", params is not None
    checks.require(who, "params", params, "given where files are read", fits, hint)
    with speaking_of(who, dict(zip(("directory", "path"), FILES, strict=True))):
        if path is not None:
            return saved_basis(path, params, count)
        return subspace.pca_basis(subspace.checkpoint_snapshots(str(directory), params), count)


def _residual(residual_rate: float | None = None, residual_momentum: float = 0.0) -> Any:
    """Make the SGD of what lies outside the span; without a rate there is none."""
    value, hint = residual_momentum, "0.9 is usual."
    checks.number("", "residual_momentum", value, "in [0, 1)", lambda x: 0 <= x < 1, hint)
    if residual_rate is None:
        return None
    hint = "Leave it out for the default."
    checks.number("", "residual_rate", residual_rate, "greater than 0", lambda x: x > 0, hint)
    return optax.sgd(residual_rate, residual_momentum or None)


def _rule(rule: str = "boostax", shrink: float | None = None, slope: float | None = None) -> Any:
    """Take a rule by its name, with another line search if one is asked for."""
    checks.choice("", "rule", rule, tuple(RULES), nearest(rule, RULES))
    search = {name: x for name, x in (("shrink", shrink), ("slope", slope)) if x is not None}
    hint = "Leave it out for the default."
    for name, value in search.items():
        checks.number("", name, value, "in (0, 1)", lambda x: 0 < x < 1, hint)
    return dataclasses.replace(RULES[rule], **search)


# Arguments that are no data, by the functions that make them; "" is any factory.
_MADE: dict[tuple[str, str], Factory] = {
    ("", "dense"): _dense,
    ("accumulate", "every"): _every,
    ("adasum", "axis_name"): _other_axes,
    ("adasum_delta", "axis_name"): _other_axes,
    ("centralize_gradients", "axes"): _axes,
    ("dim_reduce", "basis"): _recorder,
    ("dim_reduce", "residual"): _residual,
    ("dim_reduce", "rule"): _rule,
    ("group_loss_scale", "labels"): _groups,
    ("scheduled_freeze", "groups"): _groups,
    ("scheduled_freeze", "schedule"): _schedule,
    ("scheduled_freeze", "repeat"): _starts_anew,
}


@functools.cache
def _signature(factory: Factory) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(factory, eval_str=True).parameters)


def _made(factory: Factory, name: str) -> Factory | None:
    return _MADE.get((factory.__name__, name)) or _MADE.get(("", name))


@functools.cache
def takes(factory: Factory) -> dict[str, inspect.Parameter]:
    """Return what data can say to a factory; a ``kind`` comes first."""
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in _signature(factory).items():
        make = _made(factory, name)
        found |= _signature(make) if make else {name: parameter}
    data = {
        name: p
        for name, p in found.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and name not in _PLACE
        and optax.GradientTransformation not in (p.annotation, *typing.get_args(p.annotation))
    }
    return dict(sorted(data.items(), key=lambda item: item[0] != "kind"))


def arguments(factory: Factory, given: Mapping[str, Any], **place: Any) -> dict[str, Any]:
    """Return the keyword arguments of a factory but for ``inner``.

    Args:
      factory: any.
      given: arguments as data.
      **place: replica axes (``axis_name``), the params or their shapes (``tree``), and the changes
        that LessBN made to the model (``less_bn``).
    """
    told = place | {name: sequences(x, tuple) for name, x in given.items()}
    found: dict[str, Any] = {}
    with speaking_of(factory.__name__, {"n": "groups"}):
        for name in _signature(factory):
            if make := _made(factory, name):
                found[name] = make(**{key: told[key] for key in _signature(make) if key in told})
            elif name in told:
                found[name] = told[name]
    return found


def layer(factory: Factory, given: Mapping[str, Any], **place: Any) -> Any:
    """Return a transformation, a function that puts one around another, or ``None`` for nothing."""
    options = arguments(factory, given, **place)
    if factory is boostax.dim_reduce:  # It records during the run.
        return options["basis"]
    if "inner" in _signature(factory):
        factory(optax.identity(), **options)  # Raises at once.
        return functools.partial(factory, **options)
    made = factory(**options)
    return functools.partial(_after_decay, made) if given.get("after_decay") else made


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


def part(
    key: str, kinds: Mapping[str, Factory], value: Any, before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read a value of a configuration as the plain arguments of a factory, and check them.

    Args:
      key: its name in the configuration.
      kinds: the factories by kind.
      value: a dictionary of arguments, ``True`` for none, or the first argument alone.
      before: arguments that hold where ``value`` says nothing, if the kind is the same.

    Returns:
      The arguments; of a key with several kinds, ``"kind"`` first.
    """
    before, choose = before or {}, len(kinds) > 1
    kind = before.get("kind", next(iter(kinds))) if choose else next(iter(kinds))
    first = "kind" if choose else next(iter(takes(kinds[kind])), None)
    given: Any = {} if value is True else value
    given = {first: given} if first and not isinstance(given, Mapping) else given
    hint, fits = "It takes no arguments: true or false.", isinstance(given, Mapping)
    checks.require("auto", key, value, "a dictionary", fits, hint, TypeError)
    given = {name: sequences(x, list) for name, x in given.items()}
    if choose:
        kind = given.pop("kind", kind)
        checks.choice("auto", f"{key}.kind", kind, tuple(kinds), nearest(kind, kinds))
    factory, told = kinds[kind], {"kind": kind} if kind else {}
    who = factory.__name__
    if "wire" in given:  # whatever the factory calls it
        (name,) = [x for x in _WIRE if x in takes(factory)] or ["wire"]
        given[name] = given.pop("wire")
    known(given, takes(factory), f"arguments of {who}")
    if told.items() <= before.items():
        given = {name: x for name, x in before.items() if name not in told} | given
    for name, parameter in takes(factory).items():
        there = name in given or parameter.default is not parameter.empty
        checks.require(who, name, None, "given", there, "It has no default.")
        if bool in (parameter.annotation, *typing.get_args(parameter.annotation)) and name in given:
            flag(who, name, given[name])
    if key != "less_bn":  # It wants a model.
        within = [given["within"]] if isinstance(given.get("within"), str) else []
        layer(factory, given, axis_name=("axis", *within), tree=_LATER)
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
