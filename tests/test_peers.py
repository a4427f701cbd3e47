"""Environments of MindSpore, PyTorch and Horovod, and the pages whose blocks run in them."""

import pathlib
import sys
import threading

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks" / "peers"))

import documents
import setup


def test_setup_says_that_and_why_a_peer_cannot_be_had(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    peer = setup.Peer("made-up", ("no-such-framework==1.0",), "import no_such_framework")
    assert setup.main(["it"], {"it": peer}, tmp_path) == 1
    told = capsys.readouterr().out
    assert told.startswith("it: cannot be had: ERROR: ") and "no-such-framework==1.0" in told
    assert told.count("\n") == 1
    assert f"it: {setup.outcome('it', tmp_path)}\n" == told
    assert setup.outcome("other", tmp_path).endswith("setup.py other")


def test_setup_gives_up_with_all_that_it_has_started():
    """A compiler that pip started would keep its pipes open, and the wait would never end."""
    endless = "while :; do sleep 600; done"
    refused = []

    def run():
        with pytest.raises(setup.Refused, match="not done within") as error:
            setup.run(["sh", "-c", f"({endless}) & {endless}"], 0.2)
        refused.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(3600.0)
    assert refused


def test_setup_says_the_version_of_what_is_there(tmp_path, capsys):
    python = tmp_path / "here" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    peer = setup.Peer("here", (), "print('1.2.3')")
    assert setup.main([], {"it": peer}, tmp_path) == 0
    assert capsys.readouterr().out == "it: ready (1.2.3)\n"


def test_a_page_is_run_in_the_order_and_on_the_lines_of_its_blocks():
    fenced = "```python{}\n{}\n```\n"
    peer, ours = fenced.format(" pytorch", "a = 1"), fenced.format("", "b")
    page = "\n".join(["# Page\n", peer, ours, fenced.format(" pytorch", "a += 1")])
    found = documents.blocks(page)
    assert [(each.peer, each.line) for each in found] == [("pytorch", 3), ("pytorch", 11)]
    lines = documents.program(found).split("\n")
    assert lines[3] == "a = 1" and lines[11] == "a += 1"
