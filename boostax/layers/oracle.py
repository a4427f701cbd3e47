# SPDX-License-Identifier: Apache-2.0
"""The gradient function of a step whose loss scans layers, with work in the backward loop.

The loop sums a stack's gradients, unsharded or in the shards of the params, or runs the stack's
optimizer. See ``boostax.layers.scan`` for the loop, and ``boostax.layers.stacks`` for the stacks.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from boostax._core import axes, checks, handshake, norms, placement, trees
from boostax._core.placement import Placement
from boostax._core.replicas import is_per_replica
from boostax._core.types import PyTree
from boostax.accumulate import aux as auxiliary
from boostax.accumulate import carried
from boostax.accumulate.aux import as_aux, drop_empty
from boostax.layers.release import LayersState, Released, released, require_mean
from boostax.layers.scan import Run, Sink, Stack, received, require_scanned, sent, showing
from boostax.layers.stacks import Arrays, Plan, Stacked, masked, zeros
from boostax.precision.policy import Policy, autocast
from boostax.train.oracle import Around, Backward, Gradients, Oracle, PlacedOracle

Stacks = dict[str, Arrays]
_WHO = "Layers"


@dataclasses.dataclass(frozen=True)
class LayeredOracle(PlacedOracle):
    """The gradient function of a step with ``layers=``.

    Attributes:
      plan: the layers.
    """

    plan: Plan = dataclasses.field(kw_only=True)

    def placed(self, types: PyTree, place: Placement | None, wire: str | None) -> "LayeredOracle":
        """Return the gradient function for params of these types and this placement."""
        self.plan.layers.require_stacked(types)
        plan = dataclasses.replace(self.plan, types=types, place=place, wire=wire)
        plan.cuts  # noqa: B018, it refuses layers that are sharded along their number
        return dataclasses.replace(self, plan=plan)

    def inputs(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree, Gradients]:
        """Return params and the states of released layers, with specs; see ``Oracle.inputs``."""
        hint = "Its layers would be gathered from other replicas."
        got = "those of each replica" if is_per_replica(params) else None
        checks.absent(_WHO, "params", got, "common with layers=", hint)
        # An optimizer's state keeps the nodes of its params, which may be Variables of NNX.
        states = opt_state.stacks if isinstance(opt_state, LayersState) else {}
        local = Gradients(PartitionSpec(self.names))
        if self.mesh is None:
            return (params, states), None, local
        plan, layers = self.plan, self.plan.layers
        (head, stacks), (_, of_stacks) = map(layers.split, (params, plan.specs(params)))
        whole: Any = PartitionSpec()
        of_states = {k: plan.specs(x) for k, x in states.items()}
        params = layers.joined(placement.gathered(self.mesh, self.names, head), stacks)
        specs = layers.joined(jax.tree.map(lambda _: whole, head), of_stacks), of_states
        if layers.release:
            local = local._replace(applied=Released(of_stacks, of_states, whole, whole))
        elif not layers.once:
            local = local._replace(averaged=layers.joined(masked(head), of_stacks))
        return (params, states), specs, local

    def local(self, params: PyTree, *args: Any) -> tuple[Any, Gradients]:
        """Return loss, aux and gradients of one replica; for the arguments see ``Oracle.local``."""
        batch, scale, given, active, rules, _ = args
        hint = "A frozen layer's gradient would be computed in the loop."
        got = None if active is True else "a frozen stack"
        checks.absent(_WHO, "layers", got, "None with freezing", hint)
        params, states = params
        rules = carried.resolve(rules, params)
        allowed, hint = "None with boostax.carry", "A carried leaf's cotangent is no gradient."
        checks.require(not rules, _WHO, "layers", got=[*rules][:3], allowed=allowed, hint=hint)
        head, stacks = self.plan.layers.split(params)
        return _Sweep(self, self.plan, stacks, states, batch).run(head, given, scale)

    @property
    def reads(self) -> bool:
        """Return whether the loss's program is read before differentiation."""
        return True

    def judge(self, program: Any, trained: PyTree) -> None:
        """Refuse a loss that uses the layers' params outside of ``scan_layers``."""
        if self.mesh is not None:
            super().judge(program, trained)
        stack_of = self.plan.layers.stack_of
        require_scanned(program, [stack_of(name) is not None for name in trees.names(trained)])

    def gathers(self, params: PyTree) -> tuple[str, ...]:
        """Return the names of the params that this function gathers itself."""
        return tuple(filter(self.plan.layers.stack_of, trees.names(params)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Sweep:
    """The gradient of one replica's batch.

    Attributes:
      oracle: the gradient function.
      plan: the layers.
      given: the params of the stacks, as stored on the device.
      states: with ``release``, the states of the stacks' layers.
      batch: the batch of this replica.
    """

    oracle: LayeredOracle
    plan: Plan
    given: Stacks
    states: dict[str, PyTree]
    batch: PyTree

    @functools.cached_property
    def slices(self) -> int:
        """The number of micro-batches of this replica."""
        return self.oracle._slices(self.batch) // self.oracle.replicas

    @functools.cached_property
    def stacks(self) -> Stacks:
        """The params that the loop reads: shards, or params that are gathered once."""
        once, sent_ = self.plan.layers.once, self.plan.sent
        return {k: sent_(k, x, True) if once else x for k, x in self.given.items()}

    def run(
        self, head: PyTree, given: dict[str, Any], scale: jax.Array
    ) -> tuple[tuple[jax.Array, PyTree], Gradients]:
        """Return loss, aux and gradients; with ``once`` the stacks' gradients are local."""
        names, layers, oracle = self.plan.names, self.plan.layers, self.oracle
        # The loss gets zeros in place of the layers.
        shown = layers.joined(head, jax.tree.map(zeros, self.plan.stacks))
        how: Any = {"accumulator_dtype": oracle.accumulator_dtype}
        how["more"] = {"threaded": (self.sinks(), jnp.asarray(True))}
        args = self.evaluate, shown, self.batch, given, scale
        found, terms = self.traced(None, None).traced(oracle._sliced, *args, **how)
        (loss, aux), grads, (sinks, finite) = found
        weight = as_aux(aux).weight
        local = self.slices if weight is None else weight
        if layers.once:
            grads = layers.joined(grads, {k: _mean(x, local) for k, x in sinks.items()})
        if names:
            loss, aux, grads = auxiliary.over_replicas(loss, aux, grads, names)
        weight = as_aux(aux).weight
        aux = auxiliary.reported(aux, terms, oracle.replicas)
        if layers.once:
            return (loss, aux), Gradients(grads)
        if not layers.release:
            # The mean of the weighted sums over the replicas is divided by the mean of the weights.
            total = self.slices if weight is None else weight
            sums = {k: _mean(x, total) for k, x in sinks.items()}
            return (loss, aux), Gradients(grads, layers.joined(masked(head), sums))
        new = {k: received(x.bits, self.states[k]) for k, x in sinks.items()}
        params = {k: x.params for k, x in sinks.items()}
        skipped = jnp.stack([x.skipped.sum() for x in sinks.values()]).sum()
        done = Released(params, new, finite, skipped.astype(jnp.int32))
        return (loss, aux), Gradients(grads, applied=done)

    def sinks(self) -> dict[str, PyTree]:
        """Return the initial sinks of the backward loop."""
        if not self.plan.layers.release:
            dtype = self.oracle.accumulator_dtype
            return {k: trees.buffers(x, dtype) for k, x in self.stacks.items()}
        found: dict[str, PyTree] = {}
        for name, leaves in self.stacks.items():
            none = jnp.zeros(len(leaves[0]), jnp.float32)
            found[name] = Sink(leaves, sent(self.states[name]), none)
        return found

    def evaluate(
        self, params: Any, rows: Any, counts: Any, scale: Any, /, *, threaded: Any, **given: Any
    ) -> tuple[tuple[jax.Array, PyTree], PyTree, Any]:
        """Return loss, aux and other params' gradient of one micro-batch, and the new sinks."""
        oracle, layers, (sinks, finite) = self.oracle, self.plan.layers, threaded
        factor = self.factor(params, rows, given)
        head, shown = layers.split(params)

        def scaled_loss(head: PyTree, sinks: PyTree) -> Any:
            params = layers.joined(head, shown)
            run = self.traced(sinks, factor)
            result = run.traced(oracle._loss_and_aux, params, params, rows, given, scale)
            loss, _, aux = auxiliary.of_slice(result, counts, None, 1 / self.slices)
            return loss * scale.astype(loss.dtype), (loss, aux)

        with handshake.multiplied(scale):
            value, pull, (loss, aux) = jax.vjp(scaled_loss, head, sinks, has_aux=True)
        seed = jnp.ones_like(value)
        if layers.release:
            # A replica without items is ignored; if no replica has items, the step is held.
            counted = jnp.asarray(True) if factor is None else factor > 0
            finite = axes.agree(jnp.isfinite(value) | ~counted, self.plan.names)
            finite &= ~axes.agree(~counted, self.plan.names)
            seed = jnp.where(finite, seed, jnp.nan)
        grads, sinks = pull(seed)
        weight = as_aux(aux).weight
        if weight is not None:
            loss, grads = drop_empty((loss, grads), jnp.asarray(weight))
        return (loss, aux), grads, (sinks, finite)

    def factor(self, params: PyTree, rows: PyTree, given: dict[str, Any]) -> jax.Array | None:
        """Return the weight of a micro-batch's gradients in the loop; ``None`` for equal weights.

        The weight must be known before the backward pass, so the loss is evaluated once more; XLA
        removes all but the weight.
        """

        def weight(params: PyTree, rows: PyTree) -> Any:
            run = self.traced(None, None)
            _, aux = run.traced(self.oracle._loss_and_aux, params, params, rows, given)
            return as_aux(aux).weight

        if jax.eval_shape(weight, params, rows) is None:
            return None
        local = jnp.asarray(weight(params, rows), jnp.float32)
        if not self.plan.layers.release:
            return local
        total = auxiliary.total(local, self.plan.names)
        return local * self.oracle.replicas / jnp.where(total > 0, total, 1)

    def traced(self, sinks: Any, factor: Any) -> Run:
        """Return the stacks for a trace of the loss; without sinks, for a forward pass."""
        plan, policy = self.plan, self.plan.policy
        cast = None
        if policy is not None and policy.only_matmuls:
            cast = functools.partial(autocast, dtype=policy.compute_dtype)
        update = self.stepped if plan.layers.release else self.added

        def stack(name: str, leaves: Arrays) -> Stack:
            read = lambda x: plan.cast(name, x if plan.layers.once else plan.sent(name, x))  # noqa: E731
            if sinks is None:
                return Stack(name, leaves, read, wrap=cast)
            change = functools.partial(update, name, factor)
            return Stack(name, leaves, read, sinks[name], change, cast)

        return Run([stack(name, leaves) for name, leaves in self.stacks.items()])

    def added(self, name: str, factor: Any, sums: Arrays, grads: Arrays, _: Any) -> Arrays:
        """Add the gradients of a layer to their sums."""
        grads = [_weighed(g, factor) for g in grads]
        grads = grads if self.plan.layers.once else self.plan.reduced(name, grads)
        pairs = zip(sums, grads, strict=True)
        return [(total.astype(g.dtype) + g).astype(total.dtype) for total, g in pairs]

    def stepped(self, name: str, factor: Any, sink: Sink, grads: Arrays, finite: Any) -> Sink:
        """Run the optimizer of a layer, or skip the layer."""
        grads = self.plan.reduced(name, [_weighed(g, factor) for g in grads])
        finite = finite if factor is None else finite | (factor == 0)
        ok = axes.agree(finite & norms.all_finite(grads), self.plan.names)
        old = sink.params, received(sink.bits, self.states[name])
        new = self.plan.updated(name, grads, old[1], old[0])
        params, state = jax.tree.map(lambda x, y: jnp.where(ok, x, y), new, old)
        return Sink(params, sent(state), sink.skipped + ~ok)


def _mean(sums: Arrays, weight: Any) -> Arrays:
    return auxiliary.divide(sums, jnp.asarray(weight, jnp.float32))


def _weighed(g: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Return a gradient times its weight; 0 without items, because their mean is 0/0."""
    if factor is None:
        return g
    return jnp.where(factor == 0, 0, g.astype(trees.wide_dtype(g)) * factor)


def layered(plan: Plan, oracle: Oracle, policy: Policy | None) -> LayeredOracle:
    """Return a gradient function that runs layers; its params are set later by ``placed``."""
    hint = "Each layer is updated once per call: take the rows of all micro-batches at once."
    got = oracle.count if plan.layers.release and oracle.count != 1 else None
    checks.absent(_WHO, "microbatches", got, "1 with release=True", hint)

    @functools.wraps(oracle.loss_fn)
    def of_model(params: PyTree, /, *args: Any, **kwargs: Any) -> Any:
        return oracle.loss_fn(showing(trees.restored(params)), *args, **kwargs)

    fields = {x.name: getattr(oracle, x.name) for x in dataclasses.fields(oracle)}
    # The loss gets the leaves that the policy has cast, so these leaves are noted.
    fields["computed"] = of_model if policy is None else policy.compute(of_model)
    return LayeredOracle(**fields, plan=dataclasses.replace(plan, policy=policy))


@dataclasses.dataclass(frozen=True)
class Layers(Stacked, Backward):
    """Options for stacked layers that a loss scans with ``boostax.train.scan_layers``.

    Attributes:
      path: the path of the stacked params, such as ``"decoder/blocks"``, or several paths.
      weights: when to gather params that are sharded over the replicas (FSDP). ``"once"`` gathers
        them once per call, in the dtype in which the loss computes, sums unsharded gradients on
        each device and leaves the reduction to the optimizer. ``"by layer"`` gathers each layer
        before its computation, in both passes, and reduce-scatters its gradient immediately, so
        that a device has only one gathered layer besides its shards; the reduction is the plain
        mean.
      release: whether to run the stacks' optimizer in the backward loop, layer by layer, so that
        only one layer's gradient exists at a time. Weights are then gathered by layer.

    Raises:
      ValueError: an unknown value of ``weights``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> def loss(params, x):
      ...   layer = lambda x, w: (jnp.tanh(x * w), None)
      ...   return boostax.train.scan_layers(layer, x, params["layers"])[0].sum()
      >>> layers = boostax.train.Layers("layers", release=True)
      >>> step = boostax.make_train_step(loss, optax.sgd(0.1), layers=layers)
      >>> state, metrics = step(step.init({"layers": jnp.ones(3)}), jnp.ones(4))
      >>> int(metrics["layers_skipped"])
      0
    """

    def planned(
        self, tx: optax.GradientTransformation, shard_optimizer: bool
    ) -> tuple[optax.GradientTransformation, Around]:
        """Return the optimizer of a step with layers, and what makes its gradient function."""
        hint, got = "Shard the params of the layers (FSDP).", shard_optimizer and self.release
        checks.absent(_WHO, "shard_optimizer", got or None, "False with release=True", hint)
        if not self.once:
            require_mean(tx)
        plan = Plan(self, tx)
        return released(tx, self) if self.release else tx, functools.partial(layered, plan)


Layers.__init__ = checks.arguments(Layers.__init__)
