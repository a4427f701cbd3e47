# SPDX-License-Identifier: Apache-2.0
"""Estimate a compiled step's seconds on a network, and look up the fastest technique on record."""

import dataclasses
import math
import re
from collections.abc import Iterator

from boostax.auditing.adapter import WHO, checks
from boostax.auditing.collectives import Collectives
from boostax.auditing.hlo import repeated

_FORM = re.compile(r"(?P<rate>[\d.]+) ?(?P<unit>[kKmMgG]?)bit(?:/s)?(?:, ?(?P<ms>[\d.]+) ?ms)?")
_UNITS = {"": 1e0, "k": 1e3, "m": 1e6, "g": 1e9}
# Measured bytes of TCP headers and acknowledgements per message.
_TCP_BYTES = 400
# Collectives that need a single round of messages.
_ONE_ROUND = ("collective-permute", "collective-broadcast", "send")


@dataclasses.dataclass(frozen=True)
class Network:
    """Describe the links between devices, or between hosts if the program runs on several hosts.

    Attributes:
      rate: bits per second of a device's link, in each direction.
      latency: the seconds of a message in addition to the time of its bytes.
    """

    rate: float
    latency: float

    @classmethod
    def of(cls, text: str) -> "Network":
        """Read ``"100Mbit"`` or ``"1Gbit, 0.5 ms"``; the latency is 0.5 ms by default."""
        match = _FORM.fullmatch(str(text))
        rate = float(match["rate"]) * _UNITS[match["unit"].lower()] if match else 0.0
        allowed = "a rate, and a latency if known"
        hint = 'Try "100Mbit" or "1Gbit, 0.5 ms".'
        checks.require(rate > 0, WHO, "network", got=text, allowed=allowed, hint=hint)
        return cls(rate, float((match and match["ms"]) or 0.5) / 1e3)

    @property
    def advice(self) -> str:
        """Return the fastest technique to a fixed loss in the record of the nearest rate."""
        record = checks.table("boostax.auditing", "network")
        nearest = min(record["first"], key=lambda x: abs(math.log(x["rate"] / self.rate)))
        rate = f"{nearest['rate'] / 1e6:g} Mbit/s"
        tie = " (all_reduce was as fast, within the error of the record)" if nearest["tie"] else ""
        result = f"{nearest['form']} was the first to reach the last loss of all_reduce{tie}"
        return f"In the record of another program ({record['workload']}) at {rate}: {result}"


def on_wire(
    listed: Collectives, per_operand: bool
) -> Iterator[tuple[tuple[str, ...], float, float]]:
    """Yield the branches, the bytes with TCP's overhead, and the messages of each collective.

    Args:
      listed: the collectives. If some collectives cross hosts, only these collectives are counted.
      per_operand: whether each operand is a separate message, as between processes on CPUs.
    """
    for c in [c for c in listed if c.crosses] or listed:
        rounds = 1 if c.kind in _ONE_ROUND else (c.devices - 1) * (1 + (c.kind == "all-reduce"))
        messages = repeated(rounds * (len(c.operands) if per_operand else 1), c.executions)
        yield c.branches, c.wire_bytes + messages * _TCP_BYTES, messages
