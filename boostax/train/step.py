# SPDX-License-Identifier: Apache-2.0
"""The train step: gradient function and optimizer in one jitted function."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from boostax._core import axes, checks
from boostax._core.describe import once
from boostax._core.types import PyTree
from boostax.accumulate.aux import as_metrics
from boostax.order import check
from boostax.precision.policy import Level, Policy, as_policy
from boostax.train.compiled import FreezeDriver, TrainStep
from boostax.train.gather import Gather
from boostax.train.oracle import Backward, planned, value_and_grad


@checks.arguments
def make_train_step(
    loss_fn: Callable[..., PyTree],
    tx: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    axis_name: axes.AxisName | None = None,
    policy: Policy | Level | None = None,
    microbatches: int = 1,
    has_aux: bool = False,
    dtype: jax.typing.DTypeLike = jnp.float32,
    param_specs: PyTree | None = None,
    freeze_driver: FreezeDriver = "host",
    shard_optimizer: bool = False,
    gather: Gather | None = None,
    layers: Backward | str | None = None,
) -> TrainStep:
    """Make a jitted, donating train step over one device or the axes of a mesh.

    A step is ``boostax.value_and_grad`` followed by ``boostax.apply_gradients``, with the batch
    split over ``axis_name``. Put a reduction, ``all_reduce()`` or ``adasum()``, first in the
    innermost chain. The reduction, and the common decision of gates around the reduction, use the
    step's axis, unless the reduction names another axis.

    Params are placed by ``param_specs``, or keep their placement. They may be replicated, or
    sharded over any axes of the mesh, including the axis of the batch (FSDP, HSDP, tensor
    parallel). On a mesh, the step is ``boostax.value_and_grad(mesh=)`` and ``boostax.on_mesh`` in
    one ``jit``. ``loss_fn`` receives the rows of one replica, and params that are gathered over the
    replica axes.

    Args:
      loss_fn: ``loss_fn(params, batch)``, with ``key=`` and ``model_state=`` if the state has a key
        and a model state. ``loss_fn`` also receives the keywords of a call,
        ``step(state, batch, beta=0.1)``, which are not split over the replicas.
      tx: the optimizer.
      mesh: device mesh; ``None`` for one device.
      axis_name: the axis, or axes, of the mesh over which the batch is split; by default the mesh's
        only axis.
      policy: precision policy for ``loss_fn``; its ``param_dtype`` is the dtype of the stored
        params.
      microbatches: micro-batches per replica and call; see ``boostax.train.microbatch``.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``. The aux is a ``boostax.Aux``, or a tree
        of scalars, which the step reports like ``Aux.metrics``. If the loss has several terms, the
        step reports each term, too.
      dtype: dtype of the gradient sum over micro-batches.
      param_specs: the shardings of the params, a tree with a ``PartitionSpec`` for each param.
        ``None`` keeps the placement of the params in ``step.init``.
      freeze_driver: how a step with ``scheduled_freeze`` is compiled. ``"host"`` compiles a program
        for each depth when the depth first occurs, and the host chooses the program. ``"switch"``
        compiles one program for all depths. This program
        also runs inside ``jax.jit`` or ``jax.lax.scan``.
        The program of ``"switch"`` has a copy of the optimizer's code for each depth, and a step
        runs one copy. At 2, 4 and 10 depths, the program has 1.5, 2.5 and 5.5 times the optimizer's
        operations. The program also needs one more temporary copy of the params on CPU and H100,
        and two more copies on TPU v5e.
      shard_optimizer: whether to shard the optimizer's state over the replicas (ZeRO, stage 1).
        Each leaf is sharded along its first unsharded dimension that the number of replicas
        divides. The state of any optimizer can be sharded, because the optimizer receives global
        arrays.
      gather: ``"bfloat16"`` or ``"int8"``: the format in which params that are sharded over
        ``axis_name`` are all-gathered. The shards stay exact; see ``boostax.train.gather_params``.
      layers: options for stacked layers that ``loss_fn`` scans with ``boostax.train.scan_layers``;
        see ``boostax.train.Layers``.

    Returns:
      A ``TrainStep``. Cost in addition to the transformations: one scalar all-reduce for the loss.
      Params that are sharded over ``axis_name`` are gathered once per call, in their own dtype or
      in ``gather``. With ``shard_optimizer``, the optimizer's state needs ``1/n`` of the memory,
      and changed params are gathered.

    Raises:
      ValueError, TypeError: an argument out of range, or an axis that is not in the mesh; a chain
        that is wrong in every run, such as a chain without a reduction over an axis (see
        ``boostax.explain``, whose other findings become warnings). At trace time, an array with
        dimensions in an aux that is not a ``boostax.Aux``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> loss = lambda w, x: jnp.mean((w - x) ** 2)
      >>> step = boostax.make_train_step(loss, boostax.dynamic_loss_scale(optax.sgd(0.25)))
      >>> state = step.init(jnp.float32(0.0))
      >>> state, metrics = step(state, jnp.ones(8))
      >>> float(state.params), float(metrics["loss"]), bool(metrics["applied"])
      (0.5, 1.0, True)
    """
    who = "make_train_step"
    checks.transformation(who, "tx", tx)
    names = axes.of_mesh(who, axis_name, mesh)
    if mesh is None:
        hint = "Pass mesh=, or omit the argument on one device."
        needy = {"axis_name": axis_name, "param_specs": param_specs, "gather": gather}
        for name, value in needy.items():
            checks.absent(who, name, value, "None without a mesh", hint)
        checks.absent(who, "shard_optimizer", shard_optimizer or None, "False without a mesh", hint)
    if gather is not None:
        checks.choice(who, "gather", gather, Gather, "None gathers params in their dtype.")
    hint = "'host' is the fastest driver and needs the least memory."
    checks.choice(who, "freeze_driver", freeze_driver, FreezeDriver, hint)
    hint = "The step splits the batch. Reshape a stacked batch: x.reshape(-1, *x.shape[2:])."
    slices = checks.positive_int(who, "microbatches", microbatches, hint)
    precision = None if policy is None else as_policy(policy)
    options: PyTree = {"policy": precision, "microbatches": slices, "dtype": dtype}
    options |= {"mesh": mesh, "axis_name": names or None, "has_aux": has_aux}

    @functools.wraps(loss_fn)
    def reported(*args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return the loss and an aux that a step can report, equal on all replicas."""
        result = loss_fn(*args, **kwargs)
        is_pair = isinstance(result, tuple) and len(result) == 2
        return (result[0], as_metrics(result[1], who)) if is_pair else result

    oracle = value_and_grad(reported if has_aux else loss_fn, **options)
    if layers is not None:
        hint = "int8 codes are computed for complete arrays, not for single layers."
        checks.require(gather != "int8", who, "gather", gather, "'bfloat16' with layers=", hint)
        tx, around = planned(tx, layers, shard_optimizer)
        oracle = around(oracle, precision)
    settings = precision, param_specs, freeze_driver, shard_optimizer, gather
    step = TrainStep(tx, oracle, mesh, names, slices, *settings)
    key = names, precision
    found, is_scaled = once(tx.update, key, lambda: check.read(tx, names, step))
    if found:
        check.report(who, "tx", found, stacklevel=4)
    watch = functools.partial(check.of_rules, who, set()) if is_scaled else None
    return dataclasses.replace(step, oracle=dataclasses.replace(oracle, watch=watch))
