# SPDX-License-Identifier: Apache-2.0
"""Write an audit as text: totals, collectives and waste, in aligned tables."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from boostax.auditing.collectives import CompiledCollective
from boostax.auditing.hlo import Ways

if TYPE_CHECKING:
    from boostax.auditing.audit import Audit

Cells = list[tuple[str, ...]]
# The maximum number of rows of collectives; one more row sums the other collectives.
_ROWS = 16
# With fewer bytes of params than this, a TPU's program needs hardly any temporaries in HBM.
_SMALL = 100_000_000
# Counts that are not integers, and their decimal places.
_PLACES = {"overlap": 2, "network_seconds": 4}


def text(audit: Audit) -> str:
    """Return the headline, the tables and the findings."""
    blocks = [_headline(audit), aligned(_total_cells(audit))]
    if audit.collectives:
        blocks.append(aligned(_collective_cells(audit)))
    blocks.append("\n".join(f"! {waste}" for waste in audit.findings) or "Nothing is wasted.")
    accumulates = any("boostax.accumulate" in c.name for c in audit.collectives)
    if audit.calls > 1 and accumulates and 2 * audit.gradients.held > audit.params:
        times = number(audit.reductions, 2)
        blocks.append(f"The window's sum is sharded, so a step reduces {times} times the params")
    return "\n\n".join(blocks)


def number(value: float, places: int = 0) -> str:
    """Return the text of a count; an infinite count is written as ``unknown``."""
    return f"{value:,.{places}f}" if math.isfinite(value) else "unknown"


def _headline(audit: Audit) -> str:
    """Name the machine and the unit of counts, and summarize the program."""
    unit = f" ({audit.unit})" if audit.unit else ""
    params = f"{audit.params:,} params{unit}" if audit.params else "params not known"
    devices = f"{audit.devices} device{'s' * (audit.devices > 1)}"
    calls = f"; {audit.calls} calls per optimizer step" if audit.calls > 1 else ""
    lines = [f"{audit.target}, {devices}; {params}{calls}"]
    if audit.params:
        gathered = f", {number(audit.gathers, 2)} N gathered" if audit.gathered.most else ""
        per = "optimizer step" if audit.calls > 1 else "call"
        counts = f"{number(audit.reductions, 2)} N reduced{gathered} per {per}"
        lines.append(f"{counts}; temporaries {audit.temporaries:.2f} P")
    if audit.window:
        lines.append(f"A window spans several calls ({audit.window}), but calls is 1: pass calls=")
    if audit.cycles is not None and max(audit.params_bytes, audit.temporary_bytes) < _SMALL:
        lines.append("A small program's temporaries in a TPU's vector memory are not counted")
    lines += [audit.advice] * bool(audit.advice)
    if audit.unknown_loops:
        lines.append(f"Trip counts are unknown: {', '.join(audit.unknown_loops[:3])}. Pass turns=")
    return "\n".join(lines)


def _total_cells(audit: Audit) -> Cells:
    """Return totals per device, for a skipped or accumulated call and for an applied call."""
    cells: Cells = [("per call and device", "held", "applied", "of the params")]
    printed = ((x.name, *row) for x in dataclasses.fields(audit) for row in x.metadata.items())
    for name, label, unit in printed:
        value = getattr(audit, name)
        base = getattr(audit, unit) if unit else 0
        places = _PLACES.get(name, 0)
        skipped = ""
        if isinstance(value, Ways):
            skipped = number(value.held if audit.calls > 1 else value.least, places)
            value = value.most or None
        if value is not None:
            share = number(value / base, 2) if base else ""
            cells.append((label, skipped, number(value, places), share))
    return cells


def _collective_cells(audit: Audit) -> Cells:
    """Return a row for each group of equal collectives, the most expensive group first."""
    groups: dict[tuple[object, ...], list[CompiledCollective]] = {}
    for c in audit.collectives:
        groups.setdefault((*_row((c,))[:5], c.branches, *sorted(c.uses), c.source), []).append(c)
    rows = sorted(groups.values(), key=lambda group: -sum(c.wire_bytes for c in group))
    heads = "collective,dtype,times,over,call,elements,bytes sent,hidden,use".split(",")
    cells: Cells = [(*heads, "source"), *map(_row, rows[:_ROWS])]
    if others := [c for group in rows[_ROWS:] for c in group]:
        cells.append((f"{len(others)} more", "", "", "", "", *_row(others)[5:7], "", "", ""))
    return cells


def _row(group: Sequence[CompiledCollective]) -> tuple[str, ...]:
    """Return the row of equal collectives, with their number, their sums and their overlap."""
    c = group[0]
    sent = number(sum(x.wire_bytes for x in group))
    hidden = sum(x.bytes * x.overlapped for x in group) / max(1, sum(x.bytes for x in group))
    times = f"{len(group)} x " * (len(group) > 1) + number(c.executions)
    over = "x".join(c.axes) or f"{c.devices} devices"
    over += f" ({c.crosses}s)" if c.crosses else ""
    call = "applied" if c.branches else "each"
    # The source is the last folder, the file and the line of the user's code. If the line is
    # unknown, the source is the name of the boostax transformation.
    scopes = re.findall(r"boostax\.\w+", c.name)[-1:]
    source = "/".join(pathlib.PurePath(c.source).parts[-2:]) or "".join(scopes)
    dtype = "+".join(c.dtypes) + " (widened)" * c.widened
    sums = (f"{sum(x.elements for x in group):,}", sent, f"{hidden:.0%}")
    return (c.kind, dtype, times, over, call, *sums, "+".join(sorted(c.uses)), source)


def aligned(table: Cells) -> str:
    """Align the first and the last column to the left, other columns to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    left = (0, len(widths) - 1)
    line = "  ".join(f"{{:{'<' if i in left else '>'}{n}}}" for i, n in enumerate(widths))
    return "\n".join(line.format(*row).rstrip() for row in table)
