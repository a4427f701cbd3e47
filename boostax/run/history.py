# SPDX-License-Identifier: Apache-2.0
"""The rows of a long run, in few bytes."""

from array import array
from collections.abc import Sequence
from typing import Any, overload

Row = dict[str, Any]


class History(Sequence[Row]):
    """Rows of scalars, kept as numbers: 8 bytes each, where a dictionary of floats takes sixty.

    A run of a hundred thousand calls has as many rows, and its memory should not grow with them.

    Args:
      keep: how many of the last rows stay; all if ``None``.

    Example:
      >>> history = History()
      >>> history.append({"step": 1, "loss": 0.5})
      >>> history[-1], len(history)
      ({'step': 1, 'loss': 0.5}, 1)
    """

    def __init__(self, keep: int | None = None):
        self._keep = keep
        self._names: list[tuple[str, ...]] = []
        self._kinds, self._starts, self._values = array("H"), array("Q"), array("d")

    def append(self, row: Row) -> None:
        """Add a row; its ``step`` is a whole number, all else floats."""
        names = tuple(row)
        if names not in self._names:
            self._names.append(names)
        self._kinds.append(self._names.index(names))
        self._starts.append(len(self._values))
        self._values.extend(row.values())
        if self._keep is not None and len(self._kinds) >= 2 * self._keep:
            self._forget(len(self._kinds) - self._keep)

    def _forget(self, rows: int) -> None:
        """Drop the first rows: as many at once as stay, so that each is moved but once."""
        dropped = self._starts[rows]
        del self._kinds[:rows], self._starts[:rows], self._values[:dropped]
        self._starts = array("Q", (start - dropped for start in self._starts))

    def __len__(self) -> int:
        found = len(self._kinds)
        return found if self._keep is None else min(found, self._keep)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        # Rows before these wait to be forgotten.
        found = range(len(self._kinds))[-len(self) :][index]
        start = self._starts[found]
        names = self._names[self._kinds[found]]
        row: Row = dict(zip(names, self._values[start : start + len(names)], strict=True))
        return row | {"step": int(row["step"])} if "step" in row else row

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"History({list(self)!r})"
