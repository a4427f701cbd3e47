# SPDX-License-Identifier: Apache-2.0
"""An in-place optimizer for Flax NNX, and a gradient function for the optimizer's chain.

``nnx.Optimizer`` adds the chain's updates to the params in every call, so in a skipped step it
would still add zero to all params.
"""

from collections.abc import Callable
from typing import Any, Concatenate, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from boostax._core import axes, checks, describe, placement, replicas, trees
from boostax._core.norms import all_finite
from boostax._core.replicas import PerReplica
from boostax._core.types import PyTree
from boostax.accumulate import aux as auxiliary
from boostax.accumulate.aux import Aux
from boostax.accumulate.window import flush
from boostax.order import findings
from boostax.train.apply import apply_gradients, on_mesh
from boostax.train.oracle import value_and_grad

with checks.needing("boostax.nnx", "Flax", "workloads"):
    from flax import nnx

_M = TypeVar("_M")
_WHO = "boostax.nnx.Optimizer"


class Optimizer(nnx.Optimizer[_M]):
    """An ``nnx.Optimizer`` that writes params only if a step is applied.

    This class replaces ``nnx.Optimizer``, and its objects are made, updated, split, merged and
    checkpointed in the same way. Gates (a loss scaler, a window) must be outermost in ``tx``. A
    step that a gate skips writes no params. ``value_and_grad`` returns the gradients that the chain
    expects. They are gradients of the scaled loss, local to each replica, without the params that
    ``scheduled_freeze`` freezes.

    Args:
      model: an ``nnx.Module``. With ``axis_name``, the model's params are placed on one mesh by
        ``NamedSharding``, in any sharding.
      tx: any Optax chain. With ``axis_name``, the chain needs a reduction, as in
        ``boostax.on_mesh``.
      wrt: filter of the trained variables.
      axis_name: the mesh axis, or axes, over which the batch is split; ``None`` on one device, or
        if XLA reduces the gradients.
      shard_optimizer: see ``boostax.on_mesh``.
      **more: the other argument of ``nnx.Optimizer``, which is ``graph``.

    Attributes:
      step: number of calls of ``update``, including skipped calls;
        ``boostax.metrics(optimizer.opt_state)`` counts applied steps.
      tx: the chain, or with ``axis_name`` the result of ``boostax.on_mesh``.
      opt_state: the state of ``tx``, in NNX variables. An assignment of arrays calls ``set_state``.

    Cost: as ``boostax.apply_gradients`` with ``tx``. With ``nnx.jit(donate_argnums=...)``, a
    skipped step reads the params only for the loss and writes no params.

    Raises:
      ValueError: ``axis_name`` is given and the params are not on a mesh, ``wrt`` matches no
        variable, ``tx`` is a result of ``on_mesh``, or the chain has different params on each
        replica (``local_updates``, ``partial_average``), which a module cannot represent.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> from boostax.nnx import Optimizer
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> tx = boostax.dynamic_loss_scale(boostax.accumulate(optax.sgd(0.1), every=2))
      >>> optimizer = Optimizer(model, tx, wrt=nnx.Param)  # was nnx.Optimizer
      >>> @nnx.jit
      ... def train_step(model, optimizer, x):
      ...   loss_fn = lambda model, x: jnp.mean(model(x) - 1)
      ...   loss, grads = optimizer.value_and_grad(loss_fn)(model, x)  # was nnx.value_and_grad
      ...   optimizer.update(model, grads)
      ...   return loss
      >>> [float(train_step(model, optimizer, jnp.zeros((4, 2)))) for _ in range(3)]
      [-1.0, -1.0, -1.100000023841858]
    """

    def __init__(
        self,
        model: _M,
        tx: optax.GradientTransformation,
        *,
        wrt: Any,
        axis_name: axes.AxisName | None = None,
        shard_optimizer: bool = False,
        **more: Any,
    ):
        checks.transformation(_WHO, "tx", tx)
        self.freezing = describe.variants_of(tx)
        self.axis_name = axis_name
        self.shard_optimizer = shard_optimizer
        self.mesh: Any = None
        self.more = more
        params = nnx.as_pure(nnx.state(model, wrt, **more))
        allowed = "a filter that matches variables of the model"
        hint = f"The model has {', '.join(trees.names(nnx.as_pure(nnx.state(model)))[:8])}."
        checks.require(bool(jax.tree.leaves(params)), _WHO, "wrt", wrt, allowed, hint)
        is_valid = getattr(getattr(tx.update, "step", None), "__module__", "") != on_mesh.__module__
        allowed = "a chain without on_mesh, because boostax.nnx.Optimizer calls on_mesh"
        hint = "Pass the chain, and axis_name='data'."
        checks.require(is_valid, _WHO, "tx", "the result of on_mesh", allowed, hint)
        if axis_name is not None:
            tx = on_mesh(tx, params, axis_name=axis_name, shard_optimizer=shard_optimizer)
            self.mesh = jax.tree.leaves(params)[0].sharding.mesh
        else:
            findings.of_chain(_WHO, tx, ())
        is_valid = axis_name is not None or not shard_optimizer
        allowed = "False without an axis_name"
        hint = "The state is sharded over the axes of axis_name."
        checks.require(is_valid, _WHO, "shard_optimizer", True, allowed, hint)
        super().__init__(model, tx, wrt=wrt, **more)
        if self.mesh is not None:
            # The superclass made a state with variables. ``on_mesh`` distributes arrays only in a
            # state without variables, so ``tx.init`` makes the state again.
            nnx.update(self.opt_state, nnx.state(tx.init(params), **more))
            # A program cannot accept a counter on one device together with params on a mesh.
            replicated = NamedSharding(self.mesh, PartitionSpec())
            self.step.set_value(jax.device_put(self.step.get_value(), replicated))
            # State with a leading dimension of replicas gets the metadata of a param, and these
            # metadata lack the leading dimension.
            boxes = jax.tree.leaves(self.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
            for box in boxes:
                if box.has_metadata("out_sharding"):
                    box.set_metadata(out_sharding=tuple(box.get_value().sharding.spec))
        allowed = "a chain that keeps params equal on all replicas"
        got = "local_updates or partial_average"
        hint = "A module has one copy of each param. Train the model with boostax.make_train_step."
        checks.require(not replicas.owns_params(self.opt_state), _WHO, "tx", got, allowed, hint)

    def __setattr__(self, name: str, value: PyTree) -> None:
        """Set an attribute; an ``opt_state`` of arrays is passed to ``set_state``."""
        is_new = name == "opt_state" and name in vars(self) and bool(jax.tree.leaves(value))
        if is_new and trees.arrays(value) is value:
            self.set_state(value)
        else:
            super().__setattr__(name, value)

    def value_and_grad(
        self, loss_fn: Callable[Concatenate[_M, ...], Any], *, has_aux: bool = False, **how: Any
    ) -> Callable[Concatenate[_M, ...], tuple[PyTree, PyTree]]:
        """Return a gradient function for the chain, in place of ``nnx.value_and_grad``.

        Args:
          loss_fn: ``loss_fn(model, *batch, **arguments)``; a scalar, or ``(loss, aux)``. Variables
            that the loss changes in the model (BatchNorm statistics, dropout counters) are averaged
            over the replicas. If a new value is not finite, all variables keep their old values. As
            in ``nnx.value_and_grad``, the variables change even if a scaler skips the step.
          has_aux: whether the loss returns an aux. As in ``boostax.value_and_grad``, a
            ``boostax.Aux`` is combined. Any other aux is not combined: with several replicas, it is
            returned in a ``PerReplica``, whose ``local`` has a leading dimension of replicas.
          **how: the arguments ``microbatches``, ``policy`` and ``dtype`` of
            ``boostax.value_and_grad``.

        Returns:
          ``fn(model, *batch, active=None, **arguments)`` that returns ``(loss, grads)``. The rows
          of ``batch`` are split over replicas and micro-batches, but ``arguments`` are not split.
          ``active`` selects the params to differentiate, by default the params that the
          ``scheduled_freeze`` in ``tx`` trains next. Cost: as ``boostax.value_and_grad``. With
          several replicas, each variable that the loss changes costs one more collective per call.

        Raises:
          ValueError: the loss adds or removes variables of the model, or sets params outside of
            ``wrt``.
        """
        names = axes.canonical(_WHO, self.axis_name)
        how |= {"mesh": self.mesh, "axis_name": self.axis_name}

        def fn(model: _M, *batch: Any, active: PyTree = None, **arguments: Any) -> PyTree:
            # The trained params, keys, other params and all other variables.
            filters: Any = self.wrt, nnx.RngKey, nnx.Param, ...
            graph, *states = nnx.split(model, *filters, **self.more)
            params, keys, frozen, others = nnx.as_pure(states)
            # A loss with a key per replica may generate data from the key, and needs no batch.
            is_valid = not names or bool(batch) or bool(jax.tree.leaves(keys))
            allowed = "given if rows are split over replicas"
            hint = "Pass the batch to loss_fn: arrays in its closure are not split over replicas."
            checks.require_type(is_valid, _WHO, "batch", batch, allowed, hint)
            opt_state = nnx.as_pure(self.opt_state)
            loss_aux: PyTree = Aux()
            changed: PyTree = None

            def loss(
                params: PyTree, batch: PyTree, model_state: PyTree, constants: PyTree, **scales: Any
            ) -> PyTree:
                nonlocal loss_aux, changed
                keys, frozen = constants
                if names:  # Each replica draws different random numbers.
                    replica = axes.index(names)
                    keys = jax.tree.map(lambda key: jax.random.fold_in(key, replica), keys)
                merged = nnx.merge(graph, params, keys, frozen, model_state)
                result = loss_fn(merged, *batch, **arguments, **scales)
                untrained, new = nnx.as_pure(nnx.split(merged, *filters, **self.more)[3:])
                _require_same(untrained, frozen, new, model_state)
                changed = jax.tree.map(lambda new, old: new is not old, new, model_state)
                value, loss_aux = auxiliary.loss_and_aux(result, has_aux)
                combined = auxiliary.as_aux(loss_aux)._replace(model_state=new)
                return value, auxiliary.Joint(combined, auxiliary.own_of(loss_aux))

            if active is None and self.freezing is not None:
                plan, choice = self.freezing.plan(params), self.freezing.choice
                first, *later = plan.drawn
                active = choice(params, opt_state) if later else plan.active(first)
            active = True if active is None else active
            gradients_of = value_and_grad(loss, has_aux=True, **how)
            constants = keys, frozen
            constants = placement.gathered(self.mesh, names, constants) if names else constants
            extra: dict[str, PyTree] = {"model_state": others, "constants": constants}
            (value, aux), grads = gradients_of(params, opt_state, batch, active=active, **extra)
            # Variables that the loss did not change keep their old values, because a mean over the
            # replicas may round them.
            mean = aux.combined.model_state
            new = jax.tree.map(lambda x, y, old: y if x else old, changed, mean, others)
            # An overflow in the forward pass also reaches the variables, and a skipped step does
            # not restore them. So they change only if all their new values are finite.
            keep = all_finite(new)
            nnx.update(model, jax.tree.map(lambda new, old: jnp.where(keep, new, old), new, others))
            aux = auxiliary.as_given(aux.combined._replace(model_state=None), aux.other, loss_aux)
            return ((value, aux) if has_aux else value), grads

        return fn

    def update(self, model: _M, grads: PyTree, /, **kwargs: PyTree) -> PyTree:
        """Update the model as ``nnx.Optimizer.update`` does; a skipped step writes no param.

        Args:
          model: the model whose params are changed.
          grads: the result of ``value_and_grad``, or of ``nnx.grad`` if the chain has no scaler or
            reduction.
          **kwargs: arguments for ``tx.update``.

        Returns:
          The change of the params. Cost: see the class. Inside ``nnx.jit``, an unused result costs
          nothing.
        """
        params = nnx.as_pure(nnx.state(model, self.wrt, **self.more))
        local = grads.local if replicas.is_per_replica(grads) else grads
        if trees.arrays(local) is not local:
            local = nnx.as_pure(nnx.state(local, self.wrt, **self.more))
        grads = PerReplica(local) if replicas.is_per_replica(grads) else local
        opt_state, kwargs = nnx.as_pure((self.opt_state, kwargs))
        new, opt_state = apply_gradients(self.tx, grads, opt_state, params, **kwargs)
        nnx.update(model, new)
        nnx.update(self.opt_state, nnx.state(opt_state, **self.more))
        self.step[...] += 1
        return jax.tree.map(jnp.subtract, new, params)

    def flush(self, model: _M) -> None:
        """Apply the last, partial window to the model in place, as ``boostax.flush`` does."""
        new, opt_state = flush(self.tx, self, nnx.state(model, self.wrt, **self.more))
        nnx.update(model, new)
        nnx.update(self.opt_state, nnx.state(opt_state, **self.more))

    def set_state(self, state: PyTree) -> None:
        """Replace ``opt_state`` in place by a state of the same chain.

        Args:
          state: arrays or variables, for example from a checkpoint or ``boostax.reshard_state``.
            Outside of ``nnx.jit``, the arrays are placed like the old state. ``step`` is not
            changed.

        Raises:
          TypeError, ValueError: the state is for another chain, other params, or another number of
            replicas.
        """
        old = nnx.as_pure(self.opt_state)
        state = trees.require_as_made(_WHO, "state", trees.arrays(state), old)

        def place(new: jax.Array, old: jax.Array) -> jax.Array:
            # If the old array is uncommitted, the placement of the new array is not changed.
            is_placed = not isinstance(old, Tracer) and old.committed
            return jax.device_put(new, old.sharding) if is_placed else new

        nnx.update(self.opt_state, nnx.state(jax.tree.map(place, state, old), **self.more))

    def migrate(
        self, model: _M, tx: optax.GradientTransformation, *, count: int | None = None
    ) -> Any:
        """Replace the chain, and migrate the state by ``migrate_state``, outside of ``nnx.jit``.

        Args:
          model: the model that is trained.
          tx: the new chain; see the class.
          count: the number of steps so far, from which new schedules continue.

        Returns:
          The ``MigrationReport``.

        Raises:
          The errors of ``boostax.migrate_state``. After an error, the optimizer is unchanged.
        """
        from boostax.config.migrate import migrate_state

        how: Any = {"axis_name": self.axis_name, "shard_optimizer": self.shard_optimizer}
        new: Any = Optimizer(model, tx, wrt=self.wrt, **how, **self.more)
        params = nnx.state(model, self.wrt, **self.more)
        state, report = migrate_state(self, new.tx, params, count=count)
        new.set_state(state)
        self.tx, self.freezing, self.opt_state = new.tx, new.freezing, new.opt_state
        return report


def _require_same(new_frozen: PyTree, frozen: PyTree, new_state: PyTree, state: PyTree) -> None:
    """Refuse a loss that adds or removes variables, or sets params that are not trained."""
    got = jax.tree.structure((new_frozen, new_state))
    before = jax.tree.structure((frozen, state))
    hint = "Remove the added variables in the loss: nnx.pop(model, nnx.Intermediate)."
    allowed = f"a function that does not change which variables the model has, {before}"
    checks.require(got == before, _WHO, "loss_fn", got, allowed, hint)
    for (name, new), old in zip(trees.named(new_frozen), jax.tree.leaves(frozen), strict=True):
        hint = "Use a separate type for variables that the loss sets: class Average(nnx.Variable)."
        allowed = "a function that sets no nnx.Param"
        checks.require(new is old, _WHO, "loss_fn", name, allowed, hint)
