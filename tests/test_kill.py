"""A run that is killed or interrupted at any moment and resumed ends with the same bits."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import jax.numpy as jnp
import numpy as np
import processes
import pytest
from boostax.run.writers import JsonLines

from boostax.checkpoint import Checkpointer

# Everything with a state: a scale, an open window that 151 calls do not fill, two replicas.
OPTIONS = (
    "--steps 151 --width 16 --batch-size 16 --model conv --accumulate 3 "
    "--devices 2 --evaluate-every 50"
).split()
PATIENCE = 120.0


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(tmp_path_factory.mktemp("cache"))
    return processes.environment() | {"JAX_COMPILATION_CACHE_DIR": cache}


class Run:
    """One process of a training run."""

    def __init__(self, output, environment, *options):
        self.metrics = output / "metrics.jsonl"
        command = [sys.executable, "-m", "boostax.run.cli", "train", "digits", *OPTIONS, *options]
        # No pipe: while nobody reads it, one that is full would hold the run.
        self.printed = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*command, "--output", str(output), "--resume"],
            env=environment,
            stdout=self.printed,
            stderr=subprocess.STDOUT,
        )

    def reach(self, call):
        """Wait until a call has been reported."""
        deadline = time.monotonic() + PATIENCE
        while len(JsonLines.read(self.metrics)) < call:
            assert self.process.poll() is None, self.end()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return self

    def end(self, number=None):
        """Send a signal if one is given and wait: the exit code and what was printed."""
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(timeout=PATIENCE)
        with self.printed:
            self.printed.seek(0)
            return code, self.printed.read()


def results(output):
    summary = json.loads((output / "summary.json").read_text())
    rows = [
        {name: value for name, value in row.items() if not name.startswith("held_out")}
        for row in JsonLines.read(output / "metrics.jsonl")
    ]
    return summary["params_sha256"], summary["held_out_loss"], rows


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, environment):
    output = tmp_path_factory.mktemp("whole")
    code, printed = Run(output, environment).end()
    assert code == 0, printed
    assert "Warning" not in printed
    found = results(output)
    assert found[2][-1]["micro_step"] == 1
    return found


@pytest.mark.long
@pytest.mark.parametrize("moments", [(15,), (2, 15, 35)])
def test_killed_at_several_moments(tmp_path, environment, uninterrupted, moments):
    # A save at every third call: most of these moments lie within one.
    for call in moments:
        run = Run(tmp_path, environment, "--checkpoint-every", "3").reach(call)
        code, _ = run.end(signal.SIGKILL)
        assert code == -signal.SIGKILL
    code, printed = Run(tmp_path, environment, "--checkpoint-every", "100").end()
    assert code == 0, printed
    assert "resuming after call" in printed
    assert results(tmp_path) == uninterrupted


def test_signals_save_exit_cleanly_and_resume(tmp_path, environment, uninterrupted):
    for call, number in ((20, signal.SIGTERM), (60, signal.SIGINT)):
        run = Run(tmp_path, environment, "--checkpoint-every", "1000").reach(call)
        code, printed = run.end(number)
        assert code == 0, printed
        assert f"Stopped by {number.name} after call" in printed
        assert "Go on with: boostax train digits" in printed and "--resume" in printed
        assert max(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) >= call
    code, printed = Run(tmp_path, environment).end()
    assert code == 0, printed
    assert results(tmp_path) == uninterrupted


SAVER = """
import sys
import jax.numpy as jnp, numpy as np
from boostax.checkpoint import Checkpointer

with Checkpointer(sys.argv[1], keep=2) as checkpointer:
    for step in range(1, 100):
        noise = np.random.default_rng(step).standard_normal((2, 4_000_000), np.float32)
        state = {"a": jnp.asarray(noise[0]), "b": jnp.asarray(noise[1])}
        checkpointer.save(step, state, {"n": step})
        print("writing", flush=True)
"""


@pytest.mark.parametrize(
    "delay",
    [pytest.param(0.0, marks=pytest.mark.long), 0.02, pytest.param(0.1, marks=pytest.mark.long)],
)
def test_killed_during_a_save(tmp_path, environment, delay):
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    for _ in range(3):
        assert process.stdout.readline() == "writing\n"
    time.sleep(delay)
    process.kill()
    process.communicate(timeout=PATIENCE)

    leftovers = list(tmp_path.glob("*.orbax-checkpoint-tmp"))
    assert leftovers or delay
    target = {"a": jnp.zeros(4_000_000), "b": jnp.zeros(4_000_000)}
    with Checkpointer(tmp_path) as checkpointer:
        assert not any(path.exists() for path in leftovers)
        latest = checkpointer.latest()
        assert latest >= 2
        state, meta = checkpointer.restore(target)
        checkpointer.save(latest + 1, state, meta)
        assert checkpointer.latest() == latest + 1
    assert meta == {"n": latest}
    noise = np.random.default_rng(latest).standard_normal((2, 4_000_000), np.float32)
    np.testing.assert_array_equal(state["a"], noise[0])
    np.testing.assert_array_equal(state["b"], noise[1])
