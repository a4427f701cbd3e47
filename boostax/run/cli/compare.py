"""``boostax compare``: the same workload with and without each technique, side by side."""

import dataclasses
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import rich.box
from rich.console import Console
from rich.table import Table

import boostax
from boostax._core import checks, costs
from boostax._core.plain import plain
from boostax.inspect.break_even import BreakEven, break_even
from boostax.inspect.tables import Cells, columns
from boostax.run.cli.build import AXIS, Built, Refusal, build, reduction, refusing, require_devices
from boostax.run.cli.recipe import CODECS, ComparePlan, Recipe
from boostax.run.loop import fit
from boostax.run.workloads import Workload

MakeWorkload = Callable[[Any], Workload]


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


def compare(make_workload: MakeWorkload, task: Any, plan: ComparePlan) -> None:
    """Run every variant with every seed and report."""
    console = Console(highlight=False)
    with refusing():
        checks.positive_int("boostax", "--seeds", plan.seeds, "2 shows how much runs differ.")
        require_devices(plan.devices)
        variants = _variants(task, plan)
        built = {v.name: _build(make_workload, task, plan, v) for v in variants}
        name = next(iter(built.values())).workload.name
        output = plan.output or pathlib.Path("runs") / f"compare-{name}"
        output.mkdir(parents=True, exist_ok=True)
    console.print(f"{name}: {built[variants[0].name].workload.summary}")
    runs: dict[str, list[dict[str, Any]]] = {v.name: [] for v in variants}
    # Seeds outside, so that what else the machine does falls on all variants alike.
    for seed in range(task.seed, task.seed + plan.seeds):
        for variant in variants:
            console.print(f"  seed {seed}: {variant.name} ...")
            workload = make_workload(dataclasses.replace(task, seed=seed, dtype=variant.dtype))
            runs[variant.name].append(_run(built[variant.name], workload, plan, variant, seed))
    costs_of = {v.name: _costs(built[v.name], v, task.seed) for v in variants}
    report = {v.name: _summarize(runs[v.name], costs_of[v.name]) for v in variants}
    console.print(_table(report, plan))
    if plan.reduce in CODECS:
        # Params, and with them gradients, are of the same shape in all variants.
        verdict = _break_even(built[variants[0].name], plan)
        console.print(f"{plan.reduce} {verdict}", soft_wrap=True)
        report = {name: row | {"pays_below": verdict.bandwidth} for name, row in report.items()}
    _write(output, name, task, plan, report, runs)
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


def _recipe(plan: ComparePlan, variant: Variant) -> Recipe:
    return Recipe(
        steps=plan.steps * variant.parts,
        learning_rate=plan.learning_rate,
        weight_decay=plan.weight_decay,
        clip=plan.clip,
        loss_scale=variant.loss_scale,
        accumulate=variant.parts,
        devices=plan.devices,
        reduce=plan.reduce,
        density=plan.density,
        rank=plan.rank,
    )


def _build(make_workload: MakeWorkload, task: Any, plan: ComparePlan, variant: Variant) -> Built:
    workload = make_workload(dataclasses.replace(task, dtype=variant.dtype))
    slices = variant.parts * plan.devices
    if workload.batch_size % slices:
        raise ValueError(
            f"boostax: --batch-size must be divisible by accumulate x devices = {variant.parts} x "
            f"{plan.devices}, got {workload.batch_size}. Every variant takes the same batches."
        )
    return build(workload, _recipe(plan, variant))


def _part(workload: Workload, parts: int, index: int) -> Any:
    """The ``index``-th call's batch: one part of a whole batch."""
    whole, part = divmod(index, parts)
    size = workload.batch_size // parts
    return {
        name: array[part * size : (part + 1) * size]
        for name, array in workload.batch(whole).items()
    }


def _run(
    built: Built, workload: Workload, plan: ComparePlan, variant: Variant, seed: int
) -> dict[str, Any]:
    clock = _Clock()
    every = max(1, plan.steps // 10)
    result = fit(
        built.step,
        built.init(seed),
        lambda index: _part(workload, variant.parts, index),
        steps=plan.steps * variant.parts,
        writers=[clock],
        evaluate=built.evaluate,
        evaluate_every=every * variant.parts,
    )
    if result.stopped_by:
        raise Refusal(f"stopped by {result.stopped_by}; an unfinished comparison is not kept.")
    rows = result.history
    # By optimizer step: the mean over the parts of each batch.
    losses = np.reshape([row["loss"] for row in rows], (plan.steps, variant.parts)).mean(1)
    held_out = [row for row in rows if "held_out_loss" in row]
    return {
        "seed": seed,
        "held_out_loss": rows[-1]["held_out_loss"],
        "held_out_accuracy": rows[-1]["held_out_accuracy"],
        "ms_per_step": 1e3 * float(np.median(np.diff(clock.times[:: variant.parts]))),
        "skipped": int(rows[-1].get("skipped_steps", 0)),
        "training": (list(range(1, plan.steps + 1)), losses.tolist()),
        "held_out": (
            [row["step"] // variant.parts for row in held_out],
            [row["held_out_loss"] for row in held_out],
        ),
    }


def _costs(built: Built, variant: Variant, seed: int) -> dict[str, float]:
    state = built.init(seed)
    batch = _part(built.workload, variant.parts, 0)
    memory = built.step.lower(state, batch).compile().memory_analysis()
    found = costs.collectives(built.step.jaxpr(state, batch))
    # What stands in a branch is sent once per optimizer step, the rest at every call. Branches that
    # both send, such as the two sides of power-sgd, take turns.
    each_call = costs.wire_bytes(found, conditional=False)
    return {
        "temporary_bytes": math.nan if memory is None else memory.temp_size_in_bytes,
        "wire_bytes": variant.parts * each_call + costs.expected(found, conditional=True),
    }


def _break_even(built: Built, plan: ComparePlan) -> BreakEven:
    """Where the reduction pays, by its work on these devices."""
    params = jax.eval_shape(built.workload.init, jax.random.key(0))[0]
    recipe = Recipe(devices=plan.devices, reduce=plan.reduce, density=plan.density, rank=plan.rank)
    return break_even(reduction(recipe), params, plan.devices, axis_name=AXIS)


def _summarize(runs: list[dict[str, Any]], costs_of: dict[str, float]) -> dict[str, Any]:
    losses = [run["held_out_loss"] for run in runs]
    return {
        "held_out_loss": statistics.fmean(losses),
        "held_out_loss_spread": max(losses) - min(losses),
        "held_out_accuracy": statistics.fmean(run["held_out_accuracy"] for run in runs),
        "ms_per_step": statistics.median(run["ms_per_step"] for run in runs),
        "skipped": sum(run["skipped"] for run in runs),
        **costs_of,
    }


def _table(report: dict[str, dict[str, Any]], plan: ComparePlan) -> Table:
    cells: Cells = [("variant", "held-out loss", "accuracy", "ms", "temp", "sent", "skips")]
    for name, row in report.items():
        loss, spread = row["held_out_loss"], row["held_out_loss_spread"]
        judged = f"{loss:.4f} ± {spread / 2:.4f}" if math.isfinite(loss) else "diverged"
        costs = f"{row['ms_per_step']:.3g}", _size(row["temporary_bytes"]), _size(row["wire_bytes"])
        cells.append((name, judged, f"{row['held_out_accuracy']:.1%}", *costs, str(row["skipped"])))
    counts = {"optimizer step": plan.steps, "seed": plan.seeds, "device": plan.devices}
    return grid(
        columns(cells, [plan.devices > 1 or heading != "sent" for heading in cells[0]]),
        left=1,
        title=", ".join(counted(count, what) for what, count in counts.items()),
        caption="±: half the range over the seeds; ms and sent: per optimizer step (sent: by each "
        "device); temp: working memory of one call",
    )


def grid(cells: Cells, left: int = 0, **look: Any) -> Table:
    """Cells under their headings: to the right, but for the first ``left`` columns."""
    headings, *rows = cells
    table = Table(box=rich.box.SIMPLE_HEAD, padding=(0, 0, 0, 1), **look)
    for i, heading in enumerate(headings):
        wraps = heading == "collectives"
        table.add_column(heading, justify="left" if i < left else "right", no_wrap=not wraps)
    for row in rows:
        table.add_row(*row)
    return table


def counted(count: int, what: str) -> str:
    """``1 seed``, ``2 seeds``."""
    return f"{count} {what}" + ("" if count == 1 else "s")


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _write(
    output: pathlib.Path,
    name: str,
    task: Any,
    plan: ComparePlan,
    report: dict[str, dict[str, Any]],
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    from boostax.run.cli.plot import plot_comparison

    record = {
        "workload": name,
        "task": dataclasses.asdict(task),
        "plan": dataclasses.asdict(plan) | {"output": str(output)},
        "device": jax.devices()[0].device_kind,
        "versions": {"boostax": boostax.__version__, "jax": jax.__version__},
        "variants": report,
        "runs": runs,
    }
    (output / "compare.json").write_text(json.dumps(plain(record), indent=1) + "\n")
    curves = {name: (_mean(of, "training"), _mean(of, "held_out")) for name, of in runs.items()}
    bars = {
        "ms per step": {name: row["ms_per_step"] for name, row in report.items()},
        "temporary memory, MB": {n: row["temporary_bytes"] / 1e6 for n, row in report.items()},
    }
    if plan.devices > 1:
        bars["sent per step and device, MB"] = {
            name: row["wire_bytes"] / 1e6 for name, row in report.items()
        }
    title = f"{name}, {counted(plan.seeds, 'seed')}"
    plot_comparison(curves, bars, output / "compare.png", title)


def _mean(runs: list[dict[str, Any]], which: str) -> tuple[list[float], list[float]]:
    steps = runs[0][which][0]
    return steps, np.mean([run[which][1] for run in runs], axis=0).tolist()
