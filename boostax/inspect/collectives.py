# SPDX-License-Identifier: Apache-2.0
"""The collectives of a compiled program: bytes, executions, mesh axes, source lines."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from boostax.inspect.hlo import Array, Instruction, Program, Site, bits, unreadable

REDUCES = ("all-reduce", "reduce-scatter")
# XLA's names for the collectives of JAX.
_KINDS = {
    **dict.fromkeys(("psum", "pmax", "pmin"), "all-reduce"),
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
# Bytes that one of n devices sends on a ring, per byte of its operand.
RING: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    **dict.fromkeys(("collective-permute", "collective-broadcast", "send"), lambda n: 1),
}
# The collective that the permutes in a computation of this name do together.
_WINDOWED = {
    "windowed_dot_general_body_ag": "all-gather",
    "windowed_dot_general_body_rs": "reduce-scatter",
}
# Operations that compute, and can hide a transfer.
_WORK = frozenset(
    "fusion custom-call reduce dot convolution sort while conditional call copy".split()
)


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """One collective of a compiled program.

    Attributes:
      kind: ``all-reduce``, ``reduce-scatter`` (on a TPU also an all-reduce that is scattered in the
        same fusion), ``all-gather``, ``all-to-all``, ``collective-permute``, ``send``, ...
      does: the kind, except for the permutes of a windowed matrix product, by which a TPU's
        compiler gathers weights and scatters their gradients: the collective that they do together.
      dtypes: dtypes of the elements in the compiled program; for elements packed in u32, their own
        dtype.
      elements: elements of one execution on one device: its operands, or the result of an
        all-gather.
      operands: the elements of each array.
      bytes: bytes of the operands of one execution on one device.
      executions: executions per call, multiplied by the trip counts of loops.
      devices: devices in a group.
      axes: the mesh axes that it runs over; empty if the mesh is unknown or no axes fit.
      crosses: ``"slice"`` or ``"host"`` if a group spans several, else ``""``.
      branches: the branches around it, outermost first; empty if every call runs it.
      loops: the loops around it.
      widened: whether the compiler widened the dtype that the program asks for. For a program that
        was compiled before, only widened sums of a CPU or GPU are known.
      overlapped: whether something is computed between its start and its end.
      source: ``file:line``, if the compiler kept it.
      name: the name of JAX's operation: ``jit(step)/shard_map/psum``.
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
    program: Program, mesh: Mesh | None = None, jaxpr: Any = None
) -> tuple[CompiledCollective, ...]:
    """Return all collectives in the order of the schedule; ``jaxpr`` is the traced program."""
    found: dict[Any, CompiledCollective] = {}
    for site in program.sites:
        i = site.instruction
        kind = i.op.removesuffix("-start")
        if kind not in RING or (kind == "send" and "megascale" not in i.attributes):
            continue
        # On a TPU every fusion that continues a transfer contains it again, also in inner loops.
        carried = "async_collective_fusion_config" in i.attributes
        channel, chain = i.attribute(r"channel_id=(\d+)"), i.attribute(r'chain_id="(\d+)"')
        transfer = (channel, chain, site.branches) if carried else len(found)
        if transfer not in found:
            found[transfer] = _collective(program, site, kind, mesh, carried)
    listed = found.values()
    # Kinds and bits in the jaxpr for which the compiled program has no collective.
    kept = {(c.kind, bits(dtype)) for c in listed for dtype in c.dtypes}
    lost = set(_asked(jaxpr)) - kept
    return tuple(dataclasses.replace(c, widened=c.widened or _lost(c, lost)) for c in listed)


def _asked(jaxpr: Any) -> Iterator[tuple[str, int]]:
    """Yield the kind of each collective in the jaxpr, and the bits of its elements."""
    for eqn in () if jaxpr is None else jaxpr.eqns:
        kind = _KINDS.get(eqn.primitive.name.removesuffix("_invariant"))
        if kind and (eqn.params.get("axes") or eqn.params.get("axis_name")):
            yield from ((kind, bits(x.aval.dtype.name)) for x in eqn.invars)
        for inner in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            yield from _asked(inner if hasattr(inner, "eqns") else None)


def _lost(c: CompiledCollective, lost: set[tuple[str, int]]) -> bool:
    """Return whether the compiler widened a collective: a narrower one of the jaxpr is missing."""
    asked = c.name.rpartition("/")[2].removesuffix("_invariant") in _KINDS
    widest = max(map(bits, c.dtypes), default=0)
    return asked and any(kind == c.kind and narrow < widest for kind, narrow in lost)


def _collective(
    program: Program, site: Site, kind: str, mesh: Mesh | None, carried: bool
) -> CompiledCollective:
    i, given = site.instruction, program.operands(site)
    if kind == "send":
        given = given[:1] or i.result[:1]
    if kind == "all-reduce" and site.fused and "all-reduce-scatter" in site.computation:
        kind = "reduce-scatter"
    windows = _WINDOWED.items() if kind == "collective-permute" else ()
    does = next((whole for name, whole in windows if name in site.computation), kind)
    # The results of a start begin with its operands.
    arrived = i.result[len(given) * i.op.endswith("-start") :]
    reducer = i.attribute(r"to_apply=%([\w.\-]+)")
    packed = _packed(program, reducer, given)
    factor = 32 // bits(packed) if packed else 1
    operands = tuple(factor * x.elements for x in (arrived if kind == "all-gather" else given))
    groups = _groups(i, program.partitions)
    axes, crosses = _place(groups, mesh)
    if kind == "send":
        axes, crosses = slice_axes(mesh), "slice"
    # The compiler may keep the name and source of a fusion but not of its parts.
    said = (i, site.caller.instruction) if site.caller is not None and site.fused else (i,)
    names = (x.attribute(r'op_name="([^"]*)"') for x in said)
    return CompiledCollective(
        kind=kind,
        does=does,
        dtypes=(packed,) if packed else tuple(sorted({x.dtype for x in given if x.bytes > 0})),
        elements=sum(operands),
        operands=operands,
        bytes=sum(x.bytes for x in given),
        executions=site.executions,
        devices=len(groups[0]),
        axes=axes,
        crosses=crosses,
        branches=site.branches,
        loops=site.loops,
        widened="promoted" in reducer,
        overlapped=carried or _overlapped(program, site),
        source=next(filter(None, map(program.source, said)), ""),
        name=next(filter(None, names), ""),
    )


def _packed(program: Program, reducer: str, given: Sequence[Array]) -> str | None:
    """Return the narrow dtype that a TPU packs by two or four into u32 and adds up."""
    if any(x.dtype != "u32" for x in given):
        return None
    inside = program.computations.get(reducer, {}).values()
    dtypes = (i.result[0].dtype for i in inside if i.op == "bitcast-convert")
    return next((dtype for dtype in dtypes if bits(dtype) < 32), None)


def _overlapped(program: Program, site: Site) -> bool:
    """Return whether something is computed between a start and its end."""
    if site.caller is not None and site.caller.instruction.op == "async-start":
        site = site.caller
    begun = site.instruction
    if not (begun.op.endswith("-start") or begun.op == "send"):
        return False
    schedule = list(program.computations[site.computation].values())
    after = schedule[schedule.index(begun) + 1 :]
    runs = lambda i: not (i.op.endswith("-done") and begun.name in i.operands)  # noqa: E731
    return any(i.op in _WORK for i in itertools.takewhile(runs, after))


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_LISTED = r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]+\},?)+)\}"
_ALONG = r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(" + _IOTA + r"\))? \{([^}]*)\}"


def _groups(instruction: Instruction, devices: int) -> list[tuple[int, ...]]:
    """Return the groups of communicating devices, by their numbers in the program."""
    if listed := instruction.attribute(_LISTED):
        return [tuple(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", listed)]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=" + _IOTA, instruction.attributes):
        rows, dims, order = map(_numbers, iota.groups())
        return _rows(dims, order, rows, [1])
    if named := re.search(_ALONG, instruction.attributes):
        mesh, dims, order, axes = named.groups()
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
        along = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes)
        # A part of an axis is written as two sizes: the size before the part, and the size of the
        # part.
        parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in along}
        if len(parts) == len(along):
            cut = ((*parts.get(name, (1, size)), size) for name, size in sizes.items())
            shape = [x for before, part, n in cut for x in (before, part, n // before // part)]
            places = [3 * list(sizes).index(name) + 1 for name in parts]
            return _rows(_numbers(dims) or shape, _numbers(order), shape, places)
    written = instruction.attribute(r"((?:replica_groups|source_target_pairs)=.{0,60})")
    if written and not written.startswith("replica_groups={}"):
        raise unreadable("the groups of a collective", "of a known form", written)
    return [tuple(range(devices))]


def _rows(
    dims: list[int], order: list[int], shape: list[int], along: list[int]
) -> list[tuple[int, ...]]:
    """Return groups along mesh axes: numbers in the shape ``dims``, transposed and reshaped."""
    numbers = np.arange(math.prod(dims)).reshape(dims)
    box = (numbers.transpose(order) if order else numbers).reshape(shape)
    size = math.prod(shape[axis] for axis in along)
    rows = np.moveaxis(box, along, range(-len(along), 0)).reshape(-1, size)
    return [tuple(row) for row in rows.tolist()]


def _numbers(text: str | None) -> list[int]:
    return [int(x) for x in text.split(",")] if text else []


def _place(groups: Sequence[tuple[int, ...]], mesh: Mesh | None) -> tuple[tuple[str, ...], str]:
    """Return the mesh axes that groups span, and whether they span slices or hosts."""
    if mesh is None:
        return (), ""
    devices = mesh.devices.flat
    spans = lambda key: any(len({key(devices[n]) for n in group}) > 1 for group in groups)  # noqa: E731
    at = [np.transpose(np.unravel_index(group, mesh.devices.shape)) for group in groups]
    varies = np.any([(place != place[0]).any(axis=0) for place in at], axis=0)
    # A group over mesh axes holds every device along them, so no two groups share the other axes.
    apart = {tuple(place[0][~varies]) for place in at}
    whole = len(apart) == len(set(map(frozenset, groups)))
    axes = tuple(itertools.compress(mesh.axis_names, varies)) if whole else ()
    crosses = "host" if spans(lambda d: d.process_index) else ""
    return axes, "slice" if spans(_slice) else crosses


def slice_axes(mesh: Mesh | None) -> tuple[str, ...]:
    """Return the mesh axes along which the slice of a device changes."""
    if mesh is None:
        return ()
    slices = np.vectorize(_slice)(mesh.devices)
    changes = ((slices != slices.take([0], axis)).any() for axis in range(slices.ndim))
    return tuple(itertools.compress(mesh.axis_names, changes))


def _slice(device: object) -> int:
    return getattr(device, "slice_index", 0) or 0
