"""No dialect: docstrings, comments, messages, pages and names use the field's standard words.

``words.toml`` has the house words with their standard words, and how many of them are allowed.
"""

import ast
import re
import tokenize
import tomllib

import pytest
from test_budget import GENERATED, ROOT, files

WORDS = tomllib.loads((ROOT / "tests/words.toml").read_text())
CHECKED = rf"(?!{'|'.join(GENERATED)}).*\.md|boostax/.*\.(py|toml)"
FILES = [name for name in files() if re.fullmatch(CHECKED, name)]
PROSE = {house.replace(" ", r"\s+"): standard for house, standard in WORDS["prose"].items()}
# What is not prose. Pages: code, templates of tables, addresses. TOML: keys. Programs: code in
# docstrings, doctests, names of arguments. Both: values in messages.
CODE = {
    "md": r"(?s)```.*?```|<!--.*?-->|`[^`]*`|\]\([^)]*\)",
    "toml": r"(?m)^[ \t]*[\"\w .]+ =|[\w-]+ = (?=\[?\")|^\[+\w+\]+|\{\S+?\}",
    "py": r"(?ms)``.*?``|`[^`\s]+`|^ *(>>>|\.\.\.) .*?$|^ +\**\w+: |\{[^{}]*\}",
}


def exceptions(kind, name):
    return [x[kind] for x in WORDS["exceptions"] if kind in x and re.fullmatch(x["where"], name)]


def prose(name):
    """Return the text of a file without code and exceptions; each line keeps its number."""
    text = (ROOT / name).read_text()
    if name.endswith(".py"):
        lines = [""] * (text.count("\n") + 1)
        for token in tokenize.generate_tokens(iter(text.splitlines(True)).__next__):
            # A string without a space is a key.
            if re.match(r"#|[rbf]*[\"'].*\s", token.string, re.S):
                for row, line in enumerate(token.string.split("\n"), token.start[0] - 1):
                    lines[row] += re.sub(r'^#|\b[rf]*"+', "", line) + " "
        text = "\n".join(lines)
    for pattern in [CODE[name.split(".")[-1]], *exceptions("prose", name)]:
        text = re.sub(pattern, lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return text


def in_prose(name):
    """Yield the file, the line, the word and the standard word of each house word in its prose."""
    # A word with a point, a hyphen, "=" or "(" is a name.
    for match in re.finditer(rf"(?i)(?<![.-])\b({'|'.join(PROSE)})\b(?![=(])", prose(name)):
        standard = next(new for x, new in PROSE.items() if re.fullmatch(x, match[0], re.I))
        yield name, match.string.count("\n", 0, match.start()) + 1, match[0], standard


def in_names(name):
    """Yield the same for the variables, arguments, functions and fields of a program."""
    for node in ast.walk(ast.parse((ROOT / name).read_text() * name.endswith(".py"))):
        match node:
            case ast.Name(id=x, ctx=ast.Store()) | ast.arg(arg=x) | ast.FunctionDef(name=x):
                for house, standard in WORDS["names"].items():
                    if re.fullmatch(house, x) and x not in exceptions("names", name):
                        yield name, node.lineno, x, standard


@pytest.mark.parametrize(("kind", "search"), [("prose", in_prose), ("names", in_names)])
def test_words_are_those_of_the_field(kind, search):
    """The number of house words only falls, to zero; exceptions are few and have reasons."""
    lines = ["{}:{}: {!r}, write: {}".format(*x) for name in FILES for x in search(name)]
    assert len(lines) <= WORDS["allowed"][kind], "\n".join(lines)
    assert len([x["why"] for x in WORDS["exceptions"]]) <= 20
