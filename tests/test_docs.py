"""Whatever the documents show runs: every snippet, doctest, link and notebook."""

import doctest
import importlib
import json
import pathlib
import pkgutil
import re
import subprocess
import sys
import textwrap
import tomllib
import types

import harness
import nbclient
import nbformat
import pytest
from items import located
from lanes import lanes

import boostax
from boostax import testing
from boostax.__main__ import main

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
MODULES = [name for _, name, _ in pkgutil.walk_packages(boostax.__path__, "boostax.")]

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)\n(?P<code>(?:.*\n)*?)(?P=indent)```$", re.M)
HELD = re.compile(r"# From benchmarks/results/(?P<record>\w+)\.json")


def relative(path):
    return str(path.relative_to(ROOT))


def snippets(path):
    """``(line, code)`` of each block that is Python and not marked ``notest``."""
    text = path.read_text()
    for block in FENCE.finditer(text):
        if block["info"].split() == ["python"]:
            yield text[: block.start("code")].count("\n"), textwrap.dedent(block["code"])


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if any(snippets(p))], ids=relative)
def test_snippets_run(path, monkeypatch):
    """The blocks of a document, in order, in one module; those with a prompt as doctests."""
    # What a document defines is pickled by its module's name.
    module = types.ModuleType(f"document_{path.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = vars(module)
    for line, code in snippets(path):
        if code.startswith(">>>"):
            parsed = code, namespace, path.name, str(path), line
            examples = doctest.DocTestParser().get_doctest(*parsed)
            assert_passes(examples, clear_globs=False)
            namespace.update(examples.globs)
        else:
            # Blank lines in front, so that a traceback names the document's own line.
            exec(compile("\n" * line + code, str(path), "exec"), namespace)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    for examples in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)):
        assert_passes(examples)


def assert_passes(examples, clear_globs=True):
    report = []
    doctest.DocTestRunner(verbose=False).run(examples, out=report.append, clear_globs=clear_globs)
    assert not report, "".join(report)


@pytest.mark.parametrize("path", [*DOCUMENTS, *NOTEBOOKS], ids=relative)
def test_relative_links_lead_somewhere(path):
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    for link in re.finditer(r"\]\((?P<target>[^)\s]+)\)", FENCE.sub("", text)):
        target, _, fragment = link["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        page = (path.parent / target).resolve() if target else path
        assert located(relative(page)).exists(), f"{link['target']}: no such file"
        if fragment and page.suffix == ".md":
            assert fragment in anchors(page), f"{link['target']}: no such heading"


def anchors(page):
    """What GitHub makes of the headings of a page, and the names of the reference."""
    headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text()), re.M)
    found = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
    return found.union(re.findall(r"^\.\. auto\w+:: (.+)$", page.read_text(), re.M))


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """The running interpreter as a Jupyter kernel, whatever kernels are installed."""
    folder = tmp_path / "kernels" / "this-python"
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "this Python", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    return folder.name


# The rest runs in the long tests.
QUICK = [path for path in NOTEBOOKS if path.stem == "quickstart"]


@pytest.mark.parametrize("path", lanes(NOTEBOOKS, QUICK), ids=relative)
def test_notebooks_run(path, kernel, monkeypatch, tmp_path):
    """Outside the checkout: they need the package alone."""
    monkeypatch.setenv("BOOSTAX_FAST", "1")
    where = {"metadata": {"path": str(tmp_path)}}
    how = {"timeout": None, "startup_timeout": 3600, "kernel_name": kernel, "resources": where}
    nbclient.NotebookClient(nbformat.read(path, as_version=4), **how).execute()


def test_figures_that_a_notebook_holds_are_those_of_the_record():
    cells = [c.source for p in NOTEBOOKS for c in nbformat.read(p, as_version=4).cells]
    found = [(source, HELD.match(source)) for source in cells if "record = {" in source]
    assert found
    for source, name in found:
        assert name, source
        exec(source, given := {})
        sections = harness.sections_of(name["record"])
        for start, (columns, *rows) in given["record"].items():
            (title,) = (title for title in sections if title.startswith(start))
            rounded = lambda x: round(x, 4) if isinstance(x, float) else x  # noqa: E731
            known = [tuple(rounded(row[c]) for c in columns) for row in sections[title]]
            assert not [row for row in rows if row not in known], title


def test_notebooks_use_names_that_exist(tmp_path, monkeypatch):
    """Most run in the long tests only; a name or module that is not there shows here at once."""
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        code = [cell.source for cell in cells if cell.cell_type == "code"]
        (tmp_path / f"{path.stem}.py").write_text("\n".join(code))
    names = ["reportAttributeAccessIssue", "reportCallIssue", "reportMissingImports"]
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "off"}
    settings |= dict.fromkeys(names, "error")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    # It tells of a newer version in the middle of its JSON otherwise.
    monkeypatch.setenv("PYRIGHT_PYTHON_IGNORE_WARNINGS", "1")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run([*command, "-p", tmp_path], capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert told["summary"]["filesAnalyzed"] == len(NOTEBOOKS)
    # Packages without types of their own are read wrongly here and there: ours are not.
    own = rf"(class|module) \"({'|'.join(own_names())})\""
    ours = re.compile(rf"No parameter named|could not be resolved|{own}")
    assert not [x["message"] for x in told["generalDiagnostics"] if ours.search(x["message"])]


def own_names():
    for name in ["boostax", *MODULES]:
        yield re.escape(name)
        for each in vars(importlib.import_module(name)).values():
            if isinstance(each, type) and each.__module__ == name:
                yield each.__name__


def test_notebooks_keep_their_outputs():
    for path in NOTEBOOKS:
        code = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
        assert [c.execution_count for c in code] == list(range(1, len(code) + 1)), path.name
        outputs = [o for c in code for o in c.outputs]
        assert not [o for o in outputs if o.get("name", "stdout") != "stdout"], "a warning"
        assert not re.search(r"/(tmp|home|work)/", "".join(o.get("text", "") for o in outputs))
        assert path.stat().st_size < 300_000


def test_the_page_for_programs_is_that_of_the_code():
    subprocess.run([sys.executable, str(ROOT / "docs" / "names.py")], check=True)


def test_every_card_is_judged():
    """In the table of what wins where, in that of parity and research, or as a tool without one."""
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("sceptic.md", "parity.md"))
    cards = {path.name for path in (ROOT / "docs" / "cards").glob("*.md")}
    assert {card for card in cards if f"](cards/{card}" not in pages} == set()


# What a newcomer looks for: a formula, a law, the place for a codec, a command.

CONTRACT = (ROOT / "docs" / "contract.md").read_text()
PROMISES = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |^## )", CONTRACT, re.M | re.S)


def test_a_promise_names_what_holds_it():
    """Laws of the testing package, or tests."""
    assert [int(number) for number, _ in PROMISES] == list(range(1, 16))
    sources = [*located("boostax/testing").glob("*.py"), *ROOT.glob("tests/**/*.py")]
    texts = [path.read_text() for path in sources]
    for number, promise in PROMISES:
        told = re.split(r"\*(?:Laws?|Tests):\*", promise)
        assert len(told) == 2, f"promise {number} names neither a law nor a test"
        names = re.findall(r"`([\w/.]+)`", told[1])
        assert names
        for name in names:
            known = located(name).is_file() if "/" in name else name in testing.LAWS
            # A function, a class or a value, at any depth of a file.
            found = rf"(?m)^ *((def|class) (test_)?{name}\b|(test_)?{name}(: .*)? = )"
            assert known or any(re.search(found, text) for text in texts), name


def test_a_law_is_beside_its_promise():
    for name, law in testing.LAWS.items():
        assert f"`{name}`" in CONTRACT, name
        said = re.match(r"Promise (\d+):", law.__doc__)
        assert said and f"`{name}`" in dict(PROMISES)[said[1]], name


def test_the_place_of_a_codec_is_named():
    """The entry that ``CONTRIBUTING.md`` names is the one that a configuration chooses from."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    where = r"of `\[order\]` in `boostax/config/order.toml` \|"
    (key,) = re.findall(rf"\| a reduction \| `(\w+)` {where}", text)
    assert boostax.config.keys.PARTS[key]["int8"] is boostax.int8_reduce


SENTENCES = tomllib.loads(located("boostax/names.toml").read_text("utf8"))


@pytest.mark.parametrize("command", ["train", "compare", "launch", "explain", "audit --forms"])
def test_a_command_that_is_gone_says_what_stands_in_its_place(command, capsys):
    assert main([*command.split(), "text"]) == 2
    assert capsys.readouterr().err == f"boostax: {SENTENCES[f'boostax {command}']}\n"


@pytest.mark.parametrize("path", [*DOCUMENTS, *sorted(ROOT.glob("examples/**/*.py"))], ids=relative)
def test_documents_show_commands_and_examples_that_exist(path):
    if path.name != "CHANGELOG.md":
        text = path.read_text()
        assert not re.search(r"\bboostax (train|compare|launch|explain)\b", text)
        for example in re.findall(r"(?<![\w/])examples/[\w/]+\.(?:py|sh)", text):
            assert (ROOT / example).exists() or (ROOT / "docs" / example).exists(), example
