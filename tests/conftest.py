"""Eight emulated devices for every test, and shared fixtures."""

import functools
import gc
import itertools
import os
import pathlib

import drawing  # noqa: F401, its profile stands before any test is imported
import jax
import pytest
from jax._src.interpreters import mlir
from recorded import GOLDEN, load_arrays

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)

# Traces make and drop millions of small objects beside the thousands of programs that stay.
gc.set_threshold(100_000, 50, 100)

# To make a context of MLIR is a fifth of a small program's time, and each looks through all others
# that live: every program shares one.
mlir.make_ir_context = functools.cache(mlir.make_ir_context)


SLOW = pathlib.Path(__file__).parent / "slow.txt"


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="one case of each law not in slow.txt")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keep the first quick case of each law with ``--fast``; a law of the contract is a law."""
    if config.getoption("fast"):
        seen = set(SLOW.read_text().splitlines())
        items[:] = [x for x in items if not (law_of(x) in seen or seen.add(law_of(x)))]


def law_of(item):
    law = getattr(item, "callspec", None) and item.callspec.params.get("law")
    return item.nodeid.partition("[")[0] + (f" {law.__name__}" if callable(law) else "")


@pytest.fixture(scope="session")
def golden():
    return GOLDEN


@pytest.fixture(scope="session")
def arrays():
    """Return a function that reads the arrays of a golden file."""
    return lambda name: load_arrays(GOLDEN / name)


@pytest.fixture(scope="session")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not visit it."""
    gc.freeze()


def pytest_runtest_logfinish(nodeid, location, done=itertools.count(1)):
    """JAX keeps at most 8192 compiled calls: after these, a test that counts would read none."""
    del nodeid, location
    if next(done) % 1000 == 0:
        jax.clear_caches()
