# SPDX-License-Identifier: Apache-2.0
"""Find what a compiled program pays for in vain, in its text, with what to write instead."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from boostax.inspect.collectives import REDUCES, CompiledCollective

if TYPE_CHECKING:
    from boostax.inspect.audit import Audit, Buffer


@dataclasses.dataclass(frozen=True)
class Waste:
    """Something that a program pays for in vain.

    Attributes:
      what: and how much.
      where: ``file:line``, as far as the compiler kept it.
      mend: what to write instead.
    """

    what: str
    where: str
    mend: str

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.where})' if self.where else ''}. {self.mend}"


# Shares of the params, or of what is sent, below which nobody would look for a mend.
_SMALL = 0.01
_IN_LOOP = (
    "Add up the local gradients of the micro-batches and reduce once: boostax.value_and_grad(loss, "
    "mesh=, axis_name=, microbatches=) and boostax.on_mesh in plain jit, or "
    "boostax.make_train_step(..., microbatches=), with boostax.all_reduce in the chain."
)
_IN_WINDOW = (
    "Keep the window's sum local and reduce where it closes: boostax.accumulate(optax.chain("
    "boostax.all_reduce(axis), optimizer), every, axis_name=axis); in plain jit in "
    "boostax.on_mesh, with boostax.value_and_grad(loss, mesh=, axis_name=), or in "
    "boostax.nnx.Optimizer(..., axis_name=)."
)
_GATHERED = (
    "If these are sharded weights and the loop is one over micro-batches: gather them once before "
    "it, where memory allows."
)
_IN_VAIN = "Return them anew in the dtype and sharding that they came with, or do not donate."
_WIDENED = (
    "The compilers for TPU and GPU keep bf16; those for CPU and GPU keep integers in an all-to-all "
    "and an all-gather, as boostax.int8_reduce sends them."
)


def wastes(found: Audit, shapes: Sequence[tuple[int, ...]], mesh: Mesh | None) -> Iterator[Waste]:
    """Yield the findings, the dearest first in each kind."""
    if found.params:
        sizes = _gradient_sizes(shapes, mesh)
        gradients = [c for c in found.collectives if c.does in REDUCES and _is_gradient(c, sizes)]
        yield from _repeated(found, gradients)
    what = "are donated in vain: no result of that shape, dtype and sharding takes over"
    yield from _kept(found, found.donated_in_vain, what, _IN_VAIN)
    what = "come back as results of the same types and are not donated:"
    mend = "Donate them: jax.jit(step, donate_argnums=...)."
    yield from _kept(found, found.not_donated, what, mend)
    wide = [c for c in found.collectives if c.widened]
    total = sum(c.wire_bytes for c in wide)
    if total > _SMALL * max(1.0, found.wire_bytes.most):
        kinds = ", ".join(sorted({"/".join(c.dtypes) for c in wide}))
        what = f"This compiler widens what is to be sent in a narrower dtype to {kinds}: "
        what += f"{total:,.0f} bytes on the wire"
        yield Waste(what, max(wide, key=lambda c: c.wire_bytes).source, _WIDENED)


def _repeated(found: Audit, gradients: Sequence[CompiledCollective]) -> Iterator[Waste]:
    """Yield what is sent again and again: more often than ``limit`` times the params."""
    looped = [c for c in gradients if c.loops]
    each_call = [c for c in gradients if not c.branches and found.calls > 1]
    gathered = [c for c in found.collectives if c.does == "all-gather" and c.loops]
    in_loop = (
        "Gradients are reduced {times:.2f} times per call, inside a loop that runs {turns} times"
    )
    in_window = (
        "Each of the {calls} calls of an optimizer step reduces gradients, {times:.2f} times the "
        "params in all"
    )
    gathers = (
        "{times:.2f} times the params are gathered per call inside loops, the largest part {turns} "
        "times"
    )
    # One reduction of everything is needed, and a gather forwards and one backwards.
    for among, calls, limit, what, mend in (
        (looped, 1, 1.5, in_loop, _IN_LOOP),
        (each_call, found.calls, 1.5, in_window, _IN_WINDOW),
        (gathered, 1, 2.5, gathers, _GATHERED),
    ):
        times = calls * sum(c.elements * c.executions for c in among) / found.params
        if times > limit:
            dearest = max(among, key=lambda c: c.wire_bytes)
            said = what.format(times=times, calls=calls, turns=dearest.executions)
            over = f", over {' and '.join(map(repr, dearest.axes))}" if dearest.axes else ""
            yield Waste(said + over, dearest.source, mend)


def _kept(found: Audit, buffers: Sequence[Buffer], what: str, mend: str) -> Iterator[Waste]:
    """Yield buffers that take memory twice."""
    total = sum(x.bytes for x in buffers)
    if total > _SMALL * max(found.params_bytes, 2**20):
        first = max(buffers, key=lambda x: x.bytes)
        more = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
        yield Waste(f"{total:,} bytes {what} {first.path}{more}", "", mend)


def _gradient_sizes(shapes: Sequence[tuple[int, ...]], mesh: Mesh | None) -> frozenset[int]:
    """Return the elements that a gradient can have on a device: whole, of one layer, sharded."""
    shards = {1}
    for axis_size in () if mesh is None else mesh.devices.shape:
        shards |= {n * axis_size for n in shards}
    stacks = [shape for shape in shapes if len(shape) > 2]
    # XLA may also put leaves into one array: all of them, or the matrices of a layer.
    layers = [
        sum(math.prod(shape[1:]) for shape in stacks if shape[0] == count)
        for count in {shape[0] for shape in stacks}
    ]
    layers += [math.prod(shape[1:]) for shape in shapes if len(shape) > 1]
    whole = [math.prod(shape) for shape in shapes]
    sharded = {n // count for n in whole + layers for count in shards if n % count == 0}
    return frozenset({sum(whole)} | sharded)


def _is_gradient(c: CompiledCollective, sizes: frozenset[int]) -> bool:
    """Return whether most of what it reduces has the size of a leaf: activations rarely do."""
    return 2 * sum(n for n in c.operands if n in sizes) > c.elements
