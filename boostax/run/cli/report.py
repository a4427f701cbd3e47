# SPDX-License-Identifier: Apache-2.0
"""What the commands say: tables on standard output, JSON in the output directory."""

import json
import pathlib
from typing import Any

import jax

import boostax
from boostax._core.plain import plain
from boostax._core.variants import variants_of
from boostax.inspect.tables import aligned
from boostax.run.cli.build import Built


def save(record: dict[str, Any], path: pathlib.Path) -> None:
    """Write a record as JSON, with what it was made by."""
    made_by = {
        "device": jax.devices()[0].device_kind,
        "versions": {"boostax": boostax.__version__, "jax": jax.__version__},
    }
    path.write_text(json.dumps(plain(record | made_by), indent=1) + "\n")


def plan_text(built: Built, dtype: str, start: int = 0) -> str:
    """What is about to happen: what follows from a recipe, then all that it says."""
    recipe, batch = built.recipe, built.workload.batch_size
    variants = variants_of(built.step.tx)
    rows = {
        "workload": f"{built.workload.name}: {built.workload.summary}",
        "calls": f"{recipe.steps} calls, {recipe.optimizer_steps} optimizer steps",
        "batch": f"{batch} per call, {batch * recipe.accumulate} per optimizer step",
        "on": f"{recipe.devices} x {jax.devices()[0].device_kind}",
        "computes in": dtype,
        "freezing": "off" if variants is None else variants.summary(),
    }
    rows["calls"] += f", resuming after call {start}" if start else ""
    given = {name: value for name, value in vars(recipe).items() if value is not None}
    rows |= {name.replace("_", " "): str(value) for name, value in given.items()}
    return aligned(list(rows.items()), words=True)
