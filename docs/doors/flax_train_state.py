"""Flax's `TrainState`: a `lax.scan` over 8 micro-batches, the batch split over a mesh."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import boostax

CALLS = 1


class Net(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(jnp.tanh(nn.Dense(4 * self.width)(x)))


def made(mesh, width):
    model = Net(width)
    params = model.init(jax.random.key(0), jnp.ones((1, width)))["params"]
    params = jax.device_put(params, NamedSharding(mesh, P()))

    def loss_fn(params, batch):
        return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    return model, params, loss_fn


def scanned(grad_fn, count):
    """The mean over micro-batches, as one writes it by hand."""

    def mean(params, batch):
        def add(total, rows):
            return jax.tree.map(jnp.add, total, grad_fn(params, rows)), None

        split = lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)  # noqa: E731
        rows = jax.tree.map(split, batch)
        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
        total, _ = jax.lax.scan(add, zeros, rows)
        return jax.tree.map(lambda x: x / count, total)

    return mean


def before(mesh, width):
    model, params, loss_fn = made(mesh, width)
    tx = optax.adamw(1e-3)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    grad_fn = scanned(jax.value_and_grad(loss_fn), 8)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch):
        loss, grads = grad_fn(state.params, batch)
        state = state.apply_gradients(grads=grads)
        return state, loss

    return train_step, state


def after(mesh, width):
    model, params, loss_fn = made(mesh, width)
    tx = optax.adamw(1e-3)
    tx = boostax.on_mesh(optax.chain(boostax.all_reduce("data"), tx), params, axis_name="data")
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    grad_fn = boostax.value_and_grad(loss_fn, mesh=mesh, axis_name="data", microbatches=8)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch):
        loss, grads = grad_fn(state.params, state.opt_state, batch)
        state = state.apply_gradients(grads=grads)
        return state, loss

    return train_step, state
