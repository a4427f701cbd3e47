"""A checkpoint comes back bit for bit or not at all, and never takes another one with it."""

import asyncio
import collections
import functools
import json
import logging
import pathlib
import pickle
import shutil
import subprocess
import sys
import zipfile
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P
from reducing import mesh_of

import boostax
from boostax import checkpoint
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
    tx = optax.chain(optax.masked(optax.trace(0.9), {"kernel": True, "half": False, "empty": True}))
    return Counted(jnp.asarray(3, jnp.int32), params, tx.init(trained), None, key)


def bits(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    leaves = [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(tree)]
    return [(x.shape, str(x.dtype), np.asarray(x).tobytes()) for x in leaves]


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
    return shutil.copytree(saved, tmp_path / "copy")


ABSTRACT = functools.partial(jax.eval_shape, make_state)


@pytest.mark.parametrize(("target", "step"), [(make_state, None), (ABSTRACT, 10)])
def test_a_state_comes_back_bit_for_bit_in_its_own_classes(saved, target, step):
    with Checkpointer(saved) as checkpointer:
        state, meta = checkpointer.restore(target(), step)
        assert checkpointer.latest() == 20
        assert checkpointer.versions() == {x.__name__: x.__version__ for x in (boostax, jax, optax)}
    assert_same(state, make_state(step or 20))
    assert type(state) is Counted and meta == {"call": step or 20}
    files = [file.read_bytes() for file in saved.rglob("*") if file.is_file()]
    assert not any(map(zipfile.is_zipfile, saved.rglob("*")))
    # Nothing begins and ends like a pickle of any protocol since the second.
    assert not any(x.startswith(pickle.PROTO) and x.endswith(pickle.STOP) for x in files)


def test_only_the_latest_are_kept_and_the_directory_may_be_new(tmp_path, monkeypatch):
    # Each question sets JAX's counter of calls; one from a save that ends in the background would
    # set it back, and processes would stop after different calls.
    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    with Checkpointer(tmp_path / "a" / "b", keep=2) as checkpointer:
        assert checkpointer.latest() is None
        for step in (0, 1, 2, 3, 3):
            checkpointer.save(step, {"x": jnp.full(3, step)}, {"first": not asked})
        assert checkpointer.steps() == [2, 3]
        checkpointer.save(3, {"x": jnp.full(3, 7)}, {"saved": "again"})
        state, meta = checkpointer.restore({"x": jnp.zeros(3, jnp.int32)})
    assert (int(state["x"][0]), meta, asked) == (7, {"saved": "again"}, [])


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    bump, state = jax.jit(lambda x: x + 1, donate_argnums=0), {"x": jnp.arange(500_000.0)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
        for _ in range(5):
            state["x"] = bump(state["x"])
        restored, _ = checkpointer.restore(state)
    np.testing.assert_array_equal(restored["x"], np.arange(500_000.0, dtype=np.float32))


FSDP = {"param_specs": {"w": P(None, "data"), "b": P()}}


@pytest.mark.parametrize("how", [{}, {"shard_optimizer": True}, FSDP])
def test_a_restored_state_is_donated_like_a_fresh_one(tmp_path, how):
    """Defect guarded against: 17 to 75% of its bytes were, as the rest lay in the host's memory."""
    loss_fn = lambda p, batch: jnp.mean((batch @ p["w"] + p["b"]) ** 2)  # noqa: E731
    inner, axis = optax.adamw(1e-3), "data" if how else None
    if how:
        inner = optax.chain(boostax.all_reduce("data"), inner)
        how = {"mesh": mesh_of(data=4), "axis_name": "data", **how}
    step = boostax.make_train_step(loss_fn, boostax.accumulate(inner, 2, axis_name=axis), **how)

    def buffers(state):
        leaves = jax.tree_util.tree_leaves_with_path(state)
        shards = [(path, x) for path, leaf in leaves for x in leaf.addressable_shards]
        return {x.data.unsafe_buffer_pointer(): (path, x.device) for path, x in shards}

    def reused(state):
        before = buffers(state)
        state, _ = step(state, jnp.ones((16, 512)))
        return {where for at, where in buffers(state).items() if at in before}, state

    params = {"w": jnp.ones((512, 256)), "b": jnp.zeros(256)}
    fresh, state = reused(step.init(params))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        restored, _ = checkpointer.restore(step.init(params))
    assert reused(restored)[0] == fresh and len(fresh) > 0.9 * len(buffers(state))


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_sharded_leaves_come_back_on_another_number_of_devices(tmp_path, kind):
    def place(count):
        mesh = mesh_of(kind, data=count)
        put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))  # noqa: E731
        return {"split": put(jnp.arange(32.0).reshape(8, 4), "data"), "whole": put(jnp.arange(3.0))}

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, place(4))
        target = place(2)
        restored, _ = checkpointer.restore(target)
    assert_same(restored, target)
    assert restored["split"].sharding == target["split"].sharding


def test_leftovers_of_a_killed_save_are_removed_and_never_listed(copied, tmp_path):
    leftover, elsewhere = copied / "30.orbax-checkpoint-tmp", tmp_path / "elsewhere"
    shutil.copytree(copied / "20", leftover)
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    # Defect guarded against: what a link among them points to was removed, too.
    (copied / "7.orbax-checkpoint-tmp").symlink_to(elsewhere)
    with Checkpointer(copied) as checkpointer:
        assert checkpointer.steps() == [10, 20]
        checkpointer.save(30, make_state(30))
    assert sorted(path.name for path in copied.iterdir() if path.is_dir()) == ["10", "20", "30"]
    assert (elsewhere / "kept").read_text() == "kept"


# --- damage


def flip(path, data):
    half = len(data) // 2
    path.write_bytes(data[:half] + bytes([data[half] ^ 16]) + data[half + 1 :])


DAMAGES = {
    "missing": lambda path, data: path.unlink(),
    "empty": lambda path, data: path.write_bytes(b""),
    "cut short": lambda path, data: path.write_bytes(data[: len(data) // 2]),
    "one bit flipped": flip,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_reported_or_without_effect(copied, damage):
    expected, seen, words = bits(make_state(20)), 0, f"step 20 in {copied} is damaged"
    with Checkpointer(copied) as checkpointer:
        for file in filter(pathlib.Path.is_file, sorted((copied / "20").rglob("*"))):
            data = file.read_bytes()
            damage(file, data)
            try:
                assert bits(checkpointer.restore(make_state())[0]) == expected
            except RuntimeError as error:
                seen += 1
                assert all(x in str(error) for x in (words, "Nothing was deleted", "pass step=10"))
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)
        assert checkpointer.restore(make_state(), step=10)[1] == {"call": 10}
    assert seen >= 5


def test_damage_is_named_and_the_rest_of_the_process_left_alone(copied, monkeypatch):
    """Defect guarded against: other threads got its event loops, and absl's logger was silent."""
    restore, seen = ocp.CheckpointManager.restore, []
    now = lambda: (asyncio.new_event_loop, logging.getLogger("absl").disabled)  # noqa: E731
    spied = lambda *args, **kwargs: [seen.append(now()), restore(*args, **kwargs)][1]  # noqa: E731
    monkeypatch.setattr(ocp.CheckpointManager, "restore", spied)
    before = now()
    biggest = max((copied / "20").rglob("*"), key=lambda path: path.stat().st_size)
    flip(biggest, biggest.read_bytes())
    record = copied / "10" / "record" / "metadata"
    record.write_text(record.read_text().replace('"call": 10', '"call": 11'))
    (copied / "40").mkdir()
    with Checkpointer(copied) as checkpointer:
        for step, words in ((20, "params/kernel"), (10, "step's record.* No older"), (40, "=20")):
            with pytest.raises(RuntimeError, match=words):
                checkpointer.restore(make_state(), step)
    assert len(seen) >= 4 and set(seen) == {before}


# --- targets that do not fit


def change(**changes):
    return make_state()._replace(params=make_state().params | changes)


ADAM = make_state()._replace(opt_state=optax.adam(1.0).init({"half": jnp.zeros(5)}))
PARTS = "Counted, MaskedState, TraceState, got Counted, ScaleByAdamState. Restore into a state of "


TARGETS = [
    (change(kernel=jnp.zeros((40, 31))), "'params/kernel' was float32[40, 30], got float32[40"),
    (change(half=jnp.zeros(5)), "'params/half' was bfloat16[5], got float32[5]"),
    (change(wave=jnp.zeros(3)), "'params/wave' was complex64[3], got"),
    (change(more=jnp.zeros(3)), "'params/more' was not saved, got float32[3]"),
    (change(kernel=None), "'params/kernel' was float32[40, 30], got none"),
    (make_state()._replace(key=jnp.zeros(2, jnp.uint32)), "was key<fry>[], got uint32[2]"),
    (make_state()._replace(key=jax.random.key(0, impl="rbg")), "key<fry>[], got key<rbg>[]"),
    (ADAM, f"{PARTS}the saved chain, then call boostax.migrate_state."),
]


@pytest.mark.parametrize(("target", "words"), TARGETS)
def test_a_target_that_does_not_fit_is_refused_by_name(saved, target, words):
    with Checkpointer(saved) as checkpointer, pytest.raises(ValueError) as caught:
        checkpointer.restore(target)
    assert words in str(caught.value) and f"step 20 in {saved}, " in str(caught.value)


class GroupSignalState(NamedTuple):
    fast: jax.Array
    slow: jax.Array


@pytest.mark.parametrize("by", [boostax.__version__, "0.2 or before"])
def test_a_part_that_is_gone_is_named_and_all_else_of_0_2_comes_back(tmp_path, monkeypatch, by):
    sentence, trace = "This name was removed.", optax.trace(0.9).init({"w": jnp.ones(3)})
    gone = {"boostax.GroupSignalState": sentence}
    monkeypatch.setattr(checkpoint.checks, "replacement", gone.get)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, (GroupSignalState(jnp.ones(2), jnp.ones(2)), trace))
        checkpointer.save(2, {"trace": trace, "a field that is gone": None})
        checkpointer.wait()
        for path in tmp_path.glob("*/record/metadata") if by != boostax.__version__ else ():
            # As 0.2 wrote it.
            record = json.loads(path.read_text())
            record = {name: record[name] for name in ("leaves", "meta")}
            path.write_text(json.dumps(record | {"checksum": checkpoint._text_checksum(record)}))
        with pytest.raises(ValueError) as caught:
            checkpointer.restore((trace,), 1)
        assert_same(checkpointer.restore({"trace": trace})[0], {"trace": trace})
    versions = "" if by != boostax.__version__ else f", jax {jax.__version__}, optax "
    assert f"saved by boostax {by}{versions}" in str(caught.value)
    assert " with GroupSignalState" in str(caught.value)
    assert str(caught.value).endswith(f"GroupSignalState: {sentence}")


def test_a_checkpoint_of_0_3_is_read_as_the_error_says(tmp_path):
    fields = "scale clean_steps tolerance last_finite skipped_steps skipped_in_a_row growths "
    old = collections.namedtuple("LossScaleState", fields + "backoffs floor_hits inner_state")
    tx, params = boostax.dynamic_loss_scale(optax.adam(0.1)), {"w": jnp.ones(3)}
    state = tx.init(params)._replace(skipped=jnp.int32(3), applied=jnp.asarray(True))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"opt_state": old(*state), "params": params})
        with pytest.raises(ValueError, match=r"0\.4 renamed .* boostax\.migrate_state\(saved\["):
            checkpointer.restore({"opt_state": state, "params": params})
    with pytest.warns(UserWarning, match="Sharding info"):
        saved = ocp.PyTreeCheckpointer().restore(tmp_path / "1" / "state")
    assert_same(boostax.migrate_state(saved["opt_state"], tx, saved["params"])[0], state)


# --- arguments


def test_missing_steps_are_named(saved, tmp_path):
    for folder, step, words in ((saved, 15, "10, 20"), (tmp_path, None, "Save the step")):
        with Checkpointer(folder) as checkpointer, pytest.raises(FileNotFoundError, match=words):
            checkpointer.restore(make_state(), step)
    with pytest.raises(ValueError, match="Checkpointer: keep must be"):
        Checkpointer(tmp_path, keep=0)


def test_per_replica_state_that_is_said_to_be_replicated_is_refused(tmp_path):
    """Defect guarded against: in_axes=None kept each device's window, and one of them was saved."""
    inner, params = optax.chain(boostax.all_reduce("data"), optax.sgd(0.1)), jnp.ones((16, 4))
    tx = boostax.accumulate(inner, every=2, axis_name="data")
    x, state = jax.random.normal(jax.random.key(0), (4, 16, 4)), tx.init(params)
    map_ = functools.partial(jax.pmap, axis_name="data", devices=jax.devices()[:4])
    step = lambda state, x: tx.update(x, state, params)[1]  # noqa: E731
    bad = map_(step, in_axes=(None, 0), out_axes=None)(state, x)
    good = map_(step)(jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state), x)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match=r"a dimension of replicas, .* 'window/local/grads'"):
            checkpointer.save(1, bad)
        checkpointer.save(1, good)
        np.testing.assert_array_equal(checkpointer.restore(good)[0].window.local.grads, x)
    with pytest.raises(ValueError, match="reshard_state: state must be a state whose arrays that"):
        boostax.reshard_state(bad, 2)


UNSAVED = [
    *(({"a": [x]}, None, TypeError, "at a/0. Convert") for x in (1.0, np.float32(1), np.zeros(3))),
    (nnx.Sequential(nnx.relu), None, TypeError, r"NNX object, Sequential. Save nnx.as_pure\(\("),
    ({"a.b": jnp.ones(2), "a": {"b": jnp.ones(3)}}, None, ValueError, "joined by dots"),
    ({"a": jnp.ones(2)}, {"x": object()}, TypeError, "not JSON serializable"),
]


@pytest.mark.parametrize(("state", "meta", "error", "words"), UNSAVED)
def test_what_cannot_be_saved_is_refused_and_leaves_the_rest(copied, state, meta, error, words):
    with Checkpointer(copied) as checkpointer:
        with pytest.raises(error, match=words):
            checkpointer.save(30, state, meta)
        assert checkpointer.steps() == [10, 20]
        checkpointer.save(30, make_state(), {"pair": (1, 2)})
        assert checkpointer.meta() == {"pair": [1, 2]}


def test_a_target_with_a_number_is_refused(copied):
    """Defect guarded against: the step of Flax's fresh ``TrainState`` ended in AttributeError."""
    error = pytest.raises(TypeError, match=r"target must be .* got int at step\. Convert")
    with Checkpointer(copied) as checkpointer, error:
        checkpointer.restore({"step": 0}, reshard=True)


def test_a_target_that_orbax_cannot_compare_is_not_called_damage(copied):
    with Checkpointer(copied) as checkpointer:
        fails = mock.Mock(side_effect=IndexError("tuple index out of range"))
        error = pytest.raises(RuntimeError, match=r"20 in .* cannot be read: .* the saved class")
        with mock.patch.object(checkpointer._manager, "restore", fails), error:
            checkpointer.restore(make_state())


def test_a_save_that_failed_in_the_background_is_reported(copied):
    with Checkpointer(copied) as checkpointer:
        full = mock.Mock(side_effect=OSError("no space left on device"))
        error = pytest.raises(RuntimeError, match="no space left")
        with mock.patch.object(checkpointer._manager, "wait_until_finished", full), error:
            checkpointer.save(30, make_state())
        assert checkpointer.latest() == 20


def test_without_orbax_the_error_says_what_to_install():
    code = "import sys; sys.modules['orbax'] = sys.modules['orbax.checkpoint'] = None; "
    code += "import boostax; boostax.checkpoint"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1 and "pip install '.[checkpoint]'" in run.stderr
