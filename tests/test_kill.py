"""A run that is killed or stopped at any moment and goes on ends in the same state to the bit."""

import json
import os
import signal
import time

import jax.numpy as jnp
import numpy as np
import processes
import pytest
from lanes import lanes

from boostax.checkpoint import Checkpointer

CALLS = 25


class Job(processes.Processes):
    """The example as one process of two devices, or as several of one device each."""

    def __init__(self, folder, *options, count=1, **variables):
        self.steps = folder / "steps"
        command = [processes.EXAMPLE, self.steps, f"--calls={CALLS}", *options]
        super().__init__([*command, f"--device-count={2 // count}"], count, folder, **variables)

    def record(self):
        """The checksums of all leaves of the last checkpoint, those of each replica included."""
        (path,) = (self.steps / str(CALLS) / "record").glob("metadata")
        return json.loads(path.read_text())["leaves"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    found = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(tmp_path_factory.mktemp("cache"))
    return {"JAX_COMPILATION_CACHE_DIR": found}


def undisturbed(folder, **options):
    with Job(folder, **options) as job:
        printed = job.end()
        assert "Warning" not in printed
        # An overflow halves the scale, and that call never happened; the last window stays open.
        assert "'skipped': '0'" not in printed.splitlines()[-1]
        return job.record()


@pytest.mark.long
def test_stopped_and_killed_between_and_beyond_its_saves(tmp_path, cache):
    wanted = undisturbed(tmp_path / "whole", **cache)
    folder = tmp_path / "run"
    with Job(folder, "--save-every=100", **cache) as job:
        job.reach("call 8:")
        printed = job.end(number=signal.SIGTERM)
    assert "stopped after call" in printed
    assert 8 <= max(int(path.name) for path in job.steps.iterdir()) < CALLS
    with Job(folder, "--save-every=3", **cache) as job:
        job.reach("call 17:")
        job.end(-signal.SIGKILL, number=signal.SIGKILL)
    with Job(folder, **cache) as job:
        assert "going on after call" in job.end()
    assert job.record() == wanted


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_killed_at_random_moments(tmp_path, cache, count):
    """Each run saves as often as it calls: before its first save, between two or within one."""
    wanted = undisturbed(tmp_path / "first", count=count, **cache)
    assert undisturbed(tmp_path / "again", count=count, **cache) == wanted
    # A kill in the middle of a write would leave half an entry in JAX's cache.
    given = {"count": count, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9", **cache}
    random = np.random.default_rng(count)
    for number, call in enumerate(random.integers(CALLS, size=10)):
        folder = tmp_path / f"{number} at {call}"
        with Job(folder, "--save-every=1", **given) as job:
            job.reach(f"call {call}:" if call else "")
            time.sleep(random.uniform(0.0, 0.1))
        left = sorted(path.name for path in job.steps.glob("*"))
        with Job(folder, "--save-every=1", **given) as job:
            job.end()
        print(f"killed {folder.name}, it left {left}")
        assert job.record() == wanted


SAVER = """
import sys
import jax.numpy as jnp, numpy as np
from boostax.checkpoint import Checkpointer

with Checkpointer(sys.argv[1], keep=2) as checkpointer:
    for step in range(1, 100):
        noise = np.random.default_rng(step).standard_normal(8_000_000, np.float32)
        checkpointer.save(step, jnp.asarray(noise), {"n": step})
        print("writing", flush=True)
"""


@pytest.mark.parametrize("delay", lanes([0.0, 0.02, 0.1], [0.02]))
def test_killed_during_a_save(tmp_path, delay):
    steps = tmp_path / "steps"
    with processes.Processes(["-c", SAVER, steps], 1, tmp_path) as saver:
        saver.reach("writing\n" * 3)
        time.sleep(delay)
    leftovers = list(steps.glob("*.orbax-checkpoint-tmp"))
    assert leftovers or delay
    with Checkpointer(steps) as checkpointer:
        assert not any(path.exists() for path in leftovers)
        latest = checkpointer.latest()
        assert latest >= 2
        state, meta = checkpointer.restore(jnp.zeros(8_000_000))
        checkpointer.save(latest + 1, state, meta)
        assert checkpointer.latest() == latest + 1
    assert meta == {"n": latest}
    noise = np.random.default_rng(latest).standard_normal(8_000_000, np.float32)
    np.testing.assert_array_equal(state, noise)
