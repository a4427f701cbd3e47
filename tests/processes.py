"""Several processes of one run, started and ended by a test."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "several_processes.py"
# It only limits waiting for what never comes: a busy machine may take its time.
PATIENCE = 3600.0


def environment():
    """As a user's, with the machine code of the tests."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "examples"))),
        "PYTHONWARNINGS": "error",
    }


def free_port():
    """A port below 32768, where Linux begins to give them to others before this one is bound."""
    for port in range(10_000 + 10 * os.getpid() % 20_000, 32_768):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class Processes:
    """``count`` processes of ``command``; leaving the block kills what is left of them."""

    def __init__(self, command, count, logs, **variables):
        address = f"127.0.0.1:{free_port()}"
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = [logs / f"process-{i}.log" for i in range(count)]
        self.running = []
        for index, log in enumerate(self.logs):
            flags = [f"--coordinator={address}", f"--processes={count}", f"--index={index}"]
            with log.open("w") as out:
                process = subprocess.Popen(
                    [sys.executable, *map(str, command), *flags],
                    env=environment() | {"JAX_COORDINATOR_BIND_ADDRESS": address} | variables,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            self.running.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.running:
            process.kill()
            process.wait()

    def reach(self, words):
        """Wait until the first process has printed something."""
        deadline = time.monotonic() + PATIENCE
        while words not in self.printed():
            assert self.running[0].poll() is None and time.monotonic() < deadline, self.printed()
            time.sleep(0.005)

    def end(self, *codes, number=None):
        """Send a signal if one is given; wait for all of them to end with these codes, or 0."""
        for process in self.running if number else ():
            process.send_signal(number)
        try:
            ended = [process.wait(timeout=PATIENCE) for process in self.running]
        except subprocess.TimeoutExpired:
            ended = [process.poll() for process in self.running]
        printed = [*map(self.printed, range(len(ended)))]
        assert ended == (list(codes) or [0] * len(ended)), "\n".join(printed)
        return printed[0]

    def printed(self, index=0):
        return self.logs[index].read_text()
