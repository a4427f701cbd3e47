"""Plots of runs and comparisons, in the style of ``inspect/boostax.mplstyle``."""

import contextlib
import math
import pathlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from boostax.inspect.audit_picture import STYLE

# Colours of the style's cycle.
_FIRST, _SECOND, _THIRD = "C0", "C1", "C2"

Points = tuple[Sequence[float], Sequence[float]]


@contextlib.contextmanager
def _figure(path: pathlib.Path, width: float) -> Generator[Any]:
    """An empty figure in our style, which is saved and closed."""
    with plt.style.context(STYLE):
        figure = plt.figure(figsize=(width, 5.2))
        yield figure
        figure.savefig(path)
        plt.close(figure)


def plot_run(rows: Sequence[Mapping[str, float]], path: pathlib.Path, title: str) -> None:
    """Training and held-out loss over the calls and, where there is one, the loss scale."""
    steps, losses = column(rows, "loss")
    scaled = column(rows, "loss_scale")
    with _figure(path, 8) as figure:
        heights = [3, 1] if scaled[0] else [1]
        look: Any = {"sharex": True, "squeeze": False, "height_ratios": heights}
        axes = figure.subplots(len(heights), 1, **look)[:, 0]
        axes[0].plot(steps, losses, color=_FIRST, alpha=0.3, linewidth=0.8)
        axes[0].plot(steps, smooth(losses), color=_FIRST, label="training, smoothed")
        axes[0].plot(*column(rows, "held_out_loss"), "o-", color=_SECOND, label="held out")
        axes[0].set(ylabel="loss", title=title)
        axes[0].legend()
        if scaled[0]:
            axes[1].step(*scaled, where="post", color=_THIRD)
            axes[1].set_yscale("log", base=2)
            skips = _skips(rows)
            if skips[0]:
                axes[1].plot(*skips, "x", color=_SECOND, label="skipped")
                axes[1].legend()
            axes[1].set(ylabel="loss scale")
        axes[-1].set(xlabel="call")


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
    colors = {name: f"C{i}" for i, name in enumerate(curves)}
    with _figure(path, 11) as figure:
        grid = figure.add_gridspec(len(bars), 2, width_ratios=[2.2, 1])
        left = figure.add_subplot(grid[:, 0])
        for depth, (name, (training, held_out)) in enumerate(reversed(list(curves.items()))):
            # Variants often coincide: the first lie wide below the last, so that all are seen.
            look: Any = {"color": colors[name], "zorder": 3 - depth}
            left.plot(training[0], smooth(training[1]), linewidth=1, alpha=0.6, **look)
            look |= {"linewidth": 1.5 + 2 * depth, "markersize": 4 + 3 * depth, "label": name}
            left.plot(*held_out, "o-", **look)
        left.set(xlabel="optimizer step", ylabel="loss (points: held out, lines: training)")
        left.set_title(title)
        handles, labels = left.get_legend_handles_labels()
        left.legend(handles[::-1], labels[::-1])
        for row, (measure, values) in enumerate(bars.items()):
            axes = figure.add_subplot(grid[row, 1])
            drawn = axes.barh(list(values), list(values.values()), color=list(colors.values()))
            axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=9)
            axes.invert_yaxis()
            axes.grid(visible=False)
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
            axes.margins(x=0.2)
            axes.set_title(measure, fontsize=10)
            axes.tick_params(labelsize=9)


def column(rows: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    """The steps and values of the rows that have ``name``, finite ones only."""
    pairs = [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def smooth(values: Sequence[float]) -> list[float]:
    """A running mean over a thirtieth of the values to either side."""
    if not values:
        return []
    window = np.ones(2 * (len(values) // 30) + 1)
    counts = np.convolve(np.ones(len(values)), window, "same")
    return (np.convolve(values, window, "same") / counts).tolist()


def _skips(rows: Sequence[Mapping[str, float]]) -> tuple[list[float], list[float]]:
    steps, counts = column(rows, "skipped_steps")
    scales = dict(zip(*column(rows, "loss_scale"), strict=True))
    before = [0.0, *counts[:-1]]
    skipped = [s for s, a, b in zip(steps, before, counts, strict=True) if b > a and s in scales]
    return skipped, [scales[step] for step in skipped]
