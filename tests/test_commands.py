"""Every command of the command line that a document shows runs, on small data and for few steps."""

import pathlib
import re
import shlex
import subprocess
import sys

import processes
import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
WORKLOAD = re.compile(r"boostax (?:launch .*-- )?(?:train|compare|explain) (?:text|digits)")
# ``text|digits`` is two commands; what stands in dots is not one yet.
EITHER, OPEN = "text|digits", "..."
SMALL = {
    "text": "--paths ./corpus.txt --width 16 --depth 2 --heads 2 --sequence-length 8 "
    "--batch-size 8 --eval-batches 2",
    "digits": "--width 16 --batch-size 16",
}
# The quick tests run these, the long ones all.
QUICK = ("boostax train digits",)


def shown(text):
    """The commands in a document: between backticks, or lines of a block."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(
        r"(?<!`)`(boostax [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    )
    for command in (" ".join(found.split()) for found in (*lines, *spans)):
        each = [command.replace(EITHER, name) for name in EITHER.split("|")]
        yield from (found for found in dict.fromkeys(each) if WORKLOAD.match(found))


def every_command():
    found = {}
    for path in DOCUMENTS:
        for command in shown(path.read_text()):
            if OPEN not in command:
                found.setdefault(command, str(path.relative_to(ROOT)))
    demo = re.search(r"\$\(VENV\)/bin/(boostax train .*)", (ROOT / "Makefile").read_text())
    return found | {demo[1]: "Makefile"}


COMMANDS = every_command()


def small(command):
    """The same with little to do; paths of other machines lie here."""
    words = [word.removeprefix("/shared/") for word in shlex.split(command)[1:]]
    workload = next(word for word in words if word in SMALL)
    steps = [] if "explain" in words else ["--steps", "24"]
    return [*words, *SMALL[workload].split(), *steps]


def test_documents_show_commands():
    assert len(COMMANDS) > 8 and {"Makefile", "README.md", "docs/cluster.md"} <= set(
        COMMANDS.values()
    )


@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.long]) for each in COMMANDS],
)
def test_a_command_that_is_shown_runs(tmp_path, command):
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    run = subprocess.run(
        [sys.executable, "-m", "boostax.run.cli", *small(command)],
        cwd=tmp_path,
        env=processes.environment(),
        capture_output=True,
        text=True,
        timeout=processes.PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    assert run.stdout.strip()
    assert (
        "explain" in command or list(tmp_path.glob("runs/*/summary.json")) or "compare" in command
    )
