# SPDX-License-Identifier: Apache-2.0
"""Read the dictionary of ``mindspore.boost``, and the options of Apache SINGA's ``DistOpt``.

MindSpore's levels, modes, switches, settings and managers are read as MindSpore 2.10 reads them, so
settings that MindSpore ignores have no effect. Notes report each setting without effect, and each
difference that may change the trained weights. Each mode of SINGA becomes a reduction;
``docs/coming_from/singa.md`` lists the differences.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from boostax._core import checks
from boostax.config import keys
from boostax.config.refusals import WORDS, require

Level = Literal["O0", "O1", "O2"]
_WHO = "mindspore"
# The keys of MindSpore, with their defaults and with notes for the user.
DATA = checks.table("boostax.config", "mindspore")
SWITCHES: tuple[str, ...] = tuple(DATA["switches"])
LEVELS: dict[Level, list[str]] = DATA["levels"]
GROUPS: dict[str, dict[str, keys.Data]] = DATA["groups"]
KEYS = ("boost", *GROUPS, "loss_scale_manager")
# The MindSpore setting that each argument comes from.
_NAMES = {y["is"]: f"{x}.{key}" for x in GROUPS for key, y in GROUPS[x].items() if "is" in y}


def is_mindspore(data: keys.Data) -> bool:
    """Return whether a dictionary is MindSpore's, because it has a key that boostax lacks."""
    theirs = {name: GROUPS[name].keys() - {*shared} for name, shared in DATA["shared"].items()}
    inside = (theirs[x] & data[x].keys() for x in theirs if isinstance(data.get(x), Mapping))
    return bool(data.keys() & ({*KEYS, *SWITCHES} - {*keys.KEYS})) or any(inside)


def from_mindspore(
    data: keys.Data, level: Level = "O0", *, strict: bool = False
) -> tuple[keys.Data, tuple[str, ...]]:
    """Read MindSpore's dictionary and level as MindSpore reads them.

    The modes are MindSpore's: ``"auto"`` uses the techniques of the level, ``"manual"`` changes the
    techniques of the level by the switches in ``"boost"``, ``"enable_all"`` uses all techniques,
    and ``"disable_all"`` uses no technique. An unknown level means ``"O0"``. Unknown keys, switches
    that the mode ignores, and settings of a technique that is off have no effect. Some techniques
    replace others: ``dim_reduce`` replaces the optimizer and all other techniques, and
    ``grad_freeze`` replaces AdaSum and accumulation. Freezing uses MindSpore's buckets of params,
    with separate moments for each depth. Centralization comes after weight decay and skips
    dimensions whose sizes are not multiples of 16. LessBN leaves a model unchanged if it has no
    norm to remove and no Dense as head. ``loss_scale_manager`` is the result of
    ``DynamicLossScaleManager``, ``FixedLossScaleManager`` or ``GroupLossScaleManager``; set the
    switch ``loss_scale_group`` only with ``GroupLossScaleManager``.

    Args:
      data: the ``boost_config_dict`` of ``mindspore.boost.AutoBoost``, which may be ``{}``.
      level: ``"O0"``, ``"O1"`` or ``"O2"``.
      strict: whether settings that MindSpore ignores are errors.

    Returns:
      The configuration as plain data, and notes on settings without effect and on differences that
      may change the trained weights. If there are no notes, the trained weights are equal to
      MindSpore's. Cost: none.

    Raises:
      ValueError, TypeError: an unknown mode, a value out of range, or a manager that does not match
        the switch ``loss_scale_group``, as in MindSpore; with ``strict``, a setting without effect.

    Example:
      >>> from boostax.config.dictionary import from_mindspore
      >>> data = {"boost": {"mode": "manual", "grad_freeze": False, "adasum": True}}
      >>> config, notes = from_mindspore(data, "O1")
      >>> config["reduce"], config["less_bn"], "freeze" in config
      ({'kind': 'adasum-delta', 'within': 8}, {'normalized_head': True}, False)
      >>> from_mindspore({"boost": {"adasum": True}}, "O1")[1][0]
      "boost.adasum = True has no effect: mode 'auto' at level 'O1' decides."

    References:
      MindSpore 2.10, ``mindspore/boost/boost.py``, ``boost_cell_wrapper.py``.
    """
    ledger = _Ledger(strict, [])
    if level not in LEVELS:
        ledger.ignore("level", level, f"{DATA['why']['level']} {checks.nearest(level, LEVELS)}")
        level = "O0"
    data = ledger.known("boost_config_dict", data, KEYS)
    manager = data.get("loss_scale_manager") or {}
    manager = manager and keys.part("loss_scale", manager, build=True)
    # MindSpore makes a loss-scale cell only if the manager checks for overflows.
    cell = manager["kind"] if manager.get("skip_nonfinite", bool(manager)) else ""
    on = _switches(ledger, data.get("boost", {}), level, cell)
    settings = {x: _settings(ledger, x, data.get(x, {}), on.get(x, True)) for x in GROUPS}
    # With a fixed scale, only MindSpore's optimizer divides gradients, by its argument
    # ``loss_scale``.
    fixed = bool(manager) and not cell
    sens = manager["scale"] if fixed else 1.0
    settings |= {"loss_scale": manager, "sens": {"step_size": sens}}
    if on["dim_reduce"]:
        settings["dim_reduce"]["residual_rate"] *= sens
    on |= {
        "O0": level == "O0" and any(on.values()),
        # With ``grad_freeze``, each depth would have a separate scaler.
        "loss_scale": bool(manager) and not (fixed and on["grad_freeze"]),
        "sens": sens != 1 and not on["dim_reduce"],
        "gc_flag": settings["less_bn"].pop("centralize", False),
        "interval": settings["grad_freeze"].get("kind") == "interval",
        "cell": bool(cell),
        "fixed": fixed,
        "slip": manager.get("growth_factor", 0) >= DATA["slip"],
    }
    rows = ((name, x) for name, x in DATA["parts"].items() if on[name])
    parts = {x["is"]: settings.get(x.get("of", name), {}) | x.get("with", {}) for name, x in rows}
    for names, text in DATA["differs"].items():
        if any(all(on.get(x) for x in together.split()) for together in names.split(" or ")):
            ledger.notes.append(text.format(**manager | parts.get("reduce", {})))
    with keys.speaking_of(_WHO, _NAMES):
        return {x: keys.part(x, y, build=True) for x, y in parts.items()}, tuple(ledger.notes)


class _Ledger(NamedTuple):
    """The notes on a dictionary.

    Attributes:
      strict: whether settings that MindSpore would ignore are errors; if False, they are added to
        ``notes``.
      notes: the notes so far.
    """

    strict: bool
    notes: list[str]

    def ignore(self, name: str, value: object, why: str, explicit: bool = True) -> None:
        """Add a note that a setting has no effect; refuse an explicit setting if ``strict``."""
        require(not (explicit and self.strict), "strict", value, name=name, why=why)
        self.notes.append(f"{name} = {value!r} has no effect: {why}")

    def known(self, group: str, data: keys.Data, allowed: Iterable[str]) -> keys.Data:
        """Return the entries of a dictionary whose keys MindSpore reads."""
        keys.known(data, data, f"keys of {group}", _WHO)
        for key in (key for key in data if key not in allowed):
            why = DATA["why"].get(key) or checks.nearest(key, allowed)
            self.ignore(f"{group}.{key}", data[key], why)
        return {key: value for key, value in data.items() if key in allowed}


def _switches(ledger: _Ledger, boost: keys.Data, level: Level, cell: str) -> dict[str, bool]:
    """Return the effective switches for a mode, a level and a kind of loss-scale cell."""
    asked = ledger.known("boost", boost, ("mode", *SWITCHES))
    mode = asked.pop("mode", "auto")
    checks.choice(_WHO, "boost.mode", mode, DATA["modes"], checks.nearest(mode, DATA["modes"]))
    manual = mode == "manual"
    by_level = manual or mode == "auto"
    on = {x: x in LEVELS[level] if by_level else mode == "enable_all" for x in SWITCHES}
    whose = f"mode {mode!r} at level {level!r}" if by_level else f"mode {mode!r}"
    for name, value in asked.items():
        require(isinstance(value, bool), "flag", value, TypeError, who=_WHO, what=f"boost.{name}")
        if not manual and value != on[name]:
            ledger.ignore(f"boost.{name}", value, f"{whose} decides.")
    on |= asked if manual else {}
    group = on["loss_scale_group"]
    require(not cell or group == (cell == "group"), "manager", cell, TypeError, group=group)
    why = {"loss_scale_group": DATA["why"]["cell"]} if group and not cell else {}
    replaced = ((x, [y for y in others if on[y]]) for x, others in DATA["instead"].items())
    winner, losers = next(((x, others) for x, others in replaced if on[x] and others), ("", []))
    why |= {x: DATA["why"].get(winner, {}).get(x, f"{winner} replaces {x}.") for x in losers}
    for name, text in why.items():
        ledger.ignore(f"boost.{name}", True, text, name in asked)
    return on | dict.fromkeys(why, False)


def _settings(ledger: _Ledger, group: str, data: keys.Data, on: bool) -> keys.Data:
    """Return the settings of a group as arguments of the group's part."""
    data = ledger.known(group, data, GROUPS[group])
    settings: keys.Data = {}
    for name, about in GROUPS[group].items() if on else ():
        value = data.get(name, about.get("default"))
        is_valid = re.fullmatch(about.get("pattern", "(?s:.*)"), repr(value))
        require(is_valid, "setting", value, name=f"{group}.{name}", **about)
        if "is" in about:
            settings[about["is"]] = about["words"][value] if "words" in about else value
        elif value != about.get("default"):
            ledger.ignore(f"{group}.{name}", value, about["why"])
    if settings.get("pca_mat_path") and settings["weight_load_dir"]:
        path = settings.pop("weight_load_dir")
        ledger.ignore("dim_reduce.weight_load_dir", path, "pca_mat_path replaces weight_load_dir.")
    return settings


def from_singa(options: keys.Data) -> keys.Data:
    """Read ``dist_option`` and the other options of Apache SINGA's ``DistOpt`` as a reduction.

    Args:
      options: ``dist_option`` is ``"plain"``, ``"half"``, ``"partialUpdate"``, ``"sparseTopK"`` or
        ``"sparseThreshold"``; the other options have SINGA's names and defaults: ``threshold`` (in
        elements), ``spars``, ``corr``, ``topK``, ``clipping``, ``clip_Value``. boostax adds
        ``partitions``, which replaces ``threshold``, and ``capacity``.

    Returns:
      The value of the key ``"reduce"`` of a configuration. The sparse modes choose elements per
      bucket, as SINGA does, and ``"sparseThreshold"`` sends every element of magnitude ``spars`` or
      more. Dense modes leave fusion to XLA unless ``threshold`` is given.

    Raises:
      ValueError, TypeError: an option that the mode does not use, or a value out of range.
    """
    modes = checks.table("boostax.config", "singa")
    keys.known(options, options, "options", "singa")
    options = dict(options)
    mode = options.pop("dist_option", "plain")
    checks.choice("singa", "dist_option", mode, tuple(modes), checks.nearest(mode, modes))
    used = modes[mode]["is"]
    for name, value in options.items():
        hint = "XLA makes the buffers." if name == "buffSize" else checks.nearest(name, used)
        words = {"mode": mode, "used": ", ".join(map(repr, used)), "hint": hint}
        require(name in used, "option", value, name=name, **words)
    top_k = mode == "sparseTopK"
    require(options.get("topK", top_k) == top_k, "top_k", not top_k, top_k=top_k, mode=mode)
    clips = options.get("clipping", False)
    require(isinstance(clips, bool), "flag", clips, TypeError, who="singa", what="clipping")
    require(clips or options.get("clip_Value") is None, "clip", options.get("clip_Value"))
    # If ``partitions`` is given, SINGA's default for the size of a buffer has no effect.
    defaults = {} if "partitions" in options else modes[mode].get("given", {})
    options = defaults | ({"clip_Value": 100.0} if clips else {}) | options
    if "threshold" in options:
        elements = checks.natural("singa", "threshold", options["threshold"], WORDS["elements"][-1])
        require(elements < 2**29, "elements", elements)
        # ``threshold`` becomes a number of bytes, 4 for each element. With buckets of one byte,
        # every leaf has a separate bucket.
        options["threshold"] = max(4 * elements, 1)
    arguments = {used.get(x, x): y for x, y in options.items() if used.get(x, x)}
    with keys.speaking_of("singa", {argument: name for name, argument in used.items()}):
        return keys.part("reduce", {"kind": modes[mode]["kind"]} | arguments, build=True)
