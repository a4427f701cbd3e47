"""Carried leaves: what a loss hands out as a gradient is the new value, and stays one."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lanes import spread
from reducing import mesh_of
from training import fit

import boostax
from boostax.testing._mapped import MODES, on_replicas

OWG = nn.fp8_ops.OVERWRITE_WITH_GRADIENT
ROWS, FEATURES = 32, 8


class Net(nn.Module):
    """Two products in fp8, with short histories."""

    @nn.compact
    def __call__(self, x):
        dot = functools.partial(nn.fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=4)
        x = nn.Dense(FEATURES, dot_general_cls=dot)(x)
        return nn.Dense(4, dot_general_cls=dot)(nn.relu(x))


NET = Net()
RNG = np.random.default_rng(0)
X = (RNG.normal(size=(6, ROWS, FEATURES)) * np.geomspace(1, 100, ROWS)[:, None]).astype(np.float32)
BATCHES = [{"x": x, "y": RNG.normal(size=(ROWS, 4)).astype(np.float32)} for x in X]
START = jax.jit(NET.init)(jax.random.key(0), X[0])


def loss_fn(variables, batch):
    return jnp.mean((NET.apply(variables, batch["x"]) - batch["y"]) ** 2)


PLAIN_GRADS = jax.jit(jax.grad(loss_fn))


def chain(axis, optimizer):
    return optax.chain(*([boostax.all_reduce(axis)] if axis else []), optimizer)


def opened(step, state, batch):
    """One call, and the params before and after it."""
    before = jax.device_get(step.common_params(state))
    state, metrics = step(state, batch)
    return state, metrics, before, jax.device_get(step.common_params(state))


DIVIDED = [
    *((microbatches, 1, {}) for microbatches in (1, 2, 4)),
    (4, 1, {"policy": boostax.policy("O2", dtype="bfloat16")}),
    (2, 4, {}),
    (2, 4, {"shard_optimizer": True}),
    (2, 4, {"param_specs": True}),
]


@pytest.mark.parametrize(("microbatches", "replicas", "options"), DIVIDED)
def test_histories_of_micro_batches_and_replicas_are_of_one_batch(microbatches, replicas, options):
    """Bit for bit, those of cotangents included. The optimizer made -0.04 of an amax of 9.9."""
    axis = "data" if replicas > 1 else None
    where = {"mesh": mesh_of(data=replicas), "axis_name": axis} if axis else {}
    if "param_specs" in options:
        spec = lambda path, x: jax.P("data") if x.ndim == 2 else jax.P()  # noqa: E731
        options = {"param_specs": jax.tree_util.tree_map_with_path(spec, START)}
    inner = chain(axis, optax.adamw(1e-2, weight_decay=0.1))
    inner = boostax.dynamic_loss_scale(inner, init_scale=1.0, axis_name=axis)
    tx = boostax.carry(inner, axis_name=axis)
    step = boostax.make_train_step(loss_fn, tx, microbatches=microbatches, **where, **options)
    state = step.init(START)
    low = options.get("policy")
    whole = jax.jit(jax.grad(low.compute(loss_fn))) if low else PLAIN_GRADS
    for batch in BATCHES[:3]:
        state, metrics, before, after = opened(step, state, batch)
        assert bool(metrics["applied"])
        chex.assert_trees_all_equal(after[OWG], whole(before, batch)[OWG])
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after["params"], START["params"])
    assert min(jax.tree.leaves(moved)) > 0
    amax = after[OWG]["Dense_0"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    np.testing.assert_allclose(amax[0], np.abs(BATCHES[2]["x"]).max(), 1e-2 if low else 0)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_gradients_beside_carried_leaves_are_those_of_one_batch(microbatches):
    """Adam, which the other tests train by, is blind to a factor."""
    oracle = boostax.value_and_grad(loss_fn, microbatches=microbatches)
    _, grads = jax.jit(oracle)(START, boostax.carry(optax.sgd(1.0)).init(START), BATCHES[0])
    expected = PLAIN_GRADS(START, BATCHES[0])["params"]
    chex.assert_trees_all_close(grads["params"], expected, rtol=1e-5, atol=1e-4)


@jax.custom_vjp
def seen(x, amax, count, bias):
    """Hands out as gradients: the largest magnitude, the rows, the last row's sum."""
    return x


def _seen_bwd(kept, g):
    x, amax, count, bias = kept
    new = jnp.abs(x).max(), len(x) + 0 * x[0, 0], x[-1].sum()
    return g, *(n.astype(old.dtype) for n, old in zip(new, (amax, count, bias), strict=True))


seen.defvjp(lambda x, *others: (x, (x, *others)), _seen_bwd)

RULES = {"router/bias": "last", "count": "sum", "amax": "max"}
PLAIN = {
    "w": jnp.float32([1.0, -1.0]),
    "carried": {"amax": jnp.float32(0.25), "count": jnp.float32(1.5)},
    "router": {"bias": jnp.float32(0.5)},
}
DATA = np.random.default_rng(1).normal(size=(9, 8, 2)).astype(np.float32)


def carried_of(params):
    return params["carried"]["amax"], params["carried"]["count"], params["router"]["bias"]


def watched(params, x):
    x = seen(x, *carried_of(params))
    return jnp.mean((x @ params["w"] - 1) ** 2)


def expected(calls):
    """Of all rows of some calls: the rules as they read."""
    rows = np.concatenate(calls)
    return float(np.abs(rows).max()), float(len(rows)), calls[-1][-1].sum()


def of(params):
    return tuple(map(float, carried_of(params)))


def assert_of(params, numbers):
    np.testing.assert_allclose(of(params), numbers, rtol=1e-6)


def scaler(tx, axis):
    return boostax.dynamic_loss_scale(tx, axis_name=axis)


def window(tx, axis):
    return boostax.accumulate(tx, 3, axis_name=axis)


NESTINGS = {
    "plain": (1, lambda opt, axis: opt),
    "scaler": (1, scaler),
    "window": (3, window),
    "window in scaler": (3, lambda opt, axis: scaler(window(opt, axis), axis)),
    "scaler in window": (3, lambda opt, axis: window(scaler(opt, axis), axis)),
}


@pytest.mark.parametrize(("nesting", "axis"), spread(NESTINGS, ["data", None]))
def test_rules_hold_over_windows_micro_batches_and_replicas(nesting, axis):
    every, build = NESTINGS[nesting]
    tx = boostax.carry(build(chain(axis, optax.adamw(0.1)), axis), RULES, axis_name=axis)
    where = {"mesh": mesh_of(data=2), "axis_name": axis} if axis else {}
    step = boostax.make_train_step(watched, tx, microbatches=2, **where)
    state, calls = step.init(PLAIN), []
    for x in DATA[: 2 * every + 1]:
        state, metrics, before, after = opened(step, state, x)
        calls.append(x)
        assert bool(metrics["applied"]) == (len(calls) == every)
        if len(calls) < every:
            chex.assert_trees_all_equal(before, after)
        else:
            assert_of(after, expected(calls))
            calls = []
    if calls:
        for _ in range(2):
            state = step.flush(state)
            assert_of(state.params, expected(calls))


@pytest.mark.parametrize("nesting", [x for x in NESTINGS if "scaler" in x])
@pytest.mark.parametrize("bad", [np.nan, np.inf, "overflow"])
def test_a_skipped_step_leaves_carried_leaves(nesting, bad):
    """Also where only a carried value overflowed: fp8 clips what its gradients would show."""
    every, build = NESTINGS[nesting]
    tx = boostax.carry(build(optax.adamw(0.1), None), RULES)

    @jax.jit
    def call(params, state, x, ruin):
        _, grads = boostax.value_and_grad(watched)(params, state, x)
        if bad == "overflow":
            grads["carried"]["amax"] = jnp.where(ruin, jnp.inf, grads["carried"]["amax"])
        else:
            grads["w"] = jnp.where(ruin, bad, grads["w"])
        return boostax.apply_gradients(tx, grads, state, params)

    params, state = PLAIN, tx.init(PLAIN)
    for x in DATA[:every]:
        params, state = call(params, state, x, False)
    assert_of(params, expected(list(DATA[:every])))
    kept = params
    for i, x in enumerate(DATA[3 : 3 + every]):
        params, state = call(params, state, 100 * x, i == 0)
    assert int(boostax.metrics(state)["skipped"]) == 1
    chex.assert_trees_all_equal(params, kept)
    # The window that drops one takes one more; the one that is dropped begins anew.
    rest = list(DATA[6:9])[: every if nesting != "window in scaler" else 1]
    for x in rest:
        params, state = call(params, state, x, False)
    taken = [100 * x for x in DATA[4:6]] + rest if nesting == "window in scaler" else rest
    assert_of(params, expected(taken))


def test_a_value_that_is_not_finite_is_not_set_without_a_scaler():
    tx = boostax.carry(optax.sgd(0.1), RULES)
    grads = {"w": jnp.ones(2), "carried": {"amax": jnp.inf, "count": 2.0}, "router": {"bias": 1.0}}
    grads = jax.tree.map(jnp.float32, grads)
    step = jax.jit(functools.partial(boostax.apply_gradients, tx))
    params, _ = step(grads, tx.init(PLAIN), PLAIN)
    assert of(params) == of(PLAIN) and np.isfinite(params["w"]).all()
    np.testing.assert_allclose(params["w"], PLAIN["w"] - 0.1, rtol=1e-6)


def test_a_batch_that_weighs_nothing_says_nothing():
    def weighed(params, batch):
        x, mask = batch
        x = seen(x, *carried_of(params))
        return ((x @ params["w"]) ** 2 * mask).sum() / mask.sum(), boostax.Aux(weight=mask.sum())

    mask = np.float32([1, 0] * 4)  # the second micro-batch has none
    tx = boostax.carry(boostax.dynamic_loss_scale(optax.sgd(0.1)), RULES)
    step = boostax.make_train_step(weighed, tx, microbatches=2, has_aux=True)
    state, metrics = step(step.init(PLAIN), (DATA[0], mask))
    assert bool(metrics["applied"])
    assert_of(state.params, (np.abs(DATA[0][::2]).max(), 4, 0.5))


@pytest.mark.parametrize("driver", ["host", "switch"])
def test_carried_leaves_of_frozen_layers_rest(driver):

    def loss(params, x):
        return watched(params["a"], x) + watched(params["b"], 2 * x)

    groups = {"a": jax.tree.map(lambda _: 0, PLAIN), "b": jax.tree.map(lambda _: 1, PLAIN)}
    inner = boostax.carry(boostax.dynamic_loss_scale(optax.adamw(0.1)), RULES)
    tx = boostax.scheduled_freeze(inner, groups, 1)
    state, _ = fit(loss, tx, {"a": PLAIN, "b": PLAIN}, [DATA[0]], freeze_driver=driver)
    chex.assert_trees_all_equal(state.params["a"], PLAIN)
    assert_of(state.params["b"], expected([2 * DATA[0]]))


@pytest.mark.parametrize("mode", MODES)
def test_a_loop_of_ones_own(mode):
    """Plain ``jax.grad``, micro-batches by ``microbatch``, replicas by any mapping."""
    tx = boostax.carry(chain("data", optax.sgd(0.1)), RULES, axis_name="data")
    oracle = boostax.train.microbatch(jax.value_and_grad(watched), 2, rules=RULES)

    def call(params, x):
        _, grads = oracle(boostax.train.local_params(params, axis_name="data"), x)
        return boostax.apply_gradients(tx, grads, tx.init(params), params)[0]

    found = on_replicas(call, mode, DATA[:2].reshape(8, 2, 2), PLAIN)
    assert_of(jax.tree.map(lambda x: x[0], found), expected(list(DATA[:2])))
    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[i], found) for i in (0, 7)))  # noqa: B023


def test_params_of_each_replicas_own_have_the_same_carried_leaves():
    inner = boostax.reduce.local_updates(optax.sgd(0.1), axis_name="data", every=2)
    tx = boostax.carry(inner, RULES, axis_name="data")
    state, _ = fit(watched, tx, PLAIN, [DATA[0]], mesh=mesh_of(data=2), axis_name="data")
    assert np.ptp(np.asarray(state.params.local["w"]), axis=0).max() > 0
    for replica in range(2):
        assert_of(jax.tree.map(lambda x: x[replica], state.params.local), expected([DATA[0]]))  # noqa: B023


def test_stored_low_fp8_metadata_stays_f32():
    tx = boostax.carry(boostax.dynamic_loss_scale(optax.sgd(0.1)))
    step = boostax.make_train_step(loss_fn, tx, policy=boostax.policy("O3", dtype="bfloat16"))
    state = step.init(START)
    assert {x.dtype for x in jax.tree.leaves(state.params["params"])} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(state.params[OWG])} == {jnp.dtype("float32")}


SGD, FP8, OWN = optax.sgd(0.1), (loss_fn, START, BATCHES[0]), (watched, PLAIN, DATA[0])


REFUSED = [
    (SGD, FP8, "value_and_grad: opt_state .*tx = boostax.carry"),
    (boostax.dynamic_loss_scale(SGD), FP8, "value_and_grad: opt_state .*boostax.carry"),
    (boostax.dynamic_loss_scale(boostax.carry(SGD)), FP8, "dynamic_.*boostax.carry"),
    (optax.chain(boostax.carry(SGD)), FP8, "carry: .*apply_gradients"),
    # Names of one's own, which no other part knows.
    (boostax.dynamic_loss_scale(boostax.carry(SGD, RULES)), OWN, "carry: .*outermost"),
    (boostax.accumulate(boostax.carry(SGD, RULES), 2), OWN, "accumulate: inner .*outermost"),
]


@pytest.mark.parametrize(("tx", "run", "words"), REFUSED)
def test_what_would_take_a_value_for_a_gradient_is_refused(tx, run, words):
    loss, params, batch = run
    step = boostax.make_train_step(loss, tx)
    with pytest.raises(ValueError, match=words):
        step(step.init(params), batch)


CLIP = boostax.model.clip_by_global_norm(1.0)


@pytest.mark.parametrize("tx", [scaler(SGD, None), window(SGD, None), CLIP])
def test_a_loop_that_forgot_carry_is_refused(tx):
    with pytest.raises(ValueError, match=r"got the new value of a leaf at '_over.*boostax\.carry"):
        boostax.apply_gradients(tx, PLAIN_GRADS(START, BATCHES[0]), tx.init(START), START)


def test_an_optimizer_that_takes_no_extra_argument_gets_none():
    def update(updates, state, params=None):
        return updates, state

    tx = boostax.carry(optax.GradientTransformationExtraArgs(optax.init_empty_state, update), RULES)
    boostax.apply_gradients(tx, PLAIN, tx.init(PLAIN), PLAIN)


BAD_RULES = [
    (({"amax": "mean"},), ValueError, "rules must be 'max' or 'sum' or 'last'"),
    (("amax",), TypeError, "rules must be a mapping"),
    (({},), TypeError, "rules must be a mapping"),
    (({"": "max"},), TypeError, "rules must be a mapping from paths"),
    (({"amax": "max", "amaks": "max"},), ValueError, r"be paths of params, got \['amaks'\]"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), BAD_RULES)
def test_bad_rules(arguments, error, words):
    with pytest.raises(error, match=f"carry: .*{words}"):
        boostax.carry(optax.sgd(0.1), *arguments).init(PLAIN)


def test_replicas_that_would_part_are_told_of():
    """In a step of boostax's the axis is bound."""
    tx = boostax.carry(chain("data", optax.sgd(0.1)), RULES)
    (finding,) = boostax.explain(tx, PLAIN).findings
    assert finding.certain and "carry without the axis 'data'" in str(finding)
    boostax.make_train_step(watched, tx, mesh=mesh_of(data=2), axis_name="data")


def test_a_window_that_was_moved_out_of_a_state_is_not_gone_on_with():
    """Its values came with params that nobody has any more."""
    short = boostax.carry(boostax.accumulate(optax.sgd(0.1), 3), RULES)
    bare = boostax.carry(optax.sgd(0.1), RULES)
    call = lambda tx: jax.jit(functools.partial(boostax.apply_gradients, tx))  # noqa: E731
    gradient = jax.jit(jax.grad(watched))
    params, state = call(short)(gradient(PLAIN, 100 * DATA[0]), short.init(PLAIN), PLAIN)
    chex.assert_trees_all_equal(params, PLAIN)
    state = state._replace(inner_state=bare.init(PLAIN).inner_state)
    params, _ = call(bare)(gradient(PLAIN, DATA[1]), state, PLAIN)
    assert_of(params, expected([DATA[1]]))


def test_a_window_has_the_histories_of_its_rows():
    """Those of cotangents as of one call, whose mean loss is over half of the rows."""
    inner = boostax.accumulate(chain("data", optax.sgd(0.1)), 2, axis_name="data")
    tx = boostax.carry(inner, axis_name="data")
    state, _ = fit(loss_fn, tx, START, BATCHES[:2], mesh=mesh_of(data=2), microbatches=2)
    wanted = PLAIN_GRADS(START, jax.tree.map(lambda *x: np.concatenate(x), *BATCHES[:2]))[OWG]
    named = jax.tree.leaves_with_path(state.params[OWG])
    for (path, found), big in zip(named, jax.tree.leaves(wanted), strict=True):
        history_of_cotangents = "output_grad_amax" in jax.tree_util.keystr(path)
        np.testing.assert_array_equal(found, (2 if history_of_cotangents else 1) * big)
