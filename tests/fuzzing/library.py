"""A run of a case with boostax."""

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from median_gate import median_gate

import boostax
from fuzzing.cases import AVERAGES, GROUPS, MAPPED, MESHES, RING, TERMS, Case, counts

Tree = Any
AXIS = "data"

REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda axis: boostax.all_reduce(axis),
    "sum": lambda axis: boostax.all_reduce(axis, op="sum"),
    "bfloat16": lambda axis: boostax.all_reduce(axis, wire_dtype="bfloat16"),
    "top_k": lambda axis: boostax.top_k_reduce(axis, 0.25),
    "int8": lambda axis: boostax.int8_reduce(axis, rounding="stochastic"),
    # Leaves of 24, 8 and 1: a step is sparse or dense as it comes.
    "threshold": lambda x: boostax.reduce.threshold_reduce(x, 1.5, capacity=0.25, relative=True),
    "top_k_blocks": lambda axis: boostax.top_k_reduce(axis, {0: 0.5, 2: 0.25}, block=8),
}


def chain(case: Case) -> optax.GradientTransformationExtraArgs:
    """The chain of a case."""
    single = case.placement == "single"
    axis = AXIS if case.told and not single else None
    parts = [] if single else [REDUCTIONS[case.reduction](axis)]
    if case.clip is not None:
        parts.append(optax.clip_by_global_norm(case.clip))
    if case.decay == "coupled":
        parts.append(optax.add_decayed_weights(0.1))
    if case.optimizer == "adam":
        parts.append(optax.scale_by_adam(b1=0.9, b2=0.99, eps=1e-2))
    elif case.optimizer != "sgd":
        parts.append(optax.trace(0.9, nesterov=case.optimizer == "nesterov"))
    if case.decay == "decoupled":
        parts.append(optax.add_decayed_weights(0.1))
    tx = optax.chain(*parts, optax.scale_by_learning_rate(optax.linear_schedule(*case.rates, 10)))
    if case.stored:
        tx = boostax.precision.store(tx, least=1)
    if case.median:
        # The rule averages over the axis, so it cannot leave the axis to the step.
        tx = median_gate(tx, window=RING, axis_name=None if single else AXIS)
    kind, around = case.average or ("", -1)
    for place in reversed(range(len(case.gates) + 1)):
        if place < len(case.gates):
            window = case.gates[place] == "window"
            tx = _window(case, tx, axis) if window else _scaler(case, tx, axis)
        if place == around:
            tx = boostax.model.average_params(tx, kind, **AVERAGES[kind])
    if case.frozen:
        tx = boostax.scheduled_freeze(tx, {n: GROUPS[n] for n in case.shapes}, case.frozen)
    return optax.chain(tx) if case.face == "chain" else optax.with_extra_args_support(tx)


def _window(case: Case, tx: Any, axis: str | None) -> Any:
    table = jnp.asarray(case.every)
    every = case.every[-1]
    if case.schedule:
        every = lambda step: table[jnp.minimum(step, len(case.every) - 1)]  # noqa: E731
    normalize = ("p", "q") if case.terms else case.normalize
    sums = "sharded" if case.shards else "local"
    return boostax.accumulate(tx, every, normalize=normalize, sums=sums, axis_name=axis)


def _scaler(case: Case, tx: Any, axis: str | None) -> Any:
    if not case.dynamic:
        return boostax.static_loss_scale(tx, case.scale, axis_name=axis)
    interval, growth = case.growth
    hysteresis, backoff, least = case.backoff
    return boostax.dynamic_loss_scale(
        tx, init_scale=case.scale, growth_factor=growth, backoff_factor=backoff,
        growth_interval=interval, hysteresis=hysteresis, min_scale=least, axis_name=axis,
    )  # fmt: skip


class _Net(nnx.Module):
    """The params, each in a variable."""

    def __init__(self, params: Tree):
        for name, p in params.items():
            setattr(self, name, nnx.Param(p))

    def values(self) -> Tree:
        return {name: x[...] for name, x in vars(self).items() if isinstance(x, nnx.Param)}


class Library:
    """A run: every call changes what ``params`` and ``reported`` say."""

    def __init__(self, case: Case, params: Tree):
        self._prepare(case)
        params = jax.tree.map(jnp.asarray, params)
        with boostax._core.axes.binding(() if case.told else (AXIS,)):
            local = self.tx.init(params)
        self._put(params, boostax.states.stack_replicas(local, case.replicas))

    def _prepare(self, case: Case) -> None:
        self.case, self.tx = case, chain(case)
        self.oracle = self.mesh = self.loss = None
        if case.placement in ("checked", "unchecked", *MESHES):
            sizes = {AXIS: case.replicas} | ({"other": 2} if case.placement == "hsdp" else {})
            kinds = (AxisType.Auto,) * len(sizes)
            self.mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
        axis = None if case.placement == "single" else AXIS
        if case.face == "train":
            specs = self._specs() if case.placement in MESHES else None
            self.train = boostax.make_train_step(
                self._loss, self.tx, mesh=self.mesh, axis_name=axis, has_aux=True,
                microbatches=case.microbatches, param_specs=specs,
                shard_optimizer=case.placement == "zero",
            )  # fmt: skip
        elif case.loss:
            mesh = self.mesh if case.placement in MESHES else None
            self.oracle = boostax.value_and_grad(
                self._loss, axis_name=axis, mesh=mesh, microbatches=case.microbatches, has_aux=True
            )
        self.step = None

    def _loss(self, params: Tree, batch: Tree, factor: Any = 1.0) -> tuple[Tree, boostax.Aux]:
        case, totals = self.case, [jnp.float32(0.0)] * 2
        weights = counts(case, batch["w"][0])
        for name, p in params.items():
            x, term = batch["x"][name][0], TERMS[name] if case.terms else 0
            if case.terms:
                # What has no count is nothing, whatever it is.
                x = jnp.where(weights[term] > 0, x, 0)
            if case.quadratic:
                totals[term] += 0.5 * jnp.sum((p - x) ** 2)
            else:
                totals[term] += jnp.sum((p.astype(x.dtype) * x).astype(jnp.float32))
        if case.terms:
            pairs = zip(totals, weights, strict=True)
            terms = [(factor * total * weight, weight) for total, weight in pairs]
            return dict(zip("pq", terms, strict=True)), boostax.Aux()
        return factor * totals[0], boostax.Aux(weight=weights[0] if case.weighted else None)

    def _specs(self) -> Tree:
        axis = {"fsdp": AXIS, "hsdp": "other"}.get(self.case.placement)
        spec = lambda shape: PartitionSpec(axis) if shape else PartitionSpec()  # noqa: E731
        return {name: spec(shape) for name, shape in self.case.shapes.items()}

    def _put(self, params: Tree, state: Tree) -> None:
        """Params and state, whole and outside of any map, to where the step wants them."""
        case = self.case
        if case.face == "train":
            state = self.train.init(params)._replace(opt_state=state)
            self.state = jax.device_put(state, self.train.shardings(state))
            self.carry = self.state.params, self.state.opt_state
            return
        zero = case.placement == "zero"
        if case.placement in MESHES:
            place = lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec))  # noqa: E731
            params = jax.tree.map(place, params, self._specs())
            self.placed = boostax.on_mesh(self.tx, params, axis_name=AXIS, shard_optimizer=zero)
            where = jax.tree.map(lambda x: x.sharding, self.placed.init(params))
            state = jax.device_put(state, where)
        if case.face == "nnx":
            # A new optimizer has a new state; one from elsewhere is put back by its own methods.
            axis, self.model = None if case.placement == "single" else AXIS, _Net(params)
            self.optimizer = boostax.nnx.Optimizer(
                self.model, self.tx, wrt=nnx.Param, axis_name=axis, shard_optimizer=zero
            )
            self._in_place()
            return
        if case.placement == "pmap":
            params = jax.tree.map(lambda x: jnp.stack([x] * case.replicas), params)
            lead = lambda x: x if _own(x) else jnp.stack([x] * case.replicas)  # noqa: E731
            state = jax.tree.map(lead, state, is_leaf=_own)
        self.carry = params, state

    def _in_place(self) -> None:
        self.carry = self.model.values(), nnx.as_pure(self.optimizer.opt_state)

    def _of_model(self, model: _Net, optimizer: Any, given: Tree, number: Any) -> Any:
        """One step of an optimizer that works in place."""
        loss = lambda model, batch, **more: self._loss(model.values(), batch, **more)  # noqa: E731
        oracle = optimizer.value_and_grad(loss, has_aux=True, microbatches=self.case.microbatches)
        (value, aux), grads = oracle(model, given, **self._numbers(number))
        optimizer.update(model, grads, **{"weight": aux.weight} if self.case.weighted else {})
        return value

    def _taken(self) -> tuple[Tree, Tree]:
        """What ``_put`` was given, as it is now, on the host."""
        params, state = self.carry
        if self.case.placement == "pmap":
            params = jax.tree.map(lambda x: x[0], params)
            state = jax.tree.map(lambda x: x if _own(x) else x[0], state, is_leaf=_own)
        return jax.device_get((params, state))

    def call(self, x: Tree, weights: Any, number: float) -> None:
        """One step."""
        case, given = self.case, {"x": x, "w": weights}
        if not case.loss:
            scale = float(np.max(boostax.precision.loss_scale(self.carry[1])))
            with np.errstate(over="ignore", invalid="ignore"):
                rounded = lambda v: (v[:, 0].astype(np.float64) * scale).astype(v.dtype)  # noqa: E731
                given = {"x": {n: rounded(v) for n, v in x.items()}, "w": weights[:, 0]}
        if case.placement == "single" and case.face not in ("train", "nnx"):
            given = jax.tree.map(lambda v: v[0], given)
        elif (case.placement in MESHES and case.loss) or case.face in ("train", "nnx"):
            given = jax.tree.map(lambda v: v.reshape(v.shape[0] * v.shape[1], *v.shape[2:]), given)
        if case.face == "train":
            self._trained(*self.train(self.state, given, **self._numbers(number)))
            return
        if case.face == "nnx":
            self.step = self.step or nnx.jit(self._of_model)
            self.loss = self.step(self.model, self.optimizer, given, np.float32(number))
            self._in_place()
            return
        self.step = self.step or self._compiled(self._one, given=1)
        # A mapped function gets one for each replica.
        mapped = case.placement in MAPPED
        number = np.full(case.replicas, number, np.float32) if mapped else np.float32(number)
        self.carry = self.step(*self.carry, (given, number))

    def _numbers(self, number: Any) -> dict[str, Any]:
        return {"factor": number} if self.case.numbers else {}

    def _trained(self, state: Any, metrics: Tree) -> None:
        self.state, self.loss = state, metrics.get("loss")
        self.carry = state.params, state.opt_state

    def _one(self, params: Tree, state: Tree, given: Tree) -> tuple[Tree, Tree]:
        given, number = given
        tx = self.placed if self.case.placement in MESHES else self.tx
        if self.oracle is not None:
            (_, aux), grads = self.oracle(params, state, given, **self._numbers(number))
            weight = aux.weight
        else:
            grads, weight = given["x"], given["w"]
            if self.case.placement in MESHES:
                # Windows of global arrays have one weight for all replicas.
                grads, weight = boostax.PerReplica(grads), weight[0]
            grads = boostax.precision.assume_scaled(grads, state)
        extra = {"weight": weight} if self.case.weighted else {}
        if self.case.face == "update":
            tx = optax.with_extra_args_support(tx)
            updates, state = tx.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state
        return boostax.apply_gradients(tx, grads, state, params, **extra)

    def _compiled(self, step: Any, given: int = 0) -> Any:
        case = self.case
        if case.placement == "pmap":
            return jax.pmap(step, axis_name=AXIS, devices=jax.devices()[: case.replicas])
        if case.placement in ("single", *MESHES):
            return jax.jit(step, donate_argnums=(0, 1))
        how: Any = {"axis_name": AXIS, "replicas": case.replicas}
        specs = boostax.states.state_specs(self.tx, self.carry[0], **how)

        def mapped(params: Tree, state: Tree, *rest: Tree) -> tuple[Tree, Tree]:
            rest = jax.tree.map(lambda v: v[0], rest)
            params, state = step(params, boostax.states.enter_replica(state), *rest)
            return params, boostax.states.leave_replica(state)

        whole = PartitionSpec()
        wraps = jax.shard_map(
            mapped,
            mesh=self.mesh,
            in_specs=(whole, specs) + (PartitionSpec(AXIS),) * given,
            out_specs=(whole, specs),
            check_vma=case.placement == "checked",
        )
        return jax.jit(wraps, donate_argnums=(0, 1))

    def move(self, kind: str, argument: int) -> None:
        """What happens between two calls."""
        if self.case.face == "nnx":
            self._moved_in_place(kind)
            return
        if kind == "flush" and self.case.face == "train":
            self._trained(self.train.flush(self.state), {})
            return
        if kind == "flush":
            tx = self.placed if self.case.placement in MESHES else self.tx
            close = self._compiled(lambda params, state: boostax.flush(tx, state, params))
            self.carry = close(*self.carry)
            return
        if kind == "nest":
            self.move("flush", 0)
        params, state = self._taken()
        if kind == "save":
            params, state = pickle.loads(pickle.dumps((params, state)))
        params, state = jax.tree.map(jnp.asarray, (params, state))
        if kind == "reshard":
            state = boostax.reshard_state(state, argument)
            self._prepare(dataclasses.replace(self.case, replicas=argument))
        if kind == "nest":
            case = dataclasses.replace(self.case, gates=self.case.gates[::-1])
            count = None if case.placement == "single" else case.replicas
            state, _ = boostax.migrate_state(state, chain(case), params, replicas=count)
            self._prepare(case)
        self._put(params, state)

    def _moved_in_place(self, kind: str) -> None:
        if kind == "flush":
            self.optimizer.flush(self.model)
        elif kind == "save":
            fresh = boostax.nnx.Optimizer(
                self.model, self.tx, wrt=nnx.Param, axis_name=self.optimizer.axis_name,
                shard_optimizer=self.optimizer.shard_optimizer,
            )  # fmt: skip
            fresh.set_state(pickle.loads(pickle.dumps(jax.device_get(self.carry[1]))))
            self.optimizer = fresh
        else:
            self.optimizer.flush(self.model)
            self._prepare(dataclasses.replace(self.case, gates=self.case.gates[::-1]))
            self.optimizer.migrate(self.model, self.tx)
        self._in_place()

    @property
    def params(self) -> dict[str, np.ndarray]:
        """As the reference has them."""
        params, state = self._taken()
        waits = {n: 0.0 for n in params}
        if self.case.conserving:
            found = jax.tree.leaves(state, is_leaf=_compressed)
            (own,) = [x.residual.local for x in found if _compressed(x)]
            waits = {n: 0.0 if e is None else np.float64(e).mean(0) for n, e in own.items()}
        # At the rate of all of them.
        return {n: np.float64(p) - 0.1 * waits[n] for n, p in params.items()}

    @property
    def average(self) -> dict[str, np.ndarray]:
        """Of the params; they themselves without one."""
        params, state = self._taken()
        if self.case.face == "nnx":
            params = nnx.as_pure(nnx.state(self.model, nnx.Param))
        found = boostax.model.averaged_params(params, state) if self.case.average else params
        return {n: np.float64(x) for n, x in found.items()}

    def reported(self) -> dict[str, float]:
        """The metrics."""
        found = boostax.metrics(self.carry[1])
        return {name: float(np.max(np.asarray(value))) for name, value in found.items()}


def _own(node: Any) -> bool:
    return isinstance(node, boostax.PerReplica)


def _compressed(node: Any) -> bool:
    return isinstance(node, boostax.states.CompressedState)
