"""The documents as a site: it builds without a warning, and its reference has every public name."""

import pathlib
import re
import subprocess
import sys

import pytest
from test_import import COMMON

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.long
def test_the_site_builds(tmp_path):
    out = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs"]
    command += ["-b", "html", "-d", str(tmp_path / "trees"), ".", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
    reference = out / "docs" / "api" / "boostax.html"
    html = reference.read_text()
    assert "boostax.accumulate" in re.findall(r'id="([^"]+)"', html)
    # Each name leads to its entry.
    links = re.findall(r'href="(api/[^"#]+)#([^"]+)"', (out / "docs" / "names.html").read_text())
    pages = {page: (out / "docs" / page).read_text() for page, _ in links}
    assert [name for page, name in links if f'id="{name}"' not in pages[page]] == []
    assert not {f"boostax.{name}" for name in COMMON} - {name for _, name in links}
    # Formulas are drawn without a network: all that a page loads is beside it.
    loaded = re.findall(r'<(?:script|link)[^>]*(?:src|href)="([^"?#]+)[^>]*>', html)
    files = [each for each in loaded if not each.endswith(".html")]
    assert any("mathjax" in each for each in files)
    assert [each for each in files if not (reference.parent / each).exists()] == []
    command = [sys.executable, str(ROOT / "docs" / "search.py"), str(out)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    # The page that ``make docs`` names leads to a file, as a browser without a server needs it.
    (first,) = re.findall(r"url=([^\"]+)", (out / "index.html").read_text())
    assert (out / first).is_file()
