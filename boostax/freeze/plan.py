# SPDX-License-Identifier: Apache-2.0
"""Look up how many groups are frozen at which step, in the program and on the host."""

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
    """Holds a depth for every step, and the group of every leaf.

    Args:
      labels: a tree like the params of ints, the groups.
      groups: how many there are.
      schedule: has a depth for every step.
      repeat: start anew at the end.

    Attributes:
      groups: how many there are.
      depths: i32 ``[steps]``.
      drawn: those that occur, ascending.
    """

    def __init__(self, labels: PyTree, groups: int, schedule: FreezeSchedule, repeat: bool):
        self.groups, self.depths = groups, schedule.depths(groups)
        self.drawn = tuple(int(depth) for depth in np.unique(self.depths))
        self._labels, self._repeat = labels, repeat
        # The end of the table may bring another depth, or none any more.
        self._changes = np.append(np.flatnonzero(np.diff(self.depths)) + 1, len(self.depths))

    def active(self, depth: int) -> PyTree:
        """Return which leaves are trained while so many groups are frozen."""
        return jax.tree.map(lambda group: group >= depth, self._labels)

    def index(self, depth: jax.Array) -> jax.Array:
        """Return the place of a depth among those drawn, in the program."""
        return jnp.searchsorted(jnp.asarray(self.drawn, jnp.int32), depth).astype(jnp.int32)

    def at(self, steps: jax.Array) -> jax.Array:
        """Return the depth after so many applied steps, in the program; past the end the last."""
        length = len(self.depths)
        index = steps % length if self._repeat else jnp.minimum(steps, length - 1)
        # The constant in the program takes a byte per step.
        compact = self.depths.astype(np.min_scalar_type(self.drawn[-1]))
        return jnp.asarray(compact)[index].astype(jnp.int32)

    def known(self, steps: int) -> int:
        """Return the depth after so many applied steps, on the host; raise past the end."""
        length = len(self.depths)
        if steps >= length and not self._repeat:
            raise ValueError(
                f"{_WHO}: schedule must be at least as long as the run, got {length} steps "
                f"and one more to take. Make total_steps that of the run, or pass repeat=True."
            )
        return int(self.depths[steps % length])

    def until(self, steps: int) -> int:
        """Return the first count of applied steps at which another depth could follow."""
        start = steps - steps % len(self.depths)
        return start + int(self._changes[np.searchsorted(self._changes, steps - start, "right")])


class HostDepth:
    """Follows one run from call to call.

    A call takes at most one applied step, so nothing changes before as many calls as steps are left
    to the next change, and the device is not asked. Without a gate every call is an applied step,
    and nothing needs to be asked at all. A state that it did not see coming is asked.

    Args:
      plan: the schedule.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._last: Any = None
        self._most = self._until = self._depth = 0

    def __call__(self, state: Any) -> int:
        """Return the groups to freeze in a call with this state.

        Raises:
          ValueError: the schedule is over.
        """
        strange = state.steps is not self._last
        if strange or self._most >= self._until:
            if strange or gate.has_gate(state.inner_state):
                self._most = int(state.steps)
            self._depth, self._until = self._plan.known(self._most), self._plan.until(self._most)
            # What is known now is known of this state; the one followed so far is strange again.
            self._last = state.steps
        return self._depth

    def follow(self, state: Any) -> None:
        """Take note of what the call returned."""
        self._last = state.steps
        self._most += 1


def as_schedule(schedule: Any, repeat: bool) -> tuple[FreezeSchedule, bool]:
    """Return what users give as a schedule as one, and whether it starts anew at its end."""
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
