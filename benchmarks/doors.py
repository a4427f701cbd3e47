"""Doors: other people's programs before and after boostax, each in its own environment.

A door is a script ``doors/NAME.py`` that prints rows of the record as its last line. Beside it may
lie ``NAME.txt``, what pip is to install; first lines ``# python: 3.12`` and
``# source: ADDRESS@COMMIT`` say which interpreter and whose checkout it wants. Environments and
checkouts are made in ``.doors``; ``--source NAME=DIR`` takes a checkout that is there.

``--only a,b`` runs some; what others printed stays on record. ``--merge`` runs none and publishes
the rows in ``build/doors/NAME.json``, where every run leaves them.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
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
    return dict(re.findall(r"^# (python|source): (\S+)$", text, re.M))


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


def rows_of(name: str) -> list[Row]:
    """What a script printed, checked."""
    rows = json.loads((RAW / f"{name}.json").read_text())
    for row in rows:
        if tuple(row) != COLUMNS:
            raise ValueError(f"{name}: a row must have {COLUMNS}, got {tuple(row)}.")
    return [{"door": f"{name} {number}"} | row for number, row in enumerate(rows, 1)]


def merged(new: dict[str, list[Row]]) -> list[Row]:
    """New rows, and those on record of other scripts that are still there."""
    old = harness.sections_of("doors").get(DOORS, [])
    kept = [x for x in old if x["door"].split()[0] in set(names()) - new.keys()]
    every = [*kept, *(row for rows in new.values() for row in rows)]
    return sorted(every, key=lambda row: names().index(row["door"].split()[0]))


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


def main() -> None:
    """Run, and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="scripts, by comma")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--merge", action="store_true", help="run none, publish what is kept")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else names()
    if not options.merge:
        folders = dict(each.split("=", 1) for each in options.source)
        for name in chosen:
            run(name, folders)
    new = {name: rows_of(name) for name in chosen if (RAW / f"{name}.json").exists()}
    rows = merged(new)
    harness.on_cpu()
    harness.report("doors", "Doors into other people's programs", [(DOORS, rows)], bars(rows))


if __name__ == "__main__":
    main()
