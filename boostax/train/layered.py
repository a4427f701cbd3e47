# SPDX-License-Identifier: Apache-2.0
"""The gradient function of a step whose loss scans layers: what happens in the backward loop.

A stack's gradients are added up in the loop, whole or in the shards of its params, or its optimizer
runs there. See ``boostax.train.layers`` for the loop, and ``boostax.train.stacks`` for the stacks.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec, SingleDeviceSharding

from boostax._core import axes, checks, handshake, norms, trees
from boostax._core.placement import Placement
from boostax._core.replicas import PerReplica, Swept, is_per_replica
from boostax.accumulate import aux as auxiliary
from boostax.accumulate import carried
from boostax.accumulate.aux import Aux, Beside, as_aux, as_given, drop_empty, own_of
from boostax.precision.loss_scale import scales as scales_of
from boostax.precision.policy import Policy, autocast
from boostax.train.layers import (
    Run,
    Sink,
    Stack,
    moved,
    received,
    require_scanned,
    sent,
    showing,
)
from boostax.train.oracle import Oracle, gathered
from boostax.train.release import LayersState, Released, released, require_mean
from boostax.train.stacks import Arrays, Layers, Plan, masked

PyTree = Any
Stacks = dict[str, Arrays]
_WHO = "make_train_step"


class _Threaded(NamedTuple):
    """The values that go from micro-batch to micro-batch, in the place of the model's state.

    Attributes:
      model_state: the model's state.
      sinks: for each stack its ``Sink``, or the sums of its gradients.
      finite: whether the loss was finite.
    """

    model_state: PyTree
    sinks: dict[str, PyTree]
    finite: jax.Array


@dataclasses.dataclass(frozen=True)
class LayeredOracle(Oracle):
    """The gradient function of a step with ``layers=``.

    Attributes:
      plan: the layers.
    """

    plan: Any = None

    def placed(self, types: PyTree, place: Placement | None, wire: str | None) -> "LayeredOracle":
        """Return it for params of these types at their place."""
        self.plan.layers.require_stacked(types)
        plan = dataclasses.replace(self.plan, types=types, place=place, wire=wire)
        plan.cuts  # noqa: B018, it refuses layers that are sharded along their number
        return dataclasses.replace(self, plan=plan)

    def with_aux(
        self, params: PyTree, opt_state: PyTree, given_batch: PyTree, active: PyTree, kwargs: Any
    ) -> tuple[tuple[jax.Array, PyTree], PyTree]:
        """Return ``((loss, aux), grads)``; see ``Oracle.with_aux``."""
        plan: Plan = self.plan
        hint = "A frozen layer's gradient would be computed in the loop."
        checks.require(_WHO, "layers", "a frozen stack", "None with freezing", active is True, hint)
        own, hint = is_per_replica(params), "Its layers would be gathered from other replicas."
        checks.require(
            _WHO, "params", "those of each replica", "common with layers=", not own, hint
        )
        rules = carried.resolve(carried.declared(opt_state, params, _WHO), params)
        allowed, hint = "None with boostax.carry", "A carried leaf's cotangent is no gradient."
        checks.require(_WHO, "layers", [*rules][:3], allowed, not rules, hint)
        scale, scales = scales_of("loss_scale", opt_state)
        given = {k: x for k, x in (kwargs | {"scales": scales}).items() if x is not None}
        # Here an optimizer's state keeps the nodes of its params, which may be Variables of NNX.
        states = opt_state.stacks if isinstance(opt_state, LayersState) else {}
        head, stacks = plan.layers.split(params)
        with handshake.scaling(opt_state):
            if self.mesh is None:
                value, grads = _Sweep(self, stacks, states, given_batch).run(head, given, scale)
                return value, grads.entered()
            return self._over_mesh((head, stacks, states), given_batch, given, scale, scales)

    def _over_mesh(
        self, params: Any, batch: PyTree, given: Any, scale: jax.Array, scales: jax.Array | None
    ) -> tuple[tuple[jax.Array, PyTree], PyTree]:
        """Map ``_Sweep`` over the replicas: on the shards of the stacks, and whole other params."""
        plan: Plan = self.plan
        given_aux: PyTree = Aux()

        def each(params: PyTree, batch: PyTree, given: Any, scale: jax.Array) -> Any:
            nonlocal given_aux
            handshake.hand_on(scales, given.get("scales"))
            head, stacks, states = params
            (loss, given_aux), grads = _Sweep(self, stacks, states, batch).run(head, given, scale)
            own = jax.tree.map(lambda x: x[None], (own_of(given_aux), grads.local))
            return (loss, as_aux(given_aux)), own, grads[1:]

        head, _, states = params
        whole: Any = PartitionSpec()
        of_params = plan.specs(plan.types)
        of_stacks = plan.layers.split(of_params)[1]
        of_states = {k: plan.specs(x) for k, x in states.items()}
        sums = plan.layers.joined(masked(head), of_stacks)
        done = Released(of_stacks, of_states, whole, whole)
        handed: Any = (
            ((), done) if plan.layers.release else ((), ()) if plan.layers.once else (sums, ())
        )
        specs = whole, of_stacks, of_states
        run = self._mapped(each, (whole, PartitionSpec(self.names), handed), specs)
        params = gathered(self.mesh, self.names, head), *params[1:]
        (loss, told), (own, local), rest = run(params, batch, given, scale)
        aux = as_given(told, PerReplica(own), given_aux)
        return (loss, aux), Swept(PerReplica(local), *rest)

    def _loss_and_aux(
        self, trained: PyTree, params: PyTree, batch: PyTree, kwargs: Any, scale: Any = None
    ) -> Any:
        """Return the result of the loss, which gets zeros in the place of the layers."""
        shown = self.plan.layers.joined(trained, jax.tree.map(_zeros, self.plan.stacks))
        threaded = kwargs.get("model_state")
        if not isinstance(threaded, _Threaded):
            return super()._loss_and_aux(shown, shown, batch, kwargs, scale)
        kwargs = _with_state(kwargs, threaded.model_state)
        loss, aux = super()._loss_and_aux(shown, shown, batch, kwargs, scale)
        told = as_aux(aux)
        if told.model_state is not None:
            threaded = threaded._replace(model_state=told.model_state)
        return loss, as_given(told._replace(model_state=threaded), own_of(aux), aux)

    @property
    def reads(self) -> bool:
        """Return whether the loss is read before it is differentiated."""
        return True

    def judge(self, program: Any, trained: PyTree) -> None:
        """Refuse a loss that uses the layers in another way."""
        if self.mesh is not None:
            super().judge(program, trained)
        paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(trained))
        require_scanned(program, [self.plan.layers.stack_of(path) is not None for path in paths])

    def gathers(self, params: PyTree) -> tuple[str, ...]:
        """Return the names of the params that it gathers itself."""
        paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(params))
        return tuple(trees.path_name(path) for path in paths if self.plan.layers.stack_of(path))

    def loss_at(self, batch: PyTree, /, **kwargs: Any) -> Callable[[PyTree], jax.Array]:
        """Refuse a line search, which would evaluate the loss at other params."""
        del batch, kwargs

        def refused(params: PyTree) -> jax.Array:
            del params
            allowed = "an optimizer without a line search with layers="
            raise ValueError(checks.message(_WHO, "tx", allowed, "one", "Leave layers= out."))

        return refused

    def shardings(self, state: PyTree, where: PyTree) -> PyTree:
        """Return the shardings of a state, with those of the layers' in the host's memory."""
        if not self.plan.layers.host:
            return where

        def hosted(node: Any, at: Any) -> Any:
            if not isinstance(node, LayersState):
                return at
            kind = lambda x, at: at.with_memory_kind("pinned_host") if _away(x, 2) else at  # noqa: E731
            return at._replace(stacks=jax.tree.map(kind, node.stacks, at.stacks))

        return jax.tree.map(hosted, state, where, is_leaf=lambda x: isinstance(x, LayersState))

    def settled(self, state: PyTree) -> PyTree:
        """Return a step's first state where it belongs."""
        if not self.plan.layers.host:
            return state
        here = SingleDeviceSharding(jax.devices()[0])
        where = jax.tree.map(lambda x: x.sharding or here, state)
        devices = jax.tree.leaves(where)[0].device_set
        kinds = {x.kind for d in devices for x in d.addressable_memories()}
        fits = "pinned_host" in kinds and all(d.platform != "cpu" for d in devices)
        hint, allowed = "Leave host= out.", "False where a backend ignores memory kinds"
        checks.require("Layers", "host", True, allowed, fits, hint)

        def put(x: Any, where: Any) -> Any:
            typed = isinstance(x, jax.ShapeDtypeStruct)
            return x.update(sharding=where) if typed else jax.device_put(x, where)

        return jax.tree.map(put, state, self.shardings(state, where))


@dataclasses.dataclass(frozen=True, eq=False)
class _Sweep:
    """The gradient of one replica's batch.

    Attributes:
      oracle: the gradient function.
      given: the params of the stacks, as the device holds them.
      states: for ``release`` the states of their layers.
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
        """The params that the loop reads: shards, or what is gathered once."""
        once, sent_ = self.plan.layers.once, self.plan.sent
        return {k: sent_(k, x, True) if once else x for k, x in self.given.items()}

    @functools.cached_property
    def types(self) -> dict[str, PyTree]:
        """The types of the state of a layer of each stack."""
        cut = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)  # noqa: E731
        return jax.tree.map(cut, self.states)

    def run(
        self, head: PyTree, given: dict[str, Any], scale: jax.Array
    ) -> tuple[tuple[jax.Array, PyTree], Swept]:
        """Return loss, aux and gradients; those of ``once`` are local like the head's."""
        names, layers, once = self.plan.names, self.plan.layers, self.plan.layers.once
        first = _Threaded(given.get("model_state"), self.sinks(), jnp.asarray(True))
        like: list[Any] = []
        how: Any = {"accumulator_dtype": self.oracle.accumulator_dtype}
        evaluate = functools.partial(self.evaluate, like)
        args = evaluate, head, self.batch, given | {"model_state": first}, scale
        forward = self.traced(None, None)
        ((loss, aux), grads), terms = forward.traced(self.oracle._sliced, *args, **how)
        told, aux = as_aux(aux), as_given(_own(as_aux(aux), like[0]), own_of(aux), like[0])
        last: _Threaded = told.model_state
        local = self.slices if told.weight is None else told.weight
        if once:
            grads = layers.joined(grads, {k: _mean(x, local) for k, x in last.sinks.items()})
        if names:
            loss, aux, grads = auxiliary.over_replicas(loss, aux, grads, names)
        weight = as_aux(aux).weight
        aux = auxiliary.reported(aux, terms, self.replicas)
        if once:
            return (loss, aux), Swept(grads)
        if not layers.release:
            # The mean over the replicas of the weights divides the mean of what they weigh.
            total = self.slices if weight is None else weight
            sums = {k: _mean(x, total) for k, x in last.sinks.items()}
            return (loss, aux), Swept(grads, layers.joined(masked(head), sums))
        new = {k: received(x.bits, self.types[k]) for k, x in last.sinks.items()}
        params = {k: x.params for k, x in last.sinks.items()}
        skipped = jnp.stack([x.skipped.sum() for x in last.sinks.values()]).sum()
        done = Released(params, new, last.finite, skipped.astype(jnp.int32))
        return (loss, aux), Swept(grads, done=done)

    def sinks(self) -> dict[str, PyTree]:
        """Return what the backward loop begins with."""
        if not self.plan.layers.release:
            dtype = self.oracle.accumulator_dtype
            return {k: trees.buffers(x, dtype) for k, x in self.stacks.items()}
        found: dict[str, PyTree] = {}
        for name, leaves in self.stacks.items():
            bits, none = sent(self.states[name]), jnp.zeros(len(leaves[0]), jnp.float32)
            # A step's argument is typed as the device's, wherever it is.
            bits = moved(bits, jax.memory.Space.Host, self.away(name))
            found[name] = Sink(leaves, bits, none)
        return found

    def away(self, name: str) -> list[bool]:
        """Return for each array of a layer's state whether it is in the host's memory."""
        return [self.plan.layers.host and _away(x) for x in jax.tree.leaves(self.types[name])]

    def evaluate(
        self,
        like: list[Any],
        head: PyTree,
        rows: PyTree,
        counts: Any,
        scale: jax.Array,
        /,
        *,
        model_state: _Threaded,
        **given: Any,
    ) -> tuple[tuple[jax.Array, PyTree], PyTree]:
        """Return the loss and the head's gradient of one micro-batch; its aux threads the sinks."""
        given, oracle = _with_state(given, model_state.model_state), self.oracle
        factor = self.factor(head, rows, given)

        def scaled_loss(head: PyTree, sinks: PyTree) -> Any:
            run = self.traced(sinks, factor)
            result = run.traced(oracle._loss_and_aux, head, head, rows, given, scale)
            loss, _, aux = auxiliary.of_slice(result, counts, None, 1 / self.slices)
            return loss * scale.astype(loss.dtype), (loss, aux)

        with handshake.multiplied(scale):
            args = head, model_state.sinks
            value, pull, (loss, aux) = jax.vjp(scaled_loss, *args, has_aux=True)
        finite, seed = model_state.finite, jnp.ones_like(value)
        if self.plan.layers.release:
            # A replica without items has no say; without any the step is held.
            counted = jnp.asarray(True) if factor is None else factor > 0
            finite = axes.agree(jnp.isfinite(value) | ~counted, self.plan.names)
            finite &= ~axes.agree(~counted, self.plan.names)
            seed = jnp.where(finite, seed, jnp.nan)
        grads, sinks = pull(seed)
        told, like[:] = as_aux(aux), [aux]
        if told.weight is not None:
            loss, grads = drop_empty((loss, grads), jnp.asarray(told.weight))
        state = model_state.model_state if told.model_state is None else told.model_state
        told = told._replace(model_state=_Threaded(state, sinks, finite))
        return (loss, Beside(told, own_of(aux))), grads

    def factor(self, head: PyTree, rows: PyTree, given: dict[str, Any]) -> jax.Array | None:
        """Return the weight of a micro-batch's gradients in the loop; ``None`` if all are alike.

        It is known before the pass that needs it: XLA removes from this one what only the loss
        needs.
        """

        def weight(head: PyTree, rows: PyTree) -> Any:
            run = self.traced(None, None)
            _, aux = run.traced(self.oracle._loss_and_aux, head, head, rows, given)
            return as_aux(aux).weight

        if jax.eval_shape(weight, head, rows) is None:
            return None
        local = jnp.asarray(weight(head, rows), jnp.float32)
        if not self.plan.layers.release:
            return local
        total = auxiliary.total(local, self.plan.names)
        return local * self.replicas / jnp.where(total > 0, total, 1)

    def traced(self, sinks: Any, factor: Any) -> Run:
        """Return the stacks of a trace of the loss; without sinks, of a forward pass alone."""
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
            host = self.away(name) if plan.layers.host else ()
            change = functools.partial(update, name, factor)
            return Stack(name, leaves, read, sinks[name], change, host, cast)

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
        old = sink.params, received(sink.bits, self.types[name])
        new = self.plan.updated(name, grads, old[1], old[0])
        params, state = jax.tree.map(lambda x, y: jnp.where(ok, x, y), new, old)
        return Sink(params, sent(state), sink.skipped + ~ok)


def _with_state(given: dict[str, Any], model_state: PyTree) -> dict[str, Any]:
    others = {name: x for name, x in given.items() if name != "model_state"}
    return others if model_state is None else others | {"model_state": model_state}


def _own(told: Aux, like: PyTree) -> Aux:
    """Return the aux with the model's state alone, if the loss returned one."""
    state = None if as_aux(like).model_state is None else told.model_state.model_state
    return told._replace(model_state=state)


def _mean(sums: Arrays, weight: Any) -> Arrays:
    return auxiliary.divide(sums, jnp.asarray(weight, jnp.float32))


def _weighed(g: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Return a gradient times its weight; 0 without items, of which a mean is 0/0."""
    if factor is None:
        return g
    return jnp.where(factor == 0, 0, g.astype(trees.wide_dtype(g)) * factor)


def _away(x: Any, rank: int = 1) -> bool:
    """Return whether an array of a state can be kept in the host's memory.

    Integers travel as other numbers, which a device computes, and counts are scalars of a layer.
    """
    return trees.is_inexact(x.dtype) and x.ndim >= rank


def _zeros(x: Any) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype)


def layered(
    tx: optax.GradientTransformation,
    oracle: Oracle,
    layers: Layers | str,
    policy: Policy | None,
    gather: str | None,
    shard_optimizer: bool,
) -> tuple[optax.GradientTransformation, LayeredOracle]:
    """Return the optimizer and the gradient function of a step with ``layers=``."""
    layers = Layers(layers) if isinstance(layers, str) else layers
    hint = "Each layer is updated once per call: take the rows of all micro-batches at once."
    fits = oracle.count == 1 or not layers.release
    checks.require(_WHO, "microbatches", oracle.count, "1 with release=True", fits, hint)
    fits, hint = not (shard_optimizer and layers.release), "Shard the params of the layers (FSDP)."
    checks.require(_WHO, "shard_optimizer", True, "False with release=True", fits, hint)
    if not layers.once:
        require_mean(tx)
    fits, hint = gather != "int8", "Blocks of int8 are of whole arrays."
    checks.require(_WHO, "gather", gather, "'bfloat16' or None with layers=", fits, hint)

    @functools.wraps(oracle.loss_fn)
    def of_model(params: PyTree, /, *args: Any, **kwargs: Any) -> Any:
        return oracle.loss_fn(showing(trees.restored(params)), *args, **kwargs)

    fields = {x.name: getattr(oracle, x.name) for x in dataclasses.fields(oracle)}
    # The policy casts what the loss is shown, so its leaves are noted behind it.
    fields["computed"] = of_model if policy is None else policy.compute(of_model)
    made = LayeredOracle(**fields, plan=Plan(layers, tx, policy))
    return released(tx, layers) if layers.release else tx, made
