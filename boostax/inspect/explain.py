# SPDX-License-Identifier: Apache-2.0
"""Explain a chain or a train step: its parts, their bytes, and what is in wrong order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

import jax
import optax

from boostax._core import axes, checks, jaxprs
from boostax._core.describe import Reduction
from boostax._core.variants import variants_of
from boostax.chain.orders import Finding
from boostax.chain.parts import read
from boostax.chain.rows import rows
from boostax.chain.settings import findings
from boostax.inspect.costs import PartCost, Place, params_bytes, part_costs, traced
from boostax.inspect.tables import Cells, aligned
from boostax.train.compiled import TrainStep
from boostax.train.state import TrainState

PyTree = Any
_WHO = "explain"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The parts of a chain and their costs. ``print`` gives a table.

    Attributes:
      parts: the chain, in the order in which a gradient meets its parts.
      findings: what is in wrong order or does not fit, with the reason and the mend.
      params_bytes: of the params, on each device.
      problem: why nothing that is sent could be counted: no batch for a step over a mesh, no sizes
        of the axes for a chain that reduces, a step on global arrays, or a wrong order that cannot
        be traced; else empty.
    """

    parts: tuple[PartCost, ...]
    findings: tuple[Finding, ...]
    params_bytes: float
    problem: str = ""

    @property
    def state_bytes(self) -> float:
        """Bytes that the whole chain keeps on each device."""
        return sum(part.state_bytes or 0.0 for part in self.parts)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per step, a train step's loss and metrics included."""
        return sum(part.wire_bytes or 0.0 for part in self.parts)

    @property
    def note(self) -> str:
        """Totals, and what is not counted: what the table does not say."""
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
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data for JSON."""
        listed = {
            name: [x._asdict() for x in getattr(self, name)] for name in ("parts", "findings")
        }
        summed = {"state_bytes": self.state_bytes, "wire_bytes": self.wire_bytes}
        return dataclasses.asdict(self) | listed | summed

    def __str__(self) -> str:
        blocks = [aligned(_cells(self.parts))]
        if self.findings:
            blocks.append("\n".join(f"! {finding}" for finding in self.findings))
        return "\n\n".join((*blocks, self.note))


def explain(
    tx: optax.GradientTransformation | TrainStep,
    params: PyTree,
    batch: PyTree = None,
    *,
    axis_sizes: Mapping[str, int] | None = None,
) -> Explanation:
    """Say which parts a chain or a train step has, what each costs, and what is wrong in it.

    Parts are listed in the order in which a gradient meets them, each with the bytes that it keeps
    and sends on one device. Bytes are counted from types and from the traced program, so nothing is
    run. Orders known to be wrong (a clip outside the scaler, a mean before AdaSum, decay behind a
    gate, ...) are named with the reason and the mend; a part of another package is named as unknown
    and its place not judged.

    With a train step and a batch the bytes are those of the whole step, the loss's included; what
    its compiled program costs (FLOPs, memory, bytes, at each freeze depth) ``boostax.audit`` says.

    Args:
      tx: a transformation, or what ``make_train_step`` returns.
      params: arrays or ``jax.ShapeDtypeStruct``; with a step, its ``TrainState`` or params.
      batch: arrays, as for a call of the step. Nothing is run.
      axis_sizes: without a step: the mesh axes that the transformation names, ``{"data": 8}``.
        The devices need not exist. Without, nothing is counted as sent.

    Returns:
      An ``Explanation``. Cost: a trace.

    Raises:
      ValueError, TypeError: neither a transformation nor a step; and whatever ``init`` and
        ``update`` would raise, if nothing is in wrong order. If something is, that is said, and the
        error is ``problem``.

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
    """
    if isinstance(tx, TrainStep):
        allowed, hint = "left out with a train step", "Its mesh has them."
        checks.absent(_WHO, "axis_sizes", axis_sizes, allowed, hint)
        return _of_step(tx, params, batch)
    fits = isinstance(cast(Any, tx), optax.GradientTransformation)
    allowed = "a transformation or a TrainStep"
    hint = "boostax.make_train_step(loss_fn, tx) makes the latter."
    checks.require(_WHO, "tx", tx, allowed, fits, hint, TypeError)
    hint = "boostax.make_train_step makes one."
    checks.absent(_WHO, "batch", batch, "left out without a train step", hint)
    sizes = {
        name: checks.positive_int(_WHO, f"axis_sizes[{name!r}]", size, "8 is eight devices.")
        for name, size in (axis_sizes or {}).items()
    }
    place = Place(axes.canonical(_WHO, tuple(sizes) or None), sizes)
    found = _explained(tx, params, place, lambda: traced(tx, params, place) if sizes else None)
    if sizes or all(part.role not in get_args(Reduction) for part in found.parts):
        return found
    return dataclasses.replace(found, problem=found.problem or "axis_sizes was not given.")


def _of_step(step: TrainStep, state: PyTree, batch: PyTree) -> Explanation:
    if not isinstance(state, TrainState):
        state = step.init(jax.eval_shape(lambda p: p, state))
    unseen = batch is None or step.mesh is None or step.is_global(state)

    params, variants = jax.eval_shape(step.common_params, state), variants_of(step.tx)
    depth = None if variants is None else variants.drawn(params)[0]

    def program() -> jaxprs.ClosedJaxpr | None:
        if unseen:
            return None
        # A step lists the depths that it was built for; this one does not count.
        return dataclasses.replace(step, _programs={}).jaxpr(state, batch, depth=depth)

    sizes = {} if step.mesh is None else dict(step.mesh.shape)
    specs = None if step.placing is None else step.placing.of_params(state.params)
    place = Place(step.names, sizes, specs, step.shard_optimizer)
    found = _explained(step.tx, params, place, program, step)
    if step.mesh is None or not unseen:
        return found
    problem = "on global arrays XLA places it: boostax.audit counts it."
    problem = "batch was not given." if batch is None else problem
    return dataclasses.replace(found, problem=found.problem or problem)


def _explained(
    tx: optax.GradientTransformation,
    params: PyTree,
    place: Place,
    trace: Callable[[], jaxprs.ClosedJaxpr | None],
    step: TrainStep | None = None,
) -> Explanation:
    """Explain a chain; ``trace`` gives the program whose collectives are counted."""
    found = rows(read(tx))
    wrong = tuple(findings(found, step))
    program, problem = None, ""
    try:
        program = trace()
    except (ValueError, TypeError) as error:
        # A wrong order often cannot be traced; then that is what to say.
        if not wrong:
            raise
        problem = str(error).partition("\n")[0]
    parts = part_costs(tx, found, params, place, program)
    return Explanation(parts, wrong, params_bytes(params, place), problem)


def _cells(parts: tuple[PartCost, ...]) -> Cells:
    """Return the table of the parts, without columns that would hold nothing."""
    sends, owns = any(x.collectives for x in parts), any(x.own_bytes for x in parts)
    heads = ("part", "state bytes", "copies", "own bytes")
    table: Cells = [(*heads, "collectives", "sent bytes", "what it does")]
    for part in parts:
        kept = ("in the row above", "")
        if part.state_bytes is not None:
            kept = (f"{part.state_bytes:,.0f}", f"{part.copies:.2f}")
        kinds = ", ".join(f"{n:g} {kind}" for kind, n in part.collectives.items())
        sent = "above" if part.wire_bytes is None else f"{part.wire_bytes:,.0f}"
        name = "  " * part.depth + part.name + " (unknown)" * (part.role == "unknown")
        cells = (name, *kept, f"{part.own_bytes:,.0f}", kinds, sent, part.what.replace("`", ""))
        table.append(cells)
    shown = (True, True, True, owns, sends, sends, True)
    return [tuple(itertools.compress(row, shown)) for row in table]
