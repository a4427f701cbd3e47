"""Scalers refuse, while they are traced, gradients of a loss that nobody scaled."""

import contextlib
import copy
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reducing import mesh_of

import boostax
from boostax import precision

REFUSED, ALONE = "gradients of a loss that was not", "that ignores scales="
W = {"body": jnp.ones(3), "head": jnp.full(3, 0.5)}
X = jnp.arange(24.0).reshape(8, 3) / 10
LABELS = {"body": 0, "head": 1}


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x * params["body"]) @ params["head"] - 1) ** 2)


def unscaled(params, state, x):
    return jax.value_and_grad(loss_fn)(params, x)


def by_oracle(params, state, x):
    return boostax.value_and_grad(loss_fn)(params, state, x)


def by_scale_loss(params, state, x):
    return jax.value_and_grad(lambda p: precision.scale_loss(loss_fn(p, x), state))(params)


def vouched(params, state, x):
    loss, grads = jax.value_and_grad(lambda p: loss_fn(p, x) * 2.0**16)(params)
    return loss, precision.assume_scaled(grads, state)


def in_a_scan(params, state, x):
    def slice_of(total, rows):
        loss, grads = by_scale_loss(params, state, rows)
        return jax.tree.map(jnp.add, total, grads), loss

    total, losses = jax.lax.scan(slice_of, jax.tree.map(jnp.zeros_like, params), x.reshape(2, 4, 3))
    return losses.mean(), precision.assume_scaled(jax.tree.map(lambda g: g / 2, total), state)


def checkpointed(params, state, x):
    loss = jax.checkpoint(lambda p: precision.scale_loss(loss_fn(p, x), state))
    return jax.value_and_grad(loss)(params)


SCALED = [by_oracle, by_scale_loss, vouched, in_a_scan, checkpointed]
SCALE = boostax.dynamic_loss_scale
SCALERS = {
    "dynamic": SCALE,
    "static": functools.partial(boostax.static_loss_scale, scale=2.0**16),
    "chained": lambda tx: optax.chain(SCALE(tx), optax.scale(1.0)),
    "window inside": lambda tx: SCALE(boostax.accumulate(tx, every=2)),
    "window outside": lambda tx: boostax.accumulate(SCALE(tx), every=2),
    "MultiSteps": lambda tx: optax.MultiSteps(SCALE(tx), 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(SCALE(tx), 3),
    "hyperparams": lambda tx: optax.inject_hyperparams(
        lambda rate: SCALE(optax.chain(tx, optax.scale(rate)))
    )(rate=1.0),
    "flattened": lambda tx: optax.flatten(SCALE(tx)),
}
OF_A_PART = {
    "partition": lambda tx: optax.partition({"all": SCALE(tx)}, {"body": "all", "head": "all"}),
    "conditional": lambda tx: optax.conditionally_transform(SCALE(tx), lambda i, **_: i >= 0),
}


def step_of(tx, gradients):
    def step(params, state, x):
        _, grads = gradients(params, state, x)
        return boostax.apply_gradients(tx, grads, state, params)

    return step


def traced(tx, gradients):
    return jax.eval_shape(step_of(tx, gradients), W, tx.init(W), X)


def mapped(step, check):
    specs = {"in_specs": jax.P(), "out_specs": jax.P(), "check_vma": check}
    return jax.jit(jax.shard_map(step, mesh=mesh_of(data=2), **specs))


def looped(step):
    @jax.jit
    def run(params, state, x):
        return jax.lax.fori_loop(0, 2, lambda _, carry: step(*carry, x), (params, state))

    return run


def pmapped(step):
    run = jax.pmap(step, in_axes=(None, None, 0), axis_name="data")
    first = functools.partial(jax.tree.map, lambda a: a[0])
    return lambda params, state, x: first(run(params, state, jnp.stack([x, x])))


CONTEXTS = {
    "jit": jax.jit,
    "scan": looped,
    "shard_map": functools.partial(mapped, check=True),
    "shard_map, unchecked": functools.partial(mapped, check=False),
    "pmap": pmapped,
}


@pytest.mark.filterwarnings("ignore:.*loss_scale inside apply_if_finite")
@pytest.mark.parametrize("name", SCALERS)
@pytest.mark.parametrize("gradients", SCALED, ids=lambda fn: fn.__name__)
def test_a_scaled_loss_is_taken_through_every_wrapper(name, gradients):
    traced(SCALERS[name](optax.sgd(0.1)), gradients)


@pytest.mark.filterwarnings("ignore:.*loss_scale inside apply_if_finite")
@pytest.mark.parametrize("name", [*SCALERS, *OF_A_PART])
def test_a_plain_loss_is_refused_through_every_wrapper(name):
    text = "loss_scale in" if name in OF_A_PART else r"boostax\.value_and_grad\(loss_fn\)"
    with pytest.raises(ValueError, match=text):
        traced((SCALERS | OF_A_PART)[name](optax.sgd(0.1)), unscaled)


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_plain_loss_is_refused_in_every_context(name):
    tx = SCALE(optax.sgd(0.1))
    run = CONTEXTS[name]
    with pytest.raises(ValueError, match=r"assume_scaled\(grads, opt_state\)"):
        run(step_of(tx, unscaled))(W, tx.init(W), X)
    for gradients in (by_oracle, by_scale_loss):
        params, _ = run(step_of(tx, gradients))(W, tx.init(W), X)
        assert float(jnp.abs(params["head"] - W["head"]).max()) > 1e-3


def on_mesh(kind, scaler):
    """A mesh, replicated params on it, and a scaled mean over it."""
    mesh = mesh_of(kind, data=4)
    params = jax.device_put(W, jax.NamedSharding(mesh, jax.P()))
    tx = scaler(optax.chain(boostax.all_reduce("data"), optax.sgd(0.1)), axis_name="data")
    return mesh, params, boostax.on_mesh(tx, params, axis_name="data")


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_plain_loss_is_refused_on_global_arrays(kind):
    mesh, params, tx = on_mesh(kind, boostax.dynamic_loss_scale)
    oracle = boostax.value_and_grad(loss_fn, mesh=mesh, axis_name="data")
    state, x = tx.init(params), jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    plain = lambda params, state, x: oracle(params, optax.EmptyState(), x)  # noqa: E731
    with pytest.raises(ValueError, match=REFUSED):
        jax.jit(step_of(tx, plain))(params, state, x)
    jax.jit(step_of(tx, oracle))(params, state, x)


@pytest.mark.parametrize("other", [1, 0])
def test_another_optimizers_state_is_no_scale(other):
    """Two optimizers in one step: the scale of the one says nothing of the other's."""
    one, two = (SCALE(optax.sgd(r)) for r in (0.1, 0.2))

    def step(params, states, x):
        params, _ = step_of(one, by_oracle)(params, states[0], x)
        _, grads = by_oracle(params, states[other], x)
        return boostax.apply_gradients(two, grads, states[1], params)[0]

    refused = pytest.raises(ValueError, match="the scale in this opt_state")
    with contextlib.nullcontext() if other else refused:
        jax.eval_shape(step, W, (one.init(W), two.init(W)), X)


@pytest.mark.parametrize("gradients", [by_oracle, by_scale_loss])
def test_params_in_the_place_of_the_state_are_refused(gradients):
    with pytest.raises(ValueError, match=REFUSED):
        traced(SCALE(optax.sgd(0.1)), lambda params, state, x: gradients(params, params, x))


def test_the_scale_of_the_last_call_is_no_longer_good():
    tx = SCALE(optax.sgd(0.1))

    def two_steps(params, state, x):
        params, state = step_of(tx, by_oracle)(params, state, x)
        return step_of(tx, unscaled)(params, state, x)

    with pytest.raises(ValueError, match=REFUSED):
        jax.eval_shape(two_steps, W, tx.init(W), X)


@pytest.mark.parametrize("context", ["eager", "jit"])
def test_a_loss_is_scaled_once(context):
    run = jax.eval_shape if context == "jit" else lambda fn, *args: fn(*args)
    state = SCALE(optax.sgd(0.1)).init(W)

    def by_both(params, state, x):
        scaled = lambda p, x: precision.scale_loss(loss_fn(p, x), state)  # noqa: E731
        return boostax.value_and_grad(scaled)(params, state, x)

    def by_hand(params, state, x):
        return precision.scale_loss(precision.scale_loss(loss_fn(params, x), state), state)

    for fn in (by_both, by_hand):
        with pytest.raises(ValueError, match="must be multiplied by the scale once"):
            run(fn, W, state, X)
    run(by_oracle, W, state, X)  # A refusal leaves nothing behind.
    run(by_hand, W, optax.sgd(0.1).init(W), X)


def test_a_scale_of_one_asks_for_nothing():
    traced(boostax.static_loss_scale(optax.sgd(0.1), 1.0), unscaled)


def test_gradients_of_another_jit_need_a_word():
    tx = SCALE(optax.sgd(0.1))
    state = tx.init(W)
    _, grads = jax.jit(by_oracle)(W, state, X)
    with pytest.raises(ValueError, match="assume_scaled"):
        jax.jit(tx.update)(grads, state, W)
    told = jax.jit(lambda g, s, p: tx.update(precision.assume_scaled(g, s), s, p)[0])
    updates = told(grads, state, W)
    jax.tree.map(np.testing.assert_array_equal, updates, tx.update(grads, state, W)[0])


@pytest.mark.parametrize("context", ["eager", "jit"])
def test_freezing_in_one_program_asks_as_its_caller_does(context):
    """The depths are traced inside: eagerly nothing is asked, and under jit what jit would ask."""
    tx = boostax.scheduled_freeze(SCALE(optax.sgd(0.1)), LABELS, [0, 1])
    run = jax.jit if context == "jit" else lambda fn: fn
    run(step_of(tx, by_oracle))(W, tx.init(W), X)
    with pytest.raises(ValueError, match=REFUSED) if context == "jit" else contextlib.nullcontext():
        run(step_of(tx, unscaled))(W, tx.init(W), X)


def test_an_inner_jit_of_the_update_is_within_the_step():
    tx = SCALE(optax.sgd(0.1))
    inner = jax.jit(functools.partial(boostax.apply_gradients, tx))
    step = lambda params, state, x: inner(by_oracle(params, state, x)[1], state, params)  # noqa: E731
    jax.jit(step)(W, tx.init(W), X)


def crossing_by_hand(params, x, *, scales=None):
    hidden = jnp.tanh(x * params["body"])
    if scales is not None:
        hidden = precision.scale_boundary(hidden, scales, 0, 1)
    return jnp.mean((hidden @ params["head"] - 1) ** 2)


def ignoring(params, x, *, scales=None):
    return loss_fn(params, x)


def scaled_by_hand(loss):
    def gradients(params, state, x):
        scales = precision.group_scales(state)
        scaled = lambda p: precision.scale_loss(loss(p, x, scales=scales), state)  # noqa: E731
        return jax.value_and_grad(scaled)(params)

    return gradients


GROUPED = {
    "whole batch": boostax.value_and_grad,
    "micro-batches": functools.partial(boostax.value_and_grad, microbatches=2),
    "by hand": scaled_by_hand,
}


@pytest.mark.parametrize("form", GROUPED)
def test_groups_need_their_boundaries(form):
    tx = precision.group_loss_scale(optax.sgd(0.1), LABELS)
    traced(tx, GROUPED[form](crossing_by_hand))
    with pytest.raises(ValueError, match=ALONE):
        traced(tx, GROUPED[form](ignoring))
    one = precision.group_loss_scale(optax.sgd(0.1), {"body": 0, "head": 0})
    traced(one, GROUPED[form](ignoring))


def test_groups_on_global_arrays_need_their_boundaries():
    by_group = functools.partial(precision.group_loss_scale, labels=LABELS)
    mesh, params, tx = on_mesh(jax.sharding.AxisType.Auto, by_group)
    step = lambda loss: step_of(tx, boostax.value_and_grad(loss, mesh=mesh, axis_name="data"))  # noqa: E731
    jax.eval_shape(step(crossing_by_hand), params, tx.init(params), X)
    with pytest.raises(ValueError, match=ALONE):
        jax.eval_shape(step(ignoring), params, tx.init(params), X)


def test_the_program_is_the_same_with_and_without_a_word():
    """The handshake is Python's: not an equation more."""
    tx = SCALE(optax.adam(0.1))

    def text(gradients):
        step = jax.jit(step_of(tx, gradients), donate_argnums=(0, 1))
        return step.lower(copy.copy(W), tx.init(W), X).as_text()

    def twice_vouched(params, state, x):
        loss, grads = by_oracle(params, state, x)
        return loss, precision.assume_scaled(grads, state)

    assert text(by_oracle) == text(twice_vouched)


def test_marks_do_not_outlive_their_trace():
    tx = SCALE(optax.sgd(0.1))
    gc.collect()
    before = len(boostax._core.handshake._MARKS)
    for _ in range(3):
        jax.jit(step_of(tx, by_scale_loss)).lower(W, tx.init(W), X)
    gc.collect()
    assert len(boostax._core.handshake._MARKS) <= before


# Losses inside losses.


def state_of(scale):
    tx = optax.sgd(0.1)
    return (tx if scale == 1 else boostax.static_loss_scale(tx, float(scale))).init(jnp.ones(()))


@pytest.mark.parametrize("context", ["jit", "eager"])
@pytest.mark.parametrize(("outer", "inner"), [(1, 8), (8, 1), (8, 2)])
def test_a_loss_inside_a_loss_has_its_own_scale(outer, inner, context):
    """Defect guarded against: the outermost loss decided whether the inner one was scaled."""

    def inner_loss(w, x):
        return w * x, precision.current_scale()

    def outer_loss(w, x, states):
        before = precision.current_scale()
        (_, inside), grad = boostax.value_and_grad(inner_loss, has_aux=True)(w, states, x)
        return w * grad / inner, (before, inside, precision.current_scale())

    def found(w, states, x):
        loss = lambda w, x: outer_loss(w, x, states[1])  # noqa: E731
        return boostax.value_and_grad(loss, has_aux=True)(w, states[0], x)

    args = jnp.float32(3.0), (state_of(outer), state_of(inner)), jnp.float32(5.0)
    (value, scales), grad = (jax.jit(found) if context == "jit" else found)(*args)
    assert (scales, value, grad) == ((outer, inner, outer), 15.0, 5.0 * outer)


@pytest.mark.parametrize("scaled", ["outer", "inner", "other"])
def test_a_loss_inside_a_loss_is_scaled_once(scaled):
    """The scale of each enclosing loss, and no other scale, is refused."""

    def found(w, states, x):
        by_hand = lambda w, x: precision.scale_loss(w * x, states[scaled])  # noqa: E731

        def outer_loss(w, x):
            return w * boostax.value_and_grad(by_hand)(w, states["inner"], x)[1]

        return boostax.value_and_grad(outer_loss)(w, states["outer"], x)

    states = {name: state_of(2.0) for name in ("outer", "inner", "other")}
    refused = pytest.raises(ValueError, match="must be multiplied by the scale once")
    with contextlib.nullcontext() if scaled == "other" else refused:
        jax.eval_shape(found, jnp.float32(3.0), states, jnp.float32(5.0))
