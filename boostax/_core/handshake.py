# SPDX-License-Identifier: Apache-2.0
"""A handshake between scaled gradients and the scaler that divides them again.

If the loss was not multiplied by the scale, the scaler would still divide the gradients, for
example by 65536. Training would stop, and no metric would show why. So code that multiplies a loss
by a scale marks the scale, and a scaler checks during tracing that the scaler's *own* scale has a
mark. A mark is stored for the identity of a tracer, is deleted with the trace, and adds nothing to
the program.

Everything between the backward pass and the scaler must be homogeneous of degree 1 in the gradients
(``degrees.py``): casts, products with constants and means over replicas have degree 1, but a clip,
a weight decay or a sign has not. JAX names the equations of a backward pass, and keeps the equation
that made each traced array until the trace ends. These equations are not known for gradients of
another ``jax.jit``, and for gradients that no backward pass of JAX computed, so these gradients are
not refused.

Gradients from another ``jax.jit`` have no mark; ``assume_scaled`` adds a mark. Outside a trace
nothing is checked, because gradients of a compiled function have no mark.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from contextvars import ContextVar
from typing import Any

import jax
from jax.core import Tracer

from boostax._core import checks, degrees, interpret, jaxprs, protocols, trees
from boostax._core.types import Grads, PyTree


@dataclasses.dataclass
class Mark:
    """The uses of a scale in its trace, or whether a traced value is a scaled loss.

    Attributes:
      loss: whether a loss was multiplied by this scale.
      crossed: whether a boundary between two groups used this scale.
      product: whether this is a loss that was multiplied by a scale.
    """

    loss: bool = False
    crossed: bool = False
    product: bool = False


_MARKS: dict[int, tuple[weakref.ref[object], Mark]] = {}
# For each loss in the current trace, a list of its scales. The outermost loss is first.
INSIDE: ContextVar[tuple[list[jax.Array], ...]] = ContextVar("inside", default=())
# The scale that multiplies the innermost loss. The caches of jax.jit compare this context, so a
# trace for one loss is not reused for another loss.
FACTOR = jax.make_user_context(None)


def assume_scaled(grads: Grads, opt_state: PyTree) -> Grads:
    """Declare that gradients come from a loss multiplied by the loss scale of a state.

    Inside ``jax.jit``, a scaler refuses gradients of a loss that was not scaled. The scaler cannot
    recognize scaled gradients from another ``jax.jit``, from a checkpointed function with the state
    as an argument, or from a product written by hand. In these cases, call this function on the
    gradients.

    Args:
      grads: scaled gradients.
      opt_state: the optimizer state with the scale; a state without a scaler is allowed.

    Returns:
      ``grads``. Cost: none; nothing is added to the program.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.static_loss_scale(optax.sgd(1.0), 8.0)
      >>> @jax.jit
      ... def step(w, state, grads):
      ...   given = boostax.precision.assume_scaled(grads, state)
      ...   return boostax.apply_gradients(tx, given, state, w)
      >>> w, state = step(jnp.float32(1.0), tx.init(jnp.float32(1.0)), jnp.float32(2.0))
      >>> float(w)
      0.75
    """
    trees.require_order("assume_scaled", "assume_scaled(grads, opt_state)", grads=grads)
    scaled(opt_state, crossed=True)
    return grads


def scaled(opt_state: PyTree, *, crossed: bool = False) -> list[jax.Array]:
    """Mark the scales in a state as read by a loss, and return the scales."""
    scales = scales_in(opt_state)
    for mark, *_ in map(marks, scales):
        mark.loss = True
        mark.crossed |= crossed
    return scales


def hand_on(old: PyTree, new: PyTree) -> None:
    """Let a new scale, or each scale in a new state, share the mark of the old scale.

    An old scale outside all traces has no mark. Then the new scale is not checked.
    """
    for scale, new_scale in zip(scales_in(old) or [old], scales_in(new) or [new], strict=True):
        if isinstance(new_scale, Tracer):
            mark = marks(scale)[0] if isinstance(scale, Tracer) else Mark(loss=True, crossed=True)
            keep(new_scale, mark)


def multiplied(scale: jax.Array) -> contextlib.AbstractContextManager[None]:
    """Set the result of ``precision.current_scale`` for a loss that is being traced."""
    # The caches of jax.jit store and compare this context. A tracer must not be stored, and cannot
    # be compared by value. So a function returns the tracer from a weak reference.
    known = weakref.ref(scale)
    factor = (lambda: known()) if isinstance(scale, Tracer) else float(scale)
    return FACTOR(factor if any(INSIDE.get()[-1:]) else None)


def scales_in(state: PyTree) -> list[jax.Array]:
    """Return for each scaler in a state the array that identifies the scaler."""
    return [node.scale_array() for node in trees.telling(state, protocols.Scaler)]


def marks(scale: object) -> list[Mark]:
    """Return the mark of an array, or a new mark, followed by all marks in the surrounding traces.

    A new mark is stored if the array is a tracer. If a new version of JAX hides the surrounding
    traces, more gradients are refused, and no gradient is wrongly accepted.
    """
    reference, mark = _MARKS.get(id(scale), (None, Mark()))
    if reference is None or reference() is not scale:
        mark = keep(scale, Mark()) if isinstance(scale, Tracer) else Mark()
    around: set[int] = set()
    trace = getattr(scale, "_trace", None)
    while (trace := getattr(trace, "parent_trace", None)) is not None:
        around.add(id(trace))
    alive = [(ref(), other) for ref, other in list(_MARKS.values())]
    return [mark, *(other for x, other in alive if id(getattr(x, "_trace", None)) in around)]


def keep(scale: object, mark: Mark) -> Mark:
    """Store the mark of an array, until the array is deleted."""
    _MARKS[id(scale)] = weakref.ref(scale, lambda _, key=id(scale): _MARKS.pop(key, None)), mark
    return mark


def require_linear(who: str, grads: PyTree, params: PyTree) -> None:
    """Refuse gradients that are certainly not of degree 1 in the results of the backward pass.

    Args:
      who: the function that gets the gradients of a scaled loss.
      grads: gradients, traced or not.
      params: params in the same trace, which a weight decay may have added to the gradients; or
        ``None``.
    """
    got = "gradients that were clipped, decayed or changed otherwise"
    allowed = "gradients of the backward pass changed only by casts, constant factors and means"
    hint = (
        "The loss scale still multiplies these gradients, so a bound depends on the scale. Clip "
        "inside the scaler: dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), ...))."
    )
    checks.require(not is_nonlinear(grads, params), who, "gradients", got, allowed, hint)


def is_nonlinear(grads: PyTree, params: PyTree) -> bool:
    """Return whether traced gradients are certainly not of degree 1 in the backward pass."""
    leaves, constants = recorded(grads), {x.val for x in recorded(params)}
    # Only a refusal needs the slow look into the equations that contain a backward pass.
    return all(_has_other_degree(leaves, constants, by_result) for by_result in (False, True))


def _has_other_degree(leaves: list[Any], constants: set[Any], by_result: bool) -> bool:
    """Return whether a leaf is certainly not of degree 1.

    With ``by_result``, a result of an equation that contains a backward pass, such as the weight of
    a loss that a ``shard_map`` returns with the gradients, may be independent of this pass.
    """
    eqns, backward, free = between(leaves, constants, by_result)
    changed = set(backward)
    for eqn in eqns:
        if any(x in changed for x in eqn.invars if isinstance(x, jaxprs.Var)):
            changed.update(eqn.outvars)
    results = [x.val for x in leaves if x.val in changed.difference(backward)]
    if not results or all(eqn.primitive.name == "sharding_constraint" for eqn in eqns):
        return False
    program = interpret.excerpt([*free, *backward], results, eqns)
    known = [0.0 if x in constants else degrees.FREE for x in free]
    accepted = (1.0, degrees.ANY, degrees.FREE, degrees.UNKNOWN)
    return any(x not in accepted for x in degrees.degrees(program, known))


def recorded(tree: PyTree) -> list[Any]:
    """Return the recorded arrays of the tracers in a tree, without the constants."""
    recorded = list[Any]()
    for x in jax.tree.leaves(tree):
        while isinstance(x, Tracer) and not hasattr(x, "parent"):
            x = getattr(x, "val", getattr(x, "primal", None))
        if isinstance(x, Tracer) and isinstance(getattr(x, "val", None), jaxprs.Var):
            recorded.append(x)
    return recorded


def _is_backward(eqn: Any) -> bool:
    """Return whether an equation is part of a backward pass, or contains one."""
    stacks = (getattr(x.source_info.name_stack, "stack", ()) for x, _ in interpret.equations([eqn]))
    return any(x.name == "transpose" for stack in stacks for x in stack)


def _backward_results(eqn: Any, by_result: bool) -> dict[Any, bool]:
    """Return whether a backward pass in the equation computes each result; empty without one.

    Without ``by_result``, all results of an equation that contains a backward pass are True.
    """
    stack = getattr(eqn.source_info.name_stack, "stack", ())
    if not _is_backward(eqn):
        return {}
    if not by_result or any(x.name == "transpose" for x in stack):
        return dict.fromkeys(eqn.outvars, True)

    def transfer(inner: jaxprs.JaxprEqn, depends: list[bool]) -> list[bool]:
        return [any(depends) or _is_backward(inner)] * len(inner.outvars)

    traced = interpret.of_trace(eqn)
    inputs = [x for x in traced.invars if isinstance(x, jaxprs.Var)]
    program = interpret.excerpt(inputs, traced.outvars, [traced])
    results = interpret.flow(program, [False] * len(inputs), transfer, any, nothing=False)
    return dict(zip(traced.outvars, results, strict=True))


def between(
    leaves: list[Any], constants: set[Any], by_result: bool = False
) -> tuple[list[jaxprs.JaxprEqn], list[Any], list[Any]]:
    """Return the equations after the backward pass, the results of this pass, and other inputs."""
    eqns: list[jaxprs.JaxprEqn] = []
    inputs: dict[Any, bool] = {}
    # A backward pass is long, and has many results, so each equation is read once.
    results: dict[int, dict[Any, bool]] = {}
    seen: set[int] = set()
    stack = [(x, False) for x in reversed(leaves)]
    while stack:
        tracer, is_done = stack.pop()
        eqn = tracer.parent
        if isinstance(tracer.val, jaxprs.Literal):
            continue
        if eqn is not None and id(eqn) not in results:
            results[id(eqn)] = _backward_results(eqn, by_result)
        if is_done:
            eqns.append(interpret.of_trace(eqn))
        elif eqn is None or tracer.val in constants:
            inputs[tracer.val] = False
        elif results[id(eqn)]:
            inputs[tracer.val] = results[id(eqn)][tracer.val]
        elif id(eqn) not in seen:
            seen.add(id(eqn))
            stack += [(tracer, True), *((x, False) for x in eqn.in_tracers)]
    backward = [x for x, is_backward in inputs.items() if is_backward]
    return eqns, backward, [x for x, is_backward in inputs.items() if not is_backward]
