"""The train step: oracle, transformation and state, compiled into one donated program."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from boostax._core import axes, checks, trees
from boostax._core.gate import outermost_passed, passed
from boostax._core.replicas import enter_replica, leave_replica, stack_replicas, state_specs
from boostax.accumulate.aux import Aux, as_aux
from boostax.accumulate.window import flush
from boostax.precision.finite import all_finite
from boostax.precision.policy import Policy, as_policy
from boostax.train.apply import apply_gradients, metrics
from boostax.train.oracle import value_and_grad
from boostax.train.state import TrainState

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """The compiled step that ``make_train_step`` returns: ``(state, batch) -> (state, metrics)``.

    The state is donated: use the returned one. Compiled once per structure of the state.

    Attributes:
      tx: the optimizer.
      oracle: what ``boostax.value_and_grad`` made of the loss.
      mesh: device mesh, or ``None``.
      names: replica axes; empty without a mesh.
      has_aux: whether the oracle returns ``(loss, aux)``.
      microbatches: slices per replica and call.
      policy: whose ``param_dtype`` the params are stored in, or ``None``.
      check_vma: see ``make_train_step``.
      param_specs: see ``make_train_step``.
    """

    tx: optax.GradientTransformation
    oracle: Callable[..., Any]
    mesh: Mesh | None
    names: tuple[str, ...]
    has_aux: bool
    microbatches: int
    policy: Policy | None
    check_vma: bool
    param_specs: PyTree = None
    _compiled: dict[Any, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """Number of replicas; 1 without a mesh."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[x] for x in self.names)

    def init(
        self, params: PyTree, *, key: jax.Array | None = None, model_state: PyTree = None
    ) -> TrainState:
        """A state to start from, placed on the mesh.

        Args:
          params: initial params; copied, so that donation never takes the caller's arrays.
          key: PRNG key handed to the loss as ``key=``, different at each call, micro-batch and
            replica.
          model_state: handed to the loss as ``model_state=`` and replaced by ``Aux.model_state``.

        Returns:
          A ``TrainState``.
        """
        if self.policy is not None:
            params = self.policy.store_params(params)
        opt_state = self.tx.init(params)
        state = TrainState(jnp.zeros((), jnp.int32), params, opt_state, model_state, key)
        state = jax.tree.map(_own, state)
        if self.mesh is None:
            return state
        state = state._replace(opt_state=stack_replicas(state.opt_state, self.replicas))
        return jax.device_put(state, self.shardings(state))

    def shardings(self, state: PyTree) -> TrainState:
        """Where each leaf of a state lives: what a checkpoint needs to restore it."""
        if self.mesh is None:
            return jax.tree.map(lambda x: x.sharding, state)
        mesh = self.mesh

        def place(spec: PartitionSpec, part: PyTree) -> PyTree:
            return jax.tree.map(lambda _: NamedSharding(mesh, spec), part)

        # The specs are a prefix: one of them may stand for a whole tree of params.
        return jax.tree.map(
            place, self._specs(state), state, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        """One call: a whole step, or a micro-step of an ``accumulate`` window.

        Args:
          state: from ``init`` or the last call; donated.
          batch: tree of arrays whose first dimension is the global batch.

        Returns:
          The new state and scalars: ``loss`` (unscaled, the mean over all), ``applied`` (whether
          the params changed), ``boostax.metrics(opt_state)`` and ``Aux.metrics``.
        """
        batch = self._place(batch)
        return self._programs(state)[0](state, batch)

    def flush(self, state: TrainState) -> TrainState:
        """Apply a partial window at the end of a run (see ``boostax.flush``)."""
        return self._programs(state)[1](state)

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """The lowered program, for its text, memory and cost."""
        return self._programs(state)[0].lower(state, self._place(batch))

    def jaxpr(self, state: TrainState, batch: PyTree) -> Any:
        """The traced program, for counting collectives and bytes."""
        return jax.make_jaxpr(self._programs(state)[0])(state, self._place(batch))

    def _specs(self, state: TrainState) -> TrainState:
        replicated = PartitionSpec()
        opt_state = state_specs(
            self.tx,
            state.params,
            self.names,
            param_specs=self.param_specs,
            replicas=self.replicas,
        )
        return TrainState(
            step=replicated,
            params=replicated if self.param_specs is None else self.param_specs,
            opt_state=opt_state,
            model_state=replicated,
            key=replicated,
        )

    def _place(self, batch: PyTree) -> PyTree:
        if self.mesh is None:
            return batch
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            rows = leaf.shape[0] if getattr(leaf, "ndim", 0) else 0
            if not rows or rows % (self.replicas * self.microbatches):
                raise ValueError(
                    "make_train_step: the leading dimension of every batch leaf must be divisible "
                    f"by replicas x microbatches = {self.replicas} x {self.microbatches}, got "
                    f"shape {getattr(leaf, 'shape', ())} at "
                    f"{trees.path_name(path) or 'the root'!r}. Pad the batch and give the padding "
                    "no weight (boostax.Aux.weight)."
                )
        return jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec(self.names)))

    def _programs(self, state: TrainState) -> tuple[Any, Any]:
        structure = jax.tree.structure(state)
        if structure not in self._compiled:
            step, flush_step = self._step, self._flush
            if self.mesh is not None:
                specs = self._specs(state)
                step = jax.shard_map(
                    step,
                    mesh=self.mesh,
                    in_specs=(specs, PartitionSpec(self.names)),
                    out_specs=(specs, PartitionSpec()),
                    check_vma=self.check_vma,
                )
                flush_step = jax.shard_map(
                    flush_step,
                    mesh=self.mesh,
                    in_specs=(specs,),
                    out_specs=specs,
                    check_vma=self.check_vma,
                )
            self._compiled[structure] = (
                jax.jit(step, donate_argnums=0),
                jax.jit(flush_step, donate_argnums=0),
            )
        return self._compiled[structure]

    def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        opt_state = enter_replica(state.opt_state)
        value, grads = self.oracle(
            state.params, opt_state, batch, key=self._call_key(state), model_state=state.model_state
        )
        loss, aux = (value[0], as_aux(value[1])) if self.has_aux else (value, Aux())
        extra = {} if aux.weight is None else {"weight": aux.weight}
        params, opt_state = apply_gradients(self.tx, grads, opt_state, state.params, **extra)
        model_state = state.model_state
        if model_state is not None and aux.model_state is not None:
            # A skipped step never happened, and an overflow in the forward pass reaches the
            # statistics before any gradient.
            keep = outermost_passed(opt_state) & all_finite(aux.model_state)
            model_state = jax.tree.map(
                lambda new, old: jnp.where(keep, new, old), aux.model_state, model_state
            )
        new_state = TrainState(
            optax.safe_increment(state.step),
            params,
            leave_replica(opt_state),
            model_state,
            state.key,
        )
        reported = {"loss": loss, "applied": passed(opt_state), **metrics(opt_state)}
        return new_state, _named(aux.metrics) | reported

    def _flush(self, state: TrainState) -> TrainState:
        params, opt_state = flush(self.tx, enter_replica(state.opt_state), state.params)
        return state._replace(params=params, opt_state=leave_replica(opt_state))

    def _call_key(self, state: TrainState) -> jax.Array | None:
        if state.key is None:
            return None
        key = jax.random.fold_in(state.key, state.step)
        return jax.random.fold_in(key, jax.lax.axis_index(self.names)) if self.names else key


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    axis_name: axes.AxisName | None = None,
    policy: Policy | str | None = None,
    microbatches: int = 1,
    has_aux: bool = False,
    accumulator_dtype: Any = jnp.float32,
    check_vma: bool = True,
    param_specs: PyTree | None = None,
) -> TrainStep:
    """A jitted, donating train step over one device or a mesh axis.

    It is ``boostax.value_and_grad`` followed by ``boostax.apply_gradients``, inside
    ``jax.shard_map`` when there is a mesh: batch split over ``axis_name``, params replicated (or
    sharded by ``param_specs``), per-replica state kept apart, sharded state shared out. Give the
    same ``axis_name`` to the transformations and put a reduction, ``all_reduce(axis_name)`` or
    ``adasum(axis_name)``, first in the innermost chain.

    Args:
      loss_fn: ``loss_fn(params, batch)``, and ``key=``, ``model_state=`` if the state has them.
      tx: the optimizer.
      mesh: device mesh; ``None`` for one device.
      axis_name: its axis, or axes, over which the batch is split; required with a mesh.
      policy: precision policy applied to ``loss_fn``, its ``param_dtype`` to the params.
      microbatches: slices per replica and call: see ``boostax.microbatch``.
      has_aux: ``loss_fn`` returns ``(loss, aux)``; see ``boostax.Aux``.
      accumulator_dtype: of the sum over micro-batches.
      check_vma: JAX's check of what is equal on all replicas; switch it off only for code that
        cannot be typed.
      param_specs: for params sharded over further axes of the mesh (FSDP, tensor parallel): a tree
        of ``PartitionSpec`` with one for each param. ``loss_fn`` sees its shards and gathers them
        itself, ``jax.lax.all_gather(w, "fsdp", tiled=True, to="invarying")``; its loss must be
        equal over those axes.

    Returns:
      A ``TrainStep``. Cost beside the transformations': one scalar collective for the loss.

    Raises:
      ValueError, TypeError: an argument out of range, an axis that the mesh lacks.

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
    names = axes.canonical(who, axis_name)
    if (mesh is None) != (not names):
        raise ValueError(
            f"{who}: mesh and axis_name must be given together, got mesh={mesh!r} and "
            f"axis_name={axis_name!r}. Leave out both on one device."
        )
    if mesh is None and param_specs is not None:
        raise ValueError(
            checks.message(who, "param_specs", "None without a mesh", param_specs, "Pass mesh=.")
        )
    if mesh is not None:
        missing = [name for name in names if name not in mesh.shape]
        if missing:
            raise ValueError(
                checks.message(
                    who,
                    "axis_name",
                    f"among the mesh's axes {tuple(mesh.shape)}",
                    axis_name,
                    "Make the mesh with jax.make_mesh((n,), ('data',)).",
                )
            )
    rules = as_policy(who, policy)
    oracle = value_and_grad(
        loss_fn,
        axis_name=axis_name,
        policy=rules,
        microbatches=microbatches,
        has_aux=has_aux,
        accumulator_dtype=accumulator_dtype,
    )
    return TrainStep(
        tx,
        oracle,
        mesh,
        names,
        has_aux,
        int(microbatches),
        policy=rules,
        check_vma=check_vma,
        param_specs=param_specs,
    )


def _own(x: Any) -> jax.Array:
    """A copy of strong dtype: one that can be donated, and does not make the step trace twice."""
    copy = jnp.array(x, copy=True)
    return copy if jnp.issubdtype(copy.dtype, jax.dtypes.prng_key) else copy.astype(copy.dtype)


def _named(tree: PyTree) -> dict[str, jax.Array]:
    """A tree of metrics, flat, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {trees.path_name(path) or "aux": leaf for path, leaf in leaves}
