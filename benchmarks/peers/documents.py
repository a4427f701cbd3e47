"""Runs what documents say of the peers: `python benchmarks/peers/documents.py [PAGE ...]`.

Blocks fenced as ``python mindspore`` and ``python pytorch`` are run in those environments, a page's
blocks in their order and in one namespace. One line per page; the exit code is 1 if one failed.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import setup

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
SECONDS = 600.0
_FENCE = re.compile(r"^```python (mindspore|pytorch)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """Code of a page.

    Attributes:
      peer: whose.
      line: of its fence.
      code: what is between the fences.
    """

    peer: str
    line: int
    code: str


def blocks(text: str) -> list[Block]:
    """Those of a page, in order."""
    found = _FENCE.finditer(text)
    return [Block(m[1], text[: m.start()].count("\n") + 1, m[2]) for m in found]


def program(found: Sequence[Block]) -> str:
    """All of them in one module, each on the lines that it has in its page."""
    lines: list[str] = []
    for block in found:
        lines += [""] * (block.line - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def run(page: pathlib.Path, peer: str, found: Sequence[Block]) -> str | None:
    """Run a page's blocks of one peer: the error, or nothing."""
    try:
        setup.version(setup.PEERS[peer])
    except setup.Refused as refused:
        return f"{setup.outcome(peer)} ({refused})"
    python = setup.python_of(setup.PEERS[peer]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        # A file, because MindSpore reads the source of what it compiles. Its lines are the page's.
        path = pathlib.Path(folder) / f"{page.stem}.py"
        path.write_text(program(found))
        try:
            done = subprocess.run(
                [str(python), str(path)],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"not done within {SECONDS:g} s"
    if done.returncode == 0:
        return None
    lines = re.findall(rf'{page.stem}\.py", line (\d+)', done.stderr)
    where = f"line {lines[-1]}: " if lines else ""
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    return where + "".join(last)


def main(pages: Sequence[pathlib.Path]) -> int:
    """Run every page that has such blocks: the exit code."""
    failed = 0
    for page in pages:
        found = blocks(page.read_text())
        for peer in sorted({block.peer for block in found}):
            own = [block for block in found if block.peer == peer]
            error = run(page, peer, own)
            failed += error is not None
            told = f"failed: {error}" if error else f"{len(own)} blocks ran"
            print(f"{page.name}, {peer}: {told}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main([pathlib.Path(x) for x in sys.argv[1:]] or sorted(DOCS.glob("**/*.md"))))
