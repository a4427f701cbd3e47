# SPDX-License-Identifier: Apache-2.0
"""A handshake between scaled gradients and the scaler that divides them again.

If the loss was not multiplied, the scaler would divide its gradients by 65536: training would stop,
and no metric would show why. So code that multiplies a loss by a scale marks the scale, and a
scaler checks during tracing that *its* scale has a mark. A mark is attached to the identity of a
tracer. The mark ends with the trace, and adds nothing to the program.

Gradients from another ``jax.jit`` have no mark; ``assume_scaled`` adds it. Outside a trace nothing
is checked, because gradients of a compiled function have no mark.
"""

import contextlib
import contextvars
import dataclasses
import weakref
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from boostax._core import axes, checks, mismatch, trees

PyTree = Any
Grads = TypeVar("Grads")


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


_MARKS: dict[int, tuple[weakref.ref[Any], Mark]] = {}
# The scales of each loss that is being traced, outermost first.
_INSIDE: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("inside", default=())
# The factor of the innermost loss. The caches of jax.jit know this context: a trace for one loss is
# not reused for another.
_FACTOR = jax.make_user_context(None)


def assume_scaled(grads: Grads, opt_state: PyTree) -> Grads:
    """Declare that gradients come from a loss multiplied by the loss scale of a state.

    Inside ``jax.jit`` a scaler refuses gradients of a loss that was not scaled. It cannot see the
    scaling if the gradients come from another ``jax.jit``, from a checkpointed function with the
    state as an argument, or from a product written by hand. In these cases call this function on
    the gradients.

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
    mismatch.require_order("assume_scaled", "assume_scaled(grads, opt_state)", grads=grads)
    for scale in _scales(opt_state):
        mark = _mark(scale)
        mark.loss = mark.crossed = True
    return grads


def crossed(scales: object) -> None:
    """Mark the scales of groups as used by a boundary between two groups."""
    for mark in [_mark(scales), *_enclosing(scales)]:
        mark.crossed = True


def require(who: str, scale: jax.Array, groups: int = 1) -> None:
    """Refuse, in a trace, gradients of a loss that was not multiplied by this scale.

    Args:
      who: the name of the scaler.
      scale: the array that identifies the scaler's state; see ``known_by``.
      groups: the number of groups of gradients, each with its scale.
    """
    if not isinstance(scale, Tracer):
        return
    marks = [m for m in (_mark(scale), *_enclosing(scale)) if m.loss]
    allowed = "those of a loss multiplied by the scale in this opt_state"
    hint = (
        "Take them from boostax.value_and_grad(loss_fn)(params, opt_state, batch), or "
        "differentiate boostax.precision.scale_loss(loss, opt_state); boostax.precision."
        "assume_scaled(grads, opt_state) vouches for gradients of another jax.jit."
    )
    got = "some of a loss that was not"
    checks.require(bool(marks), who, "gradients", got=got, allowed=allowed, hint=hint)
    fits, got = groups == 1 or any(m.crossed for m in marks), "one that leaves scales= alone"
    hint = "Put boostax.precision.scale_boundary(x, scales, outer, inner) on edges between them."
    allowed = "one that uses the scales of the groups"
    checks.require(fits, who, "loss_fn", got=got, allowed=allowed, hint=hint)


def hand_on(old: jax.Array | None, new: jax.Array | None) -> None:
    """Let a new array share the mark of an old one.

    If the old array is outside all traces, it has no mark, and the new array is not checked.
    """
    if not isinstance(new, Tracer):
        return
    mark = _mark(old)
    if not isinstance(old, Tracer) or any(m.loss for m in _enclosing(old)):
        mark.loss = mark.crossed = True
    _keep(new, mark)


def hand_on_state(old: PyTree, new: PyTree) -> None:
    """Let the scales in a new state share the marks of the scales in an old state."""
    for one, other in zip(_scales(old), _scales(new), strict=True):
        hand_on(one, other)


def scaling(opt_state: PyTree) -> contextlib.AbstractContextManager[None]:
    """Mark the scales in a state, for a loss that is traced in this context and scaled outside."""
    scales = _scales(opt_state)
    for scale in scales:
        _mark(scale).loss = True
    return axes.during(_INSIDE, (*_INSIDE.get(), scales))


def multiplied(scale: jax.Array) -> contextlib.AbstractContextManager[None]:
    """Set the result of ``current_scale`` for a loss that is traced in ``scaling``."""
    # The caches keep the context, so it must not hold a tracer, nor be compared by its value.
    known = weakref.ref(scale)
    factor = (lambda: known()) if isinstance(scale, Tracer) else float(scale)
    return _FACTOR(factor if any(_INSIDE.get()[-1:]) else None)


def current_scale() -> jax.Array:
    """Return the number by which the loss that is being differentiated is multiplied.

    A backward rule (``jax.custom_vjp``) whose result is not proportional to the cotangent needs it:
    under a loss scale the cotangent arrives multiplied by ``s``, and the gradients are divided by
    ``s``. So a bound, a threshold, noise or an injected gradient must be multiplied by ``s``.

    Call this function in the loss, and pass the result to the rule as an argument; a call in the
    rule itself fails inside ``jax.jit``. It works in ``boostax.value_and_grad`` and
    ``make_train_step``, also in a scan, a checkpoint, a micro-batch or a replica. With
    ``scale_loss`` or in your own ``jax.grad`` pass ``loss_scale(opt_state)`` to the loss; with
    ``group_loss_scale`` the cotangents of group ``k`` are multiplied by ``scales[k]``.

    Returns:
      f32 scalar; 1 if no loss is scaled. Cost: none. Functions under ``jit`` are traced again for
      each loss.

    Example:
      Add the gradient 1 of an auxiliary loss, whatever the scale:

      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> @jax.custom_vjp
      ... def inject(x, auxiliary, scale):
      ...   return x
      >>> inject.defvjp(lambda x, auxiliary, scale: (x, scale), lambda s, g: (g, s, None))
      >>> def loss_fn(w, x):
      ...   scale = boostax.precision.current_scale()
      ...   return jnp.mean(inject(x, 0.5 * w, scale))
      >>> step = boostax.make_train_step(loss_fn, boostax.dynamic_loss_scale(optax.sgd(1.0)))
      >>> state, _ = step(step.init(jnp.float32(1.0)), jnp.ones(4))
      >>> float(state.params)
      0.5
    """
    factor: Any = _FACTOR.value
    known = factor() if callable(factor) else factor
    return jnp.asarray(1.0 if known is None else known, jnp.float32)


def scaled_once(loss: jax.Array, product: jax.Array, opt_state: PyTree) -> jax.Array:
    """Record a scaled loss; refuse a loss that is already scaled, or that outer code scales."""
    scales = _scales(opt_state)
    within = any(one is other for one in scales for found in _INSIDE.get() for other in found)
    twice = within or (bool(scales) and _mark(loss).product)
    hint = "boostax.value_and_grad does so by itself: return the plain loss there."
    allowed, got = "multiplied by the scale once", "one that is multiplied already"
    checks.require(not twice, "scale_loss", "loss", got=got, allowed=allowed, hint=hint)
    _keep(product, Mark(product=True))
    for scale in scales:
        _mark(scale).loss = True
    return product


def _scales(state: PyTree) -> list[Any]:
    """Return the array that identifies each scaler in a state."""
    return [node.known_by() for node in trees.telling(state, "known_by")]


def _mark(scale: object) -> Mark:
    """Return the mark of an array, or a new one, which is kept if the array is a tracer."""
    found = _MARKS.get(id(scale))
    if found is not None and found[0]() is scale:
        return found[1]
    return _keep(scale, Mark()) if isinstance(scale, Tracer) else Mark()


def _keep(scale: object, mark: Mark) -> Mark:
    key = id(scale)
    _MARKS[key] = weakref.ref(scale, lambda _: _MARKS.pop(key, None)), mark
    return mark


def _enclosing(scale: object) -> list[Mark]:
    """Return the marks of the traces around a scale's trace.

    If a new version of JAX hides the surrounding traces, more gradients are refused, and no
    gradient is wrongly accepted.
    """
    around: set[int] = set()
    trace = getattr(getattr(scale, "_trace", None), "parent_trace", None)
    while trace is not None:
        around.add(id(trace))
        trace = getattr(trace, "parent_trace", None)
    alive = [(ref(), mark) for ref, mark in list(_MARKS.values())]
    return [mark for x, mark in alive if id(getattr(x, "_trace", None)) in around]
