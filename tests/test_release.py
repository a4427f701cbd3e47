"""What a release says of itself is the same everywhere."""

import pathlib
import re
import tomllib

import pytest

import boostax

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted(pathlib.Path(boostax.__path__[0]).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_says_its_licence(path):
    assert path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")


def test_there_is_one_version():
    cited = (ROOT / "CITATION.cff").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^version: (.*)$", cited, re.M)[1] == boostax.__version__
    assert re.search(r"^## (.*)$", changes, re.M)[1] == boostax.__version__


def test_the_classifiers_are_those_of_the_versions_that_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [x.rpartition(" ")[2] for x in project["classifiers"] if "Python :: 3." in x]
    assert project["requires-python"] == f">={versions[0]}"
    # A licence is an expression alone: with a classifier beside it an index refuses the upload.
    assert project["license"] == "Apache-2.0"
    assert not [x for x in project["classifiers"] if x.startswith("License")]


def test_each_law_of_the_fast_run_exists():
    laws = (line.split("::") for line in (ROOT / "tests/fast.txt").read_text().splitlines())
    assert all(f"def {law.split()[0]}(" in (ROOT / path).read_text() for path, law in laws)


def test_each_law_keeps_a_case_beside_those_in_late_txt(request):
    kept = {x.nodeid.partition("[")[0] for x in request.session.items}
    laws = {x.partition("[")[0] for x in (ROOT / "tests/late.txt").read_text().splitlines()}
    whole = {x.partition("::")[0] for x in kept}
    assert {x for x in laws if x.partition("::")[0] in whole} <= kept
