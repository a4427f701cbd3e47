"""What a call of a train step costs, read from its program before anything is trained."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from boostax._core import checks, costs
from boostax.freeze.plan import Freezing
from boostax.freeze.scheduled import ScheduledFreeze
from boostax.freeze.schedules import FreezeSchedule
from boostax.train.compiled import TrainStep
from boostax.train.state import TrainState

PyTree = Any
_WHO = "explain"


class CallCost(NamedTuple):
    """What one program of a train step costs per call, on each device.

    Attributes:
      depth: groups that it freezes; ``None`` without ``scheduled_freeze``.
      share: share of the schedule's steps at this depth; ``None`` where the run decides.
      frozen_entries: entries of the params that it freezes, as a share of all.
      flops: floating-point operations of the compiled program, in which the body of a loop counts
        once, however often it runs (micro-batches, layers in a scan); NaN if XLA does not say.
      flops_ratio: the same as a multiple of those at the least depth, 0 in most schedules.
      temporary_bytes: working memory beside state and batch; NaN if XLA does not say.
      wire_bytes: bytes sent by kind of collective (``"psum"``, ``"all_gather"``, ...), as the
        formula of a ring counts them. With ``accumulate``, of a call that closes a window.
    """

    depth: int | None
    share: float | None
    frozen_entries: float
    flops: float
    flops_ratio: float
    temporary_bytes: float
    wire_bytes: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a train step costs. ``print`` gives a table.

    Attributes:
      rows: one for each program of the step.
    """

    rows: tuple[CallCost, ...]

    @property
    def mean_flops_ratio(self) -> float | None:
        """The FLOPs of a step of the whole schedule, as a multiple of those at the least depth.

        ``None`` if the run decides what is frozen, or if ``depths`` left some out.
        """
        shares = [math.nan if row.share is None else row.share for row in self.rows]
        if not math.isclose(sum(shares), 1.0):
            return None
        return sum(share * row.flops_ratio for share, row in zip(shares, self.rows, strict=True))

    @property
    def note(self) -> str:
        """What the table does not say: the mean over the schedule, kinds, what is not counted."""
        lines = ["Per call and device; the body of a loop counts once in FLOPs."]
        mean, (first, *more) = self.mean_flops_ratio, self.rows
        if first.wire_bytes:
            kinds = ", ".join(f"{kind} {n:,.0f}" for kind, n in first.wire_bytes.items())
            lines.append(f"Bytes sent by kind, first row: {kinds}.")
        if mean is not None and more:
            lines.append(f"Over the whole schedule {mean:.3g} of the FLOPs of its least depth.")
        return "\n".join(lines)

    def cells(self) -> list[tuple[str, ...]]:
        """The table, headings first; columns that would hold nothing are left out."""
        freezes = self.rows[0].depth is not None
        sends = bool(self.rows[0].wire_bytes)
        frozen = ("depth", "share", "frozen") if freezes else ()
        compared = ("ratio",) if freezes else ()
        sent = ("sent bytes",) if sends else ()
        headings = (*frozen, "FLOPs", *compared, "temp bytes", *sent)
        return [headings, *(_cells(row, freezes, sends) for row in self.rows)]

    def __str__(self) -> str:
        table = self.cells()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = (
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in table
        )
        return "\n".join((*lines, self.note))


def explain(
    step: TrainStep, state: TrainState, batch: PyTree, *, depths: Sequence[int] | None = None
) -> Explanation:
    """Say what a call of a train step costs: FLOPs, memory and bytes sent, at each freeze depth.

    What a frozen prefix saves depends on the network: the forward pass stays, and of the backward
    pass goes what lies below the first group that trains. FLOPs are counted and not timed, so they
    hold for every device of the kind, and say nothing of steps that wait for memory.

    Args:
      step: from ``make_train_step``.
      state: as for a call. It is not donated.
      batch: as for a call. Nothing is run.
      depths: of those that the schedule of ``scheduled_freeze`` draws; ``None`` for all. With
        ``freeze_driver="switch"`` they are the branches of one program, of which each call runs
        one.

    Returns:
      An ``Explanation``. Cost: for each depth one trace and one compilation, which the step's own
      calls do not reuse (JAX's persistent cache does); the least depth is among them in any case.

    Raises:
      ValueError, TypeError: no ``TrainStep``; ``depths`` that are not drawn, or without anything to
        freeze; and whatever a call would raise.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> w = {"a": jnp.ones((8, 64)), "b": jnp.ones((64, 64)), "c": jnp.ones((64, 1))}
      >>> loss = lambda w, x: jnp.mean((jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"]) ** 2)
      >>> groups = boostax.prefix_groups(w, 3)
      >>> tx = boostax.scheduled_freeze(optax.sgd(0.1), groups, [0, 0, 1, 2])
      >>> step = boostax.make_train_step(loss, tx)
      >>> found = boostax.explain(step, step.init(w), jnp.ones((32, 8)))
      >>> [(row.depth, row.share, round(row.frozen_entries, 2)) for row in found.rows]
      [(0, 0.5, 0.0), (1, 0.25, 0.11), (2, 0.25, 0.99)]
      >>> found.rows[2].flops_ratio < found.rows[1].flops_ratio < 1
      True

    References:
      Brock et al., FreezeOut, https://arxiv.org/abs/1706.04983, 2017, counts the same way what
      freezing could save at most.
    """
    given: Any = step
    if not isinstance(given, TrainStep):
        hint = "boostax.make_train_step(loss_fn, tx) makes one."
        raise TypeError(checks.message(_WHO, "step", "a TrainStep", step, hint))
    # What is built here is no part of what the step was used for.
    step = dataclasses.replace(step, _compiled={}, _hosts={})
    if not isinstance(step.tx, ScheduledFreeze):
        if depths is not None:
            hint = "Only scheduled_freeze, outermost, has any."
            allowed = "left out where nothing freezes by schedule"
            raise ValueError(checks.message(_WHO, "depths", allowed, depths, hint))
        cost = _cost(step, state, batch, None)
        return Explanation((cost,))
    freezing, params = step.tx.freezing, jax.eval_shape(step.common_params, state)
    drawn = freezing.plan(params).drawn
    chosen = _chosen(drawn, depths)
    shares = _shares(freezing, params)
    found = {d: _cost(step, state, batch, d) for d in dict.fromkeys((drawn[0], *chosen))}
    rows = (
        found[depth]._replace(
            share=None if shares is None else shares[depth],
            frozen_entries=_frozen_entries(freezing, params, depth),
            flops_ratio=_ratio(found[depth].flops, found[drawn[0]].flops),
        )
        for depth in chosen
    )
    return Explanation(tuple(rows))


def _cost(step: TrainStep, state: TrainState, batch: PyTree, depth: int | None) -> CallCost:
    """Of one program, as if it were the only one."""
    compiled = step.lower(state, batch, depth=depth).compile()
    analysis: Any = compiled.cost_analysis() or {}
    memory = compiled.memory_analysis()
    sent: dict[str, float] = {}
    if step.mesh is not None:
        found = costs.collectives(step.jaxpr(state, batch, depth=depth))
        for kind in dict.fromkeys(c.primitive for c in found):
            # All at once, so that the branches of a cond stay alternatives.
            of = lambda c, kind=kind: c.wire_bytes * (c.primitive == kind)  # noqa: E731
            sent[kind] = costs.expected(found, of)
    return CallCost(
        depth=depth,
        share=1.0,
        frozen_entries=0.0,
        flops=float(analysis.get("flops", math.nan)),
        flops_ratio=1.0,
        temporary_bytes=math.nan if memory is None else float(memory.temp_size_in_bytes),
        wire_bytes=sent,
    )


def _ratio(flops: float, least_frozen: float) -> float:
    return flops / least_frozen if least_frozen else math.nan


def _chosen(drawn: tuple[int, ...], depths: Any) -> tuple[int, ...]:
    if depths is None:
        return drawn
    allowed = f"some of the depths that the schedule draws, {list(drawn)}"
    hint = "None takes them all."
    if not isinstance(depths, Sequence):
        raise TypeError(checks.message(_WHO, "depths", allowed, depths, hint))
    if not depths or any(depth not in drawn for depth in depths):
        raise ValueError(checks.message(_WHO, "depths", allowed, depths, hint))
    return tuple(dict.fromkeys(int(depth) for depth in depths))


def _shares(freezing: Freezing, params: PyTree) -> dict[int, float] | None:
    """The share of the steps at each depth; ``None`` if it is not known beforehand."""
    if freezing.plan(params).known(0) is None:
        return None
    schedule = freezing.schedule
    if isinstance(schedule, FreezeSchedule):
        schedule = schedule.depths(freezing.count(params))
    depths, counts = np.unique(np.ravel(schedule), return_counts=True)
    return {int(d): float(n / counts.sum()) for d, n in zip(depths, counts, strict=True)}


def _frozen_entries(freezing: Freezing, params: PyTree, depth: int) -> float:
    active = jax.tree.leaves(freezing.active(params, depth))
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
    frozen = sum(size for size, trains in zip(sizes, active, strict=True) if not trains)
    return frozen / max(1, sum(sizes))


def _cells(row: CallCost, freezes: bool, sends: bool) -> tuple[str, ...]:
    share = "?" if row.share is None else f"{row.share:.1%}"
    frozen = (str(row.depth), share, f"{row.frozen_entries:.1%}") if freezes else ()
    compared = (f"{row.flops_ratio:.3f}",) if freezes else ()
    sent = (f"{sum(row.wire_bytes.values()):,.0f}",) if sends else ()
    return (*frozen, f"{row.flops:,.0f}", *compared, f"{row.temporary_bytes:,.0f}", *sent)
