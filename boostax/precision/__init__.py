# SPDX-License-Identifier: Apache-2.0
"""Half precision: loss scales and their boundaries, policies, low-bit storage, and checks."""

from boostax._core.handshake import assume_scaled as assume_scaled
from boostax._core.late import late as _late
from boostax._core.norms import all_finite as all_finite
from boostax.precision.group_scale import check_boundaries as check_boundaries
from boostax.precision.group_scale import group_loss_scale as group_loss_scale
from boostax.precision.group_scale import group_scales as group_scales
from boostax.precision.group_scale import scale_boundary as scale_boundary
from boostax.precision.loss_scale import current_scale as current_scale
from boostax.precision.loss_scale import dynamic_loss_scale as dynamic_loss_scale
from boostax.precision.loss_scale import loss_scale as loss_scale
from boostax.precision.loss_scale import scale_loss as scale_loss
from boostax.precision.loss_scale import skip_bad_steps as skip_bad_steps
from boostax.precision.loss_scale import static_loss_scale as static_loss_scale
from boostax.precision.policy import Policy as Policy
from boostax.precision.policy import policy as policy
from boostax.precision.replicas import check_replicas as check_replicas
from boostax.precision.replicas import raise_if_diverged as raise_if_diverged
from boostax.precision.store import masters as masters
from boostax.precision.store import store as store
from boostax.precision.updates import check_updates as check_updates

_late(__name__)
