# SPDX-License-Identifier: Apache-2.0
"""Find waste in a compiled program, and suggest a fix."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from boostax.auditing.adapter import checks
from boostax.auditing.collectives import RING, CompiledCollective

if TYPE_CHECKING:
    from boostax.auditing.audit import Audit


@dataclasses.dataclass(frozen=True)
class Waste:
    """An avoidable cost of a program.

    Attributes:
      what: the waste and its size.
      where: ``file:line``, if the compiler kept the source location.
      mend: what to write instead.
    """

    what: str
    where: str
    mend: str

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.where})' if self.where else ''}. {self.mend}"


# The texts of each finding.
WORDS = checks.table("boostax.auditing", "waste")
# Smaller shares of the params, or of the bytes on the wire, are not reported.
_SMALL = 0.01
# Scopes whose collectives are repeated on purpose, to save memory: ``Layers``, and a window with
# sharded sums.
_CHOSEN = ("by_layer", "boostax.accumulate")


def _waste(name: str, where: str, **numbers: object) -> Waste:
    words = WORDS[name]
    return Waste(words["what"].format(**numbers), where, words["mend"].format(**numbers))


def wastes(found: Audit, shapes: Sequence[Any], total: Any, module: str) -> Iterator[Waste]:
    """Yield findings of each kind of waste, the most expensive first.

    Args:
      found: the audit.
      shapes: the shapes of the params.
      total: the function that adds up amounts along branches, ``Program.total``.
      module: the module of the program's type.
    """

    def most(among: Iterable[Any], of: Any = lambda c: c.wire_bytes) -> float:
        return total((c.branches, of(c)) for c in among).most

    known = [c for c in found.collectives if math.isfinite(c.executions)]
    if unknown := [c for c in found.collectives if not math.isfinite(c.executions)]:
        largest = max(unknown, key=lambda c: c.bytes)
        yield _waste("unknown_turns", largest.source, count=len(unknown), over=_over(largest))
    if found.params:
        # Repeated collectives are counted in multiples of the params.
        meant = [c for c in known if not any(scope in c.name for scope in _CHOSEN)]
        gradients = [c for c in meant if 2 * c.uses.get("gradients", 0) > c.elements]
        # These run also in calls that leave a window open.
        held = [c for c in gradients if found.calls > 1 and total([(c.branches, c.elements)]).held]
        for name, calls, among in (
            ("in_loop", 1, [c for c in gradients if c.loops]),
            ("in_window", found.calls, held),
            ("gathered", 1, [c for c in meant if c.does == "all-gather" and c.loops]),
        ):
            times = calls * most(among, lambda c: c.elements * c.executions) / found.params
            if times > WORDS[name]["limit"]:
                c = max(among, key=lambda c: c.wire_bytes)
                counts = {"times": times, "calls": calls, "turns": c.executions}
                yield _waste(name, c.source, over=_over(c), **counts)
    for name in ("donated_in_vain", "not_donated"):
        buffers = getattr(found, name)
        size = sum(x.bytes for x in buffers)
        if size > _SMALL * max(found.params_bytes, 2**20):
            more = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
            first = max(buffers, key=lambda x: x.bytes).path
            call = WORDS["donates"].get(module.partition(".")[0], WORDS["donates"]["jax"])
            yield _waste(name, "", bytes=size, paths=first + more, call=call)
    wide = [c for c in known if c.widened]
    if most(wide) > _SMALL * max(1.0, most(known)):
        kinds = ", ".join(sorted({"/".join(c.dtypes) for c in wide}))
        dearest = max(wide, key=lambda c: c.wire_bytes)
        yield _waste("widened", dearest.source, kinds=kinds, bytes=most(wide))
    exchanged = [c for c in known if c.kind == "all-to-all"]
    for name in {c.name for c in exchanged if "boostax." in c.name}:
        among = [c for c in exchanged if c.name == name]
        mean = 4 * sum(map(math.prod, shapes)) * RING["all-reduce"](among[0].devices)
        # An exchange by all-to-all is followed by an all-gather.
        if 0 < 1.1 * mean < 2 * most(among):
            part = re.findall(r"boostax\.(\w+)", name)[-1]
            yield _waste("padded", "", part=part, bytes=2 * most(among), mean=mean)


def _over(c: CompiledCollective) -> str:
    return f", over {' and '.join(map(repr, c.axes))}" if c.axes else ""
