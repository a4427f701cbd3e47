"""A state saved before the chain changed goes on after it, with every part that still fits."""

import functools
import pickle
import sys
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.dynamic_scale import DynamicScale
from lanes import lanes
from recorded import plain

import boostax
from boostax.config.migrate import migrate_state
from boostax.testing import drawn

pytestmark = pytest.mark.filterwarnings("ignore:.*no part flips the sign")

ADAM = functools.partial(optax.adamw, 1e-2)
moments = optax.scale_by_adam
masked_adam = functools.partial(optax.masked, moments(), {"a": True, "b": False})
LABELS = {"a": "left", "b": "right"}


def make_params():
    return {"a": jnp.arange(3.0), "b": {"w": jnp.arange(4.0).reshape(2, 2) / 3}}


def grads_of(params, step, scale=1.0):
    return jax.tree.map(lambda p: (jnp.cos(p * (step + 1)) + 0.1) * scale, params)


def trained(tx, steps=3, start=None):
    """Params and state after a few steps, the first ten before ``start``."""
    params, state = start or (make_params(), tx.init(make_params()))
    for step in range(10 if start else 0, steps + (10 if start else 0)):
        grads = grads_of(params, step, boostax.precision.loss_scale(state))
        params, state = boostax.apply_gradients(tx, grads, state, params)
    return params, state


def moved(old_tx, new_tx, steps=3, **how):
    """A state after a few steps, what it becomes for another transformation, and the report."""
    params, old = trained(old_tx, steps)
    return old, *migrate_state(old, new_tx, params, **how)


def assert_same(actual, expected):
    chex.assert_trees_all_equal(actual, expected, strict=True)
    assert not any(x.weak_type for x in jax.tree.leaves(actual))


def buffers(tree):
    shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
    return {shard.data.unsafe_buffer_pointer() for shard in shards}


def only(state, key):
    """Adam's state as a mask keeps it that leaves one param."""
    cut = lambda tree: tree | {other: optax.MaskedNode() for other in tree if other != key}  # noqa: E731
    return optax.MaskedState(state._replace(mu=cut(state.mu), nu=cut(state.nu)))


freeze = functools.partial(boostax.scheduled_freeze, groups={"a": 0, "b": {"w": 1}})
clip = lambda: optax.clip_by_global_norm(1.0)  # noqa: E731
scaled = functools.partial(boostax.dynamic_loss_scale, init_scale=8.0)
window = lambda tx, every=2: boostax.accumulate(tx, every)  # noqa: E731
record = functools.partial(boostax.subspace.record_trajectory, 3)


def put(state, inner, **fields):
    return state._replace(inner_state=inner, **fields)


# What is added or removed, and where the state of Adam then is.
INSIDE = (put, lambda state: state.inner_state)
BEHIND = (lambda new, adam: (new[0], adam), lambda state: state[1])
PARTS = {
    "clip": (lambda tx: optax.chain(clip(), tx), *BEHIND),
    "trajectory": (lambda tx: optax.chain(record(), tx), *BEHIND),
    "centralize": (lambda tx: optax.chain(boostax.centralize_gradients(), tx), *BEHIND),
    "scaler": (scaled, *INSIDE),
    "window": (lambda tx: window(tx, 3), *INSIDE),
    "freeze": (lambda tx: freeze(tx, schedule=[0, 1, 1, 0]), *INSIDE),
}


def added(wrap, outside, _):
    return ADAM, lambda: wrap(ADAM()), lambda old, new: outside(new, old)


def removed(wrap, _, inner):
    return lambda: wrap(ADAM()), ADAM, lambda old, new: inner(old)


# Old and new transformation, and the new state by hand from the old one and a fresh one.
CHANGES = {
    **{f"{x} {do.__name__}": do(*part) for x, part in PARTS.items() for do in (added, removed)},
    "scaler moved": (
        lambda: scaled(window(ADAM(), 3)),
        lambda: window(scaled(ADAM()), 3),
        lambda old, new: put(old.inner_state, put(old, old.inner_state.inner_state)),
    ),
    "trajectory moved": (
        lambda: optax.chain(record(), ADAM()),
        lambda: scaled(optax.chain(ADAM(), record())),
        lambda old, new: new._replace(inner_state=(old[1], old[0])),
    ),
    "freeze kept with another schedule": (
        lambda: freeze(ADAM(), schedule=[0, 0, 0, 0]),
        lambda: freeze(scaled(ADAM()), schedule=[0, 0, 0, 1]),
        lambda old, new: put(old, put(new.inner_state, old.inner_state), next_depth=jnp.int32(1)),
    ),
    "masked": (optax.scale_by_adam, masked_adam, lambda old, new: only(old, "a")),
    "unmasked": (
        masked_adam,
        optax.scale_by_adam,
        lambda old, new: new._replace(
            count=old.inner_state.count,
            mu=new.mu | {"a": old.inner_state.mu["a"]},
            nu=new.nu | {"a": old.inner_state.nu["a"]},
        ),
    ),
    "momentum to adam": (lambda: optax.sgd(0.1, 0.9), lambda: optax.adam(0.1), lambda _, new: new),
    "partition": (
        moments,
        lambda: optax.partition({"left": moments(), "right": moments(b1=0.8)}, LABELS),
        lambda old, new: new._replace(inner_states={y: only(old, x) for x, y in LABELS.items()}),
    ),
}


SHORT = {"clip added", "scaler removed", "window added", "freeze kept with another schedule"}
SHORT |= {"trajectory moved", "masked", "momentum to adam", "partition"}


@pytest.mark.parametrize("change", lanes(CHANGES, SHORT))
def test_a_saved_state_goes_on_after_a_change_of_the_chain(change):
    make_old, make_new, assemble = CHANGES[change]
    old_tx, new_tx = make_old(), make_new()
    params, state = trained(old_tx)
    old = jax.tree.map(jnp.asarray, pickle.loads(pickle.dumps(jax.device_get(state))))
    migrated, _ = migrate_state(old, new_tx, params)
    expected = assemble(state, new_tx.init(params))
    assert_same(migrated, expected)
    assert not buffers(migrated) & buffers((old, params))
    step = jax.jit(functools.partial(boostax.apply_gradients, drawn(new_tx)), donate_argnums=(1,))
    step(grads_of(params, 9, boostax.precision.loss_scale(expected)), migrated, params)
    # Donated or not, the old state is still there.
    assert_same(old, state)


def test_a_donated_old_state_does_not_take_the_new_one_with_it():
    params, old = trained(ADAM())
    state, _ = migrate_state(old, scaled(ADAM()), params)
    jax.tree.map(lambda x: x.delete(), (old, params))
    jax.tree.map(np.asarray, state)
    assert len(buffers(state)) == len(jax.tree.leaves(state))
    # Schedule-free's init aliases the params.
    params, tx = make_params(), optax.contrib.schedule_free(optax.sgd(0.1), 0.1)
    assert not buffers(migrate_state(optax.EmptyState(), tx, params)[0]) & buffers(params)


def multi(every):
    return optax.MultiSteps(ADAM(), every).gradient_transformation()


@pytest.mark.parametrize("steps", [0, 4])
def test_multi_steps_becomes_accumulate_and_back(steps):
    new_tx, params = boostax.accumulate(ADAM(), 4), make_params()
    old, state, _ = moved(multi(4), new_tx, steps)
    counts = {"optimizer_steps": old.gradient_step, "inner_state": old.inner_opt_state}
    assert_same(state, new_tx.init(params)._replace(**counts))
    assert_same(migrate_state(state, multi(4), params)[0], old)


def decay(step):
    return 1e-2 / (1.0 + step)


def decayed(weight):
    return optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(weight), optax.scale(-0.1))


# A chain of a constant, or without the part; and the schedule that it gets.
SCHEDULES = {
    "rate": (optax.adamw, 1e-2, decay),
    "weight decay": (decayed, 0.1, decay),
    "injected": (optax.inject_hyperparams(optax.adamw), 1e-2, decay),
    "freeze": (lambda x: freeze(ADAM(), schedule=x) if x else ADAM(), 0, lambda n: n // 12 % 2),
    "window": (lambda x: window(ADAM(), x) if x != 1 else ADAM(), 1, lambda step: 1 + step // 11),
    "MultiSteps": (lambda x: multi(x) if x != 1 else ADAM(), 1, lambda step: 1 + step // 11),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_new_schedule_goes_on_at_a_given_step(kind):
    """As in the run of one schedule that was constant until then."""
    make, constant, schedule = SCHEDULES[kind]
    joined = make(lambda step: jnp.where(step < 10, constant, schedule(step)))
    params, old = trained(make(constant), 10)
    state, report = migrate_state(old, make(schedule), params, count=10)
    assert any("begins at 10." in note for note in report.notes)
    found, expected = trained(make(schedule), 5, (params, state))[0], trained(joined, 15)[0]
    # Inside a gate's branch Adam is compiled, which rounds elsewhere.
    chex.assert_trees_all_close(found, expected, rtol=2e-6)
    assert_same(migrate_state(state, make(schedule), params, count=99)[0], state)


def test_a_step_of_no_schedule_is_named_and_new_moments_begin_at_zero():
    _, state, report = moved(optax.sgd(0.1), ADAM(), count=10)
    assert_same(state, ADAM().init(make_params()))
    assert report.notes == ("count=10 has no effect, because no schedule is new.",)
    with pytest.raises(ValueError, match="migrate_state: count must be"):
        moved(optax.sgd(0.1), ADAM(), count=-1)


FOREIGN = {
    "flax": (DynamicScale(fin_steps=5, scale=512.0), 5),
    "flax after a step": (DynamicScale(fin_steps=jnp.int32(5), scale=jnp.float32(512)), 5),
    "jmp": (jmp.DynamicLossScale(jnp.float32(512.0), jnp.int32(7)), 7),
    "jmp in half": (jmp.DynamicLossScale(jnp.float16(512.0), jnp.int32(7)), 7),
    "jmp static": (jmp.StaticLossScale(jnp.float32(512.0)), 0),
    "one element": (jmp.StaticLossScale(jnp.full((1,), 512.0)), 0),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_scalers_of_others_hand_on_their_scale(kind):
    scaler, clean = FOREIGN[kind]
    params, old = trained(ADAM())
    new_tx = scaled(ADAM(), growth_interval=10)
    state, report = migrate_state({"opt": old, "scaler": scaler}, new_tx, params)
    found = {"scale": jnp.float32(512), "clean_steps": jnp.int32(clean)}
    assert_same(state, new_tx.init(params)._replace(inner_state=old, **found))
    assert report.notes == ("scale is 512.0, not 8.0: the saved value replaces the argument.",)
    assert report.dropped == ()


def test_apply_if_finite_becomes_a_scaler_alone_or_with_a_scale_from_elsewhere():
    old_tx = optax.apply_if_finite(ADAM(), 5)
    params, old = trained(old_tx)
    for _ in range(2):
        _, old = old_tx.update(jax.tree.map(lambda p: p * jnp.nan, params), old, params)
    skipped = {"skipped": jnp.int32(2), "skipped_in_a_row": jnp.int32(2)}
    expected = scaled(ADAM()).init(params)._replace(inner_state=old.inner_state, **skipped)
    state, report = migrate_state(old, scaled(ADAM()), params)
    assert_same(state, expected)
    assert report.dropped == ()
    state, _ = migrate_state((old, DynamicScale(fin_steps=3, scale=64.0)), scaled(ADAM()), params)
    assert_same(state, expected._replace(scale=jnp.float32(64), clean_steps=jnp.int32(3)))


def test_the_report_says_what_was_kept_made_and_dropped():
    old_tx = optax.chain(masked_adam(), optax.trace(0.5), record())
    *_, report = moved(old_tx, window(optax.chain(clip(), optax.scale_by_adam())))
    assert str(report) == (
        "kept:\n"
        "  ScaleByAdamState count, mu/a, nu/a: 0/inner_state -> inner_state/1\n"
        "initialized:\n"
        "  AccumulateState micro_step, optimizer_steps, skipped, applied, window: the root\n"
        "  ScaleByAdamState mu/b/w, nu/b/w: inner_state/1\n"
        "dropped:\n"
        "  TraceState trace: 1\n"
        "  TrajectoryState steps, recorded, snapshots: 2"
    )


def test_a_trajectory_of_another_size_begins_anew():
    _, state, report = moved(record(), boostax.subspace.record_trajectory(4))
    assert (int(state.steps), int(state.recorded)) == (3, 0)
    assert report.anew == ("TrajectoryState recorded, snapshots: the root",)


def test_moments_are_kept_together_and_counts_with_moments():
    """Integers do not become floats."""
    params, old = trained(optax.scale_by_adam())
    codes = old._replace(mu=jax.tree.map(lambda x: x.astype("int32"), old.mu))
    state, report = migrate_state(codes, optax.scale_by_adam(), params)
    assert int(state.count) == 0 and report.kept == ()
    assert all(float(jnp.abs(x).max()) == 0 for x in jax.tree.leaves(state.nu))


PRECISIONS = [(None, "bfloat16"), ("bfloat16", None), ("float16", "bfloat16")]


@pytest.mark.parametrize(("before", "after"), PRECISIONS)
def test_a_leaf_of_another_precision_is_cast_and_named(before, after):
    """Defect guarded against: mu, nu and the count of another ``mu_dtype`` began anew."""
    old, state, report = moved(ADAM(mu_dtype=before), ADAM(mu_dtype=after))
    dtypes = [str(jnp.dtype(x or "float32")) for x in (before, after)]
    assert_same(state, (old[0]._replace(mu=optax.tree.cast(old[0].mu, dtypes[1])), *old[1:]))
    assert report.notes == ("mu of ScaleByAdamState at 0 is cast from {} to {}.".format(*dtypes),)
    assert report.anew == report.dropped == ()


def test_a_cast_that_leaves_the_range_is_refused():
    params, old = trained(optax.trace(0.9))
    large = jax.tree.map(lambda x: jnp.full_like(x, 1e6), old)
    with pytest.raises(ValueError, match=r"new_tx must be wide enough .* float16 at trace/a"):
        migrate_state(large, optax.trace(0.9, accumulator_dtype="float16"), params)


def test_of_several_states_the_best_fit_is_taken_and_named():
    old, state, report = moved(optax.chain(masked_adam(), moments()), moments())
    assert_same(state, old[1])
    (note,) = report.notes
    assert note == "ScaleByAdamState: 2 in the old state, 1 in the new state; 1 -> the root."
    two = optax.named_chain(("x", optax.trace(0.9)), ("y", optax.trace(0.5)))
    old, state, report = moved(two, optax.named_chain(*[(x, optax.trace(0.9)) for x in "wxy"]))
    assert_same((state["x"], state["y"]), (old["x"], old["y"]))
    assert report.notes == ("TraceState: 2 in the old state, 3 in the new state; x -> x, y -> y.",)


def test_one_state_becomes_several_and_several_one():
    make_new, make_old, _ = CHANGES["partition"]
    old, state, report = moved(make_old(), make_new())
    left, right = (old.inner_states[side].inner_state for side in ("left", "right"))
    assert_same(state.mu, {"a": left.mu["a"], "b": right.mu["b"]})
    assert int(state.count) == 3
    assert "also gets moments from inner_states/right/inner_state" in report.notes[0]
    assert report.dropped == ("ScaleByAdamState count: inner_states/right/inner_state",)


def test_saved_hyperparameters_win_and_are_named():
    make = optax.inject_hyperparams(optax.adam)
    old, state, report = moved(make(1e-2), scaled(make(1e-3)))
    assert_same(state.inner_state, old)
    name = "inner_state/hyperparams/learning_rate"
    assert report.notes == (f"{name} is 0.01, not 0.001: the saved value replaces the argument.",)


def test_params_of_other_shapes_are_refused_by_name():
    params, old = trained(ADAM())
    params["b"]["w"] = jnp.zeros((5, 2))
    message = r"migrate_state: params must .* \(2, 2\) at '0/mu/b/w', got b/w of \(5, 2\)"
    with pytest.raises(ValueError, match=message):
        migrate_state(old, scaled(ADAM()), params)


@pytest.mark.parametrize("change", ["scaler moved", "partition", "unmasked"])
def test_a_state_without_its_classes_is_read_by_the_names_of_fields(change):
    """Defect guarded against: nothing of it was kept, also with another chain's units."""
    make_old, make_new, _ = CHANGES[change]
    old, expected, said = moved(make_old(), make_new())
    for saved in (plain(old), serialization.msgpack_restore(serialization.to_bytes(old))):
        state, report = migrate_state(saved, make_new(), make_params())
        assert_same(state, expected)
        assert report.kept == said.kept and report.dropped == said.dropped
        assert "old_state has no classes" in report.notes[0]


OLD = {"applied": "ran finite last_finite last_update_finite", "layers_skipped": "skipped_layers"}
OLD |= {"skipped": "held_calls held_updates skipped_steps dropped_windows", "rule_state": "own"}


@pytest.mark.parametrize(("new", "old"), [(new, x) for new in OLD for x in OLD[new].split()])
def test_a_field_is_read_by_its_name_of_0_3(new, old):
    layers = getattr(sys.modules.get("boostax.layers.release"), "LayersState", None)
    for cls in [x for x in (*vars(boostax.states).values(), layers) if hasattr(x, "_fields")]:
        assert old not in cls._fields
        if new in cls._fields:
            expected = cls(*map(jnp.int32, range(len(cls._fields))))
            saved = {old if x == new else x: value for x, value in plain(expected).items()}
            tx = keeping(jax.tree.map(jnp.zeros_like, expected))
            assert_same(migrate_state(saved, tx, make_params())[0], expected)


def test_misuse_is_refused():
    params, old = trained(ADAM())
    with pytest.raises(TypeError, match=r"new_tx must be an optax\.GradientTransformation"):
        migrate_state(old, old, params)


def test_the_state_of_a_part_that_is_gone_is_refused():
    class GroupSignalState(NamedTuple):
        signal: jax.Array

    GroupSignalState.__module__ = "boostax.freeze.plateau_that_was"
    params, old = trained(ADAM())
    message = "old_state must be of parts that boostax has, got 'boostax.freeze.plateau_that_was.Gr"
    with pytest.raises(ValueError, match=message):
        migrate_state((GroupSignalState(jnp.ones(2)), old), ADAM(), params)
    tx = boostax.precision.store(ADAM(), params="remainder")
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"of parts .*StoreState of params='kahan'"):
        migrate_state(state._replace(low=jax.tree.map(jnp.zeros_like, params)), tx, params)
    migrate_state(state, tx, params)


def test_residuals_of_a_train_state_are_kept_per_replica(mesh):
    old_tx = optax.chain(boostax.top_k_reduce("data", density=0.25), ADAM())
    new_tx, params = boostax.accumulate(old_tx, 2, axis_name="data"), make_params()
    old = jax.tree.map(jnp.ones_like, boostax.states.stack_replicas(old_tx.init(params), 8))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    old = (old[0]._replace(residual=jax.device_put(old[0].residual, rows)), *old[1:])
    state, report = migrate_state(old, new_tx, params)
    fresh = boostax.states.stack_replicas(new_tx.init(params), 8)
    assert_same(state, fresh._replace(inner_state=old))
    assert not buffers(state) & buffers(old)
    assert state.inner_state[0].residual.local["a"].sharding == rows
    assert "window" in report.anew[0] and len(report.anew) == 1
    # As restored, on the host.
    assert_same(migrate_state(jax.device_get(old), new_tx, params)[0], state)
    with pytest.raises(ValueError, match=r"got 4 and 8\..*boostax\.reshard_state"):
        migrate_state(state, new_tx, params, replicas=4)
    halved = boostax.reshard_state(state, 4)
    again, report = migrate_state(halved, new_tx, params, replicas=4)
    assert_same(again, halved)
    assert report.anew == report.dropped == ()


def test_shared_moments_become_those_of_each_replica_and_not_the_other_way():
    params, old = trained(ADAM())
    new_tx = boostax.reduce.adasum_delta(ADAM(), axis_name="data")
    state, _ = migrate_state(old, new_tx, params, replicas=4)
    assert_same(state.inner_state, boostax.states.stack_replicas(boostax.PerReplica(old), 4))
    back, report = migrate_state(state, ADAM(), params)
    assert_same(back, ADAM().init(params))
    assert report.dropped
    assert_same(migrate_state(boostax.reshard_state(state, 1), ADAM(), params)[0], old)
    inside, _ = migrate_state(new_tx.init(params), scaled(new_tx), params)
    assert_same(inside, scaled(new_tx).init(params))


def test_params_of_each_replica_give_the_number_of_replicas():
    params, old = trained(ADAM())
    tx = boostax.reduce.local_updates(ADAM(), every=2, axis_name="data")
    own = boostax.PerReplica(jax.tree.map(lambda p: jnp.stack([p] * 3), params))
    state, _ = migrate_state(old, tx, own)
    assert_same(state.inner_state, boostax.states.stack_replicas(boostax.PerReplica(old), 3))


def test_placement_and_keys_follow_the_new_state():
    old = jax.device_put(trained(ADAM())[1], jax.devices()[0])
    state, _ = migrate_state(old, scaled(ADAM()), jax.device_put(make_params(), jax.devices()[1]))
    assert state.inner_state[0].mu["a"].devices() == {jax.devices()[1]}
    assert not state.inner_state[0].count.committed
    noisy = optax.add_noise(0.1, 0.5, jax.random.key(1))
    old, state, _ = moved(noisy, optax.chain(clip(), noisy))
    assert jnp.all(jax.random.key_data(state[1].rng_key) == jax.random.key_data(old.rng_key))


def keeping(x):
    """A transformation whose state is no NamedTuple."""
    return optax.GradientTransformation(lambda params: x, optax.identity().update)


UNCHANGED = {
    "a tuple": lambda: keeping((jnp.zeros(2), {"x": jnp.zeros(3)})),
    "an array": lambda: keeping(jnp.zeros(2)),
    "per group": lambda: freeze(ADAM(), schedule=[0, 1], moments="per_group"),
    "factored": lambda: optax.adafactor(1e-2),
    "lbfgs": optax.lbfgs,
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_the_same_chain_keeps_everything(name):
    """As ``migrated_there_and_back_never_moved`` says of the parts of boostax."""
    tx, params = UNCHANGED[name](), make_params()
    old = jax.tree.map(jnp.ones_like, tx.init(params))
    state, report = migrate_state(old, tx, params)
    assert_same(state, old)
    assert report.anew == report.dropped == ()


def test_a_moment_that_was_not_needed_may_be_needed_now():
    """Adafactor has one element in place of the full moment of a leaf that it factors."""
    factored = optax.adafactor(1e-2, min_dim_size_to_factor=2).init(make_params())
    assert migrate_state(factored, optax.adafactor(1e-2), make_params())[1].anew
