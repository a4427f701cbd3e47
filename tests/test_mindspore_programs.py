"""Programs drawn at random train in boostax as in MindSpore 2.10: `make test-mindspore`.

150 are on record: ``python benchmarks/drawn_programs.py --write``.
"""

import json
import pathlib
import re
import subprocess

import pytest
from conformance import ours
from conformance.compare import PYTHON, outcomes
from peers import signatures
from peers.programs import active, draw, smaller

# None of the record, whose seeds are the first.
SEEDS = range(1000, 1030)
PAGES = pathlib.Path(__file__).parents[1] / "docs" / "coming_from"


@pytest.mark.mindspore
def test_weights_are_those_of_mindspore_or_a_note_says_that_they_are_not():
    found = dict(zip(SEEDS, outcomes([draw(seed) for seed in SEEDS], PYTHON), strict=True))
    assert not {seed: x for seed, x in found.items() if x.fate in ("different", "refused")}
    assert sum(x.fate == "equal" for x in found.values()) >= len(SEEDS) // 2


@pytest.mark.mindspore
def test_the_items_are_what_the_installed_package_exports():
    (package,) = pathlib.Path(PYTHON).parents[1].glob("lib/python*/site-packages/mindspore")
    record = json.loads(signatures.RECORD.read_text())
    assert signatures.of_mindspore(package) == {x: record[x] for x in ("mindspore", "keys")}


@pytest.mark.mindspore
@pytest.mark.parametrize("page", ["mindspore_amp", "mindspore_boost", "mindspore_examples"])
def test_the_blocks_of_a_page_run_in_mindspore(page, tmp_path):
    blocks = r"(?ms)^```python mindspore\n(.*?)^```$"
    # MindSpore reads the source of what it compiles, so the program is a file.
    program = tmp_path / "page.py"
    program.write_text("\n".join(re.findall(blocks, (PAGES / f"{page}.md").read_text())))
    run = subprocess.run([PYTHON, program], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.mindspore
def test_a_momentum_that_is_a_little_less_is_found(monkeypatch):
    program = draw(0) | {"on": [], "manager": None, "bad": {}}
    program["optimizer"] = {"class": "SGD", "learning_rate": 0.05, "momentum": 0.9}
    (before,), sgd = outcomes([program], PYTHON), ours.mindspore.sgd
    monkeypatch.setattr(ours.mindspore, "sgd", lambda **given: sgd(**given | {"momentum": 0.89}))
    (after,) = outcomes([program], PYTHON)
    assert (before.fate, after.fate) == ("equal", "different")


def test_a_seed_draws_one_program_and_each_smaller_one_is_read():
    assert draw(7) == draw(7) != draw(8)
    plainer = [x for seed in range(12) for x in smaller(draw(seed))]
    for spec in (x for x in plainer if "dim_reduce" not in active(x)):
        assert ("freeze" in ours.boost_of(spec).config) == ("grad_freeze" in active(spec))
