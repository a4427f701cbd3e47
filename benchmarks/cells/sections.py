"""Which cells there are, and running those of a subject."""

import time
from collections.abc import Iterator
from typing import Any

import jax

from cells import contexts, counts, faults, inputs, lifecycle
from cells.subject import FAIL, PASS, Cell, Result, Subject, judge
from cells.subjects import named

TITLES = {
    "A": "inputs",
    "B": "contexts",
    "C": "device counts",
    "D": "lifecycle",
    "E": "faults",
    "F": "misuse",
    "G": "determinism",
}
TOGETHER = "two processes"


def cells(subject: Subject, section: str) -> dict[str, Cell]:
    """By name, in the order of the tables."""
    if section != "F":
        return {
            "A": inputs.CELLS,
            "B": contexts.CELLS,
            "C": counts.CELLS,
            "D": lifecycle.CELLS,
            "E": faults.FAULTS,
            "G": faults.ORDERS,
        }[section]
    found = dict(faults.MISTAKES)
    for call, part in subject.mistakes:
        number = sum(name.startswith(f"bad {part}") for name in found) + 1
        found[f"bad {part} {number}"] = faults.mistake(call, part)
    return found


def run(name: str, section: str, wanted: list[str]) -> list[dict[str, Any]]:
    """Cells of a subject in a section, each with its seconds."""
    subject, found = named(name), []
    there = cells(subject, section)
    for cell_name, cell in ((each, there[each]) for each in wanted):
        begun = time.monotonic()
        result = judge(subject, section, cell_name, cell)
        found.append({**result._asdict(), "seconds": round(time.monotonic() - begun, 2)})
    jax.clear_caches()
    return found


def together(subjects: list[Subject]) -> Iterator[dict[str, Any]]:
    """The cell of two processes, for all subjects at once."""
    from cells.processes import pair, trained

    first, second = pair([subject.name for subject in subjects])
    for subject in subjects:
        begun = time.monotonic()
        ours, theirs = first[subject.name], second[subject.name]
        outcome, reason = PASS, ""
        if "error" in ours or "error" in theirs:
            outcome, reason = FAIL, ours.get("error") or theirs["error"]
        elif ours["bits"] != theirs["bits"]:
            outcome, reason = FAIL, "the processes differ in bits"
        elif ours["bits"] != trained(subject):
            outcome, reason = FAIL, "not the bits of one process with two devices"
        result = Result(subject.name, "B", TOGETHER, outcome, reason)
        yield {**result._asdict(), "seconds": round(time.monotonic() - begun, 2)}


def arguments() -> Iterator[dict[str, Any]]:
    """The tables of arguments out of range that the tests have, as cells of section F."""
    from test_errors import CASES, test_arguments_out_of_range

    for number, case in enumerate(CASES):
        who, _, argument, value = case.values
        name = f"{argument}={getattr(value, '__name__', value)!r} (table, {number})"

        def cell(_: Subject, values: Any = case.values) -> None:
            test_arguments_out_of_range(*values)

        subject = Subject(who, lambda inner, axis: inner)
        yield {**judge(subject, "F", name, cell)._asdict(), "seconds": 0.0}
