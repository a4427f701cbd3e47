"""Keras 3 on JAX: a stateless loop that accumulates over 8 calls, the batch split over a mesh."""

import functools
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import boostax

CALLS = 8


def made(mesh, width):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4 * width, "tanh"), keras.layers.Dense(width)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    for variable in model.variables:
        variable.assign(jax.device_put(variable.value, NamedSharding(mesh, P())))

    def loss_fn(trainable, batch):
        prediction, _ = model.stateless_call(trainable, [], batch["x"])
        return jnp.mean((prediction - batch["y"]) ** 2)

    return model, [v.value for v in model.trainable_variables], loss_fn


def before(mesh, width):
    model, trainable, loss_fn = made(mesh, width)
    optimizer = keras.optimizers.SGD(1e-2, momentum=0.9, gradient_accumulation_steps=8)
    optimizer.build(model.trainable_variables)
    grad_fn = jax.value_and_grad(loss_fn)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(trainable, variables, batch):
        loss, grads = grad_fn(trainable, batch)
        trainable, variables = optimizer.stateless_apply(variables, grads, trainable)
        return trainable, variables, loss

    return train_step, trainable, [v.value for v in optimizer.variables]


def after(mesh, width):
    _, trainable, loss_fn = made(mesh, width)
    tx = optax.chain(boostax.all_reduce("data"), optax.sgd(1e-2, momentum=0.9))
    tx = boostax.on_mesh(boostax.accumulate(tx, 8, axis_name="data"), trainable, axis_name="data")
    grad_fn = boostax.value_and_grad(loss_fn, mesh=mesh, axis_name="data")

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(trainable, opt_state, batch):
        loss, grads = grad_fn(trainable, opt_state, batch)
        trainable, opt_state = boostax.apply_gradients(tx, grads, opt_state, trainable)
        return trainable, opt_state, loss

    return train_step, trainable, tx.init(trainable)
