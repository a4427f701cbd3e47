"""Several processes of one run, started and ended by a test."""

import os
import pathlib
import socket
import subprocess
import sys

import boostax

PATIENCE = 240.0
# As the Makefile does for the tests themselves; all versions of XLA know these.
QUICK_CODE = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"


def environment():
    """As a user's, with plain machine code and one device a process."""
    return {
        **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK_CODE,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(pathlib.Path(boostax.__file__).parents[1]),
        "PYTHONWARNINGS": "error",
    }


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Processes:
    """``count`` processes of ``command``; leaving the block kills what is left of them."""

    def __init__(self, command, count, logs, **variables):
        address = f"127.0.0.1:{free_port()}"
        self.logs = [pathlib.Path(logs) / f"process-{i}.log" for i in range(count)]
        self.running = []
        for index, log in enumerate(self.logs):
            names = {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_COORDINATOR_BIND_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
            }
            with log.open("w") as out:
                process = subprocess.Popen(
                    [sys.executable, *command],
                    env={**environment(), **names, **variables},
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

    def end(self, patience=PATIENCE):
        """Wait for all of them: their exit codes."""
        return [process.wait(timeout=patience) for process in self.running]

    def printed(self, index=0):
        return self.logs[index].read_text()
