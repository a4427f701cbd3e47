"""``boostax explain``: what a call of the train step costs, before anything is trained."""

from typing import Any

from rich.console import Console

from boostax.inspect.explain import explain as explain_step
from boostax.inspect.tables import call_cells, part_cells
from boostax.run.cli.build import build, require_devices
from boostax.run.cli.recipe import Recipe
from boostax.run.cli.refusal import refusing
from boostax.run.cli.report import grid, plan_table
from boostax.run.workloads import make


def explain(task: Any, recipe: Recipe) -> None:
    """Print what the recipe decides, its chain, and what a call costs; write nothing."""
    console = Console(highlight=False)
    with refusing():
        require_devices(recipe.devices)
        built = build(make(task), recipe)
        console.print(plan_table(built, task.dtype))
        found = explain_step(built.step, built.init(task.seed), built.workload.batch(0))
    console.print(grid(part_cells(found.parts, words=False), left=1))
    for finding in found.findings:
        console.print(f"! {finding}", soft_wrap=True)
    console.print(grid(call_cells(found.calls)))
    console.print(found.note, soft_wrap=True)
