"""Write ``llms.txt``: every public name with its signature, its first line and what it refuses.

``python docs/names.py --write`` makes it anew; ``tests/test_docs.py`` holds it to the code.
"""

import functools
import importlib
import inspect
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

DOCS = pathlib.Path(__file__).parent
PACKAGES = (
    "boostax",
    "boostax.train",
    "boostax.precision",
    "boostax.reduce",
    "boostax.freeze",
    "boostax.model",
    "boostax.compat",
    "boostax.subspace",
    "boostax.config",
    "boostax.inspect",
    "boostax.states",
    "boostax.nnx",
    "boostax.run.cluster",
    "boostax.run.loop",
    "boostax.run.checkpoint",
    "boostax.run.writers",
    "boostax.testing",
)
HEAD = """\
# boostax

> Gradient transformations for JAX and Optax: one gradient reduction per optimizer step, loss
> scaling, accumulation, freezing, compressed reductions, stored formats. Each is a pure
> `optax.GradientTransformation`.

One order is right, outermost first: freeze, carry, loss scale, accumulate, skip spikes, average,
store, then a chain of reduction, centralization, clip and optimizer. Gates (scaler, window, ...)
stand outermost and are applied by `boostax.apply_gradients` or `boostax.make_train_step`. Arguments
after the first one or two are by keyword. Documents: [how to choose](choose.md),
[the contract](contract.md), [where params live](placements.md), [the cards](cards/).
"""
RECIPES = """\
`loss_fn`, `optimizer`, `params` and `batch(rows, index)` are yours; `over` is
`{"mesh": mesh, "axis_name": "data"}`, or `{}` on one device."""


class _Told:
    """Stands for a default that is an object."""

    def __init__(self, value: Any):
        self._name = getattr(value, "__name__", "...")

    def __repr__(self) -> str:
        return "..." if self._name == "<lambda>" else self._name


def public(module: Any) -> Iterator[tuple[str, Any]]:
    """What a package offers, by name; of the modules of ``boostax.run``, what each defines."""
    within = module.__name__ if module.__name__.startswith("boostax.run.") else "boostax"
    for name in sorted(dir(module)):
        if name.startswith("_"):
            continue
        value = getattr(module, name)
        ours = f"{getattr(value, '__module__', None)}.".startswith(f"{within}.")
        if ours and not inspect.ismodule(value) and value.__doc__:
            yield name, value


def signature(value: Any) -> str:
    """Names and defaults; types are in the reference."""
    # NNX's classes are made by a call of their own.
    made = inspect.isclass(value) and type(value).__call__ is not type.__call__
    try:
        given = inspect.signature(functools.partial(value.__init__, None) if made else value)
    except ValueError:
        return "(...)"
    bare = [_bare(p) for p in given.parameters.values()]
    return str(given.replace(parameters=bare, return_annotation=given.empty))


def _bare(p: inspect.Parameter) -> inspect.Parameter:
    p = p.replace(annotation=p.empty)
    told = p.default is p.empty or "<" not in repr(p.default)
    return p if told else p.replace(default=_Told(p.default))


def entry(package: str, name: str, value: Any) -> str:
    """A list item."""
    documentation = inspect.getdoc(value) or ""
    first = " ".join(documentation.split("\n\n")[0].split())
    found = re.search(r"^Raises:\n((?:  .*\n|\n)+)", documentation + "\n", re.M)
    lines = [f"- `{package}.{name}{signature(value)}`: {first}"]
    if found:
        lines.append("  - Refuses: " + " ".join(textwrap.dedent(found[1]).split()))
    return "\n".join(lines)


def recipes() -> Iterator[str]:
    """Each file, and the lines that use it."""
    page = (DOCS / "recipes.md").read_text()
    for pain in re.split(r"^## ", page, flags=re.M):
        blocks = re.findall(r"^```(?:json|python)\n.*?^```$", pain, re.M | re.S)
        if name := re.search(r"^\[(\w+)\.json\]", pain, re.M):
            yield "\n\n".join([f"`{name[1]}`:", *blocks])


def llms() -> str:
    """Every name."""
    parts, seen = [HEAD], set[int]()
    parts += ["## Recipes for `boostax.auto`", RECIPES, *recipes()]
    for package in PACKAGES:
        entries = [
            entry(package, name, value)
            for name, value in public(importlib.import_module(package))
            if id(value) not in seen and not seen.add(id(value))
        ]
        parts += [f"## {package}", "\n".join(entries)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


PAGES = {"llms.txt": llms}

if __name__ == "__main__":
    for name, text in PAGES.items():
        if "--write" in sys.argv[1:]:
            (DOCS / name).write_text(text())
        elif (DOCS / name).read_text() != text():
            sys.exit(f"docs/{name} is not that of the code: python docs/names.py --write")
