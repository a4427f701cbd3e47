"""MindSpore's optimizers as chains of Optax train what those of MindSpore 2.10 trained."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax.config.mindspore import adam, adam_weight_decay, lars, momentum, sgd
from boostax.testing import drawn

DECAYING = optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1, 0.9))
SCALED = drawn(boostax.static_loss_scale(DECAYING, 8.0, skip_nonfinite=False))
# By their names in the golden file: the weights after each of twelve steps.
RUNS = {
    "sgd": sgd(0.1),
    "sgd_mom0.9": sgd(0.1, 0.9),
    "sgd_mom0.9_nesterov": sgd(0.1, 0.9, nesterov=True),
    "sgd_mom0.9_damp0.5": sgd(0.1, 0.9, 0.5),
    "sgd_wd0.01": sgd(0.1, 0.9, 0.0, 0.01),
    "sgd_mom0.9_ls8": sgd(0.1, 0.9, loss_scale=8.0),
    "sgd_dynlr": sgd([0.1 / (i + 1) for i in range(12)]),
    "momentum0.9": momentum(0.1, 0.9),
    "momentum0.9_wd0.01_ls8": momentum(0.1, 0.9, 0.01, 8.0),
    "momentum0.9_wd0.01_ls8, by a scaler": SCALED,
    "adam": adam(1e-2),
    "adam_nesterov": adam(1e-2, use_nesterov=True),
    "adam_wd0.01": adam(1e-2, weight_decay=0.01),
    "adam_eps1e-3": adam(1e-2, 0.9, 0.999, 1e-3),
    "adamweightdecay": adam_weight_decay(1e-2, weight_decay=0.01),
}


@pytest.mark.parametrize("name", RUNS)
def test_weights_are_those_of_mindspore(arrays, name):
    run, tx = arrays("optimizers.npz"), RUNS[name]

    def step(carry, g):
        w, state = carry
        updates, state = tx.update(g, state, w)
        return (w + updates, state), w + updates

    start = jnp.asarray(run["w0"])
    _, found = jax.lax.scan(step, (start, tx.init(start)), jnp.asarray(run["g"]))
    # 1 - 0.999 in f32 moves the long first steps of an Adam without correction.
    atol = 4e-6 if name == "adamweightdecay" else 1e-6
    np.testing.assert_allclose(found, run[name.partition(",")[0]], rtol=0, atol=atol)


# What MindSpore 2.10 made of ones by gradients of 0.5, after steps 1 and 2: of a weight, and of
# gamma and beta, which decay only where params are given in groups.
DECAYED = (
    (sgd(0.1, weight_decay=0.1), [0.94, 0.8806], [0.95, 0.9]),
    (sgd(0.1, 0.9, weight_decay=0.1, loss_scale=8.0), [0.98375, 0.953038], [0.99375, 0.981875]),
    (sgd(0.1, dampening=0.5), [0.95, 0.9], [0.95, 0.9]),
    (momentum(0.1, 0.9, 0.1), [0.94, 0.8266], [0.95, 0.855]),
    (momentum(0.1, 0.9, 0.1, grouped=True), [0.94, 0.8266], [0.94, 0.8266]),
    (adam(0.1, weight_decay=0.1), [0.9, 0.800048], [0.9, 0.8]),
    (adam_weight_decay(0.01, weight_decay=0.1), [0.967379, 0.923917], [0.968379, 0.925885]),
)


@pytest.mark.parametrize(("tx", "weight", "norm"), DECAYED)
def test_decay_spares_norms_unless_params_are_grouped(tx, weight, norm):
    one = jnp.ones(())
    params = {"fc": {"kernel": one, "bias": one}, "bn1": {"scale": one}}
    params |= {"LayerNorm_0": {"bias": one}, "own": {"gamma": one}}
    state = tx.init(params)
    for decayed, spared in zip(weight, norm, strict=True):
        updates, state = tx.update(jax.tree.map(lambda _: jnp.float32(0.5), params), state, params)
        params = optax.apply_updates(params, updates)
        for name, layer in params.items():
            value = decayed if name == "fc" else spared
            np.testing.assert_allclose(jax.tree.leaves(layer), value, rtol=0, atol=2e-6)


def test_lars_is_its_formula_in_front_of_the_optimizer():
    w, g = np.float32([3.0, 4.0]), np.float32([0.6, 0.8])
    params = {"kernel": jnp.asarray(w), "bias": jnp.asarray(w), "gamma": jnp.asarray(w)}
    grads = jax.tree.map(lambda _: 8 * jnp.asarray(g), params)
    for clip in (False, True):
        tx = lars(0.1, 1e-3, 0.02, clip, 0.01, loss_scale=8.0)
        found, _ = tx.update(grads, tx.init(params), params)
        for name, decay in (("kernel", 0.1), ("gamma", 0.0)):
            factor = 0.02 * 5 / (1 + decay * 5 + 1e-3)
            factor = min(factor / 0.01, 1.0) if clip else factor
            np.testing.assert_allclose(found[name], factor * (g + decay * w), rtol=1e-6)
        np.testing.assert_allclose(found["bias"], g, rtol=1e-6)
    chain = optax.chain(lars(coefficient=0.02), momentum(0.1, 0.9))
    chain.update(grads, chain.init(params), params)


MISTAKES = (
    (lambda: sgd(0.1, nesterov=True), "sgd: nesterov must be False here, got True. Pass momentum"),
    (lambda: adam(loss_scale=0.0), "adam: loss_scale must be positive, got 0.0"),
)


@pytest.mark.parametrize(("call", "text"), MISTAKES)
def test_a_number_out_of_range_is_refused(call, text):
    with pytest.raises(ValueError, match=f"^{text}"):
        call()


@pytest.mark.parametrize("factory", [momentum, sgd, adam, adam_weight_decay])
@pytest.mark.parametrize("params", [{"w": jnp.ones(3)}, [jnp.ones((2, 2)), jnp.ones(3)]])
def test_params_by_mindspores_position_are_refused(factory, params):
    with pytest.raises(TypeError, match=f"^{factory.__name__}: learning_rate must .* got a tree"):
        factory(params, 0.1, 0.9)
