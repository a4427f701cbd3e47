"""Train loops in the form in which others write them, with a technique put in as a user would.

A loop builds a model, an optimizer and a step the way its framework's guides do; what boostax adds
are three lines: the chain, the oracle and, over replicas, the mesh. ``Put`` says which technique,
and which of the lines was forgotten.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training import own_step

import boostax
from boostax.testing import Case
from boostax.testing._case import optimizer

PyTree = Any
AXIS, REPLICAS, ROWS = "data", 2, 8
SCALE, NAME, REDUCTION = "scale", "axis_name", "reduction"
PLAIN = Case("plain Optax", lambda inner, axis: inner)


class Run(NamedTuple):
    """What a loop started with and where it ended."""

    params: PyTree
    loss: Callable[[PyTree, PyTree], jax.Array]
    trained: PyTree
    metrics: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Put:
    """A technique put into a loop.

    Attributes:
      case: the technique.
      forgotten: the line that the user forgot: the scaled loss, the axis of the gates, or the
        reduction over the replicas.
      calls: calls of the step.
      replicated: whether the loop has replicas; on one device, reductions bring their own mesh.
    """

    case: Case
    forgotten: str = ""
    calls: int = 0
    replicated: bool = False

    @property
    def replicas(self):
        """Over which the batch is split."""
        return REPLICAS if self.replicated or self.case.reduces else 1

    @property
    def batches(self):
        """One for each call."""
        random = np.random.default_rng(0)
        draw = lambda width: random.normal(size=(ROWS, width)).astype("f")  # noqa: E731
        return [{"x": draw(8), "y": draw(4)} for _ in range(self.calls or 2 * self.case.calls)]

    def chain(self):
        """Technique and optimizer."""
        inner = optimizer()
        if self.replicas > 1 and not self.case.reduces and self.forgotten != REDUCTION:
            inner = optax.chain(boostax.all_reduce(AXIS), inner)
        axis = AXIS if self.replicas > 1 and self.forgotten != NAME else None
        return optax.with_extra_args_support(self.case.make(inner, axis))

    def oracle(self, fn, grad=None, **how):
        """boostax's, or that of the loop where the user forgot to scale the loss."""
        if self.forgotten == SCALE:
            return lambda params, state, batch: (grad or jax.value_and_grad)(fn)(params, batch)
        return boostax.value_and_grad(fn, **how)

    def on_mesh(self, params):
        """Optimizer, its state, params, and how the oracle is made, on a mesh if it has replicas.

        Params are replicated unless the loop has placed them.
        """
        chain = self.chain()
        if self.replicas == 1:
            return chain, chain.init(params), params, {}
        if not isinstance(jax.tree.leaves(params)[0].sharding, NamedSharding):
            mesh = jax.make_mesh((REPLICAS,), (AXIS,), axis_types=(AxisType.Auto,))
            params = jax.device_put(params, NamedSharding(mesh, P()))
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        tx = boostax.on_mesh(chain, params, axis_name=AXIS)
        state = tx.init(params)
        if self.case.own_params:
            params = boostax.states.stack_replicas(boostax.PerReplica(params), REPLICAS)
            params = jax.device_put(params, NamedSharding(mesh, P(AXIS)))
        return tx, state, params, {"mesh": mesh, "axis_name": AXIS}


def mse(prediction, batch):
    """The loss of all loops."""
    return jnp.mean((prediction - batch["y"]) ** 2)


# Flax linen.


class Net(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x, scales=None):
        """A prediction."""
        x = boostax.precision.scale_boundary(jnp.tanh(nn.Dense(8, name="a")(x)), scales, 0, 1)
        return nn.Dense(4, name="block")(x)


def linen_model():
    """Module, params and loss."""
    model = Net()
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))["params"]

    def loss(params, batch, scales=None):
        return mse(model.apply({"params": params}, batch["x"], scales), batch)

    return model, params, loss


def linen_step(oracle):
    """The step of a ``TrainState``."""

    def train_step(state, batch):
        value, grads = oracle(state.params, state.opt_state, batch)
        return state.apply_gradients(grads=grads), value

    return train_step


def linen_pmap(put):
    """``TrainState``, replicated, in ``pmap``."""
    model, params, loss = linen_model()
    devices = jax.devices()[:REPLICAS]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=put.chain())
    state = jax_utils.replicate(state, devices)
    step = jax.pmap(linen_step(put.oracle(loss, axis_name=AXIS)), axis_name=AXIS, devices=devices)
    for batch in put.batches:
        batch = jax.tree.map(lambda x: x.reshape(REPLICAS, -1, *x.shape[1:]), batch)
        state, _ = step(state, batch)
    first = jax.tree.map(lambda x: x[0], state)
    return Run(params, loss, first.params, boostax.metrics(first.opt_state))


def linen_jit(put):
    """``TrainState`` in ``jit``, params sharded over a model axis by ``NamedSharding``."""
    model, params, loss = linen_model()
    mesh = jax.make_mesh((REPLICAS, 2), (AXIS, "model"), axis_types=(AxisType.Auto,) * 2)
    # A codec sees the shards of each device: as one device does where each has the whole.
    spec = lambda x: P() if put.case.by_shard else P(*[None] * (x.ndim - 1), "model")  # noqa: E731
    sharded = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), params)
    tx, opt_state, sharded, how = put.on_mesh(sharded)
    state = TrainState(0, model.apply, sharded, tx, opt_state)
    train_step = jax.jit(linen_step(put.oracle(loss, **how)))
    for batch in put.batches:
        batch = jax.device_put(batch, NamedSharding(mesh, P(AXIS)))
        state, _ = train_step(state, batch)
    return Run(params, loss, state.params, boostax.metrics(state.opt_state))


# Flax NNX.


class NnxNet(nnx.Module):
    """Two layers."""

    def __init__(self, rngs):
        self.a, self.block = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x, scales=None):
        """A prediction."""
        return self.block(boostax.precision.scale_boundary(jnp.tanh(self.a(x)), scales, 0, 1))


def nnx_optimizer(put):
    """``nnx.Optimizer`` in ``nnx.jit``."""
    model = NnxNet(nnx.Rngs(0))
    graph, params = nnx.split(model)

    def loss(model, batch, scales=None):
        return mse(model(batch["x"], scales), batch)

    tx, _, placed, how = put.on_mesh(params)
    # A module has no place for params of each replica's own: it keeps one of each.
    model = nnx.merge(graph, params if isinstance(placed, boostax.PerReplica) else placed)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    oracle = put.oracle(loss, nnx.value_and_grad, **how)

    @nnx.jit
    def train_step(model, optimizer, batch):
        value, grads = oracle(model, optimizer.opt_state, batch)
        optimizer.update(model, grads.local if isinstance(grads, boostax.PerReplica) else grads)
        return value

    for batch in put.batches:
        train_step(model, optimizer, batch)
    pure = lambda params, batch, **given: loss(nnx.merge(graph, params), batch, **given)  # noqa: E731
    start, end = (nnx.as_pure(nnx.state(x)) for x in (NnxNet(nnx.Rngs(0)), model))
    return Run(start, pure, end, boostax.metrics(optimizer.opt_state))


# Equinox.


class EqxNet(eqx.Module):
    """Two layers."""

    a: eqx.nn.Linear
    block: eqx.nn.Linear

    def __call__(self, x, scales=None):
        """A prediction for one row."""
        return self.block(boostax.precision.scale_boundary(jnp.tanh(self.a(x)), scales, 0, 1))


def equinox_filter_jit(put):
    """A module for params, in ``eqx.filter_jit``."""
    one, other = jax.random.split(jax.random.key(0))
    start = EqxNet(eqx.nn.Linear(8, 8, key=one), eqx.nn.Linear(8, 4, key=other))

    def loss(model, batch, scales=None):
        return mse(jax.vmap(lambda x: model(x, scales))(batch["x"]), batch)

    tx, opt_state, model, how = put.on_mesh(eqx.filter(start, eqx.is_inexact_array))
    oracle = put.oracle(loss, eqx.filter_value_and_grad, **how)

    @eqx.filter_jit
    def make_step(model, opt_state, batch):
        value, grads = oracle(model, opt_state, batch)
        updates, opt_state = tx.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, value

    for batch in put.batches:
        model, opt_state, _ = make_step(model, opt_state, batch)
    return Run(start, loss, model, boostax.metrics(opt_state))


# Optax alone.


def optax_jit(put):
    """A dict of arrays and a jitted step, donated."""
    one, other = jax.random.split(jax.random.key(0))
    start = {
        "a": {"w": jax.random.normal(one, (8, 8)) / 3, "b": jnp.zeros(8)},
        "block": {"w": jax.random.normal(other, (8, 4)) / 3, "b": jnp.zeros(4)},
    }

    def loss(params, batch, scales=None):
        hidden = jnp.tanh(batch["x"] @ params["a"]["w"] + params["a"]["b"])
        hidden = boostax.precision.scale_boundary(hidden, scales, 0, 1)
        return mse(hidden @ params["block"]["w"] + params["block"]["b"], batch)

    tx, opt_state, params, how = put.on_mesh(jax.tree.map(jnp.copy, start))
    oracle = put.oracle(loss, **how)

    def step(params, opt_state, batch):
        value, grads = oracle(params, opt_state, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    step = jax.jit(step, donate_argnums=(0, 1))
    for batch in put.batches:
        params, opt_state, _ = step(params, opt_state, batch)
    return Run(start, loss, params, boostax.metrics(opt_state))


REPLICATED = {"Flax linen, pmap": linen_pmap, "Flax linen, jit and NamedSharding": linen_jit}
LOOPS = REPLICATED | {"Flax NNX": nnx_optimizer, "Equinox": equinox_filter_jit, "Optax": optax_jit}


def put_into(loop, case, **how):
    """A technique for a loop."""
    return Put(case, **{"replicated": loop in REPLICATED} | how)


def reference(put, run):
    """The params of every replica after the same training in nobody's loop, under ``vmap``."""
    axis = AXIS if put.replicas > 1 else None
    tx = put.chain()
    step = jax.vmap(own_step(tx, boostax.value_and_grad(run.loss, axis_name=axis)), axis_name=axis)
    params = jax.tree.map(lambda x: jnp.repeat(x[None], put.replicas, 0), run.params)
    state = jax.vmap(tx.init, axis_name=axis)(params)
    for batch in put.batches:
        split = jax.tree.map(lambda x: x.reshape(put.replicas, -1, *x.shape[1:]), batch)
        params, state, _ = step(params, state, split)
    return params


def apart(put, run):
    """The largest difference of a param from the reference; params are about 1."""
    wanted = reference(dataclasses.replace(put, forgotten=""), run)
    own = isinstance(run.trained, boostax.PerReplica)
    trained = run.trained.local if own else run.trained
    wanted = wanted if own else jax.tree.map(lambda x: x[0], wanted)
    pairs = zip(jax.tree.leaves(trained), jax.tree.leaves(wanted), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs)
