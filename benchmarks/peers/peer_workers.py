"""Starting the workers of the frameworks, and asking them."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any, Self

import lenet
import setup

HERE = pathlib.Path(__file__).resolve().parent
REPLICAS = 2
# Seconds for one answer, compiling included.
PATIENCE = 180.0


class Failed(Exception):
    """A worker cannot do what it was asked; the message says why."""


class Worker:
    """One framework, in one process or in several that are asked the same.

    Attributes:
      about: framework and version.
      forms: the names of what it can do.
    """

    def __init__(self, commands: list[list[str]], variables: list[dict[str, str]]):
        self._late = False
        # What they print is only wanted when one of them fails.
        self._errors = tempfile.TemporaryFile("w+")
        self._running = [
            subprocess.Popen(
                command,
                env={**os.environ, **lenet.ONE_THREAD, **more},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
            for command, more in zip(commands, variables, strict=True)
        ]
        try:
            hello = self._answers()[0]
        except Failed:
            self.close()
            raise
        self.about: str = hello["about"]
        self.forms: list[str] = hello["forms"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, form: str, **command: Any) -> dict[str, Any]:
        """The answer: of several processes the mean loss, the time of the one that waits less.

        Raises:
          Failed: it answered with an error or not in time, or is gone.
        """
        for process in self._running:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"form": form, **command}) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise Failed(self._why()) from None
        found = self._answers()
        for answer in found:
            if "error" in answer:
                raise Failed(answer["error"])
        if "seconds" not in found[0]:
            return found[0]
        losses = [answer["loss"] for answer in found]
        return {
            "seconds": max(answer["seconds"] for answer in found),
            # Some frameworks wait for another process by polling, which is no work.
            "cpu": min(answer["cpu"] for answer in found),
            "loss": sum(losses) / len(losses),
        }

    def close(self) -> None:
        """End the processes: the end of their input is the wish, and they have ten seconds."""
        for process in self._running:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.close()
            except BrokenPipeError:
                pass
        for process in self._running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._errors.close()

    def _answers(self) -> list[dict[str, Any]]:
        clock = threading.Timer(PATIENCE, self._give_up)
        clock.start()
        try:
            lines = [process.stdout.readline() for process in self._running if process.stdout]
        finally:
            clock.cancel()
        if not all(lines):
            raise Failed(self._why())
        return [json.loads(line) for line in lines]

    def _give_up(self) -> None:
        self._late = True
        for process in self._running:
            # mpirun ends those that it has started, if it is asked.
            process.terminate()

    def _why(self) -> str:
        if self._late:
            return f"no answer within {PATIENCE:.0f} s"
        self._errors.seek(0)
        return setup.reason(self._errors.read())


def _port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def write(work: pathlib.Path) -> None:
    """Make the file of work that the others read."""
    command = [sys.executable, str(HERE / "jax_lenet.py"), str(work)]
    subprocess.run(command, env={**os.environ, **lenet.ONE_THREAD}, check=True)


def boostax(work: pathlib.Path) -> Worker:
    """JAX and boostax in one process."""
    return Worker([[sys.executable, str(HERE / "boostax_worker.py"), str(work)]], [{}])


def boostax_replicas(work: pathlib.Path) -> Worker:
    """The same as several processes."""
    command = [sys.executable, str(HERE / "boostax_worker.py"), str(work), "--replicas"]
    address = f"127.0.0.1:{_port()}"
    common = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(REPLICAS),
    }
    each = [{**common, "JAX_PROCESS_ID": str(rank)} for rank in range(REPLICAS)]
    return Worker([command] * REPLICAS, each)


def _python(peer: str) -> str:
    """The interpreter of a peer that imports."""
    try:
        setup.version(setup.PEERS[peer])
    except setup.Refused as refused:
        raise Failed(f"{setup.outcome(peer)} ({refused})") from None
    return str(setup.python_of(setup.PEERS[peer]))


def mindspore(work: pathlib.Path) -> Worker:
    """MindSpore in one process."""
    return Worker([[_python("mindspore"), str(HERE / "mindspore_worker.py"), str(work)]], [{}])


def pytorch(work: pathlib.Path) -> Worker:
    """PyTorch in one process."""
    return Worker([[_python("pytorch"), str(HERE / "pytorch_worker.py"), str(work)]], [{}])


def pytorch_replicas(work: pathlib.Path) -> Worker:
    """PyTorch as several processes."""
    command = [_python("pytorch"), str(HERE / "pytorch_worker.py"), str(work), "--replicas"]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port(), "WORLD_SIZE": str(REPLICAS)}
    each = [{**common, "RANK": str(rank)} for rank in range(REPLICAS)]
    return Worker([command] * REPLICAS, each)


def horovod(work: pathlib.Path) -> Worker:
    """Horovod as several processes, started by the MPI that came with it."""
    python = _python("horovod")
    launcher = [str(pathlib.Path(python).with_name("mpirun")), "-np", str(REPLICAS)]
    # Each process chooses its core itself, as those of the others do.
    launcher += ["--bind-to", "none", "--oversubscribe"]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return Worker([[*launcher, python, str(HERE / "horovod_worker.py"), str(work)]], [allowed])
