"""What an optimizer asks for beside gradients reaches it through whatever is around it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lanes import lanes, spread
from training import fit

import boostax
from boostax._core.describe import asked

WEIGHTS = {"a": jnp.array([2.0, 0.5, 1.0]), "b": jnp.array([[1.0, 3.0]])}
START = {"a": jnp.array([1.0, -1.0, 2.0]), "b": jnp.array([[0.5, -2.0]])}
BATCH = 1.0 + jnp.arange(8.0) / 10


def loss_fn(params, batch, scales=None):
    """Not quadratic, so that a line search has something to search."""
    each = jax.tree.map(lambda w, p: jnp.sum(w * (p**2 + 0.1 * p**4)), WEIGHTS, params)
    return jnp.mean(batch) * (each["a"] + each["b"])


OPTIMIZERS = {
    "lbfgs": lambda: optax.lbfgs(),
    "backtracking": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
    "zoom": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(15)),
    "polyak": lambda: optax.polyak_sgd(),
    "momo": lambda: optax.contrib.momo(0.1),
    "sophia": lambda: optax.contrib.sophia(0.1, update_interval=1),
    "plateau": lambda: optax.chain(optax.sgd(0.05), optax.contrib.reduce_on_plateau()),
}


def wanted(name, value, grad, fn):
    """What Optax's documentation gives to each; a line search takes no more."""
    if name == "sophia":
        return {"obj_fn": fn}
    if name in ("polyak", "momo", "plateau"):
        return {"value": value}
    return {"value": value, "grad": grad, "value_fn": fn}


def by_hand(name, calls=3, params=START):
    """What Optax's documentation writes."""
    fn, tx = lambda p: loss_fn(p, BATCH), OPTIMIZERS[name]()

    @jax.jit
    def step(params, state):
        value, grad = jax.value_and_grad(fn)(params)
        updates, state = tx.update(grad, state, params, **wanted(name, value, grad, fn))
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(calls):
        params, state = step(params, state)
    return params


def by_step(tx, calls=3, params=START, **options):
    return fit(loss_fn, tx, params, [BATCH] * calls, **options)[0].params


assert_near = functools.partial(chex.assert_trees_all_close, rtol=2e-4, atol=2e-5)


scaler = functools.partial(boostax.dynamic_loss_scale, init_scale=4.0)
AROUND = {
    "bare": lambda tx: tx,
    "group_loss_scale": lambda tx: boostax.precision.group_loss_scale(tx, {"a": 0, "b": 0}),
    "accumulate": lambda tx: boostax.accumulate(tx, 1),
    "both": lambda tx: boostax.dynamic_loss_scale(boostax.accumulate(tx, 1), init_scale=8.0),
    "scheduled_freeze": lambda tx: boostax.scheduled_freeze(scaler(tx), {"a": 0, "b": 1}, [0]),
}


@pytest.mark.parametrize(("name", "around"), spread(["backtracking", "sophia"], AROUND))
def test_a_step_supplies_what_an_optimizer_asks_for(name, around):
    assert_near(by_step(AROUND[around](OPTIMIZERS[name]())), by_hand(name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_driven_as_their_documentation_drives_them(name):
    scaled = boostax.dynamic_loss_scale(OPTIMIZERS[name](), init_scale=2.0**10)
    assert_near(by_step(scaled), by_hand(name))


@pytest.mark.parametrize("name", lanes(["zoom", "lbfgs", "sophia"], ["lbfgs"]))
@pytest.mark.parametrize("sharded", [False, True])
def test_replicas_search_as_one(mesh, name, sharded):
    inner = optax.chain(boostax.all_reduce("data"), OPTIMIZERS[name]())
    tx = scaler(inner, axis_name="data")
    assert_near(by_step(tx, mesh=mesh, axis_name="data", shard_optimizer=sharded), by_hand(name))


@pytest.mark.parametrize("name", ["backtracking", "sophia"])
def test_what_is_frozen_is_searched_around(name):
    """The same as an optimizer of the trained leaves alone."""
    fn = lambda b: loss_fn({"a": START["a"], "b": b}, BATCH)  # noqa: E731
    bare, alone = OPTIMIZERS[name](), START["b"]
    state = bare.init({"a": optax.MaskedNode(), "b": alone})
    for _ in range(2):
        value, grad = jax.value_and_grad(fn)(alone)
        hide = lambda x: {"a": optax.MaskedNode(), "b": x}  # noqa: E731
        given = wanted(name, value, hide(grad), lambda p: fn(p["b"]))
        updates, state = bare.update(hide(grad), state, hide(alone), **given)
        alone = alone + updates["b"]
    found = by_step(boostax.scheduled_freeze(OPTIMIZERS[name](), {"a": 0, "b": 1}, 1), calls=2)
    np.testing.assert_array_equal(found["a"], START["a"])
    np.testing.assert_allclose(found["b"], alone, rtol=2e-4)


@pytest.mark.parametrize("name", ["lbfgs", "backtracking", "zoom", "sophia"])
def test_a_window_of_several_calls_has_no_loss_to_search(name):
    with pytest.raises(ValueError, match="accumulate: every must be 1 around a line search"):
        by_step(boostax.accumulate(OPTIMIZERS[name](), 2))


@pytest.mark.parametrize("normalize", ["mean", "sum", "weight", ("all",)])
@pytest.mark.parametrize("sums", [None, "local", "sharded"])
def test_an_optimizer_of_the_loss_gets_that_of_the_whole_window(mesh, sums, normalize):
    """Defect guarded against: Polyak's step had the window's gradient and the last call's loss."""
    rows, counts = np.linspace(0.5, 2, 24), np.arange(24.0) % 3 > 0
    is_mean = normalize in ("mean", "sum")

    def loss(params, batch):
        x, mask = batch
        total, tokens = loss_fn(params, x * mask) * x.size, mask.sum()
        result = {"all": (total, tokens)} if normalize == ("all",) else total / tokens
        weight = tokens if normalize == "weight" else None
        return (loss_fn(params, x) if is_mean else result), boostax.Aux(weight=weight)

    reduction = [boostax.all_reduce()] if sums else []
    tx, how = optax.chain(*reduction, optax.polyak_sgd()), {"mesh": mesh} if sums else {}
    tx = boostax.accumulate(
        tx, 3 if sums == "local" else 4, normalize=normalize, sums=sums or "local"
    )
    step = boostax.make_train_step(loss, tx, has_aux=True, **how)
    state = step.init(START)
    for i in range(3):
        state, _ = step(state, (rows[i::3], counts[i::3] | (i == 2)))
    counts[2::3] = True
    share = np.average(rows, weights=None if is_mean else counts) * (3 if normalize == "sum" else 1)
    value, grad = jax.value_and_grad(lambda p: loss_fn(p, share))(START)
    updates, _ = optax.polyak_sgd().update(grad, optax.polyak_sgd().init(START), value=value)
    assert_near(step.flush(state).params, optax.apply_updates(START, updates))


def test_what_is_asked_for_is_read_through_wrappers():
    inner = optax.chain(optax.clip(1.0), optax.lbfgs())
    scaled = boostax.dynamic_loss_scale(boostax.accumulate(inner, 1))
    wrapped = [
        inner,
        scaled,
        optax.masked(scaled, {"a": True, "b": False}),
        optax.partition({"x": inner, "y": optax.sgd(0.1)}, {"a": "x", "b": "y"}),
        optax.MultiSteps(inner, 2).gradient_transformation(),
        boostax.scheduled_freeze(scaled, {"a": 0, "b": 1}, [0, 1]),
    ]
    assert all(asked(tx)["grad"] for tx in wrapped)
    assert not any(asked(optax.adamw(0.1)).get(name) for name in ("grad", "value", "obj_fn"))
    assert "obj_fn" in asked(boostax.static_loss_scale(optax.contrib.sophia(0.1), 2.0))
