"""What the compiled programs contain: memory, collectives, FLOPs. Counts, not clocks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from memory import reduction_bytes, temporary_bytes

import boostax
from boostax._core.costs import collectives
from boostax.testing import drawn

ADAM = optax.adam(1e-3)
BIG = {f"layer{i}": jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for i in range(10)}
BIG_BYTES = 10 * 1024 * 1024 * 4

CHAINS = {
    "dynamic_loss_scale": boostax.dynamic_loss_scale(ADAM),
    "static_loss_scale": boostax.static_loss_scale(ADAM, 128.0),
    "accumulate": boostax.accumulate(ADAM, 4),
    "accumulate_by_schedule": boostax.accumulate(ADAM, lambda step: 4 + 0 * step),
    "accumulate_in_bfloat16": boostax.accumulate(ADAM, 4, accumulator_dtype="bfloat16"),
    "accumulate_in_float16": boostax.accumulate(ADAM, 4, accumulator_dtype="float16"),
    "accumulate(dynamic_loss_scale)": boostax.accumulate(boostax.dynamic_loss_scale(ADAM), 8),
    "dynamic_loss_scale(accumulate)": boostax.dynamic_loss_scale(boostax.accumulate(ADAM, 8)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_apply_gradients_needs_no_temporary_copy(name):
    """10.5M params, Adam, donated: the gate writes in place (the branch order and what crosses)."""
    tx = CHAINS[name]
    temp = temporary_bytes(tx, BIG)
    print(f"{name}: apply_gradients temp / params = {temp / BIG_BYTES:.4f}")
    # Only these look at magnitudes.
    alone = reduction_bytes(BIG) if "loss_scale" in name or "noise" in name else 0
    assert temp - alone <= 0.05 * BIG_BYTES


@pytest.mark.parametrize("name", CHAINS)
def test_pure_update_needs_one_copy(name):
    tx = CHAINS[name]

    def step(params, state, grads):
        updates, state = drawn(tx).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    program = jax.jit(step, donate_argnums=(0, 1)).lower(BIG, jax.eval_shape(tx.init, BIG), BIG)
    temp = program.compile().memory_analysis().temp_size_in_bytes
    print(f"{name}: update temp / params = {temp / BIG_BYTES:.4f}")
    assert temp <= 1.1 * BIG_BYTES


@pytest.mark.parametrize("name", CHAINS)
def test_carried_leaves_cost_their_own_size(name):
    """``carry`` around a gate: no copy of what it hands on."""
    small = {"amax": jax.ShapeDtypeStruct((1024,), jnp.float32)}
    tx = boostax.carry(CHAINS[name], {"amax": "max"})
    alone = reduction_bytes(BIG) if "loss_scale" in name or "noise" in name else 0
    assert temporary_bytes(tx, {**BIG, **small}) - alone <= 0.05 * BIG_BYTES


# Data parallel over eight devices, windows of eight.

WINDOW = 8
PARAMS = {"w1": jnp.full((32, 64), 0.1), "b1": jnp.zeros(64), "w2": jnp.full((64, 8), 0.1)}


def mlp_loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)


def mlp_batch(rows):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(rows, 32)).astype(np.float32),
        "y": rng.normal(size=(rows, 8)).astype(np.float32),
    }


def optimizer():
    return optax.chain(boostax.all_reduce("data"), optax.clip_by_global_norm(1.0), ADAM)


def scaler_outside():
    inner = boostax.accumulate(optimizer(), WINDOW, axis_name="data")
    return boostax.dynamic_loss_scale(inner, axis_name="data")


def scaler_inside():
    inner = boostax.dynamic_loss_scale(optimizer(), axis_name="data")
    return boostax.accumulate(inner, WINDOW, axis_name="data")


def train_step(mesh, tx):
    step = boostax.make_train_step(mlp_loss, tx, mesh=mesh, axis_name="data")
    return step, step.init(PARAMS)


@pytest.mark.parametrize("make", [scaler_outside, scaler_inside])
def test_compiled_text_reduces_gradients_only_inside_the_branch(mesh, make):
    step, state = train_step(mesh, make())
    text = step.lower(state, mlp_batch(64)).compile().as_text()
    entry = text[text.index("ENTRY ") :]
    outside = re.findall(r"= (\S+) all-reduce(?:-start)?\(", entry)
    everywhere = re.findall(r"= (.+?) all-reduce(?:-start)?\(", text)
    large = [shape for shape in everywhere if "64" in shape]
    print(f"{make.__name__}: in the entry {outside}, of gradients {large}")
    assert all(re.match(r"(f32|s32)\[\]", shape) for shape in outside), "scalars only"
    assert len(large) == 1, "one all-reduce of all gradients, in a branch"


def test_micro_batched_flops_are_the_ideal_share(mesh):
    """Per device: 1/8 of the whole batch's, within 5%: nothing is replicated or repeated."""
    rows, slices = 1024, 4
    batch = jax.tree.map(jnp.asarray, mlp_batch(rows))
    whole = jax.jit(jax.value_and_grad(mlp_loss)).lower(PARAMS, batch).compile()
    oracle = boostax.value_and_grad(mlp_loss, axis_name="data", microbatches=slices)
    local = jax.shard_map(
        lambda p, b: jax.tree.map(lambda x: x[None], oracle(p, (), b)),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
    )
    sliced = jax.jit(local).lower(PARAMS, batch).compile()
    # cost_analysis counts the body of the scan once.
    share = slices * sliced.cost_analysis()["flops"] / (whole.cost_analysis()["flops"] / 8)
    print(f"per-device FLOPs / ideal share = {share:.4f}")
    assert 0.95 <= share <= 1.05


def test_the_counter_sees_scans_branches_and_ring_factors(mesh):
    """The tool itself: trips multiply, branches are marked, bytes follow the declared dtype."""

    def local(x):
        body = lambda c, _: (c + jax.lax.psum(x.astype(jnp.bfloat16), "data").sum(), None)  # noqa: E731
        total, _ = jax.lax.scan(body, jnp.bfloat16(0), None, length=3)
        return jax.lax.cond(total > 0, lambda: jax.lax.pmax(x, "data"), lambda: jnp.zeros(4))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P())
    first, second = collectives(mapped, jnp.ones(32))
    assert (first.primitive, first.bytes, first.count, first.conditional) == ("psum", 8, 3, False)
    assert first.wire_bytes == 8 * 3 * 2 * 7 / 8
    assert (second.primitive, second.bytes, second.conditional) == ("pmax", 16, True)


def test_of_the_branches_of_a_cond_one_counts(mesh):
    """The mean of those that send; conds that follow each other, and one inside another, add up."""

    def local(x, i):
        send = lambda size: lambda: jax.lax.pmean(x[:size], "data").sum()  # noqa: E731
        total = jax.lax.switch(i, [send(2), send(6), lambda: 0.0])
        inner = lambda: jax.lax.cond(i > 1, send(1), send(3)) + send(4)()  # noqa: E731
        return total + jax.lax.cond(i > 0, inner, lambda: 0.0) + send(8)()

    specs = (P("data"), P())
    found = collectives(
        jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()), jnp.ones(64), 0
    )
    entries = {
        branch: sum(c.share * c.bytes / 4 for c in found if c.conditional == branch)
        for branch in (True, False)
    }
    assert entries == {True: (2 + 6) / 2 + (1 + 3) / 2 + 4, False: 8}
    assert sum(c.share * c.wire_bytes for c in found) == 2 * 7 / 8 * 4 * 18
    assert sum(c.wire_bytes for c in found) == 2 * 7 / 8 * 4 * (2 + 6 + 1 + 3 + 4 + 8)


def test_questions_about_one_index_are_alternatives(mesh):
    """Whether it is 0, then whether it is 1: at most one of them; not so another index or bound."""

    def local(x, i, j):
        send = lambda size: lambda: jax.lax.pmean(x[:size], "data").sum()  # noqa: E731
        ask = lambda here, size: jax.lax.cond(here, send(size), lambda: 0.0)  # noqa: E731
        first = ask(i == 0, 1) + ask(i == 1, 3) + ask(i == 2, 8)
        return first + ask(j == 0, 2) + ask(j == 1, 4) + ask(i > 1, 5)

    specs = (P("data"), P(), P())
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    found = collectives(mapped, jnp.ones(64), 0, 0)
    entries = sum(c.share * c.bytes / 4 for c in found)
    assert entries == (1 + 3 + 8) / 3 + (2 + 4) / 2 + 5
