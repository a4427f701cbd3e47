"""A state saved before the chain changed goes on after it, with every part that still fits."""

import functools

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import boostax
from boostax.checkpoint import Checkpointer
from boostax.config.migrate import migrate_state
from boostax.testing import drawn

ADAM = functools.partial(optax.adamw, 1e-2)
LABELS = {"a": "left", "b": "right"}


def make_params():
    return {"a": jnp.arange(3.0), "b": {"w": jnp.arange(4.0).reshape(2, 2) / 3}}


def grads_of(params, step, scale=1.0):
    return jax.tree.map(lambda p: (jnp.cos(p * (step + 1)) + 0.1) * scale, params)


def trained(tx, steps=3):
    """Params and state after a few steps."""
    params = make_params()
    state = tx.init(params)
    for step in range(steps):
        grads = grads_of(params, step, boostax.precision.loss_scale(state))
        params, state = boostax.apply_gradients(tx, grads, state, params)
    return params, state


def through_disk(tx, state, params, directory):
    """The state as a later process reads it with the old transformation."""
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state)
        return checkpointer.restore(tx.init(params))[0]


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, False), path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))


def buffers(tree):
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array)
        for shard in leaf.addressable_shards
    }


def masked_adam():
    return optax.masked(optax.scale_by_adam(), {"a": True, "b": False})


def only_a(state):
    """Adam's state as ``masked_adam`` keeps it."""
    cut = lambda tree: {"a": tree["a"], "b": optax.MaskedNode()}  # noqa: E731
    return optax.MaskedState(state._replace(mu=cut(state.mu), nu=cut(state.nu)))


freeze = functools.partial(boostax.scheduled_freeze, groups={"a": 0, "b": {"w": 1}})
clip = lambda: optax.clip_by_global_norm(1.0)  # noqa: E731
scaled = functools.partial(boostax.dynamic_loss_scale, init_scale=8.0)
window = lambda tx, every=2: boostax.accumulate(tx, every)  # noqa: E731
record = functools.partial(boostax.subspace.record_trajectory, 3)

# Old and new transformation, and the new state by hand from the old one and a fresh one.
CHANGES = {
    "clip added": (ADAM, lambda: optax.chain(clip(), ADAM()), lambda old, new: (new[0], old)),
    "clip removed": (lambda: optax.chain(clip(), ADAM()), ADAM, lambda old, new: old[1]),
    "clip moved": (
        lambda: optax.chain(clip(), optax.trace(0.9), optax.scale(-1e-2)),
        lambda: optax.chain(optax.trace(0.9), clip(), optax.scale(-1e-2)),
        lambda old, new: (old[1], old[0], old[2]),
    ),
    "scaler added": (ADAM, lambda: scaled(ADAM()), lambda old, new: new._replace(inner_state=old)),
    "scaler removed": (lambda: scaled(ADAM()), ADAM, lambda old, new: old.inner_state),
    "scaler moved": (
        lambda: scaled(window(ADAM())),
        lambda: window(scaled(ADAM())),
        # The open window is now of gradients that the scale still multiplies.
        lambda old, new: old.inner_state._replace(
            window=jax.tree.map(lambda x: x * old.scale, old.inner_state.window),
            inner_state=old._replace(inner_state=old.inner_state.inner_state),
        ),
    ),
    "window added": (ADAM, lambda: window(ADAM()), lambda old, new: new._replace(inner_state=old)),
    "window removed": (lambda: window(ADAM(), 3), ADAM, lambda old, new: old.inner_state),
    "trajectory added": (
        ADAM,
        lambda: optax.chain(record(), ADAM()),
        lambda old, new: (new[0], old),
    ),
    "trajectory moved": (
        lambda: optax.chain(record(), ADAM()),
        lambda: scaled(optax.chain(ADAM(), record())),
        lambda old, new: new._replace(inner_state=(old[1], old[0])),
    ),
    "freeze added": (
        ADAM,
        lambda: freeze(ADAM(), schedule=[0, 1, 1, 0]),
        lambda old, new: new._replace(inner_state=old),
    ),
    "freeze removed": (
        lambda: freeze(ADAM(), schedule=[0, 1, 1, 0]),
        ADAM,
        lambda old, new: old.inner_state,
    ),
    "freeze kept with another schedule": (
        lambda: freeze(ADAM(), schedule=[0, 0, 0, 0]),
        lambda: freeze(scaled(ADAM()), schedule=[0, 0, 0, 1]),
        lambda old, new: old._replace(
            inner_state=new.inner_state._replace(inner_state=old.inner_state),
            next_depth=jnp.int32(1),
        ),
    ),
    "centralize added": (
        ADAM,
        lambda: optax.chain(boostax.centralize_gradients(), ADAM()),
        lambda old, new: (new[0], old),
    ),
    "masked": (optax.scale_by_adam, masked_adam, lambda old, new: only_a(old)),
    "unmasked": (
        masked_adam,
        optax.scale_by_adam,
        lambda old, new: new._replace(
            count=old.inner_state.count,
            mu=new.mu | {"a": old.inner_state.mu["a"]},
            nu=new.nu | {"a": old.inner_state.nu["a"]},
        ),
    ),
    "another schedule": (
        lambda: optax.adamw(optax.linear_schedule(0.1, 0.0, 10)),
        lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 20)),
        lambda old, new: old,
    ),
    "schedule in the place of a constant": (
        ADAM,
        lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 20)),
        lambda old, new: (old[0], old[1], new[2]),
    ),
    "injected": (
        ADAM,
        lambda: optax.inject_hyperparams(optax.adamw)(1e-2),
        lambda old, new: new._replace(inner_state=old),
    ),
    "momentum to adam": (
        lambda: optax.sgd(0.1, 0.9),
        lambda: optax.adam(0.1),
        lambda old, new: new,
    ),
    "partition": (
        optax.scale_by_adam,
        lambda: optax.partition(
            {"left": optax.scale_by_adam(), "right": optax.scale_by_adam(b1=0.8)}, LABELS
        ),
        lambda old, new: new._replace(
            inner_states={
                "left": only_a(old),
                "right": optax.MaskedState(
                    old._replace(
                        mu={"a": optax.MaskedNode(), "b": old.mu["b"]},
                        nu={"a": optax.MaskedNode(), "b": old.nu["b"]},
                    )
                ),
            }
        ),
    ),
}


SHORT = {"clip added", "scaler removed", "window added", "freeze kept with another schedule"}
SHORT |= {"trajectory moved", "masked", "momentum to adam", "partition"}


@pytest.mark.parametrize(
    "change",
    [pytest.param(x, marks=[] if x in SHORT else [pytest.mark.long]) for x in CHANGES],
)
def test_a_saved_state_goes_on_after_a_change_of_the_chain(change, tmp_path):
    make_old, make_new, assemble = CHANGES[change]
    old_tx, new_tx = make_old(), make_new()
    params, state = trained(old_tx)
    old = through_disk(old_tx, state, params, tmp_path)
    migrated, _ = migrate_state(old, new_tx, params)
    expected = assemble(state, new_tx.init(params))
    assert_same(migrated, expected)
    assert not buffers(migrated) & buffers((old, params))
    grads = grads_of(params, 9, boostax.precision.loss_scale(expected))
    wanted = boostax.apply_gradients(drawn(new_tx), grads, expected, params)
    step = jax.jit(functools.partial(boostax.apply_gradients, drawn(new_tx)), donate_argnums=(1,))
    again = boostax.apply_gradients(drawn(new_tx), grads, migrated, params)
    jax.tree.map(np.testing.assert_array_equal, again, wanted)
    step(grads, migrated, params)
    # Donated or not, the old state is still there.
    assert_same(old, state)


def test_a_donated_old_state_does_not_take_the_new_one_with_it():
    params, old = trained(ADAM())
    new_tx = scaled(ADAM())
    state, _ = migrate_state(old, new_tx, params)
    jax.tree.map(lambda x: x.delete(), (old, params))
    jax.tree.map(np.asarray, state)
    assert len(buffers(state)) == len(jax.tree.leaves(state))


def test_states_of_params_that_are_aliased_by_init_are_copied():
    params = make_params()
    tx = optax.contrib.schedule_free(optax.sgd(0.1), 0.1)
    state, _ = migrate_state(optax.EmptyState(), tx, params)
    assert not buffers(state) & buffers(params)


def multi_steps(steps):
    tx = optax.MultiSteps(ADAM(), 4).gradient_transformation()
    return tx, *trained(tx, steps)


@pytest.mark.parametrize("steps", [0, 4, 6])
def test_multi_steps_becomes_accumulate(steps):
    tx, params, old = multi_steps(steps)
    new_tx = boostax.accumulate(ADAM(), 4)
    state, report = migrate_state(old, new_tx, params)
    assert int(state.micro_step) == steps % 4 and int(state.optimizer_steps) == steps // 4
    assert bool(boostax.train.has_updated(state)) == (steps == 4)
    expected = jax.tree.map(lambda x: x * old.mini_step, old.acc_grads)
    assert_same(state.window.grads, expected)
    assert_same(state.inner_state, old.inner_opt_state)
    assert len(report.notes) == (steps == 6)
    theirs, ours = params, params
    for step in range(4):
        grads = grads_of(params, step)
        updates, old = tx.update(grads, old, theirs)
        theirs = optax.apply_updates(theirs, updates)
        ours, state = boostax.apply_gradients(new_tx, grads, state, ours)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), ours, theirs)


def test_apply_if_finite_becomes_a_scaler():
    old_tx = optax.apply_if_finite(ADAM(), 5)
    params, old = trained(old_tx)
    for _ in range(2):
        bad = jax.tree.map(lambda p: p * jnp.nan, params)
        _, old = old_tx.update(bad, old, params)
    new_tx = boostax.static_loss_scale(ADAM(), 1.0)
    state, report = migrate_state(old, new_tx, params)
    expected = new_tx.init(params)._replace(
        skipped_steps=jnp.int32(2), skipped_in_a_row=jnp.int32(2), inner_state=old.inner_state
    )
    assert_same(state, expected)
    assert report.dropped == ()


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
    expected = new_tx.init(params)._replace(
        scale=jnp.float32(512), clean_steps=jnp.int32(clean), inner_state=old
    )
    assert_same(state, expected)
    assert report.notes == ("scale is 512.0, not 8.0: the saved value stays.",)
    assert report.dropped == ()


def test_two_foreign_states_feed_one_scaler():
    params, old = trained(optax.apply_if_finite(ADAM(), 5))
    old = old._replace(total_notfinite=jnp.int32(4))
    state, _ = migrate_state((old, DynamicScale(fin_steps=3, scale=64.0)), scaled(ADAM()), params)
    found = float(state.scale), int(state.clean_steps), int(state.skipped_steps)
    assert found == (64, 3, 4)


def test_the_report_says_what_was_kept_made_and_dropped():
    params, old = trained(optax.chain(record(), optax.sgd(0.1, 0.9)))
    _, report = migrate_state(old, window(optax.adam(0.1)), params)
    assert str(report) == (
        "kept:\n"
        "  nothing\n"
        "made anew:\n"
        "  AccumulateState micro_step, optimizer_steps, dropped_windows, applied, window: "
        "the root\n"
        "  ScaleByAdamState count, mu, nu: inner_state/0\n"
        "dropped:\n"
        "  TrajectoryState steps, recorded, snapshots, gram: 0\n"
        "  TraceState trace: 1/0"
    )
    params, old = trained(optax.chain(masked_adam(), optax.trace(0.5)))
    _, report = migrate_state(old, optax.chain(clip(), optax.scale_by_adam()), params)
    assert str(report) == (
        "kept:\n"
        "  ScaleByAdamState count, mu/a, nu/a: 0/inner_state -> 1\n"
        "made anew:\n"
        "  ScaleByAdamState mu/b/w, nu/b/w: 1\n"
        "dropped:\n"
        "  TraceState trace: 1"
    )
    _, params, old = multi_steps(2)
    _, report = migrate_state(old, boostax.accumulate(ADAM(), 4), params)
    assert str(report) == (
        "kept:\n"
        "  AccumulateState micro_step, optimizer_steps, applied, window from MultiStepsState: "
        "the root\n"
        "  ScaleByAdamState count, mu, nu: inner_opt_state/0 -> inner_state/0\n"
        "made anew:\n"
        "  AccumulateState dropped_windows: the root\n"
        "dropped:\n"
        "  nothing\n"
        "notes:\n"
        "  acc_grads of MultiStepsState at the root is taken as a mean over 2 micro-steps "
        "(use_grad_mean=True)."
    )


def test_an_open_window_goes_on_in_another_precision():
    params, old = trained(boostax.accumulate(ADAM(), 4), 2)
    new_tx = boostax.accumulate(ADAM(), 4, accumulator_dtype="bfloat16")
    state, report = migrate_state(old, new_tx, params)
    assert int(state.micro_step) == 2 and not report.dropped
    assert_same(state.window, jax.tree.map(lambda x: x.astype(jnp.bfloat16), old.window))


def test_a_trajectory_of_another_size_begins_anew():
    params, old = trained(boostax.subspace.record_trajectory(3))
    state, report = migrate_state(old, boostax.subspace.record_trajectory(4), params)
    assert (int(state.steps), int(state.recorded)) == (3, 0)
    assert report.anew == ("TrajectoryState recorded, snapshots, gram: the root",)


def test_an_average_moves_with_its_counts_or_begins_anew():
    average = boostax.model.average_params
    params, old = trained(average(boostax.static_loss_scale(ADAM(), 1.0), "lawa", size=2))
    state, report = migrate_state(
        old, boostax.static_loss_scale(average(ADAM(), "lawa", size=2), 1.0), params
    )
    assert_same(state.inner_state._replace(inner_state=()), old._replace(inner_state=()))
    assert not report.dropped and not report.anew
    state, report = migrate_state(old, average(ADAM(), "lawa", size=3), params)
    assert (int(state.steps), int(state.averaged)) == (0, 0)
    assert report.anew == ("AverageParamsState steps, averaged, averages: the root",)


def test_moments_are_kept_together_and_counts_with_moments():
    params, old = trained(optax.scale_by_adam())
    state, report = migrate_state(old, optax.scale_by_adam(mu_dtype="bfloat16"), params)
    assert int(state.count) == 0 and report.kept == ()
    assert all(float(jnp.abs(x).max()) == 0 for x in jax.tree.leaves(state.nu))


def test_of_several_states_the_best_fit_is_taken_and_named():
    chain = optax.chain(masked_adam(), optax.scale_by_adam())
    params, old = trained(chain)
    state, report = migrate_state(old, optax.scale_by_adam(), params)
    assert_same(state, old[1])
    assert report.notes == (
        "ScaleByAdamState: 2 in the old state, 1 in the new one; 1 -> the root.",
    )
    params, old = trained(optax.named_chain(("x", optax.trace(0.9)), ("y", optax.trace(0.5))))
    more = optax.named_chain(*[(name, optax.trace(0.9)) for name in "wxy"])
    state, report = migrate_state(old, more, params)
    assert_same((state["x"], state["y"]), (old["x"], old["y"]))
    assert report.notes == ("TraceState: 2 in the old state, 3 in the new one; x -> x, y -> y.",)


def test_one_state_becomes_several_and_several_one():
    make_old, make_new, _ = CHANGES["partition"]
    params, old = trained(make_new())
    state, report = migrate_state(old, make_old(), params)
    left, right = (old.inner_states[side].inner_state for side in ("left", "right"))
    assert_same(state.mu, {"a": left.mu["a"], "b": right.mu["b"]})
    assert int(state.count) == 3
    assert "also takes moments from inner_states/right/inner_state" in report.notes[0]
    assert report.dropped == ("ScaleByAdamState count: inner_states/right/inner_state",)


def test_saved_hyperparameters_win_and_are_named():
    make = optax.inject_hyperparams(optax.adam)
    params, old = trained(make(1e-2))
    state, report = migrate_state(old, scaled(make(1e-3)), params)
    assert_same(state.inner_state, old)
    name = "inner_state/hyperparams/learning_rate"
    assert report.notes == (f"{name} is 0.01, not 0.001: the saved value stays.",)


def test_params_of_other_shapes_are_refused_by_name():
    params, old = trained(ADAM())
    params["b"]["w"] = jnp.zeros((5, 2))
    message = r"migrate_state: params must .* got 'b/w' of \(5, 2\), .* \(2, 2\) at '0/mu/b/w'"
    with pytest.raises(ValueError, match=message):
        migrate_state(old, scaled(ADAM()), params)


def test_misuse_is_refused():
    params, old = trained(ADAM())
    with pytest.raises(TypeError, match=r"new_tx must be an optax\.GradientTransformation"):
        migrate_state(old, old, params)
    step = boostax.make_train_step(lambda p, x: jnp.sum(p["a"] * x), ADAM())
    with pytest.raises(TypeError, match="old_state must be an optimizer state, got 'TrainState'"):
        migrate_state(step.init(params), ADAM(), params)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["b"]["w"] - 1.0) ** 2) + jnp.sum(params["a"] ** 2)


def on_mesh(mesh, inner, steps=0):
    reduce = boostax.top_k_reduce("data", density=0.25)
    step = boostax.make_train_step(
        loss_fn, inner(optax.chain(reduce, ADAM())), mesh=mesh, axis_name="data"
    )
    state = step.init(make_params())
    for i in range(steps):
        state, _ = step(state, batch_of(i))
    return step, state


def batch_of(i):
    return jnp.sin(jnp.arange(32.0) + i).reshape(16, 2)


@pytest.mark.long
def test_residuals_of_a_train_state_are_kept_per_replica(mesh):
    _, old = on_mesh(mesh, lambda tx: tx, 2)
    step, fresh = on_mesh(mesh, lambda tx: boostax.accumulate(tx, 2, axis_name="data"))
    opt_state, report = migrate_state(old.opt_state, step.tx, old.params)
    residual = old.opt_state[0].residual.local
    assert float(jnp.abs(residual["b"]["w"]).max()) > 0
    expected = fresh.opt_state._replace(inner_state=old.opt_state)
    assert_same(opt_state, expected)
    assert not buffers(opt_state) & buffers(old)
    assert opt_state.inner_state[0].residual.local["a"].sharding == residual["a"].sharding
    assert "window" in report.anew[0] and len(report.anew) == 1
    go_on = old._replace(opt_state=opt_state)
    go_on = jax.device_put(go_on, step.shardings(go_on))
    wanted = jax.tree.map(jnp.copy, go_on._replace(opt_state=expected))
    for i in range(2):
        go_on, _ = step(go_on, batch_of(i))
        wanted, _ = step(wanted, batch_of(i))
    assert_same(go_on, wanted)
    params, opt_state = make_params(), go_on.opt_state
    with pytest.raises(ValueError, match=r"got '4 and 8'\. boostax\.reshard_state"):
        migrate_state(opt_state, step.tx, params, replicas=4)
    halved = boostax.reshard_state(opt_state, 4)
    state, report = migrate_state(halved, step.tx, params, replicas=4)
    assert_same(state, halved)
    assert report.anew == report.dropped == ()


def test_shared_moments_become_those_of_each_replica_and_not_the_other_way():
    params, old = trained(ADAM())
    new_tx = boostax.reduce.adasum_delta(ADAM(), "data")
    state, _ = migrate_state(old, new_tx, params, replicas=4)
    assert_same(state.inner_state, boostax.states.stack_replicas(boostax.PerReplica(old), 4))
    back, report = migrate_state(state, ADAM(), params)
    assert_same(back, ADAM().init(params))
    assert report.dropped
    single = boostax.reshard_state(state, 1)
    assert_same(migrate_state(single, ADAM(), params)[0], old)
    inside, _ = migrate_state(new_tx.init(params), scaled(new_tx), params)
    assert_same(inside, scaled(new_tx).init(params))


def test_params_of_each_replica_give_the_number_of_replicas():
    params, old = trained(ADAM())
    tx = boostax.reduce.local_updates(ADAM(), "data", every=2)
    own = boostax.PerReplica(jax.tree.map(lambda p: jnp.stack([p] * 3), params))
    state, _ = migrate_state(old, tx, own)
    assert_same(state.inner_state, boostax.states.stack_replicas(boostax.PerReplica(old), 3))


def test_placement_and_keys_follow_the_new_state():
    params = jax.device_put(make_params(), jax.devices()[1])
    old = jax.device_put(trained(ADAM())[1], jax.devices()[0])
    state, _ = migrate_state(old, scaled(ADAM()), params)
    assert state.inner_state[0].mu["a"].devices() == {jax.devices()[1]}
    assert not state.inner_state[0].count.committed
    step = jax.jit(functools.partial(boostax.apply_gradients, drawn(scaled(ADAM()))))
    step(params, state, params)
    noisy = optax.add_noise(0.1, 0.5, jax.random.key(1))
    params, old = trained(noisy)
    state, _ = migrate_state(old, optax.chain(clip(), noisy), params)
    assert jnp.all(jax.random.key_data(state[1].rng_key) == jax.random.key_data(old.rng_key))


UNCHANGED = {
    "group scale": lambda: boostax.precision.group_loss_scale(ADAM(), {"a": 0, "b": 1}),
    "power_sgd": lambda: optax.chain(boostax.reduce.power_sgd_reduce("data", rank=1), ADAM()),
    "int8": lambda: optax.chain(boostax.int8_reduce("data"), ADAM()),
    "partial": lambda: boostax.reduce.partial_average(ADAM(), "data", 2),
    "weighted": lambda: boostax.accumulate(ADAM(), 3, axis_name="data", normalize="weight"),
    "dim_reduce": lambda: boostax.dim_reduce(boostax.subspace.random_basis(make_params(), 2)),
    "per group": lambda: freeze(ADAM(), schedule=[0, 1], moments="per_group"),
    "factored": lambda: optax.adafactor(1e-2),
    "lbfgs": optax.lbfgs,
}


@pytest.mark.parametrize("name", UNCHANGED)
@pytest.mark.parametrize("replicas", [None, pytest.param(4, marks=pytest.mark.long)])
def test_the_same_chain_keeps_everything(name, replicas):
    tx, params = UNCHANGED[name](), make_params()
    old = jax.tree.map(jnp.ones_like, tx.init(params))
    if replicas:
        old = boostax.states.stack_replicas(old, replicas)
    state, report = migrate_state(old, tx, params)
    assert_same(state, old)
    assert report.anew == report.dropped == ()
