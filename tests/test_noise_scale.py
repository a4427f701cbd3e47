"""The gradient noise scale of a window, of replicas and of both is that of the closed form."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
from boostax._core import costs, noise_scale
from boostax.testing import drawn

SHAPE, SIGMA = (32, 16), 2.0
GRADIENT = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
NOISE = SIGMA**2 * GRADIENT.size
SQUARE = float((GRADIENT.astype(np.float64) ** 2).sum())
# Of a quadratic at a fixed point the gradient is that of the mean loss, plus noise.
STILL = optax.sgd(0.0)
WINDOW, REPLICAS = 4, 4
SHARES = {"whole": P(), "sharded": P("model")}


def fixed_scale(inner, axis_name=None):
    return boostax.static_loss_scale(inner, 2.0**16, axis_name=axis_name)


def gradients(keys, factor=1.0, shape=SHAPE):
    noise = jax.vmap(lambda key: jax.random.normal(key, shape))(keys)
    return factor * (GRADIENT + SIGMA * noise)


def run(tx, grads, state=None):
    """The state after all gradients, at one point."""
    params = jnp.zeros(SHAPE)

    @jax.jit
    def through(state, grads):
        def step(state, grad):
            state = boostax.apply_gradients(drawn(tx), grad, state, params)[1]
            return state, boostax.metrics(state)

        return jax.lax.scan(step, state, grads)

    return through(tx.init(params) if state is None else state, grads)


def estimates(metrics):
    return [
        float(np.asarray(metrics[name]).ravel()[-1])
        for name in ("noise_scale", "gradient_square", "gradient_noise")
    ]


WINDOWS = {
    "bare": (lambda tx: boostax.accumulate(tx, WINDOW, noise=0.99), 1.0),
    "in the scaler": (
        lambda tx: fixed_scale(boostax.accumulate(tx, WINDOW, noise=0.99)),
        2.0**16,
    ),
    "around the scaler": (
        lambda tx: boostax.accumulate(fixed_scale(tx), WINDOW, noise=0.99),
        2.0**16,
    ),
    "around the scaler, in bfloat16": (
        lambda tx: boostax.accumulate(
            fixed_scale(tx), WINDOW, noise=0.99, accumulator_dtype="bfloat16"
        ),
        2.0**16,
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_measures_the_noise_of_its_true_gradients(name):
    make, factor = WINDOWS[name]
    grads = gradients(jax.random.split(jax.random.key(1), 200 * WINDOW), factor)
    _, metrics = run(make(STILL), grads)
    np.testing.assert_allclose(estimates(metrics), [NOISE / SQUARE, SQUARE, NOISE], rtol=0.05)


def test_a_loss_scale_changes_nothing_but_rounding():
    keys = jax.random.split(jax.random.key(2), 5 * WINDOW)
    found = [
        estimates(run(make(STILL), gradients(keys, factor))[1])
        for name, (make, factor) in WINDOWS.items()
        if "bfloat16" not in name
    ]
    # Of norms and their squares in f32, fused one way or another.
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-6)


def in_both(noise=0.99, **options):
    inner = optax.chain(boostax.all_reduce("data", noise=noise, **options), STILL)
    return boostax.accumulate(inner, WINDOW, noise=noise, axis_name="data")


def in_window(axis="data"):
    inner = optax.chain(boostax.all_reduce(axis), STILL)
    return boostax.accumulate(inner, WINDOW, noise=0.99, axis_name=axis)


# With the micro-steps of each, and the micro-batches of one replica in its small batch.
PARALLEL = {
    "replicas": (lambda: optax.chain(boostax.all_reduce("data", noise=0.99), STILL), 1, 1),
    "half-precision replicas": (
        lambda: optax.chain(boostax.all_reduce("data", noise=0.99, dtype="float16"), STILL),
        1,
        1,
    ),
    "windows": (in_window, WINDOW, 1),
    "replicas of windows": (in_both, WINDOW, 1),
    "replicas of windows of scaled gradients": (
        lambda: boostax.accumulate(
            fixed_scale(optax.chain(boostax.all_reduce("data", noise=0.99), STILL), "data"),
            WINDOW,
            noise=0.99,
            axis_name="data",
        ),
        WINDOW,
        1,
    ),
    "replicas of windows that stand for one batch": (
        lambda: boostax.accumulate(
            optax.chain(boostax.all_reduce("data", noise=0.99), STILL), WINDOW, axis_name="data"
        ),
        WINDOW,
        WINDOW,
    ),
}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", PARALLEL)
def test_replicas_measure_it_however_params_are_sharded(name, share):
    make, calls, small = PARALLEL[name]
    mesh = jax.make_mesh((REPLICAS, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = jax.device_put(jnp.zeros(SHAPE), NamedSharding(mesh, SHARES[share]))
    tx = boostax.on_mesh(make(), params, axis_name="data")
    factor = 2.0**16 if "scaled" in name else 1.0

    @jax.jit
    def through(state, keys):
        def step(state, key):
            grads = boostax.PerReplica(gradients(jax.random.split(key, REPLICAS), factor))
            return boostax.apply_gradients(drawn(tx), grads, state, params)[1], None

        return jax.lax.scan(step, state, keys)[0]

    state = through(tx.init(params), jax.random.split(jax.random.key(3), 150 * calls))
    wanted = [NOISE / SQUARE / small, SQUARE, NOISE / small]
    np.testing.assert_allclose(estimates(boostax.metrics(state)), wanted, rtol=0.05)


def test_each_piece_is_without_bias():
    """Over all draws of a few vectors: the mean of the estimates is what they estimate."""
    vectors = np.array([[3.0, 1.0], [-1.0, 0.5], [0.25, 2.0]])
    mean = vectors.mean(0)
    wanted = (mean**2).sum(), ((vectors - mean) ** 2).sum() / len(vectors)
    for n in (2, 3):
        found = []
        for drawn_vectors in itertools.product(vectors, repeat=n):
            each = np.array(drawn_vectors)
            small, large = (each**2).sum(1).mean(), (each.mean(0) ** 2).sum()
            with jax.enable_x64(True):
                new = noise_scale.observe(noise_scale.fresh(), small, large, np.float64(n), 0.0)
            found.append([float(new.gradient), float(new.noise)])
        np.testing.assert_allclose(np.mean(found, 0), wanted, rtol=1e-6)


def test_running_means_are_corrected_and_divided_last():
    grads = gradients(jax.random.split(jax.random.key(4), 3 * WINDOW))
    _, metrics = run(boostax.accumulate(STILL, WINDOW, noise=0.5), grads)
    pieces = []
    for window in np.asarray(grads, np.float64).reshape(3, WINDOW, -1):
        small, large = (window**2).sum(1).mean(), (window.mean(0) ** 2).sum()
        pieces.append(
            [(WINDOW * large - small) / (WINDOW - 1), (small - large) * WINDOW / (WINDOW - 1)]
        )
    square, noise = np.average(pieces, 0, weights=[1, 2, 4])
    np.testing.assert_allclose(estimates(metrics), [noise / square, square, noise], rtol=1e-5)


def test_a_skipped_micro_step_is_one_that_never_came():
    tx = boostax.dynamic_loss_scale(boostax.accumulate(STILL, WINDOW, noise=0.9), init_scale=1.0)
    grads = gradients(jax.random.split(jax.random.key(5), 2 * WINDOW))
    bad = jnp.concatenate([grads[:6], jnp.full((1, *SHAPE), jnp.nan), grads[6:]])
    state, found = (run(tx, given)[0] for given in (grads, bad))
    assert jax.tree.all(
        jax.tree.map(np.array_equal, state.inner_state.noise, found.inner_state.noise)
    )
    assert int(found.skipped_steps) == 1


def test_a_dropped_window_does_not_count():
    tx = boostax.accumulate(fixed_scale(STILL), WINDOW, noise=0.9)
    grads = gradients(jax.random.split(jax.random.key(6), 3 * WINDOW))
    bad = grads.at[WINDOW + 1].set(jnp.nan)
    good, _ = run(tx, jnp.concatenate([grads[:WINDOW], grads[2 * WINDOW :]]))
    found, _ = run(tx, bad)
    assert jax.tree.all(jax.tree.map(np.array_equal, good.noise, found.noise))
    assert int(found.dropped_windows) == 1


def test_what_shows_nothing_changes_nothing():
    tx = boostax.accumulate(STILL, WINDOW, noise=0.9)
    state, metrics = run(tx, gradients(jax.random.split(jax.random.key(7), 1)))
    assert np.isnan(metrics["noise_scale"]).all()
    _, state = boostax.flush(tx, state, jnp.zeros(SHAPE))
    assert float(state.noise.weight) == 0.0, "one gradient alone shows no noise"
    assert int(state.optimizer_steps) == 1


def test_noise_that_hides_the_gradient_is_an_infinite_scale():
    grads = jnp.stack([jnp.ones(SHAPE), -jnp.ones(SHAPE)] * 2)
    _, metrics = run(boostax.accumulate(STILL, WINDOW, noise=0.9), grads)
    assert metrics["noise_scale"][-1] == np.inf


def sent(tx, check_vma=True):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    step = boostax.make_train_step(
        lambda w, x: jnp.mean((x @ w) ** 2), tx, mesh=mesh, axis_name="data", check_vma=check_vma
    )
    state = step.init(jnp.ones(16))
    return costs.collectives(step.jaxpr(state, jnp.ones((8, 16))))


BARE = {
    "window": lambda: boostax.accumulate(
        optax.chain(boostax.all_reduce("data"), STILL), WINDOW, axis_name="data"
    ),
    "replicas": lambda: optax.chain(boostax.all_reduce("data"), STILL),
}
SENT = {
    "window": ("window", in_window, 8, True),
    "both": ("window", in_both, 4, True),
    "replicas": ("replicas", PARALLEL["replicas"][0], 4, False),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", SENT)
def test_a_window_sends_eight_bytes_and_a_micro_step_none(name, check_vma):
    bare, make, size, conditional = SENT[name]
    without, found = sent(BARE[bare](), check_vma), sent(make(), check_vma)
    more = [c for c in found if c not in without]
    assert len(found) == len(without) + 1 and len(more) == 1
    assert more[0].bytes == size and more[0].conditional == conditional


def test_norms_of_shards_gather_nothing():
    mesh = jax.make_mesh((REPLICAS, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = jax.device_put(jnp.zeros(SHAPE), NamedSharding(mesh, P("model")))
    grads = boostax.PerReplica(
        jax.device_put(jnp.zeros((REPLICAS, *SHAPE)), NamedSharding(mesh, P("data", "model")))
    )
    tx = boostax.on_mesh(in_both(), params, axis_name="data")
    step = jax.jit(lambda g, s, p: boostax.apply_gradients(drawn(tx), g, s, p))
    text = step.lower(grads, tx.init(params), params).compile().as_text()
    assert "all-reduce" in text
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))


def test_shards_of_a_mapped_function_are_added_up():
    """Leaves that are whole on all devices count once."""
    mesh = jax.make_mesh((REPLICAS, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tx = in_both(0.0)
    whole = {name: jnp.ones((REPLICAS, WINDOW, 6)) for name in "ab"}
    random = np.random.default_rng(0).normal(size=(2, REPLICAS, WINDOW, 6)).astype(np.float32)
    grads = {name: x + random[i] for i, (name, x) in enumerate(whole.items())}
    specs = {"a": P("data", None, "model"), "b": P("data")}

    def estimated(grads):
        each = jax.tree.map(lambda x: x[0], grads)
        params = jax.tree.map(lambda x: jnp.zeros_like(x[0]), each)
        params = jax.tree.map(lambda x: jax.lax.pmean(x, "data"), params)
        state = tx.init(params)
        for micro in zip(*each.values(), strict=True):
            state = tx.update(dict(zip(each, micro, strict=True)), state, params)[1]
        return noise_scale.found(state)[0]

    found = jax.jit(jax.shard_map(estimated, mesh=mesh, in_specs=(specs,), out_specs=P()))(grads)
    every = np.concatenate([np.asarray(x).reshape(-1, 6) for x in grads.values()], 1)
    n = len(every)
    small, large = (every**2).sum(1).mean(), (every.mean(0) ** 2).sum()
    wanted = (n * large - small) / (n - 1), (small - large) * n / (n - 1)
    np.testing.assert_allclose((found.gradient, found.noise), wanted, rtol=1e-5)


def test_without_noise_nothing_is_kept():
    state = jax.eval_shape(boostax.accumulate(STILL, WINDOW).init, jnp.zeros(3))
    names = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(state)
    ]
    assert names == [
        "micro_step",
        "optimizer_steps",
        "dropped_windows",
        "applied",
        "window/grads",
    ]
    assert not jax.tree.leaves(boostax.all_reduce("data").init(jnp.zeros(3)))


def test_windows_follow_the_noise_scale():
    every = boostax.train.by_noise(2, 64, fraction=1.0)
    tx = boostax.accumulate(STILL, every, noise=0.9)
    grads = gradients(jax.random.split(jax.random.key(8), 60))
    _, metrics = run(tx, grads)
    steps, scales = np.asarray(metrics["optimizer_steps"]), np.asarray(metrics["noise_scale"])
    ends = np.flatnonzero(np.diff(steps, prepend=0))
    lengths = np.diff(ends, prepend=-1)
    assert lengths[0] == 2, "the first window is the shortest one"
    wanted = np.clip(np.round(scales[ends[:-1]]), 2, 64)
    np.testing.assert_array_equal(lengths[1:], wanted)
    assert len(set(lengths)) > 2


def test_replicas_share_out_a_window_by_the_noise_scale():
    params = jax.device_put(
        jnp.zeros(SHAPE),
        NamedSharding(jax.make_mesh((REPLICAS,), ("data",), axis_types=(AxisType.Auto,)), P()),
    )
    inner = optax.chain(boostax.all_reduce("data", noise=0.9), STILL)
    every = boostax.train.by_noise(1, 64, fraction=8.0)
    tx = boostax.accumulate(inner, every, noise=0.9, axis_name="data")
    tx = boostax.on_mesh(tx, params, axis_name="data")

    @jax.jit
    def through(state, keys):
        def step(state, key):
            grads = boostax.PerReplica(gradients(jax.random.split(key, REPLICAS)))
            state = boostax.apply_gradients(drawn(tx), grads, state, params)[1]
            return state, boostax.metrics(state)

        return jax.lax.scan(step, state, keys)[1]

    metrics = through(tx.init(params), jax.random.split(jax.random.key(12), 60))
    ends = np.flatnonzero(np.diff(np.asarray(metrics["optimizer_steps"]), prepend=0))
    scales = np.asarray(metrics["noise_scale"])[ends[:-1]]
    assert ends[0] == 0, "replicas show noise in a window of one"
    np.testing.assert_array_equal(np.diff(ends), np.clip(np.round(8 * scales / REPLICAS), 1, 64))


@pytest.mark.parametrize(("scale", "length"), [(0.1, 3), (7.4, 7), (1e30, 9), (np.nan, 3)])
def test_windows_keep_their_bounds(scale, length):
    state = noise_scale.NoiseScaleState(
        *(jnp.float32(x) for x in (1.0, scale, 0.0 if np.isnan(scale) else 1.0))
    )
    assert int(boostax.train.by_noise(3, 9).length(state, 1)) == length
    shared = boostax.train.by_noise(3, 9, fraction=4.0).length(state, 4)
    assert int(shared) == length, "replicas share a window"


def test_an_open_window_goes_on_to_the_bit_from_numbers_on_disk():
    tx = boostax.accumulate(STILL, boostax.train.by_noise(2, 8), noise=0.9)
    grads = gradients(jax.random.split(jax.random.key(9), 20))
    whole, _ = run(tx, grads)
    half, _ = run(tx, grads[:9])
    assert int(half.micro_step) > 0
    stored = jax.tree.map(np.asarray, half)
    found, _ = run(tx, grads[9:], jax.tree.map(jnp.asarray, stored))
    assert jax.tree.all(jax.tree.map(np.array_equal, whole, found))


def test_flush_closes_a_window_by_what_it_holds():
    tx = boostax.accumulate(STILL, 8, noise=0.0)
    grads = gradients(jax.random.split(jax.random.key(10), 3))
    state, _ = run(tx, grads)
    _, state = boostax.flush(tx, state, jnp.zeros(SHAPE))
    expected, _ = run(boostax.accumulate(STILL, 3, noise=0.0), grads)
    assert jax.tree.all(jax.tree.map(np.array_equal, expected.noise, state.noise))


def test_statistics_move_to_another_chain_and_an_open_window_to_another_scale():
    old_tx = boostax.accumulate(fixed_scale(STILL), WINDOW, noise=0.9)
    grads = gradients(jax.random.split(jax.random.key(11), WINDOW + 2), 2.0**16)
    old, _ = run(old_tx, grads)
    new_tx = fixed_scale(boostax.accumulate(STILL, WINDOW, noise=0.9))
    new, _ = boostax.migrate_state(old, new_tx, jnp.zeros(SHAPE))
    assert jax.tree.all(jax.tree.map(np.array_equal, old.noise, new.inner_state.noise))
    straight, _ = run(new_tx, grads)
    np.testing.assert_allclose(new.inner_state.window.norm, straight.inner_state.window.norm)


def test_a_configuration_says_it_as_data():
    given = {"accumulate": {"every": {"low": 2, "high": 64}, "noise": 0.99}}
    boost = boostax.auto(given)
    data = json.loads(json.dumps(boost.config.to_dict()))
    assert boostax.auto(data).config == boost.config
    state = boost.optimizer(STILL).init(jnp.zeros(3))
    assert len(noise_scale.found(state)) == 1


def test_what_cannot_be_measured_is_refused():
    by_noise = boostax.train.by_noise
    with pytest.raises(ValueError, match="every must be more than 1 with noise, got 1"):
        boostax.accumulate(STILL, 1, noise=0.9)
    with pytest.raises(ValueError, match="normalize must be 'mean', got 'weight'"):
        boostax.accumulate(STILL, 2, noise=0.9, normalize="weight")
    with pytest.raises(ValueError, match="noise must be given with by_noise, got None"):
        boostax.accumulate(STILL, by_noise(2, 4))
    with pytest.raises(ValueError, match=r"every\.low must be more than 1, got 1"):
        boostax.accumulate(STILL, by_noise(1, 4), noise=0.9).init(jnp.zeros(3))
    with pytest.raises(ValueError, match="noise must be None around group_loss_scale"):
        inner = optax.chain(boostax.all_reduce("data", noise=0.9), STILL)
        scaled = boostax.precision.group_loss_scale(inner, {"a": 0, "b": 1}, axis_name="data")
        tx = boostax.accumulate(scaled, 2, noise=0.9, axis_name="data")
        tx.init({"a": jnp.zeros(3), "b": jnp.zeros(3)})
    with pytest.raises(ValueError, match="normalize must be 'mean' or 'sum' around all_reduce"):
        inner = boostax.all_reduce("data", noise=0.9)
        boostax.accumulate(inner, 2, normalize="weight", axis_name="data").init(jnp.zeros(3))
    for options in ({"op": "sum"}, {"clip": 1.0}):
        (name,) = options
        with pytest.raises(ValueError, match=f"all_reduce: {name} must be"):
            boostax.all_reduce("data", noise=0.9, **options)
