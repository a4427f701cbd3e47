# SPDX-License-Identifier: Apache-2.0
"""Audit a compiled program for its machine: memory, collectives, traffic, waste."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp

from boostax.auditing import adapter, collectives, hlo, tables, targets, traffic, waste
from boostax.auditing.adapter import WHO, PyTree, checks
from boostax.auditing.collectives import Collectives, CompiledCollective
from boostax.auditing.hlo import Program, Ways
from boostax.auditing.network import Network, on_wire
from boostax.auditing.targets import Argument

# This matches the class of a state, but not ``optax.LookaheadParams``, which are params.
_STATE = re.compile(r"<class '(optax|boostax)\..*State'>")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Name an argument and its size.

    Attributes:
      path: the path of the array in the arguments, such as ``[0].opt_state.mu['w']``.
      bytes: the bytes of the array on one device.
    """

    path: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Audit:
    """Collect the counts of a compiled program; ``print`` shows the counts as tables.

    Counts are per call and device. A count that depends on branches is ``(least, most, held)``.
    ``least`` assumes the cheapest branch of every conditional (a skipped call). ``most`` assumes
    the most expensive branch (a call that applies). ``held`` assumes the cheapest branch for
    windows, and the most expensive branch elsewhere (a call that leaves its window open). A loop
    with an unknown trip count adds nothing to ``least``, and makes ``most`` and ``held`` infinite.

    Attributes:
      target: the machine for which the program was compiled.
      devices: the number of devices that run the program.
      params: the number of elements of the params over all devices; 0 if unknown.
      params_bytes: the bytes of the params on one device.
      calls: calls per optimizer step; one of these calls runs the most expensive branches.
      donated_in_vain: donated arguments whose buffers no result reuses.
      not_donated: arguments that are not donated, although a result has the same type.
      collectives: the collectives in the order of the schedule.
      reduced: input elements of all-reduces and reduce-scatters.
      gradients: the elements of ``reduced`` that are gradients or have an unknown use; see
        ``CompiledCollective.uses``.
      gathered: output elements of all-gathers.
      wire_bytes: bytes that a device sends, by the formulas of ring algorithms.
      wire_dtypes: ``wire_bytes`` by dtype.
      crossing_bytes: the part of ``wire_bytes`` that is sent to another slice or, with a single
        slice, to another host.
      messages: the number of sequential messages of the collectives; with several hosts, only
        messages between hosts.
      network_bytes: the bytes of the messages with TCP's overhead; ``None`` without ``network``.
      network_seconds: the time of the messages without overlap; ``None`` without ``network``.
      traffic: bytes that operations read and write in memory (HBM).
      cycles: the cycles that a TPU's compiler estimates, without communication; ``None`` for other
        machines.
      temporary_bytes, argument_bytes, output_bytes, aliased_bytes: the sizes of buffers from
        ``Compiled.memory_analysis()``.
      host_bytes: further bytes of arguments and temporaries in host memory; ``None`` if there are
        none.
      overlap: the share of ``wire_bytes`` in collectives with computation between start and end;
        ``None`` without collectives.
      flops: floating-point operations by XLA's count, which counts a loop body once; NaN if XLA
        gives no count.
      unknown_loops: loops with an unknown trip count.
      compile_seconds: the time of compilation; NaN if the program was compiled before.
      findings: the waste that was found, with fixes.
      window: the path of a window's state in the arguments, if ``calls`` is 1 and the counts are
        thus per call, not per optimizer step; else empty.
      advice: the technique that reached a fixed loss first in boostax's records of another program,
        at the rate nearest to that of ``network``; empty without ``network``.
      text: the HLO text of the program.
      unit: the argument that contains the params.
    """

    target: str
    devices: int
    params: int
    params_bytes: int
    calls: int
    donated_in_vain: tuple[Buffer, ...]
    not_donated: tuple[Buffer, ...]
    collectives: tuple[CompiledCollective, ...]
    # The key of ``metadata`` is the label of a row in the table. The value is the name of the field
    # that divides the numbers of this row.
    reduced: Ways = field(metadata={"elements reduced": "params"})
    gradients: Ways = field(metadata={"of these gradients": "params"})
    gathered: Ways = field(metadata={"elements gathered": "params"})
    wire_bytes: Ways = field(metadata={"bytes sent": "params_bytes"})
    wire_dtypes: dict[str, Ways]
    crossing_bytes: Ways = field(metadata={"bytes to another slice or host": "params_bytes"})
    messages: Ways = field(metadata={"messages one after another": ""})
    network_bytes: Ways | None = field(metadata={"bytes on the network": "params_bytes"})
    network_seconds: Ways | None = field(metadata={"seconds on the network": ""})
    traffic: Ways = field(metadata={"bytes of memory traffic": "params_bytes"})
    cycles: Ways | None = field(metadata={"cycles, without network": ""})
    temporary_bytes: int = field(metadata={"temporary bytes": "params_bytes"})
    argument_bytes: int = field(metadata={"bytes of arguments": "params_bytes"})
    output_bytes: int = field(metadata={"bytes of results": "params_bytes"})
    aliased_bytes: int = field(metadata={"of these in arguments' buffers": "params_bytes"})
    host_bytes: int | None = field(metadata={"bytes in the host's memory": "params_bytes"})
    overlap: float | None = field(metadata={"share of bytes sent during other work": ""})
    flops: float
    unknown_loops: tuple[str, ...]
    compile_seconds: float
    findings: tuple[waste.Waste, ...]
    text: str = field(repr=False)
    unit: str = ""
    window: str = ""
    advice: str = ""

    def per_step(self, ways: Ways) -> float:
        """Return the sum of a count over ``calls - 1`` calls in a window and one applied call."""
        return ways.most + ((self.calls - 1) * ways.held if self.calls > 1 else 0)

    @property
    def reductions(self) -> float:
        """Return how many gradient elements an optimizer step reduces, as a multiple of the params.

        The value 1 means that each gradient is reduced once. Elements of unknown use count as
        gradients.
        """
        return self.per_step(self.gradients) / self.params if self.params else math.nan

    @property
    def gathers(self) -> float:
        """Return how many elements an optimizer step gathers, as a multiple of the params."""
        return self.per_step(self.gathered) / self.params if self.params else math.nan

    @property
    def temporaries(self) -> float:
        """Return temporary bytes as a multiple of the params' bytes on one device."""
        return self.temporary_bytes / self.params_bytes if self.params_bytes else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, without the text; ``None`` for unknown values."""
        multiples = {name: getattr(self, name) for name in ("reductions", "gathers", "temporaries")}
        plain = {x: y for x, y in dataclasses.asdict(self).items() if x != "text"} | multiples
        return jax.tree.map(lambda x: x if isinstance(x, str) or math.isfinite(x) else None, plain)

    def __str__(self) -> str:
        return tables.text(self)


def audit(
    program: Any,
    *args: PyTree,
    target: str | None = None,
    params: PyTree | int = None,
    calls: int = 1,
    depth: int | None = None,
    turns: int | None = None,
    network: str | None = None,
    **kwargs: PyTree,
) -> Audit:
    """Compile a program, and count the bytes that it sends, its memory and its waste.

    The program is a function (jitted or not) with its arguments, a ``TrainStep`` with state and
    batch, or the result of ``lower()`` or ``compile()``. The audit does not run the program, and
    arguments may be ``jax.ShapeDtypeStruct``. Counts depend on the compiler, so with ``target`` the
    audit compiles for the target's devices, which need not be present.

    Args:
      program: a program, as above.
      *args: the program's arguments; none if the program is lowered or compiled.
      target: see ``boostax.auditing.target_devices``; ``None`` for the devices of the arguments,
        which may be target devices. A program over a mesh of present devices can be moved to a
        target with as many devices.
      params: the tree whose size is the unit of counts, or an argument's position, 0 by default.
        With a position, the unit is the ``.params`` of that argument, or the argument itself if it
        has no ``.params``. The argument of a ``jax.pmap`` function has the params of all replicas,
        so pass one replica's params instead.
      calls: calls per optimizer step, which is the length of the window of ``boostax.accumulate``
        or ``optax.MultiSteps``.
      depth: the number of frozen groups of a ``TrainStep`` with ``scheduled_freeze``; by default
        the depth of the next call.
      turns: the trip count of loops whose trip count the program does not show, such as a
        ``while_loop`` with an argument as its bound. Without ``turns``, counts inside such loops
        are infinite.
      network: the rate of each device's link in each direction, and the latency of a message, such
        as ``"100Mbit"`` or ``"1Gbit, 0.1 ms"``. The audit then estimates the seconds of a call's
        collectives without overlap, and sets ``Audit.advice``.
      **kwargs: keyword arguments of a ``TrainStep`` call, which the step passes to the loss.

    Returns:
      An ``Audit``. Cost: a trace and a compilation; for a billion params on 256 devices about a
      minute with scanned layers, several minutes without a scan.

    Raises:
      ValueError, TypeError: an unknown target or program, or a program that cannot be moved; the
        argument at the position ``params`` contains an optimizer's state or no floating array.
      RuntimeError: the compiler of the target is not installed.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w))
      >>> counts = boostax.audit(step, jnp.zeros((256, 64)), jnp.ones((32, 256)))
      >>> counts.params, len(counts.collectives), counts.aliased_bytes
      (16384, 0, 0)
      >>> print(counts.findings[0].fix)
      Donate the arguments: jax.jit(step, donate_argnums=...).
    """
    checks.positive_int(WHO, "calls", calls, "Pass the number of calls per optimizer step.")
    checks.natural(WHO, "turns", turns or 0, "Pass the trip count of a loop.")
    links = None if network is None else Network.of(network)
    compiled = targets.compile_program(program, args, target, depth, kwargs)
    text = compiled.executable.as_text() or ""
    parsed = hlo.parse(text, turns)
    params, unit = _unit(params, args)
    arrays = adapter.arrays(params)
    shapes = [shape for _, shape in arrays]
    # The mesh axes that shard the arguments whose shapes are not those of params.
    others = (x for x in compiled.arguments if x.info.shape not in ((), *shapes))
    specs: list[Any] = [getattr(x.sharding, "spec", None) for x in others if x.sharding is not None]
    is_known = None not in specs and bool(specs)
    batch = frozenset(jax.tree.leaves([*map(tuple, specs)])) if is_known else None
    listed = collectives.compiled_collectives(parsed, compiled.mesh, shapes, batch)
    border = "slice" if collectives.slice_axes(compiled.mesh) else "host"
    memory: Any = compiled.executable.memory_analysis()
    loops = (x for x in parsed.sites if x.instruction.op == "while" and turns is None)
    result = Audit(
        target=target or compiled.devices,
        devices=parsed.devices,
        params=sum(map(math.prod, shapes)),
        params_bytes=sum(_local_bytes(x, getattr(x, "sharding", None)) for x, _ in arrays),
        calls=calls,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        host_bytes=memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes or None,
        collectives=listed,
        flops=float((compiled.executable.cost_analysis() or {}).get("flops", math.nan)),
        unknown_loops=tuple(x.instruction.name for x in loops if parsed.trips(x) is None),
        compile_seconds=compiled.seconds,
        findings=(),
        text=text,
        window=adapter.window(args) if calls == 1 else "",
        unit=unit,
        advice=links.advice if links else "",
        **traffic.counts(parsed),
        **_buffers(parsed, compiled.arguments),
        **_totals(parsed, listed, border, links, per_operand="cpu" in compiled.devices),
    )
    findings = waste.wastes(result, parsed, shapes, type(program).__module__)
    return dataclasses.replace(result, findings=tuple(findings))


def _totals(
    program: Program, listed: Collectives, border: str, links: Network | None, per_operand: bool
) -> dict[str, Any]:
    """Return the audit's fields that are sums over collectives, or over messages on the links."""

    def total(count: Callable[[CompiledCollective], float]) -> Ways:
        return program.total((c.branches, hlo.repeated(count(c), c.executions)) for c in listed)

    def on_ring(c: CompiledCollective, num_bytes: float) -> float:
        return num_bytes * collectives.RING[c.kind](c.devices)

    dtypes = sorted({name for c in listed for name in c.dtypes})
    wire = total(lambda c: on_ring(c, c.bytes))
    hidden = total(lambda c: on_ring(c, c.bytes * c.overlapped))
    waits = list(on_wire(listed, per_operand))
    return {
        "reduced": total(lambda c: c.elements * (c.does in collectives.REDUCES)),
        "gradients": total(lambda c: c.uses.get("gradients", 0) + c.uses.get("unknown", 0)),
        "gathered": total(lambda c: c.elements * (c.does == "all-gather")),
        "wire_bytes": wire,
        "wire_dtypes": {x: total(lambda c, x=x: on_ring(c, c.by_dtype.get(x, 0))) for x in dtypes},
        "crossing_bytes": total(lambda c: on_ring(c, c.bytes * (c.crosses == border))),
        "overlap": hidden.most / wire.most if wire.most else None,
        "messages": program.total((path, messages) for path, _, messages in waits),
        "network_bytes": links and program.total((path, size) for path, size, _ in waits),
        "network_seconds": links
        and program.total((path, x * 8 / links.rate + n * links.latency) for path, x, n in waits),
    }


def _unit(params: PyTree | int, args: tuple[Any, ...]) -> tuple[PyTree, str]:
    """Return the tree whose size is the unit of counts, and a text that names its argument."""
    if not isinstance(params, int | None) or (params is None and not args):
        return params, ""
    number = params or 0
    hint = "Pass params as a separate argument, and the argument's number as params= or --params."
    allowed = f"below {len(args)}"
    checks.require(0 <= number < len(args), WHO, "params", got=number, allowed=allowed, hint=hint)
    tree = getattr(args[number], "params", args[number])
    dtypes = [x.dtype for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    is_valid = not dtypes or any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: bool(_STATE.match(str(type(x)))))
    is_valid &= not any(_STATE.match(str(type(x))) for x in nodes)
    got = f"argument {number}, which contains an optimizer's state or only integers"
    checks.require(is_valid, WHO, "params", got=got, allowed="the params", hint=hint)
    return tree, f"{'.params of ' * (tree is not args[number])}argument {number}"


def _buffers(program: Program, arguments: Sequence[Argument]) -> dict[str, Any]:
    """Find arguments whose donation has no effect, and arguments that could be donated."""
    used = [x for x in arguments if x.sharding is not None]
    body = program.computations[program.entry].values()
    types = {int(i.literal): i.result[0][:2] for i in body if i.op == "parameter"}
    if len(types) != len(used):
        allowed = f"{len(used)}, as many as the arguments that the program uses"
        raise hlo.unreadable("the parameter count of a program", allowed, len(types))
    reused = {used[i].path for i in program.aliased}
    donated = [x for x in arguments if x.info.donated and 0 not in x.info.shape]
    in_vain = [x for x in donated if x.path not in reused]
    # The number of results in new buffers, by type. For each such result, an argument of the same
    # type could have been donated.
    free = collections.Counter(x[:2] for i in body if i.root for x in i.result)
    free -= collections.Counter(types[i] for i in program.aliased)
    not_donated: list[Argument] = []
    for i, x in enumerate(used):
        if not x.info.donated and free[types[i]] > 0:
            free[types[i]] -= 1
            not_donated.append(x)
    return {
        name: tuple(Buffer(x.path, _local_bytes(x.info, x.sharding)) for x in wasted)
        for name, wasted in (("donated_in_vain", in_vain), ("not_donated", not_donated))
    }


def _local_bytes(x: Any, sharding: jax.sharding.Sharding | None) -> int:
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize
