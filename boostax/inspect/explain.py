# SPDX-License-Identifier: Apache-2.0
"""The entry: a chain's parts with what they cost, what is in wrong order, and a step's calls."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, get_args

import jax
import optax

from boostax._core import axes, checks, jaxprs
from boostax._core.describe import Reduction
from boostax.chain.orders import Finding
from boostax.chain.parts import read
from boostax.chain.rows import rows
from boostax.chain.settings import findings
from boostax.inspect.calls import CallCost, call_costs
from boostax.inspect.costs import PartCost, Place, params_bytes, part_costs, traced
from boostax.inspect.tables import aligned, call_cells, part_cells, record
from boostax.train.compiled import TrainStep
from boostax.train.state import TrainState

PyTree = Any
# The calls of a step, and the program whose collectives are counted.
_Counted = tuple[tuple[CallCost, ...], jaxprs.ClosedJaxpr | None]
_WHO = "explain"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a chain consists of and costs. ``print`` gives tables.

    Attributes:
      parts: the chain, in the order in which a gradient meets its parts.
      findings: what is in wrong order or does not fit, with the reason and the mend.
      params_bytes: of the params, on each device.
      calls: one for each program of a train step; empty without a step and a batch.
      problem: why nothing that is sent could be counted: no batch for a step over a mesh, no sizes
        of the axes for a chain that reduces, or what is in wrong order cannot be traced; else
        empty.
    """

    parts: tuple[PartCost, ...]
    findings: tuple[Finding, ...]
    params_bytes: float
    calls: tuple[CallCost, ...] = ()
    problem: str = ""

    @property
    def state_bytes(self) -> float:
        """What the whole chain keeps on each device."""
        return sum(part.state_bytes or 0.0 for part in self.parts)

    @property
    def wire_bytes(self) -> float:
        """What each device sends per step, the loss and metrics of a train step included."""
        return sum(part.wire_bytes or 0.0 for part in self.parts)

    @property
    def reduces(self) -> bool:
        """Whether a part sends gradients, params or updates."""
        return any(part.role in get_args(Reduction) for part in self.parts)

    @property
    def mean_flops_ratio(self) -> float | None:
        """The FLOPs of a step of the whole schedule, as a multiple of those at the least depth.

        ``None`` if the run decides what is frozen, if ``depths`` left some out, or without calls.
        """
        shares = [math.nan if call.share is None else call.share for call in self.calls]
        if not math.isclose(sum(shares), 1.0):
            return None
        pairs = zip(shares, self.calls, strict=True)
        return sum(share * call.flops_ratio for share, call in pairs)

    @property
    def note(self) -> str:
        """What the tables do not say: totals, the mean over a schedule, what is not counted."""
        sent = "not counted" if self.problem else f"{self.wire_bytes:,.0f}"
        lines = [
            f"Kept on each device: {self.state_bytes:,.0f} bytes beside {self.params_bytes:,.0f} "
            f"of params; sent per step: {sent}."
        ]
        if self.problem:
            lines.append(f"What is sent could not be counted: {self.problem}")
        if any(part.own_bytes for part in self.parts):
            lines.append("Own bytes differ from replica to replica.")
        if any(part.role == "unknown" for part in self.parts):
            lines.append("An unknown part is counted, but its place is not judged.")
        if self.calls:
            lines.append("Per call and device; the body of a loop counts once in FLOPs.")
            kinds = ", ".join(f"{kind} {n:,.0f}" for kind, n in self.calls[0].wire_bytes.items())
            if kinds:
                lines.append(f"Bytes sent by kind, first row: {kinds}.")
        mean = self.mean_flops_ratio
        if mean is not None and len(self.calls) > 1:
            lines.append(f"Over the whole schedule {mean:.3g} of the FLOPs of its least depth.")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return record(self) | {"state_bytes": self.state_bytes, "wire_bytes": self.wire_bytes}

    def __str__(self) -> str:
        blocks = [aligned(part_cells(self.parts), words=True)]
        if self.findings:
            blocks.append("\n".join(f"! {finding}" for finding in self.findings))
        if self.calls:
            blocks.append(aligned(call_cells(self.calls)))
        return "\n\n".join((*blocks, self.note))


def explain(
    tx: optax.GradientTransformation | TrainStep,
    params: PyTree,
    batch: PyTree = None,
    *,
    axis_sizes: Mapping[str, int] | None = None,
    depths: Sequence[int] | None = None,
    target: str | None = None,
) -> Explanation:
    """Say what a chain or a train step consists of, what each part costs, and what is wrong in it.

    Parts are listed in the order in which a gradient meets them, each with the bytes that it keeps
    and sends on one device. Bytes are counted from types and from the traced program, so nothing is
    run. Orders known to be wrong (a clip outside the scaler, a mean before AdaSum, decay behind a
    gate, ...) are named with the reason and the mend; a part of another package is named as unknown
    and its place not judged.

    With a train step and a batch it also says what a call costs, at each freeze depth: FLOPs,
    working memory and bytes sent. What a frozen prefix saves depends on the network: the forward
    pass stays, and of the backward pass goes what lies below the first group that trains.

    Args:
      tx: a transformation, or what ``make_train_step`` returns.
      params: arrays or ``jax.ShapeDtypeStruct``; with a step, its ``TrainState`` or params.
      batch: arrays, as for a call of the step. Nothing is run.
      axis_sizes: without a step: the mesh axes that the transformation names, ``{"data": 8}``.
        The devices need not exist. Without, nothing is counted as sent.
      depths: of those that the schedule of ``scheduled_freeze`` draws; ``None`` for all. With
        ``freeze_driver="switch"`` they are the branches of one program, of which each call runs
        one.
      target: what a call costs when compiled for another machine, of as many devices as the step's
        mesh: see ``boostax.inspect.target_devices``.

    Returns:
      An ``Explanation``. Cost: a trace; with a batch, for each depth one trace and one
      compilation, which the step's own calls do not reuse (JAX's persistent cache does).

    Raises:
      ValueError, TypeError: neither a transformation nor a step; ``depths`` that are not drawn, or
        without anything to freeze; and whatever ``init`` and ``update`` would raise, if nothing
        is in wrong order. If something is, that is said, and the error is ``problem``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> inner = optax.chain(boostax.adasum("data"), optax.adam(1e-3))
      >>> tx = optax.chain(optax.clip(1.0), boostax.dynamic_loss_scale(inner, axis_name="data"))
      >>> found = boostax.explain(tx, jnp.zeros(256), axis_sizes={"data": 8})
      >>> for part in found.parts:
      ...   print("  " * part.depth + part.name, int(part.state_bytes), int(part.wire_bytes))
      clip 0 0
      dynamic_loss_scale 33 7
        adasum 4 3822
        scale_by_adam 2052 0
        scale 0 0
      >>> found.findings[0].what
      'dynamic_loss_scale after clip'

    References:
      Brock et al., FreezeOut, https://arxiv.org/abs/1706.04983, 2017, counts the same way what
      freezing could save at most.
    """
    if isinstance(tx, TrainStep):
        allowed, hint = "left out with a train step", "Its mesh has them."
        checks.absent(_WHO, "axis_sizes", axis_sizes, allowed, hint)
        return _of_step(tx, params, batch, depths, target)
    fits = isinstance(cast(Any, tx), optax.GradientTransformation)
    allowed = "a transformation or a TrainStep"
    hint = "boostax.make_train_step(loss_fn, tx) makes the latter."
    checks.require(_WHO, "tx", tx, allowed, fits, hint, TypeError)
    hint = "boostax.make_train_step makes one."
    for argument, given in (("batch", batch), ("depths", depths), ("target", target)):
        checks.absent(_WHO, argument, given, "left out without a train step", hint)
    sizes = {
        name: checks.positive_int(_WHO, f"axis_sizes[{name!r}]", size, "8 is eight devices.")
        for name, size in (axis_sizes or {}).items()
    }
    place = Place(axes.canonical(_WHO, tuple(sizes) or None), sizes)
    found = _explained(
        tx, params, place, lambda: ((), traced(tx, params, place) if sizes else None)
    )
    return found if sizes or not found.reduces else _uncounted(found, "axis_sizes")


def _of_step(
    step: TrainStep, state: PyTree, batch: PyTree, depths: Sequence[int] | None, target: str | None
) -> Explanation:
    if not isinstance(state, TrainState):
        state = step.init(jax.eval_shape(lambda p: p, state))
    sizes = {} if step.mesh is None else dict(step.mesh.shape)

    def count() -> _Counted:
        if batch is None:
            return (), None
        calls = call_costs(step, state, batch, depths, target)
        if step.mesh is None or step.is_global(state):
            return calls, None
        fresh = dataclasses.replace(step, _programs={})
        return calls, fresh.jaxpr(state, batch, depth=calls[0].depth)

    params = jax.eval_shape(step.common_params, state)
    specs = None if step.placing is None else step.placing.of_params(state.params)
    place = Place(step.names, sizes, specs, step.shard_optimizer)
    found = _explained(step.tx, params, place, count, step)
    if batch is None and step.mesh is not None:
        return _uncounted(found, "batch")
    if found.calls and not found.problem and step.is_global(state):
        problem = "on global arrays XLA places it. Below are the bytes of the whole program."
        return dataclasses.replace(found, problem=problem)
    return found


def _uncounted(found: Explanation, argument: str) -> Explanation:
    return dataclasses.replace(found, problem=found.problem or f"{argument} was not given.")


def _explained(
    tx: optax.GradientTransformation,
    params: PyTree,
    place: Place,
    count: Callable[[], _Counted],
    step: TrainStep | None = None,
) -> Explanation:
    """What ``count`` traces, part by part, beside what the chain alone tells."""
    found = rows(read(tx))
    wrong = tuple(findings(found, step))
    calls, program, problem = (), None, ""
    try:
        calls, program = count()
    except (ValueError, TypeError) as error:
        # What is in wrong order often cannot be traced; then that is what to say.
        if not wrong:
            raise
        problem = str(error).partition("\n")[0]
    parts = part_costs(tx, found, params, place, program)
    return Explanation(parts, wrong, params_bytes(params, place), calls, problem)
