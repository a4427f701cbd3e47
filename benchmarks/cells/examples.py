"""A pytest plugin: the hypothesis tests alone, each with at least ``--examples`` examples.

Run as ``PYTHONPATH=benchmarks python -m pytest -p cells.examples --examples 300``.
"""

from typing import Any

from hypothesis import settings

# Where hypothesis keeps the settings of a test; a second decorator it refuses.
SETTINGS = "_hypothesis_internal_use_settings"


def pytest_addoption(parser: Any) -> None:
    """``--examples``."""
    parser.addoption("--examples", type=int, default=300, help="the least of every law")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Raise the number of examples of what stays."""
    least = config.getoption("--examples")
    laws = [item for item in items if getattr(item.obj, "is_hypothesis_test", False)]
    for item in laws:
        now = getattr(item.obj, SETTINGS)
        count = max(least, now.max_examples)
        setattr(item.obj, SETTINGS, settings(now, max_examples=count))
    config.hook.pytest_deselected(items=[item for item in items if item not in laws])
    items[:] = laws
