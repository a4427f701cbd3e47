"""``boostax compare``: the same workload with and without each technique, side by side."""

import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from boostax._core import costs
from boostax.autoboost.reduction import CODECS
from boostax.inspect.break_even import break_even
from boostax.inspect.tables import Cells, columns
from boostax.run.cli.build import AXIS, Built, build, reduction, require_devices
from boostax.run.cli.recipe import ComparePlan, Optimization, Recipe
from boostax.run.cli.refusal import Refusal, refusing
from boostax.run.cli.report import counted, grid, save, size
from boostax.run.loop import fit
from boostax.run.workloads import Workload, make


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train: how it differs from the others."""

    name: str
    dtype: str
    loss_scale: Any
    parts: int


class _Clock:
    """A writer that notes when each call's metrics arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.times.append(time.perf_counter())

    def close(self) -> None:
        pass


def compare(task: Any, plan: ComparePlan) -> None:
    """Run every variant with every seed and report."""
    console = Console(highlight=False)
    with refusing():
        require_devices(plan.devices)
        variants = _variants(task, plan)
        built = {v.name: _build(task, plan, v) for v in variants}
        workload = built[variants[0].name].workload
        output = plan.output or pathlib.Path("runs") / f"compare-{workload.name}"
        output.mkdir(parents=True, exist_ok=True)
    console.print(f"{workload.name}: {workload.summary}")
    runs: dict[str, list[dict[str, Any]]] = {v.name: [] for v in variants}
    # Seeds outside, so that what else the machine does falls on all variants alike.
    for seed in range(task.seed, task.seed + plan.seeds):
        for variant in variants:
            console.print(f"  seed {seed}: {variant.name} ...")
            seeded = make(dataclasses.replace(task, seed=seed, dtype=variant.dtype))
            runs[variant.name].append(_run(built[variant.name], seeded, seed))
    report = {v.name: _summary(runs[v.name], built[v.name], task.seed) for v in variants}
    console.print(_table(report, plan))
    if plan.reduce in CODECS:
        # Params, and with them gradients, are of the same shape in all variants.
        params = jax.eval_shape(workload.init, jax.random.key(0))[0]
        sent = reduction(built[variants[0].name].recipe)
        verdict = break_even(sent, params, plan.devices, axis_name=AXIS)
        console.print(f"{plan.reduce} {verdict}", soft_wrap=True)
        report = {name: row | {"pays_below": verdict.bandwidth} for name, row in report.items()}
    record = {
        "workload": workload.name,
        "task": dataclasses.asdict(task),
        "plan": dataclasses.asdict(plan) | {"output": str(output)},
        "variants": report,
        "runs": runs,
    }
    save(record, output / "compare.json")
    _plot(output, workload.name, plan, report, runs)
    console.print(f"plot: {output / 'compare.png'}", soft_wrap=True)
    console.print(f"numbers: {output / 'compare.json'}", soft_wrap=True)


def _variants(task: Any, plan: ComparePlan) -> list[Variant]:
    low = task.dtype if task.dtype != "float32" else "float16"
    variants = [
        Variant("float32", "float32", "none", 1),
        Variant(low, low, "none", 1),
        Variant("+ loss scale", low, "dynamic", 1),
    ]
    if plan.accumulate > 1:
        variants.append(Variant("+ accumulate", low, "dynamic", plan.accumulate))
    return variants


def _build(task: Any, plan: ComparePlan, variant: Variant) -> Built:
    workload = make(dataclasses.replace(task, dtype=variant.dtype))
    slices = variant.parts * plan.devices
    if workload.batch_size % slices:
        raise ValueError(
            f"boostax: --batch-size must be divisible by accumulate x devices = {variant.parts} x "
            f"{plan.devices}, got {workload.batch_size}. Every variant takes the same batches."
        )
    common = {each.name: getattr(plan, each.name) for each in dataclasses.fields(Optimization)}
    steps, scale = plan.steps * variant.parts, variant.loss_scale
    recipe = Recipe(**common, steps=steps, loss_scale=scale, accumulate=variant.parts)
    return build(workload, recipe)


def _part(workload: Workload, parts: int, index: int) -> Any:
    """The ``index``-th call's batch: one part of a whole batch."""
    whole, part = divmod(index, parts)
    length = workload.batch_size // parts
    rows = slice(part * length, (part + 1) * length)
    return {name: array[rows] for name, array in workload.batch(whole).items()}


def _run(built: Built, workload: Workload, seed: int) -> dict[str, Any]:
    clock, recipe = _Clock(), built.recipe
    steps, parts = recipe.optimizer_steps, recipe.accumulate
    result = fit(
        built.step,
        built.init(seed),
        lambda index: _part(workload, parts, index),
        steps=recipe.steps,
        writers=[clock],
        evaluate=built.evaluate,
        evaluate_every=max(1, steps // 10) * parts,
    )
    if result.stopped_by:
        raise Refusal(f"stopped by {result.stopped_by}; an unfinished comparison is not kept.")
    rows = result.history
    # By optimizer step: the mean over the parts of each batch.
    losses = np.reshape([row["loss"] for row in rows], (steps, parts)).mean(1)
    held_out = [row for row in rows if "held_out_loss" in row]
    return {
        "seed": seed,
        "held_out_loss": rows[-1]["held_out_loss"],
        "held_out_accuracy": rows[-1]["held_out_accuracy"],
        "ms_per_step": 1e3 * float(np.median(np.diff(clock.times[::parts]))),
        "skipped": int(rows[-1].get("skipped_steps", 0)),
        "training": (list(range(1, steps + 1)), losses.tolist()),
        "held_out": (
            [row["step"] // parts for row in held_out],
            [row["held_out_loss"] for row in held_out],
        ),
    }


def _summary(runs: list[dict[str, Any]], built: Built, seed: int) -> dict[str, Any]:
    """What the runs of a variant come to, and what a call of its step costs."""
    parts = built.recipe.accumulate
    state, batch = built.init(seed), _part(built.workload, parts, 0)
    memory = built.step.lower(state, batch).compile().memory_analysis()
    found = costs.collectives(built.step.jaxpr(state, batch))
    # What stands in a branch is sent once per optimizer step, the rest at every call. Branches that
    # both send, such as the two sides of power-sgd, take turns.
    each_call = costs.wire_bytes(found, conditional=False)
    losses = [run["held_out_loss"] for run in runs]
    return {
        "held_out_loss": statistics.fmean(losses),
        "held_out_loss_spread": max(losses) - min(losses),
        "held_out_accuracy": statistics.fmean(run["held_out_accuracy"] for run in runs),
        "ms_per_step": statistics.median(run["ms_per_step"] for run in runs),
        "skipped": sum(run["skipped"] for run in runs),
        "temporary_bytes": math.nan if memory is None else memory.temp_size_in_bytes,
        "wire_bytes": parts * each_call + costs.expected(found, conditional=True),
    }


def _table(report: dict[str, dict[str, Any]], plan: ComparePlan) -> Table:
    cells: Cells = [("variant", "held-out loss", "accuracy", "ms", "temp", "sent", "skips")]
    for name, row in report.items():
        loss, spread = row["held_out_loss"], row["held_out_loss_spread"]
        judged = f"{loss:.4f} ± {spread / 2:.4f}" if math.isfinite(loss) else "diverged"
        costs = f"{row['ms_per_step']:.3g}", size(row["temporary_bytes"]), size(row["wire_bytes"])
        cells.append((name, judged, f"{row['held_out_accuracy']:.1%}", *costs, str(row["skipped"])))
    counts = {"optimizer step": plan.steps, "seed": plan.seeds, "device": plan.devices}
    return grid(
        columns(cells, [plan.devices > 1 or heading != "sent" for heading in cells[0]]),
        left=1,
        title=", ".join(counted(count, what) for what, count in counts.items()),
        caption="±: half the range over the seeds; ms and sent: per optimizer step (sent: by each "
        "device); temp: working memory of one call",
    )


def _plot(
    output: pathlib.Path,
    name: str,
    plan: ComparePlan,
    report: dict[str, dict[str, Any]],
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    from boostax.run.cli.plot import plot_comparison

    curves = {name: (_mean(of, "training"), _mean(of, "held_out")) for name, of in runs.items()}
    measures = {
        "ms per step": ("ms_per_step", 1.0),
        "temporary memory, MB": ("temporary_bytes", 1e6),
    }
    if plan.devices > 1:
        measures["sent per step and device, MB"] = ("wire_bytes", 1e6)
    bars = {
        title: {variant: row[field] / unit for variant, row in report.items()}
        for title, (field, unit) in measures.items()
    }
    title = f"{name}, {counted(plan.seeds, 'seed')}"
    plot_comparison(curves, bars, output / "compare.png", title)


def _mean(runs: list[dict[str, Any]], which: str) -> tuple[list[float], list[float]]:
    steps = runs[0][which][0]
    return steps, np.mean([run[which][1] for run in runs], axis=0).tolist()
