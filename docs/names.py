"""Write ``llms.txt`` and ``api.md``, which have every public name, and a page of each program.

``llms.txt`` has its signature, its first line and what it refuses; ``api.md`` is the reference. A
page in ``loops`` is a program of ``examples``, with its docstring as prose. ``python docs/names.py
--write`` makes all of them anew; ``tests/test_docs.py`` holds them to the code.
"""

import ast
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
    "boostax.config.mindspore",
    "boostax.inspect",
    "boostax.states",
    "boostax.nnx",
    "boostax.checkpoint",
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
after the first one or two are by keyword. Documents: [the five in one step](the_five.md),
[how to choose](choose.md), [the contract](contract.md), [where params live](placements.md),
[the cards](cards/).
"""
PROGRAMS = {
    "loops/optax_loop.py": "Optax",
    "loops/train_state_loop.py": "Flax `TrainState`",
    "loops/nnx_loop.py": "Flax NNX",
    "loops/equinox_loop.py": "Equinox",
    "loops/haiku_loop.py": "Haiku",
    "loops/keras_loop.py": "Keras 3",
    "several_processes.py": "A program of several processes",
}
REFERENCE = """\
# Reference

The names that most people use are in `boostax`, the others in its packages. Arguments after
the first one or two are by keyword. The same texts: `help(boostax.accumulate)`."""


class _Told:
    """Stands for a default that is an object."""

    def __init__(self, value: Any):
        self._name = getattr(value, "__name__", "...")

    def __repr__(self) -> str:
        return "..." if self._name == "<lambda>" else self._name


def public(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a package offers, by name."""
    for name in sorted(dir(module)):
        if name.startswith("_"):
            continue
        value = getattr(module, name)
        ours = f"{getattr(value, '__module__', None)}.".startswith("boostax.")
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


def packages() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield each package with its names; a name that several offer stands in the first."""
    seen = set[int]()
    for package in PACKAGES:
        found = public(importlib.import_module(package))
        yield (
            package,
            [pair for pair in found if id(pair[1]) not in seen and not seen.add(id(pair[1]))],
        )


def llms() -> str:
    """Return the page for programs."""
    parts = [HEAD, "## Recipes for `boostax.auto`"]
    for path in sorted((DOCS / "recipes").glob("*.json")):
        parts.append(f"`{path.name}`:\n\n```json\n{path.read_text().rstrip()}\n```")
    for package, found in packages():
        parts += [f"## {package}", "\n".join(entry(package, *pair) for pair in found)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def reference() -> str:
    """Return the directives by which Sphinx makes the reference of the docstrings."""
    parts = [REFERENCE]
    for package, found in packages():
        lines = [
            f".. autoclass:: {package}.{name}\n   :members:"
            if inspect.isclass(value)
            else f".. autofunction:: {package}.{name}"
            for name, value in found
        ]
        parts.append("\n".join([f"## {package}", "", "```{eval-rst}", *lines, "```"]))
    return "\n\n".join(parts) + "\n"


def program(name: str) -> str:
    """Return the page of an example: its docstring, whose commands are indented, and its code."""
    text = (DOCS.parent / "examples" / name).read_text()
    module = ast.parse(text)
    said = (ast.get_docstring(module) or "").replace("``", "`") + "\n"
    commands = lambda found: f"```sh\n{textwrap.dedent(found[0])}```\n"  # noqa: E731
    said = re.sub(r"(?:^ {4}.*\n)+", commands, said, flags=re.M)
    code = "\n".join(text.splitlines()[module.body[0].end_lineno :]).strip()
    file = f"The program: [`examples/{name}`](../../examples/{name})"
    return f"# {PROGRAMS[name]}\n\n{said}\n{file}\n\n```py\n{code}\n```\n"


PAGES = {"llms.txt": llms, "api.md": reference}
for name in PROGRAMS:
    page = name.split("/")[-1].removesuffix(".py").removesuffix("_loop")
    PAGES[f"loops/{page}.md"] = functools.partial(program, name)

if __name__ == "__main__":
    for name, text in PAGES.items():
        if "--write" in sys.argv[1:]:
            (DOCS / name).write_text(text())
        elif (DOCS / name).read_text() != text():
            sys.exit(f"docs/{name} is not that of the code: python docs/names.py --write")
