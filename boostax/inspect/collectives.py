"""The collectives of a compiled program: what they send, how often, over which axes, from where."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from boostax._core import costs, proof
from boostax.inspect.hlo import Array, Instruction, Program, Site, Ways, bits

REDUCES = ("all-reduce", "reduce-scatter")
# What JAX's collectives become.
_KINDS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
# Bytes that one device sends on a ring, per byte of what it puts in, for n devices.
RING: Mapping[str, Callable[[int], float]] = {
    **{kind: costs.RING[primitive] for primitive, kind in _KINDS.items()},
    "ragged-all-to-all": costs.RING["all_to_all"],
    "collective-broadcast": costs.RING["ppermute"],
    "send": costs.RING["ppermute"],
}
# How HLO begins the names of dtypes; the first that fits.
_DTYPES = {"bfloat": "bf", "float8_": "f8", "complex": "c", "float": "f", "uint": "u", "int": "s"}
# What computes, and can hide a transfer that is under way.
_WORK = frozenset(
    "fusion custom-call reduce dot convolution sort while conditional call copy".split()
)


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """One collective of a compiled program.

    Attributes:
      kind: ``all-reduce``, ``reduce-scatter`` (of a TPU also an all-reduce that is scattered in the
        same fusion), ``all-gather``, ``all-to-all``, ``collective-permute``, ``send``, ...
      does: the same, but of what the permutes of a matrix product in windows do together: a TPU's
        compiler gathers weights and scatters their gradients so.
      dtypes: of the elements in the compiled program; those packed in u32 by their own name.
      elements: of one execution and device: put in, or of an all-gather the result.
      operands: the same of each array.
      bytes: put in by one device and execution.
      executions: per call, trip counts of loops multiplied out.
      devices: in a group.
      axes: mesh axes it runs over; empty where the mesh is not known or no axes fit.
      crosses: ``"slice"`` or ``"host"`` if a group spans several, else ``""``.
      branches: branches it stands in, outermost first; empty if every call runs it.
      loops: loops it stands in.
      widened: whether the compiler widened the dtype that the program asks for. Of what was
        compiled before, only widened sums of a CPU or GPU are known.
      overlapped: whether something is computed between its start and its end.
      source: ``file:line``, where the compiler kept it.
      name: of JAX's operation: ``jit(step)/shard_map/psum``.
    """

    kind: str
    does: str
    dtypes: tuple[str, ...]
    elements: int
    operands: tuple[int, ...]
    bytes: int
    executions: int
    devices: int
    axes: tuple[str, ...]
    crosses: str
    branches: tuple[str, ...]
    loops: tuple[str, ...]
    widened: bool
    overlapped: bool
    source: str
    name: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per call, by the formula of a ring."""
        return self.bytes * self.executions * RING[self.kind](self.devices)


def compiled_collectives(
    program: Program, mesh: Mesh | None = None, traced: Sequence[costs.Collective] = ()
) -> tuple[CompiledCollective, ...]:
    """All collectives in the order of the schedule; ``traced`` are those that JAX asked for."""
    listed: list[CompiledCollective] = []
    under_way: set[tuple[Any, ...]] = set()
    for site in program.sites:
        kind = kind_of(site.instruction)
        if kind is None:
            continue
        # On a TPU a transfer that is under way stands in each fusion that carries it on, of loops
        # inside as well.
        carried = "async_collective_fusion_config" in site.instruction.attributes
        names = (site.instruction.attribute(x) for x in (r"channel_id=(\d+)", r'chain_id="(\d+)"'))
        transfer = (*names, site.branches)
        if carried and transfer in under_way:
            continue
        under_way |= {transfer} if carried else set()
        listed.append(_made(program, site, kind, mesh, carried))
    return _compared(listed, traced)


def _compared(
    listed: Sequence[CompiledCollective], traced: Sequence[costs.Collective]
) -> tuple[CompiledCollective, ...]:
    """With ``widened`` where a kind of collective has lost a narrower dtype that JAX asked for."""
    lost: dict[str, set[int]] = {}
    for c in traced:
        kind = _KINDS[c.primitive]
        kept = {dtype for other in listed if other.kind == kind for dtype in other.dtypes}
        lost.setdefault(kind, set()).update(
            bits(name) for name in map(_hlo_dtype, c.dtypes) if name not in kept
        )

    def widened(c: CompiledCollective) -> bool:
        asked = c.name.rpartition("/")[2].removesuffix("_invariant") in _KINDS
        return asked and any(n < max(map(bits, c.dtypes)) for n in lost.get(c.kind, ()))

    return tuple(dataclasses.replace(c, widened=c.widened or widened(c)) for c in listed)


def _hlo_dtype(name: str) -> str:
    """``float32`` as HLO writes it."""
    if name == "bool":
        return "pred"
    for long, short in _DTYPES.items():
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def kind_of(instruction: Instruction) -> str | None:
    """The kind of collective that an instruction is or begins."""
    base = instruction.op.removesuffix("-start")
    if base == "send" and "megascale" not in instruction.attributes:
        return None
    return base if base in RING else None


def along(
    program: Program,
    listed: Sequence[CompiledCollective],
    of: Callable[[CompiledCollective], float],
) -> Ways:
    """The sum of ``of(collective)`` per call on the cheapest and the dearest way."""

    def way(chosen: Sequence[CompiledCollective], depth: int) -> Ways:
        always = sum(of(c) * c.executions for c in chosen if len(c.branches) == depth)
        total = Ways(always, always)
        deeper = [c for c in chosen if len(c.branches) > depth]
        key = lambda c: c.branches[depth].rpartition(":")[0]  # noqa: E731
        for conditional, inside in itertools.groupby(sorted(deeper, key=key), key):
            branches: dict[str, list[CompiledCollective]] = {}
            for c in inside:
                branches.setdefault(c.branches[depth], []).append(c)
            each = [way(x, depth + 1) for x in branches.values()]
            # A branch without collectives costs nothing.
            quiet = len(branches) < _branch_count(program, conditional)
            least = 0.0 if quiet else min(w.least for w in each)
            total = total.plus(Ways(least, max(w.most for w in each)))
        return total

    return way(listed, 0)


def _branch_count(program: Program, conditional: str) -> int:
    return next(
        len(body[conditional].called) for body in program.named.values() if conditional in body
    )


def _made(
    program: Program, site: Site, kind: str, mesh: Mesh | None, carried: bool
) -> CompiledCollective:
    i = site.instruction
    given = program.reads(site.computation, i)
    if kind == "send":
        given = given[:1] or i.result[:1]
    outer = program.callers.get(site.computation)
    scattered = site.fused and kind == "all-reduce" and "all-reduce-scatter" in site.computation
    if scattered:
        kind = "reduce-scatter"
    counted = given
    if kind == "all-gather":
        counted = i.result[len(given) :] if i.op.endswith("-start") else i.result
    reducer = i.attribute(r"to_apply=%([\w.\-]+)") or ""
    packed = _packed(program, reducer, given)
    factor = 1 if packed is None else 32 // bits(packed)
    dtypes = (packed,) if packed else tuple(sorted({x.dtype for x in given if x.bytes > 0}))
    groups = _groups(i, program.partitions)
    name = i.attribute(r'op_name="([^"]*)"') or ""
    source = program.source(i)
    if outer is not None and site.fused:
        source = source or program.source(outer[1])
        name = name or outer[1].attribute(r'op_name="([^"]*)"') or ""
    axes, crosses = _place(groups, mesh)
    if kind == "send":
        crosses = "slice"
        axes = () if mesh is None else slice_axes(mesh)
    return CompiledCollective(
        kind=kind,
        dtypes=dtypes,
        elements=factor * sum(x.elements for x in counted),
        operands=tuple(factor * x.elements for x in counted),
        does=_windowed(program, site) or kind,
        bytes=sum(x.bytes for x in given),
        executions=site.executions,
        devices=len(groups[0]),
        axes=axes,
        crosses=crosses,
        branches=site.branches,
        loops=site.loops,
        widened="promoted" in reducer,
        overlapped=carried or _overlapped(program, site),
        source=source,
        name=name,
    )


def _windowed(program: Program, site: Site) -> str | None:
    """What a permute is a part of."""
    if site.instruction.op.removesuffix("-start") != "collective-permute":
        return None
    for name, does in (("_body_ag", "all-gather"), ("_body_rs", "reduce-scatter")):
        if "windowed_dot_general" + name in site.computation:
            return does
    return None


def _packed(program: Program, reducer: str, given: Sequence[Array]) -> str | None:
    """The narrow dtype that a TPU adds up two or four at a time in u32."""
    if any(x.dtype != "u32" for x in given):
        return None
    inside = program.computations.get(reducer, ())
    narrow = [i for i in inside if i.op == "bitcast-convert" and bits(i.result[0].dtype) < 32]
    return narrow[0].result[0].dtype if narrow else None


def _overlapped(program: Program, site: Site) -> bool:
    computation, i = site.computation, site.instruction
    if computation in program.callers and program.callers[computation][1].op == "async-start":
        computation, i = program.callers[computation]
    if not (i.op.endswith("-start") or i.op == "send"):
        return False
    body = program.computations[computation]
    begun = next(place for place, x in enumerate(body) if x.name == i.name)
    for x in body[begun + 1 :]:
        if x.op.endswith("-done") and i.name in x.operands:
            return False
        if x.op in _WORK:
            return True
    return False


def _groups(instruction: Instruction, devices: int) -> list[tuple[int, ...]]:
    """Which devices talk to each other, by their numbers in the program."""
    pairs = instruction.attribute(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}")
    listed = pairs or instruction.attribute(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}")
    if listed:
        return [tuple(map(int, x.split(","))) for x in re.findall(r"\{([\d,]+)\}", listed)]
    iota = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", instruction.attributes
    )
    if iota:
        shape, dims, order = (_numbers(x) for x in iota.groups())
        return _tuples(_ids(dims, order).reshape(shape))
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? "
        r"\{([^}]*)\}",
        instruction.attributes,
    )
    if named and ":" not in named.group(4):
        sizes = [int(x) for x in re.findall(r"=(\d+)", named.group(1))]
        names = re.findall(r"'([^']*)'=", named.group(1))
        dims, order = _numbers(named.group(2)) or sizes, _numbers(named.group(3))
        chosen = [names.index(x) for x in re.findall(r"'([^']*)'", named.group(4))]
        return _tuples(_along(_ids(dims, order).reshape(sizes), chosen))
    written = instruction.attribute(r"((?:replica_groups|source_target_pairs)=.{0,60})")
    if written is not None and not written.startswith("replica_groups={}"):
        danger = "Over which devices a collective runs would be unknown."
        raise proof.unreadable("the groups of a collective", "of a known form", written, danger)
    return [tuple(range(devices))]


def _ids(dims: list[int], order: list[int]) -> np.ndarray[Any, Any]:
    """All numbers in a box, its dimensions in another order."""
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(order) if order else ids


def _along(ids: np.ndarray[Any, Any], dims: list[int]) -> np.ndarray[Any, Any]:
    """A row for each group that lies along some dimensions."""
    count = math.prod(ids.shape[dim] for dim in dims)
    return np.moveaxis(ids, dims, range(-len(dims), 0)).reshape(-1, count)


def _tuples(rows: np.ndarray[Any, Any]) -> list[tuple[int, ...]]:
    return [tuple(map(int, row)) for row in rows]


def _numbers(text: str | None) -> list[int]:
    return [int(x) for x in text.split(",")] if text else []


def _place(groups: Sequence[tuple[int, ...]], mesh: Mesh | None) -> tuple[tuple[str, ...], str]:
    """The mesh axes over which groups span, and whether they span slices or hosts."""
    if mesh is None:
        return (), ""
    devices = list(mesh.devices.flat)
    names = [x for x in mesh.axis_names if mesh.shape[x] > 1]
    here = frozenset(n for group in groups for n in group)
    wanted = frozenset(frozenset(group) for group in groups)
    axes: tuple[str, ...] = ()
    for chosen in _subsets(names):
        # A program of one slice of several names the devices of that slice alone.
        parts = (frozenset(part) & here for part in _parts(mesh, chosen))
        if wanted <= frozenset(parts):
            axes = chosen
            break
    spans = lambda key: any(len({key(devices[n]) for n in group}) > 1 for group in groups)  # noqa: E731
    if spans(lambda d: getattr(d, "slice_index", 0)):
        return axes, "slice"
    return axes, "host" if spans(lambda d: d.process_index) else ""


def _parts(mesh: Mesh, chosen: tuple[str, ...]) -> list[frozenset[int]]:
    ids = np.arange(mesh.size).reshape(mesh.devices.shape)
    dims = [mesh.axis_names.index(x) for x in chosen]
    return [frozenset(row) for row in _tuples(_along(ids, dims))]


def slice_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which the slice changes."""
    slices = np.vectorize(lambda d: getattr(d, "slice_index", 0) or 0)(mesh.devices)
    return tuple(
        name
        for dim, name in enumerate(mesh.axis_names)
        if (slices != slices.take([0], axis=dim)).any()
    )


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(names) + 1):
        yield from itertools.combinations(names, count)
