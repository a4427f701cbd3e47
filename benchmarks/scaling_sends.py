"""A collective of a formula, and what a step of collectives costs: bytes, rounds, memory."""

import math
from typing import NamedTuple

from boostax._core.costs import RING


class Send(NamedTuple):
    """One collective.

    Attributes:
      primitive: ``psum``, ``all_gather``, ...
      axes: mesh axes it runs over.
      replicas: number of devices over those axes.
      bytes: of its operand on each device.
      share: of the steps that send, in how many it runs.
    """

    primitive: str
    axes: tuple[str, ...]
    replicas: int
    bytes: int
    share: float = 1.0

    @property
    def wire(self) -> float:
        """Bytes that a device sends on a ring, per step that sends."""
        return self.share * self.bytes * RING[self.primitive](self.replicas)

    @property
    def arrives(self) -> int:
        """Bytes of its result on each device."""
        if self.primitive == "all_gather":
            return self.bytes * self.replicas
        return self.bytes // (self.replicas if self.primitive == "reduce_scatter" else 1)


class Over(NamedTuple):
    """Replicas over which something is sent."""

    axes: tuple[str, ...]
    replicas: int

    def __call__(self, primitive: str, nbytes: int, share: float = 1.0) -> Send:
        """A collective over them."""
        return Send(primitive, self.axes, self.replicas, nbytes, share)


class Cost(NamedTuple):
    """Of a technique, on each device.

    Attributes:
      sends: its collectives.
      chain: those of the longest chain, in which each waits for the one before.
      optimizer: bytes of Adam's state.
      own: bytes of the technique's state beside it.
      every: steps of which one sends.
      batches: passes forward and backward in a step.
    """

    sends: list[Send]
    chain: list[Send]
    optimizer: int
    own: int
    every: int = 1
    batches: int = 1

    @property
    def wire(self) -> float:
        """Bytes that a device sends per step, the mean over many steps."""
        return math.fsum(send.wire for send in self.sends) / self.every

    @property
    def collectives(self) -> float:
        """How many run per step, the mean over many steps."""
        return math.fsum(send.share for send in self.sends) / self.every

    @property
    def arrives(self) -> float:
        """Bytes of the results of the collectives of a step that sends."""
        return math.fsum(send.share * send.arrives for send in self.sends)


def ring_rounds(send: Send) -> int:
    """Rounds in which all neighbours on a ring send at once."""
    reduces = send.primitive in ("psum", "pmax", "pmin")
    return (2 if reduces else 1) * (send.replicas - 1)


def tree_rounds(send: Send) -> int:
    """Rounds by halving and doubling: ``log2 n``, for an all-reduce there and back."""
    reduces = send.primitive in ("psum", "pmax", "pmin")
    return (2 if reduces else 1) * math.ceil(math.log2(send.replicas))
