# SPDX-License-Identifier: Apache-2.0
"""Count the bytes that a compiled program reads from memory and writes to memory.

Each operation of the schedule reads its operands once and writes its results once; arrays in a
TPU's vector memory are not counted. A fusion that only slices an operand reads only the slice, and
a fusion that updates a slice in place writes only the slice. So a scan over stacked layers reads
the stack once: one slice in each iteration. By this count, an Adam step on P bytes of params moves
7 P bytes, which agrees with a count by hand.
"""

from collections.abc import Iterable, Mapping

from boostax.auditing.hlo import Array, Instruction, Program, Site, Ways, repeated

# Instructions that only name existing arrays, or that run other instructions, which are counted
# separately.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id iota "
    "opt-barrier add-dependency conditional while call async-start".split()
)
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_UPDATE = "dynamic-update-slice"


def counts(program: Program) -> dict[str, Ways | None]:
    """Return the audit's fields ``traffic`` and ``cycles``: bytes of memory, and TPU cycles.

    A TPU's compiler writes its estimate of cycles, without communication, into the program; for
    other compilers ``cycles`` is ``None``.
    """
    # A fusion counts as one operation, so the instructions inside it are left out.
    sites = [site for site in program.sites if not site.fused]
    moved = program.total((x.branches, repeated(_bytes(program, x), x.executions)) for x in sites)
    texts = [(x, x.instruction.attribute(r'"estimated_cycles":"(-?\d+)"')) for x in program.sites]
    estimates = [(x, max(0, int(text or 0))) for x, text in texts if not x.fused]
    cycles = program.total((x.branches, repeated(n, x.executions)) for x, n in estimates)
    return {"traffic": moved, "cycles": cycles if any(text for _, text in texts) else None}


def _bytes(program: Program, site: Site) -> float:
    """Return the bytes that one execution of an instruction reads and writes."""
    i = site.instruction
    if i.op in _FREE or i.op.endswith("-done"):
        return 0
    body = program.computations[site.computation]
    sizes = {name: _in_memory(body[name].result) for name in i.operands if name in body}
    if i.op == "fusion":
        return _fusion(program.computations.get(i.called[0], {}), i, sizes)
    if i.op in _SLICES:
        return 2 * _in_memory(i.result)
    if i.op == _UPDATE:
        return 2 * sizes.get(i.operands[1], 0)
    read, written = sum(sizes.values()), i.result
    if i.op == "slice-start":
        # The results of a start instruction are its operands, then the received arrays.
        written = i.result[len(i.operands) : len(i.operands) + 1]
        read = written[0].bytes * (read > 0)
    elif i.op.endswith("-start"):
        written = i.result[:1] if i.op == "copy-start" else i.result[-1:]
    return read + _in_memory(written)


def _fusion(body: Mapping[str, Instruction], i: Instruction, sizes: Mapping[str, float]) -> float:
    """Count the bytes of a fusion.

    If the fusion only slices an operand, or only updates slices of it, then only the slices count.
    """
    parameters = {int(x.literal): x.name for x in body.values() if x.op == "parameter"}
    read = in_place = 0.0
    counted: set[str] = set()
    for index, operand in enumerate(i.operands):
        name, size = parameters.get(index, ""), sizes.get(operand, 0)
        uses = [_slice_of(body, x, name) for x in body.values() if name in x.operands]
        kinds = {kind for kind, _ in uses}
        if size and kinds in ({"slice"}, {"update"}):
            read += min(size, sum(num_bytes for _, num_bytes in uses))
            in_place += size * (kinds == {"update"})
        elif operand not in counted:
            read += size
        counted.add(operand)
    return read + max(0.0, _in_memory(i.result) - in_place)


def _slice_of(body: Mapping[str, Instruction], user: Instruction, name: str) -> tuple[str, float]:
    """Return how an instruction uses an array, such as ``"slice"``, and the bytes of the slice."""
    is_sliced = user.operands[0] == name and name not in user.operands[1:]
    if is_sliced and user.op in _SLICES:
        return "slice", user.result[0].bytes
    if is_sliced and user.op == _UPDATE:
        return "update", body[user.operands[1]].result[0].bytes
    return "other", 0.0


def _in_memory(arrays: Iterable[Array]) -> int:
    return sum(x.bytes for x in arrays if not x.on_chip)
