"""What doors into programs share: copies of a source, a patch, tests, rows of the record."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[3]
DEVICES = 8


def copied(source: pathlib.Path, to: pathlib.Path, names: Iterable[str]) -> pathlib.Path:
    """Files and folders of a source, outside of any repository: there ``git apply`` is silent."""
    to.mkdir(parents=True)
    for name in names:
        copy = shutil.copytree if (source / name).is_dir() else shutil.copy
        copy(source / name, to / name)
    return to


def patched(tree: pathlib.Path, patch: pathlib.Path) -> pathlib.Path:
    """The tree, with the patch."""
    subprocess.run(["git", "apply", "--unidiff-zero", str(patch)], cwd=tree, check=True)
    return tree


def lines(patch: pathlib.Path) -> int:
    """Lines that a patch writes."""
    written = patch.read_text().splitlines()
    return sum(line.startswith("+") and not line.startswith("+++") for line in written)


def rewritten(path: pathlib.Path, changes: Iterable[tuple[str, str]]) -> None:
    """Write a file anew, each pattern by what stands for it."""
    text = path.read_text()
    for pattern, new in changes:
        text, count = re.subn(pattern, new, text)
        if not count:
            raise RuntimeError(f"{path.name} must have {pattern}, got none: another version?")
    path.write_text(text)


def environment(*paths: pathlib.Path, **more: str) -> dict[str, str]:
    """With these and boostax on the path, and emulated devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    path = os.pathsep.join(map(str, (*paths, ROOT)))
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path} | more


def tests(pytest: Sequence[str], tree: pathlib.Path, env: dict[str, str]) -> tuple[int, int]:
    """How many of its tests passed, of those that ran."""
    command = [*pytest, "-q", "-p", "no:cacheprovider", "--junitxml=junit.xml"]
    subprocess.run(command, cwd=tree, env=env, check=False, stdout=sys.stderr)
    cases = ElementTree.parse(tree / "junit.xml").getroot().findall(".//testcase")
    ran = [case for case in cases if case.find("skipped") is None]
    failed = [x for x in ran if x.find("failure") is not None or x.find("error") is not None]
    print("failed:", *(case.get("name") for case in failed), file=sys.stderr)
    return len(ran) - len(failed), len(ran)


def row(
    program: str, version: str, way: str, count: int, suites: str, old: Any, new: Any
) -> dict[str, Any]:
    """Of the record, from what two runs told: losses, reductions, bytes."""
    pairs = zip(old["losses"], new["losses"], strict=True)
    made = {
        "program": program,
        "version": version,
        "way": way,
        "lines": count,
        "its tests": suites,
        "reductions before": old["reductions"],
        "reductions after": new["reductions"],
        "temp MB before": old["temporary"] / 1e6,
        "temp MB after": new["temporary"] / 1e6,
        "state MB before": old["state"] / 1e6,
        "state MB after": new["state"] / 1e6,
        "losses differ": max(abs(a - b) / abs(a) for a, b in pairs),
    }
    print(made, file=sys.stderr, flush=True)
    return made


def told(audit: Any, optimizer_state: Any) -> dict[str, Any]:
    """Of a compiled step, and of what its optimizer keeps on one device."""
    import jax

    arrays = [x for x in jax.tree.leaves(optimizer_state) if isinstance(x, jax.Array)]
    return {
        "losses": [],
        "reductions": audit.reductions,
        "temporary": audit.temporary_bytes,
        "state": sum(x.addressable_shards[0].data.nbytes for x in arrays),
    }
