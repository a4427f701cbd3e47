"""The tables of the record, and the page made of them."""

import collections
from typing import Any

from harness import markdown, sections_of

from cells.sections import TITLES
from cells.subject import FAIL, NONE, PASS, UNSUPPORTED
from cells.subjects import EVERYONE

Row = dict[str, Any]
ORDER = ("passes", "cells", "laws", "elsewhere")
ELSEWHERE = {
    "A run killed at random moments and resumed": "tests/test_kills.py",
    "A process of several that dies or stalls": "tests/test_cluster_command.py",
}
FUNCTIONS = "other functions"
# The last columns of a table of train loops.
LOOPS = 7


def tables(found: list[Row], laws: list[Row]) -> dict[str, list[Row]]:
    """What is kept: the passes by name, of all else the reason."""
    peers = {subject.name for subject in EVERYONE if subject.peer}
    found = ordered(found)
    passes: dict[tuple[str, str], list[str]] = {}
    cells = []
    for each in found:
        if each["outcome"] == PASS:
            passes.setdefault((each["subject"], each["section"]), []).append(each["cell"])
            continue
        names = ("subject", "section", "cell", "outcome", "reason")
        cells.append({name: each[name] for name in names} | {"peer": each["subject"] in peers})
    return {
        "passes": [
            {"subject": s, "section": letter, "count": len(names), "cells": "; ".join(names)}
            for (s, letter), names in passes.items()
        ],
        "cells": cells,
        "laws": laws,
        "elsewhere": told_elsewhere(),
    }


def ordered(rows: list[Row]) -> list[Row]:
    """Subjects as they are listed, then all else, each by its sections."""
    order = {subject.name: number for number, subject in enumerate(EVERYONE)}
    return sorted(rows, key=lambda x: (order.get(x["subject"], len(order)), x["section"]))


def renewed(
    record: dict[str, list[Row]], found: list[Row], names: list[str]
) -> dict[str, list[Row]]:
    """The record with all that was found of some subjects in the place of what it had of them."""
    new = tables([each for each in found if each["subject"] in names], record.get("laws", []))
    for title in ("passes", "cells"):
        others = [row for row in record.get(title, []) if row["subject"] not in names]
        new[title] = ordered([*others, *new[title]])
    return new


def told_elsewhere() -> list[Row]:
    """What tests of their own say."""
    rows = [
        {"what": what, "result": "see the test", "test": test} for what, test in ELSEWHERE.items()
    ]
    return rows + in_silence()


def in_silence() -> list[Row]:
    """What would go wrong without a word, from the records of those that look for it."""
    rows = []

    def row(what: str, counts: dict[str, int], test: str) -> None:
        result = ", ".join(f"{count} {name}" for name, count in counts.items())
        rows.append({"what": what, "result": result, "test": test})

    random, loops, suites = map(sections_of, ("fuzz", "foreign_loops", "foreign"))
    sums = lambda there, names: {x: sum(each[x] for each in there) for x in names}  # noqa: E731
    counts = sums(random["Runs"], ("number", "refused", "different"))
    row("Random chains against float64", counts, "benchmarks/fuzz.py")
    counts = sums(random["Laws of pairs of programs"], ("number", "broken"))
    row("Random draws of the laws of pairs of programs", counts, "benchmarks/fuzz.py")
    for section in ("Techniques", "Forgotten lines"):
        cells = [x for each in loops[section] for x in list(each.values())[-LOOPS:]]
        outcomes = collections.Counter(each.split(",")[0].split(":")[0] for each in cells)
        what = f"Other people's train loops: {section.lower()}"
        row(what, dict(outcomes), "benchmarks/foreign_loops.py")
    counts = sums(suites["Counts"], ("tests", "named", "ours"))
    row("Tests of Optax, Flax, jmp and mpx, with boostax put in", counts, "tests/foreign/run.py")
    rows.append(
        {
            "what": "Silent bugs met in public: wrong elsewhere, right or refused here",
            "result": "see the test",
            "test": "tests/test_museum.py",
        }
    )
    return rows


def counted(sections: dict[str, list[Row]]) -> dict[tuple[str, str], dict[str, int]]:
    """How many of each outcome, by subject and section."""
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for row in sections["passes"]:
        counts.setdefault((row["subject"], row["section"]), {})[PASS] = row["count"]
    for row in sections["cells"]:
        one = counts.setdefault((row["subject"], row["section"]), {})
        one[row["outcome"]] = one.get(row["outcome"], 0) + 1
    return counts


def table(names: list[str], counts: dict[tuple[str, str], dict[str, int]]) -> list[str]:
    """Subjects as rows, sections as columns: pass, unsupported, fail."""
    rows = []
    for name in names:
        each = [counts.get((name, letter), {}) for letter in TITLES]
        every = {kind: sum(x.get(kind, 0) for x in each) for kind in (PASS, UNSUPPORTED, FAIL)}
        rows.append([f"**{name}**", *map(cell, [*each, every])])
    return markdown(["", *(f"{k}: {title}" for k, title in TITLES.items()), "all"], rows)


def cell(counts: dict[str, int]) -> str:
    numbers = [counts.get(kind, 0) for kind in (PASS, UNSUPPORTED, FAIL)]
    return "/".join(map(str, numbers)) if any(numbers) else "-"


def total(counts: dict[tuple[str, str], dict[str, int]], names: set[str], kind: str) -> int:
    return sum(each.get(kind, 0) for (name, _), each in counts.items() if name in names)


def listed(rows: list[Row], last: str) -> list[str]:
    """A line for each reason, with the cells that share it."""
    shared: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        shared.setdefault((row["subject"], row["reason"]), []).append(row["cell"])
    lines = [
        (name, ", ".join(cells), reason.replace("|", "\\|"))
        for (name, reason), cells in shared.items()
    ]
    return markdown(("", "cells", last), lines) if rows else ["None."]


def repeated(rows: list[Row]) -> list[str]:
    """The laws on random examples, and the tests that were repeated."""
    if not rows:
        return ["Not run for this record."]
    counts = [(row["what"], row["examples"], row["failed"]) for row in rows]
    return [
        f"{sum(row['failed'] for row in rows)} fail.",
        "",
        *markdown(("what", "examples", "fails"), counts),
    ]


def page(sections: dict[str, list[Row]]) -> str:
    """The document, from the tables on record."""
    counts = counted(sections)
    peers = [subject.name for subject in EVERYONE if subject.peer]
    ours = [subject.name for subject in EVERYONE if not subject.peer]
    others = [name for name in dict.fromkeys(name for name, _ in counts) if name not in peers]
    ours += [name for name in others if name not in ours]
    passed, refused, failed = (total(counts, set(ours), k) for k in (PASS, UNSUPPORTED, FAIL))
    every = passed + refused + failed
    theirs = [total(counts, set(peers), kind) for kind in (PASS, UNSUPPORTED, FAIL)]
    of_ours = [row for row in sections["cells"] if not row["peer"]]
    of_peers = [row for row in sections["cells"] if row["peer"]]
    pick = lambda rows, kind: [row for row in rows if row["outcome"] == kind]  # noqa: E731
    lines = [
        "# Reliability scorecard",
        "",
        INTRODUCTION,
        "",
        f"**{passed + refused}/{every}** cells of boostax: {passed} pass, {refused} are declared "
        f"unsupported and refuse with a clear error, {failed} fail. Of the peers' {sum(theirs)} "
        f"cells {theirs[0]} pass and {theirs[2]} fail.",
        "",
        "## boostax",
        "",
        "Pass/unsupported/fail. " + MEANINGS,
        "",
        *table(ours, counts),
        "",
        "## Declared unsupported",
        "",
        *listed(pick(of_ours, UNSUPPORTED), "error"),
        "",
        "## Fails",
        "",
        *listed(pick(of_ours, FAIL), "why"),
        "",
        "## Without a meaning",
        "",
        *listed(pick(of_ours, NONE), "why"),
        "",
        "## Peers",
        "",
        PEERS,
        "",
        *table(peers, counts),
        "",
        "## Fails of the peers",
        "",
        *listed(pick(of_peers, FAIL), "why"),
        "",
        "Without a meaning for them:",
        "",
        *listed(pick(of_peers, NONE), "why"),
        "",
        "## Laws and repeats",
        "",
        *repeated(sections.get("laws", [])),
        "",
        "## Tried elsewhere",
        "",
        *markdown(
            ("what", "result", "test"),
            [(x["what"], x["result"], f"`{x['test']}`") for x in sections["elsewhere"]],
        ),
        "",
        "## How to run it",
        "",
        HOW,
    ]
    return "\n".join(lines) + "\n"


INTRODUCTION = """\
This page is generated: `python benchmarks/scorecard.py` runs every cell and writes it, and
[the record](../benchmarks/results/scorecard.md). A cell is one transformation in one situation. It
passes, or it is declared unsupported beforehand and raises an error that says what is not possible,
or it fails: an error that was not declared, a declaration that does not hold, a wrong result."""

MEANINGS = """\
A: what a gradient may be, from zeros and infinities to complex numbers, empty leaves and 2000 of
them. What skips nothing itself meets what is not finite inside `static_loss_scale`. B: where a step
may run. C: on 1 to 8 replicas, each against NumPy in float64 where there is a reference, and all
against each other, bit by bit. D: traces, wrappers of Optax's, files, resumption. E: NaN for a
hundred steps or on one replica only, a scale at its limits, a damaged file. F: mistakes, each of
which must be refused with the argument, what is allowed and what came. G: two runs, and the order
of the leaves. A reduction runs on two devices of a `jax.shard_map`, eagerly under `jax.vmap`, and
in B also in plain `jit` on global arrays (`boostax.on_mesh`)."""

PEERS = """\
The same cells through small adapters, which do what the peers' documentation says: gradients are
averaged first, what skips nothing itself stands inside `optax.apply_if_finite` with ten bad steps
allowed, scales and optimizer states are chosen between old and new. What has no meaning for a peer
is left out. Pass/unsupported/fail; nobody declared anything for them, so every error is a fail."""

HOW = """\
```bash
python benchmarks/scorecard.py                       # all of it
python benchmarks/scorecard.py --only BD             # some sections
python benchmarks/scorecard.py --subject adasum      # one transformation
python benchmarks/scorecard.py --subject adasum --into-record
```

Everything runs on 8 emulated devices of one machine, the cell of two processes on two more."""
