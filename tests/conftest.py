"""Eight emulated devices for every test, and shared fixtures."""

import gc
import itertools
import os
import pathlib

import drawing  # noqa: F401, its profile stands before any test is imported
import jax
import pytest
from jax._src import pjit
from jax._src.interpreters import pxla

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)

# Traces make and drop millions of small objects beside the thousands of programs that stay.
gc.set_threshold(100_000, 50, 100)

# JAX keeps a context of MLIR with what it lowered, and a new one looks through all others. It also
# keeps at most 8192 compiled calls: after that, a test that counts them would read none.
LOWERED = pjit._pjit_lower, pxla._cached_lowering_to_hlo

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
    for cache in LOWERED:
        cache.cache_clear()
    if next(done) % 1000 == 0:
        jax.clear_caches()
