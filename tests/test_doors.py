"""The doors into frameworks are open: the same losses, one reduction, few lines."""

import importlib.util
import sys

import doors
import harness
import pytest


def scripted(name):
    """A script of ``benchmarks/doors`` as a module."""
    spec = importlib.util.spec_from_file_location(f"doors_{name}", doors.SCRIPTS / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


frameworks = scripted("frameworks")
# The trainer of Keras reduces what it differentiates, in every call.
REDUCED_ALWAYS = ("keras_fit",)
FEW = [door for door in frameworks.DOORS if door.program.startswith(doors.FEW)]


@pytest.mark.parametrize("door", frameworks.DOORS, ids=lambda door: door.file)
def test_a_loop_reduces_once_and_trains_as_before(door):
    lines, old, new = frameworks.both(door, width=32)
    found = frameworks.row(door, lines, old, new)
    # A loop that trains nothing would agree with any other.
    assert len(set(new.losses)) == len(new.losses)
    after = 8 if door.file in REDUCED_ALWAYS else 1
    assert found["losses differ"] <= 1e-5
    assert found["reductions before"] == pytest.approx(8, abs=0.02)
    assert found["reductions after"] == pytest.approx(after, abs=0.02)
    assert found["temp MB after"] <= found["temp MB before"]


@pytest.mark.parametrize("door", frameworks.FREEZING, ids=lambda door: door.file)
def test_a_swap_of_the_gradient_shortens_the_backward_pass(door):
    lines, old, new = frameworks.both(door, width=16)
    found = frameworks.frozen(door, lines, old, new)
    assert len(set(new.losses)) == len(new.losses)
    assert found["losses differ"] == 0
    # Four layers: their products, those of their weights' gradients, and of three inputs'.
    assert found["products before"] == found["products after, all trained"] == 11
    assert found["products after, three of four frozen"] == 5


@pytest.mark.parametrize("door", [*FEW, *frameworks.FREEZING], ids=lambda door: door.file)
def test_few_lines_change(door):
    module = door.load()
    assert 1 <= frameworks.changed(module.before, module.after) <= 3


def test_lines_that_changed_are_counted():
    def one(a):
        a += 1
        return a

    def other(a):
        # Neither a comment nor a blank line counts.

        a += 2
        a += 3
        return a

    assert frameworks.changed(one, one) == 0
    assert frameworks.changed(one, other) == frameworks.changed(other, one) == 2


def loops():
    """The files of loops; others stand in a program's configuration."""
    return [path for path in doors.LOOPS.glob("*.py") if "def before" in path.read_text()]


def test_every_door_is_on_record():
    record = harness.sections_of("doors")
    for title, there in ((doors.DOORS, frameworks.DOORS), ("Freezing", frameworks.FREEZING)):
        rows = [row for row in record[title] if row["door"].startswith("frameworks")]
        assert [row["program"] for row in rows] == [door.program for door in there]
        lines = [frameworks.changed(d.load().before, d.load().after) for d in there]
        assert [row["lines"] for row in rows] == lines
    assert {path.stem for path in loops()} == {
        door.file for door in (*frameworks.DOORS, *frameworks.FREEZING)
    }


def test_the_page_shows_what_is_run():
    assert doors.shown(doors.PAGE.read_text()) == doors.PAGE.read_text()
    assert doors.PAGE.read_text().count("<!-- door: ") == len(loops())


def test_rows_of_a_script_take_the_place_of_its_old_ones(monkeypatch, tmp_path):
    (tmp_path / "one.py").touch()
    (tmp_path / "two.py").touch()
    monkeypatch.setattr(doors, "SCRIPTS", tmp_path)
    old = {doors.DOORS: [{"door": "one 1", "lines": 1}, {"door": "gone 1", "lines": 1}]}
    monkeypatch.setattr(harness, "sections_of", lambda name: old)
    new = {"two": {doors.DOORS: [{"door": "two 1", "lines": 2}], "More": [{"door": "two 1"}]}}
    found = doors.merged(new)
    assert [row["door"] for row in found[doors.DOORS]] == ["one 1", "two 1"]
    assert found["More"] == [{"door": "two 1"}]


def test_a_script_says_what_it_wants(monkeypatch, tmp_path):
    monkeypatch.setattr(doors, "SCRIPTS", tmp_path)
    (tmp_path / "one.txt").write_text("# python: 3.12\n# source: ssh://git@host/x@0123\njax\n")
    assert doors.wanted("one") == {"python": "3.12", "source": "ssh://git@host/x@0123"}
    assert doors.source("one", {"one": "there"}) == ["--source", "there"]
    assert doors.wanted("two") == {} and doors.source("two", {}) == []
    assert doors.environment("two") == sys.executable


def test_a_row_with_other_columns_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(doors, "RAW", tmp_path)
    (tmp_path / "one.json").write_text('[{"program": "x"}]')
    with pytest.raises(ValueError, match="one: a row must have"):
        doors.sections_of("one")
