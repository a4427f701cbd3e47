"""What a newcomer looks for is where the documents say: a formula, a law, the place for a codec."""

import pathlib
import re

import pytest

import boostax
from boostax import testing
from boostax.config import keys

ROOT = pathlib.Path(__file__).parents[1]
CARDS = sorted(ROOT.glob("docs/cards/*.md"))
CONTRACT = (ROOT / "docs" / "contract.md").read_text()
PROMISES = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |^## )", CONTRACT, re.M | re.S)


def located(name):
    """A file of the checkout; of the package, where it is installed."""
    package = pathlib.Path(boostax.__file__).parent
    return package.parent / name if name.startswith("boostax/") else ROOT / name


def defined(path, name):
    """Whether a file defines a function, a class or a value of a name, at any depth."""
    return re.search(rf"^ *((def|class) {name}\b|{name}(: .*)? = )", path.read_text(), re.M)


def named(text):
    """Pairs of a path in backticks and the names in backticks that come after it."""
    path = None
    for word in re.findall(r"`([\w./]+)`", text):
        if "/" in word:
            path = located(word)
            assert path.is_file(), f"{word} is no file"
        elif path is not None:
            yield path, word


@pytest.mark.parametrize("word", ["Code", "Tests"])
@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.stem)
def test_a_card_names_the_code_of_its_formula_and_its_tests(card, word):
    (told,) = re.findall(rf"^{word}: (.*?)\n(?:\n|\Z)", card.read_text(), re.M | re.S)
    pairs = list(named(told))
    assert pairs and all(defined(*pair) for pair in pairs), [p for p in pairs if not defined(*p)]
    tests = [path.match("tests/test_*.py") and name.startswith("test_") for path, name in pairs]
    assert all(tests) if word == "Tests" else not any(tests)


def test_a_promise_names_what_holds_it():
    """Laws in their files, or tests; and a law says of which promise it is."""
    assert [int(number) for number, _ in PROMISES] == list(range(1, 16))
    for number, promise in PROMISES:
        told = re.split(r"\*(?:Laws?|Tests):\*", promise)
        assert len(told) == 2, f"promise {number} names neither a law nor a test"
        for part in told[1].split(";"):
            files = re.findall(r"`((?:boostax|tests)/[\w/]+\.py)`", part)
            assert files and all(located(file).is_file() for file in files)
            for law in re.findall(r"`(\w+)`", part):
                assert law in testing.LAWS and defined(located(files[0]), law), law


def test_a_law_is_beside_its_promise():
    for name, law in testing.LAWS.items():
        assert f"`{name}`" in CONTRACT, name
        said = re.match(r"Promise (\d+):", law.__doc__)
        assert said and f"`{name}`" in dict(PROMISES)[said[1]], name


def test_the_place_of_a_codec_is_named():
    """The table that ``CONTRIBUTING.md`` names is the one that the configuration is made of."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (name,) = re.findall(r"\| a reduction \| `(\w+)` in `boostax/config/keys.py` \|", text)
    assert getattr(keys, name) is keys.ORDER["reduce"]
