# SPDX-License-Identifier: Apache-2.0
"""A limit on the time without progress: what hangs on one host ends on all, with a message."""

import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, Self, TextIO

from boostax._core import checks
from boostax.run.cluster.board import ServiceBoard, Standing, View
from boostax.run.cluster.verdict import report

# How long one that gives up waits for the others to write their messages: once it is gone, JAX
# aborts them. The last of them is rank 0, which keeps the service.
_FAREWELL = 3.0
_SERVICE_STAYS = 1.0
# A stream nobody reads blocks whoever writes to it; the process ends all the same.
_LAST_RESORT = 10.0


class Watchdog:
    """Ends the process when nothing has moved for too long, and says what did not.

    A collective that waits for a peer waits forever: the peer's heartbeat goes on, or comes from a
    machine that no longer answers, and nothing can interrupt it from inside. So a thread beside the
    loop counts the seconds since the loop last told of progress. Past the limit it writes where
    each rank stands and which of them the others wait for, and the process exits at once. A rank
    that gives up takes the others with it, each with its own message.

    Ranks tell each other where they are over the ``board``, from a thread of its own: the limit
    holds where the board does not answer. A time in which the process itself was stopped (Ctrl-Z, a
    paused machine) does not count. A call into native code that keeps Python's lock stops this
    thread too; then the peers notice, by their own limit, and not the process itself.

    Args:
      limit: seconds without progress, in a call or between two.
      first_limit: seconds until the first call has finished, which compiles, and in `allow`; ten
        times the limit by default.
      exit_code: of the process; 75 is what BSD calls a failure that may pass.
      board: of the run, from ``service_board``; ``None`` for a process alone.
      exit: what ends the process; it must not return.
      stream: where the message goes, standard error by default.
      clock: seconds, never going back.

    Raises:
      ValueError, TypeError: a limit that is not positive, a first limit below it, or a code that is
        none.

    Example:
      >>> from boostax.run.cluster.watchdog import Watchdog
      >>> with Watchdog(limit=600.0) as watchdog:
      ...     for step in (1, 2):
      ...         watchdog.begin(step)
      ...         watchdog.done(step)
      ...     with watchdog.allow(1800.0, "saving"):
      ...         pass

    **Cost**: two threads that wake ten times in a limit, at least once a second; per exchange two
    messages to process 0. With more than 100 processes they speak less often.
    """

    def __init__(
        self,
        limit: float,
        *,
        first_limit: float | None = None,
        exit_code: int = 75,
        board: ServiceBoard | None = None,
        exit: Callable[[int], Any] = os._exit,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        hint = "It is how many seconds may pass without progress: several times those of a call."
        checks.number("Watchdog", "limit", limit, "a positive number", lambda s: s > 0, hint)
        first = 10 * limit if first_limit is None else first_limit
        hint = "The first call compiles, so it takes longer than others."
        allowed = f"at least the limit, {limit:g}"
        checks.number("Watchdog", "first_limit", first, allowed, lambda s: s >= limit, hint)
        hint = "0 would say that all went well."
        checks.positive_int("Watchdog", "exit_code", exit_code, hint)
        checks.require("Watchdog", "exit_code", exit_code, "up to 255", exit_code <= 255, hint)
        self._limit, self._first_limit = limit, first
        self._code, self._exit, self._stream, self._clock = exit_code, exit, stream, clock
        self._board = board
        self._rank, self._count = (0, 1) if board is None else (board.rank, board.count)
        self._tick = min(max(1.0, self._count / 100), limit / 10)
        # What the others said last, and when that was heard.
        peers = (rank for rank in range(self._count) if rank != self._rank)
        self._heard = dict.fromkeys(peers, (Standing(), -math.inf))
        self._lock = threading.RLock()
        self._standing = Standing()
        self._warm = False
        self._long: list[tuple[float, str]] = []
        self._moved = self._looked = self._answered = clock()
        self._trouble = ""
        self._loop = threading.get_ident()
        self._stopping, self._wake = threading.Event(), threading.Event()
        self._timer = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._talker = threading.Thread(target=self._talk, name="watchdog-board", daemon=True)

    def __enter__(self) -> Self:
        self._moved = self._looked = self._answered = self._clock()
        self._loop = threading.get_ident()
        self._timer.start()
        if self._board is not None:
            self._talker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: object) -> None:
        if self._standing.over:
            # An error here is a peer's exit seen from the loop; the exit code says what it was.
            self._timer.join()
        self._say(left=True, place="" if kind is None else kind.__name__)
        self._stopping.set()
        self._wake.set()
        self._timer.join()
        if self._talker.is_alive():
            # The last line says that this rank has left. It is not worth a hang.
            self._talker.join(2.0)

    def begin(self, step: int) -> None:
        """The host has all for call number ``step`` and makes it next."""
        with self._lock:
            before = self._standing.finished
            finished = step - 1 if before is None else before
            self._move(begun=step, finished=finished, calling=True)

    def between(self) -> None:
        """The host is out of the call and makes the next one ready; `done` says so as well."""
        self._move(calling=False)

    def done(self, step: int) -> None:
        """The device has finished call number ``step``, and the host waits for none."""
        with self._lock:
            self._warm = True
            self._move(finished=step, calling=False)

    def _say(self, **standing: Any) -> None:
        with self._lock:
            self._standing = self._standing._replace(**standing)

    def _move(self, **standing: Any) -> None:
        with self._lock:
            self._say(**standing)
            self._moved = self._clock()

    @contextmanager
    def allow(self, seconds: float | None = None, what: str = "a long task") -> Generator[None]:
        """Give what is known to be long a limit of its own, ``math.inf`` for none.

        Peers that wait for this rank meanwhile wait as long as it may take.

        Args:
          seconds: the limit inside; the first limit by default. A shorter one than holds already
            changes nothing.
          what: its name in the messages of all ranks.
        """
        entry = (self._first_limit if seconds is None else seconds, what)
        with self._lock:
            self._long.append(entry)
            self._move()
        try:
            yield
        finally:
            with self._lock:
                self._long.remove(entry)
                self._move()

    def due(self) -> bool:
        """Whether it is time to give up; to be asked more often than four times in a limit."""
        with self._lock:
            now = self._clock()
            stopped = now - self._looked - self._limit / 4
            if stopped > 0:
                self._moved = min(now, self._moved + stopped)
                self._answered = min(now, self._answered + stopped)
                self._heard = {
                    rank: (standing, min(now, at + stopped))
                    for rank, (standing, at) in self._heard.items()
                }
            self._looked = now
            others = self._peers(now)
            if any(other.standing.over for other in others):
                return True
            return now - self._moved >= self._allowed() and not any(
                other.silence < min(self._limit, other.standing.allowance)
                for other in others
                if not other.standing.left
            )

    def exchange(self) -> None:
        """Tell the board where this rank stands and read where the others do."""
        assert self._board is not None
        with self._lock:
            self._say(beat=self._standing.beat + 1)
            line = json.dumps(self._now())
        try:
            self._board.publish(line)
            lines = self._board.read()
        except Exception as error:
            with self._lock:
                self._trouble = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return
        with self._lock:
            self._answered, self._trouble = self._clock(), ""
            for rank in self._heard.keys() & lines.keys():
                standing = Standing(*json.loads(lines[rank]))
                if standing.beat != self._heard[rank][0].beat:
                    self._heard[rank] = standing, self._answered

    def message(self) -> str:
        """Where all ranks stand, what follows from it, and where the loop of this one is."""
        with self._lock:
            now = self._clock()
            views = [View(self._rank, self._now(), 0.0), *self._peers(now)]
            unanswered = now - self._answered if self._count > 1 else 0.0
            allowed, trouble = self._allowed(), self._trouble
            text = report(views, self._rank, self._limit, allowed, unanswered, trouble)
        frame = sys._current_frames().get(self._loop)
        where = "".join(traceback.format_stack(frame)) if frame else "  (it has ended)\n"
        return (
            f"boostax watchdog: {text}\nThe loop of rank {self._rank} is here:\n{where}"
            f"Rank {self._rank} ends with exit code {self._code}.\n"
        )

    def _peers(self, now: float) -> list[View]:
        return [View(rank, said, now - at) for rank, (said, at) in self._heard.items()]

    def _allowed(self) -> float:
        least = self._limit if self._warm else self._first_limit
        return max([least, *(seconds for seconds, _ in self._long)])

    def _now(self) -> Standing:
        quiet = self._clock() - self._moved
        standing = self._standing._replace(quiet=quiet)
        if standing.left or (self._warm and not self._long):
            return standing
        place = self._long[-1][1] if self._long else ""
        return standing._replace(allowance=max(0.0, self._allowed() - quiet), place=place)

    def _watch(self) -> None:
        while not self._stopping.wait(self._tick):
            if self.due():
                self._end()
                return

    def _talk(self) -> None:
        while not self._stopping.is_set():
            self.exchange()
            self._wake.wait(self._tick)
            self._wake.clear()
        self.exchange()

    def _end(self) -> None:
        resort = threading.Timer(_LAST_RESORT, self._exit, (self._code,))
        resort.daemon = True
        resort.start()
        text = self.message()
        self._say(over=True)
        self._wake.set()
        with suppress(OSError, ValueError):
            stream = sys.stderr if self._stream is None else self._stream
            stream.write(text)
            stream.flush()
            sys.stdout.flush()
        if self._board is not None:
            until = self._clock() + _FAREWELL
            while self._clock() < until and self._awaited():
                time.sleep(self._tick / 10)
            time.sleep(_SERVICE_STAYS if self._rank == 0 else 0.0)
        self._exit(self._code)
        resort.cancel()

    def _awaited(self) -> bool:
        with self._lock:
            now = self._clock()
            if now - self._answered > self._limit / 2:
                return False
            return any(
                other.silence < self._limit / 2 and not (other.standing.over or other.standing.left)
                for other in self._peers(now)
            )
