"""Next-character prediction on the standard library, with a small transformer."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from workloads import corpus
from workloads.models import CharacterTransformer
from workloads.workload import Workload, generator, supervised

# 127 characters cover source code and most European prose; token 0 is any other one.
_VOCABULARY = 128


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """What `text` builds."""

    max_chars: int = 4_000_000
    """Characters read at most."""
    sequence_length: int = 64
    """Characters per training window."""
    batch_size: int = 32
    """Windows per batch."""
    width: int = 96
    """Width of the model; a multiple of heads."""
    depth: int = 2
    """Transformer blocks."""
    heads: int = 4
    """Attention heads per block."""
    dtype: str = "float32"
    """What the model computes in: float32, float16 or bfloat16. Parameters stay float32."""
    seed: int = 0
    """Seed of the batches. The held-out split is the same for every seed."""


def text(config: TextConfig = TextConfig()) -> Workload:
    """Predict each next character of a text from the ones before it.

    A decoder-only pre-norm transformer over the 127 most common characters of the training text
    and one token for all others. The text is cut into blocks of ``16 * (sequence_length + 1)``
    characters; every twentieth is held out, and no training window reaches into one.
    Losses are nats per character. A batch is ``batch_size`` random training windows, int32
    ``[batch_size, sequence_length]``: ``inputs``, and ``targets``, the same shifted by one.

    Args:
      config: see `TextConfig`. The text differs between versions of Python, and losses on it
        differ a little with it.

    Returns:
      The `Workload`.
    """
    length, batch_size = config.sequence_length, config.batch_size
    training, held_out = corpus.split(corpus.read(config.max_chars), length, 0.05)
    training, held_out = corpus.encode(training, held_out, _VOCABULARY)
    sizes = config.width, config.depth, config.heads
    model = CharacterTransformer(_VOCABULARY, length, *sizes, jnp.dtype(config.dtype))

    def batch(index: int) -> dict[str, Any]:
        random = generator(config.seed, index)
        blocks = random.integers(len(training), size=(batch_size, 1))
        starts = random.integers(training.shape[1] - length, size=(batch_size, 1))
        return _shifted(training[blocks, starts + np.arange(length + 1)])

    windows = held_out.reshape(-1, length + 1)
    judged = min(len(windows), 32 * batch_size)
    return supervised(
        "text",
        model,
        batch,
        _shifted(windows[corpus.spread(judged, len(windows))]),
        batch_size,
        f"{training.size:,} training and {held_out.size:,} held-out characters "
        f"({judged * length:,} judged), vocabulary {_VOCABULARY}",
    )


def _shifted(windows: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    tokens = windows.astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
