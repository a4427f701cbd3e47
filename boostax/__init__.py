# SPDX-License-Identifier: Apache-2.0
"""boostax: cheaper, steadier training as pure gradient transformations for JAX and Optax.

The most used functions are in ``boostax``; the others are in ``boostax.reduce``, ``freeze``,
``precision``, ``subspace``, ``model``, ``train``, ``states``, ``auditing``, ``explaining``,
``config`` and ``compat``.
"""

from typing import TYPE_CHECKING

from boostax import freeze as freeze
from boostax import model as model
from boostax import precision as precision
from boostax import reduce as reduce
from boostax import states as states
from boostax import subspace as subspace
from boostax import train as train
from boostax._core.describe import describe as describe
from boostax._core.gate import Pending as Pending
from boostax._core.late import late as _late
from boostax._core.replicas import PerReplica as PerReplica
from boostax._core.replicas import reshard_state as reshard_state
from boostax._core.rule import gate as gate
from boostax.accumulate.aux import Aux as Aux
from boostax.accumulate.carried import carry as carry
from boostax.accumulate.window import accumulate as accumulate
from boostax.accumulate.window import flush as flush
from boostax.freeze.scheduled import scheduled_freeze as scheduled_freeze
from boostax.freeze.schedules import freeze_schedule as freeze_schedule
from boostax.model.centralize import centralize_gradients as centralize_gradients
from boostax.precision.loss_scale import dynamic_loss_scale as dynamic_loss_scale
from boostax.precision.loss_scale import skip_bad_steps as skip_bad_steps
from boostax.precision.loss_scale import static_loss_scale as static_loss_scale
from boostax.precision.policy import policy as policy
from boostax.reduce.adasum import adasum as adasum
from boostax.reduce.by_shape import by_shape as by_shape
from boostax.reduce.mean import all_reduce as all_reduce
from boostax.reduce.quantized import int8_reduce as int8_reduce
from boostax.reduce.sparse import top_k_reduce as top_k_reduce
from boostax.subspace.dim_reduce import dim_reduce as dim_reduce
from boostax.train.apply import apply_gradients as apply_gradients
from boostax.train.apply import on_mesh as on_mesh
from boostax.train.oracle import value_and_grad as value_and_grad
from boostax.train.state import metrics as metrics
from boostax.train.step import make_train_step as make_train_step

if TYPE_CHECKING:
    from boostax import auditing as auditing
    from boostax import checkpoint as checkpoint
    from boostax import compat as compat
    from boostax import config as config
    from boostax import explaining as explaining
    from boostax import nnx as nnx
    from boostax.auditing.audit import audit as audit
    from boostax.config.auto import auto as auto
    from boostax.config.migrate import migrate_state as migrate_state
    from boostax.explaining import explain as explain
    from boostax.model.less_bn import less_bn as less_bn

__version__ = "0.4.0.dev0"

# These names load on first use, because they import many modules.
_LATE = {
    **dict.fromkeys(("auditing", "config", "compat", "explaining"), ""),
    **dict.fromkeys(("auto", "migrate_state"), "boostax.config"),
    **{"audit": "boostax.auditing", "explain": "boostax.explaining"},
    "less_bn": "boostax.model.less_bn",
}
_late(__name__, _LATE, ("checkpoint", "nnx"))
