"""Leaves, placements and rows at the border of what is usual."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from reducing import mesh_of
from training import fit, follow, own_step, walk

import boostax

REDUCTIONS = {
    "mean": boostax.all_reduce,
    "sum": lambda axis: boostax.all_reduce(axis, op="sum"),
    "half": lambda axis: boostax.all_reduce(axis, wire_dtype="bfloat16"),
    "adasum": boostax.adasum,
    "int8": boostax.int8_reduce,
    "top_k": lambda axis: boostax.top_k_reduce(axis, 1.0),
}
WRAPPERS = {
    "bare": lambda tx: tx,
    "window": lambda tx: boostax.accumulate(tx, 2),
    "scaler": boostax.dynamic_loss_scale,
    "average": boostax.model.average_params,
    "norms": lambda tx: optax.chain(boostax.model.adagc(max_norm=1e3), tx),
}
PLACES = {
    "whole": {},
    "FSDP": {"param_specs": {"w": jax.P("data"), "odd": jax.P()}},
    "ZeRO-1": {"shard_optimizer": True},
}
BATCH = {"x": np.float32(np.random.default_rng(0).normal(size=(16, 8))), "y": np.ones((16, 8))}


def loss(params, batch):
    beside = jnp.sum(params["odd"].astype(jnp.float32) ** 2)
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2) + beside


def trained(odd, tx, steps=4, **options):
    """Params after some steps, with a leaf that is seldom met."""
    return fit(loss, tx, {"w": jnp.eye(8), "odd": odd}, [BATCH] * steps, **options)[0].params


@pytest.mark.parametrize("reduction", ["mean", "half", "int8", "adasum"])
def test_a_leaf_without_elements_travels(mesh, reduction):
    tx = boostax.accumulate(optax.chain(REDUCTIONS[reduction]("data"), optax.sgd(0.1)), 2)
    options = {"mesh": mesh, "axis_name": "data"}
    wanted = trained(jnp.zeros(()), tx, **options)
    for place in PLACES.values():
        found = trained(jnp.zeros((0, 3)), tx, **options, **place)
        assert found["odd"].shape == (0, 3)
        np.testing.assert_allclose(found["w"], wanted["w"], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float8_params_travel_on_a_mesh(mesh, reduction):
    """JAX promotes no float8 by itself: its gradient is 2, so that 1 becomes 0.8 and rounds."""
    dtype = "float8_e4m3fn" if reduction in ("mean", "int8") else "float8_e5m2"
    rate = 0.1 / (8 if reduction == "sum" else 1)
    tx = optax.chain(REDUCTIONS[reduction]("data"), optax.sgd(rate))
    found = trained(jnp.ones((4, 4), dtype), tx, steps=1, mesh=mesh, axis_name="data")
    assert found["odd"].dtype == dtype
    np.testing.assert_array_equal(found["odd"], jnp.full((4, 4), 0.8).astype(dtype))


@pytest.mark.parametrize("wrapper", ["window", "scaler", "average", "norms"])
def test_float8_params_pass_gates(wrapper):
    """A gradient that overflows under the first scales is NaN in these dtypes, and skipped."""
    found = trained(jnp.ones((4, 4), "float8_e4m3fn"), WRAPPERS[wrapper](optax.sgd(0.1)), 12)
    assert found["odd"].dtype == "float8_e4m3fn" and (found["odd"] < 1).all()


LOOPS = [(AxisType.Auto, "step"), (AxisType.Explicit, "step"), (AxisType.Explicit, "own")]


@pytest.mark.parametrize(("kind", "loop"), LOOPS)
@pytest.mark.parametrize("wrapper", ["bare", "window", "scaler", "average"])
def test_params_keep_their_sharding_beside_a_state_that_users_shard(kind, wrapper, loop):
    """They took the state's, or a gate's branches differed in type."""
    mesh = mesh_of(kind, data=4)
    whole, shared = NamedSharding(mesh, jax.P()), NamedSharding(mesh, jax.P("data"))
    tx = WRAPPERS[wrapper](optax.adamw(0.1))
    params = jax.device_put({"w": jnp.eye(8), "odd": jnp.zeros(())}, whole)
    place = lambda x: jax.device_put(x, shared if x.shape == (8, 8) else whole)  # noqa: E731
    state, batch = jax.tree.map(place, tx.init(params)), jax.device_put(BATCH, whole)
    step = boostax.make_train_step(loss, tx)
    if loop == "step":
        carry = step.init(params)._replace(opt_state=state)
        _, params, state, *_ = follow(step, carry, [batch] * 2)[0]
    else:
        with jax.set_mesh(mesh):
            params, state, _ = own_step(tx, boostax.value_and_grad(loss))(params, state, batch)
    assert params["w"].is_fully_replicated
    moments = [x for x in jax.tree.leaves(state) if x.shape == (8, 8)]
    assert moments and all(x.sharding.shard_shape(x.shape) == (2, 8) for x in moments)


@pytest.mark.parametrize("rows", [15, 3])
def test_rows_that_do_not_divide_among_the_replicas(mesh, rows):
    params, batch = {"w": jnp.eye(8), "odd": jnp.zeros(())}, jax.tree.map(lambda x: x[:rows], BATCH)
    wanted = r"batch must be divisible by 8 replicas .* at 'x', got \(\d+, 8\). Pad the batch"
    with pytest.raises(ValueError, match=wanted):
        boostax.value_and_grad(loss, mesh=mesh, axis_name="data")(params, (), batch)
    with pytest.raises(ValueError, match=r"dimension 1 at 'x', got \(2, \d+, 8\)"):
        boostax.value_and_grad(loss, mesh=mesh, axis_name="data", microbatches="stacked")(
            params, (), jax.tree.map(lambda x: np.stack([x, x]), batch)
        )


def test_lookahead_in_a_window_is_lookahead_of_means():
    """Its params are two trees, of which gradients have one."""
    ahead = lambda: optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)  # noqa: E731
    start = optax.LookaheadParams.init_synced({"w": jnp.zeros(4)})
    grads = [{"w": jnp.arange(4.0) * i + i} for i in range(8)]
    means = [jax.tree.map(lambda a, b: (a + b) / 2, *grads[i : i + 2]) for i in range(0, 8, 2)]

    found, _ = walk(boostax.accumulate(ahead(), 2), start, grads)[-1]
    wanted, _ = walk(ahead(), start, means)[-1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted)


@pytest.mark.parametrize("base", [jnp.int8(2), jnp.arange(3)])
def test_a_base_of_integers_that_no_schedule_trains_passes_every_driver(base):
    """An int8 base under float adapters in one tree, frozen for good; beside it one that moves."""
    params = {"base": base, "a": jnp.zeros(3), "lora": jnp.zeros(3)}
    run = lambda p, x: jnp.mean((x * (p["base"] + p["lora"] + p["a"]) - 1) ** 2)  # noqa: E731
    window = boostax.accumulate(optax.sgd(0.1), 2)
    tx = boostax.scheduled_freeze(window, ["base", "a"], lambda step: 1 + step % 2)
    state, x = tx.init(params), jnp.ones((4, 3))
    ends = [fit(run, tx, params, [x] * 8, freeze_driver=d)[0].params for d in ("host", "switch")]
    chosen = boostax.value_and_grad(run)(params, state, x, active=tx.choice(params, state))[1]
    wanted = jax.grad(lambda lora: run(params | {"lora": lora}, x))(params["lora"])
    np.testing.assert_allclose(chosen["lora"], wanted, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert (ends[0]["a"] != 0).any() and (ends[0]["base"] == base).all()


def test_an_average_inside_a_freeze_at_one_depth_has_one_answer():
    """In a step, in ``auto`` and in a loop of one's own."""
    params, rows = {"w": jnp.ones(3), "base": jnp.ones(3)}, [jnp.ones((4, 3))] * 3
    run = lambda p, x: jnp.mean((x * (p["w"] + p["base"])) ** 2)  # noqa: E731
    average, sgd = boostax.model.average_params, optax.sgd(0.1)
    by_hand = boostax.scheduled_freeze(average(sgd, decay=0.5), ["base"], 1)
    read = {"groups": ["base"], "level": 1, "kind": [1]}
    read = boostax.auto({"freeze": read, "average_params": {"decay": 0.5}}).optimizer(sgd)
    own, state = params, by_hand.init(params)
    for x in rows:
        own, state = boostax.apply_gradients(by_hand, jax.grad(run)(own, x), state, own)
    wanted = boostax.model.averaged_params(own, state)
    for tx in (by_hand, read):
        end, _ = fit(run, tx, params, rows)
        found = boostax.model.averaged_params(end.params, end.opt_state)
        np.testing.assert_allclose(found["w"], wanted["w"], rtol=1e-6)
        np.testing.assert_array_equal(found["base"], params["base"])
    np.testing.assert_array_equal(wanted["base"], params["base"])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("make", [boostax.reduce.partial_average, boostax.reduce.local_updates])
def test_params_that_differ_per_replica_in_a_map_of_ones_own(mesh, make, check_vma):
    states, params = boostax.states, {"w": jnp.eye(8), "v": jnp.ones(8)}
    tx = make(optax.sgd(0.1), 2, axis_name="data")
    own_loss = lambda p, x: loss(p | {"odd": p["v"]}, x)  # noqa: E731
    oracle, where = boostax.value_and_grad(own_loss, axis_name="data"), jax.P("data")
    specs = where, states.state_specs(tx, params, axis_name="data")
    start = states.stack_replicas((states.PerReplica(params), tx.init(params)), 8)
    enter = lambda own, state: (states.enter_replica(own).local, states.enter_replica(state))  # noqa: E731

    def mapped(enter):
        def step(own, state, x):
            own, state = enter(own, state)
            own, state = boostax.apply_gradients(tx, oracle(own, state, x)[1], state, own)
            return states.leave_replica((states.PerReplica(own), state))

        how = {"in_specs": (*specs, where), "out_specs": specs, "check_vma": check_vma}
        return jax.jit(jax.shard_map(step, mesh=mesh, **how))(*start, BATCH)

    wanted, _ = fit(own_loss, tx, params, [BATCH], mesh=mesh, axis_name="data")
    found, _ = mapped(enter)
    np.testing.assert_allclose(found.local["w"], wanted.params.local["w"], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"Pass .*enter_replica\(params\).local"):
        mapped(lambda *given: given)


def test_a_basis_that_is_not_finite_is_not_loaded(tmp_path):
    params = {"w": jnp.zeros(3)}
    basis = boostax.subspace.Basis({"w": jnp.eye(3)[:2]}, params, jnp.ones(2))
    for bad in (jnp.nan, jnp.inf):
        broken = basis._replace(components={"w": jnp.eye(3)[:2].at[0, 0].set(bad)})
        broken.save(tmp_path / "basis.npz")
        with pytest.raises(ValueError, match="path must be a file of finite numbers"):
            boostax.subspace.Basis.load(tmp_path / "basis.npz", params)


SPECS = [jax.P("data"), jax.P("model"), jax.P(None, None, "data"), jax.P("data", "data"), "data"]


@pytest.mark.parametrize("abstract", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_a_spec_that_does_not_fit_names_its_param(mesh, spec, abstract):
    """Elsewhere the last shard of an uneven tied embedding was never trained.

    https://github.com/pytorch/pytorch/issues/176076
    """
    tx, specs = optax.chain(boostax.all_reduce(), optax.sgd(0.1)), {"rows": spec, "w": jax.P()}
    step = boostax.make_train_step(loss, tx, mesh=mesh, param_specs=specs)
    params = {"rows": jnp.zeros((10, 8)), "w": jnp.zeros(8)}
    said = r"param rows must be sharded over axes of the step's mesh.* for shape \(10, 8\)"
    with pytest.raises(ValueError, match=said):
        step.init(jax.eval_shape(lambda: params) if abstract else params)


@pytest.mark.parametrize("sizes", [{"data": 4}, {"data": 4, "model": 2}], ids=["rows", "columns"])
@pytest.mark.parametrize("slices", [1, "stacked"])
def test_a_loop_on_an_explicit_mesh_splits_its_rows(slices, sizes):
    """A batch on the host, or split in another way, is split as in a train step.

    https://github.com/google/flax/issues/5172
    """
    seen, last = [], "model" if "model" in sizes else None
    mesh = mesh_of(AxisType.Explicit, **sizes)

    def scaled(w, x):
        seen.append(jax.typeof(x).sharding.spec[-1])
        return jnp.mean((w * x) ** 2)

    x = np.float32(np.random.default_rng(0).normal(size=(2, 8, 6)[slices == 1 :]))
    w = jax.device_put(jnp.ones(6), NamedSharding(mesh, jax.P(last)))
    oracle = boostax.value_and_grad(scaled, mesh=mesh, axis_name="data", microbatches=slices)
    for rows in (x, jax.device_put(x, NamedSharding(mesh, jax.P(*[None] * (x.ndim - 1), last)))):
        _, grads = jax.jit(oracle)(w, (), rows)
        wanted = 2 * np.mean(np.float64(x) ** 2, tuple(range(x.ndim - 1))) / 6
        np.testing.assert_allclose(np.mean(grads.local, 0), wanted, rtol=1e-6)
    assert seen[-1] == last
