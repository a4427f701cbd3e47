"""``--finish dim_reduce``: a few quasi-Newton steps after the run, in the span of its last part."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import boostax
from boostax._core.place import here, place
from boostax.inspect.tables import Cells
from boostax.run.cli.build import Built, scaled, train_step
from boostax.run.cli.report import grid
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
    basis = _basis(state.opt_state, recipe.value("finish_components"), main.common_params(state))
    axis = main.names[0] if main.names else None
    tx = scaled(boostax.dim_reduce(basis, axis_name=axis), recipe, axis)
    step = train_step(workload, tx, main.mesh, _BATCHES * recipe.microbatches)
    start = main.common_params(state)
    key = None if state.key is None else jax.random.fold_in(state.key, recipe.steps)
    begun = step.init(start, key=key, model_state=state.model_state)
    if recipe.loss_scale == "dynamic":
        # The one that the run has settled on, in a buffer of its own.
        settled = jax.tree.map(jnp.copy, boostax.precision.loss_scale(state.opt_state))
        begun = begun._replace(opt_state=begun.opt_state._replace(scale=settled))
    judge = _Judge(built, state.model_state)
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
        model_state = place(judge.statistics(params), shardings)
    if isinstance(state.params, boostax.PerReplica):
        params = boostax.states.stack_replicas(boostax.PerReplica(params), main.replicas)
    done = state._replace(params=params, model_state=model_state)
    return place(done, main.shardings(done)), report


def show(console: Console, report: dict[str, Any]) -> None:
    """The report as a table, and in a line what it says."""
    cells: Cells = [("", "train loss", "held-out loss", "held-out accuracy")]
    for name in ("before", "mean_of_snapshots", "after"):
        row = report[name]
        losses = f"{row['train_loss']:.4f}", f"{row['held_out_loss']:.4f}"
        cells.append((name.replace("_", " "), *losses, f"{row['held_out_accuracy']:.1%}"))
    title = f"finish: {len(report['steps'])} steps in {report['components']} directions"
    console.print(grid(cells, left=1, title=title))
    last = report["steps"][-1]
    console.print(
        f"gradient in the span {last['subspace_energy']:.1%}, snapshots' variance "
        f"{report['explained']:.1%}, steps accepted {last['subspace_acceptance']:.0%}, "
        f"losses per step {last['subspace_tries']:.2f}",
        soft_wrap=True,
    )
    gained = report["before"]["train_loss"] - report["after"]["train_loss"]
    free = report["before"]["train_loss"] - report["mean_of_snapshots"]["train_loss"]
    if gained <= max(free, 0.0):
        console.print(
            "It brought no more than the mean of the snapshots, which is free; more often so after "
            "a learning rate that has decayed.",
            soft_wrap=True,
        )


class _Judge:
    """The loss on training batches and on the held-out split, with statistics of these params."""

    def __init__(self, built: Built, model_state: PyTree):
        self._built, self._model_state = built, model_state
        self._batches = [built.workload.batch(index) for index in range(_JUDGED)]
        self._key = jax.random.key(0)
        self._loss = jax.jit(built.workload.loss_fn)

    def statistics(self, params: PyTree) -> PyTree:
        """BatchNorm statistics that belong to the params."""
        params, state = here((params, self._model_state))
        return boostax.train.reestimate_model_state(
            self._built.workload.loss_fn, params, state, self._batches, key=self._key
        )

    def __call__(self, params: PyTree) -> dict[str, float]:
        params = here(params)
        state = None if self._model_state is None else self.statistics(params)
        given = {"key": self._key, "model_state": state}
        losses = [float(self._loss(params, batch, **given)[0]) for batch in self._batches]
        return {"train_loss": float(np.mean(losses)), **self._built.judge(params, state)}


def _basis(opt_state: PyTree, components: int, params: PyTree) -> boostax.subspace.Basis:
    """As many directions as the snapshots really have, at most those asked for."""
    count = min(components, int(boostax.subspace.trajectory(opt_state)[1]) - 1)
    while count > 1:
        with contextlib.suppress(ValueError):
            return boostax.subspace.trajectory_basis(opt_state, count, params=params)
        count //= 2
    return boostax.subspace.trajectory_basis(opt_state, 1, params=params)


def _batch(workload: Workload, step: boostax.train.TrainStep, first: int) -> PyTree:
    """Several batches as one, or this process's rows of it.

    Micro-batch i takes the rows i, i + their number, ...
    """
    size = workload.batch_size
    rows = step.rows(_BATCHES * size)
    parts = [
        workload.batch(first + i, rows[rows // size == i] % size)
        for i in range(_BATCHES)
        if np.any(rows // size == i)
    ]
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)
