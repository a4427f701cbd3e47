"""Reading the dictionary of ``mindspore.boost``: its levels, modes, switches and settings.

What MindSpore 2.10 ignores without a word is refused here: an unknown level or key, and a switch
that contradicts the level in a mode that does not look at switches. Nothing is global.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from boostax._core import checks
from boostax.autoboost.config import BoostConfig
from boostax.autoboost.part import flag, known, word
from boostax.autoboost.parts import Accumulate, Centralize, DimReduce, Freeze, LessBN, LossScale
from boostax.autoboost.reduction import Reduce

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
    """

    default: Any
    check: Callable[[str, Any], Any]


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
GROUPS: dict[str, dict[str, Setting]] = {
    "less_bn": {"fn_flag": Setting(True, _switch), "gc_flag": Setting(True, _switch)},
    "grad_freeze": {
        "param_groups": Setting(10, _count),
        "freeze_type": Setting(1, _type),
        "freeze_p": Setting(0.7, _real("in (0, 1]", lambda x: 0 < x <= 1)),
        "total_steps": Setting(65536, _count),
    },
    "grad_accumulation": {"grad_accumulation_step": Setting(1, _count)},
    "dim_reduce": {
        "rho": Setting(0.55, _PROPER),
        "gamma": Setting(0.9, _real("in [0, 1)", lambda x: 0 <= x < 1)),
        "alpha": Setting(0.001, _real("greater than 0", lambda x: x > 0)),
        "sigma": Setting(0.4, _PROPER),
        "n_components": Setting(32, _count),
        "pca_mat_path": Setting(None, _text),
        "weight_load_dir": Setting(None, _text),
        "timeout": Setting(1800, _count),
    },
    "common": {
        "gradient_split_groups": Setting(None, _splits),
        "device_number": Setting(8, _count),
    },
}
# What takes no part here, and why.
_UNUSED = {
    "common.gradient_split_groups": "XLA decides what travels together; reduce.bucket_bytes may",
    "common.device_number": "the mesh says how many devices a node has; reduce.within names them",
    "dim_reduce.pca_mat_path": "pass a boostax.Basis to finish",
    "dim_reduce.weight_load_dir": "pass the boostax.pca_basis of the checkpoints to finish",
    "dim_reduce.timeout": "no process waits for another's files",
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
    settings: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for group, keys in GROUPS.items():
        given = data.get(group, {})
        known(_WHO, given, tuple(keys), f"keys of {group}", _HINT)
        settings[group] = {key: found.default for key, found in keys.items()} | dict(given)
        for key, value in given.items():
            keys[key].check(f"{group}.{key}", value)
            name = f"{group}.{key}"
            if name in _UNUSED and value != keys[key].default and on.get(group, True):
                notes.append(f"{name} = {value!r} has no effect: {_UNUSED[name]}.")
    return Read(_config(on, settings), tuple(notes))


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


def _config(on: dict[str, bool], settings: dict[str, dict[str, Any]]) -> BoostConfig:
    norms, freezing = settings["less_bn"], settings["grad_freeze"]
    subspace = settings["dim_reduce"]
    freeze = Freeze(
        kind="interval" if freezing["freeze_type"] else "continuous",
        # MindSpore's is the share of the steps that train all. Rounded, 1 - 0.7 is 0.3.
        frozen_fraction=round(1 - freezing["freeze_p"], 12),
        total_steps=freezing["total_steps"],
        groups=freezing["param_groups"],
    )
    finish = DimReduce(
        n_components=subspace["n_components"],
        every=None,
        rule="mindspore",
        shrink=subspace["rho"],
        slope=subspace["sigma"],
        residual_rate=subspace["alpha"],
        residual_momentum=subspace["gamma"],
    )
    window = Accumulate(settings["grad_accumulation"]["grad_accumulation_step"])
    return BoostConfig(
        # MindSpore's managers are told apart from the dictionary, by layers; groups are like those.
        loss_scale=LossScale("group", groups=freeze.groups) if on["loss_scale_group"] else None,
        accumulate=window if on["grad_accumulation"] else None,
        freeze=freeze if on["grad_freeze"] else None,
        # MindSpore combines what the optimizer has made of the gradients.
        reduce=Reduce("adasum-delta") if on["adasum"] else Reduce(),
        centralize=Centralize() if on["less_bn"] and norms["gc_flag"] else None,
        less_bn=LessBN(norms["fn_flag"]) if on["less_bn"] else None,
        dim_reduce=finish if on["dim_reduce"] else None,
    )
