"""Freeze schedules: MindSpore's own sequences number by number, and what each kind promises."""

import functools
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from drawing import draws
from hypothesis import given
from hypothesis import strategies as st

from boostax.freeze.schedules import FreezeSchedule, freeze_schedule

KINDS = ("interval", "continuous", "progressive", "ramp")
FRACTIONS = st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9])
STEPS = st.integers(1, 400)
SEEDS = st.integers(0, 2**32 - 1)


def sequence(groups=4, freeze_type=1, freeze_p=0.7, total_steps=10, seed=0):
    """The depths that ``GradientFreeze`` makes after ``np.random.seed(seed)``."""
    kind = ("continuous", "interval")[freeze_type]
    schedule = freeze_schedule(kind, total_steps=total_steps, freeze_p=freeze_p, seed=seed)
    return schedule.depths(groups)


@pytest.fixture(scope="module")
def sequences(golden):
    return json.loads((golden / "grad_freeze.json").read_text())["sequences"]


def test_golden_sequences_of_mindspore(sequences):
    assert len(sequences) == 14
    for name, golden in sequences.items():
        arguments = (golden[k] for k in ("groups", "freeze_type", "freeze_p", "total_steps"))
        depths = sequence(*arguments, seed=42)
        assert depths.dtype == np.int32 and depths.shape == (golden["length"],), name
        assert np.bincount(depths, minlength=golden["groups"]).tolist() == golden["counts"], name
        assert depths[:200].tolist() == golden["head"], name
        assert np.mean(depths == 0) == golden["frac_zero"], name


@pytest.mark.parametrize("kind, freeze_type", [("interval", 1), ("continuous", 0)])
def test_a_schedule_is_the_golden_sequence_cut_off(sequences, kind, freeze_type):
    """``freeze_p`` is the share of steps that train all."""
    for golden in sequences.values():
        if golden["freeze_type"] != freeze_type or golden["freeze_p"] == 0:
            continue
        steps, fraction = golden["total_steps"], 1 - golden["freeze_p"]
        made = freeze_schedule(kind, total_steps=steps, frozen_fraction=fraction, seed=42)
        depths = made.depths(golden["groups"])
        assert depths.shape == (steps,) and depths[:200].tolist() == golden["head"][:steps]


def drawn_one_by_one(groups, freeze_p, length, seed):
    """The interval rule with one ``choice`` per frozen step."""
    random = np.random.RandomState(seed)
    depths, frozen = [0], 0
    while len(depths) < length:
        if frozen / len(depths) < 1 - freeze_p:
            weights = [weight / sum(range(groups)) for weight in range(1, groups)]
            depths.append(int(random.choice(range(groups - 1, 0, -1), p=weights)))
            frozen += 1
        else:
            depths.append(0)
    return depths


@draws(60)
@given(st.integers(2, 40), st.floats(0, 1), STEPS, SEEDS)
def test_draws_are_those_of_choice(groups, freeze_p, steps, seed):
    depths = sequence(groups, 1, freeze_p, steps, seed=seed)
    assert depths.tolist() == drawn_one_by_one(groups, freeze_p, int(1.01 * steps), seed)


def test_a_long_table_is_the_same_and_drawn_in_one_go(monkeypatch):
    slow = drawn_one_by_one(10, 1 - 0.3, 65536, 0)
    # Whatever else would draw from it fails.
    random, asked = np.random.RandomState(0), []
    draw = lambda self, n: asked.append(n) or random.random_sample(n)  # noqa: E731
    one = type("One", (), {"random_sample": draw})
    with monkeypatch.context() as patch:
        patch.setattr(np.random, "RandomState", lambda seed: one())
        depths = freeze_schedule("interval", total_steps=65536).depths(10)
    np.testing.assert_array_equal(depths, slow)
    assert asked == [np.count_nonzero(slow)]


def table(kind, groups, steps, fraction, seed=0):
    """Depths; a fraction that ``continuous`` cannot reach is brought down to what it can."""
    if kind == "continuous" and groups > 1:
        fraction = min(fraction, (groups - 1) / groups)
    schedule = freeze_schedule(kind, total_steps=steps, frozen_fraction=fraction, seed=seed)
    return schedule.depths(groups), fraction


@pytest.mark.parametrize("kind", KINDS)
@draws(60)
@given(st.integers(1, 12), STEPS, FRACTIONS, SEEDS)
def test_depths_have_the_share_and_range_of_their_kind(kind, groups, steps, fraction, seed):
    depths, _ = table(kind, groups, steps, fraction, seed)
    assert depths.dtype == np.int32 and depths.shape == (steps,)
    assert depths[0] == 0 <= depths.min() and depths.max() < groups
    if kind != "continuous" and groups > 1:
        assert abs(np.count_nonzero(depths) - fraction * steps) <= 1
    if kind in ("progressive", "ramp") and groups > 1:
        # What freezes for good never thaws.
        assert np.all(np.diff(depths) >= 0)
        power = 3 if kind == "ramp" else 1
        first = (1 - fraction) ** (1 / power)
        if steps * ((first + (1 - first) / (groups - 1)) ** power - first**power) >= 2:
            assert set(depths.tolist()) == set(range(groups))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups, fraction", [(1, 0.5), (6, 0.0), (6, 1e-18)])
def test_one_group_or_no_fraction_never_freezes(kind, groups, fraction):
    depths, _ = table(kind, groups, 50, fraction)
    assert depths.shape == (50,) and not depths.any()


@draws(60)
@given(st.integers(2, 12), st.floats(0.05, 1, exclude_max=True) | st.sampled_from([0.1, 0.5, 0.9]))
def test_continuous_repeats_a_cycle_of_at_least_the_fraction(groups, fraction):
    steps = 500
    depths, fraction = table("continuous", groups, steps, fraction)
    cycle = int(np.argmax(depths == groups - 1)) + 1
    whole = cycle - (groups - 1)
    assert whole >= 1 and depths[:cycle].tolist() == [0] * whole + list(range(1, groups))
    np.testing.assert_array_equal(depths, np.resize(depths[:cycle], steps))
    share, roundings = (groups - 1) / cycle, 1e-12
    assert fraction - roundings <= share
    assert share <= fraction * (groups - 1) / (groups - 1 - fraction) + roundings


@pytest.mark.parametrize("groups", range(2, 40))
def test_continuous_keeps_a_step_that_trains_all(groups):
    """MindSpore's rule rounds 1 - 0.9 down and leaves ten groups without: group 0 never trains."""
    depths, _ = table("continuous", groups, 3 * groups, (groups - 1) / groups)
    assert depths.tolist() == [*range(groups)] * 3 and 0 not in sequence(10, 0, 1 - 0.9, 100)


def test_when_groups_freeze():
    steps = functools.partial(np.searchsorted, v=[1, 2, 3, 4])
    progressive, _ = table("progressive", 5, 1000, 0.4)
    assert steps(progressive).tolist() == [600, 700, 800, 900]
    # 1000 * (0.5, 0.625, 0.75, 0.875)**3: the first depth from t = 0.125 on.
    ramp, _ = table("ramp", 5, 1000, 0.875)
    assert steps(ramp).tolist() == [125, 244, 422, 670]


@pytest.mark.parametrize("kind", KINDS)
def test_same_arguments_give_the_same_depths_and_leave_the_global_generator_alone(kind):
    def make():
        return freeze_schedule(kind, total_steps=300, frozen_fraction=0.4, seed=7)

    np.random.seed(1)
    before = make().depths(6)
    state = np.random.get_state()[1].copy()
    np.random.seed(2)
    np.testing.assert_array_equal(make().depths(6), before)
    np.random.seed(1)
    np.testing.assert_array_equal(np.random.get_state()[1], state)
    assert make() == make() and hash(make()) == hash(make())
    other = freeze_schedule(kind, total_steps=300, frozen_fraction=0.4, seed=8)
    assert (other != make()) == (kind == "interval")
    assert np.array_equal(other.depths(6), before) == (kind != "interval")


def test_defaults_are_three_tenths_and_seed_zero():
    for kind in KINDS:
        schedule = freeze_schedule(kind, total_steps=20)
        assert schedule == freeze_schedule(kind, total_steps=20, frozen_fraction=0.3, seed=0)
        assert isinstance(schedule, FreezeSchedule) and schedule.total_steps == 20


def test_tables_are_read_only_and_built_once():
    schedule = freeze_schedule("ramp", total_steps=20)
    depths = schedule.depths(3)
    assert schedule.depths(np.int64(3)) is depths and schedule.depths(4) is not depths
    with pytest.raises(ValueError, match="read-only"):
        depths[0] = 1


def test_a_callable_is_asked_once_per_step():
    asked = []

    def kind(step):
        asked.append(step)
        return (step, np.int64(step), jnp.int32(step))[step % 3] if step < 4 else 0

    schedule = freeze_schedule(kind, total_steps=6)
    assert asked == [] and schedule.depths(4).tolist() == [0, 1, 2, 3, 0, 0]
    schedule.depths(4)
    assert asked == [*range(6)] and all(type(step) is int for step in asked)


@pytest.mark.parametrize("depth", [4, -1, 2.0, True, np.True_, None, "1", 10**30])
def test_what_is_no_depth_is_named_with_its_step(depth):
    schedule = freeze_schedule(lambda step: depth if step == 17 else 3, total_steps=20)
    message = (
        f"freeze_schedule: the depth at step 17 must be an integer in [0, 4), got {depth!r}. "
        "Depth d freezes groups 0 to d-1, and the last group always trains."
    )
    with pytest.raises(ValueError if type(depth) is int else TypeError, match=re.escape(message)):
        schedule.depths(4)


schedule = functools.partial(freeze_schedule, "interval", total_steps=10)


@pytest.mark.parametrize("groups", [0, -1, 2**31, True, 2.5, "4", None])
def test_groups_are_a_positive_number(groups):
    match = rf"^FreezeSchedule\.depths: groups must be .+, got {re.escape(repr(groups))}\. .+\.$"
    with pytest.raises((TypeError, ValueError), match=match):
        schedule().depths(groups)


CALLED = "must be left out with a callable kind, got"
MESSAGES = [
    ({"kind": abs, "frozen_fraction": 0.3}, f"frozen_fraction {CALLED} 0.3. A callable receives"),
    ({"kind": abs, "seed": 0}, f"seed {CALLED} 0. A callable receives"),
    ({"kind": abs, "freeze_p": 0.7}, f"freeze_p {CALLED} 0.7. A callable receives"),
    (
        {"kind": "continuous", "frozen_fraction": 0.8},
        "frozen_fraction must be at most 0.75 with kind 'continuous' and 4 groups, got 0.8. Each",
    ),
    (
        {"freeze_p": 0.7, "frozen_fraction": 0.3},
        "frozen_fraction must be left out with freeze_p, got 0.3. freeze_p is the share of steps",
    ),
    (
        {"kind": "ramp", "freeze_p": 0.7},
        "kind with freeze_p must be 'interval' or 'continuous', got 'ramp'. MindSpore has no",
    ),
    (
        {"kind": "continuous", "freeze_p": 1},
        "freeze_p must be below 1 with kind 'continuous' (MindSpore's freeze_type 0), got 1.0. A",
    ),
]


@pytest.mark.parametrize(("options", "said"), MESSAGES)
def test_messages(options, said):
    with pytest.raises(ValueError, match=f"^freeze_schedule: {re.escape(said)}"):
        freeze_schedule(**{"kind": "interval", "total_steps": 9} | options).depths(4)


def test_limits_pass():
    # A fraction of 1e-15 makes a cycle of 5e15 steps, longer than the run.
    assert not table("continuous", 6, 50, 1e-15)[0].any()
    assert not sequence(groups=1, freeze_type=0, freeze_p=1.0).any()
    assert not sequence(freeze_p=1).any()
    assert sequence(freeze_p=0, total_steps=1, seed=2**32 - 1).tolist() == [0]
    assert schedule(seed=np.uint32(2**32 - 1), frozen_fraction=np.float32(0.5)).depths(2).any()
    for kind in KINDS:
        assert table(kind, 5, 1, 0.999)[0].tolist() == [0]
