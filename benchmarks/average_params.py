"""Averages of the params beside the decay of the rate that they stand for, on text.

Every run takes the same batches. Each seed trains at five peak rates, constant, linear and cosine
to zero, each with a warm-up; the averages are of these very runs. What has a setting to choose (a
rate, a decay, a start, a distance of snapshots) gets the one with the lowest train loss, for each
seed: that favours whoever has more of them, and the tables say how many. A finish by ``dim_reduce``
takes the last batches of the budget, four as one.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Bar, arguments, over_seeds, report
from subspace import COMPONENTS, SNAPSHOTS, TEXT
from workloads import Workload, text

import boostax
from boostax._core import trees

PyTree = Any
Judged = dict[str, float]
RATES = (2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
# Of the run, in which the rate grows to its peak.
WARM_UP = 0.05
FINISH, TOGETHER, JUDGED = 10, 4, 32
CONSTANT = "constant rate"
# Of the share of the run that is done, the share of the peak.
SCHEDULES: dict[str, Callable[[float], float]] = {
    CONSTANT: lambda done: 1.0,
    "linear to zero": lambda done: 1.0 - done,
    "cosine to zero": lambda done: float(0.5 * (1 + np.cos(np.pi * done))),
}
FINISHED = "dim_reduce from a constant rate"


def averages(steps: int) -> list[tuple[str, dict[str, Any]]]:
    """What is averaged in every run, with its settings as shares of it."""
    share = lambda part: max(2, round(steps * part))  # noqa: E731
    return [
        *(("ema", {"decay": 1 - 1 / share(part)}) for part in (0.01, 0.03, 0.1)),
        *(("window", {"start": steps - share(part)}) for part in (0.03, 0.1, 0.3)),
        *(("lawa", {"size": 5, "every": share(part)}) for part in (0.01, 0.03, 0.1)),
    ]


def given_rate() -> optax.GradientTransformationExtraArgs:
    """Multiply by minus the rate that ``update`` is given: one program for all schedules."""

    def update(
        updates: PyTree, state: Any, params: PyTree = None, *, rate: jax.Array, **extra: Any
    ) -> tuple[PyTree, Any]:
        del params, extra
        return jax.tree.map(lambda u: -rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def optimizer(steps: int) -> optax.GradientTransformationExtraArgs:
    """Adam, with all averages around it and the snapshots of the finish."""
    every = max(1, steps // 80)
    start = max(0, steps - FINISH * TOGETHER - every * SNAPSHOTS)
    recorder = boostax.subspace.record_trajectory(SNAPSHOTS, every=every, start=start)
    tx: Any = optax.chain(recorder, optax.scale_by_adam(), given_rate())
    for kind, given in averages(steps):
        tx = boostax.model.average_params(tx, kind, **given)
    return tx


class Programs:
    """Compiled once for all seeds and rates."""

    def __init__(self, workload: Workload, steps: int):
        self.steps, self.tx = steps, optimizer(steps)
        loss = workload.loss_fn

        def step(params: PyTree, state: PyTree, batch: PyTree, rate: jax.Array) -> Any:
            grads = jax.grad(loss)(params, batch)
            return boostax.apply_gradients(self.tx, grads, state, params, rate=rate)

        def finish(params: PyTree, state: PyTree, batch: PyTree) -> Any:
            value_fn = lambda p: loss(p, batch)  # noqa: E731
            value, grads = jax.value_and_grad(value_fn)(params)
            tx = boostax.dim_reduce(state.basis)
            more = {"value": value, "value_fn": value_fn}
            return boostax.apply_gradients(tx, grads, state, params, **more)

        self.step = jax.jit(step, donate_argnums=(0, 1))
        self.finish = jax.jit(finish)
        self.judge = jax.jit(lambda p, b: jax.lax.map(lambda each: loss(p, each), b).mean())


def run(programs: Programs, workload: Workload, seed: int) -> dict[str, list[Judged]]:
    """Of one seed, by method, what each setting ends with."""
    steps = programs.steps
    judged = [workload.batch(10**6 + index) for index in range(JUDGED)]
    judged = jax.tree.map(lambda *x: np.stack(x), *judged)
    found: dict[str, list[Judged]] = collections.defaultdict(list)

    def judge(params: PyTree, peak: float) -> Judged:
        held_out = workload.evaluate(params)["loss"]
        return {"train": float(programs.judge(params, judged)), "held-out": held_out, "peak": peak}

    for (name, schedule), peak in itertools.product(SCHEDULES.items(), RATES):
        params = workload.init(jax.random.key(seed))
        state: Any = programs.tx.init(params)
        for index in range(steps):
            if name == CONSTANT and index == steps - FINISH * TOGETHER:
                found[FINISHED].append(judge(finished(programs, workload, params, state), peak))
            done = index / steps
            rate = jnp.float32(peak * min(1.0, done / WARM_UP) * schedule(done))
            params, state = programs.step(params, state, workload.batch(index), rate)
        found[name].append(judge(params, peak))
        states = trees.find(state, boostax.states.AverageParamsState)
        for (kind, _), each in zip(reversed(averages(steps)), states, strict=True):
            average = boostax.model.averaged_params(params, each)
            found[f"{kind}, {name}"].append(judge(average, peak))
    return found


def finished(programs: Programs, workload: Workload, params: PyTree, state: PyTree) -> PyTree:
    """The params after a finish from here, with the rest of the budget."""
    count = int(boostax.subspace.trajectory(state)[1])
    basis = boostax.subspace.trajectory_basis(state, min(COMPONENTS, count - 1), params=params)
    found: Any = boostax.dim_reduce(basis).init(params)
    first = programs.steps - FINISH * TOGETHER
    for index in range(first, programs.steps, TOGETHER):
        parts = [workload.batch(index + i) for i in range(TOGETHER)]
        batch = jax.tree.map(lambda *x: np.concatenate(x), *parts)
        params, found = programs.finish(params, found, batch)
    return params


def table(seeds: list[dict[str, list[Judged]]]) -> list[dict[str, Any]]:
    """A row for each method, at its best setting of each seed, beside the better decay."""
    best = {
        name: [min(seed[name], key=lambda each: each["train"]) for seed in seeds]
        for name in seeds[0]
    }
    decayed = [
        min((best[name][i] for name in SCHEDULES if name != CONSTANT), key=lambda x: x["train"])
        for i in range(len(seeds))
    ]
    rows: list[dict[str, Any]] = []
    for name, ends in best.items():
        peaks = {f"{end['peak']:g}" for end in ends}
        row: dict[str, Any] = {"method": name, "settings": len(seeds[0][name])}
        row["peak rates"] = ", ".join(sorted(peaks, key=float))
        for figure in ("train", "held-out"):
            values = np.array([end[figure] for end in ends])
            beside = values - np.array([end[figure] for end in decayed])
            row |= {figure: float(values.mean())}
            row |= over_seeds(beside, f"{figure}: beside decay", f"{figure}: its s.e.")
        rows.append(row)
    return rows


def main() -> None:
    options = arguments(__doc__, seeds=5, steps=800)
    workload = lambda seed: text(dataclasses.replace(TEXT, seed=seed))  # noqa: E731
    programs, seeds = Programs(workload(0), options.steps), []
    for seed in range(options.seeds):
        begun = time.monotonic()
        seeds.append(run(programs, workload(seed), seed))
        print(f"seed {seed}: {time.monotonic() - begun:.0f} s", flush=True)
    rows = table(seeds)
    by = {row["method"]: row for row in rows}
    plain = by[CONSTANT]["held-out"]
    bars = [
        Bar(f"{kind} / {CONSTANT}, held-out", by[f"{kind}, {CONSTANT}"]["held-out"] / plain, 1.0)
        for kind in ("ema", "window", "lawa")
    ]
    title = f"Text, Adam, {options.steps:,} steps: nats, {options.seeds} seeds"
    report("average_params", "Averages of the params", [(title, rows)], bars)


if __name__ == "__main__":
    main()
