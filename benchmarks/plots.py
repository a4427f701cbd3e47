"""The picture of the README: boostax over what one would use instead, drawn from their record.

``python benchmarks/plots.py`` draws it anew. The picture tells which record it shows.
"""

import hashlib
import json
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from harness import RESULTS, sections_of

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
LOOKS = {"time": (BLUE, "o"), "memory": (ORANGE, "s"), "wire bytes": (GREEN, "D")}


def digest() -> str:
    """By which the picture tells what it was drawn from."""
    return hashlib.sha256(json.dumps(sections_of("peers_jax")).encode()).hexdigest()


def label(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Both names, and the remark where two pairs have the same."""
    both = ("technique", "instead of")
    alike = sum(all(row[name] == other[name] for name in both) for other in rows) > 1
    name = f"{row['technique'].replace('`', '')}  /  {row['instead of']}"
    return f"{name} ({row['remark']})" if alike else name


def draw() -> None:
    """Ratios on a log axis, a row for each pair: left of one is for boostax."""
    rows = sections_of("peers_jax")["Pairs"]
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(8.5, 0.27 * len(rows) + 1.0))
        for name, (color, marker) in LOOKS.items():
            points = [(row[name], at) for at, row in enumerate(rows) if row[name] is not None]
            x, y = zip(*points, strict=True)
            ax.scatter(x, y, s=34, color=color, marker=marker, label=name, zorder=3)
        ax.axvline(1.0, color=GREY, lw=1)
        ax.set_xscale("log")
        ticks = [0.001, 0.01, 0.1, 0.5, 1, 2, 4, 8]
        ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
        ax.minorticks_off()
        ax.set_yticks(range(len(rows)), [label(row, rows) for row in rows])
        ax.invert_yaxis()
        ax.set_xlabel("ours over theirs: left of 1 is for boostax")
        ax.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
        figure.savefig(
            RESULTS / "overview.png", metadata={"Software": None, "Description": digest()}
        )
        plt.close(figure)


if __name__ == "__main__":
    draw()
