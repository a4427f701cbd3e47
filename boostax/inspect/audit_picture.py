# SPDX-License-Identifier: Apache-2.0
"""An audit as a picture: what is held in memory, and what each collective sends."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from boostax.inspect.audit_table import headline

if TYPE_CHECKING:
    from boostax.inspect.audit import Audit

STYLE = pathlib.Path(__file__).with_name("boostax.mplstyle")
# Colours of the style's cycle.
_KINDS = {
    "all-reduce": "C0",
    "reduce-scatter": "C2",
    "all-gather": "C1",
    "all-to-all": "C3",
    "send": "C4",
}


def draw(found: Audit, path: Any) -> None:
    """Draw to a file whose suffix says the format."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.style.context(STYLE):
        figure, (memory, wire) = plt.subplots(2, 1, figsize=(9, 5.5), height_ratios=[1, 2.2])
        figure.suptitle(headline(found), fontsize=10)
        unit = found.params_bytes or 2**20
        _memory(memory, found, unit)
        _wire(wire, found, unit)
        for axes in (memory, wire):
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(pathlib.Path(path))
        plt.close(figure)


def _memory(axes: Any, found: Audit, unit: float) -> None:
    left = 0.0
    for name, color, held in (
        ("arguments", "C0", found.argument_bytes),
        ("results beside them", "C1", found.output_bytes - found.aliased_bytes),
        ("temporaries", "#b0413e", found.temporary_bytes),
    ):
        axes.barh(0, held / unit, left=left, color=color, label=f"{name} {held / unit:.2f}")
        left += held / unit
    measured = "memory of a device, in multiples of its params" if found.params else "MiB"
    axes.set(yticks=[], xlabel=measured)


def _wire(axes: Any, found: Audit, unit: float) -> None:
    """One bar a collective, in the order of the schedule; hatched where only some calls run it."""
    dearest = sorted(found.collectives, key=lambda c: -c.wire_bytes)[:40]
    shown = [c for c in found.collectives if any(c is x for x in dearest)]
    for kind in dict.fromkeys(c.kind for c in shown):
        places, alike = zip(*((i, c) for i, c in enumerate(shown) if c.kind == kind), strict=True)
        bars = axes.bar(
            places,
            [c.wire_bytes / unit for c in alike],
            color=[(_KINDS.get(kind, "#999999"), 1.0 if c.overlapped else 0.55) for c in alike],
            hatch=["///" if c.branches else "" for c in alike],
            edgecolor="white",
            label=kind,
        )
        axes.bar_label(bars, [f"{c.executions}x" if c.executions > 1 else "" for c in alike])
    measured = "sent per call, of the params' bytes" if found.params else "sent per call, MiB"
    order = "collectives as scheduled; pale: nothing computed meanwhile"
    axes.set(xticks=[], ylabel=measured, xlabel=order)
    if any(c.branches for c in shown):
        # A bar without height, for the legend.
        axes.bar(0, 0, color="none", edgecolor="gray", hatch="///", label="in a branch")
