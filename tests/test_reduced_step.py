"""The reductions inside ``make_train_step``: one and two mesh axes, sharded state, resharding."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from reducing import mesh_of

import boostax

ROWS, INPUTS, OUTPUTS = 32, 16, 5


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)


def start():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w": 0.3 * jax.random.normal(keys[0], (INPUTS, 8)),
        "v": 0.3 * jax.random.normal(keys[1], (8, OUTPUTS)),
        "b": jnp.zeros(OUTPUTS),
    }


def batches(count):
    key = jax.random.key(1)
    for i in range(count):
        x = jax.random.normal(jax.random.fold_in(key, i), (ROWS, INPUTS))
        yield x, jnp.sin(x[:, :OUTPUTS])


def train(tx, mesh=None, axis_name=None, steps=4, **options):
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name=axis_name, **options)
    state = step.init(start())
    for batch in batches(steps):
        state, metrics = step(state, batch)
    return step, state, metrics


def assert_params_close(state, other, tolerance=2e-6):
    chex.assert_trees_all_close(state.params, other.params, atol=tolerance, rtol=1e-7)


def test_two_axes_average_within_and_combine_across():
    mesh = mesh_of(dcn=4, ici=2)
    both = ("dcn", "ici")
    optimizer = optax.sgd(0.1, momentum=0.9)
    hierarchical = optax.chain(boostax.adasum("dcn", within="ici"), optimizer)
    state = train(hierarchical, mesh, both)[1]
    apart = optax.chain(boostax.all_reduce("ici"), boostax.adasum("dcn"), optimizer)
    with pytest.raises(ValueError, match=r"must be all replica axes .*within= for two levels"):
        train(apart, mesh, both)
    step, cut, _ = train(hierarchical, mesh, both, shard_optimizer=True)
    assert_params_close(state, cut)
    trace = cut.opt_state[1][0].trace["w"]
    np.testing.assert_allclose(trace, state.opt_state[1][0].trace["w"], atol=1e-6)
    assert trace.addressable_shards[0].data.shape == (INPUTS // 8, 8)
    assert step.replicas == 8
    over_both = train(optax.chain(boostax.adasum(both), optimizer), mesh, both)[1]
    flat_mesh = train(optax.chain(boostax.adasum("data"), optimizer), mesh_of(data=8), "data")[1]
    assert_params_close(over_both, flat_mesh)


def test_params_sharded_over_a_second_axis_train_alike():
    mesh = mesh_of(data=4, fsdp=2)
    specs = {"w": P("fsdp"), "v": P(), "b": P()}
    tx = optax.chain(boostax.adasum("data"), optax.adam(1e-2))
    state = train(tx, mesh, "data", param_specs=specs)[1]
    assert state.params["w"].sharding.spec == P("fsdp")
    assert state.opt_state[1][0].mu["w"].sharding.spec == P("fsdp")
    told = optax.chain(boostax.adasum("data", shard_axes="fsdp"), optax.adam(1e-2))
    with pytest.raises(ValueError, match="'fsdp', which is not bound"):
        train(told, mesh, "data", param_specs=specs)


def test_metrics_report_the_orthogonality(mesh):
    tx = optax.chain(boostax.adasum("data", leaf_metrics=True), optax.sgd(0.1))
    metrics = train(tx, mesh, "data", steps=1)[2]
    assert 0 < float(metrics["orthogonality"]) <= 8
    assert {"orthogonality/w", "orthogonality/v", "orthogonality/b"} <= set(metrics)


@pytest.mark.parametrize(("old", "new"), [(8, 4), (4, 8), (6, 4), (3, 5), (5, 1), (1, 7)])
def test_resharding_keeps_the_mean(old, new):
    values = np.random.default_rng(old).normal(size=(old, 3)).astype(np.float32)
    state = {
        "own": boostax.PerReplica({"r": jnp.asarray(values), "n": jnp.arange(old)}),
        "shared": jnp.ones(2),
    }
    moved = boostax.reshard_state(state, new)
    assert moved["own"].local["r"].shape == (new, 3)
    np.testing.assert_allclose(moved["own"].local["r"].mean(0), values.mean(0), atol=1e-6)
    assert moved["own"].local["n"].dtype == state["own"].local["n"].dtype
    np.testing.assert_array_equal(moved["shared"], state["shared"])
    if new % old == 0:
        np.testing.assert_array_equal(moved["own"].local["r"][:: new // old], values)


def test_a_sharded_state_needs_no_resharding(mesh):
    tx = optax.chain(boostax.all_reduce("data"), optax.adam(1e-2))
    eight, state, _ = train(tx, mesh, "data", shard_optimizer=True)
    step = boostax.make_train_step(
        loss_fn, tx, mesh=mesh_of(data=4), axis_name="data", shard_optimizer=True
    )
    moved = boostax.reshard_state(jax.device_get(state), 4)
    moved = jax.device_put(moved, step.shardings(moved))
    batch = list(batches(5))[4]
    after = step(moved, batch)[0]
    assert_params_close(after, eight(jax.device_put(state, eight.shardings(state)), batch)[0])


def test_specs_of_a_sharded_state():
    params = start() | {"s": jnp.zeros((6, 16)), "t": jnp.zeros((16, 8))}
    given = {"w": P(), "v": P(), "b": P(), "s": P(), "t": P("fsdp")}
    tx = optax.chain(boostax.top_k_reduce("data"), optax.adam(0.1))
    specs = boostax.states.state_specs(
        tx, params, "data", param_specs=given, replicas=8, shard_optimizer=True
    )
    assert specs[1][0].mu == {
        "w": P("data", None),
        "v": P("data", None),
        "b": P(),
        # Along the first dimension that they divide and that is whole.
        "s": P(None, "data"),
        "t": P("fsdp", "data"),
    }
    assert specs[1][0].count == P()
    assert specs[0].residual.local["w"] == P("data")
    with pytest.raises(ValueError, match="replicas must be the size"):
        boostax.states.state_specs(optax.adam(0.1), jnp.zeros(16), "data", shard_optimizer=True)


def test_param_specs_need_a_mesh():
    with pytest.raises(ValueError, match="param_specs must be None without a mesh"):
        boostax.make_train_step(loss_fn, optax.sgd(0.1), param_specs={"w": P()})


def test_specs_of_a_per_replica_state():
    specs = boostax.states.state_specs(
        boostax.reduce.adasum_delta(optax.adam(1.0), "data"), start(), "data"
    )
    assert specs.inner_state.local[0].mu["w"] == P("data")
    assert specs.adasum.orthogonality == P()


def test_params_of_each_replica_meet_when_they_should(mesh):
    """DiLoCo through the train step: apart between meetings, equal after one and after a flush."""
    tx = boostax.accumulate(
        boostax.reduce.local_updates(optax.adam(1e-2), "data", every=2), 2, axis_name="data"
    )
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name="data")
    state = step.init(start())
    own = lambda state: np.asarray(state.params.local["w"])  # noqa: E731
    assert own(state).shape == (8, INPUTS, 8)
    apart = []
    for batch in batches(6):
        state, metrics = step(state, batch)
        apart.append(bool(np.any(own(state) != own(state)[:1])))
    assert apart == [False, True, True, False, False, True]
    assert np.isfinite(float(metrics["loss"]))
    common = step.common_params(state)["w"]
    np.testing.assert_allclose(common, own(state).mean(0), atol=1e-6)
    state = step.flush(state)
    assert np.all(own(state) == own(state)[:1])
    np.testing.assert_array_equal(step.common_params(state)["w"], own(state)[0])
