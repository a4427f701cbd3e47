# SPDX-License-Identifier: Apache-2.0
"""Import what the audit needs from boostax: errors, steps, states and params.

The other modules of this package use the rest of boostax only through this module, so they can read
any program.
"""

from typing import Any

import jax
import optax

from boostax._core import checks as checks
from boostax._core.late import late as late
from boostax._core.replicas import is_per_replica
from boostax._core.types import PyTree as PyTree
from boostax.accumulate.window import AccumulateState
from boostax.train.step import TrainStep as TrainStep

# The name of the function in errors.
WHO = "audit"


def window(args: tuple[PyTree, ...]) -> str:
    """Return the path of a state of ``accumulate`` or ``optax.MultiSteps``, or an empty string."""
    states = (AccumulateState, optax.MultiStepsState)
    # The state of ``accumulate(every=1)`` has no window, but may contain the state of another
    # ``accumulate`` that has a window.
    leaves = jax.tree_util.tree_leaves_with_path(
        args, is_leaf=lambda x: isinstance(x, states) and getattr(x, "window", x) is not None
    )
    windows = ((path, type(x).__name__) for path, x in leaves if isinstance(x, states))
    return next((f"{jax.tree_util.keystr(path)}, {name}" for path, name in windows), "")


def arrays(params: PyTree) -> list[tuple[Any, tuple[int, ...]]]:
    """Return each array of the params, and its shape without the dimension of replicas."""
    nodes = jax.tree.leaves(params, is_leaf=is_per_replica)
    pairs = ((x, is_per_replica(node)) for node in nodes for x in jax.tree.leaves(node))
    return [(x, x.shape[stacked:]) for x, stacked in pairs if hasattr(x, "shape")]
