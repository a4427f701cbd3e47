# SPDX-License-Identifier: Apache-2.0
"""Read the dictionary of ``mindspore.boost``: its levels, modes, switches and settings.

The strict reading refuses what MindSpore 2.10 ignores without a word: an unknown level or key, and
a switch that contradicts the level in a mode that ignores switches. Every technique that is on must
be used. Otherwise the dictionary is read as MindSpore reads it, and each setting without effect is
noted. Nothing is global.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from boostax._core import checks
from boostax.config.keys import flag, known, part, speaking_of, table

_WHO = "mindspore"
# The keys of MindSpore, their defaults and the notes.
_DATA = table("mindspore")
SWITCHES: tuple[str, ...] = tuple(_DATA["switches"])
LEVELS: dict[str, list[str]] = _DATA["levels"]
GROUPS: dict[str, dict[str, dict[str, Any]]] = _DATA["groups"]
KEYS = ("boost", *GROUPS)
_NOTES = _DATA["notes"]
# The setting that each argument comes from.
_NAMES = {y["is"]: f"{x}.{key}" for x in GROUPS for key, y in GROUPS[x].items() if "is" in y}


def is_mindspore(data: Mapping[str, Any]) -> bool:
    """Return whether a dictionary is MindSpore's: it has a key that boostax does not have."""
    shared = _DATA["shared"]
    both = {name: data[name] for name in shared if isinstance(data.get(name), Mapping)}
    inside = [x.keys() & GROUPS[name].keys() - {*shared[name]} for name, x in both.items()]
    return bool(data.keys() & {*KEYS, *SWITCHES} - shared.keys()) or any(inside)


def from_mindspore(
    data: Mapping[str, Any], level: str = "O0", *, strict: bool = True
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read MindSpore's dictionary and level.

    The modes are those of MindSpore: ``"auto"`` takes the techniques of the level, ``"manual"`` the
    same with changes by the switches, ``"enable_all"`` all and ``"disable_all"`` none. The strict
    reading of a level leaves out ``grad_freeze`` unless the dictionary has settings of it, because
    freezing at random lost more than training fewer steps. Settings of a technique that is off are
    not read. DimReduce replaces the optimizer and trains from the first step on, from the files
    that ``pca_mat_path`` or ``weight_load_dir`` names.

    ``strict=False`` is MindSpore's own reading. An unknown level is ``"O0"``; unknown keys, and
    switches that the mode does not look at, have no effect. A technique that is on can replace
    others: ``dim_reduce`` replaces all, ``grad_freeze`` replaces AdaSum and accumulation. Freezing
    goes by buckets of three params with moments for each depth, centralization stands behind weight
    decay and skips dimensions that 16 does not divide, LessBN leaves a model without norms or head
    unchanged, and ``loss_scale_group`` switches nothing on.

    Args:
      data: the ``boost_config_dict`` of ``mindspore.boost.AutoBoost``; ``{}`` for nothing.
      level: ``"O0"``, ``"O1"`` or ``"O2"``.
      strict: whether settings that MindSpore ignores are errors.

    Returns:
      The configuration as plain data, and notes: which settings have no effect or another one, and
      why. Cost: none.

    Raises:
      ValueError, TypeError: an unknown mode, or a value out of range; in the strict reading also an
        unknown level or key, and a switch that the mode would ignore.

    Example:
      >>> from boostax.config.mindspore import from_mindspore
      >>> data = {"boost": {"mode": "manual", "grad_freeze": False, "adasum": True}}
      >>> config, notes = from_mindspore(data, "O1")
      >>> config["reduce"], config["less_bn"], "freeze" in config
      ({'kind': 'adasum-delta', 'within': 8}, {'normalized_head': True}, False)
      >>> notes[0].partition(":")[0]
      'common.device_number = 8'
      >>> from_mindspore({"boost": {"adasum": True}}, "O1", strict=False)[1][0]
      "boost.adasum = True has no effect: mode 'auto' at level 'O1' decides."

    References:
      MindSpore 2.10, ``mindspore/boost/boost.py``, ``boost_cell_wrapper.py``.
    """
    reader = _Reader(strict)
    if level not in LEVELS:
        words, hint = " or ".join(map(repr, LEVELS)), checks.nearest(level, LEVELS)
        reader.ignored("level", level, words, hint, "MindSpore takes it for 'O0'.", "auto")
        level = "O0"
    groups = reader.known(data, KEYS, "keys")
    switches = reader.switches(groups.get("boost", {}), level, "grad_freeze" in groups)
    on = reader.together(switches, level)
    settings = {x: reader.settings(x, groups.get(x, {}), on.get(x, True)) for x in GROUPS}
    config = reader.config(on, settings)
    with speaking_of(_WHO, _NAMES):
        config = {key: part(key, x, build=True) for key, x in config.items() if x}
    return config, tuple(reader.notes)


@dataclasses.dataclass
class _Reader:
    """A reader of one dictionary, step by step.

    Attributes:
      strict: whether settings that MindSpore would ignore are errors; otherwise they are noted.
      notes: the notes so far.
    """

    strict: bool
    notes: list[str] = dataclasses.field(default_factory=list[str])

    def ignored(
        self, name: str, value: object, allowed: str, hint: str, why: str, who: str = _WHO
    ) -> None:
        """Refuse a setting that MindSpore ignores, or record a note that it has no effect."""
        checks.require(who, name, value, allowed, not self.strict, hint)
        self.notes.append(f"{name} = {value!r} has no effect: {why}")

    def known(self, data: Any, allowed: tuple[str, ...], what: str) -> dict[str, Any]:
        """Return a dictionary without its unknown keys."""
        known(data, allowed if self.strict else data, what, _WHO)
        for key in data.keys() - {*allowed}:
            hint = checks.nearest(key, allowed)
            self.notes.append(f"{what}: {key} = {data[key]!r} has no effect: {hint}")
        return {key: value for key, value in data.items() if key in allowed}

    def settings(self, group: str, data: Any, on: bool) -> dict[str, Any]:
        """Read the settings of a group as arguments of its part."""
        given = self.known(data, tuple(GROUPS[group]), f"keys of {group}")
        found: dict[str, Any] = {}
        for name, about in GROUPS[group].items():
            key, value = f"{group}.{name}", given.get(name, about.get("default"))
            if on and "allowed" in about:
                fits = re.fullmatch(about["pattern"], repr(value)) is not None
                checks.require(_WHO, key, value, about["allowed"], fits, about["hint"])
            value = about["words"][value] if on and "words" in about else value
            if "is" in about:
                found[about["is"]] = value
            elif on and value != about.get("default"):
                self.notes.append(f"{key} = {value!r} has no effect: {about['why']}")
        if on and not self.strict and found.get("pca_mat_path") and found["weight_load_dir"]:
            why = "pca_mat_path takes its place."
            self.ignored("dim_reduce.weight_load_dir", found.pop("weight_load_dir"), "", "", why)
        return found

    def switches(self, boost: Any, level: str, wanted: bool) -> dict[str, bool]:
        """Set the six switches by mode and level; freezing only if the dictionary names it."""
        asked = self.known(boost, ("mode", *SWITCHES), "keys of boost")
        mode = asked.pop("mode", "auto")
        modes = tuple(_DATA["modes"])
        checks.choice(_WHO, "boost.mode", mode, modes, checks.nearest(mode, modes))
        for name, value in asked.items():
            flag(_WHO, f"boost.{name}", value)
        on: dict[str, Any] = {name: name in LEVELS[level] for name in SWITCHES}
        left = self.strict and mode in ("auto", "manual") and on["grad_freeze"]
        if left and not wanted and "grad_freeze" not in asked:
            on["grad_freeze"] = False
            self.notes.append(_NOTES["level"].format(level))
        if mode == "manual":
            return on | asked
        if mode != "auto":
            on = dict.fromkeys(SWITCHES, mode == "enable_all")
        whose = f"mode {mode!r} at level {level!r}" if mode == "auto" else f"mode {mode!r}"
        hint = "MindSpore ignores the switch; mode 'manual' obeys it."
        for name, value in asked.items():
            if value != on[name]:
                allowed = f"{on[name]} or left out with {whose}"
                self.ignored(f"boost.{name}", value, allowed, hint, f"{whose} decides.")
        return on

    def together(self, on: dict[str, bool], level: str) -> dict[str, bool]:
        """Return the switches that take effect; in MindSpore one technique can replace others."""
        taken = ((x, [y for y in others if on[y]]) for x, others in _DATA["instead"].items())
        winner, losers = next(((x, found) for x, found in taken if on[x] and found), ("", []))
        if self.strict:
            if losers:
                self.notes.append(_NOTES["together"][winner].format(", ".join(losers)))
            return on
        if level == "O0" and any(on.values()):
            self.notes.append(_NOTES["O0"])
        special = _NOTES["special"].get(winner, {})
        why = {name: special.get(name, f"{winner} takes its place.") for name in losers}
        if on["loss_scale_group"]:
            why["loss_scale_group"] = _NOTES["groups"]
        self.notes += [f"boost.{name} = True has no effect: {x}" for name, x in why.items()]
        return on | dict.fromkeys(why, False)

    def config(self, on: dict[str, bool], settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the parts that are on, as a configuration of boostax."""
        freeze, centralize = settings["grad_freeze"], settings["less_bn"].pop("centralize", False)
        if not self.strict:
            freeze |= {"cut": "mindspore", "moments": "per_group"}
            centralize = centralize and {"multiple_of": 16, "after_decay": True}
        named = on | {"gc_flag": on["less_bn"] and centralize}
        for notes in (_NOTES["always"],) if self.strict else (_NOTES["always"], _NOTES["there"]):
            texts = [note for name, texts in notes.items() if named[name] for note in texts]
            self.notes += [note.format(**settings["common"]) for note in texts]
        return {
            # MindSpore sets the groups of its managers outside of the dictionary, by layers.
            "loss_scale": on["loss_scale_group"] and {"kind": "group", "groups": freeze["groups"]},
            "accumulate": on["grad_accumulation"] and settings["grad_accumulation"],
            "freeze": on["grad_freeze"] and freeze,
            # MindSpore combines the updates of each server's optimizer for its mean gradient.
            "reduce": on["adasum"] and {"kind": "adasum-delta", **settings["common"]},
            "centralize": named["gc_flag"],
            "less_bn": on["less_bn"] and settings["less_bn"],
            "dim_reduce": on["dim_reduce"] and settings["dim_reduce"] | {"rule": "mindspore"},
        }
