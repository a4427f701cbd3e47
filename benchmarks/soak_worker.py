"""One life of the soak: text on two replicas, some of whose batches make the loss NaN or infinite.

Goes on from the last checkpoint in its folder, and says at the end what it ended with.
"""

import argparse
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from harness import on_cpu

import boostax
from boostax._core import trees
from boostax.run.checkpoint import Checkpointer
from boostax.run.loop import fit
from boostax.run.workloads import TextConfig, text
from boostax.run.writers import JsonLines

PyTree = Any
AXIS, REPLICAS, WINDOW = "data", 2, 2
TEXT = TextConfig(
    max_chars=500_000, sequence_length=32, batch_size=16, width=32, depth=1, heads=2, eval_batches=8
)
# Of the calls; the scale may grow again about as often as one of them halves it.
POISONED, GROWTH = 0.05, 20
EVALUATED = 200


def factors(index: int) -> np.ndarray[Any, Any]:
    """What the losses of a batch are weighed with: ones, or on one row no number."""
    random = np.random.default_rng((2, index))
    found = np.ones(TEXT.batch_size, np.float32)
    if random.uniform() < POISONED:
        found[random.integers(len(found))] = random.choice((np.nan, np.inf, -np.inf))
    return found


def poisoned(calls: int) -> int:
    """How many of the first calls are to be skipped."""
    return sum(not np.isfinite(factors(index)).all() for index in range(calls))


def train_step(loss_fn: Callable[..., Any]) -> boostax.train.TrainStep:
    """A window in a loss scale, around a compressed reduction with residuals."""

    def weighed(params: PyTree, batch: PyTree, **kwargs: Any) -> Any:
        loss, aux = loss_fn(params, batch, **kwargs)
        return loss * batch["factors"].mean(), aux

    tx = optax.chain(
        boostax.top_k_reduce(AXIS, 0.05, dense=lambda path, leaf: leaf.ndim < 2),
        optax.clip_by_global_norm(1.0),
        optax.adamw(3e-3),
    )
    tx = boostax.accumulate(tx, WINDOW, axis_name=AXIS)
    tx = boostax.dynamic_loss_scale(tx, growth_interval=GROWTH, axis_name=AXIS)
    mesh = jax.make_mesh((REPLICAS,), (AXIS,), (jax.sharding.AxisType.Auto,))
    return boostax.make_train_step(weighed, tx, mesh=mesh, axis_name=AXIS, has_aux=True)


class Begun:
    """Touches a file when a life has done its first call."""

    def __init__(self, path: pathlib.Path):
        self._path = path

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Touch it."""
        del step, scalars
        self._path.touch()

    def close(self) -> None:
        """Nothing to finish."""


def digests(state: PyTree) -> dict[str, str]:
    """A hash of the bytes of every leaf."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        data = np.asarray(leaf).tobytes()
        found[trees.path_name(path)] = hashlib.sha256(data).hexdigest()
    return found


def live(output: pathlib.Path, calls: int, every: int, clean: bool) -> None:
    """Train up to so many calls, with a checkpoint every few of them."""
    workload = text(TEXT)
    step = train_step(workload.loss_fn)
    state = step.init(workload.init(jax.random.key(0))[0])

    def batch(index: int) -> PyTree:
        weights = np.ones(TEXT.batch_size, np.float32) if clean else factors(index)
        return workload.batch(index) | {"factors": weights}

    def evaluate(state: PyTree) -> dict[str, float]:
        return {"held_out_loss": workload.evaluate(state.params, None)["loss"]}

    with Checkpointer(output / "checkpoints") as checkpointer:
        start = checkpointer.latest() or 0
        if start:
            state, _ = checkpointer.restore(state, start)
        writer = JsonLines(output / "metrics.jsonl", start=start)
        result = fit(
            step,
            state,
            batch,
            steps=calls,
            start=start,
            writers=[writer, Begun(output / "begun")],
            checkpointer=checkpointer,
            checkpoint_every=every,
            evaluate=evaluate,
            evaluate_every=EVALUATED,
            keep=1,
        )
        writer.close()
    metrics = jax.device_get(boostax.metrics(result.state.opt_state))
    ending = {
        "calls": result.step,
        "skipped": int(metrics["skipped_steps"]),
        "optimizer_steps": int(metrics["optimizer_steps"]),
        "held_out_loss": result.history[-1]["held_out_loss"],
        "leaves": digests(result.state),
    }
    (output / "ending.json").write_text(json.dumps(ending))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="calls between two checkpoints")
    parser.add_argument("--clean", action="store_true", help="no batch is poisoned")
    given = parser.parse_args()
    on_cpu(REPLICAS)
    live(given.output, given.calls, given.every, given.clean)
