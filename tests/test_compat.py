"""Drop-in forms beside what they are forms of: step by step, on streams with NaN in them."""

import functools
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training import dynamic_scale
from jax.sharding import PartitionSpec as P

import boostax
from boostax import compat
from boostax.testing import PAIR_LAWS, Case, laws_for

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": jnp.float32(0.5)}
LARGE = functools.partial(optax.skip_large_updates, max_squared_norm=9.0)


def adam():
    return optax.adamw(optax.linear_schedule(0.1, 0.01, 5))


def stream(seed, count, bad=()):
    """Gradients like the params; those at some indices with a NaN or an infinity."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        grads = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), PARAMS)
        if i in bad:
            grads["w"][0, 1] = rng.choice([np.nan, np.inf, -np.inf])
        yield grads


def windows(inner, axis, *skip):
    """``MultiSteps`` with windows of two, as a transformation."""
    tx = compat.MultiSteps(inner, 2, True, *skip, axis_name=axis)
    return tx.gradient_transformation()


def assert_near(actual, expected):
    """Of one structure: states of Optax's optimizers are of the same classes in both."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-6)
    jax.tree.map(close, actual, expected)


def beside(ours, theirs, fields, grads):
    """Both on a stream, under jit; yields the states after each step."""
    steps = [jax.jit(tx.update) for tx in (ours, theirs)]
    params = [PARAMS, PARAMS]
    states = [tx.init(PARAMS) for tx in (ours, theirs)]
    for each in grads:
        for i in range(2):
            updates, states[i] = steps[i](each, states[i], params[i])
            params[i] = optax.apply_updates(params[i], updates)
        assert_near(*params)
        for field in fields:
            assert_near(getattr(states[0], field), getattr(states[1], field))
        yield states


WINDOW = ("mini_step", "gradient_step", "inner_opt_state", "acc_grads", "skip_state")


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(
    ("every", "skips"),
    [
        (2, None),
        (3, optax.skip_not_finite),
        (3, LARGE),
        (lambda step: jnp.where(step < 2, 1, 3), optax.skip_not_finite),
    ],
    ids=["two", "three-finite", "three-small", "schedule-finite"],
)
def test_windows_are_those_of_multisteps(every, skips, mean):
    bad = () if skips is None else (0, 4, 5, 8)
    args = adam(), every, mean, skips
    ours, theirs = compat.MultiSteps(*args), optax.MultiSteps(*args)
    grads = list(stream(0, 14, bad))
    skipped = [skips is not None and bool(skips(g, jnp.zeros(()), None)[0]) for g in grads]
    assert any(skipped) == (skips is not None) and not all(skipped)
    for states, skip in zip(beside(ours, theirs, WINDOW, grads), skipped, strict=True):
        assert bool(ours.has_updated(states[0])) == (
            bool(theirs.has_updated(states[1])) and not skip
        )
        assert jax.tree.structure(pickle.loads(pickle.dumps(states[0]))) == jax.tree.structure(
            states[0]
        )


def test_a_window_of_one_keeps_no_sum():
    ours, theirs = compat.MultiSteps(adam(), 1), optax.MultiSteps(adam(), 1)
    fields = [field for field in WINDOW if field != "acc_grads"]
    for states in beside(ours, theirs, fields, stream(1, 4)):
        assert states[0].acc_grads is None and ours.has_updated(states[0])


@pytest.mark.parametrize("most", [0, 2])
def test_steps_are_those_of_apply_if_finite(most):
    """Until it gives in, which its documentation promises; then both hold a NaN."""
    ours, theirs = compat.apply_if_finite(adam(), most), optax.apply_if_finite(adam(), most)
    fields = ("notfinite_count", "last_finite", "total_notfinite", "inner_state")
    bad = (1, 3, 4, 6, 7, 8)
    grads = stream(2, 9, bad[: 1 if most == 0 else None])
    *_, (state, _) = beside(ours, theirs, fields, grads)
    assert int(state.total_notfinite) == (1 if most == 0 else 6)
    assert not jnp.isfinite(state.inner_state[0].mu["w"]).all()


@pytest.mark.parametrize(
    "mask", [True, False, {"w": True, "b": False}, {"w": np.array(False), "b": True}]
)
def test_what_a_mask_freezes_is_what_selective_transform_does(mask):
    args = {"freeze_mask": mask}
    ours = compat.selective_transform(adam(), **args)
    for states in beside(ours, optax.selective_transform(adam(), **args), (), stream(3, 3)):
        moments = jax.tree.leaves(states[0].inner_state)
    frozen = jax.tree.leaves(jax.tree.broadcast(jax.tree.map(bool, mask), PARAMS))
    assert sum(x.ndim == 2 for x in moments) == 2 * (not frozen[1])


# Loss scales.


def half(params, x):
    return jnp.sum((params["w"].astype(jnp.float16) @ x.astype(jnp.float16)) ** 2)


@pytest.mark.parametrize("how", [{}, {"minimum_scale": None}, {"minimum_scale": 512.0}])
def test_scales_are_those_of_dynamicscale(how):
    settings = {"growth_interval": 2, "growth_factor": 3.0, "scale": 1024.0, **how}
    pair = [kind(**settings) for kind in (compat.DynamicScale, dynamic_scale.DynamicScale)]

    @jax.jit
    def step(scale, x):
        loss = lambda x, params: (half(params, x), x[0])  # noqa: E731
        return scale.value_and_grad(loss, argnums=(1, 0), has_aux=True)(x, PARAMS)

    xs = np.random.default_rng(4).normal(size=(14, 3)).astype(np.float32)
    xs[[5, 11, 12]] = np.inf
    for x in xs:
        both = [step(scale, x) for scale in pair]
        pair = [found.dynamic_scale for found in both]
        assert both[0].finite == both[1].finite
        assert_near(*[(found.aux, found.grad, found[0].fin_steps) for found in both])
        assert_near(*[scale.scale for scale in pair])
    assert pair[0].replace(scale=1.0).scale == 1.0 and int(pair[0].fin_steps) > 0


def test_a_first_scale_is_of_the_types_of_the_second():
    """Defect guarded against: one of Python's numbers compiles the second step again."""
    traces = []

    @jax.jit
    def step(scale, w):
        traces.append(scale)
        return scale.value_and_grad(lambda w: w**2)(w).dynamic_scale

    step(step(compat.DynamicScale(), 1.0), 1.0)
    assert len(traces) == 1


@pytest.mark.parametrize("checked", [False, True])
def test_gradients_of_dynamicscale_are_means_over_replicas(mesh, checked):
    """Checked by JAX too, where Flax's are their sum."""

    def grads(scale, x):
        loss = lambda w, x: jnp.mean(w * x)  # noqa: E731
        run = lambda x: scale.value_and_grad(loss, axis_name="data")(jnp.float32(1), x)  # noqa: E731
        out = lambda x: (run(x).grad, run(x).finite, run(x).dynamic_scale.scale)  # noqa: E731
        how = {"mesh": mesh, "in_specs": P("data"), "out_specs": P(), "check_vma": checked}
        return jax.jit(jax.shard_map(out, **how))(x)

    x = jnp.arange(16.0).at[3].set(-3.0)
    assert_near(grads(compat.DynamicScale(), x), (x.mean(), True, 65536.0))
    theirs = grads(dynamic_scale.DynamicScale(), x)
    assert_near(theirs[0], x.mean() * (8 if checked else 1))
    bad = grads(compat.DynamicScale(), x.at[3].set(jnp.nan))
    assert not bad[1] and bad[2] == 32768.0


@pytest.mark.parametrize(("period", "factor", "least"), [(2, 2, 1.0), (3, 3, 0.25), (1, 2.0, 0.0)])
def test_scales_are_those_of_jmp(period, factor, least):
    args = jnp.float32(8.0), jnp.int32(0), period, factor, np.float32(least)
    ours, theirs = compat.DynamicLossScale(*args), jmp.DynamicLossScale(*args)
    step = jax.jit(lambda scale, finite: scale.adjust(finite))
    grads = {"a": jnp.arange(3.0), "b": jnp.float16(0.5)}
    for finite in np.random.default_rng(5).random(30) < 0.6:
        ours, theirs = step(ours, finite), theirs.adjust(jnp.asarray(finite))
        assert_near([ours.loss_scale, ours.counter], [theirs.loss_scale, theirs.counter])
        assert (ours.period, ours.factor, ours.min_loss_scale) == (period, factor, least)
        assert_near(ours.unscale(grads), theirs.unscale(grads))
        assert_near(ours.scale(jnp.float32(1.5)), theirs.scale(jnp.float32(1.5)))


def test_a_constant_scale_multiplies_in_f32():
    """jmp's product of an f16 loss with a Python number is infinite."""
    loss = jnp.float16(2.5)
    assert compat.StaticLossScale(2.0**15).scale(loss) == 81920.0
    assert jnp.isinf(jmp.StaticLossScale(2.0**15).scale(loss))
    for scale in (compat.NoOpLossScale(), compat.StaticLossScale(2.0)):
        assert scale.adjust(jnp.bool_(False)) is scale and not jax.tree.leaves(scale)
        assert jax.jit(lambda scale, x: scale.unscale(x))(scale, 4.0) == 4.0 / scale.loss_scale


def test_a_scale_of_jmp_is_a_plain_tree():
    """It can be lowered ahead of time and mapped to anything, which jmp's cannot."""
    scale = compat.DynamicLossScale(jnp.float32(4.0))
    assert jax.tree.map(lambda _: 0, scale).counter == 0
    shapes = jax.eval_shape(lambda: scale)
    assert jax.jit(lambda x: x.adjust(True)).lower(shapes).out_info.loss_scale.dtype == jnp.float32


# What is gained.


def test_a_window_reduces_once(mesh):
    """One branch, taken once in four calls, holds the all-reduce; beside it nothing is sent."""
    inner = optax.chain(boostax.all_reduce("data"), optax.adam(0.1))
    tx = compat.MultiSteps(inner, 4, axis_name="data").gradient_transformation()
    specs = P(), boostax.states.state_specs(tx, PARAMS, "data"), P("data")

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=specs[:2])
    def step(params, state, x):
        local = boostax.train.local_params(params, "data")
        state = boostax.states.enter_replica(state)
        loss = lambda p: jnp.mean((x @ p["w"].T + p["b"]) ** 2)  # noqa: E731
        params, state = boostax.apply_gradients(tx, jax.grad(loss)(local), state, params)
        return params, boostax.states.leave_replica(state)

    params = jax.tree.map(jnp.array, PARAMS)
    state = boostax.states.stack_replicas(tx.init(PARAMS), 8)
    x = jnp.ones((16, 3))
    found = boostax.audit(step, params, state, x, calls=4)
    assert found.reduced == (0, 7)
    assert {len(sent.branches) for sent in found.collectives} == {1}
    theirs = optax.MultiSteps(optax.adam(0.1), 4)
    expected, peer = PARAMS, theirs.init(PARAMS)
    for x in np.random.default_rng(6).normal(size=(8, 16, 3)).astype(np.float32):
        params, state = step(params, state, x)
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"].T + p["b"]) ** 2))(expected)  # noqa: B023
        updates, peer = theirs.update(grads, peer, expected)
        expected = optax.apply_updates(expected, updates)
    assert_near(params, expected)
    assert int(state.gradient_step) == 2


def test_a_window_takes_the_memory_of_accumulate():
    """No copy of the params: the renamed state is the same program."""
    params = {"w": jnp.ones((256, 256)), "v": jnp.ones((256, 256))}

    def temporaries(tx):
        step = lambda p, state, g: boostax.apply_gradients(tx, g, state, p)  # noqa: E731
        given = params, tx.init(params), params
        return jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile().memory_analysis()

    ours = temporaries(compat.MultiSteps(optax.adam(0.1), 4).gradient_transformation())
    bare = temporaries(boostax.accumulate(optax.adam(0.1), 4))
    assert ours.temp_size_in_bytes == bare.temp_size_in_bytes < 256 * 256 * 4
    assert ours.alias_size_in_bytes == bare.alias_size_in_bytes


def test_one_replica_s_skip_is_everyone_s(mesh):
    """And the largest of what they keep is kept, so that it is equal on all."""
    inner = optax.chain(boostax.all_reduce("data"), optax.sgd(1.0))
    tx = windows(inner, "data", optax.skip_not_finite)
    specs = boostax.states.state_specs(tx, jnp.zeros(()), "data")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs)
    def step(state, grads):
        updates = tx.update(grads[0], boostax.states.enter_replica(state), jnp.zeros(()))
        return boostax.states.leave_replica(updates[1])

    state = boostax.states.stack_replicas(tx.init(jnp.zeros(())), 8)
    state = step(state, jnp.ones(8))
    state = step(state, jnp.ones(8).at[5].set(jnp.nan))
    assert state.skip_state["should_skip"].dtype == bool and state.skip_state["should_skip"]
    assert (int(state.skip_state["num_not_finite"]), int(state.mini_step)) == (1, 1)
    state = step(state, jnp.ones(8))
    assert (int(state.mini_step), int(state.gradient_step)) == (0, 1)


def test_a_bad_window_is_in_no_later_one():
    """Optax multiplies its sum by zero, and a NaN stays."""
    tx = compat.MultiSteps(optax.sgd(1.0), 2)
    state = tx.init(jnp.float32(0))
    for grad in (jnp.nan, 1.0, 1.0, 3.0):
        updates, state = tx.update(jnp.float32(grad), state, jnp.float32(0))
    assert updates == -2.0 and state.acc_grads == 0.0


def test_a_window_can_be_flushed_and_saved_states_of_optax_move_in():
    old = optax.MultiSteps(optax.sgd(1.0), 3)
    _, saved = old.update(jnp.float32(2.0), old.init(jnp.float32(0)), jnp.float32(0))
    tx = compat.MultiSteps(optax.sgd(1.0), 3).gradient_transformation()
    state, report = boostax.migrate_state(saved, tx, jnp.float32(0))
    assert isinstance(state, compat.MultiStepsState) and not report.dropped
    assert (int(state.mini_step), float(state.acc_grads)) == (1, 2.0)
    params, state = boostax.flush(tx, state, jnp.float32(0))
    assert params == -2.0 and int(state.gradient_step) == 1


def test_a_scaler_inside_says_which_windows_were_applied():
    tx = compat.MultiSteps(boostax.static_loss_scale(optax.sgd(1.0), 1.0), 2)
    state = tx.init(jnp.float32(0))
    for grad, applied in ((jnp.inf, 0), (1.0, 0), (1.0, 0), (1.0, 1)):
        _, state = tx.update(jnp.float32(grad), state, jnp.float32(0))
        assert (int(state.gradient_step), bool(tx.has_updated(state))) == (applied, applied == 1)


def test_extra_arguments_pass_through():
    """Those of ``gradient_transformation`` are lost in a chain of Optax's."""
    seen = []

    def update(updates, state, params=None, *, value):
        seen.append(value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = optax.chain(compat.MultiSteps(inner, 1).gradient_transformation())
    tx.update(jnp.ones(()), tx.init(jnp.ones(())), jnp.ones(()), value=1.0)
    assert seen


def test_a_selection_ends_the_backward_pass(mesh):
    del mesh
    mask = {"w": True, "b": False}
    tx = compat.selective_transform(optax.sgd(1.0), freeze_mask=mask)
    step = boostax.make_train_step(lambda p, x: jnp.sum((x @ p["w"].T + p["b"]) ** 2), tx)
    state, _ = step(step.init(PARAMS), jnp.ones((4, 3)))
    np.testing.assert_array_equal(state.params["w"], PARAMS["w"])
    assert state.params["b"] != PARAMS["b"]


# The contract.

CASES = [
    Case("MultiSteps", windows, calls=2),
    Case(
        "MultiSteps that skips",
        lambda inner, axis: windows(inner, axis, optax.skip_not_finite),
        calls=2,
        skips=True,
        skip_view=lambda state: state.window,
    ),
    Case(
        "apply_if_finite",
        lambda inner, axis: compat.apply_if_finite(inner, 100, axis_name=axis),
        skips=True,
    ),
]
# As in Optax a finite gradient passes, however large its square is.
SQUARES = {"skip_is_as_if_the_step_never_was", "skip_inserted_anywhere_never_was"}
# What depends on how a state is wrapped; the rest is the gate's and the window's.
ALWAYS = {
    "an_unbound_axis_is_named",
    "apply_gradients_equals_update_and_apply",
    "results_are_typed_equal",
    "skip_is_agreed_when_one_replica_is_bad",
    "survives_serialisation_at_every_step",
}


@pytest.mark.parametrize(
    ("case", "law"),
    [
        pytest.param(case, name, marks=[] if name in ALWAYS else pytest.mark.long)
        for case in CASES
        for name in sorted(laws_for(case).keys() - SQUARES)
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_contract(case, law):
    laws_for(case)[law](case, *([0] if law in PAIR_LAWS else []))


def test_finite_gradients_with_infinite_squares_pass():
    """As with Optax, whose rules these are; a loss scaler around skips them."""
    for tx in (compat.apply_if_finite(optax.sgd(1.0), 3), windows(optax.sgd(1.0), None)):
        for _ in range(2):
            updates, _ = tx.update(jnp.float32(1e25), tx.init(jnp.zeros(())), jnp.zeros(()))
        assert jnp.isfinite(updates)


# Refusals.


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: compat.MultiSteps(adam(), 0), ValueError, "MultiSteps: every_k_schedule must be"),
        (lambda: compat.MultiSteps(adam(), 1.5), TypeError, "MultiSteps: every_k_schedule must be"),
        (lambda: compat.MultiSteps(3.0, 2), TypeError, "MultiSteps: opt must be"),
        (
            lambda: compat.selective_transform(adam(), freeze_mask={"w": 1, "b": 0}),
            TypeError,
            "selective_transform: freeze_mask must be a tree of bools",
        ),
        (
            lambda: compat.selective_transform(adam(), freeze_mask={"w": True}).init(PARAMS),
            ValueError,
            "groups must be a dictionary whose names match every leaf",
        ),
        (
            lambda: compat.DynamicLossScale(jnp.float32(2.0)).adjust(jnp.ones(2, bool)),
            ValueError,
            "DynamicLossScale: grads_finite must be",
        ),
    ],
)
def test_refusals(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize("skip", [jnp.ones(2, bool), jnp.int32(1)])
def test_a_skip_is_a_bool_scalar(skip):
    tx = compat.MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=lambda *_: (skip, ()))
    with pytest.raises(ValueError, match="should_skip_update_fn must be a function that returns"):
        tx.update(jnp.ones(()), tx.init(jnp.ones(())), jnp.ones(()))


def test_replicas_that_decide_separately_are_refused(mesh):
    def own(scale, finite):
        return scale.adjust(finite[0]).loss_scale[None]

    how = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P("data")}
    with pytest.raises(ValueError, match="must be the same on all replicas"):
        jax.shard_map(own, **how)(compat.DynamicLossScale(jnp.float32(2.0)), jnp.ones(8, bool))


def test_weights_are_refused():
    tx = windows(optax.sgd(1.0), None)
    with pytest.raises(ValueError, match="weight must be left out"):
        boostax.apply_gradients(tx, jnp.ones(()), tx.init(jnp.ones(())), jnp.ones(()), weight=2.0)


def test_what_a_rule_keeps_keeps_its_type():
    """Defect guarded against: a gate made an i32 of a bool that its rule kept."""
    tx = boostax.gate(optax.sgd(1.0), lambda g, own, p: (own, own), init=lambda _: True)
    assert tx.init(jnp.ones(())).own.dtype == bool


def test_neither_flax_nor_jmp_is_imported():
    script = "import sys, boostax.compat; print('flax' in sys.modules, 'jmp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr
