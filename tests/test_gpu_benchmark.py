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


@pytest.mark.parametrize(
    "part", [pytest.param(x, marks=[pytest.mark.long] * (x == "training")) for x in gpu.PARTS]
)
def test_a_part_runs(small, part):
    _, run = gpu.PARTS[part]
    rows = run(1)
    assert len(rows) > 1 and len({row["form"] for row in rows}) == len(rows)
    figures = [x for row in rows for x in row.values() if isinstance(x, float)]
    assert np.isfinite(figures).all() and min(figures) >= 0


def test_without_a_gpu_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    monkeypatch.setattr(gpu, "report", lambda *_: pytest.fail("it recorded"))
    with pytest.raises(SystemExit, match="no GPU here"):
        gpu.main()
