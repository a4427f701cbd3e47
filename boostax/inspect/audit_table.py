# SPDX-License-Identifier: Apache-2.0
"""An audit in words: totals, then the collectives, then what is wasted."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from boostax.inspect.collectives import CompiledCollective
from boostax.inspect.hlo import Ways
from boostax.inspect.tables import Cells, aligned

if TYPE_CHECKING:
    from boostax.inspect.audit import Audit

# Rows of collectives that are shown; the rest is added up in one.
_ROWS = 16
# Bytes of params below which a TPU's program needs hardly any temporaries in HBM.
_IN_VECTOR_MEMORY = 100_000_000
# What is added up: in words, its field, and the field of which it is printed as a multiple.
_TOTALS = (
    ("elements reduced", "reduced", "params"),
    ("elements gathered", "gathered", "params"),
    ("bytes sent", "wire_bytes", "params_bytes"),
    ("bytes to another slice or host", "crossing_bytes", "params_bytes"),
    ("bytes of memory traffic", "traffic", "params_bytes"),
    ("cycles, without network", "cycles", ""),
    ("temporary bytes", "temporary_bytes", "params_bytes"),
    ("bytes of arguments", "argument_bytes", "params_bytes"),
    ("bytes of results", "output_bytes", "params_bytes"),
    ("of these in arguments' buffers", "aliased_bytes", "params_bytes"),
    ("share of sent bytes with work meanwhile", "overlap", ""),
)


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
    if found.window:
        lines.append(f"Of one call, with a window open over several ({found.window}): say calls=")
    if found.cycles is not None and found.params_bytes < _IN_VECTOR_MEMORY:
        lines.append("So small a program keeps temporaries in a TPU's vector memory: none are seen")
    if found.unknown_loops:
        names = ", ".join(found.unknown_loops[:3])
        lines.append(f"Turns not known, counted once: {names}")
    return "\n".join(lines)


def total_cells(found: Audit) -> Cells:
    """Per call and device: the cheapest way through the branches, and the dearest."""
    cells: Cells = [("per call and device", "held", "applied", "of the params")]
    for words, field, unit in _TOTALS:
        value, whole = getattr(found, field), getattr(found, unit) if unit else 0
        if not isinstance(value, Ways):
            held, applied = "", value
        elif value.most:
            held, applied = f"{value.least:,.0f}", value.most
        else:
            continue
        if applied is not None:
            share = f"{applied / whole:.2f}" if whole else ""
            decimals = 2 if field == "overlap" else 0
            cells.append((words, held, f"{applied:,.{decimals}f}", share))
    return cells


def collective_cells(found: Audit) -> Cells:
    """The collectives, those alike in one row, the dearest first."""
    groups: dict[tuple[object, ...], list[CompiledCollective]] = {}
    for c in found.collectives:
        alike = (c.kind, c.dtypes, c.executions, c.axes, c.devices, c.crosses, c.branches, c.source)
        groups.setdefault(alike, []).append(c)
    rows = sorted(groups.values(), key=lambda each: -sum(c.wire_bytes for c in each))
    heads = ("collective", "dtype", "times", "over", "call", "elements", "bytes sent", "hidden")
    cells: Cells = [(*heads, "source"), *map(_row, rows[:_ROWS])]
    rest = [c for each in rows[_ROWS:] for c in each]
    if rest:
        cells.append((f"{len(rest)} more", "", "", "", "", *_sums(rest)[:2], "", ""))
    return cells


def _row(each: Sequence[CompiledCollective]) -> tuple[str, ...]:
    """Collectives that are alike: how many, and what they send together."""
    c = each[0]
    times = f"{len(each)} x {c.executions}" if len(each) > 1 else f"{c.executions}"
    over = "x".join(c.axes) or f"{c.devices} devices"
    over += f" ({c.crosses}s)" if c.crosses else ""
    call = "applied" if c.branches else "each"
    # The last folder, the file and the line.
    source = "/".join(pathlib.PurePath(c.source).parts[-2:])
    dtype = "+".join(c.dtypes) + " (widened)" * c.widened
    return (c.kind, dtype, times, over, call, *_sums(each), source)


def _sums(each: Sequence[CompiledCollective]) -> tuple[str, str, str]:
    """Elements, bytes on the wire, and the share of these with work meanwhile."""
    sent = sum(c.wire_bytes for c in each)
    hidden = sum(c.wire_bytes * c.overlapped for c in each) / sent if sent else 0.0
    return f"{sum(c.elements for c in each):,}", f"{sent:,.0f}", f"{hidden:.0%}"
