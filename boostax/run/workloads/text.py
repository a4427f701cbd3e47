# SPDX-License-Identifier: Apache-2.0
"""Next-character prediction on text files, with a small transformer."""

import dataclasses
from typing import Any

import numpy as np

from boostax._core import checks
from boostax.run.options import option
from boostax.run.workloads import _corpus
from boostax.run.workloads._models import CharacterTransformer
from boostax.run.workloads._workload import HOLDOUT, Rows, Workload, checked, generator, supervised

# 127 characters cover source code and most European prose; token 0 is any other one.
_VOCABULARY = 128


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """What `text` builds."""

    paths: tuple[str, ...] = ()
    """Text files, or folders of them; empty means the sources of Python's standard library."""
    max_chars: int = option(4_000_000, "It limits how much text is read.")
    """Characters read at most, in the order of the paths."""
    sequence_length: int = option(64, "It is the characters per window, 64 by default.")
    """Characters per training window."""
    batch_size: int = option(32, "It is the windows per batch, 32 by default.")
    """Windows per batch."""
    width: int = option(96, "It is the width of the model, 96 by default.")
    """Width of the model; a multiple of heads."""
    depth: int = option(2, "It is the number of transformer blocks, 2 by default.")
    """Transformer blocks."""
    heads: int = option(4, "It is the attention heads per block, 4 by default.")
    """Attention heads per block."""
    dropout: float = option(0.0, "0 turns it off.", "in [0, 1)", lambda p: 0 <= p < 1)
    """Share of activations dropped in training."""
    dtype: str = "float32"
    """What the model computes in: float32, float16 or bfloat16. Parameters stay float32."""
    seed: int = 0
    """Seed of the batches. The held-out split is the same for every seed."""
    holdout: float = option(0.05, *HOLDOUT)
    """Share of the text held out, in contiguous blocks spread evenly over it."""
    eval_batches: int = option(32, "It limits what one evaluation reads, 32 by default.")
    """Batches of held-out windows read by one evaluation at most, spread evenly over the split."""


def text(config: TextConfig = TextConfig()) -> Workload:
    """Predict each next character of a text from the ones before it.

    A decoder-only pre-norm transformer over the 127 most common characters of the training text
    and one token for all others. The text is cut into blocks of ``16 * (sequence_length + 1)``
    characters; every ``1 / holdout``-th is held out, and no training window reaches into one.
    Losses are nats per character. A batch is ``batch_size`` random training windows, int32
    ``[batch_size, sequence_length]``: ``inputs``, and ``targets``, the same shifted by one.

    Args:
      config: see `TextConfig`. Files are UTF-8, or Latin-1 where they are not valid UTF-8. In a
        folder, hidden files and those with NUL bytes are passed over. The default text differs
        between versions of Python, and losses on it differ a little with it.

    Returns:
      The `Workload`. Its ``loss_fn`` needs a ``key`` if ``dropout`` is above 0.

    Raises:
      ValueError: for a path that is missing, unreadable or no text, for less text than two blocks,
        and for sizes out of range or that do not fit together.
      TypeError: for sizes that are no numbers.
    """
    dtype = checked("text", config)
    allowed, fits = f"a multiple of heads, {config.heads}", config.width % config.heads == 0
    hint = "Every head takes an equal share of it."
    checks.require("text", "width", config.width, allowed, fits, hint)
    length, batch_size = config.sequence_length, config.batch_size
    characters = _corpus.read(config.paths, config.max_chars)
    training, held_out = _corpus.split(characters, length, config.holdout)
    training, held_out = _corpus.encode(training, held_out, _VOCABULARY)
    sizes = config.width, config.depth, config.heads
    model = CharacterTransformer(_VOCABULARY, length, *sizes, config.dropout, dtype)

    def batch(index: int, rows: Rows = None) -> dict[str, Any]:
        random = generator(config.seed, index)
        blocks = random.integers(len(training), size=(batch_size, 1))
        starts = random.integers(training.shape[1] - length, size=(batch_size, 1))
        chosen = slice(None) if rows is None else rows
        return _shifted(training[blocks[chosen], starts[chosen] + np.arange(length + 1)])

    windows = held_out.reshape(-1, length + 1)
    judged = min(len(windows), config.eval_batches * batch_size)
    return supervised(
        "text",
        model,
        batch,
        _shifted(windows[_corpus.spread(judged, len(windows))]),
        batch_size,
        f"{training.size:,} training and {held_out.size:,} held-out characters "
        f"({judged * length:,} judged), vocabulary {_VOCABULARY}",
        dropout=config.dropout > 0,
    )


def _shifted(windows: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    tokens = windows.astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
