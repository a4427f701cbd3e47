# SPDX-License-Identifier: Apache-2.0
"""A run and its finish in the subspace of the run, as one step."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from boostax._core import checks, trees
from boostax.accumulate.window import AccumulateState
from boostax.precision.group_state import GroupLossScaleState
from boostax.precision.loss_scale import LossScaleState
from boostax.subspace import algebra
from boostax.subspace.basis import Basis
from boostax.subspace.dim_reduce import DimReduceState
from boostax.subspace.trajectory import TrajectoryState, trajectory_basis
from boostax.train.compiled import TrainStep
from boostax.train.state import TrainState

PyTree = Any
_PHASES = (TrajectoryState, DimReduceState)
_SCALERS = (LossScaleState, GroupLossScaleState)


@dataclasses.dataclass(frozen=True, eq=False)
class FinishingStep(TrainStep):
    """The step of a run, and after so many optimizer steps that of its finish; made by ``auto``.

    A state says itself which of them is on. The call that meets a run at its end makes a basis of
    the snapshots and of the params as they are now, and a state of the finish from both, whose
    loss scale, key, statistics and count of calls go on; an open window is applied before. What a
    ``TrainStep`` says of itself it says of the run, what it says of a state of the phase of that.

    Attributes:
      after: optimizer steps of the run.
      end: the step of the finish. A checkpoint of the finish is restored as
        ``end.init(params, ...)``.
      begin: the state of the finish from the last one of the run.
    """

    after: int = 0
    end: Any = None
    begin: Any = None
    _seen: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        """One call, of the run or of the finish: see ``TrainStep``."""
        phase = _phase(state)
        if isinstance(phase, DimReduceState):
            return self.end(state, batch)
        if phase is not None and self._over(phase):
            return self.end(self.begin(state), batch)
        state, reported = super().__call__(state, batch)
        self._seen.update(last=_phase(state).steps, most=self._seen["most"] + 1)
        return state, reported

    def flush(self, state: TrainState) -> TrainState:
        """Apply a partial window at the end of a run; a finish has none."""
        return state if self._finishes(state) else super().flush(state)

    def jitted(
        self, state: TrainState, batch: PyTree, *, depth: int | None = None
    ) -> tuple[Any, tuple[TrainState, PyTree]]:
        """The ``jax.jit`` function of a call in the phase of the state, and its arguments."""
        if self._finishes(state):
            return self.end.jitted(state, batch, depth=depth)
        return super().jitted(state, batch, depth=depth)

    def shardings(self, state: PyTree) -> TrainState:
        """Where each leaf of a state lives: what a checkpoint needs to restore it."""
        return self.end.shardings(state) if self._finishes(state) else super().shardings(state)

    def _finishes(self, state: TrainState) -> bool:
        return isinstance(_phase(state), DimReduceState)

    def _over(self, phase: TrajectoryState) -> bool:
        """Whether the run has come to its end; the device is asked as seldom as can be.

        A call takes at most one optimizer step, so nobody needs to ask before as many calls as
        there are steps left. Given a state that it did not see coming, it asks.
        """
        seen = self._seen
        steps, hint = phase.steps, "A run and its finish are two programs: call it from Python."
        outside = not isinstance(steps, Tracer)
        checks.require("FinishingStep", "state", steps, "outside of jit", outside, hint)
        if steps is not seen.get("last") or seen["most"] >= self.after:
            seen.update(last=steps, most=int(steps))
        return seen["most"] >= self.after


def finishing_step(
    run: TrainStep, ends: Callable[[Any], TrainStep], after: int, n_components: int
) -> FinishingStep:
    """A run and a finish by the basis that it recorded.

    Args:
      run: its step, whose chain records.
      ends: from a basis to the step of the finish.
      after: optimizer steps of the run.
      n_components: directions of the basis.
    """

    def empty(params: PyTree) -> Basis:
        mean = jax.tree.map(lambda p: jnp.zeros(p.shape, algebra.compute_dtype(p)), params)
        rows = jax.tree.map(lambda x: jnp.zeros((n_components, *x.shape), x.dtype), mean)
        return Basis(rows, mean, jnp.zeros(n_components))

    def begin(state: TrainState) -> TrainState:
        if trees.find(state.opt_state, lambda node: isinstance(node, AccumulateState)):
            state = run.flush(state)
        params = run.common_params(state)
        basis = trajectory_basis(state.opt_state, n_components, params=params, complete=False)
        missing = int(np.sum(np.asarray(basis.explained) == 0))
        if missing:
            # No run is to end for this.
            warnings.warn(
                f"FinishingStep: dim_reduce.n_components is {n_components}, and the snapshots "
                f"differ in {n_components - missing} directions beyond their rounding: the finish "
                "takes these. Snapshots that lie further apart (dim_reduce.every) have more.",
                stacklevel=3,
            )
        begun = ends(basis).init(params, key=state.key, model_state=state.model_state)
        opt_state = begun.opt_state
        if isinstance(opt_state, _SCALERS):
            scaler = trees.find(state.opt_state, lambda x: isinstance(x, type(opt_state)))[0]
            opt_state = scaler._replace(inner_state=opt_state.inner_state)
        return begun._replace(step=state.step, opt_state=opt_state)

    fields = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    return FinishingStep(**fields, after=after, end=ends(empty), begin=begin)


def _phase(state: TrainState) -> Any:
    """The state of the recorder, or of the finish."""
    return next(iter(trees.find(state.opt_state, lambda node: isinstance(node, _PHASES))), None)
