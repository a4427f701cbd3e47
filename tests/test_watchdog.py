"""A hang ends on every living host, in time, with a message that names who is to blame."""

import io
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import boostax
from boostax.run.cluster.board import Standing, View
from boostax.run.cluster.verdict import conclude, report
from boostax.run.cluster.watchdog import Watchdog

LIMIT = 10.0
PATIENCE = 60.0


class Clock:
    """Time that passes when told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class DictBoard:
    """The lines of all ranks in a dict; ``broken`` raises on every call."""

    def __init__(self, lines, rank, count):
        self.rank, self.count = rank, count
        self.lines, self.broken = lines, False

    def publish(self, text):
        if self.broken:
            raise RuntimeError("DEADLINE_EXCEEDED\nmore")
        self.lines[self.rank] = text

    def read(self):
        return dict(self.lines)


class Run:
    """Watchdogs of a run in one process, on one clock and one board, without their threads."""

    def __init__(self, count=3, first_limit=None):
        self.clock = Clock()
        lines = {}
        self.boards = [DictBoard(lines, rank, count) for rank in range(count)]
        self.dogs = [
            Watchdog(LIMIT, first_limit=first_limit, board=board, clock=self.clock)
            for board in self.boards
        ]
        self.stopped = set()

    def living(self):
        return [dog for rank, dog in enumerate(self.dogs) if rank not in self.stopped]

    def call(self, step, ranks=None):
        for rank in range(len(self.dogs)) if ranks is None else ranks:
            self.dogs[rank].begin(step)
            self.dogs[rank].done(step)

    def until_due(self, most=10 * LIMIT):
        """Let time pass until someone gives up: who, and after how long; None if nobody did."""
        begun = self.clock.now
        while self.clock.now - begun < most:
            self.clock.now += 1.0
            # Twice: so that the first to read has the news of the last to speak.
            for dog in 2 * self.living():
                dog.exchange()
            due = [rank for rank, dog in enumerate(self.dogs) if dog in self.living() and dog.due()]
            if due:
                return due, self.clock.now - begun
        return None


def conclusion(dog):
    """The sentences below the table."""
    lines = dog.message().splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("The loop of")) - 1]


def test_who_has_not_begun_the_call_is_named():
    run = Run()
    run.call(1)
    for rank in (0, 2):
        # The host runs a call ahead of the device.
        run.dogs[rank].begin(2)
        run.dogs[rank].begin(3)
    due, seconds = run.until_due()
    assert due == [0, 1, 2] and seconds == LIMIT
    for dog in run.dogs:
        said = "Rank 1 has not begun call 2: stuck between calls, in its data or on its host."
        assert conclusion(dog) == said
    table = run.dogs[0].message().splitlines()[1:5]
    assert [line.split() for line in table] == [
        "rank begun finished no progress for heard of".split(),
        "0 3 1 10.0 s itself".split(),
        "1 1 1 10.0 s 0.0 s ago".split(),
        "2 3 1 10.0 s 0.0 s ago".split(),
    ]


def test_who_is_out_of_a_call_whose_end_nobody_has_seen_is_named():
    """The loop looks at a call when it has dispatched the next, so ``finished`` says too little."""
    run = Run(2)
    run.call(1)
    for step in (2, 3):
        run.dogs[0].begin(step)
    run.dogs[1].begin(2)
    run.dogs[1].between()
    run.until_due()
    assert conclusion(run.dogs[0]).startswith("Rank 1 has not begun call 3: stuck between calls")


def test_who_is_still_in_a_call_that_others_have_finished_is_named():
    run = Run(2)
    run.call(1)
    run.dogs[0].begin(2)
    run.dogs[0].done(2)
    run.dogs[0].begin(3)
    run.dogs[1].begin(2)
    run.until_due()
    said = "Rank 1 is still in call 2, which others have finished."
    assert conclusion(run.dogs[0]) == said


def test_ranks_that_are_all_between_calls_are_all_named():
    run = Run(2)
    run.call(1)
    run.until_due()
    said = "No rank is in a call: stuck between calls, in their data or on their host."
    assert conclusion(run.dogs[0]) == said


def test_a_silent_rank_is_named():
    run = Run()
    run.call(1)
    run.until_due(most=3.0)
    run.stopped = {0}
    for dog in run.dogs:
        dog.begin(2)
    due, seconds = run.until_due()
    assert due == [1, 2] and seconds == LIMIT
    for dog in run.living():
        said = "Rank 0 was last heard of 10.0 s ago, after call 1: stopped, frozen machine or cut "
        assert conclusion(dog) == said + "network."


def test_a_rank_that_never_came_is_named():
    run = Run(first_limit=LIMIT)
    run.stopped = {1}
    for rank in (0, 2):
        run.dogs[rank].begin(1)
    run.until_due()
    assert conclusion(run.dogs[0]) == "Rank 1 was never heard of: it has not come to the loop."


def test_a_collective_that_hangs_blames_nobody():
    run = Run()
    run.call(1)
    for dog in run.dogs:
        dog.begin(2)
    run.until_due()
    said = "All have begun call 2 and none has seen it finish: a collective hangs on the network "
    assert conclusion(run.dogs[2]) == said + "or a device."


def test_a_silent_service_is_named_whatever_was_heard():
    run = Run(2)
    run.call(1)
    run.until_due(most=3.0)
    run.stopped = {0}
    run.boards[1].broken = True
    run.dogs[1].begin(2)
    due, seconds = run.until_due()
    assert due == [1] and seconds == LIMIT
    said = "Rank 0, which keeps the coordination service, has not answered for 10.0 s"
    assert conclusion(run.dogs[1]).startswith(said + " (RuntimeError: DEADLINE_EXCEEDED): stopped")


def test_a_service_that_has_answered_again_is_not_blamed():
    run = Run(2)
    run.call(1)
    run.boards[1].broken = True
    assert run.until_due(most=8.0) is None
    run.boards[1].broken = False
    run.dogs[1].begin(2)
    run.until_due()
    assert conclusion(run.dogs[1]).startswith("Rank 0 has not begun call 2")


def test_progress_holds_the_limit_off():
    run = Run(2)
    for step in range(1, 8):
        run.call(step)
        assert run.until_due(most=LIMIT - 1) is None
    assert run.until_due() is not None


def test_the_first_call_and_what_is_allowed_have_their_own_limits():
    run = Run(1, first_limit=40.0)
    (dog,) = run.dogs
    dog.begin(1)
    assert run.until_due(most=39.0) is None
    dog.done(1)
    with dog.allow(25.0, "saving"):
        with dog.allow(5.0, "waiting"):
            assert run.until_due(most=24.0) is None
        assert run.until_due(most=24.0) is None
        assert run.until_due() == ([0], 1.0)
        assert dog.message().startswith(
            "boostax watchdog: rank 0: no progress for 25.0 s in saving; the limit is 25 s."
        )
        assert conclusion(dog) == "Rank 0 is in saving."
    assert run.until_due() == ([0], LIMIT)
    with dog.allow():
        assert run.until_due() == ([0], 40.0)
    with dog.allow(float("inf")):
        assert run.until_due(most=1e4) is None


def test_others_wait_for_a_rank_that_is_allowed_to_be_long():
    run = Run(2)
    run.call(1)
    run.dogs[1].begin(2)
    with run.dogs[0].allow(30.0, "saving"):
        due, seconds = run.until_due()
        assert 0 in due and seconds == 30.0
        assert conclusion(run.dogs[1]) == "Rank 0 has not begun call 2: it is in saving."


def test_a_rank_that_is_silent_in_a_long_task_is_not_waited_for():
    run = Run(2)
    run.call(1)
    run.dogs[1].begin(2)
    with run.dogs[0].allow(1000.0, "saving"):
        assert run.until_due(most=2.0) is None
        run.stopped = {0}
        due, seconds = run.until_due()
    assert due == [1] and seconds == LIMIT
    assert conclusion(run.dogs[1]).startswith("Rank 0 was last heard of 10.0 s ago, in saving:")


def test_ranks_in_a_barrier_wait_for_the_one_between_calls():
    run = Run(3)
    run.call(4)
    with run.dogs[0].allow(20.0, "saving"), run.dogs[2].allow(20.0, "saving"):
        run.until_due()
        said = "Ranks 0 and 2 are in saving. Rank 1 is not: stuck between calls, in the data or on "
        assert conclusion(run.dogs[0]) == said + "the host."


def test_who_has_left_is_named():
    run = Run(2)
    run.call(1)
    run.call(2)
    with pytest.raises(KeyError), run.dogs[1]:
        run.stopped = {1}
        raise KeyError("rows")
    run.dogs[0].begin(3)
    assert run.until_due() == ([0], LIMIT)
    assert conclusion(run.dogs[0]) == "Rank 1 has left the loop by KeyError, after call 2."


def test_who_has_left_in_peace_is_not_silent():
    run = Run(2)
    run.call(1)
    with run.dogs[1]:
        run.stopped = {1}
    run.dogs[0].begin(2)
    run.until_due()
    assert conclusion(run.dogs[0]) == "Rank 1 has left the loop and does not make call 2."


def test_one_that_gives_up_takes_the_others_along():
    run = Run(2)
    run.call(1)
    run.boards[0].lines[1] = json.dumps(Standing(beat=10**6, begun=1, finished=1, over=True))
    run.dogs[0].begin(2)
    run.dogs[0].exchange()
    assert run.dogs[0].due()
    assert run.dogs[0].message().splitlines()[0].endswith("Rank 1 gave up.")


def test_a_time_in_which_the_process_was_stopped_does_not_count():
    run = Run(2)
    run.call(1)
    assert run.until_due(most=2.0) is None
    run.clock.now += 3600.0
    assert not any(dog.due() for dog in run.dogs)
    due, seconds = run.until_due()
    assert due == [0, 1] and LIMIT / 2 <= seconds <= LIMIT


def test_alone_and_before_the_first_call():
    run = Run(1, first_limit=LIMIT)
    run.until_due()
    said = "Rank 0 is in no call: stuck between calls, in its data or on its host."
    assert conclusion(run.dogs[0]) == said
    run.dogs[0].begin(5)
    run.until_due()
    assert conclusion(run.dogs[0]).startswith("Call 5 has begun and not finished: the device hangs")


def test_a_long_table_begins_with_those_behind():
    views = [View(rank, Standing(begun=9, finished=8, calling=True), 0.1) for rank in range(100)]
    views[70] = View(70, Standing(begun=8, finished=8), 0.1)
    lines = report(views, 0, LIMIT, LIMIT).splitlines()
    assert lines[2].split()[0] == "70" and lines[-2] == "  and 68 more"
    assert lines[-1].startswith("Rank 70 has not begun call 9")
    behind = [view._replace(standing=Standing(begun=8, finished=8)) for view in views[:20]]
    words = conclude([*behind, *views[20:]], LIMIT)
    assert words.startswith("Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 13 more have not begun call 9")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"limit": 0.0}, "limit must be a positive number, got 0.0"),
        ({"first_limit": 1.0}, "first_limit must be at least the limit, 10, got 1.0"),
        ({"exit_code": 0}, "exit_code must be a positive integer, got 0"),
        ({"exit_code": 256}, "exit_code must be up to 255, got 256"),
    ],
)
def test_arguments(change, words):
    with pytest.raises(ValueError) as error:
        Watchdog(**{"limit": LIMIT, **change})
    assert words in str(error.value)


def test_the_threads_end_with_the_loop():
    before = threading.active_count()
    lines, codes, stream = {}, [], io.StringIO()
    with Watchdog(30.0, board=DictBoard(lines, 0, 2), exit=codes.append, stream=stream) as dog:
        dog.begin(1)
        dog.done(1)
    assert threading.active_count() == before
    last = Standing(*json.loads(lines[0]))
    assert (last.begun, last.finished, last.left, last.over) == (1, 1, True, False)
    assert codes == [] and stream.getvalue() == ""


def test_a_service_that_blocks_does_not_hold_the_limit_or_the_end():
    released, codes = threading.Event(), []

    class Blocking(DictBoard):
        def publish(self, text):
            released.wait(PATIENCE)

    def exit(code):
        codes.append(code)
        released.set()

    board, stream = Blocking({}, 1, 2), io.StringIO()
    with Watchdog(0.5, first_limit=0.5, board=board, exit=exit, stream=stream) as dog:
        dog.begin(1)
        assert released.wait(PATIENCE)
    assert codes == [75]
    assert "Rank 0, which keeps the coordination service, has not answered" in stream.getvalue()


def test_an_error_meanwhile_waits_for_the_exit():
    """A peer's exit breaks the collective here: the code must be the watchdog's."""
    codes = []

    def exit(code):
        time.sleep(0.5)
        codes.append(code)

    with pytest.raises(OSError):
        with Watchdog(0.2, first_limit=0.2, exit=exit, stream=io.StringIO()) as dog:
            while not dog._standing.over:
                time.sleep(0.01)
            raise OSError("connection reset")
    assert codes == [75]


HANGING = """
import sys, time
from boostax.run.cluster.watchdog import Watchdog

def load_the_next_batch():
    time.sleep(600)

with Watchdog(1.0, first_limit=1.0) as watchdog:
    watchdog.begin(1)
    watchdog.done(1)
    print("row 1")
    load_the_next_batch()
"""


def environment():
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    root = str(pathlib.Path(boostax.__file__).parents[1])
    return {**kept, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_alone_that_hangs_ends_with_a_message():
    process = start(HANGING)
    try:
        out, error = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 75, error
    assert out == "row 1\n"
    assert "rank 0: no progress for 1." in error and "after call 1; the limit is 1 s." in error
    assert "Rank 0 is in no call: stuck between calls, in its data or on its host." in error
    assert "in load_the_next_batch" in error


WORKER = """
import os, sys, threading, time
import jax, jax.numpy as jnp
from boostax.run.cluster.board import service_board
from boostax.run.cluster.watchdog import Watchdog

address, rank, stuck = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, 2, rank)
mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
total = jax.jit(
    jax.shard_map(
        lambda x: jax.lax.psum(x, "data"),
        mesh=mesh,
        in_specs=jax.P("data"),
        out_specs=jax.P(),
    )
)
rows = jax.make_array_from_callback(
    (2,), jax.NamedSharding(mesh, jax.P("data")), lambda index: jnp.ones(2)[index]
)

def load(step):
    while rank == stuck and step == 6:
        pass
    time.sleep(0.02)

def leave(code):
    print("ended by the thread", threading.current_thread().name, file=sys.stderr, flush=True)
    os._exit(code)

with Watchdog(5.0, board=service_board(), exit=leave) as watchdog:
    last = None
    for step in range(1, 10_000):
        load(step)
        watchdog.begin(step)
        result = total(rows)
        if last is not None:
            jax.block_until_ready(last)
            watchdog.done(step - 1)
            print("finished", step - 1, flush=True)
        last = result
"""


class Pair:
    """Two processes that sum over the network for as long as they live."""

    def __init__(self, stuck=-1):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.processes = [start(WORKER, address, str(rank), str(stuck)) for rank in range(2)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()

    def reach(self, step):
        """Until both have finished a call."""
        for process in self.processes:
            for line in process.stdout:
                if line == f"finished {step}\n":
                    break
            else:
                raise AssertionError(process.stderr.read())

    def ends(self, rank):
        """What it said: that the limit of a call ended it, and not the last resort after that."""
        _, error = self.processes[rank].communicate(timeout=PATIENCE)
        assert self.processes[rank].returncode == 75, error
        assert "; the limit is 5 s." in error and "ended by the thread watchdog\n" in error, error
        return error

    def stop(self, rank):
        """Let them run, then freeze one: what the other says, which has waited for the limit."""
        self.reach(40)
        self.processes[rank].send_signal(signal.SIGSTOP)
        error = self.ends(1 - rank)
        assert float(re.search(r"no progress for (\S+) s", error)[1]) >= 5.0, error
        assert self.processes[rank].poll() is None
        return error


def test_a_peer_that_is_stuck_or_stopped_ends_the_others():
    # At the same time: each spends its limit in waiting.
    with Pair(stuck=1) as stuck, Pair() as stopped:
        said = stopped.stop(1)
        pattern = r"Rank 1 was last heard of \d+\.\d s ago, (in|after) call \d+: stopped, frozen"
        assert re.search(pattern, said)
        found = [stuck.ends(rank) for rank in range(2)]
    for error in found:
        assert "Rank 1 has not begun call 6: stuck between calls, in its data" in error
    assert "in load" in found[1] and "in load" not in found[0]


@pytest.mark.long
def test_a_stopped_coordinator_ends_the_other():
    with Pair() as pair:
        said = pair.stop(0)
    assert "Rank 0, which keeps the coordination service, has not answered for" in said
