"""What the table of every item says of boostax is so."""

import dataclasses
import importlib
import inspect
import itertools
import json
import re
import types

import items
import pytest

from boostax.config.dictionary import GROUPS, SWITCHES

ITEMS = items.every_item()
NAMES = [item.name for item in ITEMS]
# What the packages export, and the keys in their documents: benchmarks/peers/signatures.py.
EXPORTED = json.loads((items.ROOT / "tests" / "golden" / "signatures.json").read_text())


def test_an_item_is_printed_with_its_default_what_it_is_and_its_test():
    lines = {item.name: items.described(item) for item in ITEMS}
    assert lines["boost.less_bn"] == (
        "boost.less_bn = False is same: boostax.less_bn "
        "(test_conformance.py::test_weights_are_those_of_mindspore)"
    )
    said = "common.gradient_split_groups = [50, 100] is missing: XLA decides"
    assert lines["common.gradient_split_groups"].startswith(said)


def test_an_item_says_what_it_is_why_and_where_that_is_shown():
    for item in ITEMS:
        assert item.word in items.WORDS, item
        assert bool(item.here) == (item.word != "missing"), item
        assert item.why or item.word == "same", item
        assert item.test or item.word == "missing", item


def test_what_an_item_is_here_exists_with_its_arguments():
    for item in ITEMS:
        for path, arguments in item.names():
            assert set(arguments) <= parameters(found(path)), (item.name, path)


def found(path):
    """What a dotted name stands for."""
    head, *names = path.split(".")
    value = importlib.import_module(head)
    for name in names:
        if isinstance(value, types.ModuleType) and not hasattr(value, name):
            importlib.import_module(f"{value.__name__}.{name}")
        value = getattr(value, name)
    return value


def parameters(value):
    if not callable(value):
        return set()
    fields = getattr(value, "_fields", ())  # of a NamedTuple
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
    return {*inspect.signature(value).parameters, *fields}


def test_a_test_that_is_named_exists():
    for test in {item.test for item in ITEMS if item.test}:
        file, _, name = test.partition("::")
        text = (items.ROOT / "tests" / file).read_text()
        assert re.search(rf"^def {name}\(", text, re.M), f"{file} has no {name}"


def test_a_text_that_is_broken_stands_once_in_its_file():
    for item in ITEMS:
        assert bool(item.breaks) == bool(item.test), item
        path, old, new = item.breaks or ("README.md", "# boostax\n", "")
        assert items.located(path).read_text().count(old) == 1 and new != old, item


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    items.copy(folder := tmp_path_factory.mktemp("house"))
    return folder


# Items that are broken by one text and shown by one test are one case.
CASES = {(item.breaks, item.test): item for item in ITEMS if item.breaks}


@pytest.mark.long
@pytest.mark.parametrize("item", CASES.values(), ids=lambda item: item.name)
def test_the_test_of_an_item_fails_where_the_item_is_broken(item, house):
    status, told = items.broken(item, house)
    assert status == 1, told


def test_no_item_is_said_twice():
    assert sorted(NAMES) == sorted(set(NAMES))


CALL = re.compile(r"(?:amp\.|nn\.|DistOpt\.)?([\w.]+)(?:\(([^()]*)\))?")


def said(peer):
    """Return ``{(name, its param or ""): default}``; ``.name`` belongs to the class before it."""
    found = {}
    own = [each for title, _, each in items.sections() if ("SINGA" in title) == (peer == "singa")]
    for item in itertools.chain(*own):
        of = ""
        for name, given in CALL.findall(item.name):
            name = of + name if name[0] == "." else name
            of = name.partition(".")[0]
            for param in map(str.strip, given.split(",")):
                found[name, param] = found.get((name, param)) or item.default
            found[name, ""] = ""
    return found


@pytest.mark.parametrize("peer", ["mindspore", "singa"])
def test_every_name_that_a_package_exports_is_an_item_with_its_default(peer):
    found, missing = said(peer), []
    for name, given in EXPORTED[peer].items():
        name = name.removeprefix("DistOpt.")
        if not any(known == name or known.startswith(f"{name}.") for known, _ in found):
            missing.append(name)
        for param, default in given.items():
            told = found.get((name, param), "no item")
            if told.replace('"', "'") != default:
                missing.append(f"{name}({param}): {default or 'no default'}, not {told}")
    assert not missing, "\n".join(missing)


DEFAULTS = {item.name: item.default for item in ITEMS}


def test_every_key_in_the_documents_is_an_item_with_its_default():
    for name, default in EXPORTED["keys"].items():
        assert DEFAULTS[name] == default, name
    assert EXPORTED["keys"].keys() <= {"boost.mode", *(f"boost.{name}" for name in SWITCHES)} | {
        f"{group}.{key}" for group, settings in GROUPS.items() for key in settings
    }


def test_defaults_of_keys_are_those_that_a_configuration_has():
    # The code's default of the groups is none; the documents say [50, 100].
    told = DEFAULTS | {"common.gradient_split_groups": "None"}
    for group, settings in GROUPS.items():
        for key, setting in settings.items():
            assert told[f"{group}.{key}"] == str(setting.get("default")), f"{group}.{key}"
