"""The part that says how gradients of several replicas become one."""

import dataclasses
from typing import Any, Literal, NamedTuple

from boostax._core import axes, checks
from boostax._core.layouts import LayoutName
from boostax.autoboost.part import Layer, Part, Place, around, chosen, flag
from boostax.reduce.adasum import adasum
from boostax.reduce.delta import adasum_delta
from boostax.reduce.local import local_updates
from boostax.reduce.low_rank import power_sgd_reduce
from boostax.reduce.mean import all_reduce
from boostax.reduce.partial import partial_average
from boostax.reduce.quantized import int8_reduce, int16_reduce, sign_reduce
from boostax.reduce.sparse import random_k_reduce, threshold_reduce, top_k_reduce

# Those that keep the replicas equal, and those that let their params differ.
Equal = Literal[
    "mean",
    "adasum",
    "adasum-delta",
    "top-k",
    "threshold",
    "random-k",
    "int8",
    "int16",
    "sign",
    "power-sgd",
]
Kind = Literal[Equal, "partial", "local"]


class _Reduction(NamedTuple):
    """What is behind a kind.

    Attributes:
      factory: the transformation.
      fields: what it can be told.
      wire: what it calls the dtype on the wire.
      around: whether it stands around the optimizer, and not in front of it.
    """

    factory: Any
    fields: tuple[str, ...]
    wire: str = "wire_dtype"
    around: bool = False


_CODEC = ("error_feedback", "dense")
_SPARSE = ("block", "wire", *_CODEC)
_KINDS: dict[str, _Reduction] = {
    "mean": _Reduction(all_reduce, ("wire", "clip", "bucket_bytes"), "dtype"),
    "adasum": _Reduction(adasum, ("wire", "scope", "within", "bucket_bytes")),
    "adasum-delta": _Reduction(
        adasum_delta, ("wire", "scope", "within", "bucket_bytes"), around=True
    ),
    "top-k": _Reduction(top_k_reduce, ("density", "momentum", *_SPARSE), "value_dtype"),
    "threshold": _Reduction(
        threshold_reduce, ("threshold", "capacity", "relative", *_SPARSE), "value_dtype"
    ),
    "random-k": _Reduction(random_k_reduce, ("density", "seed", *_CODEC)),
    "int8": _Reduction(int8_reduce, ("block", "rounding", "seed", *_CODEC)),
    "int16": _Reduction(int16_reduce, _CODEC),
    "sign": _Reduction(sign_reduce, ("form", "two_shot", "block", *_CODEC)),
    "power-sgd": _Reduction(power_sgd_reduce, ("rank", "seed", "layout", *_CODEC)),
    "partial": _Reduction(partial_average, ("partitions",), around=True),
    "local": _Reduction(local_updates, ("every",), around=True),
}
_FIELDS = {kind: found.fields for kind, found in _KINDS.items()}
_NEEDED = {"partial": "partitions", "local": "every"}


@dataclasses.dataclass(frozen=True)
class Reduce(Part):
    """How replicas agree. Without an ``axis_name`` there are none, and it stands nowhere.

    A field belongs to the kinds that have it as an argument; ``None`` is their default.

    Attributes:
      kind: ``"mean"`` (``all_reduce``), ``"adasum"``, ``"adasum-delta"``, ``"top-k"``,
        ``"threshold"``, ``"random-k"``, ``"int8"``, ``"int16"``, ``"sign"``, ``"power-sgd"``,
        ``"partial"`` (``partial_average``) or ``"local"`` (``local_updates``).
      wire: dtype in which gradients, or values of a sparse one, travel.
      clip: bound on every entry of a local gradient.
      bucket_bytes: what travels together.
      scope: ``"leaf"`` or ``"tree"``.
      within: an axis, one of ``axis_name``, over which is averaged before AdaSum.
      density: share of the entries that travel.
      momentum: of the momentum correction.
      threshold: magnitude from which an entry travels.
      capacity: share of the entries that have a place.
      relative: a threshold in units of the root mean square.
      block: entries that are chosen, or scaled, together.
      rounding: ``"nearest"`` or ``"stochastic"``.
      form: ``"mean"`` or ``"majority"``.
      two_shot: see ``sign_reduce``.
      rank: of the approximation.
      seed: of what is drawn.
      layout: of the kernels: ``"torch"`` or ``"equinox"`` for outputs first.
      error_feedback: keep what was not sent.
      dense: ``"vectors"`` sends norms and biases whole.
      partitions: of ``"partial"``, which needs it: one of so many is averaged at each step.
      every: of ``"local"``, which needs it: steps from one meeting to the next.
    """

    kind: Kind = "mean"
    wire: str | None = None
    clip: float | None = None
    bucket_bytes: int | None = None
    scope: Literal["leaf", "tree"] | None = None
    within: str | None = None
    density: float | None = None
    momentum: float | None = None
    threshold: float | None = None
    capacity: float | None = None
    relative: bool | None = None
    block: int | None = None
    rounding: Literal["nearest", "stochastic"] | None = None
    form: Literal["mean", "majority"] | None = None
    two_shot: bool | None = None
    rank: int | None = None
    seed: int | None = None
    layout: LayoutName | None = None
    error_feedback: bool | None = None
    dense: Literal["vectors"] | None = None
    partitions: int | None = None
    every: int | None = None

    @property
    def keeps_own_params(self) -> bool:
        """Whether params differ between replicas."""
        return self.kind in ("partial", "local")

    def check(self) -> None:
        """As the factory does."""
        for name in ("relative", "two_shot", "error_feedback"):
            if getattr(self, name) is not None:
                flag(name, getattr(self, name))
        if self.dense not in (None, "vectors"):
            hint = "Leave it out to treat all leaves alike."
            raise ValueError(checks.message("", "dense", "'vectors'", self.dense, hint))
        others = () if self.within is None else (self.within,)
        self.layer(Place(("axis", *others), None))

    def layer(self, place: Place) -> Layer:
        """First behind the gates; or around the optimizer."""
        given = chosen(self, _FIELDS, _NEEDED)
        found = _KINDS[self.kind]
        names = axes.canonical("Reduce", place.axis_name)
        if not names:
            return None
        options = {found.wire if name == "wire" else name: x for name, x in given.items()}
        if self.dense is not None:
            options["dense"] = vectors
        axis_name: Any = place.axis_name
        if self.within is not None:
            axis_name = tuple(name for name in names if name != self.within)
            if len(axis_name) != len(names) - 1 or not axis_name:
                allowed = f"one of several axes, {names}"
                hint = "It is the axis of the fast links."
                raise ValueError(checks.message("Reduce", "within", allowed, self.within, hint))
        if found.around:
            return around(found.factory, axis_name=axis_name, **options)
        return found.factory(axis_name, **options)

    @property
    def renamed(self) -> dict[str, str]:
        """The argument that ``wire`` becomes."""
        return {name: "wire" for kind, (_, _, name, _) in _KINDS.items() if kind == self.kind}


def vectors(path: str, leaf: Any) -> bool:
    """Norms and biases: few bytes, and thinned out they cost more than they save."""
    del path
    return leaf.ndim < 2
