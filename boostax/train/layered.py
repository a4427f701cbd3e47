# SPDX-License-Identifier: Apache-2.0
"""The gradient function of a step whose loss scans layers, with work in the backward loop.

The loop sums a stack's gradients, unsharded or in the shards of the params, or runs the stack's
optimizer. See ``boostax.train.layers`` for the loop, and ``boostax.train.stacks`` for the stacks.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from boostax._core import axes, checks, gate, handshake, norms, placement, trees
from boostax._core.placement import Placement
from boostax._core.replicas import Swept, is_per_replica
from boostax.accumulate import aux as auxiliary
from boostax.accumulate import carried
from boostax.accumulate.aux import as_aux, drop_empty
from boostax.precision.policy import Policy, autocast
from boostax.train.layers import Run, Sink, Stack, received, require_scanned, sent, showing
from boostax.train.oracle import Oracle
from boostax.train.release import LayersState, Released
from boostax.train.stacks import Arrays, Layers, Plan, masked, zeros

PyTree = Any
Stacks = dict[str, Arrays]
_WHO = "Layers"


@dataclasses.dataclass(frozen=True)
class LayeredOracle(Oracle):
    """The gradient function of a step with ``layers=``.

    Attributes:
      plan: the layers.
    """

    plan: Any = None

    def placed(self, types: PyTree, place: Placement | None, wire: str | None) -> "LayeredOracle":
        """Return the gradient function for params of these types and this placement."""
        self.plan.layers.require_stacked(types)
        plan = dataclasses.replace(self.plan, types=types, place=place, wire=wire)
        plan.cuts  # noqa: B018, it refuses layers that are sharded along their number
        return dataclasses.replace(self, plan=plan)

    def entering(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Return params and the states of released layers, and the specs of their shards."""
        plan: Plan = self.plan
        own, hint = is_per_replica(params), "Its layers would be gathered from other replicas."
        got = "those of each replica"
        checks.require(not own, _WHO, "params", got=got, allowed="common with layers=", hint=hint)
        # An optimizer's state keeps the nodes of its params, which may be Variables of NNX.
        states = opt_state.stacks if isinstance(opt_state, LayersState) else {}
        if self.mesh is None:
            return (params, states), None
        (head, stacks), (_, of_stacks) = map(plan.layers.split, (params, plan.specs(params)))
        of_head = jax.tree.map(lambda _: PartitionSpec(), head)
        of_states = {k: plan.specs(x) for k, x in states.items()}
        params = plan.layers.joined(placement.gathered(self.mesh, self.names, head), stacks)
        return (params, states), (plan.layers.joined(of_head, of_stacks), of_states)

    def leaving(self, specs: PyTree) -> tuple[PyTree, ...]:
        """Return the specs of a ``Swept``'s fields besides local gradients."""
        layers: Layers = self.plan.layers
        if layers.once:
            return ()
        head, of_stacks = layers.split(specs[0])
        if layers.release:
            whole: Any = PartitionSpec()
            return (), Released(of_stacks, specs[1], whole, whole)
        return (layers.joined(masked(head), of_stacks),)

    def swept(self, params: PyTree, *args: Any) -> tuple[Any, Swept]:
        """Return loss, aux and gradients of one replica; for the arguments see ``_local``."""
        batch, scale, given, active, rules, _ = args
        hint = "A frozen layer's gradient would be computed in the loop."
        allowed = "None with freezing"
        got = "a frozen stack"
        checks.require(active is True, _WHO, "layers", got=got, allowed=allowed, hint=hint)
        params, states = params
        rules = carried.resolve(rules, params)
        allowed, hint = "None with boostax.carry", "A carried leaf's cotangent is no gradient."
        checks.require(not rules, _WHO, "layers", got=[*rules][:3], allowed=allowed, hint=hint)
        head, stacks = self.plan.layers.split(params)
        return _Sweep(self, stacks, states, batch).run(head, given, scale)

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
      given: the params of the stacks, as stored on the device.
      states: with ``release``, the states of the stacks' layers.
      batch: the batch of this replica.
    """

    oracle: LayeredOracle
    given: Stacks
    states: dict[str, PyTree]
    batch: PyTree

    @functools.cached_property
    def plan(self) -> Plan:
        """The layers."""
        return self.oracle.plan

    @functools.cached_property
    def replicas(self) -> int:
        """The number of replicas."""
        return axes.size(self.plan.names) if self.plan.names else 1

    @functools.cached_property
    def slices(self) -> int:
        """The number of micro-batches of this replica."""
        return self.oracle._slices(self.batch) // self.replicas

    @functools.cached_property
    def stacks(self) -> Stacks:
        """The params that the loop reads: shards, or params that are gathered once."""
        once, sent_ = self.plan.layers.once, self.plan.sent
        return {k: sent_(k, x, True) if once else x for k, x in self.given.items()}

    def run(
        self, head: PyTree, given: dict[str, Any], scale: jax.Array
    ) -> tuple[tuple[jax.Array, PyTree], Swept]:
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
        aux = auxiliary.reported(aux, terms, self.replicas)
        if layers.once:
            return (loss, aux), Swept(grads)
        if not layers.release:
            # The mean of the weighted sums over the replicas is divided by the mean of the weights.
            total = self.slices if weight is None else weight
            sums = {k: _mean(x, total) for k, x in sinks.items()}
            return (loss, aux), Swept(grads, layers.joined(masked(head), sums))
        new = {k: received(x.bits, self.states[k]) for k, x in sinks.items()}
        params = {k: x.params for k, x in sinks.items()}
        skipped = jnp.stack([x.skipped.sum() for x in sinks.values()]).sum()
        done = Released(params, new, finite, skipped.astype(jnp.int32))
        return (loss, aux), Swept(grads, done=done)

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
        return local * self.replicas / jnp.where(total > 0, total, 1)

    def traced(self, sinks: Any, factor: Any) -> Run:
        """Return the stacks for a trace of the loss; without sinks, for a forward pass."""
        plan, policy = self.plan, self.plan.policy
        cast = None
        if policy is not None and policy.only_matmuls:
            cast = functools.partial(autocast, dtype=policy.compute_dtype)
        update = self.stepped if plan.layers.release else self.added

        def stack(name: str, leaves: Arrays) -> Stack:
            sent_ = lambda x: x if plan.layers.once else plan.sent(name, x)  # noqa: E731
            read = lambda x: plan.cast(name, sent_(x))  # noqa: E731
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
    fits = oracle.count == 1 or not plan.layers.release
    allowed = "1 with release=True"
    checks.require(fits, _WHO, "microbatches", got=oracle.count, allowed=allowed, hint=hint)

    @functools.wraps(oracle.loss_fn)
    def of_model(params: PyTree, /, *args: Any, **kwargs: Any) -> Any:
        return oracle.loss_fn(showing(trees.restored(params)), *args, **kwargs)

    fields = {x.name: getattr(oracle, x.name) for x in dataclasses.fields(oracle)}
    # The loss gets the leaves that the policy has cast, so these leaves are noted.
    fields["computed"] = of_model if policy is None else policy.compute(of_model)
    return LayeredOracle(**fields, plan=dataclasses.replace(plan, policy=policy))


@dataclasses.dataclass(frozen=True, eq=False)
class LayeredUpdate(gate.GatedUpdate):
    """The ``update`` of an optimizer on a mesh, with the plan of its layers.

    Attributes:
      around: returns a gradient function that runs the layers, from a plain gradient function and
        its policy.
    """

    around: Callable[[Oracle, Policy | None], Oracle]


def on_place(update: Any, plan: Plan, types: PyTree, place: Placement) -> LayeredUpdate:
    """Return the ``update`` of an optimizer on a mesh, for params of these types and placement."""

    def around(oracle: Oracle, policy: Policy | None) -> Oracle:
        got, wanted = (oracle.mesh, oracle.names), (place.mesh, place.names)
        hint = "Pass value_and_grad the mesh and the axis of on_mesh: mesh=mesh, axis_name=..."
        allowed = f"{wanted}"
        checks.require(got == wanted, "value_and_grad", "mesh", got=got, allowed=allowed, hint=hint)
        return layered(plan, oracle, policy).placed(types, place, None)

    return LayeredUpdate(update.step, update.flush, around, init=update.init)
