"""What doors share whose programs run from their own folder: copies, and tests made anew."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from typing import Any

from parts.door import local_bytes

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


def told(audit: Any, optimizer_state: Any) -> dict[str, Any]:
    """Of a compiled step, and of what its optimizer keeps on one device."""
    return {
        "losses": [],
        "reductions": audit.reductions,
        "temp": audit.temporary_bytes / 1e6,
        "state": local_bytes(optimizer_state) / 1e6,
    }
