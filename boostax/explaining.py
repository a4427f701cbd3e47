# SPDX-License-Identifier: Apache-2.0
"""Explain a chain or a train step: list its parts, and report wrong orders of parts."""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, describe, groups, handshake, interpret, trees
from boostax._core.types import PyTree
from boostax.order import findings, parts
from boostax.order.findings import Finding as Finding
from boostax.precision.loss_scale import loss_scale
from boostax.train import apply
from boostax.train.state import TrainState
from boostax.train.step import TrainStep

_WHO = "explain"


class _Part(NamedTuple):
    """Describe a part of a chain.

    Attributes:
      name: the name of the part's factory.
      depth: the number of parts that wrap the part.
      role: the kind of part; ``"unknown"`` if boostax does not know the part.
      what: the first line of the part's docstring.
    """

    name: str
    depth: int
    role: str
    what: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """List the parts of a chain, and report wrong orders of parts; ``print`` shows a table.

    Attributes:
      parts: the parts, in the order in which a gradient passes them. Each part has a ``name``, a
        ``depth`` (the number of parts that wrap it), a ``role``, and the first line of its
        docstring as ``what``.
      findings: parts in a wrong order or with a wrong setting, with the reason and a fix.
    """

    parts: tuple[_Part, ...]
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data for JSON."""
        return {name: [x._asdict() for x in listed] for name, listed in vars(self).items()}

    def __str__(self) -> str:
        table = [("part", "what it does")]
        for part in self.parts:
            name = "  " * part.depth + part.name + " (unknown)" * (part.role == parts.UNKNOWN)
            table.append((name, part.what.replace("`", "")))
        width = max(len(name) for name, _ in table)
        aligned = "\n".join(f"{name:{width}}  {what}".rstrip() for name, what in table)
        errors = "\n".join(f"! {finding}" for finding in self.findings)
        is_unknown = any(part.role == parts.UNKNOWN for part in self.parts)
        note = "The position of an unknown part is not checked." if is_unknown else ""
        return "\n\n".join(filter(None, (aligned, errors, note)))


@checks.arguments
def explain(
    tx: optax.GradientTransformation | TrainStep,
    params: PyTree,
    batch: PyTree = None,
    **kwargs: PyTree,
) -> Explanation:
    """List the parts of a chain or a train step, and report wrong orders of parts.

    Parts are listed in the order in which a gradient passes them. Wrong orders, such as a clip
    before the loss scaler or a mean before AdaSum, are reported with the reason and a fix. A part
    of another package has the role ``"unknown"``, and the position of that part is not checked.

    With a batch and a train step that scales the loss, ``explain`` also reports backward rules
    (``jax.custom_vjp``) that are not linear in the cotangent, and params whose unscaled gradients
    differ between the scale in the state and a scale near 1. For this comparison, f32 replaces the
    f16 of a policy. Gradients are not compared if the loss itself computes in f16, if ``kwargs``
    are given, or if the chain contains ``boostax.carry``.

    With a batch and a train step, ``explain`` also reports parts that have no effect, such as a
    ``by_shape`` that distributes nothing. Without a batch, ``explain`` reports only what ``init``
    shows, such as a schedule that freezes nothing.

    ``boostax.audit`` counts the FLOPs, the memory and the sent bytes of the compiled step.

    Args:
      tx: a transformation, or the result of ``make_train_step``.
      params: arrays or ``jax.ShapeDtypeStruct``; for a step, the step's ``TrainState`` or params.
      batch: a batch of the step, as arrays or as ``jax.ShapeDtypeStruct``.
      **kwargs: keyword arguments that a call of the step passes to the loss.

    Returns:
      An ``Explanation``. Cost: a trace of ``init``; with a batch, a trace of the step, and two
      gradients if the loss is scaled and the batch consists of arrays.

    Raises:
      ValueError, TypeError: ``tx`` is neither a transformation nor a step, or ``init`` raises.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> inner = optax.chain(boostax.adasum("data"), optax.adam(1e-3))
      >>> tx = optax.chain(optax.clip(1.0), boostax.dynamic_loss_scale(inner, axis_name="data"))
      >>> explanation = boostax.explain(tx, jnp.zeros(256))
      >>> for part in explanation.parts:
      ...   print("  " * part.depth + part.name)
      clip
      dynamic_loss_scale
        adasum
        scale_by_adam
        scale
      >>> explanation.findings[0].what
      'dynamic_loss_scale after clip'
    """
    step = tx if isinstance(tx, TrainStep) else None
    chain = tx.tx if isinstance(tx, TrainStep) else tx
    listed: list[Finding] = []
    idle: dict[Finding, None] = {}
    if step is not None:
        state = params
        with axes.during(findings.IDLE, idle):
            if not isinstance(state, TrainState):
                state = step.init(jax.eval_shape(lambda p: p, params))
            _trace(step, state, batch, kwargs)
        if batch is not None and findings.scales(chain):
            listed = _of_scales(step, state, batch, kwargs)
    else:
        checks.transformation(_WHO, "tx", chain)
        for name, value in {"batch": batch, **kwargs}.items():
            if removed := checks.replacement(f"explain({name}=)"):
                raise TypeError(f"{_WHO}: {removed}")
            hint = "Pass the result of boostax.make_train_step as tx."
            checks.absent(_WHO, name, value, "left out without a train step", hint)
        with axes.binding((axes.UNNAMED,)), axes.during(findings.IDLE, idle):
            jax.eval_shape(chain.init, params)
    rows = parts.rows(parts.read(chain))
    described = (_Part(x.part.name, len(x.holders), x.role, _what(x.part, params)) for x in rows)
    trained = params.params if isinstance(params, TrainState) else params
    listed += findings.decays(chain, trained)
    return Explanation(tuple(described), (*findings.findings(rows, step), *idle, *listed))


def _trace(step: TrainStep, state: TrainState, batch: PyTree, kwargs: PyTree) -> None:
    """Trace a step whose parts report that they have no effect; without a batch, only read it."""
    depth = None
    if (variants := describe.variants_of(step.tx)) is not None:
        freezing = variants.find(state.opt_state)
        plan = variants.plan(apply.local_types(state.params))
        depth = plan.drawn[0]
        if isinstance(freezing.steps, jax.Array):
            plan.report_idle(int(freezing.steps), freezing)
    if batch is not None:
        # A new step has no trace of an earlier call.
        oracle = dataclasses.replace(step.oracle, watch=None)
        new = dataclasses.replace(step, oracle=oracle, _programs={})
        new.jaxpr(state, batch, depth=depth, **kwargs)


def _what(part: parts.Part, params: PyTree) -> str:
    """Return what a part does; for a freezing that never changes, with the leaves that train."""
    freezing = part.settings.get("freezing")
    plan = freezing and freezing.plan(getattr(params, "params", params))
    if plan is None or len(plan.drawn) > 1:
        return part.what
    active = plan.active(plan.drawn[0])
    leaves = [name for name, trains in trees.named(active) if trains]
    shown = groups.few(leaves) or "nothing"
    return f"Train only {shown} ({len(leaves)} of {len(trees.names(active))} leaves)"


def _of_scales(step: TrainStep, state: TrainState, batch: PyTree, kwargs: PyTree) -> list[Finding]:
    """Find backward rules that are not linear, and params whose gradients depend on the scale."""
    rules: list[str] = []
    oracle: Any = dataclasses.replace(step.oracle, watch=rules.extend)
    if step.policy is not None:
        wide = dataclasses.replace(step.policy, compute_dtype=jnp.float32)
        oracle = dataclasses.replace(oracle, computed=wide.compute(oracle.computed.__wrapped__))

    def unscaled(factor: float, state: TrainState, batch: PyTree, more: PyTree) -> list[jax.Array]:
        scales = handshake.scales_in(state.opt_state)
        leaves, tree = jax.tree.flatten(state.opt_state)
        leaves = [x * factor if any(x is y for y in scales) else x for x in leaves]
        more = {**more, "key": state.key, "model_state": state.model_state}
        _, grads = oracle.with_aux(state.params, tree.unflatten(leaves), batch, True, more)
        return [g / factor for g in jax.tree.leaves(trees.at_least_float32(grads))]

    def differs(*args: PyTree) -> list[jax.Array]:
        pairs = zip(unscaled(1.0, *args), unscaled(factor, *args), strict=True)
        norms = ([jnp.max(jnp.abs(z), initial=0) for z in (x - y, x)] for x, y in pairs)
        return [difference > tolerance * norm for difference, norm in norms]

    args = (state, step.place(batch), kwargs)
    program = jax.make_jaxpr(functools.partial(unscaled, 1.0))(*args).jaxpr
    listed = [findings.finding("not_linear", rule=rule) for rule in dict.fromkeys(rules)]
    values: Any = [x.aval for equation, _ in interpret.equations(program) for x in equation.outvars]
    limits = [jnp.finfo(x.dtype) for x in values if jnp.issubdtype(x.dtype, jnp.floating)]
    is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args))
    # Scaling by a power of two is exact unless a value underflows or overflows, as it may in f16.
    if kwargs or is_abstract or any(x.tiny > 1e-30 for x in limits):
        return listed
    factor = 2.0 ** -(round(math.log2(loss_scale(state.opt_state))) or 8)
    # On a GPU, the order of the terms of a sum may differ between two runs.
    tolerance = max(float(x.eps) for x in limits) ** 0.5
    names = groups.few([*itertools.compress(trees.names(state.params), jax.jit(differs)(*args))])
    return [*listed, findings.finding("depends_on_scale", leaves=names)] if names else listed
