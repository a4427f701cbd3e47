"""Examples are whole programs, and run as their docstrings say."""

import pathlib
import re
import subprocess
import sys

import processes
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


LOOPS = [
    ("optax_loop", 1.0),
    ("train_state_loop", 1.0),
    # Statistics of the head's BatchNorm, averaged in each call, count as gradients.
    pytest.param("nnx_loop", 1.0 + 4 * 128 / 4808, marks=pytest.mark.long),
    pytest.param("equinox_loop", 1.0, marks=pytest.mark.long),
    # Gradients go by all-to-all and all-gather; the statistics alone are reduced.
    pytest.param("haiku_loop", 4 * 260 / 2760, marks=pytest.mark.long),
    pytest.param("keras_loop", 1.0 + 4 * 128 / 2760, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "reductions"), LOOPS)
def test_a_loop_resumes_on_half_of_its_devices(name, reductions):
    command = [sys.executable, EXAMPLES / "loops" / f"{name}.py"]
    how = {"capture_output": True, "text": True, "check": True, "env": processes.environment()}
    printed = subprocess.run(command, **how).stdout
    losses = [float(x) for x in re.findall(r": loss (\S+),", printed)]
    saved, resumed, last = (float(x) for x in re.findall(r"held out (\S+)", printed))
    assert last < saved < 0.7 * losses[0] and abs(resumed - saved) < 0.002
    # The average resumes even without the params that the next calls start from.
    before = printed[: printed.index("resumed on 4 devices")].count(": loss")
    assert losses[before] < losses[before - 1] + 0.1
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
    how = {"capture_output": True, "text": True, "check": True, "env": processes.environment()}
    printed = subprocess.run(command, **how).stdout
    before, after = (float(x) for x in re.findall(r"held out (\S+)", printed))
    assert after < before < 4.9  # a loss of log(128) = 4.85 knows nothing
    plain, ours = (float(x) for x in re.findall(r"(\S+) N ", printed))
    assert (plain, ours) == (4.0, 1.0)
    assert (tmp_path / "loss.png").stat().st_size > 10_000
