"""Random chains against a float64 reference, and laws of pairs of programs, drawn from seeds.

Runs add up: each goes on from the seeds and draws that are on record.
"""

import collections
import multiprocessing
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
from harness import Bar, arguments, on_cpu, report, sections_of

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "docs/examples")]

from contract_cases import CASES  # noqa: E402
from fuzzing.cases import Case, draw  # noqa: E402
from fuzzing.compare import fuzz  # noqa: E402

from boostax.testing import PAIR_LAWS, laws_for  # noqa: E402

RUNS, DREW, LAWS = "Runs", "What was drawn", "Laws of pairs of programs"
ASKED_CASES, ASKED_DRAWS = 1000, 100
# As many to a job, so that a process has compiled little when it ends.
CHUNK = 25
Outcomes = dict[int, str]


def cases(seeds: list[int]) -> Outcomes:
    """What became of the cases of these seeds."""
    found: Outcomes = {}
    for seed in seeds:
        try:
            found[seed] = fuzz(seed)
        except AssertionError as error:
            print(error, flush=True)
            found[seed] = "different"
    jax.clear_caches()
    return found


def draws(law: str, seeds: list[int]) -> Outcomes:
    """What became of a law, of a transformation after the other."""
    ours = [case for case in CASES if law in laws_for(case)]
    found: Outcomes = {}
    for seed in seeds:
        case = ours[seed % len(ours)]
        try:
            PAIR_LAWS[law](case, seed)
            found[seed] = "kept"
        except Exception as error:
            print(f"{law} of {case.name}, seed {seed}: {error}", flush=True)
            found[seed] = "broken"
    jax.clear_caches()
    return found


def job(asked: tuple[str, list[int]]) -> tuple[str, Outcomes]:
    """Some cases, or some draws of a law."""
    law, seeds = asked
    return law, draws(law, seeds) if law else cases(seeds)


def chunks(first: int, count: int) -> list[list[int]]:
    """So many seeds from the first on, job by job."""
    seeds = list(range(first, first + count))
    return [seeds[i : i + CHUNK] for i in range(0, count, CHUNK)]


def run_of(outcomes: Outcomes) -> dict[str, Any]:
    """A row of the cases of neighbouring seeds."""
    counts = collections.Counter(outcomes.values())
    open_ones = [str(seed) for seed, found in sorted(outcomes.items()) if found == "different"]
    return {
        "seeds": f"{min(outcomes)} to {max(outcomes)}",
        "number": len(outcomes),
        **{fate: counts[fate] for fate in ("equal", "refused", "different")},
        "which": ", ".join(open_ones),
    }


def again(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the record, its differences run anew."""
    if not row["which"]:
        return row
    new = run_of(cases([int(seed) for seed in row["which"].split(", ")]))
    total = {name: row[name] + new[name] for name in ("equal", "refused")}
    return row | total | {name: new[name] for name in ("different", "which")}


def drawn(seeds: Iterator[int]) -> list[dict[str, Any]]:
    """How often each choice came up."""
    found = collections.Counter(each for seed in seeds for each in choices(draw(seed)).items())
    return [{"choice": n, "of": v, "cases": count} for (n, v), count in sorted(found.items())]


def choices(case: Case) -> dict[str, str]:
    """What a reader may ask after."""
    moves = ", ".join(sorted({kind for _, kind, _ in case.moves})) or "none"
    return {
        "placement": case.placement,
        "gates, from the outside": ", ".join(case.gates) or "none",
        "window": case.normalize if "window" in case.gates else "none",
        "gradients": f"{case.dtype}, {'of a loss' if case.loss else 'handed over'}",
        "reduction": "none" if case.placement == "single" else case.reduction,
        "optimizer": f"{case.optimizer}, decay {case.decay}",
        "freezing": "yes" if case.frozen else "no",
        "door": case.face,
        "loss": ", ".join(x for x in ("terms", "numbers") if getattr(case, x)) or "one number",
        "a leaf without elements": "yes" if case.empty else "no",
        "moved in mid-run": moves,
        "bad gradients": "yes" if case.bad else "no",
    }


def go_on(rows: list[dict[str, Any]]) -> int:
    """The first seed that is not on record."""
    return sum(row["number"] for row in rows)


def publish(runs: list[dict[str, Any]], laws: list[dict[str, Any]]) -> None:
    """The record, and its bars."""
    done = go_on(runs)
    open_ones = sum(row["different"] for row in runs) + sum(row["broken"] for row in laws)
    fewest = min((row["number"] for row in laws), default=0)
    bars = [
        Bar("open differences", open_ones, 0),
        Bar(f"cases that lack to {ASKED_CASES}", max(0, ASKED_CASES - done), 0),
        Bar(f"draws that the law with the fewest lacks to {ASKED_DRAWS}", ASKED_DRAWS - fewest, 0),
    ]
    sections = [(RUNS, runs), (DREW, drawn(iter(range(done)))), (LAWS, laws)]
    report("fuzz", "Random chains and pairs of programs", sections, bars)


def main() -> None:
    options = arguments(
        __doc__,
        cases=(ASKED_CASES, "so many cases more"),
        draws=(ASKED_DRAWS, "so many of each law more"),
        workers=2,
    )
    sections = sections_of("fuzz")
    on_cpu()
    runs = [again(row) for row in sections.get(RUNS, [])]
    laws = {row["law"]: row for row in sections.get(LAWS, [])}
    first = go_on(runs)
    begins = {law: laws.get(law, {"number": 0})["number"] for law in PAIR_LAWS}
    jobs = [("", seeds) for seeds in chunks(first, options.cases)]
    jobs += [(law, seeds) for law, at in begins.items() for seeds in chunks(at, options.draws)]
    outcomes: Outcomes = {}
    fates: dict[str, list[str]] = collections.defaultdict(list)
    # A pool of concurrent.futures hangs once its processes have done the tasks allowed to each.
    with multiprocessing.get_context("spawn").Pool(options.workers, on_cpu, (), 4) as pool:
        for number, (law, found) in enumerate(pool.imap_unordered(job, jobs), 1):
            if law:
                fates[law] += found.values()
            else:
                outcomes |= found
            print(f"{number} of {len(jobs)} jobs", flush=True)
    if outcomes:
        runs.append(run_of(outcomes))
    for law, found in fates.items():
        before = laws.get(law, {"number": 0, "kept": 0, "broken": 0})
        counts = collections.Counter(found) + collections.Counter(kept=before["kept"])
        number = before["number"] + len(found)
        laws[law] = {
            "law": law,
            "seeds": f"0 to {number - 1}",
            "number": number,
            "kept": counts["kept"],
            "broken": number - counts["kept"],
        }
    publish(runs, [laws[law] for law in PAIR_LAWS if law in laws])


if __name__ == "__main__":
    main()
