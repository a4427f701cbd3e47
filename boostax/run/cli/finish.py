"""``--finish dim_reduce``: a few quasi-Newton steps after the run, in the span of its last part."""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import boostax
from boostax._core import checks
from boostax._core.place import here, place
from boostax.run.cli.recipe import Recipe
from boostax.run.workloads import Workload

PyTree = Any
_STEPS, _COMPONENTS, _BATCHES, _JUDGED = 10, 20, 8, 16


class Finish(NamedTuple):
    """What a finish came to.

    Attributes:
      state: the last state, with the params and statistics after the finish.
      report: numbers for the summary.
    """

    state: boostax.TrainState
    report: dict[str, Any]


def finish_steps(recipe: Recipe) -> int:
    """How many steps follow the run."""
    if recipe.finish == "none":
        return 0
    return _STEPS if recipe.finish_steps is None else recipe.finish_steps


def _components(recipe: Recipe) -> int:
    return _COMPONENTS if recipe.finish_components is None else recipe.finish_components


def recorder(recipe: Recipe, optimizer_steps: int) -> optax.GradientTransformation:
    """One snapshot more than directions, over the second half of the run."""
    half = optimizer_steps // 2
    size = min(_components(recipe) + 1, half)
    every = half // size
    return boostax.record_trajectory(size, every=every, start=optimizer_steps - every * size)


def check_finish(recipe: Recipe, optimizer_steps: int) -> None:
    """Refuse options of ``--finish`` that make no sense."""
    off = recipe.finish == "none"
    for option, value in (
        ("--finish-steps", recipe.finish_steps),
        ("--finish-components", recipe.finish_components),
    ):
        if off:
            hint = "--finish dim_reduce takes quasi-Newton steps after the run."
            checks.absent("boostax", option, value, "left out without --finish", hint)
        elif value is not None:
            hint = "10 steps in 20 directions are the default."
            checks.positive_int("boostax", option, value, hint)
    if off:
        return
    if recipe.freeze != "none":
        raise ValueError(
            "boostax: --finish must be none with --freeze, got dim_reduce. While layers stand "
            "still the path of the params is not recorded."
        )
    if optimizer_steps < 8:
        raise ValueError(
            f"boostax: --steps must give at least 8 optimizer steps with --finish, got "
            f"{optimizer_steps}. The second half of them is what the directions come from."
        )


def finish(
    workload: Workload, main: boostax.TrainStep, recipe: Recipe, state: boostax.TrainState
) -> Finish:
    """Go on from the last state of a run; each step takes eight batches as one."""
    basis = _basis(state.opt_state, _components(recipe), main.common_params(state))
    axis = main.names[0] if main.names else None
    tx = boostax.dim_reduce(basis, axis_name=axis)
    scale = recipe.loss_scale
    if scale == "dynamic":
        tx = boostax.dynamic_loss_scale(tx, axis_name=axis)
    elif scale != "none":
        tx = boostax.static_loss_scale(tx, scale, axis_name=axis)
    step = boostax.make_train_step(
        workload.loss_fn,
        tx,
        mesh=main.mesh,
        axis_name=axis,
        microbatches=_BATCHES * recipe.microbatches,
        has_aux=True,
    )
    start = main.common_params(state)
    key = None if state.key is None else jax.random.fold_in(state.key, recipe.steps)
    begun = step.init(start, key=key, model_state=state.model_state)
    if scale == "dynamic":
        # The one that the run has settled on, in a buffer of its own.
        settled = jax.tree.map(jnp.copy, boostax.loss_scale(state.opt_state))
        begun = begun._replace(opt_state=begun.opt_state._replace(scale=settled))
    judge = _Judge(workload, state.model_state)
    report = {"components": int(jax.tree.leaves(basis.components)[0].shape[0])}
    report |= {"explained": float(np.sum(basis.explained)), "before": judge(start)}
    mean = jax.tree.map(lambda x, p: x.astype(p.dtype), basis.mean, start)
    report["mean_of_snapshots"] = judge(mean)
    rows: list[dict[str, float]] = []
    for index in range(finish_steps(recipe)):
        begun, metrics = step(begun, _batch(workload, step, recipe.steps + index * _BATCHES))
        rows.append({name: float(value) for name, value in metrics.items()})
    report |= {"after": judge(begun.params), "steps": rows}
    params, model_state = begun.params, begun.model_state
    if model_state is not None:
        shardings = jax.tree.map(lambda old: old.sharding, model_state)
        model_state = place(judge.statistics(params), shardings)
    if isinstance(state.params, boostax.PerReplica):
        params = boostax.stack_replicas(boostax.PerReplica(params), main.replicas)
    done = state._replace(params=params, model_state=model_state)
    return Finish(place(done, main.shardings(done)), report)


def show(console: Console, report: dict[str, Any]) -> None:
    """The report as a table, and in a line what it says."""
    table = Table(
        title=f"finish: {len(report['steps'])} steps in {report['components']} directions"
    )
    for column in ("", "train loss", "held-out loss", "held-out accuracy"):
        table.add_column(column, justify="left" if not column else "right")
    for name in ("before", "mean_of_snapshots", "after"):
        row = report[name]
        table.add_row(
            name.replace("_", " "),
            f"{row['train_loss']:.4f}",
            f"{row['held_out_loss']:.4f}",
            f"{row['held_out_accuracy']:.1%}",
        )
    console.print(table)
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

    def __init__(self, workload: Workload, model_state: PyTree):
        self._workload, self._model_state = workload, model_state
        self._batches = [workload.batch(index) for index in range(_JUDGED)]
        self._key = jax.random.key(0)

        def loss(params: PyTree, batch: PyTree, model_state: PyTree) -> jax.Array:
            given = {} if model_state is None else {"model_state": model_state}
            return workload.loss_fn(params, batch, key=self._key, **given)[0]

        self._loss = jax.jit(loss)

    def statistics(self, params: PyTree) -> PyTree:
        """BatchNorm statistics that belong to the params."""
        params, state = here((params, self._model_state))
        return boostax.reestimate_model_state(
            self._workload.loss_fn, params, state, self._batches, key=self._key
        )

    def __call__(self, params: PyTree) -> dict[str, float]:
        params = here(params)
        state = None if self._model_state is None else self.statistics(params)
        losses = [float(self._loss(params, batch, state)) for batch in self._batches]
        held_out = self._workload.evaluate(params, state)
        found = {f"held_out_{name}": value for name, value in held_out.items()}
        return {"train_loss": float(np.mean(losses)), **found}


def _basis(opt_state: PyTree, components: int, params: PyTree) -> boostax.Basis:
    """As many directions as the snapshots really have, at most those asked for."""
    count = min(components, int(boostax.trajectory(opt_state)[1]) - 1)
    while count > 1:
        with contextlib.suppress(ValueError):
            return boostax.trajectory_basis(opt_state, count, params=params)
        count //= 2
    return boostax.trajectory_basis(opt_state, 1, params=params)


def _batch(workload: Workload, step: boostax.TrainStep, first: int) -> PyTree:
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
