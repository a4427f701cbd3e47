"""The budget of the house: ceilings of code lines and words that only fall.

A new capability pays for itself. Where one has to raise a ceiling, its commit says what it paid
with. A code line is one that has a token and is neither comment nor docstring.
``python tests/test_budget.py`` prints where the house stands.
"""

import ast
import collections
import functools
import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# Code lines of rooms ("boostax" alone are the files that stand in no package of it), then the rest.
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
    "the library": 15695,
    "code lines of a function": 60,
    "words of documents": 45928,
    "words of README": 900,
    "words before `pip install`": 100,
    "words of a card": 900,
    "lines of a whole loop": 120,
}
TOP = ("boostax", "examples", "tests", "benchmarks")
# Records, and pages that a program writes.
GENERATED = (
    "CHANGELOG.md", "benchmarks/results/", "docs/api/", "docs/names.md",
    "docs/coming_from/every_item.md", "docs/loops/", "build/", "dist/", "runs/",
)  # fmt: skip
NO_CODE = ("NL", "NEWLINE", "INDENT", "DEDENT", "COMMENT", "ENDMARKER", "ENCODING")


def code_lines(text):
    """Return the numbers of the code lines of a program."""
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] not in NO_CODE:
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


def words(text):
    """Count the words of a page, without its tables."""
    return len(re.sub(r"(?m)^ *\|.*$", "", text).split())


def shown(path):
    """Return a page without the templates of its tables, which no reader sees."""
    return re.sub(r"(?s)<!--.*?-->", "", path.read_text())


def kept(path):
    name = path.relative_to(ROOT).as_posix()
    return "site-packages" not in name and not name.startswith(GENERATED)


@functools.cache
def house():
    """Return the size of what has a ceiling and, of the longest of its kind, its name."""
    rooms, functions = collections.Counter(), []
    for path in (path for top in TOP for path in sorted((ROOT / top).rglob("*.py"))):
        text, room = path.read_text(), room_of(path)
        lines = code_lines(text)
        rooms[room] += len(lines)
        for node in ast.walk(ast.parse(text)) if room.startswith("boostax") else ():
            if isinstance(node, ast.FunctionDef):
                size = len(lines & set(range(node.lineno, node.end_lineno + 1)))
                functions.append((size, f"{path.relative_to(ROOT)}: {node.name}"))
    pages = (*ROOT.glob("[!.]*.md"), *ROOT.glob("[!.]*/**/*.md"))
    readme = shown(ROOT / "README.md")
    loops = [(len(p.read_text().splitlines()), p.name) for p in ROOT.glob("examples/loops/*.py")]
    return {room: (size, "") for room, size in rooms.items()} | {
        "the library": (sum(n for room, n in rooms.items() if room.startswith("boostax")), ""),
        "code lines of a function": max(functions),
        "words of documents": (sum(words(p.read_text()) for p in pages if kept(p)), ""),
        "words of README": (len(readme.split()), ""),
        "words before `pip install`": (len(readme.partition("pip install")[0].split()), ""),
        "words of a card": max((words(shown(p)), p.name) for p in ROOT.glob("docs/cards/*.md")),
        "lines of a whole loop": max(loops),
    }


@pytest.mark.parametrize("what", CEILINGS)
def test_nothing_grows_over_its_ceiling(what):
    size, longest = house()[what]
    assert size <= CEILINGS[what], longest


if __name__ == "__main__":
    for what, (size, longest) in house().items():
        print(f"{size:6} of {CEILINGS[what]:6}  {what} {longest}".rstrip())
