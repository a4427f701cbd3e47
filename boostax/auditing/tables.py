# SPDX-License-Identifier: Apache-2.0
"""The text of an audit: totals, collectives and waste, in aligned tables."""

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
# The maximum of rows of collectives; further collectives are added up in one more row.
_ROWS = 16
# With fewer bytes of params a TPU's program needs hardly any temporaries in HBM.
_SMALL = 100_000_000
# Counts that are not integers, and their decimal places.
_PLACES = {"overlap": 2, "network_seconds": 4}


def text(found: Audit) -> str:
    """Return the whole audit in words."""
    blocks = [_headline(found), aligned(_total_cells(found))]
    if found.collectives:
        blocks.append(aligned(_collective_cells(found)))
    blocks.append("\n".join(f"! {waste}" for waste in found.findings) or "Nothing is wasted.")
    own = any("boostax.accumulate" in c.name for c in found.collectives)
    if found.calls > 1 and own and 2 * found.gradients.held > found.params:
        times = number(found.reductions, 2)
        blocks.append(f"{times} N: the sum of the window is sharded (sums='sharded')")
    return "\n\n".join(blocks)


def number(value: float, places: int = 0) -> str:
    """Return the text of a count; an infinite count is unknown."""
    return f"{value:,.{places}f}" if math.isfinite(value) else "unknown"


def _headline(found: Audit) -> str:
    """Name the machine and the unit of counts, and sum up the program."""
    per = f"; {found.calls} calls per optimizer step" if found.calls > 1 else ""
    sized = f"{found.params:,} params{f' ({found.unit})' * bool(found.unit)}"
    sized = sized if found.params else "params not known"
    where = f"{found.devices} device{'s' * (found.devices > 1)}"
    lines = [f"{found.target}, {where}; {sized}{per}"]
    if found.params:
        said = f"{number(found.reductions, 2)} N reduced"
        said += f", {number(found.gathers, 2)} N gathered" if found.gathered.most else ""
        unit = "optimizer step" if found.calls > 1 else "call"
        lines.append(f"{said} per {unit}; temporaries {found.temporaries:.2f} P")
    if found.window:
        lines.append(f"One call, with a window open over several ({found.window}): say calls=")
    if found.cycles is not None and max(found.params_bytes, found.temporary_bytes) < _SMALL:
        lines.append("A small program's temporaries are in a TPU's vector memory and not counted")
    lines += [found.advice] * bool(found.advice)
    if found.unknown_loops:
        lines.append(f"Turns not known: {', '.join(found.unknown_loops[:3])}. Say turns=")
    return "\n".join(lines)


def _total_cells(found: Audit) -> Cells:
    """Return totals per call and device, held and applied."""
    cells: Cells = [("per call and device", "held", "applied", "of the params")]
    printed = ((x.name, *row) for x in dataclasses.fields(found) for row in x.metadata.items())
    for name, words, unit in printed:
        value, whole = getattr(found, name), getattr(found, unit) if unit else 0
        held, places = "", _PLACES.get(name, 0)
        if isinstance(value, Ways):
            waits = value.held if found.calls > 1 else value.least
            held, value = number(waits, places), value.most or None
        if value is not None:
            share = number(value / whole, 2) if whole else ""
            cells.append((words, held, number(value, places), share))
    return cells


def _collective_cells(found: Audit) -> Cells:
    """Return the collectives, equal ones in one row, the most expensive first."""
    groups: dict[tuple[object, ...], list[CompiledCollective]] = {}
    for c in found.collectives:
        alike = (*_row((c,))[:5], c.branches, *sorted(c.uses), c.source)
        groups.setdefault(alike, []).append(c)
    rows = sorted(groups.values(), key=lambda group: -sum(c.wire_bytes for c in group))
    heads = "collective,dtype,times,over,call,elements,bytes sent,hidden,use".split(",")
    cells: Cells = [(*heads, "source"), *map(_row, rows[:_ROWS])]
    rest = [c for group in rows[_ROWS:] for c in group]
    if rest:
        cells.append((f"{len(rest)} more", "", "", "", "", *_sums(rest)[:2], "", "", ""))
    return cells


def _row(group: Sequence[CompiledCollective]) -> tuple[str, ...]:
    """Return the row of equal collectives, with their number and sums."""
    c = group[0]
    times = f"{len(group)} x " * (len(group) > 1) + number(c.executions)
    over = "x".join(c.axes) or f"{c.devices} devices"
    over += f" ({c.crosses}s)" if c.crosses else ""
    call = "applied" if c.branches else "each"
    # The last folder, the file and the line; without a line of the user the part of a chain.
    scopes = re.findall(r"boostax\.\w+", c.name)[-1:]
    source = "/".join(pathlib.PurePath(c.source).parts[-2:]) or "".join(scopes)
    dtype = "+".join(c.dtypes) + " (widened)" * c.widened
    return (c.kind, dtype, times, over, call, *_sums(group), "+".join(sorted(c.uses)), source)


def _sums(group: Sequence[CompiledCollective]) -> tuple[str, str, str]:
    """Return elements, bytes on the wire, and the share of these bytes with overlap."""
    sent = sum(c.wire_bytes for c in group)
    hidden = sum(c.bytes * c.overlapped for c in group) / max(1, sum(c.bytes for c in group))
    return f"{sum(c.elements for c in group):,}", number(sent), f"{hidden:.0%}"


def aligned(table: Cells) -> str:
    """Align the first and the last column to the left, other columns to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    left = (0, len(widths) - 1)
    line = "  ".join(f"{{:{'<' if i in left else '>'}{n}}}" for i, n in enumerate(widths))
    return "\n".join(line.format(*row).rstrip() for row in table)
