"""A transformer on text to train by a compiled scan: its batches stacked, and more to judge by."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from workloads import TextConfig, Workload, text

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Text:
    """The text workload of every seed.

    Attributes:
      config: the model and its batches.
      judged: batches by which a run is judged; they are training windows unseen.
    """

    config: TextConfig
    judged: int

    def workload(self, seed: int) -> Workload:
        """The text, in the order of a seed."""
        return _workload(self.config, seed)

    def init(self, seed: int) -> PyTree:
        """Params of a seed."""
        return self.workload(seed).init(jax.random.key(seed))

    def loss(self, params: PyTree, batch: PyTree) -> jax.Array:
        """Nats a character: the same function of every seed's params."""
        return self.workload(0).loss_fn(params, batch)

    def judge(self, params: PyTree, batches: PyTree) -> jax.Array:
        """The mean loss over batches."""
        return jax.lax.map(lambda batch: self.loss(params, batch), batches).mean()

    def batches(self, seed: int, steps: int) -> tuple[PyTree, PyTree]:
        """Batches ``[steps, ...]`` to train on, and ``[judged, ...]`` to judge by."""
        return _batches(self, seed, steps)

    def halves(self, batches: PyTree) -> tuple[PyTree, PyTree]:
        """Of the batches to judge by: those to choose a rate by, and those to report."""
        parts = (slice(self.judged // 2), slice(self.judged // 2, None))
        first, rest = (jax.tree.map(lambda x, part=part: x[part], batches) for part in parts)
        return first, rest


@functools.cache
def _workload(config: TextConfig, seed: int) -> Workload:
    return text(dataclasses.replace(config, seed=seed))


@functools.cache
def _batches(which: Text, seed: int, steps: int) -> tuple[PyTree, PyTree]:
    every = [which.workload(seed).batch(index) for index in range(steps + which.judged)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *every)
    return jax.tree.map(lambda x: x[:steps], stacked), jax.tree.map(lambda x: x[steps:], stacked)


SMALL = Text(TextConfig(width=32, depth=2, heads=2, sequence_length=32, batch_size=16), judged=64)


def warmed(rate: jax.Array, steps: int) -> Callable[[Any], jax.Array]:
    """A schedule: linear warm-up over a tenth of the steps, then linear decay to a tenth."""
    warm = max(1, steps // 10)

    def at(step: Any) -> jax.Array:
        down = 1 - 0.9 * (step - warm) / (steps - warm)
        return rate * jnp.minimum((step + 1) / warm, down)

    return at
