"""Optax's wrappers around a gate: what they would do in a call that the gate holds back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training import follow

import boostax

PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array([0.1])}
SGD = optax.sgd(0.1)
FALLING = optax.linear_schedule(0.5, 0.1, 4)
NAN = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), PARAMS)


def gradient(call):
    return jax.tree.map(lambda x: jnp.cos(call + jnp.arange(x.size, dtype=x.dtype)), PARAMS)


def ran(tx, grads):
    """Params and state after each call, through the pure update that every wrapper keeps."""
    tx = optax.with_extra_args_support(tx)
    params, state = PARAMS, tx.init(PARAMS)
    for each in grads:
        updates, state = tx.update(each, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def safe(tx):
    """A scaler of scale 1, so that the gradients here are scaled ones."""
    return boostax.static_loss_scale(tx, 1.0)


def window(tx):
    return boostax.accumulate(tx, 2)


WRAPPERS = {
    "inject_hyperparams": lambda gate: optax.inject_hyperparams(lambda rate: gate(optax.sgd(rate)))(
        rate=FALLING
    ),
    "schedule_free": lambda gate: optax.contrib.schedule_free(gate(SGD), 0.1),
    "mechanize": lambda gate: optax.contrib.mechanize(gate(SGD)),
    "sam": lambda gate: optax.contrib.sam(gate(SGD), optax.sgd(0.05)),
}
MENDED = {
    "inject_hyperparams": lambda gate: gate(
        optax.inject_hyperparams(optax.sgd)(learning_rate=FALLING)
    ),
    "schedule_free": lambda gate: gate(optax.contrib.schedule_free(SGD, 0.1)),
    "mechanize": lambda gate: gate(optax.contrib.mechanize(SGD)),
    "sam": lambda gate: gate(optax.contrib.sam(SGD, optax.sgd(0.05))),
}


@pytest.mark.parametrize("gate", [safe, window], ids=["scaler", "window"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_around_a_gate_is_refused_or_named(name, gate):
    tx = WRAPPERS[name](gate)
    said = rf"make_train_step: .* inside {name}: .* Put (\w+) around {name}: \1\({name}\("
    if name == "inject_hyperparams":
        with pytest.warns(UserWarning, match=said):
            boostax.make_train_step(lambda p, x: jnp.sum(p["w"]), tx)
    else:
        with pytest.raises(ValueError, match=said):
            boostax.make_train_step(lambda p, x: jnp.sum(p["w"]), tx)
    boostax.make_train_step(lambda p, x: jnp.sum(p["w"]), MENDED[name](gate))


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_skipped_call_is_none_in_what_is_written_instead(name):
    """Around the gate each of them counts the call, moves params or keeps its NaN."""
    good = [gradient(call) for call in range(5)]
    bad = [*good[:2], NAN, *good[2:4], NAN, NAN, good[4]]
    for made, same in ((WRAPPERS, False), (MENDED, True)):
        pair = ran(made[name](safe), good)[0], ran(made[name](safe), bad)[0]
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
    step = boostax.make_train_step(loss, ours, has_aux=True)
    state, _ = follow(step, step.init(jnp.float32(0.0)), batches)
    np.testing.assert_allclose(state.params, -5 / 3, rtol=1e-6)
