"""Reading the dictionary of ``mindspore.boost``: its levels, modes, switches and settings.

What MindSpore 2.10 ignores without a word is refused here: an unknown level or key, and a switch
that contradicts the level in a mode that does not look at switches. Nothing is global.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from boostax._core import checks
from boostax.autoboost.config import BoostConfig
from boostax.autoboost.part import flag, known, word

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
    if value not in (0, 1) or type(value) is bool:
        hint = "0 is continuous, 1 by intervals."
        raise ValueError(checks.message(_WHO, name, "0 or 1", value, hint))


def _text(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, str):
        raise TypeError(checks.message(_WHO, name, "a path or None", value, "It names files."))


def _splits(name: str, value: Any) -> Any:
    found: Any = value
    if value is not None and not (
        isinstance(value, (list, tuple)) and all(type(x) is int for x in found)
    ):
        hint = "[50, 100] cuts a list of params in three."
        raise TypeError(checks.message(_WHO, name, "a list of integers", value, hint))


def _switch(name: str, value: Any) -> Any:
    flag(name, value, _WHO)


_PROPER = _real("in (0, 1)", lambda x: 0 < x < 1)
_SHARE = _real("in (0, 1]", lambda x: 0 < x <= 1)
_MOMENTUM = _real("in [0, 1)", lambda x: 0 <= x < 1)
_RATE = _real("greater than 0", lambda x: x > 0)
GROUPS: dict[str, dict[str, Setting]] = {
    "less_bn": {
        "fn_flag": Setting(True, _switch, "normalized_head"),
        "gc_flag": Setting(True, _switch, "centralize"),
    },
    "grad_freeze": {
        "param_groups": Setting(10, _count, "groups"),
        "freeze_type": Setting(1, _type, "kind", read=("continuous", "interval").__getitem__),
        # MindSpore's is the share of the steps that train all. Rounded, 1 - 0.7 is 0.3.
        "freeze_p": Setting(0.7, _SHARE, "frozen_fraction", read=lambda p: round(1 - p, 12)),
        "total_steps": Setting(65536, _count, "total_steps"),
    },
    "grad_accumulation": {"grad_accumulation_step": Setting(1, _count, "every")},
    "dim_reduce": {
        "rho": Setting(0.55, _PROPER, "shrink"),
        "gamma": Setting(0.9, _MOMENTUM, "residual_momentum"),
        "alpha": Setting(0.001, _RATE, "residual_rate"),
        "sigma": Setting(0.4, _PROPER, "slope"),
        "n_components": Setting(32, _count, "n_components"),
        "pca_mat_path": Setting(None, _text, unused="pass a boostax.subspace.Basis to finish"),
        "weight_load_dir": Setting(
            None, _text, unused="pass the boostax.subspace.pca_basis of the checkpoints to finish"
        ),
        "timeout": Setting(1800, _count, unused="no process waits for another's files"),
    },
    "common": {
        "gradient_split_groups": Setting(
            None, _splits, unused="XLA decides what travels together; reduce.bucket_bytes may"
        ),
        "device_number": Setting(
            8,
            _count,
            unused="the mesh says how many devices a node has; reduce.within names them",
        ),
    },
}


class Read(NamedTuple):
    """What a dictionary came to.

    Attributes:
      config: the configuration.
      notes: what of the dictionary has no effect, and why.
    """

    config: BoostConfig
    notes: tuple[str, ...]


def is_mindspore(data: Mapping[str, Any]) -> bool:
    """Whether a dictionary is MindSpore's: it has a key that a ``BoostConfig`` has not."""
    own = {"less_bn", "dim_reduce"}
    keys = set(data) & ({"boost", "common", *GROUPS, *SWITCHES} - own)
    for name in own & set(data):
        if isinstance(data[name], Mapping):
            keys |= set(data[name]) & (set(GROUPS[name]) - {"n_components"})
    return bool(keys)


def from_mindspore(data: Mapping[str, Any], level: str = "O0") -> Read:
    """The configuration that MindSpore's dictionary and level stand for.

    Modes are MindSpore's: ``"auto"`` takes the level's techniques, ``"manual"`` these as changed by
    the switches, ``"enable_all"`` and ``"disable_all"`` all and none. Settings of what is off are
    checked and have no effect. Of ``dim_reduce`` no snapshots are recorded, as MindSpore reads them
    from checkpoints.

    Args:
      data: what ``mindspore.boost.AutoBoost`` takes as ``boost_config_dict``; ``{}`` for nothing.
      level: ``"O0"``, ``"O1"`` or ``"O2"``.

    Returns:
      A ``BoostConfig`` and notes. Cost: none.

    Raises:
      ValueError, TypeError: an unknown level, mode or key; a switch that the mode would ignore; a
        value out of range.

    Example:
      >>> from boostax.autoboost.mindspore import from_mindspore
      >>> data = {"boost": {"mode": "manual", "grad_freeze": False, "adasum": True}}
      >>> config, notes = from_mindspore(data, "O1")
      >>> config.reduce.kind, config.freeze, config.less_bn.normalized_head, notes
      ('adasum-delta', None, True, ())

    References:
      MindSpore 2.10, ``mindspore/boost/boost.py``.
    """
    word(level, tuple(LEVELS), "level", "auto")
    known(_WHO, data, ("boost", *GROUPS), "keys", _HINT)
    on = _switched(data.get("boost", {}), level)
    parts: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for group, keys in GROUPS.items():
        given = data.get(group, {})
        known(_WHO, given, tuple(keys), f"keys of {group}", _HINT)
        for key, value in given.items():
            name, setting = f"{group}.{key}", keys[key]
            setting.check(name, value)
            if setting.unused and value != setting.default and on.get(group, True):
                notes.append(f"{name} = {value!r} has no effect: {setting.unused}.")
        parts[group] = {
            setting.field: setting.read(given.get(key, setting.default))
            for key, setting in keys.items()
            if setting.field
        }
    return Read(_config(on, parts), tuple(notes))


def _switched(boost: Any, level: str) -> dict[str, bool]:
    """The six switches."""
    known(_WHO, boost, ("mode", *SWITCHES), "keys of boost", _HINT)
    asked: dict[str, Any] = dict(boost)
    mode = asked.pop("mode", "auto")
    word(mode, _MODES, "boost.mode", _WHO)
    for name, value in asked.items():
        _switch(f"boost.{name}", value)
    level_on = {name: name in LEVELS[level] for name in SWITCHES}
    if mode == "manual":
        return level_on | asked
    every = {"enable_all": True, "disable_all": False}
    on = {name: every.get(mode, level_on[name]) for name in SWITCHES}
    for name, value in asked.items():
        if value != on[name]:
            what = f"mode 'auto' at level {level!r}" if mode == "auto" else f"mode {mode!r}"
            hint = "MindSpore ignores the switch; mode 'manual' obeys it."
            allowed = f"{on[name]} or left out with {what}"
            raise ValueError(checks.message(_WHO, f"boost.{name}", allowed, value, hint))
    return on


def _config(on: dict[str, bool], parts: dict[str, dict[str, Any]]) -> BoostConfig:
    freeze, norms = parts["grad_freeze"], parts["less_bn"]
    centralize = norms.pop("centralize")
    finish = parts["dim_reduce"] | {"every": None, "rule": "mindspore"}
    return BoostConfig.from_dict(
        {
            # MindSpore's managers are told apart from the dictionary, by layers, as groups are.
            "group_loss_scale": on["loss_scale_group"] and {"groups": freeze["groups"]},
            "accumulate": on["grad_accumulation"] and parts["grad_accumulation"],
            "freeze": on["grad_freeze"] and freeze,
            # MindSpore combines what the optimizer has made of the gradients.
            "adasum_delta": on["adasum"],
            "centralize": on["less_bn"] and centralize,
            "less_bn": on["less_bn"] and norms,
            "dim_reduce": on["dim_reduce"] and finish,
        }
    )
