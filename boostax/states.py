# SPDX-License-Identifier: Apache-2.0
"""The state classes of the transformations, and the markers of state that differs per replica."""

import jax
import optax
from jax.sharding import PartitionSpec

from boostax._core import axes, checks, replicas
from boostax._core.describe import Holds as Holds
from boostax._core.late import late as _late
from boostax._core.replicas import PerReplica as PerReplica
from boostax._core.replicas import reshard_state as reshard_state
from boostax._core.replicas import specs_like as _specs_like
from boostax._core.replicas import stack_replicas as stack_replicas
from boostax._core.rule import GateState as GateState
from boostax._core.types import PyTree
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


def enter_replica(opt_state: PyTree) -> PyTree:
    """Remove the replica dimension (of size 1), at the beginning of a function in ``shard_map``.

    Raises:
      ValueError: the replica dimension has another size, because the state is for another number of
        replicas.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> boostax.states.enter_replica(boostax.PerReplica(jnp.zeros((1, 3)))).local.shape
      (3,)
    """
    replicas.require_replicas("enter_replica", opt_state, 1)
    local = replicas.is_per_replica
    return jax.tree.map(
        lambda x: jax.tree.map(lambda y: y[0], x) if local(x) else x, opt_state, is_leaf=local
    )


def leave_replica(opt_state: PyTree) -> PyTree:
    """Add the replica dimension (of size 1) again, at the end of a function in ``shard_map``.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> boostax.states.leave_replica(boostax.PerReplica(jnp.zeros(3))).local.shape
      (1, 3)
    """
    local = replicas.is_per_replica
    return jax.tree.map(
        lambda x: jax.tree.map(lambda y: y[None], x) if local(x) else x, opt_state, is_leaf=local
    )


@checks.arguments
def state_specs(
    tx: optax.GradientTransformation,
    params: PyTree,
    *,
    axis_name: axes.AxisName | None = None,
    param_specs: PyTree | None = None,
    replicas: int | None = None,
    shard_optimizer: bool = False,
) -> PyTree:
    """Return partition specs for an optimizer state, for ``shard_map`` or ``NamedSharding``.

    A state leaf belongs to a param if the leaf's path ends with the param's path, and the shapes
    are equal: ``.inner_state[0].mu['dense']['kernel']`` belongs to ``params['dense']['kernel']``.
    The leaf may have one more leading dimension, as snapshots and the components of a basis have.
    The leaf gets the param's spec, and all leaves without a param are replicated. Inside a
    ``PerReplica``, each spec begins with the replica axis. Matching by paths also works through
    ``optax.masked``, ``partition`` and ``inject_hyperparams``, which change the structure of the
    state.

    Args:
      tx: the transformation whose ``init`` makes the state.
      params: arrays or ``jax.ShapeDtypeStruct``.
      axis_name: the replica axis, or a tuple of axes. With ``None``, the step that runs the call
        (``make_train_step``, ``on_mesh``) supplies its own axis.
      param_specs: a tree with the structure of ``params`` and a ``PartitionSpec`` for each leaf;
        ``None`` if the params are replicated.
      replicas: the size of the replica axis; required with ``shard_optimizer``.
      shard_optimizer: whether to shard over the replicas every state leaf that has a param's shape
        and is equal on all replicas, as ``make_train_step(shard_optimizer=True)`` does.

    Returns:
      A tree of ``PartitionSpec`` with the structure of ``tx.init(params)``. Cost: an abstract
      ``init``, which makes no arrays.

    Raises:
      ValueError: ``param_specs`` and the params differ in the number of leaves, ``replicas`` is
        missing, or ``axis_name`` is missing and no step runs the call.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.accumulate(optax.sgd(0.1), every=4, axis_name="data")
      >>> specs = boostax.states.state_specs(tx, {"w": jnp.zeros(3)}, axis_name="data")
      >>> specs.window.local.grads["w"]
      P('data',)
    """
    who = "state_specs"
    names = axes.named_or_bound(who, axis_name)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    specs = jax.tree.leaves([PartitionSpec()] * len(leaves) if param_specs is None else param_specs)
    allowed = f"a tree with one PartitionSpec for each of the {len(leaves)} params"
    hint = "Use PartitionSpec() for a replicated param, not None."
    checks.require(len(specs) == len(leaves), who, "param_specs", len(specs), allowed, hint)
    allowed = "the size of the replica axis if shard_optimizer=True"
    is_set = replicas is not None or not shard_optimizer
    checks.require(is_set, who, "replicas", replicas, allowed, "Pass replicas=mesh.shape['data'].")
    owners = {path: (x.shape, spec) for (path, x), spec in zip(leaves, specs, strict=True)}
    state = jax.eval_shape(tx.init, params)
    return _specs_like(owners, state, names, (replicas or 0) * shard_optimizer)
