"""Sharded params sent in fewer bits: what the loss sees, what the owner keeps, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reducing import mesh_of
from training import follow, losses_of

import boostax

BOTH = ("data", "model")
SPECS = {
    "FSDP": ({"data": 8}, {"w": jax.P("data"), "v": jax.P(None, "data"), "b": jax.P()}),
    "HSDP": ({"data": 4, "model": 2}, {"w": jax.P(*BOTH), "v": jax.P(BOTH), "b": jax.P()}),
}
KINDS = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}


def placed(name, kind="auto"):
    sizes, specs = SPECS[name]
    mesh = mesh_of(KINDS[kind], **sizes)
    rng = np.random.default_rng(0)
    shapes = {"w": (512, 48), "v": (256, 16), "b": (48,)}
    whole = {k: rng.normal(size=s, scale=0.1).astype(np.float32) for k, s in shapes.items()}
    return mesh, whole, {k: jax.NamedSharding(mesh, spec) for k, spec in specs.items()}


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((hidden[:, :16] - x[:, :256] @ params["v"]) ** 2)


def fsdp_step(tx, loss=loss_fn, gather="int8", **options):
    """A step whose params are sharded over all devices, and the first params."""
    mesh, whole, _ = placed("FSDP")
    how = {"mesh": mesh, "axis_name": "data", "param_specs": SPECS["FSDP"][1]} | options
    return boostax.make_train_step(loss, tx, gather=gather, **how), whole


def rounded(x, spec, mesh, dtype):
    """What is to arrive of a param: NumPy's words for it, shard by shard."""
    if dtype == "bfloat16":
        return np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))
    out = np.empty_like(x)
    for index in jax.NamedSharding(mesh, spec).devices_indices_map(x.shape).values():
        part = x[index]
        block = boostax.precision.formats.block_of(part.shape)
        for corner in np.ndindex(*(n // b for n, b in zip(part.shape, block, strict=True))):
            at = tuple(slice(i * b, (i + 1) * b) for i, b in zip(corner, block, strict=True))
            scale = np.float32(127) / np.abs(part[at]).max()
            codes = np.floor(part[at] * scale + np.float32(0.5))
            out[index][at] = codes * (np.abs(part[at]).max() / np.float32(127))
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", SPECS)
def test_the_loss_sees_params_rounded_by_blocks_of_their_shards(name, dtype, kind):
    mesh, whole, where = placed(name, kind)
    params = jax.device_put(whole, where)
    found = jax.jit(boostax.train.gather_params(params, dtype, axis_name="data"))(params)
    for leaf, x in whole.items():
        expected = x if leaf == "b" else rounded(x, SPECS[name][1][leaf], mesh, dtype)
        np.testing.assert_allclose(found[leaf], expected, rtol=1e-6, atol=1e-9)
        assert "data" not in jax.tree.leaves(tuple(found[leaf].sharding.spec))
    if dtype == "int8":
        assert np.abs(found["w"] - whole["w"]).max() <= 0.51 * np.abs(whole["w"]).max() / 127


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", SPECS)
def test_owners_keep_their_params_exact(name, dtype):
    """A step with ``gather=`` is a step of the params by gradients at the rounded ones."""
    mesh, whole, where = placed(name)
    tx = optax.chain(boostax.all_reduce("data"), optax.sgd(1e-4))
    specs = SPECS[name][1]
    x = np.random.default_rng(1).normal(size=(16, 512)).astype(np.float32)
    step, _ = fsdp_step(tx, gather=dtype, mesh=mesh, param_specs=specs)
    state, told = step(step.init(whole), x)
    seen = {k: v if k == "b" else rounded(v, specs[k], mesh, dtype) for k, v in whole.items()}
    loss, grads = jax.value_and_grad(loss_fn)(seen, x)
    np.testing.assert_allclose(told["loss"], loss, rtol=1e-5)
    for leaf, moved in state.params.items():
        np.testing.assert_allclose(moved, whole[leaf] - 1e-4 * grads[leaf], rtol=2e-6, atol=1e-7)
        assert moved.sharding.is_equivalent_to(where[leaf], moved.ndim)


def test_many_steps_smaller_than_a_unit_of_the_code_move_the_params():
    """They would stand still where params are stored in int8."""
    flat = lambda params, x: 1e-5 * jnp.sum(params["w"]) + 0 * jnp.sum(x)  # noqa: E731
    step, whole = fsdp_step(optax.chain(boostax.all_reduce("data"), optax.sgd(1.0)), flat)
    state, _ = follow(step, step.init(whole), [np.ones((8, 1), np.float32)] * 20)
    np.testing.assert_allclose(state.params["w"], whole["w"] - 20e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_what_is_not_finite_is_seen_and_a_zero_block_stays_zero(dtype):
    _, whole, where = placed("FSDP")
    whole["w"][3, 4], whole["v"][:] = np.nan, 0
    params = jax.device_put(whole, where)
    found = jax.jit(boostax.train.gather_params(params, dtype, axis_name="data"))(params)
    assert np.isnan(found["w"][3, 4]) and np.isfinite(found["w"][100]).all()
    np.testing.assert_array_equal(found["v"], 0)


def test_with_a_window_a_scaler_and_a_sharded_state():
    """Params change when the window closes; whatever is around, the loss falls as without."""
    chain = optax.chain(boostax.all_reduce("data"), optax.adam(1e-2))
    tx = boostax.accumulate(boostax.dynamic_loss_scale(chain), 2)
    x, ends = np.random.default_rng(0).normal(size=(16, 512)).astype(np.float32), {}
    for dtype in (None, "int8", "bfloat16"):
        step, whole = fsdp_step(tx, gather=dtype, shard_optimizer=True, microbatches=2)
        seen = losses_of(follow(step, step.init(whole), [x] * 20)[1])
        assert seen[-1] < 0.5 * seen[0]
        ends[dtype] = seen[-1]
    np.testing.assert_allclose(ends["int8"], ends[None], rtol=0.02)
    np.testing.assert_allclose(ends["bfloat16"], ends[None], rtol=0.02)


def test_a_line_search_sees_the_loss_that_it_was_told():
    """Its first trial at a step of zero would otherwise differ from the value of the call."""
    step, whole = fsdp_step(optax.chain(boostax.all_reduce("data"), optax.lbfgs()))
    x = np.random.default_rng(0).normal(size=(16, 512)).astype(np.float32)
    seen = losses_of(follow(step, step.init(whole), [x] * 4)[1])
    assert seen[-1] < 0.1 * seen[0]


def test_stored_params_may_be_sent_in_int8():
    """bf16 with a remainder on the owner, int8 on the wire."""
    chain = optax.chain(boostax.all_reduce("data"), optax.adam(1e-2))
    step, whole = fsdp_step(boostax.precision.store(chain, params="remainder"))
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), whole)
    state, told = step(step.init(low), np.ones((8, 512), np.float32))
    assert state.params["w"].dtype == jnp.bfloat16 and np.isfinite(told["loss"])


def test_what_is_carried_is_not_rounded():
    """A history of an fp8 layer, sharded like a weight."""
    params = {"w": np.ones(128, np.float32), "history": np.linspace(0, 1, 128, dtype=np.float32)}
    chain = optax.chain(boostax.all_reduce("data"), optax.sgd(0.0))
    tx = boostax.carry(chain, {"history": "max"}, axis_name="data")
    loss = lambda p, x: jnp.sum(p["w"] * x) + jnp.sum(p["history"] ** 2) / 2  # noqa: E731
    ends = []
    for dtype in (None, "int8"):
        step, _ = fsdp_step(tx, loss, dtype, param_specs=dict.fromkeys(params, jax.P("data")))
        state, _ = step(step.init(params), np.zeros((8, 1), np.float32))
        ends.append(state.params["history"])
    np.testing.assert_array_equal(*ends)


def test_refusals():
    mesh, whole, where = placed("FSDP")
    tx = optax.chain(boostax.all_reduce("data"), optax.sgd(1e-2))
    make = lambda dtype: boostax.make_train_step(loss_fn, tx, mesh=mesh, gather=dtype)  # noqa: E731
    with pytest.raises(ValueError, match="gather must be"):
        make("int4")
    with pytest.raises(ValueError, match="params must be sharded over data"):
        make("int8")(make("int8").init(whole), np.ones((8, 512), np.float32))
    for place, dtype, said in (
        (None, "int8", "params must be placed on one mesh"),
        (jax.NamedSharding(mesh, jax.P()), "int8", "params must be sharded over data"),
        (where, "float8", "dtype must be"),
    ):
        params = jax.device_put(whole, place) if place else whole
        with pytest.raises(ValueError, match=said):
            boostax.train.gather_params(params, dtype, axis_name="data")
