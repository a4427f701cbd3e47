"""Principal components of snapshots, and the ring buffer that records them."""

import gc
import json
import re
import weakref
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawing import draws
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
from boostax.subspace.basis import Basis, Gram, pca_basis, pca_from_gram, updated_gram
from boostax.subspace.components import lift, project
from boostax.subspace.trajectory import record_trajectory, trajectory, trajectory_basis

OPT = optax.sgd(0.1)
INFINITE = (
    "pca_basis: snapshots must be finite, got 'a NaN or infinity'. Look for the step at which"
)
SHAPES = {"a": (6, 5), "b": (7,), "c": {"d": (2, 3, 2), "e": (), "f": (0, 2)}}


def draw(count, seed=0, mean=0.0, decay=0.7, dtype=np.float32):
    """Snapshots ``mean + deviations`` whose widths decay from direction to direction."""
    rng = np.random.default_rng(seed)

    def leaf(shape):
        spread = decay ** np.arange(count) * rng.normal(size=(*shape, count)) / np.sqrt(50)
        return spread, mean * (1 + rng.uniform(size=shape))

    leaves = jax.tree.map(leaf, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    mix = np.random.default_rng(seed + 1).normal(size=(count, count))
    return jax.tree.map(
        lambda pair: jnp.asarray(np.moveaxis(pair[0] @ mix, -1, 0) + pair[1], dtype),
        leaves,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def flat(tree, rows):
    return np.concatenate(
        [np.asarray(x, np.float64).reshape(rows, -1) for x in jax.tree.leaves(tree)], 1
    )


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


def mlp(x):
    """MindSpore's flat weights of a 5-8-1 network as a tree."""
    return {
        "1": x[:, :40].reshape(-1, 5, 8),
        "2": x[:, 40:48],
        "3": x[:, 48:56].reshape(-1, 8, 1),
        "4": x[:, 56],
    }


def filled(snapshots, rows):
    gram = Gram(jnp.zeros((rows, rows), jax.tree.leaves(snapshots)[0].dtype))
    for slot in range(rows):
        new = jax.tree.map(lambda x, slot=slot: x[slot], snapshots)
        gram = updated_gram(gram, snapshots, new, slot)
    return gram


@pytest.mark.parametrize(
    "method", ["gram", "read", pytest.param("randomized", marks=pytest.mark.long)]
)
def test_components_are_those_of_mindspore(golden, method):
    arrays = np.load(golden / "pca.npz")
    with jax.enable_x64(True):
        samples = jnp.asarray(arrays["samples"], jnp.float64)
        if method == "read":
            got = Read({"a": np.asarray(samples)}).basis(6)
        else:
            got = pca_basis(mlp(samples), 6, method=method)
        rows = flat(got.components, 6)
    for name in ("full_svd", "randomized_svd_seed0"):
        expected = arrays[name]
        assert gap(rows, expected) < 1e-9
        signs = np.sign((rows * expected).sum(1))
        np.testing.assert_allclose(rows * signs[:, None], expected, atol=1e-9)


@pytest.mark.parametrize("method", [pytest.param("gram", marks=pytest.mark.long), "randomized"])
def test_directions_five_thousand_times_narrower_than_the_first_are_found_in_float32(
    golden, method
):
    # The sixth has 4e-8 of the variance, less than one rounding of a Gram matrix in f32.
    arrays = np.load(golden / "pca.npz")
    got = pca_basis(mlp(jnp.asarray(arrays["samples"])), 6, method=method)
    rows, expected = flat(got.components, 6), arrays["full_svd"]
    assert gap(rows[:5], expected[:5]) < 1e-5
    assert gap(rows, expected) < 2e-4
    assert skew(rows) < 1e-6


@pytest.mark.parametrize("jitted", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("method", ["gram", "randomized"])
def test_basis_is_orthonormal_for_a_mean_a_thousand_times_the_spread(method, jitted):
    # Components from an uncentred Gram matrix in f32 miss this by a factor of a hundred and more.
    snapshots = draw(20, mean=1000.0)

    def fn(x):
        return pca_basis(x, 8, method=method)

    got = (jax.jit(fn) if jitted else fn)(snapshots)
    rows = flat(got.components, 8)
    s, vt = reference(snapshots, 20)
    assert skew(rows) < 1e-5
    assert gap(rows, vt[:8]) < 1e-5
    np.testing.assert_allclose(got.explained, (s**2 / (s**2).sum())[:8], rtol=1e-4)
    mean = flat(snapshots, 20).mean(0)
    np.testing.assert_allclose(flat(jax.tree.map(lambda x: x[None], got.mean), 1)[0], mean, 2e-7)


def test_largest_entry_of_each_component_is_positive():
    rows = flat(pca_basis(draw(9), 5).components, 5)
    assert (rows[np.arange(5), np.abs(rows).argmax(1)] > 0).all()


@pytest.mark.parametrize("mean", [pytest.param(0.0, marks=pytest.mark.long), 1000.0])
def test_streaming_equals_batch(mean):
    snapshots = draw(12, mean=mean)
    gram = filled(snapshots, 12)
    new = jax.tree.map(lambda x: x[3] + (x[0] - x[1]), snapshots)
    replaced = jax.tree.map(lambda x, y: x.at[3].set(y), snapshots, new)
    for tree, distances in (
        (snapshots, gram),
        (replaced, updated_gram(gram, replaced, new, 3)),
    ):
        batch, streamed = pca_basis(tree, 6), pca_from_gram(distances, tree, 6)
        assert gap(flat(batch.components, 6), flat(streamed.components, 6)) < 1e-5
        np.testing.assert_allclose(batch.explained, streamed.explained, rtol=1e-5)


def test_trees_are_read_from_lists_and_iterators():
    stacked = draw(7)
    each = [jax.tree.map(lambda x, i=i: np.asarray(x[i]), stacked) for i in range(7)]
    expected = pca_basis(stacked, 3)
    for given_as in (each, iter(each), (tree for tree in each)):
        got = pca_basis(given_as, 3)
        chex.assert_trees_all_equal(got, expected)
    # A tree whose root is a list.
    leaves = jax.tree.leaves(stacked)
    got = pca_basis(leaves, 3, stacked=True)
    chex.assert_trees_all_equal(got.components, jax.tree.leaves(expected.components))


class Read(Sequence):
    """Snapshots that are made when they are asked for, and counted while anything holds them."""

    def __init__(self, stacked):
        self.stacked, self.alive, self.most, self.reads = stacked, [], 0, 0

    def __len__(self):
        return len(jax.tree.leaves(self.stacked)[0])

    def __getitem__(self, i):
        self.alive = [one for one in self.alive if one() is not None]
        self.most = max(self.most, len(self.alive) + self.on_device() - self.others)
        self.reads += 1
        tree = jax.tree.map(lambda x: np.array(x[i]), self.stacked)
        self.alive.append(weakref.ref(tree["a"]))
        return tree

    def on_device(self):
        shape = np.shape(self.stacked["a"])[1:]
        return sum(x.shape in (shape, (1, *shape)) for x in jax.live_arrays())

    def basis(self, *args, **options):
        """The basis, and how many arrays like ``a`` there were at a time, beside the new one."""
        gc.collect()
        self.others = self.on_device()
        return pca_basis(self, *args, **options)


@pytest.mark.parametrize("method", ["gram", "randomized"])
@pytest.mark.parametrize("count", [pytest.param(5, marks=pytest.mark.long), 17])
def test_however_many_snapshots_are_read_two_are_in_memory(method, count):
    """While one is read there are the first, the mean, and the last difference to it."""
    path = Read(jax.tree.map(np.asarray, draw(count, mean=1000.0)))
    got, batch = path.basis(3, method=method), pca_basis(path.stacked, 3, method=method)
    assert path.most <= 3
    assert (
        path.reads == (count * (count + 1) // 2 + 6 * count if method == "gram" else 8 * count) + 1
    )
    assert gap(flat(got.components, 3), flat(batch.components, 3)) < 1e-5
    assert skew(flat(got.components, 3)) < 1e-6
    np.testing.assert_allclose(got.explained, batch.explained, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got.mean, batch.mean)


def test_snapshots_that_are_read_are_refused_as_stacked_ones():
    path = Read({"a": np.random.default_rng(0).normal(size=(5, 4))})
    with pytest.raises(ValueError, match="n_components must be below the number of snapshots, 5"):
        path.basis(5)
    path.stacked["a"][3, 1] = np.nan
    with pytest.raises(ValueError, match="snapshots must be finite"):
        path.basis(2)
    line = Read({"a": 3.0 + np.arange(6.0)[:, None] * np.array([0.3, 0.4, 0.0])})
    with pytest.raises(ValueError, match="n_components must be at most 1, the number of direc"):
        line.basis(2)
    path.__class__ = type("Odd", (Read,), {"__getitem__": lambda self, i: {"a": np.ones(i + 1)}})
    with pytest.raises(ValueError, match="trees of one structure and equal shapes, got others"):
        path.basis(2)


# A basis on disk


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_saved_basis_comes_back_to_the_bit(tmp_path, suffix, dtype):
    stacked, path = draw(7), tmp_path / f"basis.{suffix}"
    basis = pca_basis(stacked, 3, dtype=dtype)
    basis.save(path)
    got = Basis.load(str(path), jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], stacked)))
    assert jax.tree.structure(got) == jax.tree.structure(basis)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(basis), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    # What is there is replaced as a whole.
    pca_basis(stacked, 2).save(path)
    assert Basis.load(path, basis.mean).explained.shape == (2,)
    assert [x.name for x in tmp_path.iterdir()] == [path.name]


def test_a_safetensors_file_is_of_the_public_format(tmp_path):
    path = tmp_path / "basis.safetensors"
    basis = Basis(jnp.array([[0.0, 1.0]], "bfloat16"), jnp.array([2.0, 3.0]), jnp.ones(1))
    basis.save(path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    assert header == {
        "components": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [0, 4]},
        "mean": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        "explained": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]},
    }
    assert body == b"\0\0\x80\x3f" + np.array([2, 3, 1], "<f4").tobytes()
    # Written by others: with metadata, other arrays, and no filling.
    header |= {"__metadata__": {"format": "np"}}
    header["more"] = {"dtype": "I64", "shape": [0], "data_offsets": [16, 16]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    assert Basis.load(path, jnp.zeros(2)).mean.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_basis_of_other_params_or_a_broken_file_is_refused(tmp_path, suffix):
    path = tmp_path / f"basis.{suffix}"
    params = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(4)}
    rng = np.random.default_rng(0)
    tree = jax.tree.map(lambda x: rng.normal(size=(5, *x.shape)).astype(np.float32), params)
    pca_basis(tree, 2).save(path)
    with pytest.raises(ValueError) as error:
        Basis.load(path, {**params, "w": jnp.zeros((3, 2))})
    assert str(error.value) == (
        f"Basis.load: params must be those of {path}, got 'components/w', which should be of "
        "(2, 3, 2) like float32, and is float32 of (2, 2, 3) there. Names are paths in the params, "
        "such as 'layer/kernel'."
    )
    with pytest.raises(ValueError, match="got 'components/v', which is not there"):
        Basis.load(path, {"v": params["w"]})
    with pytest.raises(ValueError, match=r"\(2, 4\) like complex64, and is float32 of"):
        Basis.load(path, {**params, "b": jnp.zeros(4, complex)})
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=rf"path must be a whole \.{suffix} file, got"):
        Basis.load(path, params)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="path must be that of a file, got"):
        Basis.load(path, params)
    with pytest.raises(ValueError, match=r"path must be a file of \.npz or \.safetensors, got"):
        pca_basis(tree, 2).save(tmp_path / "basis.pkl")


def test_complex_leaves_count_as_pairs_of_reals():
    rng = np.random.default_rng(0)
    real = rng.normal(size=(8, 2, 6)).astype(np.float32)
    got = pca_basis({"z": jnp.asarray(real[:, 0] + 1j * real[:, 1])}, 3).components["z"]
    rows = np.concatenate([got.real, got.imag], 1)
    assert gap(rows, reference(real, 8)[1][:3]) < 1e-5


def test_storage_in_bfloat16():
    # Of components, and of snapshots: then it is those that are decomposed.
    snapshots = draw(10)
    got = pca_basis(snapshots, 4, dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(got.components)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(got.mean)} == {jnp.dtype("float32")}
    assert skew(flat(got.components, 4)) < 4e-3
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), snapshots)
    rows = flat(pca_basis(low, 4).components, 4)
    assert gap(rows, reference(low, 10)[1][:4]) < 1e-5
    point = jax.tree.map(lambda x: x[0], snapshots)
    assert project(got.components, point).dtype == jnp.float32


def test_missing_directions_are_named_and_zero_inside_jit():
    line = {"w": 3.0 + jnp.arange(6.0)[:, None] * jnp.array([0.3, 0.4, 0.0])}
    with pytest.raises(ValueError) as error:
        pca_basis(line, 2)
    assert str(error.value) == (
        "pca_basis: n_components must be at most 1, the number of directions in which these "
        "snapshots differ beyond their rounding, got 2. Take fewer, or snapshots that lie further "
        "apart."
    )
    for method in ("gram", "randomized"):
        got = jax.jit(lambda x, m=method: pca_basis(x, 2, method=m))(line)
        np.testing.assert_allclose(got.components["w"], [[0.6, 0.8, 0], [0, 0, 0]], atol=1e-6)
        np.testing.assert_allclose(got.explained, [1.0, 0.0], atol=1e-6)
    still = jax.tree.map(jnp.ones_like, line)
    with pytest.raises(ValueError, match="must be at most 0, the number"):
        pca_basis(still, 1)
    assert not jax.jit(lambda x: pca_basis(x, 1))(still).components["w"].any()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda x: pca_basis(x, 5),
            "pca_basis: n_components must be below the number of snapshots, 5, got 5. m snapshots "
            "differ from their mean in m - 1 directions at most.",
        ),
        (lambda x: pca_basis(x, 0), "pca_basis: n_components must be a positive integer, got 0. "),
        (
            lambda x: pca_basis(x, 2, method="svd"),
            "pca_basis: method must be 'gram' or 'randomized', got 'svd'. 'gram' is exact.",
        ),
        (
            lambda x: pca_basis({"a": x, "b": x[:3]}, 2),
            "pca_basis: snapshots must be a tree of arrays with one leading dimension, got "
            "[(3,), (5,)]. Stack the snapshots of each leaf, or pass a list of trees.",
        ),
        (
            lambda x: pca_basis([x, x[:, :1]], 2),
            "pca_basis: snapshots must be trees of one structure and equal shapes, got others at "
            "number 1. If this is one stacked tree whose root is a list, pass stacked=True.",
        ),
        (lambda x: pca_basis(x.at[1, 1].set(jnp.nan), 2), INFINITE),
        (lambda x: pca_basis(x.at[1, 1].set(jnp.inf), 2, method="randomized"), INFINITE),
        (
            lambda x: pca_from_gram(Gram(jnp.zeros((4, 4))), x, 2),
            "pca_from_gram: gram must be 5 x 5, got (4, 4). Both come from the same ring buffer.",
        ),
        (
            lambda x: trajectory(OPT.init(x)),
            "trajectory: opt_state must hold a TrajectoryState, got none. Put "
            "boostax.subspace.record_trajectory into the chain.",
        ),
        (
            lambda x: record_trajectory(3).update(x, record_trajectory(3).init(x)),
            "record_trajectory: params must be given to update, got None. They are what is",
        ),
        (lambda x: record_trajectory(1), "record_trajectory: size must be at least 2, got 1. It"),
    ],
)
def test_errors_explain(call, said):
    with pytest.raises(ValueError) as error:
        call(jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32))
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("method", ["gram", "randomized", "streaming"])
@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.long)]
)
def test_sharded_leaves_stay_where_they_are(kind, method):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    rng = np.random.default_rng(0)
    whole = {
        "w": np.float32(rng.normal(size=(12, 16, 4))),
        "b": np.float32(rng.normal(size=(12, 8))),
    }
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(None, "x"))
        x = jax.device_put(whole, sharding)

        def fn(x):
            if method == "streaming":
                got = pca_from_gram(filled(x, 12), x, 4)
            else:
                got = pca_basis(x, 4, method=method)
            return got, project(got.components, lift(got.components, jnp.arange(4.0)))

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
    if method != "randomized":
        assert gap(flat(got.components, 4), reference(whole, 12)[1][:4]) < 1e-4


@draws(15)
@given(
    coefficients=st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=4),
    seed=st.integers(0, 3),
)
def test_projection_of_a_lift_is_the_identity(coefficients, seed):
    components = pca_basis(draw(8, seed), 4).components
    tree = lift(components, jnp.asarray(coefficients, jnp.float32))
    largest = max(map(abs, coefficients), default=0.0)
    np.testing.assert_allclose(project(components, tree), coefficients, atol=1e-5 * largest + 1e-30)


@pytest.mark.parametrize("steps", [0, 4, 8, 14])
def test_ring_holds_the_last_snapshots_oldest_first(steps):
    tx = optax.chain(optax.sgd(1.0), record_trajectory(3, every=2, start=3))
    w = {"w": jnp.zeros(2)}
    state = tx.init(w)

    @jax.jit
    def step(w, state):
        updates, state = tx.update({"w": -jnp.ones(2)}, state, w)
        return optax.apply_updates(w, updates), state

    for _ in range(steps):
        w, state = step(w, state)
    # Call t is given params of t; the calls 3, 5, 7, ... are recorded.
    due = list(range(3, steps, 2))
    snapshots, count = trajectory(state)
    assert count == min(len(due), 3)
    np.testing.assert_array_equal(snapshots["w"][:, 0], due[-3:])
    assert int(boostax.metrics(state)["trajectory_snapshots"]) == len(due)


@pytest.mark.parametrize("count", [6, pytest.param(8, marks=pytest.mark.long), 21])
def test_recorded_basis_is_that_of_the_snapshots(count):
    path = draw(21, mean=50.0)
    tx = record_trajectory(8)
    point = jax.tree.map(lambda x: x[0], path)
    state = tx.init(point)
    update = jax.jit(lambda state, p: tx.update(p, state, p)[1])
    for i in range(count):
        state = update(state, jax.tree.map(lambda x, i=i: x[i], path))
    window, _ = trajectory(state)
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, y[max(count - 8, 0) : count]), window, path
    )
    got, batch = trajectory_basis(state, 4), pca_basis(window, 4)
    assert gap(flat(got.components, 4), flat(batch.components, 4)) < 1e-5
    if count >= 8:
        inside = jax.jit(lambda s: trajectory_basis(s, 4))(state)
        assert gap(flat(got.components, 4), flat(inside.components, 4)) < 1e-5


def test_distances_are_of_what_is_stored():
    tx = record_trajectory(4, dtype="bfloat16")
    path = draw(4, mean=3.0)
    state = tx.init(jax.tree.map(lambda x: x[0], path))
    for i in range(4):
        _, state = tx.update(None, state, jax.tree.map(lambda x, i=i: x[i], path))
    stored = flat(state.snapshots, 4)
    expected = ((stored[:, None] - stored[None]) ** 2).sum(-1)
    np.testing.assert_allclose(state.gram.distances, expected, rtol=1e-5, atol=1e-9)


def test_a_skipped_step_records_nothing():
    tx = boostax.dynamic_loss_scale(optax.chain(record_trajectory(3), optax.sgd(1.0)))
    w = jnp.zeros(2)
    state = tx.init(w)
    for g in (1.0, jnp.nan, 1.0, jnp.inf):
        w, state = boostax.apply_gradients(tx, jnp.full(2, g), state, w)
    assert trajectory(state)[1] == 2


def test_writing_a_snapshot_copies_no_buffer():
    # A row of distances that reads the slot back from the buffer makes XLA copy all of it.
    tx = optax.chain(record_trajectory(16, every=5), optax.sgd(0.1, momentum=0.9))
    params = {"a": jnp.zeros((256, 256)), "b": jnp.zeros(4096)}
    state = tx.init(params)

    def step(params, state, grads):
        return boostax.apply_gradients(tx, grads, state, params)

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile()
    memory = compiled.memory_analysis()
    # What distances take by themselves: nothing, but XLA:CPU before 0.10.2 writes out what a
    # reduction reads.
    distances = lambda x, y: jnp.sum((x - y) ** 2, axis=tuple(range(1, x.ndim)))  # noqa: E731
    buffer = jax.tree.map(lambda x: jnp.zeros((16, *x.shape)), params)
    alone = jax.jit(lambda *trees: jax.tree.map(distances, *trees)).lower(buffer, params).compile()
    # One copy of the params, which the step overwrites while they are being recorded.
    temp = memory.temp_size_in_bytes - alone.memory_analysis().temp_size_in_bytes
    assert temp < 1.01 * 4 * (256 * 256 + 4096)
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
