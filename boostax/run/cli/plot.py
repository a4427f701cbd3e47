"""Plots that read on dark and on light pages: transparent, in tones between the two."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

# As far from white as from GitHub's dark background: contrast 4.3 with each.
TEXT = "#797979"
COLORS = ("#3d85c6", "#d9762b", "#2f9e6b", "#a667c2", "#b8862b")

_STYLE: Any = {
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "axes.titlecolor": TEXT,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "grid.alpha": 0.3,
    "grid.color": TEXT,
    "legend.frameon": False,
    "legend.labelcolor": TEXT,
    "savefig.dpi": 150,
    "savefig.transparent": True,
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}

Points = tuple[Sequence[float], Sequence[float]]


def plot_run(rows: Sequence[Mapping[str, float]], path: pathlib.Path, title: str) -> None:
    """Training and held-out loss over the calls and, where there is one, the loss scale."""
    steps, losses = column(rows, "loss")
    scaled = column(rows, "loss_scale")
    with plt.rc_context(_STYLE):
        heights = [3, 1] if scaled[0] else [1]
        figure, axes = plt.subplots(
            len(heights), 1, sharex=True, figsize=(8, 5.2), height_ratios=heights, squeeze=False
        )
        top = axes[0, 0]
        top.plot(steps, losses, color=COLORS[0], alpha=0.3, linewidth=0.8)
        top.plot(steps, smooth(losses), color=COLORS[0], label="training, smoothed")
        top.plot(*column(rows, "held_out_loss"), "o-", color=COLORS[1], label="held out")
        top.set(ylabel="loss", title=title)
        top.legend()
        if scaled[0]:
            bottom = axes[1, 0]
            bottom.step(*scaled, where="post", color=COLORS[2])
            bottom.set_yscale("log", base=2)
            skips = _skips(rows)
            if skips[0]:
                bottom.plot(*skips, "x", color=COLORS[1], label="skipped")
                bottom.legend()
            bottom.set(ylabel="loss scale")
        axes[-1, 0].set(xlabel="call")
        figure.savefig(path)
        plt.close(figure)


def plot_comparison(
    curves: Mapping[str, tuple[Points, Points]],
    bars: Mapping[str, Mapping[str, float]],
    path: pathlib.Path,
    title: str,
) -> None:
    """Curves of each variant, training and held-out, beside small bars of what each costs.

    Args:
      curves: of each variant its training and its held-out points.
      bars: of each measure, such as ``"ms per step"``, a value per variant.
      path: the PNG.
      title: of the whole.
    """
    colors = dict(zip(curves, COLORS, strict=False))
    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(11, 5.2))
        grid = figure.add_gridspec(len(bars), 2, width_ratios=[2.2, 1])
        left = figure.add_subplot(grid[:, 0])
        for depth, (name, (training, held_out)) in enumerate(reversed(list(curves.items()))):
            # Variants often coincide: the first lie wide below the last, so that all are seen.
            look: Any = {"color": colors[name], "zorder": 3 - depth}
            left.plot(training[0], smooth(training[1]), linewidth=1, alpha=0.6, **look)
            left.plot(
                *held_out,
                "o-",
                linewidth=1.5 + 2 * depth,
                markersize=4 + 3 * depth,
                **look,
                label=name,
            )
        left.set(xlabel="optimizer step", ylabel="loss (points: held out, lines: training)")
        left.set_title(title)
        handles, labels = left.get_legend_handles_labels()
        left.legend(handles[::-1], labels[::-1])
        for row, (measure, values) in enumerate(bars.items()):
            axes = figure.add_subplot(grid[row, 1])
            drawn = axes.barh(
                list(values), list(values.values()), color=[colors[name] for name in values]
            )
            axes.bar_label(drawn, fmt="%.3g", padding=3, color=TEXT, fontsize=9)
            axes.invert_yaxis()
            axes.grid(visible=False)
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
            axes.margins(x=0.2)
            axes.set_title(measure, fontsize=10)
            axes.tick_params(labelsize=9)
        figure.savefig(path)
        plt.close(figure)


def column(rows: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    """The steps and values of the rows that have ``name``, finite ones only."""
    pairs = [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def smooth(values: Sequence[float]) -> list[float]:
    """A running mean over a thirtieth of the values to either side."""
    reach = len(values) // 30
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(values))
    return ((sums[high] - sums[low]) / (high - low)).tolist()


def _skips(rows: Sequence[Mapping[str, float]]) -> tuple[list[float], list[float]]:
    steps, counts = column(rows, "skipped_steps")
    scales = dict(zip(*column(rows, "loss_scale"), strict=True))
    before = [0.0, *counts[:-1]]
    skipped = [s for s, a, b in zip(steps, before, counts, strict=True) if b > a and s in scales]
    return skipped, [scales[step] for step in skipped]
