"""Calls of a train step, and of a loop of one's own, one after the other."""

import jax

import boostax


def follow(step, state, batches):
    """Return the state after a call for each batch, and what each call reported."""
    told = []
    for batch in batches:
        state, metrics = step(state, batch)
        told.append(jax.device_get(metrics))
    return state, told


def losses_of(told):
    """Return the losses among what the calls reported."""
    return [float(metrics["loss"]) for metrics in told]


def own_step(tx, oracle):
    """Return a jitted step of params, state and batch to params, state and loss."""

    @jax.jit
    def step(params, state, batch):
        loss, grads = oracle(params, state, batch)
        return *boostax.apply_gradients(tx, grads, state, params), loss

    return step
