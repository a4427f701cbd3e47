"""Section H: laws on random examples, and the fast tests again and again."""

import base64
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES, REPEATS = 300, 20
FAST = ("tests/test_errors.py", "tests/test_peer_defects.py", "tests/test_scorecard.py")
Row = dict[str, Any]


def pytest(report: pathlib.Path, *arguments: str) -> ET.Element:
    """What pytest says in JUnit's form; raises where it could not even begin."""
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
    paths = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {ended.returncode}: {ended.stdout[-2000:]}")
    return ET.parse(report).getroot()


def failures(case: ET.Element) -> list[str]:
    """The first line of each failure or error."""
    found = [*case.iter("failure"), *case.iter("error")]
    return [str(each.get("message", "")).split("\n")[0][:200] for each in found]


def hypotheses(work: pathlib.Path) -> list[Row]:
    """A row for each law."""
    arguments = ("-p", "cells.examples", "--examples", str(EXAMPLES), "-m", "not gpu", "tests")
    suite = pytest(work / "laws.xml", *arguments)
    statistics = {
        str(each.get("name")).rpartition("/")[2]: base64.b64decode(str(each.get("value"))).decode()
        for each in suite.iter("property")
        if str(each.get("name")).startswith("hypothesis-statistics-")
    }
    rows = []
    for case in suite.iter("testcase"):
        file, name, wrong = (
            str(case.get("classname")).split(".")[-1],
            case.get("name"),
            failures(case),
        )
        told = statistics[f"{file}.py::{name}"]
        rows.append(
            {
                "what": f"{file}: {name}",
                "examples": sum(map(int, re.findall(r"(\d+) passing", told))),
                "failed": int(bool(wrong)),
                "why": "; ".join(wrong),
            }
        )
    return rows


def repeats(work: pathlib.Path) -> list[Row]:
    """One row: the fast tests so many times, each time in a process of its own."""
    failed, why, count, longest = 0, "", 0, 0.0
    for number in range(REPEATS):
        begun = time.monotonic()
        found = list(pytest(work / f"fast-{number}.xml", *FAST).iter("testcase"))
        longest, count = max(longest, time.monotonic() - begun), len(found)
        for case in found:
            wrong = failures(case)
            failed += bool(wrong)
            why = why or "; ".join(f"{case.get('name')}: {each}" for each in wrong)
    what = f"{count} fast tests, {REPEATS} times, at most {longest:.0f} s"
    return [{"what": what, "examples": REPEATS, "failed": failed, "why": why}]


def laws(work: pathlib.Path) -> list[Row]:
    """The rows of both; what is on record is not run again."""
    record = work / "laws.json"
    rows: dict[str, list[Row]] = json.loads(record.read_text()) if record.exists() else {}
    for name, run in (("hypotheses", hypotheses), ("repeats", repeats)):
        if name not in rows:
            rows[name] = run(work)
            record.write_text(json.dumps(rows))
    return [*rows["hypotheses"], *rows["repeats"]]
