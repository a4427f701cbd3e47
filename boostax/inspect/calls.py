# SPDX-License-Identifier: Apache-2.0
"""What a call of a train step costs, read from its programs before anything is trained."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from boostax._core import checks
from boostax._core.variants import variants_of
from boostax.inspect import hlo
from boostax.inspect.collectives import compiled_collectives
from boostax.inspect.costs import by_kind
from boostax.inspect.targets import compile_program
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
      temporary_bytes: working memory beside state and batch.
      wire_bytes: bytes sent by kind of collective (``"psum"``, ``"all_gather"``, ...), as the
        formula of a ring counts them, in the dtypes that the program asks for. With ``accumulate``,
        of a call that closes a window. With a target, of the compiled program (``"all-reduce"``).
    """

    depth: int | None
    share: float | None
    frozen_entries: float
    flops: float
    flops_ratio: float
    temporary_bytes: float
    wire_bytes: Mapping[str, float]


def call_costs(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    depths: Sequence[int] | None,
    target: str | None = None,
) -> tuple[CallCost, ...]:
    """One for each program of a step; with ``scheduled_freeze``, for each depth that it draws."""
    # What is built here is no part of what the step was used for.
    step = dataclasses.replace(step, _programs={})
    variants = variants_of(step.tx)
    if variants is None:
        hint = "Only scheduled_freeze, outermost, has any."
        allowed = "left out where nothing freezes by schedule"
        checks.absent(_WHO, "depths", depths, allowed, hint)
        return (_cost(step, state, batch, None, target),)
    params = jax.eval_shape(step.common_params, state)
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
    drawn, shares = variants.drawn(params), variants.shares(params)
    chosen = _chosen(drawn, depths)
    found = {d: _cost(step, state, batch, d, target) for d in dict.fromkeys((drawn[0], *chosen))}
    least = found[drawn[0]].flops
    result: list[CallCost] = []
    for depth in chosen:
        trained = jax.tree.leaves(variants.active(params, depth))
        frozen = sum(size for size, trains in zip(sizes, trained, strict=True) if not trains)
        share = None if shares is None else shares[depth]
        ratio = found[depth].flops / least if least else math.nan
        frozen_entries = frozen / max(1, sum(sizes))
        result.append(
            found[depth]._replace(share=share, frozen_entries=frozen_entries, flops_ratio=ratio)
        )
    return tuple(result)


def _cost(
    step: TrainStep, state: TrainState, batch: PyTree, depth: int | None, target: str | None
) -> CallCost:
    """Of one program, as if it were the only one."""
    made = compile_program(step, (state, batch), target, depth)
    sent: dict[str, float] = {}
    if target is not None or step.is_global(state):
        for c in compiled_collectives(hlo.parse(made.compiled.as_text())):
            sent[c.kind] = sent.get(c.kind, 0.0) + c.wire_bytes
    elif step.mesh is not None:
        sent = by_kind(made.traced)
    temporary_bytes = float(made.compiled.memory_analysis().temp_size_in_bytes)
    return CallCost(depth, 1.0, 0.0, made.flops, 1.0, temporary_bytes, sent)


def _chosen(drawn: tuple[int, ...], depths: Any) -> tuple[int, ...]:
    if depths is None:
        return drawn
    allowed = f"some of the depths that the schedule draws, {list(drawn)}"
    hint = "None takes them all."
    listed = isinstance(depths, Sequence)
    checks.require(_WHO, "depths", depths, allowed, listed, hint, TypeError)
    fits = bool(depths) and all(depth in drawn for depth in depths)
    checks.require(_WHO, "depths", depths, allowed, fits, hint)
    return tuple(dict.fromkeys(int(depth) for depth in depths))
