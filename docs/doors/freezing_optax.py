"""A freezing schedule in a loop of Optax alone: the swap that shortens the backward pass."""

import jax
import jax.numpy as jnp
import optax

import boostax

CALLS = 1


def made(width):
    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
    schedule = boostax.freeze_schedule("progressive", total_steps=6, frozen_fraction=0.6)
    return params, boostax.scheduled_freeze(optax.adamw(1e-3), [0, 1, 2, 3], schedule)


def loss_fn(params, batch):
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer)
    return jnp.mean((x - batch["y"]) ** 2)


def before(mesh, width):
    params, tx = made(width)
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, loss

    return step, params, state


def after(mesh, width):
    params, tx = made(width)
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        active = tx.choice(params, state)
        loss, grads = boostax.value_and_grad(loss_fn)(params, state, batch, active=active)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, loss

    return step, params, state
