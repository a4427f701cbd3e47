"""Keras 3 on JAX: the step that `fit` compiles, 8 calls per update, the batch split over a mesh.

The trainer differentiates the whole batch, so XLA reduces in every call, whatever the optimizer is.
"""

import functools
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
import boostax.keras

CALLS = 8


def made(width):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4 * width, "tanh"), keras.layers.Dense(width)]
    return keras.Sequential([keras.Input((width,)), *layers])


def fitted(mesh, model):
    """What `fit` does with a compiled model."""
    model.optimizer.build(model.trainable_variables)
    state = [model.trainable_variables, model.optimizer.variables, model.metrics_variables]
    state = [[v.value for v in each] for each in state]
    trainable, *others = jax.device_put(state, NamedSharding(mesh, P()))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(trainable, others, batch):
        variables, metrics = others
        state = trainable, [], variables, metrics
        logs, state = model.train_step(state, (batch["x"], batch["y"]))
        trainable, _, variables, metrics = state
        return trainable, (variables, metrics), logs["loss"]

    return step, trainable, tuple(others)


def before(mesh, width):
    model = made(width)
    optimizer = keras.optimizers.SGD(1e-2, momentum=0.9, gradient_accumulation_steps=8)
    model.compile(optimizer=optimizer, loss="mse")
    return fitted(mesh, model)


def after(mesh, width):
    model = made(width)
    tx = boostax.accumulate(optax.sgd(1e-2, momentum=0.9), 8)
    optimizer = boostax.keras.Optimizer(tx)
    model.compile(optimizer=optimizer, loss="mse")
    return fitted(mesh, model)
