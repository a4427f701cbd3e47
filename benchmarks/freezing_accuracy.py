"""What freezing by schedule does to the result, and to the time of a whole run: digits and text.

The learning rate is tuned without freezing and kept. Seeds outside, variants inside, so that what
else the machine does falls on all alike; the first seed pays for the compilations.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from digits_replicas import Split, accuracy, data, init, loss
from harness import arguments, caveats, over_seeds, report
from workloads import TextConfig, text

import boostax
from boostax._core.groups import as_groups

PyTree = Any
GROUPS, FRACTION = 10, 0.3
TEXT = TextConfig(width=48, depth=8, heads=4, sequence_length=32, batch_size=16)
SIZES, BATCH = (64, *[64] * 9, 10), 32
NONE = "no freezing"


class Task(NamedTuple):
    """Something to train.

    Attributes:
      name: for the tables.
      steps: of a run.
      rates: to try without freezing.
      optimizer: from a schedule of the rate.
      groups: of the params, in forward order.
      loss_fn: ``(params, batch)``.
      init: params of a seed.
      batches: ``(seed, steps)``.
      judge: ``params`` to ``{figure: value}``; the first is what the rate is chosen by.
    """

    name: str
    steps: int
    rates: tuple[float, ...]
    optimizer: Callable[[Any], optax.GradientTransformation]
    groups: Callable[[PyTree], PyTree]
    loss_fn: Callable[[PyTree, PyTree], jax.Array]
    init: Callable[[int], PyTree]
    batches: Callable[[int, int], Iterator[PyTree]]
    judge: Callable[[PyTree], dict[str, float]]


class Variant(NamedTuple):
    """A way to freeze, or not to.

    Attributes:
      name: for the tables.
      schedule: from the steps of the run; ``None`` trains all.
      order: the place of each group: permuted, something else than a prefix is frozen.
      compute_of: the variant whose FLOPs this one may spend, in fewer steps.
    """

    name: str
    schedule: Callable[[int], Any] | None = None
    order: tuple[int, ...] = tuple(range(GROUPS))
    compute_of: str | None = None


class Run(NamedTuple):
    """How a run ended."""

    figures: dict[str, float]
    seconds: float
    flops: float
    depths: tuple[int, ...]


def named(kind: Any) -> Callable[[int], Any]:
    return lambda steps: boostax.freeze_schedule(
        kind, total_steps=steps, frozen_fraction=FRACTION, seed=None
    )


def variants() -> list[Variant]:
    """The controls stand next to what they control."""
    shuffled = tuple(int(i) for i in np.random.default_rng(0).permutation(GROUPS))
    backwards = tuple(reversed(range(GROUPS)))
    return [
        Variant(NONE),
        Variant("interval", named("interval")),
        Variant("no freezing, FLOPs of interval", compute_of="interval"),
        Variant("interval, random order", named("interval"), shuffled),
        Variant("interval, reversed order", named("interval"), backwards),
        Variant("continuous", named("continuous")),
        Variant("progressive", named("progressive")),
        Variant("no freezing, FLOPs of progressive", compute_of="progressive"),
        Variant("progressive, reversed order", named("progressive"), backwards),
        Variant("ramp", named("ramp")),
    ]


def digits_task(steps: int) -> Task:
    """A perceptron of ten layers."""
    training, validation, test = data()

    def batches(seed: int, steps: int) -> Iterator[PyTree]:
        random = np.random.default_rng(seed)
        for _ in range(steps):
            rows = random.integers(len(training.labels), size=BATCH)
            yield Split(training.images[rows], training.labels[rows])

    @jax.jit
    def judged(params: PyTree) -> tuple[jax.Array, ...]:
        return accuracy(params, validation), accuracy(params, test), loss(params, test)

    def judge(params: PyTree) -> dict[str, float]:
        of_validation, of_test, lost = map(float, judged(params))
        return {"validation": of_validation, "accuracy": of_test, "held-out loss": lost}

    return Task(
        "Digits, SGD with momentum 0.9, a perceptron of ten layers",
        steps,
        tuple(2.0**power for power in range(-8, -1)),
        lambda schedule: optax.sgd(schedule, momentum=0.9),
        lambda params: list(range(len(params))),
        loss,
        lambda seed: init(jax.random.key(seed), SIZES),
        batches,
        judge,
    )


def text_task(steps: int) -> Task:
    """A transformer of eight blocks."""

    @functools.cache
    def workload(seed: int) -> Any:
        return text(dataclasses.replace(TEXT, seed=seed))

    patterns = [["characters", "positions"], *(f"block_{i}" for i in range(8))]

    def judge(params: PyTree) -> dict[str, float]:
        found = workload(0).evaluate(params)
        lost = found["loss"]
        return {"validation": -lost, "accuracy": found["accuracy"], "held-out loss": lost}

    def labels(params: PyTree) -> PyTree:
        return as_groups("freezing_accuracy", patterns, params).tree

    return Task(
        f"Text, AdamW, a transformer of eight blocks, {workload(0).summary}",
        steps,
        (2.0**-10, 2.0**-9, 2.0**-8, 2.0**-7),
        lambda schedule: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)),
        labels,
        workload(0).loss_fn,
        lambda seed: workload(seed).init(jax.random.key(seed)),
        lambda seed, steps: map(workload(seed).batch, range(steps)),
        judge,
    )


def make_step(task: Task, variant: Variant, rate: float, steps: int) -> boostax.train.TrainStep:
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 10), steps)
    optimizer = task.optimizer(schedule)
    if variant.schedule is None:
        return boostax.make_train_step(task.loss_fn, optimizer)
    shapes = jax.eval_shape(lambda: task.init(0))
    groups = jax.tree.map(lambda group: variant.order[group], task.groups(shapes))
    tx = boostax.scheduled_freeze(optimizer, groups, variant.schedule(steps))
    return boostax.make_train_step(task.loss_fn, tx)


def run(
    task: Task, step: boostax.train.TrainStep, seed: int, steps: int
) -> tuple[dict[str, float], Any]:
    """``(figures, (seconds, depth of each call))``."""
    params = task.init(seed)
    batches = list(task.batches(seed, steps))
    jax.block_until_ready((params, batches))
    begun = time.perf_counter()
    state = step.init(params)
    depths: list[Any] = []
    for batch in batches:
        state, told = step(state, batch)
        depths.append(told.get("frozen_groups", 0))
    jax.block_until_ready(state)
    seconds = time.perf_counter() - begun
    return task.judge(state.params), (seconds, [int(depth) for depth in jax.device_get(depths)])


def flops_of(task: Task, step: boostax.train.TrainStep, depths: set[int]) -> dict[int, float]:
    """FLOPs of a call at each depth."""
    state = step.init(task.init(0))
    batch = next(iter(task.batches(0, 1)))

    def of(depth: int) -> float:
        freezes = isinstance(step.tx, boostax.freeze.ScheduledFreeze)
        compiled = step.lower(state, batch, depth=depth if freezes else None).compile()
        return float(dict(compiled.cost_analysis() or {})["flops"])

    return {depth: of(depth) for depth in depths}


def tuned(task: Task) -> float:
    """The rate that validates best without freezing, with one seed."""
    found = {}
    for rate in task.rates:
        figures, _ = run(task, make_step(task, Variant(NONE), rate, task.steps), 0, task.steps)
        found[rate] = figures["validation"] if math.isfinite(figures["validation"]) else -math.inf
    return max(found, key=lambda rate: found[rate])


def trained(task: Task, seeds: int) -> tuple[dict[str, list[Run]], dict[str, int], float]:
    """All variants with all seeds, the steps of each, and the rate."""
    rate = tuned(task)
    print(task.name, "rate", rate, flush=True)
    # Compile times are figures from here on.
    jax.config.update("jax_enable_compilation_cache", False)
    found: dict[str, list[Run]] = {}
    steps: dict[str, int] = {}
    made: dict[str, boostax.train.TrainStep] = {}
    flops: dict[str, dict[int, float]] = {}
    for seed in range(seeds):
        for variant in variants():
            name = variant.name
            if seed == 0:
                of = variant.compute_of
                share = 1.0 if of is None else found[of][0].flops / found[NONE][0].flops
                steps[name] = round(task.steps * share)
                made[name] = make_step(task, variant, rate, steps[name])
            figures, (seconds, depths) = run(task, made[name], seed, steps[name])
            if seed == 0:
                flops[name] = {}
            new = set(depths) - set(flops[name])
            flops[name] |= flops_of(task, made[name], new)
            total = sum(flops[name][depth] for depth in depths)
            found.setdefault(name, []).append(Run(figures, seconds, total, tuple(depths)))
            print(seed, name, figures, round(seconds, 1), flush=True)
    jax.config.update("jax_enable_compilation_cache", True)
    return found, steps, rate


def column(runs: list[Run], key: str) -> np.ndarray[Any, Any]:
    """A figure of each run."""
    return np.array([each.figures[key] for each in runs])


def table(found: dict[str, list[Run]], steps: dict[str, int]) -> list[dict[str, Any]]:
    """A row for each variant, compared with no freezing seed by seed."""
    base = found[NONE]
    rows: list[dict[str, Any]] = []
    for name, runs in found.items():
        points = 100 * (column(runs, "accuracy") - column(base, "accuracy"))
        lost = column(runs, "held-out loss") - column(base, "held-out loss")
        later = [a.seconds / b.seconds for a, b in zip(runs[1:], base[1:], strict=True)]
        rows.append(
            {
                "variant": name,
                "steps": steps[name],
                "frozen": float(np.mean([np.mean(np.array(r.depths) > 0) for r in runs])),
                "FLOPs / none": float(np.mean([r.flops for r in runs]) / base[0].flops),
                "time / none": float(np.median(later)),
                "with compiling / none": runs[0].seconds / base[0].seconds,
                "compiled": len({depth for each in runs for depth in each.depths}),
                "held-out loss": float(column(runs, "held-out loss").mean()),
                **over_seeds(lost, "more than none", "its s.e."),
                "accuracy": float(column(runs, "accuracy").mean()),
                **over_seeds(points, "points more than none"),
            }
        )
    return rows


def main() -> None:
    options = arguments(__doc__, seeds=5, text_steps=600, digits_steps=1500)
    sections: list[tuple[str, list[dict[str, Any]]]] = []
    for task in (digits_task(options.digits_steps), text_task(options.text_steps)):
        found, steps, rate = trained(task, options.seeds)
        heading = f"{task.name}: {task.steps} steps, {options.seeds} seeds, rate {rate:g}"
        sections.append((heading, table(found, steps)))
    lines = [
        f"Ten groups, {FRACTION:.0%} of the steps frozen in part, which interval draws as "
        "MindSpore's defaults do.",
        "Rates by factors of two, tuned without freezing on the first seed: on digits by the "
        "validation split, on text by the held-out text itself, which favours no freezing.",
        "FLOPs are the compiler's, of all calls of a run. Time leaves out compilations and is the "
        "median over seeds; with compiling it is the first seed's run, everything included.",
        "Digits: a call takes less than a millisecond, most of it outside the program: the times "
        "say nothing of larger models.",
        "Random and reversed orders freeze something else than a prefix: the backward pass must "
        "go through it, and little is saved.",
    ]
    sections.append(("To keep in mind", caveats(lines)))
    report("freezing_accuracy", "Freezing by schedule: what it does to a whole run", sections, [])


if __name__ == "__main__":
    main()
