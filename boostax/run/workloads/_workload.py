"""The record every workload is, and what they share: metrics, evaluation, random numbers."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax._core import checks
from boostax._core.place import here
from boostax.accumulate.aux import Aux

PyTree = Any
Rows = np.ndarray[Any, Any] | None


@dataclasses.dataclass(frozen=True)
class Workload:
    """A real task as plain functions: what to train, on what, and how to judge it.

    Nothing here has state. ``batch`` depends on the configured seed and the call's index alone,
    so a run resumes at call ``n`` by asking for ``batch(n)``; no position in the data is saved.

    Attributes:
      name: what the workload is called on the command line and in records.
      init: ``key -> (params, model_state)``; float32 parameters, and BatchNorm statistics or None.
      loss_fn: ``loss_fn(params, batch, *, key=None, model_state=None) -> (loss, Aux)``, in training
        mode: a float32 mean over the batch, ``metrics={"accuracy": ...}``, and the new model state
        where the model has one. Every example weighs the same, so ``weight`` is None.
      batch: ``(index, rows=None) -> {"inputs": ..., "targets": ...}``, NumPy arrays with a leading
        axis of ``batch_size``, or only the given ``rows`` of it, ascending: what one of several
        processes reads. Raises ValueError for a negative index.
      evaluate: ``(params, model_state) -> {"loss": ..., "accuracy": ...}`` on the held-out split,
        without dropout and with BatchNorm's running averages.
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
    """Random numbers that depend on the pair alone; raises ValueError for a negative index."""
    if index < 0:
        hint = "It counts the calls of a run from zero."
        raise ValueError(checks.message("batch", "index", "at least 0", index, hint))
    return np.random.Generator(np.random.Philox(key=np.array([seed, index], np.uint64)))


def check_drawing(who: str, seed: Any, holdout: Any) -> None:
    """Refuse what is no Philox key, and shares that leave nothing to train on or to judge by."""
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
        hint = "It selects the batches."
        raise ValueError(checks.message(who, "seed", "an integer in [0, 2**64)", seed, hint))
    hint = "0.1 holds a tenth of the data out."
    checks.number(who, "holdout", holdout, "in (0, 1)", lambda share: 0 < share < 1, hint)


def parameter_count(init: Callable[[jax.Array], tuple[PyTree, PyTree | None]]) -> int:
    """The number of trainable parameters, without computing any."""
    params, _ = jax.eval_shape(init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def evaluator(
    predict: Callable[[PyTree, PyTree | None, jax.Array], jax.Array],
    held_out: dict[str, np.ndarray[Any, Any]],
    batch_size: int,
) -> Callable[[PyTree, PyTree | None], dict[str, float]]:
    """An ``evaluate`` over all of ``held_out``, ``batch_size`` examples at a time.

    The last batch is filled up with the first examples at weight zero, so that one shape is
    compiled and every example counts once.
    """
    count = len(held_out["inputs"])
    batches = -(-count // batch_size)
    order = np.arange(batches * batch_size).reshape(batches, batch_size)
    stacked = {name: array[order % count] for name, array in held_out.items()}
    weights = (order < count).astype(np.float32)
    total = held_out["targets"].size

    @jax.jit
    def means(params: PyTree, model_state: PyTree | None, stacked: Any, weights: Any) -> Any:
        def sums(one: tuple[dict[str, jax.Array], jax.Array]) -> dict[str, jax.Array]:
            batch, weight = one
            logits = predict(params, model_state, batch["inputs"])
            losses, hits = cross_entropy(logits, batch["targets"])
            weight = weight.reshape(-1, *(1,) * (losses.ndim - 1))
            return {"loss": (losses * weight).sum(), "accuracy": (hits * weight).sum()}

        return jax.tree.map(lambda each: each.sum() / total, jax.lax.map(sums, (stacked, weights)))

    def evaluate(params: PyTree, model_state: PyTree | None = None) -> dict[str, float]:
        # Where parameters are replicated, every device would evaluate the same split.
        found = means(*here((params, model_state)), stacked, weights)
        return {name: float(found[name]) for name in ("loss", "accuracy")}

    return evaluate
