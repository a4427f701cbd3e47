# SPDX-License-Identifier: Apache-2.0
"""What was found of each configuration, and the table of it."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

from boostax._core.plain import plain
from boostax.config.build import Boost
from boostax.config.config import BoostConfig
from boostax.inspect.tables import aligned, columns

# The best first.
Verdict = Literal["recommended", "baseline", "no difference", "not recommended", "refused"]


class Trial(NamedTuple):
    """What was found of one configuration; a row of a ``Measurement``.

    Numbers are per call and device; NaN stands for what was not measured (it was refused) or what
    XLA does not say.

    Attributes:
      name: of the candidate; ``"baseline"``; or several names and plus signs.
      config: the configuration; ``None`` where ``BoostConfig`` refused it.
      verdict: ``"recommended"``, ``"baseline"``, ``"no difference"``, ``"not recommended"`` or
        ``"refused"``.
      reason: why, in words.
      step_seconds: of a call, the median over rounds; with freezing, over the depths that the
        schedule draws in the calls of the baseline, as are FLOPs and bytes sent.
      time_ratio: the same as a multiple of the baseline's: median of the ratios within a round.
      time_error: its standard error.
      compile_seconds: of all programs, traced and compiled; little where JAX's persistent cache had
        them.
      flops: floating-point operations, the body of a loop counted once.
      memory_bytes: arguments, results and temporaries of the compiled program; with freezing, of
        the largest.
      memory_ratio: the same as a multiple of the baseline's.
      wire_bytes: what is sent, by the formulas of a ring; the mean over a window, and over the
        steps between two meetings. 0 on one device.
      wire_ratio: the same as a multiple of the baseline's; 1 where neither sends.
      steps: calls made in the time of the baseline's, in whole windows.
      loss: held-out, after these.
      loss_difference: the mean over held-out batches of the loss minus the baseline's.
      loss_error: its standard error: from batch to batch, and by the calls that ``time_error``
        leaves in doubt.
      equal_steps_loss: held-out, after as many calls as the baseline's.
      skipped: windows that a loss scaler skipped before its first step; they do not count.
    """

    name: str
    config: BoostConfig | None
    verdict: Verdict
    reason: str
    step_seconds: float = math.nan
    time_ratio: float = math.nan
    time_error: float = math.nan
    compile_seconds: float = math.nan
    flops: float = math.nan
    memory_bytes: float = math.nan
    memory_ratio: float = math.nan
    wire_bytes: float = math.nan
    wire_ratio: float = math.nan
    steps: int = 0
    loss: float = math.nan
    loss_difference: float = math.nan
    loss_error: float = math.nan
    equal_steps_loss: float = math.nan
    skipped: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``None`` for what is no finite number."""
        return plain(self._asdict()) | {"config": self.config and self.config.to_dict()}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What ``auto("measure", ...)`` found. ``print`` gives a table, and the reasons.

    Attributes:
      rows: a ``Trial`` for each configuration, the best first: what is recommended, the baseline,
        what makes no difference, what is not recommended, what was refused.
      noise: what one step of the optimizer more or less changes in the baseline's held-out loss; no
        smaller difference counts.
      calls: calls of the baseline.
    """

    rows: tuple[Trial, ...]
    noise: float
    calls: int

    @property
    def config(self) -> BoostConfig:
        """The best one: that of the first row, which may be the baseline."""
        config = self.rows[0].config
        assert config is not None
        return config

    @property
    def boost(self) -> Boost:
        """The best one, ready to build."""
        return Boost(self.config)

    @property
    def note(self) -> str:
        """What the table does not say."""
        return (
            f"After {self.calls} calls of the baseline, and as much time for each; a loss within "
            f"{self.noise:.2g} is the same.\nA few steps only say so much: what pays late in a run "
            "(freezing for good, a residual that fills up) is judged too\nharshly, what harms late "
            "too mildly. Train the best few for longer before you rely on them."
        )

    def cells(self) -> list[tuple[str, ...]]:
        """The table, headings first; without a column for what nobody sends."""
        sends = any(row.wire_bytes > 0 for row in self.rows)
        costs = ("ms", "time", "compile s", "MB", "sent MB")
        headings = ("", *costs, "calls", "loss", "difference", "")
        table = [headings, *(_cells(row) for row in self.rows if row.steps)]
        return columns(table, [sends or heading != "sent MB" for heading in headings])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``BoostConfig.from_dict`` reads each ``config``."""
        return {
            "config": self.config.to_dict(),
            "noise": self.noise,
            "calls": self.calls,
            "rows": [row.to_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        reasons = (f"{row.name}: {row.reason}." for row in self.rows if row.verdict != "baseline")
        return "\n".join((aligned(self.cells(), words=True), *reasons, self.note))


def _cells(row: Trial) -> tuple[str, ...]:
    return (
        row.name,
        f"{1e3 * row.step_seconds:,.3g}",
        f"{row.time_ratio:.2f}",
        f"{row.compile_seconds:.1f}",
        f"{row.memory_bytes / 1e6:,.3g}",
        f"{row.wire_bytes / 1e6:,.3g}",
        str(row.steps),
        f"{row.loss:.4g}",
        "" if row.verdict == "baseline" else f"{row.loss_difference:+.2g} ± {row.loss_error:.1g}",
        row.verdict,
    )
