"""Training runs recorded from MindSpore come out of boostax step for step."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training import walk

import boostax

CLOSE = {"rtol": 0, "atol": 1e-6}
MOMENTUM = optax.sgd(0.1, momentum=0.9)
BAD = {"train": {4: np.inf, 5: np.inf, 9: np.nan}, "x_accum": {1: np.inf, 5: np.inf}}


def prepared(run, bad=()):
    """Arrays of a run, initial params, and its batches with the bad inputs put in."""
    for step in bad:
        run["X"][step, 0, 0] = bad[step]
    return run, [run[f"ws{i}"] for i in (1, 2, 3)], list(zip(run["X"], run["Y"], strict=True))


def assert_near(params, expected, step, most=1e-6):
    """With the true tanh it would be 1e-4: see golden/README.md."""
    # Each step rounds an update and the params, here and in MindSpore.
    atol = min(most, 2 * (step + 1) * np.finfo(np.float32).eps * np.abs(expected).max())
    np.testing.assert_allclose(params, expected, rtol=0, atol=atol)


@jax.custom_jvp
def tanh(x):
    """The rational approximation of MindSpore's CPU kernel, 1 beyond 5."""
    square = x * x
    above = (((square + 378) * square + 17325) * square + 135135) * x
    below = ((28 * square + 3150) * square + 62370) * square + 135135
    return jnp.where(abs(x) > 5, jnp.sign(x), above / below)


@tanh.defjvp
def _(primals, tangents):
    y = tanh(*primals)
    return y, (1 - y * y) * tangents[0]


def loss_fn(params, batch):
    x, y = batch
    first, second, last = params
    return jnp.mean((tanh(tanh(x @ first) @ second) @ last - y) ** 2)


def flat(params):
    return np.concatenate([np.ravel(w) for w in params])


scaled = functools.partial(boostax.dynamic_loss_scale, init_scale=1024, growth_interval=3)


@pytest.fixture(params=["one device", "8 replicas"])
def train(request, mesh):
    """``train(transformation of an axis name, params, batches)`` yields state and metrics."""
    axis_name = "data" if request.param == "8 replicas" else None

    def reduced(opt):
        return optax.chain(boostax.all_reduce(axis_name), opt) if axis_name else opt

    def run(make_tx, params, batches, **options):
        devices = {"mesh": mesh, "axis_name": axis_name} if axis_name else {}
        step = boostax.make_train_step(loss_fn, make_tx(reduced, axis_name), **devices, **options)
        state = step.init(params)
        for batch in batches:
            state, told = step(state, batch)
            yield jax.device_get((state, told))

    return run


@pytest.mark.parametrize("cell", ["TrainOneStep", "BoostTrainOneStep"])
def test_training_with_loss_scale_equals_mindspore(arrays, train, cell):
    name = f"loss_scale_train_{cell}WithLossScaleCell_graph.npz"
    run, params, batches = prepared(arrays(name), BAD["train"])
    states = train(lambda reduced, axis: scaled(reduced(MOMENTUM), axis_name=axis), params, batches)
    for t, (state, told) in enumerate(states):
        assert told["applied"] == (not run["overflow"][t])
        assert told["loss_scale"] == run["scale_after"][t] == run["scale_returned"][t]
        assert_near(flat(state.params), run["w"][t], t)
    assert told["skipped"] == 3


def test_loss_scale_around_accumulation_equals_mindspore(arrays, train):
    """A bad micro-batch is dropped alone; the window takes one more; the scale goes on."""
    run, params, batches = prepared(arrays("loss_scale_x_accum3_graph.npz"), BAD["x_accum"])
    assert run["overflow_steps"].tolist() == [1, 5]

    def make_tx(reduced, axis):
        window = boostax.accumulate(reduced(optax.sgd(0.1)), 3, axis_name=axis)
        return scaled(window, axis_name=axis)

    applied = []
    for t, (state, told) in enumerate(train(make_tx, params, batches)):
        assert told["loss_scale"] == run["scale"][t]
        assert told["micro_step"] == run["accumulation_step"][t]
        applied += [t] if told["applied"] else []
        assert_near(flat(state.params), run["w"][t], t)
        if told["micro_step"]:
            # MindSpore adds g/3, we divide the sum at the end; replicas hold their own sums.
            window = state.opt_state.inner_state.window
            if isinstance(window, boostax.PerReplica):
                window = jax.tree.map(lambda x: x.mean(0), window.local)
            np.testing.assert_allclose(flat(window.grads) / 3, run["accum"][t], **CLOSE)
    assert applied == [3, 7, 10]


@pytest.mark.parametrize("scales", [False, True])
def test_accumulation_in_the_train_cell_equals_mindspore(arrays, train, scales):
    """Also with the scaler inside the window."""
    run, params, batches = prepared(arrays("boost_cell_accum3_graph.npz"))

    def make_tx(reduced, axis):
        inner = scaled(reduced(MOMENTUM), axis_name=axis) if scales else reduced(MOMENTUM)
        return boostax.accumulate(inner, 3, axis_name=axis)

    for t, (state, told) in enumerate(train(make_tx, params, batches)):
        assert told["micro_step"] == run["accumulation_step"][t]
        assert_near(flat(state.params), run["w"][t], t)


@pytest.mark.parametrize("every", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_gradient_accumulation_equals_mindspore(arrays, optimizer, every):
    run = arrays("grad_accumulation.npz")
    name = f"{optimizer}_k{every}"
    tx = boostax.accumulate({"sgd": optax.sgd(0.1), "momentum": MOMENTUM}[optimizer], every)
    start = {"w": jnp.asarray(run["w0"]), "b": jnp.asarray(run["b0"])}
    grads = [{"w": w, "b": b} for w, b in zip(run["gw"], run["gb"], strict=True)]
    for t, (params, state) in enumerate(walk(tx, start, grads)):
        assert int(state.micro_step) == run[f"{name}_step"][t]
        assert bool(boostax.train.has_updated(state)) == (run[f"{name}_step"][t] == 0)
        for leaf in "wb":
            assert_near(params[leaf], run[f"{name}_{leaf}"][t], t)
        if state.micro_step:
            mean = state.window.grads["w"] / every
            np.testing.assert_allclose(mean, run[f"{name}_acc_w"][t], **CLOSE)


FREEZE_OPTIMIZERS = {
    "freeze_sgd": (optax.sgd(0.1), "shared"),
    "freeze_momentum": (MOMENTUM, "per_group"),
    "freeze_momentum, configured": (MOMENTUM, "per_group"),
    "freeze_none_strategy_momentum": (MOMENTUM, "per_group"),
    # MindSpore's list of rates is by step of the run, whatever is frozen.
    "freeze_dynlr_sgd": (optax.sgd(lambda step: 0.1 * (step + 1)), "shared"),
    "plain_momentum": (MOMENTUM, "shared"),
}


@pytest.mark.parametrize("name", FREEZE_OPTIMIZERS)
def test_freezing_equals_mindspore(arrays, train, name):
    """Group i of ``FreezeOpt`` trains params i and later; without a strategy they take turns."""
    run, params, batches = prepared(arrays("freeze_training_graph.npz"))
    optimizer, moments = FREEZE_OPTIMIZERS[name]
    name, _, configured = name.partition(", ")
    own = {"freeze_none_strategy_momentum": [0, 1, 2], "plain_momentum": [0]}
    depths = own.get(name, run["strategy"])

    def make_tx(reduced, axis):
        freeze = {"groups": {"0": 0, "1": 1, "2": 2}, "moments": moments}
        if configured:
            config = json.dumps({"freeze": freeze | {"kind": run["strategy"].tolist()}})
            return boostax.auto(json.loads(config)).optimizer(reduced(optimizer), params)
        how = {"moments": moments, "repeat": True}
        return boostax.scheduled_freeze(reduced(optimizer), [0, 1, 2], depths, **how)

    expected = run[f"{name}_w"]
    states = list(train(make_tx, params, batches[: len(expected)]))
    for t, (state, told) in enumerate(states):
        assert told["frozen_groups"] == depths[t % len(depths)]
        # Rates of up to 1.2 make more of a rounding.
        assert_near(flat(state.params), expected[t], t, 4e-6 if "dynlr" in name else 1e-6)
        if f"{name}_loss" in run:
            np.testing.assert_allclose(told["loss"], run[f"{name}_loss"][t], rtol=1e-5)
    if f"{name}_opt_global_step" in run:
        # Ours counts in how many steps each group was trained; theirs are those of each depth.
        trained = states[-1][0].opt_state.trained_steps
        assert trained.tolist() == np.cumsum(run[f"{name}_opt_global_step"]).tolist()
