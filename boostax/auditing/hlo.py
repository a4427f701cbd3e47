# SPDX-License-Identifier: Apache-2.0
"""Parse the HLO text of a compiled program: instructions, positions, and executions.

``Compiled.as_text()`` is the optimized, scheduled HLO of one device. ``boostax.audit`` reads all
its counts from this text, so the counts are valid for the compiler that wrote the text.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from boostax.auditing.adapter import checks

_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
# In the text of a program, a table is a heading with numbered rows. A computation is a header with
# all lines up to "}".
_TABLE = re.compile(r"^([A-Z]\w+)\n((?:\d+ .*\n)+)", re.M)
_ROW = re.compile(r"^(\d+) (.*)", re.M)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*\n((?:(?!\}).*\n)*)\}", re.M)
# HLO writes each complex constant in parentheses, inside the parentheses of the operands.
_INSTRUCTION = re.compile(
    r"\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^()]*(?:\([^()]*\)[^()]*)*)\)(.*)"
)
_REFERENCE = re.compile(r"%([\w.\-]+)")
# Attributes that name the computations of an operation. ``called`` sorts these attributes, so the
# branches are in order: false, then true.
_BODIES = "body|branch_computations|calls|condition|false_computation|true_computation"
# The folder of boostax. A user cannot fix waste in the source lines of boostax.
_LIBRARY = f"{pathlib.Path(__file__).parents[1]}/"
# The scope of the boostax transformation that made a conditional. A transformation in ``_WINDOWS``
# chooses the branch by the number of calls. Other transformations choose it by the values of
# gradients.
_GATE = r'op_name="[^"]*\bboostax\.(\w+)'
_WINDOWS = ("accumulate", "local_updates")


class Array(NamedTuple):
    """Describe an array type.

    Attributes:
      dtype: the dtype in the notation of HLO: ``f32``, ``s8``, ``pred``.
      elements: the number of elements.
      on_chip: whether the array is in a TPU's vector memory and not in HBM.
    """

    dtype: str
    elements: int
    on_chip: bool

    @property
    def bytes(self) -> int:
        """Return the bytes without padding."""
        return self.elements * bits(self.dtype) // 8


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """Describe a line of a computation.

    Attributes:
      name: the name of the instruction, unique in the program.
      op: the operation: ``fusion``, ``all-reduce-start``, ...
      result: the arrays that the instruction returns.
      operands: names of the instructions whose results the instruction reads.
      literal: the value of a constant or the number of a parameter, which HLO writes in place of
        operands.
      attributes: the rest of the line.
      root: whether the instruction is the result of its computation.
    """

    name: str
    op: str
    result: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str
    root: bool

    def attribute(self, pattern: str) -> str:
        """Return the first group of a pattern's match in the attributes; empty without a match."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Return the computations that an instruction runs; for a conditional, all branches."""
        keys = "to_apply" if self.op == "call" else _BODIES
        bodies = re.findall(rf"\b({keys})=(\{{[^}}]*\}}|%[\w.\-]+)", self.attributes)
        return tuple(name for _, names in sorted(bodies) for name in _REFERENCE.findall(names))


class Site(NamedTuple):
    """Describe an instruction at its position.

    Attributes:
      instruction: the instruction.
      computation: the name of its computation.
      caller: the site that runs the computation; ``None`` in the entry computation.
      executions: how often a call that takes ``branches`` runs the instruction; infinite in a loop
        with an unknown trip count.
      branches: the branches around the instruction, outermost first, as ``conditional:index``.
      loops: the loops around the instruction, outermost first.
      fused: whether the instruction is part of a fusion.
    """

    instruction: Instruction
    computation: str
    caller: Site | None
    executions: float
    branches: tuple[str, ...]
    loops: tuple[str, ...]
    fused: bool


class Ways(NamedTuple):
    """Sum counts over a program whose branches have different counts.

    Attributes:
      least: the sum if each conditional takes its cheapest branch, as in a skipped call. Loops with
        an unknown trip count add nothing.
      most: the sum if each conditional takes its most expensive branch, as in a call that applies.
        The sum is infinite if a loop with an unknown trip count contributes.
      held: the sum if windows take their cheapest branch and other conditionals take their most
        expensive branch, as in a call that leaves its window open. The sum is infinite under the
        same condition as ``most``.
    """

    least: float
    most: float
    held: float


class _Value(NamedTuple):
    """Describe a number in the computation of a loop: an element of the carry plus a constant.

    Attributes:
      element: the index of the element; ``None`` for a constant.
      offset: the constant; NaN if it is unknown.
    """

    element: int | None
    offset: float


@dataclasses.dataclass(frozen=True)
class Program:
    """Describe a parsed program.

    Attributes:
      computations: the instructions of each computation by name, in the order of the schedule.
      entry: the computation that a call runs.
      devices: the number of devices that run the program.
      aliased: the numbers of the arguments whose buffers are reused by results.
      tables: the tables of source locations: each row by the table's heading and the row's number.
      trip_count: the trip count of loops whose trip count the program does not show; ``None`` if
        unknown.
    """

    computations: Mapping[str, Mapping[str, Instruction]]
    entry: str
    devices: int
    aliased: frozenset[int]
    tables: Mapping[str, Mapping[str, str]]
    trip_count: int | None = None

    @functools.cached_property
    def sites(self) -> tuple[Site, ...]:
        """Return every instruction that a call can run, in order and including those in fusions."""
        return tuple(self._walk(self.entry))

    def _walk(self, computation: str, caller: Site | None = None, index: int = 0) -> Iterator[Site]:
        """Yield the sites of a computation, whose index in the caller's ``called`` is ``index``."""
        executions, branches, loops, fused = caller[3:] if caller else (1, (), (), False)
        if caller is not None:
            outer = caller.instruction
            if outer.op == "while":
                trips = self.trip_count if (known := self.trips(caller)) is None else known
                # Index 1 is the condition, which runs once more than the body.
                executions *= math.inf if trips is None else max(1, trips + index)
            branches += (f"{outer.name}:{index}",) * (outer.op == "conditional")
            loops += (outer.name,) * (outer.op == "while")
            fused |= outer.op == "fusion"
        for i in self.computations.get(computation, {}).values():
            site = Site(i, computation, caller, executions, branches, loops, fused)
            yield site
            for number, called in enumerate(i.called):
                yield from self._walk(called, site, number)

    def total(self, amounts: Iterable[tuple[Sequence[str], float]]) -> Ways:
        """Return the sum of amounts for each of the three choices of branches in ``Ways``.

        Args:
          amounts: pairs ``(branches, amount)``, where the amount includes all executions.
        """
        least = most = accumulating = 0.0
        inside: dict[str, dict[str, list[tuple[Sequence[str], float]]]] = {}
        for branches, amount in amounts:
            if branches:
                name, _, index = branches[0].rpartition(":")
                inside.setdefault(name, {}).setdefault(index, []).append((branches[1:], amount))
            else:
                least += amount if math.isfinite(amount) else 0.0
                most += amount
                accumulating += amount
        for name, by_branch in inside.items():
            count, is_window = self._conditionals[name]
            sums = list(map(self.total, by_branch.values()))
            # A branch that is missing in ``by_branch`` costs nothing.
            sums += [Ways(0.0, 0.0, 0.0)] * (len(sums) < count)
            least += min(x.least for x in sums)
            most += max(x.most for x in sums)
            accumulating += (min if is_window else max)(x.held for x in sums)
        return Ways(least, most, accumulating)

    @functools.cached_property
    def _conditionals(self) -> Mapping[str, tuple[int, bool]]:
        """Return each conditional's number of branches, and whether it is a window.

        A window is a conditional of a transformation that accumulates over calls. The
        transformation's named scope identifies the conditional. If no conditional is a window of
        boostax, every conditional of other code counts as a window.
        """
        instructions = (i for body in self.computations.values() for i in body.values())
        conditionals = [i for i in instructions if i.op == "conditional"]
        gates = {i.name: i.attribute(_GATE) for i in conditionals}
        windows = {name for name, gate in gates.items() if gate in _WINDOWS}
        windows = windows or {name for name, gate in gates.items() if not gate}
        return {i.name: (len(i.called), i.name in windows) for i in conditionals}

    def root(self, computation: str) -> Instruction | None:
        """Return the instruction whose result a computation returns."""
        return next((i for i in self.computations.get(computation, {}).values() if i.root), None)

    def trips(self, site: Site) -> int | None:
        """Return how often the body of a ``while`` runs; ``None`` if unknown.

        The compilers for CPU and GPU write the trip count into the HLO text. For a TPU, the trip
        count follows from the counter's first value, its increment, and its bound in the condition.
        A loop whose condition is a flag that the body clears runs at most once.
        """
        loop = site.instruction
        if known := loop.attribute(r'"known_trip_count":\{"n":"?(\d+)'):
            return int(known)
        condition, body = loop.attribute(r"condition=%([\w.\-]+)"), loop.called[0]
        test, result = self.root(condition), self.root(body)
        if test is None or result is None or result.op != "tuple":
            return None
        if (flag := self._value(condition, test.name).element) is not None:
            return 1 if self._value(body, result.operands[flag]) == _Value(None, 0) else None
        if "direction=LT" not in test.attributes:
            return None
        counter, limit = (self._value(condition, name) for name in test.operands)
        if counter.element is None:
            return None
        updated = self._value(body, result.operands[counter.element])
        if updated.element != counter.element or not updated.offset > 0:
            return None
        trips = (self._initial(site, limit) - self._initial(site, counter)) / updated.offset
        return None if math.isnan(trips) else max(0, math.ceil(trips))

    def _value(self, computation: str, name: str) -> _Value:
        """Return the value of a constant, a copy, or a sum of constants and copies."""
        body = self.computations[computation]
        i = body[name]
        literal = "0" if i.literal == "false" else i.literal
        if i.op == "constant" and literal.lstrip("-").isdigit():
            return _Value(None, int(literal))
        if i.op == "get-tuple-element" and body[i.operands[0]].op == "parameter":
            return _Value(int(i.attribute(r"index=(\d+)")), 0)
        if i.op in ("add", "copy", "bitcast", "convert"):
            terms = [self._value(computation, operand) for operand in i.operands]
            carried = [x.element for x in terms if x.element is not None]
            if len(carried) < 2:
                return _Value((*carried, None)[0], sum(x.offset for x in terms))
        return _Value(None, math.nan)

    def _initial(self, site: Site | None, value: _Value) -> float:
        """Return the first value of a loop's carry, which may come from an outer loop's carry."""
        if value.element is None:
            return value.offset
        if site is None or site.instruction.op != "while":
            return math.nan
        carry = self.computations[site.computation][site.instruction.operands[0]]
        if carry.op != "tuple":
            return math.nan
        outside = self._value(site.computation, carry.operands[value.element])
        return self._initial(site.caller, outside) + value.offset

    def source(self, instruction: Instruction) -> str:
        """Return ``file:line`` of the user's code behind an instruction; empty if unknown."""
        line = next(self.sources(instruction), "")
        return "" if line.startswith(_LIBRARY) else line

    def sources(self, instruction: Instruction) -> Iterator[str]:
        """Yield ``file:line`` of the code behind an instruction and of its callers."""
        # Frame 1 has no caller, so its row shows whether XLA numbers callers from 1 or from 0.
        none = int(self._numbers("StackFrames", "1").get("parent_frame_id", 0))
        number = instruction.attribute(r"stack_frame_id=(\d+)")
        while frame := self._numbers("StackFrames", number):
            place = self._numbers("FileLocations", frame.get("file_location_id", ""))
            if file := self.tables["FileNames"].get(place.get("file_name_id", ""), "").strip('"'):
                yield f"{file}:{place['line']}"
            # A caller has a smaller number than the frame that it calls.
            number = str(min(int(number), int(frame.get("parent_frame_id", 0)) - none + 1) - 1)

    def _numbers(self, table: str, number: str) -> dict[str, str]:
        """Return the fields of a row of a table."""
        return dict(re.findall(r"(\w+)=(\d+)", self.tables.get(table, {}).get(number, "")))


def parse(text: str, trip_count: int | None = None) -> Program:
    """Parse the text of a compiled program: header, tables of source locations, computations."""
    header = text.partition("\n")[0]
    entry = ""
    computations: dict[str, dict[str, Instruction]] = {}
    for is_entry, name, lines in _COMPUTATION.findall(text):
        body = map(_instruction, filter(str.strip, lines.splitlines()))
        computations[name] = {i.name: i for i in body}
        entry = name if is_entry else entry
    allowed = "compiled to HLO text with an ENTRY computation"
    hint = "Pass a jax.jit function with its arguments, or the result of its lower() or compile()."
    checks.require(bool(entry), "audit", "program", got=header[:80], allowed=allowed, hint=hint)
    tables = {heading: dict(_ROW.findall(rows)) for heading, rows in _TABLE.findall(text)}
    devices = max(map(int, re.findall(r"num_partitions=(\d+)", header)), default=1)
    aliased = frozenset(map(int, re.findall(r": \((\d+), \{[^}]*\}, \w+-alias\)", header)))
    return Program(computations, entry, devices, aliased, tables, trip_count)


def unreadable(subject: str, allowed: str, got: object) -> RuntimeError:
    """Return the error for HLO text of an unknown form, which would make counts wrong."""
    text = f"audit: {subject} of JAX {jax.__version__} must be {allowed}, got {got!r}. "
    text += "The audit would be incomplete. Install versions that were tested together: "
    return RuntimeError(f"{text}pip install -c constraints.txt . in a checkout.")


def repeated(amount: float, executions: float) -> float:
    """Return the amount of all executions; zero times infinite executions is zero."""
    return amount and amount * executions


@functools.cache
def bits(dtype: str) -> int:
    """Return the bits of an element of a dtype, in the notation of HLO or JAX."""
    match = re.match(r"[a-z]+(\d+)", dtype)
    return int(match.group(1)) if match else 8 * (dtype in ("pred", "bool"))


def _instruction(line: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    if match is None:
        raise unreadable("a line of a compiled program", "%name = type op(...)", line)
    root, name, shape, op, inner, attributes = match.groups()
    # The type may be a tuple of several arrays.
    result = tuple(
        Array(dtype, math.prod(map(int, re.findall(r"\d+", dims))), "S(1)" in layout)
        for dtype, dims, layout in _ARRAY.findall(shape)
    )
    operands = tuple(_REFERENCE.findall(inner))
    literal = "" if "%" in inner else inner
    return Instruction(name, op, result, operands, literal, attributes, root is not None)
