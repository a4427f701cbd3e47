# SPDX-License-Identifier: Apache-2.0
"""Find waste in a compiled program, and suggest a fix."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from boostax.auditing.adapter import checks
from boostax.auditing.collectives import RING, Collectives, CompiledCollective, Shapes
from boostax.auditing.hlo import Program

if TYPE_CHECKING:
    from boostax.auditing.audit import Audit


@dataclasses.dataclass(frozen=True)
class Waste:
    """Describe an avoidable cost of a program.

    Attributes:
      what: the waste and its size.
      where: ``file:line``, if the compiler kept the source location.
      fix: the code to write instead.
    """

    what: str
    where: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.where})' if self.where else ''}. {self.fix}"


# For each finding, its texts.
WORDS = checks.table("boostax.auditing", "waste")
# A finding about a smaller share of the params, or of the bytes on the wire, is not reported.
_SMALL = 0.01
# Scopes that repeat collectives on purpose, to save memory: the scopes of ``Layers`` and of a
# window with sharded sums.
_CHOSEN = ("by_layer", "boostax.accumulate")


def wastes(audit: Audit, program: Program, shapes: Shapes, module: str) -> Iterator[Waste]:
    """Yield for each kind of waste a finding that names the most expensive place.

    Args:
      audit: the audit.
      program: the program.
      shapes: the shapes of the params.
      module: the name of the module that defines the program's type.
    """
    known = [c for c in audit.collectives if math.isfinite(c.executions)]
    if unknown := [c for c in audit.collectives if not math.isfinite(c.executions)]:
        largest = max(unknown, key=lambda c: c.bytes)
        yield _waste("unknown_turns", largest, count=len(unknown))
    if audit.params:
        yield from _repeated(audit, program, known)
    for name in ("donated_in_vain", "not_donated"):
        buffers = getattr(audit, name)
        size = sum(x.bytes for x in buffers)
        if size > _SMALL * max(audit.params_bytes, 2**20):
            more = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
            first = max(buffers, key=lambda x: x.bytes).path
            call = WORDS["donates"].get(module.partition(".")[0], WORDS["donates"]["jax"])
            yield _waste(name, bytes=size, paths=first + more, call=call)
    widened = [c for c in known if c.widened]
    sent = _sent(program, widened)
    if sent > _SMALL * max(1.0, _sent(program, known)):
        kinds = ", ".join(sorted({"/".join(c.dtypes) for c in widened}))
        largest = max(widened, key=lambda c: c.wire_bytes)
        yield _waste("widened", largest, kinds=kinds, bytes=sent)
    exchanges = [c for c in known if c.kind == "all-to-all"]
    for name in {c.name for c in exchanges if "boostax." in c.name}:
        exchange = [c for c in exchanges if c.name == name]
        mean = 4 * sum(map(math.prod, shapes)) * RING["all-reduce"](exchange[0].devices)
        # Each all-to-all is followed by an all-gather that sends as many bytes.
        sent = 2 * _sent(program, exchange)
        if 0 < 1.1 * mean < sent:
            part = re.findall(r"boostax\.(\w+)", name)[-1]
            yield _waste("padded", part=part, bytes=sent, mean=mean)


def _repeated(audit: Audit, program: Program, known: Collectives) -> Iterator[Waste]:
    """Yield findings about collectives that send a multiple of the params' size."""
    unintended = [c for c in known if not any(scope in c.name for scope in _CHOSEN)]
    gradients = [c for c in unintended if 2 * c.uses.get("gradients", 0) > c.elements]
    # ``held`` is positive if a call that leaves a window open also runs the collective.
    in_window = [c for c in gradients if program.total([(c.branches, c.elements)]).held]
    for name, calls, repeated in (
        ("in_loop", 1, [c for c in gradients if c.loops]),
        ("in_window", audit.calls, in_window if audit.calls > 1 else []),
        ("gathered", 1, [c for c in unintended if c.does == "all-gather" and c.loops]),
    ):
        elements = program.total((c.branches, c.elements * c.executions) for c in repeated).most
        times = calls * elements / audit.params
        if times > WORDS[name]["limit"]:
            largest = max(repeated, key=lambda c: c.wire_bytes)
            yield _waste(name, largest, times=times, calls=calls, turns=largest.executions)


def _sent(program: Program, collectives: Collectives) -> float:
    return program.total((c.branches, c.wire_bytes) for c in collectives).most


def _waste(name: str, c: CompiledCollective | None = None, **values: object) -> Waste:
    """Return a finding with its texts filled in; ``c`` is the collective that causes the waste."""
    values["over"] = f", over {' and '.join(map(repr, c.axes))}" if c and c.axes else ""
    what, fix = (WORDS[name][key].format(**values) for key in ("what", "fix"))
    return Waste(what, c.source if c else "", fix)
