"""Tables of the pages, written from the records in ``benchmarks/results``.

A page holds a table behind its template, which is a comment::

    <!-- table: freezing_accuracy > Text
    | schedule | FLOPs | nats above none |
    | {variant} | {FLOPs / none : .0%} | {more than none ± its s.e. : .3f} |
    rows: interval; progressive
    -->
    (the table)
    <!-- end of table -->

In braces is a cell, ``FILE > SECTION > ROW > COLUMN : FORMAT``. Of a section any words that no
other section has are enough; a row is named by its first columns, joined by ``&``. What a path
leaves out in front is the table's FILE and SECTION and the row of the line: a line with such a
cell is written once for each of ``rows`` (``*``: all of them), whose name is ``_`` in a longer
path. ``COLUMN ± COLUMN`` adds an error, and ``COLUMN ÷ ROW`` divides by the value of another row.
A format is Python's, of a number in a unit of `UNITS` if one is in front: ``ms .1f``. Without
a format the cell is written as it is.

``python benchmarks/tables.py`` lists the pages that disagree; ``--write`` fixes them.
"""

import os
import pathlib
import re
import sys
from typing import Any

import harness

ROOT = pathlib.Path(__file__).parents[1]
TABLE = re.compile(
    r"(?P<template><!-- table:(?P<path>[^\n]*)\n(?P<lines>.*?)\n-->\n)"
    r"(?P<table>.*?)<!-- end of table -->",
    re.S,
)
CELL = re.compile(r"\{([^{}]+)\}")
UNITS = {"": 1.0, "points": 100.0, "ms": 1e3, "kB": 1e-3, "MB": 1e-6, "GB": 1e-9}
MINUS, EMPTY = "\N{MINUS SIGN}", "\N{EN DASH}"


class TableError(ValueError):
    """A template that leads to no cell."""


def pages() -> list[pathlib.Path]:
    """What may hold tables."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def rewritten(text: str, page: pathlib.Path) -> str:
    """The text of a page with the tables of the present records."""
    if text.count("<!-- table:") != len(TABLE.findall(text)):
        raise TableError(f"{page.name}: a template must end in a line '-->', a table in its end")
    return TABLE.sub(
        lambda match: f"{match['template']}{_table(match, page)}<!-- end of table -->", text
    )


def _table(match: re.Match[str], page: pathlib.Path) -> str:
    defaults = [part for part in match["path"].strip().split(" > ") if part]
    header, *templates = match["lines"].splitlines()
    wanted: list[str] = []
    if templates[-1].startswith("rows: "):
        wanted = templates.pop().removeprefix("rows: ").split("; ")
    if wanted == ["*"]:
        wanted = [str(next(iter(row.values()))) for row in _section(defaults[0], defaults[1])]
    lines, files = [header, "|" + "---|" * (header.count("|") - 1)], {}
    for template in templates:
        cells = [_Cell(words, defaults) for words in CELL.findall(template)]
        files |= dict.fromkeys(cell.file for cell in cells)
        for row in wanted if any(cell.of_a_row for cell in cells) else [""]:
            texts = iter([cell.written(row) for cell in cells])
            lines.append(CELL.sub(lambda _, texts=texts: next(texts), template))
    where = os.path.relpath(harness.RESULTS, page.parent)
    links = [f"[{x}]({where}/{x}.md)" for x in files if f"results/{x}.md" not in match["lines"]]
    caption = f"\nFrom {', '.join(links)}.\n" if links else ""
    return "\n".join(lines) + f"\n{caption}"


class _Cell:
    def __init__(self, words: str, defaults: list[str]) -> None:
        path, _, self.format = words.partition(" : ")
        parts = path.split(" > ")
        parts = [*[*defaults, "_"][: 4 - len(parts)], *parts]
        if len(parts) != 4:
            raise TableError(f"{words!r}: FILE > SECTION > ROW > COLUMN must be given, got {parts}")
        self.words = words
        self.file, self.section, self.row, columns = parts
        columns, _, self.base = columns.partition(" ÷ ")
        self.columns = columns.split(" ± ")

    @property
    def of_a_row(self) -> bool:
        """Whether the row is that of the line."""
        return "_" in self.row.split(" & ")

    def written(self, row: str) -> str:
        """The text of the cell in the line of a row."""
        values = [self._value(self.row, column, row) for column in self.columns]
        if self.base:
            values = [x / self._value(self.base, self.columns[0], row) for x in values]
        text = " ± ".join(map(self._text, values)).replace("% ±", " ±")
        return EMPTY if text == f"{EMPTY} ± {EMPTY}" else text

    def _value(self, name: str, column: str, row: str) -> Any:
        wanted = " & ".join(row if part == "_" else part for part in name.split(" & ")).split(" & ")
        rows = _section(self.file, self.section)
        found = [x for x in rows if [str(v) for v in x.values()][: len(wanted)] == wanted]
        if len(found) != 1:
            raise TableError(f"{self.words!r}: one row must be {wanted}, got {len(found)}")
        if column not in found[0]:
            raise TableError(f"{self.words!r}: columns must be of {list(rows[0])}, got {column!r}")
        return found[0][column]

    def _text(self, value: Any) -> str:
        unit, _, form = self.format.rpartition(" ")
        if value is None or not form:
            return EMPTY if value in (None, "") else str(value)
        if unit not in UNITS:
            raise TableError(f"{self.words!r}: a unit must be one of {list(UNITS)}, got {unit!r}")
        try:
            text = format(value * UNITS[unit], form)
        except (TypeError, ValueError) as error:
            raise TableError(f"{self.words!r}: {error}, the cell is {value!r}") from error
        # What rounds to zero from below reads as it does from above.
        return text.lstrip("-") if not re.search("[1-9]", text) else text.replace("-", MINUS)


def _section(file: str, words: str) -> list[dict[str, Any]]:
    if not (harness.RESULTS / f"{file}.json").exists():
        raise TableError(f"{file!r}: no such record in {harness.RESULTS}")
    sections = harness.sections_of(file)
    found = [words] if words in sections else [title for title in sections if words in title]
    if len(found) != 1:
        raise TableError(f"{file}: one section must have {words!r}, got {found} of {[*sections]}")
    return sections[found[0]]


def fix(write: bool) -> int:
    """Print the pages that disagree with the records, and rewrite them if asked."""
    wrong = 0
    for page in pages():
        text = page.read_text()
        if (fixed := rewritten(text, page)) != text:
            wrong += 1
            print(page.relative_to(ROOT))
            if write:
                page.write_text(fixed)
    return int(wrong > 0 and not write)


if __name__ == "__main__":
    sys.exit(fix("--write" in sys.argv[1:]))
