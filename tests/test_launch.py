"""A launcher that leaves nothing behind: codes, signals, prefixes, and every way to end."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import boostax
from boostax.run.cluster.launch import launch

PATIENCE = 60.0
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def program(text):
    """A command that runs Python text with ``rank`` defined, without the site's packages."""
    head = "import os, signal, sys, time\nrank = int(os.environ['JAX_PROCESS_ID'])\n"
    return [sys.executable, "-I", "-S", "-c", head + text]


def running(pid):
    """Whether a process is there and no zombie, which whoever adopts it may be slow to reap."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(pids, seconds=10.0):
    deadline = time.monotonic() + seconds
    while any(running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(running(pid) for pid in pids)


NOTE_PID = "open(f'{sys.argv[1]}/{rank}', 'w').write(str(os.getpid()))\n"


def pids(folder, count):
    """The pids that ``count`` programs have noted."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = [path.read_text() for path in folder.iterdir()]
        if len(found) == count and all(found):
            return [int(pid) for pid in found]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_process_is_told_its_place(tmp_path):
    text = f"""
values = [os.environ[name] for name in {VARIABLES}] + [os.environ["MORE"]]
open(f"{{sys.argv[1]}}/{{rank}}", "w").write(" ".join(values))
"""
    assert launch([*program(text), str(tmp_path)], 3, environment={"MORE": "yes"}) == 0
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [words[1:] for words in told] == [["3", str(rank), "yes"] for rank in range(3)]
    (address,) = {words[0] for words in told}
    host, port = address.split(":")
    assert host == "127.0.0.1" and 1024 <= int(port) < 2**16


def test_a_given_port_is_used(tmp_path):
    text = "open(sys.argv[1] + '/address', 'w').write(os.environ['JAX_COORDINATOR_ADDRESS'])"
    assert launch([*program(text), str(tmp_path)], 1, port=4321) == 0
    assert (tmp_path / "address").read_text() == "127.0.0.1:4321"


def test_the_lines_of_all_but_the_first_bear_their_rank(capfd):
    text = """
print("out", flush=True)
print("error", file=sys.stderr, flush=True)
os.write(1, b"half \\xff\\rend")
"""
    assert launch(program(text), 3) == 0
    out, error = capfd.readouterr()
    assert out.startswith("out\n") and out.endswith("end")
    lines = error.splitlines()
    for rank in (1, 2):
        own = [line.split(" ", 1)[1] for line in lines if line.startswith(f"[{rank}]")]
        assert own == ["out", "error", "half \N{REPLACEMENT CHARACTER}", "end"]
    assert [line for line in lines if not line.startswith("[")] == ["error"]


def test_much_output_stops_nobody(capfd):
    text = "for _ in range(20_000): print('y' * 99)"
    assert launch(program(text), 2) == 0
    out, error = capfd.readouterr()
    assert out.count("y" * 99) == 20_000
    assert error.count("[1] " + "y" * 99 + "\n") == 20_000


def test_nobody_reads_standard_input():
    assert launch(program("sys.exit(len(sys.stdin.read()))"), 2) == 0


def test_the_first_failure_names_the_code(capfd):
    text = "time.sleep([0, 0, 1][rank])\nsys.exit([0, 3, 7][rank])"
    assert launch(program(text), 3) == 3
    line = capfd.readouterr().err.splitlines()[-1]
    assert re.match(r"boostax launch: rank 1 ended with exit code 3 after \d+\.\d s; ", line)
    assert line.endswith("rank 0 ended with exit code 0, rank 2 ended with exit code 7")


def test_a_signal_counts_as_in_a_shell(capfd):
    text = "if rank: os.kill(os.getpid(), signal.SIGKILL)"
    assert launch(program(text), 2) == 137
    assert "rank 1 was ended by SIGKILL (exit code 137) after" in capfd.readouterr().err


def test_the_others_have_time_to_end_by_themselves(capfd):
    text = "if rank == 0: sys.exit(5)\ntime.sleep(0.5)\nsys.exit(6)"
    assert launch(program(text), 2, grace=30.0) == 5
    error = capfd.readouterr().err
    assert "rank 1 ended with exit code 6" in error and "sent" not in error


class Clock:
    """In the place of ``time``: only what the launcher sleeps counts, however long it takes."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        time.sleep(seconds)

    def notes(self, monkeypatch, module):
        """When the launcher first did what to which rank, and first saw it ended."""
        done = {}

        def noting(name, note, original):
            def call(rank):
                result = original(rank)
                if result or name != "look":
                    done.setdefault((note, rank.rank), self.now)
                return result

            return call

        for name, note in (("look", "ended"), ("terminate", "terminate"), ("kill", "kill")):
            original = getattr(module._Rank, name)
            monkeypatch.setattr(module._Rank, name, noting(name, note, original))
        return done


def test_who_does_not_end_gets_sigterm_and_who_ignores_it_sigkill(tmp_path, capfd, monkeypatch):
    module = sys.modules[launch.__module__]
    monkeypatch.setattr(module, "_LAST_WORDS", 1.0)
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    done = clock.notes(monkeypatch, module)
    text = NOTE_PID + (
        "while rank == 0 and len(os.listdir(sys.argv[1])) < 3: time.sleep(0.01)\n"
        "if rank == 0: sys.exit(9)\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(600)"
    )
    assert launch([*program(text), str(tmp_path)], 3, grace=0.2) == 9
    # By the launcher's own clock, to a look or two: the grace, then the time for last words.
    few = 2.5 * module._POLL
    assert done["terminate", 1] == done["terminate", 2]
    assert done["terminate", 1] - done["ended", 0] == pytest.approx(0.2, abs=few)
    assert done["kill", 1] - done["terminate", 1] == pytest.approx(1.0, abs=few)
    error = capfd.readouterr().err
    sent = "rank 1 was ended by SIGKILL (exit code 137), having been sent SIGTERM and SIGKILL"
    assert sent in error
    assert "rank 2 was ended by SIGTERM (exit code 143), having been sent SIGTERM" in error
    assert not any(running(pid) for pid in pids(tmp_path, 3))


def test_what_a_process_has_started_ends_with_it(tmp_path):
    text = """
child = os.fork()
while child == 0: time.sleep(600)
open(f"{sys.argv[1]}/{rank}", "w").write(str(child))
"""
    # The children never end and hold the pipe open: a launcher that waited for them would hang.
    found = []
    thread = threading.Thread(
        target=lambda: found.append(launch([*program(text), str(tmp_path)], 2)), daemon=True
    )
    thread.start()
    started = pids(tmp_path, 2)
    try:
        thread.join(PATIENCE)
        assert found == [0] and all_gone(started)
    finally:
        for pid in filter(running, started):
            os.kill(pid, signal.SIGKILL)


def test_a_process_that_cannot_be_started_leaves_no_others(tmp_path, monkeypatch):
    start, begun = subprocess.Popen, []

    def fail_at_third(*args, **options):
        if len(begun) == 2:
            raise OSError("no more processes")
        begun.append(start(*args, **options))
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", fail_at_third)
    with pytest.raises(OSError, match="no more processes"):
        launch(program("time.sleep(600)"), 3)
    assert [process.returncode for process in begun] == [-signal.SIGKILL] * 2


LAUNCHER = """
import sys
from boostax.run.cluster.launch import launch
sys.exit(launch(sys.argv[1:], 2))
"""


class Launcher:
    """A launcher as a process of its own, and what it has started."""

    def __init__(self, folder, before, after):
        root = str(pathlib.Path(boostax.__file__).parents[1])
        command = [*program(before + NOTE_PID + after), str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *command],
            env={**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started = []
        self.started = pids(folder, 2)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        for pid in self.started:
            if running(pid):
                os.kill(pid, signal.SIGKILL)

    def end(self):
        _, error = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, error


STOPPABLE = """
count = 0
def note(*_):
    global count
    count += 1
signal.signal(signal.SIGTERM, note)
"""
STOPPED = """
until = time.monotonic() + 60
while not count and time.monotonic() < until: time.sleep(0.01)
time.sleep(0.5)
sys.exit(0 if count == 1 else 99)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_everybody_once_as_sigterm(tmp_path, number):
    with Launcher(tmp_path, STOPPABLE, STOPPED) as launcher:
        launcher.process.send_signal(number)
        if number == signal.SIGTERM:
            time.sleep(0.2)
            launcher.process.send_signal(number)
        assert launcher.end() == (0, "")
        assert all_gone(launcher.started)


DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def test_a_second_sigint_kills(tmp_path):
    with Launcher(tmp_path, DEAF, "time.sleep(600)") as launcher:
        launcher.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert launcher.process.poll() is None
        launcher.process.send_signal(signal.SIGINT)
        code, error = launcher.end()
        assert code == 137
        assert "rank 0 was ended by SIGKILL" in error and "sent SIGTERM and SIGKILL" in error
        assert all_gone(launcher.started)


def test_a_killed_launcher_takes_all_with_it(tmp_path):
    with Launcher(tmp_path, DEAF, "time.sleep(600)") as launcher:
        launcher.process.kill()
        assert all_gone(launcher.started)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"processes": 0}, "processes must be a positive integer, got 0"),
        ({"grace": -1.0}, "grace must be a number of seconds, got -1.0"),
        ({"port": 70_000}, "port must be below 65536, got 70000"),
        ({"command": []}, "command must be a program that is there, got []"),
        ({"command": ["no-such-program"]}, "must be a program that is there"),
    ],
)
def test_arguments(change, words):
    with pytest.raises(ValueError) as error:
        launch(**{"command": program(""), "processes": 1, **change})
    assert words in str(error.value)
