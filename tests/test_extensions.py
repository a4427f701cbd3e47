"""A codec, a gate and a schedule of a user's: one file and one line each, and treated like ours."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bound_logits import bound_logits
from contract_cases import each_law, half
from extensions.drop_spikes import drop_spikes
from extensions.signs import Signs, sign_reduce
from extensions.thaw import thaw
from median_gate import median_gate
from reducing import at_once
from training import walk

import boostax
from boostax.testing import LAWS, PAIR_LAWS, Case

THAWING = boostax.freeze_schedule(thaw, total_steps=12)
TWO = boostax.freeze_schedule(lambda step: min(thaw(step), 1), total_steps=12)
REDUCES = {"reduces": True, "compresses": True, "by_shard": True}
CASES = [
    Case("signs", lambda inner, axis: optax.chain(sign_reduce(axis), inner), **REDUCES),
    Case("drop_spikes", lambda inner, axis: drop_spikes(inner, axis_name=axis), skips=True),
    Case("thaw", lambda inner, axis: boostax.scheduled_freeze(inner, half, TWO, repeat=True)),
]


def late(case, law):
    """Freezing by a table of one's own is that of any other: once in the quick run."""
    return (case.name == "thaw" and law != "keeps_types_and_traces_once") or law in SLOW


# Of a single leaf nothing can be frozen.
SINGLE_LEAF = ("works_in_float64", "passes_masked_nodes", "meta_gradients_are_finite")
# What the gate and the reduction do around any rule, under ours in every run.
SLOW = (PAIR_LAWS.keys() - {"skip_inserted_anywhere_never_was"}) | set(
    "any_placement_means_the_same any_placement_means_the_same_on_an_explicit_mesh "
    "results_are_typed_equal scan_eager_and_disabled_jit_agree vmap_over_an_ensemble "
    "works_in_every_optax_wrapper works_in_float64 meta_gradients_are_finite "
    "sharded_arrays_under_plain_jit skip_is_agreed_in_any_placement".split()
)


@each_law(CASES, late, lambda case, law: case.name == "thaw" and law in SINGLE_LEAF)
def test_it_keeps_the_contract(case, law):
    law(case)


def test_a_codec_that_loses_what_it_does_not_send_breaks_the_law():
    class Forgetful(Signs):
        def reduce(self, leaves, state, names):
            message = super().reduce(leaves, state, names)
            return message._replace(residuals=[jnp.zeros_like(x) for x in leaves])

    sent = lambda axis: boostax.reduce.compress(Forgetful(), name="forgetful", axis_name=axis)  # noqa: E731
    make = lambda inner, axis: optax.chain(sent(axis), inner)  # noqa: E731
    with pytest.raises(AssertionError, match=r"of the gradients is lost at call 0"):
        LAWS["what_is_not_sent_waits"](Case("forgetful", make, **REDUCES))


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_a_majority_is_the_sign_of_most(replicas):
    grads = np.float32(np.random.default_rng(0).normal(size=(replicas, 4, 5)))
    found, _ = at_once(sign_reduce("data", majority=True))(grads)
    expected = np.broadcast_to(np.sign(np.sign(grads).sum(0)), grads.shape)
    np.testing.assert_array_equal(found, expected)


def test_explain_knows_them():
    """Name and role of parts that it has never seen."""
    inner = optax.chain(sign_reduce("data"), optax.adam(1e-3))
    tx = optax.chain(optax.clip(1.0), drop_spikes(inner, axis_name="data"))
    parts = {part.name: part for part in boostax.explain(tx, jnp.zeros(256)).parts}
    assert (parts["sign_reduce"].role, parts["drop_spikes"].role) == ("compressed", "check")
    assert "Signs" not in parts


def test_the_rules_of_order_hold_for_them():
    late = optax.chain(drop_spikes(optax.sgd(0.1)), optax.add_decayed_weights(0.1))
    (finding, *_) = boostax.explain(late, jnp.zeros(4)).findings
    assert finding.what == "add_decayed_weights after drop_spikes"
    twice = optax.chain(sign_reduce("data"), boostax.all_reduce("data"), optax.sgd(0.1))
    (finding,) = boostax.explain(twice, jnp.zeros(4)).findings
    assert finding.what == "all_reduce after sign_reduce"


def test_a_step_takes_them_together():
    mesh = jax.make_mesh((4,), ("data",))
    gated = drop_spikes(optax.chain(sign_reduce("data"), optax.sgd(0.05)), axis_name="data")
    tx = boostax.scheduled_freeze(gated, {"w": 0, "v": 1, "b": 2}, THAWING)

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] @ params["v"] + params["b"] - 1.0) ** 2)

    params = {"w": jnp.ones((3, 3)), "v": jnp.ones(3), "b": jnp.zeros(())}
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name="data")
    state, losses = step.init(params), []
    batch = jax.random.normal(jax.random.key(0), (16, 3)) * 0.1
    for call in range(12):
        state, report = step(state, batch * jnp.where(call == 5, jnp.nan, 1.0))
        losses.append(float(report["loss"]))
        if call == 3:
            assert bool((state.params["w"] == params["w"]).all())
    assert int(boostax.metrics(state.opt_state)["skipped"]) == 1 and losses[-1] < losses[0] / 2
    assert not bool((state.params["w"] == params["w"]).any())


def test_a_rule_that_says_no_bool_is_refused():
    tx = boostax.gate(optax.sgd(0.1), lambda grads, own, params: (1.0, own), name="always")
    with pytest.raises(TypeError, match=r"always: run must be a bool scalar, got .*"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


def test_a_role_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"describe: role must be 'scaler' or .*, got 'clipper'"):
        boostax.describe("mine", "clipper")


def accepted(norms, window):
    """Whether each norm is below the limit of ``median_gate``, in float64."""
    recorded, found = [], []
    for norm in np.float64(norms):
        last, limit = np.array(recorded[-window:]), np.inf
        if len(recorded) >= window // 2:
            center = np.median(last)
            limit = center + 6 * max(1.4826 * np.median(abs(last - center)), center / 100)
        found.append(bool(np.isfinite(norm) and norm <= limit))
        recorded += [norm] * found[-1]
    return np.array(found)


def test_a_gate_by_the_median_skips_the_steps_that_numpy_skips():
    """The others are the run without these steps, bit for bit."""
    norms = np.float32(np.exp(0.1 * np.random.default_rng(0).normal(size=80)))
    norms[[20, 21, 35]] *= 50
    norms[[12, 30]] = np.nan, np.inf
    tx, zero = median_gate(optax.adam(0.1), window=16), jnp.float32(0)

    def call(carry, grad):
        params, state = carry
        return boostax.apply_gradients(tx, grad, state, params), state.rule_state.count

    run = jax.jit(lambda grads: jax.lax.scan(call, (zero, tx.init(zero)), grads))

    (params, state), counts = run(norms)
    expected = accepted(norms, window=16)
    np.testing.assert_array_equal(np.diff(counts, append=state.rule_state.count), expected)
    assert 5 <= (~expected).sum() < 12
    (alone, kept), _ = run(norms[expected])
    results = (params, state.rule_state), (alone, kept.rule_state)
    jax.tree.map(np.testing.assert_array_equal, *results)


SHAPE, MAXIMA = (6, 4, 3), np.array([50.0, 400.0, 1600.0, np.inf])


def test_a_bound_on_logits_scales_heads_after_the_update():
    """MuonClip, in float64: each weight is the square root of its factor times p + u."""
    random = np.random.default_rng(0)
    drawn = {name: random.normal(size=(2, *SHAPE)) for name in ("query", "key", "value")}
    with jax.enable_x64(True):
        drawn_64 = {name: jnp.asarray(x) for name, x in drawn.items()}
        params, grads = ({"layer": {k: x[i] for k, x in drawn_64.items()}} for i in (0, 1))
        tx = bound_logits(optax.sgd(0.5), tau=100.0)
        state, maxima = tx.init(params), {"layer": jnp.asarray(MAXIMA)}
        updates, _ = tx.update(grads, state, params, max_logits=maxima)
        new = optax.apply_updates(params, updates)["layer"]
    factors = np.array([1.0, 0.5, 0.25, 1.0])[:, None]
    for name, (p, g) in drawn.items():
        expected = (p - 0.5 * g) * (1 if name == "value" else factors)
        np.testing.assert_allclose(new[name], expected, rtol=1e-14, atol=1e-14)


LAYOUTS = [
    ((6, 12), (6, 12), -1),  # heads and their elements in one dimension
    ((4, 8, 3), (4, 8, 3), -2),  # heads first
    ((6, 4, 3), (6, 2, 3), -2),  # query heads that share a key head
    ((6, 4, 5), (6, 4, 7), -2),  # a rotary part in queries, values in keys
    ((2, 6, 4, 3), (6, 4, 3), -2),  # stacked layers
]


@pytest.mark.parametrize(("query", "key", "axis"), LAYOUTS)
def test_a_bound_on_logits_refuses_other_layouts(query, key, axis):
    params = {"layer": {"query": jnp.ones(query), "key": jnp.ones(key)}}
    tx, maxima = bound_logits(optax.sgd(0.1), axis=axis), {"layer": jnp.full(4, 200.0)}
    with pytest.raises(ValueError, match=r"must have 4 heads of equal size .* Reshape them"):
        tx.update(params, tx.init(params), params, max_logits=maxima)


def test_a_bound_on_logits_works_in_a_loop_with_a_loss_scale():
    """It takes the largest logits of the micro-batches; a skipped step scales nothing."""

    def loss_fn(params, x):
        q, k = (jnp.einsum("bd,dhe->bhe", x, params["layer"][n]) for n in ("query", "key"))
        scores = jnp.einsum("bhe,che->hbc", q, k)
        return jnp.mean(scores**2), {"layer": scores.max((1, 2))}

    tx = boostax.dynamic_loss_scale(bound_logits(optax.sgd(0.0), tau=1.0), init_scale=8.0)
    value_and_grad = boostax.value_and_grad(loss_fn, has_aux=True, microbatches=2)
    params = {"layer": {n: jnp.ones(SHAPE) for n in ("query", "key")}}
    state, x = tx.init(params), np.float32([[1.0] * 6, [2.0] * 6])
    for batch, expected in ((x, 1.0), (x * np.inf, 1.0)):
        (_, maxima), grads = value_and_grad(params, state, batch)
        largest = jax.tree.map(lambda m: m.max(0), maxima)
        params, state = boostax.apply_gradients(tx, grads, state, params, max_logits=largest)
        _, found = loss_fn(params, x)
        np.testing.assert_allclose(found["layer"], expected, rtol=1e-6)
    assert int(boostax.metrics(state)["skipped"]) == 1


def test_a_saved_state_of_theirs_moves_to_another_chain():
    """What they keep goes along, by class, as that of ours does."""
    old = drop_spikes(optax.adam(1e-2))
    params, state = walk(old, {"w": jnp.ones(3)}, [{"w": jnp.full(3, x)} for x in (1.0, 2.0)])[-1]
    new = boostax.dynamic_loss_scale(drop_spikes(optax.adam(1e-2)))
    moved, report = boostax.migrate_state(state, new, params)
    jax.tree.map(np.testing.assert_array_equal, moved.inner_state, state)
    assert "dropped:\n  nothing" in str(report)


class HeavyBall(NamedTuple):
    """A sum of gradients, in units of the scale that is inside."""

    velocity: Any


def heavy_ball():
    def update(grads, state, params=None):
        velocity = jax.tree.map(lambda v, g: 0.5 * v + g, state.velocity, grads)
        return velocity, HeavyBall(velocity)

    init = lambda params: HeavyBall(jax.tree.map(jnp.zeros_like, params))  # noqa: E731
    return optax.GradientTransformation(init, update)


def test_a_sum_of_theirs_in_units_of_a_scale_does_not_move_into_the_scaler():
    params = {"w": jnp.ones(3)}
    old = optax.chain(heavy_ball(), boostax.static_loss_scale(optax.sgd(0.1), 4.0))
    new = boostax.static_loss_scale(optax.chain(heavy_ball(), optax.sgd(0.1)), 4.0)
    said = r"HeavyBall of gradients scaled by \[\[4\.0\]\] at 0, but by"
    with pytest.raises(ValueError, match=said):
        boostax.migrate_state(old.init(params), new, params)


def test_a_configuration_names_them():
    """By the names of their factories; where they stand follows from what they say they are."""
    told = {"loss_scale": "dynamic", "accumulate": 2, "sign_reduce": True, "clip": 1.0}
    own = (sign_reduce, drop_spikes)
    boost = boostax.auto(told | {"drop_spikes": {"factor": 4.0}}, factories=own)
    found = boostax.explain(boost.optimizer(optax.sgd(0.1), axis_name="data"), jnp.zeros(8))
    chain = ["dynamic_loss_scale", "accumulate", "drop_spikes", "sign_reduce"]
    assert [part.name for part in found.parts][:5] == [*chain, "clip_by_global_norm"]
    assert not found.findings
    with pytest.raises(ValueError, match="axis_name must be given with the reduction 'sign_red"):
        boost.optimizer(optax.sgd(0.1))


def test_what_a_configuration_cannot_place_is_refused():
    def rate(size):
        return optax.scale(size)

    def mine():
        return optax.GradientTransformation(optax.init_empty_state, lambda g, s, p=None: (g, s))

    for data, factory, text in (
        ({"rate": {"size": 0.1}}, rate, "auto: rate must be described .*, got 'rate'"),
        ({"mine": True}, mine, "auto: mine must be described .*, got 'unknown'"),
        ({"drop_spikes": {"faktor": 4.0}}, drop_spikes, "of drop_spikes must be among 'factor'"),
        ({"reduce": "adasum", "sign_reduce": True}, sign_reduce, "reduce must be left out here"),
        ({"accumulate": 2}, boostax.accumulate, "factories must be functions of your own"),
    ):
        with pytest.raises(ValueError, match=text):
            boostax.auto(data, factories=(factory,))
