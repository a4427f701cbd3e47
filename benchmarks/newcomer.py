"""A newcomer's path: a clone of the last commit, ``make demo``, and how long until its result."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

from harness import Bar, report

ROOT = pathlib.Path(__file__).parents[1]


def path(folder: pathlib.Path) -> tuple[list[dict[str, float | str]], float]:
    """Seconds of each step, and the demo's held-out loss; nothing but Python and git is given."""
    clone, home = folder / "boostax", folder / "home"
    home.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"}
    steps = {
        "git clone": ["git", "clone", "--quiet", str(ROOT), str(clone)],
        "install, downloads included": ["make", "-C", str(clone), ".venv/.ready"],
        "make demo": ["make", "-C", str(clone), "demo"],
    }
    rows: list[dict[str, float | str]] = []
    for name, command in steps.items():
        begun = time.monotonic()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        rows.append({"step": name, "seconds": time.monotonic() - begun})
        print(rows[-1], flush=True)
    summary = json.loads((clone / "runs" / "demo" / "summary.json").read_text())
    picture = clone / "runs" / "demo" / "loss.png"
    if not picture.stat().st_size:
        raise RuntimeError("newcomer: the demo drew no picture")
    return rows, summary["held_out_loss"]


def main() -> None:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="newcomer-"))
    try:
        rows, loss = path(folder)
    finally:
        shutil.rmtree(folder)
    total = sum(float(row["seconds"]) for row in rows)
    rows.append({"step": "in all", "seconds": total})
    told = [{"what": "held-out loss of the demo", "figure": loss}]
    bars = [Bar("seconds from the clone to the first result", total, 300.0)]
    sections = [("The path", rows), ("The result", told)]
    report("newcomer", "From the clone to the first result", sections, bars)


if __name__ == "__main__":
    main()
