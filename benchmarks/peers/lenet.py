"""The work that every framework does alike, and how a worker is asked to do it.

LeNet-5 on handwritten digits: initial weights, batches and settings, in NumPy alone. A worker is a
process with one framework in it. It reads a JSON object per line, such as
``{"form": "plain", "calls": 20}``, does so many calls, and answers with the seconds that they took,
on the clock and of the processor, and with the last loss.
"""

import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]

BATCH, RATE, MOMENTUM = 32, 0.01, 0.9
WINDOW = 4
INIT_SCALE, GROWTH_INTERVAL = 2.0**16, 2000
# Of each unit of work: a multiple of the window, and one turn of the freeze schedule.
CALLS = 12
# After so many calls losses are compared.
AFTER = 20
FROZEN_FRACTION = 0.3
DIRECTIONS, SNAPSHOTS, SNAPSHOT_EVERY = 8, 10, 6
# MindSpore's rule: the rate and the momentum of what is outside the subspace.
RESIDUAL_RATE, RESIDUAL_MOMENTUM = 1e-3, 0.9
RANK = 2
# PyTorch's default, in bytes.
BUCKET = 25 << 20
LAYERS = ("conv1", "conv2", "fc1", "fc2", "fc3")
# As PyTorch and MindSpore keep them: outputs first.
SHAPES: dict[str, tuple[int, ...]] = {
    "conv1": (6, 1, 5, 5),
    "conv2": (16, 6, 5, 5),
    "fc1": (120, 400),
    "fc2": (84, 120),
    "fc3": (10, 84),
}
# Linear algebra on one thread, whichever library does it.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}


class Work(NamedTuple):
    """What all frameworks are given.

    Attributes:
      images: f32 ``[batches, BATCH, 1, 32, 32]`` in [0, 1].
      labels: i32 ``[batches, BATCH]``.
      depths: i32 ``[CALLS]``, how many layers the freeze schedule holds back in each call.
      basis: f32 ``[DIRECTIONS, n]`` of orthonormal rows, as ``flat`` orders the params.
      finish: f32 ``[n]``, the params at which training in the span of the basis begins.
    """

    images: Array
    labels: Array
    depths: Array
    basis: Array
    finish: Array


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to train, with params and batches of its own.

    Attributes:
      run: does so many calls, blocks, and returns the loss of the last.
      state: bytes kept between two calls beside the params.
      wire: bytes that a process sends per call; ``None`` where nobody counts them.
    """

    run: Callable[[int], float]
    state: Callable[[], int | None] = lambda: None
    wire: Callable[[], float | None] = lambda: None


def weights() -> Weights:
    """Initial ones, ``{"conv1.weight": ..., "conv1.bias": ..., ...}``, the same for everybody."""
    # Of the older generator: its numbers are the same in every version of NumPy.
    random = np.random.RandomState(0)
    found: Weights = {}
    for layer, shape in SHAPES.items():
        bound = (3.0 / np.prod(shape[1:])) ** 0.5
        found[f"{layer}.weight"] = random.uniform(-bound, bound, shape).astype(np.float32)
        found[f"{layer}.bias"] = random.uniform(-0.01, 0.01, shape[0]).astype(np.float32)
    return found


def flat(params: Mapping[str, Array]) -> Array:
    """All of them as one vector, in the order of ``weights``."""
    return np.concatenate([np.ravel(params[name]) for name in weights()])


def unflat(vector: Array) -> Weights:
    """The way back from ``flat``."""
    like = weights()
    ends = np.cumsum([w.size for w in like.values()])
    parts = np.split(vector, ends[:-1])
    return {name: p.reshape(like[name].shape) for name, p in zip(like, parts, strict=True)}


def batches(pixels: Array, labels: Array) -> tuple[Array, Array]:
    """Images ``[batches, BATCH, 1, 32, 32]`` of 8 x 8 pixels up to 16, each repeated 4 x 4."""
    rows = np.random.RandomState(1).permutation(len(labels))
    rows = rows[: len(rows) // BATCH * BATCH]
    large = np.repeat(np.repeat(pixels[rows] / 16, 4, axis=1), 4, axis=2).astype(np.float32)
    return large.reshape(-1, BATCH, 1, 32, 32), labels[rows].reshape(-1, BATCH).astype(np.int32)


def principal(snapshots: Array, count: int) -> Array:
    """The first principal directions of rows, ``[count, n]``, orthonormal."""
    centred = snapshots.astype(np.float64) - snapshots.mean(0, dtype=np.float64)
    return np.linalg.svd(centred, full_matrices=False)[2][:count].astype(np.float32)


def save(path: pathlib.Path, work: Work) -> None:
    """Write it for the workers."""
    np.savez(path, **work._asdict())


def load(path: str | pathlib.Path) -> Work:
    """Read what ``save`` wrote."""
    with np.load(path) as found:
        return Work(**{name: found[name] for name in Work._fields})


def pin(rank: int = 0) -> None:
    """Keep this process on one core: the last for rank 0, the one before for rank 1."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1 - rank % len(cores)]})


def serve(
    forms: Mapping[str, Callable[[], Form]],
    about: str,
    share: Callable[[str | None], str] | None = None,
    average: Callable[[float], float] | None = None,
    first: bool = True,
) -> None:
    """Answer commands until the input ends.

    ``{"form", "calls"}`` runs; ``"fresh": true`` begins with new params; ``"count": true`` asks for
    what is kept and sent. A form that fails answers with its error, and the worker goes on.

    Args:
      forms: what makes each of them.
      about: the framework and its version.
      share: hands the command of the first process to all, where only that one can be spoken to.
      average: of the losses of all, there as well.
      first: whether this process can be spoken to.
    """
    # Frameworks print. What they print goes to standard error, answers alone to standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(told: dict[str, Any]) -> None:
        if first:
            print(json.dumps(told), file=answers, flush=True)

    answer({"about": about, "forms": list(forms)})
    made: dict[str, Form] = {}
    while True:
        line = sys.stdin.readline() if first else None
        line = share(line) if share else line
        if not line:
            return
        try:
            told = _obey(json.loads(line), forms, made)
            if average and "loss" in told:
                told["loss"] = average(told["loss"])
            answer(told)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            answer({"error": f"{type(error).__name__}: {lines[0]}"})


def _obey(
    command: dict[str, Any], forms: Mapping[str, Callable[[], Form]], made: dict[str, Form]
) -> dict[str, Any]:
    name = command["form"]
    if name not in made or command.get("fresh"):
        made[name] = forms[name]()
    form = made[name]
    if command.get("count"):
        return {"state": form.state(), "wire": form.wire()}
    begun, busy = time.perf_counter(), time.process_time()
    loss = form.run(command["calls"])
    used = time.process_time() - busy
    return {"seconds": time.perf_counter() - begun, "cpu": used, "loss": float(loss)}
