# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are loaded when first asked for."""

import importlib
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

# The release that no longer has the old names.
LAST = "0.3.0"
MODULES = {
    "boostax.cli": "boostax.run.cli",
    "boostax.cluster": "boostax.run.cluster",
    "boostax.train.checkpoint": "boostax.run.checkpoint",
    "boostax.train.loop": "boostax.run.loop",
    "boostax.train.writers": "boostax.run.writers",
    "boostax.workloads": "boostax.run.workloads",
}


def late(
    package: str,
    names: Mapping[str, str],
    moved: Mapping[str, str] | None = None,
    apart: Collection[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package.

    Args:
      package: its name.
      names: of each name the module that has it; of a package inside this one ``""``.
      moved: old names, which work for one release more, and the package that each is in now.
      apart: packages inside this one that want others installed: loaded, but not listed.
    """
    old = moved or {}

    def load(name: str) -> Any:
        if name in names:
            module = importlib.import_module(names[name] or f"{package}.{name}")
            value = getattr(module, name) if names[name] else module
            setattr(sys.modules[package], name, value)
            return value
        if name in old:
            now = f"{package}.{old[name]}"
            text = f"{package}.{name} is {now}.{name} now; the old name goes with {LAST}."
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return getattr(importlib.import_module(now), name)
        if name in apart:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return load, listed


def renamed(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module that is another one now; it works for one release more."""
    now = MODULES[module]

    def load(name: str) -> Any:
        if name.startswith("__"):  # What Python asks every module for.
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = f"{module} is {now} now; the old name goes with {LAST}."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(now), name)

    return load
