# SPDX-License-Identifier: Apache-2.0
"""The entry: from whatever names a configuration to what it builds, or to a trial of many."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from boostax._core import checks
from boostax.config.build import Boost
from boostax.config.config import KEYS as OWN_KEYS
from boostax.config.config import BoostConfig, role_of
from boostax.config.mindspore import KEYS, LEVELS, from_mindspore, is_mindspore
from boostax.config.own import owned
from boostax.config.part import flag, nearest
from boostax.config.reduction import Reduce
from boostax.config.singa import singa


def auto(
    spec: Any,
    *,
    level: str | None = None,
    strict: bool | None = None,
    factories: Sequence[Callable[..., Any]] = (),
) -> Boost:
    """What a level, a dictionary, a JSON file or a ``BoostConfig`` asks for, ready to build.

    ===== ====================================================================================
    level switches on
    ===== ====================================================================================
    O0    nothing
    O1    LessBN with a normalised head, gradient centralization
    O2    the same, and AdaSum of the optimizers' updates
    ===== ====================================================================================

    The levels are those of ``mindspore.boost``, not of precision, but for its freezing at random,
    which lost more than fewer steps: settings of ``grad_freeze`` or ``strict=False`` bring it. Its
    own dictionary is read as it is, and what it would ignore is an error; with ``strict=False`` it
    is run as MindSpore runs it, and ``notes`` say what has no effect. So is
    ``{"singa": {"dist_option": "sparseTopK"}}``, which names a mode of Apache SINGA's. Beside
    either stand fields of a ``BoostConfig``, and ``level`` and ``strict``: a file holds all of a
    job. Of a part that MindSpore's dictionary names they say what it has no word for:
    ``{"grad_freeze": {...}, "freeze": {"order": [...]}}``.

    What is on is in what is built, or refused there: a reduction other than the mean wants an axis,
    LessBN the report of the model that it changed.

    Args:
      spec: a ``BoostConfig``; ``"O0"``, ``"O1"`` or ``"O2"``; a dictionary like
        ``BoostConfig.to_dict()`` gives, MindSpore's, or one with ``"singa"``; or the path of a
        JSON file of one.
      level: of a dictionary or a file: where they start from; ``None`` is ``"O0"``.
      strict: of MindSpore's dictionary or level: ``False`` reads it as MindSpore does, the default
        as it is written.
      factories: functions of your own that make transformations, whose names are keys of the
        dictionary, too. They are to be described (``boostax.describe``): their role says where they
        stand. A reduction takes the place of the mean.

    Returns:
      A ``Boost``, at no cost: nothing is global, and nothing in the file is executed.

    Raises:
      ValueError, TypeError: unknown keys, words and levels, values out of range, and parts that do
        not go together. OSError: no such file.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> boost = boostax.auto({"loss_scale": "dynamic", "accumulate": 4, "clip": 1.0})
      >>> tx = boost.optimizer(optax.adam(1e-3))
      >>> type(tx.init(jnp.zeros(3))).__name__, boost.config.clip
      ('LossScaleState', Clip(max_norm=1.0))

    References:
      MindSpore 2.10, ``mindspore.boost.AutoBoost``, which is one object for the whole process.
    """
    who = "auto"
    given = _loaded(spec) if _is_file(spec) else spec
    if isinstance(given, str) and given in LEVELS and level is None:
        given, level = {}, given
    if not isinstance(given, Mapping):
        hint = "It is where a dictionary or a file starts from."
        checks.absent(who, "level", level, "left out here", hint)
        hint = "False reads MindSpore's dictionary as MindSpore does."
        checks.absent(who, "strict", strict, "left out here", hint)
        hint = "A dictionary or a file says what they are called with."
        checks.absent(who, "factories", factories or None, "left out here", hint)
    if isinstance(given, BoostConfig):
        return Boost(given)
    if isinstance(given, Mapping):
        data, own = owned(dict(given), factories)
        boost = _from_dictionary(data, level, strict)
        reduce, hint = boost.config.reduce, "One of factories is a reduction."
        alone = reduce == Reduce() or all(place != "reduce" for place, _ in own)
        checks.require(who, "reduce", reduce.kind, "left out here", alone, hint)
        return dataclasses.replace(boost, own=own)
    allowed = "a level, a dictionary, the path of a .json file, or a BoostConfig"
    if isinstance(given, str):
        hint = nearest(given, tuple(LEVELS))
        raise ValueError(checks.message(who, "spec", allowed, given, hint))
    hint = "'O1' is what mindspore.boost switches on at O1."
    raise TypeError(checks.message(who, "spec", allowed, given, hint))


def _from_dictionary(data: dict[str, Any], level: str | None, strict: bool | None) -> Boost:
    """MindSpore's or SINGA's part of a dictionary, and then the rest of it."""
    level = _once("level", level, data)
    strict = _once("strict", strict, data)
    if strict is not None:
        flag("strict", strict, "auto")
    # Read as there, what nothing knows is MindSpore's to ignore.
    theirs = KEYS if is_mindspore(data) else ()
    if strict is False:
        theirs = (*theirs, *(key for key in data if key not in (*OWN_KEYS, "singa")))
    foreign = {key: data.pop(key) for key in theirs if key in data}
    level = "O0" if level is None else level
    read = from_mindspore(foreign, level, strict=strict is not False)
    if "singa" in data:
        data["reduce"] = _beside("reduce", data, singa(data.pop("singa")), "singa")
    if foreign:
        for role, part in read.config.changed().items():
            given = data.get(role)
            # Of what MindSpore has no word for, such as the order of layers, it says nothing.
            if not isinstance(given, Mapping) or given.keys() & part.stated().keys():
                _beside(role, data, part, "MindSpore's dictionary")
    config = BoostConfig.from_dict(data, read.config)
    return Boost(config, read.notes, strict=strict is not False)


def _once(name: str, given: Any, data: dict[str, Any]) -> Any:
    """What is said of it as an argument or in the dictionary, from which it is taken."""
    there = data.pop(name, None)
    same, hint = given is None or there in (None, given), "The dictionary says it, too."
    checks.require("auto", name, given, f"{there!r} or left out", same, hint)
    return there if given is None else given


def _beside(role: str, data: Mapping[str, Any], part: Any, whose: str) -> Any:
    """The part, if nothing else in the dictionary says what takes its role."""
    for key, got in data.items():
        allowed, hint = f"left out beside {whose}", f"{whose} names one already."
        checks.require("auto", key, got, allowed, role_of(key) != role, hint)
    return part


def _is_file(spec: Any) -> bool:
    return isinstance(spec, pathlib.Path) or (isinstance(spec, str) and spec.endswith(".json"))


def _loaded(path: str | pathlib.Path) -> Any:
    try:
        return json.loads(pathlib.Path(path).read_text())
    # Also no text at all, and brackets in brackets without end.
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = f"{error}."
        raise ValueError(
            checks.message("auto", "spec", "a file of JSON", str(path), hint)
        ) from error
