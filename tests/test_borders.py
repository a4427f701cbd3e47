"""Leaves, placements and rows at the border of what is usual."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import boostax

REDUCTIONS = {
    "mean": boostax.all_reduce,
    "sum": lambda axis: boostax.all_reduce(axis, op="sum"),
    "half": lambda axis: boostax.all_reduce(axis, dtype="bfloat16"),
    "adasum": boostax.adasum,
    "int8": boostax.int8_reduce,
    "top_k": lambda axis: boostax.top_k_reduce(axis, 1.0),
    "power_sgd": lambda axis: boostax.reduce.power_sgd_reduce(axis, 4),
}
WRAPPERS = {
    "bare": lambda tx: tx,
    "window": lambda tx: boostax.accumulate(tx, 2),
    "scaler": boostax.dynamic_loss_scale,
    "average": boostax.model.average_params,
}
PLACES = {
    "whole": {},
    "FSDP": {"param_specs": {"w": P("data"), "odd": P()}},
    "ZeRO-1": {"shard_optimizer": True},
}
BATCH = {"x": np.float32(np.random.default_rng(0).normal(size=(16, 8))), "y": np.ones((16, 8))}


def loss(params, batch):
    beside = jnp.sum(params["odd"].astype(jnp.float32) ** 2)
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2) + beside


def trained(odd, tx, steps=4, **options):
    """Params after some steps, with a leaf that is seldom met."""
    step = boostax.make_train_step(loss, tx, **options)
    state = step.init({"w": jnp.eye(8), "odd": odd})
    for _ in range(steps):
        state, _ = step(state, BATCH)
    return state.params


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrapper", ["bare", "window"])
@pytest.mark.parametrize("reduction", ["mean", "int8", "power_sgd"])
def test_a_leaf_without_elements_travels(mesh, reduction, wrapper, place):
    make = lambda: WRAPPERS[wrapper](  # noqa: E731
        optax.chain(REDUCTIONS[reduction]("data"), optax.sgd(0.1))
    )
    options = {"mesh": mesh, "axis_name": "data", **PLACES[place]}
    found = trained(jnp.zeros((0, 3)), make(), **options)
    wanted = trained(jnp.zeros(()), make(), **options | {"param_specs": None})
    assert found["odd"].shape == (0, 3)
    np.testing.assert_allclose(found["w"], wanted["w"], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float8_params_travel_on_a_mesh(mesh, reduction, dtype):
    """JAX promotes no float8 by itself: its gradient is 2, so that 1 becomes 0.8 and rounds."""
    tx = optax.chain(
        REDUCTIONS[reduction]("data"), optax.sgd(0.1 / (8 if reduction == "sum" else 1))
    )
    found = trained(jnp.ones((4, 4), dtype), tx, steps=1, mesh=mesh, axis_name="data")
    assert found["odd"].dtype == dtype
    np.testing.assert_array_equal(found["odd"], jnp.full((4, 4), 0.8).astype(dtype))


@pytest.mark.parametrize("wrapper", ["window", "scaler", "average"])
def test_float8_params_pass_gates(wrapper):
    """A gradient that overflows under the first scales is NaN in these dtypes, and skipped."""
    found = trained(jnp.ones((4, 4), "float8_e4m3fn"), WRAPPERS[wrapper](optax.sgd(0.1)), 12)
    assert found["odd"].dtype == "float8_e4m3fn" and (found["odd"] < 1).all()


@pytest.mark.parametrize("loop", ["step", "own"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_params_keep_their_sharding_beside_a_state_that_users_shard(kind, wrapper, loop):
    """They took the state's, or a gate's branches differed in type."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    whole, shared = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    tx = WRAPPERS[wrapper](optax.adamw(0.1))
    params = jax.device_put({"w": jnp.eye(8), "odd": jnp.zeros(())}, whole)
    place = lambda x: jax.device_put(x, shared if x.shape == (8, 8) else whole)  # noqa: E731
    state, batch = jax.tree.map(place, tx.init(params)), jax.device_put(BATCH, whole)
    step = boostax.make_train_step(loss, tx)
    if loop == "step":
        carry = step.init(params)._replace(opt_state=state)
        for _ in range(2):
            carry, _ = step(carry, batch)
        params, state = carry.params, carry.opt_state
    else:
        # On an Auto mesh types have no sharding, and the user's jit says it.
        where = (whole, None) if kind is AxisType.Auto else None
        oracle = boostax.value_and_grad(loss)
        with jax.set_mesh(mesh):
            params, state = jax.jit(
                lambda p, s, b: boostax.apply_gradients(tx, oracle(p, s, b)[1], s, p),
                out_shardings=where,
            )(params, state, batch)
    assert params["w"].is_fully_replicated
    moments = [x for x in jax.tree.leaves(state) if x.shape == (8, 8)]
    assert moments and all(x.sharding.shard_shape(x.shape) == (2, 8) for x in moments)


@pytest.mark.parametrize("rows", [15, 3])
def test_rows_that_do_not_divide_among_the_replicas(mesh, rows):
    oracle = boostax.value_and_grad(loss, mesh=mesh, axis_name="data")
    params, batch = {"w": jnp.eye(8), "odd": jnp.zeros(())}, jax.tree.map(lambda x: x[:rows], BATCH)
    wanted = r"batch must be divisible by 8 replicas .* at 'x', got \(\d+, 8\). Pad the batch"
    with pytest.raises(ValueError, match=wanted):
        oracle(params, (), batch)
    with pytest.raises(ValueError, match=r"dimension 1 at 'x', got \(2, \d+, 8\)"):
        boostax.value_and_grad(loss, mesh=mesh, axis_name="data", microbatches="stacked")(
            params, (), jax.tree.map(lambda x: np.stack([x, x]), batch)
        )
