# SPDX-License-Identifier: Apache-2.0
"""Load the names of a package on first use, and explain names that the package does not have."""

import importlib
import sys
from collections.abc import Collection, Mapping

from boostax._core import checks


def late(package: str, names: Mapping[str, str] | None = None, extra: Collection[str] = ()) -> None:
    """Give a package a ``__getattr__`` and a ``__dir__``.

    A type checker does not see the two functions, so it still reports unknown names.

    Args:
      package: the package's name.
      names: the module of each name; ``""`` for a subpackage.
      extra: subpackages that need an optional dependency. These subpackages are loaded on demand,
        but are not listed.
    """
    names = names or {}

    def load(name: str) -> object:
        if name in names:
            module = importlib.import_module(names[name] or f"{package}.{name}")
            value = getattr(module, name) if names[name] else module
            setattr(sys.modules[package], name, value)
            return value
        if name in extra:
            return importlib.import_module(f"{package}.{name}")
        text = f"module {package!r} has no attribute {name!r}"
        # Python itself looks up names such as ``__path__``, so the error for such a name has no
        # hint.
        if not name.startswith("__"):
            hint = checks.replacement(f"{package}.{name}") or checks.replacement(f"boostax.{name}")
            text = f"{text}. {hint or checks.nearest(name, dir(sys.modules[package]))}"
        raise AttributeError(text)

    module = sys.modules[package]
    vars(module).update(__getattr__=load, __dir__=lambda: sorted({*vars(module), *names}))
