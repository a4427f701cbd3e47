# SPDX-License-Identifier: Apache-2.0
"""Where every process of a run stands, told beside its arrays, by JAX's coordination service."""

import itertools
import math
from typing import Any, NamedTuple

import jax

from boostax._core import proof

# Each loop of a process has keys of its own: what an earlier one left would be read as news.
_LOOPS = itertools.count()


class Standing(NamedTuple):
    """What a process says of itself, on the board as a JSON list.

    Attributes:
      beat: how often it has spoken; it grows as long as the process lives.
      begun: the last call its host has reached, ``None`` before the first.
      finished: the last call its host has seen finished, ``None`` before the first begins. The
        loop looks a call late, so the device may be a call further.
      calling: its host is in the call it has begun, or waits in it for an earlier one.
      quiet: seconds without progress, by its own clock.
      allowance: seconds that it may still take for something long: a first call, a save. 0 in an
        ordinary call.
      place: the long thing it is in, such as ``"saving"``; of one that has left, the error.
      left: it has left the loop.
      over: it has given the run up and is about to exit.
    """

    beat: int = 0
    begun: int | None = None
    finished: int | None = None
    calling: bool = False
    quiet: float = 0.0
    allowance: float = 0.0
    place: str = ""
    left: bool = False
    over: bool = False


class View(NamedTuple):
    """A rank as this process sees it.

    The clocks of hosts differ, so no time of another host is compared with one of this host: a rank
    is heard of when its beat is seen to have changed.

    Attributes:
      rank: whose.
      standing: the last one heard of.
      silence: seconds since it was heard of, infinite if never.
    """

    rank: int
    standing: Standing = Standing()
    silence: float = math.inf


class ServiceBoard:
    """Where each rank leaves one line and reads those of all: the key-value store of process 0.

    Process 0 keeps it for ``jax.distributed``. Calls may block or raise.

    Args:
      client: the client of the coordination service.
      rank: of this process.
      count: of processes.
      loop: tells the boards of a run apart; equal on all ranks.

    **Cost**: two short messages to process 0 per exchange; the reply to one has a line per rank.
    """

    def __init__(self, client: Any, rank: int, count: int, loop: int):
        self.rank, self.count = rank, count
        self._client = client
        self._folder = f"boostax/watchdog/{loop}/"

    def publish(self, text: str) -> None:
        """Put ``text`` in the place of this rank's line."""
        self._client.key_value_set(f"{self._folder}{self.rank}", text, allow_overwrite=True)

    def read(self) -> dict[int, str]:
        """The lines of all ranks that have one."""
        lines = self._client.key_value_dir_get(self._folder)
        return {int(key.rpartition("/")[2]): text for key, text in lines}


def service_board() -> ServiceBoard | None:
    """The board of this run; ``None`` in a process alone.

    Every process must ask for its boards in the same order, one for each loop.

    Raises:
      RuntimeError: this JAX does not show its coordination service, and there are other processes.

    Example:
      >>> service_board() is None
      True
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return None
    return ServiceBoard(_client(), jax.process_index(), jax.process_count(), next(_LOOPS))


def _client() -> Any:
    """Of the coordination service. JAX has no public name for it, so only who has peers asks."""
    try:
        from jax._src import distributed

        client = distributed.global_state.client
        for name in ("key_value_set", "key_value_dir_get"):
            getattr(client, name)
    except (ImportError, AttributeError) as error:
        allowed = "jax._src.distributed.global_state.client with a key-value store"
        danger = "A hang of several processes could not be explained; fit(limit=None) does without."
        what = "the coordination service"
        raise proof.unreadable(what, allowed, str(error), danger) from error
    return client
