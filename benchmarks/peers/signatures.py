"""What MindSpore and SINGA export: `python benchmarks/peers/signatures.py PACKAGE OPT [--write]`.

Read from the text of the installed MindSpore package and of SINGA's ``opt.py``, neither of which is
imported: each public class, method and function with its params and their defaults, and the keys
that the documents of ``AutoBoost`` list. The record, ``tests/golden/signatures.json``, is of
MindSpore 2.10.0 and of ``python/singa/opt.py`` at 4ddb562 of apache/singa; each name in it is a row
of ``docs/coming_from/every_item.toml``.
"""

import argparse
import ast
import json
import pathlib
import re
import sys
from collections.abc import Iterator

RECORD = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "signatures.json"
# Files of MindSpore, and whose names they define: a file's, or those of a train step.
FILES = {
    "boost/*.py": "boost/__init__.py",
    **dict.fromkeys(("amp.py", "train/amp.py", "train/loss_scale_manager.py"), "amp.py"),
    **dict.fromkeys(("nn/wrap/loss_scale.py", "nn/optim/adasum.py"), None),
    "nn/wrap/cell_wrapper.py": ["TrainOneStepCell"],
}
KEY = re.compile(r"- (\w+):\n|- (\w+) \(\w+\):(?:(?!\n *- ).)*?Default: ``(.+?)``", re.DOTALL)


def exported(tree: ast.Module) -> list[str]:
    """Return the names in ``__all__``; without one, each class that is not private."""
    found = [x.name for x in tree.body if isinstance(x, ast.ClassDef) and x.name[0] != "_"]
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found = ast.literal_eval(node.value)
    return found


def params(function: ast.FunctionDef) -> dict[str, str]:
    """Return params by name, with the text of the default, empty where there is none."""
    given = function.args
    names = [x.arg for x in given.posonlyargs + given.args]
    texts = [re.sub(r"^(mstype|tensor)\.", "", ast.unparse(x)) for x in given.defaults]
    found = dict(zip(names, [""] * (len(names) - len(texts)) + texts, strict=True))
    if given.vararg:
        found[f"*{given.vararg.arg}"] = ""
    for x, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found[x.arg] = ast.unparse(default).removeprefix("mstype.") if default else ""
    found.pop("self", None)
    return found


def signatures(text: str, names: list[str] | None = None) -> Iterator[tuple[str, dict[str, str]]]:
    """Give each exported function, class and public method, with what it takes.

    A cell's ``construct`` is its call; a method that a class of the file gives anew is its own row
    only where it was first.
    """
    tree = ast.parse(text)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        if node.name not in (exported(tree) if names is None else names):
            continue
        if isinstance(node, ast.FunctionDef):
            yield node.name, params(node)
            continue
        methods = {x.name: x for x in node.body if isinstance(x, ast.FunctionDef)}
        first = methods.get("__init__") or methods.get("__new__")
        yield node.name, params(first) if first else {}
        bases = [classes[x.id] for x in node.bases if isinstance(x, ast.Name) and x.id in classes]
        known = {x.name for base in bases for x in base.body if isinstance(x, ast.FunctionDef)}
        for name in methods.keys() - known - {"construct"}:
            if name[0] != "_":
                yield f"{node.name}.{name}", params(methods[name])


def keys(text: str) -> dict[str, str]:
    """Return the keys of ``boost_config_dict`` in the documents of ``AutoBoost``, with defaults."""
    found, group = {}, ""
    for header, key, default in KEY.findall(text):
        group = header or group
        if key:
            found[f"{group}.{key}"] = default
    return found


def of_mindspore(package: pathlib.Path) -> dict[str, dict]:
    """Return what the folder ``mindspore`` exports."""
    found: dict[str, dict[str, str]] = {}
    for pattern, names in FILES.items():
        if isinstance(names, str):
            names = exported(ast.parse((package / names).read_text()))
        for path in package.glob(pattern):
            found |= signatures(path.read_text(), names)
    return {"mindspore": found, "keys": keys((package / "boost" / "boost.py").read_text())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=pathlib.Path)
    parser.add_argument("opt", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    record = of_mindspore(given.package) | {"singa": dict(signatures(given.opt.read_text()))}
    if given.write:
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    elif record != json.loads(RECORD.read_text()):
        sys.exit(f"{RECORD.name} is not what these export: --write")
