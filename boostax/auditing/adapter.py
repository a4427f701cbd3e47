# SPDX-License-Identifier: Apache-2.0
"""Import what the audit needs from boostax: errors, steps, states and params.

The other modules of this package import nothing else from boostax, so they read any program.
"""

from typing import Any

import jax
import optax

from boostax._core import checks as checks
from boostax._core.late import late as late
from boostax._core.replicas import is_per_replica
from boostax._core.types import PyTree as PyTree
from boostax.accumulate.window import AccumulateState
from boostax.train.compiled import TrainStep as TrainStep

# The function that errors name.
WHO = "audit"


def is_state(x: object) -> bool:
    """Return whether this is a state of Optax or boostax; params may be a ``LookaheadParams``."""
    ours = type(x).__module__.startswith(("optax.", "boostax."))
    return ours and type(x).__name__.endswith("State")


def window(args: tuple[PyTree, ...]) -> str:
    """Return the path of a window of ``accumulate`` or ``optax.MultiSteps``, if there is one."""

    def is_window(x: object) -> bool:
        ours = isinstance(x, AccumulateState) and x.window is not None
        return ours or isinstance(x, optax.MultiStepsState)

    leaves = jax.tree_util.tree_leaves_with_path(args, is_leaf=is_window)
    windows = ((path, type(x).__name__) for path, x in leaves if is_window(x))
    return next((f"{jax.tree_util.keystr(path)}, {name}" for path, name in windows), "")


def arrays(params: PyTree) -> list[tuple[Any, tuple[int, ...]]]:
    """Return each array of params, and its shape without a dimension of replicas."""
    nodes = jax.tree.leaves(params, is_leaf=is_per_replica)
    pairs = ((x, is_per_replica(node)) for node in nodes for x in jax.tree.leaves(node))
    return [(x, x.shape[stacked:]) for x, stacked in pairs if hasattr(x, "shape")]
