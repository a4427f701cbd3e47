"""``boostax train``: one run with checkpoints, metrics, a plot and a summary."""

import collections
import dataclasses
import hashlib
import json
import pathlib
import shlex
import time
from typing import Any

import jax
import numpy as np
from rich.console import Console

import boostax
from boostax._core.variants import variants_of
from boostax.run.checkpoint import Checkpointer
from boostax.run.cli.build import Built, build, require_devices
from boostax.run.cli.finish import finish, show
from boostax.run.cli.recipe import Recipe, RunOptions
from boostax.run.cli.refusal import Refusal, refusing
from boostax.run.cli.report import counted, plan_table, save
from boostax.run.cluster.start import initialize
from boostax.run.loop import FitResult, fit
from boostax.run.workloads import make
from boostax.run.writers import JsonLines, Progress, TensorBoard, Writer

# What of a task's configuration only says how it is judged.
_JUDGING = frozenset(("eval_batches",))


def train(task: Any, recipe: Recipe, options: RunOptions, argv: list[str]) -> None:
    """Train, or go on training, one workload; ``argv`` is what the user typed."""
    with refusing():
        processes = initialize(heartbeat=options.heartbeat)
        devices = require_devices(recipe.devices, processes.count)
        recipe = dataclasses.replace(recipe, devices=devices)
        workload = make(task)
        built = build(workload, recipe)
        output = options.output or pathlib.Path("runs") / workload.name
        output.mkdir(parents=True, exist_ok=True)
        checkpointer = Checkpointer(output / "checkpoints")
    console = Console(highlight=False, quiet=not processes.first)
    numbers = _numbers(built, task)
    with checkpointer:
        with refusing():
            start = _calls_done(checkpointer, options, output, numbers)
            if start == recipe.calls and (output / "summary.json").exists():
                console.print(f"This run is finished: {start} calls done, results in {output}.")
                console.print("Longer training needs a run of its own: other --steps, --output.")
                return
            # Killed after its last save and before its summary: the finish, if any, comes again.
            start = min(start, recipe.steps)
            state = built.init(task.seed)
            if start:
                state, saved = checkpointer.restore(state, start, reshard=True)
                _say_resharded(console, saved["numbers"]["devices"], recipe.devices)
        console.print(plan_table(built, task.dtype, start))
        writers: list[Writer] = []
        if processes.first:
            with refusing():
                writers.append(JsonLines(output / "metrics.jsonl", start=start))
                if options.tensorboard:
                    writers.append(TensorBoard(output / "tensorboard", start=start))
                writers.append(Progress(recipe.steps, start=start, console=console))
        begun = time.monotonic()
        meta, rows, finished = {"numbers": numbers}, built.step.rows(workload.batch_size), None
        # A process alone keeps nobody waiting.
        unlimited = options.step_limit is None and processes.count == 1
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
                limit=None if unlimited else options.step_limit or 600.0,
            )
            if recipe.finish != "none" and not result.stopped_by:
                state, finished = finish(built, result.state)
                checkpointer.save(recipe.calls, state, meta)
                result = dataclasses.replace(result, state=state)
        finally:
            for writer in writers:
                writer.close()
    if result.stopped_by:
        again = shlex.join(["boostax", *_without(argv, "--resume"), "--resume"])
        console.print(f"Stopped by {result.stopped_by} after call {result.step}; state saved.")
        console.print(f"Go on with: {again}", soft_wrap=True)
    elif processes.first:
        seconds = time.monotonic() - begun
        _report(console, built, output, result, numbers, seconds, finished)
        console.print("[bold]Next[/bold]")
        for line in _next(built, task.dtype, output, argv):
            console.print(f"  {line}", soft_wrap=True)


def _say_resharded(console: Console, was: int, now: int) -> None:
    if was != now:
        console.print(
            f"Saved on {counted(was, 'device')}, going on with {now}: what each of them keeps for "
            "itself (residuals, open windows) is shared out anew, its mean unchanged. The run goes "
            "on, but no longer bit for bit as it would have.",
            soft_wrap=True,
        )


def _numbers(built: Built, task: Any) -> dict[str, Any]:
    """All that decides the numbers of a run, as JSON gives it back."""
    workload = built.workload
    fields = {
        name: value for name, value in dataclasses.asdict(task).items() if name not in _JUDGING
    }
    fields |= {"workload": workload.name, "data": workload.summary.split(" (")[0]}
    return json.loads(json.dumps(fields | dataclasses.asdict(built.recipe)))


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


def _digest(params: Any) -> str:
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        total.update(np.asarray(leaf).tobytes())
    return total.hexdigest()


def _report(
    console: Console,
    built: Built,
    output: pathlib.Path,
    result: FitResult,
    numbers: dict[str, Any],
    seconds: float,
    finished: dict[str, Any] | None,
) -> None:
    from boostax.run.cli.plot import plot_run

    rows = JsonLines.read(output / "metrics.jsonl")
    # A run that was killed between its end and its finish has no calls of its own.
    last = result.history[-1] if result.history else rows[-1]
    if finished is not None:
        last = last | {k: v for k, v in finished["after"].items() if k in last}
    skipped = int(last.get("skipped_steps", 0))
    plot_run(rows, output / "loss.png", built.workload.name)
    frozen = _frozen(built.step, result)
    summary = {
        "configuration": numbers,
        "calls": result.step,
        "optimizer_steps": int(last.get("optimizer_steps", result.step - skipped)),
        "skipped_steps": skipped,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(result.state.params)),
        "params_sha256": _digest(result.state.params),
        **{name: value for name, value in last.items() if name.startswith("held_out_")},
        **({"freeze": frozen} if frozen else {}),
        **({"finish": finished} if finished else {}),
        "seconds": seconds,
    }
    save(summary, output / "summary.json")
    if finished is not None:
        show(console, finished)
    console.print(
        f"held-out loss [bold]{last['held_out_loss']:.4f}[/bold], "
        f"accuracy [bold]{last['held_out_accuracy']:.1%}[/bold], in {seconds:.1f} s"
    )
    if frozen and frozen["depths"]:
        calls = (f"{depth} in {counted(n, 'call')}" for depth, n in frozen["depths"].items())
        steps = counted(len(frozen["compiled"]), "compiled step")
        console.print(f"frozen groups: {', '.join(calls)}; {steps}", soft_wrap=True)
    console.print(f"plot: {output / 'loss.png'}", soft_wrap=True)


def _frozen(step: boostax.train.TrainStep, result: FitResult) -> dict[str, Any]:
    """How many calls of this process froze how many groups; nothing if none ever do."""
    if variants_of(step.tx) is None:
        return {}
    depths = collections.Counter(int(row["frozen_groups"]) for row in result.history)
    return {"depths": dict(sorted(depths.items())), "compiled": list(step.depths)}


def _next(built: Built, dtype: str, output: pathlib.Path, argv: list[str]) -> list[str]:
    """Commands that are worth a try after this one."""
    tries = {
        ("--dtype", "float16"): dtype == "float32",
        ("--accumulate", "4"): built.recipe.accumulate == 1,
        ("--devices", "2"): built.recipe.devices == 1,
    }
    lines: list[str] = []
    for option, value in [words for words, sensible in tries.items() if sensible][:2]:
        other = f"{output}-{option.strip('-')}-{value}"
        kept = _without(argv, "--resume", "--output", option)
        lines.append(shlex.join(["boostax", *kept, option, value, "--output", other]))
    return [*lines, f"boostax compare {built.workload.name}"]


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
