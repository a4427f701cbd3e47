"""How cost grows with params, leaves, replicas, the window and groups: curves of every technique.

Memory, operations, what is sent and the size of the program are counted in what is compiled, from
abstract arguments; no clock can spoil them. Clocks are beside them, in seconds of the processor.
"""

import argparse
import math
import pathlib
import time
from collections.abc import Sequence

import harness
import jax
from growth_cases import CASES, Case
from growth_measure import CLOCKS, COUNTS, MOST_COMPILED, Row, measured
from growth_plots import draw
from growth_programs import Point
from harness import RESULTS, Bar, report

AXES: dict[str, tuple[int, ...]] = {
    "params": (1_000_000, 10_000_000, 100_000_000),
    "leaves": (10, 100, 1000),
    "replicas": (1, 4, 16),
    "window": (1, 4, 16, 64),
    "groups": (2, 8, 32),
}
BASE = Point()
# Groups are of layers: there must be as many. Two replicas of the most params fit into memory.
BASES = {"groups": BASE._replace(leaves=32), "params": BASE._replace(replicas=2)}
LIMIT, CLOCK_LIMIT = 1.05, 1.3
# Up to so many are scalars and small tables, whatever they are a multiple of.
FLOORS = dict.fromkeys(("temp bytes", "flops", "unfused bytes"), 2.0**16)
CLOCK_FLOOR = 1e-4
CAVEATS = (
    "A slope is the power by which a figure grows between the last two points: 0 is flat, 1 is "
    "linear.",
    "Memory and operations below 64 KiB (2^16), and temporary memory below a copy of the params "
    "along params, count as nothing: a slope from nothing has no meaning.",
    "What replicas send to all others may be linear in the number of the others.",
    "XLA counts the operations of all depths of a freezing program, of which a call runs one. "
    "Bytes that operations read and write are counted before they are fused.",
    "Clocks are seconds of the processor, single readings on a machine that others use. Programs "
    "of 1,000 leaves are traced and lowered, not compiled; updates are run along params only.",
)


def point_of(axis: str, value: int, case: Case, base: Point | None = None) -> Point:
    """The base with one number changed; without replicas where they mean nothing."""
    point = (base or BASES.get(axis, BASE))._replace(**{axis: value})
    return point if case.reduces or axis == "replicas" else point._replace(replicas=0)


def cases_along(axis: str) -> dict[str, Case]:
    every = axis in ("params", "leaves")
    return {name: case for name, case in CASES.items() if every or axis in case.axes}


def values_of(axis: str, case: Case) -> list[int]:
    return [value for value in AXES[axis] if axis != "window" or value >= case.least]


def slope(x: Sequence[float], y: Sequence[float], floor: float = 1.0) -> float:
    """The power of ``x`` by which ``y`` grows from the last point but one to the last."""
    before, after = (max(each, floor) for each in y[-2:])
    return max(0.0, math.log(after / before) / math.log(x[-1] / x[-2]))


def work(axis: str, count: str, values: Sequence[int]) -> list[float]:
    """What a count may be linear in: who sends to all others sends to one less than there are."""
    less = axis == "replicas" and count == "wire bytes"
    return [float(value - 1 if less else value) for value in values]


def floor_of(axis: str, name: str, value: float) -> float:
    """What counts as nothing at a point.

    Along params that is a copy of them: from some size on XLA hands a mean to a library, which
    writes down what was fused into its users before.
    """
    if axis == "params" and name == "temp bytes":
        return 4.0 * value
    return CLOCK_FLOOR if name in CLOCKS else FLOORS.get(name, 1.0)


def slopes_of(axis: str, rows: Sequence[Row]) -> Row:
    """Of the curves of one technique, a row per point."""
    values = [row[axis] for row in rows]
    found: Row = {}
    for name in (*COUNTS, *CLOCKS):
        kept = [
            (x, row[name]) for x, row in zip(values, rows, strict=True) if row[name] is not None
        ]
        if len(kept) > 1:
            x, y = zip(*kept, strict=True)
            found[name] = slope(work(axis, name, x), y, floor_of(axis, name, x[-2]))
        else:
            found[name] = None
    return found


def along(axis: str, most: int = MOST_COMPILED, path: pathlib.Path | None = None) -> list[Row]:
    """A row per technique and point; those that are kept already are not measured again."""
    known = harness.kept(path, "technique", axis)
    rows: list[Row] = []
    for name, case in cases_along(axis).items():
        for value in values_of(axis, case):
            row = known.get((name, value))
            if row is None:
                start = time.perf_counter()
                found = measured(case, point_of(axis, value, case), axis == "params", most)
                row = {"technique": name, axis: value, **found}
                took = time.perf_counter() - start
                print(f"{axis} {value:>11,} {took:6.1f} s  {name}", flush=True)
                if path:
                    harness.keep(path, [row])
            rows.append(row)
        # What JAX keeps of programs that are done with would slow the next ones down.
        jax.clear_caches()
    return rows


def by_technique(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["technique"], []).append(row)
    return found


def steepest(axis: str, rows: Sequence[Row]) -> list[Bar]:
    """Of each count and clock the technique that grows fastest."""
    slopes = {name: slopes_of(axis, each) for name, each in by_technique(rows).items()}
    bars: list[Bar] = []
    for count in (*COUNTS, *CLOCKS):
        known = {name: each[count] for name, each in slopes.items() if each[count] is not None}
        if known:
            name = max(known, key=lambda name: known[name])
            limit = CLOCK_LIMIT if count in CLOCKS else LIMIT
            claim = f"{axis}: {count}, the steepest of {len(known)}: {name}"
            bars.append(Bar(claim, known[name], limit))
    return bars


def bars_of(found: dict[str, list[Row]]) -> list[Bar]:
    """All of a record."""
    different = sum(row["as the page says"] is False for rows in found.values() for row in rows)
    bars = [Bar("programs that send something else than the page on scaling says", different, 0)]
    return bars + [bar for axis, rows in found.items() for bar in steepest(axis, rows)]


def sections_of(found: dict[str, list[Row]]) -> list[tuple[str, list[Row]]]:
    """Slopes first, then the curves."""
    bases = [
        {"axis": axis, "points": ", ".join(f"{x:,}" for x in AXES[axis]), "the others": fixed(axis)}
        for axis in found
    ]
    slopes = [
        (
            f"Slopes along {axis}",
            [{"technique": name} | slopes_of(axis, x) for name, x in by_technique(rows).items()],
        )
        for axis, rows in found.items()
    ]
    curves = [(f"Along {axis}", rows) for axis, rows in found.items()]
    caveats = harness.caveats(CAVEATS)
    return [("Points", bases), ("To keep in mind", caveats), *slopes, *curves]


def fixed(axis: str) -> str:
    base = BASES.get(axis, BASE)._asdict()
    return ", ".join(f"{name} {value:,}" for name, value in base.items() if name != axis)


def on_record(axes: Sequence[str]) -> dict[str, list[Row]]:
    """The curves that were measured before, of techniques that are still there."""
    sections = harness.sections_of("growth")
    known = {axis: sections[f"Along {axis}"] for axis in axes if f"Along {axis}" in sections}
    return {axis: [x for x in rows if x["technique"] in CASES] for axis, rows in known.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--axes",
        nargs="*",
        choices=list(AXES),
        default=list(AXES),
        help="the others' curves are taken from the record; none draws all anew",
    )
    parser.add_argument("--compiled", type=int, default=MOST_COMPILED, help="of how many leaves")
    parser.add_argument("--keep", type=pathlib.Path, help="a file to go on from")
    options = parser.parse_args()
    harness.on_cpu(max(AXES["replicas"]))
    # A program from a cache takes no time to compile.
    jax.config.update("jax_enable_compilation_cache", False)
    new = {axis: along(axis, options.compiled, options.keep) for axis in options.axes}
    # Read last: other axes may have been measured meanwhile.
    found = on_record(list(AXES)) | new
    found = {axis: found[axis] for axis in AXES if axis in found}
    pictures = {f"Slopes along {axis}": f"growth_{axis}.png" for axis in found}
    report("growth", "How cost grows", sections_of(found), bars_of(found), pictures)
    families = {name: case.family for name, case in CASES.items()}
    for axis, rows in found.items():
        draw(axis, by_technique(rows), families, RESULTS / f"growth_{axis}.png")


if __name__ == "__main__":
    main()
