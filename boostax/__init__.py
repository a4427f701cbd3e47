"""boostax: cheaper, steadier training as pure gradient transformations for JAX and Optax."""

import importlib
from typing import TYPE_CHECKING

from boostax._core.axes import local_params as local_params
from boostax._core.describe import describe as describe
from boostax._core.finite import all_finite as all_finite
from boostax._core.gate import GateState as GateState
from boostax._core.gate import Pending as Pending
from boostax._core.gate import gate as gate
from boostax._core.groups import prefix_groups as prefix_groups
from boostax._core.handshake import assume_scaled as assume_scaled
from boostax._core.replicas import PerReplica as PerReplica
from boostax._core.replicas import enter_replica as enter_replica
from boostax._core.replicas import leave_replica as leave_replica
from boostax._core.replicas import reshard_state as reshard_state
from boostax._core.replicas import stack_replicas as stack_replicas
from boostax._core.replicas import state_specs as state_specs
from boostax.accumulate.aux import Aux as Aux
from boostax.accumulate.carried import CarryState as CarryState
from boostax.accumulate.carried import carry as carry
from boostax.accumulate.microbatch import microbatch as microbatch
from boostax.accumulate.window import AccumulateState as AccumulateState
from boostax.accumulate.window import accumulate as accumulate
from boostax.accumulate.window import flush as flush
from boostax.accumulate.window import has_updated as has_updated
from boostax.freeze.order import forward_order as forward_order
from boostax.freeze.plateau import GroupSignalState as GroupSignalState
from boostax.freeze.plateau import freeze_on_plateau as freeze_on_plateau
from boostax.freeze.plateau import group_signal as group_signal
from boostax.freeze.scheduled import ScheduledFreeze as ScheduledFreeze
from boostax.freeze.scheduled import ScheduledFreezeState as ScheduledFreezeState
from boostax.freeze.scheduled import active_groups as active_groups
from boostax.freeze.scheduled import scheduled_freeze as scheduled_freeze
from boostax.freeze.schedules import FreezeSchedule as FreezeSchedule
from boostax.freeze.schedules import freeze_schedule as freeze_schedule
from boostax.model.centralize import centralize_gradients as centralize_gradients
from boostax.model.clip import clip_by_global_norm as clip_by_global_norm
from boostax.precision.boundary import check_boundaries as check_boundaries
from boostax.precision.boundary import scale_boundary as scale_boundary
from boostax.precision.crossings import group_boundaries as group_boundaries
from boostax.precision.group_scale import group_loss_scale as group_loss_scale
from boostax.precision.group_state import GroupLossScaleState as GroupLossScaleState
from boostax.precision.group_state import group_scales as group_scales
from boostax.precision.loss_scale import LossScaleState as LossScaleState
from boostax.precision.loss_scale import dynamic_loss_scale as dynamic_loss_scale
from boostax.precision.loss_scale import loss_scale as loss_scale
from boostax.precision.loss_scale import scale_loss as scale_loss
from boostax.precision.loss_scale import static_loss_scale as static_loss_scale
from boostax.precision.lost_updates import LostUpdatesState as LostUpdatesState
from boostax.precision.lost_updates import count_lost_updates as count_lost_updates
from boostax.precision.policy import Policy as Policy
from boostax.precision.policy import policy as policy
from boostax.precision.updates import CheckUpdatesState as CheckUpdatesState
from boostax.precision.updates import check_updates as check_updates
from boostax.reduce.adasum import AdasumState as AdasumState
from boostax.reduce.adasum import adasum as adasum
from boostax.reduce.delta import AdasumDeltaState as AdasumDeltaState
from boostax.reduce.delta import adasum_delta as adasum_delta
from boostax.reduce.feedback import CompressedState as CompressedState
from boostax.reduce.local import LocalUpdatesState as LocalUpdatesState
from boostax.reduce.local import local_updates as local_updates
from boostax.reduce.low_rank import power_sgd_reduce as power_sgd_reduce
from boostax.reduce.mean import all_reduce as all_reduce
from boostax.reduce.partial import PartialAverageState as PartialAverageState
from boostax.reduce.partial import partial_average as partial_average
from boostax.reduce.quantized import int8_reduce as int8_reduce
from boostax.reduce.quantized import int16_reduce as int16_reduce
from boostax.reduce.quantized import sign_reduce as sign_reduce
from boostax.reduce.sparse import random_k_reduce as random_k_reduce
from boostax.reduce.sparse import threshold_reduce as threshold_reduce
from boostax.reduce.sparse import top_k_reduce as top_k_reduce
from boostax.subspace.basis import Basis as Basis
from boostax.subspace.basis import pca_basis as pca_basis
from boostax.subspace.components import Int8Components as Int8Components
from boostax.subspace.components import random_basis as random_basis
from boostax.subspace.components import replace_basis as replace_basis
from boostax.subspace.coordinates import SubspaceParamsState as SubspaceParamsState
from boostax.subspace.coordinates import subspace_params as subspace_params
from boostax.subspace.dim_reduce import DimReduceState as DimReduceState
from boostax.subspace.dim_reduce import dim_reduce as dim_reduce
from boostax.subspace.quasi_newton import SubspaceRule as SubspaceRule
from boostax.subspace.trajectory import TrajectoryState as TrajectoryState
from boostax.subspace.trajectory import record_trajectory as record_trajectory
from boostax.subspace.trajectory import trajectory as trajectory
from boostax.subspace.trajectory import trajectory_basis as trajectory_basis
from boostax.train.apply import apply_gradients as apply_gradients
from boostax.train.apply import metrics as metrics
from boostax.train.compiled import TrainStep as TrainStep
from boostax.train.model_state import reestimate_model_state as reestimate_model_state
from boostax.train.on_mesh import on_mesh as on_mesh
from boostax.train.oracle import value_and_grad as value_and_grad
from boostax.train.state import TrainState as TrainState
from boostax.train.step import make_train_step as make_train_step

if TYPE_CHECKING:
    from boostax.autoboost.auto import auto as auto
    from boostax.autoboost.build import Boost as Boost
    from boostax.autoboost.config import BoostConfig as BoostConfig
    from boostax.autoboost.measure import measure as measure
    from boostax.autoboost.measurement import Measurement as Measurement
    from boostax.autoboost.measurement import Trial as Trial
    from boostax.autoboost.migrate import MigrationReport as MigrationReport
    from boostax.autoboost.migrate import migrate_state as migrate_state
    from boostax.chain.orders import Finding as Finding
    from boostax.inspect.audit import Audit as Audit
    from boostax.inspect.audit import audit as audit
    from boostax.inspect.break_even import BreakEven as BreakEven
    from boostax.inspect.break_even import break_even as break_even
    from boostax.inspect.calls import CallCost as CallCost
    from boostax.inspect.collectives import CompiledCollective as CompiledCollective
    from boostax.inspect.costs import PartCost as PartCost
    from boostax.inspect.explain import Explanation as Explanation
    from boostax.inspect.explain import explain as explain
    from boostax.inspect.targets import target_devices as target_devices
    from boostax.model.less_bn import LessBNReport as LessBNReport
    from boostax.model.less_bn import less_bn as less_bn
    from boostax.model.normalized_dense import NormalizedDense as NormalizedDense
    from boostax.subspace.host import HostTrajectory as HostTrajectory
    from boostax.subspace.host import checkpoint_snapshots as checkpoint_snapshots

__version__ = "0.1.0"

# Loaded when first asked for: they are many modules, and NormalizedDense needs Flax.
_LATE = {
    "Audit": "boostax.inspect.audit",
    "Boost": "boostax.autoboost.build",
    "BreakEven": "boostax.inspect.break_even",
    "BoostConfig": "boostax.autoboost.config",
    "CompiledCollective": "boostax.inspect.collectives",
    "CallCost": "boostax.inspect.calls",
    "Explanation": "boostax.inspect.explain",
    "Finding": "boostax.chain.orders",
    "HostTrajectory": "boostax.subspace.host",
    "LessBNReport": "boostax.model.less_bn",
    "Measurement": "boostax.autoboost.measurement",
    "MigrationReport": "boostax.autoboost.migrate",
    "NormalizedDense": "boostax.model.normalized_dense",
    "PartCost": "boostax.inspect.costs",
    "Trial": "boostax.autoboost.measurement",
    "audit": "boostax.inspect.audit",
    "auto": "boostax.autoboost.auto",
    "break_even": "boostax.inspect.break_even",
    "checkpoint_snapshots": "boostax.subspace.host",
    "explain": "boostax.inspect.explain",
    "less_bn": "boostax.model.less_bn",
    "measure": "boostax.autoboost.measure",
    "migrate_state": "boostax.autoboost.migrate",
    "target_devices": "boostax.inspect.targets",
}


if not TYPE_CHECKING:  # where any name would pass for one

    def __getattr__(name: str) -> object:
        """The names that are loaded late."""
        if name not in _LATE:
            raise AttributeError(f"module 'boostax' has no attribute {name!r}")
        globals()[name] = value = getattr(importlib.import_module(_LATE[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
