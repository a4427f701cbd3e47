"""A newcomer's path: a clone of the last commit, ``make demo``, and the loops that one has.

How long each step takes; of a loop, the audits and the training of both its forms, not the typing
of the lines that differ.
"""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from typing import Any

from harness import Bar, report

ROOT = pathlib.Path(__file__).parents[1]
LOOPS = ("optax_multi_steps", "optax_scan", "flax_train_state", "flax_nnx", "equinox_module")
Row = dict[str, Any]


def path(folder: pathlib.Path) -> tuple[list[Row], list[Row], float]:
    """Steps, loops, and the demo's held-out loss; nothing but Python and git is given."""
    clone, home = folder / "boostax", folder / "home"
    home.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"}
    steps = {
        "git clone": ["git", "clone", "--quiet", str(ROOT), str(clone)],
        "install, downloads included": ["make", "-C", str(clone), ".venv/.ready"],
        "make demo": ["make", "-C", str(clone), "demo"],
    }
    rows: list[Row] = []
    for name, command in steps.items():
        begun = time.monotonic()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        rows.append({"step": name, "seconds": time.monotonic() - begun})
        print(rows[-1], flush=True)
    summary = json.loads((clone / "runs" / "demo" / "summary.json").read_text())
    picture = clone / "runs" / "demo" / "loss.png"
    if not picture.stat().st_size:
        raise RuntimeError("newcomer: the demo drew no picture")
    return rows, [loop(clone, name, environment) for name in LOOPS], summary["held_out_loss"]


def loop(clone: pathlib.Path, name: str, environment: dict[str, str]) -> Row:
    """A loop of ``docs/doors``, audited and trained before and after its lines."""
    command = [clone / ".venv" / "bin" / "python", clone / "benchmarks" / "doors" / "frameworks.py"]
    begun = time.monotonic()
    done = subprocess.run(
        [*command, name], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    seconds = time.monotonic() - begun
    (row,) = json.loads(done.stdout.splitlines()[-1])["Doors"]
    kept = ("program", "lines", "reductions before", "reductions after", "losses differ")
    return {column: row[column] for column in kept} | {"seconds": seconds}


def main() -> None:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="newcomer-"))
    try:
        rows, loops, loss = path(folder)
    finally:
        shutil.rmtree(folder)
    total = sum(row["seconds"] for row in rows)
    rows.append({"step": "in all", "seconds": total})
    told = [{"what": "held-out loss of the demo", "figure": loss}]
    bars = [
        Bar("seconds from the clone to the first result", total, 300.0),
        Bar("seconds of the demo, once installed", rows[-2]["seconds"], 180.0),
        Bar("loops: lines changed", max(row["lines"] for row in loops), 3),
        Bar("loops: reductions per step", max(row["reductions after"] for row in loops), 1.01),
    ]
    sections = [("The path", rows), ("Own loops", loops), ("The result", told)]
    report("newcomer", "From the clone to the first result", sections, bars)


if __name__ == "__main__":
    main()
