# SPDX-License-Identifier: Apache-2.0
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
from boostax.run.options import check
from boostax.run.workloads._models import initial

PyTree = Any
Rows = np.ndarray[Any, Any] | None

_COMPUTE_DTYPES = ("float32", "float16", "bfloat16")
# The rule of the share that is held out.
HOLDOUT: Any = ("0.1 holds a tenth of the data out.", "in (0, 1)", lambda share: 0 < share < 1)


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
    hint = "It counts the calls of a run from zero."
    checks.require("batch", "index", index, "at least 0", index >= 0, hint)
    return np.random.Generator(np.random.Philox(key=np.array([seed, index], np.uint64)))


def checked(who: str, config: Any) -> jnp.dtype:
    """What the model of a configuration computes in; refuses what all configurations refuse."""
    check(who, config)
    seed, hint = config.seed, "It selects the batches."
    # What is no key of Philox.
    fits = isinstance(seed, (int, np.integer)) and bool(0 <= seed < 2**64)
    checks.require(who, "seed", seed, "an integer in [0, 2**64)", fits, hint)
    hint = "The model computes in it; parameters are float32 whatever it is."
    return jnp.dtype(checks.choice(who, "dtype", config.dtype, _COMPUTE_DTYPES, hint))


def supervised(
    name: str,
    model: Any,
    batch: Callable[..., PyTree],
    held_out: dict[str, np.ndarray[Any, Any]],
    batch_size: int,
    sizes: str,
    *,
    dropout: bool = False,
) -> Workload:
    """The workload of a Flax model that maps inputs to logits.

    Args:
      name: of the workload.
      model: ``model(inputs, train=False)`` gives logits; BatchNorm is all the state it may have.
      batch: as in `Workload`.
      held_out: the split to judge by.
      batch_size: as in `Workload`.
      sizes: of the splits, for the summary.
      dropout: whether training draws.
    """

    def init(key: jax.Array) -> tuple[PyTree, PyTree | None]:
        variables = initial(model, key, held_out["inputs"][:1])
        params = variables.pop("params")
        return params, variables or None

    params, model_state = jax.eval_shape(init, jax.random.key(0))
    stateful = model_state is not None
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))

    def variables(params: PyTree, model_state: PyTree | None) -> PyTree:
        allowed = f"the BatchNorm statistics of {type(model).__name__}"
        hint = "Pass on the second result of init, or the last Aux.model_state."
        given = model_state is not None or not stateful
        checks.require(name, "model_state", None, allowed, given, hint)
        return {"params": params, **(model_state if model_state and stateful else {})}

    def loss_fn(
        params: PyTree, batch: PyTree, *, key: jax.Array | None = None, model_state: PyTree = None
    ) -> tuple[jax.Array, Aux]:
        hint, fits = "Give the step a key, or set dropout to 0.", key is not None or not dropout
        checks.require(name, "key", key, "a key for dropout", fits, hint)
        how = {"train": True, "mutable": "batch_stats", "rngs": {"dropout": key} if dropout else {}}
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
        found = means(*here((params, model_state)), stacked, weights)
        return {name: float(found[name]) for name in ("loss", "accuracy")}

    return Workload(
        name, init, loss_fn, batch, evaluate, batch_size, f"{count:,} parameters, {sizes}"
    )
