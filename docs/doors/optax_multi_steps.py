"""Optax alone: `optax.MultiSteps` over 8 calls, the batch split over a mesh, in plain `jit`."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import boostax

CALLS = 8


def made(mesh, width):
    one, other = jax.random.split(jax.random.key(0))
    params = {
        "up": jax.random.normal(one, (width, 4 * width)) / width**0.5,
        "down": jax.random.normal(other, (4 * width, width)) / (4 * width) ** 0.5,
    }
    return jax.device_put(params, NamedSharding(mesh, P()))


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def before(mesh, width):
    params = made(mesh, width)
    tx = optax.MultiSteps(optax.adamw(1e-3), 8)
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, loss

    return step, params, state


def after(mesh, width):
    params = made(mesh, width)
    tx = optax.chain(boostax.all_reduce(), optax.adamw(1e-3))
    tx = boostax.on_mesh(boostax.accumulate(tx, 8), params)
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = boostax.value_and_grad(loss_fn, mesh=mesh)(params, state, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, loss

    return step, params, state
