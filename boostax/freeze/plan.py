# SPDX-License-Identifier: Apache-2.0
"""How many groups are frozen at which step: from a table, or as the run goes."""

import operator
from collections.abc import Callable
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import checks
from boostax._core.gate import has_gate
from boostax.freeze.schedules import CYCLE, FreezeSchedule, freeze_schedule

PyTree = Any


class Plan(Protocol):
    """A schedule that knows how many groups there are.

    Attributes:
      drawn: the depths that can occur, ascending.
    """

    drawn: tuple[int, ...]

    def index(self, depth: jax.Array) -> jax.Array:
        """In the program: the place of a depth among those drawn."""
        return jnp.searchsorted(jnp.asarray(self.drawn, jnp.int32), depth).astype(jnp.int32)

    def init(self) -> PyTree:
        """What it keeps in the state."""
        return ()

    def first(self) -> int:
        """The depth of the first step."""
        return self.known(0) or 0

    def follow(
        self, kept: PyTree, steps: jax.Array, depth: jax.Array, inner_state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """In the program: the depth after so many applied steps, and what is kept."""
        ...

    def known(self, steps: int) -> int | None:
        """On the host: the depth after so many applied steps; ``None``: only the state knows it."""
        ...

    def until(self, steps: int) -> int:
        """On the host: the first count of applied steps at which another depth could follow."""
        ...

    def table(self) -> np.ndarray[Any, Any] | None:
        """On the host: the depth of every step, once through; ``None`` if the run decides."""
        return None


class Table(Plan):
    """A depth for every step, known beforehand.

    Args:
      who: the transformation's name, for errors.
      depths: i32 ``[steps]``.
      repeat: start anew at the end.
    """

    def __init__(self, who: str, depths: np.ndarray[Any, Any], repeat: bool):
        self.drawn = tuple(int(depth) for depth in np.unique(depths))
        self._who, self._depths, self._repeat = who, depths, repeat
        # In the program it is a constant: a byte per step.
        self._compact = depths.astype(np.min_scalar_type(int(depths.max())))
        self._changes = np.flatnonzero(np.diff(depths)) + 1

    def follow(
        self, kept: PyTree, steps: jax.Array, depth: jax.Array, inner_state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """Look it up; past the end, the last one."""
        del depth, inner_state
        length = len(self._depths)
        index = steps % length if self._repeat else jnp.minimum(steps, length - 1)
        return jnp.asarray(self._compact)[index].astype(jnp.int32), kept

    def known(self, steps: int) -> int:
        """Look it up; past the end, raise."""
        length = len(self._depths)
        if steps >= length and not self._repeat:
            raise ValueError(
                f"{self._who}: schedule must be at least as long as the run, got {length} steps "
                f"and one more to take. Make total_steps that of the run, or pass repeat=True."
            )
        return int(self._depths[steps % length])

    def until(self, steps: int) -> int:
        """The next change in the table, or its end."""
        length = len(self._depths)
        start = steps - steps % length
        ahead = np.searchsorted(self._changes, steps - start, side="right")
        # The end of the table may bring another depth, or none any more.
        return start + int(self._changes[ahead] if ahead < len(self._changes) else length)

    def table(self) -> np.ndarray[Any, Any]:
        """The table itself."""
        return self._depths


class HostDepth:
    """Follows one run from call to call.

    A call takes at most one applied step, so nothing changes before as many calls as steps are left
    to the next change, and the device is not asked. Without a gate every call is an applied step,
    and a table needs no asking at all. Given a state that it did not see coming, it asks.

    Args:
      plan: the schedule.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._last: Any = None
        self._most = self._until = self._depth = 0

    def __call__(self, state: Any) -> int:
        """Groups to freeze in a call with this state.

        Raises:
          ValueError: the schedule is over.
        """
        strange = state.steps is not self._last
        if strange or self._most >= self._until:
            exact = not strange and not has_gate(state.inner_state)
            self._most = self._most if exact else int(state.steps)
            known = self._plan.known(self._most)
            self._depth = int(state.next_depth) if known is None else known
            self._until = self._plan.until(self._most)
            # What is known now is known of this state; the one followed so far is strange again.
            self._last = state.steps
        return self._depth

    def follow(self, state: Any) -> None:
        """Take note of what the call returned."""
        self._last = state.steps
        self._most += 1


def as_schedule(who: str, schedule: Any) -> Any:
    """What users give as a schedule, checked as far as can be without knowing the groups.

    Returns:
      A ``FreezeSchedule``, something with a ``plan`` method, or a table of depths.
    """
    hint = "boostax.freeze_schedule makes one; 2 keeps the first two groups frozen for good."
    allowed = (
        "a FreezeSchedule, freeze_on_plateau(...), a function of the step, a depth, or a sequence "
        "of depths"
    )
    if isinstance(schedule, FreezeSchedule) or callable(getattr(schedule, "plan", None)):
        return schedule
    if callable(schedule):
        return freeze_schedule(cast(Callable[[int], int], schedule), total_steps=CYCLE)
    given: Any = [schedule] if isinstance(schedule, (int, np.integer)) else schedule
    try:
        if isinstance(schedule, (str, bytes, bool)):
            raise TypeError
        depths = [operator.index(depth) for depth in given]
    except TypeError as error:
        raise TypeError(checks.message(who, "schedule", allowed, schedule, hint)) from error
    if not depths or min(depths) < 0:
        raise ValueError(checks.message(who, "schedule", allowed, schedule, hint))
    return np.asarray(depths, np.int32)


def as_plan(who: str, schedule: Any, groups: int, repeat: bool) -> Plan:
    """A schedule from ``as_schedule``, for so many groups."""
    if isinstance(schedule, FreezeSchedule):
        return Table(who, schedule.depths(groups), repeat)
    if not isinstance(schedule, np.ndarray):
        return schedule.plan(who, groups)
    if schedule.max() >= groups:
        allowed = f"depths from 0 to {groups - 1} with {groups} groups"
        hint = "The last group always trains."
        raise ValueError(checks.message(who, "schedule", allowed, int(schedule.max()), hint))
    return Table(who, schedule, repeat or len(schedule) == 1)
