"""Optax's wrappers around a gate: what they would do in a call that the gate holds back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lanes import spread
from training import fit

import boostax

PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array([0.1])}
SGD = optax.sgd(0.1)
FALLING = optax.linear_schedule(0.5, 0.1, 4)
NAN = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), PARAMS)


def gradient(call):
    return jax.tree.map(lambda x: jnp.cos(call + jnp.arange(x.size, dtype=x.dtype)), PARAMS)


def ran(tx, *runs):
    """The params after each run, through the pure update that every wrapper keeps."""

    @jax.jit
    def step(grads, state, params):
        updates, state = optax.with_extra_args_support(tx).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grads in runs:
        params, state = PARAMS, tx.init(PARAMS)
        for each in grads:
            params, state = step(each, state, params)
        yield params


# A scaler of scale 1, so that the gradients here are scaled ones.
safe = functools.partial(boostax.static_loss_scale, scale=1.0)
inject = optax.inject_hyperparams
WRAPPERS = {
    "inject_hyperparams": lambda gate: inject(lambda rate: gate(optax.sgd(rate)))(rate=FALLING),
    "schedule_free": lambda gate: optax.contrib.schedule_free(gate(SGD), 0.1),
    "mechanize": lambda gate: optax.contrib.mechanize(gate(SGD)),
    "sam": lambda gate: optax.contrib.sam(gate(SGD), optax.sgd(0.05)),
}
MENDED = {
    "inject_hyperparams": lambda gate: gate(inject(optax.sgd)(FALLING)),
    "schedule_free": lambda gate: gate(optax.contrib.schedule_free(SGD, 0.1)),
    "mechanize": lambda gate: gate(optax.contrib.mechanize(SGD)),
    "sam": lambda gate: gate(optax.contrib.sam(SGD, optax.sgd(0.05))),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_skipped_call_is_none_in_what_is_written_instead(name):
    """Around the gate each of them counts the call, moves params or keeps its NaN."""
    good = [gradient(call) for call in range(5)]
    for made, same in ((WRAPPERS, False), (MENDED, True)):
        pair = ran(made[name](safe), good, [*good[:2], NAN, *good[2:4], NAN, NAN, good[4]])
        equal = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), *pair)
        assert all(jax.tree.leaves(equal)) == same


def test_a_window_of_weighted_micro_batches_is_none_of_multi_steps():
    """It gave the mean of the two means, -1.5, where the mean over all tokens is -5/3."""

    def loss(w, batch):
        tokens, mask = batch
        return jnp.sum(mask * tokens * w) / jnp.sum(mask), boostax.Aux(weight=jnp.sum(mask))

    batches = [(jnp.array([1.0, 9.0]), jnp.array([1.0, 0.0])), (2 * jnp.ones(2), jnp.ones(2))]
    peer = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    ours = boostax.accumulate(optax.sgd(1.0), 2, normalize="weight")
    said = "apply_gradients: weight must be left out around optax.MultiSteps"
    for tx in (peer, safe(peer), optax.chain(peer)):
        step = boostax.make_train_step(loss, tx, has_aux=True)
        with pytest.raises(ValueError, match=said):
            step(step.init(jnp.float32(0.0)), batches[0])
    state, _ = fit(loss, ours, jnp.float32(0.0), batches, has_aux=True)
    np.testing.assert_allclose(state.params, -5 / 3, rtol=1e-6)


# A scaler's reach: the loss is multiplied as a whole, so all gradients must pass the scaler.

PARTS = {"a": jnp.float32(1.0), "b": jnp.float32(2.0), "n": jnp.ones(3)}
SIDES = {"a": "scaled", "b": "plain", "n": "plain"}
MASK = {"a": True, "b": False, "n": False}
REST = optax.masked(optax.set_to_zero(), jax.tree.map(lambda x: not x, MASK))


def loss_of_parts(params, x, *, scales=None):
    # All leaves are of group 0, and the boundary is none.
    x = boostax.precision.scale_boundary(x, scales, 0, 0)
    return jnp.sum(x) * (params["a"] + params["b"] ** 2) + jnp.sum(params["n"])


SCALERS = {
    "dynamic": boostax.dynamic_loss_scale,
    "static": lambda tx: boostax.static_loss_scale(tx, 1024.0),
    "group": lambda tx: boostax.precision.group_loss_scale(tx, {"a": 0, "b": 0, "n": 0}),
    "in a chain": lambda tx: optax.chain(optax.identity(), boostax.dynamic_loss_scale(tx)),
    "in a window": lambda tx: boostax.accumulate(boostax.dynamic_loss_scale(tx), 1),
}
PARTIAL = {
    "partition": lambda tx: optax.partition({"scaled": tx, "plain": SGD}, SIDES),
    "masked": lambda tx: optax.masked(tx, MASK),
    "frozen beside it": lambda tx: optax.chain(optax.masked(tx, MASK), REST),
    "every other call": lambda tx: optax.conditionally_transform(tx, lambda step: step % 2 == 0),
}


@pytest.mark.parametrize(("kind", "where"), spread(SCALERS, PARTIAL))
def test_a_scaler_of_a_part_is_refused_before_a_loss_is_multiplied(kind, where):
    """The other leaves moved by 65536 times their gradient."""
    tx = PARTIAL[where](SCALERS[kind](SGD))
    said = r"loss_scale: opt_state must contain one loss scaler.*, got a scaler in a \w+State\."
    for whole in (tx, boostax.scheduled_freeze(tx, {"a": 1, "b": 1, "n": 0}, 1)):
        state = whole.init(PARTS)
        with pytest.raises(ValueError, match=said):
            boostax.precision.scale_loss(jnp.float32(1.0), state)
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(boostax.value_and_grad(loss_of_parts), PARTS, state, jnp.ones(2))
        with pytest.raises(ValueError, match=r"make_train_step: tx .*\. Put \w+_scale around \w+:"):
            boostax.make_train_step(loss_of_parts, whole)


def trained(tx):
    """Four calls of a loop of one's own."""
    oracle, params = boostax.value_and_grad(loss_of_parts), PARTS
    state = tx.init(params)
    for call in range(4):
        _, grads = oracle(params, state, jnp.full(2, 0.1 * call))
        params, state = boostax.apply_gradients(tx, grads, state, params)
    return params


@functools.cache
def unscaled(where):
    return trained(PARTIAL[where](SGD))


@pytest.mark.filterwarnings(r"ignore:\w+. set_to_zero in")
@pytest.mark.parametrize(("kind", "where"), spread(SCALERS, PARTIAL))
def test_the_mended_is_bit_for_bit_as_without_a_scaler(kind, where):
    mended = trained(SCALERS[kind](PARTIAL[where](SGD)))
    jax.tree.map(np.testing.assert_array_equal, mended, unscaled(where))


def test_leaves_that_nobody_gives_are_no_part():
    """What is frozen around a scaler, or masked for the whole optimizer, has no gradient."""
    tx = boostax.dynamic_loss_scale(SGD)
    assert float(boostax.precision.loss_scale(tx.init(PARTS | {"n": optax.MaskedNode()}))) == 2**16
    frozen = boostax.scheduled_freeze(tx, {"a": 1, "b": 1, "n": 0}, 1)
    state, _ = fit(loss_of_parts, frozen, PARTS, [jnp.full(2, 0.1)])
    assert state.params["n"].tolist() == [1, 1, 1]
    np.testing.assert_allclose(state.params["b"], 2.0 - 0.1 * 0.2 * 4.0, rtol=1e-6)
