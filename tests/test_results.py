"""The published figures: every bar of every benchmark on record is met."""

import importlib

import combinations
import compilers
import foreign_loops
import gpu
import harness
import peers_jax
import PIL.Image
import placements
import plots
import pytest
import recipes

RESULTS = sorted(harness.RESULTS.glob("*.json"))
BARS = [
    pytest.param(bar, id=f"{path.stem}: {bar['claim']}")
    for path in RESULTS
    for bar in harness.record(path.stem)["bars"]
]

SCRIPTS = sorted(p for p in harness.RESULTS.parent.glob("*.py") if "def main" in p.read_text())


def test_every_benchmark_is_on_record():
    # The suites of others are run beside the tests; a GPU's is on record once there was one.
    recorded = {path.stem for path in RESULTS} | {gpu.NAME}
    assert recorded == {path.stem for path in SCRIPTS} | {"foreign"}
    assert all(path.with_suffix(".md").exists() for path in RESULTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_benchmark_finds_what_it_imports(script):
    """Defect guarded against: two took a function from where it was no more."""
    importlib.import_module(script.stem)


@pytest.mark.parametrize("bar", BARS)
def test_bar(bar):
    print(f"{bar['claim']}: {bar['figure']:.3f} <= {bar['limit']}")
    assert bar["figure"] <= bar["limit"]


def test_the_page_of_combinations_is_that_of_the_record():
    sections = harness.sections_of("combinations")
    assert combinations.PAGE.read_text() == combinations.page(sections)
    asked = [each.title for each in combinations.everything_asked()]
    assert [row["configuration"] for rows in sections.values() for row in rows] == asked


def test_the_page_of_compilers_is_that_of_the_record():
    sections = harness.sections_of("compilers")
    assert compilers.PAGE.read_text() == compilers.page(sections)
    assert list(sections) == list(compilers.SECTIONS)


def test_the_page_of_foreign_loops_is_that_of_the_record():
    sections = harness.sections_of("foreign_loops")
    assert foreign_loops.PAGE.read_text() == foreign_loops.page(sections)
    names = [row["technique"] for row in sections[foreign_loops.TRAINED]]
    assert names == list(foreign_loops.ALL)


def test_the_page_of_peers_is_that_of_the_record():
    record = harness.record("peers_jax")
    assert peers_jax.PAGE.read_text() == peers_jax.page(record)
    behind = [row for row in record["sections"]["Pairs"] if row["ahead"] == "the other"]
    assert behind and peers_jax.PAGE.read_text().count("| the other |") == 2 * len(behind)


def test_the_page_of_placements_is_that_of_the_record():
    sections = harness.sections_of("placements")
    assert placements.PAGE.read_text() == placements.page(sections)
    names = [case.name for case in placements.CASES]
    assert all([row["technique"] for row in rows] == names for rows in sections.values())


def test_the_page_of_recipes_is_that_of_the_record():
    page, sections = recipes.PAGE.read_text(), recipes.on_record()
    assert page == recipes.page(sections)
    assert all(f"## {recipe.pain}" in page for recipe in recipes.RECIPES.values())
    for rows in (sections[recipes.TRAINED], sections[recipes.AUDITED]):
        assert {row["recipe"] for row in rows} == set(recipes.RECIPES)


def test_the_picture_shows_the_present_record():
    """After a benchmark: ``python benchmarks/plots.py``."""
    picture = RESULTS[0].parent / "overview.png"
    with PIL.Image.open(picture) as image:
        assert image.info["Description"] == plots.digest()
