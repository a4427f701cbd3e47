"""``boostax explain``: what a call of the train step costs, before anything is trained."""

from collections.abc import Callable
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

from boostax.cli.build import build, refusing, require_devices
from boostax.cli.recipe import Recipe
from boostax.cli.train import plan_table
from boostax.train.explain import Explanation
from boostax.train.explain import explain as explain_step
from boostax.workloads import Workload


def explain(make_workload: Callable[[Any], Workload], task: Any, recipe: Recipe) -> None:
    """Print what the recipe decides and what a call costs; write nothing."""
    console = Console(highlight=False)
    with refusing():
        require_devices(recipe.devices)
        built = build(make_workload(task), recipe)
        console.print(plan_table(built, task, recipe))
        found = explain_step(built.step, built.init(task.seed), built.workload.batch(0))
    console.print(_table(found))
    console.print(found.note, soft_wrap=True)


def _table(found: Explanation) -> Table:
    headings, *rows = found.cells()
    table = Table(box=rich.box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
