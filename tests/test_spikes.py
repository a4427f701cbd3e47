"""Spikes are refused by rules of accepted norms alone, and leave no trace in them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from memory import reduction_bytes, temporary_bytes

import boostax
from boostax.precision import skip_spikes
from boostax.testing import drawn

TAKEN, OVER, NOT_FINITE = 0, 2, 3
WINDOW = 16


def values(seed=0, size=80):
    """Norms that vary by a tenth, with spikes, and with what is not finite."""
    found = np.exp(0.1 * np.random.default_rng(seed).normal(size=size)).astype(np.float32)
    found[[20, 21, 35]] *= 50
    found[[12, 30]] = np.nan, np.inf
    return found


def follow(tx, grads):
    """The states after each step of a scan over gradients, stacked; and the last params."""

    def step(carry, g):
        params, state = boostax.apply_gradients(drawn(tx), g, carry[1], carry[0])
        return (params, state), state

    start = jnp.float32(0), tx.init(jnp.float32(0))
    (params, _), states = jax.jit(lambda grads: jax.lax.scan(step, start, grads))(grads)
    return jax.device_get((states, params))


def expected(rule, k, floor, given):
    """Limits and reasons in float64."""
    ring, limits, reasons = [], [], []
    for value in np.float64(given):
        last, limit = np.float64(ring[-WINDOW:]), np.inf
        if len(ring) >= WINDOW // 2:
            middle = np.median if rule == "median" else np.mean
            centre = middle(last)
            spread = 1.4826 * np.median(abs(last - centre)) if rule == "median" else last.std()
            limit = centre + k * max(spread, floor * abs(centre))
        limits.append(limit)
        finite, over = np.isfinite(value), value > limit
        reasons.append((OVER if over else TAKEN) if finite else NOT_FINITE)
        ring += [value] if finite and not over else []
    return np.array(limits), np.array(reasons)


LIMITS = [("median", 6.0, 0.01), ("median", 2.0, 0.0), ("sigma", 3.0, 0.01)]


@pytest.mark.parametrize(("rule", "k", "floor"), LIMITS)
def test_limits_are_those_of_numpy(rule, k, floor):
    tx = skip_spikes(optax.sgd(1.0), rule=rule, k=k, floor=floor, window=WINDOW)
    states, _ = follow(tx, values())
    told = jax.vmap(boostax.metrics)(states)
    limits, reasons = expected(rule, k, floor, values())
    # Squares and roots in f32, and a sum of 16; both reduce to a few units of 6e-8.
    np.testing.assert_allclose(told["spike_limit"], limits, rtol=2e-5)
    np.testing.assert_array_equal(told["spike_reason"], reasons)
    np.testing.assert_array_equal(told["spike_value"], values())
    bad, in_a_row = reasons != TAKEN, [0]
    np.testing.assert_array_equal(told["spikes"], np.cumsum(bad))
    np.testing.assert_array_equal(states.ran, ~bad)
    for refused in bad:
        in_a_row.append(in_a_row[-1] + 1 if refused else 0)
    np.testing.assert_array_equal(told["spikes_in_a_row"], in_a_row[1:])
    assert {TAKEN, OVER, NOT_FINITE} == set(reasons)


def test_a_run_with_refused_steps_is_the_run_without_them_to_the_bit():
    inner = optax.chain(optax.adam(optax.linear_schedule(1.0, 0.9, 50)))
    tx = skip_spikes(inner, window=WINDOW)
    states, params = follow(tx, values())
    kept, alone = follow(tx, values()[states.ran])
    refused = boostax.metrics(jax.tree.map(lambda x: x[-1], states))["spikes"]
    assert refused >= 4 and kept.own.spikes[-1] == 0 and params == alone
    for mine, other in ((states.own[:2], kept.own[:2]), (states.inner_state, kept.inner_state)):
        chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[-1], x) for x in (mine, other)))


@pytest.mark.parametrize("rule", ["median", "sigma"])
@pytest.mark.parametrize("zeros", [[0] * 4, [0] * 20, [1e-3, 0] * 4])
def test_zero_gradients_do_not_make_every_other_a_spike(rule, zeros):
    """After four zeros in a window of eight the limit was 0, and all else refused for ever."""
    given = np.float32([*zeros, *[1e-3] * 20, 1.0, 0, 1e-3])
    states, _ = follow(skip_spikes(optax.sgd(1.0), rule=rule, window=8), given)
    assert np.flatnonzero(~states.ran).tolist() == [len(given) - 3]


@pytest.mark.parametrize("size", [1e-25, 1e-20, 1e20, 1e30])
def test_norms_of_any_size_are_told_apart(size):
    """Norms of 1e-25 and 1e-20 were both 0, and one of 1e20 was called not finite."""
    given = np.float32(size) * np.float32([1, 1.1, 0.9, 1, 1, 1e5, 1, np.inf])
    states, _ = follow(skip_spikes(optax.sgd(1.0), window=8), given)
    told = jax.vmap(boostax.metrics)(states)
    np.testing.assert_allclose(told["spike_value"], given, rtol=1e-6)
    assert told["spike_reason"].tolist() == [0, 0, 0, 0, 0, OVER, 0, NOT_FINITE]


def test_around_a_window_micro_steps_are_judged_and_inside_one_windows():
    given = np.ones(24, np.float32)
    given[[9, 10]] = 100
    around = skip_spikes(boostax.accumulate(optax.sgd(1.0), 2), window=4)
    states, params = follow(around, given)
    assert np.flatnonzero(~states.ran).tolist() == [9, 10] and params == -11
    inside = boostax.accumulate(skip_spikes(optax.sgd(1.0), window=4), 2)
    states, params = follow(inside, given)
    # Two of twelve windows hold a spike.
    assert states.inner_state.own.spikes[-1] == 2 and params == -10


def test_a_scaler_inside_is_refused_as_its_scale_would_be_in_the_norm():
    tx = skip_spikes(boostax.accumulate(boostax.dynamic_loss_scale(optax.sgd(1.0)), 2))
    with pytest.raises(ValueError, match=r"inner must be without a loss scaler, got .*LossScale"):
        tx.init(jnp.zeros(3))


def test_replicas_refuse_the_same_step_and_send_eight_bytes(mesh):
    inner = optax.chain(boostax.all_reduce("data"), optax.sgd(0.1))
    tx = skip_spikes(inner, window=4, axis_name="data")
    loss = lambda w, x: jnp.mean((w - x) ** 2)  # noqa: E731
    step = boostax.make_train_step(loss, tx, mesh=mesh, axis_name="data")
    batch, state = jnp.ones(16), step.init(jnp.float32(0.0))
    assert boostax.explain(step, state, batch).parts[0].wire_bytes == 2 * 7 / 8 * 8
    for i in range(8):
        # One replica's rows alone.
        data = batch.at[:2].set(1e3) if i == 5 else batch.at[3].set(jnp.nan) if i == 6 else batch
        state, metrics = step(state, data)
        reasons = {5: OVER, 6: NOT_FINITE}
        assert int(metrics["spike_reason"]) == reasons.get(i, TAKEN)
        assert bool(metrics["applied"]) == (i not in reasons)
    assert int(metrics["spikes"]) == 2 and int(metrics["spikes_in_a_row"]) == 0


def test_the_norm_is_the_root_of_the_replicas_mean_squares(mesh):
    tx = skip_spikes(optax.chain(boostax.all_reduce("data"), optax.sgd(0.0)), axis_name="data")
    grads, w = jnp.arange(16.0).reshape(8, 2), jnp.zeros(2)

    def local(g):
        return boostax.apply_gradients(tx, g[0], tx.init(w), w)[1].own.value

    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P()))(grads)
    np.testing.assert_allclose(found, np.sqrt(np.square(grads).sum() / 8), rtol=1e-6)


def test_no_temporary_beyond_those_of_the_bare_step():
    big = {f"layer{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(4)}
    adam = optax.adam(1e-3)
    bare = temporary_bytes(adam, big) + reduction_bytes(big)
    assert temporary_bytes(skip_spikes(adam), big) - bare <= 0.01 * 4 * 4 * 512**2


def test_explain_knows_it_as_a_check_and_a_ring_of_another_size_begins_anew():
    old, longer = (skip_spikes(optax.adam(1e-2), window=size) for size in (4, 8))
    assert boostax.explain(old, jnp.zeros(3)).parts[0].role == "check"
    params = jnp.ones(3)
    params, state = boostax.apply_gradients(old, params, old.init(params), params)
    moved, _ = boostax.migrate_state(state, longer, params)
    assert int(moved.own.accepted) == 0 and not moved.own.norms.any()
