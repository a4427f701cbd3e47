"""Spikes are refused or clipped by rules of accepted values alone, and leave no trace in them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from memory import reduction_bytes

import boostax
from boostax._core.costs import collectives
from boostax.precision import AdaGC, MedianLimit, SigmaLimit, ZClip, skip_spikes
from boostax.states import SpikesState
from boostax.testing import LAWS, Case, drawn, laws_for

TAKEN, CLIPPED, OVER, NOT_FINITE = range(4)
WINDOW = 16


def values(seed=0, size=80):
    """Norms that vary by a tenth, with spikes, and with what is not finite."""
    found = np.exp(0.1 * np.random.default_rng(seed).normal(size=size)).astype(np.float32)
    found[[20, 21, 35]] *= 50
    found[[12, 30]] = np.nan, np.inf
    return found


def follow(tx, grads, params=0.0, **extra):
    """The states after each step of a scan over gradients, stacked; and the last params."""
    params = jax.tree.map(jnp.float32, params)

    def step(carry, g):
        told = {name: of(g) for name, of in extra.items()}
        params, state = boostax.apply_gradients(drawn(tx), g, carry[1], carry[0], **told)
        return (params, state), state

    run = jax.jit(lambda grads: jax.lax.scan(step, (params, tx.init(params)), grads))
    (params, _), states = run(grads)
    return jax.device_get((states, params))


# The rules in NumPy: a class that is told a value and says its limit, and records what was taken.


class OfRing:
    def __init__(self, rule):
        self.rule, self.ring = rule, []

    def limit(self, value):
        del value
        if len(self.ring) < WINDOW // 2:
            return np.inf
        last = np.float64(self.ring[-WINDOW:])
        if isinstance(self.rule, MedianLimit):
            centre = np.median(last)
            spread = 1.4826 * np.median(abs(last - centre))
        else:
            centre, spread = last.mean(), last.std()
        return centre + self.rule.k * max(spread, self.rule.floor * abs(centre))

    def record(self, value):
        self.ring.append(value)


class OfMoments:
    def __init__(self, rule):
        self.rule, self.seen, self.mean, self.variance = rule, [], 0.0, 0.0

    def limit(self, value):
        if len(self.seen) < self.rule.warmup:
            return np.inf
        deviation = self.variance**0.5
        score = (value - self.mean) / deviation
        z = self.rule.z
        return self.mean + (z**2 / score if score > z else z) * deviation

    def record(self, value):
        self.seen.append(value)
        if len(self.seen) <= self.rule.warmup:
            self.mean, self.variance = np.mean(self.seen), np.var(self.seen)
        else:
            decay = self.rule.decay
            self.mean = decay * self.mean + (1 - decay) * value
            self.variance = decay * self.variance + (1 - decay) * (value - self.mean) ** 2


def expected(peer, values, action):
    """Limits and reasons of a rule in float64."""
    limits, reasons = [], []
    for value in np.float64(values):
        limit = peer.limit(value)
        over = value > limit
        limits.append(limit)
        if not np.isfinite(value):
            reasons.append(NOT_FINITE)
            continue
        reasons.append((OVER if action == "skip" else CLIPPED) if over else TAKEN)
        if action == "clip" or not over:
            peer.record(min(value, limit))
    return np.array(limits), np.array(reasons)


@pytest.mark.parametrize("action", ["skip", "clip"])
@pytest.mark.parametrize(
    "rule", [MedianLimit(), MedianLimit(2.0, 0.0), SigmaLimit(3.0), ZClip(warmup=9)], ids=str
)
def test_limits_are_those_of_numpy(rule, action):
    if rule.clips and action == "skip":
        with pytest.raises(ValueError, match=r"action must be 'clip' with ZClip\(z=2.5, .*'skip'"):
            skip_spikes(optax.sgd(1.0), rule=rule)
        return
    given = values()
    tx = skip_spikes(optax.sgd(1.0), rule=rule, action=action, window=WINDOW)
    states, _ = follow(tx, given)
    limits, reasons = expected(
        OfMoments(rule) if isinstance(rule, ZClip) else OfRing(rule), given, action
    )
    # Squares and roots in f32, and a sum of 16; both reduce to a few units of 6e-8.
    np.testing.assert_allclose(states.limit[reasons != NOT_FINITE], limits[reasons != NOT_FINITE],
                               rtol=2e-5)  # fmt: skip
    np.testing.assert_array_equal(states.reason, reasons)
    bad = (reasons == NOT_FINITE) | (reasons == OVER)
    np.testing.assert_array_equal(states.spikes, np.cumsum(bad))
    np.testing.assert_array_equal(states.clipped, np.cumsum(reasons == CLIPPED))
    np.testing.assert_array_equal(states.ran, ~bad)
    in_a_row = [0]
    for refused in bad:
        in_a_row.append(in_a_row[-1] + 1 if refused else 0)
    np.testing.assert_array_equal(states.spikes_in_a_row, in_a_row[1:])
    assert {NOT_FINITE, TAKEN} < set(reasons)


def test_leaves_are_clipped_to_their_running_norms_as_in_numpy():
    """AdaGC: global clipping first, then every leaf by itself."""
    rule, rng = AdaGC(1.1, 0.9, warmup=5, max_norm=1.5), np.random.default_rng(0)
    shapes = {"a": (3,), "b": (2, 2)}
    grads = {k: rng.normal(size=(20, *shape)).astype(np.float32) for k, shape in shapes.items()}
    grads["a"][11] *= 30
    grads["b"][14, 0, 0] = np.nan
    params = {k: np.zeros(shape) for k, shape in shapes.items()}
    norms, steps = dict.fromkeys(shapes, np.inf), 0
    want = {k: x.copy() for k, x in params.items()}
    for i in range(20):
        wide = {k: np.float64(g[i]) for k, g in grads.items()}
        size = {k: np.linalg.norm(g) for k, g in wide.items()}
        if not np.isfinite(sum(size.values())):
            continue
        total = np.hypot(*size.values())
        for k in shapes:
            bound = size[k] * min(1, 1.5 / total) if steps < 5 else min(size[k], 1.1 * norms[k])
            want[k] -= wide[k] * bound / size[k]
            norms[k] = min(norms[k], bound) if steps < 5 else 0.9 * norms[k] + 0.1 * bound
        steps += 1
    tx = skip_spikes(optax.sgd(1.0), rule=rule, action="clip")
    states, got = follow(tx, grads, params)
    for k in shapes:
        np.testing.assert_allclose(got[k], want[k], rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(states.own.norms[k][-1], norms[k], rtol=2e-5)
    assert states.spikes[-1] == 1 and states.own.accepted[-1] == 19
    # The leaf that is told is the one furthest over.
    np.testing.assert_allclose(states.value[11], np.linalg.norm(grads["a"][11]), rtol=1e-6)


def test_a_leaf_without_a_gradient_at_first_is_not_held_at_zero():
    """Defect guarded against: the running norm of such a leaf is zero, and a share of it too."""
    rule = AdaGC(warmup=2)
    grads = {"a": jnp.ones(6), "late": jnp.asarray([0.0, 0, 0, 1, 1, 1])}
    tx = skip_spikes(optax.sgd(1.0), rule=rule, action="clip")
    states, params = follow(tx, grads, {"a": 0.0, "late": 0.0})
    assert params["late"] < -1 and states.spikes[-1] == 0


# What is refused is as if it had never been.


def theirs(given, window, k=6.0):
    """The skip step of Levanter and MaxText in NumPy: every value enters the window."""
    ring, taken = [], []
    for value in np.float64(given):
        last = np.array(ring[-window:])
        full = len(last) >= window // 2
        taken.append(not full or bool(value <= last.mean() + k * max(last.std(), 1e-6)))
        ring.append(value)
    return np.array(taken)


def test_after_a_nan_the_next_step_is_taken_where_theirs_refuses_a_window():
    given = np.exp(0.1 * np.random.default_rng(1).normal(size=60)).astype(np.float32)
    given[20] = np.nan
    for rule in ("median", "sigma"):
        tx = skip_spikes(optax.sgd(1.0), rule=rule, window=WINDOW)
        states, _ = follow(tx, given)
        assert np.flatnonzero(~states.ran).tolist() == [20]
    refused = np.flatnonzero(~theirs(given, WINDOW))
    assert refused.tolist() == list(range(20, 20 + WINDOW + 1))


def test_a_second_spike_is_refused_where_the_first_has_widened_their_limit():
    given = np.exp(0.1 * np.random.default_rng(2).normal(size=60)).astype(np.float32)
    given[[30, 33]] = 100, 50
    for rule in ("median", "sigma"):
        states, _ = follow(skip_spikes(optax.sgd(1.0), rule=rule, window=WINDOW), given)
        assert np.flatnonzero(~states.ran).tolist() == [30, 33]
    assert np.flatnonzero(~theirs(given, WINDOW)).tolist() == [30]


@pytest.mark.parametrize("by", ["loss", "gradient", "update"])
def test_a_run_with_refused_steps_is_the_run_without_them_to_the_bit(by):
    # Of Adam's updates only what is not finite stands out: SGD.
    inner = optax.chain(optax.sgd(optax.linear_schedule(1.0, 0.9, 50), momentum=0.5))
    given = values(size=50)
    extra = {"value": lambda g: g + 1} if by == "loss" else {}
    tx = skip_spikes(inner, by=by, window=WINDOW)
    states, params = follow(tx, given, **extra)
    assert states.spikes[-1] >= 4
    kept, alone = follow(tx, given[states.ran], **extra)
    assert kept.spikes[-1] == 0 and params == alone
    last = lambda tree: jax.tree.map(lambda x: x[-1], tree)  # noqa: E731
    for name in ("own", "inner_state"):
        mine, others = last(getattr(states, name)), last(getattr(kept, name))
        jax.tree.map(np.testing.assert_array_equal, mine, others)


def test_a_resumed_run_ends_with_the_same_bits():
    tx = skip_spikes(optax.adam(0.1), window=WINDOW)
    step = jax.jit(lambda g, state, w: boostax.apply_gradients(tx, g, state, w))
    w, state = jnp.float32(0), tx.init(jnp.float32(0))
    saved = None
    for i, g in enumerate(values(size=40)):
        if i == 20:
            saved = jax.device_get((w, state))
        w, state = step(g, state, w)
    again, resumed = jax.tree.map(jnp.asarray, saved)
    for g in values(size=40)[20:]:
        again, resumed = step(g, resumed, again)
    jax.tree.map(np.testing.assert_array_equal, (w, state), (again, resumed))


def test_a_clipped_gradient_has_the_norm_of_the_limit_in_every_argument():
    """The extra argument ``grad`` too, and what an outer scaler still has to divide by."""

    def update(updates, state, params=None, *, grad, **extra):
        return updates, tuple(map(optax.tree.norm, (updates, grad)))

    zeros = jnp.zeros(()), jnp.zeros(())
    spy = optax.GradientTransformationExtraArgs(lambda params: zeros, update)
    scale = 8.0
    inner = skip_spikes(spy, rule=AdaGC(warmup=1), action="clip")
    for tx in (inner, skip_spikes(spy, action="clip", window=2)):
        outer = boostax.static_loss_scale(tx, scale)
        params, state = {"a": jnp.zeros(4)}, outer.init({"a": jnp.zeros(4)})
        for size in (0.25, 0.25, 5.0):
            grads = {"a": jnp.full(4, size * scale)}
            given = drawn(outer), grads, state, params
            params, state = boostax.apply_gradients(*given, grad=grads)
        limit = float(state.inner_state.limit)
        assert 0.5 < limit < 0.6 and int(state.inner_state.clipped) == 1
        np.testing.assert_allclose(state.inner_state.inner_state, limit, rtol=1e-6)


# Windows, scalers, replicas, steps.


def test_around_a_window_micro_steps_are_judged_and_inside_one_windows():
    given = np.ones(24, np.float32)
    given[[9, 10]] = 100
    around = skip_spikes(boostax.accumulate(optax.sgd(1.0), 2), window=4)
    states, params = follow(around, given)
    assert np.flatnonzero(~states.ran).tolist() == [9, 10] and params == -11
    inside = boostax.accumulate(skip_spikes(optax.sgd(1.0), window=4), 2)
    states, params = follow(inside, given)
    # Of twelve windows two hold a spike.
    assert states.inner_state.spikes[-1] == 2 and params == -10


def test_an_update_that_a_window_inside_holds_back_is_no_value():
    tx = skip_spikes(boostax.accumulate(optax.sgd(1.0), 2), by="update", window=4)
    states, _ = follow(tx, np.ones(12, np.float32))
    assert states.own.accepted[-1] == 6 and states.limit[-1] == pytest.approx(1.06)


def test_a_scaler_inside_is_refused_where_its_scale_would_be_in_the_value():
    scaled = boostax.dynamic_loss_scale(optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"inner must be without a loss scaler .*Put it around"):
        skip_spikes(boostax.accumulate(scaled, 2)).init(jnp.zeros(3))
    for by in ("loss", "update"):
        assert isinstance(skip_spikes(scaled, by=by).init(jnp.zeros(3)), SpikesState)


def test_by_the_loss_without_one_is_refused():
    tx = skip_spikes(optax.sgd(1.0), by="loss")
    match = r"value must be given with by='loss', got None\. .*value=loss\); loss=loss does as well"
    for nothing in ({}, {"loss": None}):
        with pytest.raises(ValueError, match=match):
            boostax.apply_gradients(tx, jnp.ones(3), tx.init(jnp.ones(3)), jnp.ones(3), **nothing)


def test_the_loss_may_come_as_loss_as_trainers_of_others_name_it():
    """Levanter's hands ``loss=`` to ``update``; where both come, ``value`` is the one."""
    tx = skip_spikes(optax.sgd(1.0), by="loss", window=WINDOW)
    told = {"value": lambda g: g + 1}
    named = {"loss": lambda g: g + 1}
    both = told | {"loss": lambda g: jnp.zeros_like(g)}
    one, other, third = (follow(tx, values(size=50), **extra)[0] for extra in (told, named, both))
    assert one.spikes[-1] >= 4
    for more in (other, third):
        jax.tree.map(np.testing.assert_array_equal, one, more)
    state = tx.init(jnp.ones(3))
    with pytest.raises(ValueError, match=r"loss must be shaped \(\), got \(1,\)"):
        boostax.apply_gradients(tx, jnp.ones(3), state, jnp.ones(3), loss=jnp.ones(1))


def quadratic(w, x):
    return jnp.mean((w - x) ** 2)


def test_by_the_loss_inside_a_window_is_refused():
    tx = boostax.accumulate(skip_spikes(optax.sgd(0.1), by="loss"), 2)
    with pytest.raises(ValueError, match=r"skip_spikes by the loss in a window: .*last call"):
        boostax.make_train_step(quadratic, tx)
    boostax.make_train_step(quadratic, skip_spikes(boostax.accumulate(optax.sgd(0.1), 2)))
    told = {"skip_spikes": {"by": "loss"}, "accumulate": 2}
    with pytest.raises(ValueError, match=r"skip_spikes\.by must be .* with accumulate, got 'loss'"):
        boostax.auto(told)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("by", ["loss", "gradient", "update"])
def test_replicas_refuse_the_same_step_and_send_four_bytes(mesh, by, check_vma):
    inner = optax.chain(boostax.all_reduce("data"), optax.sgd(0.1))
    tx = skip_spikes(inner, by=by, window=4, axis_name="data")
    how = {"mesh": mesh, "axis_name": "data", "check_vma": check_vma}
    step = boostax.make_train_step(quadratic, tx, **how)
    bare = boostax.make_train_step(quadratic, inner, **how)
    batch = jnp.ones(16)
    state = step.init(jnp.float32(0.0))
    sent = collectives(step.jaxpr(state, batch))
    alone = collectives(bare.jaxpr(bare.init(jnp.float32(0.0)), batch))
    more = sum(x.bytes * x.count for x in sent) - sum(x.bytes * x.count for x in alone)
    assert more == 4
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
    grads = jnp.arange(16.0).reshape(8, 2)

    def local(g):
        w = jnp.zeros(2)
        return boostax.apply_gradients(tx, g[0], tx.init(w), w)[1].value

    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P()))(grads)
    np.testing.assert_allclose(found, np.sqrt(np.square(grads).sum() / 8), rtol=1e-6)


BIG = {f"layer{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(4)}


def temporaries(tx):
    def step(grads, state, params):
        return boostax.apply_gradients(tx, grads, state, params, value=jnp.float32(1))

    state = jax.eval_shape(tx.init, BIG)
    lowered = jax.jit(step, donate_argnums=(1, 2)).lower(BIG, state, BIG)
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "options",
    [{"by": "loss"}, {"by": "gradient"}, {"action": "clip"}, {"rule": "adagc", "action": "clip"}],
    ids=str,
)
def test_no_temporary_beyond_those_of_the_bare_step(options):
    adam = optax.adam(1e-3)
    bare = temporaries(optax.with_extra_args_support(adam)) + reduction_bytes(BIG)
    assert temporaries(skip_spikes(adam, **options)) - bare <= 0.01 * 4 * 4 * 512**2


def test_explain_knows_it_as_a_check_and_a_move_takes_its_ring_along():
    old = skip_spikes(optax.adam(1e-2), window=4)
    assert boostax.explain(old, jnp.zeros(3)).parts[0].role == "check"
    params = {"w": jnp.ones(3)}
    state = old.init(params)
    for size in (1.0, 2.0, 3.0):
        params, state = boostax.apply_gradients(old, {"w": jnp.full(3, size)}, state, params)
    moved, report = boostax.migrate_state(state, boostax.dynamic_loss_scale(old), params)
    jax.tree.map(np.testing.assert_array_equal, moved.inner_state, state)
    assert "dropped:\n  nothing" in str(report)
    # A ring of another size begins anew, with its count.
    longer = skip_spikes(optax.adam(1e-2), window=8)
    moved, _ = boostax.migrate_state(state, longer, params)
    assert int(moved.own.accepted) == 0 and not moved.own.values.any()


# The other values and limits, by the laws that they could break.
OTHERS = {
    "by_update": {"by": "update"},
    "by_leaf": {"rule": "adagc", "action": "clip"},
    "zclip": {"rule": "zclip", "action": "clip"},
}
QUICK = {
    "keeps_types_and_traces_once",
    "skip_is_as_if_the_step_never_was",
    "results_are_typed_equal",
    "passes_masked_nodes",
    "takes_trees_without_arrays",
    "init_takes_shapes",
}


def case(name):
    def make(inner, axis):
        return skip_spikes(inner, axis_name=axis, **OTHERS[name])

    # An optimizer may make a good update of a bad gradient.
    return Case(f"skip_spikes_{name}", make, skips=name != "by_update")


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "law",
    [x if x in QUICK else pytest.param(x, marks=pytest.mark.long) for x in LAWS],
)
def test_contract(name, law):
    if law in laws_for(case(name)):
        LAWS[law](case(name))


def test_a_configuration_has_the_settings_of_a_rule():
    """As data, held to the rule that has them."""
    data = {"skip_spikes": {"rule": "zclip", "action": "clip", "z": 3.0, "warmup": 5}}
    given = boostax.auto(data).optimizer(optax.sgd(1.0))
    expected = skip_spikes(optax.sgd(1.0), rule=ZClip(z=3.0, warmup=5), action="clip")
    ends = []
    for tx in (given, expected):
        w, state = jnp.zeros(3), tx.init(jnp.zeros(3))
        for i in range(12):
            grads = jnp.full(3, 50.0 if i == 9 else 1.0 + 0.1 * (i % 3))
            w, state = boostax.apply_gradients(tx, grads, state, w)
        ends.append(w)
    np.testing.assert_array_equal(*ends)
    for wrong, message in (
        ({"rule": "median", "z": 3.0}, "z must be left out with rule 'median'"),
        ({"rule": "zclip", "action": "clip", "z": -1.0}, "z must be greater than 0"),
        ({"rule": "mean"}, "rule must be"),
    ):
        with pytest.raises(ValueError, match=message):
            boostax.auto({"skip_spikes": wrong})
