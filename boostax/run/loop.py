# SPDX-License-Identifier: Apache-2.0
"""The loop around a train step: metrics that never stall it, checkpoints, a clean stop."""

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from boostax._core import checks
from boostax.run.cluster.board import service_board
from boostax.run.cluster.end import PeerLost
from boostax.run.cluster.watchdog import Watchdog
from boostax.run.history import History, Row
from boostax.run.signals import handled
from boostax.run.writers import Writer

if TYPE_CHECKING:
    from boostax.run.checkpoint import Checkpointer

PyTree = Any


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What ``fit`` returns.

    Attributes:
      state: the last state; with the run complete, its accumulation window is closed.
      step: calls done, those before ``start`` included.
      history: one row per call made here: ``{"step": ..., "loss": ..., ...}``, and the evaluation's
        scalars where there was one; the last of them alone if ``fit`` was told how many to keep.
      stopped_by: ``"SIGINT"`` or ``"SIGTERM"`` if that ended it early, else None.
    """

    state: PyTree
    step: int
    history: Sequence[Row]
    stopped_by: str | None


def fit(
    step: Callable[[PyTree, PyTree], tuple[PyTree, Mapping[str, Any]]],
    state: PyTree,
    batch: Callable[[int], PyTree],
    *,
    steps: int,
    start: int = 0,
    writers: Iterable[Writer] = (),
    checkpointer: "Checkpointer | None" = None,
    checkpoint_every: int | None = None,
    meta: dict[str, Any] | None = None,
    evaluate: Callable[[PyTree], Mapping[str, float]] | None = None,
    evaluate_every: int | None = None,
    flush: bool = True,
    limit: float | None = None,
    patience: int | None = None,
    keep: int | None = None,
) -> FitResult:
    """Call ``step`` on ``batch(start)``, ..., ``batch(steps - 1)``.

    Neither logging, evaluation nor checkpoints change the numbers: a run that is killed at any
    moment and resumed from its last checkpoint ends with the same bits. For that ``batch`` must
    depend on its index alone, and randomness come from a key in the state.

    The metrics of a call are read after the next one is dispatched, so the device never waits for
    the host. On SIGINT and SIGTERM the running step is finished and the state saved; a second
    SIGINT raises KeyboardInterrupt at once. In a run of several processes JAX catches SIGTERM
    itself, and all of them stop after the same call; SIGINT is left alone there.

    Args:
      step: ``(state, batch) -> (state, dict of scalars)``, such as ``make_train_step`` returns; it
        may donate the state.
      state: to start from; a restored one with ``start``.
      batch: ``index -> batch``; the index counts calls from 0.
      steps: calls of the whole run, those before ``start`` included.
      start: calls already done.
      writers: each gets ``write(step, scalars)`` once per call; the caller closes them.
      checkpointer: where to save, under the number of calls done, when all are done or at a stop.
      checkpoint_every: save after every so many calls as well.
      meta: saved with each checkpoint.
      evaluate: ``state -> scalars``, which join the row of the call before it. Must not donate.
      evaluate_every: after how many calls to evaluate; also at the end of a complete run.
      flush: close a partial accumulation window (``step.flush``) when all calls are done.
      limit: seconds that a call may take, and the time between two, before the process ends and
        says who is stuck (``boostax.run.cluster.Watchdog``); with several processes on each of
        them. The first call, evaluations and saves get ten times as long. Choose it above the time
        that a step takes to compile if the schedule of a ``scheduled_freeze`` compiles more of
        them.
      patience: end the run with an error when a metric that counts steps refused one after the
        other reaches this: ``skipped_in_a_row`` of a loss scaler, ``spikes_in_a_row``. Inside a
        compiled step nothing raises, and a gate never gives in.
      keep: how many of the last rows ``history`` holds (default: all). A row of ten scalars takes
        100 bytes, so a run of many million calls with a writer should not keep them all.

    Returns:
      A `FitResult`.

    Raises:
      ValueError, TypeError: for counts out of range, or a window that ``step.flush`` cannot reach.
      RuntimeError: ``patience`` is at an end; what was saved before stands.
      PeerLost: a collective failed because another process has ended.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> from boostax.run.loop import fit
      >>> loss = lambda w, x: jnp.mean((w - x) ** 2)
      >>> step = boostax.make_train_step(loss, boostax.accumulate(optax.sgd(0.25), every=2))
      >>> result = fit(step, step.init(jnp.float32(0.0)), lambda i: jnp.full(8, 1.0), steps=3)
      >>> float(result.state.params), [row["loss"] for row in result.history]
      (0.75, [1.0, 1.0, 0.25])

    **Cost**: one fetch of the scalars per call.
    """
    checks.positive_int("fit", "steps", steps, "It counts the calls of the whole run.")
    for name, value in (("checkpoint_every", checkpoint_every), ("evaluate_every", evaluate_every)):
        if value is not None:
            checks.positive_int("fit", name, value, "It counts calls; None leaves it to the end.")
    if patience is not None:
        checks.positive_int("fit", "patience", patience, "It counts refused steps; None waits.")
    if keep is not None:
        checks.positive_int("fit", "keep", keep, "It counts rows; None keeps all.")
    allowed, hint = f"from 0 to steps, {steps}", "It is how many calls are done already."
    checks.require("fit", "start", start, allowed, 0 <= start <= steps, hint)
    close_window = _flusher(step, state) if flush else None
    # Without a limit it takes notes, and nobody reads them.
    watchdog = Watchdog(1.0) if limit is None else Watchdog(limit, board=service_board())
    writers, history = tuple(writers), History(keep)
    pending: list[tuple[int, Mapping[str, Any]]] = []
    done, saved, stopped_by = start, start, None

    def settle(more: Mapping[str, float] | None = None) -> None:
        """Make the metrics of the pending call a row."""
        if pending:
            call, metrics = pending.pop()
            scalars = {name: float(x) for name, x in jax.device_get(dict(metrics)).items()}
            watchdog.done(call)
            scalars |= more or {}
            history.append({"step": call, **scalars})
            for writer in writers:
                writer.write(call, scalars)
            _require_progress(call, scalars, patience)

    def save() -> None:
        nonlocal saved
        if checkpointer is not None and saved != done:
            # The rows go out first: a resumed run does not repeat them.
            settle()
            with watchdog.allow(what="saving"):
                checkpointer.save(done, state, meta)
            saved = done

    def judge() -> None:
        if evaluate is not None:
            with watchdog.allow(what="evaluation"):
                settle(evaluate(state))

    @contextlib.contextmanager
    def losing_peers() -> Generator[None]:
        """With several processes, a failed collective means that one of them is gone."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() == 1:
                raise
            where = "" if checkpointer is None else f" {checkpointer.remaining()}"
            raise PeerLost(
                f"fit: call {done + 1} failed in process {jax.process_index()} of "
                f"{jax.process_count()}: {str(error).splitlines()[0][:300]}. It does when another "
                f"process has ended: see what that one printed.{where}"
            ) from error

    watching = contextlib.nullcontext() if limit is None else watchdog
    with watching, losing_peers(), _signals() as received:
        while done < steps:
            data = batch(done)
            watchdog.begin(done + 1)
            state, metrics = step(state, data)
            done += 1
            # One call late: the next one is under way.
            settle()
            pending.append((done, metrics))
            watchdog.between()
            stopped_by = received(done)
            if done == steps or stopped_by:
                break
            if evaluate_every and done % evaluate_every == 0:
                judge()
            if checkpoint_every and done % checkpoint_every == 0:
                save()
        if done == steps:
            stopped_by = None
            with watchdog.allow(what="closing the window"):
                state = state if close_window is None else close_window(state)
            if done > start:
                judge()
        settle()
        save()
        if checkpointer is not None:
            with watchdog.allow(what="saving"):
                checkpointer.wait()
    return FitResult(state, done, history, stopped_by)


def _require_progress(call: int, scalars: Mapping[str, float], patience: int | None) -> None:
    """Raise where a gate has refused as many steps as that, one after the other."""
    for name, count in scalars.items():
        if patience is not None and "_in_a_row" in name and count >= patience:
            raise RuntimeError(
                f"fit: {name} must be below patience={patience}, got {count:.0f} at call {call}. "
                "Every step is refused: the rows before tell the scale, or the value and its limit."
            )


@contextlib.contextmanager
def _signals() -> Generator[Callable[[int], str | None]]:
    """Note SIGINT and SIGTERM instead of dying of them: which came, to be asked after each call."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        # JAX listens, so that all processes stop at one call.
        stops = multihost_utils.reached_preemption_sync_point
        yield lambda done: "SIGTERM" if stops(done) else None
        return
    came: list[str] = []

    def note(number: int) -> None:
        if number == signal.SIGINT and came[-1:] == ["SIGINT"]:
            raise KeyboardInterrupt
        came.append(signal.Signals(number).name)

    with handled(note):
        yield lambda done: came[-1] if came else None


def _flusher(step: Any, state: PyTree) -> Callable[[PyTree], PyTree] | None:
    close_window = getattr(step, "flush", None)
    if close_window is None:
        return None
    try:
        # A window out of reach is better found before the run than after it.
        jax.eval_shape(close_window, state)
    except ValueError as error:
        raise ValueError(f"fit: {error} Or pass flush=False and drop a partial window.") from error
    return close_window
