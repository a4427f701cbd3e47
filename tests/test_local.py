"""Replicas on their own: rotating averages as SINGA has them, local SGD and DiLoCo."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reducing import at_once, mapped, mesh_of

import boostax
from boostax.testing import drawn

RATE, MOMENTUM = 0.1, 0.9
SGD = optax.sgd(RATE, momentum=MOMENTUM)
SHAPES = {"a": (4, 3), "b": (5,), "c": {"d": (2, 2), "e": ()}}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
local_updates = functools.partial(boostax.reduce.local_updates, axis_name="data")
partial_average = functools.partial(boostax.reduce.partial_average, axis_name="data")


def draw(seed, *lead):
    rng = np.random.default_rng(seed)
    make = lambda shape: np.float32(rng.normal(size=(*lead, *shape)))  # noqa: E731
    return jax.tree.map(make, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def start():
    """The first params, in f64 where that is on."""
    return jax.tree.map(lambda x: jnp.asarray(x, float), draw(0))


def gradient(params, noise):
    """That of a quadratic with a centre of its own on every replica and at every step."""
    return jax.tree.map(lambda p, x: 0.3 * p + x, params, noise)


def trajectory(tx, noise, mode="vmap"):
    """Params of every replica after every step ``(replicas, steps, ...)``, and the last state."""

    def train(params, noise):
        def step(carry, x):
            params, state = carry
            params, state = boostax.apply_gradients(tx, gradient(params, x), state, params)
            return (params, state), params

        first = boostax.train.local_params(params, axis_name="data"), tx.init(params)
        (_, state), each = jax.lax.scan(step, first, noise)
        return each, state

    return on_replicas(train, mode, noise)


def on_replicas(train, mode, noise):
    """``train(params, the replica's noise)``, its result stacked."""
    if mode == "vmap":
        return jax.jit(jax.vmap(train, (None, 0), axis_name="data"))(start(), noise)

    def on_one(params, noise):
        return jax.tree.map(lambda x: x[None], train(params, jax.tree.map(lambda x: x[0], noise)))

    how = {"mesh": mesh_of(data=len(jax.tree.leaves(noise)[0])), "check_vma": mode == "checked"}
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data")}
    return jax.jit(jax.shard_map(on_one, **how, **specs))(start(), noise)


def reference(noise, meet):
    """Float64: momentum SGD on every replica, ``meet(step, params)`` after each step.

    Params are a list of leaves ``(replicas, ...)``.
    """
    xs = [np.float64(x) for x in jax.tree.leaves(noise)]
    replicas, steps = xs[0].shape[:2]
    own = [np.stack([np.float64(p)] * replicas) for p in jax.tree.leaves(draw(0))]
    trace = [np.zeros_like(p) for p in own]
    for t in range(steps):
        for i, x in enumerate(xs):
            trace[i] = MOMENTUM * trace[i] + (0.3 * own[i] + x[:, t])
            own[i] = own[i] - RATE * trace[i]
        own = meet(t, own)
        yield [p.copy() for p in own]


def rotating(labels):
    """SINGA: sum over the replicas divided by their number, one partition per step."""
    count = max(labels) + 1

    def meet(t, own):
        average = lambda p: np.broadcast_to(p.sum(0) / len(p), p.shape)  # noqa: E731
        return [average(p) if k == t % count else p for p, k in zip(own, labels, strict=True)]

    return meet


def diloco(every, rate=0.7, momentum=0.9, turns=(0,) * 4):
    """DiLoCo, algorithm 1, with Nesterov momentum outside; each leaf at its turn in a round."""
    anchor = [np.float64(p) for p in jax.tree.leaves(draw(0))]
    trace = [np.zeros_like(p) for p in anchor]

    def meet(t, own):
        for i, p in enumerate(own):
            if (t + 1 - turns[i]) % every == 0:
                away = anchor[i] - p.mean(0)
                trace[i] = momentum * trace[i] + away
                anchor[i] = anchor[i] - rate * (away + momentum * trace[i])
                own[i] = np.broadcast_to(anchor[i], p.shape)
        return own

    return meet


def sparse_loco(every, density, block, decay):
    """SparseLoCo, algorithm 1: of each chunk the largest, as two magnitudes in bf16."""
    anchor = [np.float64(p) for p in jax.tree.leaves(draw(0))]
    held = [0.0 for _ in anchor]

    def sent(x):
        flat = x.reshape(len(x), -1)
        width = min(block, flat.shape[1])
        rows = np.pad(flat, [(0, 0), (0, -flat.shape[1] % width)]).reshape(len(x), -1, width)
        order = np.argsort(-abs(rows), -1, kind="stable")[..., : int(np.ceil(density * width))]
        values = np.take_along_axis(rows, order, -1)
        large = abs(values) > abs(values).mean(-1, keepdims=True)
        for half in (large, ~large):
            mean = np.where(half, abs(values), 0).sum(-1) / np.maximum(half.sum(-1), 1)
            mean = (np.float32(mean).view(np.uint32) & 0xFFFF0000).view(np.float32)
            values = np.where(half, np.sign(values) * mean[..., None], values)
        coded = np.zeros_like(rows)
        np.put_along_axis(coded, order, values, -1)
        return coded.reshape(len(x), -1)[:, : flat.shape[1]].reshape(x.shape)

    def meet(t, own):
        if (t + 1) % every:
            return own
        for i, p in enumerate(own):
            held[i] = decay * held[i] + anchor[i] - p
            codes = sent(held[i])
            held[i], anchor[i] = held[i] - codes, anchor[i] - codes.mean(0)
        return [np.broadcast_to(a, p.shape) for a, p in zip(anchor, own, strict=True)]

    return meet


def assert_follows(each, noise, meet, tolerance=3e-6):
    for t, own in enumerate(reference(noise, meet)):
        for actual, expected in zip(jax.tree.leaves(each), own, strict=True):
            np.testing.assert_allclose(actual[:, t], expected, atol=tolerance, rtol=tolerance)


def equal_on_all(x):
    return bool((np.asarray(x) == np.asarray(x)[:1]).all())


LEAVES = {"a": 0, "b": 2, "c": 1}
CASES = [(2, "vmap"), (3, "checked"), (8, "unchecked")]


# Rotating averages.


@pytest.mark.parametrize(("replicas", "mode"), CASES)
def test_partial_average_is_singas(replicas, mode):
    noise = draw(1, replicas, 7)
    each, state = trajectory(partial_average(SGD, LEAVES), noise, mode)
    assert_follows(each, noise, rotating([0, 2, 1, 1]))
    assert np.asarray(state.since_sync).tolist() == [7] * replicas
    assert not equal_on_all(state.inner_state.local[0].trace["a"])


PARTITIONS = {
    "number": (partial_average, {"partitions": 4}, [0, 1, 2, 3]),
    "tree": (partial_average, {"partitions": LEAVES}, [0, 2, 1, 1]),
    "bytes": (partial_average, {"bucket_bytes": 30}, [1, 0, 0, 0]),
    "preset": (local_updates, {"every": 3, "outer": None, "fragments": LEAVES}, [0, 2, 1, 1]),
}


@pytest.mark.parametrize("kind", PARTITIONS)
def test_partial_average_is_singas_in_f64_through_a_skipped_call(kind):
    make, how, labels = PARTITIONS[kind]
    scaler = functools.partial(boostax.dynamic_loss_scale, init_scale=1.0, axis_name="data")
    tx, calls = scaler(make(SGD, **how)), [0, 1, 2, 3, 5, 6, 7, 8, 9]
    noise = jax.tree.map(np.float64, draw(1, 3, 10))
    noise["b"][1, 4] = np.nan
    with jax.enable_x64(True):
        each, _ = trajectory(drawn(tx), noise)
    each, noise = jax.tree.map(lambda x: np.asarray(x)[:, calls], (each, noise))
    for t, own in enumerate(reference(noise, rotating(labels))):
        for actual, expected in zip(jax.tree.leaves(each), own, strict=True):
            assert abs(actual[:, t] - expected).max() <= 1e-15 * abs(expected).max()


def test_without_an_outer_optimizer_there_is_no_copy_of_the_params():
    params = jax.eval_shape(start)
    for tx in (partial_average(SGD, 2), local_updates(SGD, 2, None, warmup=1)):
        state = jax.eval_shape(tx.init, params)
        assert [x.shape for x in jax.tree.leaves(state._replace(inner_state=None))] == [(), ()]
        chex.assert_trees_all_equal_shapes(state.inner_state.local[0].trace, params)


def test_a_warm_up_needs_no_outer_optimizer():
    each, _ = trajectory(local_updates(SGD, 4, None, warmup=3), draw(9, 2, 7), "checked")
    met = [equal_on_all(each["a"][:, t]) for t in range(7)]
    assert met == [True, True, True, False, False, False, True]


def test_consecutive_leaves_are_shared_out_evenly():
    rng = np.random.default_rng(0)
    for _ in range(100):
        sizes = [int(x) for x in rng.integers(0, 20, rng.integers(1, 8))]
        parts = int(rng.integers(1, len(sizes) + 1))
        labels = boostax.reduce.local._even_runs(sizes, parts)
        assert labels == sorted(labels) and set(labels) == set(range(parts))
        cuts = itertools.combinations(range(1, len(sizes)), parts - 1)
        runs = ([0, *inner, len(sizes)] for inner in cuts)
        best = min(max(sum(sizes[a:b]) for a, b in itertools.pairwise(ends)) for ends in runs)
        largest = max(sum(s for s, k in zip(sizes, labels, strict=True) if k == j) for j in labels)
        assert largest == best


# Local updates.


@pytest.mark.parametrize(("replicas", "mode"), CASES)
def test_local_updates_are_diloco(replicas, mode):
    noise = draw(4, replicas, 10)
    each, state = trajectory(local_updates(SGD, 4, NESTEROV), noise, mode)
    assert_follows(each, noise, diloco(4))
    for t in range(10):
        assert all(equal_on_all(x[:, t]) == (t in (3, 7)) for x in jax.tree.leaves(each))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[:, 7], each), state.anchor)
    assert set(np.asarray(state.since_sync)) == {2} and set(np.asarray(state.syncs)) == {2}


def test_local_sgd_averages_params_by_default():
    noise = draw(5, 3, 6)
    each, _ = trajectory(local_updates(SGD, 3), noise)
    assert_follows(each, noise, diloco(3, rate=1.0, momentum=0.0))
    each, _ = trajectory(local_updates(SGD, 1), noise)
    assert_follows(each, noise, rotating([0] * 4))


@pytest.mark.parametrize(("replicas", "mode"), CASES)
def test_fragments_are_synchronized_in_turn_at_steps_far_apart(replicas, mode):
    """Of 4 steps each of three synchronizes one, as diloco; flush all but the last at once."""
    noise, turns = draw(7, replicas, 10), [2, 4, 3, 3]
    how = {"outer": NESTEROV, "fragments": LEAVES}
    each, state = trajectory(local_updates(SGD, 4, **how), noise, mode)
    assert_follows(each, noise, diloco(4, turns=turns))
    for t in range(10):
        met = [equal_on_all(x[:, t]) for x in jax.tree.leaves(each)]
        assert met == [(t + 1) % 4 == turn % 4 for turn in turns]
    assert set(np.asarray(state.syncs)) == {7} and len(state.outer_state) == 3


def test_another_reduction_may_make_the_outer_gradient():
    adasum = local_updates(SGD, 2, reduction=boostax.adasum("data"))
    each, state = trajectory(adasum, draw(8, 2, 2), "checked")
    assert all(equal_on_all(x[:, 1]) for x in jax.tree.leaves(each))
    assert 1 <= float(boostax.metrics(state)["orthogonality"][0]) <= 2


@pytest.mark.parametrize(("replicas", "mode"), CASES)
def test_chunked_top_k_in_2_bits_with_a_decay_is_sparse_loco(replicas, mode):
    noise = draw(6, replicas, 10)
    top_k = boostax.top_k_reduce("data", 0.4, block=8, bits=2, decay=0.9)
    each, _ = trajectory(local_updates(SGD, 2, reduction=top_k), noise, mode)
    assert_follows(each, noise, sparse_loco(2, 0.4, 8, 0.9))


def test_a_warm_up_averages_after_each_step_and_nothing_else_moves():
    """Then the rounds begin, with the outer state and the residuals of a start."""
    noise = draw(9, 2, 9)
    first = jax.tree.map(lambda x: x[:, :3], noise)
    how = {"outer": NESTEROV, "fragments": 2, "reduction": boostax.top_k_reduce("data", 0.5)}
    tx = local_updates(SGD, 4, warmup=3, **how)
    each, state = trajectory(tx, first, "checked")
    assert_follows(each, first, rotating([0] * 4))
    assert set(np.asarray(state.syncs)) == {3} and set(np.asarray(state.since_sync)) == {0}
    waiting = state.outer_state, [x.residual for x in state.reduction_state]
    assert not any(np.any(x) for x in jax.tree.leaves(waiting))
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[:, -1], each), state.anchor)
    each, _ = trajectory(tx, noise, "checked")
    met = [[equal_on_all(x[:, t]) for x in jax.tree.leaves(each)] for t in range(3, 9)]
    none, a, b = [False] * 4, [True, False, False, False], [False, True, True, True]
    assert met == [none, a, none, b, none, a]


apart = functools.partial(local_updates, optax.adam(0.1), 2, NESTEROV)
WRAPPED = {
    "partial": lambda: partial_average(optax.adam(0.1), 3),
    "local": apart,
    "fragments": functools.partial(apart, fragments=2),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_flush_lets_the_replicas_meet(kind):
    tx = boostax.dynamic_loss_scale(WRAPPED[kind](), init_scale=1.0, axis_name="data")

    def train(params, noise):
        own, state = boostax.train.local_params(params, axis_name="data"), tx.init(params)
        own, state = boostax.apply_gradients(drawn(tx), gradient(own, noise), state, own)
        return own, boostax.flush(tx, state, own)

    noise = jax.tree.map(lambda x: x[:, 0], draw(17, 8, 1))
    own, (met, state) = on_replicas(train, "checked", noise)
    assert all(map(equal_on_all, jax.tree.leaves(met)))
    if kind == "partial":
        mean = jax.tree.map(lambda x: np.broadcast_to(x.mean(0), x.shape), own)
        chex.assert_trees_all_close(met, mean, rtol=1e-7, atol=1e-6)
    else:
        chex.assert_trees_all_equal(met, state.inner_state.anchor)
        assert np.asarray(state.inner_state.since_sync).tolist() == [0] * 8


@pytest.mark.parametrize("kind", WRAPPED)
def test_low_params_have_wide_moments_and_no_elements_are_no_matter(kind):
    tx = WRAPPED[kind]()
    params = {"a": jnp.ones(3, "bfloat16"), "b": jnp.zeros((0, 2)), "w": jnp.full(8, 0.1j)}

    def train(seed):
        own, state = params, tx.init(params)
        for t in range(2):
            grads = jax.tree.map(lambda p, t=t: (p + seed * (t + 1)).astype(p.dtype), own)
            own, state = boostax.apply_gradients(tx, grads, state, own)
        return own, state

    own, state = jax.jit(jax.vmap(train, axis_name="data"))(jnp.arange(3.0))
    chex.assert_trees_all_equal_dtypes(own, params)
    assert state.inner_state.local[0].mu["a"].dtype == jnp.float32
    if kind == "local":
        assert all(map(equal_on_all, jax.tree.leaves(own)))
        chex.assert_trees_all_equal(own, state.anchor)


# What is refused.


local = functools.partial(local_updates, every=1)
REFUSED = {
    "number of param leaves, 4": [lambda: partial_average(SGD, 5).init(start())],
    "pytree structure error": [lambda: partial_average(SGD, {"a": 0, "x": 1}).init(start())],
    "gate outside": [
        lambda: local(boostax.accumulate(SGD, 2)),
        lambda: local(optax.chain(boostax.accumulate(SGD, 2))).init(start()),
        lambda: partial_average(local(SGD), 1),
    ],
    "equal on all replicas": [lambda: mapped(local(SGD).init, mesh_of(data=2))(jnp.ones((2, 3)))],
    "params must be given": [lambda: at_once(local(SGD))(draw(0, 2))],
}


@pytest.mark.parametrize("match", REFUSED)
def test_what_cannot_be_is_refused(match):
    for make in REFUSED[match]:
        with pytest.raises((ValueError, TypeError), match=match):
            make()


def test_params_of_all_replicas_are_one_on_an_explicit_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Explicit,) * 2)
    tx, specs = local_updates(SGD, every=4), {"w": jax.P(None, "model")}
    how = {"mesh": mesh, "axis_name": "data", "param_specs": specs}
    step = boostax.make_train_step(lambda p, x: jnp.mean((x * p["w"]) ** 2), tx, **how)
    state, _ = step(step.init({"w": jnp.ones((1, 6))}), np.ones((4, 6), "f"))
    common = step.common_params(state)["w"]
    assert common.sharding.spec == specs["w"]
    np.testing.assert_allclose(common, np.asarray(state.params.local["w"]).mean(0), atol=1e-6)
