"""Every figure that a document states is that of its record, and none stands there without one."""

import json
import pathlib
import re

import figures
import pytest

ROOT = figures.ROOT
# Written by a benchmark from its record; tests/test_results.py and others hold them to it.
GENERATED = {
    "docs/combinations.md",
    "docs/compilers.md",
    "docs/foreign_loops.md",
    "docs/museum.md",
    "docs/peers.md",
    "docs/placement_matrix.md",
    "docs/recipes.md",
    "docs/scaling.md",
    "docs/scorecard.md",
}
DOCUMENTS = [
    str(path.relative_to(ROOT))
    for path in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    if str(path.relative_to(ROOT)) not in GENERATED
]
FIGURES, GIVEN = figures.every_entry()

# Sections of these titles state measurements, and so does every block that links to a record, with
# the table right behind it. There every number in digits must be a figure or given.
MEASURING = re.compile(r"Measured|What it costs$|Cost$|When .*do(es)? not pay$")
RECORD_LINK = re.compile(r"\]\([^)\s]*benchmarks/results/")
# Code, links' targets, addresses and the marks of a list; the text of a link is text.
CODE = re.compile(
    r"^ *```.*\n(?:.*\n)*? *```$|(?<!`)(`+)(?!`)[^`]+?\1(?!`)|(?<=\])\([^)\s]+\)|<?https?://[^\s)>]+"
    r"|^ *\d+\. ",
    re.M,
)
ITEM = re.compile(r" *(?:[-*]|\d+\.) ")
# Not what belongs to a name: f16, GPT-2, #7. Powers, fractions and exponents are one number.
NUMBER = re.compile(
    r"(?<![\w.^*/#])(?<![A-Za-z\d]-)\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?:(?:\^|\*\*)-?[\d.]+|/\d+)?"
)
WHY = re.compile(
    r"hyperparameter|definition|setting: (?P<script>benchmarks/\S+\.py)|source: \S.*"
    r"|count: (?P<file>tests/\S+\.py)::(?P<test>test_\w+)"
)


def blank(text):
    """The text with code and addresses as spaces, every other character in its place."""
    return CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def blocks(text):
    """``(heading level or 0, start, end)`` of headings, paragraphs, tables and items of lists."""
    found, plain = [], blank(text)
    for match in re.finditer(r"(?:^.*\S.*\n?)+", plain, re.M):
        start = match.start()
        for line in match[0].splitlines(keepends=True):
            level = re.match(r"(#+) ", line)
            item = ITEM.match(text, start)
            if level or item or not found or found[-1][2] != start or found[-1][0]:
                found.append((len(level[1]) if level else 0, start, start + len(line)))
            else:
                found[-1] = (0, found[-1][1], start + len(line))
            start += len(line)
    return found


def measured(text):
    """Spans of the blocks that state measurements."""
    spans, under, linked = [], 0, False
    for level, start, end in blocks(text):
        title = text[start:end].strip("# \n")
        if level and (not under or level <= under):
            under = level if MEASURING.match(title) else 0
        behind = linked and text[start:end].lstrip().startswith("|")
        linked = bool(RECORD_LINK.search(text[start:end]))
        if not level and (under or linked or behind):
            spans.append((start, end))
    return spans


def uncovered(text, entries, given):
    """``line: number in its line`` of what stands in measured blocks without an entry."""
    covered = [
        match.span(group)
        for figure in entries
        for match in figure.places(text, figure.written())
        for group in range(1, len(match.groups()) + 1)
    ]
    covered += [match.span() for each in given for match in each.places(text)]
    plain, found = blank(text), []
    for start, end in measured(text):
        for match in NUMBER.finditer(plain, start, end):
            if not any(a <= match.start() and match.end() <= b for a, b in covered):
                line = text[: match.start()].count("\n")
                found.append(f"{line + 1}: {match[0]} in {text.splitlines()[line].strip()!r}")
    return found


def of(document, entries):
    return [each for each in entries if each.document == document]


@pytest.mark.parametrize(
    "figure", FIGURES, ids=lambda x: f"{pathlib.Path(x.document).stem}: {x.says[:50]}"
)
def test_the_document_says_what_the_record_says(figure):
    trouble = figures.disagreements(figure, (ROOT / figure.document).read_text())
    assert not trouble, trouble


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_measured_number_is_tied_to_a_record(document):
    text = (ROOT / document).read_text()
    found = uncovered(text, of(document, FIGURES), of(document, GIVEN))
    assert not found, f"{document}: no [[figure]] and no [[given]] for\n" + "\n".join(found)


@pytest.mark.parametrize(
    "given", GIVEN, ids=lambda x: f"{pathlib.Path(x.document).stem}: {x.words[:50]}"
)
def test_what_is_given_stands_there_and_its_reason_holds(given):
    assert given.places((ROOT / given.document).read_text()), (
        f"{given.words!r} does not stand there"
    )
    assert NUMBER.search(given.words), f"{given.words!r} has no number"
    why = WHY.fullmatch(given.why)
    assert why, f"{given.why!r}: not one of the reasons {WHY.pattern}"
    if why["script"]:
        assert (ROOT / why["script"]).exists()
    if why["test"]:
        assert re.search(rf"^def {why['test']}\(", (ROOT / why["file"]).read_text(), re.M)


def test_every_file_of_entries_is_of_one_document_that_exists():
    pages = [figures.read(path)[0] for path in figures.ENTRIES.glob("*.toml")]
    assert sorted(pages) == sorted(set(pages)) and set(pages) <= set(DOCUMENTS)


PAGE = f"""# Page

An interval of 7 is nobody's business.

## Measured effect

A step takes 1.25 times the time ([table](../benchmarks/results/toy.md)), with `x = 3` and f16, and
loses **{figures.MINUS}1.9 ± 0.1 points** in 20
steps.

## Else

Of [a table](benchmarks/results/toy.md):

| 4 | 5 |
|---|---|

And 6 behind it.
"""
SECTION = [
    {"form": "plain", "seeds": 3, "time": 0.8, "points": -0.019, "s.e.": 0.001, "note": None},
    {"form": "boostax", "seeds": 3, "time": 1.0, "points": 0.0, "s.e.": 0.0, "note": "1,250 steps"},
]
SAYS = {
    "A step takes {} times": [
        {"ratio": ["toy > T > boostax > time", "toy > T > plain > time"], "as": ".2f"}
    ],
    "loses **{} ± {} points** in": ["toy > T > plain & 3 > points; s.e. : points .1f"],
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A record of two rows, in the place of all others."""
    bars = [{"claim": "toy: time", "figure": 1.25, "limit": 2, "met": True}]
    (tmp_path / "toy.json").write_text(json.dumps({"sections": {"A Table": SECTION}, "bars": bars}))
    monkeypatch.setattr(figures, "RECORDS", tmp_path)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    figures.record.cache_clear()
    yield [figures.Figure("page.md", says, tuple(values)) for says, values in SAYS.items()]
    figures.record.cache_clear()


def test_a_document_that_disagrees_is_found(toy):
    assert [figures.disagreements(each, PAGE) for each in toy] == ["", ""]
    older = PAGE.replace("1.25", "1.2").replace("0.1 points", "10.1 points")
    first, second = (figures.disagreements(each, older) for each in toy)
    assert "must say 'A step takes 1.25 times', says ['A step takes 1.2 times']" in first
    assert "loses **-1.9 ± 0.1 points** in" in second
    assert "nothing like it" in figures.disagreements(toy[0], PAGE.replace("step", "call"))
    mended = figures.rewritten(toy[1], figures.rewritten(toy[0], older))
    assert mended == PAGE


def test_a_number_without_an_entry_is_found(toy):
    steps = figures.Given("page.md", "20 steps", "hyperparameter")
    assert [x.split()[1] for x in uncovered(PAGE, toy, [steps])] == ["4", "5"]
    assert [x.split(" in ")[0] for x in uncovered(PAGE, toy[:1], [])] == [
        "8: 1.9",
        "8: 0.1",
        "8: 20",
        "15: 4",
        "15: 5",
    ]
    # A value that is not the record's covers nothing.
    assert "7: 1.2 in" in uncovered(PAGE.replace("1.25", "1.2"), toy, [steps])[0]


@pytest.mark.parametrize(
    "value, texts",
    [
        ("toy > Table > boostax > time : .1%", ["100.0%"]),
        ("toy > A Table > b* > time; seeds : g", ["1", "3"]),
        ("toy > bars > toy: time : .2f", ["1.25"]),
        ("toy > Table > boostax > note > {} steps : ,.0f", ["1,250"]),
        ({"max": ["toy > Table > * > time", 0.9], "as": ".1f"}, ["1.0"]),
        ({"mean": ["toy > Table > * > time"], "as": ".1f"}, ["0.9"]),
        ({"difference": [{"min": ["toy > Table > * > time"]}, 0.801], "as": ".1f"}, ["0.0"]),
    ],
)
def test_values_are_read_and_written(toy, value, texts):
    assert figures.formatted(value) == texts


@pytest.mark.parametrize(
    "value, error",
    [
        ("toy > Table > boostax > time", "a format must follow"),
        ("toy > Table > boostax : .1f", "FILE > SECTION > ROW > COLUMN"),
        ("other > Table > boostax > time : .1f", "no such file"),
        ("toy > Tale > boostax > time : .1f", "sections with 'Tale' are"),
        ("toy > Table > * > time : .1f", "one row is wanted, got 2"),
        ("toy > Table > boost > time : .1f", "one row is wanted, got 0"),
        ("toy > Table > boostax > tine : .1f", "columns are"),
        ("toy > Table > plain > note : s", "an empty cell"),
        ("toy > Table > boostax > note : .1f", "the cell is '1,250 steps'"),
        ("toy > Table > boostax > note > {} calls : .1f", "once is wanted"),
        ("toy > Table > boostax > time : miles .1f", "a scale is one of"),
        ({"sum": ["toy > Table > * > time"], "as": ".1f"}, "one of"),
        ({"ratio": ["toy > Table > boostax > time"], "as": ".1f"}, "ratio of 1 numbers"),
        ({"max": ["toy > Table > boostax > note"], "as": ".1f"}, "cells must be numbers"),
    ],
)
def test_what_leads_nowhere_is_an_error(toy, value, error):
    with pytest.raises(figures.FigureError, match=re.escape(error)):
        figures.formatted(value)


def test_an_entry_that_says_too_little_or_too_much_is_an_error(toy, tmp_path):
    with pytest.raises(figures.FigureError, match=r"0 places, got \[\]"):
        figures.disagreements(figures.Figure("page.md", "A step", ()), PAGE)
    with pytest.raises(figures.FigureError, match=r"2 places, got \['0\.8'\]"):
        one = "toy > Table > plain > time : .1f"
        figures.disagreements(figures.Figure("page.md", "{} of {}", (one,)), PAGE)
    path = tmp_path / "page.toml"
    path.write_text('document = "page.md"\n[[figure]]\nsay = "{}"\nfrom = []\n')
    with pytest.raises(figures.FigureError, match=r"got \['say'\]"):
        figures.read(path)
