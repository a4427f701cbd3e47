"""The reliability scorecard: every transformation in every cell of the contract, and its peers.

Makes ``docs/scorecard.md``, beside the results.
"""

import itertools
import pathlib
from typing import Any

import harness

PAGE = harness.DOCS / "scorecard.md"
Found = dict[str, Any]


def job(name: str, section: str, wanted: list[str]) -> list[Found]:
    from cells.sections import run

    return run(name, section, wanted)


def run_all(names: list[str], letters: str, path: pathlib.Path, workers: int) -> list[Found]:
    """Every cell asked for; what is kept is not run again."""
    from cells.sections import TITLES, TOGETHER, arguments, cells, together
    from cells.subjects import named

    key = ("subject", "section", "cell")
    done = harness.kept(path, *key)
    jobs = {}
    for letter, name in itertools.product(TITLES, names):
        left = [cell for cell in cells(named(name), letter) if (name, letter, cell) not in done]
        if letter in letters and left:
            jobs[letter, name] = name, letter, left
    harness.in_processes(job, jobs, path, workers)
    if "B" in letters and any((name, "B", TOGETHER) not in done for name in names):
        harness.keep(path, together([named(name) for name in names]))
    if "F" in letters:
        harness.keep(path, arguments())
    found = list(harness.kept(path, *key).values())
    print(*(f"FAIL {each}" for each in found if each["outcome"] == "fail"), sep="\n", flush=True)
    return found


def main() -> None:
    options = harness.resumable(
        __doc__,
        "sections, such as AB",
        subject=("", "names, by comma; publishes nothing but with --into-record"),
        into_record=(False, "rows of --subject into the record, all others as on record"),
        without_laws=(False, "section H as on record"),
        laws=(False, "section H alone, into the record"),
    )
    harness.on_cpu()
    harness.quick()
    from cells import page
    from cells.laws import laws
    from cells.subjects import EVERYONE

    if options.page or options.laws:
        new = {"laws": laws(harness.work_of(options, "scorecard"))} if options.laws else {}
        publish(harness.sections_of("scorecard") | new | {"elsewhere": page.told_elsewhere()})
        return
    work = harness.work_of(options, "scorecard")
    names = [each.name for each in EVERYONE if options.subject in ("", each.name)]
    if options.subject:
        names = options.subject.split(",")
    letters = options.only or "ABCDEFGH"
    found = run_all(names, letters, work / "cells.jsonl", options.workers)
    if options.only or (options.subject and not options.into_record):
        if "H" in options.only:
            print(laws(work))
        return
    record = harness.sections_of("scorecard")
    if options.subject:
        publish(page.renewed(record, found, names))
        return
    kept = record.get("laws", []) if options.without_laws else laws(work)
    publish(page.tables(found, kept))


def publish(sections: dict[str, list[Found]]) -> None:
    """The record and the page."""
    from cells import page

    sections = {title: sections[title] for title in page.ORDER if sections.get(title)}
    failed = sum(each["outcome"] == "fail" for each in sections["cells"] if not each["peer"])
    bars = [harness.Bar("cells of ours that fail", failed, 0)]
    if "laws" in sections:
        flaky = sum(row["failed"] for row in sections["laws"])
        bars.append(harness.Bar("laws and repeats that fail", flaky, 0))
        fewest = min(row["examples"] for row in sections["laws"] if row["what"].startswith("test_"))
        bars.append(
            harness.Bar("examples that the law with the fewest lacks to 300", 300 - fewest, 0)
        )
    harness.report("scorecard", "Reliability", list(sections.items()), bars)
    PAGE.write_text(page.page(sections))


if __name__ == "__main__":
    main()
