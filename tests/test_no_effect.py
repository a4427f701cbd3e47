"""A part that has no effect where it is says so: one warning, and a finding of ``explain``."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from reducing import mesh_of

import boostax
from boostax.order import findings

PARAMS = {name: jnp.ones((8, 8)) for name in "abc"}
STACK, ODD = {"stack": jnp.ones((3, 8, 8))}, {"a": jnp.ones((5, 7))}
X = jnp.ones((8, 8))
ADAM = optax.adam(0.1)
MEAN = optax.chain(boostax.all_reduce(), ADAM)
MUON = boostax.by_shape(optax.contrib.muon(0.1))
CHECKED = boostax.precision.check_replicas(MEAN)
LOCAL = boostax.precision.check_replicas(boostax.reduce.local_updates(ADAM, 2))


def loss(params, x):
    return sum(jnp.mean(w**2) for w in jax.tree.leaves(params)) * jnp.mean(x)


def freeze(*depths, inner=ADAM, **how):
    return boostax.scheduled_freeze(inner, {"a": 0, "b": 1, "c": 2}, depths, **how)


def reported(fn, *args, **how):
    """Of what a call warns."""
    findings._WARNED.clear()
    with warnings.catch_warnings(record=True, action="always") as caught:
        fn(*args, **how)
    return [str(x.message).split(": ")[1] for x in caught]


def loop(tx, grad_fn):
    """Ten calls of each of two traces."""
    for _ in range(2):
        step, state = jax.jit(lambda p, s: tx.update(grad_fn(p, s), s, p)), tx.init(PARAMS)
        for _ in range(10):
            _, state = step(PARAMS, state)


def train(tx, params=PARAMS, **how):
    """Ten calls of each of two steps; return the last step and its state."""
    for _ in range(2):
        step = boostax.make_train_step(loss, tx, **how)
        state = step.init(params)
        for _ in range(10):
            state, _ = step(state, X)
    return step, state


plain, whole = jax.grad(loss), boostax.value_and_grad(loss)


def test_a_backward_pass_that_freezing_does_not_shorten_is_reported():
    tx, told = freeze(0, 1, 2), ["gradients of all params"]
    for grad_fn in (plain, jax.jit(plain), lambda p, x: whole(p, tx.init(p), x)[1]):
        assert reported(loop, tx, lambda p, s, fn=grad_fn: fn(p, X)) == told
    # The gradient function alone sees it too, and gradients of another program are not judged.
    assert reported(lambda: [jax.jit(whole)(PARAMS, tx.init(PARAMS), X) for _ in "12"]) == told
    assert reported(loop, tx, lambda p, s: p) == []


def test_a_backward_pass_that_freezing_shortens_is_not_reported():
    tx = freeze(0, 1, 2)

    def masked(params, state, depth):
        _, grads = whole(params, state, X, active=tx.active(params, depth))
        return boostax.apply_gradients(tx, grads, state, params, depth=depth)

    step = jax.jit(masked, static_argnums=2)
    assert reported(lambda: [step(PARAMS, tx.init(PARAMS), depth) for depth in (0, 1, 2)]) == []
    assert reported(loop, tx, lambda p, s: whole(p, s, X, active=tx.choice(p, s))[1]) == []
    for driver, kind in itertools.product(("host", "switch"), [*jax.sharding.AxisType][:2]):
        tx, mesh = freeze(0, 1, 2, inner=MEAN, repeat=True), mesh_of(kind, data=2)
        assert reported(train, tx, mesh=mesh, freeze_driver=driver) == []


def test_a_schedule_that_freezes_no_later_step_is_reported():
    told, never, ended = "a schedule that freezes nothing", [0] * 30, freeze(1, *[0] * 30)
    assert reported(train, freeze(*never)) == [told]
    assert [x.what for x in boostax.explain(freeze(*never), PARAMS).findings] == [told]
    # At its end a schedule is not reported, but where training begins again.
    assert reported(train, ended) == [] == [*boostax.explain(ended, PARAMS).findings]
    step, state = train(ended)
    assert [x.what for x in boostax.explain(step, state).findings] == [told]
    assert reported(lambda: boostax.make_train_step(loss, ended)(state, X)) == [told]
    # Code that maps a state calls ``init`` on params without arrays.
    for tx, params in ((freeze(0, 1), PARAMS), (boostax.by_shape(ADAM, axis_name="data"), STACK)):
        states = []
        reported(lambda: states.append(tx.init(params)))  # noqa: B023
        assert reported(optax.tree.map_params, tx, lambda x: x, *states) == []


SHARDED = {name: jax.P("data") for name in PARAMS}
# A part, its params, the number of replicas, options of the step, and the report.
CASES = {
    "distributed": (MUON, PARAMS, 2, {"shard_optimizer": True}, []),
    "one replica": (MUON, PARAMS, 1, {}, []),
    "a stack": (MUON, STACK, 2, {}, ["matrices on every replica"]),
    "shared": (MEAN, PARAMS | {"d": jnp.ones(3)}, 2, {"shard_optimizer": True}, []),
    "not divisible": (MEAN, ODD, 2, {"shard_optimizer": True}, ["a state on every replica"]),
    "own params": (LOCAL, PARAMS, 2, {}, []),
    "partly compared": (CHECKED, PARAMS, 2, {"param_specs": SHARDED | {"c": jax.P()}}, []),
    "FSDP": (CHECKED, PARAMS, 2, {"param_specs": SHARDED}, ["params without copies"]),
    "no copies": (CHECKED, PARAMS, 1, {}, ["params without copies"]),
    "a mean": (MEAN, PARAMS, 1, {"shard_optimizer": True}, []),
}


@pytest.mark.parametrize(("tx", "params", "count", "how", "told"), CASES.values(), ids=CASES)
def test_a_part_without_effect_is_reported_and_explained(tx, params, count, how, told):
    made = []
    run = lambda: made.append(train(tx, params, mesh=mesh_of(data=count), **how))  # noqa: E731
    assert reported(run) == told
    assert [x.what for x in boostax.explain(*made[0], X).findings] == told


def test_a_check_of_one_replica_in_your_own_map_is_reported():
    tx = boostax.precision.check_replicas(boostax.all_reduce("data"), axis_name="data")
    step = jax.vmap(lambda grads: tx.update(grads, tx.init(grads), grads), axis_name="data")
    for count, told in ((1, ["params without copies"]), (2, [])):
        assert reported(step, {"a": jnp.ones((count, 8))}) == told
