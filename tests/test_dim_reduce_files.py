"""DimReduce by configuration: from files on disk at once, or after a run that records."""

import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance import ours
from lanes import lanes
from mindspore_runs import ABOUT, arrays, as_flax, split
from training import follow, losses_of

import boostax
from boostax.config.auto import auto
from boostax.subspace import files, pca_basis

# MindSpore's runs: a layer of ten and one of four, with relu between.


def tiny(flat):
    return as_flax(split(flat, ABOUT["shapes"]["tiny"]))


def with_files(config, folder):
    """MindSpore's dictionary with the files that it names, as boostax reads them."""
    config = json.loads(json.dumps(config))
    settings = config["dim_reduce"]
    if name := settings.get("pca_mat_path"):
        settings["pca_mat_path"] = str(folder / f"{name}.npy")
        rows = [jax.tree.leaves(tiny(row)) for row in arrays()[name]]
        np.save(settings["pca_mat_path"], [np.concatenate([*map(np.ravel, x)]) for x in rows])
    if name := settings.get("weight_load_dir"):
        settings["weight_load_dir"] = str(folder / name)
        write(folder / name, [tiny(row) for row in arrays()[name]])
    return config


def write(folder, snapshots):
    folder.mkdir()
    for i, tree in enumerate(snapshots):
        np.savez(folder / f"{i:02}.npz", **dict(boostax._core.trees.named(tree)))


def mindspores_runs():
    runs = [run for run in ABOUT["runs"] if "program" in run and run["switches"]["dim_reduce"]]
    return {run["name"]: run for run in runs if run["way"] == "boost"}


QUICK = ("dim_reduce_checkpoints", "dim_reduce_accumulate_2")


@pytest.mark.parametrize("name", lanes(mindspores_runs(), QUICK))
def test_weights_are_those_of_mindspore(name, tmp_path):
    run = mindspores_runs()[name]
    boost = auto(with_files(run["config"], tmp_path), level=run["level"])
    _, worst = ours.rerun(run, boost, optax.sgd(0.1))
    if name == "dim_reduce_accumulate_2":
        # There the direction is of a window, and the loss of its last micro-batch.
        assert worst > 0.1 and "no window is around dim_reduce" in " ".join(boost.notes)
        return
    assert worst < 1e-5


# A small model, twelve checkpoints of a run of it, and what is made of them by hand.

INNER = optax.sgd(0.05)


def start():
    w = jax.random.normal(jax.random.split(jax.random.key(0), 2)[0], (6, 8)) / 2
    return {"fc1": {"kernel": w, "bias": jnp.zeros(8)}, "fc2": {"kernel": w[0, :8, None] / 4}}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["fc1"]["kernel"] + params["fc1"]["bias"])
    return jnp.mean((hidden @ params["fc2"]["kernel"] - jnp.sin(batch[:, :1])) ** 2)


def batch(i, size=64):
    return jax.random.normal(jax.random.fold_in(jax.random.key(1), i), (size, 6))


def advance(step, state, count, first=None):
    """Some calls: with the batches of a run from the first one on, or all with the same."""
    given = [batch(99, 256)] * count if first is None else map(batch, range(first, first + count))
    state, told = follow(step, state, given)
    return state, losses_of(told)


@functools.cache
def run():
    """Params after the run, and the twelve snapshots of its last steps."""
    step = boostax.make_train_step(loss_fn, optax.sgd(0.8))
    state, snapshots = step.init(start()), []
    for i in range(20):
        state, _ = advance(step, state, 1, i)
        snapshots.append(jax.tree.map(np.array, state.params))
    return snapshots[-1], snapshots[8:]


def write_checkpoints(folder, snapshots):
    with boostax.checkpoint.Checkpointer(folder, keep=len(snapshots)) as checkpointer:
        for i, tree in enumerate(snapshots):
            checkpointer.save(i, {"params": jax.tree.map(jnp.asarray, tree), "more": jnp.ones(3)})


def assert_same(boost, tx, params, count=4):
    """A configuration does what a transformation does, to the bit."""
    step = boost.make_train_step(loss_fn, INNER, params)
    hand = boostax.make_train_step(loss_fn, tx)
    state, found = advance(step, step.init(params), count)
    expected, reported = advance(hand, hand.init(params), count)
    chex.assert_trees_all_equal(state, expected, strict=True)
    assert found == reported
    return found


@pytest.mark.parametrize("form", [write, write_checkpoints])
def test_one_file_finishes_from_twelve_checkpoints_on_disk(tmp_path, form):
    params, snapshots = run()
    form(tmp_path / "weights", snapshots)
    job = tmp_path / "job.json"
    settings = {"n_components": 8, "weight_load_dir": str(tmp_path / "weights")}
    job.write_text(json.dumps({"dim_reduce": settings}))
    # By hand, of the snapshots as they were in memory.
    tx = boostax.dim_reduce(pca_basis(snapshots, 8), residual=INNER)
    found = assert_same(auto(job), tx, params, 6)
    assert found[-1] < 0.9 * found[0]


@pytest.mark.parametrize("name", ["basis.npz", "basis.npy"])
def test_one_file_finishes_from_a_saved_basis(tmp_path, name):
    params, snapshots = run()
    basis = pca_basis(snapshots, 9)
    first = jax.tree.map(lambda x: x[:8], basis.components)
    settings = {"n_components": 8, "pca_mat_path": str(tmp_path / name)}
    if name.endswith("npy"):
        rows = [np.reshape(x, (9, -1)) for x in jax.tree.leaves(basis.components)]
        np.save(tmp_path / name, np.concatenate(rows, 1))
    else:
        basis.save(tmp_path / name)
        first = basis._replace(components=first, explained=basis.explained[:8])
    tx = boostax.dim_reduce(first, residual=INNER)
    found = assert_same(auto({"dim_reduce": settings}), tx, params)
    assert found[-1] < 0.9 * found[0]


def test_files_of_mindspores_dictionary_have_their_effect(tmp_path):
    params, snapshots = run()
    write(tmp_path / "weights", snapshots)
    settings = {"n_components": 8, "weight_load_dir": str(tmp_path / "weights"), "timeout": 60}
    boost = auto({"boost": {"mode": "manual", "dim_reduce": True}, "dim_reduce": settings})
    waits, _, last = boost.notes
    assert waits == "dim_reduce.timeout = 60 has no effect: no process waits for another's files."
    assert last.startswith("dim_reduce: the optimizer has no effect. An SGD with alpha and gamma")
    basis = pca_basis(files.snapshots(tmp_path / "weights", params), 8)
    tx = boostax.dim_reduce(basis, residual=optax.sgd(0.001, 0.9), rule="mindspore")
    assert_same(boost, tx, params)


def test_a_basis_takes_the_place_of_checkpoints_in_mindspores_reading():
    settings = {"pca_mat_path": "basis.npy", "weight_load_dir": "weights"}
    job = {"boost": {"mode": "manual", "dim_reduce": True}, "dim_reduce": settings}
    text = r"^mindspore: dim_reduce.weight_load_dir must be left out, got 'weights'"
    with pytest.raises(ValueError, match=text):
        auto(job, strict=True)
    boost = auto(job)
    assert "weight_load_dir" not in boost.config["dim_reduce"]
    assert "weight_load_dir = 'weights' has no effect: pca_mat_path" in " ".join(boost.notes)


# What is refused


def refused(said, settings, params=None, error=ValueError):
    with pytest.raises(error, match=said):
        auto({"dim_reduce": settings}).make_train_step(loss_fn, INNER, params)


def test_settings_that_make_no_finish_are_refused():
    both = {"weight_load_dir": "a", "pca_mat_path": "b"}
    refused("^dim_reduce: weight_load_dir or pca_mat_path must be given", {"weight_load_dir": None})
    refused("^dim_reduce: params must be given if files are", {"weight_load_dir": "none"})
    refused("^dim_reduce: weight_load_dir must be left", both)
    boost = auto({"boost": {"mode": "manual", "dim_reduce": True}})
    with pytest.raises(ValueError, match="weight_load_dir or pca_mat_path must be given"):
        boost.make_train_step(loss_fn, INNER, start())


def halved() -> optax.GradientTransformation:
    @boostax.describe("halved", "clip")
    def update(updates, state, params=None, **extra):
        return jax.tree.map(lambda g: g / 2, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


MORE = [{"accumulate": 2}, {"clip": 1.0}, {"reduce": "adasum"}, {"freeze": True}, {"halved": True}]


@pytest.mark.parametrize("beside", MORE)
def test_what_a_finish_from_files_would_leave_out_is_refused(beside):
    (name,) = beside
    boost = auto({"dim_reduce": {"weight_load_dir": "weights"}} | beside, factories=[halved])
    text = rf"^Boost.optimizer: config.{name} must be left out with dim_reduce from the first step"
    with pytest.raises(ValueError, match=text):
        boost.make_train_step(loss_fn, INNER, start(), axis_name="data")


def test_files_of_other_params_are_refused_by_name(tmp_path):
    params, snapshots = run()
    write(tmp_path / "weights", snapshots)
    folder, path = {"weight_load_dir": str(tmp_path / "weights")}, str(tmp_path / "basis.npy")
    few, matrix = {"n_components": 8} | folder, {"n_components": 8, "pca_mat_path": path}
    wider = {"fc1": params["fc1"], "fc2": {"kernel": jnp.zeros((8, 2))}}
    refused(r"'fc2/kernel', which is .*, but should be float32 of \(8, 2\)", few, wider)
    more = {**params, "fc3": jnp.zeros(3)}
    refused("'fc3', which is not there. Names are paths in the params", few, more)
    many = {"n_components": 12} | folder
    refused("^dim_reduce: n_components must be below the number of sn", many, params)
    nowhere = {"weight_load_dir": str(tmp_path / "nowhere")}
    refused("must be a folder of .npz files, or", nowhere, params, FileNotFoundError)
    refused("basis.npy", matrix, params, FileNotFoundError)
    for rows, said in (
        (np.eye(8, 7), r"pca_mat_path must be a file of shape \(k, 64\), with a r"),
        (np.eye(4, 64), "n_components must be at most 4, the number of compon"),
        (np.ones((8, 64)), "pca_mat_path must be a file of orthonormal"),
    ):
        np.save(path, rows)
        refused(f"^dim_reduce: {said}", matrix, params)
    (tmp_path / "basis.npy").write_bytes(b"\x93NUMPY")
    refused("^dim_reduce: pca_mat_path must be a whole .npy file, got", matrix, params)
