"""What each class of state holds, as far as a move to another chain depends on it: one table.

A class that is not here keeps what Optax's optimizers keep: moments, each of which belongs to a
param, and counts.
"""

from typing import Any, NamedTuple

import optax

from boostax.accumulate.window import AccumulateState
from boostax.freeze.scheduled import ScheduledFreezeState
from boostax.precision.group_state import GroupLossScaleState
from boostax.precision.loss_scale import LossScaleState
from boostax.reduce.feedback import CompressedState
from boostax.subspace.coordinates import SubspaceParamsState
from boostax.subspace.dim_reduce import DimReduceState
from boostax.subspace.trajectory import TrajectoryState


class Holds(NamedTuple):
    """What the fields of a state are.

    Attributes:
      bound: those that mean something together alone, kept if all of them fit, or none; ``()`` if
        each stands for itself. ``None`` for moments and counts.
      opened: the count of micro-steps in an open window.
      sums: what is proportional to the gradients that the state sees, by the beginning of a path.
      scale: the loss scale, or the table of them.
      basis: directions, which were an argument of the factory as scales are.
      params: whether its arrays are of params, not gradients.
    """

    bound: tuple[str, ...] | None = None
    opened: str = ""
    sums: tuple[str, ...] = ()
    scale: str = ""
    basis: str = ""
    params: bool = False


HOLDS: dict[type | None, Holds] = {
    # Arrays in no NamedTuple at all.
    None: Holds(params=True),
    AccumulateState: Holds(("micro_step", "window"), "micro_step", ("window/grads",)),
    optax.MultiStepsState: Holds(("mini_step", "acc_grads"), "mini_step", ("acc_grads",)),
    LossScaleState: Holds(scale="scale"),
    GroupLossScaleState: Holds(
        (
            *("table", "measured", "largest", "nonfinite", "underflow", "entries"),
            *("until_count", "overflow_group", "backoffs", "floor_hits"),
        ),
        scale="table",
    ),
    CompressedState: Holds((), sums=("residual", "velocity")),
    optax.TraceState: Holds(sums=("trace",)),
    ScheduledFreezeState: Holds(("depth", "next_depth", "schedule_state")),
    TrajectoryState: Holds(("recorded", "snapshots", "gram"), params=True),
    DimReduceState: Holds(("basis", "explained", "memory", "to_mean"), basis="basis"),
    SubspaceParamsState: Holds(("basis", "coordinates"), basis="basis"),
    optax.contrib.ScheduleFreeState: Holds(params=True),
}


class Equivalent(NamedTuple):
    """The state that does the work of another library's.

    Attributes:
      cls: its class.
      fields: where each field of the other's goes.
    """

    cls: type
    fields: dict[str, str]


_WINDOW = {
    "acc_grads": "window/grads",
    "mini_step": "micro_step",
    "gradient_step": "optimizer_steps",
}
# By the name of the class, so that neither Flax nor jmp is imported.
EQUIVALENTS: dict[str, Equivalent] = {
    "DynamicScale": Equivalent(LossScaleState, {"scale": "scale", "fin_steps": "clean_steps"}),
    "DynamicLossScale": Equivalent(
        LossScaleState, {"loss_scale": "scale", "counter": "clean_steps"}
    ),
    "StaticLossScale": Equivalent(LossScaleState, {"loss_scale": "scale"}),
    "ApplyIfFiniteState": Equivalent(
        LossScaleState,
        {
            "notfinite_count": "skipped_in_a_row",
            "total_notfinite": "skipped_steps",
            "last_finite": "last_finite",
        },
    ),
    "MultiStepsState": Equivalent(AccumulateState, _WINDOW),
    "AccumulateState": Equivalent(
        optax.MultiStepsState, {ours: theirs for theirs, ours in _WINDOW.items()}
    ),
}


def holds(cls: Any) -> Holds:
    """What the fields of a class are."""
    return HOLDS.get(cls, Holds())
