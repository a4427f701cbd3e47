"""Write ``names.md``, ``llms.txt`` and ``api/`` with every public name, ``loops/``, and a map.

``names.md`` says what it does in a line and links to the reference in ``api/`` and to its page;
``llms.txt`` has its signature and what it refuses, for programs. A page in ``loops/`` is a program
of ``examples``, with its docstring as prose, and how to change it, as ``loops/optax.md`` has it.
The map in ``ARCHITECTURE.md`` has the subject of each file of the library, from its docstring.

``python docs/names.py --write`` writes them; ``tests/test_docs.py`` compares them with the code.
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
    "boostax.auditing",
    "boostax.explaining",
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

One order is right, outermost first: freeze, carry, loss scale, accumulate, average, store, then a
chain of reduction, centralization, clip and optimizer. Gates (scaler, window, ...) are outermost
and are applied by `boostax.apply_gradients` or `boostax.make_train_step`. Arguments after the first
one or two are by keyword. Documents: [the five in one step](the_five.md), [how to
choose](choose.md), [the contract](contract.md), [where params live](placements.md), [the
cards](cards/).
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
# The text in a program for what a row of ``loops/optax.md`` replaces in Optax's program. A row
# without its text is left out, as are sharded sums of whole params and micro-batches with a
# model's state.
_NONE = {"loss_fn, mesh=mesh": "-", "tx), WINDOW)": "-"}
INSTEAD = {
    "loops/equinox_loop.py": {
        "optax.adamw(2e-2)": "optax.contrib.muon(0.1)",
        "init_params(), ": "model, ",
    },
    "loops/train_state_loop.py": {"loss_fn, mesh=mesh": "-"},
    "loops/nnx_loop.py": {"loss_fn, mesh=mesh": 'loss_fn, policy="O2"', "tx), WINDOW)": "-"},
    "loops/haiku_loop.py": _NONE,
    "loops/keras_loop.py": _NONE,
}
NAMES = """\
# Names

Every public name, with its entry in the reference and the page that shows it. The names that most
people use are in `boostax`, the others in its packages. Arguments after the first one or two are by
keyword. The same texts: `help(boostax.accumulate)`. For programs: [llms.txt](llms.txt).

```{toctree}
:hidden:
:glob:

api/*
```"""


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
    """Yield each package with its names; a name that several offer is in the first."""
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


def names() -> str:
    """Return the list of names, each with its first line, its reference and the pages on it."""
    parts = [NAMES]
    for package, found in packages():
        lines = [f"## {package}", ""]
        for name, value in found:
            first = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
            # The class of a state is on the page of what its docstring names.
            pages = _pages(name) or _pages(*re.findall(r"`(?:boostax\.)?(\w+)`", first))
            links = [f"[{page.stem}]({page.relative_to(DOCS)})" for page in pages]
            see = f" See {', '.join(links)}." if links else ""
            target = f"api/{package}.md#{package}.{name}"
            lines.append(f"- [`{name}`]({target}): {_plain(first)}{see}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


@functools.cache
def _heads() -> dict[pathlib.Path, str]:
    """Return what each page begins with: for most a list of the names that it is about."""
    pages = [page for each in ("cards", "", "coming_from") for page in (DOCS / each).glob("*.md")]
    parts = {page: page.read_text().split("\n\n", 2) for page in sorted(pages)}
    return {page: found[1].replace("\n", " ") for page, found in parts.items() if found[1:]}


def _pages(*names: str) -> list[pathlib.Path]:
    """Return the pages that begin with a list of names with one of these in it."""
    quoted = re.compile(rf"`(.*`)?([\w.]+\.)?({'|'.join(names)})`")
    return [page for page, head in _heads().items() if names and quoted.match(head)]


def _plain(text: str) -> str:
    """Return a docstring's line in Markdown: its code is in single backticks."""
    return text.replace("``", "`").replace("*", "\\*")


def reference(package: str, found: list[tuple[str, Any]]) -> str:
    """Return the directives by which Sphinx makes a package's reference of its docstrings."""
    lines = [
        f".. autoclass:: {package}.{name}\n   :members:"
        if inspect.isclass(value)
        else f".. autofunction:: {package}.{name}"
        for name, value in found
    ]
    return "\n".join([f"# {package}", "", "```{eval-rst}", *lines, "```", ""])


def program(name: str) -> str:
    """Return the page of an example: its docstring, whose commands are indented, and its code."""
    text = (DOCS.parent / "examples" / name).read_text()
    module = ast.parse(text)
    said = (ast.get_docstring(module) or "").replace("``", "`") + "\n"
    commands = lambda found: f"```sh\n{textwrap.dedent(found[0])}```\n"  # noqa: E731
    said = re.sub(r"(?:^ {4}.*\n)+", commands, said, flags=re.M)
    code = "\n".join(text.splitlines()[module.body[0].end_lineno :]).strip()
    file = f"The program: [`examples/{name}`](../../examples/{name})"
    page = f"# {PROGRAMS[name]}\n\n{said}\n{file}\n\n```py\n{code}\n```\n"
    return page + _changes(name, code) if name.startswith("loops/") else page


def _changes(name: str, code: str) -> str:
    """Return the rows of ``loops/optax.md`` that change this program."""
    lines = (DOCS / "loops/optax.md").read_text().partition("\n| for |")[2].splitlines()
    kept = ["\n## To change it\n\n| for |" + lines[0]]
    for line in lines[1:]:
        for general, own in INSTEAD.get(name, {}).items():
            line = line.replace(general, own)
        row = re.fullmatch(r"\|.*\| (`.*`) \| `.*` \|", line)
        if not row or all(code.count(old) == 1 for old in re.findall("`(.*?)`", row[1])):
            kept.append(line)
    return "\n".join(kept) + "\n"


def architecture() -> str:
    """Return ``ARCHITECTURE.md`` with the subject of each file: a docstring's first line."""
    page = DOCS.parent / "ARCHITECTURE.md"
    library = DOCS.parent / "boostax"
    lines: list[str] = []
    for path in sorted(library.rglob("*.py"), key=lambda x: (x.parent != library, x.parts)):
        is_package = path.name == "__init__.py"
        name = f"{path.parent.name}/" if is_package else path.name
        indent = "" if is_package else "  "
        subject = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
        subject = " ".join(subject.replace("``", "").removesuffix(".").split())
        lines.append(f"{indent}{name:{22 - len(indent)}}{subject}")
    before, start, rest = page.read_text().partition("<!-- map -->\n```\n")
    return before + start + "\n".join(lines) + "\n```" + rest.partition("```")[2]


def written() -> dict[pathlib.Path, str]:
    """Return what each file has to be."""
    files = {f"api/{package}.md": reference(package, found) for package, found in packages()}
    for name in PROGRAMS:
        page = name.split("/")[-1].removesuffix(".py").removesuffix("_loop")
        files[f"loops/{page}.md"] = program(name)
    return {DOCS / name: text for name, text in files.items()} | {
        DOCS / "llms.txt": llms(),
        DOCS / "names.md": names(),
        DOCS.parent / "ARCHITECTURE.md": architecture(),
    }


if __name__ == "__main__":
    files = written()
    wrong = {*DOCS.glob("api/*.md"), *DOCS.glob("loops/*.md")} - {*files}
    for path, text in files.items():
        if "--write" in sys.argv[1:]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            wrong.add(path)
    if wrong:
        sys.exit(f"{sorted(map(str, wrong))} are not of the code: python docs/names.py --write")
