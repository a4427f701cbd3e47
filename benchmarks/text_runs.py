"""Training runs of a small transformer on text, each one compiled scan, on one device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from boostax.run.workloads import TextConfig, Workload, text

PyTree = Any
TEXT = TextConfig(width=32, depth=2, heads=2, sequence_length=32, batch_size=16)
WIDE = TextConfig(width=128, depth=4, heads=4, sequence_length=64, batch_size=16)
# Batches by which a run is judged; they are training windows unseen.
JUDGED = 64


@functools.cache
def workload_of(seed: int) -> Workload:
    """The text, in the order of a seed."""
    return text(dataclasses.replace(TEXT, seed=seed))


def wide() -> Workload:
    """A model of a million params, to time steps of."""
    return text(WIDE)


@functools.cache
def batches_of(seed: int, steps: int) -> tuple[PyTree, PyTree]:
    """Batches ``[steps, ...]`` to train on, and ``[JUDGED, ...]`` to judge by."""
    every = [workload_of(seed).batch(index) for index in range(steps + JUDGED)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *every)
    return jax.tree.map(lambda x: x[:steps], stacked), jax.tree.map(lambda x: x[steps:], stacked)


def init(seed: int) -> PyTree:
    """Params of a seed."""
    return workload_of(seed).init(jax.random.key(seed))[0]


def loss_of(params: PyTree, batch: PyTree) -> jax.Array:
    """Nats a character: the same function of every seed's params."""
    return workload_of(0).loss_fn(params, batch)[0]


def judged(params: PyTree, batches: PyTree) -> jax.Array:
    """The mean loss of f32 params over batches."""
    return jax.lax.map(lambda batch: loss_of(params, batch), batches).mean()


def halves(batches: PyTree) -> tuple[PyTree, PyTree]:
    """Of the batches to judge by: those to choose a rate by, and those to report."""
    half = JUDGED // 2
    parts = (slice(half), slice(half, None))
    first, rest = (jax.tree.map(lambda x, part=part: x[part], batches) for part in parts)
    return first, rest


def warmed(rate: jax.Array, steps: int) -> Any:
    """A schedule: linear warm-up over a tenth of the steps, then linear decay to a tenth."""
    warm = max(1, steps // 10)

    def at(step: Any) -> jax.Array:
        down = 1 - 0.9 * (step - warm) / (steps - warm)
        return rate * jnp.minimum((step + 1) / warm, down)

    return at
