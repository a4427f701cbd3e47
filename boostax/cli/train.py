"""``boostax train``: one run with checkpoints, metrics, a plot and a summary."""

import dataclasses
import hashlib
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import boostax
from boostax.cli.build import Built, Refusal, build, refusing, require_devices
from boostax.cli.plot import plot_run
from boostax.cli.recipe import Recipe, RunOptions
from boostax.train.checkpoint import Checkpointer
from boostax.train.loop import FitResult, fit
from boostax.train.writers import JsonLines, Progress, TensorBoard, Writer
from boostax.workloads import Workload

# What of a task's configuration only says how it is judged.
_JUDGING = frozenset(("eval_batches",))


def train(
    make_workload: Callable[[Any], Workload],
    task: Any,
    recipe: Recipe,
    options: RunOptions,
    command: str,
) -> None:
    """Train, or go on training, one workload; ``command`` is what the user typed."""
    console = Console(highlight=False)
    with refusing():
        require_devices(recipe.devices)
        workload = make_workload(task)
        built = build(workload, recipe)
        output = options.output or pathlib.Path("runs") / workload.name
        output.mkdir(parents=True, exist_ok=True)
        checkpointer = Checkpointer(output / "checkpoints")
    numbers = _numbers(workload, task, recipe)
    with checkpointer:
        with refusing():
            state, start = _first_state(built, task, checkpointer, options, output, numbers)
        if start == recipe.steps:
            console.print(f"This run is finished: {start} calls done, results in {output}.")
            console.print("Longer training needs a run of its own: another --steps and --output.")
            return
        console.print(_table(built, task, recipe, state, start))
        with refusing():
            writers = _writers(recipe, options, output, start, console)
        begun = time.monotonic()
        try:
            result = fit(
                built.step,
                state,
                workload.batch,
                steps=recipe.steps,
                start=start,
                writers=writers,
                checkpointer=checkpointer,
                checkpoint_every=options.checkpoint_every,
                meta={"numbers": numbers},
                evaluate=built.evaluate,
                evaluate_every=options.evaluate_every,
            )
        finally:
            for writer in writers:
                writer.close()
    if result.stopped_by:
        again = command if options.resume else f"{command} --resume"
        console.print(f"Stopped by {result.stopped_by} after call {result.step}; state saved.")
        console.print(f"Go on with: {again}", soft_wrap=True)
        return
    seconds = time.monotonic() - begun
    _finish(console, built, task, recipe, output, result, numbers, seconds)


def _numbers(workload: Workload, task: Any, recipe: Recipe) -> dict[str, Any]:
    """All that decides the numbers of a run, as JSON gives it back."""
    fields = {
        name: value for name, value in dataclasses.asdict(task).items() if name not in _JUDGING
    }
    fields |= {"workload": workload.name, "data": workload.summary.split(" (")[0]}
    return json.loads(json.dumps(fields | dataclasses.asdict(recipe)))


def _first_state(
    built: Built,
    task: Any,
    checkpointer: Checkpointer,
    options: RunOptions,
    output: pathlib.Path,
    numbers: dict[str, Any],
) -> tuple[boostax.TrainState, int]:
    state = built.init(task.seed)
    latest = checkpointer.latest()
    if latest is None:
        return state, 0
    if not options.resume:
        raise Refusal(
            f"{output} holds a run of {latest} calls. Add --resume to go on with it, or give "
            "another --output."
        )
    saved = checkpointer.meta(latest)["numbers"]
    for name in sorted(saved.keys() | numbers.keys()):
        was, now = saved.get(name), numbers.get(name)
        if was != now:
            raise Refusal(
                f"--resume: {name} must be {was!r}, as in the run saved in {output}, got {now!r}. "
                "It changes the numbers: set it back, or start a run with another --output."
            )
    restored, _ = checkpointer.restore(state, latest)
    return restored, latest


def _writers(
    recipe: Recipe, options: RunOptions, output: pathlib.Path, start: int, console: Console
) -> list[Writer]:
    writers: list[Writer] = [JsonLines(output / "metrics.jsonl", start=start)]
    if options.tensorboard:
        writers.append(TensorBoard(output / "tensorboard", start=start))
    return [*writers, Progress(recipe.steps, start=start, console=console)]


def _table(
    built: Built, task: Any, recipe: Recipe, state: boostax.TrainState, start: int
) -> Table:
    batch = built.workload.batch_size
    scale = recipe.loss_scale
    scale = f"{scale:g}, fixed" if isinstance(scale, float) else scale
    one = f"{batch} per call"
    table = Table(show_header=False, box=None, title=None, padding=(0, 2, 0, 0))
    rows = {
        "workload": f"{built.workload.name}: {built.workload.summary}",
        "parameters": f"{parameter_count(state.params):,}",
        "steps": f"{recipe.steps} calls, {built.optimizer_steps} optimizer steps"
        + (f", resuming after call {start}" if start else ""),
        "effective batch": f"{batch * recipe.accumulate}"
        + (f" ({one}, {recipe.accumulate} calls accumulated)" if recipe.accumulate > 1 else ""),
        "devices": f"{recipe.devices} x {jax.devices()[0].device_kind}"
        + (f", {batch // recipe.devices} examples each" if recipe.devices > 1 else ""),
        "micro-batches": "off" if recipe.microbatches == 1 else f"{recipe.microbatches} per call",
        "computes in": task.dtype,
        "loss scale": "off" if scale == "none" else scale,
    }
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", value)
    return table


def parameter_count(params: Any) -> int:
    """Numbers in a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _digest(params: Any) -> str:
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        total.update(np.asarray(leaf).tobytes())
    return total.hexdigest()


def _finish(
    console: Console,
    built: Built,
    task: Any,
    recipe: Recipe,
    output: pathlib.Path,
    result: FitResult,
    numbers: dict[str, Any],
    seconds: float,
) -> None:
    last = result.history[-1]
    rows = JsonLines.read(output / "metrics.jsonl")
    plot_run(rows, output / "loss.png", built.workload.name)
    held_out = {name: value for name, value in last.items() if name.startswith("held_out_")}
    summary = {
        "configuration": numbers,
        "calls": result.step,
        "optimizer_steps": last.get("optimizer_steps", result.step - last.get("skipped_steps", 0)),
        "skipped_steps": last.get("skipped_steps", 0),
        "parameters": parameter_count(result.state.params),
        "params_sha256": _digest(result.state.params),
        **held_out,
        "seconds": seconds,
        "device": jax.devices()[0].device_kind,
        "versions": {"boostax": boostax.__version__, "jax": jax.__version__},
    }
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(
        f"held-out loss [bold]{last['held_out_loss']:.4f}[/bold], "
        f"accuracy [bold]{last['held_out_accuracy']:.1%}[/bold], in {seconds:.1f} s"
    )
    console.print(f"plot: {output / 'loss.png'}", soft_wrap=True)
    console.print("[bold]Next[/bold]")
    for line in _next(built.workload.name, task, recipe):
        console.print(f"  {line}", soft_wrap=True)


def _next(name: str, task: Any, recipe: Recipe) -> list[str]:
    lines: list[str] = []
    if task.dtype == "float32":
        lines.append(f"boostax train {name} --dtype float16 --output runs/{name}-float16")
    if recipe.accumulate == 1:
        lines.append(f"boostax train {name} --accumulate 4 --output runs/{name}-accumulate")
    if recipe.devices == 1:
        lines.append(f"boostax train {name} --devices 2 --output runs/{name}-two-devices")
    return [*lines[:2], f"boostax compare {name}"]
