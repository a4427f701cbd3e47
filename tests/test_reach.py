"""A scaler's reach: the loss is multiplied as a whole, so all gradients must pass the scaler."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax

PARAMS = {"a": jnp.float32(1.0), "b": jnp.float32(2.0), "n": jnp.ones(3)}
SIDES = {"a": "scaled", "b": "plain", "n": "plain"}
MASK = {"a": True, "b": False, "n": False}
GROUPS = {"a": 0, "b": 0, "n": 0}
SGD = optax.sgd(0.1)


def loss(params, x, *, scales=None):
    # All leaves are of group 0, and the boundary is none.
    x = boostax.precision.scale_boundary(x, scales, 0, 0)
    return jnp.sum(x) * (params["a"] + params["b"] ** 2) + jnp.sum(params["n"])


SCALERS = {
    "dynamic": boostax.dynamic_loss_scale,
    "static": lambda tx: boostax.static_loss_scale(tx, 1024.0),
    "group": lambda tx: boostax.precision.group_loss_scale(tx, GROUPS),
    "in a chain": lambda tx: optax.chain(optax.identity(), boostax.dynamic_loss_scale(tx)),
    "in a window": lambda tx: boostax.accumulate(boostax.dynamic_loss_scale(tx), 1),
}
PARTIAL = {
    "partition": lambda tx: optax.partition({"scaled": tx, "plain": SGD}, SIDES),
    "masked": lambda tx: optax.masked(tx, MASK),
    "frozen beside it": lambda tx: optax.chain(
        optax.masked(tx, MASK),
        optax.masked(optax.set_to_zero(), jax.tree.map(lambda x: not x, MASK)),
    ),
    "every other call": lambda tx: optax.conditionally_transform(tx, lambda step: step % 2 == 0),
}


@pytest.mark.parametrize("where", PARTIAL)
@pytest.mark.parametrize("kind", SCALERS)
def test_a_scaler_of_a_part_is_refused_before_a_loss_is_multiplied(kind, where):
    """The other leaves moved by 65536 times their gradient."""
    tx = PARTIAL[where](SCALERS[kind](SGD))
    for whole in (tx, boostax.scheduled_freeze(tx, {"a": 1, "b": 1, "n": 0}, 1)):
        state = whole.init(PARAMS)
        said = (
            r"loss_scale: opt_state must hold one loss scaler that all .*, got one in a \w+State\."
        )
        with pytest.raises(ValueError, match=said):
            boostax.precision.scale_loss(jnp.float32(1.0), state)
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(boostax.value_and_grad(loss), PARAMS, state, jnp.ones(2))
        with pytest.raises(ValueError, match=r"make_train_step: tx .*\. Put \w+_scale around \w+:"):
            boostax.make_train_step(loss, whole)


def trained(tx):
    """Four calls of a loop of one's own."""
    oracle, params = boostax.value_and_grad(loss), PARAMS
    state = tx.init(params)
    for call in range(4):
        _, grads = oracle(params, state, jnp.full(2, 0.1 * call))
        params, state = boostax.apply_gradients(tx, grads, state, params)
    return params


@pytest.mark.parametrize("where", PARTIAL)
@pytest.mark.parametrize("kind", SCALERS)
def test_the_mended_is_bit_for_bit_as_without_a_scaler(kind, where):
    alone, mended = PARTIAL[where](SGD), SCALERS[kind](PARTIAL[where](SGD))
    jax.tree.map(np.testing.assert_array_equal, trained(mended), trained(alone))


def test_leaves_that_nobody_gives_are_no_part():
    """What is frozen around a scaler, or masked for the whole optimizer, has no gradient."""
    tx = boostax.dynamic_loss_scale(SGD)
    assert float(boostax.precision.loss_scale(tx.init(PARAMS | {"n": optax.MaskedNode()}))) == 2**16
    frozen = boostax.scheduled_freeze(tx, {"a": 1, "b": 1, "n": 0}, 1)
    step = boostax.make_train_step(loss, frozen)
    state, _ = step(step.init(PARAMS), jnp.full(2, 0.1))
    assert state.params["n"].tolist() == [1, 1, 1]
    np.testing.assert_allclose(state.params["b"], 2.0 - 0.1 * 0.2 * 4.0, rtol=1e-6)
