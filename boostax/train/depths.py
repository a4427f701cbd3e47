"""What a step that freezes knows of states of one structure."""

from typing import Any

import jax

from boostax._core.prune import Pruning
from boostax.freeze.driver import HostDepth
from boostax.freeze.scheduled import ScheduledFreeze
from boostax.train.placing import local_shapes
from boostax.train.state import TrainState


class Depths:
    """Which depth comes next, and what of a state the program of a depth is given.

    A call costs time for every array that it hands over, whether it is touched or not: moments of
    what is frozen stay where they are.

    Attributes:
      coming: the depth of the next call.
    """

    def __init__(self, tx: ScheduledFreeze, state: TrainState, structure: Any):
        self._tx, self._params, self._structure = tx, local_shapes(state), structure
        self._parts: dict[int, Pruning] = {}
        self.coming = HostDepth(tx.freezing.plan(self._params))

    def part(self, depth: int) -> Pruning:
        """Where a state without what is frozen lies in the whole one."""
        if depth not in self._parts:
            numbers = self._structure.unflatten(range(self._structure.num_leaves))
            inner_state = self._tx.cut(self._params, depth).take(numbers.opt_state.inner_state)
            opt_state = numbers.opt_state._replace(inner_state=inner_state)
            places, part = jax.tree.flatten(numbers._replace(opt_state=opt_state))
            self._parts[depth] = Pruning(self._structure, part, tuple(places))
        return self._parts[depth]
