"""boostax beside the boosts of other frameworks: the same network, batches and threads.

A technique is judged by what it adds to its own framework's plain step, timed in the same rounds,
and by counts: what it keeps and what it sends. Time is that of the processor: on one core it
is what a clock shows where nothing else runs. ``peers/setup.py`` makes the peers' environments.
"""

import pathlib
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

from harness import Bar, arguments, caveats, ratio, report

sys.path.insert(0, str(pathlib.Path(__file__).parent / "peers"))

import lenet
import peer_workers as workers
from peer_workers import Failed, Worker

OURS = "boostax"
PLAIN = "plain"
ALONE: dict[str, Callable[[pathlib.Path], Worker]] = {
    OURS: workers.boostax,
    "MindSpore": workers.mindspore,
    "PyTorch": workers.pytorch,
}
REPLICAS: dict[str, Callable[[pathlib.Path], Worker]] = {
    OURS: workers.boostax_replicas,
    "PyTorch": workers.pytorch_replicas,
    "Horovod": workers.horovod,
}
# What must hold of the time of a call, ours to a peer's, each in its own plain steps.
BARS = (
    ("loss scale", "MindSpore"),
    ("loss scale", "PyTorch"),
    ("accumulation", "MindSpore"),
)
ALIKE = {"first": 1e-4, "after": 1e-3}
CLOSE = 1.05


class Figures(NamedTuple):
    """Of one framework, by the names of its forms.

    Attributes:
      about: framework and version.
      first: loss of the first call.
      after: loss of call ``AFTER``.
      times: of the processor for ``CALLS`` calls, a list by rounds, in seconds.
      clock: the same on the clock.
      state: bytes kept between calls.
      wire: bytes that a process sends per call.
      failed: why a form has no figures.
    """

    about: str
    first: dict[str, float]
    after: dict[str, float]
    times: dict[str, list[float]]
    clock: dict[str, list[float]]
    state: dict[str, int | None]
    wire: dict[str, float | None]
    failed: dict[str, str]

    def ratio(self, form: str) -> float | None:
        """Time of a call, in that of the plain step."""
        return ratio(self.times, form, PLAIN) if form in self.times else None


def measure(worker: Worker, rounds: int) -> Figures:
    """Losses and counts first, which also compile everything; then rounds in random order."""
    found = Figures(worker.about, {}, {}, {}, {}, {}, {}, {})
    for form in worker.forms:
        try:
            found.first[form] = worker.ask(form, calls=1, fresh=True)["loss"]
            counted = worker.ask(form, count=True)
            found.after[form] = worker.ask(form, calls=lenet.AFTER - 1)["loss"]
        except Failed as failed:
            if form == PLAIN:
                # There is nothing to judge the others by.
                raise
            found.failed[form] = str(failed)
            continue
        found.state[form], found.wire[form] = counted["state"], counted["wire"]
        found.times[form], found.clock[form] = [], []
    order = random.Random(0)
    for index in range(rounds + 1):
        for form in order.sample(list(found.times), len(found.times)):
            told = worker.ask(form, calls=lenet.CALLS)
            if index:
                found.times[form].append(told["cpu"])
                found.clock[form].append(told["seconds"])
    return found


def all_figures(
    made: dict[str, Callable[[pathlib.Path], Worker]], work: pathlib.Path, rounds: int
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Of every framework that can be had, and why the others cannot."""
    found: dict[str, Figures] = {}
    missing: dict[str, str] = {}
    for name, start in made.items():
        try:
            with start(work) as worker:
                found[name] = measure(worker, rounds)
        except Failed as failed:
            missing[name] = str(failed)
        print(name, "measured" if name in found else missing[name], flush=True)
    return found, missing


def table(
    found: dict[str, Figures], what: Callable[[Figures, str], Any], heading: str
) -> list[dict[str, Any]]:
    """A row for each technique, a column for each framework."""
    names = list(dict.fromkeys(form for each in found.values() for form in each.times))
    return [
        {heading: form} | {name: what(each, form) for name, each in found.items()} for form in names
    ]


def same_work(found: dict[str, Figures], where: str) -> tuple[list[dict[str, Any]], list[Bar]]:
    """That the plain steps of all frameworks lose alike."""
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    ours = found[OURS]
    for name, each in found.items():
        rows.append(
            {
                "framework": name,
                "first loss": f"{each.first[PLAIN]:.6f}",
                f"loss of call {lenet.AFTER}": f"{each.after[PLAIN]:.6f}",
                "plain step, ms": 1e3 * statistics.median(each.times[PLAIN]) / lenet.CALLS,
            }
        )
        if name != OURS:
            for when, limit in ALIKE.items():
                gap = abs(getattr(each, when)[PLAIN] - getattr(ours, when)[PLAIN])
                call = {"first": 1, "after": lenet.AFTER}[when]
                bars.append(Bar(f"{where}, plain: loss of call {call}, off {name}'s", gap, limit))
    return rows, bars


def losses_to(
    found: dict[str, Figures], what: Callable[[Figures, str], Any], figure: str
) -> list[dict[str, Any]]:
    """Where a peer has the smaller figure, by more than its last digit in a table."""
    rows: list[dict[str, Any]] = []
    for name, each in found.items():
        for form in each.times if name != OURS else ():
            ours = what(found[OURS], form) if form in found[OURS].times else None
            theirs = what(each, form)
            if ours is not None and theirs is not None and ours > theirs + 5e-4:
                row = {"technique": form, "figure": figure, "peer": name}
                rows.append(row | {"ours": float(ours), "theirs": float(theirs)})
    return rows


def availability(figures: dict[str, Figures], missing: dict[str, str]) -> list[dict[str, Any]]:
    """Which peers could be had, and which of their forms failed."""
    rows = [{"peer": name, "had": each.about} for name, each in figures.items()]
    rows += [{"peer": name, "had": f"no: {why}"} for name, why in missing.items()]
    for name, each in figures.items():
        rows += [{"peer": f"{name}, {f}", "had": f"no: {why}"} for f, why in each.failed.items()]
    return rows


def main() -> None:
    rounds = arguments(__doc__, rounds=15).rounds
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder) / "work.npz"
        workers.write(work)
        alone, missing = all_figures(ALONE, work, rounds)
        replicas, absent = all_figures(REPLICAS, work, rounds)
    params = 4 * lenet.flat(lenet.weights()).size

    def time_of(each: Figures, form: str) -> float | None:
        return each.ratio(form)

    def clock_of(each: Figures, form: str) -> float | None:
        return ratio(each.clock, form, PLAIN) if form in each.clock else None

    def loss_of(each: Figures, form: str) -> float | None:
        return each.after.get(form)

    def state_of(each: Figures, form: str) -> float | None:
        kept = each.state.get(form)
        return None if kept is None else kept / params

    def wire_of(each: Figures, form: str) -> float | None:
        sent = each.wire.get(form)
        return None if sent is None else sent / 1e3

    same, bars = same_work(alone, "one process")
    same_replicas, more = same_work(replicas, "two processes")
    bars += more
    for form, peer in BARS:
        if peer in alone and form in alone[peer].times:
            figure = (alone[OURS].ratio(form) or 0.0) / (alone[peer].ratio(form) or 1.0)
            bars.append(Bar(f"{form}: our ratio / {peer}'s ratio", figure, CLOSE))
    lost = [
        *losses_to(alone, time_of, "time / plain step"),
        *losses_to(alone, state_of, "kept / params"),
        *losses_to(replicas, time_of, "time / plain step, two processes"),
        *losses_to(replicas, wire_of, "sent per call, kB"),
        *losses_to(alone, loss_of, f"loss of call {lenet.AFTER}"),
        *losses_to(replicas, loss_of, f"loss of call {lenet.AFTER}, two processes"),
    ]
    name = "technique"
    sections = [
        ("Peers, one process", availability(alone, missing)),
        ("Peers, two processes", availability(replicas, absent)),
        ("The same work, one process", same),
        ("The same work, two processes: each trains alone", same_replicas),
        ("Time of a call / own framework's plain step", table(alone, time_of, name)),
        (f"Loss of call {lenet.AFTER}", table(alone, loss_of, name)),
        ("Kept between calls / params", table(alone, state_of, name)),
        ("Two processes: time / a plain step that sends nothing", table(replicas, time_of, name)),
        ("Two processes: the same on the clock", table(replicas, clock_of, name)),
        (f"Two processes: loss of call {lenet.AFTER}", table(replicas, loss_of, name)),
        ("Two processes: sent per call and process, kB", table(replicas, wire_of, name)),
        ("Where boostax loses", lost or [{"technique": "nowhere"}]),
        ("To keep in mind", caveats(CAVEATS)),
    ]
    report("peers_frameworks", "boostax beside other frameworks' boosts", sections, bars)


CAVEATS = (
    f"LeNet-5 of 61,706 params on digits of 32 x 32, batches of {lenet.BATCH} in f32, SGD "
    f"{lenet.RATE} with momentum {lenet.MOMENTUM}, windows of {lenet.WINDOW}; batches lie in the "
    "framework's memory before a clock starts.",
    "Each process has one core and one thread; of two processes each has a core of its own. Time "
    "is that of the processor, into which other work on the machine does not enter: on one core, "
    "what a clock shows where nothing else runs. Of two processes it is that of the one that "
    "waits less, as some wait by polling.",
    f"Figures are medians over rounds of ratios within a round, of {lenet.CALLS} calls each.",
    "Plain is what one writes without a boost: a jitted step with Optax, MindSpore's "
    "TrainOneStepCell in graph mode, an eager loop in PyTorch. A slow convolution makes all that "
    "is added to it look cheap: ratios are to be read with the plain step in mind.",
    "Freezing: layers in five groups. 4 of 5 trains the last alone; the schedule is MindSpore's "
    f"type 1 with {lenet.FROZEN_FRACTION:g} of the steps frozen in part, the same depths for all. "
    "MindSpore keeps moments of their own for each depth, so its loss differs.",
    f"DimReduce: {lenet.DIRECTIONS} directions, of {lenet.SNAPSHOTS} snapshots; the same basis and "
    "the same start for both. MindSpore's rule on both sides; our own rule besides.",
    "MindSpore's test for overflow asks an Ascend operator; here its own branch by IsFinite is on.",
    f"The mean goes in buckets of {lenet.BUCKET >> 20} MiB, PyTorch's default: all params in one. "
    "Horovod fuses them too.",
    f"PowerSGD has rank {lenet.RANK} on both sides and begins at once (PyTorch's default waits "
    "1,000 calls). PyTorch sends both factors in every call, we send them in turn.",
    "Sent: ours by the formula of a ring from the traced program, without the loss (4 bytes); "
    "PyTorch's the tensors that its hooks hand to all-reduce. Horovod's MPI is not counted.",
    "AdaSum: Horovod's optimizer combines what local optimizers did, as adasum_delta does.",
)


if __name__ == "__main__":
    main()
