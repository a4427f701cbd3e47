"""Eight emulated devices for every test, and shared fixtures."""

import gc
import itertools
import os
import pathlib

import drawing  # noqa: F401, its profile stands before any test is imported
import jax
import pytest

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)

# Traces make and drop millions of small objects beside the thousands of programs that stay.
gc.set_threshold(100_000, 50, 100)

# Each program that JAX keeps slows down the next: a new context of MLIR looks through all others.
# JAX also keeps at most 8192 compiled calls: after that, a test that counts them would read none.
TESTS_BETWEEN_CLEARINGS = 150

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def golden():
    return GOLDEN


@pytest.fixture(scope="session")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not visit it."""
    gc.freeze()


def pytest_runtest_logfinish(nodeid, location, done=itertools.count(1)):
    """Programs of tests that are over do not pile up."""
    del nodeid, location
    if next(done) % TESTS_BETWEEN_CLEARINGS == 0:
        jax.clear_caches()
