"""Every technique in other people's train loops, and the lines that users forget in them.

Runs the loops of ``tests/train_loops.py``. Makes ``docs/foreign_loops.md``, beside the results.
"""

import pathlib
import sys

import harness
import jax
from placements import FAILS, NONE, PASSES, REFUSED, Row, judged

TESTS = pathlib.Path(__file__).parents[1] / "tests"
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

import train_loops  # noqa: E402
from contract_cases import CASES  # noqa: E402
from train_loops import LOOPS, NAME, PLAIN, REDUCTION, SCALE, put_into  # noqa: E402

PAGE = harness.DOCS / "foreign_loops.md"
TOLERANCE = 2e-6
# Compiled elsewhere, a gradient's last bit may round to the next integer of the wire.
ROUNDED = {"int16_reduce": 2.0**-15}
FLUSH = "flush"
TRAINED, FORGOTTEN = "Techniques", "Forgotten lines"
ALL = {case.name: case for case in (PLAIN, *CASES)}
# The lines, and the techniques in which each can be forgotten. A reduction that no part of boostax
# stands around is nobody's to miss.
MISTAKES = {
    SCALE: [
        "dynamic_loss_scale",
        "static_loss_scale",
        "static_loss_scale_without_check",
        "group_loss_scale",
        "accumulate_inside_the_scaler",
        "accumulate_around_the_scaler",
    ],
    NAME: ["dynamic_loss_scale", "group_loss_scale", "accumulate"],
    REDUCTION: ["dynamic_loss_scale", "accumulate", "group_loss_scale"],
    FLUSH: ["accumulate", "accumulate_inside_the_scaler"],
}
LINES = {
    SCALE: "the loss is not scaled",
    NAME: "no `axis_name` in the gates",
    REDUCTION: "no reduction over the replicas",
    FLUSH: "no flush of the last window",
}


def rows() -> list[tuple[str, str]]:
    """A line of the tables: what was forgotten, and the technique."""
    return [("", name) for name in ALL] + [
        (x, name) for x, there in MISTAKES.items() for name in there
    ]


def cell(forgotten: str, name: str, loop: str) -> float | None:
    """The difference from the technique alone; ``None`` where the state must say what is open."""
    case = ALL[name]
    if forgotten == FLUSH:
        put = put_into(loop, case, calls=case.calls + 1)
        if int(LOOPS[loop](put).metrics["micro_step"]) != 1:
            raise AssertionError("a window is open and the state does not say so")
        return None
    of_replicas = {"replicated": True} if forgotten in (NAME, REDUCTION) else {}
    put = put_into(loop, case, forgotten=forgotten, **of_replicas)
    found = train_loops.difference(put)(loop)
    if found > ROUNDED.get(name, TOLERANCE):
        raise AssertionError(f"params differ by {found:.0e}")
    if forgotten == NAME and case.skips:
        raise AssertionError("one replica that overflows would skip, and the others wait for ever")
    return found


def job(loop: str, wanted: list[tuple[str, str]]) -> list[Row]:
    """Some cells of a loop."""
    found = []
    for forgotten, name in wanted:
        row = {"forgotten": forgotten, "technique": name, "loop": loop}
        found.append(row | judged(lambda f=forgotten, n=name: cell(f, n, loop)))
    jax.clear_caches()
    return found


def run_all(wanted: list[tuple[str, str]], path: pathlib.Path, workers: int) -> list[Row]:
    """All cells; what is kept is not run again."""
    key = ("forgotten", "technique", "loop")
    done = harness.kept(path, *key)
    left = [(row, loop) for row in wanted for loop in LOOPS if (*row, loop) not in done]
    harness.in_processes(job, {(*row, loop): (loop, [row]) for row, loop in left}, path, workers)
    return list(harness.kept(path, *key).values())


def tables(wanted: list[tuple[str, str]], found: list[Row]) -> dict[str, list[Row]]:
    """A row for each technique, a cell as it is written."""
    cells = {(row["forgotten"], row["technique"], row["loop"]): row for row in found}
    sections: dict[str, list[Row]] = {TRAINED: [], FORGOTTEN: []}
    for forgotten, name in wanted:
        there = {loop: written(cells.get((forgotten, name, loop))) for loop in LOOPS}
        line = {"line": LINES[forgotten]} if forgotten else {}
        sections[FORGOTTEN if forgotten else TRAINED].append(line | {"technique": name} | there)
    return {title: there for title, there in sections.items() if there}


def written(row: Row | None) -> str:
    """A cell: the largest difference, or who refuses, or what is wrong."""
    if row is None:
        return NONE
    if row["outcome"] == PASSES:
        return PASSES if row["difference"] is None else f"{PASSES}, {row['difference']:.0e}"
    said = row["said"].split(":")[0] if row["outcome"] == REFUSED else row["said"]
    return f"{row['outcome']}: {said}"


def counted(section: list[Row]) -> dict[str, int]:
    """Cells by outcome."""
    every = [row[loop] for row in section for loop in LOOPS]
    outcomes = {PASSES: PASSES, REFUSED: REFUSED, FAILS: FAILS, NONE: "not run"}
    return {name: sum(x.startswith(each) for x in every) for each, name in outcomes.items()}


def page(sections: dict[str, list[Row]]) -> str:
    """The document, from the sections on record."""
    lines = ["# Techniques in other people's loops", "", INTRODUCTION]
    for title, there in sections.items():
        count = ", ".join(f"{n} {name}" for name, n in counted(there).items() if n)
        columns = [each for each in there[0] if each not in ("technique", "line")]
        lines += ["", f"## {title}", "", ABOUT[title], "", f"Cells: {count}.", ""]
        names = (" in ".join(filter(None, [x.get("line"), f"**{x['technique']}**"])) for x in there)
        cells = [[name, *(x[c] for c in columns)] for name, x in zip(names, there, strict=True)]
        lines += harness.markdown(["", *columns], cells)
    return "\n".join(lines) + "\n"


INTRODUCTION = """\
This page is generated: `python benchmarks/foreign_loops.py` runs every cell and writes it, and
[the record](../benchmarks/results/foreign_loops.md). A column is a train loop in the form of its
framework's guides, in `tests/train_loops.py`: Flax's `TrainState` in `pmap`, and in `jit` with
params sharded over a model axis by `NamedSharding`; `nnx.Optimizer`; an Equinox module in
`filter_jit`; Haiku; Keras 3 on JAX by `stateless_call`; Optax alone. A row is an entry of
`tests/contract_cases.py`, put in as a user would: the optimizer's chain,
`value_and_grad`, and over two replicas the mesh."""
ABOUT = {
    TRAINED: (
        "The first two loops train on two replicas; the others on one device, and by `on_mesh` on "
        "two replicas where the technique is a reduction. A cell shows the largest difference of a "
        "param from the same training under `jax.vmap`, in nobody's loop, and passes within "
        f"{TOLERANCE:g}, `int16_reduce` within a unit of its integers, 2^-15: compiled in another "
        "context, a gradient may round to the next. A module of NNX cannot hold params of each "
        "replica's own, and `on_mesh` says so."
    ),
    FORGOTTEN: (
        "Each row leaves out one line. A cell is right if it trains as if the line were there, "
        "or is refused by name while it is traced. A window that is never flushed passes if its "
        "state says that it is open."
    ),
}


def main() -> None:
    options = harness.resumable(__doc__, "techniques, by comma")
    if options.page:
        PAGE.write_text(page(harness.sections_of("foreign_loops")))
        return
    harness.on_cpu()
    harness.quick()
    work = harness.work_of(options, "foreign_loops")
    only = options.only.split(",") if options.only else list(ALL)
    wanted = [row for row in rows() if row[1] in only]
    sections = tables(wanted, run_all(wanted, work / "cells.jsonl", options.workers))
    if options.only:
        print(page(sections))
        return
    bars = [
        harness.Bar(
            f"{title.lower()}: cells that are neither right nor refused", counted(there)[FAILS], 0
        )
        for title, there in sections.items()
    ]
    harness.report(
        "foreign_loops", "Techniques in other people's loops", list(sections.items()), bars
    )
    PAGE.write_text(page(sections))


if __name__ == "__main__":
    main()
