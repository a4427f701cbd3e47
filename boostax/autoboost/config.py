"""The configuration of a run: frozen data that goes to JSON and back."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from boostax._core import checks
from boostax.autoboost.part import Part, known, speaking_of
from boostax.autoboost.parts import (
    Accumulate,
    Carry,
    Centralize,
    CheckUpdates,
    Clip,
    CountLostUpdates,
    DimReduce,
    Freeze,
    LessBN,
    LossScale,
    Precision,
)
from boostax.autoboost.reduction import Reduce

_WHO = "BoostConfig"
# The roles in a chain, from the optimizer outwards: the one order. A part stands in front of all
# before it, or around.
ORDER: dict[str, type[Part]] = {
    "count_lost_updates": CountLostUpdates,
    "check_updates": CheckUpdates,
    "clip": Clip,
    "centralize": Centralize,
    "reduce": Reduce,
    "dim_reduce": DimReduce,
    "accumulate": Accumulate,
    "loss_scale": LossScale,
    "carry": Carry,
    "freeze": Freeze,
}
_PARTS = ORDER | {"policy": Precision, "less_bn": LessBN}
# Of each public factory the role, and the kind that it is there.
FACTORIES: dict[str, tuple[str, str]] = {
    factory.__name__: (role, kind)
    for role, part in _PARTS.items()
    for kind, factory in part.kinds.items()
}


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
      carry: leaves whose "gradient" is their new value.
      check_updates: what the optimizer makes of good gradients is good too, or held back.
      count_lost_updates: what the stored precision rounds away is counted.

    Raises:
      ValueError, TypeError: a value out of range, or parts that do not go together.

    Cost: none; nothing is built.

    Example:
      >>> import boostax
      >>> asked = {"loss_scale": "dynamic", "accumulate": {"every": 4}}
      >>> config = boostax.BoostConfig.from_dict(asked)
      >>> config.accumulate
      Accumulate(every=4, normalize='mean', accumulator_dtype='float32', drop='micro-batch')
      >>> config.to_dict()["loss_scale"], boostax.BoostConfig.from_dict(config.to_dict()) == config
      ({'kind': 'dynamic'}, True)
    """

    policy: Precision | None = None
    loss_scale: LossScale | None = None
    accumulate: Accumulate | None = None
    microbatches: int = 1
    freeze: Freeze | None = None
    reduce: Reduce = Reduce()  # noqa: RUF009  # frozen
    centralize: Centralize | None = None
    clip: Clip | None = None
    less_bn: LessBN | None = None
    dim_reduce: DimReduce | None = None
    carry: Carry | None = None
    check_updates: CheckUpdates | None = None
    count_lost_updates: CountLostUpdates | None = None

    def __post_init__(self) -> None:
        hint = "1 takes each batch whole."
        checks.positive_int(_WHO, "microbatches", self.microbatches, hint)
        for name, kind in _PARTS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or name == "reduce"):
                allowed = f"a {kind.__name__}" + ("" if name == "reduce" else " or None")
                hint = "BoostConfig.from_dict reads words, numbers and dictionaries."
                raise TypeError(checks.message(_WHO, name, allowed, value, hint))
        _check_together(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: what is on, without the fields that were left to the defaults."""
        found = {"microbatches": self.microbatches}
        return found | {
            name: {field: _plain(value) for field, value in part.stated().items()}
            for name in _PARTS
            if (part := getattr(self, name)) is not None
        }

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
        fields = tuple(field.name for field in dataclasses.fields(base))
        known(_WHO, data, tuple(dict.fromkeys((*fields, *FACTORIES))), "keys", "JSON gives one.")
        changed: dict[str, Any] = {}
        for name, value in data.items():
            role = name if name in fields else FACTORIES[name][0]
            if role in changed:
                allowed, hint = f"left out beside another {role}", "A chain has one of them."
                raise ValueError(checks.message(_WHO, name, allowed, value, hint))
            if name == "microbatches":
                changed[role] = value
            elif name == role:
                changed[role] = _read(name, value, getattr(base, role))
            else:
                changed[role] = _read_factory(name, value)
        return dataclasses.replace(base, **changed)


def _read(name: str, value: Any, base: Part | None) -> Part | None:
    kind = _PARTS[name]
    if isinstance(value, kind):
        return value
    given = _given(name, value, tuple(field.name for field in dataclasses.fields(kind)))
    if given is None:
        # Replicas always agree somehow.
        return Reduce() if name == "reduce" else None
    other = base is not None and "kind" in given and given["kind"] != getattr(base, "kind", None)
    return kind(**given) if base is None or other else dataclasses.replace(base, **given)


def _read_factory(name: str, value: Any) -> Part | None:
    role, kind = FACTORIES[name]
    part = _PARTS[role]
    given = _given(name, value, tuple(part.parameters(part.kinds[kind])))
    if given is None:
        return _read(role, None, None)
    fields = {part.renamed.get(key, key): x for key, x in given.items()}
    with speaking_of(name, {part.renamed[key]: key for key in given if key in part.renamed}):
        return part(**fields, **({"kind": kind} if kind else {}))


def _given(name: str, value: Any, keys: tuple[str, ...]) -> dict[str, Any] | None:
    """What is said of a part, in whatever form; ``None`` where it is turned off."""
    if value is None or value is False:
        return None
    if value is True:
        value = {}
    if not isinstance(value, Mapping):
        value = {keys[0]: value} if keys else value
    known(_WHO, value, keys, f"keys of {name}", "JSON gives one.")
    return dict(typing.cast("Mapping[str, Any]", value))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(x) for x in typing.cast("tuple[Any, ...]", value)]
    return value


def _check_together(config: BoostConfig) -> None:
    freezes, own = config.freeze is not None, config.reduce.keeps_own_params
    if config.policy is not None and config.policy.policy().compute_dtype == jnp.float16:
        if config.loss_scale is None:
            allowed = "given where policy computes in float16"
            hint = "Small gradients vanish without: 'dynamic' scales, and bfloat16 needs none."
            raise ValueError(checks.message(_WHO, "loss_scale", allowed, None, hint))
    if freezes and own:
        allowed = "no 'partial' or 'local' with freeze"
        hint = "What is frozen between two meetings would stay different on every replica."
        raise ValueError(checks.message(_WHO, "reduce", allowed, config.reduce.kind, hint))
    if config.dim_reduce is not None and (freezes or own):
        allowed, why = "None with freeze", "A frozen layer is not recorded."
        if own:
            allowed = f"None with reduce {config.reduce.kind!r}"
            why = "Each replica has params of its own."
        hint = (
            f"{why} boostax.HostTrajectory records between steps, and finish takes its basis: "
            "dim_reduce.every = None."
        )
        checks.absent(_WHO, "dim_reduce.every", config.dim_reduce.every, allowed, hint)
