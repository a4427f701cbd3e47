"""The reliability scorecard: every transformation in every cell of the contract, and its peers.

Makes ``docs/scorecard.md``, beside the results.
"""

import itertools
import json
import multiprocessing
import os
import pathlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import jax
from harness import Bar, report, resumable, sections_of, work_of

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "scorecard.md"
Found = dict[str, Any]


def prepare() -> None:
    """In each process, before JAX is first used."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


def quick() -> None:
    """Compiling takes most of the time; plainer machine code takes a third of it."""
    flags = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    if flags not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def job(name: str, section: str, wanted: list[str]) -> list[Found]:
    from cells.sections import run

    return run(name, section, wanted)


def cells_on_record(record: pathlib.Path) -> dict[tuple[str, str, str], Found]:
    lines = record.read_text().splitlines() if record.exists() else []
    found = map(json.loads, lines)
    return {(each["subject"], each["section"], each["cell"]): each for each in found}


def run_all(names: list[str], letters: str, record: pathlib.Path, workers: int) -> list[Found]:
    """Every cell asked for; what is on record is not run again."""
    from cells.sections import TITLES, TOGETHER, arguments, cells, together
    from cells.subjects import named

    done = cells_on_record(record)

    def keep(results: Any) -> None:
        with record.open("a") as file:
            for each in results:
                done[each["subject"], each["section"], each["cell"]] = each
                file.write(json.dumps(each) + "\n")
                if each["outcome"] == "fail":
                    print(f"FAIL {each}", flush=True)

    wanted = []
    for letter, name in itertools.product(TITLES, names):
        there = cells(named(name), letter)
        left = [cell for cell in there if (name, letter, cell) not in done]
        if letter in letters and left:
            wanted.append((name, letter, left))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, prepare)
    try:
        running = {pool.submit(job, *each): each for each in wanted}
        for number, future in enumerate(as_completed(running), 1):
            keep(future.result())
            print(f"{number}/{len(wanted)} {' '.join(running[future][:2])}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    if "B" in letters and any((name, "B", TOGETHER) not in done for name in names):
        keep(together([named(name) for name in names]))
    if "F" in letters:
        keep(arguments())
    return list(done.values())


def main() -> None:
    parser = resumable(__doc__, "sections, such as AB")
    parser.add_argument("--subject", default="", help="names, by comma; publishes nothing")
    parser.add_argument("--without-laws", action="store_true", help="section H as on record")
    parser.add_argument("--laws", action="store_true", help="section H alone, into the record")
    options = parser.parse_args()
    prepare()
    quick()
    from cells import page
    from cells.laws import laws
    from cells.subjects import EVERYONE

    if options.page or options.laws:
        new = {"laws": laws(work_of(options, "scorecard"))} if options.laws else {}
        publish(sections_of("scorecard") | new | {"elsewhere": page.told_elsewhere()})
        return
    work = work_of(options, "scorecard")
    names = [each.name for each in EVERYONE if options.subject in ("", each.name)]
    if options.subject:
        names = options.subject.split(",")
    letters = options.only or "ABCDEFGH"
    found = run_all(names, letters, work / "cells.jsonl", options.workers)
    if options.only or options.subject:
        if "H" in options.only:
            print(laws(work))
        return
    kept = sections_of("scorecard").get("laws", []) if options.without_laws else laws(work)
    publish(page.tables(found, kept))


def publish(sections: dict[str, list[Found]]) -> None:
    """The record and the page."""
    from cells import page

    sections = {title: sections[title] for title in page.ORDER if sections.get(title)}
    failed = sum(each["outcome"] == "fail" for each in sections["cells"] if not each["peer"])
    bars = [Bar("cells of ours that fail", failed, 0)]
    if "laws" in sections:
        flaky = sum(row["failed"] for row in sections["laws"])
        bars.append(Bar("laws and repeats that fail", flaky, 0))
        fewest = min(row["examples"] for row in sections["laws"] if row["what"].startswith("test_"))
        bars.append(Bar("examples that the law with the fewest lacks to 300", 300 - fewest, 0))
    report("scorecard", "Reliability", list(sections.items()), bars)
    PAGE.write_text(page.page(sections))


if __name__ == "__main__":
    main()
