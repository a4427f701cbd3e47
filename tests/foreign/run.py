"""The test suites of others, as they are, with boostax put in: ``make test-foreign``.

Optax's come with its wheel. Flax's is taken from a folder (``--source flax=DIR``), or fetched by
git at the tag of the version that is installed. What fails is run once more without boostax: what
fails there too is not ours.
"""

import argparse
import dataclasses
import fnmatch
import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))
from harness import report, sections_of  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Suite:
    """Test files of a package.

    Attributes:
      package: whose version is named.
      files: in the installed package, or in its source.
      ways: of putting boostax in: see ``put_in.py``.
      origin: where its source is, if the wheel has no tests, and the form of its tags.
    """

    package: str
    files: tuple[str, ...]
    ways: tuple[str, ...] = ("scaler", "window")
    origin: tuple[str, str] | None = None


FLAX = ("https://github.com/google/flax", "v{}")
SUITES = {
    "optax contrib": Suite("optax", ("contrib/_common_test.py",)),
    "optax sharding": Suite("optax", ("_src/sharding_test.py",)),
    "optax accumulation": Suite(
        "optax", ("transforms/_accumulation_test.py",), ("scaler", "window", "compat")
    ),
    "optax conditionality": Suite("optax", ("transforms/_conditionality_test.py",), ("compat",)),
    "optax masking": Suite("optax", ("transforms/_masking_test.py",)),
    "optax combining": Suite("optax", ("transforms/_combining_test.py",)),
    "flax nnx optimizer": Suite(
        "flax", ("tests/nnx/optimizer_test.py",), ("scaler", "window", "nnx"), origin=FLAX
    ),
}

# What fails with boostax alone, and why that is no fault: by the test's name, or by its message.
FIELDS = "it reads fields of the bare state, now in inner_state"
REASONS = {
    "*ExtraArgsTest.test_extra_args": "its gradients are integers, which boostax refuses",
    "*test_multi_steps_mixed_precision*": (
        "updates come in the dtypes of the params, not in those that the bare optimizer would make"
    ),
    "*test_sharding_propagation": FIELDS,
    "*test_masked_state_structure": FIELDS,
    "*State' object has no attribute 'b1'*_schedule_free.py*": FIELDS,
}

FINE = ("passed", "skipped")


def source(suite: Suite, folders: dict[str, str]) -> pathlib.Path:
    """Where the files of a suite are."""
    if suite.origin is None:
        return pathlib.Path(importlib.util.find_spec(suite.package).origin).parent
    if suite.package in folders:
        return pathlib.Path(folders[suite.package])
    address, tag = suite.origin
    folder = pathlib.Path(tempfile.mkdtemp(prefix="foreign-"))
    version = tag.format(importlib.metadata.version(suite.package))
    command = ["git", "clone", "--quiet", "--depth", "1", "--branch", version, address, folder]
    subprocess.run(command, check=True)
    return folder


def run(files: list[str], way: str) -> dict[str, str]:
    """The outcome of each test: passed, skipped, or the traceback of its failure."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", *files]
        command += ["-p", "put_in", "-p", "no:cacheprovider", "-c", os.devnull]
        command += [f"--rootdir={folder}", f"--junitxml={log}"]
        paths = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        more = {"FOREIGN": way, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True)
        if not log.exists():
            raise RuntimeError(done.stdout + done.stderr)
        outcomes: dict[str, str] = {}
        for case in ElementTree.parse(log).iter("testcase"):
            name = f"{case.get('classname')}.{case.get('name')}"
            outcomes[name] = "passed"
            for child in (x for x in case if x.tag in ("failure", "error", "skipped")):
                outcomes[name] = "skipped" if child.tag == "skipped" else child.text or child.tag
        return outcomes


def main() -> int:
    """Run, print and, with ``--write``, publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="suites whose name holds this")
    parser.add_argument("--source", action="append", default=[], metavar="PACKAGE=DIR")
    parser.add_argument("--write", action="store_true", help="publish them; keep the others")
    given = parser.parse_args()
    folders = dict(each.split("=", 1) for each in given.source)
    rows, failures, ours = [], [], 0
    for name, suite in SUITES.items():
        if given.only not in name:
            continue
        files = [str(source(suite, folders) / each) for each in suite.files]
        bare: dict[str, str] | None = None
        for way in suite.ways:
            found = run(files, way)
            failed = [test for test, outcome in found.items() if outcome not in FINE]
            if failed and bare is None:
                bare = run(files, "")
            theirs = [test for test in failed if (bare or {}).get(test, "passed") not in FINE]
            mine = [test for test in failed if test not in theirs]
            named = {
                test: reason
                for test in mine
                for pattern, reason in REASONS.items()
                if fnmatch.fnmatch(test, pattern) or fnmatch.fnmatch(found[test], pattern)
            }
            open_ones = [test for test in mine if test not in named]
            ours += len(open_ones)
            version, counts = importlib.metadata.version(suite.package), [*found.values()].count
            row = {"suite": name, "version": version, "boostax": way, "tests": len(found)}
            row |= {"passed": counts("passed"), "skipped by itself": counts("skipped")}
            row |= {"fails without boostax": len(theirs)}
            rows.append(row | {"named": len(named), "ours": len(open_ones)})
            print(rows[-1], flush=True)
            reasons = dict.fromkeys(theirs, "it fails without boostax too") | named
            reasons |= dict.fromkeys(open_ones, "a fault of boostax")
            for test, reason in reasons.items():
                failures.append({"suite": name, "boostax": way, "test": test, "reason": reason})
                print("  ", test, "-", reason, flush=True)
                if test in open_ones:
                    print(found[test], flush=True)
    if given.write:
        ran, known = {row["suite"] for row in rows}, sections_of("foreign")
        order = list(SUITES).index
        sections = [
            (title, sorted(new + [x for x in known[title] if x["suite"] in SUITES.keys() - ran],
                           key=lambda row: order(row["suite"])))
            for title, new in (("Counts", rows), ("Failures", failures))
        ]  # fmt: skip
        report("foreign", "The suites of others with boostax put in", sections, [])
    return int(ours > 0)


if __name__ == "__main__":
    sys.exit(main())
