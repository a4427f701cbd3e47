"""What a newcomer looks for is where the documents say: a formula, a law, the place for a codec."""

import pathlib
import re

import boostax
from boostax import testing
from boostax.config import keys

ROOT = pathlib.Path(__file__).parents[1]
CONTRACT = (ROOT / "docs" / "contract.md").read_text()
PROMISES = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |^## )", CONTRACT, re.M | re.S)


def located(name):
    """A file of the checkout; of the package, where it is installed."""
    package = pathlib.Path(boostax.__file__).parent
    return package.parent / name if name.startswith("boostax/") else ROOT / name


def defined(path, name):
    """Whether a file defines a function, a class or a value of a name, at any depth."""
    return re.search(rf"^ *((def|class) {name}\b|{name}(: .*)? = )", path.read_text(), re.M)


def test_a_promise_names_what_holds_it():
    """Laws of the testing package, or tests."""
    assert [int(number) for number, _ in PROMISES] == list(range(1, 16))
    sources = [*located("boostax/testing").glob("*.py"), *ROOT.glob("tests/**/*.py")]
    for number, promise in PROMISES:
        told = re.split(r"\*(?:Laws?|Tests):\*", promise)
        assert len(told) == 2, f"promise {number} names neither a law nor a test"
        names = re.findall(r"`([\w/.]+)`", told[1])
        assert names
        for name in names:
            known = located(name).is_file() if "/" in name else name in testing.LAWS
            assert known or any(defined(path, f"(test_)?{name}") for path in sources), name


def test_a_law_is_beside_its_promise():
    for name, law in testing.LAWS.items():
        assert f"`{name}`" in CONTRACT, name
        said = re.match(r"Promise (\d+):", law.__doc__)
        assert said and f"`{name}`" in dict(PROMISES)[said[1]], name


def test_the_place_of_a_codec_is_named():
    """The entry that ``CONTRIBUTING.md`` names is the one that a configuration chooses from."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (key,) = re.findall(
        r"\| a reduction \| `(\w+)` of `\[order\]` in `boostax/config/order.toml` \|", text
    )
    assert keys.PARTS[key]["int8"] is boostax.int8_reduce
