"""Pictures of the records, readable on light and dark pages; each names the record it shows.

``python benchmarks/plots.py`` draws all of them anew.
"""

import hashlib
import json
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from harness import RESULTS

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#777777"
STYLE = {
    "figure.facecolor": "white",
    "figure.dpi": 110,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "font.size": 9,
    "figure.constrained_layout.use": True,
}
# The pictures and the record of each.
PICTURES = {"peers_jax": "peers_jax"}


def record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def digest(name: str) -> str:
    """By which a picture tells which record it was drawn from."""
    return hashlib.sha256((RESULTS / f"{name}.json").read_bytes()).hexdigest()


def save(figure: Any, name: str) -> None:
    metadata = {"Software": None, "Description": digest(PICTURES[name])}
    figure.savefig(RESULTS / f"{name}.png", metadata=metadata)
    plt.close(figure)


def pairs() -> None:
    """Ratios to the peers, on a log axis: left of one is for boostax."""
    rows = record("peers_jax")["sections"]["Pairs"]
    looks = {"time": (BLUE, "o"), "memory": (ORANGE, "s"), "wire bytes": (GREEN, "D")}
    names = [f"{row['technique'].replace('`', '')}  /  {row['instead of']}" for row in rows]
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(9, 0.27 * len(rows) + 1.1))
        for name, (color, marker) in looks.items():
            points = [
                (max(row[name], 1e-3), at) for at, row in enumerate(rows) if row[name] is not None
            ]
            x, y = zip(*points, strict=True)
            ax.scatter(x, y, s=30, color=color, marker=marker, label=name, zorder=3)
        ax.axvline(1.0, color=GREY, lw=1)
        ax.set_xscale("log")
        ax.set_yticks(range(len(rows)), names)
        ax.invert_yaxis()
        ax.set_xlabel("ours over theirs: below 1 is for boostax")
        ax.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
        save(figure, "peers_jax")


def draw_all() -> None:
    """Every picture whose record is there."""
    pairs()


if __name__ == "__main__":
    draw_all()
