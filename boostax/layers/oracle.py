# SPDX-License-Identifier: Apache-2.0
"""The gradient function of a step that reduces or updates stacked layers in the backward loop.

The backward loop sums a stack's gradients, unsharded or in shards like the params, or runs the
stack's optimizer. ``boostax.layers.scan`` has the loop, and ``boostax.layers.stacks`` describes the
stacks.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from boostax._core import axes, checks, handshake, interpret, jaxprs, norms, placement, trees
from boostax._core.placement import Placement
from boostax._core.replicas import is_per_replica
from boostax._core.types import PyTree
from boostax.accumulate import aux as auxiliary
from boostax.accumulate import carried
from boostax.layers import scan
from boostax.layers.release import LayersState, Released, released, require_mean
from boostax.layers.stacks import Arrays, Plan, Stacked
from boostax.precision.policy import Policy, autocast
from boostax.train.oracle import Around, Backward, Gradients, Oracle

# Loss and aux.
Result = tuple[jax.Array, PyTree]
# The weight of a micro-batch's gradients; None for equal weights.
Weight = jax.Array | None
_WHO = "Layers"


@dataclasses.dataclass(frozen=True)
class LayeredOracle(Oracle):
    """The gradient function of a step with ``layers=``.

    Attributes:
      plan: the layers.
    """

    plan: Plan = dataclasses.field(kw_only=True)

    def placed(self, types: PyTree, place: Placement | None, wire: str | None) -> LayeredOracle:
        """Return the gradient function for params of these types and this placement."""
        self.plan.layers.require_stacked(types)
        plan = dataclasses.replace(self.plan, types=types, place=place, wire=wire)
        plan.sharded_dims  # noqa: B018, the property refuses stacks that are sharded along layers
        return dataclasses.replace(self, plan=plan)

    def inputs(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree, Gradients]:
        """Return params and the states of released layers, with specs; see ``Oracle.inputs``."""
        hint = "Each replica gathers shards of the layers from other replicas."
        got = "different per replica" if is_per_replica(params) else None
        checks.absent(_WHO, "params", got, "equal on all replicas with layers=", hint)
        # Only an optimizer that runs in the backward loop has a ``LayersState``.
        states = opt_state.stacks if isinstance(opt_state, LayersState) else {}
        local = Gradients(PartitionSpec(self.names))
        if self.mesh is None:
            return (params, states), None, local
        layers = self.plan.layers
        head, stacks = layers.split(params)
        replicated: PyTree = PartitionSpec()
        of_stacks = layers.split(self.plan.specs(params))[1]
        of_states = {name: self.plan.specs(state) for name, state in states.items()}
        params = layers.joined(placement.gathered(self.mesh, self.names, head), stacks)
        specs = layers.joined(jax.tree.map(lambda _: replicated, head), of_stacks), of_states
        if layers.release:
            local = local._replace(applied=Released(of_stacks, of_states, replicated, replicated))
        elif not layers.once:
            local = local._replace(averaged=layers.alone(params, of_stacks))
        return (params, states), specs, local

    def local(self, params: PyTree, *args: PyTree) -> tuple[Result, Gradients]:
        """Return loss, aux and gradients of one replica; for the arguments see ``Oracle.local``."""
        batch, scale, kwargs, active, rules, _ = args
        hint = "The backward loop would also compute the gradients of frozen layers."
        got = None if active is True else "a frozen stack"
        checks.absent(_WHO, "layers", got, "None with freezing", hint)
        params, states = params
        rules = carried.resolve(rules, params)
        hint = "The cotangent of a carried leaf is its new value, not a gradient."
        checks.absent(_WHO, "layers", [*rules][:3] or None, "None with boostax.carry", hint)
        count = self._slices(batch) // self.replicas
        return _Replica(self, self.plan, params, states, batch, count).gradients(kwargs, scale)

    @property
    def reads(self) -> bool:
        """Return True, because ``check`` reads the loss's program before differentiation."""
        return True

    def check(self, program: jaxprs.ClosedJaxpr, trained: PyTree) -> None:
        """Refuse a loss that does not scan a stack or also uses the stack's params elsewhere."""
        if self.mesh is not None:
            super().check(program, trained)
        if not scan.STACKS.get():
            return
        missing = [stack.name for stack in scan.STACKS.get() if not stack.scanned]
        hint = "Scan the unmodified params of the stack, and cast or mask them inside the body."
        allowed = "scanned by boostax.train.scan_layers in loss_fn"
        checks.absent("scan_layers", "layers", missing or None, allowed, hint)
        shown = [self.plan.layers.stack_of(name) is not None for name in trees.names(trained)]
        got = "used outside" if any(interpret.flow(program, shown, None, any, False)) else None
        hint = "Other uses get no gradient. Move the code into the body, or leave layers= out."
        checks.absent("scan_layers", "params of layers", got, "used only in scan_layers", hint)

    def gathers(self, params: PyTree) -> tuple[str, ...]:
        """Return the names of the params that the backward loop gathers in place of the step."""
        return tuple(filter(self.plan.layers.stack_of, trees.names(params)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Replica:
    """The work of one replica on its batch.

    Attributes:
      oracle: the gradient function.
      plan: the layers.
      params: the params of this replica; the stacks' params are as stored on the device.
      states: with ``release``, the states of the stacks' layers.
      batch: the batch of this replica.
      microbatches: the number of micro-batches of this replica.
    """

    oracle: LayeredOracle
    plan: Plan
    params: PyTree
    states: dict[str, PyTree]
    batch: PyTree
    microbatches: int

    @functools.cached_property
    def stacks(self) -> dict[str, Arrays]:
        """Return the stacks' params that the loop reads: shards, or params gathered once."""
        stacks = self.plan.layers.split(self.params)[1]
        once = self.plan.layers.once
        return {k: self.plan.gathered(k, x, True) if once else x for k, x in stacks.items()}

    def gradients(self, kwargs: dict[str, PyTree], scale: jax.Array) -> tuple[Result, Gradients]:
        """Return loss, aux and gradients; if ``layers.once``, the stacks' gradients are local."""
        layers = self.plan.layers
        types = layers.split(self.plan.types)[1]
        # The loss gets zeros in place of the layers' params.
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)
        args = self.evaluate, layers.joined(self.params, zeros), self.batch, kwargs, scale
        accumulators: dict[str, PyTree] = {}
        for name, leaves in self.stacks.items():
            if layers.release:
                skipped = jnp.zeros(len(leaves[0]), jnp.float32)
                bits = jax.tree.map(scan.as_floats, self.states[name])
                accumulators[name] = scan.UpdatedLayers(leaves, bits, skipped)
            else:
                accumulators[name] = trees.buffers(leaves, self.oracle.dtype)
        more = {"threaded": (accumulators, jnp.asarray(True))}
        with axes.during(scan.STACKS, self.traced()):
            result, terms = self.oracle._sliced(*args, more=more, dtype=self.oracle.dtype)
        (loss, aux), grads, (stacks, finite) = result
        if layers.once:
            grads = layers.joined(grads, self.means(stacks, auxiliary.as_aux(aux).weight))
        if self.plan.names:
            loss, aux, grads = auxiliary.over_replicas(loss, aux, grads, self.plan.names)
        weight = auxiliary.as_aux(aux).weight
        aux = auxiliary.reported(aux, terms, self.oracle.replicas)
        if layers.once:
            return (loss, aux), Gradients(grads)
        if not layers.release:
            # ``stacks`` has sums of weighted gradients, averaged over the replicas. ``weight`` is
            # averaged over the replicas, too.
            means = layers.alone(self.params, self.means(stacks, weight))
            return (loss, aux), Gradients(grads, means)
        of_stack = functools.partial(jax.tree.map, scan.from_floats)
        states = {name: of_stack(x.bits, self.states[name]) for name, x in stacks.items()}
        params = {name: x.params for name, x in stacks.items()}
        skipped = jnp.stack([x.skipped.sum() for x in stacks.values()]).sum()
        applied = Released(params, states, finite, skipped.astype(jnp.int32))
        return (loss, aux), Gradients(grads, applied=applied)

    def means(self, sums: dict[str, Arrays], weight: PyTree) -> dict[str, Arrays]:
        """Divide the stacks' sums of gradients by ``weight``, or by the number of micro-batches."""
        total = self.microbatches if weight is None else weight
        return {k: auxiliary.divide(x, jnp.asarray(total, jnp.float32)) for k, x in sums.items()}

    def evaluate(
        self, *args: PyTree, threaded: tuple[dict[str, PyTree], jax.Array], **kwargs: PyTree
    ) -> tuple[Result, PyTree, PyTree]:
        """Return loss, aux, the gradients outside of the stacks, and the new accumulators."""
        params, rows, counts, scale = args
        layers = self.plan.layers
        accumulators, finite = threaded
        weight = self.weight(params, rows, kwargs)
        head, zeros = layers.split(params)

        def scaled_loss(head: PyTree, accumulators: PyTree) -> tuple[jax.Array, Result]:
            params = layers.joined(head, zeros)
            with axes.during(scan.STACKS, self.traced(accumulators, weight)):
                result = self.oracle._loss_and_aux(params, params, rows, kwargs, scale)
            loss, _, aux = auxiliary.of_slice(result, counts, None, 1 / self.microbatches)
            return loss * scale.astype(loss.dtype), (loss, aux)

        with handshake.multiplied(scale):
            value, pull, (loss, aux) = jax.vjp(scaled_loss, head, accumulators, has_aux=True)
        seed = jnp.ones_like(value)
        if layers.release:
            # A loss that is not finite is ignored on a replica without items. If no replica has
            # items, the step is skipped.
            counted = jnp.asarray(True) if weight is None else weight > 0
            finite = axes.agree(jnp.isfinite(value) | ~counted, self.plan.names)
            finite &= ~axes.agree(~counted, self.plan.names)
            seed = jnp.where(finite, seed, jnp.nan)
        grads, accumulators = pull(seed)
        items = auxiliary.as_aux(aux).weight
        if items is not None:
            loss, grads = auxiliary.drop_empty((loss, grads), jnp.asarray(items))
        return (loss, aux), grads, (accumulators, finite)

    def weight(self, params: PyTree, rows: PyTree, kwargs: dict[str, PyTree]) -> Weight:
        """Return the weight of a micro-batch's gradients in the loop; ``None`` for equal weights.

        The weight must be known before the backward pass, so the loss is evaluated once more. XLA
        removes the part of this evaluation that the weight does not need.
        """

        def items(params: PyTree, rows: PyTree) -> PyTree:
            with axes.during(scan.STACKS, self.traced()):
                _, aux = self.oracle._loss_and_aux(params, params, rows, kwargs)
            return auxiliary.as_aux(aux).weight

        if jax.eval_shape(items, params, rows) is None:
            return None
        local = jnp.asarray(items(params, rows), jnp.float32)
        if not self.plan.layers.release:
            return local
        total = auxiliary.total(local, self.plan.names)
        return local * self.oracle.replicas / jnp.where(total > 0, total, 1)

    def traced(self, accumulators: PyTree = None, weight: Weight = None) -> list[scan.Stack]:
        """Return the stacks for a trace of the loss; a backward pass needs accumulators."""
        policy = self.plan.policy
        cast = None
        if policy is not None and policy.only_matmuls:
            cast = functools.partial(autocast, dtype=policy.compute_dtype)
        stacks: list[scan.Stack] = []
        for name, leaves in self.stacks.items():
            read = functools.partial(self.plan.read, name)
            change = functools.partial(self.update, name, weight)
            accumulator = accumulators and accumulators[name]
            stacks.append(scan.Stack(name, leaves, read, change, accumulator, cast))
        return stacks

    def update(
        self, name: str, weight: Weight, layer: PyTree, grads: Arrays, finite: jax.Array
    ) -> PyTree:
        """Add a layer's gradients to their sums, or update the layer if it is not skipped."""
        if weight is not None:
            # Without items, a mean loss is 0/0 and its gradient is NaN, so the gradient becomes 0.
            products = (g.astype(trees.wide_dtype(g)) * weight for g in grads)
            grads = [jnp.where(weight == 0, 0, g) for g in products]
        grads = grads if self.plan.layers.once else self.plan.reduced(name, grads)
        if not self.plan.layers.release:
            pairs = zip(layer, grads, strict=True)
            return [(total.astype(g.dtype) + g).astype(total.dtype) for total, g in pairs]
        finite = finite if weight is None else finite | (weight == 0)
        is_applied = axes.agree(finite & norms.all_finite(grads), self.plan.names)
        state = jax.tree.map(scan.from_floats, layer.bits, self.states[name])
        new = self.plan.updated(name, grads, state, layer.params)
        old = layer.params, state
        params, state = jax.tree.map(lambda x, y: jnp.where(is_applied, x, y), new, old)
        bits = jax.tree.map(scan.as_floats, state)
        return scan.UpdatedLayers(params, bits, layer.skipped + ~is_applied)


def layered(plan: Plan, oracle: Oracle, policy: Policy | None) -> LayeredOracle:
    """Return a gradient function for layers; its method ``placed`` sets the types of the params."""
    hint = "Each layer is updated once per call. Leave microbatches= out, and pass all rows."
    got = oracle.count if plan.layers.release and oracle.count != 1 else None
    checks.absent(_WHO, "microbatches", got, "1 with release=True", hint)

    @functools.wraps(oracle.loss_fn)
    def of_model(params: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        params = trees.restored(params)
        for stack in scan.STACKS.get():
            path = f"{stack.name}/"
            stack.shown = [x for name, x in trees.named(params) if f"{name}/".startswith(path)]
            stack.scanned = False
        return oracle.loss_fn(params, *args, **kwargs)

    fields = {x.name: getattr(oracle, x.name) for x in dataclasses.fields(oracle)}
    # The policy casts leaves before the loss sees them, so ``of_model`` records the cast leaves.
    fields["computed"] = of_model if policy is None else policy.compute(of_model)
    return LayeredOracle(**fields, plan=dataclasses.replace(plan, policy=policy))


@dataclasses.dataclass(frozen=True)
class Layers(Stacked, Backward):
    """Options for stacked layers that a loss scans with ``boostax.train.scan_layers``.

    Attributes:
      path: the path of the stacked params, such as ``"decoder/blocks"``, or several paths.
      weights: when to gather params that are sharded over the replicas (FSDP). ``"once"`` gathers
        the params once per call, in the dtype in which the loss computes, and sums unsharded
        gradients on each device; the optimizer reduces the sums. ``"by layer"`` gathers each layer
        before its computation, in both passes, and reduce-scatters the layer's gradient
        immediately. A device then has only one gathered layer in addition to its shards. The
        reduction is the plain mean.
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
        """Return the optimizer of a step, and a function that makes its ``LayeredOracle``."""
        hint = "Shard the params of the layers, as FSDP does, not the optimizer."
        got = True if shard_optimizer and self.release else None
        checks.absent(_WHO, "shard_optimizer", got, "False with release=True", hint)
        if not self.once:
            require_mean(tx)
        plan = Plan(self, tx)
        return released(tx, self) if self.release else tx, functools.partial(layered, plan)


Layers.__init__ = checks.arguments(Layers.__init__)
