"""Scales by groups: exact at boundaries, blamed where the overflow began, skipped as a whole."""

import functools
import json
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawing import draws
from hypothesis import given, strategies
from memory import temporary_bytes

import boostax
from boostax.precision import check_boundaries, group_loss_scale, group_scales, scale_boundary
from boostax.testing import drawn

SGD = optax.sgd(1.0)
THREE = {"a": 0, "b": 1, "c": 2}
SCALES = jnp.array([2.0**9, 2.0**-6, 2.0**4])


def grads_of(*values):
    return {name: jnp.asarray(x, jnp.float32) for name, x in zip("abc", values, strict=True)}


def updated(state, *values, **options):
    """The state after a gradient in each of three groups."""
    return compiled_update(tuple(options.items()))(state, grads_of(*values))


@functools.cache
def compiled_update(options):
    tx = group_loss_scale(SGD, THREE, **dict(options))
    return jax.jit(lambda state, grads: drawn(tx).update(grads, state, grads_of(0, 0, 0))[1])


def start(**options):
    return group_loss_scale(SGD, THREE, **options).init(grads_of(0, 0, 0))


# The table


def test_the_table_moves_as_in_mindspore(golden):
    record = json.loads((golden / "group_loss_scale.json").read_text())
    tx, params = drawn(group_loss_scale(SGD, {"x": 0})), {"x": jnp.float32(0)}
    first = tx.init(params)
    assert float(first.table[0]) == record["init"] == record["layout_after_init"][1]

    def step(state, grad):
        state = tx.update({"x": grad}, state, params)[1]
        return state, (state.table[0], state.scales[0])

    grads = jnp.array([0.0 if op == "grow" else jnp.inf for op in record["ops"]])
    table, scales = jax.lax.scan(step, first, grads)[1]
    np.testing.assert_array_equal(table, np.float64(record["values"]))
    np.testing.assert_array_equal(scales, 2.0 ** np.floor(np.log2(record["values"])))


@draws(60)
@given(strategies.floats(2.0**-60, 2.0**60, width=32))
def test_the_scale_applied_is_the_power_of_two_below_the_table(entry):
    state = start()._replace(table=jnp.full(3, entry, jnp.float32))
    mantissa, exponent = np.frexp(np.float32(entry))
    assert mantissa >= 0.5
    np.testing.assert_array_equal(state.scales, np.full(3, np.ldexp(0.5, exponent), np.float32))
    assert float(state.scale) == float(group_scales((state,))[-1]) == float(state.scales[-1])


def test_floor_and_ceiling_hold():
    options = {"init_scale": 4.0, "min_scale": 2.0, "max_scale": 8.0, "growth_factor": 3.0}
    options["backoff_factor"] = 0.125
    state = start(**options)
    for _ in range(3):
        state = updated(state, jnp.inf, jnp.inf, jnp.inf, **options)
        assert state.table.tolist() == [4.0, 4.0, 2.0]
    for table in ([8.0, 8.0, 6.0], [8.0, 8.0, 8.0]):
        state = updated(state, 0, 0, 0, **options)
        assert state.table.tolist() == table


# Blame


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan, 2.0**70])
def test_only_the_group_where_the_overflow_began_is_to_blame(bad):
    """It ruins those before it, of which nothing is known; those after it grow."""
    for first, expected in enumerate(([-1, 1, 1], [0, -1, 1], [0, 0, -1])):
        state = updated(start(), *[bad if k <= first else 1.0 for k in range(3)])
        np.testing.assert_array_equal(np.sign(np.asarray(state.table) - 4096.0), expected)
        assert int(state.overflow_group) == first


MOVES = {
    # What overflowed in each step, and MindSpore's table after the last: (1, 1, 1) lowers all.
    ((0, 0, 0), (0, 0, 1), (1, 1, 1)): [2900.3, 2900.3, 2049.4],
    ((1, 1, 1),): [2896.3, 2896.3, 2896.3],
    ((1, 0, 1), (0, 1, 0)): [2898.3, 2898.3, 2898.3],
}


@pytest.mark.parametrize("steps", MOVES)
def test_each_group_moves_by_its_own_overflow(steps):
    """As ``GroupLossScaleManager``'s, float by float; the step is skipped if any overflows."""
    state, table = start(overflow="each"), np.full(3, 4096, np.float32)
    for flags in steps:
        state = updated(state, *[jnp.inf if flag else 1.0 for flag in flags], overflow="each")
        factors = np.where(flags, np.float32(2**-0.5), np.float32(2 ** (1 / 1000)))
        table = (table * factors).astype(np.float32)
        np.testing.assert_array_equal(state.table, table)
        assert bool(state.applied) == (not any(flags))
    np.testing.assert_allclose(table, MOVES[steps], atol=0.05)


@pytest.mark.parametrize("overflow", ["blame", "each"])
def test_a_skip_that_no_group_of_its_own_explains_still_ends(overflow):
    """The third group's cotangent overflows and only the first one's gradients show it."""
    options = {"overflow": overflow, "init_scale": 2.0**20, "growth_factor": 1 + 1e-7}
    state = start(**options)
    for _ in range(24):
        state = updated(state, jnp.inf, 1.0, 1.0, **options)
    np.testing.assert_allclose(40 - 2 * np.log2(np.asarray(state.table)), [24, 16, 8], atol=1e-3)


def test_every_group_can_start_at_a_scale_of_its_own():
    for form in (tuple, list, np.array, jnp.array):
        state = start(init_scale=form([64.0, 8.0, 2.0]))
        assert state.scales.tolist() == [64.0, 8.0, 2.0] and float(state.scale) == 2.0


def test_a_true_overflow_in_f16_is_found_and_mended():
    """The first group's cotangent is beyond f16: its scale falls, the last one's does not."""

    def loss(params, x, *, scales):
        hidden = (x * params["a"].astype(jnp.float16)) * jnp.float16(50.0)
        hidden = scale_boundary(hidden, scales, 0, 1) * params["b"].astype(jnp.float16)
        hidden = scale_boundary(hidden, scales, 1, 2) * params["c"].astype(jnp.float16)
        return jnp.mean(hidden.astype(jnp.float32))

    tx, params = group_loss_scale(optax.sgd(0.0), THREE), grads_of(1.0, 1.0, 1.0)
    state, x = tx.init(params), jnp.full(1, 0.01, jnp.float16)
    step = jax.jit(functools.partial(by_hand, tx, loss))
    for _ in range(40):
        _, state = step(params, state, x)
    assert bool(state.applied) and int(state.skipped) >= 1
    assert float(state.table[0]) < float(state.table[2]) and float(state.scale) == 4096.0


def by_hand(tx, loss_fn, params, state, batch):
    """A step as ``boostax.value_and_grad`` takes it."""
    scales = group_scales(state)
    scaled = lambda p: scales[-1] * loss_fn(p, batch, scales=scales).astype(jnp.float32)  # noqa: E731
    return drawn(tx).update(jax.grad(scaled)(params), state, params)


# Skips


def test_gradients_are_unscaled_by_the_scale_that_they_were_computed_with():
    """MindSpore takes the scale after the update: 0.07% too low at each clean step."""
    tx = drawn(group_loss_scale(SGD, THREE, init_scale=2.0, growth_factor=2.0))
    state, update = tx.init(grads_of(0, 0, 0)), jax.jit(tx.update)
    for _ in range(5):
        grads = dict(zip("abc", 3.0 * state.scales, strict=True))
        updates, state = update(grads, state, grads_of(0, 0, 0))
        assert jax.tree.leaves(updates) == [-3.0] * 3


def test_frozen_groups_keep_their_scale():
    state = start()
    masked = grads_of(1.0, 1.0, 1.0) | {"a": optax.MaskedNode()}
    _, state = group_loss_scale(SGD, THREE).update(masked, state, masked)
    assert np.sign(np.asarray(state.table) - 4096.0).tolist() == [0, 1, 1]


def test_a_window_outside_hands_sums_on_with_the_factor_of_their_mean():
    tx = boostax.accumulate(group_loss_scale(SGD, {"a": 0}), 2)
    params = {"a": jnp.zeros(2)}
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update({"a": jnp.array([2.0**-14.5, 1.0])}, state, params)
    np.testing.assert_allclose(state.inner_state.largest, 1 / 4096)
    np.testing.assert_array_equal(updates["a"], -jnp.array([2.0**-14.5, 1.0]) / 4096)


# Measured scales


def test_the_first_gradient_sets_a_measured_scale():
    options = {"rule": "measure", "max_scale": 2.0**50}
    state = start(**options)
    true = np.array([2.0**-38 * 1.5, 2.0**-20, 3.0])
    for call in range(3):
        # What is below f16 comes out zero.
        state = updated(state, *np.float32(np.float16(true * np.asarray(state.scales))), **options)
        assert call > 0 or (state.largest > 0).tolist() == [False, True, True]
    scaled = true * np.asarray(state.scales)
    assert ((scaled > 2.0**10) & (scaled <= 2.0**12)).all(), scaled


def test_a_measured_scale_falls_at_once_and_rises_slowly():
    options = {"rule": "measure", "headroom": 4.0}
    state, told = start(**options), []
    for true in (1.0, 1.0, 64.0, 1.0, 1.0):
        state = updated(state, *(true * state.scales), **options)
        told.append(np.log2(np.asarray(state.table)[0]))
    np.testing.assert_allclose(told, [14, 14, 8, 8.001, 8.002], atol=1e-5)
    assert int(state.skipped) == 0


# Boundaries


PARAMS = {name: jax.random.normal(jax.random.key(i), (4, 4)) for i, name in enumerate("abc")}
X = jnp.linspace(-1, 1, 12).reshape(3, 4)


def residual(params, x, *, scales=None):
    """A stream that is added to, a long way back, an output of every layer, a penalty on all."""
    cross = functools.partial(scale_boundary, opt_state_or_scales=scales)
    one = x + jnp.sin(x @ params["a"])
    one_in_1, one_in_2 = (cross(one, outer=0, inner=i) for i in (1, 2))
    two = cross(one_in_1 + jnp.sin(one_in_1 @ params["b"]), outer=1, inner=2)
    three = two + one_in_2 + x @ params["c"]
    ends = [cross(params[k], outer=g, inner=2) for k, g in THREE.items()]
    return jnp.mean(three**2) + jnp.mean(jnp.abs(one_in_2)) + 0.1 * sum(jnp.sum(p**2) for p in ends)


def scanned(params, x, *, scales=None):
    """A scale for each layer of a scan, with remat and a tree of activations."""

    @jax.checkpoint
    def layer(carry, inputs):
        w, place = inputs
        # From the layer before it; the first one's input comes from no param.
        stream = scale_boundary(carry, scales, jnp.maximum(place - 1, 0), place)
        return {"h": jnp.tanh(stream["h"] @ w), "n": stream["n"] + 1}, None

    weights = jnp.stack([params[k] for k in "abc"])
    stream, _ = jax.lax.scan(layer, {"h": x, "n": jnp.int32(0)}, (weights, jnp.arange(3)))
    return jnp.mean(stream["h"] ** 2)


@pytest.mark.parametrize("loss", [residual, scanned])
def test_gradients_do_not_depend_on_the_scales_to_the_bit(loss):
    """And they are those of the model without boundaries; so is the loss."""
    assert check_boundaries(loss, PARAMS, X, THREE, rtol=0) == 0.0
    tx = group_loss_scale(SGD, THREE, min_scale=2.0**-9)
    state = tx.init(PARAMS)._replace(table=SCALES)
    scaled = lambda p: SCALES[-1] * loss(p, X, scales=SCALES)  # noqa: E731
    value, grads = jax.jit(jax.value_and_grad(scaled))(PARAMS)
    expected, plain = jax.jit(jax.value_and_grad(lambda p: loss(p, X)))(PARAMS)
    assert float(value) == float(SCALES[-1] * expected)
    updates = jax.tree.map(jnp.negative, tx.update(grads, state, PARAMS)[0])
    # Compiled apart, sums may be taken in another order.
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain))
    chex.assert_trees_all_close(updates, plain, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_a_boundary_multiplies_the_cotangent_and_nothing_else(dtype):
    """By ratios beyond the range of f16 too, in every transformation."""
    x = {"x": jnp.asarray([2.0**-14, -(2.0**-13)], dtype), "n": jnp.arange(2)}
    scales = jnp.array([2.0**20, 1.0])

    def total(value, scales=scales):
        crossed = scale_boundary(value, scales, 0, 1)
        assert crossed["n"] is value["n"]
        return crossed["x"]

    np.testing.assert_array_equal(total(x), x["x"])
    one = jnp.asarray([2.0**-10, 2.0**-11], dtype)
    mapped = jax.vmap(total, in_axes=({"x": 0, "n": 0},))
    for f in (total, jax.jit(total), jax.checkpoint(total), mapped):
        _, pullback = jax.vjp(lambda v, f=f: f({"x": v, "n": x["n"]}), x["x"])
        np.testing.assert_array_equal(pullback(one)[0], np.asarray([1024, 512], one.dtype))


def test_scale_boundary_reads_the_state_and_does_nothing_without_one():
    state = (start()._replace(table=SCALES),)
    assert float(jax.grad(lambda x: scale_boundary(x, state, 2, 0))(1.0)) == 2.0**-5
    x = jnp.ones(3)
    adam = optax.adam(1.0).init(x)
    assert all(scale_boundary(x, given, 0, 1) is x for given in (adam, None))
    assert group_scales(adam) is None


@pytest.mark.parametrize(("edge", "spoiled"), list(enumerate("aaba")))
def test_the_checker_names_what_a_missing_boundary_spoils(edge, spoiled):
    """Left out one by one: between two layers, on a residual stream, on a weight used twice."""

    def loss(params, x, *, scales, left_out=edge):
        def cross(number, value, outer, inner):
            return value if number == left_out else scale_boundary(value, scales, outer, inner)

        one = jnp.tanh(x @ params["a"])
        two = jnp.tanh(cross(0, one, 0, 1) @ params["b"])
        three = cross(2, two, 1, 2) @ params["c"] + cross(1, one, 0, 2)
        return jnp.mean((three @ cross(3, params["a"], 0, 2)) ** 2)

    assert check_boundaries(functools.partial(loss, left_out=None), PARAMS, X, THREE, rtol=0) == 0.0
    with pytest.raises(ValueError, match=f"of '.*{spoiled}'.* that depend on the sc"):
        check_boundaries(loss, PARAMS, X, THREE)


# Many devices


def test_the_last_group_that_is_bad_on_any_replica_is_to_blame():
    """That all skip together, in any mode, is in the contract."""
    inner, params = optax.chain(boostax.all_reduce("data"), SGD), grads_of(0, 0, 0)
    tx = group_loss_scale(inner, THREE, axis_name="data")
    state = tx.init(params)
    bad = jnp.zeros((8, 3)).at[5, 1].set(jnp.nan).at[2, 0].set(jnp.inf)
    update = lambda g: drawn(tx).update(grads_of(*g), state, params)[1]  # noqa: E731
    state = jax.jit(jax.vmap(update, axis_name="data"))(bad)
    for leaf in jax.tree.leaves(state):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    assert (state.overflow_group[0], state.skipped[0]) == (1, 1)
    assert np.sign(state.table[0] - 4096).tolist() == [0, -1, 1]


# Memory and tracing


def test_it_takes_no_more_memory_than_one_scale():
    shapes = {f"layer{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(6)}
    adam, labels = optax.adam(1e-3), {name: i // 2 for i, name in enumerate(shapes)}
    both = boostax.dynamic_loss_scale(adam), group_loss_scale(adam, labels)
    for dtype in (jnp.float32, jnp.float16):
        grads = jax.tree.map(lambda x, dtype=dtype: x.update(dtype=dtype), shapes)
        one, many = (temporary_bytes(tx, shapes, grads) for tx in both)
        assert many <= one + 16384


def test_groups_keep_gradients_that_every_single_scale_loses():
    """From 1/4 down to 2**-50: f16 has 40 powers of two, subnormals included."""
    count, x = 17, jnp.ones(4)
    params = [jnp.ones(4) for _ in range(count)]

    def loss(params, x, *, scales=None):
        hidden = x.astype(jnp.float16)
        for group, param in enumerate(params):
            hidden = scale_boundary(hidden, scales, max(group - 1, 0), group)
            # In the backward pass an eighth.
            hidden = scale_boundary(hidden, jnp.array([0.125, 1.0]), 0, 1)
            hidden = hidden * param.astype(jnp.float16)
        return jnp.mean(hidden.astype(jnp.float32))

    true = 2.0 ** (-2 - 3.0 * np.arange(count)[::-1])
    tx = group_loss_scale(optax.identity(), [*range(count)], rule="measure", max_scale=2.0**60)
    state, kept = tx.init(params), np.zeros(count, bool)
    step = jax.jit(functools.partial(by_hand, tx, loss))
    for _ in range(20):
        updates, state = step(params, state, x)
        kept |= np.array([float(g[0]) for g in updates]) == true
    assert kept.all(), state
    one = jax.grad(lambda p: 2.0**16 * loss(p, x))(params)
    assert not np.any(one[0]) and np.isfinite(one[-1]).all()


# Errors


INNER = "scale_boundary: inner must be a group from 0 to 2, got 3. Group 0 is the first in "
PATTERN = "labels must be patterns that match params, got 'x*'. The pattern matches no param."
SCALE = "init_scale must be one number, or a number for each of 3 groups, got (1.0, 2.0). The "
REFUSED = {
    INNER: lambda: scale_boundary(1.0, SCALES, 0, 3),
    "outer must be a group from 0 to 2, got 'a'": lambda: scale_boundary(1.0, SCALES, "a", 1),
    PATTERN: lambda: group_loss_scale(SGD, ["x*"]).init(PARAMS),
    SCALE: lambda: start(init_scale=(1.0, 2.0)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_errors_say_what_to_do(message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        REFUSED[message]()
