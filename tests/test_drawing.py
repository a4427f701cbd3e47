"""Property tests draw alike at every quick run, and what a search finds stays found."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from hypothesis.database import choices_from_bytes, choices_to_bytes

TESTS = pathlib.Path(__file__).parent

LAW = """
from drawing import draws
from hypothesis import given, strategies as st

@draws({examples})
@given(st.integers(0, 10**6), st.floats(0, 1))
def test_law(x, y):
    {body}
"""


@pytest.fixture
def law(tmp_path):
    """Writes a law, runs it, and returns how it ended and what it printed."""
    (tmp_path / "conftest.py").write_text("import drawing\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(body, *arguments, examples=1, hash_seed="0"):
        (tmp_path / "test_it.py").write_text(LAW.format(body=body, examples=examples))
        command = [sys.executable, "-B", "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONHASHSEED": hash_seed}
        how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        ended = subprocess.run([*command, *arguments], **how)
        return ended.returncode, ended.stdout + ended.stderr

    return run


@pytest.mark.long
def test_what_a_search_finds_every_later_run_tries(law, tmp_path):
    """Also once the test is written otherwise, and for good once it passes."""
    kept = tmp_path / "examples" / "test_it" / "test_law"
    search = "--hypothesis-profile=search"
    assert law("assert x < 5")[0] == 0 and not kept.exists()  # one example: 0, 0.0
    code, told = law("assert x < 5", search)
    assert code == 1 and "x=5" in told
    (file,) = kept.iterdir()  # the smallest alone, not what it was shrunk from
    assert json.loads(file.read_text()) == [5, 0.0]
    code, told = law("assert x < 5")
    assert code == 1 and "x=5" in told
    assert law("larger = x >= 5; assert not larger")[0] == 1
    for arguments in ([], [search]):
        assert law("assert x <= 10**6", *arguments)[0] == 0 and [*kept.iterdir()] == [file]
    assert law("assert x < 5")[0] == 1 and [*kept.iterdir()] == [file]


@pytest.mark.long
def test_a_quick_run_draws_what_the_last_one_drew(law, tmp_path):
    """Whatever hashes give, and whichever modules are imported by then; a search draws anew."""
    (tmp_path / "local_module.py").write_text(f"CONSTANTS = {[*range(10**5, 10**6, 997)]}\n")

    def drawn(*arguments, hash_seed="0"):
        code, told = law("print('drew', x, y)", *arguments, examples=50, hash_seed=hash_seed)
        assert code == 0, told
        return [line for line in told.splitlines() if "drew" in line]

    alike = drawn()
    assert len(alike) == 50 and drawn(hash_seed="1") == alike
    assert drawn("-p", "local_module") == alike
    search = "--hypothesis-profile=search"
    first, second = drawn(search), drawn(search)
    assert len(first) == 1000 and first != second


def test_examples_that_are_kept_can_still_be_read():
    for path in (TESTS / "examples").rglob("*.json"):
        choices = json.loads(path.read_text())
        assert [*choices_from_bytes(choices_to_bytes(choices))] == choices, path
