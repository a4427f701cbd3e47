"""The record every workload is, and what they share: metrics, evaluation, random numbers."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax import Aux
from workloads.models import initial

PyTree = Any
Rows = np.ndarray[Any, Any] | None


@dataclasses.dataclass(frozen=True)
class Workload:
    """A real task as plain functions: what to train, on what, and how to judge it.

    Nothing here has state. ``batch`` depends on the configured seed and the call's index alone,
    so a run resumes at call ``n`` by asking for ``batch(n)``; no position in the data is saved.

    Attributes:
      name: what records call it.
      init: ``key -> (params, model_state)``; float32 parameters, and BatchNorm statistics or None.
      loss_fn: ``loss_fn(params, batch, *, model_state=None) -> (loss, Aux)``, in training
        mode: a float32 mean over the batch, ``metrics={"accuracy": ...}``, and the new model state
        where the model has one. Every example weighs the same, so ``weight`` is None.
      batch: ``(index, rows=None) -> {"inputs": ..., "targets": ...}``, NumPy arrays with a leading
        axis of ``batch_size``, or only the given ``rows`` of it, ascending: what one of several
        processes reads.
      evaluate: ``(params, model_state) -> {"loss": ..., "accuracy": ...}`` on the held-out split,
        with BatchNorm's running averages.
      batch_size: examples in one ``batch``.
      summary: one line with the number of parameters and the sizes of the two splits.
    """

    name: str
    init: Callable[[jax.Array], tuple[PyTree, PyTree | None]]
    loss_fn: Callable[..., tuple[jax.Array, Aux]]
    batch: Callable[..., PyTree]
    evaluate: Callable[[PyTree, PyTree | None], dict[str, float]]
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
      model: ``model(inputs, train=False)`` gives logits; BatchNorm is all the state it may have.
      batch: as in `Workload`.
      held_out: the split to judge by.
      batch_size: as in `Workload`.
      sizes: of the splits, for the summary.
    """

    def init(key: jax.Array) -> tuple[PyTree, PyTree | None]:
        variables = initial(model, key, held_out["inputs"][:1])
        params = variables.pop("params")
        return params, variables or None

    params, model_state = jax.eval_shape(init, jax.random.key(0))
    stateful = model_state is not None
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))

    def variables(params: PyTree, model_state: PyTree | None) -> PyTree:
        return {"params": params, **(model_state if model_state and stateful else {})}

    def loss_fn(
        params: PyTree, batch: PyTree, *, key: jax.Array | None = None, model_state: PyTree = None
    ) -> tuple[jax.Array, Aux]:
        del key
        how = {"train": True, "mutable": "batch_stats"}
        logits, updated = model.apply(variables(params, model_state), batch["inputs"], **how)
        losses, hits = cross_entropy(logits, batch["targets"])
        aux = Aux(metrics={"accuracy": hits.mean()}, model_state=updated if stateful else None)
        return losses.mean(), aux

    # The last batch is filled up with the first examples at weight zero, so that one shape is
    # compiled and every example counts once.
    size = len(held_out["inputs"])
    order = np.arange(-(-size // batch_size) * batch_size).reshape(-1, batch_size)
    stacked = {name: array[order % size] for name, array in held_out.items()}
    weights = (order < size).astype(np.float32)

    @jax.jit
    def means(params: PyTree, model_state: PyTree | None, stacked: Any, weights: Any) -> Any:
        def sums(one: tuple[dict[str, jax.Array], jax.Array]) -> dict[str, jax.Array]:
            batch, weight = one
            logits: Any = model.apply(variables(params, model_state), batch["inputs"])
            losses, hits = cross_entropy(logits, batch["targets"])
            weight = weight.reshape(-1, *(1,) * (losses.ndim - 1))
            return {"loss": (losses * weight).sum(), "accuracy": (hits * weight).sum()}

        found = jax.lax.map(sums, (stacked, weights))
        return jax.tree.map(lambda each: each.sum() / held_out["targets"].size, found)

    def evaluate(params: PyTree, model_state: PyTree | None = None) -> dict[str, float]:
        # Where parameters are replicated, every device would evaluate the same split.
        found = means(*jax.device_get((params, model_state)), stacked, weights)
        return {name: float(found[name]) for name in ("loss", "accuracy")}

    return Workload(
        name, init, loss_fn, batch, evaluate, batch_size, f"{count:,} parameters, {sizes}"
    )
