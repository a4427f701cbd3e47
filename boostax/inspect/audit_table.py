"""An audit in words: totals, then the collectives, then what is wasted."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from boostax.inspect.collectives import CompiledCollective
from boostax.inspect.tables import Cells, aligned

if TYPE_CHECKING:
    from boostax.inspect.audit import Audit
    from boostax.inspect.hlo import Ways

# Rows of collectives that are shown; the rest is added up in one.
_ROWS = 16
# Bytes of params below which a TPU's program needs hardly any temporaries in HBM.
_IN_VECTOR_MEMORY = 100_000_000


def text(found: Audit) -> str:
    """The whole audit."""
    blocks = [headline(found), aligned(total_cells(found), words=True)]
    if found.collectives:
        blocks.append(aligned(collective_cells(found), words=True))
    blocks.append("\n".join(f"! {waste}" for waste in found.findings) or "Nothing is wasted.")
    return "\n\n".join(blocks)


def headline(found: Audit) -> str:
    """Where it runs, and what it is measured by."""
    per = f"; {found.calls} calls per optimizer step" if found.calls > 1 else ""
    sized = f"{found.params:,} params" if found.params else "params not known"
    where = f"{found.devices} device{'s' * (found.devices > 1)}"
    lines = [f"{found.target}, {where}; {sized}{per}"]
    if found.params:
        said = f"{found.reductions:.2f} N reduced"
        said += f", {found.gathers:.2f} N gathered" if found.gathered.most else ""
        unit = "optimizer step" if found.calls > 1 else "call"
        lines.append(f"{said} per {unit}; temporaries {found.temporaries:.2f} P")
    if found.cycles is not None and found.params_bytes < _IN_VECTOR_MEMORY:
        lines.append("So small a program keeps temporaries in a TPU's vector memory: none are seen")
    if found.unknown_loops:
        names = ", ".join(found.unknown_loops[:3])
        lines.append(f"Turns not known, counted once: {names}")
    return "\n".join(lines)


def total_cells(found: Audit) -> Cells:
    """Per call and device: the cheapest way through the branches, and the dearest."""
    cells: Cells = [("per call and device", "held", "applied", "of the params")]

    def row(name: str, ways: Ways, unit: float) -> None:
        if ways.most:
            share = f"{ways.most / unit:.2f}" if unit else ""
            cells.append((name, f"{ways.least:,.0f}", f"{ways.most:,.0f}", share))

    elements, size = found.params, found.params_bytes
    row("elements reduced", found.reduced, elements)
    row("elements gathered", found.gathered, elements)
    row("bytes sent", found.wire_bytes, size)
    row("bytes to another slice or host", found.crossing_bytes, size)
    row("bytes of memory traffic", found.traffic, size)
    if found.cycles is not None:
        row("cycles, without network", found.cycles, 0)
    for name, value in (
        ("temporary bytes", found.temporary_bytes),
        ("bytes of arguments", found.argument_bytes),
        ("bytes of results", found.output_bytes),
        ("of these in arguments' buffers", found.aliased_bytes),
    ):
        share = f"{value / size:.2f}" if size else ""
        cells.append((name, "", f"{value:,}", share))
    if found.overlap is not None:
        cells.append(("share of sent bytes with work meanwhile", "", f"{found.overlap:.2f}", ""))
    return cells


def collective_cells(found: Audit) -> Cells:
    """The collectives, those alike in one row, the dearest first."""
    groups: dict[tuple[object, ...], list[CompiledCollective]] = {}
    for c in found.collectives:
        alike = (c.kind, c.dtypes, c.executions, c.axes, c.devices, c.crosses, c.branches, c.source)
        groups.setdefault(alike, []).append(c)
    rows = sorted(groups.values(), key=lambda each: -sum(c.wire_bytes for c in each))
    heads = ("collective", "dtype", "times", "over", "call", "elements", "bytes sent", "hidden")
    cells: Cells = [(*heads, "source")]
    for each in rows[:_ROWS]:
        c = each[0]
        over = "x".join(c.axes) or f"{c.devices} devices"
        over += f" ({c.crosses}s)" if c.crosses else ""
        call = "applied" if c.branches else "each"
        times = f"{len(each)} x {c.executions}" if len(each) > 1 else f"{c.executions}"
        dtype = "+".join(c.dtypes) + " (widened)" * c.widened
        sent = sum(x.wire_bytes for x in each)
        hidden = sum(x.wire_bytes * x.overlapped for x in each) / sent if sent else 0.0
        elements = f"{sum(x.elements for x in each):,}"
        sent_cell = f"{sent:,.0f}"
        place = _short(c.source)
        cells.append(
            (c.kind, dtype, times, over, call, elements, sent_cell, f"{hidden:.0%}", place)
        )
    if len(rows) > _ROWS:
        rest = [c for each in rows[_ROWS:] for c in each]
        sent_cell = f"{sum(c.wire_bytes for c in rest):,.0f}"
        elements = f"{sum(c.elements for c in rest):,}"
        cells.append((f"{len(rest)} more", "", "", "", "", elements, sent_cell, "", ""))
    return cells


def _short(source: str) -> str:
    """The last folder, the file and the line."""
    return "/".join(pathlib.PurePath(source).parts[-2:])
