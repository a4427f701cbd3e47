"""One step object that serves params in one placement after the other."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reducing import mesh_of
from training import follow

import boostax

# An empty leaf has no elements to be cut.
PARAMS = {"w": jnp.ones((16, 8)), "b": jnp.zeros(8), "e": jnp.zeros((0, 4))}
BATCH = jnp.sin(jnp.arange(16.0 * 16)).reshape(16, 16)
FOUR = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[4:])
SPECS = {
    "whole": {"w": P(), "b": P(), "e": P()},
    "FSDP": {"w": P("data"), "b": P("data"), "e": P()},
    "columns": {"w": P(None, "model"), "b": P("model"), "e": P()},
    "HSDP": {"w": P(("data", "model")), "b": P("model"), "e": P()},
}


def loss(p, x):
    return jnp.mean((jnp.tanh(x @ p["w"]) + p["b"] - 1.0) ** 2)


def make(mesh, **options):
    tx = boostax.accumulate(optax.chain(boostax.int8_reduce(), optax.adam(1e-2)), 2)
    return boostax.make_train_step(loss, tx, mesh=mesh, axis_name="data", **options)


def placed(mesh, name):
    return jax.device_put(PARAMS, jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS[name]))


def run(step, start, steps=3):
    return follow(step, step.init(start), [BATCH] * steps)[0]


def shards(tree):
    return jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), tree)


@pytest.mark.parametrize("share", [False, True], ids=["whole", "ZeRO-1"])
def test_a_later_placement_is_what_a_step_of_its_own_makes(share):
    """Params and moments came back whole on every device, and nothing was raised."""
    mesh = mesh_of(data=4, model=2)
    shared = make(mesh, shard_optimizer=share)
    expected = {name: run(make(mesh, shard_optimizer=share), placed(mesh, name)) for name in SPECS}
    for name in (*SPECS, "FSDP", "whole"):
        found = run(shared, placed(mesh, name))
        chex.assert_trees_all_equal(found, expected[name])
        assert shards(found) == shards(expected[name])
        where = NamedSharding(mesh, SPECS[name]["w"])
        assert found.params["w"].sharding.is_equivalent_to(where, 2)
        mu = found.opt_state.inner_state[1][0].mu["w"]
        assert mu.sharding.shard_shape(mu.shape) <= where.shard_shape(mu.shape)


def test_params_of_another_mesh():
    """With the same axes they keep their shards on its devices; without, they are refused."""
    eight, four = mesh_of(data=4, model=2), FOUR
    state = run(make(eight), placed(four, "HSDP"))
    assert state.params["w"].sharding.is_equivalent_to(NamedSharding(eight, SPECS["HSDP"]["w"]), 2)
    narrow = make(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)))
    with pytest.raises(ValueError, match=r"param b must be sharded over axes of the step's mesh"):
        narrow.init(placed(eight, "columns"))
