"""A window of micro-steps, and a step of micro-batches, equal the big batch they stand for."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawing import draws
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from lanes import spread
from optax import microbatching
from training import scalars as run

import boostax

NORMALIZATIONS = ("mean", "sum", "weight")
assert_same = chex.assert_trees_all_equal
assert_close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-6)
MICRO_STEPS = 9
NARROW = ("float16", "bfloat16")
KINDS = ("float32", "complex64", *NARROW, *(f"in {dtype}" for dtype in NARROW))
WEIGHTS = st.lists(st.integers(0, 50), min_size=MICRO_STEPS, max_size=MICRO_STEPS)


@functools.cache
def window_updates(normalize, accumulator):
    """Updates of each micro-step; the window's length is an argument: one program for all."""

    @jax.jit
    def updates(every, grads, weights):
        options = {"normalize": normalize, "dtype": accumulator}
        tx = boostax.accumulate(optax.identity(), lambda _: every, **options)

        def step(state, given):
            grad, weight = given
            extra = {"weight": weight} if normalize == "weight" else {}
            result, state = tx.update(grad, state, **extra)
            return state, (result, boostax.train.has_updated(state))

        return jax.lax.scan(step, tx.init(grads[0]), (grads, weights))[1]

    return updates


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
@draws(25)
@example(every=1, weights=[24, 0, 0, 0, 0, 0, 0, 0, 0], seed=12)
@example(every=1, weights=[50, 0, 0, 0, 0, 0, 0, 0, 0], seed=19438)
@given(every=st.integers(1, MICRO_STEPS), weights=WEIGHTS, seed=st.integers(0, 2**31))
def test_a_window_equals_the_big_batch(normalize, kind, every, weights, seed):
    dtype, accumulator = ("float32", kind[3:]) if kind[:3] == "in " else (kind, "float32")
    weights = np.array(weights, np.float32)
    rng = np.random.default_rng(seed)
    grads = (rng.normal(size=(MICRO_STEPS, 5)) * 10.0 ** rng.integers(-3, 2)).astype(dtype)
    if normalize == "weight":
        grads[weights == 0] = np.nan  # a mean over nothing is 0/0
    result, applied = jax.device_get(window_updates(normalize, accumulator)(every, grads, weights))
    wide = np.where(np.isnan(grads), 0, grads).astype(np.complex128)[:every]
    factors = weights[:every, None] if normalize == "weight" else np.ones((every, 1))
    total = 1 if normalize == "sum" else factors.sum()
    error = abs(result[every - 1] - (wide * factors).sum(0) / (total or 1))
    # Every addition rounds once, in the accumulator's dtype: by eps / 2 of what it gives, or half
    # of the smallest number. In f32 the product rounds too, and the two operations that normalise.
    limits = jnp.finfo(accumulator)
    eps, smallest = float(limits.eps), float(limits.smallest_subnormal)
    bound = eps * (abs(wide) * factors).sum(0) + smallest
    assert (error <= (every + 2) * bound / (total or 1)).all() and not result[: every - 1].any()
    assert applied[every - 1] == (total > 0) and not applied[: every - 1].any()
    assert result.dtype == ("complex64" if dtype == "complex64" else "float32")


# Twelve bits each: in f32 their products with the weights are exact.
DRAWN = np.float32([[1386, 2785, -4041], [-680, -2598, 3331], [-648, 1335, -996]]) / 2**22


def summed(grads, weights, dtype):
    """The sums after each micro-batch, rounded once for each."""
    total, history = np.zeros(grads.shape[1:], dtype), []
    for grad, weight in zip(grads, weights, strict=True):
        total = (np.float32(total) + np.float32(weight) * grad).astype(dtype)
        history.append(total)
    return history


@pytest.mark.parametrize(("dtype", "normalize"), spread(NARROW, NORMALIZATIONS))
def test_a_narrow_sum_rounds_once_per_micro_step(normalize, dtype):
    """A gradient was narrowed before it had its weight, which then multiplied the error."""
    weights = [24, 50, 7] if normalize == "weight" else [1, 1, 1]
    tx = boostax.accumulate(optax.sgd(1.0), 3, normalize=normalize, dtype=dtype)
    each = {"weight": weights} if normalize == "weight" else {}
    expected = summed(DRAWN, weights, jnp.dtype(dtype))
    for count in (1, 2, 3):
        given = {name: values[:count] for name, values in each.items()}
        _, state = run(tx, DRAWN[:count], np.zeros(3), **given)
        assert state.window.grads.dtype == dtype
        assert_same(np.float32(state.window.grads), np.float32(expected[count - 1]))


@pytest.mark.parametrize("dtype", NARROW)
def test_a_weight_lifts_what_a_narrow_sum_could_not_hold(dtype):
    """2**-26 is nothing in f16, 2**20 times as much is a number; weights may be zero."""
    tx = boostax.accumulate(optax.sgd(1.0), 3, normalize="weight", dtype=dtype)
    history, _ = run(tx, [2.0**-26, np.nan, 2.0**-26], weight=[2.0**20, 0.0, 2.0**20])
    assert history[-1] == -(2.0**-26)
    # The sum must fit, or the window is dropped. Of weights only the ratio counts.
    weights = np.float32([2**14, 2**14, 2**15])
    history, state = run(tx, [1.0] * 3, weight=weights)
    assert history[-1] == (0.0 if dtype == "float16" else -1.0)
    assert state.skipped == (dtype == "float16")
    assert run(tx, [1.0] * 3, weight=weights / 2**14)[0][-1] == -1.0


def test_a_schedule_counts_applied_optimizer_steps():
    window = functools.partial(boostax.accumulate, every=lambda step: step + 1, normalize="sum")
    assert run(window(optax.sgd(1.0)), [1] * 10)[0] == [-1, -1, -3, -3, -3, -6, -6, -6, -6, -10]
    # A skipped window does not count: the next is as long again.
    tx = window(boostax.static_loss_scale(optax.sgd(1.0), 1.0))
    history, state = run(tx, [1.0, jnp.nan, 1.0, 1.0, 1.0, 1.0])
    assert history == [-1, -1, -1, -1, -3, -3] and int(state.optimizer_steps) == 2
    # What a skipped one gave up is over with the next micro-batch.
    seen = [bool(run(tx, [1.0, 1.0, jnp.nan, 1.0][:n])[1].gradient_used()) for n in (2, 3, 4)]
    assert seen == [True, False, True]


def test_a_window_of_one_keeps_no_buffer_and_is_the_inner_transformation():
    """Bit for bit: there is nothing to round to."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    grads = np.random.default_rng(0).normal(size=(4, 3))
    expected, inner_state = run(inner, grads, [1.0, 2.0, 3.0])
    for normalize in NORMALIZATIONS:
        tx = boostax.accumulate(inner, 1, normalize=normalize, dtype="float16")
        each = {"weight": [1.0, 2.0, 4.0, 8.0]} if normalize == "weight" else {}
        history, state = run(tx, grads, [1.0, 2.0, 3.0], **each)
        assert state.window is None and history == expected
        assert_same(state.inner_state, inner_state)


def test_a_window_without_weight_is_not_applied():
    """Not even weight decay."""
    tx = boostax.accumulate(optax.adamw(0.1, weight_decay=0.5), 2, normalize="weight")
    history, state = run(tx, [1.0, 2.0, np.nan, 3.0], 1.0, weight=[1.0, 1.0, 0.0, 0.0])
    before = run(tx, [1.0, 2.0], 1.0, weight=[1.0, 1.0])
    assert history[1:] == [before[0][-1]] * 3
    assert_same(state.inner_state, before[1].inner_state)
    assert (state.optimizer_steps, state.micro_step) == (1, 0)
    assert not boostax.train.has_updated(state)


scaled = functools.partial(boostax.dynamic_loss_scale, init_scale=4.0)
NESTINGS = {
    "bare": boostax.accumulate,
    "scaler outside": lambda opt, *args, **kw: scaled(boostax.accumulate(opt, *args, **kw)),
    "scaler inside": lambda opt, *args, **kw: boostax.accumulate(scaled(opt), *args, **kw),
}


@pytest.mark.parametrize(("normalize", "nesting"), spread(NORMALIZATIONS, NESTINGS))
def test_flush_applies_what_a_partial_window_holds(nesting, normalize):
    """Bit for bit as if the window had been meant to be that short; twice is once."""
    moments = lambda state: [optax.tree.get(state, name) for name in ("mu", "nu", "count")]  # noqa: E731
    tx, short = (NESTINGS[nesting](optax.adamw(0.1), k, normalize=normalize) for k in (5, 3))
    grads = np.float32([[1, 2], [3, 5], [0.3, 7]])
    each = {"weight": [1.0, 2.0, 4.0]} if normalize == "weight" else {}
    history, state = run(tx, grads, [1.0, 2.0], **each)
    assert history[-1] == [1.0, 2.0]
    flush = jax.jit(functools.partial(boostax.flush, tx))
    params, flushed = flush(state, jnp.float32([1.0, 2.0]))
    expected, expected_state = run(short, grads, [1.0, 2.0], **each)
    assert params.tolist() == expected[-1] != history[-1]
    assert_same(moments(flushed), moments(expected_state))
    assert bool(boostax.train.has_updated(flushed))
    again, last = flush(flushed, params)
    assert_same((again, moments(last)), (params, moments(flushed)))
    assert not boostax.train.has_updated(last)


@pytest.mark.parametrize("every", [None, 1, 2])
def test_flush_of_nothing_leaves_a_skipped_step_skipped(every):
    """It was told to have run where no window was open, or by the flag of an earlier call."""
    inner = optax.adamw(0.1) if every is None else boostax.accumulate(optax.adamw(0.1), every)
    history, state = run(scaled(inner), [1.0, 2.0, np.nan], 1.0)
    assert not state.applied
    params, flushed = boostax.flush(scaled(inner), state, jnp.float32(history[-1]))
    assert not flushed.applied and params == history[-1]
    assert not boostax.metrics(flushed)["applied"]


# Micro-batches in one step.

PARAMS = {"w": jnp.float32([0.5, -1.0, 2.0]), "b": jnp.float32(0.1)}
BATCH = np.random.default_rng(1).normal(size=(24, 3)).astype(np.float32)


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def masked_loss(params, batch):
    """A mean over the rows that count."""
    x, mask = batch
    losses = jnp.tanh(x @ params["w"] + params["b"]) ** 2
    loss, told = (losses * mask).sum() / mask.sum(), {"rows": jnp.int32(len(x))}
    return loss, boostax.Aux(weight=mask.sum(), metrics=told | {"loss again": loss})


@pytest.mark.parametrize("count", [1, 3, 24])
def test_micro_batches_equal_the_big_batch(count):
    plain = jax.value_and_grad(loss_fn)
    result = jax.jit(boostax.train.microbatch(plain, count))(PARAMS, BATCH)
    assert_close(result, plain(PARAMS, BATCH))
    options = {"microbatch_size": 24 // count, "accumulator": microbatching.AccumulationType.MEAN}
    peer = microbatching.microbatch(plain, argnums=1, **options)
    assert_close(result, jax.jit(peer)(PARAMS, BATCH))
    total = jax.value_and_grad(lambda params, x: len(x) * loss_fn(params, x))
    summed = boostax.train.microbatch(total, count, normalize="sum")
    assert_close(jax.jit(summed)(PARAMS, BATCH), total(PARAMS, BATCH))


@pytest.mark.parametrize("count", [1, 4])
def test_a_batch_that_is_cut_already_is_taken_as_it_lies(count):
    """Micro-batch i has rows i, i + k, ... of a whole batch: to the bit the same."""
    f = jax.value_and_grad(masked_loss, has_aux=True)
    whole = BATCH, np.float32(np.random.default_rng(2).random(24) < 0.4)
    cut = jax.tree.map(lambda x: x.reshape(24 // count, count, *x.shape[1:]).swapaxes(0, 1), whole)
    step = functools.partial(boostax.value_and_grad, masked_loss, has_aux=True)
    for form in (
        lambda count: boostax.train.microbatch(f, count, has_aux=True),
        lambda count: lambda params, batch: step(microbatches=count)(params, (), batch),
    ):
        once, stacked = jax.jit(form(count)), jax.jit(form("stacked"))
        # One slice is not summed where it is not stacked.
        check = assert_close if count == 1 else assert_same
        jax.tree.map(check, stacked(PARAMS, cut), once(PARAMS, whole))


def test_weights_make_a_mean_over_rows_that_count():
    """One micro-batch counts nothing: its mean is 0/0."""
    mask = np.float32(np.random.default_rng(2).random(24) < 0.4)
    mask[1::4] = 0
    f = jax.value_and_grad(masked_loss, has_aux=True)
    (loss, aux), grads = boostax.train.microbatch(f, 4, has_aux=True)(PARAMS, (BATCH, mask))
    (whole, _), whole_grads = f(PARAMS, (BATCH, mask))
    assert_close((loss, grads, aux.metrics["loss again"]), (whole, whole_grads, whole))
    assert int(aux.weight) == mask.sum() and int(aux.metrics["rows"]) == 24


def token_loss(params, batch):
    """Its gradient is ``x``, and its weight the second of the batch."""
    x, tokens = batch
    return (params * x[0]).sum(), boostax.Aux(tokens.sum(), metrics={"half": jnp.float16(0.5)})


@pytest.mark.parametrize("dtype", NARROW)
def test_a_narrow_sum_of_micro_batches_rounds_once_each(dtype):
    x = np.concatenate([DRAWN, np.ones((1, 3), np.float32)])
    tokens = np.float32([24, 50, 7, 0])
    f = jax.value_and_grad(token_loss, has_aux=True)
    sliced = boostax.train.microbatch(f, 4, has_aux=True, dtype=dtype)
    _, grads = jax.jit(sliced)(jnp.zeros(3), (x, tokens))
    total = summed(x, tokens, jnp.dtype(dtype))[-1]
    assert grads.dtype == dtype
    assert_same(np.float32(grads), np.float32((np.float32(total) / 81).astype(dtype)))


def test_a_number_of_tokens_beyond_f16_is_no_infinity():
    """The total of the weights was narrowed before it divided."""
    x, tokens = np.full((4, 3), 0.125, np.float32), np.float32([60000, 70000, 80000, 90000])
    f = jax.value_and_grad(token_loss, has_aux=True)
    sliced = boostax.train.microbatch(f, 4, has_aux=True, dtype="float16")
    (_, aux), grads = jax.jit(sliced)(jnp.zeros(3), (x, tokens))
    assert_same(grads, np.full(3, 0.125, np.float16))
    assert aux.metrics["half"] == 0.5 and aux.metrics["half"].dtype == jnp.float32


def test_weights_of_replicas_do_not_overflow_f16_gradients(mesh):
    """Gradients of f16 params, each times its replica's share of the tokens, stay f16."""
    tokens = np.float32([1024, 3072] * 4)
    x = np.float16(np.random.default_rng(4).normal(size=(8, 3)) * 1000)
    f = boostax.value_and_grad(token_loss, axis_name="data", mesh=mesh, has_aux=True)
    grads = jax.jit(f)(jnp.zeros(3, jnp.float16), (), (x, tokens))[1].local
    assert_same(grads, (np.float32(x) * tokens[:, None] / 2048).astype(np.float16))


def test_keys_and_model_state_go_through_the_micro_batches():
    """The key is folded with the index; the state is handed on from one to the next."""

    def loss(params, x, *, key, model_state):
        noise = jax.random.uniform(key)
        new_state = 0.5 * model_state + x.mean()
        return params["b"] * noise, boostax.Aux(model_state=new_state, metrics=noise)

    key = jax.random.key(7)
    f = boostax.train.microbatch(jax.value_and_grad(loss, has_aux=True), 3, has_aux=True)
    (_, aux), grads = jax.jit(f)(PARAMS, BATCH, key=key, model_state=jnp.float32(1.0))
    noise = [float(jax.random.uniform(jax.random.fold_in(key, i))) for i in range(3)]
    state = 1.0
    for i in range(3):
        state = 0.5 * state + BATCH[i::3].mean()
    assert len(set(noise)) == 3 and aux.weight is None
    mean = np.mean(noise)
    assert_close((grads["b"], aux.metrics, aux.model_state), (mean, mean, state))


def test_low_gradients_are_summed_in_f32_and_metrics_are_averaged():
    def loss(params, x):
        told = {"mean": x.mean(), "n": jnp.int32(len(x)), "any": x[0, 0] > -99}
        return loss_fn(params, x), boostax.Aux(metrics=told)

    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    f = jax.value_and_grad(loss, has_aux=True)
    (_, aux), grads = boostax.train.microbatch(f, 4, has_aux=True)(params, BATCH)
    parts = [f(params, BATCH[i::4])[1] for i in range(4)]
    assert_close(grads, jax.tree.map(lambda *g: np.mean(np.float32(g), axis=0), *parts))
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert_close(aux.metrics, {"mean": BATCH.mean(), "n": 24, "any": 4})


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_sharded_batch_stays_where_it_is(kind):
    """Micro-batches of neighbouring rows would move it, or have every device compute all."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        rows = np.ones((64, 3), np.float32)
        batch = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))
        params = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec()))
        f = jax.jit(boostax.train.microbatch(jax.value_and_grad(loss_fn), 4))
        text = f.lower(params, batch).compile().as_text()
        assert_close(f(params, batch), jax.value_and_grad(loss_fn)(params, batch))
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))
    assert "f32[2,3]" in text  # 64 rows, 8 devices, 4 micro-batches
