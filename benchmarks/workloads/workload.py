"""The record every workload is, and what they share: metrics, evaluation, random numbers."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from workloads.models import initial

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Workload:
    """A real task as plain functions: what to train, on what, and how to judge it.

    Nothing here has state. ``batch`` depends on the configured seed and the call's index alone,
    so a run resumes at call ``n`` by asking for ``batch(n)``; no position in the data is saved.

    Attributes:
      name: what records call it.
      init: ``key -> params``, in float32.
      loss_fn: ``(params, batch)`` to a float32 mean over the batch.
      batch: ``index -> {"inputs": ..., "targets": ...}``, NumPy arrays with a leading axis of
        ``batch_size``.
      evaluate: ``params -> {"loss": ..., "accuracy": ...}`` on the held-out split.
      batch_size: examples in one ``batch``.
      summary: one line with the number of parameters and the sizes of the two splits.
    """

    name: str
    init: Callable[[jax.Array], PyTree]
    loss_fn: Callable[[PyTree, PyTree], jax.Array]
    batch: Callable[[int], PyTree]
    evaluate: Callable[[PyTree], dict[str, float]]
    batch_size: int
    summary: str


def cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy in nats and whether the best guess was right, each float32, per target."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses, (logits.argmax(-1) == targets).astype(jnp.float32)


def generator(seed: int, index: int) -> np.random.Generator:
    """Return random numbers that depend on the pair alone."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, index], np.uint64)))


def supervised(
    name: str,
    model: Any,
    batch: Callable[..., PyTree],
    held_out: dict[str, np.ndarray[Any, Any]],
    batch_size: int,
    sizes: str,
) -> Workload:
    """The workload of a Flax model that maps inputs to logits.

    Args:
      name: of the workload.
      model: ``model(inputs)`` gives logits.
      batch: as in `Workload`.
      held_out: the split to judge by.
      batch_size: as in `Workload`.
      sizes: of the splits, for the summary.
    """

    def init(key: jax.Array) -> PyTree:
        return initial(model, key, held_out["inputs"][:1])["params"]

    count = sum(
        math.prod(x.shape) for x in jax.tree.leaves(jax.eval_shape(init, jax.random.key(0)))
    )

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        logits = model.apply({"params": params}, batch["inputs"])
        return cross_entropy(logits, batch["targets"])[0].mean()

    # The last batch is filled up with the first examples at weight zero, so that one shape is
    # compiled and every example counts once.
    size = len(held_out["inputs"])
    order = np.arange(-(-size // batch_size) * batch_size).reshape(-1, batch_size)
    stacked = {name: array[order % size] for name, array in held_out.items()}
    weights = (order < size).astype(np.float32)

    @jax.jit
    def means(params: PyTree, stacked: Any, weights: Any) -> Any:
        def sums(one: tuple[dict[str, jax.Array], jax.Array]) -> dict[str, jax.Array]:
            batch, weight = one
            logits: Any = model.apply({"params": params}, batch["inputs"])
            losses, hits = cross_entropy(logits, batch["targets"])
            weight = weight.reshape(-1, *(1,) * (losses.ndim - 1))
            return {"loss": (losses * weight).sum(), "accuracy": (hits * weight).sum()}

        found = jax.lax.map(sums, (stacked, weights))
        return jax.tree.map(lambda each: each.sum() / held_out["targets"].size, found)

    def evaluate(params: PyTree) -> dict[str, float]:
        # Where parameters are replicated, every device would evaluate the same split.
        found = means(jax.device_get(params), stacked, weights)
        return {name: float(found[name]) for name in ("loss", "accuracy")}

    return Workload(
        name, init, loss_fn, batch, evaluate, batch_size, f"{count:,} parameters, {sizes}"
    )
