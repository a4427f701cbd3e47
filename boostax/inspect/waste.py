# SPDX-License-Identifier: Apache-2.0
"""Find waste in a compiled program, and suggest a fix."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tomllib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from boostax.inspect.collectives import REDUCES

if TYPE_CHECKING:
    from boostax.inspect.audit import Audit


@dataclasses.dataclass(frozen=True)
class Waste:
    """An avoidable cost of a program.

    Attributes:
      what: the waste and its size.
      where: ``file:line``, if the compiler kept it.
      mend: what to write instead.
    """

    what: str
    where: str
    mend: str

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.where})' if self.where else ''}. {self.mend}"


# The words of each finding.
_WORDS = tomllib.loads(files("boostax.inspect").joinpath("waste.toml").read_text("utf8"))
# Smaller shares of the params, or of the bytes on the wire, are not reported.
_SMALL = 0.01


def _waste(name: str, where: str, **numbers: object) -> Waste:
    return Waste(_WORDS[name]["what"].format(**numbers), where, _WORDS[name]["mend"])


def wastes(found: Audit, shapes: Sequence[tuple[int, ...]], mesh: Mesh | None) -> Iterator[Waste]:
    """Yield the waste of each kind, the dearest first."""
    if found.params:
        yield from _repeated(found, _gradient_sizes(shapes, mesh))
    for name in ("donated_in_vain", "not_donated"):
        buffers = getattr(found, name)
        total = sum(x.bytes for x in buffers)
        if total > _SMALL * max(found.params_bytes, 2**20):
            more = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
            first = max(buffers, key=lambda x: x.bytes)
            yield _waste(name, "", bytes=total, paths=first.path + more)
    wide = [c for c in found.collectives if c.widened]
    total = sum(c.wire_bytes for c in wide)
    if total > _SMALL * max(1.0, found.wire_bytes.most):
        kinds = ", ".join(sorted({"/".join(c.dtypes) for c in wide}))
        dearest = max(wide, key=lambda c: c.wire_bytes)
        yield _waste("widened", dearest.source, kinds=kinds, bytes=total)


def _repeated(found: Audit, sizes: frozenset[int]) -> Iterator[Waste]:
    """Yield findings of repeated collectives, counted in multiples of the params."""
    # Most operands of a gradient's reduction have the size of a leaf; activations rarely have it.
    reduced = [c for c in found.collectives if c.does in REDUCES]
    gradients = [c for c in reduced if 2 * sum(n for n in c.operands if n in sizes) > c.elements]
    always = [c for c in gradients if not c.branches and found.calls > 1]
    gathered = [c for c in found.collectives if c.does == "all-gather" and c.loops]
    for name, calls, among in (
        ("in_loop", 1, [c for c in gradients if c.loops]),
        ("in_window", found.calls, always),
        ("gathered", 1, gathered),
    ):
        times = calls * sum(c.elements * c.executions for c in among) / found.params
        if times > _WORDS[name]["limit"]:
            c = max(among, key=lambda c: c.wire_bytes)
            over = f", over {' and '.join(map(repr, c.axes))}" if c.axes else ""
            numbers = {"times": times, "calls": calls, "turns": c.executions, "over": over}
            yield _waste(name, c.source, **numbers)


def _gradient_sizes(shapes: Sequence[tuple[int, ...]], mesh: Mesh | None) -> frozenset[int]:
    """Return the possible sizes of a gradient on a device: of a leaf, a layer or a shard."""
    sizes = () if mesh is None else mesh.devices.shape
    shards = {math.prod(taken) for taken in itertools.product(*((1, n) for n in sizes))}
    stacks = [shape for shape in shapes if len(shape) > 2]
    # XLA may also join leaves in one array: all of them, or the matrices of a layer.
    counts = {shape[0] for shape in stacks}
    layers = [sum(math.prod(x[1:]) for x in stacks if x[0] == count) for count in counts]
    layers += [math.prod(shape[1:]) for shape in shapes if len(shape) > 1]
    whole = [math.prod(shape) for shape in shapes]
    sharded = {n // count for n in whole + layers for count in shards if n % count == 0}
    return frozenset({sum(whole)} | sharded)
