"""Characters of Python's standard library: reading them, holding blocks out, tokens."""

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

WINDOWS_PER_BLOCK = 16
# Tables and help pages written by programs are no text to learn from.
_LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
)


def read(max_chars: int) -> str:
    """Return the sources of the standard library, sorted by name, ``max_chars`` at most."""
    library = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[str] = []
    remaining = max_chars
    for file in sorted(library.rglob("*.py")):
        if not _LEFT_OUT.isdisjoint(file.relative_to(library).parts):
            continue
        if remaining <= 0:
            break
        data = file.read_bytes()
        try:
            piece = data.decode("utf-8-sig")[:remaining]
        except UnicodeDecodeError:
            piece = data.decode("latin-1")[:remaining]
        pieces.append(piece)
        remaining -= len(piece) + 1
    return "\n".join(pieces)[:max_chars]


def split(text: str, length: int, holdout: float) -> tuple[Array, Array]:
    """Return code points of the training and the held-out blocks, each ``[blocks, characters]``.

    A block is ``WINDOWS_PER_BLOCK`` windows of ``length + 1`` characters. At least one is held
    out and one left for training; what does not fill a block is dropped.
    """
    size = WINDOWS_PER_BLOCK * (length + 1)
    count = len(text) // size
    codes = np.frombuffer(text[: count * size].encode("utf-32-le", "surrogatepass"), "<u4")
    blocks = codes.reshape(count, size)
    chosen = spread(min(max(1, round(holdout * count)), count - 1), count)
    return np.delete(blocks, chosen, axis=0), blocks[chosen]


def spread(chosen: int, count: int) -> Array:
    """Return ``chosen`` different indices below ``count``, evenly apart."""
    return ((np.arange(chosen) + 0.5) * count / chosen).astype(np.int64)


def encode(training: Array, held_out: Array, vocabulary: int) -> tuple[Array, Array]:
    """Return tokens, uint8, of both splits by how common characters are in ``training``.

    Token 0 stands for every character beyond the ``vocabulary - 1`` most common ones.
    """
    counts = np.bincount(training.ravel(), minlength=int(held_out.max()) + 1)
    # Stable, so that equally common characters rank by code point.
    common = np.argsort(-counts, kind="stable")[: vocabulary - 1]
    common = common[counts[common] > 0]
    table = np.zeros(len(counts), np.uint8)
    table[common] = np.arange(1, len(common) + 1)
    return table[training], table[held_out]
