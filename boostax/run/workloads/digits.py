"""Handwritten digits, 8x8 pixels, with a perceptron or a small convolutional network."""

import dataclasses
from typing import Any, Literal

import jax
import numpy as np

from boostax._core import checks
from boostax.accumulate.aux import Aux
from boostax.run.workloads._models import (
    DigitsConv,
    DigitsMLP,
    DigitsSigmoid,
    compute_dtype,
    initial,
)
from boostax.run.workloads._resnet import DigitsResNet
from boostax.run.workloads._workload import (
    PyTree,
    Rows,
    Workload,
    check_drawing,
    cross_entropy,
    evaluator,
    generator,
    parameter_count,
)

Array = np.ndarray[Any, Any]

_MODELS = {"mlp": DigitsMLP, "conv": DigitsConv, "sigmoid": DigitsSigmoid, "resnet": DigitsResNet}
# With BatchNorm, and what their width must be a multiple of.
_STATEFUL = {"conv": 4, "resnet": 8}


@dataclasses.dataclass(frozen=True)
class DigitsConfig:
    """What `digits` builds."""

    model: Literal["mlp", "conv", "sigmoid", "resnet"] = "mlp"
    """mlp: two layers; conv, resnet: with BatchNorm; sigmoid: five layers, vanishing gradients."""
    batch_size: int = 64
    """Images per batch."""
    width: int = 128
    """Hidden units per layer; the channels of convolutions are fractions of it."""
    dtype: str = "float32"
    """What the model computes in: float32, float16 or bfloat16. Parameters stay float32."""
    seed: int = 0
    """Seed of the batches. The held-out split is the same for every seed."""
    holdout: float = 0.2
    """Share of each class held out."""


def digits(config: DigitsConfig = DigitsConfig()) -> Workload:
    """Classify the 1,797 handwritten digits that scikit-learn ships with.

    Batches are ``inputs``, float32 ``[batch_size, 8, 8, 1]`` in [0, 1], and ``targets``, int32
    ``[batch_size]``. Every epoch takes all training images once, in an order of its own; a batch
    may end one epoch and begin the next. The loss is cross-entropy in nats.

    The ``conv`` and ``resnet`` models have the state ``{"batch_stats": ...}``: ``loss_fn``
    normalises by the batch and returns the new running averages as ``Aux.model_state``;
    ``evaluate`` normalises by them.

    The ``sigmoid`` model is the textbook case of vanishing gradients: five layers of sigmoids from
    normal(0.02) weights. In float32 it learns; in float16 the gradients of the lowest layers
    round to zero, and it stays at chance unless the loss is scaled.

    Args:
      config: see `DigitsConfig`.

    Returns:
      The `Workload`. Its ``loss_fn`` and ``evaluate`` need ``model_state`` if ``model`` is "conv"
      or "resnet".

    Raises:
      ValueError: for sizes out of range or that do not fit together.
      TypeError: for sizes that are no numbers.
      ImportError: if scikit-learn is not installed.

    The images are a copy of the test set of E. Alpaydin and C. Kaynak, "Optical Recognition of
    Handwritten Digits", UCI Machine Learning Repository (1998).
    """
    dtype = compute_dtype("digits", config.dtype)
    _check(config)
    images, labels = _load()
    training, held_out = _split(labels, config.holdout)
    stateful = config.model in _STATEFUL
    model = _MODELS[config.model](config.width, dtype)

    def init(key: jax.Array) -> tuple[PyTree, PyTree | None]:
        variables = dict(initial(model, key, images[:1]))
        params = variables.pop("params")
        return params, variables or None

    def require_state(model_state: PyTree | None) -> PyTree:
        if stateful and model_state is None:
            allowed = f"the BatchNorm statistics of the {config.model} model"
            hint = "Pass on the second result of init, or the last Aux.model_state."
            raise ValueError(checks.message("digits", "model_state", allowed, None, hint))
        return model_state if stateful else {}

    def loss_fn(
        params: PyTree,
        batch: PyTree,
        *,
        key: jax.Array | None = None,
        model_state: PyTree | None = None,
    ) -> tuple[jax.Array, Aux]:
        del key
        variables = {"params": params, **require_state(model_state)}
        logits: Any
        logits, updated = model.apply(variables, batch["inputs"], train=True, mutable="batch_stats")
        losses, hits = cross_entropy(logits, batch["targets"])
        aux = Aux(metrics={"accuracy": hits.mean()}, model_state=updated if stateful else None)
        return losses.mean(), aux

    def batch(index: int, rows: Rows = None) -> PyTree:
        positions = np.arange(index * config.batch_size, (index + 1) * config.batch_size)
        positions = positions if rows is None else positions[rows]
        epochs, places = np.divmod(positions, len(training))
        orders = {
            epoch: generator(config.seed, epoch).permutation(training)
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1)
        }
        drawn = np.array(
            [orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)]
        )
        return {"inputs": images[drawn], "targets": labels[drawn]}

    def predict(params: PyTree, model_state: PyTree | None, inputs: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params, **require_state(model_state)}, inputs)
        return logits

    return Workload(
        name="digits",
        init=init,
        loss_fn=loss_fn,
        batch=batch,
        evaluate=evaluator(
            predict, {"inputs": images[held_out], "targets": labels[held_out]}, config.batch_size
        ),
        batch_size=config.batch_size,
        summary=(
            f"{parameter_count(init):,} parameters, {len(training):,} training and "
            f"{len(held_out):,} held-out images, 10 classes"
        ),
    )


def _load() -> tuple[Array, Array]:
    with checks.needing("boostax.run.workloads.digits", "scikit-learn", "workloads"):
        from sklearn.datasets import load_digits
    data: Any = load_digits()
    images = (data.images / 16).astype(np.float32)[..., None]
    return images, data.target.astype(np.int32)


def _split(labels: Array, holdout: float) -> tuple[Array, Array]:
    """Rows to train on and rows held out: the same share of every class, at least one of each."""
    random = generator(0, 0)
    held_out: list[Array] = []
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        held_out.append(rows[: min(max(1, round(holdout * len(rows))), len(rows) - 1)])
    chosen = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


def _check(config: DigitsConfig) -> None:
    hint = "mlp is the fastest, conv and resnet have BatchNorm, sigmoid has vanishing gradients."
    checks.choice("digits", "model", config.model, tuple(_MODELS), hint)
    hint = "It is the images per batch, 64 by default."
    checks.positive_int("digits", "batch_size", config.batch_size, hint)
    hint = "It is the hidden units per layer, 128 by default."
    checks.positive_int("digits", "width", config.width, hint)
    divisor = _STATEFUL.get(config.model, 1)
    if config.width % divisor:
        hint = "The channels of its convolutions are fractions of it."
        allowed = f"a multiple of {divisor} for the {config.model} model"
        raise ValueError(checks.message("digits", "width", allowed, config.width, hint))
    check_drawing("digits", config.seed, config.holdout)
