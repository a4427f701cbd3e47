# SPDX-License-Identifier: Apache-2.0
"""The state classes of the transformations, and the markers of state that differs per replica."""

from boostax._core.describe import Holds as Holds
from boostax._core.late import late as _late
from boostax._core.replicas import PerReplica as PerReplica
from boostax._core.replicas import enter_replica as enter_replica
from boostax._core.replicas import leave_replica as leave_replica
from boostax._core.replicas import reshard_state as reshard_state
from boostax._core.replicas import stack_replicas as stack_replicas
from boostax._core.replicas import state_specs as state_specs
from boostax._core.rule import GateState as GateState
from boostax.accumulate.carried import CarryState as CarryState
from boostax.accumulate.window import AccumulateState as AccumulateState
from boostax.freeze.scheduled import ScheduledFreezeState as ScheduledFreezeState
from boostax.model.average import AverageParamsState as AverageParamsState
from boostax.model.clip import AdaGCState as AdaGCState
from boostax.precision.group_scale import GroupLossScaleState as GroupLossScaleState
from boostax.precision.loss_scale import LossScaleState as LossScaleState
from boostax.precision.replicas import CheckReplicasState as CheckReplicasState
from boostax.precision.store import StoreState as StoreState
from boostax.precision.updates import CheckUpdatesState as CheckUpdatesState
from boostax.reduce.adasum import AdasumDeltaState as AdasumDeltaState
from boostax.reduce.adasum import AdasumState as AdasumState
from boostax.reduce.by_shape import ByShapeState as ByShapeState
from boostax.reduce.feedback import CompressedState as CompressedState
from boostax.reduce.local import LocalUpdatesState as LocalUpdatesState
from boostax.subspace.dim_reduce import DimReduceState as DimReduceState
from boostax.subspace.trajectory import TrajectoryState as TrajectoryState
from boostax.train.state import metrics as metrics

_late(__name__)
