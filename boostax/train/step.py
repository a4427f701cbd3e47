# SPDX-License-Identifier: Apache-2.0
"""The train step: gradient function and optimizer in one jitted function."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from boostax._core import axes, checks, jaxprs, replicas, trees, types
from boostax._core.describe import asked, variants_of
from boostax._core.gate import outermost_passed
from boostax._core.norms import all_finite
from boostax._core.protocols import ChoosesVariant
from boostax._core.replicas import PerReplica, is_per_replica
from boostax._core.trees import Pruning, is_number
from boostax._core.types import PyTree
from boostax.accumulate import carried
from boostax.accumulate.aux import any_items, as_aux, as_metrics
from boostax.accumulate.window import AccumulateState, flush, require_weighted
from boostax.order import findings
from boostax.precision.policy import Level, Policy, as_policy
from boostax.train.apply import applied, local_types, placed_on
from boostax.train.gather import Gather, gathering
from boostax.train.oracle import Backward, Gradients, Oracle, planned, value_and_grad
from boostax.train.state import Placing, TrainState, metrics

FreezeDriver = Literal["host", "switch"]
Kind = Literal["step", "flush"]
# Keywords that a step or ``lower`` uses, or that the state supplies to the loss.
_RESERVED = ("active", "depth", "key", "model_state", "scales")


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
        compiles one program for all depths. This program also runs inside ``jax.jit`` or
        ``jax.lax.scan``. The program of ``"switch"`` has a copy of the optimizer's code for each
        depth, and a step runs one copy. At 2, 4 and 10 depths, the program has 1.5, 2.5 and 5.5
        times the optimizer's operations. The program also needs one more temporary copy of the
        params on CPU and H100, and two more copies on TPU v5e.
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
    wrong, is_scaled = findings.read(tx, names, step)
    if wrong:
        findings.report(who, "tx", wrong, level=4)
    watch = functools.partial(findings.of_rules, who, set()) if is_scaled else None
    return dataclasses.replace(step, oracle=dataclasses.replace(oracle, watch=watch))


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """The compiled step that ``make_train_step`` returns: ``(state, batch) -> (state, metrics)``.

    The state is donated, so use the returned state. The step is compiled once for each structure of
    the state, and for each set of param types and param shardings.

    Attributes:
      tx: the optimizer.
      oracle: the gradient function, from ``boostax.value_and_grad``.
      mesh: device mesh, or ``None``.
      names: replica axes; empty without a mesh.
      microbatches: micro-batches per replica and call.
      policy: precision policy, or ``None``; params are stored in the policy's ``param_dtype``.
      param_specs: see ``make_train_step``.
      freeze_driver: see ``make_train_step``.
      shard_optimizer: see ``make_train_step``.
      gather: see ``make_train_step``.
    """

    tx: optax.GradientTransformation
    oracle: Oracle
    mesh: Mesh | None
    names: tuple[str, ...]
    microbatches: int
    policy: Policy | None
    param_specs: PyTree = None
    freeze_driver: FreezeDriver = "host"
    shard_optimizer: bool = False
    gather: Gather | None = None
    _programs: dict[PyTree, Programs] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def placing(self) -> Placing | None:
        """Return the placement of state and batches; ``None`` without a mesh."""
        if self.mesh is None:
            return None
        options = self.names, self.microbatches, self.param_specs, self.shard_optimizer
        count = math.prod(self.mesh.shape[name] for name in self.names)
        rows = NamedSharding(self.mesh, PartitionSpec(self.names))
        spans_processes = len({x.process_index for x in self.mesh.devices.flat}) > 1
        return Placing(self.mesh, *options, count, rows, spans_processes)

    @property
    def replicas(self) -> int:
        """Return the number of replicas; 1 without a mesh."""
        return 1 if self.placing is None else self.placing.replicas

    @property
    def depths(self) -> tuple[int, ...]:
        """Return the depths of ``scheduled_freeze`` for which a step is compiled."""
        keys = (key for programs in self._programs.values() for key in programs.compiled)
        return tuple(sorted({x for kind, x in keys if kind == "step" and x is not None}))

    @checks.arguments
    def init(
        self, params: types.Params, *, key: jax.Array | None = None, model_state: PyTree = None
    ) -> TrainState[types.Params]:
        """Make the first state, placed on the mesh.

        Args:
          params: the initial params. ``init`` copies the params, so that donation never deletes the
            caller's arrays. With ``jax.ShapeDtypeStruct``, the result is a state of types with
            shardings, with which the step can be lowered for absent devices
            (``boostax.auditing.target_devices``).
          key: PRNG key, from which each call, micro-batch and replica derives a different key for
            the loss, ``key=``.
          model_state: passed to the loss as ``model_state=`` and replaced by ``Aux.model_state``.

        Returns:
          A ``TrainState``.
        """
        args = params, key, model_state
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
            state = jax.eval_shape(self._unplaced, *args)
            typed = jax.tree.map(lambda x, y: x.update(sharding=y.sharding), state.params, params)
            state = state._replace(params=typed)
        else:
            # The copies have strong dtypes, so that a step is traced only once.
            state = jax.tree.map(lambda x: _strong(jnp.array(x)), self._unplaced(*args))
        return state if self.placing is None else self.placing.state(state)

    def _unplaced(self, params: PyTree, key: jax.Array | None, model_state: PyTree) -> TrainState:
        # A compiled step cannot accept leaves that are not arrays, such as functions in a module.
        got = [(name, type(x).__name__) for name, x in trees.named(params) if not is_number(x)]
        hint = "Use eqx.partition(model, eqx.is_inexact_array), and eqx.combine in the loss."
        checks.require_type(not got, "make_train_step", "params", got[:6], "arrays", hint)
        trees.require_order("make_train_step", "step.init(params)", params=params)
        if self.policy is not None:
            params = self.policy.store_params(params)
        with axes.binding(self.names):
            opt_state = self.tx.init(params)
        nested = variants_of(self.tx) is None and trees.telling(opt_state, ChoosesVariant)
        got = "inside another transformation, where the whole backward pass would be computed"
        hint = "Write scheduled_freeze(dynamic_loss_scale(...), ...), with all gates inside."
        checks.require(not nested, "make_train_step", "scheduled_freeze", got, "outermost", hint)
        return TrainState(jnp.zeros((), jnp.int32), params, opt_state, model_state, key)

    def shardings(self, state: PyTree) -> TrainState:
        """Return the sharding of each leaf of a state, for restoring a checkpoint."""
        placing = self.placing
        return placing.shardings(state) if placing else jax.tree.map(lambda x: x.sharding, state)

    @checks.arguments
    def __call__(
        self, state: TrainState[types.Params], batch: PyTree, **kwargs: PyTree
    ) -> tuple[TrainState[types.Params], dict[str, jax.Array]]:
        """Apply an optimizer step, or a micro-step of an ``accumulate`` window.

        Args:
          state: the state from ``init`` or the last call; donated.
          batch: tree of arrays whose first dimension is the global batch; on a mesh of several
            processes, only the rows of this process (see ``rows``).
          **kwargs: keyword arguments of the loss that are not split by rows, such as ``beta=0.1``.
            The values are arrays, numbers, or trees of arrays and numbers, equal in all processes.
            Each micro-batch and replica receives the same values. A number is traced as an array of
            its default dtype, so a new value causes no recompilation.

        Returns:
          The new state and a dict of scalars: ``loss`` (unscaled, the mean over all rows),
          ``applied`` (whether the params changed), ``boostax.metrics(opt_state)``, ``Aux.metrics``
          and ``Aux.means``.

        Raises:
          ValueError, TypeError: the number of rows is not a multiple of replicas times
            micro-batches, or a keyword is unknown to the loss, reserved, or not an array.

        Example:
          >>> import boostax, jax.numpy as jnp, optax
          >>> loss = lambda w, x, beta: beta * jnp.mean(w * x)
          >>> step = boostax.make_train_step(loss, optax.sgd(1.0), microbatches=2)
          >>> state, metrics = step(step.init(jnp.float32(2.0)), jnp.ones(4), beta=0.25)
          >>> float(metrics["loss"]), float(state.params)
          (0.5, 1.75)
        """
        with trees.explaining(self._explain, state, batch):
            args = self._placed(batch, kwargs)
            programs = self._of(state)
            if (schedule := self._schedule(state)) is None:
                return programs.jitted("step", None)(state, *args)
            depth = programs.coming(schedule)
            part = programs.part(depth)
            smaller, reported = programs.jitted("step", depth)(part.take(state), *args)
            state = part.set(state, smaller)
            programs.coming.follow(self._schedule(state))
            return state, reported

    def flush(self, state: TrainState[types.Params]) -> TrainState[types.Params]:
        """Apply a partial window at the end of a run (see ``boostax.flush``)."""
        with trees.explaining(self._explain, state):
            depth = self._coming(state)
            programs = self._of(state)
            part = programs.part(depth)
            return part.set(state, programs.jitted("flush", depth)(part.take(state)))

    def jitted(
        self, state: TrainState, batch: PyTree, *, depth: int | None = None, **kwargs: PyTree
    ) -> tuple[jax.stages.Wrapped, tuple[TrainState, PyTree, PyTree]]:
        """Return the ``jax.jit`` function for a call at a depth, and the function's arguments."""
        with trees.explaining(self._explain, state, batch):
            depth = self._coming(state) if depth is None else depth
            programs = self._of(state)
            args = programs.part(depth).take(state), *self._placed(batch, kwargs)
            return programs.jitted("step", depth), args

    def lower(
        self, state: TrainState, batch: PyTree, *, depth: int | None = None, **kwargs: PyTree
    ) -> jax.stages.Lowered:
        """Lower the program, also from shapes, to read the program's text, memory and cost."""
        with trees.explaining(self._explain, state, batch):
            program, args = self.jitted(state, batch, depth=depth, **kwargs)
            return program.lower(*args)

    def jaxpr(
        self, state: TrainState, batch: PyTree, *, depth: int | None = None, **kwargs: PyTree
    ) -> jaxprs.ClosedJaxpr:
        """Trace the program, to count collectives and bytes."""
        with trees.explaining(self._explain, state, batch):
            program, args = self.jitted(state, batch, depth=depth, **kwargs)
            return jax.make_jaxpr(program)(*args)

    def common_params(self, state: TrainState[types.Params]) -> types.Params:
        """Return the params for an evaluation: the mean of per-replica params."""
        return _mean_of_replicas(state.params) if is_per_replica(state.params) else state.params

    def rows(self, size: int) -> np.ndarray:
        """Return the rows of a global batch of ``size`` that this process passes to the step.

        The row numbers are ascending. If the mesh belongs to one process, all rows are returned.
        """
        return np.arange(size) if self.placing is None else self.placing.own_rows(size)

    def place(self, batch: PyTree) -> PyTree:
        """Place a batch on the mesh, as a call does."""
        return batch if self.placing is None else self.placing.batch(batch)

    def _placed(self, batch: PyTree, kwargs: PyTree) -> tuple[PyTree, PyTree]:
        """Return the batch and the keywords of a call, placed on the mesh."""
        hint = "Rename the keyword in loss_fn. Pass key= and model_state= to step.init."
        allowed = f"none of {', '.join(_RESERVED)}"
        reserved = next((name for name in kwargs if name in _RESERVED), None)
        checks.absent("TrainStep", "a keyword", reserved, allowed, hint)
        kwargs = jax.tree.map(_strong, kwargs)
        kwargs = self.placing.common(kwargs, batch) if kwargs and self.placing else kwargs
        return self.place(batch), kwargs

    def _schedule(self, state: TrainState) -> ChoosesVariant | None:
        """Return the state of the schedule that the host follows, or ``None``."""
        variants = variants_of(self.tx) if self.freeze_driver == "host" else None
        schedule = variants and variants.find(state.opt_state)
        # Inside another program, the state is traced and cannot be read.
        return None if schedule is None or isinstance(schedule.next_variant(), Tracer) else schedule

    def _of(self, state: TrainState) -> Programs:
        """Return the programs for a state's structure and for the types and specs of its params."""
        leaves = jax.tree.leaves(state.params)
        # Inside another program, the params are traced. Traced params have no attribute
        # ``sharding``, but their types may have a sharding.
        is_placed = all(isinstance(getattr(x, "sharding", None), NamedSharding) for x in leaves)
        is_placed = is_placed and bool(leaves) and not any(isinstance(x, Tracer) for x in leaves)
        specs = jax.tree.map(lambda x: x.sharding, state.params) if is_placed else None
        specs = self.placing.of_params(state.params) if self.placing else specs
        types = tuple((x.shape, x.dtype) for x in leaves)
        key = jax.tree.structure(state), types, tuple(jax.tree.leaves(specs))
        if key not in self._programs:
            self._programs[key] = Programs(self, state, specs)
        return self._programs[key]

    def _coming(self, state: TrainState) -> int | None:
        """Return the depth of the next call without advancing the schedule.

        The result is ``None`` if the program reads the depth from the state. After the end of a
        schedule, this method does not raise, because a flush of an open window may follow.
        """
        if (schedule := self._schedule(state)) is None:
            return None
        depth = schedule.next_variant()
        is_known = not isinstance(depth, jax.ShapeDtypeStruct)
        hint = "Pass depth=, or a state with values, which contains the depth of the next call."
        checks.require(is_known, "TrainStep", "depth", None, "given if a state has no values", hint)
        return int(depth)

    def _stacked(self, params: PyTree) -> PyTree:
        """Return the first optimizer state for the params of one replica."""
        return replicas.stack_replicas(self._unplaced(params, None, None).opt_state, self.replicas)

    def _explain(self, state: PyTree, batch: PyTree = ()) -> None:
        """Refuse a state of another step, and swapped arguments."""
        who, call = "TrainStep", "step(state, batch)"
        trees.require_order(who, call, batch=batch, state=state)
        if not hasattr(state, "opt_state"):
            fix = "Use step.init(params), also for the target of a restore."
            raise TypeError(checks.message(who, "state", "a TrainState", type(state).__name__, fix))
        tx = optax.GradientTransformation(self._stacked, self.tx.update)
        trees.require_state(who, call, tx, state.opt_state, local_types(state.params))


class Programs:
    """The programs of a step for one structure of a state, and the leaves that each program needs.

    Every argument array costs host time per call, even if the program does not use the array. So
    moments of frozen params are not passed.

    Attributes:
      compiled: the jitted functions, by kind and depth.
      coming: the depth of the next call.
    """

    def __init__(self, step: TrainStep, state: TrainState, specs: PyTree):
        self._step, self._structure = step, jax.tree.structure(state)
        self._placement: PyTree = step.placing and step.placing.placement(state.params)
        # If there is no mesh and the user has sharded the state, XLA would give the params the
        # sharding of the state.
        unspecified: PyTree = None
        shardings = TrainState(unspecified, specs, None, None, None)
        self._shardings: PyTree = step.shardings(state) if step.placing else shardings
        place = self._placement
        self._tx = placed_on(step.tx, place, step.shard_optimizer) if place else step.tx
        types = local_types(state.params)
        findings.report("make_train_step", "tx", findings.decays(step.tx, types), self._structure)
        self._oracle = step.oracle.placed(types, place, step.gather)
        self._variants = variants_of(step.tx)
        self._parts: dict[int | None, Pruning] = {}
        self.compiled: dict[tuple[Kind, int | None], jax.stages.Wrapped] = {}
        # The shapes are checked, because the state of other params could silently broadcast.
        expected = jax.eval_shape(step._stacked, types)
        how: PyTree = {"like": expected, "hint": "The state is for other params: use step.init."}
        self._require = functools.partial(trees.require_shapes, "TrainStep", "opt_state", **how)
        if self._variants is not None:
            self._require(state.opt_state)
            self._params = types
            self.coming = self._variants.on_host(self._params)

    def part(self, depth: int | None) -> Pruning:
        """Return the positions of the state leaves that the program for this depth receives."""
        if depth not in self._parts:
            numbers = self._structure.unflatten(range(self._structure.num_leaves))
            if depth is not None:
                with axes.binding(self._step.names):
                    opt_state = self._variants.part(self._params, numbers.opt_state, depth)
                numbers = numbers._replace(opt_state=opt_state)
            places, part = jax.tree.flatten(numbers)
            self._parts[depth] = Pruning(self._structure, part, tuple(places))
        return self._parts[depth]

    def jitted(self, kind: Kind, depth: int | None) -> jax.stages.Wrapped:
        """Return the step or the flush at a depth; ``None`` means the depth in the state."""
        key = kind, depth
        if key not in self.compiled:
            shardings = self._shardings
            if self._placement is not None:
                shardings = self.part(depth).take(shardings)
            shardings = (shardings, None) if kind == "step" else shardings
            extra: dict[str, PyTree] = {} if depth is None else {"depth": depth}

            def _checked(state: TrainState, *args: PyTree) -> PyTree:
                """Run a step or a flush, and check the state while the program is traced."""
                replicas.require_replicas("make_train_step", state, self._step.replicas)
                if depth is None:
                    self._require(state.opt_state)
                if kind == "step":
                    return self._train(state, *args, **extra)
                params, opt_state = flush(self._tx, state.opt_state, state.params, **extra)
                return state._replace(params=params, opt_state=opt_state)

            self.compiled[key] = jax.jit(_checked, donate_argnums=0, out_shardings=shardings)
        return self.compiled[key]

    def _train(
        self, state: TrainState, batch: PyTree, kwargs: PyTree, **extra: PyTree
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return the state and the report of a step."""
        step, params, opt_state, model_state, key = state
        active: PyTree = True
        if "depth" in extra:
            active = self._variants.plan(params).active(extra["depth"])
        elif self._variants is not None:
            active = self._variants.choice(params, opt_state)
        key = None if key is None else jax.random.fold_in(key, step)
        kwargs = kwargs | {"key": key, "model_state": model_state}
        ((loss, aux), grads), value_fn = self._gradients(params, opt_state, batch, active, kwargs)
        aux = as_aux(aux)
        arguments = asked(self._step.tx)
        # Only line searches compile ``value_fn``.
        extra |= {"value": loss, "value_fn": value_fn}
        extra |= {"obj_fn": value_fn} if "obj_fn" in arguments else {}
        if "loss_program" in arguments:
            extra["loss_program"] = str(jax.make_jaxpr(value_fn)(params))
        if arguments.get("grad"):
            # The gradient of the mean loss, multiplied by the same loss scale as the local
            # gradients.
            wide = trees.at_least_float32(grads if type(grads) is Gradients else Gradients(grads))
            if is_per_replica(wide.local):
                wide = wide._replace(local=jax.tree.map(lambda g: g.mean(0), wide.local))
            extra["grad"] = wide.unwrapped()
        extra |= {} if aux.weight is None else {"weight": aux.weight}
        require_weighted(opt_state, aux.weight)
        # A window itself counts the items of its calls.
        windows = trees.find(opt_state, AccumulateState)
        counted = None if aux.weight is None or windows else any_items(aux.weight)
        params, opt_state = applied(self._tx, grads, opt_state, params, extra, counted)
        if model_state is not None and aux.model_state is not None:
            # An overflow in the forward pass also reaches the model's statistics. So the old
            # statistics remain if the step is skipped, or if new statistics are not finite.
            keep = outermost_passed(opt_state) & all_finite(aux.model_state)
            model_state = jax.tree.map(lambda *x: jnp.where(keep, *x), aux.model_state, model_state)
        steps: PyTree = optax.safe_increment(step)
        new_state = TrainState(steps, params, opt_state, model_state, state.key)
        # Without a gate, every call is applied.
        reported = {"loss": loss, "applied": jnp.asarray(True), **metrics(opt_state)}
        of_loss = {name or "aux": x for name, x in trees.named(aux.metrics)} | aux.means
        for name in sorted(of_loss.keys() & reported.keys()):
            allowed = "named differently from the scalars of a step"
            hint = f"Use {name + '_of_mine'!r}; a step reports {', '.join(sorted(reported))}."
            raise ValueError(checks.message("make_train_step", "metrics", allowed, name, hint))
        return new_state, of_loss | reported

    def _gradients(
        self, params: PyTree, opt_state: PyTree, batch: PyTree, active: PyTree, kwargs: PyTree
    ) -> tuple[PyTree, Callable[[PyTree], jax.Array]]:
        """Return the result of the gradient function, and the loss as a function of the params."""
        loss_at = self._oracle.loss_at(batch, **kwargs)
        args = opt_state, batch, active, kwargs
        if self._step.gather is None:
            return self._oracle.with_aux(params, *args), loss_at
        # A carried leaf is not a weight, so the leaf is not rounded.
        rules = carried.declared(opt_state, params, "make_train_step")
        exact = *carried.resolve(rules, params), *self._oracle.gathers(local_types(params))
        gather = gathering("make_train_step", self._step.gather, self._placement, exact)
        return self._oracle.with_aux(gather(params), *args), lambda x: loss_at(gather(x))


@jax.jit
def _mean_of_replicas(params: PerReplica) -> PyTree:
    leaves, tree = jax.tree.flatten(params.local)
    means: list[jax.Array] = []
    for x in leaves:
        # JAX refuses an index into a sharded dimension of an Explicit mesh.
        first = jnp.where((jnp.arange(len(x)) == 0).reshape(-1, *[1] * (x.ndim - 1)), x, 0).sum(0)
        # If all replicas are equal, the mean of the differences to the first replica is 0, and the
        # result is exact.
        means.append(first + (x - first).mean(0))
    return tree.unflatten(means)


def _strong(x: PyTree) -> PyTree:
    """Return an argument in a strong dtype, so that numbers and arrays share one trace."""
    if isinstance(x, jax.Array):
        return x.astype(x.dtype) if getattr(x, "weak_type", False) else x
    # Other values are returned unchanged, because JAX's error about a value that is not an array
    # names the value.
    return np.asarray(x, jnp.result_type(x)) if isinstance(x, jax.typing.ArrayLike) else x
