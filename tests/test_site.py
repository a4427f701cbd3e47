"""The documents as a site: it builds without a warning, and its reference has every public name."""

import pathlib
import re
import subprocess
import sys

import pytest
from test_import import named

import boostax

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.long
def test_the_site_builds(tmp_path):
    out = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs"]
    command += ["-b", "html", "-d", str(tmp_path / "trees"), ".", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
    reference = out / "docs" / "api.html"
    html = reference.read_text()
    places = set(re.findall(r'id="([^"]+)"', html))
    assert not [name for name in named(boostax) if f"boostax.{name}" not in places], (
        "not in docs/api.md"
    )
    # Formulas are drawn without a network: all that a page loads is beside it.
    loaded = re.findall(r'<(?:script|link)[^>]*(?:src|href)="([^"?#]+)[^>]*>', html)
    files = [each for each in loaded if not each.endswith(".html")]
    assert any("mathjax" in each for each in files)
    assert [each for each in files if not (reference.parent / each).exists()] == []
