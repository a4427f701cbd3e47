"""Two processes of one device each: every subject in one go, against one process of two devices.

Run as ``python -m cells.processes RANK PORT FILE``; it writes a JSON of what became of each.
"""

import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

HERE = pathlib.Path(__file__).parents[1]
PATIENCE = 420.0
Found = dict[str, dict[str, str]]


def worker(rank: int, port: int, file: pathlib.Path, names: list[str]) -> None:
    """Train each subject, and note the hash of its params and the first leaf, or the error."""
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"localhost:{port}", 2, rank, heartbeat_timeout_seconds=30)
    from cells.subjects import named

    found: Found = {}
    for name in names:
        try:
            found[name] = {"bits": trained(named(name))}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    file.write_text(json.dumps(found))
    jax.distributed.shutdown()


def trained(subject: Any) -> str:
    """The hash of the params after two changes, on two devices, whoever they belong to."""
    from boostax.testing._case import even_params
    from cells.programs import on_devices

    params = even_params()
    program = on_devices(subject, params, 2)
    carry = program.start(params)
    for seed in range(2 * subject.calls):
        carry = program.jitted(carry, program.spread(program.grads(params, seed)))
    held = carry[0].local if subject.own_params else carry[0]
    whole = jax.tree.map(lambda x: jax.jit(_whole, out_shardings=_everywhere(x))(x), held)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(whole):
        digest.update(np.asarray(leaf.addressable_data(0)).tobytes())
    return digest.hexdigest()


def _whole(x: jax.Array) -> jax.Array:
    return x


def _everywhere(x: jax.Array) -> NamedSharding:
    return NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec())


def pair(names: list[str]) -> list[Found]:
    """What both processes found."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": str(HERE),
    }
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder) / f"{rank}.json" for rank in range(2)]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "cells.processes", str(rank), str(port), str(file), *names],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, file in enumerate(files)
        ]
        try:
            printed = [process.communicate(timeout=PATIENCE)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        for process, text in zip(started, printed, strict=True):
            if process.returncode:
                raise RuntimeError(f"exit code {process.returncode}: {text[-2000:]}")
        return [json.loads(file.read_text()) for file in files]


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4:])
