"""Loss scaling follows its state machine exactly, and never costs a gradient."""

import collections
import functools
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawing import draws
from hypothesis import given, strategies

import boostax
from boostax.testing import drawn

POWERS_OF_TWO = [(65536, 2, 4), (2**24, 2, 2000), (128, 4, 3), (4, 2, 1), (1, 2, 5)]
F32 = jnp.finfo(jnp.float32)


def trace(overflow, **options):
    """States of a scaler after each step; a bad step alternates between inf and NaN."""
    tx = boostax.dynamic_loss_scale(optax.sgd(1.0), **options)
    params = jnp.float32(0.0)

    def step(carry, bad):
        params, state, odd = carry
        grads = jnp.where(bad, jnp.where(odd, jnp.inf, jnp.nan), 0.0).astype(jnp.float32)
        params, state = boostax.apply_gradients(drawn(tx), grads, state, params)
        return (params, state, ~odd), state

    return jax.lax.scan(step, (params, tx.init(params), jnp.asarray(False)), overflow)[1]


@pytest.fixture(scope="module")
def golden_traces(golden):
    """Golden traces by setting, each with ours of the same overflow pattern."""
    found, run = collections.defaultdict(list), {}
    for record in json.loads((golden / "loss_scale_traces.json").read_text())["traces"]:
        setting = init, factor, window = record["init"], record["factor"], record["window"]
        if setting not in run:
            options = {"growth_factor": factor, "backoff_factor": 1 / factor}
            options |= {"growth_interval": window, "max_scale": float(F32.max)}
            run[setting] = jax.jit(functools.partial(trace, init_scale=init, **options))
        states = jax.device_get(run[setting](jnp.asarray(record["overflow"], bool)))
        found[setting].append((record, states))
    return found


def test_the_golden_traces_are_all_there(golden_traces):
    assert set(golden_traces) == {*POWERS_OF_TWO, (1024, 3, 6), (3e38, 2, 2)}
    assert [len(records) for records in golden_traces.values()] == [9] * 7


@pytest.mark.parametrize("setting", [*POWERS_OF_TWO, (1024, 3, 6)], ids=str)
def test_trajectories_equal_all_three_of_mindspore(golden_traces, setting):
    """Exactly; with factor 3 the peers themselves differ by rounding, x/3 against x*(1/3)."""
    rtol = 0 if setting in POWERS_OF_TWO else 40 * F32.eps
    for record, states in golden_traces[setting]:
        for peer in ("update_cell", "manager", "amp_scaler"):
            np.testing.assert_allclose(states.scale, np.float64(record[peer]), rtol, err_msg=peer)


def test_growth_past_the_largest_number_is_refused(golden_traces):
    """MindSpore's update cell becomes infinite here and stays so; its amp scaler does not."""
    for record, states in golden_traces[3e38, 2, 2]:
        assert np.isfinite(states.scale).all()
        np.testing.assert_array_equal(states.scale, np.float32(record["amp_scaler"]))


def test_clean_steps_count_as_in_mindspore(golden_traces):
    for record, states in (pair for pairs in golden_traces.values() for pair in pairs):
        np.testing.assert_array_equal(states.clean_steps, record["amp_scaler_counter"])
        since = np.array(record["update_cell_cur_iter"]) - 1
        since -= record["update_cell_last_overflow_iter"]
        np.testing.assert_array_equal(states.clean_steps, since)


def reference(overflow, options):
    """The state machine in plain Python, f32 arithmetic."""
    values = {name: np.float32(x) for name, x in options.items()}
    scale, low, hysteresis = values["init_scale"], values["min_scale"], options["hysteresis"]
    count = collections.Counter(tolerance=hysteresis)
    for bad in overflow:
        if bad:
            count["clean_steps"] = 0
            count["skipped"] += 1
            count["skipped_in_a_row"] += 1
            count["tolerance"] = max(count["tolerance"] - 1, 0)
            if count["tolerance"] == 0 and scale <= low:
                count["floor_hits"] += 1
            elif count["tolerance"] == 0:
                count["backoffs"] += 1
                scale = max(scale * values["backoff_factor"], low)
        else:
            count["clean_steps"] += 1
            count["skipped_in_a_row"] = 0
            if count["clean_steps"] == options["growth_interval"]:
                count["clean_steps"], count["tolerance"] = 0, hysteresis
                grown = scale * values["growth_factor"]
                if grown <= values["max_scale"]:
                    count["growths"] += 1
                    scale = grown
        yield {"scale": float(scale), "applied": not bad, **count}


# Hyperparameters as arguments: one program for all examples.
traced = jax.jit(lambda overflow, options: trace(overflow, **options))


@draws(150)
@given(
    overflow=strategies.lists(strategies.booleans(), min_size=32, max_size=32),
    scales=strategies.lists(strategies.integers(-20, 30), min_size=3, max_size=3).map(sorted),
    options=strategies.fixed_dictionaries(
        {
            "growth_factor": strategies.sampled_from([2.0, 4.0, 1.5, 2**0.25]),
            "backoff_factor": strategies.sampled_from([0.5, 0.25, 0.75, 0.1]),
            "growth_interval": strategies.integers(1, 6),
            "hysteresis": strategies.integers(1, 4),
        }
    ),
)
def test_state_machine_equals_its_plain_reference(overflow, scales, options):
    for name, exponent in zip(("min_scale", "init_scale", "max_scale"), scales, strict=True):
        options[name] = 2.0**exponent
    states = jax.device_get(traced(jnp.asarray(overflow), options))
    for t, expected in enumerate(reference(overflow, options)):
        assert {name: getattr(states, name)[t] for name in expected} == expected, (t, options)


@pytest.mark.parametrize("skip", [True, False])
def test_static_scale_stays_and_skips_only_when_asked(skip):
    tx = boostax.static_loss_scale(optax.sgd(1.0), 128.0, skip_nonfinite=skip)
    params, state = jnp.float32(0.0), tx.init(jnp.float32(0.0))
    for grads, expected in ((64.0, -0.5), (math.inf, -0.5 if skip else -math.inf)):
        params, state = boostax.apply_gradients(tx, jnp.float32(grads), state, params)
        assert float(params) == expected and float(boostax.precision.loss_scale(state)) == 128.0
    told = boostax.metrics(state)
    assert (int(told["skipped"]), bool(told["applied"])) == (skip, not skip)
    assert ("cond" in str(jax.make_jaxpr(drawn(tx).update)(params, state, params))) == skip


@jax.jit
def identity_inside(grads, scale):
    tx = boostax.static_loss_scale(optax.identity(), scale)
    return drawn(tx).update(grads, tx.init(grads))


def unscaled(grads, scale):
    """What the inner transformation sees."""
    updates, state = identity_inside(grads, scale)
    assert bool(state.applied)
    return np.asarray(updates)


@pytest.mark.parametrize("exponent", [-24, -1, 0, 10, 16, 24, 64, 65])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_powers_of_two_unscale_bit_for_bit(dtype, exponent):
    """Every f16 and bf16 number, and as many f32 ones."""
    bits = np.arange(2**16, dtype=np.uint16)
    bits = bits.astype(np.uint32) * 65537 if dtype == jnp.float32 else bits
    grads = bits.view(dtype)
    grads = grads[np.isfinite(grads.astype(np.float32))]
    exact = np.ldexp(grads.astype(np.float64), -exponent)
    # XLA flushes subnormal f32; what is 2**48 or more counts as an overflow.
    normal = np.minimum(abs(exact), abs(grads.astype(np.float64))) >= float(F32.tiny)
    usable = normal & (abs(exact) < 2.0**48)
    assert usable.sum() > 1000
    grads, exact = np.where(usable, grads, grads.dtype.type(0)), np.where(usable, exact, 0)
    result = unscaled(jnp.asarray(grads), 2.0**exponent)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, exact)


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 0.3, 2.0**126, 2.0**127, 3e38])
def test_gradients_of_any_scale_come_back(scale):
    """The reciprocal of a scale above 2**126 is subnormal, and was zero to the processor."""
    true = np.array([1.0, -0.75, 1 / 3, 1.1], np.float32)
    grads = jnp.asarray(true * np.float32(scale))
    np.testing.assert_allclose(unscaled(grads, scale), true, rtol=3 * F32.eps)


def test_the_oracle_saves_a_gradient_below_the_range_of_f16():
    tx = boostax.static_loss_scale(optax.identity(), 2.0**15)
    params = jnp.float32(1.0)
    state = tx.init(params)
    loss = lambda w, x: w * x * x  # noqa: E731
    f = boostax.value_and_grad(loss, policy="compute=float16")
    _, grads = f(params, state, jnp.float32(1e-4))
    assert float(jax.grad(lambda w: loss(w.astype(jnp.float16), jnp.float16(1e-4)))(params)) == 0.0
    np.testing.assert_allclose(tx.update(grads, state, params)[0], 1e-8, rtol=3 * 2**-11)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_scaler_operations_equal_mindspore_where_it_keeps_f32(arrays, dtype):
    """Its f16 and bf16 go through a low product: the right value is the f32 one."""
    ops = arrays("loss_scaler_ops.npz")
    x = jnp.asarray(ops["x"], dtype)
    state = boostax.static_loss_scale(optax.sgd(0.1), 1024.0).init(x)
    scaled = np.array([boostax.precision.scale_loss(value, state) for value in x])
    np.testing.assert_array_equal(scaled, np.asarray(x, np.float32) * 1024)
    np.testing.assert_array_equal(unscaled(x, 1024.0), np.asarray(x, np.float32) / 1024)
    if dtype == jnp.float32:
        np.testing.assert_array_equal(scaled, ops["scale_Float32"])
        np.testing.assert_array_equal(unscaled(x, 1024.0), ops["unscale_Float32"])
    else:
        name = {jnp.float16: "Float16", jnp.bfloat16: "BFloat16"}[dtype]
        assert (ops[f"scale_{name}"] != scaled).any() or dtype == jnp.bfloat16
        np.testing.assert_allclose(ops[f"unscale_{name}"][[0, 1, 3]], scaled[[0, 1, 3]] / 2**20)


def test_all_finite_equals_mindspore(arrays):
    ops = arrays("loss_scaler_ops.npz")
    for row, expected in zip(ops["all_finite_inputs"], ops["all_finite"], strict=True):
        assert bool(boostax.precision.all_finite([*map(jnp.asarray, row)])) == expected


TREES = [
    (None, True),
    ({}, True),
    ({"a": None, "b": jnp.zeros((0, 3)), "c": jnp.int32(2**31 - 1)}, True),
    (jnp.array([True]), True),
    ((jnp.zeros((0,)), jnp.float16("inf")), False),
    (jnp.array([2e38 + 3e38j, 0]), True),  # its magnitude is not finite, it is
    (jnp.array([1 + 0j, complex(0, math.nan)]), False),
    (jnp.array([complex(-math.inf, 0)]), False),
    (jnp.bfloat16(3e38), True),
    (np.float32("nan"), False),
    (math.inf, False),
]


@pytest.mark.parametrize(("tree", "finite"), TREES, ids=str)
def test_all_finite_of_any_tree(tree, finite):
    result = jax.jit(lambda: boostax.precision.all_finite(tree))()
    assert (result.shape, result.dtype, bool(result)) == ((), jnp.bool_, finite)


def test_all_finite_agrees_over_an_axis():
    x = jnp.ones((4, 3)).at[2, 1].set(jnp.nan)
    local = jax.vmap(boostax.precision.all_finite)(x)
    agree = functools.partial(boostax.precision.all_finite, axis_name="i")
    agreed = jax.vmap(agree, axis_name="i")(x)
    assert (local.tolist(), agreed.tolist()) == ([True, True, False, True], [False] * 4)


SGD = optax.sgd(0.1)
REPORTS = {
    "loss_scaling": boostax.dynamic_loss_scale(SGD),
    "group_loss_scale": boostax.precision.group_loss_scale(SGD, {"k": 0}),
}


@pytest.mark.parametrize("card", REPORTS)
def test_the_card_names_every_metric(card):
    text = (pathlib.Path(__file__).parent.parent / "docs" / "cards" / f"{card}.md").read_text()
    sentence = re.search(r"`boostax\.metrics\(opt_state\)` has (.+?)\.\s", text, re.DOTALL)[1]
    found = boostax.metrics(REPORTS[card].init({"k": jnp.ones(3)}))
    names = {name.replace("group_0_", "group_k_") for name in found}
    assert set(re.findall(r"`(\w\w+)`", sentence)) == names
