"""How many bytes a compiled program reads from memory and writes to it.

Each operation of the schedule reads its operands once and writes its results once; what stays in a
TPU's vector memory costs nothing. A fusion that only cuts a piece out of an operand reads the
piece, and one that sets a piece of it in place writes the piece: so a scan over stacked layers
reads the stack once. Of an Adam step on P bytes of params that is 7 P, as it is by hand.
"""

from __future__ import annotations

from collections.abc import Collection

from boostax.inspect.hlo import FREE, Instruction, Program, Ways

_PIECES = frozenset(("dynamic-slice", "slice", "gather"))
_SETS = ("dynamic-update-slice",)


def traffic(program: Program) -> Ways:
    """Bytes per call on the cheapest and the dearest way through the branches."""
    return program.ways(lambda computation, i: _bytes(program, computation, i))


def cycles(program: Program) -> Ways | None:
    """Cycles that the compiler for TPU estimates, without the network; ``None`` of the others."""
    estimates = any(i.cycles is not None for body in program.computations.values() for i in body)
    return program.ways(lambda _, i: i.cycles or 0) if estimates else None


def _bytes(program: Program, computation: str, i: Instruction) -> float:
    if i.op in FREE or i.op.endswith("-done") or i.op == "async-start":
        return 0.0
    if i.op == "fusion":
        return _fusion(program, computation, i)
    read = sum(_size(program, computation, o) for o in dict.fromkeys(i.operands))
    if i.op in _PIECES:
        return 2.0 * _written(i)
    if i.op == "dynamic-update-slice":
        return 2.0 * _size(program, computation, i.operands[1])
    if i.op == "copy-start":
        return read + sum(x.bytes for x in i.result[:1] if not x.on_chip)
    if i.op == "slice-start":
        piece = i.result[len(i.operands)]
        return piece.bytes * ((read > 0) + (not piece.on_chip))
    # A start's results name its operands as well; what arrives is as much as what the last is.
    written = sum(x.bytes for x in i.result[-1:] if not x.on_chip)
    return read + (written if i.op.endswith("-start") else _written(i))


def _fusion(program: Program, computation: str, i: Instruction) -> float:
    inside = program.computations.get(i.called[0], ()) if i.called else ()
    parameters = {x.name: int(x.literal) for x in inside if x.op == "parameter"}
    users: dict[int, list[Instruction]] = {}
    for x in inside:
        for operand in x.operands:
            if operand in parameters:
                users.setdefault(parameters[operand], []).append(x)
    names = {place: name for name, place in parameters.items()}
    total, in_place = 0.0, 0.0
    counted: set[str] = set()
    for place, operand in enumerate(i.operands):
        used = users.get(place, [])
        whole = _size(program, computation, operand)
        if whole and used and all(_of_pieces(x, names[place], _PIECES) for x in used):
            total += min(whole, sum(x.result[0].bytes for x in used))
        elif whole and used and all(_of_pieces(x, names[place], _SETS) for x in used):
            named = program.named[i.called[0]]
            pieces = sum(x.result[0].bytes for u in used for x in [named[u.operands[1]]])
            total += min(whole, pieces)
            in_place += whole
        elif operand not in counted:
            total += whole
        counted.add(operand)
    return total + max(0.0, _written(i) - in_place)


def _of_pieces(user: Instruction, name: str, kinds: Collection[str]) -> bool:
    """Whether an instruction of these kinds reads or sets a piece of an array, and no more."""
    return user.op in kinds and user.operands[0] == name and name not in user.operands[1:]


def _written(i: Instruction) -> float:
    return float(sum(x.bytes for x in i.result if not x.on_chip))


def _size(program: Program, computation: str, name: str) -> float:
    made = program.named[computation].get(name)
    return 0.0 if made is None else _written(made)
