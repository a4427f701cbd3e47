"""Equinox: a `lax.scan` over 8 micro-batches, the batch split over a mesh, in `filter_jit`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import boostax

CALLS = 1


def made(mesh, width):
    model = eqx.nn.MLP(width, width, 4 * width, 1, activation=jnp.tanh, key=jax.random.key(0))
    return eqx.filter_shard(model, NamedSharding(mesh, P()))


def loss_fn(model, batch):
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def scanned(grad_fn, count):
    """The mean over micro-batches, as one writes it by hand."""

    def mean(model, batch):
        def add(total, rows):
            return jax.tree.map(jnp.add, total, grad_fn(model, rows)), None

        split = lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)  # noqa: E731
        rows = jax.tree.map(split, batch)
        zeros = jnp.float32(0), eqx.filter(model, eqx.is_inexact_array)
        zeros = jax.tree.map(jnp.zeros_like, zeros)
        total, _ = jax.lax.scan(add, zeros, rows)
        return jax.tree.map(lambda x: x / count, total)

    return mean


def before(mesh, width):
    model = made(mesh, width)
    tx = optax.adamw(1e-3)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    grad_fn = scanned(eqx.filter_value_and_grad(loss_fn), 8)

    @eqx.filter_jit
    def make_step(model, opt_state, batch):
        loss, grads = grad_fn(model, batch)
        updates, opt_state = tx.update(grads, opt_state, model)
        model = eqx.apply_updates(model, updates)
        return model, opt_state, loss

    return make_step, model, opt_state


def after(mesh, width):
    model = made(mesh, width)
    tx = optax.adamw(1e-3)
    tx = boostax.on_mesh(optax.chain(boostax.all_reduce("data"), tx), model, axis_name="data")
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    grad_fn = boostax.value_and_grad(loss_fn, mesh=mesh, axis_name="data", microbatches=8)

    @eqx.filter_jit
    def make_step(model, opt_state, batch):
        loss, grads = grad_fn(model, opt_state, batch)
        updates, opt_state = tx.update(grads, opt_state, model)
        model = eqx.apply_updates(model, updates)
        return model, opt_state, loss

    return make_step, model, opt_state
