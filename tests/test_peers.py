"""The benchmark beside other frameworks: fixed work, workers that answer, refusals that say why."""

import hashlib
import pathlib
import signal
import sys
import threading

import numpy as np
import pytest
from sklearn.datasets import load_digits

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks" / "peers"))

import documents
import lenet
import peer_workers
import setup


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    path = tmp_path_factory.mktemp("peers") / "work.npz"
    peer_workers.write(path)
    return path


def test_weights_are_those_of_the_record():
    """Every framework makes them itself, with the NumPy of its environment."""
    flat = lenet.flat(lenet.weights())
    assert flat.shape == (61_706,) and flat.dtype == np.float32
    np.testing.assert_array_equal(flat, lenet.flat(lenet.weights()))
    np.testing.assert_array_equal(lenet.flat(lenet.unflat(flat)), flat)
    digest = hashlib.sha256(flat.tobytes()).hexdigest()
    assert digest.startswith("e2000b7bc4cb6ecb")


def test_batches_are_the_digits_in_a_fixed_order(work):
    given = lenet.load(work)
    found = load_digits()
    images, labels = lenet.batches(found.images, found.target)
    np.testing.assert_array_equal(given.images, images)
    np.testing.assert_array_equal(given.labels, labels)
    assert images.shape == (56, lenet.BATCH, 1, 32, 32) and images.max() == 1
    # Each pixel of a digit is a square of four by four.
    small = images[..., ::4, ::4]
    np.testing.assert_array_equal(small.repeat(4, axis=-2).repeat(4, axis=-1), images)


def test_the_basis_is_orthonormal(work):
    given = lenet.load(work)
    product = given.basis @ given.basis.T
    np.testing.assert_allclose(product, np.eye(lenet.DIRECTIONS), atol=1e-5)
    assert len(given.depths) == lenet.CALLS


def test_the_worker_answers(work):
    """Two calls in one go lose what two calls one by one do; a wrong name leaves it alive."""
    with peer_workers.boostax(work) as worker:
        assert {"plain", "loss scale", "accumulation", "DimReduce"} <= set(worker.forms)
        first = worker.ask("plain", calls=1, fresh=True)
        second = worker.ask("plain", calls=1)
        assert first["cpu"] > 0 and first["seconds"] > 0
        assert second["loss"] != first["loss"]
        with pytest.raises(peer_workers.Failed, match="KeyError: 'no such form'"):
            worker.ask("no such form", calls=1)
        both = worker.ask("plain", calls=2, fresh=True)
        assert both["loss"] == second["loss"]
        # Momentum is as large as the params.
        assert worker.ask("plain", count=True) == {"state": 4 * 61_706, "wire": None}


def test_a_worker_that_does_not_answer_is_given_up(monkeypatch):
    """It waits for input that never ends, and no longer than it is waited for."""
    waited = []

    class Timer(threading.Timer):
        """The patience without the time: over as soon as it begins."""

        def __init__(self, seconds, give_up):
            waited.append(seconds)
            super().__init__(0.0, give_up)

    silent = """print('{"about": "", "forms": []}', flush=True); import sys; sys.stdin.read()"""
    with peer_workers.Worker([[sys.executable, "-c", silent]], [{}]) as worker:
        monkeypatch.setattr(peer_workers.threading, "Timer", Timer)
        for _ in range(2):
            with pytest.raises(peer_workers.Failed, match="no answer within 180 s"):
                worker.ask("plain", calls=1)
        # The second time it is gone, and whether that is seen in writing or in reading is open.
        assert waited in ([180.0], [180.0, 180.0])
        (process,) = worker._running
        assert process.wait(60.0) == -signal.SIGTERM


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
    thread.join(60.0)
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
