"""The depth of the coming call, known on the host, asking the device as seldom as can be."""

from typing import Any

from boostax._core.gate import has_gate
from boostax.freeze.plan import Plan

PyTree = Any


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
