# SPDX-License-Identifier: Apache-2.0
"""The plot of a run, in the style of ``inspect/boostax.mplstyle``."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from boostax.inspect.audit_picture import STYLE


def plot_run(rows: Sequence[Mapping[str, float]], path: pathlib.Path, title: str) -> None:
    """Training and held-out loss over the calls and, where there is one, the loss scale."""
    steps, losses = column(rows, "loss")
    scaled = column(rows, "loss_scale")
    with plt.style.context(STYLE):
        heights = [3, 1] if scaled[0] else [1]
        look: Any = {"sharex": True, "squeeze": False, "height_ratios": heights}
        figure, grid = plt.subplots(len(heights), 1, figsize=(8, 5.2), **look)
        axes = grid[:, 0]
        axes[0].plot(steps, losses, alpha=0.3, linewidth=0.8)
        axes[0].plot(steps, smooth(losses), color="C0", label="training, smoothed")
        axes[0].plot(*column(rows, "held_out_loss"), "o-", color="C1", label="held out")
        axes[0].set(ylabel="loss", title=title)
        axes[0].legend()
        if scaled[0]:
            axes[1].step(*scaled, where="post", color="C2")
            axes[1].set_yscale("log", base=2)
            axes[1].set(ylabel="loss scale")
        axes[-1].set(xlabel="call")
        figure.savefig(path)
        plt.close(figure)


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
