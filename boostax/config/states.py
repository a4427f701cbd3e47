# SPDX-License-Identifier: Apache-2.0
"""What states of other libraries hold, and which of ours do the work of theirs: tables.

What ours hold stands with each: ``holds`` of its class.
"""

from typing import Any, NamedTuple

import optax

from boostax._core.describe import Holds
from boostax.accumulate.window import AccumulateState
from boostax.precision.loss_scale import LossScaleState

HOLDS: dict[type | None, Holds] = {
    # Arrays in no NamedTuple at all.
    None: Holds(params=True),
    optax.MultiStepsState: Holds(("mini_step", "acc_grads"), "mini_step", ("acc_grads",)),
    optax.TraceState: Holds(sums=("trace",)),
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


# By the name of the class, so that neither Flax nor jmp is imported.
_SCALERS = {
    "DynamicScale": {"scale": "scale", "fin_steps": "clean_steps"},
    "DynamicLossScale": {"loss_scale": "scale", "counter": "clean_steps"},
    "StaticLossScale": {"loss_scale": "scale"},
    "ApplyIfFiniteState": {
        "notfinite_count": "skipped_in_a_row",
        "total_notfinite": "skipped_steps",
        "last_finite": "last_finite",
    },
}
_WINDOW = {
    "acc_grads": "window/grads",
    "mini_step": "micro_step",
    "gradient_step": "optimizer_steps",
}
EQUIVALENTS = {name: Equivalent(LossScaleState, fields) for name, fields in _SCALERS.items()} | {
    "MultiStepsState": Equivalent(AccumulateState, _WINDOW),
    "AccumulateState": Equivalent(
        optax.MultiStepsState, {ours: theirs for theirs, ours in _WINDOW.items()}
    ),
}


def holds(cls: Any) -> Holds:
    """What the fields of a class are: what it says itself, or what is known of Optax's."""
    return getattr(cls, "holds", HOLDS.get(cls, Holds()))
