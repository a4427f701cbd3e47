"""What the commands say: tables on the console, JSON and plots in the output directory."""

import json
import pathlib
from typing import Any

import jax
import rich.box
from rich.table import Table

import boostax
from boostax._core.plain import plain
from boostax._core.variants import variants_of
from boostax.autoboost.reduction import CODECS
from boostax.inspect.tables import Cells
from boostax.run.cli.build import Built
from boostax.run.cli.recipe import Recipe


def save(record: dict[str, Any], path: pathlib.Path) -> None:
    """Write a record as JSON, with what it was made by."""
    made_by = {
        "device": jax.devices()[0].device_kind,
        "versions": {"boostax": boostax.__version__, "jax": jax.__version__},
    }
    path.write_text(json.dumps(plain(record | made_by), indent=1) + "\n")


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


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def plan_table(built: Built, dtype: str, start: int = 0) -> Table:
    """What is about to happen, in a row for each thing that a recipe decides."""
    recipe, batch = built.recipe, built.workload.batch_size
    scale = recipe.loss_scale
    scale = scale if isinstance(scale, str) else f"{scale:g}, fixed"
    steps = f"{recipe.steps} calls, {recipe.optimizer_steps} optimizer steps"
    effective = f"{batch * recipe.accumulate}"
    devices = f"{recipe.devices} x {jax.devices()[0].device_kind}"
    if start:
        steps += f", resuming after call {start}"
    if recipe.accumulate > 1:
        effective += f" ({batch} per call, {recipe.accumulate} calls accumulated)"
    if recipe.devices > 1:
        devices += f", {batch // recipe.devices} examples each"
    rows = {
        "workload": f"{built.workload.name}: {built.workload.summary}",
        "steps": steps,
        "effective batch": effective,
        "devices": devices,
        "reduction": _reduction(recipe),
        "micro-batches": "off" if recipe.microbatches == 1 else f"{recipe.microbatches} per call",
        "computes in": dtype,
        "loss scale": "off" if scale == "none" else scale,
        "freezing": _freezing(built),
        "finish": f"{recipe.calls - recipe.steps} steps" if recipe.finish != "none" else "none",
    }
    table = Table(show_header=False, box=None, title=None, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", value)
    return table


def _reduction(recipe: Recipe) -> str:
    if recipe.devices == 1:
        return "none"
    if recipe.reduce in ("top-k", "random-k"):
        return f"{recipe.reduce}, {recipe.value('density'):.3g} of the elements sent"
    if recipe.reduce == "power-sgd":
        return f"{recipe.reduce}, rank {recipe.value('rank')} sent"
    return recipe.reduce if recipe.reduce in CODECS else f"{recipe.reduce}, {recipe.wire} sent"


def _freezing(built: Built) -> str:
    variants = variants_of(built.step.tx)
    return "off" if variants is None else variants.summary()
