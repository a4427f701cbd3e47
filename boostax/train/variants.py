"""What a step with variants knows of states of one structure."""

from typing import Any

import jax

from boostax._core.prune import Pruning
from boostax.train.placing import local_shapes
from boostax.train.state import TrainState


class Parts:
    """Which variant comes next, and what of a state the program of a variant is given.

    A call costs time for every array that it hands over, whether it is touched or not: moments of
    what is frozen stay where they are.

    Attributes:
      coming: the variant of the next call.
    """

    def __init__(self, variants: Any, state: TrainState, structure: Any):
        self._variants, self._params, self._structure = variants, local_shapes(state), structure
        self._parts: dict[int, Pruning] = {}
        self.coming = variants.on_host(self._params)

    def part(self, variant: int) -> Pruning:
        """Where a state without what the variant leaves alone lies in the whole one."""
        if variant not in self._parts:
            numbers = self._structure.unflatten(range(self._structure.num_leaves))
            opt_state = self._variants.part(self._params, numbers.opt_state, variant)
            places, part = jax.tree.flatten(numbers._replace(opt_state=opt_state))
            self._parts[variant] = Pruning(self._structure, part, tuple(places))
        return self._parts[variant]
