"""Principal components of snapshots, and the ring buffer that records them."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lanes import lanes
from memory import compiled_step
from reducing import mesh_of
from training import walk

import boostax
from boostax.subspace.basis import Basis, lift, pca_basis, project
from boostax.subspace.trajectory import record_trajectory, trajectory, trajectory_basis

SHAPES = {"a": (6, 5), "b": (7,), "c": {"d": (2, 3, 2), "e": (), "f": (0, 2)}}


def draw(count, seed=0, mean=0.0, decay=0.7, dtype=np.float32):
    """Snapshots ``mean + deviations`` whose widths decay from direction to direction."""
    rng = np.random.default_rng(seed)
    mix = np.random.default_rng(seed + 1).normal(size=(count, count))

    def leaf(shape):
        spread = decay ** np.arange(count) * rng.normal(size=(*shape, count)) / np.sqrt(50)
        centre = mean * (1 + rng.uniform(size=shape))
        return jnp.asarray(np.moveaxis(spread @ mix, -1, 0) + centre, dtype)

    return jax.tree.map(leaf, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def flat(tree, rows):
    return np.concatenate([np.float64(x).reshape(rows, -1) for x in jax.tree.leaves(tree)], 1)


def reference(snapshots, rows):
    """Singular values and directions of the centred matrix, in f64."""
    x = flat(snapshots, rows)
    _, s, vt = np.linalg.svd(x - x.mean(0), full_matrices=False)
    return s, vt


def gap(p, q):
    """The sine of the largest angle between two subspaces of equal dimension."""
    return np.linalg.norm(p - (p @ q.T) @ q, 2)


def skew(p):
    return np.abs(p @ p.T - np.eye(len(p))).max()


jitted = jax.jit(pca_basis, static_argnums=1, static_argnames="dtype")


def mlp(x):
    """MindSpore's flat weights of a 5-8-1 network as a tree."""
    first = {"1": x[:, :40].reshape(-1, 5, 8), "2": x[:, 40:48]}
    return first | {"3": x[:, 48:56].reshape(-1, 8, 1), "4": x[:, 56]}


def test_components_are_those_of_mindspore(arrays):
    run = arrays("pca.npz")
    with jax.enable_x64(True):
        got = pca_basis(mlp(jnp.asarray(run["samples"], jnp.float64)), 6)
    rows = flat(got.components, 6)
    for name in ("full_svd", "randomized_svd_seed0"):
        expected = run[name]
        assert gap(rows, expected) < 1e-9
        signs = np.sign((rows * expected).sum(1))
        np.testing.assert_allclose(rows * signs[:, None], expected, atol=1e-9)


def test_directions_five_thousand_times_narrower_than_the_first_are_found_in_float32(arrays):
    # The sixth has 4e-8 of the variance, less than one rounding of a Gram matrix in f32.
    run = arrays("pca.npz")
    rows = flat(pca_basis(mlp(jnp.asarray(run["samples"])), 6).components, 6)
    s, _ = reference(run["samples"], 40)
    # A rounding of the widest direction turns the fifth by this angle.
    assert gap(rows[:5], run["full_svd"][:5]) < np.finfo(np.float32).eps * s[0] / s[4]
    assert gap(rows, run["full_svd"]) < 2e-4 and skew(rows) < 1e-6


@pytest.mark.parametrize("jitted", [False, True])
def test_basis_is_orthonormal_for_a_mean_a_thousand_times_the_spread(jitted):
    # Components from an uncentred Gram matrix in f32 miss this by a factor of a hundred and more.
    snapshots = draw(20, mean=1000.0)
    fn = lambda x: pca_basis(x, 8)  # noqa: E731
    got = (jax.jit(fn) if jitted else fn)(snapshots)
    rows = flat(got.components, 8)
    s, vt = reference(snapshots, 20)
    assert skew(rows) < 1e-5 and gap(rows, vt[:8]) < 1e-5
    assert (rows[np.arange(8), np.abs(rows).argmax(1)] > 0).all()
    np.testing.assert_allclose(got.explained, (s**2 / (s**2).sum())[:8], rtol=1e-4)
    mean = flat(snapshots, 20).mean(0)
    np.testing.assert_allclose(flat(jax.tree.map(lambda x: x[None], got.mean), 1)[0], mean, 2e-7)


def test_trees_are_read_from_lists_and_iterators():
    stacked = draw(7)
    each = [jax.tree.map(lambda x, i=i: np.asarray(x[i]), stacked) for i in range(7)]
    expected = pca_basis(stacked, 3)
    for given_as in (each, iter(each), (tree for tree in each)):
        chex.assert_trees_all_equal(pca_basis(given_as, 3), expected)
    # A tree whose root is a list.
    got = pca_basis(jax.tree.leaves(stacked), 3, stacked=True)
    chex.assert_trees_all_equal(got.components, jax.tree.leaves(expected.components))


# A basis on disk


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_saved_basis_comes_back_to_the_bit(tmp_path, dtype):
    stacked, path = draw(7), tmp_path / "basis.npz"
    basis = jitted(stacked, 3, dtype=dtype)
    basis.save(path)
    got = Basis.load(str(path), jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], stacked)))
    chex.assert_trees_all_equal(got, basis, strict=True)
    # What is there is replaced as a whole.
    jitted(stacked, 2).save(path)
    assert Basis.load(path, basis.mean).explained.shape == (2,)
    assert [x.name for x in tmp_path.iterdir()] == [path.name]


def test_a_basis_of_other_params_or_a_broken_file_is_refused(tmp_path):
    path, params = tmp_path / "basis.npz", {"w": jnp.zeros((2, 3)), "b": jnp.zeros(4)}
    rng = np.random.default_rng(0)
    basis = pca_basis(jax.tree.map(lambda x: np.float32(rng.normal(size=(5, *x.shape))), params), 2)
    basis.save(path)

    def refused(match, params=params, error=ValueError):
        with pytest.raises(error, match=match):
            Basis.load(path, params)

    said = (
        f"Basis.load: params must be those of {path}, got 'components/w', which is float32 "
        "of (2, 2, 3) in the file, but should be float32 of (2, 3, 2). Names are paths in the "
        "params, such as 'layer/kernel'."
    )
    refused(f"^{re.escape(said)}$", {**params, "w": jnp.zeros((3, 2))})
    refused("got 'components/v', which is not there", {"v": params["w"]})
    refused(r"is float32 .* be complex64 of \(2, 4\)", {**params, "b": jnp.zeros(4, complex)})
    path.write_bytes(path.read_bytes()[:-40])
    refused(r"path must be a whole \.npz file, got")
    path.unlink()
    refused("basis.npz", error=FileNotFoundError)
    with pytest.raises(ValueError, match=r"path must be a \.npz file, got"):
        basis.save(tmp_path / "basis.safetensors")
    with pytest.raises(TypeError, match=r"path must be of NumPy's dtypes or bfloat16, got float8"):
        basis._replace(explained=jnp.ones(2, "float8_e4m3fn")).save(path)


def test_complex_leaves_count_as_pairs_of_reals():
    real = np.float32(np.random.default_rng(0).normal(size=(8, 2, 6)))
    got = pca_basis({"z": jnp.asarray(real[:, 0] + 1j * real[:, 1])}, 3).components["z"]
    assert gap(np.concatenate([got.real, got.imag], 1), reference(real, 8)[1][:3]) < 1e-5


def test_storage_in_bfloat16():
    # Of components, and of snapshots: then it is those that are decomposed.
    got = jitted(snapshots := draw(10), 4, dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(got.components)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(got.mean)} == {jnp.dtype("float32")}
    assert skew(flat(got.components, 4)) < 4e-3
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), snapshots)
    assert gap(flat(jitted(low, 4).components, 4), reference(low, 10)[1][:4]) < 1e-5
    first = jax.tree.map(lambda x: x[0], lift(got.components, jnp.eye(4, 1)))
    unit = np.eye(4, dtype=np.float32)[0]
    np.testing.assert_allclose(project(got.components, first), unit, atol=4e-3, strict=True)


def test_missing_directions_are_named_and_zero_inside_jit():
    line = {"w": 3.0 + jnp.arange(6.0)[:, None] * jnp.array([0.3, 0.4, 0.0])}
    with pytest.raises(ValueError) as error:
        pca_basis(line, 2)
    assert str(error.value) == (
        "pca_basis: n_components must be at most 1, the number of directions in which these "
        "snapshots differ beyond their rounding, got 2. Choose fewer components, or "
        "snapshots that differ more."
    )
    got = jax.jit(lambda x: pca_basis(x, 2))(line)
    np.testing.assert_allclose(got.components["w"], [[0.6, 0.8, 0], [0, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(got.explained, [1.0, 0.0], atol=1e-6)
    still = jax.tree.map(jnp.ones_like, line)
    with pytest.raises(ValueError, match="must be at most 0, the number"):
        pca_basis(still, 1)
    assert not jax.jit(lambda x: pca_basis(x, 1))(still).components["w"].any()


BASIS, PAIR = jnp.eye(3), {"a": jnp.ones(3), "b": jnp.ones(3)}
make, replace = boostax.dim_reduce, boostax.subspace.replace_basis
step = functools.partial(make(BASIS).update, jnp.ones(3), None, jnp.ones(3))
REFUSED = {
    "dim_reduce: basis must be a tree like the params, PyTreeDef(": (
        lambda _: make({"w": BASIS}).init(PAIR)
    ),
    "dim_reduce: basis must be shaped (3, 4) at 'the root', got (3, 3). Pass boostax.subspace."
    "pca_basis(snapshots, k) of the same params.": lambda _: make(BASIS).init(jnp.zeros(4)),
    "dim_reduce: basis must be shaped (3, 3) at 'b', got (2, 3). ": (
        lambda _: make({"a": BASIS, "b": BASIS[:2]}).init(PAIR)
    ),
    "dim_reduce: update must be given params, value, value_fn, got no value. make_train_step "
    "passes value and value_fn, which computes the loss for any params.": lambda _: step(),
    "dim_reduce: update must be given params, value, value_fn, got no value_fn.": (
        lambda _: step(value=1.0)
    ),
    "replace_basis: opt_state must be a tree with a DimReduceState, got a tree without one.": (
        lambda _: replace(optax.adam(1.0).init(jnp.ones(3)), BASIS)
    ),
    "replace_basis: basis must be of the shapes (3, 3), got (2, 3).": (
        lambda _: replace(make(BASIS).init(jnp.ones(3)), BASIS[:2])
    ),
    "pca_basis: n_components must be below the number of snapshots, 5, got 5. m snapshots differ "
    "from their mean in m - 1 directions at most.": lambda x: pca_basis(x, 5),
    "pca_basis: n_components must be a positive integer, got 0. ": lambda x: pca_basis(x, 0),
    "pca_basis: snapshots must be a tree of arrays with the same leading dimension, got [(3,), (5,)"
    "]. Stack the snapshots of each leaf, or pass": lambda x: pca_basis({"a": x, "b": x[:3]}, 2),
    "pca_basis: snapshots must be finite, got a NaN or infinity. Find the step at which": (
        lambda x: pca_basis(x.at[1, 1].set(jnp.inf), 2)
    ),
    "trajectory: opt_state must be a tree with a TrajectoryState, got a tree without one. Put "
    "boostax.subspace.": lambda x: trajectory(optax.sgd(0.1).init(x)),
    "record_trajectory: params must be given to update, got None. The params are recorded.": (
        lambda x: record_trajectory(3).update(x, record_trajectory(3).init(x))
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_errors_explain(said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        REFUSED[said](jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32))


@pytest.mark.parametrize("kind", lanes([AxisType.Auto, AxisType.Explicit], [AxisType.Auto]))
def test_sharded_leaves_stay_where_they_are(kind):
    mesh = mesh_of(kind, x=8)
    rng = np.random.default_rng(0)
    whole = {x: np.float32(rng.normal(size=(12, *n))) for x, n in (("w", (16, 4)), ("b", (8,)))}
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(None, "x"))
        x = jax.device_put(whole, sharding)

        def fn(x):
            got = pca_basis(x, 4)
            tree = jax.tree.map(lambda x: x[0], lift(got.components, jnp.arange(4.0)[:, None]))
            return got, project(got.components, tree)

        compiled = jax.jit(fn).lower(x).compile()
        text = compiled.as_text()
        got, coordinates = compiled(x)
        assert not re.search(r"all-gather|all-to-all|collective-permute", text)
        sent = re.findall(r"f32\[([\d,]*)\]", " ".join(re.findall(r"= (.*) all-reduce\(", text)))
        assert sent and all(np.prod([int(n) for n in s.split(",") if n]) <= 12 * 14 for s in sent)
        for leaf in jax.tree.leaves((got.components, pca_basis(x, 4).components)):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        for leaf in jax.tree.leaves(got.mean):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), leaf.ndim)
        np.testing.assert_allclose(coordinates, np.arange(4.0), atol=1e-5)
    assert gap(flat(got.components, 4), reference(whole, 12)[1][:4]) < 1e-4


@pytest.mark.parametrize("steps", [0, 4, 8, 14])
def test_ring_holds_the_last_snapshots_oldest_first(steps):
    tx = optax.chain(optax.sgd(1.0), record_trajectory(3, every=2, start=3))
    w = {"w": jnp.zeros(2)}
    _, state = [(w, tx.init(w)), *walk(tx, w, [{"w": -jnp.ones(2)}] * steps)][-1]
    # Call t is given params of t; the calls 3, 5, 7, ... are recorded.
    due = list(range(3, steps, 2))
    snapshots, count = trajectory(state)
    assert count == min(len(due), 3)
    np.testing.assert_array_equal(snapshots["w"][:, 0], due[-3:])
    assert int(boostax.metrics(state)["trajectory_snapshots"]) == len(due)


@pytest.mark.parametrize("count", [6, 21])
def test_recorded_basis_is_that_of_the_snapshots(count):
    path = draw(21, mean=50.0)
    tx = record_trajectory(8)
    state = tx.init(jax.tree.map(lambda x: x[0], path))
    update = jax.jit(lambda state, p: tx.update(p, state, p)[1])
    for i in range(count):
        state = update(state, jax.tree.map(lambda x, i=i: x[i], path))
    window, _ = trajectory(state)
    last = jax.tree.map(lambda x: x[max(count - 8, 0) : count], path)
    jax.tree.map(np.testing.assert_array_equal, window, last)
    got, batch = trajectory_basis(state, 4), jitted(window, 4)
    assert gap(flat(got.components, 4), flat(batch.components, 4)) < 1e-5
    if count >= 8:
        inside = jax.jit(lambda s: trajectory_basis(s, 4))(state)
        assert gap(flat(got.components, 4), flat(inside.components, 4)) < 1e-5


def test_writing_a_snapshot_copies_no_buffer():
    tx = optax.chain(record_trajectory(16, every=5), optax.sgd(0.1, momentum=0.9))
    memory = compiled_step(tx, {"a": jnp.zeros((256, 256)), "b": jnp.zeros(4096)}).memory_analysis()
    # One copy of the params, which the step overwrites while they are being recorded.
    assert memory.temp_size_in_bytes < 1.01 * 4 * (256 * 256 + 4096)
    assert memory.alias_size_in_bytes >= 16 * 4 * (256 * 256 + 4096)


def test_buffer_is_sharded_like_the_params(mesh):
    params = jax.device_put(jnp.zeros((16, 4)), NamedSharding(mesh, P("data")))
    tx = record_trajectory(3)
    expected = NamedSharding(mesh, P(None, "data"))
    state = tx.init(params)
    assert state.snapshots.sharding.is_equivalent_to(expected, 3)
    compiled = jax.jit(tx.update, donate_argnums=1).lower(params, state, params).compile()
    assert not re.search(r"all-gather|all-to-all|collective-permute", compiled.as_text())
    _, state = compiled(params, state, params)
    assert state.snapshots.sharding.is_equivalent_to(expected, 3)
