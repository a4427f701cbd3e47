"""A freezing schedule in a loop of `nnx.Optimizer`: the swap that shortens the backward pass."""

import jax.numpy as jnp
import optax
from flax import nnx

import boostax
import boostax.nnx

CALLS = 1


class Net(nnx.Module):
    def __init__(self, width, rngs):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def made(width):
    schedule = boostax.freeze_schedule("progressive", total_steps=6, frozen_fraction=0.6)
    groups = ["layers/0", "layers/1", "layers/2", "layers/3"]
    tx = boostax.scheduled_freeze(optax.adamw(1e-3), groups, schedule)
    return Net(width, nnx.Rngs(0)), tx


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def before(mesh, width):
    model, tx = made(width)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    return train_step, model, optimizer


def after(mesh, width):
    model, tx = made(width)
    optimizer = boostax.nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads = optimizer.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    return train_step, model, optimizer
