"""Handwritten digits, 8x8 pixels, with a perceptron."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from workloads.models import DigitsMLP, DigitsSigmoid
from workloads.workload import Workload, generator, supervised

Array = np.ndarray[Any, Any]

_MODELS = {"mlp": DigitsMLP, "sigmoid": DigitsSigmoid}


@dataclasses.dataclass(frozen=True)
class DigitsConfig:
    """What `digits` builds."""

    model: Literal["mlp", "sigmoid"] = "mlp"
    """mlp: two layers; sigmoid: five layers, vanishing gradients."""
    batch_size: int = 64
    """Images per batch."""
    width: int = 128
    """Hidden units per layer."""
    dtype: str = "float32"
    """What the model computes in: float32, float16 or bfloat16. Parameters stay float32."""
    seed: int = 0
    """Seed of the batches. The held-out split is the same for every seed."""


def digits(config: DigitsConfig = DigitsConfig()) -> Workload:
    """Classify the 1,797 handwritten digits that scikit-learn ships with.

    Batches are ``inputs``, float32 ``[batch_size, 8, 8, 1]`` in [0, 1], and ``targets``, int32
    ``[batch_size]``. Every epoch takes all training images once, in an order of its own; a batch
    may end one epoch and begin the next. The loss is cross-entropy in nats.

    The ``sigmoid`` model is the textbook case of vanishing gradients: five layers of sigmoids from
    normal(0.02) weights. In float32 it learns; in float16 the gradients of the lowest layers
    round to zero, and it stays at chance unless the loss is scaled.

    Args:
      config: see `DigitsConfig`.

    Returns:
      The `Workload`.

    The images are a copy of the test set of E. Alpaydin and C. Kaynak, "Optical Recognition of
    Handwritten Digits", UCI Machine Learning Repository (1998).
    """
    images, labels = _load()
    training, held_out = _split(labels)

    def batch(index: int) -> dict[str, Any]:
        positions = np.arange(index * config.batch_size, (index + 1) * config.batch_size)
        epochs, places = np.divmod(positions, len(training))
        order = {x: generator(config.seed, int(x)).permutation(training) for x in np.unique(epochs)}
        drawn = np.concatenate([mine[places[epochs == x]] for x, mine in order.items()])
        return {"inputs": images[drawn], "targets": labels[drawn]}

    return supervised(
        "digits",
        _MODELS[config.model](config.width, jnp.dtype(config.dtype)),
        batch,
        {"inputs": images[held_out], "targets": labels[held_out]},
        config.batch_size,
        f"{len(training):,} training and {len(held_out):,} held-out images, 10 classes",
    )


def _load() -> tuple[Array, Array]:
    from sklearn.datasets import load_digits  # benchmarks on text alone go without

    data: Any = load_digits()
    return (data.images / 16).astype(np.float32)[..., None], data.target.astype(np.int32)


def _split(labels: Array) -> tuple[Array, Array]:
    """Rows to train on, and a fifth of every class held out."""
    random = generator(0, 0)
    held_out: list[Array] = []
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        held_out.append(rows[: round(0.2 * len(rows))])
    chosen = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen
