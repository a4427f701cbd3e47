# SPDX-License-Identifier: Apache-2.0
"""Look up how many groups are frozen at a step, in the program and on the host."""

import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import checks, gate
from boostax.freeze.schedules import CYCLE, FreezeSchedule, freeze_schedule

PyTree = Any
_WHO = "scheduled_freeze"


class Plan:
    """A schedule for the groups of given params: the depth of every step, the group of every leaf.

    Args:
      labels: a tree of ints like the params: the group of each leaf.
      groups: number of groups.
      schedule: the depth of every step.
      repeat: whether the schedule starts anew at its end.

    Attributes:
      groups: number of groups.
      depths: i32 ``[steps]``, the depth of every step.
      drawn: the depths that occur, ascending.
    """

    def __init__(self, labels: PyTree, groups: int, schedule: FreezeSchedule, repeat: bool):
        self.groups, self.depths = groups, schedule.depths(groups)
        self.drawn = tuple(int(depth) for depth in np.unique(self.depths))
        self._labels, self._repeat = labels, repeat
        # The end of the table counts as a change: the first depth may differ from the last.
        self._changes = np.append(np.flatnonzero(np.diff(self.depths)) + 1, len(self.depths))

    def active(self, depth: int) -> PyTree:
        """Return a tree of bools that are True for the leaves trained at this depth."""
        return jax.tree.map(lambda group: group >= depth, self._labels)

    def index(self, depth: jax.Array) -> jax.Array:
        """Return the position of a depth in ``drawn``, in the program."""
        return jnp.searchsorted(jnp.asarray(self.drawn, jnp.int32), depth).astype(jnp.int32)

    def at(self, steps: jax.Array) -> jax.Array:
        """Return the depth after ``steps`` applied steps, in the program; the last past the end."""
        length = len(self.depths)
        index = steps % length if self._repeat else jnp.minimum(steps, length - 1)
        # As a constant in the program it takes one byte per step.
        compact = self.depths.astype(np.min_scalar_type(self.drawn[-1]))
        return jnp.asarray(compact)[index].astype(jnp.int32)

    def known(self, steps: int) -> int:
        """Return the depth after ``steps`` applied steps, on the host; raise after the end."""
        length = len(self.depths)
        if steps >= length and not self._repeat:
            raise ValueError(
                f"{_WHO}: schedule must be at least as long as the run, got {length} steps and one "
                "more to take. Make total_steps the length of the run, or pass repeat=True."
            )
        return int(self.depths[steps % length])

    def until(self, steps: int) -> int:
        """Return the next count of applied steps at which the depth may change."""
        start = steps - steps % len(self.depths)
        return start + int(self._changes[np.searchsorted(self._changes, steps - start, "right")])


class HostDepth:
    """The depth of each call of one run, found on the host with few reads of the device.

    A call applies at most one step. So if the depth changes in ``n`` steps, it does not change
    during the next ``n`` calls, and the counter on the device need not be read. Without a gate
    every call applies a step, and the counter is read only once. If a state was not returned by the
    last call, its counter is read again.

    Args:
      plan: the schedule.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._last: jax.Array | None = None
        self._most = self._until = self._depth = 0

    def __call__(self, state: Any) -> int:
        """Return the depth of a call with this state.

        Raises:
          ValueError: the schedule has ended.
        """
        unknown = state.steps is not self._last
        if unknown or self._most >= self._until:
            if unknown or gate.has_gate(state.inner_state):
                self._most = int(state.steps)
            self._depth, self._until = self._plan.known(self._most), self._plan.until(self._most)
            # From now on this state is followed, and the earlier one is forgotten.
            self._last = state.steps
        return self._depth

    def follow(self, state: Any) -> None:
        """Record the state that the call returned."""
        self._last = state.steps
        self._most += 1


def as_schedule(schedule: Any, repeat: bool) -> tuple[FreezeSchedule, bool]:
    """Return a user's schedule, given in any form, and whether it starts anew at its end."""
    if isinstance(schedule, FreezeSchedule):
        return schedule, repeat
    if callable(schedule):
        return freeze_schedule(cast(Callable[[int], int], schedule), total_steps=CYCLE), repeat
    hint = "boostax.freeze_schedule makes one; 2 keeps the first two groups frozen for good."
    allowed = "a FreezeSchedule, a function of the step, a depth, or a sequence of depths"
    try:
        listed = list(schedule) if isinstance(schedule, Iterable) else schedule
        depths = [operator.index(depth) for depth in np.atleast_1d(listed)]
    except (TypeError, ValueError) as error:
        raise TypeError(checks.message(_WHO, "schedule", allowed, schedule, hint)) from error
    checks.require(_WHO, "schedule", schedule, allowed, bool(depths) and min(depths) >= 0, hint)
    found = freeze_schedule(depths.__getitem__, total_steps=len(depths))
    return found, repeat or len(depths) == 1
