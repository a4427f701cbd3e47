"""Doors: other people's programs before and after boostax, each in its own environment.

A door is a script ``doors/NAME.py`` that prints rows of the record as its last line, or an
object of them by section. Beside it may lie ``NAME.txt``, what pip is to install; first lines
``# python: 3.12`` and ``# source: ADDRESS@COMMIT`` say which interpreter and whose checkout it
wants. Environments and checkouts are made in ``.doors``; ``--source NAME=DIR`` takes a checkout
that is there.

``--only a,b`` runs some; what others printed stays on record. ``--merge`` runs none and publishes
the rows in ``build/doors/NAME.json``, where every run leaves them. ``--page`` runs none and writes
the differences of the loops in ``docs/doors`` into ``docs/doors.md``.
"""

import argparse
import ast
import difflib
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from typing import Any

import harness

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks" / "doors"
MADE, RAW = ROOT / ".doors", ROOT / "build" / "doors"
COLUMNS = (
    "program",
    "version",
    "way",
    "lines",
    "its tests",
    "reductions before",
    "reductions after",
    "temp MB before",
    "temp MB after",
    "state MB before",
    "state MB after",
    "losses differ",
)
LOOPS, PAGE = harness.DOCS / "doors", harness.DOCS / "doors.md"
DOORS = "Doors"
# Where few lines are promised.
FEW = ("Optax", "Flax", "Equinox")
Row = dict[str, Any]


def names() -> list[str]:
    """Of the scripts, the frameworks first."""
    found = sorted(path.stem for path in SCRIPTS.glob("*.py"))
    return sorted(found, key=lambda name: name != "frameworks")


def wanted(name: str) -> dict[str, str]:
    """What the first lines of its requirements ask for."""
    path = SCRIPTS / f"{name}.txt"
    text = path.read_text() if path.exists() else ""
    return dict(re.findall(r"^# (python|source|pip): (\S+)$", text, re.M))


def environment(name: str) -> str:
    """The interpreter: this one where the script has no requirements."""
    requirements = SCRIPTS / f"{name}.txt"
    if not requirements.exists():
        return sys.executable
    python = MADE / name / "bin" / "python"
    if not python.exists():
        version = wanted(name).get("python")
        command = [f"python{version}" if version else sys.executable, "-m", "venv", MADE / name]
        subprocess.run(command, check=True)
    install = [python, "-m", "pip", "install", "--quiet", "-r", requirements]
    if "pip" in wanted(name):
        install += [wanted(name)["pip"]]
    subprocess.run(install, check=True)
    return str(python)


def source(name: str, folders: dict[str, str]) -> list[str]:
    """The option that says where its checkout is."""
    if name in folders:
        return ["--source", folders[name]]
    if "source" not in wanted(name):
        return []
    address, commit = wanted(name)["source"].rsplit("@", 1)
    folder = MADE / f"{name}-source"
    if not folder.exists():
        git = ["git", "-C", str(folder)]
        subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
        subprocess.run([*git, "fetch", "--quiet", "--depth", "1", address, commit], check=True)
        subprocess.run([*git, "checkout", "--quiet", "FETCH_HEAD"], check=True)
    return ["--source", str(folder)]


def run(name: str, folders: dict[str, str]) -> None:
    """Run a script and keep its rows."""
    command = [environment(name), str(SCRIPTS / f"{name}.py"), *source(name, folders)]
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
    given = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=True)
    RAW.mkdir(parents=True, exist_ok=True)
    (RAW / f"{name}.json").write_text(done.stdout.splitlines()[-1] + "\n")


def sections_of(name: str) -> dict[str, list[Row]]:
    """What a script printed, checked."""
    found = json.loads((RAW / f"{name}.json").read_text())
    sections = found if isinstance(found, dict) else {DOORS: found}
    for row in sections[DOORS]:
        if tuple(row) != COLUMNS:
            raise ValueError(f"{name}: a row must have {COLUMNS}, got {tuple(row)}.")
    return {
        title: [{"door": f"{name} {number}"} | row for number, row in enumerate(rows, 1)]
        for title, rows in sections.items()
    }


def merged(new: dict[str, dict[str, list[Row]]]) -> dict[str, list[Row]]:
    """New rows, and those on record of other scripts that are still there."""
    of = lambda row: row["door"].split()[0]  # noqa: E731
    every = {
        title: [row for row in rows if of(row) in set(names()) - new.keys()]
        for title, rows in ({DOORS: []} | harness.sections_of("doors")).items()
    }
    for sections in new.values():
        for title, rows in sections.items():
            every[title] = [*every.get(title, []), *rows]
    return {
        title: sorted(rows, key=lambda row: names().index(of(row))) for title, rows in every.items()
    }


def bars(rows: list[Row]) -> list[harness.Bar]:
    """What is promised: of all doors, and of those into frameworks that take a chain of Optax."""
    few = [x for x in rows if x["program"].startswith(FEW) and x["door"].startswith("frameworks")]
    most = lambda there, column: max((x[column] for x in there), default=0)  # noqa: E731
    said = " and ".join((", ".join(FEW[:-1]), FEW[-1]))
    return [
        harness.Bar(f"{said}: lines changed", most(few, "lines"), 3),
        harness.Bar(f"{said}: reductions per step", most(few, "reductions after"), 1.01),
        harness.Bar(f"{said}: losses differ", most(few, "losses differ"), 1e-5),
        harness.Bar("all doors: lines changed", most(rows, "lines"), 20),
    ]


def shown(page: str) -> str:
    """The page with the differences of the loops as they are now."""
    return re.sub(
        r"(<!-- door: (\w+) -->\n).*?(<!-- end of door -->)",
        lambda found: f"{found[1]}```diff\n{difference(found[2])}\n```\n{found[3]}",
        page,
        flags=re.S,
    )


def difference(loop: str) -> str:
    """Of the bodies of ``before`` and ``after``, all lines."""
    text = (LOOPS / f"{loop}.py").read_text()
    found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    bodies = [
        textwrap.dedent("\n".join(text.splitlines()[node.lineno : node.end_lineno])).splitlines()
        for node in (found["before"], found["after"])
    ]
    # Without the names of files and the line numbers.
    lines = [*difflib.unified_diff(*bodies, lineterm="", n=99)][3:]
    return "\n".join(line.rstrip() for line in lines)


def main() -> int:
    """Run, and publish; of what fails the rows on record stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="scripts, by comma")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--merge", action="store_true", help="run none, publish what is kept")
    parser.add_argument("--page", action="store_true", help="run none, write the differences")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(shown(PAGE.read_text()))
        return 0
    chosen = options.only.split(",") if options.only else names()
    failed: list[str] = []
    if not options.merge:
        folders = dict(each.split("=", 1) for each in options.source)
        for name in chosen:
            try:
                run(name, folders)
            except (subprocess.CalledProcessError, FileNotFoundError) as error:
                print(f"{name}: {error}", file=sys.stderr)
                failed.append(name)
    sections = merged(
        {
            name: sections_of(name)
            for name in chosen
            if name not in failed and (RAW / f"{name}.json").exists()
        }
    )
    harness.on_cpu()
    title = "Doors into other people's programs"
    harness.report("doors", title, list(sections.items()), bars(sections[DOORS]))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
