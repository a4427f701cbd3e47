"""Draw sentences of the documents and the code, for readers who did not write them.

``python tests/sentences.py SEED [COUNT]`` prints equally many from docstrings, comments, texts of
errors and pages, with their places.
"""

import ast
import pathlib
import random
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
GENERATED = (".", "CHANGELOG", "benchmarks/results", "docs/api", "docs/names", "docs/pairs")
CODE = r"(?s)```.*?```|<!--.*?-->|\.\. math::.*?(\n\n|\Z)|(?m:^ *(\||#|>>>|\.\.\.)[^\n]*$)"


def split(text):
    """The sentences of a text, without its code, formulas and tables."""
    for part in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d\.) |\n\s*\w+: ", re.sub(CODE, "\n\n", text)):
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z`*])", " ".join(part.split()))


def plain(node):
    """The text of a string, with a name for each value in it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(x.value if isinstance(x, ast.Constant) else "<value>" for x in node.values)
    return ""


def of_module(source):
    """``(kind, line, text)`` of the docstrings, comments and other strings of a module."""
    read = set()
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node):
            read.add(node.body[0].value)
            yield "docstring", node.body[0].lineno, ast.get_docstring(node)
        elif node not in read and " " in plain(node):
            read |= set(ast.walk(node))
            yield "error", node.lineno, plain(node)
    for match in re.finditer(r"(?m)(?:^ *# (?!SPDX).*\n)+", source):
        yield "comment", source[: match.start()].count("\n") + 1, re.sub("(?m)^ *# ", "", match[0])


def drawn(seed, count):
    """``(kind, place, sentence)``: ``count`` sentences, of each kind a quarter."""
    kinds = {}
    for path in [*sorted(ROOT.rglob("*.md")), *sorted((ROOT / "boostax").rglob("*.py"))]:
        name = str(path.relative_to(ROOT))
        text = path.read_text()
        parts = of_module(text) if path.suffix == ".py" else [("page", 1, text)]
        for kind, line, text in () if name.startswith(GENERATED) else parts:
            sentences = [x for x in split(text) if len(x.split()) > 5]
            kinds.setdefault(kind, []).extend((kind, f"{name}:{line}", x) for x in sentences)
    pick = random.Random(seed)
    return [x for kind in sorted(kinds) for x in pick.sample(kinds[kind], count // 4)]


if __name__ == "__main__":
    seed, count = map(int, [*sys.argv[1:], 60][:2])
    print(*(f"{kind:9} {place}: {text}" for kind, place, text in drawn(seed, count)), sep="\n")
