"""A run killed on FSDP goes on as ZeRO-1 and, killed again, replicated: nothing is lost.

Three processes with eight, four and two devices; SIGKILL ends the first two, and every checkpoint
that they left lies within a window. Beside them one process makes the same moves undisturbed.
"""

import json
import pathlib
import signal
import time

import numpy as np
import pytest
from boostax.run.cluster.start import ADDRESS, COUNT, INDEX
from boostax.run.writers import JsonLines
from processes import PATIENCE, Processes
from workers import moves
from workers.moves import INPUTS, LEGS, OUTPUTS, REDUCTIONS, ROWS, SPOILT, WINDOW

WORKER = pathlib.Path(moves.__file__)
RESIDUAL, SUMS = ".residual.local", ".window.local.grads"
REDUCED, OPEN = ".reduced", ".opt_state.inner_state.micro_step"
# Calls of the last leg: its end finds a window open, too.
LAST = 2 * WINDOW + 1
ALONE = dict.fromkeys((ADDRESS, COUNT, INDEX), "")

pytestmark = pytest.mark.xdist_group("moves")


class Leg(Processes):
    """One process of a run."""

    def __init__(self, folder, name, *arguments):
        command = [str(WORKER), str(folder), *map(str, arguments)]
        (folder / name).mkdir()
        super().__init__(command, 1, folder / name, **ALONE)

    def finish(self):
        assert self.end() == [0], self.printed()

    def kill(self, reached):
        """SIGKILL as soon as what is awaited is there."""
        deadline = time.monotonic() + PATIENCE
        while not reached():
            assert self.running[0].poll() is None, self.printed()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        self.running[0].send_signal(signal.SIGKILL)
        assert self.end() == [-signal.SIGKILL]


def checkpoints(folder):
    return [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()]


def ahead(folder, log, old):
    """Whether a leg that began at ``old`` has two checkpoints, and calls beyond the last."""
    new = max(checkpoints(folder), default=0)
    return new > old + WINDOW and JsonLines.read(log)[-1]["call"] >= new


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Run:
    """What the three processes left, and the undisturbed one.

    ``moves`` are the calls after which the run went on elsewhere; ``history`` has a line for each
    call that counts, which are not those that a kill undid.
    """

    def __init__(self, folder, reduction):
        self.reduction, self.folder = reduction, folder
        logs = [folder / f"log-{number}.jsonl" for number in range(len(LEGS))]
        self.moves = []
        for number in (0, 1):
            old = max(checkpoints(folder), default=0)
            with Leg(folder, f"leg {number}", reduction, number) as leg:
                # Checkpoints of its own, and a call that none of them has.
                leg.kill(lambda old=old, log=logs[number]: ahead(folder, log, old))
            self.moves.append(max(checkpoints(folder)))
        self.ends = [*self.moves, self.moves[-1] + LAST]
        with (
            Leg(folder, "leg 2", reduction, 2, LAST) as leg,
            Leg(folder, "whole", reduction, "whole", *self.ends) as undisturbed,
        ):
            leg.finish()
            undisturbed.finish()
        rows = [JsonLines.read(log) for log in logs]
        done = [of[-1]["call"] + 1 for of in rows]
        print(f"{reduction}: killed after {done[:2]} calls, gone on after {self.moves}")
        self.history = [
            row for of, end in zip(rows, self.ends, strict=True) for row in of if row["call"] < end
        ]

    def state(self, name):
        with np.load(self.folder / name) as found:
            return dict(found)


pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=REDUCTIONS)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return Run(folder, request.param)


def gradient(line):
    """Of the loss over the whole batch, in float64 from the formula."""
    w, b = np.array(line["w"]), np.array(line["b"])
    x, y = (moves.batch(line["call"])[name].astype(np.float64) for name in "xy")
    found = np.tanh(x @ w + b)
    back = 2 * (found - y) * (1 - found**2) / found.size
    return {"w": x.T @ back, "b": back.sum(0)}


def total(lines):
    grads = [gradient(line) for line in lines]
    return {name: sum((g[name] for g in grads), np.zeros(())) for name in ("w", "b")}


def of_leaf(state, part, name):
    """What a part of the state has for a param, stacked: one array, or none."""
    found = [x for key, x in state.items() if key.endswith(f"{part}['{name}']")]
    return np.array(found, np.float64)


def rounding(history, state):
    """A bound on what rounding in f32 makes of the sums of gradients of a run.

    A gradient's element is a sum over the rows, of activations that are sums over the inputs; then
    come tanh and its derivative, the window, the mean over replicas, the residual, both shots of a
    reduction and the ledger: less than 32 roundings more. Each is of a number that is at most what
    the terms' magnitudes add up to, ``|x| * 2 |h - y| / (rows * outputs)`` with ``|h - y| < 2``,
    beside the largest residual.
    """
    batches = [moves.batch(line["call"])["x"] for line in history]
    terms = max(np.abs(x).sum(0).max() for x in batches) * 4 / (ROWS * OUTPUTS)
    held = max((np.abs(x).max() for name, x in state.items() if RESIDUAL in name), default=0.0)
    return len(history) * (ROWS + INPUTS + 32) * 2.0**-24 * (terms + held)


def missing(history, state):
    """How far what was reduced, held back and held open is from all gradients of the history."""
    opened = int(state[OPEN])
    closed = len(history) - opened
    assert closed % WINDOW == 0
    of_closed = total(history[:closed])
    of_open = total(history[closed:])
    errors = []
    for name in ("w", "b"):
        held = sum(x.mean(0) for x in of_leaf(state, RESIDUAL, name))
        (reduced,) = of_leaf(state, REDUCED, name)
        errors.append(np.abs(reduced + held - of_closed[name] / WINDOW).max())
        if opened:
            (sums,) = (x.mean(0) for x in of_leaf(state, SUMS, name))
            errors.append(np.abs(sums - of_open[name]).max())
    return max(errors)


def test_each_leg_goes_on_within_a_window(run):
    for number, moved in enumerate(run.moves):
        assert moved % WINDOW == LEGS[number].open > 0
    assert [line["call"] for line in run.history] == list(range(run.ends[-1]))


def test_losses_and_states_are_those_of_the_same_moves_without_a_kill(run):
    """To the bit, though one was restored from a checkpoint and the other moved by hand."""
    assert run.history == lines(run.folder / "nothing" / "log.jsonl")
    final, wanted = run.state("final.npz"), run.state("nothing/final.npz")
    assert final.keys() == wanted.keys()
    for name, x in final.items():
        np.testing.assert_array_equal(x, wanted[name], err_msg=name)
    losses = [line["loss"] for line in run.history]
    third = len(losses) // 3
    assert np.mean(losses[-third:]) < 0.9 * np.mean(losses[:third])


def test_a_move_averages_neighbours_and_leaves_the_rest_alone(run):
    """As ``reshard_state`` promises: half as many replicas, each the mean of two, to the bit."""
    for number, moved in enumerate(run.moves, 1):
        saved, resumed = run.state(f"saved-{moved}.npz"), run.state(f"resumed-{number}.npz")
        assert saved.keys() == resumed.keys()
        averaged = 0
        for name, x in saved.items():
            if ".local" in name:
                assert len(x) == LEGS[number - 1].devices
                pairs = x.astype(np.float64).reshape(-1, 2, *x.shape[1:])
                x, averaged = pairs.mean(1).astype(np.float32), averaged + 1
                assert np.abs(x).max() > 0, name
            np.testing.assert_array_equal(resumed[name], x, err_msg=name)
        # Windows of both leaves, and residuals of those that are compressed.
        assert averaged == {"mean": 2, "rank 2": 3}.get(run.reduction, 4)
        assert resumed[OPEN] == LEGS[number - 1].open


def test_no_gradient_is_lost_or_counted_twice(run):
    """All that was reduced and all that is held back are the gradients of the closed windows."""
    for name, calls in (
        ("resumed-1.npz", run.moves[0]),
        ("resumed-2.npz", run.moves[1]),
        ("final.npz", run.ends[-1]),
    ):
        state, history = run.state(name), run.history[:calls]
        off, bound = missing(history, state), rounding(history, state)
        print(f"{run.reduction}, {name}: off by {off:.1e}, rounding explains {bound:.1e}")
        assert off <= bound


@pytest.mark.parametrize("name", [name for name in SPOILT if name != "nothing"])
def test_a_move_that_loses_or_repeats_is_seen(run, name):
    history = lines(run.folder / name / "log.jsonl")
    state = run.state(f"{name}/final.npz")
    off, bound = missing(history, state), rounding(history, state)
    print(f"{run.reduction}, {name}: off by {off:.1e}, rounding explains {bound:.1e}")
    if "residual" in name and run.reduction == "mean":
        assert off <= bound  # A mean holds nothing back.
    else:
        assert off > 10 * bound
