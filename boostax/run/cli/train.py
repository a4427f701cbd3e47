"""``boostax train``: one run with checkpoints, metrics, a plot and a summary."""

import collections
import dataclasses
import hashlib
import json
import pathlib
import shlex
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import boostax
from boostax._core import checks
from boostax._core.groups import group_count
from boostax.freeze.plateau import FreezeOnPlateau
from boostax.freeze.scheduled import ScheduledFreeze
from boostax.run.checkpoint import Checkpointer
from boostax.run.cli.build import (
    Built,
    Refusal,
    build,
    density,
    rank,
    refusing,
    require_devices,
)
from boostax.run.cli.compare import counted
from boostax.run.cli.finish import Finish, finish, finish_steps, show
from boostax.run.cli.recipe import CODECS, Recipe, RunOptions
from boostax.run.cluster.start import Processes, initialize
from boostax.run.loop import FitResult, fit
from boostax.run.workloads import Workload
from boostax.run.writers import JsonLines, Progress, TensorBoard, Writer

# What of a task's configuration only says how it is judged.
_JUDGING = frozenset(("eval_batches",))


def train(
    make_workload: Callable[[Any], Workload],
    task: Any,
    recipe: Recipe,
    options: RunOptions,
    argv: list[str],
) -> None:
    """Train, or go on training, one workload; ``argv`` is what the user typed."""
    with refusing():
        for name in ("checkpoint_every", "evaluate_every"):
            option = "--" + name.replace("_", "-")
            checks.positive_int("boostax", option, getattr(options, name), "It counts calls.")
        if options.step_limit is not None:
            hint = "It is several times what a call takes, in seconds."
            checks.number(
                "boostax", "--step-limit", options.step_limit, "> 0", lambda x: x > 0, hint
            )
        processes = initialize(heartbeat=options.heartbeat)
        devices = require_devices(recipe.devices, processes.count)
        recipe = dataclasses.replace(recipe, devices=devices)
        workload = make_workload(task)
        built = build(workload, recipe)
        output = options.output or pathlib.Path("runs") / workload.name
        output.mkdir(parents=True, exist_ok=True)
        checkpointer = Checkpointer(output / "checkpoints")
    console = Console(highlight=False, quiet=not processes.first)
    numbers = _numbers(workload, task, recipe)
    with checkpointer:
        with refusing():
            start = _calls_done(checkpointer, options, output, numbers)
            written = (output / "summary.json").exists()
            if start == recipe.steps + finish_steps(recipe) and written:
                console.print(f"This run is finished: {start} calls done, results in {output}.")
                console.print("Longer training needs a run of its own: other --steps, --output.")
                return
            # Killed after its last save and before its summary: the finish, if any, comes again.
            start = min(start, recipe.steps)
            state = built.init(task.seed)
            if start:
                state, saved = checkpointer.restore(state, start, reshard=True)
                _say_resharded(console, saved["numbers"]["devices"], recipe.devices)
        console.print(plan_table(built, task, recipe, start))
        writers: list[Writer] = []
        if processes.first:
            with refusing():
                writers = _writers(recipe, options, output, start, console)
        begun = time.monotonic()
        meta = {"numbers": numbers}
        finished = None
        rows = built.step.rows(workload.batch_size)
        try:
            result = fit(
                built.step,
                state,
                lambda index: workload.batch(index, rows),
                steps=recipe.steps,
                start=start,
                writers=writers,
                checkpointer=checkpointer,
                checkpoint_every=options.checkpoint_every,
                meta=meta,
                evaluate=built.evaluate,
                evaluate_every=options.evaluate_every,
                limit=_limit(options, processes),
            )
            if recipe.finish != "none" and not result.stopped_by:
                finished = finish(workload, built.step, recipe, result.state)
                checkpointer.save(recipe.steps + finish_steps(recipe), finished.state, meta)
                result = dataclasses.replace(result, state=finished.state)
        finally:
            for writer in writers:
                writer.close()
    if result.stopped_by:
        again = shlex.join(["boostax", *_without(argv, "--resume"), "--resume"])
        console.print(f"Stopped by {result.stopped_by} after call {result.step}; state saved.")
        console.print(f"Go on with: {again}", soft_wrap=True)
        return
    if not processes.first:
        return
    seconds = time.monotonic() - begun
    _finish(console, built, output, result, numbers, seconds, finished)
    console.print("[bold]Next[/bold]")
    for line in _next(built.workload.name, task, recipe, output, argv):
        console.print(f"  {line}", soft_wrap=True)


def _limit(options: RunOptions, processes: Processes) -> float | None:
    """Seconds for a call. A process alone keeps nobody waiting."""
    alone = options.step_limit is None and processes.count == 1
    return None if alone else options.step_limit or 600.0


def _say_resharded(console: Console, was: int, now: int) -> None:
    if was != now:
        console.print(
            f"Saved on {counted(was, 'device')}, going on with {now}: what each of them keeps for "
            "itself (residuals, open windows) is shared out anew, its mean unchanged. The run goes "
            "on, but no longer bit for bit as it would have.",
            soft_wrap=True,
        )


def _numbers(workload: Workload, task: Any, recipe: Recipe) -> dict[str, Any]:
    """All that decides the numbers of a run, as JSON gives it back."""
    fields = {
        name: value for name, value in dataclasses.asdict(task).items() if name not in _JUDGING
    }
    fields |= {"workload": workload.name, "data": workload.summary.split(" (")[0]}
    return json.loads(json.dumps(fields | dataclasses.asdict(recipe)))


def _calls_done(
    checkpointer: Checkpointer,
    options: RunOptions,
    output: pathlib.Path,
    numbers: dict[str, Any],
) -> int:
    latest = checkpointer.latest()
    if latest is None:
        return 0
    if not options.resume:
        raise Refusal(
            f"{output} holds a run of {latest} calls. Add --resume to go on with it, or give "
            "another --output."
        )
    saved = checkpointer.meta(latest)["numbers"]
    for name in sorted((saved.keys() | numbers.keys()) - {"devices"}):
        was, now = saved.get(name), numbers.get(name)
        if was != now:
            raise Refusal(
                f"--resume: {name} must be {was!r}, as in the run saved in {output}, got {now!r}. "
                "It changes the numbers: set it back, or start a run with another --output."
            )
    return latest


def _writers(
    recipe: Recipe, options: RunOptions, output: pathlib.Path, start: int, console: Console
) -> list[Writer]:
    writers: list[Writer] = [JsonLines(output / "metrics.jsonl", start=start)]
    if options.tensorboard:
        writers.append(TensorBoard(output / "tensorboard", start=start))
    return [*writers, Progress(recipe.steps, start=start, console=console)]


def plan_table(built: Built, task: Any, recipe: Recipe, start: int = 0) -> Table:
    """What is about to happen, in a row for each thing that a recipe decides."""
    batch = built.workload.batch_size
    scale = recipe.loss_scale
    scale = scale if isinstance(scale, str) else f"{scale:g}, fixed"
    one = f"{batch} per call"
    table = Table(show_header=False, box=None, title=None, padding=(0, 2, 0, 0))
    rows = {
        "workload": f"{built.workload.name}: {built.workload.summary}",
        "steps": f"{recipe.steps} calls, {built.optimizer_steps} optimizer steps"
        + (f", resuming after call {start}" if start else ""),
        "effective batch": f"{batch * recipe.accumulate}"
        + (f" ({one}, {recipe.accumulate} calls accumulated)" if recipe.accumulate > 1 else ""),
        "devices": f"{recipe.devices} x {jax.devices()[0].device_kind}"
        + (f", {batch // recipe.devices} examples each" if recipe.devices > 1 else ""),
        "reduction": _reduction(recipe),
        "micro-batches": "off" if recipe.microbatches == 1 else f"{recipe.microbatches} per call",
        "computes in": task.dtype,
        "loss scale": "off" if scale == "none" else scale,
        "freezing": _freezing(built),
        "finish": f"{finish_steps(recipe)} steps" if recipe.finish != "none" else "none",
    }
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", value)
    return table


def _reduction(recipe: Recipe) -> str:
    if recipe.devices == 1:
        return "none"
    if recipe.reduce in ("top-k", "random-k"):
        return f"{recipe.reduce}, {density(recipe):.3g} of the entries sent"
    if recipe.reduce == "power-sgd":
        return f"{recipe.reduce}, rank {rank(recipe)} sent"
    return recipe.reduce if recipe.reduce in CODECS else f"{recipe.reduce}, {recipe.wire} sent"


def _freezing(built: Built) -> str:
    tx = built.step.tx
    if not isinstance(tx, ScheduledFreeze):
        return "off"
    schedule, groups = tx.freezing.schedule, group_count(tx.freezing.groups)
    if isinstance(schedule, FreezeOnPlateau):
        looks = counted(schedule.every, "optimizer step")
        return f"plateau, {groups} groups, a look every {looks}"
    share = np.mean(schedule.depths(groups) > 0)
    return f"{schedule.kind}, {groups} groups, on {share:.0%} of the optimizer steps"


def _digest(params: Any) -> str:
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        total.update(np.asarray(leaf).tobytes())
    return total.hexdigest()


def _finish(
    console: Console,
    built: Built,
    output: pathlib.Path,
    result: FitResult,
    numbers: dict[str, Any],
    seconds: float,
    finished: Finish | None,
) -> None:
    from boostax.run.cli.plot import plot_run

    rows = JsonLines.read(output / "metrics.jsonl")
    # A run that was killed between its end and its finish has no calls of its own.
    last = result.history[-1] if result.history else rows[-1]
    if finished is not None:
        last = last | {k: v for k, v in finished.report["after"].items() if k in last}
    skipped = int(last.get("skipped_steps", 0))
    plot_run(rows, output / "loss.png", built.workload.name)
    held_out = {name: value for name, value in last.items() if name.startswith("held_out_")}
    frozen = _frozen(built.step, result)
    summary = {
        "configuration": numbers,
        "calls": result.step,
        "optimizer_steps": int(last.get("optimizer_steps", result.step - skipped)),
        "skipped_steps": skipped,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(result.state.params)),
        "params_sha256": _digest(result.state.params),
        **held_out,
        **({"freeze": frozen} if frozen else {}),
        **({"finish": finished.report} if finished else {}),
        "seconds": seconds,
        "device": jax.devices()[0].device_kind,
        "versions": {"boostax": boostax.__version__, "jax": jax.__version__},
    }
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if finished is not None:
        show(console, finished.report)
    console.print(
        f"held-out loss [bold]{last['held_out_loss']:.4f}[/bold], "
        f"accuracy [bold]{last['held_out_accuracy']:.1%}[/bold], in {seconds:.1f} s"
    )
    if frozen and frozen["depths"]:
        calls = (f"{depth} in {counted(n, 'call')}" for depth, n in frozen["depths"].items())
        steps = counted(len(frozen["compiled"]), "compiled step")
        console.print(f"frozen groups: {', '.join(calls)}; {steps}", soft_wrap=True)
    console.print(f"plot: {output / 'loss.png'}", soft_wrap=True)


def _frozen(step: boostax.TrainStep, result: FitResult) -> dict[str, Any]:
    """How many calls of this process froze how many groups; nothing if none ever do."""
    if not isinstance(step.tx, ScheduledFreeze):
        return {}
    depths = collections.Counter(int(row["frozen_groups"]) for row in result.history)
    return {"depths": dict(sorted(depths.items())), "compiled": list(step.depths)}


def _next(name: str, task: Any, recipe: Recipe, output: pathlib.Path, argv: list[str]) -> list[str]:
    tries = [
        (task.dtype == "float32", "--dtype", "float16"),
        (recipe.accumulate == 1, "--accumulate", "4"),
        (recipe.devices == 1, "--devices", "2"),
    ]
    lines: list[str] = []
    for sensible, option, value in tries:
        if sensible:
            other = f"{output}-{option.strip('-')}-{value}"
            kept = _without(argv, "--resume", "--output", option)
            lines.append(shlex.join(["boostax", *kept, option, value, "--output", other]))
    return [*lines[:2], f"boostax compare {name}"]


def _without(argv: list[str], *options: str) -> list[str]:
    """The arguments less some options and their values."""
    kept: list[str] = []
    dropping = False
    for word in argv:
        if word.startswith("--"):
            dropping = word.split("=")[0] in options
        if not dropping:
            kept.append(word)
    return kept
