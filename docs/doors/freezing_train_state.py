"""A freezing schedule in a loop of `TrainState`: the swap that shortens the backward pass."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import boostax

CALLS = 1


class Net(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        for number in range(4):
            x = jnp.tanh(nn.Dense(self.width, name=f"layer{number}")(x))
        return x


def made(width):
    model = Net(width)
    params = model.init(jax.random.key(0), jnp.ones((1, width)))["params"]
    schedule = boostax.freeze_schedule("progressive", total_steps=6, frozen_fraction=0.6)
    groups = ["layer0", "layer1", "layer2", "layer3"]
    tx = boostax.scheduled_freeze(optax.adamw(1e-3), groups, schedule)

    def loss_fn(params, batch):
        return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    return TrainState.create(apply_fn=model.apply, params=params, tx=tx), loss_fn


def before(mesh, width):
    state, loss_fn = made(width)
    grad_fn = jax.value_and_grad(loss_fn)

    @jax.jit
    def train_step(state, batch):
        loss, grads = grad_fn(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return train_step, state


def after(mesh, width):
    state, loss_fn = made(width)
    grad_fn = boostax.value_and_grad(loss_fn)

    @jax.jit
    def train_step(state, batch):
        active = state.tx.choice(state.params, state.opt_state)
        loss, grads = grad_fn(state.params, state.opt_state, batch, active=active)
        return state.apply_gradients(grads=grads), loss

    return train_step, state
