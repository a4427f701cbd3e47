# SPDX-License-Identifier: Apache-2.0
"""Drop-in forms of what Optax, Flax and jmp offer, on the transformations of boostax."""

from typing import TYPE_CHECKING

from boostax._core.late import late as _late
from boostax.compat.scales import DynamicLossScale as DynamicLossScale
from boostax.compat.scales import DynamicScale as DynamicScale
from boostax.compat.scales import DynamicScaleResult as DynamicScaleResult
from boostax.compat.scales import NoOpLossScale as NoOpLossScale
from boostax.compat.scales import StaticLossScale as StaticLossScale
from boostax.compat.wrappers import ApplyIfFiniteState as ApplyIfFiniteState
from boostax.compat.wrappers import MultiSteps as MultiSteps
from boostax.compat.wrappers import MultiStepsState as MultiStepsState
from boostax.compat.wrappers import MultiStepsSumState as MultiStepsSumState
from boostax.compat.wrappers import apply_if_finite as apply_if_finite
from boostax.compat.wrappers import selective_transform as selective_transform

if not TYPE_CHECKING:
    __getattr__, __dir__ = _late(__name__)
