# SPDX-License-Identifier: Apache-2.0
"""``boostax train``: one run with checkpoints, metrics, a plot and a summary."""

import collections
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import shlex
import time
from typing import Any

import jax
import numpy as np

from boostax._core.variants import variants_of
from boostax.run.checkpoint import Checkpointer
from boostax.run.cli.beside import beside
from boostax.run.cli.build import Built, build, require_devices
from boostax.run.cli.finish import finish, told
from boostax.run.cli.plot import plot_run
from boostax.run.cli.recipe import Recipe, RunOptions
from boostax.run.cli.refusal import Refusal, refusing
from boostax.run.cli.report import plan_text, save
from boostax.run.cluster.start import initialize
from boostax.run.loop import FitResult, fit
from boostax.run.workloads import make
from boostax.run.writers import JsonLines, Progress, TensorBoard, Writer


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
    numbers, finished = _numbers(built, task), None

    def say(words: str) -> None:
        if processes.first:
            print(words, flush=True)

    with checkpointer, contextlib.ExitStack() as closing:
        writers: list[Writer] = []
        with refusing():
            start, was = _calls_done(checkpointer, options, output, numbers)
            if start == recipe.calls and (output / "summary.json").exists():
                say(f"This run is finished: {start} calls done, results in {output}.")
                if options.audit:
                    say(beside(built, built.init(task.seed)))
                return
            # Killed after its last save and before its summary: the finish, if any, comes again.
            start = min(start, recipe.steps)
            state = built.init(task.seed)
            if start:
                state, _ = checkpointer.restore(state, start, reshard=True)
            if processes.first:
                writers.append(JsonLines(output / "metrics.jsonl", start=start))
                if options.tensorboard:
                    writers.append(TensorBoard(output / "tensorboard", start=start))
        if start and was != devices:
            say(
                f"Saved on {was} devices, going on with {devices}: what each of them "
                "keeps for itself (residuals, open windows) is shared out anew, its mean "
                "unchanged. The run goes on, but no longer bit for bit as it would have."
            )
        say(plan_text(built, task.dtype, start))
        if processes.first:
            writers.append(Progress(recipe.steps, start=start))
        for writer in writers:
            closing.enter_context(contextlib.closing(writer))
        begun = time.monotonic()
        meta, rows = {"numbers": numbers}, built.step.rows(workload.batch_size)
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
            # A process alone keeps nobody waiting.
            limit=options.step_limit or (600.0 if processes.count > 1 else None),
        )
        if recipe.finish != "none" and not result.stopped_by:
            state, finished = finish(built, result.state)
            checkpointer.save(recipe.calls, state, meta)
            result = dataclasses.replace(result, state=state)
    if result.stopped_by:
        again = [*argv, *["--resume"] * ("--resume" not in argv)]
        say(f"Stopped by {result.stopped_by} after call {result.step}; state saved.")
        say(f"Go on with: {shlex.join(['boostax', *again])}")
    elif processes.first:
        say(_report(built, output, result, numbers, time.monotonic() - begun, finished))
        if options.audit:
            with refusing():
                say(beside(built, result.state))


def _numbers(built: Built, task: Any) -> dict[str, Any]:
    """All that decides the numbers of a run, as JSON gives it back."""
    workload = built.workload
    fields = dataclasses.asdict(task) | dataclasses.asdict(built.recipe)
    # It only says how the task is judged.
    fields.pop("eval_batches", None)
    fields |= {"workload": workload.name, "data": workload.summary.split(" (")[0]}
    return json.loads(json.dumps(fields))


def _calls_done(
    checkpointer: Checkpointer, options: RunOptions, output: pathlib.Path, numbers: dict[str, Any]
) -> tuple[int, int]:
    """After how many calls, and on how many devices, the run was saved."""
    latest = checkpointer.latest()
    if latest is None:
        return 0, 0
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
    return latest, saved["devices"]


def _report(
    built: Built,
    output: pathlib.Path,
    result: FitResult,
    numbers: dict[str, Any],
    seconds: float,
    finished: dict[str, Any] | None,
) -> str:
    """Write the plot and the summary; what to say of them."""
    rows = JsonLines.read(output / "metrics.jsonl")
    last = rows[-1] | ({} if finished is None else finished["after"])
    skipped = int(last.get("skipped_steps", 0))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(result.state.params)]
    digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves))
    plot_run(rows, output / "loss.png", built.workload.name)
    summary = {
        "configuration": numbers,
        "calls": result.step,
        "optimizer_steps": int(last.get("optimizer_steps", result.step - skipped)),
        "skipped_steps": skipped,
        "parameters": sum(leaf.size for leaf in leaves),
        "params_sha256": digest.hexdigest(),
        **{name: value for name, value in last.items() if name.startswith("held_out_")},
        "seconds": seconds,
    }
    if variants_of(built.step.tx) is not None:
        # How many calls of this process froze how many groups.
        depths = collections.Counter(int(row["frozen_groups"]) for row in result.history)
        frozen = {"depths": dict(sorted(depths.items())), "compiled": list(built.step.depths)}
        summary["freeze"] = frozen
    if finished is not None:
        summary["finish"] = finished
    save(summary, output / "summary.json")
    said = [] if finished is None else [told(finished)]
    said.append(
        f"held-out loss {last['held_out_loss']:.4f}, accuracy {last['held_out_accuracy']:.1%}, "
        f"in {seconds:.1f} s\nplot: {output / 'loss.png'}"
    )
    return "\n".join(said)
