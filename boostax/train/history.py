"""The rows of a long run, in few bytes."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, overload

Row = dict[str, Any]


class History(Sequence[Row]):
    """Rows of scalars, kept as numbers: 8 bytes each, where a dictionary of floats takes sixty.

    A run of a hundred thousand calls has as many rows, and its memory should not grow with them.

    Example:
      >>> history = History()
      >>> history.append({"step": 1, "loss": 0.5})
      >>> history[-1], len(history)
      ({'step': 1, 'loss': 0.5}, 1)
    """

    def __init__(self, rows: Iterable[Row] = ()):
        self._names: list[tuple[str, ...]] = []
        self._kinds, self._starts, self._values = array("H"), array("Q"), array("d")
        for row in rows:
            self.append(row)

    def append(self, row: Row) -> None:
        """Add a row; its ``step`` is a whole number, all else floats."""
        names = tuple(row)
        if names not in self._names:
            self._names.append(names)
        self._kinds.append(self._names.index(names))
        self._starts.append(len(self._values))
        self._values.extend(row.values())

    def __len__(self) -> int:
        return len(self._kinds)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = self._starts[index]
        names = self._names[self._kinds[index]]
        row: Row = dict(zip(names, self._values[start : start + len(names)], strict=True))
        return row | {"step": int(row["step"])} if "step" in row else row

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"History({list(self)!r})"
