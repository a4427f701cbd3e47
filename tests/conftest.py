"""Eight emulated devices for every test, and shared fixtures."""

import os
import pathlib

import jax
import pytest

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def golden():
    return GOLDEN


@pytest.fixture(scope="session")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


# What takes longest and has a quicker sibling in the short tests.
LATE = (
    "test_docs.py::test_notebooks_run[notebooks/freezing",
    "test_docs.py::test_notebooks_run[notebooks/compression",
    "test_docs.py::test_notebooks_run[notebooks/adasum",
    "test_cli.py::test_a_finish_follows_the_run_and_can_be_made_up_for[]",
    "test_cli.py::test_a_finish_follows_the_run_and_can_be_made_up_for[--model",
    "test_compressed_travel.py::test_results_are_those_of_one_device",
    "test_freeze.py::test_all_forms_take_the_same_steps",
    "test_freeze.py::test_frozen_leaves_keep_their_bits_and_the_others_move[adasum-8-switch",
    "test_freeze.py::test_frozen_leaves_keep_their_bits_and_the_others_move[accumulated",
    *(
        f"test_freeze.py::test_frozen_leaves_do_not_travel[{name}]"
        for name in ("random-k", "int8", "half", "top-k", "power-sgd", "sign")
    ),
    "test_less_bn.py::test_training_under_a_policy",
    "test_less_bn.py::test_head_under_vmap_and_shard_map",
    "test_less_bn.py::test_both_flavours_are_told_the_same",
    "test_auto.py::test_a_finish_lowers_the_loss_with_an_optimizer_outside_the_span",
    "test_subspace_train.py::test_sharded_arrays_under_plain_jit[32",
    "test_subspace_train.py::test_narrow_storage_finds_the_same_minimum",
    "test_subspace_train.py::test_coordinates_on_any_number_of_devices[lbfgs",
    "test_workloads.py::test_loss_is_finite_float32_and_reaches_every_parameter[bfloat16",
    "test_reduced_step.py::test_every_reduction_composes_with_the_gates[scaler",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if any(name in item.nodeid for name in LATE):
            item.add_marker(pytest.mark.long)
