"""Four recipes, each trained as its configuration says, beside plain f32 on the same batches.

Makes ``docs/recipes.md``, beside the results. The one for several hosts runs as two processes.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
from typing import Any

import jax
import optax
from harness import DOCS, Bar, of_rows, on_cpu, over_seeds, report, sections_of

import boostax
from boostax.run.cluster import initialize, launch
from boostax.run.workloads import TextConfig, text

Row = dict[str, Any]
ROWS, STEPS, SEEDS, RATE = 32, 200, (0, 1, 2), 4e-3


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A configuration of ``docs/recipes``, and where it is measured."""

    title: str
    devices: int
    processes: int = 1

    @property
    def mesh(self) -> Any:
        """None on one device."""
        if self.devices == 1:
            return None
        auto = (jax.sharding.AxisType.Auto,)
        return jax.make_mesh((self.devices,), ("data",), axis_types=auto)


RECIPES = {
    "one_gpu": Recipe("One small GPU", 1),
    "small_gpu_store": Recipe("One small GPU, and params that do not fit", 1),
    "one_host": Recipe("One host of 8 devices", 8),
    "several_hosts": Recipe("Several hosts", 8, processes=2),
}
PLAIN = "f32 and a plain mean"


def rate(steps: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, RATE, steps // 10, steps, RATE / 10)


def trained(recipe: Recipe, config: Any, calls: int, seed: int, steps: int) -> Row:
    """A run of so many optimizer steps, each of so many calls, and what its step costs."""
    boost = boostax.auto(config)
    workload = text(TextConfig(batch_size=ROWS, seed=seed))
    params, _ = workload.init(jax.random.key(seed))
    mesh = recipe.mesh
    axis = None if mesh is None else "data"
    optimizer = optax.adamw(rate(steps))
    step = boost.make_train_step(
        workload.loss_fn, optimizer, params, mesh=mesh, axis_name=axis, has_aux=True
    )
    state = step.init(params, key=jax.random.key(seed))
    rows = step.rows(ROWS)
    costs = boostax.explain(step, state, workload.batch(0))
    for index in range(calls * steps):
        state, metrics = step(state, workload.batch(index, rows))
        # On emulated devices, several calls on their way would wait for each other's threads.
        jax.block_until_ready(metrics)
    told = {name: float(value) for name, value in metrics.items()}
    common = jax.device_get(step.common_params(state))
    return {
        **workload.evaluate(common, None),
        "working MB": costs.calls[0].temporary_bytes / 1e6,
        "state MB": costs.state_bytes / 1e6,
        "sent": costs.wire_bytes,
        "skipped": told.get("skipped_total", 0.0),
    }


def work(name: str, steps: int, out: pathlib.Path) -> None:
    """One recipe and plain f32, as one process of those that it has."""
    recipe = RECIPES[name]
    on_cpu(recipe.devices // recipe.processes)
    processes = initialize()
    path = DOCS / "recipes" / f"{name}.json"
    asked = json.loads(path.read_text())
    window = boostax.auto(asked).config.accumulate
    calls = 1 if window is None else window.every
    plain = {name: asked[name] for name in ("accumulate", "clip") if name in asked}
    if isinstance(asked.get("accumulate"), dict):
        sums = ("accumulator_dtype", "rounding")
        plain["accumulate"] = {k: x for k, x in asked["accumulate"].items() if k not in sums}
    found = {
        label: [trained(recipe, config, calls, seed, steps) for seed in SEEDS]
        for label, config in ((path.name, asked), (PLAIN, plain))
    }
    if processes.first:
        out.write_text(json.dumps(found))


def rows_of(recipe: Recipe, found: dict[str, list[Row]]) -> list[Row]:
    """A row for the recipe and one for plain f32."""
    return [
        {
            "recipe": recipe.title,
            "form": label,
            **over_seeds([each["loss"] for each in runs], "held-out loss"),
            "accuracy": statistics.mean(each["accuracy"] for each in runs),
            "working MB": runs[0]["working MB"],
            "state MB": runs[0]["state MB"],
            "KB sent a step": runs[0]["sent"] / 1e3,
            "skipped": statistics.mean(each["skipped"] for each in runs),
        }
        for label, runs in found.items()
    ]


def on_record() -> list[Row]:
    """The rows that were measured before."""
    return sections_of("recipes")["Recipes"]


def page(rows: list[Row]) -> str:
    """The document: the prose of ``docs/recipes``, the configurations and the tables."""
    parts = [(DOCS / "recipes" / "head.txt").read_text().rstrip()]
    for name, recipe in RECIPES.items():
        mine = [row for row in rows if row["recipe"] == recipe.title]
        columns = [c for c in mine[0] if c != "recipe"]
        config = (DOCS / "recipes" / f"{name}.json").read_text().rstrip()
        prose = (DOCS / "recipes" / f"{name}.txt").read_text().rstrip()
        block = f"[{name}.json](recipes/{name}.json):\n\n```json\n{config}\n```"
        table = "\n".join(of_rows(mine, columns))
        parts += [f"## {recipe.title}", block, prose, table]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="other than 200: prints only")
    parser.add_argument(
        "--only", nargs="*", choices=list(RECIPES), default=list(RECIPES), metavar="RECIPE",
        help=f"of {', '.join(RECIPES)}; the others' rows stay; none writes the page anew",
    )  # fmt: skip
    parser.add_argument("--work", help="a recipe to run as one process; for this script itself")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.steps, options.out)
        return
    known = [] if len(options.only) == len(RECIPES) else on_record()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe in RECIPES.items():
            if name not in options.only:
                rows += [row for row in known if row["recipe"] == recipe.title]
                continue
            out = pathlib.Path(folder) / f"{name}.json"
            asked = [sys.executable, __file__, f"--work={name}", f"--out={out}"]
            code = launch(
                [*asked, f"--steps={options.steps}"], recipe.processes, environment=os.environ
            )
            if code:
                raise RuntimeError(f"recipes: {name} ended with {code}")
            rows += rows_of(recipe, json.loads(out.read_text()))
            print(json.dumps(rows[-2:], indent=1), flush=True)
    if options.steps != STEPS:
        return
    bars = [
        Bar(
            f"{ours['recipe']}: held-out loss over that of f32",
            ours["held-out loss"] / plain["held-out loss"],
            1.02,
        )
        for ours, plain in zip(rows[::2], rows[1::2], strict=True)
    ]
    report("recipes", "Four recipes", [("Recipes", rows)], bars)
    (DOCS / "recipes.md").write_text(page(on_record()))


if __name__ == "__main__":
    main()
