# SPDX-License-Identifier: Apache-2.0
"""``--finish dim_reduce``: a few quasi-Newton steps after the run, in the span of its last part."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import boostax
from boostax._core.place import here, place
from boostax.inspect.tables import Cells, aligned
from boostax.run.cli.build import Built, boosted, train_step
from boostax.run.workloads import Workload

PyTree = Any
_BATCHES, _JUDGED = 8, 16


def finish(
    built: Built, state: boostax.train.TrainState
) -> tuple[boostax.train.TrainState, dict[str, Any]]:
    """Go on from the last state of a run; each step takes eight batches as one.

    Returns:
      The last state, with the params and statistics after the finish; numbers for the summary.
    """
    workload, recipe, main = built.workload, built.recipe, built.step
    start = main.common_params(state)
    basis = _basis(state.opt_state, recipe.value("finish_components"), start)
    axis = main.names[0] if main.names else None
    tx = boosted(recipe).finish(basis, start, axis_name=axis)
    step = train_step(workload, tx, main.mesh, _BATCHES * recipe.microbatches)
    key = None if state.key is None else jax.random.fold_in(state.key, recipe.steps)
    begun = step.init(start, key=key, model_state=state.model_state)
    if recipe.loss_scale == "dynamic":
        # The one that the run has settled on, in a buffer of its own.
        settled = jax.tree.map(jnp.copy, boostax.precision.loss_scale(state.opt_state))
        begun = begun._replace(opt_state=begun.opt_state._replace(scale=settled))
    batches = [workload.batch(index) for index in range(_JUDGED)]
    fixed, loss = jax.random.key(0), jax.jit(workload.loss_fn)

    def statistics(params: PyTree) -> PyTree:
        """BatchNorm statistics that belong to the params."""
        params, old = here((params, state.model_state))
        return boostax.train.reestimate_model_state(
            workload.loss_fn, params, old, batches, key=fixed
        )

    def judge(params: PyTree) -> dict[str, float]:
        """The loss on training batches and on the held-out split."""
        params = here(params)
        given = None if state.model_state is None else statistics(params)
        losses = [loss(params, batch, key=fixed, model_state=given)[0] for batch in batches]
        return {"train_loss": float(np.mean(losses)), **built.judge(params, given)}

    report = {"components": int(jax.tree.leaves(basis.components)[0].shape[0])}
    report |= {"explained": float(np.sum(basis.explained)), "before": judge(start)}
    mean = jax.tree.map(lambda x, p: x.astype(p.dtype), basis.mean, start)
    report["mean_of_snapshots"] = judge(mean)
    rows: list[dict[str, float]] = []
    for index in range(recipe.value("finish_steps")):
        begun, metrics = step(begun, _batch(workload, step, recipe.steps + index * _BATCHES))
        rows.append({name: float(value) for name, value in metrics.items()})
    report |= {"after": judge(begun.params), "steps": rows}
    params, model_state = begun.params, begun.model_state
    if model_state is not None:
        shardings = jax.tree.map(lambda old: old.sharding, model_state)
        model_state = place(statistics(params), shardings)
    if isinstance(state.params, boostax.PerReplica):
        params = boostax.states.stack_replicas(boostax.PerReplica(params), main.replicas)
    done = state._replace(params=params, model_state=model_state)
    return place(done, main.shardings(done)), report


def told(report: dict[str, Any]) -> str:
    """The report as a table, and what the last step says of itself."""
    names = ("train_loss", "held_out_loss", "held_out_accuracy")
    cells: Cells = [("", *(name.replace("_", " ") for name in names))]
    for row in ("before", "mean_of_snapshots", "after"):
        cells.append((row.replace("_", " "), *(f"{report[row][name]:.4f}" for name in names)))
    last = report["steps"][-1]
    return (
        f"finish: {len(report['steps'])} steps in {report['components']} directions\n"
        f"{aligned(cells, words=True)}\n"
        f"gradient in the span {last['subspace_energy']:.1%}, snapshots' variance "
        f"{report['explained']:.1%}, steps accepted {last['subspace_acceptance']:.0%}, "
        f"losses per step {last['subspace_tries']:.2f}"
    )


def _basis(opt_state: PyTree, components: int, params: PyTree) -> boostax.subspace.Basis:
    """As many directions as the snapshots really have, at most those asked for."""
    count = min(components, int(boostax.subspace.trajectory(opt_state)[1]) - 1)
    while count > 1:
        with contextlib.suppress(ValueError):
            return boostax.subspace.trajectory_basis(opt_state, count, params=params)
        count //= 2
    return boostax.subspace.trajectory_basis(opt_state, 1, params=params)


def _batch(workload: Workload, step: boostax.train.TrainStep, first: int) -> PyTree:
    """Several batches as one, or this process's rows of it."""
    rows = step.rows(_BATCHES * workload.batch_size)
    parts = [workload.batch(first + i) for i in range(_BATCHES)]
    return jax.tree.map(lambda *x: np.concatenate(x)[rows], *parts)
