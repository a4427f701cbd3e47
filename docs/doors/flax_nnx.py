"""`nnx.Optimizer`: `optax.MultiSteps` over 8 calls, the batch split over a mesh, in `nnx.jit`."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
import boostax.nnx

CALLS = 8


class Net(nnx.Module):
    def __init__(self, width, rngs):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def made(mesh, width):
    model = Net(width, nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
    return model


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def before(mesh, width):
    model = made(mesh, width)
    tx = optax.adamw(1e-3)
    tx = optax.MultiSteps(tx, 8)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    return train_step, model, optimizer


def after(mesh, width):
    model = made(mesh, width)
    tx = optax.adamw(1e-3)
    tx = boostax.accumulate(optax.chain(boostax.all_reduce("data"), tx), 8, axis_name="data")
    optimizer = boostax.nnx.Optimizer(model, tx, wrt=nnx.Param, axis_name="data")

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def train_step(model, optimizer, batch):
        loss, grads = optimizer.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    return train_step, model, optimizer
