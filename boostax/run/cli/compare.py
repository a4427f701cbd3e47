# SPDX-License-Identifier: Apache-2.0
"""``boostax compare``: the same workload with and without each technique, side by side."""

import dataclasses
import math
import pathlib
import statistics
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from boostax._core import costs
from boostax.config.part import Place
from boostax.config.reduction import CODECS
from boostax.inspect.break_even import break_even
from boostax.inspect.tables import Cells, aligned, units
from boostax.run.cli.build import AXIS, Built, boosted, build, require_devices
from boostax.run.cli.recipe import ComparePlan, Optimization, Recipe
from boostax.run.cli.refusal import Refusal, refusing
from boostax.run.cli.report import save
from boostax.run.loop import fit
from boostax.run.workloads import Workload, make


class Variant(NamedTuple):
    """One way to train: how it differs from the others."""

    name: str
    dtype: str
    loss_scale: Any
    parts: int


def compare(task: Any, plan: ComparePlan) -> None:
    """Run every variant with every seed and report."""
    with refusing():
        require_devices(plan.devices)
        variants = _variants(task, plan)
        built = {v.name: _build(task, plan, v) for v in variants}
        workload = built[variants[0].name].workload
        output = plan.output or pathlib.Path("runs") / f"compare-{workload.name}"
        output.mkdir(parents=True, exist_ok=True)
    print(f"{workload.name}: {workload.summary}")
    runs: dict[str, list[dict[str, Any]]] = {v.name: [] for v in variants}
    # Seeds outside, so that what else the machine does falls on all variants alike.
    for seed in range(task.seed, task.seed + plan.seeds):
        for variant in variants:
            print(f"  seed {seed}: {variant.name} ...", flush=True)
            seeded = make(dataclasses.replace(task, seed=seed, dtype=variant.dtype))
            runs[variant.name].append(_run(built[variant.name], seeded, seed))
    report = {v.name: _summary(runs[v.name], built[v.name], task.seed) for v in variants}
    print(_table(report, plan))
    if plan.reduce in CODECS:
        # Params, and with them gradients, are of the same shape in all variants.
        params = jax.eval_shape(workload.init, jax.random.key(0))[0]
        boost = boosted(built[variants[0].name].recipe)
        sent: Any = boost.config.reduce.layer(Place(AXIS, None))
        verdict = break_even(sent, params, plan.devices, axis_name=AXIS)
        print(f"{plan.reduce} {verdict}")
        report = {name: row | {"pays_below": verdict.bandwidth} for name, row in report.items()}
    record = {
        "workload": workload.name,
        "task": dataclasses.asdict(task),
        "plan": dataclasses.asdict(plan) | {"output": str(output)},
        "variants": report,
        "runs": runs,
    }
    save(record, output / "compare.json")
    print(f"numbers: {output / 'compare.json'}")


def _variants(task: Any, plan: ComparePlan) -> list[Variant]:
    low = task.dtype if task.dtype != "float32" else "float16"
    variants = [
        Variant("float32", "float32", "none", 1),
        Variant(low, low, "none", 1),
        Variant("+ loss scale", low, "dynamic", 1),
        Variant("+ accumulate", low, "dynamic", plan.accumulate),
    ]
    return variants[: 4 if plan.accumulate > 1 else 3]


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
    recipe, parts = built.recipe, built.recipe.accumulate
    begun: list[float] = []

    def batch(index: int) -> Any:
        begun.append(time.perf_counter())
        return _part(workload, parts, index)

    state, every = built.init(seed), max(1, recipe.optimizer_steps // 10) * parts
    look: Any = {"evaluate": built.evaluate, "evaluate_every": every}
    result = fit(built.step, state, batch, steps=recipe.steps, **look)
    if result.stopped_by:
        raise Refusal(f"stopped by {result.stopped_by}; an unfinished comparison is not kept.")
    per_step = float(np.median(np.diff(begun[::parts])))
    return {"seed": seed, "ms_per_step": 1e3 * per_step, "rows": list(result.history)}


def _summary(runs: list[dict[str, Any]], built: Built, seed: int) -> dict[str, Any]:
    """What the runs of a variant come to, and what a call of its step costs."""
    parts = built.recipe.accumulate
    state, batch = built.init(seed), _part(built.workload, parts, 0)
    memory = built.step.lower(state, batch).compile().memory_analysis()
    found = costs.collectives(built.step.jaxpr(state, batch))
    # What stands in a branch is sent once per optimizer step, the rest at every call. Branches that
    # both send, such as the two sides of power-sgd, take turns.
    each_call = costs.wire_bytes(found, conditional=False)
    last = [run["rows"][-1] for run in runs]
    losses = [row["held_out_loss"] for row in last]
    return {
        "held_out_loss": statistics.fmean(losses),
        "held_out_loss_spread": max(losses) - min(losses),
        "held_out_accuracy": statistics.fmean(row["held_out_accuracy"] for row in last),
        "ms_per_step": statistics.median(run["ms_per_step"] for run in runs),
        "skipped": sum(int(row.get("skipped_steps", 0)) for row in last),
        "temporary_bytes": math.nan if memory is None else memory.temp_size_in_bytes,
        "wire_bytes": parts * each_call + costs.expected(found, conditional=True),
    }


def _table(report: dict[str, dict[str, Any]], plan: ComparePlan) -> str:
    cells: Cells = [("variant", "held-out loss", "accuracy", "ms", "temp", "skips", "sent")]
    for name, row in report.items():
        loss, spread = row["held_out_loss"], row["held_out_loss_spread"]
        judged = f"{loss:.4f} ± {spread / 2:.4f}" if math.isfinite(loss) else "diverged"
        temp, sent = (units(row[kind], "B") for kind in ("temporary_bytes", "wire_bytes"))
        ms, skips = f"{row['ms_per_step']:.3g}", str(row["skipped"])
        cells.append((name, judged, f"{row['held_out_accuracy']:.1%}", ms, temp, skips, sent))
    return (
        f"optimizer steps: {plan.steps}, seeds: {plan.seeds}, devices: {plan.devices}\n"
        f"{aligned(cells, words=True)}\n"
        "±: half the range over the seeds; ms and sent: per optimizer step (sent: by each device); "
        "temp: working memory of one call"
    )
