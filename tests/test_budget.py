"""The budget of the house: ceilings of code lines and words that only fall.

A new capability pays for itself. Where one has to raise a ceiling, its commit says what it paid
with. A code line is one that has a token and is neither comment nor docstring.
``python tests/test_budget.py`` prints where the house stands.
"""

import ast
import functools
import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# Code lines; "boostax" alone are the files that stand in no package of it.
CEILINGS = {
    "boostax": 595,
    "boostax/_core": 3010,
    "boostax/accumulate": 644,
    "boostax/chain": 311,
    "boostax/config": 947,
    "boostax/freeze": 480,
    "boostax/inspect": 1711,
    "boostax/model": 715,
    "boostax/precision": 1736,
    "boostax/reduce": 2018,
    "boostax/subspace": 685,
    "boostax/testing": 817,
    "boostax/train": 2026,
    "examples": 718,
    "tests": 21381,
    "benchmarks": 6987,
}
TOP = ("boostax", "examples", "tests", "benchmarks")
LIBRARY = 15695
WORDS = 45928
LONGEST = 60
# Functions that are longer, until they are cut.
LONG: set[str] = set()
# Records, and pages that a program writes.
GENERATED = (
    "CHANGELOG.md", "benchmarks/results/", "docs/api/", "docs/names.md",
    "docs/coming_from/every_item.md", "docs/loops/", "build/", "dist/", "runs/",
)  # fmt: skip
NO_CODE = {
    tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT,
    tokenize.ENDMARKER, tokenize.ENCODING,
}  # fmt: skip


def code_lines(text):
    """Return the numbers of the code lines of a program."""
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            found -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return found


def room_of(path):
    """Return the room of a file: a package of the library, or a folder at the top."""
    parts = path.relative_to(ROOT).parts
    inner = "/".join(parts[:2])
    return inner if inner in CEILINGS else parts[0]


@functools.cache
def house():
    """Count the code lines of each room, and those of each long function of the library."""
    rooms, long = dict.fromkeys(CEILINGS, 0), {}
    for path in (path for top in TOP for path in sorted((ROOT / top).rglob("*.py"))):
        text = path.read_text()
        lines = code_lines(text)
        rooms[room_of(path)] += len(lines)
        for node in ast.walk(ast.parse(text)) if room_of(path).startswith("boostax") else ():
            if isinstance(node, ast.FunctionDef):
                size = len(lines & set(range(node.lineno, node.end_lineno + 1)))
                if size > LONGEST:
                    long[f"{path.relative_to(ROOT)}: {node.name}"] = size
    return rooms, long


def words():
    """Count the words of the documents, without what a program writes."""
    pages = (*ROOT.glob("[!.]*.md"), *ROOT.glob("[!.]*/**/*.md"))
    return sum(len(re.sub(r"(?m)^ *\|.*$", "", p.read_text()).split()) for p in pages if kept(p))


def kept(path):
    name = path.relative_to(ROOT).as_posix()
    return "site-packages" not in name and not name.startswith(GENERATED)


@pytest.mark.parametrize("room", CEILINGS)
def test_no_room_grows_over_its_ceiling(room):
    assert house()[0][room] <= CEILINGS[room]


def test_the_library_keeps_its_budget():
    rooms, _ = house()
    assert sum(size for room, size in rooms.items() if room.startswith("boostax")) <= LIBRARY


def test_functions_are_short():
    """The exceptions are all there are: one that was cut leaves the list."""
    assert set(house()[1]) == LONG


def test_documents_keep_their_budget():
    assert words() <= WORDS


if __name__ == "__main__":
    rooms, long = house()
    for room, size in rooms.items():
        print(f"{size:6} of {CEILINGS[room]:6}  {room}")
    size = sum(size for room, size in rooms.items() if room.startswith("boostax"))
    print(f"{size:6} of {LIBRARY:6}  the library")
    print(f"{words():6} of {WORDS:6}  words of documents")
    for name, size in long.items():
        print(f"{size:6} of {LONGEST:6}  {name}")
