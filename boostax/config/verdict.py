# SPDX-License-Identifier: Apache-2.0
"""What follows from a trial: a verdict in words, a ranking, and what goes together."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from boostax.config.config import BoostConfig
from boostax.config.measurement import Trial, Verdict
from boostax.config.trial import Candidate, Losses, timed

_SAVES, _SLOWER = 0.9, 1.1


def compared(candidates: Sequence[Candidate], noise: float, repeats: int) -> list[Trial]:
    """Rows for the baseline, which is the first, and for the others."""
    baseline, turns = candidates[0], timed(candidates, repeats)
    rows: list[Trial] = []
    for candidate, times in zip(candidates, turns, strict=True):
        ratio, error = time_ratio(times, turns[0])
        found, base = candidate.costs, baseline.costs
        calls = candidate.setting.steps if candidate is baseline else candidate.equal_calls(ratio)
        # A wrong time is a wrong number of calls.
        in_doubt = noise / baseline.window * calls * error / ratio
        loss, difference, loss_error = against(candidate.after(calls), baseline.losses, in_doubt)
        row = Trial(
            name=candidate.name,
            config=candidate.config,
            verdict="baseline",
            reason="what the others are compared to",
            step_seconds=statistics.median(times),
            time_ratio=ratio,
            time_error=error,
            **found._asdict(),
            memory_ratio=_ratio(found.memory_bytes, base.memory_bytes),
            wire_ratio=_ratio(found.wire_bytes, base.wire_bytes),
            steps=calls,
            loss=loss,
            loss_difference=difference,
            loss_error=loss_error,
            equal_steps_loss=float(np.mean(candidate.losses)),
            skipped=candidate.skipped,
        )
        rows.append(judged(row, rows[0], noise, candidate.note) if rows else row)
    return rows


def time_ratio(times: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """The median of the ratios to the baseline's, round by round, and its standard error."""
    ratios = [_ratio(mine, its) for mine, its in zip(times, base, strict=True)]
    # A median is less sure than a mean by the root of pi / 2.
    error = math.sqrt(math.pi / 2 / len(ratios)) * statistics.stdev(ratios)
    return statistics.median(ratios), error


def against(losses: Losses, base: Losses, in_doubt: float) -> tuple[float, float, float]:
    """The mean loss, that of its difference to the baseline's, and the error of this.

    Args:
      losses: by held-out batch.
      base: the baseline's.
      in_doubt: another error, which the batches do not tell.
    """
    with np.errstate(all="ignore"):
        differences = losses - base
        error = float(differences.std(ddof=1) / math.sqrt(len(differences)))
        return float(losses.mean()), float(differences.mean()), math.hypot(error, in_doubt)


def judged(row: Trial, base: Trial, noise: float, note: str = "") -> Trial:
    """The row with its verdict and the reason.

    Args:
      row: with all its numbers.
      base: the baseline.
      noise: a difference of losses that says nothing.
      note: what else the reader must know.
    """
    verdict, reason = _verdict(row, base, noise)
    notes = [_costs(row)] + ([note] if note else [])
    if row.skipped:
        notes.append(f"{row.skipped} skipped while the loss scale settled, not counted")
    return row._replace(verdict=verdict, reason="; ".join([reason, *notes]))


def _verdict(row: Trial, base: Trial, noise: float) -> tuple[Verdict, str]:
    if not math.isfinite(row.loss):
        return "not recommended", "the loss is not finite"
    if not math.isfinite(base.loss):
        return "recommended", "the loss is finite, and the baseline's is not"
    difference, limit = row.loss_difference, _limit(noise, row)
    by = f"by {abs(difference):.3g} ± {row.loss_error:.2g} in equal time"
    if difference < -limit:
        return "recommended", f"the loss is lower {by}"
    if difference > limit:
        return "not recommended", f"the loss is higher {by}"
    # The baseline ran, so memory and wire are there: nobody has to buy them for time.
    if row.time_ratio - 2 * row.time_error > _SLOWER:
        return "not recommended", "slower, and the loss is no lower"
    ratios = {
        "time": row.time_ratio + 2 * row.time_error,
        "memory": row.memory_ratio,
        "bytes sent": row.wire_ratio,
    }
    saved = " and ".join(word for word, ratio in ratios.items() if ratio <= _SAVES)
    if not saved:
        return "no difference", "the loss is as good, and it saves less than 10%"
    if row.time_ratio > _SLOWER:
        return "no difference", f"the loss is as good, and it saves {saved}, but may be slower"
    return "recommended", f"the loss is as good, and it saves {saved}"


def _costs(row: Trial) -> str:
    """Times what of the baseline's."""
    sent = "" if row.wire_bytes == 0 and row.wire_ratio == 1 else f", sent x{row.wire_ratio:.3g}"
    return f"time x{row.time_ratio:.3g}, memory x{row.memory_ratio:.3g}{sent}"


def _limit(noise: float, *rows: Trial) -> float:
    """The difference of losses from which it is one."""
    return max(noise, *(2 * row.loss_error for row in rows if math.isfinite(row.loss_error)), 0.0)


def _ratio(mine: float, its: float) -> float:
    if mine == its:
        return 1.0
    return mine / its if its else math.inf


def ranked(rows: Sequence[Trial], noise: float) -> list[Trial]:
    """Best first: by verdict, then by loss, and among equal losses by what is saved."""
    found: list[Trial] = []
    for verdict in get_args(Verdict):
        rest = [row for row in rows if row.verdict == verdict]
        while rest:
            least = min(rest, key=_loss)
            near = [row for row in rest if _loss(row) <= _loss(least) + _limit(noise, row, least)]
            best = min(near, key=_spent)
            found.append(best)
            rest = [row for row in rest if row is not best]
    return found


def _loss(row: Trial) -> float:
    return row.loss if math.isfinite(row.loss) else math.inf


def _spent(row: Trial) -> float:
    ratios = (row.time_ratio, row.memory_ratio, row.wire_ratio)
    return math.prod(ratio for ratio in ratios if math.isfinite(ratio))


def together(
    names: Sequence[str], changes: Mapping[str, Mapping[str, Any]], base: BoostConfig
) -> dict[str, Mapping[str, Any]]:
    """Of changes, the best first, those that go with all before them.

    Two of the same part exclude each other: there is one reduction, and one policy.
    """
    taken: dict[str, Mapping[str, Any]] = {}
    for name in names:
        if any(key in other for other in taken.values() for key in changes[name]):
            continue
        try:
            merged({**taken, name: changes[name]}, base)
        except (ValueError, TypeError):
            continue
        taken[name] = changes[name]
    return taken


def merged(changes: Mapping[str, Mapping[str, Any]], base: BoostConfig) -> BoostConfig:
    """All changes in one."""
    data = {key: value for change in changes.values() for key, value in change.items()}
    return BoostConfig.from_dict(data, base)


def noise_of(losses: Losses, *neighbours: Losses) -> float:
    """What one step more or less changes in a loss: less than that is no difference."""
    with np.errstate(all="ignore"):
        found = [abs(float(np.mean(losses - other))) for other in neighbours]
    return max((x for x in found if math.isfinite(x)), default=0.0)
