# SPDX-License-Identifier: Apache-2.0
"""Averages of params, gradient centralization, clipping of gradients, LessBN."""

from typing import TYPE_CHECKING

from boostax._core.late import late as _late
from boostax.model.average import average_params as average_params
from boostax.model.average import averaged_params as averaged_params
from boostax.model.centralize import centralize_gradients as centralize_gradients
from boostax.model.clip import adagc as adagc
from boostax.model.clip import clip_by_global_norm as clip_by_global_norm

if TYPE_CHECKING:
    from boostax.model.less_bn import LessBNReport as LessBNReport
    from boostax.model.normalized_dense import NormalizedDense as NormalizedDense

# NormalizedDense needs Flax, and importing the report imports many modules.
_LATE = {
    "LessBNReport": "boostax.model.less_bn",
    "NormalizedDense": "boostax.model.normalized_dense",
}

_late(__name__, _LATE)
