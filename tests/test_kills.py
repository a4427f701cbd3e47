"""Kills -9 of a whole job at random moments: resumed, it ends in the same state to the bit."""

import collections
import json
import os
import pathlib
import resource
import time

import jax
import numpy as np
import pytest
from boostax.run.cli.build import build
from boostax.run.cli.recipe import Recipe
from boostax.run.cluster.start import ADDRESS, COUNT, INDEX
from boostax.run.writers import JsonLines
from processes import Processes
from workloads import DigitsConfig, digits

from boostax.checkpoint import Checkpointer

KILLS = 10
CALLS = 25
# A state of everything: a scale that overflows in float16, windows of which the last stays open
# until the end, residuals of each replica, frozen moments; and as many saves as calls.
TASK = {"model": "mlp", "width": 32, "batch_size": 16, "dtype": "float16"}
RECIPE = {
    "steps": CALLS,
    "learning_rate": 0.5,
    "clip": 0.0,
    "weight_decay": 0.0,
    "accumulate": 2,
    "devices": 2,
    "reduce": "top-k",
    "density": 0.05,
    "freeze": "continuous",
    "freeze_groups": 2,
    "freeze_fraction": 0.4,
}
OFTEN = {"checkpoint_every": 1, "evaluate_every": 10}
BEFORE, BETWEEN, WITHIN = "before the first checkpoint", "between saves", "in a save"


class Job(Processes):
    """The training run as one process of two devices or two processes of one device each."""

    def __init__(self, count, output, cache, **variables):
        output.mkdir(exist_ok=True)
        if count == 1:
            # As a user starts it: alone, not as the only member of a cluster.
            variables |= dict.fromkeys((ADDRESS, COUNT, INDEX), "")
        options = [
            f"--{name.replace('_', '-')}={value}" for name, value in (TASK | RECIPE | OFTEN).items()
        ]
        command = ["-m", "boostax.run.cli", "train", "digits", *options, "--resume"]
        super().__init__(
            [*command, f"--output={output}"],
            count,
            output,
            JAX_COMPILATION_CACHE_DIR=str(cache),
            **variables,
        )

    def finish(self):
        """Wait for it to end well: what the first process printed."""
        codes = self.end()
        assert codes == [0] * len(codes), [self.printed(index) for index in range(len(codes))]
        assert "Warning" not in self.printed()
        return self.printed()

    def spent(self):
        """Seconds of processor time, or ``None`` if a process has ended."""
        ticks = 0
        for process in self.running:
            if process.poll() is not None:
                return None
            fields = (
                pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            )
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def kill(self, moment):
        """Kill all at once after so much processor time: whether they were still running then."""
        while (spent := self.spent()) is not None and spent < moment:
            time.sleep(0.002)
        for process in self.running:
            process.kill()
        return spent is not None and all(code < 0 for code in self.end())


def record(output):
    """Shape, dtype and checksum of every leaf of the last checkpoint, and what lies beside it."""
    (path,) = (output / "checkpoints" / str(CALLS) / "record").glob("metadata")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def target():
    """A state to restore into."""
    return build(digits(DigitsConfig(**TASK)), Recipe(**RECIPE)).init(0)


def restored(output, target):
    """The bytes of every leaf of the last checkpoint, those of each replica included."""
    with Checkpointer(output / "checkpoints") as checkpointer:
        assert checkpointer.latest() == CALLS
        state, _ = checkpointer.restore(target)
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaves[jax.tree_util.keystr(path)] = np.asarray(leaf).tobytes()
    return leaves


def results(output, target):
    rows = (output / "metrics.jsonl").read_text()
    summary = json.loads((output / "summary.json").read_text())
    return record(output), restored(output, target), rows, summary["params_sha256"]


def where(output):
    """What a killed run was at, by what it left."""
    steps = list((output / "checkpoints").glob("*"))
    if any(path.name.endswith(".orbax-checkpoint-tmp") for path in steps):
        return WITHIN
    return BETWEEN if any(path.name.isdigit() for path in steps) else BEFORE


def processor_time():
    """Seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def uninterrupted(processes, folder, cache, target):
    """The results of a run that nobody disturbs, and the time that it takes once compiled."""
    found, seconds = [], 0.0
    for name in ("first", "again"):
        begun = processor_time()
        with Job(processes, folder / name, cache) as job:
            job.finish()
        seconds = processor_time() - begun
        found.append(results(folder / name, target))
    assert found[0] == found[1]
    rows = JsonLines.read(folder / "first" / "metrics.jsonl")
    assert rows[-1]["skipped_steps"] > 0 and rows[-1]["loss_scale"] < 2.0**16
    assert rows[-1]["micro_step"] == 1.0
    assert {row["frozen_groups"] for row in rows} == {0.0, 1.0}
    return found[0], seconds


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_random_moments(tmp_path, target, processes):
    cache = tmp_path / "cache"
    wanted, seconds = uninterrupted(processes, tmp_path, cache, target)
    # A kill in the middle of a write would leave half an entry in JAX's cache.
    reading = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
    fell = collections.Counter()
    # Uniform over the processor time of a run, its start and its saves included: the time on the
    # clock depends on what else the machine does.
    for number, share in enumerate(np.random.default_rng(processes).uniform(size=KILLS)):
        moment, alive, output = share * seconds, False, pathlib.Path()
        while not alive:
            # A run that took less than the one that was timed, and was over: an earlier moment.
            output = tmp_path / f"{number} after {moment:.2f}"
            with Job(processes, output, cache, **reading) as job:
                alive = job.kill(moment)
            moment *= 0.9
        place, done = where(output), len(JsonLines.read(output / "metrics.jsonl"))
        fell[place] += 1
        with Job(processes, output, cache, **reading) as job:
            job.finish()
        equal = results(output, target) == wanted
        print(f"killed {output.name} s of {seconds:.1f}, {done} calls done, {place}: {equal=}")
        assert equal
    leaves = len(wanted[1])
    print(f"{processes} processes, {KILLS} kills, {leaves} leaves each, equal to the bit: {fell}")
