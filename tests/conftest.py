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


# A test function a line, or a law of the contract behind it.
FAST = (pathlib.Path(__file__).parent / "fast.txt").read_text()
# A case a line, for `make test-long`: they cost much, and their laws have other cases.
LATE = set((pathlib.Path(__file__).parent / "late.txt").read_text().splitlines())
# Files with cases in which a part has no effect: one replica, one matrix, all gradients.
WITHOUT_EFFECT = """
test_axis_once test_backward_rules test_by_shape test_check_replicas test_contract test_diffs
test_extras test_freeze test_golden_training test_handshake test_identity test_moves_in_mid_window
test_nnx test_peer_defects test_train_step test_wrong_inputs
""".split()
NO_EFFECT = "(gradients of all|a schedule that freezes|matrices on|a state on|params without)"


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="one case of each law in tests/fast.txt")


def pytest_ignore_collect(collection_path, config):
    test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return (config.getoption("fast") and test and f"{collection_path.name}::" not in FAST) or None


def pytest_itemcollected(item):
    if item.nodeid in LATE:
        item.add_marker(pytest.mark.long)
    if item.path.stem in WITHOUT_EFFECT:
        item.add_marker(pytest.mark.filterwarnings(rf"ignore:\w+. {NO_EFFECT}"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keep the first case of each law with ``--fast``, of those that markers have left."""
    if config.getoption("fast"):
        laws, first = set(FAST.splitlines()), {law_of(x): x for x in reversed(items)}
        items[:] = [x for law, x in reversed(first.items()) if law in laws]


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
