"""The curves of the benchmark of growth: one picture per axis, a column per family."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import PIL.Image

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator

COLORS = ("#1f6fb2", "#d1611c", "#23845a", "#9347b0", "#a07400", "#c2255c", "#5b6470", "#0b8b9c")
MARKS = "osD^vPXd"
DRAWN = ("temp bytes", "unfused bytes", "flops", "wire bytes", "equations", "compile s")
STYLE: dict[str, Any] = {
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "savefig.dpi": 110,
}
Rows = Sequence[Mapping[str, Any]]


def draw(
    axis: str, curves: Mapping[str, Rows], families: Mapping[str, str], path: pathlib.Path
) -> None:
    """Small multiples with logarithmic axes: a row per count, a column per family.

    Args:
      axis: what grows to the right.
      curves: of each technique its rows, one per point.
      families: of each technique the family.
      path: the PNG.
    """
    columns = list(dict.fromkeys(families[name] for name in curves))
    counts = [
        count for count in DRAWN if any(row[count] for rows in curves.values() for row in rows)
    ]
    with plt.rc_context(STYLE):
        size = (2.9 * len(columns) + 0.4, 1.75 * len(counts) + 1.9)
        figure, panels = plt.subplots(
            len(counts), len(columns), figsize=size, sharex=True, sharey="row", squeeze=False
        )
        for i, family in enumerate(columns):
            chosen = {name: rows for name, rows in curves.items() if families[name] == family}
            for panel, count in zip(panels[:, i], counts, strict=True):
                _panel(panel, axis, count, chosen)
            panels[-1, i].set_xlabel(axis)
            handles, labels = panels[0, i].get_legend_handles_labels()
            panels[0, i].legend(
                handles, labels, loc="lower left", bbox_to_anchor=(0, 1.02), fontsize=7.5,
                title=family, alignment="left", borderaxespad=0, handlelength=1.6,
            )  # fmt: skip
        for panel, count in zip(panels[:, 0], counts, strict=True):
            panel.set_ylabel(count)
        figure.text(0.995, 0.002, "dashed: linear", ha="right", va="bottom", color="#555555")
        figure.tight_layout(h_pad=0.6, w_pad=0.8)
        figure.savefig(path)
        plt.close(figure)
    with PIL.Image.open(path) as image:
        # Few colours: a quarter of the size.
        small = image.convert("RGB").quantize(96, dither=PIL.Image.Dither.NONE)
    small.save(path, optimize=True)


def _panel(panel: Any, axis: str, count: str, chosen: Mapping[str, Rows]) -> None:
    """One count of one family; what is zero has no place on a logarithmic axis."""
    panel.set_xscale("log")
    panel.set_yscale("log")
    tops = []
    for index, (name, rows) in enumerate(chosen.items()):
        points = [(row[axis], row[count]) for row in rows if row[count]]
        label, look = name.replace("`", ""), {"color": COLORS[index], "marker": MARKS[index]}
        # Later curves are thinner, so that those that coincide are all seen.
        width = 3.2 - 2.2 * index / max(1, len(chosen) - 1)
        panel.plot(
            *(zip(*points, strict=True) if points else ([], [])),
            linewidth=width, markersize=width + 1.6, label=label, **look,
        )  # fmt: skip
        tops += points[-1:]
    if tops:
        x, y = max(tops, key=lambda point: point[1])
        first = min(row[axis] for rows in chosen.values() for row in rows)
        # As far down as there are curves.
        look = {"color": "#555555", "linewidth": 0.8, "zorder": 0}
        panel.plot([first, x], [y * first / x, y], "--", **look, scaley=False)
    else:
        panel.text(0.5, 0.5, "none", transform=panel.transAxes, ha="center", color="#777777")
    ticks = sorted({row[axis] for rows in chosen.values() for row in rows})
    panel.set_xticks(ticks, [_short(x) for x in ticks])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_locator(LogLocator(numticks=5))
    panel.yaxis.set_minor_locator(NullLocator())


def _short(value: int) -> str:
    return f"{value // 10**6}M" if value >= 10**6 else str(value)
