"""The text of a compiled program: its instructions, where each stands and how often it runs.

``Compiled.as_text()`` is the optimized, scheduled HLO of one device. Everything that
``boostax.audit`` says is read from it, so it holds for the compiler that wrote it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from boostax._core import proof

_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_NAME = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
_REFERENCE = re.compile(r"%([\w.\-]+)")
# Instructions that name what is there already.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id iota "
    "opt-barrier add-dependency conditional while call".split()
)
# In whose attributes computations stand that run when they do.
_CALLS = {
    "conditional": ("branch_computations", "false_computation", "true_computation"),
    "while": ("body",),
    "call": ("to_apply",),
    "fusion": ("calls",),
    "async-start": ("calls",),
}


class Array(NamedTuple):
    """An array type.

    Attributes:
      dtype: as HLO writes it: ``f32``, ``s8``, ``pred``.
      elements: their number.
      on_chip: whether it lives in a TPU's vector memory and not in HBM.
    """

    dtype: str
    elements: int
    on_chip: bool

    @property
    def bytes(self) -> int:
        """Without padding."""
        return self.elements * bits(self.dtype) // 8


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """A line of a computation.

    Attributes:
      name: unique in the program.
      op: ``fusion``, ``all-reduce-start``, ...
      result: the arrays it gives.
      operands: names of what it reads.
      literal: what stands in the place of operands: of a constant its value.
      attributes: the rest of the line.
      root: whether it is what its computation gives.
    """

    name: str
    op: str
    result: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str
    root: bool

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in the attributes."""
        found = re.search(pattern, self.attributes)
        return None if found is None else found.group(1)

    @property
    def called(self) -> tuple[str, ...]:
        """The computations it runs: of a conditional its branches, by their index."""
        names: list[str] = []
        for key in _CALLS.get(self.op, ()):
            found = self.attribute(key + r"=\{([^}]*)\}") or self.attribute(key + r"=(%[\w.\-]+)")
            names += _REFERENCE.findall(found or "")
        return tuple(names)

    @property
    def cycles(self) -> int | None:
        """What the TPU's compiler estimates, without the network."""
        found = self.attribute(r'"estimated_cycles":"(-?\d+)"')
        return None if found is None else max(0, int(found))


class Site(NamedTuple):
    """An instruction where it stands.

    Attributes:
      instruction: it.
      computation: the name of its computation.
      executions: how often a call of the program runs it, as a multiple of its branches' runs.
      branches: the branches it stands in, outermost first, as ``conditional:index``.
      loops: the loops it stands in, outermost first.
      fused: whether it is a part of a fusion.
    """

    instruction: Instruction
    computation: str
    executions: int
    branches: tuple[str, ...]
    loops: tuple[str, ...]
    fused: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A parsed program.

    Attributes:
      computations: instructions in the order of the schedule.
      entry: the computation that a call runs.
      header: the first line.
      frames: source locations by number: ``file:line``.
    """

    computations: Mapping[str, Sequence[Instruction]]
    entry: str
    header: str
    frames: Mapping[int, str]

    @functools.cached_property
    def named(self) -> Mapping[str, Mapping[str, Instruction]]:
        """The instructions of each computation by their names."""
        return {name: {i.name: i for i in body} for name, body in self.computations.items()}

    @functools.cached_property
    def callers(self) -> Mapping[str, tuple[str, Instruction]]:
        """Of each computation one that runs it, and the instruction by which it does."""
        found: dict[str, tuple[str, Instruction]] = {}
        for name, body in self.computations.items():
            for i in body:
                for inner in i.called:
                    found.setdefault(inner, (name, i))
        return found

    @property
    def partitions(self) -> int:
        """Devices that run it together."""
        found = re.search(r"num_partitions=(\d+)", self.header)
        return int(found.group(1)) if found else 1

    @functools.cached_property
    def sites(self) -> tuple[Site, ...]:
        """Every instruction that a call can run, those inside fusions too, in order."""
        return tuple(self._walk(self.entry, 1, (), (), False))

    def aliased(self) -> frozenset[int]:
        """Arguments whose buffers results take over."""
        start = self.header.find("input_output_alias={")
        if start < 0:
            return frozenset()
        listed = _balanced(self.header[start + len("input_output_alias=") :], "{", "}")
        return frozenset(int(n) for n in re.findall(r": \((\d+), ", listed))

    def reads(self, computation: str, instruction: Instruction) -> tuple[Array, ...]:
        """The arrays of its operands."""
        named = self.named[computation]
        return tuple(x for o in instruction.operands if o in named for x in named[o].result)

    def trips(self, computation: str, loop: Instruction) -> int | None:
        """How often the body of a ``while`` runs; ``None`` where that is not known.

        CPU and GPU say it. For a TPU it is read from the counter: where it starts, what is added to
        it at each turn, and with which constant the condition compares it.
        """
        told = loop.attribute(r'"known_trip_count":\{"n":"?(\d+)')
        if told is not None:
            return int(told)
        condition = loop.attribute(r"condition=%([\w.\-]+)") or ""
        (body,) = loop.called or ("",)
        roots = [i for i in self.computations.get(condition, ()) if i.root]
        if not roots or "direction=LT" not in roots[0].attributes:
            return None
        counter, limit = (self._carried(condition, o) for o in roots[0].operands)
        if not isinstance(counter, _Place):
            return None
        start = self._start(computation, loop, counter)
        if isinstance(limit, _Place):
            limit = self._start(computation, loop, limit)
        step = self._step(body, counter)
        if start is None or limit is None or not step:
            return None
        return max(0, -(-(limit - start) // step))

    def _carried(self, computation: str, name: str) -> _Place | int | None:
        """A place in what a loop carries, or a constant."""
        named = self.named.get(computation, {})
        while name in named:
            i = named[name]
            if i.op == "constant" and i.literal.lstrip("-").isdigit():
                return int(i.literal)
            if i.op == "get-tuple-element" and named[i.operands[0]].op == "parameter":
                return _Place(int(i.attribute(r"index=(\d+)") or 0))
            if i.op not in ("copy", "bitcast", "convert"):
                return None
            name = i.operands[0]
        return None

    def _start(self, computation: str, loop: Instruction, place: _Place) -> int | None:
        given = self.named[computation].get(loop.operands[0])
        if given is None or given.op != "tuple":
            return None
        found = self._carried(computation, given.operands[place.number])
        if isinstance(found, _Place) and computation in self.callers:
            outside, caller = self.callers[computation]
            return self._start(outside, caller, found) if caller.op == "while" else None
        return found if isinstance(found, int) else None

    def _step(self, body: str, counter: _Place) -> int | None:
        roots = [i for i in self.computations.get(body, ()) if i.root]
        if not roots or roots[0].op != "tuple":
            return None
        added = self.named[body].get(roots[0].operands[counter.number])
        if added is None or added.op != "add":
            return None
        pair = [self._carried(body, o) for o in added.operands]
        return next((x for x in pair if isinstance(x, int)), None) if counter in pair else None

    def source(self, instruction: Instruction) -> str:
        """``file:line`` of the code that asked for it; empty where the compiler lost it."""
        frame = instruction.attribute(r"stack_frame_id=(\d+)")
        if frame is not None:
            return self.frames.get(int(frame), "")
        file = instruction.attribute(r'source_file="([^"]*)"')
        line = instruction.attribute(r"source_line=(\d+)")
        return f"{file}:{line}" if file else ""

    def ways(self, measure: Callable[[str, Instruction], float]) -> Ways:
        """The sum of a measure on the cheapest and the dearest way through the branches.

        Args:
          measure: of one execution of an instruction in a computation; not asked inside fusions.
        """
        known: dict[str, Ways] = {}

        def way(name: str) -> Ways:
            if name not in known:
                total = Ways(0.0, 0.0)
                for i in self.computations.get(name, ()):
                    own = measure(name, i)
                    total = total.plus(Ways(own, own))
                    if i.op == "conditional":
                        total = total.plus(_either([way(x) for x in i.called]))
                    elif i.op in ("while", "call", "async-start"):
                        turns = (self.trips(name, i) or 1) if i.op == "while" else 1
                        for x in i.called:
                            total = total.plus(way(x).times(turns))
                known[name] = total
            return known[name]

        return way(self.entry)

    def _walk(
        self,
        name: str,
        executions: int,
        branches: tuple[str, ...],
        loops: tuple[str, ...],
        fused: bool,
    ) -> Iterator[Site]:
        for i in self.computations.get(name, ()):
            yield Site(i, name, executions, branches, loops, fused)
            for place, inner in enumerate(i.called):
                times, within, inside = executions, branches, loops
                if i.op == "conditional":
                    within = (*branches, f"{i.name}:{place}")
                elif i.op == "while":
                    times, inside = executions * (self.trips(name, i) or 1), (*loops, i.name)
                parts = fused or i.op == "fusion"
                yield from self._walk(inner, times, within, inside, parts)


class _Place(NamedTuple):
    """A place in the tuple that a loop carries."""

    number: int


class Ways(NamedTuple):
    """A sum along a program whose branches differ.

    Attributes:
      least: where each conditional takes its cheapest branch: a call that is held or skipped.
      most: where each takes its dearest: a call that applies.
    """

    least: float
    most: float

    def plus(self, other: Ways) -> Ways:
        """One after the other."""
        return Ways(self.least + other.least, self.most + other.most)

    def times(self, trips: int) -> Ways:
        """A loop."""
        return Ways(self.least * trips, self.most * trips)


def parse(text: str) -> Program:
    """Read the text of a compiled program."""
    lines = text.splitlines()
    header = lines[0] if lines else ""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in lines[1:]:
        if current is None:
            found = _COMPUTATION.match(line)
            if found:
                current = computations.setdefault(found.group(2), [])
                entry = found.group(2) if found.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif not line.strip():
            continue
        else:
            current.append(_instruction(line))
    if not entry:
        raise ValueError(
            "audit: program must be compiled to HLO text with an ENTRY computation, got "
            f"{header[:80]!r}. Pass a jax.jit function with its arguments, or what its lower() or "
            "compile() returned."
        )
    return Program(computations, entry, header, _frames(lines))


@functools.cache
def bits(dtype: str) -> int:
    """Of an element."""
    if dtype in ("pred", "token"):
        return 8 if dtype == "pred" else 0
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found.group(1)) if found else 0


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays in a type, which may be a tuple."""
    found: list[Array] = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        sizes = [int(d.strip("<=")) for d in dims.split(",") if d.strip("<=")]
        found.append(Array(dtype, math.prod(sizes), "S(1)" in layout))
    return tuple(found)


def _either(branches: Sequence[Ways]) -> Ways:
    if not branches:
        return Ways(0.0, 0.0)
    return Ways(min(b.least for b in branches), max(b.most for b in branches))


def _instruction(line: str) -> Instruction:
    found = _NAME.match(line)
    if found is None:
        danger = "What it does would be missed."
        raise proof.unreadable("a line of a compiled program", "%name = type op(...)", line, danger)
    rest = line[found.end() :]
    shape = _balanced(rest, "(", ")") if rest.startswith("(") else rest.split(" ", 1)[0]
    rest = rest[len(shape) :].lstrip()
    op, _, after = rest.partition("(")
    inner = _balanced("(" + after, "(", ")")
    attributes = after[len(inner) - 1 :]
    operands = tuple(_REFERENCE.findall(inner))
    literal = "" if operands else inner[1:-1]
    root = found.group(1) is not None
    return Instruction(found.group(2), op, arrays(shape), operands, literal, attributes, root)


def _balanced(text: str, opens: str, closes: str) -> str:
    """From the bracket that ``text`` begins with to the one that closes it."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c == opens) - (c == closes)
        if depth == 0:
            return text[: i + 1]
    return text


def _frames(lines: Sequence[str]) -> dict[int, str]:
    """Source locations from the tables between the header and the first computation."""
    tables: dict[str, dict[int, str]] = {}
    rows: dict[int, str] | None = None
    for line in lines[1:]:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            rows = tables.setdefault(line, {})
        elif rows is not None and line[:1].isdigit():
            key, _, row = line.partition(" ")
            rows[int(key)] = row
        elif line and rows is not None:
            break
    files, locations = tables.get("FileNames", {}), tables.get("FileLocations", {})

    def number(row: str, key: str) -> int:
        found = re.search(key + r"=(\d+)", row)
        return int(found.group(1)) if found else 0

    def place(row: str) -> str:
        location = locations.get(number(row, "file_location_id"), "")
        file = files.get(number(location, "file_name_id"), '""').strip('"')
        return f"{file}:{number(location, 'line')}" if file else ""

    return {frame: place(row) for frame, row in tables.get("StackFrames", {}).items()}
