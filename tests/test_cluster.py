"""Several processes train what one does, and each reads its own rows."""

import pathlib

import jax
import numpy as np
import optax
import pytest
from processes import Processes

import boostax
from boostax.run.cluster import initialize
from boostax.run.cluster.start import detect

WORKER = pathlib.Path(__file__).parent / "workers" / "techniques.py"

# Seconds for ten techniques on sixteen devices of two busy cores.
PATIENCE = 900.0
# A sum, a residual, a window: what `make test` has the time for.
FEW = ("window", "top-k")
# Those whose results do not depend on how many share the batch.
MEANS = ("mean", "freezing", "dim_reduce", "window", "shared out")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The params of every technique, trained by so many processes with so many devices each."""
    made = {}

    def train(processes, devices, names=(), again=0):
        key = processes, devices, names, again
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{processes}x{devices}-")
            command = [str(WORKER), str(folder / "params.npz"), str(devices), *names]
            with Processes(command, processes, folder) as run:
                assert run.end(PATIENCE) == [0] * processes, run.printed()
            with np.load(folder / "params.npz") as found:
                made[key] = dict(found)
        return made[key]

    return train


def assert_equal_training(found, wanted, names=None):
    assert found.keys() == wanted.keys()
    for key in found:
        if names is None or key.split("/")[0] in names:
            np.testing.assert_allclose(found[key], wanted[key], rtol=2e-5, atol=2e-5, err_msg=key)


@pytest.mark.long
def test_two_processes_train_what_one_does_and_the_same_bits_again(trained):
    found = trained(2, 2, FEW)
    assert_equal_training(found, trained(1, 4, FEW))
    for key, value in trained(2, 2, FEW, again=1).items():
        np.testing.assert_array_equal(value, found[key], err_msg=key)


@pytest.mark.long
@pytest.mark.parametrize("layout", [(p, d) for p in (2, 4) for d in (1, 2, 3, 4)])
def test_every_layout_trains_what_one_process_does(trained, layout):
    processes, devices = layout
    assert_equal_training(trained(processes, devices), trained(1, processes * devices))


@pytest.mark.long
@pytest.mark.parametrize("layout", [(2, 2), (4, 1)])
def test_the_same_layout_gives_the_same_bits_by_every_technique(trained, layout):
    found, again = trained(*layout), trained(*layout, again=1)
    for key, value in found.items():
        np.testing.assert_array_equal(value, again[key], err_msg=key)


@pytest.mark.long
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_means_do_not_depend_on_the_number_of_devices(trained, devices):
    assert_equal_training(trained(1, devices), trained(1, 1), MEANS)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"JAX_COORDINATOR_ADDRESS": "host:1234"}, None),
        (
            {
                "JAX_COORDINATOR_ADDRESS": "host:1234",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": "0",
            },
            "variables",
        ),
        ({"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}, "slurm"),
        ({"SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_NTASKS": "2"}, None),
        ({"OMPI_MCA_orte_hnp_uri": "1;tcp://h:1", "OMPI_COMM_WORLD_SIZE": "2"}, "ompi"),
        ({"OMPI_MCA_orte_hnp_uri": "1;tcp://h:1", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, "k8s"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "tpu"),
    ],
)
def test_who_started_the_processes(variables, found):
    assert detect(variables) == found


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_an_mpi_that_jax_does_not_know_is_refused(name):
    with pytest.raises(ValueError, match=f"got none of them and {name}=2"):
        detect({name: "2"})
    assert detect({name: "1"}) is None


def test_half_a_manual_start_is_refused():
    with pytest.raises(ValueError, match="got no JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID"):
        detect({"JAX_NUM_PROCESSES": "2"})
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    with pytest.raises(ValueError, match="JAX_PROCESS_ID must be a whole number, got 'first'"):
        initialize(environment=dict(zip(names, ("host:1", "2", "first"), strict=True)))


def test_one_process_reads_all_rows():
    step = boostax.make_train_step(
        lambda w, x: (w * x).sum(), boostax.accumulate(optax.adam(1e-3), 2)
    )
    np.testing.assert_array_equal(step.rows(6), np.arange(6))
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    tx = boostax.all_reduce("data")
    step = boostax.make_train_step(lambda w, x: (w * x).sum(), tx, mesh=mesh, axis_name="data")
    np.testing.assert_array_equal(step.rows(8), np.arange(8))
