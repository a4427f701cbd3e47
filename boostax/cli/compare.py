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
from rich.console import Console
from rich.table import Table

import boostax
from boostax._core import checks, costs
from boostax.cli.build import Built, build, refusing, require_devices
from boostax.cli.plot import column, plot_comparison
from boostax.cli.recipe import Recipe
from boostax.train.loop import fit
from boostax.workloads import Workload

MakeWorkload = Callable[[Any], Workload]


@dataclasses.dataclass(frozen=True)
class ComparePlan:
    """What is the same for all variants, and how often they are run."""

    steps: int = 200
    """Optimizer steps of each run; each takes one batch, whole or in parts."""
    seeds: int = 2
    """Runs of each variant, from different initial parameters and with different batches."""
    learning_rate: float = 2e-3
    """Peak of the schedule."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on matrices only."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 turns clipping off."""
    accumulate: int = 4
    """Parts into which the last variant cuts each batch, one call for each."""
    devices: int = 1
    """Devices to split each batch over; with more than one the bytes on the wire are counted."""
    output: pathlib.Path | None = None
    """Directory for the results; runs/compare-<workload> by default."""


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
    _write(output, name, task, plan, report, runs)
    console.print(f"plot: {output / 'compare.png'}", soft_wrap=True)
    console.print(f"numbers: {output / 'compare.json'}", soft_wrap=True)


def _variants(task: Any, plan: ComparePlan) -> list[Variant]:
    low = task.dtype if task.dtype != "float32" else "float16"
    variants = [
        Variant("float32", "float32", "none", 1),
        Variant(low, low, "none", 1),
        Variant(f"{low} + loss scale", low, "dynamic", 1),
    ]
    if plan.accumulate > 1:
        variants.append(
            Variant(f"{low} + loss scale + accumulate", low, "dynamic", plan.accumulate)
        )
    return variants


def _build(make_workload: MakeWorkload, task: Any, plan: ComparePlan, variant: Variant) -> Built:
    recipe = Recipe(
        steps=plan.steps * variant.parts,
        learning_rate=plan.learning_rate,
        weight_decay=plan.weight_decay,
        clip=plan.clip,
        loss_scale=variant.loss_scale,
        accumulate=variant.parts,
        devices=plan.devices,
    )
    workload = make_workload(dataclasses.replace(task, dtype=variant.dtype))
    slices = variant.parts * plan.devices
    if workload.batch_size % slices:
        raise ValueError(
            f"boostax: --batch-size must be divisible by accumulate x devices = {variant.parts} x "
            f"{plan.devices}, got {workload.batch_size}. Every variant takes the same batches."
        )
    return build(workload, recipe)


def _part(workload: Workload, parts: int, index: int) -> Any:
    """The ``index``-th call's batch: one part of a whole batch."""
    whole, part = divmod(index, parts)
    size = workload.batch_size // parts
    return {
        name: array[part * size : (part + 1) * size] for name, array in workload.batch(whole).items()
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
        evaluate=lambda state: workload.evaluate(state.params, state.model_state),
        evaluate_every=every * variant.parts,
    )
    return {}


