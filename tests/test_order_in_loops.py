"""Wrong order in a loop: what a train step refuses or warns of, each function of boostax does."""

import contextlib
import functools
import random
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import boostax
import boostax.nnx
from boostax import dynamic_loss_scale, precision
from boostax.order import findings

PARAMS = {"a": jnp.ones(3), "b": jnp.full((2, 2), 2.0)}
X, ADAM = jnp.arange(3.0), optax.adam(1e-3)
GATES = {
    "scaler": functools.partial(dynamic_loss_scale, init_scale=256.0),
    "window": functools.partial(boostax.accumulate, every=2),
    "skip": boostax.skip_bad_steps,
}
LINKS = {
    "norm clip": lambda: optax.clip_by_global_norm(1.0),
    "clip": lambda: optax.clip(0.5),
    "decay": lambda: optax.add_decayed_weights(1e-2),
    "momentum": lambda: optax.trace(0.9),
    "adam": optax.scale_by_adam,
    "rms": optax.scale_by_rms,
    "rate": lambda: optax.scale_by_learning_rate(0.1),
    "schedule": lambda: optax.scale_by_schedule(lambda count: 0.5),
    "noise": lambda: optax.add_noise(0.1, 0.1, 0),
    "sign": optax.scale_by_sign,
    "zero": optax.zero_nans,
    "nothing": optax.identity,
    "centralize": boostax.centralize_gradients,
    "adagc": lambda: boostax.model.adagc(1.05),
}


def chain(names, draw):
    """A chain of parts; each gate wraps some of those behind it."""
    parts = [optax.identity()]
    for i, name in enumerate(names):
        if name in GATES:
            end = draw.randint(i + 1, len(names))
            inner = chain(names[i + 1 : end], draw)
            return optax.chain(*parts, GATES[name](inner), chain(names[end:], draw))
        parts.append(LINKS[name]())
    return optax.chain(*parts)


def loss(params, x):
    return jnp.sum(params["a"] * x) ** 2 + jnp.sum(params["b"] ** 3)


def applied(tx, params, state, x):
    _, grads = boostax.value_and_grad(loss)(params, state, x)
    return boostax.apply_gradients(tx, grads, state, params)


def updated(tx, params, state, x):
    _, grads = boostax.value_and_grad(loss)(params, state, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def differentiated(tx, params, state, x):
    grads = jax.grad(lambda y: precision.scale_loss(loss(y, x), state))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def reported(fn):
    """What a call refuses, and of what it warns, without the names of functions and of scalers."""
    findings._WARNED.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fn()
        except ValueError as error:
            return [str(error)]
    texts = [str(x.message).replace("skip_bad_steps", "loss_scale") for x in caught]
    texts = [re.sub(r"^\w+: |\w+_(?=loss_scale)", "", text) for text in texts]
    assert len(set(texts)) == len(texts) or fn.func is boostax.make_train_step
    return [None, *sorted(set(texts))]


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(x, marks=pytest.mark.long) for x in range(40, 200))]
)
def test_a_loop_refuses_and_warns_of_what_a_train_step_does(seed):
    draw = random.Random(seed)
    tx = chain([draw.choice([*LINKS, *GATES]) for _ in range(6)], draw)
    step = reported(functools.partial(boostax.make_train_step, loss, tx))
    reports = {}
    for loop in (applied, updated, differentiated):
        jitted = jax.jit(functools.partial(loop, tx)).lower
        reports[loop] = reported(functools.partial(jitted, PARAMS, tx.init(PARAMS), X))
    if step[0]:
        assert reports[applied][0]
        return
    assert reports[applied] == step
    # Without the chain, only its state and the gradients can be read.
    seen = {x for x in step[1:] if re.match(r"(scale_by_(adam|rms)|trace) after loss_scale", x)}
    assert all(x[0] is None and seen <= {*x} <= {*step} for x in reports.values())
    if len(step) > 1:
        return
    fn = boostax.make_train_step(loss, tx)
    (expected, _), states = fn(fn.init(PARAMS), X), tx.init(PARAMS)
    for loop in reports:
        params, _ = jax.jit(functools.partial(loop, tx))(PARAMS, states, X)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-6), params, expected.params
        )


KEEPS = {"a": True, "b": False}
NESTED = {
    "check_replicas inside loss_scale": dynamic_loss_scale(precision.check_replicas(ADAM)),
    "check_replicas inside accumulate": boostax.accumulate(precision.check_replicas(ADAM), 2),
    "accumulate in partition": optax.partition(
        {True: boostax.accumulate(ADAM, 2), False: ADAM}, KEEPS
    ),
    "set_to_zero in masked": dynamic_loss_scale(
        optax.chain(ADAM, optax.masked(optax.set_to_zero(), KEEPS))
    ),
}


@pytest.mark.parametrize("what", NESTED)
def test_a_part_in_a_wrong_wrapper_is_reported_in_each_loop(what):
    tx = NESTED[what]
    assert what in str(reported(functools.partial(boostax.make_train_step, loss, tx)))
    # A state does not show what has no state.
    for loop in (applied, updated, differentiated)[: 1 if "zero" in what else 3]:
        jitted = jax.jit(functools.partial(loop, tx)).lower
        assert what in str(reported(functools.partial(jitted, PARAMS, tx.init(PARAMS), X)))


@pytest.mark.parametrize("name", ["norm clip", "clip", "decay", "rate", "nothing"])
def test_a_search_along_a_changed_gradient_is_reported_without_the_slope(name):
    tx = optax.chain(
        LINKS[name](), boostax.dim_reduce({"a": jnp.eye(3), "b": jnp.zeros((3, 2, 2))})
    )

    def update(has_slope, params, state):
        value, grads = jax.value_and_grad(loss)(params, X)
        extra = {
            "value": value,
            "value_fn": lambda w: loss(w, X),
            "grad": grads if has_slope else None,
        }
        return tx.update(grads, state, params, **extra)

    for has_slope in (False, True):
        jitted = jax.jit(functools.partial(update, has_slope)).lower
        got = reported(functools.partial(jitted, PARAMS, tx.init(PARAMS)))
        assert ("the slope of the loss" in str(got)) == (
            not has_slope and name not in ("rate", "nothing")
        )


# What may happen to gradients between the backward pass and a scaler, and what may not.
LINEAR = {
    "cast": lambda g, w: g.astype(jnp.bfloat16).astype(g.dtype),
    "factor": lambda g, w: 3 * g,
    "mask": lambda g, w: g * (w > 0),
    "finite": lambda g, w: jnp.where(jnp.isfinite(g), g, 0),
    "relative": lambda g, w: jnp.clip(g, -jnp.abs(g).max() / 2, jnp.abs(g).max() / 2),
}
OTHERS = {
    "clip": lambda g, w: jnp.clip(g, -1, 1),
    "jit": lambda g, w: jax.jit(lambda g: jnp.clip(g, -1, 1))(g),
    "decay": lambda g, w: g + 0.1 * w,
    "sign": lambda g, w: jnp.sign(g),
    "tanh": lambda g, w: jnp.tanh(g),
}


def seeds(step):
    return lambda *trees: jax.vmap(step)(*jax.tree.map(lambda x: jnp.stack([x, x]), trees))


def steps(step):
    def body(carry, x):
        return step(*carry, x), None

    return lambda params, state, x: jax.lax.scan(body, (params, state), jnp.stack([x, x]))


@pytest.mark.parametrize("around", [lambda step: step, jax.checkpoint, seeds, steps])
@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
@pytest.mark.parametrize("micro", [False, True])
def test_a_scaler_refuses_what_is_not_linear_since_the_backward_pass(around, name, micro):
    tx = dynamic_loss_scale(ADAM)

    def grads_of(params, state, x):
        return jax.grad(lambda y: precision.scale_loss(loss(y, x), state))(params)

    def step(params, state, x):
        grads = grads_of(params, state, x)
        if micro:

            def body(i, total):
                return jax.tree.map(jnp.add, total, grads_of(params, state, x))

            grads = jax.lax.fori_loop(0, 2, body, grads)
        grads = jax.tree.map((LINEAR | OTHERS)[name], grads, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    lower = functools.partial(jax.jit(around(step)).lower, PARAMS, tx.init(PARAMS), X)
    text = "clipped, decayed or changed otherwise"
    with pytest.raises(ValueError, match=text) if name in OTHERS else contextlib.nullcontext():
        lower()


def test_a_nonlinear_rule_of_the_loss_is_no_change_after_the_backward_pass():
    rule = jax.custom_vjp(lambda x: x)
    rule.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))
    tx = dynamic_loss_scale(optax.sgd(1.0))

    def step(params, state, x):
        scaled = jax.jit(lambda y: precision.scale_loss(loss(jax.tree.map(rule, y), x), state))
        return tx.update(jax.grad(scaled)(params), state, params)

    jax.jit(step).lower(PARAMS, tx.init(PARAMS), X)


def test_a_decay_of_running_statistics_is_reported_once():
    params = {"params": PARAMS, "batch_stats": {"mean": jnp.ones(3)}}
    fn = lambda params, x: loss(params["params"], x)  # noqa: E731
    for mask, count in ((None, 1), ({"params": True, "batch_stats": False}, 0)):
        step = boostax.make_train_step(fn, optax.adamw(0.1, mask=mask))
        with warnings.catch_warnings(record=True, action="always") as caught:
            step(step(step.init(params), X)[0], X)
        assert all("on Flax's batch_stats: the running" in str(x.message) for x in caught)
        assert len(boostax.explain(step, params).findings) == len(caught) == count


def test_an_optimizer_on_a_mesh_and_of_nnx_check_their_chain_and_gradients():
    wrong = optax.chain(optax.clip(1.0), dynamic_loss_scale(optax.sgd(1.0)))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(PARAMS, jax.NamedSharding(mesh, jax.P()))
    for make in (
        lambda: boostax.on_mesh(wrong, placed),
        lambda: boostax.nnx.Optimizer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), wrong, wrt=nnx.Param),
    ):
        with pytest.raises(ValueError, match="dynamic_loss_scale after clip: clip receives grad"):
            make()
    tx = boostax.on_mesh(dynamic_loss_scale(optax.chain(boostax.all_reduce(), ADAM)), placed)
    fn = boostax.value_and_grad(loss, mesh=mesh)
    args = placed, tx.init(placed), X[None]
    with pytest.raises(ValueError, match=r"on_mesh: gradients must be .* clipped, decayed or"):
        jax.eval_shape(lambda *a: tx.update(jax.tree.map(jnp.tanh, fn(*a)[1]), a[1], a[0]), *args)
