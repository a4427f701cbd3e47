# SPDX-License-Identifier: Apache-2.0
"""Late loading of the names of a package, and errors for names that it does not have."""

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def late(
    package: str, names: Mapping[str, str] | None = None, apart: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package.

    Args:
      package: the package's name.
      names: the module of each name; ``""`` for a package inside.
      apart: packages inside that need other packages installed; they are loaded on demand, but not
        listed.
    """
    names = names or {}

    def load(name: str) -> Any:
        if name in names:
            module = importlib.import_module(names[name] or f"{package}.{name}")
            value = getattr(module, name) if names[name] else module
            setattr(sys.modules[package], name, value)
            return value
        if name in apart:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(missing(package, name))

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return load, listed


def missing(package: str, name: str) -> str:
    """Return the error's text for a name that a package does not have.

    ``names.toml`` has a sentence for each name that was removed, has moved, or is found elsewhere.
    """
    text = f"module {package!r} has no attribute {name!r}"
    if name.startswith("__"):  # Python itself asks modules for such names.
        return text
    said = told(f"{package}.{name}")
    return f"{text}. {said}" if said else text


def told(name: str) -> str | None:
    """Return the sentence that ``names.toml`` has for a name, such as ``"boostax train"``."""
    import tomllib
    from importlib.resources import files

    return tomllib.loads(files("boostax").joinpath("names.toml").read_text("utf8")).get(name)
