"""An audit as a picture: what is held in memory, and what each collective sends."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from boostax.inspect.audit_table import headline
from boostax.inspect.collectives import CompiledCollective

if TYPE_CHECKING:
    from boostax.inspect.audit import Audit

# Tones between black and white pages.
_TEXT = "#797979"
_KINDS = {
    "all-reduce": "#3d85c6",
    "reduce-scatter": "#2f9e6b",
    "all-gather": "#d9762b",
    "all-to-all": "#a667c2",
    "send": "#b8862b",
}
_OTHER = "#999999"


def draw(found: Audit, path: Any) -> None:
    """Draw to a file whose suffix says the format."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {"text.color": _TEXT, "axes.labelcolor": _TEXT, "xtick.color": _TEXT}
    style |= {"ytick.color": _TEXT, "axes.edgecolor": _TEXT, "figure.constrained_layout.use": True}
    with plt.rc_context(style):
        figure, (memory, wire) = plt.subplots(2, 1, figsize=(9, 5.5), height_ratios=[1, 2.2])
        figure.suptitle(headline(found), fontsize=10)
        _memory(memory, found)
        _wire(wire, found)
        figure.savefig(pathlib.Path(path), transparent=True, dpi=150)
        plt.close(figure)


def _memory(axes: Any, found: Audit) -> None:
    held = {
        "arguments": found.argument_bytes,
        "results beside them": found.output_bytes - found.aliased_bytes,
        "temporaries": found.temporary_bytes,
    }
    unit = found.params_bytes or 2**20
    left = 0.0
    for (name, value), color in zip(held.items(), ("#3d85c6", "#d9762b", "#b0413e"), strict=True):
        axes.barh(0, value / unit, left=left, color=color, label=f"{name} {value / unit:.2f}")
        left += value / unit
    axes.set_yticks([])
    axes.set_xlabel("memory of a device, in multiples of its params" if found.params else "MiB")
    _legend(axes)


def _wire(axes: Any, found: Audit) -> None:
    """One bar a collective, in the order of the schedule; hatched where only some calls run it."""
    shown = sorted(found.collectives, key=lambda c: -c.wire_bytes)[:40]
    ordered = [c for c in found.collectives if any(c is x for x in shown)]
    unit = found.params_bytes or 2**20
    for place, c in enumerate(ordered):
        axes.bar(
            place,
            c.wire_bytes / unit,
            color=_KINDS.get(c.kind, _OTHER),
            alpha=1.0 if c.overlapped else 0.55,
            hatch="///" if c.branches else None,
            edgecolor="white" if c.branches else "none",
        )
        if c.executions > 1:
            axes.annotate(
                f"{c.executions}x", (place, c.wire_bytes / unit), ha="center", va="bottom"
            )
    axes.set_xticks([])
    sent = "sent per call, of the params' bytes" if found.params else "sent per call, MiB"
    axes.set_ylabel(sent)
    axes.set_xlabel("collectives as scheduled; pale: nothing computed meanwhile")
    _name_kinds(axes, ordered)


def _name_kinds(axes: Any, shown: list[CompiledCollective]) -> None:
    for kind in dict.fromkeys(c.kind for c in shown):
        axes.bar(0, 0, color=_KINDS.get(kind, _OTHER), label=kind)
    if any(c.branches for c in shown):
        axes.bar(0, 0, color="none", edgecolor=_TEXT, hatch="///", label="in a branch")
    if shown:
        _legend(axes)


def _legend(axes: Any) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=_TEXT)
