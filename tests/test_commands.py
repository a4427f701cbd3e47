"""Commands: those that are gone say what stands in their place, and no document shows them."""

import pathlib
import re
import tomllib

import pytest

from boostax.__main__ import main

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")])
SENTENCES = tomllib.loads((ROOT / "boostax" / "names.toml").read_text("utf8"))


@pytest.mark.parametrize("command", ["train", "compare", "launch", "explain"])
def test_a_command_that_is_gone_says_what_stands_in_its_place(command, capsys):
    assert main([command, "text"]) == 2
    assert capsys.readouterr().err == f"boostax: {SENTENCES[f'boostax {command}']}\n"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_show_commands_and_examples_that_exist(path):
    if path.name != "CHANGELOG.md":
        text = path.read_text()
        assert not re.search(r"\bboostax (train|compare|launch|explain)\b", text)
        for example in re.findall(r"(?<![\w/])examples/[\w/]+\.(?:py|sh)", text):
            assert (ROOT / example).exists() or (ROOT / "docs" / example).exists(), example
