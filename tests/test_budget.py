"""The budget of the house: ceilings of code lines, names and words that only fall.

``budget.toml`` has two columns, today's ceilings and the design's. A code line has a token and is
neither comment nor docstring. ``python tests/test_budget.py`` prints the sizes.
"""

import ast
import functools
import importlib
import io
import itertools
import pathlib
import re
import subprocess
import sys
import tokenize
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
BUDGET = tomllib.loads((ROOT / "tests/budget.toml").read_text())
# Pages that a program writes, and what is no page.
GENERATED = ("CHANGELOG.md", "benchmarks/results/", "docs/api/", "docs/names.md", "docs/pairs.md")
NO_CODE = ("NL", "NEWLINE", "INDENT", "DEDENT", "COMMENT", "ENDMARKER", "ENCODING")


def code_lines(text):
    """Return the numbers of the code lines of a program."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def git(*arguments):
    """Return what git prints about the checkout, or ``None`` without one."""
    run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return run.stdout if run.returncode == 0 and (ROOT / ".git").exists() else None


@functools.cache
def files():
    """List the files of the checkout by name; without git, those that a release contains."""
    tracked = git("ls-files", "--cached", "--others", "--exclude-standard")
    if tracked is not None:
        return sorted(x for x in tracked.splitlines() if (ROOT / x).is_file())
    tops = ("boostax", "tests", "benchmarks", "examples", "docs", "notebooks")
    found = [*ROOT.glob("*.md"), *(path for top in tops for path in (ROOT / top).rglob("*"))]
    return sorted(path.relative_to(ROOT).as_posix() for path in found if path.is_file())


@functools.cache
def lines_of(name):
    return code_lines((ROOT / name).read_text())


def size_of(*tops):
    """Count the code lines of Python files and folders."""
    names = [name for name in files() if name.endswith(".py")]
    return sum(len(lines_of(x)) for x in names if x.startswith(tuple(f"{top}/" for top in tops)))


def room_size(room):
    parts = [f"boostax/{part}" for part in room.split()]
    # No module has the name of a function, so `explain` is explaining.py.
    modules = [x for x in files() if x.endswith(".py") and x[:-3].removesuffix("ing") in parts]
    return size_of(*parts) + sum(len(lines_of(x)) for x in modules)


def toml_lines():
    """Count the TOML lines of the library, without the table of other names."""
    names = [x for x in files() if x.startswith("boostax/") and x.endswith(".toml")]
    texts = [(ROOT / x).read_text() for x in names if not x.endswith("/names.toml")]
    return sum(len(re.findall(r"(?m)^[ \t]*[^# \t\n].*$", text)) for text in texts)


def public_names():
    """Count the distinct names of the public modules that boostax defines, before others load."""
    import boostax

    packages = sorted(path.parent.name for path in ROOT.glob("boostax/[!_]*/__init__.py"))
    packages += ["explaining", "states"]
    names = {x for x in boostax._LATE if x not in packages}
    for module in (boostax, *[importlib.import_module(f"boostax.{x}") for x in packages]):
        for name, value in vars(module).items():
            ours = getattr(value, "__module__", "boostax").startswith("boostax")
            if ours and not name.startswith("_") and type(value).__name__ != "module":
                names.add(name)
    return len(names - {"TYPE_CHECKING"})


def words(name, rows=r"(?!)"):
    """Count the words that a reader sees without ``rows``; a template of a table is a comment."""
    return len(re.sub(rows, "", re.sub(r"(?s)<!--.*?-->", "", (ROOT / name).read_text())).split())


@functools.cache
def sizes():
    """Return the size of what has a ceiling and, of the longest of its kind, its name."""
    pages = [x for x in files() if x.endswith(".md") and not x.startswith(GENERATED)]
    functions = []
    for name in [x for x in files() if x.startswith("boostax/") and x.endswith(".py")]:
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.FunctionDef):
                body = set(range(node.lineno, node.end_lineno + 1))
                functions.append((len(lines_of(name) & body), f"{name}: {node.name}"))
    loops = [x for x in files() if x.startswith("examples/loops/") and x.endswith(".py")]
    cards = [x for x in pages if x.startswith("docs/cards/")]
    alone = [sys.executable, "-c", "import test_budget as x; print(x.public_names())"]
    before = (ROOT / "README.md").read_text().partition("pip install")[0]
    return {room: (room_size(room), "") for room in BUDGET["rooms"]} | {
        "code lines of the library": (size_of("boostax"), ""),
        "lines of TOML in the library": (toml_lines(), ""),
        "public names": (int(subprocess.check_output(alone, cwd=ROOT / "tests")), ""),
        "code lines of tests": (size_of("tests"), ""),
        "code lines of benchmarks": (size_of("benchmarks"), ""),
        "code lines of examples": (size_of("examples"), ""),
        "words of pages": (sum(len((ROOT / x).read_text().split()) for x in pages), ""),
        "code lines of a function": max(functions),
        "words of README": (words("README.md"), ""),
        "words before `pip install`": (len(before.split()), ""),
        "words of a card": max((words(x, r"(?m)^ *\|.*$"), x) for x in cards),
        "lines of a whole loop": max((len((ROOT / x).read_text().splitlines()), x) for x in loops),
    }


def rises(old, new):
    """List what a change of the budget may not raise.

    The design's column never changes. Until all rooms of the design have code, a total only falls,
    and a room rises by at most what other rooms fall; then each rises to the design's ceiling.
    """
    in_order = all(today > 0 for today, design in new["rooms"].values() if design)
    faults = []
    for part, rows in old.items():
        for name, (was, allowed) in rows.items():
            today, design = new[part].get(name, (0, 0))
            if design != allowed:
                faults.append(f"{name}: the design's ceiling is {allowed}, not {design}")
            if today > was and not (today <= design if in_order else part == "rooms"):
                faults.append(f"{name}: {was} to {today}")
    before, after = (sum(today for today, _ in x["rooms"].values()) for x in (old, new))
    if after > before and not in_order:
        faults.append(f"the rooms together: {before} to {after}")
    return faults


CEILINGS = [(name, today) for rows in BUDGET.values() for name, (today, _) in rows.items()]


@pytest.mark.parametrize(("name", "ceiling"), CEILINGS, ids=[name for name, _ in CEILINGS])
def test_nothing_grows_over_its_ceiling(name, ceiling):
    size, longest = sizes()[name]
    assert size <= ceiling, longest


def test_each_file_of_the_library_is_in_one_room():
    assert sum(map(room_size, BUDGET["rooms"])) == size_of("boostax")


def test_no_commit_raised_a_ceiling():
    """Nor does the working tree; of the commits, each since the budget has two columns."""
    hashes = git("log", "--first-parent", "--reverse", "--format=%H", "--", "tests/budget.toml")
    texts = [git("show", f"{x}:tests/budget.toml") for x in (hashes or "").split()]
    for old, new in itertools.pairwise([*(tomllib.loads(x) for x in texts if x), BUDGET]):
        assert rises(old, new) == []


DRAFT = {"rooms": {"a": [10, 8], "b": [5, 9], "later": [0, 3]}, "totals": {"tests": [7, 9]}}
ORDERED = {"rooms": {"a": [8, 8], "b": [5, 9], "later": [1, 3]}, "totals": {"tests": [7, 9]}}


RISES = [
    (DRAFT, {"a": [9, 8]}, []),
    (DRAFT, {"a": [11, 8]}, ["the rooms together: 15 to 16"]),
    (DRAFT, {"a": [8, 8], "b": [7, 9]}, []),
    (DRAFT, {"a": [8, 8], "b": [8, 9]}, ["the rooms together: 15 to 16"]),
    (DRAFT, {"a": [10, 9]}, ["a: the design's ceiling is 8, not 9"]),
    (DRAFT, {"tests": [8, 9]}, ["tests: 7 to 8"]),
    (DRAFT, {"tests": [6, 9]}, []),
    (DRAFT, {"more": [1, 0]}, ["the rooms together: 15 to 16"]),
    (ORDERED, {"b": [9, 9], "tests": [9, 9]}, []),
    (ORDERED, {"b": [10, 9], "tests": [10, 9]}, ["b: 5 to 10", "tests: 7 to 10"]),
]


@pytest.mark.parametrize(("old", "change", "faults"), RISES)
def test_a_rise_needs_an_equal_fall_or_the_room_that_the_design_gives(old, change, faults):
    new = {part: dict(rows) for part, rows in old.items()}
    for name, row in change.items():
        new["totals" if name == "tests" else "rooms"][name] = row
    assert rises(old, new) == faults


if __name__ == "__main__":
    for what, (size, longest) in sizes().items():
        today, design = next(rows[what] for rows in BUDGET.values() if what in rows)
        print(f"{size:6} of {today:6} (design {design:6})  {what} {longest}".rstrip())
