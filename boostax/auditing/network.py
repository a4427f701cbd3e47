# SPDX-License-Identifier: Apache-2.0
"""Estimate a compiled step's seconds on a network, and look up the fastest technique on record."""

import dataclasses
import math
import re

from boostax.auditing.adapter import WHO, checks
from boostax.auditing.collectives import CompiledCollective
from boostax.auditing.hlo import repeated

_FORM = re.compile(
    r"(?P<rate>[\d.]+) ?(?P<unit>[kKmMgG]?)bit(?:/s)?(?:, ?(?P<latency>[\d.]+) ?ms)?"
)
_UNITS = {"": 1e0, "k": 1e3, "m": 1e6, "g": 1e9}
# Measured bytes of TCP headers and acknowledgements per message.
_BESIDE = 400
# Collectives of a single round of messages.
_SINGLE = ("collective-permute", "collective-broadcast", "send")


@dataclasses.dataclass(frozen=True)
class Network:
    """Links between devices, or between hosts if the program runs on several hosts.

    Attributes:
      rate: bits per second of the link of a device, in each direction.
      latency: seconds of a message in addition to the time of its bytes.
    """

    rate: float
    latency: float

    @classmethod
    def of(cls, text: str) -> "Network":
        """Read ``"100Mbit"`` or ``"1Gbit, 0.5 ms"``; the latency is 0.5 ms by default."""
        found = _FORM.fullmatch(str(text))
        rate = float(found["rate"]) * _UNITS[found["unit"].lower()] if found else 0.0
        allowed, hint = "a rate, and a latency if known", 'Try "100Mbit" or "1Gbit, 0.5 ms".'
        checks.require(rate > 0, WHO, "network", got=text, allowed=allowed, hint=hint)
        return cls(rate, float((found and found["latency"]) or 0.5) / 1e3)

    def seconds(self, sent: float, messages: float) -> float:
        """Return the seconds for ``on_wire`` bytes in a number of sequential messages."""
        return sent * 8 / self.rate + messages * self.latency

    @property
    def advice(self) -> str:
        """The technique that reached a loss first in the records, at the nearest rate."""
        record = checks.table("boostax.auditing", "network")
        near = min(record["first"], key=lambda row: abs(math.log(row["rate"] / self.rate)))
        first, rate = near["form"], f"{near['rate'] / 1e6:g} Mbit/s"
        tie = "; all_reduce as soon, within the error" if near["tie"] else ""
        said = f"{first} reached the loss first{tie}"
        return f"Another program, on record at {rate} ({record['workload']}): {said}"


def on_wire(collective: CompiledCollective, apart: bool) -> tuple[float, float]:
    """Return the bytes that a device sends per call with TCP's overhead, in how many messages.

    The messages are sequential.

    Args:
      collective: the collective.
      apart: whether each operand is its own message, as between processes on CPUs.
    """
    rounds = (collective.devices - 1) * (2 if collective.kind == "all-reduce" else 1)
    rounds = 1 if collective.kind in _SINGLE else rounds
    messages = repeated(rounds * (len(collective.operands) if apart else 1), collective.executions)
    return collective.wire_bytes + messages * _BESIDE, messages
