# SPDX-License-Identifier: Apache-2.0
"""What a run carries from step to step."""

from typing import Any, NamedTuple

PyTree = Any


class TrainState(NamedTuple):
    """All that a run must carry from step to step, and a checkpoint must hold.

    Attributes:
      step: i32 scalar, calls so far (micro-steps, with ``accumulate``).
      params: the params.
      opt_state: state of the transformation; its ``PerReplica`` parts lead with the replicas.
      model_state: what the loss threads through ``Aux.model_state``, or ``None``.
      key: PRNG key, constant; each call folds ``step`` (and the replica) into it. Or ``None``.
    """

    step: Any
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    key: Any
