"""Techniques tried on the user's own model: what is measured, what is said, what goes together."""

import itertools
import json
import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import boostax
from boostax.config.candidates import default_candidates
from boostax.config.config import BoostConfig
from boostax.config.measure import measure
from boostax.config.measurement import Measurement, Trial
from boostax.config.parts import Accumulate, Freeze, LossScale, Precision
from boostax.config.trial import Candidate, Setting, fetched, placed
from boostax.config.verdict import against, compared, judged, ranked, time_ratio, together
from boostax.train.compiled import TrainStep

SIZES = (4, 16, 16, 2)
SIX = {"steps": 6, "repeats": 2}


def mlp():
    rng = np.random.default_rng(0)
    return {
        f"layer_{i}": {
            "kernel": jnp.asarray(rng.normal(size=shape) / math.sqrt(shape[0]), jnp.float32),
            "bias": jnp.zeros(shape[1]),
        }
        for i, shape in enumerate(itertools.pairwise(SIZES))
    }


ENTRIES = sum(x.size for x in jax.tree.leaves(mlp()))
LEAVES = 2 * (len(SIZES) - 1)


def loss_fn(params, batch):
    x, y = batch
    for name in sorted(params):
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    return jnp.mean((x - y.astype(x.dtype)) ** 2)


def batch_of(index):
    x = np.random.default_rng(index).normal(size=(16, 4)).astype(np.float32)
    return x, np.tanh(x[:, :2] - x[:, 2:])


BATCHES = [batch_of(i) for i in range(8)]


class Clock:
    """Time that passes in calls alone, a second for each slice, however the machine feels."""

    now = 0.0

    def __call__(self):
        return self.now


CLOCK = Clock()


@pytest.fixture(scope="module", autouse=True)
def ticking():
    call = TrainStep.__call__

    def tick(step, state, batch):
        CLOCK.now += step.microbatches
        return call(step, state, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "__call__", tick)
        yield


def measured(candidates, *, inner=None, batches=BATCHES, loss=loss_fn, **options):
    inner = optax.sgd(0.3) if inner is None else inner
    options = {"clock": CLOCK, **SIX, **options}
    return measure(loss, inner, mlp(), batches, candidates=candidates, **options)


def row(found, name):
    (row,) = [row for row in found.rows if row.name == name]
    return row


def verdicts(found):
    return {row.name: row.verdict for row in found.rows}


# Time.


@pytest.fixture(scope="module")
def slower():
    return measured({"in slices": {"microbatches": 4}, "as it is": {}}, steps=8)


def test_what_is_slower_makes_fewer_calls_in_equal_time_and_is_not_recommended(slower):
    found = row(slower, "in slices")
    assert (found.time_ratio, found.time_error, found.step_seconds) == (4.0, 0.0, 4.0)
    assert found.steps == 2 and row(slower, "baseline").steps == 8
    assert found.verdict == "not recommended"
    assert found.reason.startswith("the loss is higher by 0.")
    assert "in equal time; time x4, memory x" in found.reason
    # In as many calls it would have been as good.
    same = row(slower, "baseline")
    assert found.equal_steps_loss == pytest.approx(same.loss, rel=1e-5)
    assert found.loss > 1.05 * same.loss
    assert slower.config == BoostConfig()


def test_what_is_slower_and_as_good_is_called_slower():
    found = row(measured({"in slices": {"microbatches": 4}}, inner=optax.sgd(0.0)), "in slices")
    assert found.verdict == "not recommended" and found.loss_difference == 0
    assert found.reason.startswith("slower, and the loss is no lower; time x4")


def test_what_changes_nothing_ends_with_the_same_bits(slower):
    """All candidates see the same batches in the same order, from the same params."""
    found = row(slower, "as it is")
    assert (found.loss_difference, found.loss_error, found.time_ratio) == (0.0, 0.0, 1.0)
    assert (found.memory_ratio, found.wire_ratio) == (1.0, 1.0)
    assert found.verdict == "no difference"
    assert found.reason.startswith("the loss is as good, and it saves less than 10%; time x1")


def test_what_is_faster_makes_at_most_four_times_the_calls():
    found = measured({"whole": {"microbatches": 1}}, base=BoostConfig(microbatches=8))
    assert row(found, "whole").time_ratio == 1 / 8
    assert row(found, "whole").steps == 24
    assert [row.name for row in found.rows] == ["whole", "baseline"]
    assert found.config == found.boost.config == BoostConfig()


def test_a_ratio_is_the_median_within_rounds():
    """A machine that slows down for a round does so for both."""
    ratio, error = time_ratio([2.0, 200.0, 2.0, 2.2], [1.0, 100.0, 1.0, 1.0])
    assert ratio == 2.0
    assert error == pytest.approx(0.1 * math.sqrt(math.pi / 8))


def test_a_time_in_doubt_is_a_loss_in_doubt():
    losses, base = np.array([1.0, 3.0]), np.array([2.0, 3.0])
    loss, difference, error = against(losses, base, in_doubt=1.2)
    assert (loss, difference) == (2.0, -0.5)
    assert error == pytest.approx(math.hypot(0.5, 1.2))
    assert against(losses, base, in_doubt=0.0)[2] == pytest.approx(0.5)


def test_a_ratio_in_doubt_is_a_number_of_calls_in_doubt():
    """A ratio of 2 give or take 0.2 is ten calls give or take one, and so much loss."""
    baseline = Candidate("a", BoostConfig(), setting(steps=20))
    slow = Candidate("b", BoostConfig(), setting(steps=20))
    seconds = {baseline: itertools.cycle([1.0]), slow: itertools.cycle([1.8, 2.0, 2.2, 2.0])}
    for candidate, times in seconds.items():
        candidate.seconds = times.__next__
    _, row = compared([baseline, slow], noise=1.2, repeats=4)
    error = math.sqrt(math.pi / 8) * statistics.stdev([2.0, 2.2, 2.0, 1.8])
    losses = slow.after(10) - baseline.losses
    batches = losses.std(ddof=1) / math.sqrt(len(losses))
    assert (row.steps, row.time_ratio) == (10, 2.0)
    assert row.time_error == pytest.approx(error)
    assert row.loss_error == pytest.approx(math.hypot(batches, 1.2 * 10 * error / 2))


def test_a_turn_holds_whole_windows_and_meetings(mesh):
    place = {"mesh": mesh, "axis_name": "data"}
    config = BoostConfig.from_dict({"accumulate": 3, "reduce": {"kind": "local", "every": 4}})
    assert Candidate("a", config, setting(steps=3, **place)).calls == 12
    # On one device there is nobody to synchronise with.
    with pytest.raises(ValueError, match="axis_name must be given with the reduction 'local'"):
        Candidate("b", config, setting(steps=3))
    assert Candidate("c", BoostConfig(), setting()).calls == 2
    # A partition for each leaf.
    leaves = len(jax.tree.leaves(setting().params))
    apart = BoostConfig.from_dict({"reduce": {"kind": "partial", "bucket_bytes": 1}})
    assert Candidate("d", apart, setting(steps=3, **place)).calls == leaves > 2


def setting(key=None, model_state=None, mesh=None, axis_name=None, **changed):
    given = dict(
        loss_fn=loss_fn, inner=optax.adam(1e-2), params=mlp(), batch=batch_of,
        held_out=BATCHES[:2], steps=4, clock=itertools.count().__next__,
        of_step={"mesh": mesh, "axis_name": axis_name},
        of_init={"key": key, "model_state": model_state},
    )  # fmt: skip
    return Setting(**(given | changed))


# Losses.


def test_the_baseline_is_the_run_by_hand_judged_on_batches_it_did_not_see():
    found = measured({}, steps=7)
    step = boostax.make_train_step(loss_fn, optax.sgd(0.3))
    state = step.init(mlp())
    losses = {}
    for call in range(8):
        # Of eight batches two are held out.
        state, _ = step(state, BATCHES[call % 6])
        losses[call + 1] = np.mean([loss_fn(state.params, batch) for batch in BATCHES[6:]])
    (only,) = found.rows
    assert only.loss == only.equal_steps_loss == pytest.approx(losses[7], rel=1e-6)
    assert found.noise == pytest.approx(
        max(abs(losses[7] - losses[6]), abs(losses[8] - losses[7])), rel=1e-4
    )
    assert found.config == BoostConfig()


def test_all_are_asked_for_the_same_batches_in_order():
    asked = []

    def batches(index):
        asked.append(index)
        return batch_of(index)

    candidates = {"one": {"centralize": True}, "two": {"clip": 0.5}}
    measured(candidates, batches=batches, steps=5, repeats=2)
    held_out, calls = list(range(20, 28)), list(range(5))
    assert asked[:8] == held_out
    # For the costs; 4 and 6 calls of the baseline for the noise.
    baseline = [0, *calls, *calls[:4], 5]
    turns = [0, 1] * 3 * 3
    assert asked[8:] == [*baseline, *[0, *calls] * 2, *turns]


@pytest.mark.long
def test_what_diverges_is_not_recommended():
    def steep(params, batch):
        return loss_fn(params, batch) + 1e3 * sum(jnp.sum(x**4) for x in jax.tree.leaves(params))

    base = BoostConfig.from_dict({"clip": 1e-3})
    found = measured({"no clip": {"clip": None}}, loss=steep, base=base)
    assert row(found, "no clip").verdict == "not recommended"
    assert row(found, "no clip").reason.startswith("the loss is not finite; time x1")
    assert row(found, "no clip").to_dict()["loss"] is None
    # And the other way round.
    found = measured({"clip": {"clip": 1e-3}}, loss=steep)
    assert found.config == base
    assert found.rows[0].reason.startswith("the loss is finite, and the baseline's is not")


def test_what_a_scaler_skips_before_its_first_step_does_not_count():
    scaled = {"loss_scale": {"init_scale": 2.0**24}, "policy": {"spec": "O2"}}
    found = measured({"float16": scaled})
    half, full = row(found, "float16"), row(found, "baseline")
    assert half.skipped >= 1
    assert half.reason.endswith(
        f"; {half.skipped} skipped while the loss scale settled, not counted"
    )
    assert half.equal_steps_loss == pytest.approx(full.loss, abs=found.noise)


@pytest.mark.long
def test_key_and_model_state_go_through_and_the_last_one_judges():
    def noisy(params, batch, *, key, model_state):
        loss = loss_fn(params, batch) + 0.01 * jax.random.normal(key) + 0.1 * model_state
        return loss, boostax.Aux(model_state=model_state + 1.0)

    found = measured(
        {"centralize": {"centralize": True}},
        loss=noisy, has_aux=True, steps=3, repeats=2,
        key=jax.random.key(0), model_state=jnp.float32(0.0),
    )  # fmt: skip
    assert row(found, "baseline").loss > 0.3
    # The same noise for all cancels in the difference.
    assert abs(row(found, "centralize").loss_difference) < 0.05
    assert row(found, "centralize").loss_error < 0.005


def test_losses_are_judged_in_f32_whatever_the_params_are_stored_in():
    # The next neighbours of 273 in bfloat16 are 272 and 274.
    params = {"w": jnp.ones(273, jnp.bfloat16)}
    judge = setting(loss_fn=lambda p, batch: jnp.sum(p["w"]), params=params)
    assert judge.losses(params, None).tolist() == [273.0, 273.0]


# Costs.


def ring(replicas):
    return 2 * (replicas - 1) / replicas


def test_wire_bytes_are_those_counted_by_hand(mesh):
    candidates = {
        "int16": {"reduce": {"kind": "int16"}},
        "local": {"reduce": {"kind": "local", "every": 4}},
    }
    found = measured(candidates, mesh=mesh, axis_name="data", repeats=2)
    loss = ring(8) * 4
    assert row(found, "baseline").wire_bytes == ring(8) * 4 * ENTRIES + loss
    # Once in four calls.
    assert row(found, "local").wire_bytes == ring(8) * 4 * ENTRIES / 4 + loss
    # Exchanged and gathered in 2 bytes, with a scale for each leaf and two numbers for the metrics.
    half = row(found, "int16")
    padded = math.ceil(ENTRIES / 8) * 8
    assert half.wire_bytes == ring(8) * (2 * padded + 4 * LEAVES + 4 * 2) + loss
    assert half.wire_ratio == half.wire_bytes / row(found, "baseline").wire_bytes
    assert half.verdict == "recommended"
    assert "it saves bytes sent; time x1, memory x" in half.reason
    assert "sent MB" in str(found)


def test_a_window_sends_once(mesh):
    found = measured(
        {}, mesh=mesh, axis_name="data", repeats=2,
        base=BoostConfig(accumulate=Accumulate(2)),
    )  # fmt: skip
    (only,) = found.rows
    assert only.wire_bytes == ring(8) * 4 * ENTRIES / 2 + ring(8) * 4


def test_costs_are_those_of_the_compiled_program():
    step = boostax.make_train_step(loss_fn, optax.adam(1e-2))
    compiled = step.lower(step.init(mlp()), BATCHES[0]).compile()
    memory = compiled.memory_analysis()
    found = Candidate("a", BoostConfig(), setting()).costs
    state = 4 * (3 * ENTRIES + 2)
    batch = 4 * 16 * (4 + 2)
    assert memory.argument_size_in_bytes == state + batch
    # The state is donated: on top come loss and ``applied``, and XLA's table of the results.
    more = found.memory_bytes - memory.temp_size_in_bytes - state - batch
    assert 4 + 1 <= more <= 4 + 1 + 8 * (3 * LEAVES + 2 + 2)
    assert found.flops == compiled.cost_analysis()["flops"]
    assert (found.wire_bytes, found.compile_seconds) == (0.0, 1.0)


def test_with_freezing_each_depth_that_is_drawn_counts_by_its_share():
    config = BoostConfig(freeze=Freeze("continuous", frozen_fraction=0.5, groups=3))
    frozen = Candidate("a", config, setting(steps=8))
    # Cycles of 0, 0, 1, 2.
    assert frozen.depths == {0: 0.5, 1: 0.25, 2: 0.25}
    state = frozen.step.init(mlp())
    calls = boostax.explain(frozen.step, state, BATCHES[0]).calls
    mean = 0.5 * calls[0].flops + 0.25 * (calls[1].flops + calls[2].flops)
    assert frozen.costs.flops == pytest.approx(mean)
    assert frozen.costs.compile_seconds == 3.0 and frozen.note == ""


@pytest.mark.long
def test_a_turn_freezes_as_the_schedule_does_from_its_beginning():
    config = BoostConfig(freeze=Freeze("continuous", frozen_fraction=0.5, groups=3))
    frozen = Candidate("a", config, setting(steps=6))
    depths, step = [], frozen.step

    def spy(state, batch):
        state, metrics = step(state, batch)
        depths.append(int(metrics["frozen_groups"]))
        return state, metrics

    frozen.step = spy
    for _ in range(2):
        frozen.seconds()
        assert depths == [0, 0, 1, 2, 0, 0]
        depths.clear()


@pytest.mark.long
def test_freezing_that_comes_later_is_not_judged_by_what_came_before():
    freeze = {"freeze": {"kind": "progressive", "total_steps": 1000, "groups": 3}}
    found = row(measured({"freeze": freeze}), "freeze")
    assert found.verdict == "no difference"
    assert found.reason.endswith("; nothing was frozen in these calls")
    # A schedule that is no longer than the trial ends it.
    late = {"freeze": {"kind": "progressive", "total_steps": 7, "groups": 3}}
    config = BoostConfig.from_dict(late)
    assert Candidate("a", config, setting(steps=6)).equal_calls(0.5) == 7
    (only,) = measured({}, base=config, steps=7).rows
    assert only.steps == 7


def test_what_waits_on_the_host_comes_back_bit_for_bit_as_often_as_asked(mesh):
    place, alike = (jax.sharding.NamedSharding(mesh, spec) for spec in (P("data"), P()))
    tree = {
        "split": jax.device_put(jnp.arange(16.0), place),
        "key": jax.device_put(jax.random.key(3), alike),
        "count": jax.device_put(jnp.int32(5), alike),
    }
    kept = fetched(tree)
    spoil = jax.jit(
        lambda t: t | {"split": t["split"] * 0, "count": t["count"] + 1}, donate_argnums=0
    )
    spoil(tree)
    for _ in range(2):
        back = placed(kept)
        assert back["split"].sharding == place and int(back["count"]) == 5
        np.testing.assert_array_equal(back["split"], np.arange(16.0))
        assert jax.random.key_data(back["key"]).tolist() == [0, 3]
        spoil(back)


# What follows.


def trial(name="a", **changed):
    given = dict(
        config=BoostConfig(), verdict="recommended", reason="", time_ratio=1.0, time_error=0.0,
        memory_ratio=1.0, wire_ratio=1.0, wire_bytes=0.0, loss=1.0, loss_difference=0.0,
        loss_error=0.0,
    )  # fmt: skip
    return Trial(name, **(given | changed))


VERDICTS = {
    "lower": ({"loss_difference": -0.3, "loss_error": 0.1}, "recommended"),
    "lower by luck": ({"loss_difference": -0.3, "loss_error": 0.2}, "no difference"),
    "lower by less than a step": ({"loss_difference": -0.009}, "no difference"),
    "lower, for more memory": ({"loss_difference": -0.3, "memory_ratio": 2.0}, "recommended"),
    "higher": ({"loss_difference": 0.3, "loss_error": 0.1}, "not recommended"),
    "higher, for less memory": ({"loss_difference": 0.3, "memory_ratio": 0.1}, "not recommended"),
    "higher by luck": ({"loss_difference": 0.3, "loss_error": 0.2}, "no difference"),
    "less memory": ({"memory_ratio": 0.89}, "recommended"),
    "hardly less": ({"memory_ratio": 0.91, "time_ratio": 0.95}, "no difference"),
    "less memory, a little slower": ({"memory_ratio": 0.5, "time_ratio": 1.05}, "recommended"),
    "less memory, slower": ({"memory_ratio": 0.5, "time_ratio": 1.2}, "not recommended"),
    "slower by luck": ({"time_ratio": 1.2, "time_error": 0.06}, "no difference"),
    "less memory, perhaps slower": (
        {"memory_ratio": 0.5, "time_ratio": 1.2, "time_error": 0.06},
        "no difference",
    ),
    "less sent": ({"wire_ratio": 0.25}, "recommended"),
    "faster": ({"time_ratio": 0.8, "time_error": 0.01}, "recommended"),
    "faster by luck": ({"time_ratio": 0.8, "time_error": 0.06}, "no difference"),
    "nothing": ({}, "no difference"),
    "infinite": ({"loss": math.inf, "memory_ratio": 0.1}, "not recommended"),
}


@pytest.mark.parametrize(("changed", "expected"), VERDICTS.values(), ids=VERDICTS)
def test_verdicts(changed, expected):
    base = trial("baseline", verdict="baseline")
    assert judged(trial(**changed), base, noise=0.01).verdict == expected


def test_the_best_comes_first_and_equal_losses_are_ranked_by_what_is_saved():
    rows = [
        trial("refused", verdict="refused", loss=math.nan),
        trial("bad", verdict="not recommended", loss=9.0),
        trial("good", loss=0.5, memory_ratio=0.9),
        trial("good and small", loss=0.505, memory_ratio=0.5),
        trial("best", loss=0.3, memory_ratio=3.0),
        trial("same", verdict="no difference", loss=0.1),
        trial("baseline", verdict="baseline"),
    ]
    for order in (rows, rows[::-1]):
        assert [row.name for row in ranked(order, 0.01)] == [
            "best", "good and small", "good", "baseline", "same", "bad", "refused",
        ]  # fmt: skip


def test_the_best_of_each_part_go_together_if_the_configuration_allows_it():
    changes = {
        "top-k": {"reduce": {"kind": "top-k"}},
        "bfloat16": {"policy": {"spec": "O1", "dtype": "bfloat16"}},
        "int8": {"reduce": {"kind": "int8"}},
        "float16": {"policy": {"spec": "O1", "dtype": "float16"}, "loss_scale": "dynamic"},
        "freeze": {"freeze": {"groups": 2}},
        "local": {"reduce": {"kind": "local", "every": 4}},
    }
    base = BoostConfig()
    assert list(together(list(changes), changes, base)) == ["top-k", "bfloat16", "freeze"]
    assert list(together(["local", "freeze", "int8"], changes, base)) == ["local"]
    assert list(together(["float16", "bfloat16"], changes, base)) == ["float16"]


def test_what_is_recommended_is_tried_together():
    base = BoostConfig(microbatches=4, accumulate=Accumulate(2))
    candidates = {
        "whole": {"microbatches": 1},
        "halves": {"microbatches": 2},
        "every call": {"accumulate": None},
        "clipped": {"clip": 1e-6},
    }
    found = measured(candidates, base=base)
    joined = {"every call + whole", "whole + every call"} & set(verdicts(found))
    (joined,) = joined
    assert row(found, joined).config == BoostConfig()
    assert row(found, joined).time_ratio == 0.25 and row(found, joined).steps == 24
    assert verdicts(found) == {
        joined: "recommended",
        "whole": "recommended",
        "halves": "recommended",
        "every call": "recommended",
        "baseline": "baseline",
        "clipped": "not recommended",
    }
    assert found.config == BoostConfig() and found.rows[0].name == joined


def test_what_cannot_be_built_is_a_row_that_says_why(mesh):
    found = measured(
        {
            "narrow": {"policy": {"dtype": "float16"}},
            "unknown": {"centralise": True},
            "deep": {"freeze": {"groups": 9}},
            "slices": {"microbatches": 3},
            "model": {"less_bn": True},
            "window": {"accumulate": 4},
        },
        mesh=mesh, axis_name="data", repeats=2, steps=2,
    )  # fmt: skip
    assert verdicts(found) == {
        "baseline": "baseline",
        **dict.fromkeys(("narrow", "unknown", "deep", "slices", "model", "window"), "refused"),
    }
    assert row(found, "narrow").config is None and row(found, "deep").config.freeze.groups == 9
    assert row(found, "narrow").reason.startswith("BoostConfig: loss_scale must be given where")
    assert row(found, "unknown").reason.endswith("Did you mean 'centralize'?")
    assert row(found, "deep").reason.startswith("Freeze: groups must be at most the number of")
    assert "divisible by replicas x microbatches = 8 x 3" in row(found, "slices").reason
    assert row(found, "model").reason.startswith("auto: less_bn must be left alone, got LessBN(")
    assert row(found, "window").reason.startswith("auto: steps must be at least a window of 4")
    assert math.isnan(row(found, "deep").loss) and row(found, "deep").steps == 0
    assert f"\ndeep: {row(found, 'deep').reason}." in str(found)


def test_what_the_baseline_raises_is_raised():
    with pytest.raises(ValueError, match=r"^Freeze: groups must be at most the number of layers"):
        measured({}, base=BoostConfig(freeze=Freeze(groups=9)))


def test_the_defaults_are_those_that_apply(mesh):
    alone = ["bfloat16", "float16", "micro-batches", "centralize", "freeze"]
    reductions = [
        "bfloat16 wire", "int8", "top-k", "power-sgd", "adasum", "adasum-delta", "local",
    ]  # fmt: skip
    assert list(default_candidates(setting(), BoostConfig())) == alone
    many = default_candidates(setting(mesh=mesh, axis_name="data"), BoostConfig())
    assert list(many) == alone + reductions
    # Three layers, in an order that their names tell.
    assert many["freeze"] == {"freeze": {"kind": "interval", "groups": 3}}
    for change in many.values():
        BoostConfig.from_dict(change)
    on = BoostConfig(policy=Precision("O1", "float16"), loss_scale=LossScale(), microbatches=2)
    found = default_candidates(setting(), on)
    assert "float16" not in found and found["micro-batches"] == {"microbatches": 8}
    single = setting(loss_fn=lambda p, b: jnp.mean(b[0] @ p["w"]), params={"w": jnp.ones((4, 2))})
    assert "freeze" not in default_candidates(single, BoostConfig())


def test_layers_freeze_in_the_order_of_the_forward_pass():
    def backwards(params, batch):
        x, y = batch
        for name in ("c", "b", "a"):
            x = jnp.tanh(x @ params[name])
        return jnp.mean((x[:, :2] - y) ** 2)

    params = {name: jnp.ones((4, 4)) for name in "abc"}
    found = default_candidates(setting(loss_fn=backwards, params=params), BoostConfig())
    assert found["freeze"]["freeze"]["order"] == ("c", "b", "a")


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 8])
def test_the_defaults_run_and_each_is_judged(mesh, devices):
    place = {} if devices == 1 else {"mesh": mesh, "axis_name": "data"}
    batches = [(np.repeat(x, 2, 0), np.repeat(y, 2, 0)) for x, y in BATCHES]
    found = measure(loss_fn, optax.adam(1e-2), mlp(), batches, steps=4, repeats=2, **place)
    said = verdicts(found)
    assert set(default_candidates(setting(**place), BoostConfig())) < set(said)
    assert "refused" not in said.values()
    assert all(math.isfinite(row.loss) and row.reason for row in found.rows)
    print(found)


# What is handed out and taken in.


def test_the_table_is_aligned_and_the_data_go_to_json_and_back(slower):
    heading, first, second, third, *rest = str(slower).splitlines()
    assert heading.split() == ["ms", "time", "compile", "s", "MB", "calls", "loss", "difference"]
    assert first.startswith("baseline ") and "±" not in first
    begins = [
        line.index(word)
        for line, word in (
            (first, " baseline"),
            (second, "no difference"),
            (third, "not recommended"),
        )
    ]
    assert begins[0] + 1 == begins[1] == begins[2]
    assert rest[0].startswith("as it is: the loss is as good")
    assert rest[-1].startswith("harshly") and f"After {slower.calls} calls" in str(slower)
    data = json.loads(json.dumps(slower.to_dict(), allow_nan=False))
    assert [each["name"] for each in data["rows"]] == [each.name for each in slower.rows]
    assert BoostConfig.from_dict(data["rows"][-1]["config"]) == slower.rows[-1].config
    assert BoostConfig.from_dict(data["config"]) == slower.config
    assert isinstance(slower, Measurement)


MISTAKES = {
    "steps": ({"steps": 0}, "auto: steps must be a positive integer, got 0. "),
    "repeats": ({"repeats": 2.5}, "auto: repeats must be a positive integer, got 2.5. "),
    "one repeat": ({"repeats": 1}, "auto: repeats must be at least 2, got 1. "),
    "base": ({"base": {"clip": 1.0}}, "auto: base must be a BoostConfig, got {'clip': 1.0}. "),
    "clock": ({"clock": 3}, "auto: clock must be a function, got 3. "),
    "inner": ({"inner": 3}, "auto: inner must be an optax.GradientTransformation, got 3. "),
    "candidates": (
        {"candidates": ["int8"]},
        "auto: candidates must be a mapping of names to changes, got ['int8']. ",
    ),
    "change": (
        {"candidates": {"int8": "int8"}},
        "auto: candidates must be a mapping of names to changes, got {'int8': 'int8'}. ",
    ),
    "name": (
        {"candidates": {"baseline": {}}},
        "auto: candidates must be named other than 'baseline', got ['baseline']. ",
    ),
    "batches": (
        {"batches": 3},
        "auto: batches must be a list of batches, or a function, got 3. ",
    ),
    "few batches": (
        {"batches": [1, 2]},
        "auto: batches must be more than 2 batches, got 2. ",
    ),
    "no batches": (
        {"batches": [], "held_out": [1, 2]},
        "auto: batches must be more than 0 batches, got 0. ",
    ),
    "held_out": ({"held_out": [1]}, "auto: held_out must be at least 2 batches, got 1. "),
    "held_out of another kind": (
        {"held_out": 3},
        "auto: held_out must be a list of batches, got 3. ",
    ),
}


@pytest.mark.parametrize(("changed", "text"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused_by_name(changed, text):
    given = {"batches": BATCHES, "inner": optax.sgd(0.1)} | changed
    batches, inner = given.pop("batches"), given.pop("inner")
    with pytest.raises((ValueError, TypeError)) as error:
        measure(loss_fn, inner, mlp(), batches, **given)
    assert str(error.value).startswith(text) and str(error.value).endswith(".")


def test_clocks_of_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"^auto: jax\.process_count\(\) must be 1, got 2\. "):
        measured({})


def test_auto_is_the_way_in():
    given = {"candidates": {"none": {"policy": "O9"}}, "steps": 2, "repeats": 2}
    arguments = (loss_fn, optax.sgd(0.1), mlp(), BATCHES)
    found = boostax.auto("measure", *arguments, **given)
    assert [row.name for row in found.rows] == ["baseline", "none"]
    with pytest.raises(ValueError, match=r"^auto: level must be left out here, got 'O1'. base= is"):
        boostax.auto("measure", *arguments, level="O1")
    with pytest.raises(TypeError, match=r"^auto: further arguments must be left out here, got"):
        boostax.auto("O1", *arguments, steps=2)
