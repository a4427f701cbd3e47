"""Examples are whole programs, and run as their docstrings say."""

import os
import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def test_the_keras_loop_trains():
    command = [sys.executable, EXAMPLES / "loops" / "keras_loop.py", "--calls", "30"]
    given = {**os.environ, "KERAS_BACKEND": "jax"}
    printed = subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout
    before, after = (float(x) for x in printed.split("\n")[0][5:].split(" -> "))
    assert after < 0.8 * before and "optimizer steps 8" in printed
