"""What params of low precision round away is counted, and nothing else changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from memory import compiled_step
from reducing import mesh_of

import boostax
from boostax.testing import drawn

RNG = np.random.default_rng(0)
LOW = {
    "a": jnp.asarray(RNG.normal(size=(64, 16)), jnp.bfloat16),
    "b": jnp.asarray(RNG.normal(size=(32,)), jnp.float16),
    "c": jnp.asarray(RNG.normal(size=(8,)), jnp.float32),
}
sparse = lambda n: jnp.asarray(10.0 ** RNG.uniform(-6, 0, n) * (RNG.random(n) < 0.7))  # noqa: E731
GRADS = jax.tree.map(lambda p: sparse(p.shape), LOW)


ADAM = optax.adamw(1e-2)


def reference(params, grads, rate):
    """In NumPy: of the low leaves alone."""
    lost = some = 0
    for name in ("a", "b"):
        old = np.asarray(params[name])
        update = -np.float32(rate) * np.asarray(grads[name], np.float32)
        new = (old.astype(np.float32) + update).astype(old.dtype)
        some += (update != 0).sum()
        lost += ((update != 0) & (new == old)).sum()
    return lost / some


def plain(tx, params=LOW, grads=GRADS, state=None, steps=1):
    call = jax.jit(functools.partial(boostax.apply_gradients, drawn(tx)))
    state = tx.init(params) if state is None else state
    for _ in range(steps):
        params, state = call(grads, state, params)
    return params, state


def test_the_share_is_that_of_numpy_and_steps_are_those_of_the_bare_optimizer():
    tx = boostax.precision.count_lost_updates(optax.sgd(0.1))
    assert float(boostax.metrics(tx.init(LOW))["lost_updates"]) == 0
    params, state = plain(tx)
    found = [state.lost, plain(tx, params, GRADS, state)[1].lost]
    expected = [reference(LOW, GRADS, 0.1), reference(params, GRADS, 0.1)]
    assert 0.2 < expected[0] < 0.8
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    counted = boostax.precision.count_lost_updates(ADAM)
    wrapped, bare = (plain(boostax.dynamic_loss_scale(x), steps=3)[0] for x in (counted, ADAM))
    jax.tree.map(np.testing.assert_array_equal, wrapped, bare)


def test_updates_of_nothing_are_none_that_are_lost_and_a_skipped_step_counts_nothing():
    tx = boostax.static_loss_scale(boostax.precision.count_lost_updates(optax.sgd(0.1)), 1.0)
    params, state = plain(tx)
    before = boostax.metrics(state)["lost_updates"]
    ruined = GRADS | {"c": jnp.full(8, jnp.nan)}
    _, skipped = plain(tx, params, ruined, state)
    assert boostax.metrics(skipped)["lost_updates"] == before > 0
    _, state = plain(tx, params, jax.tree.map(jnp.zeros_like, GRADS), state)
    assert boostax.metrics(state)["lost_updates"] == 0


def test_f32_params_cost_nothing():
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), LOW)
    texts = []
    for tx in (optax.identity(), boostax.precision.count_lost_updates(optax.identity())):
        state = tx.init(wide)

        def call(grads, params, tx=tx, state=state):
            return boostax.apply_gradients(tx, grads, state, params)[0]

        texts.append(jax.jit(call).lower(wide, wide).as_text())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("form", ["mapped", "sharded", "zero"])
def test_replicas_and_shards_count_as_one(form):
    batch = jnp.tile(jnp.arange(1.0, 5.0)[:, None], (1, 3))

    def loss(params, x):
        pairs = zip(params.values(), GRADS.values(), strict=True)
        return x.mean() * sum(jnp.vdot(p.astype(jnp.float32), g) for p, g in pairs)

    reduced = optax.chain(boostax.all_reduce("data"), optax.sgd(0.1))
    counted = boostax.precision.count_lost_updates(reduced)
    specs = {"a": P("data"), "b": P(), "c": P()} if form == "sharded" else None
    how = {"param_specs": specs, "shard_optimizer": form == "zero"}
    step = boostax.make_train_step(loss, counted, mesh=mesh_of(data=4), axis_name="data", **how)
    _, metrics = step(step.init(LOW), batch)
    # bf16 gradients round, and their mean besides.
    np.testing.assert_allclose(metrics["lost_updates"], reference(LOW, GRADS, 0.25), rtol=5e-3)


def test_gates_inside_and_updates_without_params_are_refused():
    with pytest.raises(ValueError, match=r"count_lost_updates: inner must be .* without gates"):
        boostax.precision.count_lost_updates(boostax.accumulate(optax.sgd(0.1), 2)).init(LOW)
    tx = boostax.precision.count_lost_updates(optax.sgd(0.1))
    with pytest.raises(ValueError, match="count_lost_updates: params must be given"):
        tx.update(GRADS, tx.init(LOW))


COSTS = [(optax.sgd(0.1), 2.3, 1), (ADAM, 1.6, 3)]


@pytest.mark.parametrize(("optimizer", "traffic", "copies"), COSTS)
def test_the_cost_is_what_the_docstring_says(optimizer, traffic, copies):
    """Of 6.3M bf16 params, inside a scaler, in the program compiled for CPU."""
    params = {f"layer{i}": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16) for i in range(6)}
    moved, held = [], []
    for inner in (optimizer, boostax.precision.count_lost_updates(optimizer)):
        program = compiled_step(boostax.dynamic_loss_scale(inner), params)
        moved.append(program.cost_analysis()["bytes accessed"])
        held.append(program.memory_analysis().temp_size_in_bytes)
    assert moved[1] <= traffic * moved[0]
    assert held[1] - held[0] <= 1.01 * copies * 6 * 2**21


@pytest.mark.parametrize("kind", [None, "stochastic", "remainder"])
def test_inside_stored_params_it_is_refused_where_it_would_report_zero(kind):
    """It counted on f32 params, and said 0.0 while every update was lost."""
    count, low = boostax.precision.count_lost_updates, {"w": jnp.ones(4, jnp.bfloat16)}
    tx = boostax.precision.store(optax.chain(count(optax.sgd(1e-6))), params=kind)
    around = count(boostax.precision.store(optax.sgd(1e-6), params=kind))
    said = r"store: inner must be without count_lost_updates .* count_lost_updates\(store\(...\)\)"
    with pytest.raises(ValueError, match=said):
        tx.init(low | {"b": jnp.ones(4)})
    if kind is None:
        tx.init(jnp.ones(4))
        w, state = plain(around, low, {"w": jnp.ones(4)})
        assert state.lost == 1 and (w["w"] == 1).all()
    else:  # No mend leads to another refusal.
        with pytest.raises(ValueError, match="Leave count_lost_updates out"):
            around.init(low)
