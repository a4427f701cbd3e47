# SPDX-License-Identifier: Apache-2.0
"""What an explanation says, as cells of tables."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from boostax.inspect.calls import CallCost
from boostax.inspect.costs import PartCost
from boostax.inspect.hlo import Ways

Cells = list[tuple[str, ...]]


def part_cells(parts: Sequence[PartCost]) -> Cells:
    """The chain, headings first; columns that would hold nothing are left out."""
    sends = any(part.collectives for part in parts)
    owns = any(part.own_bytes for part in parts)
    heads = ("part", "state bytes", "copies", "own bytes")
    table: Cells = [(*heads, "collectives", "sent bytes", "what it does")]
    for part in parts:
        kept = ("in the row above", "")
        if part.state_bytes is not None:
            kept = (f"{part.state_bytes:,.0f}", f"{part.copies:.2f}")
        own = f"{part.own_bytes:,.0f}"
        kinds = ", ".join(f"{n:g} {kind}" for kind, n in part.collectives.items())
        sent = "above" if part.wire_bytes is None else f"{part.wire_bytes:,.0f}"
        name = "  " * part.depth + part.name + " (unknown)" * (part.role == "unknown")
        table.append((name, *kept, own, kinds, sent, part.what.replace("`", "")))
    return columns(table, (True, True, True, owns, sends, sends, True))


def call_cells(calls: Sequence[CallCost]) -> Cells:
    """The programs of a step, headings first; columns that would hold nothing are left out."""
    freezes = calls[0].depth is not None
    sends = bool(calls[0].wire_bytes)
    table: Cells = [("depth", "share", "frozen", "FLOPs", "ratio", "temp bytes", "sent bytes")]
    for call in calls:
        share = "?" if call.share is None else f"{call.share:.1%}"
        frozen = (str(call.depth), share, f"{call.frozen_entries:.1%}")
        compared = (f"{call.flops:,.0f}", f"{call.flops_ratio:.3f}")
        sent = f"{sum(call.wire_bytes.values()):,.0f}"
        table.append((*frozen, *compared, f"{call.temporary_bytes:,.0f}", sent))
    return columns(table, (freezes, freezes, freezes, True, freezes, True, sends))


def columns(table: Cells, shown: Sequence[bool]) -> Cells:
    """The columns that are to be shown."""
    return [tuple(itertools.compress(row, shown)) for row in table]


def aligned(table: Cells, words: bool = False) -> str:
    """Cells under each other, to the right; with ``words`` the first and the last to the left."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    left = (0, len(widths) - 1) if words else ()
    line = "  ".join(f"{{:{'<' if i in left else '>'}{n}}}" for i, n in enumerate(widths))
    return "\n".join(line.format(*row).rstrip() for row in table)


def units(value: float, unit: str) -> str:
    """Three digits in the power of a thousand that suits them."""
    factors = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6}
    for prefix, factor in factors.items():
        # What rounds to a thousand of one is one of the next.
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def record(value: Any) -> Any:
    """Plain data for JSON: what has names as a dictionary, but of ``Ways`` the two numbers."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    elif hasattr(value, "_asdict") and not isinstance(value, Ways):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: record(x) for name, x in value.items()}
    return [record(x) for x in value] if isinstance(value, tuple) else value
