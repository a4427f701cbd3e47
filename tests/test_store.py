"""Params and state in fewer bytes: the mean is kept, masters are exact, nothing is held in f32."""

import functools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import NamedSharding, P
from lanes import lanes, spread
from median_gate import median_gate
from memory import temporary_bytes
from reducing import mesh_of
from stored_accuracy import FORMS
from training import follow, losses_of, walk

import boostax
from boostax.precision import entries, formats, masters, store
from boostax.testing import drawn


def applied(tx):
    return lambda params, state, grads: boostax.apply_gradients(tx, grads, state, params)


def low(params):
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)


def some(seed, shape=(128, 64)):
    w = np.random.default_rng(seed).normal(size=shape)
    return {"w": jnp.asarray(w, jnp.float32), "b": jnp.ones(3)}


@jax.jit
def halved_badly(start, few):
    """How many patterns are not the sum of their halves, or NaN in both."""
    whole = start + jax.lax.iota(jnp.uint32, 1 << 24) if few is None else few
    x = jax.lax.bitcast_convert_type(whole, jnp.float32)
    high = formats.nearest(x)
    again = formats.joined(high, formats.remainder(x, high))
    same = jax.lax.bitcast_convert_type(again, jnp.uint32) == whole
    return jnp.sum(~jnp.where(jnp.isnan(x), jnp.isnan(high) & jnp.isnan(again), same))


def test_halves_of_every_class_of_numbers_and_every_kind_of_nan():
    """A NaN of bits 0x7fffffff was a param of -0.0, one of 0x7f800001 an infinity."""
    low = np.uint32([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    high = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    assert halved_badly(0, (high + low).ravel()) == 0


@pytest.mark.long
def test_halves_of_all_four_billion_numbers():
    assert all(halved_badly(np.uint32(i << 24), None) == 0 for i in range(256))


HALVES = {
    "to the nearest, away from zero": formats.nearest,
    "to the nearest, to even": lambda x: x.astype(jnp.bfloat16),
    "a unit further": lambda x: jnp.nextafter(x.astype(jnp.bfloat16), jnp.bfloat16(jnp.inf)),
    "of the other sign": lambda x: -x.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("rounding", HALVES)
def test_a_rest_is_the_distance_in_bits_or_0_where_it_does_not_fit(rounding):
    """Of a param that others rounded, too: a tie to even lies one bit beyond the range of i16."""
    low = np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = ((np.arange(1 << 16, dtype=np.uint32)[:, None] << 16) + low).ravel().view(np.float32)
    x = x[~np.isnan(x)]
    high = HALVES[rounding](jnp.asarray(x))
    wide = np.asarray(high).view(np.uint16).astype(np.uint32) << 16
    distance = x.view(np.int32).astype(np.int64) - wide.view(np.int32)
    expected = np.where(abs(distance + 0.5) < 2**15, distance, 0)
    np.testing.assert_array_equal(formats.remainder(jnp.asarray(x), high), expected)


EDGES = np.float32([0.0, 1e-45, 1e-39, 2.0**-126, 2.0**-60, 0.3, 1.0, 2.0**100])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_sign_in_a_stored_leaf_is_that_of_jax(dtype):
    """Of every class of numbers, bit for bit: -0 and NaN stay what they are."""
    numbers = np.concatenate([EDGES, [np.inf, np.nan]])
    x = jnp.asarray(np.concatenate([numbers, -numbers])).astype(dtype)
    (found,) = entries.play(jax.make_jaxpr(jnp.sign)(x), [x], x.shape, None)
    np.testing.assert_array_equal(*(np.asarray(y).tobytes() for y in (found, jnp.sign(x))))


@pytest.mark.parametrize("noise", [0, 0x80000000, 0xFFFFFFFF])
@pytest.mark.parametrize("name", formats.FORMATS)
def test_numbers_at_the_edges_of_a_format(name, noise):
    """They stay finite, keep their sign and are at most a level away; zeros stay zeros."""
    largest = np.finfo(np.float32).max
    rows = [EDGES, np.minimum(EDGES, 1), EDGES * 0, np.minimum(EDGES, 1e-39), EDGES * 0 + largest]
    x = np.concatenate([np.resize(row, (1, 128)) for row in rows])
    x = np.concatenate([x, x * np.resize(np.float32([1, -1, -1]), 128)])
    bits = jnp.full(x.shape, np.uint32(noise).view(np.int32))
    made = formats.FORMATS[name]
    found = np.asarray(made.decode(*made.encode(jnp.asarray(x), bits)), np.float64)
    most = np.abs(x).max(1, keepdims=True).astype(np.float64)
    gap = {"bfloat16": 2.0**-7 * abs(x), "int8": most / 127, "log8": abs(x) / 6 + 2.0**-19 * most}
    assert np.isfinite(found).all() and (found * x >= 0).all()
    assert (abs(found - x) <= 1.001 * gap[name] + 2.0**-126).all()
    assert (found[x == 0] == 0).all()
    if name == "log8":  # One divides by second moments, which have no signs.
        assert (found[:5] > 0)[x[:5] > 0].all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
@pytest.mark.parametrize("kind", ["remainder", "stochastic"])
def test_a_nan_of_any_payload_stays_and_is_held_back(kind, bits):
    nan, w = jnp.asarray(np.full(4, bits, np.uint32).view(np.float32)), jnp.ones(4, jnp.bfloat16)
    tx = store(optax.sgd(1.0), params=kind)
    new, state = boostax.apply_gradients(tx, nan, tx.init(w), w)
    assert jnp.isnan(new).all() and jnp.isnan(masters(new, state)).all()
    tx = boostax.precision.check_updates(tx)
    new, state = boostax.apply_gradients(tx, nan, tx.init(w), w)
    assert (new == 1).all() and boostax.metrics(state)["skipped"] == 1


GAPS = {
    "bfloat16": lambda x: 2.0**-7 * abs(x),
    "int8": lambda x: 0 * x + abs(x).max() / 127,
    "log8": lambda x: abs(x) / 6 + 2.0**-20 * abs(x).max(),
}


@pytest.mark.parametrize("name", GAPS)
def test_what_is_drawn_is_right_on_average(name):
    """400 drawings of 8,192 elements: within 6 standard errors of two values so far apart."""
    x, made = some(0)["w"], formats.FORMATS[name]

    def one(step):
        return made.decode(*made.encode(x, formats.draw(formats.fold(7, step), x.shape)))

    found = np.asarray(jax.lax.map(one, jnp.arange(400)), np.float64)
    gap = GAPS[name](np.asarray(x, np.float64))
    assert (np.abs(found - np.asarray(x)) <= 1.001 * gap).all()
    assert (np.abs(found.mean(0) - np.asarray(x)) <= 6 * gap / 2 / np.sqrt(400)).all()
    assert (found == np.asarray(x)).mean() < 0.5


@pytest.mark.parametrize("name", ["int8", "log8"])
def test_arrays_of_a_param_share_noise_and_are_rounded_independently(name):
    x, made, errors = 0.1 + some(0)["w"] ** 2, formats.FORMATS[name], []
    for salt in ("", "mu", "nu"):
        codes, scales = made.encode(x, formats.draw(formats.fold(0, 0), x.shape), salt)
        errors.append(np.ravel(made.decode(codes, scales) - x))
    assert abs(np.corrcoef(errors) - np.eye(3)).max() <= 6 / np.sqrt(x.size)


@functools.partial(jax.jit, static_argnums=0)
def rounded(name, x):
    made = formats.FORMATS[name]
    return made.decode(*made.encode(x, formats.draw(formats.fold(0, 0), x.shape)))


@pytest.mark.parametrize("name, most", [("bfloat16", 2**-7), ("log8", 1 / 6)])
def test_second_moments_keep_their_size_over_forty_octaves(name, most):
    v = 2.0 ** jax.random.uniform(jax.random.key(1), (256, 64), minval=-40.0, maxval=0.0)
    v = v.at[0].set(1.0)
    assert float(jnp.abs(rounded(name, v) / v - 1).max()) <= most
    # One divides by them.
    assert float(rounded(name, v.at[1].set(1e-30)).min()) > 0


def test_codes_of_log8_are_levels_above_the_scale():
    """Six levels an octave, equally far apart, so that bits of f32 number them."""
    made, codes = formats.FORMATS["log8"], np.arange(256, dtype=np.uint8).reshape(2, 128)
    levels = lambda n: np.where(n > 0, 2.0 ** ((n - 1) // 6) * (1 + (n - 1) % 6 / 6), 0)  # noqa: E731
    found = made.decode(jnp.asarray(codes), jnp.full((2, 1), -(2.0**-40)))
    np.testing.assert_allclose(found, 2.0**-40 * levels(codes.astype(int)), rtol=1e-6)
    # No element of a block with signs is stored as a negative zero.
    found = made.decode(jnp.asarray(codes), jnp.full((2, 1), 2.0**-40))
    wanted = 2.0**-40 * levels(codes % 128 + 0) * np.where(codes < 128, 1, -1)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    x = jnp.full((64, 128), -1e-30).at[:, 0].set(1.0)
    assert not np.asarray(made.encode(x, formats.draw(formats.fold(0, 0), x.shape))[0])[:, 1:].any()


@pytest.mark.parametrize(("signs", "most"), spread([1, -1], [1.0, 3.4e38, 1e-30]))
def test_levels_are_next_to_what_they_stand_for_at_any_scale(most, signs):
    """Also where the inverse of the largest is no normal number."""
    x = most * 2.0 ** jax.random.uniform(jax.random.key(2), (256, 64), minval=-20.0, maxval=0.0)
    x = x.at[::128].set(most).at[1::2].multiply(signs)
    found = rounded("log8", x)
    assert float(jnp.abs(found / x - 1).max()) <= 1 / 6 and bool(jnp.isfinite(found).all())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", formats.FORMATS)
def test_what_is_not_finite_is_seen(name, bad):
    assert not bool(jnp.isfinite(rounded(name, some(0)["w"].at[5, 5].set(bad))).all())


BLOCKS = [
    ((512, 512), (1, 128)),
    ((512, 100), (128, 1)),
    ((4096, 3), (128, 1)),
    ((1000,), (200,)),
    ((257,), (257,)),
    ((3, 3, 64, 100), (1, 1, 64, 2)),
    ((8, 4), (8, 4)),
]


@pytest.mark.parametrize("shape, block", BLOCKS)
def test_blocks_are_of_whole_dimensions(shape, block):
    assert formats.block_of(shape) == block


def test_a_bf16_param_moves_as_far_as_it_should():
    """1,000 steps of 1e-3 down from 1: the mean within 4 standard errors; to the nearest, still."""
    ones = {"w": jnp.ones((64, 256), jnp.bfloat16)}
    tiny = {"w": jnp.full((64, 256), 1e-3)}

    def after(tx):
        params, _ = walk(tx, ones, [tiny] * 1000)[-1]
        return np.asarray(params["w"], np.float64)

    found = after(store(optax.sgd(1.0), params="stochastic"))
    error = found.std() / np.sqrt(found.size)
    assert abs(found.mean() - (1 - 1000 * float(np.float32(1e-3)))) <= 4 * error
    # Control: half a unit in the last place below 1 is 2**-9.
    assert (after(optax.sgd(1.0)) == 1).all()


OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2),
    "lion": optax.lion(1e-3),
    "momentum": optax.sgd(1e-2, 0.9),
    "adafactor": optax.adafactor(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
}


# What an optimizer is made of does not matter to its masters.
@pytest.mark.parametrize("name", ["adamw", "adafactor", "clipped"])
def test_remainders_are_f32_masters_bit_for_bit(name):
    """As the optimizer on f32 params, operation by operation: compilers contract differently."""
    inner, start = OPTIMIZERS[name], low(some(0, (8, 16)))
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), start)
    forms = (store(inner, params="remainder", least=1), start), (store(inner, least=1), wide)
    found = []
    with jax.disable_jit():
        for tx, params in (*forms, (inner, wide)):
            state = tx.init(params)
            for seed in range(4):
                params, state = applied(tx)(params, state, some(seed + 1, (8, 16)))
            found.append(jax.tree.leaves(masters(params, state)))
    for exact, wanted, close in zip(*found, strict=True):
        np.testing.assert_array_equal(exact, wanted)
        np.testing.assert_allclose(exact, close, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("params", lanes(["stochastic", "remainder"], ["stochastic"]))
def test_updates_make_what_a_step_writes(params):
    """The pure ``update``, where a step is less than 256 units in the last place."""
    tx, start = store(optax.adamw(1e-4), params=params, moments="log8"), low(some(0))

    @jax.jit
    def pure(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step, whole, apart = jax.jit(applied(tx)), (start, tx.init(start)), (start, tx.init(start))
    for seed in range(10):
        whole = step(*whole, some(seed + 1))
        apart = pure(*apart, some(seed + 1))
    large = abs(np.asarray(start["w"], np.float32)) > 0.01
    for one, other in zip((whole[0], masters(*whole)), (apart[0], masters(*apart)), strict=True):
        np.testing.assert_array_equal(one["w"][large], other["w"][large])


def test_a_derivative_passes_through_a_rounding_at_random():
    tx, start = store(optax.adamw(1e-2), params="stochastic"), jnp.ones((64, 128), jnp.bfloat16)
    step = lambda p: applied(tx)(p, tx.init(start), start)[0].astype(jnp.float32).sum()  # noqa: E731
    assert (jax.grad(jax.jit(step))(start) == 1).all()


def test_a_skipped_step_draws_the_same_noise_again():
    tx = boostax.dynamic_loss_scale(store(optax.adamw(1e-2), params="stochastic", moments="log8"))
    step, params = jax.jit(applied(drawn(tx))), low(some(0))
    state = tx.init(params)
    scaled = lambda seed: jax.tree.map(lambda g: g * 2.0**16, some(seed))  # noqa: E731
    params, state = step(params, state, scaled(1))
    kept, after = step(params, state, jax.tree.map(lambda g: g * jnp.nan, some(1)))
    same = lambda a, b: bool((a == b).all())  # noqa: E731
    pair = (params, state.inner_state), (kept, after.inner_state)
    assert jax.tree.all(jax.tree.map(same, *pair))
    assert int(after.inner_state.steps) == 1


EVERY = OPTIMIZERS | {"muon": optax.contrib.muon(1e-2)}


def sizes(tx, dtype, shape=(256, 512)):
    """Bytes held and temporary, per param and in copies of f32 params, of twelve leaves."""
    params = {f"layer{i:02d}": jax.ShapeDtypeStruct(shape, dtype) for i in range(12)}
    held_arrays, count = (params, jax.eval_shape(tx.init, params)), 12 * shape[0] * shape[1]
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held_arrays))
    return held / count, temporary_bytes(tx, params) / (4 * count)


@functools.cache
def bare_sizes(name):
    return sizes(boostax.accumulate(EVERY[name], 16), jnp.float32)


@pytest.mark.parametrize("name", lanes(EVERY, ["adamw", "lion"]))
@pytest.mark.parametrize("moments", ["int8", "log8"])
@pytest.mark.filterwarnings("ignore:.*int8 rounds")
def test_six_bytes_a_param_with_a_window_and_no_more_in_between(name, moments):
    tx = store(EVERY[name], params="stochastic", moments=moments)
    low_sums = {"dtype": "bfloat16", "rounding": "stochastic"}
    held, temporary = sizes(boostax.accumulate(tx, 16, **low_sums), jnp.bfloat16)
    _, bare = bare_sizes(name)
    assert held <= 6.1 and temporary <= bare + 0.1


def test_second_moments_in_int8_warn():
    tx = store(optax.adam(1e-3), moments={"*mu": "log8", "*nu": "int8"})
    with pytest.warns(UserWarning, match="int8 rounds small values of .*nu' to 0, .* Use 'log8'"):
        tx.init(jnp.ones((64, 64)))


RATE, SEEN = 1e-2, {"e": (64, 256), "experts": (4, 8, 256), "lora": (32, 256), "thawed": (8, 256)}
RECOMMENDED = [name for name, x in FORMS.items() if x.recommended and x.options is not None]


def seldom(step):
    """Gradients of rows and of an expert that are rarely seen, and of a leaf that thaws."""
    rows = np.random.default_rng(step).integers(0, 32 if step % 50 else 48, 8)
    rng, grads = np.random.default_rng(1000 + step), {k: np.zeros(x, "f4") for k, x in SEEN.items()}
    np.add.at(grads["e"], rows, rng.normal(size=(8, 256)).astype("f4"))
    grads["experts"][step % 3 if step % 50 else 3] = rng.normal(size=(8, 256))
    grads["lora"] += rng.normal(size=(32, 256))
    grads["thawed"] += rng.normal(size=(8, 256)) * (step >= 60)
    return grads


@functools.cache
def longest_steps(name):
    """The longest step of an element of each leaf, in learning rates, of 100 micro-steps."""
    form, adam = FORMS[name], optax.adam(RATE)
    tx = adam if form.options is None else store(adam, **form.options, least=1)
    tx = tx if form.window is None else boostax.accumulate(tx, 4, **form.window)
    params = jax.tree.map(jnp.zeros, SEEN, is_leaf=lambda x: isinstance(x, tuple))
    params["lora"] = some(0, (32, 8))["w"] / 8, jnp.zeros((8, 256))
    params = low(params) if form.low else params

    def step(carry, grads):
        ab = carry[0]["lora"]  # Before the first step b is 0, and so is the gradient of a.
        fitted = jax.grad(lambda ab: jnp.mean((ab[0] @ ab[1] - grads["lora"]) ** 2))(ab)
        after = applied(tx)(*carry, grads | {"lora": fitted})
        moved = jax.tree.map(lambda x, y: jnp.abs(x - y).max(), masters(*after), masters(*carry))
        return after, moved

    grads = jax.tree.map(lambda *x: np.stack(x), *map(seldom, range(100)))
    _, moved = jax.jit(lambda start: jax.lax.scan(step, start, grads))((params, tx.init(params)))
    return jax.tree.map(lambda x: float(x.max()) / RATE, moved)


@pytest.mark.parametrize("name", RECOMMENDED)
def test_no_step_of_a_recommended_form_is_twice_as_long_as_in_f32(name):
    """Defect guarded against: a card recommended int8 for first moments of embeddings."""
    plain = longest_steps("f32" if FORMS[name].window is None else "f32, window")
    found = longest_steps(name)
    assert jax.tree.all(jax.tree.map(lambda x, y: x <= 2 * y, found, plain)), (found, plain)


def test_first_moments_in_int8_make_long_steps_of_rarely_seen_rows():
    """As the card says, of up to 49 learning rates, less than 2 in f32."""
    found = longest_steps("params f32, moments int8 and log8")["e"]
    assert 48 < found < 50 and longest_steps("f32")["e"] < 2


@pytest.mark.parametrize("name", ["lion", "adafactor", "muon"])
def test_leaf_by_leaf_an_optimizer_keeps_less_than_alone(name):
    """XLA:CPU holds what it has of every leaf; nothing is stored low here."""
    both = EVERY[name], store(EVERY[name])
    alone, by_leaf = (sizes(tx, jnp.float32, (128, 256))[1] for tx in both)
    assert by_leaf <= alone / 4


WRAPPERS = {
    "scaler": lambda tx: drawn(boostax.dynamic_loss_scale(tx, init_scale=1.0)),
    "window": lambda tx: boostax.accumulate(tx, 1),
    "average": lambda tx: boostax.model.average_params(tx, "ema", decay=0.9),
    "gate": median_gate,
    "freezing": lambda tx: boostax.scheduled_freeze(tx, {"w": 1, "b": 0}, [1, 0]),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_stands_around_hands_params_on_as_they_are_stored(name):
    tx = WRAPPERS[name](store(optax.adamw(1e-2), params="remainder", moments="log8"))
    params, state = walk(tx, low(some(0)), [some(1), some(2)])[-1]
    exact = masters(params, state)["w"]
    assert exact.dtype == jnp.float32 and bool((exact != params["w"]).any())
    assert bool((formats.nearest(exact) == params["w"]).all())


def test_a_sum_in_bf16_is_right_on_average():
    """256 additions of 1/512 of the sum: to the nearest it would stand still."""
    params = {"w": jnp.zeros((64, 64))}
    grads = {"w": jnp.full((64, 64), 2.0**-9)}
    made = functools.partial(boostax.accumulate, optax.sgd(1.0), 257, normalize="sum")
    found = {}
    for rounding in ("nearest", "stochastic"):
        tx = made(dtype="bfloat16", rounding=rounding)
        after, _ = walk(tx, params, [{"w": jnp.ones((64, 64))}] + [grads] * 256)[-1]
        found[rounding] = -np.asarray(after["w"], np.float64)
    assert (found["nearest"] == 1).all()
    assert abs(found["stochastic"].mean() - 1.5) <= 4 * found["stochastic"].std() / 64


def test_moments_move_in_and_out_by_migration():
    params, inner = low(some(0)), optax.adamw(1e-2)
    state = inner.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
    _, state = inner.update(some(1), state, some(0))
    tx = boostax.accumulate(store(inner, params="remainder", moments="log8"), 4)
    stored, report = boostax.migrate_state(state, tx, params)
    assert "mu, nu" in str(report)
    codes = stored.inner_state.inner_state[0]
    assert codes.nu["w"].dtype == jnp.uint8 and int(codes.count) == 1
    back, _ = boostax.migrate_state(stored, inner, masters(params, stored))
    np.testing.assert_allclose(back[0].nu["w"], state[0].nu["w"], rtol=1 / 6)
    np.testing.assert_array_equal(back[0].nu["b"], state[0].nu["b"])


def test_codes_and_scales_are_sharded_like_the_param():
    mesh = mesh_of(data=8)
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P(None, "data") if x.ndim > 1 else P()))  # noqa: E731
    params = jax.tree.map(place, low(some(0, (256, 1024))))
    inner = optax.chain(boostax.all_reduce("data"), optax.adamw(1e-2))
    tx = store(inner, params="remainder", moments="log8")
    state = boostax.on_mesh(tx, params, axis_name="data").init(params)
    for x in (state.low["w"], state.inner_state[1][0].nu["w"], state.scales["1/0/nu"].scales["w"]):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 2), x.sharding
    assert state.scales["1/0/nu"].scales["w"].shape == (256, 8)


def test_adasum_of_changes_of_a_stored_optimizer_on_shards():
    """Each replica's own moments, in blocks of its shards, train as in f32 and stay stored."""
    mesh = mesh_of(data=2, model=4)
    specs, rows = {"w": P("model"), "b": P()}, np.asarray(some(7, (64, 512))["w"])
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["w"]) + p["b"].sum() - x[:, :32]) ** 2)  # noqa: E731
    params, found = some(0, (512, 32)), {}
    adam = optax.adam(1e-2)
    for name, inner in (("f32", adam), ("log8", store(adam, moments="log8"))):
        tx = boostax.reduce.adasum_delta(inner, axis_name="data")
        step = boostax.make_train_step(loss, tx, mesh=mesh, axis_name="data", param_specs=specs)
        state, told = follow(step, step.init(params), [rows] * 10)
        found[name] = losses_of(told)
    codes = state.opt_state.inner_state.local.inner_state[0].nu["w"]
    assert codes.dtype == jnp.uint8 and codes.shape == (2, 512, 32)
    assert codes.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 3)
    assert found["f32"][-1] < 0.9 * found["f32"][0]
    np.testing.assert_allclose(found["log8"], found["f32"], rtol=0.05)


LONG, ROWS = (512, 4), P("model")
SHARDS = [(LONG, ROWS, False), ((8, 4), ROWS, False), (LONG, P(None, "model"), True)]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("shape", "spec", "whole"), SHARDS)
def test_shards_in_ones_own_shard_map_have_the_scales_of_their_blocks(shape, spec, whole, check):
    """Defect guarded against: shards met the scales of the whole array, and JAX's errors told."""
    tx = store(optax.adam(0.1), moments="log8", least=1)
    params, grads = jnp.ones(shape), some(0, shape)["w"]
    state = tx.init(params)
    specs = boostax.states.state_specs(tx, params, param_specs=spec, axis_name="data")
    places = {"in_specs": (spec, specs, spec), "out_specs": (spec, specs)}
    step = jax.shard_map(applied(tx), mesh=mesh_of(model=4), check_vma=check, **places)
    if whole:
        new, state = jax.jit(step)(params, state, grads)
        alone, _ = boostax.apply_gradients(tx, grads, tx.init(params), params)
        np.testing.assert_allclose(new, alone, rtol=1e-6)
    elif check or shape[0] > formats.BLOCK:
        with pytest.raises(ValueError, match=r"without blocks, in .+ own, got '0/mu'"):
            jax.eval_shape(step, params, state, grads)


def test_refusals_name_the_line_that_mends_them():
    gated = store(boostax.accumulate(optax.sgd(1.0), 2))
    with pytest.raises(ValueError, match=r"dynamic_loss_scale\(store\(adamw\(...\)\)\)"):
        gated.init(some(0))
    inner = optax.chain(optax.clip(1.0), store(optax.sgd(1.0), params="stochastic"))
    hidden = boostax.accumulate(inner, 2)
    with pytest.raises(ValueError, match="wrap the complete chain: store"):
        hidden.init(low(some(0)))


@pytest.mark.parametrize("reduce", ["int8_reduce", "top_k_reduce"])
def test_residuals_of_replicas_stand_inside(reduce):
    """Defect guarded against: turns that waited for a replica's own differed by replica."""
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    params = jax.device_put(params, NamedSharding(mesh_of(data=4), P()))
    rng = np.random.default_rng(0)
    given = lambda: jax.tree.map(lambda p: rng.normal(size=(4, *p.shape)).astype("f4"), params)  # noqa: E731
    grads = [boostax.PerReplica(given()) for _ in range(3)]

    def ends(around):
        inner = optax.chain(getattr(boostax.reduce, reduce)("data"), optax.adam(0.1))
        return walk(boostax.on_mesh(around(inner), params, axis_name="data"), params, grads)[-1][0]

    plain = ends(lambda tx: tx)
    found = ends(lambda tx: store(tx, least=1))
    # Two programs; a residual that is not the replica's own would be off by whole quanta.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, plain)


def test_an_audit_counts_what_a_leaf_moves_on_a_cpu():
    """The loop of a leaf has one turn; an unknown number would be no bound."""
    tx = store(optax.adamw(1e-2), params="stochastic", moments={"*mu": "int8", "*nu": "log8"})
    params = low({"w": jnp.ones((256, 512))})
    step = jax.jit(applied(tx), donate_argnums=(0, 1))
    found = boostax.audit(step, params, tx.init(params), params)
    assert found.traffic.most / params["w"].size <= 40
    # A scale in a layout of its own would be copied from that of the state and back.
    program = step.lower(params, tx.init(params), params).compile().as_text()
    assert "f32[256,4,1]{1,0,2}" not in program


def test_a_kernel_for_tpus_computes_the_same_bits_whole_and_on_shards():
    script = pathlib.Path(__file__).parent / "kernels.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
