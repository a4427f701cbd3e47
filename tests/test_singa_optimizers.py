"""Every optimizer and schedule of Apache SINGA's ``opt`` is an Optax expression, and its states.

Drawn at random; the table is ``docs/coming_from/singa.md``.
"""

import functools
import random

import jax
import numpy as np
import optax
import pytest
from conformance import singa
from conformance.singa import SGD, AdaGrad, Adam, RMSProp, constant, exponential_decay

import boostax

STEPS = 20


def warmup(step):
    """A ``DecayScheduler`` of the user's, from zero upwards."""
    return 0.1 * step


STARTS = (0.1, 4), (0.1, 5), (0.9, 40), (0.01, 10)
LR, DECAY, BETA, EPSILON = ([value, steps, 0.7, False] for value, steps in STARTS)
# All hyper-parameters decay.
DECAYING = {
    "SGD": {"momentum": [0.95, 30, 0.8, False], "dampening": [0.5, 7, 0.6, True]},
    "RMSProp": {"rho": BETA, "epsilon": EPSILON},
    "AdaGrad": {"epsilon": EPSILON},
    "Adam": {"beta_1": BETA, "beta_2": [0.999, 100, 0.9, False], "epsilon": EPSILON},
}
BOTH = {"lr": LR, "weight_decay": DECAY}
SCHEDULED = {name.lower(): {"class": name} | BOTH | more for name, more in DECAYING.items()}
USUAL = {"class": "Adam", "lr": 0.1, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}
DAMPED = {"class": "SGD", "lr": 0.05, "momentum": 0.9, "dampening": 0.3}
DRAWN = {f"drawn {n}": singa.draw_optimizer(random.Random(n)) for n in range(16)}
CASES = {
    name: (functools.partial(singa.optimizer_of, x), singa.optax_of(x))
    for name, x in ({"usual": USUAL, "damped": DAMPED} | SCHEDULED | DRAWN).items()
}


def normal(seed, *lead):
    """Params or a run of gradients; one entry never gets a gradient."""
    random = np.random.default_rng(seed)
    kernel, bias = random.normal(size=(*lead, 3, 4)), random.normal(size=(*lead, 4))
    if lead:
        bias[..., 0] = 0.0
    return {"kernel": kernel, "bias": bias}


def singa_run(optimizer, params, grads):
    """The params after each step."""
    history = []
    for step in range(len(grads["bias"])):
        params = optimizer(params, {name: g[step] for name, g in grads.items()})
        history.append(params)
    return {name: np.stack([params[name] for params in history]) for name in params}


@functools.cache
def runner(tx):
    def step(carry, grads):
        params, state = boostax.apply_gradients(tx, grads, carry[1], carry[0])
        return (params, state), params

    return jax.jit(lambda carry, grads: jax.lax.scan(step, carry, grads))


def optax_run(tx, params, state, grads):
    """The params after each step, and the last params and state; ``scan`` wants constant types."""
    (params, state), history = runner(tx)((params, state), grads)
    return history, params, state


def assert_near(actual, expected, tolerance):
    """Relative to the largest param of the leaf."""
    for name, x in expected.items():
        largest = abs(x).max()
        np.testing.assert_allclose(actual[name] / largest, x / largest, rtol=0, atol=tolerance)


def cast(tree, dtype):
    return jax.tree.map(lambda x: jax.numpy.asarray(x, dtype), tree)


TOLERANCE = {
    "float64": lambda name: 1e-12,
    # Optax computes 1 - 0.999**t in f32, which is good to 1e-5 at t = 1.
    "float32": lambda name: 5e-6 if name == "usual" else 1e-6,
}


@functools.cache
def optax_histories(dtype):
    """Of all cases, in one program."""
    labels = {name: name for name in CASES}
    tx = optax.partition({name: tx for name, (_, tx) in CASES.items()}, labels)
    with jax.enable_x64(dtype == "float64"):
        params = cast({name: normal(0) for name in CASES}, dtype)
        grads = cast({name: normal(1, STEPS) for name in CASES}, dtype)
        history, _, _ = optax_run(tx, params, tx.init(params), grads)
        assert all(x.dtype == dtype for x in jax.tree.leaves(history))
        return jax.device_get(history)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_optax_goes_singas_way(name, dtype):
    expected = singa_run(CASES[name][0](), normal(0), normal(1, STEPS))
    assert_near(optax_histories(dtype)[name], expected, TOLERANCE[dtype](name))


def test_singas_own_numbers():
    """What its unit tests expect of one step, held against its classes here."""
    p, g = {"w": np.array([0.1, 1.0])}, {"w": np.array([0.1, 0.1])}
    for name, (optimizer, after) in {
        "sgd": (SGD(0.1), p["w"] - 0.1 * g["w"]),
        # PyTorch's dampening starts at the second step.
        "damped": (SGD(0.1, 0.9, 0.25), p["w"] - 0.1 * 0.75 * g["w"]),
        "rmsprop": (RMSProp(0.1), p["w"] - 0.1 * g["w"] / np.sqrt(0.1 * g["w"] ** 2 + 1e-8)),
        "adagrad": (AdaGrad(0.1), p["w"] - 0.1 * g["w"] / np.sqrt(g["w"] ** 2 + 1e-8)),
        # Both corrections undo the betas at the first step.
        "adam": (Adam(0.1), p["w"] - 0.1 * g["w"] / (g["w"] + 1e-8)),
    }.items():
        np.testing.assert_allclose(optimizer(p, g)["w"], after, rtol=0, atol=1e-15, err_msg=name)


@pytest.mark.parametrize("staircase", [False, True])
def test_schedules_are_singas(staircase):
    singa = exponential_decay(0.1, 2, 0.5, staircase)
    schedule = jax.jit(optax.exponential_decay(0.1, 2, 0.5, staircase=staircase))
    for step in range(STEPS):
        np.testing.assert_allclose(schedule(jax.numpy.asarray(step)), singa(step), rtol=1e-6)
        if staircase:
            assert singa(step) == 0.1 * 0.5 ** (step // 2)
        assert optax.constant_schedule(0.1)(step) == constant(0.1)(step)


def test_a_rate_of_zero_is_a_constant_in_optax():
    assert [exponential_decay(0.1, 2, 0.0)(step) for step in range(3)] == [0.1, 0.0, 0.0]
    assert [optax.exponential_decay(0.1, 2, 0.0)(step) for step in range(3)] == [0.1] * 3


DECAYED = optax.chain(optax.add_decayed_weights(warmup), optax.sgd(0.1))
RISING = {
    "weight decay": (SGD(weight_decay=warmup), DECAYED),
    "momentum": (SGD(momentum=warmup), optax.inject_hyperparams(optax.sgd)(0.1, warmup)),
}


@pytest.mark.parametrize("name", RISING)
def test_a_schedule_may_start_at_zero(name):
    """SINGA looks at its first value, and never applies one that starts at zero."""
    singa, tx = RISING[name]
    params, grads = normal(0), normal(1, STEPS)
    theirs = singa_run(singa, params, grads)
    assert all((theirs[name] == x).all() for name, x in singa_run(SGD(), params, grads).items())
    params, grads = cast((params, grads), "float32")
    ours, _, _ = optax_run(tx, params, tx.init(params), grads)
    for name, x in theirs.items():
        np.testing.assert_allclose(ours[name][0], x[0], rtol=1e-6)
        assert abs(ours[name][-1] - x[-1]).max() > 1e-3


@pytest.mark.parametrize("name, dtype", [*zip(SCHEDULED, ["float16", "bfloat16"] * 2, strict=True)])
def test_half_params_and_schedules_go_together_behind_a_gate(name, dtype):
    """The moments are in f32, also where a number of a schedule is."""
    params, grads = cast((normal(0), normal(1, STEPS)), dtype)
    gated = boostax.static_loss_scale(CASES[name][1], 1.0)
    history, _, state = optax_run(gated, params, gated.init(params), grads)
    assert all(x.dtype == dtype for x in jax.tree.leaves(history))
    assert not any(x.dtype == dtype for x in jax.tree.leaves(state))


# get_states and set_states.

FIELDS = {"moments": "trace", "running_average": "nu", "history": "sum_of_squares"}
FIELDS |= {"m": "mu", "v": "nu", "step_counter": "count"}


def set_states(state, states):
    """What SINGA's ``get_states`` returned, in an Optax state of dicts of params."""
    values = {FIELDS[name]: value for name, value in states.items()}

    def replace(path, leaf):
        for depth, key in enumerate(path):
            # A field of a NamedTuple; keys of a dict are params and hyper-parameters.
            if isinstance(key, jax.tree_util.GetAttrKey) and key.name in values:
                value = values[key.name]
                for entry in path[depth + 1 :]:
                    value = value[entry.key]
                return jax.numpy.asarray(value, leaf.dtype)
        return leaf

    return jax.tree_util.tree_map_with_path(replace, state)


@pytest.mark.parametrize("name", SCHEDULED)
def test_a_run_of_singas_goes_on_in_optax(name):
    """Its states are moments by the params' names, and one counter for all schedules."""
    singa, tx = CASES[name]
    optimizer, grads = singa(), normal(1, STEPS)
    early, late = ({k: g[part] for k, g in grads.items()} for part in (np.s_[:7], np.s_[7:]))
    middle = {k: x[-1] for k, x in singa_run(optimizer, normal(0), early).items()}
    states = optimizer.get_states()
    expected = singa_run(optimizer, middle, late)
    with jax.enable_x64(True):
        params, late = cast((middle, late), "float64")
        state = set_states(tx.init(params), states)
        counters = [value for _, value in optax.tree_utils.tree_get_all_with_path(state, "count")]
        assert all(int(counter) == 7 for counter in counters)
        history, _, _ = optax_run(tx, params, state, late)
        assert_near(jax.device_get(history), expected, 1e-12)
