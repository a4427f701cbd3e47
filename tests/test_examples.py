"""Examples are whole programs, and run as their docstrings say."""

import pathlib
import re
import subprocess
import sys

import processes
import pytest

ROOT = pathlib.Path(__file__).parents[1]


def rows(page):
    """Return what each row of a loop's page replaces in its program, and by what."""
    text = (ROOT / "docs" / "loops" / f"{page}.md").read_text()
    found = re.findall(r"^\|.*\| (`.*`) \| (`.*`) \|$", text, re.M)
    return [[re.findall("`(.*?)`", cell) for cell in row] for row in found]


OPTAX = rows("optax")
# All but other windows, on a mesh as JAX makes it, whose axes are typed; half the bytes go by
# all-to-all and all-gather instead of a reduction.
TOGETHER = [*OPTAX[:2], *OPTAX[4:], [["(AxisType.Auto,), "], [""]]]
LOOPS = [("optax_loop", 0.0, TOGETHER), ("train_state_loop", 1.0, [])]
NNX = 4 * 128 / 4808
LONG = [
    # Statistics of the head's BatchNorm, averaged in each call, count as gradients.
    ("nnx_loop", 1.0 + NNX, []),
    *((name, 1.0, []) for name in ("optax_loop", "equinox_loop")),
    # Gradients go by all-to-all and all-gather; the statistics alone are reduced.
    ("haiku_loop", 4 * 260 / 2760, []),
    ("keras_loop", 1.0 + 4 * 128 / 2760, []),
    *(("optax_loop", 4.0 * ("sums" in row[1][0]) or 1.0, [row]) for row in OPTAX[:6] + OPTAX[7:]),
    ("nnx_loop", NNX, rows("nnx")[2:]),
    ("equinox_loop", 0.0, rows("equinox")[:2] + rows("equinox")[4:]),
    ("haiku_loop", 4 * 260 / 2760, rows("haiku")[:1] + rows("haiku")[2:]),
    ("keras_loop", 4 * 128 / 2760, rows("keras")[1:]),
    ("train_state_loop", 0.0, rows("train_state")),
]


CASES = [*LOOPS, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]


@pytest.mark.parametrize(("name", "reductions", "changes"), CASES)
def test_a_loop_resumes_on_half_of_its_devices(name, reductions, changes):
    program = (ROOT / "examples/loops" / f"{name}.py").read_text()
    for old, new in changes:
        for a, b in zip(old, new, strict=True):
            assert program.count(a) == 1
            program = program.replace(a, b)
    how = {"capture_output": True, "text": True, "check": True, "env": processes.environment()}
    printed = subprocess.run([sys.executable, "-c", program], **how).stdout
    losses = [float(x) for x in re.findall(r": loss (\S+),", printed)]
    saved, resumed, last = (float(x) for x in re.findall(r"held out (\S+)", printed))
    assert last < saved < 0.7 * losses[0] and abs(resumed - saved) < 0.002
    # The average resumes even without the params that the next calls start from.
    before = printed[: printed.index("resumed on 4 devices")].count(": loss")
    assert changes or losses[before] < losses[before - 1] + 0.1
    (counted,) = re.findall(r"an optimizer step reduces (\S+) N", printed)
    assert float(counted) == pytest.approx(reductions, abs=0.01)


SMALL = """
import train_text as program
program.WIDTH, program.LENGTH, program.BATCH = 32, 32, 8
program.CHARACTERS, program.HELD_OUT = 400_000, 20_000
program.main()
"""


@pytest.mark.long
def test_the_text_model_trains_and_its_step_reduces_once(tmp_path):
    command = [sys.executable, "-c", SMALL, "--calls=24", f"--output={tmp_path}"]
    printed = subprocess.check_output(command, text=True, env=processes.environment())
    before, after = (float(x) for x in re.findall(r"held out (\S+)", printed))
    assert after < before < 4.9  # a loss of log(128) = 4.85 knows nothing
    plain, ours = (float(x) for x in re.findall(r"(\S+) N ", printed))
    assert (plain, ours) == (4.0, 1.0) and (tmp_path / "loss.png").stat().st_size > 10_000
