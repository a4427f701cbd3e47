"""What scripts of doors share: a patched copy, a program's tests, a run in a process, a row."""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # A program may want its environment before anything imports JAX.
    import boostax

ROOT = pathlib.Path(__file__).parents[3]
DOORS = ROOT / "docs" / "doors"


@contextlib.contextmanager
def patched(source: pathlib.Path, patch: pathlib.Path) -> Iterator[pathlib.Path]:
    """A copy of a checkout with a patch applied, as its users would."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / source.name
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git"))
        subprocess.run(["git", "apply", "--unidiff-zero", str(patch)], cwd=copy, check=True)
        yield copy


def lines_of(patch: pathlib.Path) -> int:
    """Lines that it adds, or takes away if these are more."""
    lines = [x for x in patch.read_text().splitlines() if not x.startswith(("+++", "---"))]
    count = lambda sign: sum(x.startswith(sign) and bool(x[1:].strip()) for x in lines)  # noqa: E731
    return max(count("+"), count("-"))


def code_of(path: pathlib.Path, marks: tuple[str, str] = ("", "")) -> int:
    """Lines of code of a file, without comments, blanks and its first docstring."""
    text = re.sub(r'^""".*?"""', "", path.read_text(), flags=re.S)
    text = text[text.index(marks[0]) :] if marks[0] else text
    text = text[: text.index(marks[1])] if marks[1] else text
    lines = (line.strip() for line in text.splitlines())
    return sum(bool(line) and not line.startswith(("#", '"""')) for line in lines)


def environment(*paths: pathlib.Path) -> dict[str, str]:
    """The variables of a process that imports from these folders first."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    every = [*map(str, paths), str(ROOT), *given]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, every))}


def passed(root: pathlib.Path, files: Sequence[str], *paths: pathlib.Path, more: Any = ()) -> str:
    """Of the tests that a program has for itself: ``passed of run``, those skipped left out."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *more]
    given = environment(*paths) | {"HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=root, env=given, stdout=subprocess.PIPE, text=True)
    found = dict((name, int(n)) for n, name in re.findall(r"(\d+) (\w+)", done.stdout[-400:]))
    count = found.get("passed", 0)
    print(done.stdout[-2000:], file=sys.stderr, flush=True)
    return f"{count} of {count + found.get('failed', 0) + found.get('error', 0)}"


def tests(with_boostax: str, without: str) -> str:
    """Both counts as the record says them."""
    return f"{with_boostax}, {without.split()[0]} without"


def measured(script: str, way: str, *paths: pathlib.Path) -> dict[str, Any]:
    """What a script says of one way, in a process of its own that imports from these folders."""
    command = [sys.executable, script, "--way", way]
    given = environment(*paths) | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=True)
    print(way, done.stdout.splitlines()[-1], file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def local_bytes(tree: Any) -> int:
    """Of the arrays in a tree, on one device."""
    import jax

    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return sum(x.addressable_shards[0].data.nbytes for x in arrays)


def told(audit: "boostax.inspect.Audit", kept: int, losses: list[float], over: Any = ()) -> str:
    """The line that ``measured`` reads; reductions over some axes alone, if these are named."""
    elements = sum(
        c.elements * c.executions
        for c in audit.collectives
        if c.kind in ("all-reduce", "reduce-scatter") and (not over or set(c.axes) & set(over))
    )
    reductions = elements / audit.params if over else audit.reductions
    found = {"reductions": reductions, "temp": audit.temporary_bytes / 1e6, "state": kept / 1e6}
    return json.dumps(found | {"gathers": audit.gathers, "losses": losses})


def row(
    program: str, version: str, way: str, lines: int, its_tests: str, old: Any, new: Any
) -> dict[str, Any]:
    """Of the record."""
    pairs = list(zip(old["losses"], new["losses"], strict=True))
    assert len(pairs) >= 5
    return {
        "program": program,
        "version": version,
        "way": way,
        "lines": lines,
        "its tests": its_tests,
        "reductions before": old["reductions"],
        "reductions after": new["reductions"],
        "temp MB before": old["temp"],
        "temp MB after": new["temp"],
        "state MB before": old["state"],
        "state MB after": new["state"],
        "losses differ": max(abs(a - b) / abs(a) for a, b in pairs),
    }


def run(
    what: str,
    train: Callable[..., None],
    rows: Callable[[pathlib.Path], list[dict[str, Any]]],
) -> None:
    """The command of a script: print the rows, or what one way does."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--source", type=pathlib.Path, help="a checkout")
    parser.add_argument("--way", help="the arguments of train, by spaces")
    options = parser.parse_args()
    if options.way:
        return train(*options.way.split())
    print(json.dumps(rows(options.source.resolve())))
