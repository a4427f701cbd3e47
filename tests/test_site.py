"""The documents as a site: it builds without a warning, and nothing in it leads nowhere."""

import html.parser
import pathlib
import subprocess
import sys
import urllib.parse

import boostax

ROOT = pathlib.Path(__file__).parents[1]


class Page(html.parser.HTMLParser):
    """What a page links to and shows, and the names of its places."""

    def __init__(self, text):
        super().__init__()
        self.links, self.places = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.places.update(filter(None, (given.get("id"), given.get("name"))))
        for key in ("href", "src"):
            if given.get(key) and tag != "link":
                self.links.append(given[key])


def broken(folder):
    """Every link of every page that leads to no file or to no place in one."""
    pages = {path: Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path
            if parts.path:
                target = (path.parent / urllib.parse.unquote(parts.path)).resolve()
            if target.is_dir():
                target /= "index.html"
            there = target in pages and urllib.parse.unquote(parts.fragment) in pages[target].places
            if not target.exists() or (parts.fragment and target in pages and not there):
                wrong.append(f"{path.relative_to(folder)}: {link}")
    return wrong


def test_the_site_builds_and_leads_somewhere(tmp_path):
    out = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs"]
    command += ["-b", "html", "-d", str(tmp_path / "trees"), ".", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
    assert broken(out) == []
    reference = Page((out / "docs" / "api.html").read_text())
    missing = [name for name in public() if f"boostax.{name}" not in reference.places]
    assert not missing, "not in docs/api.md"
    (out / "docs" / "faq.html").unlink()
    assert broken(out), "a page is gone, and nobody notices"


def public():
    return [
        name
        for name in dir(boostax)
        if not name.startswith("_")
        and (getattr(getattr(boostax, name), "__module__", None) or "").startswith("boostax.")
    ]
