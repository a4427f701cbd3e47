"""Examples are whole programs, and run as their docstrings say."""

import os
import pathlib
import re
import subprocess
import sys

import processes
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def test_the_keras_loop_trains():
    command = [sys.executable, EXAMPLES / "loops" / "keras_loop.py", "--calls", "30"]
    given = {**os.environ, "KERAS_BACKEND": "jax"}
    printed = subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout
    before, after = (float(x) for x in printed.split("\n")[0][5:].split(" -> "))
    assert after < 0.8 * before and "optimizer steps 8" in printed


LOOPS = ["optax_loop"]
LOOPS += [pytest.param(x, marks=pytest.mark.long) for x in ()]


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_resumes_on_half_of_its_devices_and_reduces_once(name):
    command = [sys.executable, EXAMPLES / "loops" / f"{name}.py"]
    how = {"capture_output": True, "text": True, "check": True, "env": processes.environment()}
    printed = subprocess.run(command, **how).stdout
    first, saved, resumed, last = (float(x) for x in re.findall(r"held out (\S+)", printed))
    assert last < saved < 0.7 * first and abs(resumed - saved) < 0.002
    # The average would also resume alone: the params and the optimizer go on as well.
    before, after = (x for x in printed.split("resumed on 4 devices"))
    losses = [[float(x) for x in re.findall(r": loss (\S+),", part)] for part in (before, after)]
    assert losses[1][0] < losses[0][-1] + 0.1 and losses[1][-1] < losses[0][-1]
    assert "an optimizer step reduces 1.00 N" in printed


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
