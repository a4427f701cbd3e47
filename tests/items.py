"""What the documents of MindSpore and SINGA name, item by item.

``docs/coming_from/every_item.toml`` has tables ``[[section]]`` with ``items``, one a line. Of an
item ``name`` and ``default`` are the original's; ``here`` is what it is now, as names with their
arguments (``boostax.accumulate(every)``), from jax and optax, too; ``is`` is one of `WORDS`;
``why`` is a remark; ``test`` is ``FILE::NAME`` in ``tests``; ``breaks`` is ``[file, old, new]``: a
text in a file of the library (in the call that the test makes where the item is of jax or optax
alone), and what makes the test fail in its place.

``python tests/items.py WORD ...`` prints the items that have one of the words in their names;
``--break WORD ...`` breaks a copy for each item that has one of the words in its name or its test,
and prints what each test does.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from typing import NamedTuple

import boostax

ROOT = pathlib.Path(__file__).parents[1]
LIBRARY = pathlib.Path(boostax.__file__).parents[1]
TABLE = ROOT / "docs" / "coming_from" / "every_item.toml"
WORDS = {
    "same": "the same effect, shown by the test",
    "better": "does what that does, and more or without a fault of it",
    "different": "another way to the same end, and why",
    "missing": "has no meaning in JAX, and why",
}
NAME = re.compile(r"(?P<path>[\w.]+)(?:\((?P<arguments>[\w, ]+)\))?")


class Item(NamedTuple):
    """A line of the table.

    Attributes:
      name: the original's.
      word: one of `WORDS`.
      default: the original's; empty where it has none.
      here: what it is now; empty if it is missing.
      why: a remark.
      test: the test that shows it.
      breaks: a file, a text that stands once in it, and what makes the test fail in its place.
    """

    name: str
    word: str
    default: str = ""
    here: str = ""
    why: str = ""
    test: str = ""
    breaks: tuple[str, ...] = ()

    def names(self):
        """``(dotted name, its arguments)`` of what it is here."""
        for match in NAME.finditer(self.here):
            yield match["path"], re.findall(r"\w+", match["arguments"] or "")


def sections():
    """``(title, what stands before its table, items)`` of each section."""
    for section in tomllib.loads(TABLE.read_text())["section"]:
        rows = [{"breaks": ()} | item for item in section["items"]]
        items = [Item(word=x.pop("is"), breaks=tuple(x.pop("breaks")), **x) for x in rows]
        yield section["title"], section.get("intro", ""), items


def every_item():
    """The items of all sections."""
    return [item for _, _, items in sections() for item in items]


def described(item):
    """A line that says what an item is here, and the test that shows it."""
    parts = (item.default and f"= {item.default}", f"is {item.word}:", item.here, item.why)
    return " ".join([item.name, *filter(None, parts), item.test and f"({item.test})"]).rstrip()


def located(name):
    """Return a file of the checkout; of the library, where it is installed."""
    return (LIBRARY if name.startswith("boostax/") else ROOT) / name


def copy(folder):
    """Copy what the tests read of the house into a folder."""
    for name in ("boostax", "tests", "docs", "benchmarks", "examples", "notebooks"):
        ignored = shutil.ignore_patterns("__pycache__", "build")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy(path, folder)


def broken(item, house):
    """Return pytest's exit status on the test of an item in a broken copy, and its output."""
    path, (old, new) = house / item.breaks[0], item.breaks[1:]
    whole = path.read_text()
    path.write_text(whole.replace(old, new))
    flags = "-x -q -m= -n0 -p no:cacheprovider --no-header --tb=short"
    command = [sys.executable, "-m", "pytest", *flags.split(), f"tests/{item.test}"]
    given = {**os.environ, "PYTHONPATH": str(house), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=house, env=given, capture_output=True, text=True)
    finally:
        path.write_text(whole)
    return done.returncode, done.stdout


if __name__ == "__main__":
    if "--break" in sys.argv:
        words = sys.argv[sys.argv.index("--break") + 1 :]
        with tempfile.TemporaryDirectory() as folder:
            copy(pathlib.Path(folder))
            for item in every_item():
                if item.breaks and any(word in item.name + item.test for word in words):
                    status, told = broken(item, pathlib.Path(folder))
                    last = [line for line in told.splitlines() if line.startswith("E ")][-1:]
                    print("fails" if status == 1 else f"SURVIVES ({status})", item.name, *last)
    else:
        asked = (x for x in every_item() if any(y in x.name for y in sys.argv[1:]))
        print(*map(described, asked), sep="\n")
