# SPDX-License-Identifier: Apache-2.0
"""Audit a compiled program for its machine: memory, collectives, traffic, waste."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, TypeAlias

import jax
import optax
from jax.sharding import Mesh

from boostax._core import checks
from boostax._core.replicas import is_per_replica
from boostax.accumulate.window import AccumulateState
from boostax.inspect import collectives, hlo, tables, targets, traffic, waste
from boostax.inspect import network as networks
from boostax.inspect.collectives import CompiledCollective
from boostax.inspect.hlo import Ways

PyTree: TypeAlias = Any
WHO = "audit"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An argument and its size.

    Attributes:
      path: its position among the arguments: ``[0].opt_state.mu['w']``.
      bytes: its bytes on one device.
    """

    path: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Audit:
    """The counts of a compiled program. ``print`` says them in words.

    Counts are per call and device. If branches differ, a count is ``(least, most, held)``: with the
    cheapest branch of every conditional (a call that is skipped), with the dearest (a call that
    applies), and with the cheapest of windows alone (a call that waits for the last of its window).
    A loop whose turns are not known adds nothing to the least and makes the others infinite.

    Attributes:
      target: the machine that it was compiled for.
      devices: the number of devices that run it together.
      params: elements of the params on all devices together; 0 if not known.
      params_bytes: bytes of the params on one device.
      calls: calls per optimizer step, one of which takes the dearest path.
      donated_in_vain: donated arguments whose buffers no result takes over.
      not_donated: arguments that are returned with the same type and are not donated.
      collectives: the collectives in the order of the schedule.
      reduced: elements that all-reduces and reduce-scatters take in.
      gradients: of these, gradients, and all whose use cannot be told: see ``uses`` of
        ``CompiledCollective``.
      gathered: elements that all-gathers return.
      wire_bytes: bytes that a device sends, by the formula of a ring.
      wire_dtypes: these bytes by dtype.
      crossing_bytes: the ``wire_bytes`` sent to another slice; on a single slice, to another host.
      messages: messages that follow one another in collectives; between hosts if there are several.
      network_bytes: ``wire_bytes`` of these with what TCP adds; ``None`` without a network.
      network_seconds: the time that they take, without any overlap; likewise.
      traffic: bytes that operations read and write in memory (HBM).
      cycles: the estimate of a TPU's compiler, without the network; ``None`` for other machines.
      temporary_bytes, argument_bytes, output_bytes, aliased_bytes: the sizes of buffers in XLA's
        plan.
      host_bytes: the sizes of arguments and temporaries in the host's memory, beside these; or
        ``None``.
      overlap: the share of ``wire_bytes`` with work between the start and the end of a collective;
        ``None`` without collectives.
      flops: floating-point operations by XLA's count, the body of a loop once; NaN without a count.
      unknown_loops: loops whose number of turns is unknown.
      compile_seconds: the time of compilation; NaN if the program was compiled before.
      findings: waste, each with a fix.
      window: the path of a window's state among the arguments if ``calls`` is 1, because counts are
        then per call and not per optimizer step; else empty.
      advice: what reached a loss first on such a network, on record; empty without a network.
      text: the program.
    """

    target: str
    devices: int
    params: int
    params_bytes: int
    calls: int
    donated_in_vain: tuple[Buffer, ...]
    not_donated: tuple[Buffer, ...]
    collectives: tuple[CompiledCollective, ...]
    # The label of each row of the table, and the field that holds the same count as a multiple.
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
    overlap: float | None = field(metadata={"share of sent bytes with work meanwhile": ""})
    flops: float
    unknown_loops: tuple[str, ...]
    compile_seconds: float
    findings: tuple[waste.Waste, ...]
    text: str = field(repr=False)
    window: str = ""
    advice: str = ""

    def per_step(self, ways: Ways) -> float:
        """Return the sum over an optimizer step: ``calls - 1`` held calls and one that applies."""
        return ways.most + ((self.calls - 1) * ways.held if self.calls > 1 else 0)

    @property
    def reductions(self) -> float:
        """Gradients reduced per optimizer step, as a multiple of the params: 1 is once.

        What cannot be told from gradients is counted.
        """
        return self.per_step(self.gradients) / self.params if self.params else math.nan

    @property
    def gathers(self) -> float:
        """Elements gathered per optimizer step, as a multiple of the params."""
        return self.per_step(self.gathered) / self.params if self.params else math.nan

    @property
    def temporaries(self) -> float:
        """Temporary bytes as a multiple of the bytes of the params on one device."""
        return self.temporary_bytes / self.params_bytes if self.params_bytes else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, without the text; ``None`` for what is not known."""
        measured = {name: getattr(self, name) for name in ("reductions", "gathers", "temporaries")}
        plain = {x: y for x, y in dataclasses.asdict(self).items() if x != "text"} | measured
        return jax.tree.map(lambda x: x if isinstance(x, str) or math.isfinite(x) else None, plain)

    def __str__(self) -> str:
        return tables.text(self)


def audit(
    program: Any,
    *args: Any,
    target: str | None = None,
    params: PyTree = None,
    calls: int = 1,
    depth: int | None = None,
    turns: int | None = None,
    network: str | None = None,
    **given: PyTree,
) -> Audit:
    """Compile a program and count what it sends, keeps and copies.

    The program is a function or ``jax.jit`` of one with its arguments, a ``TrainStep`` with state
    and batch, or the result of ``lower()`` or ``compile()``. Nothing runs, and arguments may be
    ``jax.ShapeDtypeStruct``. With a target it is compiled for devices that need not be present:
    counts of one compiler often do not hold for another.

    Args:
      program: see above.
      *args: its arguments; none if it is lowered or compiled.
      target: see ``boostax.inspect.target_devices``; ``None`` for the devices of the arguments,
        which may be those of a target. A program over a present mesh moves to a target with as many
        devices.
      params: the tree whose size is the unit of counts; by default ``.params`` of the first
        argument if it has them, else the first argument. ``jax.pmap`` stacks its params: pass those
        of one replica.
      calls: calls per optimizer step: the window of ``boostax.accumulate`` or ``optax.MultiSteps``.
      depth: the number of frozen groups of a ``TrainStep`` with ``scheduled_freeze``; by default
        that of the next call.
      turns: turns of loops whose number the program does not say, as of a ``while_loop`` whose
        bound is an argument. Without it, what is inside counts as infinite.
      network: the rate of each device's link in each direction, and the latency of a message:
        ``"100Mbit"``, ``"1Gbit, 0.1 ms"``. The audit then says the seconds that a call waits for
        its collectives, without any overlap, and what reached a loss first at this rate.
      **given: keywords of the loss of a ``TrainStep``, as for a call of it.

    Returns:
      An ``Audit``. Cost: a trace and a compilation; for a billion params on 256 devices about a
      minute, several minutes if layers are not scanned.

    Raises:
      ValueError, TypeError: an unknown target or program, or a program that cannot be moved.
      RuntimeError: the compiler of the target is not installed.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w))
      >>> found = boostax.audit(step, jnp.zeros((256, 64)), jnp.ones((32, 256)))
      >>> found.params, len(found.collectives), found.aliased_bytes
      (16384, 0, 0)
      >>> print(found.findings[0].mend)
      Donate them: jax.jit(step, donate_argnums=...).
    """
    checks.positive_int(WHO, "calls", calls, "It is the number of calls per optimizer step.")
    checks.natural(WHO, "turns", turns or 0, "It is the number of turns of a loop.")
    links = None if network is None else networks.Network.of(network)
    made = targets.compile_program(program, args, target, depth, given)
    parsed = hlo.parse(made.compiled.as_text(), turns)
    if params is None:
        params = getattr(args[0], "params", args[0]) if args else None
    sizes = _sizes(params)
    shapes = [shape for shape, _ in sizes]
    possible = functools.cache(functools.partial(collectives.gradient_sizes, shapes, made.mesh))
    batch = _batch_axes(made.arguments, shapes)
    listed = collectives.compiled_collectives(parsed, made.mesh, possible, batch)
    memory: Any = made.compiled.memory_analysis()
    loops = (x for x in parsed.sites if x.instruction.op == "while" and turns is None)
    found = Audit(
        target=target or made.described,
        devices=parsed.partitions,
        params=sum(math.prod(shape) for shape, _ in sizes),
        params_bytes=sum(local for _, local in sizes),
        calls=calls,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        host_bytes=memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes or None,
        collectives=listed,
        traffic=traffic.traffic(parsed),
        cycles=traffic.cycles(parsed),
        flops=float((made.compiled.cost_analysis() or {}).get("flops", math.nan)),
        unknown_loops=tuple(x.instruction.name for x in loops if parsed.trips(x) is None),
        compile_seconds=made.seconds,
        findings=(),
        text=made.compiled.as_text(),
        window=_window(args) if calls == 1 else "",
        advice=links.advice if links else "",
        **_buffers(parsed, made.arguments),
        **_sent(parsed, listed, made.mesh),
        **_waited(parsed, listed, links, apart="cpu" in made.described),
    )
    findings = waste.wastes(found, shapes, parsed.total, type(program).__module__)
    return dataclasses.replace(found, findings=tuple(findings))


def _sent(program: hlo.Program, listed: Sequence[Any], mesh: Mesh | None) -> dict[str, Any]:
    """Return the fields of an audit that are sums over collectives."""

    def total(of: Callable[[CompiledCollective], float]) -> Ways:
        return program.total((c.branches, hlo.repeated(of(c), c.executions)) for c in listed)

    share = lambda c: collectives.RING[c.kind](c.devices)  # noqa: E731
    sent = lambda c: c.bytes * share(c)  # noqa: E731
    dtypes = sorted({name for c in listed for name in c.dtypes})
    wire, hidden = total(sent), total(lambda c: c.overlapped * sent(c))
    border = "slice" if collectives.slice_axes(mesh) else "host"
    return {
        "reduced": total(lambda c: c.elements * (c.does in collectives.REDUCES)),
        "gradients": total(lambda c: c.uses.get("gradients", 0) + c.uses.get("unknown", 0)),
        "gathered": total(lambda c: c.elements * (c.does == "all-gather")),
        "wire_bytes": wire,
        "wire_dtypes": {x: total(lambda c, x=x: c.by_dtype.get(x, 0) * share(c)) for x in dtypes},
        "crossing_bytes": total(lambda c: sent(c) * (c.crosses == border)),
        "overlap": hidden.most / wire.most if wire.most else None,
    }


def _waited(
    program: hlo.Program, listed: Sequence[Any], links: networks.Network | None, *, apart: bool
) -> dict[str, Any]:
    """Return the fields of an audit that say how long the network takes."""
    # Devices of one host do not wait for the network.
    far = [c for c in listed if c.crosses] or listed
    counts = [(c, networks.messages(c, apart)) for c in far]
    counted = [(c, networks.on_wire(c, sent), sent) for c, sent in counts]
    total = lambda of: program.total((c.branches, of(*x)) for c, *x in counted)  # noqa: E731
    return {
        "messages": total(lambda _, messages: messages),
        "network_bytes": links and total(lambda sent, _: sent),
        "network_seconds": links and total(links.seconds),
    }


def _batch_axes(arguments: Sequence[Any], shapes: Sequence[Any]) -> frozenset[str] | None:
    """Return the mesh axes that shard arguments other than params and what has their shapes."""
    used = [x for x in arguments if x.sharding is not None and x.info.shape not in ((), *shapes)]
    specs: list[Any] = [getattr(x.sharding, "spec", None) for x in used]
    return None if None in specs or not specs else frozenset(jax.tree.leaves([*map(tuple, specs)]))


def _window(args: tuple[Any, ...]) -> str:
    """Return the path of a window of ``accumulate`` or ``optax.MultiSteps``, if there is one."""

    def holds(x: object) -> bool:
        ours = isinstance(x, AccumulateState) and x.window is not None
        return ours or isinstance(x, optax.MultiStepsState)

    leaves = jax.tree_util.tree_leaves_with_path(args, is_leaf=holds)
    found = (f"{jax.tree_util.keystr(at)}, {type(x).__name__}" for at, x in leaves if holds(x))
    return next(found, "")


def _buffers(program: hlo.Program, arguments: Sequence[targets.Argument]) -> dict[str, Any]:
    """Find arguments that are donated in vain, and those that could be donated and are not."""
    used = [x for x in arguments if x.sharding is not None]
    body = program.computations[program.entry].values()
    types = {int(i.literal): i.result[0][:2] for i in body if i.op == "parameter"}
    if len(types) != len(used):
        allowed = f"{len(used)}, one for each argument that it uses"
        raise hlo.unreadable("the parameters of a compiled program", allowed, len(types))
    kept = {used[i].path for i in program.aliased}
    donated = [x for x in arguments if x.info.donated and 0 not in x.info.shape]
    in_vain = [x for x in donated if x.path not in kept]
    # Results in new buffers, by type: an argument of the same type could have been donated.
    free = collections.Counter(x[:2] for i in body if i.root for x in i.result)
    free -= collections.Counter(types[i] for i in program.aliased)
    not_donated: list[targets.Argument] = []
    for i, x in enumerate(used):
        if not x.info.donated and free[types[i]] > 0:
            free[types[i]] -= 1
            not_donated.append(x)
    return {
        name: tuple(Buffer(x.path, _local_bytes(x.info, x.sharding)) for x in found)
        for name, found in (("donated_in_vain", in_vain), ("not_donated", not_donated))
    }


def _sizes(params: PyTree) -> list[tuple[tuple[int, ...], int]]:
    """Return each leaf's shape, without a dimension of replicas, and its bytes on one device."""
    return [
        (x.shape[is_per_replica(node) :], _local_bytes(x, getattr(x, "sharding", None)))
        for node in jax.tree.leaves(params, is_leaf=is_per_replica)
        for x in jax.tree.leaves(node)
        if hasattr(x, "shape")
    ]


def _local_bytes(x: Any, sharding: jax.sharding.Sharding | None) -> int:
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize
