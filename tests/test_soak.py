"""A short soak: kills, resumes and poisoned batches lose nothing. The long one is a benchmark."""

import pytest
from soak import soak


@pytest.mark.long
def test_a_soak_of_ninety_seconds_keeps_every_promise(tmp_path):
    sections, bars = soak(1.5, tmp_path)
    tables = dict(sections)
    for row in (*tables["Lives"], *tables["Endings"]):
        print(row)
    for bar in bars:
        print(f"{bar.claim}: {bar.figure:.3f} <= {bar.limit}")
    assert all(bar.met for bar in bars)
    # What the promises are about has happened.
    assert [row["killed"] for row in tables["Lives"]].count("no") == 1
    assert len(tables["Lives"]) > 2
    assert sum(row["done again"] for row in tables["Lives"]) > 0
    assert tables["Endings"][0]["skipped"] > 0
