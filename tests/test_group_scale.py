"""Scales by groups: exact at boundaries, blamed where the overflow began, skipped as a whole."""

import functools
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawing import draws
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import boostax
from boostax.precision.boundary import check_boundaries, scale_boundary
from boostax.precision.crossings import group_boundaries
from boostax.precision.group_scale import group_loss_scale
from boostax.precision.group_state import GroupLossScaleState, group_scales
from boostax.testing import drawn

SGD = optax.sgd(1.0)
THREE = {"a": 0, "b": 1, "c": 2}
SCALES = jnp.array([2.0**9, 2.0**-6, 2.0**4])


def half(path, leaf):
    del leaf
    return 1 if path == "b" or path.startswith(("list", "pair", "block")) else 0


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
    tx = group_loss_scale(SGD, {"x": 0})
    params = {"x": jnp.float32(0)}
    state = tx.init(params)
    assert float(state.table[0]) == record["init"] == record["layout_after_init"][1]
    for op, value in zip(record["ops"], record["values"], strict=True):
        given_one = {"x": jnp.float32(0.0 if op == "grow" else jnp.inf)}
        state = tx.update(given_one, state, params)[1]
        assert float(state.table[0]) == value
        assert float(state.scales[0]) == 2.0 ** np.floor(np.log2(value))


@draws(60)
@given(st.floats(2.0**-60, 2.0**60, width=32))
def test_the_scale_applied_is_the_power_of_two_below_the_table(entry):
    state = start()._replace(table=jnp.full(3, entry, jnp.float32))
    mantissa, exponent = np.frexp(np.float32(entry))
    assert mantissa >= 0.5
    np.testing.assert_array_equal(state.scales, np.full(3, np.ldexp(0.5, exponent), np.float32))
    assert float(state.scale) == float(boostax_scale(state)) == float(state.scales[-1])


def boostax_scale(state):
    return group_scales((*optax.chain(SGD).init(0.0), state))[-1]


def test_floor_and_ceiling_hold():
    options = {"init_scale": 4.0, "min_scale": 2.0, "max_scale": 8.0, "growth_factor": 3.0}
    options["backoff_factor"] = 0.125
    state = start(**options)
    for hits in range(3):
        state = updated(state, jnp.inf, jnp.inf, jnp.inf, **options)
        assert state.table.tolist() == [4.0, 4.0, 2.0]
        assert state.floor_hits.tolist() == [0, 0, hits]
    for table in ([8.0, 8.0, 6.0], [8.0, 8.0, 8.0]):
        state = updated(state, 0, 0, 0, **options)
        assert state.table.tolist() == table
    assert state.backoffs.tolist() == [0, 0, 1]


# Blame


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan, 2.0**70])
def test_only_the_group_where_the_overflow_began_is_to_blame(bad):
    """It ruins those before it, of which nothing is known; those after it grow."""
    for first, expected in enumerate(([-1, 1, 1], [0, -1, 1], [0, 0, -1])):
        values = [bad if k <= first else 1.0 for k in range(3)]
        state = updated(start(), *values)
        moved = np.sign(np.asarray(state.table) - 4096.0)
        np.testing.assert_array_equal(moved, expected)
        assert int(state.overflow_group) == first
        assert state.backoffs.tolist() == [int(x < 0) for x in expected]


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
        values = [jnp.inf if flag else 1.0 for flag in flags]
        state = updated(state, *values, overflow="each")
        factors = np.where(flags, np.float32(2**-0.5), np.float32(2 ** (1 / 1000)))
        table = (table * factors).astype(np.float32)
        np.testing.assert_array_equal(state.table, table)
        assert bool(state.last_finite) == (not any(flags))
    np.testing.assert_allclose(table, MOVES[steps], atol=0.05)
    backoffs = np.sum(steps, axis=0)
    np.testing.assert_array_equal(state.backoffs, backoffs)


def test_blame_lowers_one_group_where_each_lowers_all():
    for overflow, moved in (("blame", [0, 0, -1]), ("each", [-1, -1, -1])):
        state = updated(start(overflow=overflow), jnp.inf, jnp.inf, jnp.inf, overflow=overflow)
        np.testing.assert_array_equal(np.sign(np.asarray(state.table) - 4096.0), moved)
        assert int(state.overflow_group) == 2


def test_a_skip_that_no_group_of_its_own_explains_still_ends():
    """The third group's cotangent overflows and only the first one's gradients show it."""
    state = start(overflow="each", init_scale=2.0**20)
    for _ in range(24):
        state = updated(state, jnp.inf, 1.0, 1.0, overflow="each")
    table = np.asarray(state.table)
    assert (table[:2] < 2.0**20).all() and state.backoffs.tolist() == [24, 16, 8]


def test_every_group_can_start_at_a_scale_of_its_own():
    state = start(init_scale=(64.0, 8.0, 2.0))
    assert state.scales.tolist() == [64.0, 8.0, 2.0] and float(state.scale) == 2.0
    for form in (list, np.array, jnp.array):
        assert start(init_scale=form([64.0, 8.0, 2.0])).scales.tolist() == [64.0, 8.0, 2.0]


def test_blame_spreads_towards_the_loss_while_skips_go_on():
    """A cotangent can overflow without a trace in the gradients of its own group."""
    state, lowered = start(init_scale=2.0**20), []
    for _ in range(24):
        before, state = state, updated(state, jnp.inf, 1.0, 1.0)
        lowered.append((np.asarray(state.table) < np.asarray(before.table)).tolist())
    assert lowered[:8] == [[True, False, False]] * 8
    assert lowered[8:16] == [[True, True, False]] * 8
    assert lowered[16:] == [[True, True, True]] * 8


def test_a_true_overflow_in_f16_is_found_and_mended():
    """The first group's cotangent is beyond f16: its scale falls, the last one's does not."""

    def loss(params, x):
        hidden = (x * params["a"].astype(jnp.float16)) * jnp.float16(50.0)
        hidden = hidden * params["b"].astype(jnp.float16)
        return jnp.mean((hidden * params["c"].astype(jnp.float16)).astype(jnp.float32))

    tx = group_loss_scale(optax.sgd(0.0), THREE)
    params = {"a": jnp.float32(1.0), "b": jnp.float32(1.0), "c": jnp.float32(1.0)}
    state, x = tx.init(params), jnp.full(1, 0.01, jnp.float16)
    step = jax.jit(functools.partial(by_hand, tx, group_boundaries(loss, THREE)))
    for _ in range(40):
        params, state = step(params, state, x)
    assert bool(state.last_finite)
    assert int(state.skipped_steps) >= 1
    assert float(state.table[0]) < float(state.table[2])
    assert float(state.scale) == 4096.0


def by_hand(tx, loss_fn, params, state, batch):
    """A step as ``boostax.value_and_grad`` takes it."""
    scales = group_scales(state)
    scaled = lambda p: scales[-1] * loss_fn(p, batch, scales=scales).astype(jnp.float32)  # noqa: E731
    return boostax.apply_gradients(drawn(tx), jax.grad(scaled)(params), state, params)


# Skips


def test_any_overflow_skips_the_whole_step_bit_for_bit():
    inner = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.linear_schedule(0.1, 0.01, 9), weight_decay=0.1),
    )
    tx = group_loss_scale(inner, THREE)
    step = jax.jit(lambda p, s, g: boostax.apply_gradients(drawn(tx), g, s, p))
    params = grads_of(1.0, 2.0, 3.0)
    params, state = step(params, tx.init(params), grads_of(4.0, 5.0, 6.0))
    for place in range(3):
        for bad in (jnp.nan, jnp.inf, 2.0**62):
            values = [1.0, 1.0, 1.0]
            values[place] = bad
            after, skipped = step(params, state, grads_of(*values))
            jax.tree.map(np.testing.assert_array_equal, after, params)
            jax.tree.map(np.testing.assert_array_equal, skipped.inner_state, state.inner_state)
            assert not skipped.last_finite
            assert (int(skipped.skipped_steps), int(skipped.skipped_in_a_row)) == (1, 1)
    _, state = step(params, skipped, grads_of(1.0, 1.0, 1.0))
    assert bool(state.last_finite) and int(state.skipped_in_a_row) == 0


def test_gradients_are_unscaled_by_the_scale_that_they_were_computed_with():
    """MindSpore takes the scale after the update: 0.07% too low at each clean step."""
    tx = group_loss_scale(SGD, THREE, init_scale=2.0, growth_factor=2.0)
    state = tx.init(grads_of(0, 0, 0))
    for _ in range(5):
        updates, state = tx.update(
            dict(zip("abc", 3.0 * state.scales, strict=True)), state, grads_of(0, 0, 0)
        )
        assert jax.tree.leaves(updates) == [-3.0] * 3


def test_frozen_groups_keep_their_scale():
    tx = group_loss_scale(SGD, THREE)
    state = start()
    masked = grads_of(1.0, 1.0, 1.0) | {"a": optax.MaskedNode()}
    _, state = tx.update(masked, state, masked)
    assert np.sign(np.asarray(state.table) - 4096.0).tolist() == [0, 1, 1]
    assert state.entries.tolist() == [0, 1, 1]


# Counts


def test_entries_that_underflow_are_counted_per_group():
    tx = group_loss_scale(SGD, {"a": 0, "b": 1}, count_every=3)
    low = jnp.float16(2.0**-15)
    grads = {
        "a": jnp.array([0.0, low, 2.0**-14, 1.0], jnp.float16),
        "b": [jnp.array([1 + 0j, 2.0**-20 + 2.0**-20 * 1j]), jnp.zeros((0, 2))],
    }
    state, update = tx.init(grads), jax.jit(drawn(tx).update)
    _, state = update(grads, state, grads)
    assert (state.underflow.tolist(), state.entries.tolist()) == ([2, 1], [4, 2])
    told = boostax.metrics(state)
    assert float(told["group_0_underflow"]) == 0.5
    others = jax.tree.map(lambda x: jnp.ones_like(x), grads)
    for call in range(1, 4):
        _, state = update(others, state, grads)
        assert state.underflow.tolist() == ([2, 1] if call < 3 else [0, 0])
    bad = others | {"a": jnp.array([jnp.nan, jnp.inf, 0.0, 1.0], jnp.float16)}
    _, state = update(bad, state, grads)
    assert (state.nonfinite.tolist(), state.underflow.tolist()) == ([2, 0], [1, 0])


def test_a_window_outside_counts_what_came():
    """It hands sums on, with the factor of their mean still to come."""
    tx = boostax.accumulate(group_loss_scale(SGD, {"a": 0}), 2)
    params = {"a": jnp.zeros(2)}
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update({"a": jnp.array([2.0**-14.5, 1.0])}, state, params)
    assert state.inner_state.underflow.tolist() == [1.0]
    np.testing.assert_array_equal(updates["a"], -jnp.array([2.0**-14.5, 1.0]) / 4096)
    tx = group_loss_scale(boostax.accumulate(SGD, 2), {"a": 0})
    state = tx.init(params)
    for value in (1.0, jnp.nan, 3.0):
        grads = {"a": jnp.full(2, value * state.scale)}
        updates, state = tx.update(grads, state, params)
    assert updates["a"].tolist() == [-2.0, -2.0]


# Measured scales


def test_the_first_gradient_sets_a_measured_scale():
    options = {"rule": "measure", "max_scale": 2.0**50}
    state = start(**options)
    true = np.array([2.0**-38 * 1.5, 2.0**-20, 3.0])
    for call in range(3):
        grads = true * np.asarray(state.scales)
        # What is below f16 comes out zero.
        state = updated(state, *np.float32(np.float16(grads)), **options)
        if call == 0:
            assert state.measured.tolist() == [False, True, True]
    scaled = true * np.asarray(state.scales)
    assert state.measured.all()
    assert ((scaled > 2.0**10) & (scaled <= 2.0**12)).all(), scaled


def test_a_measured_scale_falls_at_once_and_rises_slowly():
    options = {"rule": "measure", "headroom": 4.0}
    state, told = start(**options), []
    for true in (1.0, 1.0, 64.0, 1.0, 1.0):
        state = updated(state, *(true * state.scales), **options)
        told.append(np.log2(np.asarray(state.table)[0]))
    np.testing.assert_allclose(told, [14, 14, 8, 8.001, 8.002], atol=1e-5)
    assert int(state.skipped_steps) == 0


def test_a_measured_scale_backs_off_like_any():
    state = updated(start(rule="measure"), jnp.inf, 1.0, 1.0, rule="measure")
    assert float(state.table[0]) == np.float32(4096 * 2**-0.5)
    assert state.measured.tolist() == [False, True, True]


# Boundaries


def key(seed):
    return jax.random.key(seed)


def mlp():
    params = {name: jax.random.normal(key(i), (4, 4)) for i, name in enumerate("abc")}

    def loss(params, x):
        hidden = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
        return jnp.mean((hidden @ params["c"]) ** 2)

    return loss, params, jnp.linspace(-1, 1, 12).reshape(3, 4), THREE


def residual():
    _, params, x, labels = mlp()

    def loss(params, x):
        one = x + jnp.sin(x @ params["a"])
        two = one + jnp.sin(one @ params["b"])
        # A long way back, an output of every layer, and a penalty on all params.
        three = two + one + x @ params["c"]
        penalty = sum(jnp.sum(p**2) for p in params.values())
        return jnp.mean(three**2) + jnp.mean(jnp.abs(one)) + 0.1 * penalty

    return loss, params, x, labels


def tied():
    params = {"table": jax.random.normal(key(0), (7, 4)), "body": jax.random.normal(key(1), (4, 4))}

    def loss(params, ids):
        hidden = jax.nn.gelu(params["table"][ids] @ params["body"])
        logits = hidden @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

    return loss, params, jnp.arange(6) % 7, {"table": 0, "body": 1}


def scanned():
    params = {
        "first": jax.random.normal(key(0), (4, 4)),
        "layers": jax.random.normal(key(1), (5, 4, 4)),
        "head": jax.random.normal(key(2), (4, 2)),
    }

    def loss(params, x):
        layer = lambda h, w: (h + jnp.tanh(h @ w), None)  # noqa: E731
        hidden, _ = jax.lax.scan(layer, x @ params["first"], params["layers"])
        return jnp.mean((hidden @ params["head"]) ** 2)

    return loss, params, jnp.ones((3, 4)), {"first": 0, "layers": 1, "head": 2}


def rematerialised():
    loss, params, x, labels = residual()
    policy = jax.checkpoint_policies.dots_saveable
    return jax.jit(jax.checkpoint(loss, policy=policy)), params, x, labels


def vmapped():
    loss, params, x, labels = residual()

    def mean(params, x):
        return jnp.mean(jax.vmap(loss, (None, 0))(params, x[:, None]))

    return mean, params, x, labels


def branching():
    """A branch, a loop, a custom rule, integers: each one operation of its last group."""
    _, params, x, labels = mlp()

    def loss(params, x):
        hidden = jax.nn.relu(x @ params["a"])
        first = jnp.argmax(hidden, -1)
        hidden = jax.lax.cond(x[0, 0] < 0, lambda h, w: h @ w, lambda h, w: h, hidden, params["b"])
        hidden = jax.lax.fori_loop(0, 3, lambda _, h: jnp.sin(h + params["b"][0]), hidden)
        hidden = jax.nn.logsumexp(hidden + first[:, None], axis=-1, keepdims=True)
        return jnp.mean(optax.safe_norm(hidden * params["c"][0], 1e-3, axis=-1))

    return loss, params, x, labels


class Tied(nn.Module):
    """Tied embeddings, residual blocks, norms, remat."""

    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(7, 4, name="embed")
        stream = table(ids)
        for i in range(2):
            normed = nn.LayerNorm(name=f"norm_{i}")(stream)
            stream = stream + nn.gelu(nn.remat(nn.Dense)(4, name=f"mlp_{i}")(normed))
        return table.attend(stream)


def linen():
    model, ids = Tied(), jnp.arange(12).reshape(2, 6) % 7
    params = model.init(key(0), ids)["params"]

    def loss(params, ids):
        logits = model.apply({"params": params}, ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits, (ids + 1) % 7).mean()

    return loss, params, ids, [["embed"], ["*_0"]]


def nnx_model():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.second = nnx.Linear(8, 8, rngs=rngs)
            self.head = nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x):
            hidden = nnx.relu(self.norm(self.first(x)))
            return self.head(hidden + nnx.relu(self.second(hidden)))

    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
    loss = lambda params, x: jnp.mean(nnx.merge(graph, params)(x) ** 2)  # noqa: E731
    return loss, params, jnp.linspace(-1, 1, 12).reshape(3, 4), [["first", "norm"], "second"]


MODELS = [
    mlp,
    residual,
    tied,
    scanned,
    rematerialised,
    vmapped,
    branching,
    linen,
    nnx_model,
]


@pytest.mark.parametrize("make", MODELS)
def test_gradients_do_not_depend_on_the_scales_to_the_bit(make):
    """Any model, left as it is; and they are those of the model without boundaries."""
    loss, params, x, labels = make()
    bounded = group_boundaries(loss, labels)
    assert check_boundaries(bounded, params, x, labels, rtol=0) == 0.0
    plain = jax.jit(jax.grad(loss))(params, x)
    state = group_loss_scale(SGD, labels).init(params)
    scales = jnp.exp2(jnp.arange(state.table.size) * 5.0 - 3)
    grads = jax.jit(jax.grad(lambda p: scales[-1] * bounded(p, x, scales=scales)))(params)
    tx = group_loss_scale(SGD, labels, min_scale=2.0**-9)
    updates, _ = tx.update(grads, state._replace(table=scales), params)
    # Compiled apart, sums may be taken in another order.
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain))
    for ours, theirs in zip(jax.tree.leaves(updates), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(-ours, theirs, rtol=1e-4, atol=1e-5 * largest)


def test_the_forward_pass_and_the_loss_are_the_same_to_the_bit():
    loss, params, x, labels = residual()
    bounded = group_boundaries(loss, labels)
    assert float(jax.jit(bounded)(params, x, scales=SCALES)) == float(jax.jit(loss)(params, x))
    assert str(jax.make_jaxpr(bounded)(params, x)) == str(jax.make_jaxpr(loss)(params, x))


def test_a_boundary_in_every_iteration_of_a_scan():
    """A scale for each layer of a scan, by hand, with remat and a tree of activations."""

    def loss(params, x, *, scales):
        @jax.checkpoint
        def layer(carry, inputs):
            w, place = inputs
            # From the layer before it; the first one's input comes from no param.
            stream = scale_boundary(carry, scales, jnp.maximum(place - 1, 0), place)
            return {"h": jnp.tanh(stream["h"] @ w), "n": stream["n"] + 1}, None

        carry = {"h": x, "n": jnp.int32(0)}
        places = jnp.arange(3)
        stream, _ = jax.lax.scan(layer, carry, (jnp.stack(list(params.values())), places))
        return jnp.mean(stream["h"] ** 2)

    with_scales = lambda p, x, *, scales: loss(  # noqa: E731
        {k: scale_boundary(v, scales, g, 2) for g, (k, v) in enumerate(p.items())}, x, scales=scales
    )
    _, params, x, _ = mlp()
    with pytest.raises(ValueError, match="'a', 'b'"):
        check_boundaries(with_scales, params, x, THREE)

    def stacked(params, x, *, scales):
        return loss({k: params[k] for k in "abc"}, x, scales=scales)

    assert check_boundaries(stacked, params, x, THREE, rtol=0) == 0.0


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_a_boundary_multiplies_the_cotangent_and_nothing_else(dtype):
    """By ratios beyond the range of f16 too, in every transformation."""
    x = {"x": jnp.asarray([2.0**-14, -(2.0**-13)], dtype), "n": jnp.arange(2)}
    scales = jnp.array([2.0**20, 1.0])

    def total(value, scales=scales):
        crossed = scale_boundary(value, scales, 0, 1)
        assert crossed["n"] is value["n"]
        np.testing.assert_array_equal(crossed["x"], value["x"]) if concrete(value) else None
        return crossed["x"]

    one = jnp.asarray([2.0**-10, 2.0**-11], dtype)
    for f in (
        total,
        jax.jit(total),
        jax.checkpoint(total),
        jax.vmap(total, in_axes=({"x": 0, "n": 0},)),
    ):
        _, pullback = jax.vjp(lambda v, f=f: f({"x": v, "n": x["n"]}), x["x"])
        np.testing.assert_array_equal(pullback(one)[0], np.asarray([1024, 512], one.dtype))


def concrete(value):
    return not isinstance(value["x"], jax.core.Tracer)


def test_scale_boundary_reads_the_state_and_does_nothing_without_one():
    state = optax.chain(group_loss_scale(SGD, THREE)).init(grads_of(0, 0, 0))
    state = (state[0]._replace(table=SCALES),)
    slope = jax.grad(lambda x: scale_boundary(x, state, 2, 0))(1.0)
    assert float(slope) == 2.0**-5
    x = jnp.ones(3)
    assert scale_boundary(x, optax.adam(1.0).init(x), 0, 1) is x
    assert scale_boundary(x, None, 0, 1) is x
    assert group_scales(optax.adam(1.0).init(x)) is None


@pytest.mark.parametrize("edge", range(4))
def test_the_checker_names_what_a_missing_boundary_spoils(edge):
    """Left out one by one: between two layers, on a residual stream, on a weight used twice."""
    spoiled = ["a", "a", "b", "a"]

    def loss(params, x, *, scales, left_out=edge):
        def cross(number, value, outer, inner):
            return value if number == left_out else scale_boundary(value, scales, outer, inner)

        one = jnp.tanh(x @ params["a"])
        two = jnp.tanh(cross(0, one, 0, 1) @ params["b"])
        three = cross(2, two, 1, 2) @ params["c"] + cross(1, one, 0, 2)
        return jnp.mean((three @ cross(3, params["a"], 0, 2)) ** 2)

    _, params, x, labels = mlp()
    right = functools.partial(loss, left_out=None)
    assert check_boundaries(right, params, x, labels, rtol=0) == 0.0
    with pytest.raises(ValueError, match=f"depend on the scales at '.*{spoiled[edge]}'"):
        check_boundaries(loss, params, x, labels)


# Many devices


@pytest.mark.parametrize("mode", ["checked", "unchecked", "pmap"])
def test_one_bad_replica_skips_the_step_on_all(mesh, mode):
    """Bit-equal states on all; the blame is of the last group that is bad anywhere."""
    loss, params, _, labels = residual()
    bounded = group_boundaries(loss, labels)
    tx = group_loss_scale(
        optax.chain(boostax.all_reduce("data"), optax.adamw(0.1)), labels, axis_name="data"
    )
    x = jax.random.normal(key(3), (8, 3, 4))

    def train(params, x):
        state = tx.init(params)
        for call in range(3):
            scales = group_scales(state)
            local = boostax.train.local_params(params, "data")
            grads = jax.grad(lambda p, s=scales: s[-1] * bounded(p, x, scales=s))(local)
            # Replica 5 loses group 1 and those before it.
            bad = (jax.lax.axis_index("data") == 5) & (call == 1)
            ruined = {k: jnp.where(bad & (k != "c"), jnp.nan, g) for k, g in grads.items()}
            before = params
            params, state = boostax.apply_gradients(drawn(tx), ruined, state, params)
            if call == 1:
                moved = jax.tree.map(lambda a, b: jnp.any(a != b), params, before)
        return params, state, moved

    if mode == "pmap":
        result = jax.pmap(train, axis_name="data", in_axes=(None, 0))(params, x)
    else:
        local = lambda p, x: jax.tree.map(lambda y: y[None], train(p, x[0]))  # noqa: E731
        specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
        mapped = jax.shard_map(local, mesh=mesh, check_vma=mode == "checked", **specs)
        result = jax.jit(mapped)(params, x)
    params, state, moved = jax.device_get(result)
    assert not any(jax.tree.leaves(jax.tree.map(np.any, moved)))
    for leaf in jax.tree.leaves((params, state)):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    assert (state.overflow_group[0], state.skipped_steps[0]) == (1, 1)
    assert state.backoffs[0].tolist() == [0, 1, 0]
    assert np.sign(state.table[0] - 4096).tolist() == [1, -1, 1]


def test_boundaries_keep_the_varying_types(mesh):
    """Values that vary and values that do not, in a scan, with checking on."""
    loss, params, _, labels = scanned()
    bounded = group_boundaries(loss, labels)

    def local(params, x):
        f = lambda p, s: s[-1] * bounded(p, x, scales=s)  # noqa: E731
        one = jax.grad(f)(boostax.train.local_params(params, "data"), SCALES)
        return jax.tree.map(lambda g: jax.lax.pmean(g, "data"), one), jax.grad(f)(params, SCALES)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    x = jax.random.normal(key(1), (8, 4))
    local_mean, total = jax.jit(mapped)(params, x)
    for a, b in zip(jax.tree.leaves(local_mean), jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(8 * a, b, rtol=2e-5, atol=1e-5 * float(jnp.abs(b).max()))


# Memory and tracing


def test_it_takes_no_more_memory_than_one_scale():
    shapes = {f"layer{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(6)}
    adam = optax.adam(1e-3)

    def temp(tx, dtype):
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)
        state = jax.eval_shape(tx.init, shapes)
        step = jax.jit(
            lambda p, s, g: boostax.apply_gradients(drawn(tx), g, s, p), donate_argnums=(0, 1)
        )
        compiled = step.lower(shapes, state, given).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    labels = {name: i // 2 for i, name in enumerate(shapes)}
    for dtype in (jnp.float32, jnp.float16):
        one, many = (
            temp(boostax.dynamic_loss_scale(adam), dtype),
            temp(group_loss_scale(adam, labels), dtype),
        )
        print(f"{jnp.dtype(dtype).name}: temp of one scale {one}, of three {many} bytes")
        assert many <= one + 16384


@jax.custom_jvp
def attenuate(x):
    return x


@attenuate.defjvp
def attenuate_jvp(primals, tangents):
    return primals[0], tangents[0] * jnp.asarray(2.0**-3, tangents[0].dtype)


def test_groups_keep_gradients_that_every_single_scale_loses():
    """From 1/4 down to 2**-50: f16 has 40 powers of two, subnormals included."""
    count, x = 17, jnp.ones(4)
    params = [jnp.ones(4) for _ in range(count)]
    labels = list(range(count))

    def loss(params, x):
        hidden = x.astype(jnp.float16)
        for param in params:
            hidden = attenuate(hidden) * param.astype(jnp.float16)
        return jnp.mean(hidden.astype(jnp.float32))

    true = 2.0 ** (-2 - 3.0 * np.arange(count)[::-1])
    tx = group_loss_scale(optax.identity(), labels, rule="measure", max_scale=2.0**60)
    state = tx.init(params)
    step = jax.jit(functools.partial(grads_by_hand, tx, group_boundaries(loss, labels)))
    kept = np.zeros(count, bool)
    for _ in range(20):
        updates, state = step(params, state, x)
        kept |= np.array([float(g[0]) for g in updates]) == true
    assert kept.all(), state
    one = jax.grad(lambda p: 2.0**16 * loss(p, x))(params)
    assert not np.any(one[0]) and np.isfinite(one[-1]).all()


def grads_by_hand(tx, loss_fn, params, state, batch):
    scales = group_scales(state)
    scaled = lambda p: scales[-1] * loss_fn(p, batch, scales=scales).astype(jnp.float32)  # noqa: E731
    return drawn(tx).update(jax.grad(scaled)(params), state, params)


# Errors


def two_scalers():
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    one = group_loss_scale(SGD, {"a": 0, "b": 1})
    return group_scales((one.init(params), one.init(params)))


def wrong_labels():
    return group_loss_scale(SGD, ["x*"]).init({"a": jnp.zeros(1), "b": jnp.zeros(1)})


def wrong_scales():
    loss, params, x, labels = mlp()
    return group_boundaries(loss, labels)(params, x, scales=jnp.ones(2))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: scale_boundary(1.0, SCALES, 0, 3),
            ValueError,
            "scale_boundary: inner must be a group from 0 to 2, got 3. The first of the forward "
            "pass is 0.",
        ),
        (
            lambda: scale_boundary(1.0, SCALES, "a", 1),
            TypeError,
            "scale_boundary: outer must be a group from 0 to 2, got 'a'. The first of the forward "
            "pass is 0.",
        ),
        (
            two_scalers,
            ValueError,
            "group_scales: opt_state must hold one loss scaler that all gradients pass, got 2. Put "
            "one around the whole optimizer, outside optax.partition, optax.masked and "
            "optax.conditionally_transform.",
        ),
        (
            wrong_labels,
            ValueError,
            "group_loss_scale: labels must be patterns that match params, got 'x*'. It matches "
            "none; there are 'a', 'b'.",
        ),
        (
            lambda: group_loss_scale(SGD, {"a": 0, "b": 2}),
            ValueError,
            "group_loss_scale: labels must be the integers 0, 1, ... without a gap, got [0, 2]. No "
            "leaf is in group 1; boostax.freeze.prefix_groups(params, n) makes n groups.",
        ),
        (
            lambda: group_loss_scale(SGD, half, init_scale=0.5),
            ValueError,
            "group_loss_scale: init_scale must be from 1.0 to 16777216.0, got 0.5. It lies between "
            "min_scale and max_scale; 4096 is the default.",
        ),
        (
            lambda: start(init_scale=(1.0, 2.0)),
            ValueError,
            "group_loss_scale: init_scale must be a number or one for each group, 3, got (1.0, "
            "2.0). The first is group 0's.",
        ),
        (
            lambda: start(overflow="all"),
            ValueError,
            "group_loss_scale: overflow must be 'blame' or 'each', got 'all'. 'each' is "
            "MindSpore's.",
        ),
        (
            wrong_scales,
            ValueError,
            "group_boundaries: scales must be one for each group, 3, got shape (2,). Give "
            "group_boundaries and group_loss_scale the same labels.",
        ),
    ],
)
def test_errors_say_what_to_do(call, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        call()


def test_the_state_is_found_by_class():
    assert isinstance(start(), GroupLossScaleState)
    told = boostax.metrics(optax.chain(group_loss_scale(SGD, THREE)).init(grads_of(0, 0, 0)))
    assert {"loss_scale", "group_2_scale", "group_0_largest", "overflow_group"} <= set(told)
