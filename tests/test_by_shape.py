"""Laws of ``by_shape``: a dealt optimizer of matrices is Optax's, on any replicas and placement."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import lanes, spread
from reducing import mesh_of, sends, updating
from training import walk

import boostax
from boostax._core import trees
from boostax.train.resharding import as_saved, resharded

STEPS = 3
# A single matrix, counts that divide among no replicas, and one that divides among 8.
COUNTS = {(4, 3): 8, (3, 5): 7, (2, 4): 3, (8, 2): 1}


def muon(**options):
    """Momentum, decay, a schedule, and Adam for vectors."""
    rate = optax.linear_schedule(0.1, 0.01, 5)
    return optax.contrib.muon(rate, weight_decay=0.1, adam_b1=0.8, **options)


def drawn(params, seed, *lead):
    """Gradients for params, stacked over the replicas."""
    normal = np.random.default_rng(seed).normal
    return jax.tree.map(lambda x: jnp.asarray(normal(size=(*lead, *x.shape)), jnp.float32), params)


def tree(counts):
    """Matrices of these shapes between vectors."""
    one = lambda shape, count: {f"w{i}": jnp.zeros(shape) for i in range(count)}  # noqa: E731
    groups = {f"{m}x{n}": one((m, n), count) for (m, n), count in counts.items()}
    return drawn({**groups, "bias": jnp.zeros(5), "scale": jnp.zeros(())}, 99)


def matrices(count=3, shape=(4, 8)):
    """A few matrices and a vector, whose dimensions 2 and 4 divide."""
    return tree({shape: count})


@functools.cache
def reference_step(make):
    """A step of the optimizer alone on the mean of stacked gradients."""
    tx = make()

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(jax.tree.map(lambda g: g.mean(0), grads), state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def reference(make, params, replicas, steps=range(STEPS)):
    init, step = reference_step(make)
    state = init(params)
    for seed in steps:
        params, state = step(params, state, drawn(params, seed, replicas))
    return params


def placed(params, mesh, spec=P()):
    """Matrices by a spec, all else whole."""
    of = lambda x: spec if x.ndim == 2 else P()  # noqa: E731
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, of(x))), params)


def on_global_arrays(tx, params, steps=range(STEPS), state=None, **options):
    """Train in plain ``jit`` on params that are placed; return params and state."""
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    tx = boostax.on_mesh(tx, params, axis_name="data", **options)
    where = NamedSharding(mesh, P("data"))
    grads = (jax.device_put(drawn(params, seed, mesh.shape["data"]), where) for seed in steps)
    return walk(tx, params, grads, state)[-1]


def assert_equal(got, wanted, tolerance=1e-6):
    named = jax.tree_util.tree_leaves_with_path(got)
    for (path, x), y in zip(named, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance, err_msg=str(path))


# Eight are those of the placements below.
@pytest.mark.parametrize("replicas", lanes([1, 2, 3, 4, 5, 8], [3]))
def test_it_is_muon_for_any_number_of_replicas_and_matrices(replicas):
    params = tree(COUNTS)
    got, state = on_global_arrays(boostax.by_shape(muon()), placed(params, mesh_of(data=replicas)))
    assert_equal(got, reference(muon, params, replicas))
    dealt = [x[0].shape for part, _ in state.distributed_items() if (x := jax.tree.leaves(part))]
    counts = [8, 7, 3]
    assert sorted({x[:2] for x in dealt}) == sorted({(replicas, -(-n // replicas)) for n in counts})


@pytest.mark.parametrize("mode", ("checked", "unchecked", "pmap", "vmap"))
def test_it_is_muon_in_a_mapped_function(mode):
    params, replicas = matrices(9), jax.device_count()
    tx = boostax.by_shape(muon(), axis_name="data")
    state = boostax.states.stack_replicas(tx.init(params), replicas)

    def step(params, state, grads):
        return boostax.apply_gradients(tx, grads, state, params)

    if mode in ("checked", "unchecked"):
        specs = boostax.states.state_specs(tx, params, axis_name="data")

        def local(params, state, grads):
            one = jax.tree.map(lambda g: g[0], grads)
            params, state = step(params, boostax.states.enter_replica(state), one)
            return params, boostax.states.leave_replica(state)

        given = {"in_specs": (P(), specs, P("data")), "out_specs": (P(), specs)}
        check = {"check_vma": mode == "checked"}
        run = jax.jit(jax.shard_map(local, mesh=mesh_of(data=replicas), **given, **check))
        for seed in range(STEPS):
            params, state = run(params, state, drawn(params, seed, replicas))
    else:
        mapped = {"axis_name": "data", "in_axes": (None, 0)}

        def train(params, grads):
            one = lambda carry, grads: (step(*carry, grads), None)  # noqa: E731
            return jax.lax.scan(one, (params, tx.init(params)), grads)[0][0]

        several = [drawn(params, seed, replicas) for seed in range(STEPS)]
        grads = jax.tree.map(lambda *xs: jnp.stack(xs, 1), *several)
        run = jax.pmap(train, **mapped) if mode == "pmap" else jax.jit(jax.vmap(train, **mapped))
        params = jax.tree.map(lambda x: x[-1], run(params, grads))
    assert_equal(params, reference(muon, matrices(9), replicas))


PLACEMENTS = {
    "FSDP": ({"data": 8}, P("data"), {}),
    "ZeRO": ({"data": 8}, P(), {"shard_optimizer": True}),
    "tensor parallel": ({"data": 4, "model": 2}, P(None, "model"), {}),
    "FSDP and tensor parallel": ({"data": 4, "model": 2}, P("data", "model"), {}),
}


@pytest.mark.parametrize(("name", "kind"), spread(PLACEMENTS, (AxisType.Auto, AxisType.Explicit)))
def test_it_is_muon_on_sharded_params(name, kind):
    sizes, spec, options = PLACEMENTS[name]
    params = matrices(6, (8, 16))
    start = placed(params, mesh_of(kind, **sizes), spec)
    got, _ = on_global_arrays(boostax.by_shape(muon()), start, **options)
    assert_equal(got, reference(muon, params, sizes["data"]))


def test_matrices_of_one_shape_may_be_sharded_in_two_ways():
    """Columns and rows, as in the two products of a tensor-parallel block."""
    params, mesh = matrices(5, (8, 8)), mesh_of(data=4, model=2)
    start = placed(params, mesh)
    for i, spec in enumerate([P(None, "model"), P("model"), P("model"), P(), P("data", "model")]):
        start["8x8"][f"w{i}"] = jax.device_put(params["8x8"][f"w{i}"], NamedSharding(mesh, spec))
    got, _ = on_global_arrays(boostax.by_shape(muon()), start)
    assert_equal(got, reference(muon, params, 4))


def by_label(params):
    """Adam for the first matrix, Muon for the others."""
    first = lambda path, x: "adam" if "w0" in str(path) else "muon"  # noqa: E731
    return jax.tree_util.tree_map_with_path(first, params)


def partitioned(matrices_by=muon, vectors_by=optax.adam):
    return optax.partition({"muon": matrices_by(), "adam": vectors_by(0.1)}, by_label)


def hyperparameters():
    rate = optax.linear_schedule(0.1, 0.01, 5)
    return optax.inject_hyperparams(optax.contrib.muon)(learning_rate=rate, weight_decay=0.1)


WRAPPED = {
    "around hyperparameters": hyperparameters,
    "around Adafactor": functools.partial(optax.adafactor, 0.1, min_dim_size_to_factor=2),
    "around LAMB": lambda: optax.lamb(0.1),
    "around an optimizer that keeps params": lambda: optax.contrib.schedule_free_adamw(0.1),
}


@pytest.mark.parametrize("name", ["in a partition", *WRAPPED])
def test_it_is_the_optimizer_that_it_wraps(name):
    alone = WRAPPED.get(name, partitioned)
    reduced = lambda rate: optax.chain(boostax.all_reduce(), optax.adam(rate))  # noqa: E731
    apart = partitioned(lambda: boostax.by_shape(muon()), reduced)
    tx = boostax.by_shape(alone()) if name in WRAPPED else apart
    params = matrices(6)
    got, _ = on_global_arrays(tx, placed(params, mesh_of(data=4)))
    assert_equal(got, reference(alone, params, 4), 2e-6)


def test_a_scaled_window_skips_and_waits_around_it():
    params, mesh = matrices(5), mesh_of(data=4)
    tx = boostax.static_loss_scale(boostax.accumulate(boostax.by_shape(muon()), 2), 8.0)
    scaled = lambda seed: jax.tree.map(lambda g: 8 * g, drawn(params, seed, 4))  # noqa: E731
    start = placed(params, mesh)
    bad = jax.tree.map(lambda g: g.at[1].set(jnp.nan), scaled(7))
    got, _ = walk(boostax.on_mesh(tx, start), start, (scaled(0), bad, scaled(1)))[-1]
    init, one = reference_step(muon)
    means = jax.tree.map(lambda *g: sum(g) / 2, *[drawn(params, seed, 4) for seed in (0, 1)])
    assert_equal(got, one(params, init(params), means)[0])


@pytest.mark.parametrize("replicas", lanes([1, 3, 8], [3, 8]))
def test_a_state_of_four_replicas_trains_on_by_others(replicas):
    """Both by ``reshard_state`` and as a checkpoint is read into another step's state."""
    params = matrices(7)
    tx, start = boostax.by_shape(muon()), placed(params, mesh_of(data=4))
    first, state = on_global_arrays(tx, start, range(2))
    init, one = reference_step(muon)
    wanted, known = params, init(params)
    for seed, count in [(0, 4), (1, 4), (2, replicas)]:
        wanted, known = one(wanted, known, drawn(params, seed, count))
    moved = placed(jax.device_get(first), mesh_of(data=replicas))
    target = boostax.on_mesh(tx, moved, axis_name="data").init(moved)
    found = as_saved(target, {name: {"shape": x.shape} for name, x in trees.named(state)})
    assert [x.shape for x in jax.tree.leaves(found)] == [x.shape for x in jax.tree.leaves(state)]
    host = jax.device_get(state)
    for way in (boostax.reshard_state(host, replicas), resharded(host, target)):
        where = jax.tree.map(lambda x: x.sharding, target)
        got, _ = on_global_arrays(tx, moved, [2], jax.device_put(way, where))
        assert_equal(got, wanted)


def norm_of_all():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))


REFUSED = [
    (norm_of_all, "reads several gradients"),
    (lambda: optax.flatten(optax.sgd(0.1, momentum=0.9)), "reads several gradients"),
    (lambda: boostax.skip_bad_steps(optax.sgd(0.1)), "without gates"),
    (lambda: optax.chain(boostax.accumulate(optax.sgd(0.1), 2)), "without gates"),
]


@pytest.mark.parametrize(("inner", "said"), REFUSED)
@pytest.mark.parametrize("count", [2, 8])
def test_what_needs_all_matrices_is_refused(inner, said, count):
    # Matrices alone: beside vectors a common norm is seen in what it does to these.
    params, replicas = matrices(count)["4x8"], jax.device_count()
    with pytest.raises(ValueError, match=said):
        boostax.by_shape(inner(), axis_name="data").init(params)
    with pytest.raises(ValueError, match=said):
        init = lambda _: boostax.by_shape(inner(), axis_name="data").init(params)  # noqa: E731
        jax.vmap(init, axis_name="data")(jnp.arange(replicas))


def test_a_state_for_other_replicas_is_refused():
    params = matrices(7)
    tx = boostax.by_shape(muon(), axis_name="data")
    tx_state = tx.init(params)
    with pytest.raises(ValueError, match="reshard_state"):
        jax.vmap(lambda g: tx.update(g, tx_state, params), axis_name="data")(drawn(params, 0, 4))


def test_it_is_described_as_a_reduction():
    params = placed(matrices(3), mesh_of(data=4))
    tx = boostax.dynamic_loss_scale(boostax.accumulate(boostax.by_shape(muon()), 2))
    found = boostax.explain(tx, params)
    assert [x.role for x in found.parts if x.name == "by_shape"] == ["delta"] and not found.findings
    twice = boostax.explain(optax.chain(boostax.all_reduce(), boostax.by_shape(muon())), params)
    assert any("needs local gradients" in x.fix for x in twice.findings)


@pytest.mark.parametrize("count, times", [(1, 1), (2, 2), (3, 2), (7, 8 / 7), (9, 16 / 9), (24, 1)])
def test_it_sends_what_a_mean_sends_times_what_fills_up_the_replicas(count, times):
    mesh, shapes = mesh_of(data=8), [(16, 8)] * count
    sent = lambda tx: sum(c.wire_bytes for c in sends(updating(tx), shapes, mesh))  # noqa: E731
    by_shape, mean = boostax.by_shape(optax.sgd(0.1), axis_name="data"), boostax.all_reduce("data")
    assert sent(by_shape) == pytest.approx(times * sent(mean))


def test_replicas_may_be_those_of_two_axes():
    params, names = matrices(5), ("nodes", "cores")
    start = placed(params, mesh_of(nodes=2, cores=2))
    tx = boostax.on_mesh(boostax.by_shape(muon()), start, axis_name=names)
    several = [drawn(params, seed, 4) for seed in range(STEPS)]
    wanted = reference(muon, params, 4)
    assert_equal(walk(tx, start, several)[-1][0], wanted)
    tx = boostax.by_shape(muon(), axis_name=names)
    train = lambda several: walk(tx, matrices(5), several)[-1][0]  # noqa: E731
    split = jax.tree.map(lambda g: g.reshape(2, 2, *g.shape[1:]), several)
    mapped = jax.vmap(jax.vmap(train, axis_name="cores"), axis_name="nodes")(split)
    assert_equal(jax.tree.map(lambda x: x[1, 1], mapped), wanted)


def test_an_optimizer_that_reads_the_norm_of_all_params_is_refused():
    divided = lambda u, s, p=None: (jax.tree.map(lambda x: x / optax.tree.norm(p), u), s)  # noqa: E731
    by_norm = optax.GradientTransformation(lambda p: optax.EmptyState(), divided)
    with pytest.raises(ValueError, match="reads several"):
        boostax.by_shape(by_norm, axis_name="data").init(matrices(4)["4x8"])


def test_an_optimizer_that_chooses_matrices_by_path_is_refused():
    """Defect guarded against: where paths were others no matrix was Muon's, and Adam got all."""
    chosen = lambda path, _: optax.contrib.MuonDimensionNumbers() if "w" in str(path) else None  # noqa: E731
    by_path = functools.partial(jax.tree_util.tree_map_with_path, chosen)
    said = "treats '2x4/w0' according to .*Choose params around by_shape: optax.partition"
    for inner in (muon(muon_weight_dimension_numbers=by_path), partitioned()):
        with pytest.raises(ValueError, match=said):
            boostax.by_shape(inner, axis_name="data").init(matrices(2, (2, 4)))


def test_counts_do_not_move_without_the_moments_that_are_dealt():
    params = matrices()
    plain = optax.chain(boostax.all_reduce("data"), optax.contrib.muon(0.1))
    state = jax.tree.map(lambda x: x + 1, plain.init(params))
    moved, _ = boostax.migrate_state(state, boostax.by_shape(optax.contrib.muon(0.1)), params)
    counts = [x for name, x in trees.named(moved) if name.endswith("count")]
    assert counts and not any(map(int, counts))


def test_moments_of_params_with_other_names_are_refused():
    """Dealt by the order of names, they would move to other matrices of the shape."""
    tx = boostax.by_shape(optax.contrib.muon(0.1), axis_name="data")
    params = {"b": jnp.eye(4), "c": jnp.ones((4, 4))}
    state = tx.init(params)
    boostax.migrate_state(state, tx, params)
    with pytest.raises(ValueError, match=r"named as in the by_shape st.*Restore the names"):
        boostax.migrate_state(state, tx, {"a": params["c"], "b": params["b"]})


def test_an_nnx_optimizer_is_dealt_its_matrices():
    weights = jax.device_put(matrices()["4x8"], NamedSharding(mesh_of(data=4), P()))
    model = nnx.Dict({name: nnx.Param(x) for name, x in weights.items()})
    tx = boostax.by_shape(optax.sgd(0.1, momentum=0.9))
    optimizer = boostax.nnx.Optimizer(model, tx, wrt=nnx.Param, axis_name="data")
    loss = lambda model, x: sum((p[...] ** 2).sum() for p in model.values()) * x.mean() / 2  # noqa: E731
    _, grads = optimizer.value_and_grad(loss)(model, jnp.ones((4, 1)))
    optimizer.update(model, grads)
    found = {name: model[name][...] for name in weights}
    assert_equal(found, jax.tree.map(lambda x: 0.9 * x, weights))
