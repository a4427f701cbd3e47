"""The program for a GPU runs part by part, small and on a CPU: nothing is left to find out."""

import gpu
import numpy as np
import problems
import pytest


@pytest.fixture
def small(monkeypatch):
    for module in (problems, gpu):
        for name in filter(str.isupper, vars(module)):
            monkeypatch.setattr(module, name, getattr(module, name))
    gpu.smaller()


@pytest.mark.parametrize("part", gpu.PARTS)
def test_a_part_runs(small, part):
    rows = gpu.PARTS[part][1](1)
    assert len(rows) > 1 and len({row["form"] for row in rows}) == len(rows)
    figures = {(k, x) for row in rows for k, x in row.items() if isinstance(x, float)}
    assert np.isfinite([x for _, x in figures]).all()
    assert min(x for k, x in figures if not k.startswith("more than")) >= 0


def test_without_a_gpu_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    monkeypatch.setattr(gpu.harness, "report", lambda *_: pytest.fail("it recorded"))
    with pytest.raises(SystemExit, match="no GPU here"):
        gpu.main()


def test_a_part_that_fails_leaves_the_others_on_record(small, monkeypatch):
    told = []
    parts = {"b": ("B", lambda _: 1 // 0), "a": ("A", lambda rounds: [{"form": rounds}])}
    monkeypatch.setattr("sys.argv", ["gpu.py", "--rounds", "3"])
    monkeypatch.setattr(gpu.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu.harness, "sections_of", lambda _: {"B": [{"form": "of another card"}]})
    monkeypatch.setattr(gpu.harness, "report", lambda *given: told.append(dict(given[2])))
    with pytest.raises(SystemExit, match="b failed"):
        gpu.main()
    assert [[*sections] for sections in told] == [["To keep in mind"], ["A", "To keep in mind"]]
    assert told[-1]["A"] == [{"form": 3}]
