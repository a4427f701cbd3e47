"""Calls of a train step, and of a loop of one's own, one after the other."""

import functools

import jax

import boostax
from boostax.testing import drawn


def follow(step, state, batches):
    """Return the state after a call for each batch, and what each call reported."""
    told = []
    for batch in batches:
        state, metrics = step(state, batch)
        told.append(jax.device_get(metrics))
    return state, told


def fit(loss, tx, params, batches, **options):
    """Return the state of a new train step after all batches, and what each call reported."""
    step = boostax.make_train_step(loss, tx, **options)
    return follow(step, step.init(params), batches)


def losses_of(told):
    """Return the losses among what the calls reported."""
    return [float(metrics["loss"]) for metrics in told]


def walk(tx, params, grads, state=None, **each):
    """Return params and state after each gradient, with extra arguments listed by name."""
    step = jax.jit(functools.partial(boostax.apply_gradients, drawn(tx)))
    state, path = tx.init(params) if state is None else state, []
    for index, grad in enumerate(grads):
        extra = {name: values[index] for name, values in each.items()}
        params, state = step(grad, state, params, **extra)
        path.append((params, state))
    return path


def scalars(tx, grads, params=0.0, dtype=jax.numpy.float32, **each):
    """Return params after each gradient, as Python numbers, and the last state."""
    path = walk(tx, jax.numpy.asarray(params, dtype), jax.numpy.asarray(grads, dtype), **each)
    return [params.tolist() for params, _ in path], path[-1][1]


def own_step(tx, oracle):
    """Return a jitted step of params, state and batch to params, state and loss."""

    @jax.jit
    def step(params, state, batch):
        loss, grads = oracle(params, state, batch)
        return *boostax.apply_gradients(tx, grads, state, params), loss

    return step
