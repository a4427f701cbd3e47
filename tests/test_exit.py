"""What leaves a gate is as finite as what went in, or was never taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax

ADAM = optax.adamw(0.1, weight_decay=0.5)
assert_same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
safe = functools.partial(boostax.static_loss_scale, scale=1.0)


def run(tx, calls, params, flush=False):
    """Params and state after ``(grads, extra)`` of each call."""
    state = tx.init(params)
    step = jax.jit(lambda p, s, g, extra: boostax.apply_gradients(tx, g, s, p, **extra))
    for grads, extra in calls:
        params, state = step(params, state, grads, extra)
    return boostax.flush(tx, state, params) if flush else (params, state)


def same_but_for_the_drop(found, without, dropped=1):
    """Params and inner state as without the window, which is counted."""
    (params, state), (expected, before) = found, without
    assert_same((params, state.inner_state.inner_state), (expected, before.inner_state.inner_state))
    assert int(boostax.metrics(state)["dropped_windows"]) == dropped
    assert int(state.inner_state.optimizer_steps) == int(before.inner_state.optimizer_steps)


ONE = jnp.ones(3)
GOOD = [(ONE, {}), (2 * ONE, {})]


@pytest.mark.parametrize("normalize", ["mean", "sum", "weight"])
@pytest.mark.parametrize("flush", [False, True])
def test_a_window_whose_narrow_sum_overflows_is_dropped(normalize, flush):
    """Each gradient fits f16, their sum does not; neither Adam nor its decay may see it."""
    weigh = lambda calls: [  # noqa: E731
        (g, {"weight": 1.0} if normalize == "weight" else {}) for g, _ in calls
    ]
    options = {"normalize": normalize, "accumulator_dtype": "float16"}
    tx = safe(boostax.accumulate(ADAM, 3 if flush else 2, **options))
    window = [(ONE, {}), (ONE, {})] + ([(ONE, {})] if flush else [])
    bad = jnp.float32([1.0, 6e4, 1.0])
    before = run(tx, weigh(window), ONE)
    after = run(tx, weigh([*window, (bad, {}), (bad, {})]), ONE, flush)
    same_but_for_the_drop(after, before)
    assert not boostax.has_updated(after[1])
    if not flush:
        last = run(tx, weigh([*window, (bad, {}), (bad, {}), *GOOD]), ONE)
        same_but_for_the_drop(last, run(tx, weigh([*window, *GOOD]), ONE))


def test_a_scaler_inside_sees_the_overflow_of_the_sum_and_lowers_the_scale():
    scaled = boostax.dynamic_loss_scale(ADAM, init_scale=4.0)
    tx = boostax.accumulate(scaled, 2, accumulator_dtype="float16")
    params, state = run(tx, [(6e4 * ONE, {}), (6e4 * ONE, {})], ONE)
    assert params.tolist() == [1.0] * 3
    found = boostax.metrics(state)
    assert found["loss_scale"] == 2.0 and found["skipped_steps"] == found["dropped_windows"] == 1


@pytest.mark.parametrize("weight", [np.inf, np.nan, -1.0, 2.0**64, 1e-30])
def test_a_window_with_an_unusable_weight_is_dropped(weight):
    """An infinite one makes inf * 0 of every param, a negative one an average of nothing."""
    tx = safe(boostax.accumulate(ADAM, 2, normalize="weight"))
    weighted = lambda weights: [(ONE, {"weight": np.float32(w)}) for w in weights]  # noqa: E731
    second = 0.0 if weight == 1e-30 else 2.0
    before = run(tx, weighted([1, 3]), ONE)
    same_but_for_the_drop(run(tx, weighted([1, 3, weight, second]), ONE), before)
    found = run(tx, weighted([1, 3, second, weight, 4, 5]), ONE)
    same_but_for_the_drop(found, run(tx, weighted([1, 3, 4, 5]), ONE))
    assert boostax.all_finite(found[1])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("normalize", ["mean", "sum", "weight"])
def test_replicas_drop_a_window_together(mesh, normalize, check_vma):
    """The sum of one of eight overflows."""
    inner = optax.chain(boostax.all_reduce("data"), ADAM)
    options = {"normalize": normalize, "accumulator_dtype": "float16", "axis_name": "data"}
    tx = safe(boostax.accumulate(inner, 2, **options), axis_name="data")

    def loss(w, x):
        return jnp.mean(w * x), boostax.Aux(weight=1.0 if normalize == "weight" else None)

    step = boostax.make_train_step(
        loss, tx, mesh=mesh, axis_name="data", check_vma=check_vma, has_aux=True
    )
    good, bad = jnp.ones(8), jnp.ones(8).at[3].set(6e4)
    state = step.init(jnp.float32(1.0))
    for batch in (good, good):
        state, metrics = step(state, batch)
    assert metrics["applied"]
    before = jax.device_get((state.params, state.opt_state.inner_state.inner_state))
    for batch in (bad, bad):
        state, metrics = step(state, batch)
    assert not metrics["applied"] and metrics["dropped_windows"] == 1
    assert_same(jax.device_get((state.params, state.opt_state.inner_state.inner_state)), before)
