# SPDX-License-Identifier: Apache-2.0
"""Drop-in forms of Optax's wrappers, built on the transformations of boostax."""

from boostax._core.late import late as _late
from boostax.compat.wrappers import ApplyIfFiniteState as ApplyIfFiniteState
from boostax.compat.wrappers import MultiSteps as MultiSteps
from boostax.compat.wrappers import MultiStepsState as MultiStepsState
from boostax.compat.wrappers import apply_if_finite as apply_if_finite

_late(__name__)
