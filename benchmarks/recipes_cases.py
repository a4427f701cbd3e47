"""Configurations of ``docs/recipes``, and the audit of a step by one of them, by shapes alone."""

import json
from typing import Any

import compilers_cases as cases
import jax
import optax
from compilers_cases import Model, mesh_of
from harness import DOCS

import boostax

FOLDER = DOCS / "recipes"


def config_of(name: str) -> dict[str, Any]:
    """Read the file of a recipe."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def calls_of(config: dict[str, Any]) -> int:
    """Count the calls of an optimizer step."""
    window = config.get("accumulate", 1)
    return window["every"] if isinstance(window, dict) else window


def stepped(
    config: dict[str, Any],
    target: str,
    model: Model,
    optimizer: optax.GradientTransformation | None = None,
    rows: int = 8,
    **options: Any,
) -> "boostax.auditing.Audit":
    """Audit a configuration's step, of so many rows a device and micro-batch."""
    mesh = mesh_of(target)
    if mesh.size > 1:
        options |= {"mesh": mesh, "axis_name": cases.AXIS}
    inner = optax.adamw(1e-3) if optimizer is None else optimizer
    step = boostax.auto(config).make_train_step(model.loss, inner, model.params, **options)
    batch = model.batch(rows * mesh.size * config.get("microbatches", 1))
    return boostax.audit(
        step, step.init(model.params), batch, target=target, calls=calls_of(config)
    )


def hidden(params: Any) -> Any:
    """Select what Muon is for: the matrices of scanned layers; all else is Adam's."""
    stack = optax.contrib.MuonDimensionNumbers(1, 2)
    pick = lambda path, x: stack if path[0].key == "layers" and x.ndim == 3 else None  # noqa: E731
    return jax.tree_util.tree_map_with_path(pick, params)


def muon() -> optax.GradientTransformation:
    return optax.contrib.muon(0.02, muon_weight_dimension_numbers=hidden)
