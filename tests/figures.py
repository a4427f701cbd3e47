"""Figures in documents: of which record each is a cell, how it is written, and where it must stand.

``docs/figures/NAME.toml`` has those of one document: tables ``[[figure]]`` and ``[[given]]``. ::

    document = "docs/cards/accumulate.md"

    [[figure]]                    # the sentence, {} for each value, and the values in order
    says = "a window takes {} of the time, {} at best"
    from = [
      "accumulation > a window of 4 > accumulate, update > window / MultiSteps : .2f",
      { min = ["accumulation > bars > *: window / MultiSteps"], as = ".2f" },
    ]

    [[given]]                     # numbers that are no measurement of ours
    words = "a scale of 2^16"
    why = "hyperparameter"

A cell is ``FILE > SECTION > ROW > COLUMN``: the file ``benchmarks/results/FILE.json``; a section's
title, or words of it that no other has; a row's first columns, joined by `` & ``; a column's title,
or several joined by ``; ``, which give a value each. ``FILE > bars > CLAIM`` is a bar's figure.
``*`` stands for any characters of a row. Of a cell that is prose, ``> words {} words`` behind it
takes the number in the place of ``{}``. Behind `` : `` stands Python's format, with one of `SCALES`
in front if need be: ``points .1f``. Values computed from cells and plain numbers are tables with
one of `WORDS` and ``as``, and may hold such tables without ``as``.

``python tests/figures.py`` lists what disagrees, and ``--write`` puts the record's values in.
"""

import dataclasses
import functools
import json
import pathlib
import re
import statistics
import sys
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results"
ENTRIES = ROOT / "docs" / "figures"

SCALES = {"points": 100.0, "ms": 1e3, "kB": 1e-3, "MB": 1e-6, "GB": 1e-9}
WORDS = {
    "ratio": lambda a, b: a / b,
    "difference": lambda a, b: a - b,
    "min": lambda *numbers: min(numbers),
    "max": lambda *numbers: max(numbers),
    "mean": lambda *numbers: statistics.mean(numbers),
}
MINUS = "\N{MINUS SIGN}"
ANY_NUMBER = rf"[-+{MINUS}]?\d[\d,]*(?:\.\d+)?%?"


class FigureError(ValueError):
    """An entry that cannot be read, or that leads to no cell."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """A sentence of a document and the values in it."""

    document: str
    says: str
    values: tuple

    def written(self):
        """The values as the record has them."""
        values = [text for value in self.values for text in formatted(value)]
        if not values or len(values) != self.says.count("{}"):
            raise FigureError(f"{self.says!r}: {self.says.count('{}')} places, got {values}")
        return values

    def places(self, text, values=None):
        """Matches of the sentence, a group for each value; any numbers where none are given."""
        places = self.says.count("{}")
        numbers = [ANY_NUMBER] * places if values is None else map(_number, values)
        between = map(_words, self.says.split("{}"))
        held = [rf"(?<![\d.{MINUS}-])({number})(?!\d|[.,]\d)" for number in numbers]
        pattern = next(between) + "".join(a + b for a, b in zip(held, between, strict=True))
        return list(re.finditer(pattern, text))


@dataclasses.dataclass(frozen=True)
class Given:
    """Words whose numbers are not measured, and why."""

    document: str
    words: str
    why: str

    def places(self, text):
        """Matches of the words."""
        return list(re.finditer(_words(self.words), text))


def _words(text):
    return r"\s+".join(map(re.escape, re.split(r"\s+", text)))


def _number(text):
    return re.sub(r"^\\-", f"[-{MINUS}]", re.escape(text))


def read(path):
    """The entries of one file: ``(document, figures, given)``."""
    table = tomllib.loads(path.read_text())
    _only(table, {"document", "figure", "given"}, path.name)
    document, figures, given = table["document"], [], []
    for each in table.get("figure", []):
        _only(each, {"says", "from"}, path.name)
        figures.append(Figure(document, each["says"], tuple(each["from"])))
    for each in table.get("given", []):
        _only(each, {"words", "why"}, path.name)
        given.append(Given(document, each["words"], each["why"]))
    return document, figures, given


def _only(table, keys, where):
    if unknown := set(table) - keys:
        raise FigureError(f"{where}: keys are {sorted(keys)}, got {sorted(unknown)}")


def every_entry():
    """All figures and all that is given, of all files."""
    found = [read(path) for path in sorted(ENTRIES.glob("*.toml"))]
    return [x for _, xs, _ in found for x in xs], [x for _, _, xs in found for x in xs]


def formatted(value):
    """What ``from`` has in one place, as written in the document: a text for each column."""
    if isinstance(value, str):
        path, found, form = value.rpartition(" : ")
        if not found:
            raise FigureError(f"{value!r}: a format must follow, such as ' : .2f'")
        return [_format(x, form, value) for x in cells(path)]
    value = dict(value)
    form = value.pop("as")
    return [_format(number(value), form, str(value))]


def _format(value, form, where):
    scale, _, spec = form.rpartition(" ")
    if scale:
        if scale not in SCALES:
            raise FigureError(f"{where}: a scale is one of {sorted(SCALES)}, got {scale!r}")
        value = value * SCALES[scale]
    try:
        text = format(value, spec)
    except (TypeError, ValueError) as error:
        raise FigureError(f"{where}: {error}, the cell is {value!r}") from error
    # What rounds to zero from below reads as it does from above.
    return text.lstrip("-") if re.fullmatch(r"-0[.0]*%?", text) else text


def number(value):
    """A plain number, a cell, or a table of one word and what it is taken of."""
    numbers = _numbers(value)
    if len(numbers) != 1:
        raise FigureError(f"{value!r}: one number is wanted, got {numbers}")
    return numbers[0]


def _numbers(value):
    if isinstance(value, int | float):
        return [value]
    if isinstance(value, str):
        found = cells(value, many=True)
        if not all(isinstance(x, int | float) for x in found):
            raise FigureError(f"{value!r}: cells must be numbers, got {found}")
        return found
    if len(value) != 1 or not set(value) <= set(WORDS):
        raise FigureError(f"{value!r}: one of {sorted(WORDS)} is wanted")
    ((word, of),) = value.items()
    numbers = [x for each in of for x in _numbers(each)]
    try:
        return [WORDS[word](*numbers)]
    except TypeError as error:
        raise FigureError(f"{value!r}: {word} of {len(numbers)} numbers") from error


@functools.cache
def record(name):
    """A file of the records; its bars as one more section."""
    path = RECORDS / f"{name}.json"
    if not path.exists():
        raise FigureError(f"{name!r}: no such file in {RECORDS.relative_to(ROOT)}")
    data = json.loads(path.read_text())
    return data["sections"] | {"bars": data["bars"]}


def cells(path, many=False):
    """The values to which a path leads: one row's, unless ``many``."""
    parts = [part.strip() for part in path.split(" > ")]
    if len(parts) == 3 and parts[1] == "bars":
        parts.append("figure")
    if len(parts) not in (4, 5):
        raise FigureError(f"{path!r}: FILE > SECTION > ROW > COLUMN is wanted")
    name, section, row, columns, *words = parts
    sections = record(name)
    titles = [section] if section in sections else [t for t in sections if section in t]
    if len(titles) != 1:
        raise FigureError(f"{path!r}: sections with {section!r} are {titles} of {list(sections)}")
    rows = _rows(sections[titles[0]], row)
    if not rows or (len(rows) > 1 and not many):
        raise FigureError(f"{path!r}: one row is wanted, got {len(rows)} of {titles[0]!r}")
    values = []
    for column in columns.split("; "):
        if column not in rows[0]:
            raise FigureError(f"{path!r}: columns are {list(rows[0])}, got {column!r}")
        values += [each[column] for each in rows]
    if None in values:
        raise FigureError(f"{path!r}: an empty cell")
    return [_in_prose(x, words[0], path) for x in values] if words else values


def _rows(rows, wanted):
    wanted = wanted.split(" & ")
    first = [[str(x) for x in row.values()][: len(wanted)] for row in rows]
    if wanted not in first:
        globs = [".*".join(map(re.escape, each.split("*"))) for each in wanted]
        alike = [len(has) == len(globs) and all(map(re.fullmatch, globs, has)) for has in first]
        return [row for row, fits in zip(rows, alike, strict=True) if fits]
    return [row for row, has in zip(rows, first, strict=True) if has == wanted]


def _in_prose(text, words, path):
    before, _, after = words.partition("{}")
    found = re.findall(rf"{_words(before)}({ANY_NUMBER}){_words(after)}", text)
    if len(found) != 1:
        raise FigureError(f"{path!r}: {words!r} once is wanted, got {found}")
    return float(found[0].replace(",", "").replace(MINUS, "-").rstrip("%"))


def disagreements(figure, text):
    """What is wrong with a figure in the text of its document, in words; empty if nothing is."""
    values = figure.written()
    if figure.places(text, values):
        return ""
    says = figure.says.replace("{}", "{}").format(*values)
    found = [match[0] for match in figure.places(text)]
    return f"{figure.document} must say {says!r}, says {found or 'nothing like it'}"


def rewritten(figure, text):
    """The text with the record's values in the one place that has the sentence."""
    places = figure.places(text)
    if len(places) != 1:
        raise FigureError(f"{figure.document}: {figure.says!r} stands {len(places)} times")
    spans = list(zip(range(1, len(places[0].groups()) + 1), figure.written(), strict=True))
    for group, value in reversed(spans):
        start, end = places[0].span(group)
        text = text[:start] + value.replace("-", MINUS) + text[end:]
    return text


def main(write):
    """Print what disagrees, and mend it if asked; the exit code says whether anything did."""
    figures, _ = every_entry()
    wrong = 0
    for figure in figures:
        page = ROOT / figure.document
        if trouble := disagreements(figure, page.read_text()):
            wrong += 1
            print(trouble)
            if write:
                page.write_text(rewritten(figure, page.read_text()))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(write="--write" in sys.argv[1:]))
