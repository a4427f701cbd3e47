"""Finishes of a training run, of 5 to 300 steps: in a subspace, by decay, and by averages.

Each seed trains a model at a constant rate, and every finish goes on from there with the same
batches. Where a finish has a rate to choose, the best is taken for each seed and each length by the
very loss that the tables show: that favours the ones that decay, which are what must be beaten.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Bar, Form, arguments, paired, ratio, report
from workloads import DigitsConfig, TextConfig, Workload, digits, text

import boostax

PyTree = Any
LENGTHS = (5, 10, 20, 40, 300)
MULTIPLES = (0.5, 1.0, 2.0, 4.0, 8.0)
COMPONENTS, SNAPSHOTS, EMA = 19, 20, 0.98


class RateState(NamedTuple):
    """A rate that falls in a line to zero; in the state, so that one program serves all.

    Attributes:
      steps: so far.
      peak: the rate of the first.
      length: steps to zero; infinite for a constant rate.
    """

    steps: jax.Array
    peak: jax.Array
    length: jax.Array


def falling_rate(peak: float) -> optax.GradientTransformation:
    """Multiply by minus the rate."""

    def init(params: PyTree) -> RateState:
        del params
        return RateState(jnp.float32(0), jnp.float32(peak), jnp.float32(jnp.inf))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        del params
        rate = state.peak * (1 - state.steps / state.length)
        return jax.tree.map(lambda u: -rate * u, updates), state._replace(steps=state.steps + 1)

    return optax.GradientTransformation(init, update)


def at_rate(state: PyTree, peak: float, length: float) -> PyTree:
    """The state with a rate that begins here."""
    is_rate = lambda x: isinstance(x, RateState)  # noqa: E731
    fresh = lambda: RateState(*map(jnp.float32, (0, peak, length)))  # noqa: E731
    return jax.tree.map(lambda x: fresh() if is_rate(x) else x, state, is_leaf=is_rate)


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, and how.

    Attributes:
      name: in the tables.
      workload: from a seed.
      optimizer: without the rate.
      rate: of the first part, constant.
      steps: of the first part.
      every: steps from one snapshot to the next; the last ones are kept.
      together: batches that a step of a finish takes as one.
      judged: batches over which the train loss is taken.
    """

    name: str
    workload: Callable[[int], Workload]
    optimizer: Callable[[], optax.GradientTransformation]
    rate: float
    steps: int
    every: int
    together: int
    judged: int

    def base(self) -> optax.GradientTransformation:
        """The optimizer of the user."""
        return optax.chain(self.optimizer(), falling_rate(self.rate))


def wrong_labels(workload: Workload, share: float) -> Workload:
    """The same with a share of the training labels replaced, always the same ones."""

    def batch(index: int) -> PyTree:
        given = workload.batch(index)
        # By the image, so that an example is wrong in every epoch alike.
        marks = np.abs(given["inputs"].reshape(len(given["targets"]), -1) @ _MARK) * 1e4 % 1
        other = np.int32(marks / share * 10 % 10)
        return {**given, "targets": np.where(marks < share, other, given["targets"])}

    return dataclasses.replace(workload, batch=batch)


_MARK = np.random.default_rng(7).normal(size=64).astype(np.float32)
DIGITS = DigitsConfig(model="mlp", width=64, batch_size=64)
TEXT = TextConfig(width=32, depth=2, heads=2, sequence_length=32, batch_size=32)


def of_text(seed: int) -> Workload:
    return text(dataclasses.replace(TEXT, seed=seed))


def of_digits(seed: int) -> Workload:
    return digits(dataclasses.replace(DIGITS, seed=seed))


def of_wrong_labels(seed: int) -> Workload:
    return wrong_labels(of_digits(seed), 0.3)


MOMENTUM = functools.partial(optax.trace, 0.9)
TASKS = [
    Task("text", of_text, optax.scale_by_adam, 3e-3, 1200, 15, 4, 64),
    Task("digits", of_digits, MOMENTUM, 0.05, 660, 11, 4, 23),
    Task("digits, 30% wrong labels", of_wrong_labels, MOMENTUM, 0.05, 660, 11, 4, 23),
]


class Run:
    """One seed of a task: its first part, and the finishes that follow it."""

    def __init__(self, task: Task, seed: int, programs: dict[str, Any]):
        self.task, self.workload, self.programs = task, task.workload(seed), programs
        params = self.workload.init(jax.random.key(seed))
        recorder = boostax.subspace.record_trajectory(
            SNAPSHOTS, every=task.every, start=task.steps - task.every * SNAPSHOTS
        )
        tx = optax.chain(recorder, task.base())
        state: Any = tx.init(params)
        self.ema = params
        for index in range(task.steps):
            params, state, _ = self.step(
                "first part", tx, params, state, self.workload.batch(index)
            )
            self.ema = self.averaged(self.ema, params)
        self.params, self.state = params, state[1]
        self.basis = boostax.subspace.trajectory_basis(state, COMPONENTS, params=params)
        self.late = jax.tree.map(lambda x: x[-10:].mean(0), boostax.subspace.trajectory(state)[0])
        self.batches = [self._together(index) for index in range(max(LENGTHS))]
        judged = [self.workload.batch(10**6 + index) for index in range(task.judged)]
        self._judged = jax.tree.map(lambda *x: np.stack(x), *judged)

    def step(self, name: str, tx: Any, params: PyTree, state: PyTree, batch: PyTree) -> Any:
        """One step of a program that is compiled once for all seeds and rates."""
        if name not in self.programs:
            loss_fn, tx = self.workload.loss_fn, optax.with_extra_args_support(tx)

            @jax.jit
            def program(params: PyTree, state: PyTree, batch: PyTree) -> Any:
                value_fn = lambda p: loss_fn(p, batch)  # noqa: E731
                value, grads = jax.value_and_grad(value_fn)(params)
                updates, state = tx.update(grads, state, params, value=value, value_fn=value_fn)
                return optax.apply_updates(params, updates), state, value

            self.programs[name] = program
        return self.programs[name](params, state, batch)

    def averaged(self, ema: PyTree, params: PyTree) -> PyTree:
        """One step of an exponential average."""
        if "ema" not in self.programs:
            mix = lambda e, p: jax.tree.map(lambda x, y: EMA * x + (1 - EMA) * y, e, p)  # noqa: E731
            self.programs["ema"] = jax.jit(mix)
        return self.programs["ema"](ema, params)

    def judge(self, params: PyTree) -> dict[str, float]:
        """Train loss, held-out loss and accuracy."""
        if "judge" not in self.programs:
            loss_fn = self.workload.loss_fn
            self.programs["judge"] = jax.jit(
                lambda p, b: jax.lax.map(lambda each: loss_fn(p, each), b).mean()
            )
        held_out = self.workload.evaluate(params)
        return {
            "train": float(self.programs["judge"](params, self._judged)),
            "held-out": held_out["loss"],
            "accuracy": held_out["accuracy"],
        }

    def finish(
        self,
        name: str,
        tx: Any,
        lengths: Iterable[int] = LENGTHS,
        peak: float | None = None,
        average: bool = False,
        falls: bool = False,
        start: PyTree = None,
    ) -> dict[int, dict[str, float]]:
        """What a finish comes to after each number of steps."""
        found: dict[int, dict[str, float]] = {}
        lengths = list(lengths)
        # A rate that falls to zero makes each length a run of its own.
        for last, stops in [(n, [n]) for n in lengths] if falls else [(max(lengths), lengths)]:
            params, ema = self.params if start is None else start, self.ema
            state = _with_moments(tx.init(params), self.state)
            peak = self.task.rate if peak is None else peak
            state = at_rate(state, peak, last if falls else np.inf)
            for index in range(last):
                params, state, _ = self.step(name, tx, params, state, self.batches[index])
                if average:
                    ema = self.averaged(ema, params)
                if index + 1 in stops:
                    found[index + 1] = self.judge(ema if average else params) | _reported(state)
        return found

    def _together(self, index: int) -> PyTree:
        first = self.task.steps + index * self.task.together
        each = [self.workload.batch(first + i) for i in range(self.task.together)]
        return jax.tree.map(lambda *x: np.concatenate(x), *each)


def _with_moments(state: PyTree, base: PyTree) -> PyTree:
    """A finish that is, or has inside, the user's optimizer goes on with its moments."""
    structure = jax.tree.structure(base)
    if jax.tree.structure(state) == structure:
        return base
    if isinstance(state, boostax.states.DimReduceState):
        if jax.tree.structure(state.residual_state) == structure:
            return state._replace(residual_state=base)
    return state


def _reported(state: PyTree) -> dict[str, float]:
    if not isinstance(state, boostax.states.DimReduceState):
        return {}
    return {name: float(value) for name, value in state.metrics().items()}


def _best(runs: list[dict[int, dict[str, float]]]) -> dict[int, dict[str, float]]:
    """Of several rates the one with the lowest train loss, for each length."""
    return {n: min((run[n] for run in runs), key=lambda each: each["train"]) for n in runs[0]}


def finishes(run: Run) -> dict[str, dict[int, dict[str, float]]]:
    """Every way to finish."""
    task, basis = run.task, run.basis
    base = task.base()
    random = boostax.subspace.random_basis(run.params, COMPONENTS, seed=1)
    zero = {n: run.judge(run.params) for n in LENGTHS}
    found: dict[str, dict[int, dict[str, float]]] = {
        "no finish": zero,
        "constant rate": run.finish("base", base),
        "EMA of a constant rate": run.finish("base", base, average=True),
        "mean of the last 10 snapshots": dict.fromkeys(LENGTHS, run.judge(run.late)),
    }
    rates = [task.rate * each for each in MULTIPLES]
    decays = {rate: run.finish("base", base, peak=rate, falls=True) for rate in rates}
    found["tuned decay"] = _best(list(decays.values()))
    reduce = boostax.dim_reduce
    found["random basis"] = run.finish("random", reduce(random))
    mindspore = reduce(basis, rule="mindspore", residual=optax.sgd(1e-3, 0.9))
    found["MindSpore's rule"] = run.finish("MindSpore", mindspore)
    found["dim_reduce"] = run.finish("ours", reduce(basis))
    found["dim_reduce from the mean"] = run.finish("ours", reduce(basis), start=basis.mean)
    both = reduce(basis, residual=base)
    found["dim_reduce + constant rate"] = run.finish("both", both)
    # At the rates that suit the decay alone.
    tuned = {n: min(rates, key=lambda rate: decays[rate][n]["train"]) for n in LENGTHS}
    found["dim_reduce + tuned decay"] = {
        n: run.finish("both", both, [n], peak=tuned[n], falls=True)[n] for n in LENGTHS
    }
    return found


def table(seeds: list[dict[str, dict[int, dict[str, float]]]], figure: str) -> list[dict[str, Any]]:
    """Mean over the seeds, with the standard deviation at the last length."""
    rows: list[dict[str, Any]] = []
    for name in seeds[0]:
        row: dict[str, Any] = {"finish": name}
        for n in LENGTHS:
            row[f"{n} steps"] = float(np.mean([seed[name][n][figure] for seed in seeds]))
        row["s.d. at 10"] = float(np.std([s[name][10][figure] for s in seeds], ddof=len(seeds) > 1))
        row["at 300"] = float(np.std([s[name][300][figure] for s in seeds], ddof=len(seeds) > 1))
        rows.append(row)
    return rows


def told(seeds: list[dict[str, dict[int, dict[str, float]]]]) -> list[dict[str, Any]]:
    """What the searches report, at 300 steps."""
    names = {
        "accepted": "subspace_acceptance",
        "losses per step": "subspace_tries",
        "last gradient in the span": "subspace_energy",
    }
    searching = [name for name in seeds[0] if "subspace_tries" in seeds[0][name][300]]
    return [
        {"finish": name}
        | {said: float(np.mean([s[name][300][key] for s in seeds])) for said, key in names.items()}
        for name in searching
    ]


def worst_gap(seeds: list[Any], name: str, base: str, n: int) -> float:
    """The largest ratio of train losses over the seeds."""
    return max(seed[name][n]["train"] / seed[base][n]["train"] for seed in seeds)


def deviations(seeds: list[Any], name: str, base: str, n: int, figure: str = "train") -> float:
    """By how many standard deviations of the base the mean is worse."""
    a, b = (np.array([seed[x][n][figure] for seed in seeds]) for x in (name, base))
    return float((a - b).mean() / max(b.std(ddof=1), 1e-12))


def step_times(rounds: int) -> tuple[list[dict[str, Any]], list[Bar]]:
    """A step on the text workload as it is, beside plain Adam."""
    workload = text()
    params = workload.init(jax.random.key(0))
    batch = workload.batch(0)
    rows = boostax.subspace.random_basis(params, COMPONENTS)
    forms: dict[str, Form] = {}
    tries: dict[str, Callable[[], float]] = {}

    def form(name: str, tx: Any) -> None:
        step = boostax.make_train_step(workload.loss_fn, tx)
        carry = [step.init(params)]

        def run() -> None:
            for index in range(4):
                carry[0], _ = step(carry[0], workload.batch(index))
            jax.block_until_ready(carry[0])

        memory: Any = step.lower(carry[0], batch).compile().memory_analysis()
        forms[name] = Form(run, memory.temp_size_in_bytes)
        tries[name] = lambda: float(boostax.metrics(carry[0].opt_state).get("subspace_tries", 0.0))

    form("Adam", optax.adam(1e-3))
    form("dim_reduce", boostax.dim_reduce(rows))
    form("dim_reduce + Adam", boostax.dim_reduce(rows, residual=optax.adam(1e-3)))
    times = paired(forms, rounds)
    found = [
        {
            "step": name,
            "time / Adam": ratio(times, name, "Adam"),
            "losses per step": tries[name](),
            "temp MB": (forms[name].temp or 0) / 1e6,
        }
        for name in forms
    ]
    slowest = max(ratio(times, name, "Adam") for name in forms)
    return found, [Bar("time of a step / Adam's, with and without a residual", slowest, 1.5)]


def main() -> None:
    options = arguments(__doc__, seeds=5, rounds=15)
    timed, bars = step_times(options.rounds)
    sections: list[tuple[str, list[dict[str, Any]]]] = [("Time of a step", timed)]
    for task in TASKS:
        programs: dict[str, Any] = {}
        seeds: list[dict[str, dict[int, dict[str, float]]]] = []
        for seed in range(options.seeds):
            begun = time.monotonic()
            seeds.append(finishes(Run(task, seed, programs)))
            print(f"{task.name}, seed {seed}: {time.monotonic() - begun:.0f} s", flush=True)
        for figure in ("train", "held-out", "accuracy"):
            sections.append((f"{task.name}: {figure}", table(seeds, figure)))
        sections.append((f"{task.name}: what the searches report", told(seeds)))
        if task.name == "text":
            worst = worst_gap(seeds, "dim_reduce", "tuned decay", 10)
            bars.append(Bar("text, 10 steps: train loss / tuned decay's, worst seed", worst, 1.0))
        searches = [
            s[name][300]["subspace_tries"]
            for s in seeds
            for name in ("dim_reduce", "dim_reduce + constant rate")
        ]
        bars.append(Bar(f"{task.name}: losses per step", statistics.fmean(searches), 1.6))
        if options.seeds > 1:
            for rate in ("constant rate", "tuned decay"):
                gap = deviations(seeds, f"dim_reduce + {rate}", rate, 300)
                claim = f"{task.name}, 300 steps: worse than {rate} alone, in its s.d."
                bars.append(Bar(claim, gap, 1.0))
    report("subspace", "Finishing in a subspace", sections, bars)


if __name__ == "__main__":
    main()
