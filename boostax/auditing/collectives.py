# SPDX-License-Identifier: Apache-2.0
"""List the collectives of a compiled program: bytes, executions, mesh axes, source lines."""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from boostax.auditing.hlo import Instruction, Program, Site, bits, repeated, unreadable

Groups = list[tuple[int, ...]]
Shapes = Sequence[tuple[int, ...]]
Axes = frozenset[str]

REDUCES = ("all-reduce", "reduce-scatter")
# The bytes that each of n devices sends on a ring, per byte of the operand.
RING: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    **dict.fromkeys(("reduce-scatter", "all-to-all", "ragged-all-to-all"), lambda n: (n - 1) / n),
    **dict.fromkeys(("collective-permute", "collective-broadcast", "send"), lambda n: 1),
}
# The collective that several permutes form together, if the name of their computation or scope
# contains the key.
_FORMED = {
    "ring_reduce_scatter": "reduce-scatter",
    "windowed_dot_general_body_ag": "all-gather",
    "windowed_dot_general_body_rs": "reduce-scatter",
}
# Operations that move an array without computing.
_MOVES = frozenset("bitcast bitcast-convert copy convert get-tuple-element reshape".split())
# Operations that compute, and can hide a transfer.
_WORK = "fusion custom-call reduce dot convolution sort while conditional call copy".split()


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """Describe a collective of a compiled program.

    Attributes:
      kind: ``all-reduce``, ``reduce-scatter`` (on a TPU also an all-reduce and a slice in one
        fusion), ``all-gather``, ``all-to-all``, ``collective-permute``, ``send``, ...
      does: the kind, except for the permutes with which a TPU's compiler gathers weights or
        scatters gradients in a windowed matrix product. These permutes together form a collective,
        whose kind is their ``does``.
      dtypes: dtypes of the elements in the compiled program; for elements packed in u32, the
        unpacked dtype.
      elements: elements per execution and device, in the operands or, for an all-gather, in the
        result.
      operands: the elements of each array.
      bytes: bytes of the operands per execution and device.
      by_dtype: ``bytes`` by dtype.
      uses: elements per execution by use: ``"gradients"``, ``"activations"`` of a sharded model,
        matrix products of the ``"optimizer"``, or ``"unknown"``.
      executions: executions per call, the product of the trip counts of ``loops``; infinite if a
        trip count is unknown.
      devices: devices in a group.
      axes: the mesh axes that the collective runs over; empty if unknown.
      crosses: ``"slice"`` or ``"host"`` if a group spans several slices or hosts, else ``""``.
      branches: the branches around the collective, outermost first; empty if every call runs the
        collective.
      loops: the loops around the collective.
      widened: whether the compiler widened the dtype that the collective has in the JAX program.
      overlapped: whether computation is scheduled between the collective's start and end.
      source: ``file:line``, if the compiler kept the source location.
      name: the name of JAX's operation, such as ``jit(step)/shard_map/psum``.
    """

    kind: str
    does: str
    dtypes: tuple[str, ...]
    elements: int
    operands: tuple[int, ...]
    bytes: int
    by_dtype: Mapping[str, int]
    uses: Mapping[str, int]
    executions: float
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
        """Return the bytes that each device sends per call, by the formula of a ring algorithm."""
        return repeated(self.bytes * RING[self.kind](self.devices), self.executions)


Collectives = Sequence[CompiledCollective]


def compiled_collectives(
    program: Program, mesh: Mesh | None = None, shapes: Shapes = (), batch: Axes | None = None
) -> tuple[CompiledCollective, ...]:
    """Return all collectives in the order of the schedule.

    Args:
      program: the compiled program.
      mesh: the mesh of the program.
      shapes: the shapes of the params.
      batch: the mesh axes over which the batch is sharded; ``None`` if unknown.
    """
    sizes = functools.cache(functools.partial(_gradient_sizes, shapes, mesh))
    collectives: dict[object, CompiledCollective] = {}
    for site in program.sites:
        i = site.instruction
        kind = i.op.removesuffix("-start")
        if kind not in RING or (kind == "send" and "megascale" not in i.attributes):
            continue
        # On a TPU, every fusion that continues a transfer repeats the transfer's instruction.
        # Fusions in inner loops repeat the instruction, too.
        carried = "async_collective_fusion_config" in i.attributes
        chain = (i.attribute(r"channel_id=(\d+)"), i.attribute(r'chain_id="(\d+)"'), site.branches)
        transfer = chain if carried else len(collectives)
        if transfer not in collectives:
            c = _collective(program, site, kind, mesh, carried)
            across = bool(c.axes) and batch is not None and batch.isdisjoint(c.axes)
            if c.does in REDUCES:
                c = _with_uses(program, site, c, sizes(c.axes if across else ()), across)
            collectives[transfer] = c
    return tuple(collectives.values())


def _widened(program: Program, site: Site) -> bool:
    """Return whether the compiler added a conversion that widens the collective's operand."""
    body = program.computations[site.computation]
    i = body[site.instruction.operands[0]]
    if i.op == "fusion":
        body, i = program.computations[i.called[0]], program.root(i.called[0]) or i
    converts = i.op == "convert" and "op_name=" not in i.attributes
    return converts and bits(body[i.operands[0]].result[0].dtype) < bits(i.result[0].dtype)


def _collective(
    program: Program, site: Site, kind: str, mesh: Mesh | None, carried: bool
) -> CompiledCollective:
    i = site.instruction
    body = program.computations[site.computation]
    inputs = tuple(x for name in i.operands if name in body for x in body[name].result)
    if kind == "send":
        inputs = inputs[:1] or i.result[:1]
    if kind == "all-reduce" and site.fused and "all-reduce-scatter" in site.computation:
        kind = "reduce-scatter"
    # The compiler may keep the name and source of a fusion, but drop the names and sources of the
    # instructions in it.
    lines = (i, site.caller.instruction) if site.caller is not None and site.fused else (i,)
    scope = next(filter(None, (x.attribute(r'op_name="([^"]*)"') for x in lines)), "")
    formed = _FORMED.items() if kind == "collective-permute" else ()
    does = next((x for name, x in formed if name in f"{site.computation} {scope}"), kind)
    reducer = i.attribute(r"to_apply=%([\w.\-]+)")
    # A TPU packs two or four elements of a narrow dtype into a u32.
    is_u32 = all(x.dtype == "u32" for x in inputs)
    reducing = program.computations.get(reducer, {}).values() if is_u32 else ()
    unpacked = (x.result[0].dtype for x in reducing if x.op == "bitcast-convert")
    packed = next((dtype for dtype in unpacked if bits(dtype) < 32), None)
    factor = 32 // bits(packed) if packed else 1
    # The results of a start instruction begin with its operands.
    outputs = i.result[len(inputs) * i.op.endswith("-start") :]
    operands = tuple(factor * x.elements for x in (outputs if kind == "all-gather" else inputs))
    groups = _groups(i, program.devices)
    axes, crosses = (slice_axes(mesh), "slice") if kind == "send" else _span(groups, mesh)
    by_dtype = collections.Counter[str]()
    for x in inputs:
        by_dtype[packed or x.dtype] += x.bytes
    return CompiledCollective(
        kind=kind,
        does=does,
        dtypes=tuple(sorted(name for name, size in by_dtype.items() if packed or size > 0)),
        elements=sum(operands),
        operands=operands,
        bytes=by_dtype.total(),
        by_dtype=dict(by_dtype),
        uses={},
        executions=site.executions,
        devices=len(groups[0]),
        axes=axes,
        crosses=crosses,
        branches=site.branches,
        loops=site.loops,
        widened="promoted" in reducer or (kind not in REDUCES and _widened(program, site)),
        overlapped=carried or _overlapped(program, site),
        source=next(filter(None, map(program.source, lines)), ""),
        name=scope,
    )


def _with_uses(
    program: Program, site: Site, c: CompiledCollective, sizes: Collection[int], across: bool
) -> CompiledCollective:
    """Determine the uses of a reduction's elements.

    If the reduction has no usable source line, it gets the line of its largest gradient.

    Names of operations distinguish the forward pass, the backward pass and the optimizer. A result
    of the forward or backward pass counts as activations under at least two of three conditions:
    the result belongs to the forward pass, the batch is not sharded over the reduction's axes
    (``across``), and the result's size is not among the ``sizes`` of gradients.
    """
    uses = collections.Counter[str]()
    most = (0, "")
    # The ``op_name`` of a collective with several operands describes at most the first operand, so
    # the ``op_name`` is used only if there is one operand.
    named = {_stage(program, site.instruction, True)} if len(c.operands) == 1 else set()
    for name, elements in zip(site.instruction.operands, c.operands, strict=False):
        for origin, count in _origins(program, site, name, elements):
            stages = (named | {_stage(program, origin, False)}) - {""}
            use = "gradients" if count in sizes else "unknown"
            if "optimizer" in stages:
                use = "optimizer" if len(stages) == 1 else use
            elif stages and (stages == {"forward"}) + across + (use == "unknown") > 1:
                use = "activations"
            uses[use] += count
            most = max(most, (count * (use == "gradients"), program.source(origin)))
    return dataclasses.replace(c, uses=dict(uses), source=c.source * (":" not in c.name) or most[1])


def _stage(program: Program, i: Instruction, is_collective: bool) -> str:
    """Return the stage of an operation: ``"forward"``, ``"backward"`` or ``"optimizer"``.

    The result is empty if the operation's name does not determine the stage. The name of the
    forward pass determines the stage only of collectives, matrix products and convolutions, because
    other operations with this name may compute a gradient.
    """
    name = i.attribute(r'op_name="([^"]*)"')
    product = name.endswith(("/dot_general", "/conv_general_dilated"))
    if "transpose(" in name:
        return "backward"
    if "jvp(" in name:
        return "forward" if is_collective or product else ""
    return "optimizer" * (product and any("-packages/optax/" in x for x in program.sources(i)))


def _origins(program: Program, site: Site, name: str, n: int) -> Iterator[tuple[Instruction, int]]:
    """Yield the instructions that computed the parts of an operand, and each part's size."""
    body = program.computations[site.computation]
    i = body[name]
    root = program.root(i.called[0]) if i.op in ("fusion", "call") else None
    if i.op == "parameter" and site.caller is not None:
        argument = site.caller.instruction.operands[int(i.literal)]
        yield from _origins(program, site.caller, argument, n)
    elif i.op == "concatenate" or (i.op in _MOVES and not _stage(program, i, False)):
        for operand in i.operands:
            part = n if i.op in _MOVES else body[operand].result[0].elements
            yield from _origins(program, site, operand, part)
    elif root is not None and root.op in ("concatenate", *_MOVES):
        inside = Site(root, i.called[0], site._replace(instruction=i), 1, (), (), False)
        yield from _origins(program, inside, root.name, n)
    else:
        yield i, n


def _overlapped(program: Program, site: Site) -> bool:
    """Return whether computation is scheduled between a collective's start and its end."""
    if site.caller is not None and site.caller.instruction.op == "async-start":
        site = site.caller
    start = site.instruction
    if not (start.op.endswith("-start") or start.op == "send"):
        return False
    schedule = list(program.computations[site.computation].values())
    after = schedule[schedule.index(start) + 1 :]
    ends = (n for n, i in enumerate(after) if i.op.endswith("-done") and start.name in i.operands)
    return any(i.op in _WORK for i in after[: next(ends, None)])


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_LISTED = r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]+\},?)+)\}"
_ALONG = r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(" + _IOTA + r"\))? \{([^}]*)\}"


def _groups(instruction: Instruction, devices: int) -> Groups:
    """Return the groups of communicating devices, as device numbers of the program."""
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
            split = ((*parts.get(name, (1, size)), size) for name, size in sizes.items())
            shape = [x for before, part, n in split for x in (before, part, n // before // part)]
            dimensions = [3 * list(sizes).index(name) + 1 for name in parts]
            return _rows(_numbers(dims) or shape, _numbers(order), shape, dimensions)
    written = instruction.attribute(r"((?:replica_groups|source_target_pairs)=.{0,60})")
    if written and not written.startswith("replica_groups={}"):
        raise unreadable("the groups of a collective", "of a known form", written)
    return [tuple(range(devices))]


def _rows(dims: list[int], order: list[int], shape: list[int], along: list[int]) -> Groups:
    """Return groups along mesh axes: an iota of shape ``dims``, transposed and reshaped."""
    numbers = np.arange(math.prod(dims)).reshape(dims)
    grid = (numbers.transpose(order) if order else numbers).reshape(shape)
    size = math.prod(shape[axis] for axis in along)
    rows = np.moveaxis(grid, along, range(-len(along), 0)).reshape(-1, size)
    return [tuple(row) for row in rows.tolist()]


def _numbers(text: str | None) -> list[int]:
    return [int(x) for x in text.split(",")] if text else []


def _span(groups: Groups, mesh: Mesh | None) -> tuple[tuple[str, ...], str]:
    """Return the mesh axes that groups span, and whether groups span slices or hosts."""
    if mesh is None:
        return (), ""
    indices = [np.transpose(np.unravel_index(group, mesh.devices.shape)) for group in groups]
    varies = np.any([(index != index[0]).any(axis=0) for index in indices], axis=0)
    # A group over mesh axes contains every device along those axes, so two groups differ in the
    # other axes.
    others = {tuple(index[0][~varies]) for index in indices}
    is_full = len(others) == len(set(map(frozenset, groups)))
    axes = tuple(itertools.compress(mesh.axis_names, varies)) if is_full else ()
    for border, name in {"slice": "slice_index", "host": "process_index"}.items():
        numbers = [getattr(device, name, 0) or 0 for device in mesh.devices.flat]
        if any(len({numbers[n] for n in group}) > 1 for group in groups):
            return axes, border
    return axes, ""


def slice_axes(mesh: Mesh | None) -> tuple[str, ...]:
    """Return the mesh axes along which devices belong to different slices."""
    if mesh is None:
        return ()
    numbers = [getattr(device, "slice_index", 0) or 0 for device in mesh.devices.flat]
    slices = np.reshape(numbers, mesh.devices.shape)
    changes = ((slices != slices.take([0], axis)).any() for axis in range(slices.ndim))
    return tuple(itertools.compress(mesh.axis_names, changes))


def _gradient_sizes(shapes: Shapes, mesh: Mesh | None, unsharded: Collection[str] = ()) -> set[int]:
    """Return the possible sizes of a gradient on a device: of a leaf, a layer or a shard.

    Gradients are assumed not to be sharded over the axes ``unsharded``.
    """
    sizes = () if mesh is None else [n for axis, n in mesh.shape.items() if axis not in unsharded]
    shards = {math.prod(factors) for factors in itertools.product(*((1, n) for n in sizes))}
    stacks = [shape for shape in shapes if len(shape) > 2]
    # XLA may also concatenate all leaves, or the matrices of a layer, in one array.
    layers = [sum(math.prod(x[1:]) for x in stacks if x[0] == n) for n in {x[0] for x in stacks}]
    layers += [math.prod(shape[1:]) for shape in shapes if len(shape) > 1]
    leaves = [math.prod(shape) for shape in shapes]
    sharded = {n // count for n in leaves + layers for count in shards if n % count == 0}
    return {sum(leaves)} | sharded
