"""What leaves a gate is as finite as what went in, or was never taken."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawing import draws
from hypothesis import given
from hypothesis import strategies as st
from lanes import spread
from training import follow, walk

import boostax

ADAM = optax.adamw(0.1, weight_decay=0.5)
assert_same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
safe = functools.partial(boostax.static_loss_scale, scale=1.0)


def run(tx, calls, params, flush=False):
    """Params and state after ``(grads, extra)`` of each call."""
    each = {name: [extra[name] for _, extra in calls] for name in calls[0][1]}
    params, state = walk(tx, params, [grads for grads, _ in calls], **each)[-1]
    return boostax.flush(tx, state, params) if flush else (params, state)


def same_but_for_the_drop(found, without, dropped=1):
    """Params and inner state as without the window, which is counted."""
    (params, state), (expected, before) = found, without
    assert_same((params, state.inner_state.inner_state), (expected, before.inner_state.inner_state))
    assert int(boostax.metrics(state)["accumulate_skipped"]) == dropped
    assert int(state.inner_state.optimizer_steps) == int(before.inner_state.optimizer_steps)


ONE = jnp.ones(3)
GOOD = [(ONE, {}), (2 * ONE, {})]


@pytest.mark.parametrize(("normalize", "flush"), spread(["mean", "sum", "weight"], [False, True]))
def test_a_window_whose_narrow_sum_overflows_is_dropped(normalize, flush):
    """Each gradient fits f16, their sum does not; neither Adam nor its decay may see it."""
    weigh = lambda calls: [(g, {"weight": 1.0} if normalize == "weight" else {}) for g, _ in calls]  # noqa: E731
    options = {"normalize": normalize, "dtype": "float16"}
    tx = safe(boostax.accumulate(ADAM, 3 if flush else 2, **options))
    window = [(ONE, {}), (ONE, {})] + ([(ONE, {})] if flush else [])
    bad = jnp.float32([1.0, 6e4, 1.0])
    after = run(tx, weigh([*window, (bad, {}), (bad, {})]), ONE, flush)
    same_but_for_the_drop(after, run(tx, weigh(window), ONE))
    assert not boostax.train.has_updated(after[1])
    if not flush:
        last = run(tx, weigh([*window, (bad, {}), (bad, {}), *GOOD]), ONE)
        same_but_for_the_drop(last, run(tx, weigh([*window, *GOOD]), ONE))


def test_a_scaler_inside_sees_the_overflow_of_the_sum_and_lowers_the_scale():
    tx = boostax.accumulate(boostax.dynamic_loss_scale(ADAM, init_scale=4.0), 2, dtype="float16")
    params, state = run(tx, [(6e4 * ONE, {}), (6e4 * ONE, {})], ONE)
    assert params.tolist() == [1.0] * 3
    found = boostax.metrics(state)
    assert found["loss_scale"] == 2.0 and found["skipped"] == found["loss_scale_skipped"] == 1


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
    assert boostax.precision.all_finite(found[1])


# What an optimizer makes of good gradients.


def normalized():
    """Divides by the norm, with nothing to keep it from zero."""
    divide = lambda u, _: jax.tree.map(lambda x: x / optax.tree.norm(u), u)  # noqa: E731
    return optax.chain(optax.stateless(divide), optax.trace(0.9), optax.scale(-1))


checked = boostax.precision.check_updates
decayed = optax.chain(optax.add_decayed_weights(0.1), optax.clip_by_global_norm(1.0), ADAM)
LARGE, F16_TRACE = jnp.float32([1.0, 1e6]), optax.trace(0.0, accumulator_dtype="float16")
# Optimizer, params, a good gradient, and one of which the optimizer makes what is not finite.
FAULTS = {
    "0/0": (normalized(), jnp.ones(2), jnp.float32([3.0, 4.0]), jnp.zeros(2)),
    "beyond the dtype": (optax.sgd(1.0), jnp.ones(2, jnp.float16), ONE[:2], LARGE),
    "into the state": (optax.chain(F16_TRACE, optax.clip(1.0)), jnp.ones(2), ONE[:2], LARGE),
}
NESTINGS = {
    "alone": checked,
    "scaler": lambda opt: safe(checked(opt)),
    "window": lambda opt: boostax.accumulate(checked(opt), 1),
    "both": lambda opt: safe(boostax.accumulate(checked(opt), 1)),
    "in a chain": lambda opt: optax.chain(optax.identity(), checked(opt)),
    "around a window": lambda opt: checked(boostax.accumulate(opt, 1)),
    "group scales": lambda opt: boostax.precision.group_loss_scale(checked(opt), 0, init_scale=1.0),
}


def innermost(state):
    """Moments and counters of the optimizer."""
    state = next(filter(is_check, jax.tree.leaves(state, is_leaf=is_check))).inner_state
    return state.inner_state if isinstance(state, boostax.states.AccumulateState) else state


def is_check(x):
    return isinstance(x, boostax.states.CheckUpdatesState)


@pytest.mark.parametrize(("nesting", "fault"), spread(NESTINGS, FAULTS))
def test_a_step_that_would_not_stay_finite_never_happened(nesting, fault):
    opt, params, good, bad = FAULTS[fault]
    tx = NESTINGS[nesting](opt)
    without = run(tx, [(good, {}), (good, {})], params)
    found = run(tx, [(good, {}), (bad, {})], params)
    once = run(tx, [(good, {})], params)
    assert_same((found[0], innermost(found[1])), (once[0], innermost(once[1])))
    metrics = boostax.metrics(found[1])
    assert metrics["skipped"] == 1 and not metrics["applied"]
    between = run(tx, [(bad, {}), (good, {}), (bad, {}), (good, {})], params)
    assert_same((between[0], innermost(between[1])), (without[0], innermost(without[1])))
    metrics = boostax.metrics(between[1])
    assert metrics["skipped"] == 2 and metrics["applied"]
    assert boostax.precision.all_finite((between[0], innermost(between[1])))
    # Nothing is wrong with the gradient, so the scale is not to blame.
    assert metrics.get("loss_scale_skipped", 0) == 0


def test_what_was_infinite_before_holds_nothing_back():
    """A masked param, the best loss before the first; but it may not spread."""
    params = {"mask": jnp.float32([-jnp.inf, 1.0]), "w": jnp.float32(1.0)}
    grads = {"mask": jnp.ones(2), "w": jnp.float32(1.0)}
    tx = safe(checked(optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau())))
    params_after, state = run(tx, [(grads, {"value": jnp.float32(2.0)})], params)
    assert params_after["mask"].tolist() == [-np.inf, 0.5] and float(params_after["w"]) == 0.5
    assert boostax.metrics(state)["skipped"] == 0
    tx = safe(checked(decayed))
    params_after, state = run(tx, [(grads, {}), (grads, {})], params)
    assert_same(params_after, params)
    assert boostax.metrics(state)["skipped"] == 2 and boostax.precision.all_finite(innermost(state))


def test_a_held_update_of_a_window_is_a_dropped_window():
    """Of 1 and -1 the mean is zero, and so is its norm."""
    tx = boostax.accumulate(checked(normalized()), 2)
    opposite = [(jnp.float32([x, 0.0]), {}) for x in (1.0, -1.0)]
    alike = [(jnp.float32([x, 0.0]), {}) for x in (1.0, 1.0)]
    params, state = run(tx, [*opposite, *alike], jnp.zeros(2))
    assert params.tolist() == [-1.0, 0.0]
    metrics = boostax.metrics(state)
    assert metrics["skipped"] == metrics["check_updates_skipped"] == metrics["optimizer_steps"] == 1
    params, state = run(tx, opposite[:1], jnp.zeros(2), flush=True)
    assert params.tolist() == [-1.0, 0.0]
    outside = checked(boostax.accumulate(normalized(), 4))
    params, state = run(outside, opposite, jnp.zeros(2), flush=True)
    assert params.tolist() == [0.0, 0.0] and state.skipped == 1
    # As never flushed: the window is open still.
    assert state.inner_state.micro_step == 2


@pytest.mark.parametrize("form", ["mean", "sum", "weight", "checked"])
def test_replicas_drop_a_window_together_or_hold_it_back(mesh, form):
    """The sum of one of eight overflows; checked, the state with it: none takes the micro-batch."""
    normalize = "mean" if form == "checked" else form
    options = {"normalize": normalize, "dtype": "float16", "axis_name": "data"}
    tx = boostax.accumulate(optax.chain(boostax.all_reduce("data"), ADAM), 2, **options)
    tx = safe(checked(tx, axis_name="data") if form == "checked" else tx, axis_name="data")

    def loss(w, x):
        return jnp.mean(w * x), boostax.Aux(weight=1.0 if normalize == "weight" else None)

    step = boostax.make_train_step(loss, tx, mesh=mesh, axis_name="data", has_aux=True)
    good, bad = jnp.ones(8), jnp.ones(8).at[3].set(6e4)
    kept = lambda: jax.device_get((state.params, state.opt_state.inner_state.inner_state))  # noqa: E731
    state, _ = follow(step, step.init(jnp.float32(1.0)), (good, good, bad))
    before = kept()
    state, metrics = step(state, bad)
    dropped = "check_updates_skipped" if form == "checked" else "accumulate_skipped"
    assert not metrics["applied"] and metrics[dropped] == 1
    assert_same(kept(), before)
    _, (*_, metrics) = follow(step, state, (good, good)[form == "checked" :])
    assert metrics["applied"] and metrics[dropped] == 1


def test_state_per_replica_wants_the_axis():
    tx = checked(optax.chain(boostax.top_k_reduce("data", density=0.5), optax.sgd(1.0)))
    with pytest.raises(ValueError, match=r"check_updates: axis_name must be .* got None"):
        tx.init(jnp.ones(4))


# What is counted.


def test_each_gate_has_one_counter_and_one_flag():
    """Defect guarded against: seven names counted skipped calls, and five reported the last one."""
    states = [x for x in vars(boostax.states).values() if hasattr(x, "_fields")]
    gates = [x for x in states if hasattr(x, "inner_ran")]
    assert gates == [x for x in states if {"applied", "skipped"} & {*x._fields}] and len(gates) == 7
    assert all({"applied", "skipped"} <= {*x._fields} for x in gates)


GATES = {
    "loss_scale": safe,
    "accumulate": functools.partial(boostax.accumulate, every=2),
    "check_updates": checked,
    "gate": lambda tx: boostax.gate(tx, lambda grads, own, _: (jnp.abs(grads.value()) < 4, own)),
}
nests = st.lists(st.sampled_from([*GATES]), unique=True, min_size=1, max_size=3)


@draws(10)
@given(nests, st.lists(st.sampled_from([1.0, -1.0, 0.0, 8.0, np.nan, 1e30]), max_size=9))
def test_a_call_is_applied_or_skipped_or_added_to_a_window(nest, grads):
    """The optimizer makes an infinity of a gradient of zero; a window counts what is inside it."""
    tx, zero = optax.stateless(lambda grads, params: 1 / grads), jnp.float32(0)
    for name in nest:
        tx = GATES[name](tx)
    outside = nest[nest.index("accumulate") :] if "accumulate" in nest else nest
    steps = [(zero, tx.init(zero)), *walk(tx, zero, jnp.float32(grads))]
    for (old, before), (new, state) in itertools.pairwise(steps):
        before, now = boostax.metrics(before), boostax.metrics(state)
        added = now.get("micro_step", 0) > before.get("micro_step", 0)
        assert added + now["applied"] + now["skipped"] - before["skipped"] == 1
        assert now["applied"] or new == old or jnp.isnan(old)
        parts = [f"{name}_skipped" for name in nest[::-1] if len(nest) > 1]
        assert parts == [x for x in now if x.endswith("_skipped")]
        assert not parts or now["skipped"] == sum(now[f"{name}_skipped"] for name in outside)
