"""The configuration of a run: frozen data that goes to JSON and back."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from boostax._core import checks
from boostax.autoboost.part import known
from boostax.autoboost.parts import (
    Accumulate,
    Centralize,
    Clip,
    DimReduce,
    Freeze,
    LessBN,
    LossScale,
    Precision,
)
from boostax.autoboost.reduction import Reduce

_WHO = "BoostConfig"


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
            name: {
                field.name: _plain(getattr(part, field.name))
                for field in dataclasses.fields(part)
                if field.default is not None or getattr(part, field.name) is not None
            }
            for name in _PARTS
            if (part := getattr(self, name)) is not None
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], base: "BoostConfig | None" = None) -> "BoostConfig":
        """Read what ``to_dict`` gives, and shorter forms of it.

        For a part, ``None`` or ``False`` turns it off, ``True`` takes its defaults, and a single
        value is that of its first field: ``{"accumulate": 8, "reduce": "adasum"}``.

        Args:
          data: by the names of the fields.
          base: what stands where ``data`` says nothing, field by field; a part whose ``kind`` is
            another starts from its defaults.

        Returns:
          A ``BoostConfig``.

        Raises:
          ValueError, TypeError: an unknown key, a value out of range, parts that do not go
            together.
        """
        base = BoostConfig() if base is None else base
        known(_WHO, data, (*_PARTS, "microbatches"), "keys", "JSON gives one.")
        changed: dict[str, Any] = {}
        for name, value in data.items():
            if name == "microbatches":
                changed[name] = value
            else:
                changed[name] = _read(name, value, getattr(base, name))
        return dataclasses.replace(base, **changed)


_PARTS: dict[str, type[Any]] = {
    "policy": Precision,
    "loss_scale": LossScale,
    "accumulate": Accumulate,
    "freeze": Freeze,
    "reduce": Reduce,
    "centralize": Centralize,
    "clip": Clip,
    "less_bn": LessBN,
    "dim_reduce": DimReduce,
}


def _read(name: str, value: Any, base: Any) -> Any:
    kind = _PARTS[name]
    fields = tuple(field.name for field in dataclasses.fields(kind))
    if value is None or value is False:
        # Replicas always agree somehow.
        return Reduce() if name == "reduce" else None
    if isinstance(value, kind):
        return value
    if value is True:
        value = {}
    if not isinstance(value, Mapping):
        value = {fields[0]: value}
    given = typing.cast("Mapping[str, Any]", value)
    known(_WHO, given, fields, f"keys of {name}", "JSON gives one.")
    other = base is not None and "kind" in given and given["kind"] != getattr(base, "kind", None)
    return kind(**given) if base is None or other else dataclasses.replace(base, **given)


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
