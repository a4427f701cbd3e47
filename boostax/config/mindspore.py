# SPDX-License-Identifier: Apache-2.0
"""Reading the dictionary of ``mindspore.boost``: its levels, modes, switches and settings.

Strictly, what MindSpore 2.10 ignores without a word is refused: an unknown level or key, and a
switch that contradicts the level in a mode that does not look at switches; and all that is on is
on. Otherwise it is read as MindSpore reads it, and each thing that has no effect is noted. Nothing
is global.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from boostax._core import checks
from boostax.config.config import BoostConfig
from boostax.config.part import flag, known, nearest, path, word

SWITCHES = (
    "less_bn",
    "grad_freeze",
    "adasum",
    "grad_accumulation",
    "dim_reduce",
    "loss_scale_group",
)
LEVELS: dict[str, tuple[str, ...]] = {
    "O0": (),
    "O1": ("less_bn", "grad_freeze"),
    "O2": ("less_bn", "grad_freeze", "adasum"),
}
# What MindSpore's levels switch on, and boostax's do not: docs/cards/freezing.md.
_NOT_OURS = "grad_freeze"
# What is on and leaves out others, the first first: dim_reduce is applied alone, and the train step
# takes the way of freezing before it looks at others.
_INSTEAD = {
    "dim_reduce": ("less_bn", "grad_freeze", "adasum", "grad_accumulation"),
    "grad_freeze": ("adasum", "grad_accumulation"),
}
_MODES = ("auto", "manual", "enable_all", "disable_all")
_WHO = "mindspore"
_HINT = "It is a dictionary in MindSpore's."


class Setting(NamedTuple):
    """A key of a group.

    Attributes:
      default: MindSpore's.
      check: raises if a value is none; takes the key's name and the value.
      field: of the part that the group is here; empty where there is none.
      unused: why it has no effect.
      read: the field's value, from MindSpore's.
    """

    default: Any
    check: Callable[[str, Any], Any]
    field: str = ""
    unused: str = ""
    read: Callable[[Any], Any] = lambda value: value


def _count(name: str, value: Any) -> Any:
    return checks.positive_int(_WHO, name, value, "MindSpore counts with it.")


def _real(allowed: str, test: Callable[[float], bool]) -> Callable[[str, Any], Any]:
    hint = "It is a number in MindSpore's dictionary."
    return lambda name, value: checks.number(_WHO, name, value, allowed, test, hint)


def _type(name: str, value: Any) -> Any:
    fits = value in (0, 1) and type(value) is not bool
    checks.require(_WHO, name, value, "0 or 1", fits, "0 is continuous, 1 by intervals.")


def _splits(name: str, value: Any) -> Any:
    listed: Any = () if value is None else value
    fits = isinstance(listed, (list, tuple)) and all(type(x) is int for x in listed)
    hint = "[50, 100] cuts a list of params in three."
    checks.require(_WHO, name, value, "a list of integers", fits, hint, TypeError)


_SWITCH, _TEXT = functools.partial(flag, who=_WHO), functools.partial(path, who=_WHO)
_PROPER = _real("in (0, 1)", lambda x: 0 < x < 1)
_SHARE = _real("in [0, 1]", lambda x: 0 <= x <= 1)
_MOMENTUM = _real("in [0, 1)", lambda x: 0 <= x < 1)
_RATE = _real("greater than 0", lambda x: x > 0)
GROUPS: dict[str, dict[str, Setting]] = {
    "less_bn": {
        "fn_flag": Setting(True, _SWITCH, "normalized_head"),
        "gc_flag": Setting(True, _SWITCH, "centralize"),
    },
    "grad_freeze": {
        "param_groups": Setting(10, _count, "groups"),
        "freeze_type": Setting(1, _type, "kind", read=("continuous", "interval").__getitem__),
        "freeze_p": Setting(0.7, _SHARE, "freeze_p"),
        "total_steps": Setting(65536, _count, "total_steps"),
    },
    "grad_accumulation": {"grad_accumulation_step": Setting(1, _count, "every")},
    "dim_reduce": {
        "rho": Setting(0.55, _PROPER, "shrink"),
        "gamma": Setting(0.9, _MOMENTUM, "residual_momentum"),
        "alpha": Setting(0.001, _RATE, "residual_rate"),
        "sigma": Setting(0.4, _PROPER, "slope"),
        "n_components": Setting(32, _count, "n_components"),
        "pca_mat_path": Setting(None, _TEXT, "pca_mat_path"),
        "weight_load_dir": Setting(None, _TEXT, "weight_load_dir"),
        "timeout": Setting(1800, _count, unused="no process waits for another's files"),
    },
    "common": {
        "gradient_split_groups": Setting(
            None, _splits, unused="XLA decides what travels together; reduce.bucket_bytes may"
        ),
        "device_number": Setting(8, _count, "within"),
    },
}


class Read(NamedTuple):
    """What a dictionary came to.

    Attributes:
      config: the configuration.
      notes: what of the dictionary has no effect or another one, and why.
    """

    config: BoostConfig
    notes: tuple[str, ...]


# Keys of MindSpore's that are fields of a BoostConfig, too; and theirs that are fields there.
_SHARED = {"less_bn": (), "dim_reduce": ("n_components", "pca_mat_path", "weight_load_dir")}
KEYS = ("boost", *GROUPS)


def is_mindspore(data: Mapping[str, Any]) -> bool:
    """Whether a dictionary is MindSpore's: it has a key that a ``BoostConfig`` has not."""
    keys = set(data) & ({*KEYS, *SWITCHES} - set(_SHARED))
    for name in set(_SHARED) & set(data):
        if isinstance(data[name], Mapping):
            keys |= set(data[name]) & (set(GROUPS[name]) - set(_SHARED[name]))
    return bool(keys)


def from_mindspore(data: Mapping[str, Any], level: str = "O0", *, strict: bool = True) -> Read:
    """The configuration that MindSpore's dictionary and level stand for.

    Modes are MindSpore's: ``"auto"`` takes the level's techniques, ``"manual"`` these as changed by
    the switches, ``"enable_all"`` and ``"disable_all"`` all and none. Strictly, a level leaves
    ``grad_freeze`` out, which lost more than fewer steps, unless the dictionary has settings of it.
    Settings of what is off are checked and have no effect. DimReduce trains from the first step on,
    from the files that ``pca_mat_path`` or ``weight_load_dir`` names, in the place of the
    optimizer.

    ``strict=False`` is MindSpore's own reading. An unknown level is ``"O0"``; unknown keys, and
    switches that the mode does not look at, have no effect; settings of what is off are not looked
    at. Of techniques that are on, one can take another's place: ``dim_reduce`` that of all others,
    ``grad_freeze`` that of AdaSum and of accumulation. Freezing goes by buckets of three params
    with moments for each depth, centralization stands behind weight decay and leaves alone what
    does not divide by 16, LessBN leaves a model without norms or head as it is, and
    ``loss_scale_group`` switches nothing on.

    Args:
      data: what ``mindspore.boost.AutoBoost`` takes as ``boost_config_dict``; ``{}`` for nothing.
      level: ``"O0"``, ``"O1"`` or ``"O2"``.
      strict: whether what MindSpore ignores is an error.

    Returns:
      A ``BoostConfig`` and notes. Cost: none.

    Raises:
      ValueError, TypeError: a mode that there is not, or a value out of range; strictly, also an
        unknown level or key, and a switch that the mode would ignore.

    Example:
      >>> from boostax.config.mindspore import from_mindspore
      >>> data = {"boost": {"mode": "manual", "grad_freeze": False, "adasum": True}}
      >>> config, notes = from_mindspore(data, "O1")
      >>> config.reduce, config.freeze, config.less_bn.normalized_head
      (Reduce(kind='adasum-delta', within=8), None, True)
      >>> notes[0].partition(":")[0]
      'common.device_number = 8'
      >>> from_mindspore({"boost": {"adasum": True}}, "O1", strict=False).notes[0]
      "boost.adasum = True has no effect: mode 'auto' takes what level 'O1' says."

    References:
      MindSpore 2.10, ``mindspore/boost/boost.py``, ``boost_cell_wrapper.py``.
    """
    reader = _Reader(strict)
    if level not in LEVELS:
        if strict:
            word(level, tuple(LEVELS), "level", "auto")
        reader.no_effect("level", level, "MindSpore takes it for 'O0'.")
        level = "O0"
    known_keys = reader.known(data, KEYS, "keys")
    switches = reader.switches(known_keys.get("boost", {}), level, _NOT_OURS in known_keys)
    on = reader.together(switches, level)
    parts: dict[str, dict[str, Any]] = {}
    for group, keys in GROUPS.items():
        given = reader.known(known_keys.get(group, {}), tuple(keys), f"keys of {group}")
        for key, value in given.items():
            name, setting = f"{group}.{key}", keys[key]
            if strict or on.get(group, True):
                setting.check(name, value)
            if setting.unused and value != setting.default and on.get(group, True):
                reader.no_effect(name, value, f"{setting.unused}.")
        parts[group] = {
            setting.field: setting.read(given.get(key, setting.default))
            for key, setting in keys.items()
            if setting.field and (on.get(group, True) or strict)
        }
    return Read(BoostConfig.from_dict(reader.config(on, parts)), tuple(reader.notes))


@dataclasses.dataclass
class _Reader:
    """A dictionary, read step by step.

    Attributes:
      strict: whether what MindSpore would ignore is an error; otherwise it is noted.
      notes: so far.
    """

    strict: bool
    notes: list[str] = dataclasses.field(default_factory=list[str])

    def no_effect(self, name: str, value: Any, why: str) -> None:
        """Note it."""
        self.notes.append(f"{name} = {value!r} has no effect: {why}")

    def known(self, data: Any, allowed: tuple[str, ...], what: str) -> dict[str, Any]:
        """What of a dictionary there is a use for."""
        if self.strict or not isinstance(data, Mapping):
            known(_WHO, data, allowed, what, _HINT)
        given: dict[str, Any] = dict(data)
        for key in given.keys() - set(allowed):
            self.no_effect(f"{what}: {key}", given.pop(key), nearest(key, allowed))
        return given

    def switches(self, boost: Any, level: str, wanted: bool) -> dict[str, bool]:
        """The six switches, as mode and level have them; freezing if it is wanted by its name."""
        asked = self.known(boost, ("mode", *SWITCHES), "keys of boost")
        mode = asked.pop("mode", "auto")
        word(mode, _MODES, "boost.mode", _WHO)
        for name, value in asked.items():
            flag(f"boost.{name}", value, _WHO)
        on: dict[str, bool] = {name: name in LEVELS[level] for name in SWITCHES}
        of_level = mode in ("auto", "manual") and on[_NOT_OURS]
        if self.strict and of_level and not wanted and _NOT_OURS not in asked:
            on[_NOT_OURS] = False
            self.notes.append(_LEFT_OUT.format(level))
        if mode == "manual":
            return on | asked
        what, why = f"mode {mode!r}", f"mode {mode!r} does not look."
        if mode == "auto":
            what, why = f"{what} at level {level!r}", f"{what} takes what level {level!r} says."
        else:
            on = {name: mode == "enable_all" for name in SWITCHES}
        hint = "MindSpore ignores the switch; mode 'manual' obeys it."
        for name, value in asked.items():
            argument, obeyed = f"boost.{name}", value == on[name]
            if self.strict:
                allowed = f"{on[name]} or left out with {what}"
                checks.require(_WHO, argument, value, allowed, obeyed, hint)
            elif not obeyed:
                self.no_effect(argument, value, why)
        return on

    def together(self, on: dict[str, bool], level: str) -> dict[str, bool]:
        """The switches that hold: in MindSpore's train step one takes the place of others."""
        taken = ((name, [x for x in others if on[x]]) for name, others in _INSTEAD.items())
        winner, losers = next(((x, found) for x, found in taken if on[x] and found), ("", []))
        if self.strict:
            if losers:
                self.notes.append(_TOGETHER[winner].format(", ".join(losers)))
            return on
        if level == "O0" and any(on.values()):
            self.notes.append(
                "level 'O0': the switches are read as AutoBoost and its train cells read them; "
                "MindSpore's Model boosts at O1 and O2 alone."
            )
        for name in losers:
            why = f"{winner} takes its place."
            if (winner, name) == ("dim_reduce", "grad_accumulation"):
                why = (
                    "no window stands around dim_reduce, whose line search would see the last "
                    "micro-batch alone; in MindSpore one does."
                )
            self.no_effect(f"boost.{name}", True, why)
        if on["loss_scale_group"]:
            why = "nothing in MindSpore reads the switch: group_loss_scale is a key of its own."
            self.no_effect("boost.loss_scale_group", True, why)
        return on | dict.fromkeys((*losers, "loss_scale_group"), False)

    def config(self, on: dict[str, bool], parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The configuration as a dictionary of boostax's own."""
        freeze, norms, servers = parts["grad_freeze"], parts["less_bn"], parts["common"]
        centralize, finish = norms.pop("centralize", False), parts["dim_reduce"]
        if not self.strict:
            freeze |= {"cut": "mindspore", "moments": "per_group"}
            centralize = centralize and {"multiple_of": 16, "after_decay": True}
            if finish.get("pca_mat_path") and (files := finish.pop("weight_load_dir", None)):
                self.no_effect("dim_reduce.weight_load_dir", files, "pca_mat_path takes its place.")
        named = on | {"gc_flag": on["less_bn"] and centralize}
        for name, note in _NOTES if self.strict else (*_NOTES, *_NOTES_AS_THERE):
            if named[name]:
                self.notes.append(note.format(**servers))
        return {
            # MindSpore's managers are told apart from the dictionary, by layers, as groups are.
            "group_loss_scale": on["loss_scale_group"] and {"groups": freeze.get("groups")},
            "accumulate": on["grad_accumulation"] and parts["grad_accumulation"],
            "freeze": on["grad_freeze"] and freeze,
            # MindSpore combines what the optimizer of each server has made of its mean gradient.
            "adasum_delta": on["adasum"] and servers,
            "centralize": named["gc_flag"],
            "less_bn": on["less_bn"] and norms,
            "dim_reduce": on["dim_reduce"] and finish | {"after": 0, "rule": "mindspore"},
        }


_LEFT_OUT = (
    "level {!r}: grad_freeze is left out: freezing at random lost more than fewer steps for the "
    "same FLOPs. Settings of it in the dictionary switch it on; strict=False is MindSpore's level."
)
# What is said, strictly, of a technique that leaves out others in MindSpore.
_TOGETHER = {
    "dim_reduce": "dim_reduce takes the place of {}: what of them is in the chain is refused when "
    "a step is built; strict=False leaves them out, as MindSpore does.",
    "grad_freeze": "grad_freeze and {} hold together here; MindSpore leaves out the latter: "
    "strict=False does.",
}
# What is said of a technique that is on; further on, where it is read as there.
_NOTES = (
    (
        "adasum",
        "common.device_number = {within}: a run of no more devices is one server, whose gradients "
        "are averaged, and nothing is left for AdaSum; MindSpore does the same without a word.",
    ),
    (
        "dim_reduce",
        "dim_reduce: the optimizer has no effect: an SGD of alpha and gamma trains what is outside "
        "the span, as in MindSpore.",
    ),
)
_MADE_ANEW = (
    "{}: the optimizer is the one given; MindSpore makes it anew, and its weight decay then takes "
    "gamma and beta, too."
)
_NOTES_AS_THERE = (
    (
        "grad_freeze",
        "grad_freeze: groups are buckets of three params in the order of their names or of "
        "freeze.order, and a network with fewer of them than param_groups is not frozen; depths "
        "are drawn with seed 0, MindSpore's from NumPy's global generator. A schedule of rates "
        "goes by the steps of the run, as MindSpore's lists do; its LearningRateSchedules go by "
        "the steps of each depth.",
    ),
    (
        "less_bn",
        "less_bn: the norms that go are those inside residual branches; MindSpore matches "
        "patterns of the compiled graph, and in PyNative mode it removes no norms.",
    ),
    ("less_bn", _MADE_ANEW.format("less_bn")),
    ("grad_freeze", _MADE_ANEW.format("grad_freeze")),
    (
        "gc_flag",
        "less_bn.gc_flag: embeddings are not centralized; in MindSpore, whose operator exists on "
        "Ascend alone, they are where their features divide by 16.",
    ),
)
