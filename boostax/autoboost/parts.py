"""The parts of a configuration: a frozen dataclass for each technique but the reductions."""

import dataclasses
from typing import Any, Literal

import optax

from boostax._core import checks
from boostax._core.layouts import LayoutName
from boostax.accumulate.window import accumulate
from boostax.autoboost.part import (
    Groups,
    Layer,
    Part,
    Place,
    Wrap,
    are_texts,
    around,
    check_groups,
    chosen,
    flag,
    labels,
    word,
)
from boostax.freeze.scheduled import scheduled_freeze
from boostax.freeze.schedules import freeze_schedule
from boostax.model.centralize import centralize_gradients
from boostax.precision.group_scale import group_loss_scale
from boostax.precision.loss_scale import dynamic_loss_scale, static_loss_scale
from boostax.precision.policy import Policy, policy
from boostax.subspace.quasi_newton import RULES, SubspaceRule
from boostax.subspace.trajectory import record_trajectory

PyTree = Any
_CYCLE = 65536


@dataclasses.dataclass(frozen=True)
class Precision(Part):
    """In which dtypes the step works: ``boostax.policy(spec, dtype=dtype)``.

    Attributes:
      spec: ``"O0"`` to ``"O3"``, or ``"params=float32,compute=bfloat16,output=float32"``.
      dtype: the low dtype of the levels.
    """

    spec: str = "O2"
    dtype: str = "float16"

    def check(self) -> None:
        """As ``boostax.policy`` does."""
        self.policy()

    def policy(self) -> Policy:
        """The policy."""
        return policy(self.spec, dtype=self.dtype)


@dataclasses.dataclass(frozen=True)
class Clip(Part):
    """``optax.clip_by_global_norm``, behind the reduction.

    Attributes:
      max_norm: the largest norm that passes, > 0.
    """

    max_norm: float = 1.0

    def layer(self, place: Place) -> Layer:
        """In front of the optimizer."""
        hint = "1.0 is usual."
        checks.number("", "max_norm", self.max_norm, "greater than 0", lambda x: x > 0, hint)
        return optax.clip_by_global_norm(self.max_norm)


@dataclasses.dataclass(frozen=True)
class Centralize(Part):
    """``boostax.centralize_gradients``, behind the reduction and before clipping.

    Attributes:
      multiple_of: only kernels whose input channels divide by it; MindSpore's is 16.
      layout: whose kernels they are, such as ``"torch"``; ``None`` for Flax's and Equinox's.
    """

    multiple_of: int | None = None
    layout: LayoutName | None = None

    def layer(self, place: Place) -> Layer:
        """In front of clipping."""
        return centralize_gradients(multiple_of=self.multiple_of, layout=self.layout)


@dataclasses.dataclass(frozen=True)
class Accumulate(Part):
    """``boostax.accumulate``: one optimizer step for so many calls.

    Attributes:
      every: calls in a window.
      normalize: ``"mean"``, ``"sum"`` or ``"weight"``.
      accumulator_dtype: of the sums.
      drop: what a call that overflows takes with it: itself (``"micro-batch"``: the loss scaler
        stands around the window) or all of its ``"window"`` (inside; cheaper).
    """

    every: int = 1
    normalize: Literal["mean", "sum", "weight"] = "mean"
    accumulator_dtype: str = "float32"
    drop: Literal["micro-batch", "window"] = "micro-batch"

    def layer(self, place: Place) -> Layer:
        """Around the reduction and all behind it."""
        word(self.drop, ("micro-batch", "window"), "drop")
        return around(
            accumulate,
            every=self.every,
            normalize=self.normalize,
            accumulator_dtype=self.accumulator_dtype,
            axis_name=place.axis_name,
        )


_TABLE = ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
_SCALES = {
    "dynamic": (*_TABLE, "growth_interval", "hysteresis"),
    "static": ("scale", "skip_nonfinite"),
    "group": (*_TABLE, "rule", "groups", "order", "level"),
}
_NEEDED = {"static": "scale", "group": "groups"}


@dataclasses.dataclass(frozen=True)
class LossScale(Part):
    """``dynamic_loss_scale``, ``static_loss_scale`` or ``group_loss_scale``; ``None`` is theirs.

    Attributes:
      kind: ``"dynamic"``, ``"static"`` or ``"group"``.
      scale: of ``"static"``, which needs it.
      skip_nonfinite: of ``"static"``.
      init_scale: of ``"dynamic"`` and ``"group"``, as are the next four.
      growth_factor: see there.
      backoff_factor: see there.
      min_scale: see there.
      max_scale: see there.
      growth_interval: of ``"dynamic"``.
      hysteresis: of ``"dynamic"``.
      rule: of ``"group"``: ``"trial"`` or ``"measure"``.
      groups: of ``"group"``, which needs it: as in ``Freeze``.
      order: of ``"group"``: as in ``Freeze``, as is ``level``.
      level: of ``"group"``.
    """

    kind: Literal["dynamic", "static", "group"] = "dynamic"
    scale: float | None = None
    skip_nonfinite: bool | None = None
    init_scale: float | None = None
    growth_factor: float | None = None
    backoff_factor: float | None = None
    min_scale: float | None = None
    max_scale: float | None = None
    growth_interval: int | None = None
    hysteresis: int | None = None
    rule: Literal["trial", "measure"] | None = None
    groups: Groups | None = None
    order: tuple[str, ...] | None = None
    level: int | None = None

    def check(self) -> None:
        """Labels do not matter for the other arguments."""
        options = chosen(self, _SCALES, _NEEDED)
        if "skip_nonfinite" in options:
            flag("skip_nonfinite", self.skip_nonfinite)
        if self.groups is not None:
            check_groups(self.groups)
        self._layer(options, "axis", {"any": 0})(optax.identity())

    def labels(self, params: PyTree) -> Any:
        """Of ``"group"``: the group of each leaf."""
        return labels("LossScale", self.groups, params, order=self.order, level=self.level)

    def layer(self, place: Place) -> Layer:
        """Around the window, or inside it."""
        options = chosen(self, _SCALES, _NEEDED)
        found = self.labels(place.params) if self.kind == "group" else None
        return self._layer(options, place.axis_name, found)

    def _layer(self, options: dict[str, Any], axis_name: Any, found: Any) -> Wrap:
        options = {k: v for k, v in options.items() if k not in ("groups", "order", "level")}
        factory: Any = dynamic_loss_scale
        if self.kind == "static":
            factory = static_loss_scale
        if self.kind == "group":
            factory, options = group_loss_scale, {"labels": found} | options
        return around(factory, axis_name=axis_name, **options)


@dataclasses.dataclass(frozen=True)
class Freeze(Part):
    """``boostax.scheduled_freeze``, outermost.

    Attributes:
      kind: of ``boostax.freeze_schedule``: ``"interval"``, ``"continuous"``, ``"progressive"`` or
        ``"ramp"``.
      frozen_fraction: share of the optimizer steps on which something is frozen.
      total_steps: optimizer steps of the run. ``None`` is 65536, for the first two kinds alone,
        which start anew at the end; the others freeze for good and have to know it.
      groups: so many groups of layers; or patterns of paths, an entry for each group.
      order: of a number of groups: path names in the order of the forward pass, such as
        ``boostax.forward_order`` finds.
      level: of a number of groups: leading path components that make a layer.
      seed: of the draws of ``"interval"``.
    """

    kind: Literal["interval", "continuous", "progressive", "ramp"] = "interval"
    frozen_fraction: float = 0.3
    total_steps: int | None = None
    groups: Groups = 4
    order: tuple[str, ...] | None = None
    level: int | None = None
    seed: int = 0

    def check(self) -> None:
        """What can be known without params."""
        check_groups(self.groups)
        self._schedule()

    def layer(self, place: Place) -> Layer:
        """Around everything."""
        found = labels("Freeze", self.groups, place.params, order=self.order, level=self.level)
        return around(
            scheduled_freeze, groups=found, schedule=self._schedule(), repeat=self._cyclic
        )

    @property
    def _cyclic(self) -> bool:
        return self.kind in ("interval", "continuous")

    def _schedule(self) -> Any:
        total = _CYCLE if self.total_steps is None and self._cyclic else self.total_steps
        word(self.kind, ("interval", "continuous", "progressive", "ramp"), "kind")
        if total is None:
            allowed = f"the optimizer steps of the run for {self.kind!r}"
            hint = "It freezes for good: without them nobody knows when."
            raise ValueError(checks.message("", "total_steps", allowed, None, hint))
        return freeze_schedule(
            self.kind, total_steps=total, frozen_fraction=self.frozen_fraction, seed=self.seed
        )


@dataclasses.dataclass(frozen=True)
class LessBN(Part):
    """``boostax.less_bn``, on the model.

    Attributes:
      normalized_head: replace the last Dense by one of cosines.
      multiplier: what its scalar starts from.
      remove: patterns of the norms that go; ``None`` goes by the flow of the data.
    """

    normalized_head: bool = True
    multiplier: float = 1.0
    remove: tuple[str, ...] | None = None

    def check(self) -> None:
        """What can be known without a model."""
        flag("normalized_head", self.normalized_head)
        hint = "It starts the multiplier of the head."
        checks.number("", "multiplier", self.multiplier, "positive", lambda m: m > 0, hint)
        if self.remove is not None and not are_texts(self.remove):
            hint = "Such as ['block_*/norm_1']."
            raise TypeError(checks.message("", "remove", "a list of patterns", self.remove, hint))


@dataclasses.dataclass(frozen=True)
class DimReduce(Part):
    """``boostax.dim_reduce``, after the run; and the recorder of its snapshots, during it.

    Attributes:
      n_components: directions.
      every: optimizer steps from one snapshot to the next; ``None`` records none, and the basis
        comes from elsewhere. The last ``n_components + 1`` are kept.
      start: optimizer steps before the first one.
      rule: ``"boostax"``, ``"mindspore"`` or ``"p-bfgs"``.
      shrink: of the line search, in (0, 1); ``None`` is the rule's. MindSpore's ``rho``.
      slope: of the line search, in (0, 1); ``None`` is the rule's. MindSpore's ``sigma``.
      residual_rate: learning rate of an ``optax.sgd`` for what lies outside the span; ``None`` for
        none. MindSpore's ``alpha``.
      residual_momentum: of it. MindSpore's ``gamma``.
    """

    n_components: int = 20
    every: int | None = 10
    start: int = 0
    rule: Literal["boostax", "mindspore", "p-bfgs"] = "boostax"
    shrink: float | None = None
    slope: float | None = None
    residual_rate: float | None = None
    residual_momentum: float = 0.0

    def check(self) -> None:
        """What can be known without a basis."""
        hint = "It counts directions; 20 are usual."
        checks.positive_int("", "n_components", self.n_components, hint)
        word(self.rule, tuple(RULES), "rule")
        for name in ("shrink", "slope", "residual_rate"):
            value = getattr(self, name)
            if value is not None:
                over = (lambda x: 0 < x) if name == "residual_rate" else (lambda x: 0 < x < 1)
                allowed = "greater than 0" if name == "residual_rate" else "in (0, 1)"
                checks.number("", name, value, allowed, over, "Leave it out for the default.")
        value, hint = self.residual_momentum, "0.9 is usual."
        checks.number("", "residual_momentum", value, "in [0, 1)", lambda x: 0 <= x < 1, hint)
        self.layer(Place(None, None))

    def layer(self, place: Place) -> Layer:
        """The recorder, in front of the reduction."""
        del place
        if self.every is None:
            return None
        return record_trajectory(self.n_components + 1, every=self.every, start=self.start)

    def subspace_rule(self) -> SubspaceRule:
        """The rule, with the line search that is asked for."""
        given = {"shrink": self.shrink, "slope": self.slope}
        given = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(RULES[self.rule], **given)

    def residual(self) -> optax.GradientTransformation | None:
        """The optimizer of what lies outside the span, or none."""
        if self.residual_rate is None:
            return None
        return optax.sgd(self.residual_rate, self.residual_momentum or None)
