# SPDX-License-Identifier: Apache-2.0
"""Explain a chain or a train step: its parts, and errors in their order."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, groups, handshake, interpret, trees
from boostax._core.types import PyTree
from boostax.chain import findings, parts
from boostax.chain.findings import Finding as Finding
from boostax.precision.loss_scale import loss_scale
from boostax.train.compiled import TrainStep
from boostax.train.state import TrainState

_WHO = "explain"


class _Part(NamedTuple):
    """A part of a chain.

    Attributes:
      name: the name of its factory.
      depth: the number of parts around it.
      role: the kind of part; ``"unknown"`` if boostax does not know it.
      what: the first line of its docstring.
    """

    name: str
    depth: int
    role: str
    what: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The parts of a chain, and errors in their order; ``print`` shows a table.

    Attributes:
      parts: the parts, in the order in which a gradient passes them, each with its ``name``, its
        ``depth`` (the number of parts around it), its ``role`` and the first line of its docstring
        (``what``).
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
        unknown = any(part.role == parts.UNKNOWN for part in self.parts)
        note = "The position of an unknown part is not checked." if unknown else ""
        wrong = "\n".join(f"! {finding}" for finding in self.findings)
        return "\n\n".join(filter(None, (aligned, wrong, note)))


@checks.arguments
def explain(
    tx: optax.GradientTransformation | TrainStep,
    params: PyTree,
    batch: PyTree = None,
    **given: PyTree,
) -> Explanation:
    """List the parts of a chain or a train step, and errors in their order.

    Parts are listed in the order in which a gradient passes them. Known errors of order, such as a
    clip outside the scaler or a mean before AdaSum, are reported with the reason and a fix. A part
    of another package is called unknown, and its position is not checked.

    With a batch and a train step that scales the loss, ``explain`` also reports backward rules
    (``jax.custom_vjp``) that are not linear in the cotangent, and params whose unscaled gradients
    differ between the scale in the state and a scale near 1. A policy's f16 is replaced by f32 for
    this comparison. Gradients are not compared if the loss itself computes in f16, with keywords,
    or with ``boostax.carry``.

    ``boostax.audit`` counts FLOPs, memory and bytes of the compiled step.

    Args:
      tx: a transformation, or the result of ``make_train_step``.
      params: arrays or ``jax.ShapeDtypeStruct``; with a step, its ``TrainState`` or params.
      batch: a batch of the step, as arrays or as ``jax.ShapeDtypeStruct``.
      **given: keyword arguments of a step's call, which it passes to the loss.

    Returns:
      An ``Explanation``. Cost: a trace of ``init``; with arrays as batch and a loss scale, two
      gradients.

    Raises:
      ValueError, TypeError: ``tx`` is neither a transformation nor a step; errors of ``init``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> inner = optax.chain(boostax.adasum("data"), optax.adam(1e-3))
      >>> tx = optax.chain(optax.clip(1.0), boostax.dynamic_loss_scale(inner, axis_name="data"))
      >>> found = boostax.explain(tx, jnp.zeros(256))
      >>> for part in found.parts:
      ...   print("  " * part.depth + part.name)
      clip
      dynamic_loss_scale
        adasum
        scale_by_adam
        scale
      >>> found.findings[0].what
      'dynamic_loss_scale after clip'
    """
    if isinstance(tx, TrainStep):
        state = params
        if not isinstance(state, TrainState):
            state = tx.init(jax.eval_shape(lambda p: p, params))
        scaled = batch is not None and findings.scales(tx.tx)
        return _explained(tx.tx, tx, _of_scales(tx, state, batch, given) if scaled else ())
    checks.transformation(_WHO, "tx", tx)
    for name, value in {"batch": batch, **given}.items():
        if removed := checks.replacement(f"explain({name}=)"):
            raise TypeError(f"{_WHO}: {removed}")
        hint = "boostax.make_train_step makes one."
        checks.absent(_WHO, name, value, "left out without a train step", hint)
    with axes.binding((axes.UNNAMED,)):
        jax.eval_shape(tx.init, params)
    return _explained(tx)


def _explained(tx: Any, step: TrainStep | None = None, more: Iterable[Finding] = ()) -> Explanation:
    rows = parts.rows(parts.read(tx))
    listed = (_Part(x.part.name, len(x.holders), x.role, x.part.what) for x in rows)
    return Explanation(tuple(listed), (*findings.findings(rows, step), *more))


def _of_scales(step: TrainStep, state: TrainState, batch: PyTree, given: Any) -> list[Finding]:
    """Find backward rules that are not linear, and leaves whose gradients depend on the scale."""
    rules: list[str] = []
    oracle: Any = dataclasses.replace(step.oracle, watch=rules.extend)
    if step.policy is not None:
        wide = dataclasses.replace(step.policy, compute_dtype=jnp.float32)
        oracle = dataclasses.replace(oracle, computed=wide.compute(oracle.computed.__wrapped__))

    def unscaled(factor: float, state: TrainState, batch: PyTree, given: Any) -> list[jax.Array]:
        own = handshake.scales_in(state.opt_state)
        put = lambda x: x * factor if any(x is y for y in own) else x  # noqa: E731
        more = {**given, "key": state.key, "model_state": state.model_state}
        _, grads = oracle(state.params, jax.tree.map(put, state.opt_state), batch, **more)
        return [g / factor for g in jax.tree.leaves(trees.at_least_float32(grads))]

    def apart(*args: Any) -> list[jax.Array]:
        pairs = zip(unscaled(1.0, *args), unscaled(factor, *args), strict=True)
        largest = lambda x: jnp.max(jnp.abs(x), initial=0)  # noqa: E731
        return [largest(x - y) > tolerance * largest(x) for x, y in pairs]

    args = state, step.place(batch), given
    program: Any = jax.make_jaxpr(functools.partial(unscaled, 1.0))(*args).jaxpr
    found = [findings.finding("not_linear", rule=rule) for rule in dict.fromkeys(rules)]
    values: Any = [x.aval for eqn, _ in interpret.equations(program) for x in eqn.outvars]
    limits = [jnp.finfo(x.dtype) for x in values if jnp.issubdtype(x.dtype, jnp.floating)]
    shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args))
    # Scaling by a power of two is exact unless a value underflows or overflows, as in f16.
    if given or shapes or any(x.tiny > 1e-30 for x in limits):
        return found
    factor = 2.0 ** -(round(math.log2(loss_scale(state.opt_state))) or 8)
    # On a GPU the order of a sum may differ from run to run.
    tolerance = max(float(x.eps) for x in limits) ** 0.5
    leaves = groups.few([*itertools.compress(trees.names(state.params), jax.jit(apart)(*args))])
    return [*found, findings.finding("depends_on_scale", leaves=leaves)] if leaves else found
