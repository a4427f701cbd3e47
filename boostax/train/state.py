# SPDX-License-Identifier: Apache-2.0
"""The state that a training run carries from step to step."""

from typing import Any, NamedTuple

PyTree = Any


class TrainState(NamedTuple):
    """State of a run, which a step takes and returns, and which a checkpoint saves.

    Attributes:
      step: i32 scalar, calls so far (micro-steps, with ``accumulate``).
      params: the params.
      opt_state: state of the transformation; its ``PerReplica`` parts lead with the replicas.
      model_state: state of the model, which the loss returns in ``Aux.model_state``; or ``None``.
      key: PRNG key, constant; each call folds ``step`` (and the replica) into it; or ``None``.
    """

    step: Any
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    key: Any
