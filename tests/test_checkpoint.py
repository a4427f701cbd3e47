"""A checkpoint comes back bit for bit or not at all, and never takes another one with it."""

import asyncio
import json
import logging
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import boostax
from boostax.checkpoint import Checkpointer


class Counted(NamedTuple):
    step: jax.Array
    params: dict
    opt_state: tuple
    model_state: None
    key: jax.Array


def make_state(seed=0):
    key = jax.random.key(seed)
    params = {
        "kernel": jax.random.normal(key, (40, 30)),
        "half": jnp.arange(5, dtype=jnp.bfloat16) / 3,
        "narrow": jnp.arange(5, dtype=jnp.float16) / 7,
        "empty": jnp.zeros((0, 4)),
        "wave": jnp.arange(3) * (1 + 2j),
        "flags": jnp.array([True, False]),
        "bytes": jnp.arange(-3, 3, dtype=jnp.int8),
    }
    trained = {name: params[name] for name in ("kernel", "half", "empty")}
    tx = optax.chain(
        optax.masked(optax.trace(0.9), {**dict.fromkeys(trained, True), "half": False})
    )
    return Counted(jnp.asarray(3, jnp.int32), params, tx.init(trained), None, key)


def bits(tree):
    def one(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return leaf.shape, str(leaf.dtype), np.asarray(leaf).tobytes()

    return [one(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert bits(actual) == bits(expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two steps on disk, for tests that damage a copy of them."""
    directory = tmp_path_factory.mktemp("saved")
    with Checkpointer(directory) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step, make_state(step), {"call": step})
    return directory


@pytest.fixture
def copied(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved, tmp_path / "copy"))


def test_a_state_comes_back_bit_for_bit_in_its_own_classes(saved):
    with Checkpointer(saved) as checkpointer:
        state, meta = checkpointer.restore(make_state())
        assert checkpointer.latest() == 20
    assert_same(state, make_state(20))
    assert type(state) is Counted
    assert meta == {"call": 20}


def test_an_abstract_target_and_an_older_step(saved):
    with Checkpointer(saved) as checkpointer:
        state, meta = checkpointer.restore(jax.eval_shape(make_state), step=10)
    assert_same(state, make_state(10))
    assert meta == {"call": 10}


def test_only_the_latest_are_kept_and_the_directory_may_be_new(tmp_path):
    with Checkpointer(tmp_path / "a" / "b", keep=2) as checkpointer:
        assert checkpointer.latest() is None
        for step in range(4):
            checkpointer.save(step, {"x": jnp.full(3, step)})
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3]


def test_saving_a_step_again_replaces_it(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for value in (1.0, 2.0):
            checkpointer.save(5, {"x": jnp.full(3, value)}, {"value": value})
        state, meta = checkpointer.restore({"x": jnp.zeros(3)})
    assert (float(state["x"][0]), meta["value"]) == (2.0, 2.0)


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    bump = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = {"x": jnp.arange(500_000.0), "y": jnp.arange(500_000.0)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
        for _ in range(5):
            state = bump(state)
        restored, _ = checkpointer.restore(state)
    np.testing.assert_array_equal(restored["x"], np.arange(500_000.0, dtype=np.float32))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_leaves_come_back_on_another_number_of_devices(tmp_path, kind):
    def place(count):
        mesh = jax.make_mesh((count,), ("data",), (kind,), devices=jax.devices()[:count])
        split = NamedSharding(mesh, PartitionSpec("data"))
        whole = NamedSharding(mesh, PartitionSpec())
        return {
            "split": jax.device_put(jnp.arange(32.0).reshape(8, 4), split),
            "whole": jax.device_put(jnp.arange(3.0), whole),
        }

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, place(4))
        target = place(2)
        restored, _ = checkpointer.restore(target)
    assert_same(restored, target)
    assert restored["split"].sharding == target["split"].sharding


def test_nothing_is_pickled(saved):
    for file in saved.rglob("*"):
        if file.is_file():
            assert not zipfile.is_zipfile(file)
            # What a pickle of any protocol since the second begins and ends with.
            data = file.read_bytes()
            assert not (data.startswith(pickle.PROTO) and data.endswith(pickle.STOP))


def test_leftovers_of_a_killed_save_are_removed_and_never_listed(copied):
    leftover = copied / "30.orbax-checkpoint-tmp"
    shutil.copytree(copied / "20", leftover)
    with Checkpointer(copied) as checkpointer:
        assert checkpointer.steps() == [10, 20]
        checkpointer.save(30, make_state(30))
    assert sorted(path.name for path in copied.iterdir() if path.is_dir()) == ["10", "20", "30"]
    shutil.copytree(copied / "20", leftover)
    Checkpointer(copied).close()
    assert not leftover.exists()


# --- damage


def files_of(step_directory):
    return sorted(path for path in step_directory.rglob("*") if path.is_file())


DAMAGES = {
    "missing": lambda path, data: path.unlink(),
    "empty": lambda path, data: path.write_bytes(b""),
    "cut short": lambda path, data: path.write_bytes(data[: len(data) // 2]),
    "one bit flipped": lambda path, data: path.write_bytes(
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 16]) + data[len(data) // 2 + 1 :]
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_reported_or_without_effect(copied, damage):
    expected, seen = bits(make_state(20)), 0
    step = copied / "20"
    with Checkpointer(copied) as checkpointer:
        for file in files_of(step):
            data = file.read_bytes()
            damage(file, data)
            try:
                state, meta = checkpointer.restore(make_state())
            except RuntimeError as error:
                seen += 1
                message = str(error)
                assert f"step 20 in {copied} is damaged" in message
                assert "Nothing was deleted" in message and "pass step=10" in message
            else:
                assert bits(state) == expected and meta == {"call": 20}
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)
        assert checkpointer.restore(make_state(), step=10)[1] == {"call": 10}
    assert seen >= 5


def test_a_flipped_bit_in_the_numbers_names_a_leaf(copied):
    (biggest,) = sorted(files_of(copied / "20"), key=lambda path: path.stat().st_size)[-1:]
    data = bytearray(biggest.read_bytes())
    data[len(data) // 2] ^= 1
    biggest.write_bytes(data)
    with Checkpointer(copied) as checkpointer, pytest.raises(RuntimeError, match="kernel"):
        checkpointer.restore(make_state())


def test_restoring_leaves_the_rest_of_the_process_alone(copied, monkeypatch):
    """Defect guarded against: other threads got its event loops, and absl's logger was silent."""
    restore, seen = ocp.CheckpointManager.restore, []
    now = lambda: (asyncio.new_event_loop, logging.getLogger("absl").disabled)  # noqa: E731

    def spied(self, *args, **kwargs):
        seen.append(now())
        return restore(self, *args, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, "restore", spied)
    before = now()
    with Checkpointer(copied) as checkpointer:
        checkpointer.restore(make_state())
        shutil.rmtree(copied / "20" / "state")
        with pytest.raises(RuntimeError, match=r"step 20 .* is damaged"):
            checkpointer.restore(make_state())
    assert len(seen) >= 3 and set(seen) == {before}


def test_altered_meta_is_damage(copied):
    path = copied / "20" / "record" / "metadata"
    path.write_text(path.read_text().replace('"call": 20', '"call": 21'))
    with Checkpointer(copied) as checkpointer, pytest.raises(RuntimeError, match="its record"):
        checkpointer.restore(make_state())


def test_the_only_step_damaged(copied):
    shutil.rmtree(copied / "10")
    shutil.rmtree(copied / "20" / "state")
    with Checkpointer(copied) as checkpointer, pytest.raises(RuntimeError, match="No older step"):
        checkpointer.restore(make_state())
    assert (copied / "20").exists()


def test_an_empty_step_directory_is_damage(copied):
    (copied / "40").mkdir()
    with Checkpointer(copied) as checkpointer, pytest.raises(RuntimeError, match="pass step=20"):
        checkpointer.restore(make_state())


# --- targets that do not fit


def change(**changes):
    state = make_state()
    return state._replace(params={**state.params, **changes})


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (change(kernel=jnp.zeros((40, 31))), ["params/kernel", "[40, 30]", "[40, 31]"]),
        (change(half=jnp.zeros(5)), ["params/half", "bfloat16", "float32"]),
        (change(wave=jnp.zeros(3)), ["params/wave", "complex64"]),
        (change(more=jnp.zeros(3)), ["in target but not saved", "params/more"]),
        (change(kernel=None), ["saved but not in target", "params/kernel"]),
        (make_state()._replace(key=jnp.zeros(2, jnp.uint32)), ["key<fry>", "uint32[2]"]),
        (make_state()._replace(key=jax.random.key(0, impl="rbg")), ["key<fry>", "key<rbg>"]),
        (make_state()._replace(opt_state=()), ["saved but not in target", "opt_state"]),
    ],
    ids=["shape", "dtype", "complex", "extra", "missing", "raw key", "key kind", "chain"],
)
def test_a_target_that_does_not_fit_is_refused_by_name(saved, target, words):
    with Checkpointer(saved) as checkpointer, pytest.raises(ValueError) as caught:
        checkpointer.restore(target)
    for word in [*words, "step 20", str(saved)]:
        assert word in str(caught.value)


# --- arguments


def test_missing_steps_are_named(saved, tmp_path):
    with Checkpointer(saved) as checkpointer, pytest.raises(FileNotFoundError, match="10, 20"):
        checkpointer.restore(make_state(), step=15)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(FileNotFoundError, match="Save one"):
        checkpointer.restore(make_state())


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_keep_must_be_a_positive_integer(tmp_path, keep):
    with pytest.raises((ValueError, TypeError), match="Checkpointer: keep must be"):
        Checkpointer(tmp_path, keep=keep)


@pytest.mark.parametrize("mapped", ["pmap", "shard_map"])
def test_per_replica_state_that_is_said_to_be_replicated_is_refused(tmp_path, mapped):
    """Defect guarded against: in_axes=None kept each device's window, and one of them was saved."""
    n, params = 4, {"w": jnp.ones((16, 4))}
    inner = optax.chain(boostax.all_reduce("data"), optax.sgd(0.1))
    tx = boostax.accumulate(inner, every=2, axis_name="data")

    def step(state, x):
        return tx.update({"w": x}, state, params)[1]

    def stacked(state, x):
        return boostax.states.leave_replica(step(boostax.states.enter_replica(state), x))

    x = jax.random.normal(jax.random.key(0), (n, 16, 4))
    state, mesh = tx.init(params), Mesh(np.array(jax.devices()[:n]), ("data",))
    if mapped == "pmap":
        how = {"axis_name": "data", "devices": jax.devices()[:n]}
        bad = jax.pmap(step, in_axes=(None, 0), out_axes=None, **how)(state, x)
        whole = jax.tree.map(lambda leaf: jnp.stack([leaf] * n), state)
        good = jax.pmap(step, **how)(whole, x)
    else:
        one, rows = PartitionSpec(), PartitionSpec("data")
        unchecked = {"mesh": mesh, "check_vma": False}
        each = lambda state, x: step(state, x[0])  # noqa: E731
        bad = jax.shard_map(each, in_specs=(one, rows), out_specs=one, **unchecked)(state, x)
        specs = boostax.states.state_specs(tx, params, "data", replicas=n)
        each = lambda state, x: stacked(state, x[0])  # noqa: E731
        given = jax.shard_map(each, in_specs=(specs, rows), out_specs=specs, **unchecked)
        good = given(boostax.states.stack_replicas(state, n), x)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(
            ValueError, match=r"must lead with the replicas .* 'window/local/grads/w'"
        ):
            checkpointer.save(1, bad)
        checkpointer.save(1, good)
        back, _ = checkpointer.restore(good)
    np.testing.assert_array_equal(back.window.local.grads["w"], x)
    with pytest.raises(ValueError, match="reshard_state: state must lead with the replicas"):
        boostax.reshard_state(bad, 2)


@pytest.mark.parametrize("leaf", [1.0, np.float32(1), np.zeros(3)])
def test_leaves_must_be_jax_arrays(tmp_path, leaf):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(TypeError, match="a/0"):
        checkpointer.save(0, {"a": [leaf]})


def test_paths_that_fall_together_on_disk_are_refused(tmp_path):
    state = {"a.b": jnp.ones(2), "a": {"b": jnp.ones(3)}}
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match="joined by dots"):
        checkpointer.save(0, state)


def test_meta_must_be_json_and_a_failed_save_leaves_the_rest(copied):
    with Checkpointer(copied) as checkpointer:
        with pytest.raises(TypeError):
            checkpointer.save(30, make_state(), {"x": object()})
        assert checkpointer.steps() == [10, 20]
        checkpointer.save(30, make_state(), {"pair": (1, 2)})
        assert checkpointer.meta() == {"pair": [1, 2]}


def test_a_save_that_failed_in_the_background_is_reported(copied, monkeypatch):
    def fail():
        raise OSError("no space left on device")

    with Checkpointer(copied) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(checkpointer._manager, "wait_until_finished", fail)
            with pytest.raises(RuntimeError, match="no space left"):
                checkpointer.save(30, make_state())
        assert checkpointer.latest() == 20


def test_without_orbax_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['orbax'] = None; sys.modules['orbax.checkpoint'] = None\n"
        "import boostax.checkpoint"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert re.search(r"pip install 'boostax\[checkpoint\]'", run.stderr)


def test_the_record_on_disk_is_plain_json(saved):
    record = json.loads((saved / "20" / "record" / "metadata").read_text())
    assert record["leaves"]["params/kernel"]["shape"] == [40, 30]
    assert record["meta"] == {"call": 20}


def test_saving_does_not_ask_jax_for_a_signal(tmp_path, monkeypatch):
    # Each question sets JAX's counter of calls; one from a save that ends in the background would
    # set it back, and processes would stop after different calls.
    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"a": jnp.arange(3.0)})
    assert not asked


def test_a_link_among_the_leftovers_leads_nowhere(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    run = tmp_path / "run"
    run.mkdir()
    (run / "7.orbax-checkpoint-tmp").symlink_to(elsewhere)
    with Checkpointer(run) as checkpointer:
        checkpointer.save(1, {"a": jnp.arange(3.0)})
    assert (elsewhere / "kept").read_text() == "kept"
    assert not (run / "7.orbax-checkpoint-tmp").exists()
