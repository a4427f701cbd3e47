# SPDX-License-Identifier: Apache-2.0
"""Several processes of one command on this machine, which start, stop and end together."""

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress

from boostax._core import checks
from boostax.run.signals import handled

_POLL = 0.02
_LAST_WORDS = 5.0

# Runs before the command, in the process that becomes it: Linux kills that when its parent is gone,
# however the parent went. It is a program of its own because code between fork and exec is not safe
# beside JAX's threads. The parent may have gone before the wish was heard.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(137)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def launch(
    command: Sequence[str],
    processes: int,
    *,
    port: int | None = None,
    grace: float = 20.0,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run ``processes`` copies of a command that find each other through ``jax.distributed``.

    Each finds ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` in its
    environment. Process 0 writes where this one does; every line of the others goes to standard
    error behind ``[1]``, their rank. None reads standard input.

    SIGINT and SIGTERM here reach each process once, as SIGTERM, which JAX takes for the wish to
    stop after a common call; then this waits. A second SIGINT kills them. Ctrl-C in a terminal does
    not reach them on its own: each has a session of its own.

    When one fails, the others have ``grace`` seconds to notice and end; then they get SIGTERM, and
    5 s later SIGKILL, with all that they started. None outlives this call; on Linux not even when
    this process is killed with SIGKILL (elsewhere they then run on, and so does, anywhere, what
    *they* have started).

    Args:
      command: program and arguments, such as ``[sys.executable, "train.py"]``.
      processes: how many.
      port: of the coordinator, on 127.0.0.1; a free one by default.
      grace: seconds.
      environment: variables on top of those of this process.

    Returns:
      0 if all ended with 0, otherwise the exit code of the first that failed: 128 + n if signal n
      ended it. One line on standard error says which it was and how the others ended.

    Raises:
      ValueError, TypeError: for a program that is not there, or numbers out of range.

    Example:
      >>> from boostax.run.cluster.launch import launch
      >>> launch(["sh", "-c", 'test "$JAX_NUM_PROCESSES" = 2'], processes=2)
      0

    **Cost**: a thread per process; on Linux 20 ms at the start for the interpreter that ties a
    process to this one.
    """
    checks.positive_int("launch", "processes", processes, "1 runs the command alone.")
    hint = "0 does not wait for the others when one has failed."
    checks.number("launch", "grace", grace, "a number of seconds", lambda s: s >= 0, hint)
    if port is not None and not 0 < checks.positive_int("launch", "port", port, "") < 2**16:
        hint = "None takes a free one."
        raise ValueError(checks.message("launch", "port", "below 65536", port, hint))
    given = {**os.environ, **(environment or {})}
    fits = bool(command) and shutil.which(command[0], path=given.get("PATH")) is not None
    hint = "Pass program and arguments, such as [sys.executable, 'train.py']."
    checks.require("launch", "command", list(command), "a program that is there", fits, hint)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{port or probe.getsockname()[1]}"
    given["JAX_COORDINATOR_ADDRESS"] = address
    # JAX would listen on all interfaces, to whoever comes.
    given["JAX_COORDINATOR_BIND_ADDRESS"] = address
    given["JAX_NUM_PROCESSES"] = str(processes)
    # What a process has in its buffer when it is killed is what one wants to read.
    given.setdefault("PYTHONUNBUFFERED", "1")
    ranks: list[_Rank] = []
    wishes: list[int] = []
    # To be acted upon where it is safe.
    with handled(wishes.append):
        try:
            for rank in range(processes):
                ranks.append(_Rank(rank, command, {**given, "JAX_PROCESS_ID": str(rank)}))
            first = _wait(ranks, wishes, grace)
        finally:
            for rank in ranks:
                rank.close()
    if first is None:
        return 0
    others = ", ".join(str(rank) for rank in ranks if rank is not first)
    line = f"boostax launch: {first} after {first.seconds:.1f} s"
    print(f"{line}; {others}" if others else line, file=sys.stderr, flush=True)
    return first.code


class _Rank:
    """One process: its output passed on, its end noted."""

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str]):
        tied = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid())]
        self.rank = rank
        self.seconds: float | None = None
        self._sent: list[str] = []
        self._begun = time.monotonic()
        self._process = subprocess.Popen(
            [*(tied if sys.platform == "linux" else []), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank else None,
            stderr=subprocess.STDOUT if rank else None,
            start_new_session=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    @property
    def code(self) -> int:
        """As a shell counts: 128 + n for signal n."""
        code = self._process.returncode
        return 128 - code if code < 0 else code

    def __str__(self) -> str:
        how = f"ended with exit code {self.code}"
        if self._process.returncode < 0:
            how = f"was ended by {_signal_name(self.code - 128)} (exit code {self.code})"
        if self._sent:
            how += f", having been sent {' and '.join(self._sent)}"
        return f"rank {self.rank} {how}"

    def look(self) -> bool:
        """Whether it has ended; what it had started then ends as well."""
        if self.seconds is None and self._process.poll() is not None:
            self.seconds = time.monotonic() - self._begun
            self._kill_session()
        return self.seconds is not None

    def terminate(self) -> None:
        """SIGTERM to the process alone, once: what it has started is its to stop."""
        if not self.look() and "SIGTERM" not in self._sent:
            self._sent.append("SIGTERM")
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, which a stopped process cannot ignore either, to it and all it has started."""
        if not self.look():
            self._sent.append("SIGKILL")
            self._kill_session()

    def close(self) -> None:
        """Make sure that it has ended, and that its last lines are out."""
        self.kill()
        self._process.wait()
        self.look()
        self._reader.join(_LAST_WORDS)

    def _kill_session(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _pass_on(self) -> None:
        with self._process.stdout or nullcontext(()) as lines:
            for line in lines:
                # Where nobody listens any more, it must still not stand before a full pipe.
                with suppress(OSError, ValueError):
                    sys.stderr.write(f"[{self.rank}] {line.rstrip()}\n")
                    sys.stderr.flush()


def _wait(ranks: Sequence[_Rank], wishes: list[int], grace: float) -> _Rank | None:
    """Until all have ended; the first that failed."""
    first: _Rank | None = None
    deadline, late = math.inf, _Rank.terminate
    while True:
        running = [rank for rank in ranks if not rank.look()]
        failed = [rank for rank in ranks if rank not in running and rank.code]
        if first is None and failed:
            first, deadline = failed[0], time.monotonic() + grace
        if not running:
            return first
        over = time.monotonic() >= deadline
        for rank in running:
            if wishes.count(signal.SIGINT) > 1:
                rank.kill()
            elif wishes:
                rank.terminate()
            if over:
                late(rank)
        if over:
            deadline, late = time.monotonic() + _LAST_WORDS, _Rank.kill
        time.sleep(_POLL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
