"""What the compiled programs contain: memory, collectives, FLOPs. Counts, not clocks."""

import costs
import jax
import jax.numpy as jnp
import optax
import pytest
from memory import reduction_bytes, temporary_bytes

import boostax

ADAM = optax.adam(1e-3)
BIG = {f"layer{i}": jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for i in range(4)}
BIG_BYTES = 4 * 1024 * 1024 * 4

CHAINS = {
    "dynamic_loss_scale": boostax.dynamic_loss_scale(ADAM),
    "static_loss_scale": boostax.static_loss_scale(ADAM, 128.0),
    "accumulate": boostax.accumulate(ADAM, 4),
    "accumulate_by_schedule": boostax.accumulate(ADAM, lambda step: 4 + 0 * step),
    "accumulate_in_bfloat16": boostax.accumulate(ADAM, 4, dtype="bfloat16"),
    "accumulate_in_float16": boostax.accumulate(ADAM, 4, dtype="float16"),
    "accumulate(dynamic_loss_scale)": boostax.accumulate(boostax.dynamic_loss_scale(ADAM), 8),
    "dynamic_loss_scale(accumulate)": boostax.dynamic_loss_scale(boostax.accumulate(ADAM, 8)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_apply_gradients_needs_no_temporary_copy(name):
    """4.2M params, Adam, donated: the gate writes in place (the branch order and what crosses).

    ``carry`` around it copies nothing of what it hands on.
    """
    small = {"amax": jax.ShapeDtypeStruct((1024,), jnp.float32)}
    # Only these look at magnitudes.
    alone = reduction_bytes(BIG) if "loss_scale" in name else 0
    carried = boostax.carry(CHAINS[name], {"amax": "max"})
    for tx, params in ((CHAINS[name], BIG), (carried, BIG | small)):
        assert temporary_bytes(tx, params) - alone <= 0.05 * BIG_BYTES


@pytest.mark.parametrize("name", CHAINS)
def test_pure_update_needs_one_copy(name):
    tx = CHAINS[name]

    def step(params, state, grads):
        updates, state = boostax.testing.drawn(tx).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    program = jax.jit(step, donate_argnums=(0, 1)).lower(BIG, jax.eval_shape(tx.init, BIG), BIG)
    assert program.compile().memory_analysis().temp_size_in_bytes <= 1.1 * BIG_BYTES


# Data parallel over eight devices.


def test_micro_batched_flops_are_the_ideal_share(mesh):
    """Per device: 1/8 of the whole batch's, within 5%: nothing is replicated or repeated."""
    slices, batch = 4, jnp.ones((1024, 32))
    params = {"w1": jnp.ones((32, 64)), "b1": jnp.zeros(64), "w2": jnp.ones((64, 8))}
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"]) ** 2)  # noqa: E731
    whole = jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile()
    oracle = boostax.value_and_grad(loss, axis_name="data", microbatches=slices)
    local = lambda p, x: jax.tree.map(lambda x: x[None], oracle(p, (), x))  # noqa: E731
    how = {"mesh": mesh, "in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data")}
    sliced = jax.jit(jax.shard_map(local, **how)).lower(params, batch).compile()
    # cost_analysis counts the body of the scan once.
    share = slices * sliced.cost_analysis()["flops"] / (whole.cost_analysis()["flops"] / 8)
    assert 0.95 <= share <= 1.05


def test_the_counter_sees_scans_branches_and_ring_factors(mesh):
    """The tool itself: trips multiply, branches are marked, bytes follow the declared dtype."""

    def local(x):
        body = lambda c, _: (c + jax.lax.psum(x.astype(jnp.bfloat16), "data").sum(), None)  # noqa: E731
        total, _ = jax.lax.scan(body, jnp.bfloat16(0), None, length=3)
        return jax.lax.cond(total > 0, lambda: jax.lax.pmax(x, "data"), lambda: jnp.zeros(4))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    first, second = costs.collectives(mapped, jnp.ones(32))
    assert (first.primitive, first.bytes, first.count, first.conditional) == ("psum", 8, 3, False)
    assert first.wire_bytes == 8 * 3 * 2 * 7 / 8
    assert (second.primitive, second.bytes, second.conditional) == ("pmax", 16, True)
