"""Steps in a subspace inside train steps: devices, shards, gates, storage, other solvers."""

import functools
import itertools
import re

import chex
import costs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import lanes
from reducing import mesh_of
from training import follow

import boostax
from boostax._core import interpret
from boostax.subspace.basis import project

ROWS, WIDTH = 24, 10
FSDP = {"w": P("fsdp"), "v": P(), "b": P()}
LARGE = {"w": jnp.zeros((ROWS, 4096)), "v": jnp.zeros(4096), "b": jnp.zeros(())}
SIZE = 4 * (ROWS + 1) * 4096


def start(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "w": 0.5 * jax.random.normal(keys[0], (ROWS, WIDTH)),
        "v": 0.5 * jax.random.normal(keys[1], (WIDTH,)),
        "b": jnp.zeros(()),
    }


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)


def batches(count, rows=48):
    x = np.random.default_rng(1).normal(size=(count, rows, ROWS)).astype(np.float32)
    y = np.sin(x[..., :4].sum(-1)).astype(np.float32)
    return [(x[i], y[i]) for i in range(count)]


def basis_of(k, params=None):
    return boostax.subspace.random_basis(start() if params is None else params, k)


def train(tx, loss=loss_fn, steps=6, data=None, params=None, **options):
    step = boostax.make_train_step(loss, tx, **options)
    state = step.init(start() if params is None else params)
    return follow(step, state, batches(steps) if data is None else data)


def assert_close(got, expected, atol=1e-5):
    chex.assert_trees_all_close(got, expected, rtol=0, atol=atol)


RESIDUALS = {
    "none": lambda *reduce: None,
    "sgd": lambda *reduce: optax.chain(*reduce, optax.sgd(0.05, 0.9)),
}


def scheduled(tx):
    return boostax.scheduled_freeze(tx, {"w": 0, "v": 1, "b": 1}, schedule=[0, 1, 0, 0, 1, 0])


LAYOUTS = [1, 2, 3, 4, 8, (1, 2), (1, 3), (1, 8), (2, 2), (2, 4)]
EVERY = itertools.product(RESIDUALS, [5, 7, 32], LAYOUTS)


@functools.cache
def alone(residual, k):
    """The same on one device."""
    state, seen = train(boostax.dim_reduce(basis_of(k), residual=RESIDUALS[residual]()))
    assert seen[-1]["loss"] < seen[0]["loss"]
    return state


@pytest.mark.parametrize("case", lanes(EVERY, {("none", 5, 3), ("sgd", 7, (2, 2))}), ids=str)
def test_same_run_on_any_number_of_devices(case):
    """Batch split over the devices, or params and basis, or both."""
    residual, k, layout = case
    rest = RESIDUALS[residual](boostax.all_reduce("data"))
    tx = boostax.dim_reduce(basis_of(k), residual=rest, axis_name="data")
    if isinstance(layout, int):
        state, _ = train(tx, mesh=mesh_of(data=layout), axis_name="data")
        assert_close(state.params, alone(residual, k).params)
        return
    mesh = mesh_of(data=layout[0], fsdp=layout[1])
    state, _ = train(tx, mesh=mesh, axis_name="data", param_specs=FSDP)
    assert_close(state.params, alone(residual, k).params)
    rows = state.opt_state.basis["w"]
    assert rows.sharding.spec == P(None, "fsdp")
    assert rows.addressable_shards[0].data.nbytes == 4 * k * ROWS * WIDTH // layout[1]
    assert state.opt_state.basis["v"].sharding.is_fully_replicated


@pytest.mark.parametrize("wrap", [boostax.dynamic_loss_scale, scheduled])
def test_same_run_on_an_explicit_mesh(wrap):
    """Which jax.make_mesh makes: the first basis with a mean, and the line search, raised there."""
    points = [jax.tree.map(lambda x, i=i: x * (1 + 0.1 * i**2), start(i)) for i in range(4)]
    basis, rest = boostax.subspace.pca_basis(points, 3), RESIDUALS["sgd"](boostax.all_reduce())
    tx = wrap(boostax.dim_reduce(basis, residual=rest, axis_name="data"))
    ends = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        how = {"mesh": mesh_of(kind, data=2, fsdp=2), "axis_name": "data", "param_specs": FSDP}
        ends.append(train(tx, **how)[0].params)
    assert_close(*ends)


@pytest.mark.parametrize("layout", lanes([(2, 2), (1, 3), (2, 4)], [(2, 2)]))
def test_same_run_in_a_shard_map_of_ones_own(layout):
    """Whose loss gathers what is sharded."""
    mesh = mesh_of(data=layout[0], fsdp=layout[1])
    rest = RESIDUALS["sgd"](boostax.all_reduce("data"))
    tx = boostax.dim_reduce(basis_of(5), residual=rest, axis_name="data", shard_axes="fsdp")

    def gathering_loss(params, batch):
        w = jax.lax.all_gather(params["w"], "fsdp", tiled=True, to="invarying")
        return loss_fn({**params, "w": w}, batch)

    oracle = boostax.value_and_grad(gathering_loss, axis_name="data")

    def step(params, state, batch):
        value, grads = oracle(params, state, batch)
        told = {"value": value, "value_fn": oracle.loss_at(batch)}
        return boostax.apply_gradients(tx, grads, state, params, **told)

    kept = FSDP, boostax.states.state_specs(tx, start(), param_specs=FSDP, axis_name="data")
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(*kept, P("data")), out_specs=kept))
    params, state = start(), tx.init(start())
    for batch in batches(6):
        params, state = step(params, state, batch)
    assert_close(params, alone("sgd", 5).params)
    assert state.basis["w"].sharding.spec == P(None, "fsdp")


@pytest.mark.parametrize("k", lanes([5, 32], [5]))
@pytest.mark.parametrize("kind", lanes([AxisType.Auto, AxisType.Explicit], [AxisType.Auto]))
def test_sharded_arrays_under_plain_jit(kind, k):
    """Nothing but the coordinates crosses the devices, and nothing is made flat."""
    mesh = mesh_of(kind, x=8)
    plan = {"w": P("x"), "v": P(), "b": P()}
    rest = optax.sgd(0.05, 0.9)
    expected, _ = train(boostax.dim_reduce(basis_of(k), residual=rest))
    with jax.set_mesh(mesh):
        place = lambda tree, lead=(): jax.tree.map(  # noqa: E731
            lambda x, p: jax.device_put(x, NamedSharding(mesh, P(*lead, *p))), tree, plan
        )
        rows, params = place(basis_of(k), (None,)), place(start())
        alone = jax.jit(lambda rows, g: project(rows, g)).lower(rows, params).compile().as_text()
        assert not re.search(r"all-gather|all-to-all|collective-permute|concatenate", alone)
        sums = re.findall(r"= (\S+) all-reduce\(", alone)
        assert [re.sub(r"\{.*", "", each) for each in sums] == [f"f32[{k},1]"]
        state, _ = train(boostax.dim_reduce(rows, residual=rest), params=params)
    assert state.opt_state.basis["w"].addressable_shards[0].data.nbytes == rows["w"].nbytes // 8
    assert_close(state.params, expected.params)


@pytest.mark.parametrize("k", [5, 32])
def test_what_travels(k):
    """Four bytes for each coordinate; the energy and every loss are one number."""
    mesh = mesh_of(data=1, fsdp=8)
    rows = basis_of(k)

    def coordinates(rows, grads):
        return project(rows, grads, ("fsdp",))

    stacked = jax.tree.map(lambda spec: P(None, *spec), FSDP)
    mapped = jax.shard_map(coordinates, mesh=mesh, in_specs=(stacked, FSDP), out_specs=P(None))
    found = costs.collectives(mapped, rows, start())
    assert [(each.primitive, each.bytes) for each in found] == [("psum", 4 * k)]

    tx = boostax.dim_reduce(basis_of(k), axis_name="data")
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh_of(data=8), axis_name="data")
    state = step.init(start())
    found = boostax.audit(step, state, batches(1)[0]).collectives
    assert {each.does for each in found} == {"all-reduce"}
    # The coordinates, the energy's two squares and a few losses: gradients stay where they are.
    assert 4 * (k + 3) <= sum(each.bytes for each in found) <= 4 * (k + 6)
    text = step.lower(state, batches(1)[0]).compile().as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)


def reads(jaxpr, shape):
    """Equations of a traced program that read an array of this shape and make another of it."""
    has = lambda atoms: any(getattr(x.aval, "shape", None) == shape for x in atoms)  # noqa: E731
    readers = (x for x, _ in interpret.equations(jaxpr) if has(x.invars) and not has(x.outvars))
    return sum(len([*interpret.equations([eqn])]) == 1 for eqn in readers)


@pytest.mark.parametrize("residual", [None, optax.adam(1e-2)])
def test_basis_is_read_twice(residual):
    step = boostax.make_train_step(loss_fn, boostax.dim_reduce(basis_of(7), residual=residual))
    assert reads(step.jaxpr(step.init(start()), batches(1)[0]).jaxpr, (7, ROWS, WIDTH)) == 2


def test_traced_once_and_no_copy_of_the_basis():
    traces = 0

    def counting(params, batch):
        nonlocal traces
        traces += 1
        return loss_fn(params, batch)

    inner = boostax.dim_reduce(basis_of(20, LARGE), residual=optax.adam(1e-3))
    step = boostax.make_train_step(counting, boostax.dynamic_loss_scale(inner))
    state, batch = step.init(LARGE), batches(1)[0]
    state, _ = step(state, batch)
    once = traces
    other = boostax.subspace.replace_basis(state.opt_state, basis_of(20, LARGE))
    state = state._replace(opt_state=other)
    state, _ = follow(step, state, [batch] * 3)
    assert traces == once
    memory = step.lower(state, batch).compile().memory_analysis()
    # Two lifts, the moved params and the residual's gradient; the basis is twenty.
    assert memory.temp_size_in_bytes < 8 * SIZE and memory.alias_size_in_bytes >= 20 * SIZE


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_that_is_not_finite_changes_nothing(scaled):
    """Of gradients the laws of the contract say the same."""
    loss = lambda p, batch: loss_fn(p, batch[:2]) + jax.lax.stop_gradient(batch[2])  # noqa: E731
    tx = boostax.dim_reduce(basis_of(7), residual=optax.adam(1e-2))
    tx = boostax.dynamic_loss_scale(tx) if scaled else tx
    step = boostax.make_train_step(loss, tx)
    state, data = step.init(start()), batches(4)
    inner = lambda s: s.opt_state.inner_state if scaled else s.opt_state  # noqa: E731
    state, _ = follow(step, state, [(*batch, jnp.float32(0)) for batch in data[:3]])
    before = jax.tree.map(np.array, state)
    for wrong in (jnp.nan, jnp.inf):
        state, metrics = step(state, (*data[3], jnp.float32(wrong)))
        assert not bool(metrics["applied"])
    apart = {"skipped": 0, "applied": 0}
    chex.assert_trees_all_equal(
        (state.params, inner(state)._replace(**apart)),
        (before.params, inner(before)._replace(**apart)),
    )
    state, metrics = step(state, (*data[3], jnp.float32(0)))
    assert bool(metrics["applied"]) and np.isfinite(float(metrics["loss"]))


def test_a_window_of_several_calls_is_refused():
    with pytest.raises(ValueError, match=r"every must be 1 around a line search.*reads the loss"):
        train(boostax.accumulate(boostax.dim_reduce(basis_of(5)), 2), steps=1)
    state, _ = train(boostax.accumulate(boostax.dim_reduce(basis_of(5)), 1), steps=2)
    assert int(state.opt_state.inner_state.steps) == 2


def test_weights_of_replicas_and_slices_count_in_the_line_search():
    def weighted(params, batch):
        x, y, w = batch
        losses = (jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2
        return (losses * w).sum() / w.sum(), boostax.Aux(weight=w.sum())

    rng = np.random.default_rng(0)
    data = [(*b, rng.integers(1, 4, 48).astype(np.float32)) for b in batches(5)]
    make = lambda axis: boostax.dim_reduce(basis_of(7), axis_name=axis)  # noqa: E731
    expected, _ = train(make(None), weighted, data=data, has_aux=True)
    for options in ({"microbatches": 3}, {"mesh": mesh_of(data=4), "axis_name": "data"}):
        tx = make(options.get("axis_name"))
        state, _ = train(tx, weighted, data=data, has_aux=True, **options)
        assert_close(state.params, expected.params)


def test_trials_leave_the_statistics_alone_and_use_the_same_key():
    def loss(params, batch, *, key, model_state):
        value = loss_fn(params, (batch[0] * jax.random.bernoulli(key, 0.5, (ROWS,)), batch[1]))
        return value, boostax.Aux(model_state=0.9 * model_state + 0.1 * batch[0].mean())

    step = boostax.make_train_step(loss, boostax.dim_reduce(basis_of(7)), has_aux=True)
    state = step.init(start(), key=jax.random.key(0), model_state=jnp.float32(0.0))
    expected = 0.0
    for batch in batches(4):
        state, metrics = step(state, batch)
        expected = 0.9 * expected + 0.1 * float(batch[0].mean())
        assert metrics["subspace_tries"] >= 1
    np.testing.assert_allclose(state.model_state, expected, rtol=1e-5)
    batch, kwargs = batches(1)[0], {"key": jax.random.key(3), "model_state": jnp.float32(0.0)}
    (value, _), _ = step.oracle(state.params, state.opt_state, batch, **kwargs)
    assert float(step.oracle.loss_at(batch, **kwargs)(state.params)) == float(value)


@pytest.mark.long
def test_narrow_storage():
    """Directions as good, in half the bytes, with no wide copy of them; and the same minimum."""
    rows = basis_of(6, LARGE)
    tx = boostax.dim_reduce(rows, dtype="bfloat16")
    state = tx.init(LARGE)
    bytes_kept = sum(x.nbytes for x in jax.tree.leaves(state.basis))
    assert bytes_kept < 0.501 * sum(x.nbytes for x in jax.tree.leaves(rows))
    g = jax.tree.map(lambda x: x[0] + 0.5 * x[1], rows)
    np.testing.assert_allclose(project(state.basis, g), [1, 0.5, 0, 0, 0, 0], atol=6e-3)
    update = jax.jit(lambda g, s: tx.update(g, s, LARGE, value=1.0, value_fn=lambda p: 0.5)[0])
    assert update.lower(g, state).compile().memory_analysis().temp_size_in_bytes < 4 * SIZE
    assert_close(update(g, state), jax.tree.map(lambda x: -x, g), atol=2e-3)
    forms = (boostax.dim_reduce(basis_of(7), dtype=x) for x in ("bfloat16", None))
    low, full = (train(form, data=batches(1) * 40)[1][-1]["loss"] for form in forms)
    assert abs(low / full - 1) < 0.01


def test_frozen_leaves_stand_still():
    schedule = boostax.freeze_schedule("progressive", total_steps=6, frozen_fraction=0.5)
    inner = boostax.dim_reduce(basis_of(7), residual=optax.sgd(0.05))
    for driver in ("host", "switch"):
        tx = boostax.scheduled_freeze(inner, {"w": 0, "v": 1, "b": 1}, schedule)
        step = boostax.make_train_step(loss_fn, tx, freeze_driver=driver)
        state = step.init(start())
        for batch in batches(6):
            before = np.array(state.params["w"])
            state, metrics = step(state, batch)
            moved = not np.array_equal(before, state.params["w"])
            assert moved == (int(metrics["frozen_groups"]) == 0)


def test_residual_is_told_the_loss():
    plateau = optax.contrib.reduce_on_plateau(patience=1, rtol=1.0)
    tx = boostax.dim_reduce(basis_of(3), residual=optax.chain(optax.sgd(0.01), plateau))
    state, _ = train(tx, steps=4)
    assert float(state.opt_state.residual_state[1].scale) < 1.0


# Snapshots from disk.


def test_checkpoints_on_disk_become_snapshots(tmp_path):
    path = [start(seed) for seed in range(11)]
    with boostax.checkpoint.Checkpointer(tmp_path, keep=20) as checkpointer:
        for i, params in enumerate(path):
            checkpointer.save(i, {"params": params, "more": jnp.ones(3)})
    shapes, found = jax.eval_shape(start), boostax.subspace.files.snapshots
    chex.assert_trees_all_equal(found(tmp_path, shapes), path)
    for params, match in (
        ({**start(), "w": jnp.zeros((2, 2))}, r"'params/w', which .* should be .* of \(2, 2\)"),
        ({"other": jnp.zeros(3)}, "got 'params/other', which is not there"),
    ):
        with pytest.raises(ValueError, match=match):
            found(tmp_path, params)
    with pytest.raises(FileNotFoundError, match="a subdirectory for each step"):
        found(tmp_path / "none", shapes)


def test_files_of_arrays_by_path_become_snapshots(tmp_path):
    """Of numbers in their order, whatever else lies there."""
    found, params = boostax.subspace.files.snapshots, {"a": {"b": jnp.ones((2, 3))}}
    (tmp_path / "weights.safetensors").write_bytes(b"no snapshot")
    with pytest.raises(FileNotFoundError, match=r"got none in .*safetensors.numpy.load_file"):
        found(tmp_path, params)
    for i in range(12):
        arrays = {"a/b": np.full((2, 3), i, np.float32), "opt/m": np.ones(1)}
        boostax.subspace.files.write("test", tmp_path / f"step_{i}.npz", arrays)
    assert [int(x["a"]["b"][0, 0]) for x in found(tmp_path, params)] == list(range(12))
    (tmp_path / "100").mkdir()
    with pytest.raises(ValueError, match=r"directory must be a folder of .* got both in"):
        found(tmp_path, params)


def test_bfloat16_as_numpy_itself_writes_it_is_read(tmp_path):
    np.savez(tmp_path / "1.npz", w=np.asarray(jnp.arange(3.0, dtype="bfloat16")))
    (got,) = boostax.subspace.files.snapshots(tmp_path, {"w": jnp.zeros(3, "bfloat16")})
    assert got["w"].dtype == "bfloat16" and got["w"].tolist() == [0.0, 1.0, 2.0]
