"""The axis of the replicas is named once, by the step, or told to each part."""

import re

import chex
import cloudpickle
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import boostax
from boostax import model, precision, reduce

P = PartitionSpec
PARAMS = {"w": jnp.ones((16, 8)), "b": jnp.zeros(8)}
BATCH = jnp.sin(jnp.arange(64.0 * 16)).reshape(64, 16)


def loss(p, x):
    return jnp.mean((x @ p["w"] + p["b"] - 1.0) ** 2)


def adam(reduction):
    return optax.chain(reduction, optax.adam(1e-2))


def rule(grads, own, params):
    return optax.tree.norm(grads.value()) < 1e6, own


def step_of(tx, mesh, **options):
    return boostax.make_train_step(loss, tx, mesh=mesh, axis_name="data", **options)


def trained(tx, mesh, **options):
    step = step_of(tx, mesh, **options)
    state = step.init(PARAMS)
    for _ in range(4):
        state, _ = step(state, BATCH)
    return step, state


# Each part with an axis that it is told, or with ``None``.
CHAINS = {
    "all_reduce": lambda a: adam(boostax.all_reduce(a)),
    "half": lambda a: adam(boostax.all_reduce(a, dtype="bfloat16")),
    "adasum": lambda a: adam(boostax.adasum(a)),
    "int8": lambda a: adam(boostax.int8_reduce(a)),
    "top_k": lambda a: adam(boostax.top_k_reduce(a, density=0.1)),
    "threshold": lambda a: adam(reduce.threshold_reduce(a, threshold=1e-3)),
    "power_sgd": lambda a: adam(reduce.power_sgd_reduce(a, rank=2)),
    "adasum_delta": lambda a: reduce.adasum_delta(optax.adam(1e-2), a),
    "partial_average": lambda a: reduce.partial_average(optax.adam(1e-2), a, 2),
    "local_updates": lambda a: boostax.dynamic_loss_scale(
        reduce.local_updates(optax.adam(1e-2), a, 2), axis_name=a
    ),
    "scaler(window)": lambda a: boostax.dynamic_loss_scale(
        boostax.accumulate(adam(boostax.all_reduce(a)), 2, axis_name=a), axis_name=a
    ),
    "window(scaler)": lambda a: boostax.accumulate(
        boostax.static_loss_scale(adam(boostax.all_reduce(a)), 8.0, axis_name=a), 2, axis_name=a
    ),
    "told inside": lambda a: boostax.dynamic_loss_scale(
        boostax.accumulate(adam(boostax.int8_reduce("data")), 2, axis_name=a), axis_name=a
    ),
    "window of a sum": lambda a: boostax.accumulate(
        adam(boostax.all_reduce(a, op="sum")), 2, axis_name=a
    ),
    "checks": lambda a: precision.check_updates(
        precision.skip_spikes(
            boostax.gate(adam(boostax.top_k_reduce(a)), rule, axis_name=a), axis_name=a
        ),
        axis_name=a,
    ),
    "built later": lambda a: boostax.accumulate(
        optax.inject_hyperparams(lambda rate: optax.chain(boostax.all_reduce(a), optax.sgd(rate)))(
            rate=1e-2
        ),
        2,
        axis_name=a,
    ),
    "compat": lambda a: boostax.compat.MultiSteps(
        boostax.compat.apply_if_finite(adam(boostax.all_reduce(a)), 3, axis_name=a), 2, axis_name=a
    ).gradient_transformation(),
    "in combinators": lambda a: optax.named_chain(
        ("it", optax.masked(boostax.all_reduce(a), True)), ("rest", optax.sgd(1e-2))
    ),
    "stored, averaged": lambda a: model.average_params(
        boostax.accumulate(precision.store(adam(boostax.all_reduce(a))), 2, axis_name=a), "ema"
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_that_names_no_axis_is_the_one_that_names_it_everywhere(name, mesh):
    told, unsaid = (trained(CHAINS[name](axis), mesh)[1] for axis in ("data", None))
    chex.assert_trees_all_equal(unsaid, told)


PLACED = {
    "ZeRO-1": {"shard_optimizer": True},
    "host": {"freeze_driver": "host"},
    "FSDP": {"param_specs": {"w": P("data"), "b": P("data")}},
    "switch": {"freeze_driver": "switch"},
}


@pytest.mark.parametrize("name", PLACED)
def test_in_any_placement(name, mesh):
    make = CHAINS["scaler(window)"]
    if name in ("host", "switch"):
        make = lambda a: boostax.scheduled_freeze(  # noqa: E731
            CHAINS["scaler(window)"](a), {"w": 0, "b": 1}, [0, 1, 0, 1]
        )
    told, unsaid = (trained(make(axis), mesh, **PLACED[name])[1] for axis in ("data", None))
    chex.assert_trees_all_equal(unsaid, told)


def test_the_only_axis_of_a_mesh_need_not_be_named(mesh):
    tx = CHAINS["scaler(window)"](None)
    state = trained(tx, mesh)[1]
    step = boostax.make_train_step(loss, tx, mesh=mesh)
    found = step.init(PARAMS)
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    placed, gradient = boostax.on_mesh(tx, params), boostax.value_and_grad(loss, mesh=mesh)

    @jax.jit
    def own(params, opt_state):
        grads = gradient(params, opt_state, BATCH)[1]
        return boostax.apply_gradients(placed, grads, opt_state, params)

    carry = params, placed.init(params)
    for _ in range(4):
        found, carry = step(found, BATCH)[0], own(*carry)
    chex.assert_trees_all_equal(found, state)
    chex.assert_trees_all_close(carry, (state.params, state.opt_state), rtol=1e-6)


def test_two_axes_one_of_which_a_reduction_averages_within():
    mesh = jax.make_mesh((4, 2), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2)
    states = []
    for axis in ("dcn", None):
        tx = boostax.accumulate(adam(boostax.adasum(axis, within="ici")), 2)
        step = boostax.make_train_step(loss, tx, mesh=mesh, axis_name=("dcn", "ici"))
        states.append(step(step.init(PARAMS), BATCH)[0])
    chex.assert_trees_all_equal(*states)


def test_a_gate_behind_the_reduction_stays_without(mesh):
    tx = optax.chain(boostax.all_reduce(), boostax.accumulate(optax.adam(1e-2), 2))
    with pytest.warns(UserWarning, match="accumulate after all_reduce"):
        _, state = trained(tx, mesh)
    assert not isinstance(state.opt_state[1].window, boostax.PerReplica)


def test_a_jitted_update_is_not_reused_where_nothing_is_bound(mesh):
    tx = boostax.accumulate(adam(boostax.all_reduce()), 1)
    update = jax.jit(tx.update)
    inside = optax.GradientTransformationExtraArgs(tx.init, lambda *args, **_: update(*args))
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    placed = boostax.on_mesh(inside, params, axis_name="data")
    grads = boostax.PerReplica(jax.tree.map(lambda x: jnp.ones((8, *x.shape)), PARAMS))
    state = placed.init(params)
    placed.update(grads, state, params)
    with pytest.raises(ValueError, match="all_reduce: axis_name must be a mesh axis, got None"):
        jax.vmap(lambda g: update(g, state, PARAMS), axis_name="data")(grads.local)


def test_a_chain_that_a_step_will_bind_is_migrated_explained_and_pickled(mesh):
    step, state = trained(CHAINS["scaler(window)"](None), mesh)
    short = boostax.accumulate(adam(boostax.all_reduce()), 2)
    moved, report = boostax.migrate_state(state.opt_state, short, state.params)
    assert str(report).count("nothing") == 1 and isinstance(moved.window, boostax.PerReplica)
    found = boostax.explain(step, state, BATCH)
    assert not found.findings and [x.collectives for x in found.parts].count("") < len(found.parts)
    assert not boostax.explain(short, PARAMS).findings
    again = cloudpickle.loads(cloudpickle.dumps(CHAINS["told inside"](None)))
    chex.assert_trees_all_equal(
        trained(again, mesh)[1], trained(CHAINS["told inside"]("data"), mesh)[1]
    )


def of_replica(g):
    tx = boostax.accumulate(adam(boostax.all_reduce("data")), 2)
    return tx.update(g, tx.init(g), g)[0]


FORGOTTEN = {
    "another axis, on_mesh": (
        lambda m: boostax.on_mesh(
            adam(boostax.all_reduce("date")),
            jax.device_put(PARAMS, NamedSharding(m, P())),
            axis_name="data",
        ).init(jax.device_put(PARAMS, NamedSharding(m, P()))),
        "all_reduce: axis_name must be among the axes of the step around it, ('data',), got ('date",
    ),
    "no on_mesh": (
        lambda m: adam(boostax.all_reduce()).init(PARAMS),
        "or leave it to make_train_step or on_mesh around it",
    ),
    "a map of one's own": (
        lambda m: jax.vmap(
            lambda g: boostax.all_reduce().update(g, optax.EmptyState()), axis_name="data"
        )(jnp.ones(8)),
        "all_reduce: axis_name must be a mesh axis, got None",
    ),
    "a gate in a map of one's own": (
        lambda m: jax.vmap(of_replica, axis_name="data")(jnp.ones(8)),
        "accumulate: axis_name must name all axes over which what is inside communicates",
    ),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_an_axis_that_is_forgotten_is_refused_in_words(name, mesh):
    call, words = FORGOTTEN[name]
    with pytest.raises(ValueError, match=re.escape(words)):
        call(mesh)
