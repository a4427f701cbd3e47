"""Haiku: `optax.MultiSteps` over 8 calls, the batch split over a mesh, in plain `jit`."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import boostax

CALLS = 8


def made(mesh, width):
    def forward(x):
        return hk.Linear(width, name="down")(jnp.tanh(hk.Linear(4 * width, name="up")(x)))

    net = hk.without_apply_rng(hk.transform(forward))
    params = net.init(jax.random.key(0), jnp.ones((1, width)))

    def loss_fn(params, batch):
        return jnp.mean((net.apply(params, batch["x"]) - batch["y"]) ** 2)

    return jax.device_put(params, NamedSharding(mesh, P())), loss_fn


def before(mesh, width):
    params, loss_fn = made(mesh, width)
    tx = optax.adamw(1e-3)
    tx = optax.MultiSteps(tx, 8)
    opt_state = tx.init(params)
    grad_fn = jax.value_and_grad(loss_fn)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, opt_state, batch):
        loss, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, loss

    return update, params, opt_state


def after(mesh, width):
    params, loss_fn = made(mesh, width)
    tx = optax.adamw(1e-3)
    tx = boostax.accumulate(optax.chain(boostax.all_reduce("data"), tx), 8, axis_name="data")
    tx = boostax.on_mesh(tx, params, axis_name="data")
    opt_state = tx.init(params)
    grad_fn = boostax.value_and_grad(loss_fn, mesh=mesh, axis_name="data")

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, opt_state, batch):
        loss, grads = grad_fn(params, opt_state, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, loss

    return update, params, opt_state
