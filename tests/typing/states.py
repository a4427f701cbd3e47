# pyright: reportUnnecessaryTypeIgnoreComment=true
"""What states answer, as a strict type checker sees it; nothing here is run."""

from typing import Any, assert_type

import jax

from boostax import states
from boostax._core import protocols as asks
from boostax._core import trees


def misspelt(opt_state: Any) -> None:
    for window in trees.telling(opt_state, asks.Window):
        assert_type(window.is_open(), jax.Array)
        window.is_opened()  # pyright: ignore[reportAttributeAccessIssue]


def gates(
    scaler: states.LossScaleState, own: states.GateState
) -> tuple[list[asks.Gate], asks.Scaler]:
    return [scaler, own], scaler


def parts(
    window: states.AccumulateState, matrices: states.ByShapeState, delta: states.AdasumDeltaState
) -> tuple[asks.Window, asks.HasSummedParts, asks.HasDistributedItems, asks.HasServerParts]:
    return window, window, matrices, delta


def params(
    own: states.LocalUpdatesState, average: states.AverageParamsState, stored: states.StoreState
) -> tuple[asks.OwnsParams, asks.HasMetrics, asks.NeedsAllParams, asks.KeepsMasters]:
    return own, own, average, stored


def variant(freeze: states.ScheduledFreezeState) -> asks.ChoosesVariant:
    return freeze
