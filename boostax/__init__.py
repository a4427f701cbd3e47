"""boostax: cheaper, steadier training as pure gradient transformations for JAX and Optax."""

from boostax._core.axes import local_params as local_params
from boostax._core.replicas import PerReplica as PerReplica
from boostax._core.replicas import Sharded as Sharded
from boostax._core.replicas import enter_replica as enter_replica
from boostax._core.replicas import leave_replica as leave_replica
from boostax._core.replicas import reshard_state as reshard_state
from boostax._core.replicas import stack_replicas as stack_replicas
from boostax._core.replicas import state_specs as state_specs
from boostax.accumulate.aux import Aux as Aux
from boostax.accumulate.microbatch import microbatch as microbatch
from boostax.accumulate.window import AccumulateState as AccumulateState
from boostax.accumulate.window import accumulate as accumulate
from boostax.accumulate.window import flush as flush
from boostax.accumulate.window import has_updated as has_updated
from boostax.precision.finite import all_finite as all_finite
from boostax.precision.loss_scale import LossScaleState as LossScaleState
from boostax.precision.loss_scale import dynamic_loss_scale as dynamic_loss_scale
from boostax.precision.loss_scale import loss_scale as loss_scale
from boostax.precision.loss_scale import scale_loss as scale_loss
from boostax.precision.loss_scale import static_loss_scale as static_loss_scale
from boostax.precision.policy import Policy as Policy
from boostax.precision.policy import policy as policy
from boostax.reduce.adasum import AdasumState as AdasumState
from boostax.reduce.adasum import adasum as adasum
from boostax.reduce.delta import AdasumDeltaState as AdasumDeltaState
from boostax.reduce.delta import adasum_delta as adasum_delta
from boostax.reduce.feedback import CompressedState as CompressedState
from boostax.reduce.low_rank import power_sgd_reduce as power_sgd_reduce
from boostax.reduce.mean import all_reduce as all_reduce
from boostax.reduce.quantized import int8_reduce as int8_reduce
from boostax.reduce.quantized import int16_reduce as int16_reduce
from boostax.reduce.quantized import sign_reduce as sign_reduce
from boostax.reduce.shard import ShardOptimizerState as ShardOptimizerState
from boostax.reduce.shard import shard_optimizer as shard_optimizer
from boostax.reduce.sparse import random_k_reduce as random_k_reduce
from boostax.reduce.sparse import threshold_reduce as threshold_reduce
from boostax.reduce.sparse import top_k_reduce as top_k_reduce
from boostax.train.apply import apply_gradients as apply_gradients
from boostax.train.apply import metrics as metrics
from boostax.train.oracle import value_and_grad as value_and_grad
from boostax.train.state import TrainState as TrainState
from boostax.train.step import TrainStep as TrainStep
from boostax.train.step import make_train_step as make_train_step

__version__ = "0.1.0.dev0"
