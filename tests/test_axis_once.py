"""The axis of the replicas is named once, by the step, or told to each part."""

import functools

import chex
import cloudpickle
import jax
import jax.numpy as jnp
import optax
import pytest
from contract_cases import CASES
from training import follow, own_step

import boostax

P = jax.sharding.PartitionSpec
PARAMS = {"w": jnp.ones((16, 8)), "b": jnp.zeros(8)}
BATCH = jnp.sin(jnp.arange(64.0 * 16)).reshape(64, 16)


def loss(p, x):
    return jnp.mean((x @ p["w"] + p["b"] - 1.0) ** 2)


def adam(reduction):
    return optax.chain(reduction, optax.adam(1e-2))


def rule(grads, own, params):
    return optax.tree.norm(grads.value()) < 1e6, own


def step_of(tx, mesh, **options):
    return boostax.make_train_step(loss, tx, mesh=mesh, **{"axis_name": "data"} | options)


def trained(tx, mesh):
    step = step_of(tx, mesh)
    return step, follow(step, step.init(PARAMS), [BATCH] * 4)[0]


def window(tx, axis, **how):
    return boostax.accumulate(tx, 2, axis_name=axis, **how)


def scaled_window(tx, axis):
    return boostax.dynamic_loss_scale(window(tx, axis), axis_name=axis)


def checked(axis):
    gated = boostax.gate(adam(boostax.top_k_reduce(axis)), rule, axis_name=axis)
    return boostax.precision.check_updates(gated, axis_name=axis)


def built_later(axis):
    make = lambda rate: optax.chain(boostax.all_reduce(axis), optax.sgd(rate))  # noqa: E731
    return window(optax.inject_hyperparams(make)(rate=1e-2), axis)


def compatible(axis):
    inner = boostax.compat.apply_if_finite(adam(boostax.all_reduce(axis)), 3, axis_name=axis)
    return boostax.compat.MultiSteps(inner, 2, axis_name=axis).gradient_transformation()


# Each part with an axis that it is told, or with ``None``.
CHAINS = {
    **{case.name: functools.partial(case.make, optax.adam(1e-2)) for case in CASES if case.reduces},
    "scaler(window)": lambda a: scaled_window(adam(boostax.all_reduce(a)), a),
    "told inside": lambda a: scaled_window(adam(boostax.int8_reduce("data")), a),
    "window of a sum": lambda a: window(adam(boostax.all_reduce(a, op="sum")), a),
    "checks": checked,
    "built later": built_later,
    "compat": compatible,
    "in combinators": lambda a: optax.named_chain(
        ("it", optax.masked(boostax.all_reduce(a), True)), ("rest", optax.sgd(1e-2))
    ),
    "stored, averaged": lambda a: boostax.model.average_params(
        window(boostax.precision.store(adam(boostax.all_reduce(a))), a), "ema"
    ),
}


def require_same(make, mesh, depth=None, **options):
    """Of the axis that is told and of the one that is not: first states, and the programs."""
    steps = [step_of(make(axis), mesh, **options) for axis in ("data", None)]
    states = [step.init(PARAMS) for step in steps]
    chex.assert_trees_all_equal(*states)
    lowered = zip(steps, states, strict=True)
    told, unsaid = (step.lower(state, BATCH, depth=depth).as_text() for step, state in lowered)
    assert unsaid == told


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_that_names_no_axis_is_the_one_that_names_it_everywhere(name, mesh):
    require_same(CHAINS[name], mesh)


PLACED = {
    "ZeRO-1": {"shard_optimizer": True},
    "host": {"freeze_driver": "host", "depth": 1},
    "FSDP": {"param_specs": {"w": P("data"), "b": P("data")}},
    "switch": {"freeze_driver": "switch"},
}


@pytest.mark.parametrize("name", PLACED)
def test_in_any_placement(name, mesh):
    make = inner = CHAINS["scaler(window)"]
    if name in ("host", "switch"):
        make = lambda a: boostax.scheduled_freeze(inner(a), {"w": 0, "b": 1}, [0, 1, 0, 1])  # noqa: E731
    require_same(make, mesh, **PLACED[name])


def test_the_only_axis_of_a_mesh_need_not_be_named(mesh):
    tx = CHAINS["scaler(window)"](None)
    state = trained(tx, mesh)[1]
    step = boostax.make_train_step(loss, tx, mesh=mesh)
    found = step.init(PARAMS)
    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, P()))
    placed, gradient = boostax.on_mesh(tx, params), boostax.value_and_grad(loss, mesh=mesh)

    own, carry = own_step(placed, gradient), (params, placed.init(params))
    for _ in range(4):
        found, (*carry, _) = step(found, BATCH)[0], own(*carry, BATCH)
    chex.assert_trees_all_equal(found, state)
    chex.assert_trees_all_close(tuple(carry), (state.params, state.opt_state), rtol=1e-6)


def test_two_axes_one_of_which_a_reduction_averages_within():
    mesh = jax.make_mesh((4, 2), ("dcn", "ici"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    make = lambda a: boostax.accumulate(adam(boostax.adasum(a and "dcn", within="ici")), 2)  # noqa: E731
    require_same(make, mesh, axis_name=("dcn", "ici"))


def test_a_gate_behind_the_reduction_stays_without(mesh):
    tx = optax.chain(boostax.all_reduce(), boostax.accumulate(optax.adam(1e-2), 2))
    with pytest.warns(UserWarning, match="accumulate after all_reduce"):
        _, state = trained(tx, mesh)
    assert not isinstance(state.opt_state[1].window, boostax.PerReplica)


half = functools.partial(boostax.all_reduce, wire_dtype="bfloat16")
other = lambda axis: boostax.all_reduce((axis, "model"))  # noqa: E731
MORE = (boostax.adasum, None), (boostax.int8_reduce, "data"), (half, None), (other, "data")


def test_a_gate_behind_the_reduction_in_a_gate_stays_without():
    """The outer gate has the axis of the reduction, the inner window has none."""
    inner = optax.chain(boostax.all_reduce(), boostax.accumulate(optax.sgd(0.1), 2))
    with boostax._core.axes.binding(("data",)):
        state = boostax.dynamic_loss_scale(inner).init(PARAMS)
    assert not boostax._core.trees.find(state, boostax.PerReplica)


@pytest.mark.parametrize(("part", "axis"), MORE)
def test_a_window_in_shards_takes_a_plain_mean_alone(part, axis, mesh):
    placed = jax.device_put(PARAMS, jax.NamedSharding(mesh, P()))
    text = "without the axis 'mo" if part is other else "sums must be 'local' around a reduction"
    with pytest.raises(ValueError, match=f"accumulate:? {text}"):
        boostax.on_mesh(window(adam(part(axis)), axis, sums="sharded"), placed).init(placed)


def test_a_jitted_update_is_not_reused_where_nothing_is_bound(mesh):
    tx = boostax.accumulate(adam(boostax.all_reduce()), 1)
    update = jax.jit(tx.update)
    inside = optax.GradientTransformationExtraArgs(tx.init, lambda *args, **_: update(*args))
    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, P()))
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
    assert found.parts and not (found.findings or boostax.explain(short, PARAMS).findings)
    inside = CHAINS["told inside"]
    again = cloudpickle.loads(cloudpickle.dumps(inside(None)))
    require_same(lambda axis: inside(axis) if axis else again, mesh)
