"""What any program does on the machine it is compiled for: memory, collectives, traffic, waste."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.tree_util import keystr

from boostax._core import checks, costs
from boostax._core.replicas import is_per_replica
from boostax.inspect import hlo
from boostax.inspect.collectives import (
    REDUCES,
    CompiledCollective,
    compiled_collectives,
    slice_axes,
)
from boostax.inspect.hlo import Ways
from boostax.inspect.targets import compiler_options, retargeted, target_devices
from boostax.inspect.traffic import cycles, traffic
from boostax.inspect.waste import Waste, wastes
from boostax.train.compiled import TrainStep

PyTree = Any
WHO = "audit"


class Buffer(NamedTuple):
    """An argument.

    Attributes:
      path: of the argument: ``[0].opt_state.mu['w']``.
      bytes: on one device.
    """

    path: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Audit:
    """What a compiled program does. ``print`` says it in words.

    Counts are per call and device. Where branches differ they are ``(least, most)``: with the
    cheapest branch of every conditional (a call that a gate holds) and with the dearest (one that
    it lets through).

    Attributes:
      target: what it was compiled for.
      devices: that run it together.
      params: elements of the params, on all devices together; 0 if not known.
      params_bytes: of the params on one device.
      calls: calls per optimizer step, of which one takes the dearest way.
      argument_bytes, temporary_bytes, output_bytes, aliased_bytes: as XLA plans its buffers.
      donated_in_vain: donated arguments that no result takes over.
      not_donated: arguments that come back as results of their type, and are not donated.
      collectives: in the order of the schedule.
      reduced: elements that go into all-reduces and reduce-scatters.
      gathered: elements that come out of all-gathers.
      wire_bytes: that the device sends, by the formula of a ring.
      crossing_bytes: of these, to another slice; of a single slice, to another host.
      traffic: bytes that operations read and write in memory (HBM).
      cycles: that a TPU's compiler estimates, without the network; ``None`` of the others.
      flops: floating-point operations that XLA counts, the body of a loop once; NaN if it does not.
      overlap: the share of ``wire_bytes`` with work between the start of a collective and its end;
        ``None`` without collectives.
      unknown_loops: loops whose turns the compiler does not say: what is in them counts once.
      compile_seconds: that the compiler took; NaN of a program that was compiled before.
      findings: what is wasted, with the mend.
      text: the program.
    """

    target: str
    devices: int
    params: int
    params_bytes: int
    calls: int
    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    aliased_bytes: int
    donated_in_vain: tuple[Buffer, ...]
    not_donated: tuple[Buffer, ...]
    collectives: tuple[CompiledCollective, ...]
    reduced: Ways
    gathered: Ways
    wire_bytes: Ways
    crossing_bytes: Ways
    traffic: Ways
    cycles: Ways | None
    flops: float
    overlap: float | None
    unknown_loops: tuple[str, ...]
    compile_seconds: float
    findings: tuple[Waste, ...]
    text: str = dataclasses.field(repr=False)

    def per_step(self, ways: Ways) -> float:
        """Of an optimizer step: ``calls - 1`` calls that are held, and one that applies."""
        return (self.calls - 1) * ways.least + ways.most

    @property
    def reductions(self) -> float:
        """Elements reduced per optimizer step, as a multiple of the params: 1 is once."""
        return self.per_step(self.reduced) / self.params if self.params else math.nan

    @property
    def gathers(self) -> float:
        """Elements gathered per optimizer step, as a multiple of the params."""
        return self.per_step(self.gathered) / self.params if self.params else math.nan

    @property
    def temporaries(self) -> float:
        """Temporary bytes as a multiple of the params' on one device."""
        return self.temporary_bytes / self.params_bytes if self.params_bytes else math.nan

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON, without the text."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "text"]
        names += ["reductions", "gathers", "temporaries"]
        return {name: _plain(getattr(self, name)) for name in names}

    def save_picture(self, path: Any) -> None:
        """Draw memory and collectives to a file; needs matplotlib."""
        from boostax.inspect.audit_picture import draw

        draw(self, path)

    def __str__(self) -> str:
        from boostax.inspect.audit_table import text

        return text(self)


def audit(
    program: Any,
    *args: Any,
    target: str | None = None,
    params: PyTree = None,
    calls: int = 1,
    depth: int | None = None,
) -> Audit:
    """Say what a program sends, keeps and copies, in the program that the compiler makes of it.

    Any program: a function or ``jax.jit`` of one with its arguments, a ``TrainStep`` with state and
    batch, or what ``lower()`` or ``compile()`` returned. Nothing is run, and arguments may be
    ``jax.ShapeDtypeStruct``. With a target it is compiled for devices that need not be here: what
    is true of one compiler is often not of another.

    Args:
      program: see above.
      *args: its arguments; none with what is lowered or compiled already.
      target: see ``boostax.inspect.target_devices``; ``None`` for the devices of the arguments,
        which may be those of a target as well. A program over a mesh at hand moves to a target of
        as many.
      params: a tree by whose size counts are measured; by default ``.params`` of the first argument
        if it has them, else the first argument. With ``jax.pmap``, whose params are stacked, pass
        those of one replica.
      calls: per optimizer step: the window of ``boostax.accumulate`` or ``optax.MultiSteps``.
      depth: of a ``TrainStep`` with ``scheduled_freeze``: groups frozen; the coming one by default.

    Returns:
      An ``Audit``. Cost: a trace and a compilation, of a billion params for 256 devices about a
      minute, several where layers are not scanned.

    Raises:
      ValueError, TypeError: a target or a program that it does not know, or that cannot be moved.
      RuntimeError: the target's compiler is not installed.

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
    made = _compiled(program, args, target, depth)
    parsed = hlo.parse(made.compiled.as_text())
    listed = compiled_collectives(parsed, made.mesh, made.traced)
    memory: Any = made.compiled.memory_analysis()
    if params is None:
        params = getattr(args[0], "params", args[0]) if args else None
    sizes = _sizes(params)
    in_vain, not_donated = _buffers(parsed, made.arguments)

    def total(of: Callable[[CompiledCollective], float]) -> Ways:
        return parsed.total((c.branches, of(c)) for c in listed)

    wire = total(lambda c: c.wire_bytes)
    hidden = total(lambda c: c.overlapped * c.wire_bytes)
    border = "slice" if made.mesh is not None and slice_axes(made.mesh) else "host"
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
        donated_in_vain=in_vain,
        not_donated=not_donated,
        collectives=listed,
        reduced=total(lambda c: c.elements * c.executions * (c.does in REDUCES)),
        gathered=total(lambda c: c.elements * c.executions * (c.does == "all-gather")),
        wire_bytes=wire,
        crossing_bytes=total(lambda c: c.wire_bytes * (c.crosses == border)),
        traffic=traffic(parsed),
        cycles=cycles(parsed),
        flops=float((made.compiled.cost_analysis() or {}).get("flops", math.nan)),
        overlap=hidden.most / wire.most if wire.most else None,
        unknown_loops=tuple(
            site.instruction.name
            for site in parsed.sites
            if site.instruction.op == "while" and parsed.trips(site) is None
        ),
        compile_seconds=made.seconds,
        findings=(),
        text=made.compiled.as_text(),
    )
    findings = wastes(found, [shape for shape, _ in sizes], made.mesh)
    return dataclasses.replace(found, findings=tuple(findings))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, (Buffer, Waste)):
        return value._asdict()
    return [_plain(x) for x in value] if isinstance(value, tuple) else value


class _Argument(NamedTuple):
    """An argument of a compiled program.

    Attributes:
      path: where it stands.
      donated: whether its buffer may be taken over.
      types: its shape and dtype.
      sharding: ``None`` if the program does not use it, and XLA never sees it.
    """

    path: str
    donated: bool
    types: Any
    sharding: Any


class _Made(NamedTuple):
    """A compiled program.

    Attributes:
      compiled: what XLA made.
      arguments: in order.
      seconds: that compiling took.
      traced: the collectives that JAX asked for, as far as they are known.
    """

    compiled: Any
    arguments: tuple[_Argument, ...]
    seconds: float
    traced: Sequence[costs.Collective] = ()

    @property
    def mesh(self) -> Mesh | None:
        """Over which it runs, if over one."""
        return next(_meshes(x.sharding for x in self.arguments), None)

    @property
    def described(self) -> str:
        """The devices in words."""
        used = [x.sharding for x in self.arguments if x.sharding is not None]
        devices = list(used[0].device_set) if used else []
        return f"{len(devices)} x {devices[0].device_kind}" if devices else "unknown"


def _compiled(program: Any, args: tuple[Any, ...], target: str | None, depth: int | None) -> _Made:
    if isinstance(program, (jax.stages.Lowered, jax.stages.Compiled)):
        if args or target is not None:
            raise ValueError(
                f"{WHO}: a lowered or compiled program must be given alone, got "
                f"{len(args)} arguments and target={target!r}. Pass the jax.jit function itself, "
                "with its arguments, to compile it for another target."
            )
        return _finish(program)
    if isinstance(program, TrainStep):
        program, args = program.jitted(*args, depth=depth)
    else:
        checks.absent(WHO, "depth", depth, "left out", "Only a TrainStep has any.")
    if not callable(program):
        allowed = "a function, a TrainStep, or what lower() or compile() returned"
        hint = "audit(jax.jit(step), state, batch)."
        raise TypeError(checks.message(WHO, "program", allowed, program, hint))
    # Only jax.jit traces apart from lowering; jax.pmap lowers, and so do wrappers of both.
    program = program if hasattr(program, "lower") else jax.jit(program)
    shapes = jax.tree.map(_shape, args)
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(shapes)]
    meant = {device for x in shardings if x is not None for device in x.device_set}
    devices = target_devices(target) if target is not None else tuple(meant)
    stage = program.trace(*shapes) if hasattr(program, "trace") else None
    if meant <= set(devices) and (meant or target is None):
        # What a wrapper takes for an array is its own affair.
        made = _finish(program.lower(*args) if stage is None else stage.lower(), devices)
    elif isinstance(stage, jax.stages.Traced):
        made = _moved(program, shapes, stage.args_info, devices)
    else:
        hint = "Pass the jax.jit function inside, or build the program on the target's devices."
        got = getattr(program, "__name__", type(program).__name__)
        allowed = "a jax.jit function where it is to move to a target"
        raise TypeError(checks.message(WHO, "program", allowed, got, hint))
    known = isinstance(stage, jax.stages.Traced)
    return made._replace(traced=costs.collectives(stage.jaxpr) if known else ())


def _moved(program: Any, args: tuple[Any, ...], args_info: Any, devices: Sequence[Any]) -> _Made:
    """The program for other devices than those that its arguments are on."""
    platform: str = devices[0].platform
    platform = {"gpu": "cuda"}.get(platform, platform)
    exported = jax.export.export(program, platforms=[platform])(*args)
    args = jax.tree.map(_number, args)
    mesh = next(_meshes(x.sharding for x in jax.tree.leaves(args)), None)
    if exported.nr_devices > 1 and mesh is None:
        raise ValueError(
            f"{WHO}: args must have shardings over the program's mesh where a target is given, "
            "got none. Pass jax.ShapeDtypeStruct(shape, dtype, sharding=...) or placed arrays."
        )
    there = None if mesh is None else retargeted(mesh, devices, WHO)

    def place(x: Any) -> Any:
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
        sharding = NamedSharding(there, spec) if there else SingleDeviceSharding(devices[0])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    donated = (jax.tree.leaves(info, is_leaf=_is_info) for info in args_info[0])
    donate = tuple(i for i, infos in enumerate(donated) if any(x.donated for x in infos))
    again = jax.jit(lambda *args: exported.call(*args), donate_argnums=donate)
    # The mesh that a program with explicit axes runs under.
    plain = jax.sharding.get_mesh().empty or there is None
    with contextlib.nullcontext() if plain else jax.set_mesh(there):
        return _finish(again.lower(*jax.tree.map(place, args)), devices)


def _finish(
    program: jax.stages.Lowered | jax.stages.Compiled, devices: Collection[Any] = ()
) -> _Made:
    """Compile what is not compiled yet, for these devices."""
    begun = time.perf_counter()
    # Flax's NNX wraps what JAX returns.
    program = getattr(program, "lowered", program)
    compiled: Any = program
    if isinstance(program, jax.stages.Lowered):
        compiled = program.compile(compiler_options=compiler_options(devices))
    seconds = time.perf_counter() - begun if compiled is not program else math.nan
    infos = jax.tree_util.tree_leaves_with_path(compiled.args_info, is_leaf=_is_info)
    structure = jax.tree.structure(compiled.args_info, is_leaf=_is_info)
    shardings = structure.flatten_up_to(compiled.input_shardings)
    arguments = tuple(
        # The first key tells positional arguments from named ones.
        _Argument(keystr(path[1:]), info.donated, info, sharding)
        for (path, info), sharding in zip(infos, shardings, strict=True)
    )
    return _Made(compiled, arguments, seconds)


def _buffers(
    program: hlo.Program, arguments: Sequence[_Argument]
) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...]]:
    """Arguments donated in vain, and those that could be donated and are not."""
    used = [x for x in arguments if x.sharding is not None]
    body = program.computations[program.entry].values()
    types = {int(i.literal): i.result[0][:2] for i in body if i.op == "parameter"}
    if len(types) != len(used):
        raise RuntimeError(
            f"{WHO}: the compiled program must have a parameter for each of its {len(used)} "
            f"arguments, got {len(types)}. This version of JAX ({jax.__version__}) tells otherwise "
            "which arguments a program uses; please report it."
        )
    kept = {used[i].path for i in program.aliased}
    in_vain = [x for x in arguments if x.donated and x.path not in kept and 0 not in x.types.shape]
    # Results that stand in buffers of their own, by type: some argument might have given its own.
    free = collections.Counter(x[:2] for i in body if i.root for x in i.result)
    free.subtract(types[i] for i in program.aliased)
    not_donated: list[_Argument] = []
    for i, x in enumerate(used):
        if not x.donated and free[types[i]] > 0:
            free[types[i]] -= 1
            not_donated.append(x)
    told = lambda x: Buffer(x.path, _local_bytes(x.types, x.sharding))  # noqa: E731
    return tuple(map(told, in_vain)), tuple(map(told, not_donated))


def _meshes(shardings: Iterable[Any]) -> Iterator[Mesh]:
    """Of shardings, the meshes of devices that they are over."""
    meshes = (x.mesh for x in shardings if isinstance(x, NamedSharding))
    return (mesh for mesh in meshes if isinstance(mesh, Mesh))


def _sizes(params: PyTree) -> list[tuple[tuple[int, ...], int]]:
    """Of every leaf its shape, without the replicas', and its bytes on one device."""
    return [
        (
            x.shape[1:] if is_per_replica(node) else x.shape,
            _local_bytes(x, getattr(x, "sharding", None)),
        )
        for node in jax.tree.leaves(params, is_leaf=is_per_replica)
        for x in jax.tree.leaves(node)
        if hasattr(x, "shape")
    ]


def _local_bytes(x: Any, sharding: Any) -> int:
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def _shape(x: Any) -> Any:
    """An array without its values; what is none stays: it may be static."""
    if isinstance(x, np.ndarray):
        return jax.ShapeDtypeStruct(x.shape, jax.numpy.result_type(x))
    if not isinstance(x, jax.Array):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None)


def _number(x: Any) -> Any:
    """The types of a number of Python's, to be placed elsewhere."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if not isinstance(x, (bool, int, float, complex)):
        hint = "Bind what is static with functools.partial before jax.jit."
        raise TypeError(checks.message(WHO, "args", "arrays where a target is given", x, hint))
    return jax.ShapeDtypeStruct((), jax.numpy.result_type(x))


def _is_info(x: Any) -> bool:
    return hasattr(x, "donated")
