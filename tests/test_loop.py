"""The loop never changes the numbers, never stalls the device, and stops when told to."""

import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax.run.checkpoint import Checkpointer
from boostax.run.history import History
from boostax.run.loop import fit
from boostax.run.writers import JsonLines, Progress, TensorBoard

EVERY = 3


def loss_fn(params, batch, *, key):
    noise = jax.random.normal(key, params["w"].shape)
    return jnp.mean((batch @ (params["w"] + 0.1 * noise) - 1.0) ** 2)


def batch(index):
    # A bad batch now and then: skips must resume like everything else.
    rows = np.random.default_rng(index).standard_normal((8, 4), np.float32)
    return np.full_like(rows, np.nan) if index % 7 == 5 else rows


def make_step():
    tx = boostax.dynamic_loss_scale(boostax.accumulate(optax.adamw(0.1), every=EVERY))
    return boostax.make_train_step(loss_fn, tx)


@pytest.fixture(scope="module")
def step():
    return make_step()


def start_state(step):
    return step.init({"w": jnp.zeros(4)}, key=jax.random.key(0))


def assert_same(actual, expected):
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        np.testing.assert_array_equal(left, right)


class Recorder:
    """A writer that keeps what it gets and may act on it."""

    def __init__(self, act=lambda step: None):
        self.rows, self.act = [], act

    def write(self, step, scalars):
        self.rows.append({"step": step, **scalars})
        self.act(step)

    def close(self):
        pass


@pytest.fixture(scope="module")
def whole(step):
    return fit(step, start_state(step), batch, steps=20)


@pytest.mark.parametrize("keep", [1, 3, 7, 20, 50])
def test_the_history_holds_the_last_rows_alone(step, whole, keep):
    writer = Recorder()
    result = fit(step, start_state(step), batch, steps=20, keep=keep, writers=[writer])
    kept = list(whole.history)[-keep:]
    # As text: among the losses are some that are no numbers.
    assert str(list(result.history)) == str(kept) and len(result.history) == len(kept)
    assert str(result.history[0]) == str(kept[0]) and str(result.history[-1]) == str(kept[-1])
    assert str(result.history[1:]) == str(kept[1:]) and len(writer.rows) == 20
    with pytest.raises(IndexError):
        result.history[keep]


def test_a_long_history_takes_no_more_than_twice_what_it_keeps():
    history = History(keep=100)
    for number in range(100_000):
        history.append({"step": number, "loss": 1.0} | ({"held_out": 2.0} if number % 7 else {}))
    taken = sum(sys.getsizeof(x) for x in vars(history).values())
    assert len(history) == 100 and taken < 100 * 2 * 8 * 8
    assert [row["step"] for row in history] == list(range(99_900, 100_000))


def test_rows_are_complete_ordered_and_equal_to_a_plain_loop(step, whole):
    state, losses = start_state(step), []
    for index in range(20):
        state, metrics = step(state, batch(index))
        losses.append(float(metrics["loss"]))
    assert [row["step"] for row in whole.history] == list(range(1, 21))
    np.testing.assert_array_equal([row["loss"] for row in whole.history], losses)
    assert whole.stopped_by is None and whole.step == 20
    assert whole.history[-1]["skipped_steps"] == 3


def test_the_last_window_is_closed_only_when_all_calls_are_done(step, whole):
    unflushed = fit(step, start_state(step), batch, steps=20, flush=False).state
    assert int(boostax.metrics(unflushed.opt_state)["micro_step"]) > 0
    assert int(boostax.metrics(whole.state.opt_state)["micro_step"]) == 0
    assert_same(whole.state, step.flush(unflushed))


@pytest.mark.parametrize("cut", [1, 4, 6, 19])
def test_resuming_from_any_call_ends_with_the_same_bits(step, whole, tmp_path, cut):
    class Killed(Exception):
        pass

    def kill(done):
        if done > cut:
            raise Killed

    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(Killed):
            fit(
                step,
                start_state(step),
                batch,
                steps=20,
                writers=[Recorder(kill)],
                checkpointer=checkpointer,
                checkpoint_every=cut,
                evaluate=lambda state: {"norm": float(jnp.sum(state.params["w"] ** 2))},
                evaluate_every=2,
            )
        start = checkpointer.latest()
        assert start == cut
        state, _ = checkpointer.restore(start_state(step))
        result = fit(step, state, batch, steps=20, start=start, checkpointer=checkpointer)
        assert checkpointer.latest() == 20
        assert_same(checkpointer.restore(start_state(step))[0], whole.state)
    assert_same(result.state, whole.state)
    assert [row["step"] for row in result.history] == list(range(cut + 1, 21))


def test_a_finished_run_does_nothing_more(step, whole):
    state = jax.tree.map(jnp.copy, whole.state)
    result = fit(step, state, batch, steps=20, start=20, evaluate=lambda state: 1 / 0)
    assert_same(result.state.params, whole.state.params)
    assert result.history == []


@pytest.mark.parametrize("name", ["skipped_in_a_row", "spikes_in_a_row"])
def test_a_run_ends_where_patience_does(name):
    """Its rows are written first; a count that falls back to zero ends nothing."""
    counts = [1, 2, 0, 1, 2, 3, 4]
    writer = Recorder()
    run = lambda state, index: (state, {name: counts[index]})  # noqa: E731
    match = rf"fit: {name} must be below patience=3, got 3 at call 6\. .* rows before"
    with pytest.raises(RuntimeError, match=match):
        fit(run, None, lambda index: index, steps=7, patience=3, writers=[writer])
    assert [row[name] for row in writer.rows] == counts[:6]
    assert len(fit(run, None, lambda index: index, steps=7, patience=5).history) == 7
    with pytest.raises(ValueError, match="fit: patience must be a positive integer"):
        fit(run, None, lambda index: index, steps=7, patience=0)


def test_metrics_are_read_after_the_next_call_is_dispatched():
    order = []

    class Scalar:
        def __init__(self, index):
            self.index = index

        def __float__(self):
            order.append(f"read {self.index}")
            return float(self.index)

    def step(state, index):
        order.append(f"call {index}")
        return state, {"loss": Scalar(index)}

    fit(step, None, lambda index: index, steps=3)
    assert order == ["call 0", "call 1", "read 0", "call 2", "read 1", "read 2"]


def test_rows_are_written_before_the_checkpoint_that_counts_them(step):
    order = []

    class Checkpoints:
        def save(self, done, state, meta):
            order.append((done, meta, len(recorder.rows)))

        def wait(self):
            order.append("wait")

    recorder = Recorder()
    fit(
        step,
        start_state(step),
        batch,
        steps=6,
        writers=[recorder],
        checkpointer=Checkpoints(),
        checkpoint_every=2,
        meta={"seed": 1},
    )
    meta = {"seed": 1}
    assert order == [(2, meta, 2), (4, meta, 4), (6, meta, 6), "wait"]


def test_evaluation_joins_the_row_of_its_call_and_sees_the_closed_window(step, whole):
    seen = {}

    def evaluate(state):
        seen[int(state.step)] = np.asarray(state.params["w"])
        return {"held_out_loss": float(state.step)}

    result = fit(step, start_state(step), batch, steps=20, evaluate=evaluate, evaluate_every=8)
    evaluated = [row["step"] for row in result.history if "held_out_loss" in row]
    assert evaluated == [8, 16, 20]
    np.testing.assert_array_equal(seen[20], whole.state.params["w"])


# --- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_puts_the_handlers_back(step, tmp_path, number):
    before = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
    killer = Recorder(lambda done: os.kill(os.getpid(), number) if done == 4 else None)
    with Checkpointer(tmp_path) as checkpointer:
        result = fit(
            step,
            start_state(step),
            batch,
            steps=20,
            writers=[killer],
            checkpointer=checkpointer,
            checkpoint_every=100,
        )
        assert checkpointer.latest() == result.step == 5
        assert_same(checkpointer.restore(start_state(step))[0], result.state)
    assert result.stopped_by == signal.Signals(number).name
    assert len(result.history) == 5
    assert [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_sigint_interrupts_at_once(step):
    handler = signal.getsignal(signal.SIGINT)

    def twice(done):
        if done == 2:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        fit(step, start_state(step), batch, steps=20, writers=[Recorder(twice)])
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_signal_in_the_last_call_is_a_complete_run(step, whole):
    killer = Recorder(lambda done: os.kill(os.getpid(), signal.SIGTERM) if done == 19 else None)
    result = fit(step, start_state(step), batch, steps=20, writers=[killer])
    assert result.stopped_by is None
    assert_same(result.state, whole.state)


def test_it_runs_outside_the_main_thread(step, whole):
    results = []
    thread = threading.Thread(
        target=lambda: results.append(fit(step, start_state(step), batch, steps=20))
    )
    thread.start()
    thread.join()
    assert_same(results[0].state, whole.state)


# --- arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"steps": 0}, "fit: steps must be a positive integer"),
        ({"steps": 2, "keep": 0}, "fit: keep must be a positive integer"),
        ({"steps": 3, "start": 4}, "fit: start must be from 0 to steps, 3, got 4"),
        ({"steps": 3, "start": -1}, "fit: start"),
        ({"steps": 3, "checkpoint_every": 0}, "fit: checkpoint_every"),
        ({"steps": 3, "evaluate_every": -2}, "fit: evaluate_every"),
    ],
)
def test_counts_out_of_range_are_refused(step, arguments, words):
    with pytest.raises(ValueError, match=words):
        fit(step, start_state(step), batch, **arguments)


def test_a_window_out_of_reach_is_refused_before_the_run():
    tx = optax.chain(boostax.accumulate(optax.sgd(0.1), every=2))
    step = boostax.make_train_step(lambda w, x: jnp.mean((w - x) ** 2), tx)
    state = step.init(jnp.zeros(4))
    with pytest.raises(ValueError, match=r"outside optax.chain.*flush=False"):
        fit(step, state, batch, steps=3)
    fit(step, state, lambda index: jnp.ones(4), steps=3, flush=False)


def test_a_plain_optimizer_has_no_window_to_close():
    step = boostax.make_train_step(lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(0.1))
    assert fit(step, step.init(jnp.zeros(4)), lambda index: jnp.ones(4), steps=3).step == 3


# --- writers


def test_json_lines_resume_without_duplicates_or_torn_lines(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    writer = JsonLines(path)
    for step in (1, 2, 3, 4):
        writer.write(step, {"loss": 1.0 / step})
    writer.write(5, {"loss": float("inf")})
    writer.close()
    assert '"loss": null' in path.read_text()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert np.isnan(JsonLines.read(path)[-1]["loss"])
    writer = JsonLines(path, start=3)
    writer.write(4, {"loss": 0.5})
    writer.close()
    rows = JsonLines.read(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[-1]["loss"] == 0.5
    JsonLines(path).close()
    assert JsonLines.read(path) == []


def test_json_lines_reach_the_disk_line_by_line(tmp_path):
    writer = JsonLines(tmp_path / "metrics.jsonl")
    writer.write(1, {"loss": 1.0})
    assert len(JsonLines.read(tmp_path / "metrics.jsonl")) == 1
    writer.close()


def test_tensorboard_writes_events(tmp_path):
    pytest.importorskip("tensorboardX")
    for start in (0, 5):
        writer = TensorBoard(tmp_path, start=start)
        writer.write(start + 1, {"loss": 0.25})
        writer.close()
    files = list(tmp_path.glob("events.out.tfevents*"))
    assert files and b"loss" in b"".join(file.read_bytes() for file in files)


def test_progress_prints_plain_lines_without_a_terminal(capsys):
    progress = Progress(3, every=0.0)
    for step in (1, 2, 3):
        progress.write(step, {"loss": 0.5, "loss_scale": 65536.0, "skipped_steps": 2.0})
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[-1].startswith("step 3/3  loss 0.5000  scale 65536  skipped 2  ")
    assert "steps/s" in lines[-1] and lines[-1].endswith("left")


def test_progress_is_sparing_and_always_shows_the_last_step(capsys):
    progress = Progress(50, every=3600.0)
    for step in range(1, 51):
        progress.write(step, {"loss": 0.5})
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/50", "50/50"]


def test_progress_draws_a_bar_on_a_terminal():
    from io import StringIO

    from rich.console import Console

    screen = StringIO()
    progress = Progress(4, start=2, console=Console(file=screen, force_terminal=True, width=100))
    for step in (3, 4):
        progress.write(step, {"loss": 0.125, "loss_scale": 8.0})
    progress.close()
    assert "4/4" in screen.getvalue() and "loss 0.1250  scale 8" in screen.getvalue()
