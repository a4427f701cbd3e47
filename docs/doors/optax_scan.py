"""Optax alone: a `lax.scan` over 8 micro-batches, the batch split over a mesh, in plain `jit`."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import boostax

CALLS = 1


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
    params = made(mesh, width)
    tx = optax.adamw(1e-3)
    grad_fn = scanned(jax.value_and_grad(loss_fn), 8)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = grad_fn(params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, loss

    return step, params, tx.init(params)


def after(mesh, width):
    params = made(mesh, width)
    tx = optax.adamw(1e-3)
    tx = boostax.on_mesh(optax.chain(boostax.all_reduce("data"), tx), params, axis_name="data")
    grad_fn = boostax.value_and_grad(loss_fn, mesh=mesh, axis_name="data", microbatches=8)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = grad_fn(params, state, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, loss

    return step, params, tx.init(params)
