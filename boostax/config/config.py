# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run: frozen data that goes to JSON and back."""

import contextlib
import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from boostax._core import checks
from boostax.config import parts
from boostax.config.part import Part, known, speaking_of
from boostax.config.reduction import Reduce

_WHO = "BoostConfig"
# The roles in a chain, from the optimizer outwards: the order. A part stands in front of all
# before it, or around.
ORDER: dict[str, type[Part]] = {
    "count_lost_updates": parts.CountLostUpdates,
    "check_updates": parts.CheckUpdates,
    "clip": parts.Clip,
    "centralize": parts.Centralize,
    "reduce": Reduce,
    "dim_reduce": parts.DimReduce,
    "store": parts.Store,
    "average_params": parts.AverageParams,
    "skip_spikes": parts.SkipSpikes,
    "accumulate": parts.Accumulate,
    "loss_scale": parts.LossScale,
    "carry": parts.Carry,
    "freeze": parts.Freeze,
}
_PARTS = ORDER | {"policy": parts.Precision, "less_bn": parts.LessBN}
# Of each public factory the role, and the kind that it is there.
FACTORIES: dict[str, tuple[str, str]] = {
    factory.__name__: (role, kind)
    for role, part in _PARTS.items()
    for kind, factory in part.kinds.items()
}


def role_of(key: str) -> str:
    """The part that a key of a dictionary says something of."""
    return key if key in _FIELDS else FACTORIES.get(key, (key, ""))[0]


@dataclasses.dataclass(frozen=True)
class BoostConfig:
    """Which techniques are on, and how; all are off but the mean over replicas.

    Attributes:
      policy: in which dtypes the step works.
      loss_scale: scaling of the loss.
      accumulate: windows of calls.
      microbatches: slices of each batch within a call.
      freeze: groups of layers that stand still at times.
      reduce: how replicas agree; of no effect without an axis.
      centralize: gradients without their mean over the inputs.
      clip: by global norm.
      less_bn: fewer BatchNorms and a normalised head.
      dim_reduce: a finish in the subspace of the run.
      store: bf16 params and state in fewer bytes.
      average_params: an average of the params, for ``boostax.model.averaged_params``.
      carry: leaves whose "gradient" is their new value.
      check_updates: what the optimizer makes of good gradients is good too, or held back.
      skip_spikes: steps whose gradient is far above what is usual are skipped.
      count_lost_updates: what the stored precision rounds away is counted.

    Raises:
      ValueError, TypeError: a value out of range, or parts that do not go together.

    Cost: none; nothing is built.

    Example:
      >>> import boostax
      >>> asked = {"loss_scale": "dynamic", "accumulate": {"every": 4}}
      >>> config = boostax.config.BoostConfig.from_dict(asked)
      >>> config.accumulate.every, config.accumulate.normalize
      (4, 'mean')
      >>> config.to_dict()["loss_scale"]
      {'kind': 'dynamic'}
      >>> boostax.config.BoostConfig.from_dict(config.to_dict()) == config
      True
    """

    policy: parts.Precision | None = None
    loss_scale: parts.LossScale | None = None
    accumulate: parts.Accumulate | None = None
    microbatches: int = 1
    freeze: parts.Freeze | None = None
    reduce: Reduce = Reduce()  # noqa: RUF009  # frozen
    centralize: parts.Centralize | None = None
    clip: parts.Clip | None = None
    less_bn: parts.LessBN | None = None
    dim_reduce: parts.DimReduce | None = None
    average_params: parts.AverageParams | None = None
    store: parts.Store | None = None
    carry: parts.Carry | None = None
    check_updates: parts.CheckUpdates | None = None
    skip_spikes: parts.SkipSpikes | None = None
    count_lost_updates: parts.CountLostUpdates | None = None

    def __post_init__(self) -> None:
        hint = "1 takes each batch whole."
        checks.positive_int(_WHO, "microbatches", self.microbatches, hint)
        for name, kind in _PARTS.items():
            value, allowed = getattr(self, name), f"a {kind.__name__}"
            fits = isinstance(value, kind)
            if name != "reduce":
                allowed, fits = f"{allowed} or None", fits or value is None
            hint = "BoostConfig.from_dict reads words, numbers and dictionaries."
            checks.require(_WHO, name, value, allowed, fits, hint, TypeError)
        _check_together(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: what is on, without the fields that were left to the defaults."""
        found = {"microbatches": self.microbatches}
        return found | {
            name: {field: _plain(value) for field, value in part.stated().items()}
            for name in _PARTS
            if (part := getattr(self, name)) is not None
        }

    def changed(self) -> dict[str, Any]:
        """What is not as it is by default, by its field."""
        default = BoostConfig()
        now = {name: getattr(self, name) for name in _FIELDS}
        return {name: value for name, value in now.items() if value != getattr(default, name)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], base: "BoostConfig | None" = None) -> "BoostConfig":
        """Read what ``to_dict`` gives, shorter forms of it, and factories by their own names.

        For a part, ``None`` or ``False`` turns it off, ``True`` takes its defaults, and a single
        value is that of its first field: ``{"accumulate": 8, "reduce": "adasum"}``. Under the name
        of a public factory stand its arguments: ``{"top_k_reduce": {"density": 0.01}}``. A number
        of ``groups`` stands for a tree of them, a ``kind`` and ``total_steps`` for a schedule.

        Args:
          data: by the names of the fields, or of factories.
          base: what stands where ``data`` says nothing, field by field; a part whose ``kind`` is
            another starts from its defaults.

        Returns:
          A ``BoostConfig``.

        Raises:
          ValueError, TypeError: an unknown key, two for the same part, a value out of range, parts
            that do not go together.
        """
        base = BoostConfig() if base is None else base
        known(_WHO, data, KEYS, "keys", "JSON gives one.")
        changed: dict[str, Any] = {}
        for name, value in data.items():
            role = role_of(name)
            allowed, hint = f"left out beside another {role}", "A chain has one of them."
            checks.require(_WHO, name, value, allowed, role not in changed, hint)
            changed[role] = value if name == "microbatches" else _read(name, value, base)
        return dataclasses.replace(base, **changed)


_FIELDS = tuple(field.name for field in dataclasses.fields(BoostConfig))
# All that a dictionary may say.
KEYS = tuple(dict.fromkeys((*_FIELDS, *FACTORIES)))


def _read(name: str, value: Any, base: BoostConfig) -> Part | None:
    """The part that is meant by a role, or by a factory, and what is said of it."""
    by_role = name in _PARTS
    role, kind = (name, "") if by_role else FACTORIES[name]
    part, before = _PARTS[role], getattr(base, role)
    if value is None or value is False:
        # Replicas always agree somehow.
        return Reduce() if role == "reduce" else None
    if isinstance(value, part):
        return value
    keys = [field.name for field in dataclasses.fields(part)]
    if not by_role:
        keys = list(part.parameters(part.kinds[kind]))
    if value is True:
        value = {}
    if not isinstance(value, Mapping) and keys:
        value = {keys[0]: value}
    known(_WHO, value, tuple(keys), f"keys of {name}", "JSON gives one.")
    data = typing.cast("Mapping[str, Any]", value)
    named = {part.renamed.get(key, key): key for key in data}
    given = {field: data[key] for field, key in named.items()} | ({"kind": kind} if kind else {})
    other = "kind" in given and given["kind"] != getattr(before, "kind", None)
    with contextlib.nullcontext() if by_role else speaking_of(name, named):
        return part(**given) if before is None or other else dataclasses.replace(before, **given)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(x) for x in typing.cast("tuple[Any, ...]", value)]
    return value


def _check_together(config: BoostConfig) -> None:
    freezes, own, finish = config.freeze, config.reduce.keeps_own_params, config.dim_reduce
    if config.policy is not None and config.policy.policy().compute_dtype == jnp.float16:
        scale, allowed = config.loss_scale, "given where policy computes in float16"
        hint = "Small gradients vanish without: 'dynamic' scales, and bfloat16 needs none."
        checks.require(_WHO, "loss_scale", scale, allowed, scale is not None, hint)
    hint = "What is frozen between two meetings would stay different on every replica."
    allowed, kind = "no 'partial' or 'local' with freeze", config.reduce.kind
    checks.require(_WHO, "reduce", kind, allowed, not (freezes and own), hint)
    if config.average_params is not None and (freezes or own):
        allowed, hint = "None with freeze", "What is frozen would be missing from the average."
        if own:
            allowed = f"None with reduce {kind!r}"
            hint = "Each replica has params of its own."
        checks.absent(_WHO, "average_params", config.average_params, allowed, hint)
    if finish is None:
        return
    if not finish.at_once and (freezes or own):
        allowed, why = "None with freeze", "A frozen layer is not recorded."
        if own:
            allowed, why = f"None with reduce {kind!r}", "Each replica has params of its own."
        hint = (
            f"{why} Keep jax.device_get(params) in a list between steps, and finish takes the "
            "boostax.subspace.pca_basis of it: dim_reduce.every = None."
        )
        checks.absent(_WHO, "dim_reduce.every", finish.every, allowed, hint)
    if config.carry is not None:
        hint = "A finish has gradients alone: Boost.finish, of params without the carried leaves."
        checks.absent(_WHO, "dim_reduce.after", finish.after, "None with carry", hint)
