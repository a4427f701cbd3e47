"""What an explanation says, as cells of tables."""

from collections.abc import Sequence

from boostax.inspect.calls import CallCost
from boostax.inspect.costs import PartCost

Cells = list[tuple[str, ...]]


def part_cells(parts: Sequence[PartCost], words: bool = True) -> Cells:
    """The chain, headings first; columns that would hold nothing are left out."""
    sends = any(part.collectives for part in parts)
    owns = any(part.own_bytes for part in parts)
    heads = ("part", "state bytes", "copies")
    more = ("own bytes",) * owns + ("collectives", "sent bytes") * sends
    table: Cells = [(*heads, *more, *("what it does",) * words)]
    for part in parts:
        kept = ("in the row above", "") if part.state_bytes is None else ("", "")
        if part.state_bytes is not None and part.copies is not None:
            kept = (f"{part.state_bytes:,.0f}", f"{part.copies:.2f}")
        own = (f"{part.own_bytes:,.0f}",) * owns
        kinds = ", ".join(f"{n:g} {kind}" for kind, n in part.collectives.items())
        sent = "above" if part.wire_bytes is None else f"{part.wire_bytes:,.0f}"
        name = "  " * part.depth + part.name + " (unknown)" * (part.role == "unknown")
        what = (part.what.replace("`", ""),) * words
        table.append((name, *kept, *own, *((kinds, sent) if sends else ()), *what))
    return table


def call_cells(calls: Sequence[CallCost]) -> Cells:
    """The programs of a step, headings first; columns that would hold nothing are left out."""
    freezes = calls[0].depth is not None
    sends = bool(calls[0].wire_bytes)
    frozen = ("depth", "share", "frozen") if freezes else ()
    compared = ("ratio",) if freezes else ()
    sent = ("sent bytes",) if sends else ()
    headings = (*frozen, "FLOPs", *compared, "temp bytes", *sent)
    return [headings, *(_call(call, freezes, sends) for call in calls)]


def aligned(table: Cells, words: bool = False) -> str:
    """Cells under each other, to the right; with ``words`` the first and the last to the left."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    last = len(widths) - 1
    lines = (
        "  ".join(
            cell.ljust(width) if words and i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )
    return "\n".join(lines)


def _call(call: CallCost, freezes: bool, sends: bool) -> tuple[str, ...]:
    share = "?" if call.share is None else f"{call.share:.1%}"
    frozen = (str(call.depth), share, f"{call.frozen_entries:.1%}") if freezes else ()
    compared = (f"{call.flops_ratio:.3f}",) if freezes else ()
    sent = (f"{sum(call.wire_bytes.values()):,.0f}",) if sends else ()
    return (*frozen, f"{call.flops:,.0f}", *compared, f"{call.temporary_bytes:,.0f}", *sent)
