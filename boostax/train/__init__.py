# SPDX-License-Identifier: Apache-2.0
"""Train steps: the gradient function, its application, the compiled step and its state."""

from boostax._core.axes import local_params as local_params
from boostax._core.late import late as _late
from boostax.accumulate.aux import Aux as Aux
from boostax.accumulate.microbatch import microbatch as microbatch
from boostax.accumulate.window import flush as flush
from boostax.accumulate.window import has_updated as has_updated
from boostax.layers import *  # noqa: F403, the one import of a package that can be removed
from boostax.train.apply import apply_gradients as apply_gradients
from boostax.train.apply import on_mesh as on_mesh
from boostax.train.gather import gather_params as gather_params
from boostax.train.oracle import value_and_grad as value_and_grad
from boostax.train.state import TrainState as TrainState
from boostax.train.state import metrics as metrics
from boostax.train.step import TrainStep as TrainStep
from boostax.train.step import make_train_step as make_train_step

_late(__name__)
