# SPDX-License-Identifier: Apache-2.0
"""Characters from files: reading them, holding blocks out, and turning them into tokens."""

import codecs
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from boostax._core import checks

Array = np.ndarray[Any, Any]

WINDOWS_PER_BLOCK = 16

# Tables and help pages written by programs are no text to learn from.
_LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
)
_ALLOWED = "readable text files or folders"
_HINT = "Leave it empty to train on Python's standard library."


def read(paths: tuple[str, ...], max_chars: int) -> str:
    """The text of all files in order, at most ``max_chars`` of it, with newlines in between.

    Without ``paths`` it is Python's standard library, sorted by name. Valid UTF-8 is read as that
    and anything else as Latin-1. Files with NUL bytes are no text: in a folder they are passed
    over, as are hidden files; named directly they raise ValueError.
    """
    if isinstance(paths, str):
        hint = "Put a single path into a tuple: (path,)."
        raise ValueError(checks.message("text", "paths", "a tuple of strings", paths, hint))
    pieces: list[str] = []
    remaining = max_chars
    for file in _files(paths):
        if remaining <= 0:
            break
        piece = _decode(file, remaining)
        pieces.append(piece)
        remaining -= len(piece) + 1
    return "\n".join(pieces)[:max_chars]


def _files(paths: tuple[str, ...]) -> Iterator[Path]:
    if not paths:
        library = Path(sysconfig.get_paths()["stdlib"])
        for file in sorted(library.rglob("*.py")):
            if _LEFT_OUT.isdisjoint(file.relative_to(library).parts):
                yield file
        return
    for path in map(Path, paths):
        if path.is_dir():
            found = False
            for file in sorted(path.rglob("*")):
                hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if not hidden and file.is_file() and _is_text(file):
                    found = True
                    yield file
            if not found:
                raise _refusal(path, "a folder without a text file")
        elif not path.exists():
            raise _refusal(path, "no such file")
        elif not path.is_file():
            raise _refusal(path, "not a regular file")
        elif not _is_text(path):
            raise _refusal(path, "it has NUL bytes, so it is binary or UTF-16")
        else:
            yield path


def _is_text(file: Path) -> bool:
    return b"\0" not in _bytes(file, 8192)


def _bytes(file: Path, count: int) -> bytes:
    try:
        with file.open("rb") as handle:
            return handle.read(count)
    except OSError as error:
        raise _refusal(file, error.strerror or str(error)) from error


def _decode(file: Path, count: int) -> str:
    # No UTF-8 character is longer than four bytes. The incremental decoder forgives one cut short.
    data = _bytes(file, 4 * count)
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(data)[:count]
    except UnicodeDecodeError:
        return data.decode("latin-1")[:count]


def _refusal(path: Path, reason: str) -> ValueError:
    return ValueError(f"text: paths must name {_ALLOWED}, got {str(path)!r} ({reason}). {_HINT}")


def split(text: str, length: int, holdout: float) -> tuple[Array, Array]:
    """Code points of the training and the held-out blocks, each ``[blocks, characters]``.

    A block is ``WINDOWS_PER_BLOCK`` windows of ``length + 1`` characters. At least one is held
    out and one left for training; what does not fill a block is dropped.
    """
    size = WINDOWS_PER_BLOCK * (length + 1)
    count = len(text) // size
    if count < 2:
        raise ValueError(
            f"text: paths must hold at least {2 * size} characters, two blocks of "
            f"{WINDOWS_PER_BLOCK} windows, got {len(text)}. "
            "Give more text, raise max_chars or lower sequence_length."
        )
    codes = np.frombuffer(text[: count * size].encode("utf-32-le", "surrogatepass"), "<u4")
    blocks = codes.reshape(count, size)
    chosen = spread(min(max(1, round(holdout * count)), count - 1), count)
    return np.delete(blocks, chosen, axis=0), blocks[chosen]


def spread(chosen: int, count: int) -> Array:
    """``chosen`` different indices below ``count``, evenly apart."""
    return ((np.arange(chosen) + 0.5) * count / chosen).astype(np.int64)


def encode(training: Array, held_out: Array, vocabulary: int) -> tuple[Array, Array]:
    """Tokens, uint8, of both splits by how common characters are in ``training``.

    Token 0 stands for every character beyond the ``vocabulary - 1`` most common ones.
    """
    counts = np.bincount(training.ravel(), minlength=int(held_out.max()) + 1)
    # Stable, so that equally common characters rank by code point.
    common = np.argsort(-counts, kind="stable")[: vocabulary - 1]
    common = common[counts[common] > 0]
    table = np.zeros(len(counts), np.uint8)
    table[common] = np.arange(1, len(common) + 1)
    return table[training], table[held_out]
