"""Both sides of programs, their differences, and the smallest program that differs."""

import json
import pathlib
import subprocess
import tempfile
from typing import NamedTuple

import jax
import numpy as np
from mindspore_runs import farthest
from peers import programs as specs
from recorded import load_arrays

from . import ours

PYTHON = pathlib.Path(__file__).parents[2] / ".peers" / "mindspore" / "bin" / "python"
THEIRS = pathlib.Path(specs.__file__).with_name("mindspore_programs.py")


class Outcome(NamedTuple):
    """What became of a program.

    Attributes:
      fate: ``"equal"``; ``"note"``, where a note of ``auto`` says that other weights are trained;
        ``"rounding"``, of at most four times what float64 moves the run; ``"different"``;
        ``"refused"`` by MindSpore.
      gap: the largest difference of a weight after any step.
      why: the note, or what differs.
    """

    fate: str
    gap: float
    why: str = ""


def theirs(programs, python, folder):
    """What MindSpore trained: for each program the names of its params and arrays, or an error."""
    given = folder / "specs.json"
    given.write_text(json.dumps(programs))
    command = [python, str(THEIRS), str(given), str(folder)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    for number in range(len(programs)):
        told = json.loads((folder / f"{number}.json").read_text())
        path = folder / f"{number}.npz"
        yield told, load_arrays(path) if path.exists() else {}


def gaps(spec, names, arrays, told):
    """The largest difference of the weights, and what else differs."""
    shapes = {name: specs.shapes(spec["network"]).get(name, ()) for name in names}
    worst, other = 0.0, ""
    for i, (flat, (params, metrics, table)) in enumerate(zip(arrays["w"], told, strict=True)):
        worst = max(worst, farthest(params, flat, shapes))
        if len(arrays["flags"]):
            scales = table if np.ndim(table) else metrics["loss_scale"]
            if (metrics["skipped_in_a_row"] > 0) != arrays["flags"][i]:
                other = f"the overflow of step {i + 1}"
            elif not np.allclose(scales, np.ravel(arrays["scales"][i]), rtol=2e-6, atol=0):
                other = f"the scale after step {i + 1}: {scales}, theirs {arrays['scales'][i]}"
    return worst, other


def judged(spec, told, arrays, folder):
    """Train a program here, and compare."""
    if "error" in told:
        return Outcome("refused", 0.0, told["error"].split("\n")[0])
    try:
        found, notes = ours.run(spec, folder)
    except ValueError as error:
        return Outcome("different", np.inf, str(error))
    gap, other = gaps(spec, told["params"], arrays, found)
    if other or gap <= 1e-5:
        return Outcome("different" if other else "equal", gap, other)
    if (cause := specs.cause(spec)) and cause in " ".join(notes):
        return Outcome("note", gap, cause)
    small = gap <= 4 * own_rounding(spec, folder, found)
    return Outcome("rounding" if small else "different", gap)


def own_rounding(spec, folder, found):
    """How far a run in float64 is from the one in float32."""
    with jax.enable_x64(True):
        wide, _ = ours.run(spec, folder, jax.numpy.float64)
    pairs = zip(found, wide, strict=True)
    worst = [jax.tree.map(lambda x, y: np.abs(x - y).max(), a[0], b[0]) for a, b in pairs]
    return max(jax.tree.leaves(worst))


def outcomes(programs, python):
    """Of each program what became of it."""
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        for spec, (told, arrays) in zip(programs, theirs(programs, python, folder), strict=True):
            yield judged(spec, told, arrays, folder)
        jax.clear_caches()


def shrunk(spec, outcome, python):
    """The smallest program that differs, by one thing after the other."""
    while True:
        tries = [x for x in specs.smaller(spec) if x != spec]
        found = zip(tries, outcomes(tries, python), strict=True)
        smaller = next(((x, told) for x, told in found if told.fate == "different"), None)
        if smaller is None:
            return spec, outcome
        spec, outcome = smaller
