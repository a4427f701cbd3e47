"""Several processes train what one does, and each reads its own rows."""

import chex
import jax
import numpy as np
import optax
import processes
import pytest
from recorded import load_arrays
from workers.techniques import TECHNIQUES

import boostax

WORKER = processes.ROOT / "tests" / "workers" / "techniques.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The params of every technique, trained by so many processes with so many devices each."""
    made = {}

    def train(count, devices, again=0):
        if (count, devices, again) not in made:
            folder = tmp_path_factory.mktemp(f"{count}x{devices}-")
            command = [WORKER, folder, f"--device-count={devices}", "--calls=12"]
            with processes.Processes(command, count, folder, NAMES=",".join(TECHNIQUES)) as run:
                run.end()
            found = {name: load_arrays(folder / f"{name}.npz") for name in TECHNIQUES}
            made[count, devices, again] = found
        return made[count, devices, again]

    return train


@pytest.mark.long
@pytest.mark.parametrize("layout", [(p, d) for p in (2, 4) for d in (1, 2, 3, 4)])
def test_every_layout_trains_what_one_process_does(trained, layout):
    count, devices = layout
    found, expected = trained(count, devices), trained(1, count * devices)
    chex.assert_trees_all_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("layout", [(2, 2), (4, 1)])
def test_the_same_layout_gives_the_same_bits_by_every_technique(trained, layout):
    found, again = trained(*layout), trained(*layout, again=1)
    jax.tree.map(np.testing.assert_array_equal, again, found)


def test_one_process_reads_all_rows():
    loss = lambda w, x: (w * x).sum()  # noqa: E731
    step = boostax.make_train_step(loss, boostax.accumulate(optax.adam(1e-3), 2))
    np.testing.assert_array_equal(step.rows(6), np.arange(6))
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    step = boostax.make_train_step(loss, boostax.all_reduce("data"), mesh=mesh, axis_name="data")
    np.testing.assert_array_equal(step.rows(8), np.arange(8))
