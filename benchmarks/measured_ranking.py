"""What ``auto("measure", ...)`` ranks after few calls, beside what whole runs make of the same.

Each candidate of each task is measured over 20 and 300 calls of the baseline, and over a whole run.
The truth is the mean over seeds of the held-out loss that whole runs end with in equal time. Two
candidates are told apart by it if their difference, seed by seed, is more than two standard errors.
The rates are constant, and the baseline's best of a grid by factors of two on a whole run. The
rival that costs nothing is to measure nothing and keep the baseline.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_replicas import Split, data, init, loss, order
from harness import Bar, in_processes, kept, of_rows, on_cpu, report, resumable, unfinished, work_of
from scipy.stats import kendalltau
from text_runs import SMALL

import boostax

PyTree = Any
FEW = (20, 300)
BATCH, DEVICES = 32, 4
BASELINE = "baseline"
# Nats that nobody would give for memory.
HARM = 0.05


class Given(NamedTuple):
    """What ``measure`` is given of a seed."""

    loss_fn: Callable[[PyTree, PyTree], jax.Array]
    params: PyTree
    batches: Callable[[int], PyTree]
    held_out: Sequence[PyTree]


class Task(NamedTuple):
    """A model, its optimizer and how long a whole run is.

    Attributes:
      given: of a seed.
      optimizer: of the baseline, at its best rate.
      whole: calls of a whole run.
      seeds: how many.
      replicas: devices; 1 for a step without a mesh.
    """

    given: Callable[[int], Given]
    optimizer: Callable[[], optax.GradientTransformation]
    whole: int
    seeds: int
    replicas: int


def digits(seed: int, replicas: int) -> Given:
    """The perceptron; every epoch in an order of its own, judged on all that is not trained on."""
    training, *rest = data()
    rows = order(seed, replicas, 200, BATCH // replicas).reshape(-1, BATCH)

    def batch(index: int) -> Split:
        chosen = rows[index % len(rows)]
        return Split(training.images[chosen], training.labels[chosen])

    images, labels = (
        jnp.concatenate([getattr(part, name) for part in rest]) for name in Split._fields
    )
    whole = len(labels) // BATCH
    held_out = [Split(images[i::whole][:BATCH], labels[i::whole][:BATCH]) for i in range(whole)]
    return Given(loss, init(jax.random.key(seed)), batch, held_out)


def characters(seed: int) -> Given:
    """The small transformer on text."""
    workload = SMALL.workload(seed)
    held_out = [workload.batch(10**6 + index) for index in range(32)]
    return Given(SMALL.loss, SMALL.init(seed), workload.batch, held_out)


TASKS = {
    "digits, SGD": Task(
        functools.partial(digits, replicas=1), lambda: optax.sgd(2.0**-4, 0.9), 1000, 5, 1
    ),
    "digits, 4 replicas, AdamW": Task(
        functools.partial(digits, replicas=DEVICES), lambda: optax.adamw(2.0**-7), 1000, 5, DEVICES
    ),
    "text, AdamW": Task(characters, lambda: optax.adamw(2.0**-8), 1000, 3, 1),
}


def measured(name: str, runs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Rows of what is measured in some seeds and calls, in the order of the ranking."""
    task, found = TASKS[name], []
    for calls, seed in runs:
        given = task.given(seed)
        mesh = jax.make_mesh((task.replicas,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        of_step = {} if task.replicas == 1 else {"mesh": mesh, "axis_name": "data"}
        begun = time.monotonic()
        ranking = boostax.auto(
            "measure",
            given.loss_fn,
            task.optimizer(),
            given.params,
            given.batches,
            held_out=given.held_out,
            steps=calls,
            **of_step,
        )
        seconds = time.monotonic() - begun
        rows = [
            {
                "name": row.name,
                "verdict": row.verdict,
                "loss": row.loss,
                "time": row.time_ratio,
                "calls": row.steps,
            }
            for row in ranking.rows
            # What goes together is another choice in each measurement.
            if row.verdict != "refused" and " + " not in row.name
        ]
        found.append({"task": name, "calls": calls, "seed": seed, "s": seconds, "rows": rows})
        print(f"{name}, {calls} calls, seed {seed}: {seconds:.0f} s", flush=True)
    return found


class Truth(NamedTuple):
    """What whole runs end with.

    Attributes:
      losses: of a candidate, held-out by seed.
    """

    losses: Mapping[str, np.ndarray[Any, Any]]

    def above(self, name: str, other: str = BASELINE) -> tuple[float, float]:
        """How much higher a loss is than another one's, and the standard error."""
        with np.errstate(invalid="ignore"):
            found = self.losses[name] - self.losses[other]
        error = float(found.std(ddof=1) / math.sqrt(len(found)))
        return float(found.mean()), error

    def higher(self, name: str, other: str = BASELINE) -> bool:
        """Whether it is, by more than two standard errors."""
        difference, error = self.above(name, other)
        return difference > 2 * error or bool(np.isinf(self.losses[name]).any())

    @property
    def best(self) -> float:
        """The lowest mean loss."""
        return min(float(of.mean()) for of in self.losses.values())


def truth_of(whole: Sequence[Mapping[str, Any]]) -> Truth:
    """Of the measurements of whole runs, one for each seed."""
    by_seed = [{row["name"]: row["loss"] for row in found["rows"]} for found in whole]
    finite = lambda loss: loss if math.isfinite(loss) else math.inf  # noqa: E731
    return Truth({name: np.array([finite(of[name]) for of in by_seed]) for name in by_seed[0]})


def ranking(name: str, calls: int, found: Sequence[Mapping[str, Any]], truth: Truth) -> Any:
    """How some measurements of a task rank, beside the truth."""
    apart = [pair for pair in itertools.permutations(truth.losses, 2) if truth.higher(*pair)]
    right, taus, picked, praised, worse, blamed, missed = [], [], [], 0, 0, 0, 0
    for each in found:
        place = {row["name"]: index for index, row in enumerate(each["rows"])}
        right += [place[above] > place[below] for above, below in apart]
        names = list(place)
        means = [float(truth.losses[one].mean()) for one in names]
        tau: Any = kendalltau([place[one] for one in names], means)
        taus.append(float(tau.statistic))
        picked.append(float(truth.losses[names[0]].mean()) - truth.best)
        verdicts = {row["name"]: row["verdict"] for row in each["rows"]}
        good = [one for one, verdict in verdicts.items() if verdict == "recommended"]
        bad = [one for one, verdict in verdicts.items() if verdict == "not recommended"]
        praised, worse = praised + len(good), worse + sum(map(truth.higher, good))
        blamed += len(bad)
        missed += sum(truth.higher(BASELINE, one) for one in bad)
    spread = float(np.std(taus, ddof=1) / math.sqrt(len(taus)))
    return {
        "measurement": f"{name}, {calls:,} calls",
        "seconds": float(np.median([each["s"] for each in found])),
        "pairs told apart": len(apart),
        "ranked so": f"{np.mean(right):.2f}" if apart else "-",
        "Kendall's tau": float(np.mean(taus)),
        "its s.e.": spread,
        "recommended": praised,
        "of these worse": worse,
        "not recommended": blamed,
        "of these better": missed,
        "nats above the best: the first": float(np.mean(picked)),
        "the baseline": float(truth.losses[BASELINE].mean()) - truth.best,
    }


def ends(truth: Truth, by_calls: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Of each candidate what whole runs end with, and in how many seeds it is recommended."""
    rows: list[dict[str, Any]] = []
    last = max(by_calls)
    for name in sorted(truth.losses, key=lambda one: float(truth.losses[one].mean())):
        above, error = truth.above(name)
        of = lambda calls, one=name: [  # noqa: E731
            row for found in by_calls[calls] for row in found["rows"] if row["name"] == one
        ]
        row: dict[str, Any] = {"candidate": name, "nats": float(truth.losses[name].mean())}
        row |= {"above the baseline": above, "its s.e.": error}
        row["time"] = float(np.median([each["time"] for each in of(last)]))
        for calls in by_calls:
            verdicts = [each["verdict"] for each in of(calls)]
            yes, no = verdicts.count("recommended"), verdicts.count("not recommended")
            row[f"yes/no at {calls}"] = "" if name == BASELINE else f"{yes}/{no} of {len(verdicts)}"
        rows.append(row)
    return rows


def main() -> None:
    options = resumable(__doc__, "tasks, by semicolon")
    path = work_of(options, "measured_ranking") / "rows.jsonl"
    names = options.only.split(";") if options.only else list(TASKS)
    cells = {
        (name,): itertools.product((*FEW, TASKS[name].whole), range(TASKS[name].seeds))
        for name in names
    }
    jobs = unfinished(path, ("task", "calls", "seed"), cells)
    # Times are measured: one after another.
    in_processes(measured, jobs, path, 1, functools.partial(on_cpu, DEVICES))
    found = kept(path, "task", "calls", "seed")
    ranks: list[dict[str, Any]] = []
    harms: dict[str, int] = {}
    sections: list[tuple[str, list[dict[str, Any]]]] = []
    for name in names:
        task = TASKS[name]
        by_calls = {
            calls: [found[name, calls, seed] for seed in range(task.seeds)]
            for calls in (*FEW, task.whole)
        }
        truth = truth_of(by_calls[task.whole])
        harms[name] = sum(
            row["verdict"] == "recommended" and truth.above(row["name"])[0] >= HARM
            for each in itertools.chain(*by_calls.values())
            for row in each["rows"]
        )
        ranks += [ranking(name, calls, by_calls[calls], truth) for calls in by_calls]
        title = f"{name}: whole runs of {task.whole:,} calls, {task.seeds} seeds"
        sections.append((title, ends(truth, by_calls)))
    sections.insert(0, ("The ranking beside the truth", ranks))
    if options.only:
        print(*(line for _, rows in sections for line in of_rows(rows)), sep="\n")
        return
    bars = [
        Bar(f"{name}: recommended, and {HARM} nats above the baseline or more", harmful, 0)
        for name, harmful in harms.items()
    ]
    report("measured_ranking", "What few calls rank, beside whole runs", sections, bars)


if __name__ == "__main__":
    main()
