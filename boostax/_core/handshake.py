# SPDX-License-Identifier: Apache-2.0
"""Scaled gradients shake hands with the scaler that divides them again.

A scaler that is given the gradients of a loss which nobody multiplied would divide them by 65536
all the same: training stands still, and every metric is healthy. So whoever multiplies a loss
leaves a mark on the scale that was read, and a scaler asks, while it is traced, whether *its*
scale bears one. A mark belongs to a tracer, by identity: it is gone when the trace is, and nothing
of it reaches the program.

What a trace cannot see needs a word: gradients of another ``jax.jit`` arrive unmarked, and
``assume_scaled`` vouches for them. Without tracing nothing is asked, as gradients of a compiled
function leave no mark.
"""

import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Generator
from typing import Any, TypeVar

import jax
from jax.core import Tracer

from boostax._core import trees

PyTree = Any
Grads = TypeVar("Grads")


@dataclasses.dataclass
class Mark:
    """Uses of a scale since its trace began.

    Attributes:
      loss: a loss was multiplied by it.
      crossed: cotangents changed from one group's scale to another's.
    """

    loss: bool = False
    crossed: bool = False


_MARKS: dict[int, tuple[weakref.ref[Any], Mark]] = {}
_SCALED: dict[int, weakref.ref[Any]] = {}
_INSIDE: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("inside", default=())


def assume_scaled(grads: Grads, opt_state: PyTree) -> Grads:
    """Vouch that gradients are of a loss that was multiplied by a state's loss scale.

    Inside ``jax.jit`` a scaler refuses gradients of a loss that nobody scaled. It cannot see the
    scaling of gradients that come from elsewhere: from another ``jax.jit`` or a checkpointed
    function that was given the state, or from a product written by hand. This says that they are.

    Args:
      grads: scaled gradients.
      opt_state: the state that holds the scale; one without a scaler needs no word.

    Returns:
      ``grads``. Cost: nothing in the program.

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
    for scale in _scales(opt_state):
        mark = _mark(scale)
        mark.loss = mark.crossed = True
    return grads


def crossed(scales: Any) -> None:
    """Mark the scales of groups: cotangents change from one to another."""
    for mark in [_mark(scales), *_enclosing(scales)]:
        mark.crossed = True


def require(who: str, scale: jax.Array, groups: int = 1) -> None:
    """Refuse, while tracing, gradients of a loss that was not multiplied by this scale.

    Args:
      who: the scaler.
      scale: by which its state is known.
      groups: the number of groups of gradients with a scale of their own.
    """
    if not isinstance(scale, Tracer):
        return
    marks = [m for m in (_mark(scale), *_enclosing(scale)) if m.loss]
    if not marks:
        raise ValueError(
            f"{who}: gradients must be those of a loss multiplied by the scale in this opt_state, "
            "got some of a loss that was not. Take them from boostax.value_and_grad(loss_fn)("
            "params, opt_state, batch), or differentiate boostax.precision.scale_loss(loss, "
            "opt_state); boostax.precision.assume_scaled(grads, opt_state) vouches for gradients "
            "of another jax.jit."
        )
    if groups > 1 and not any(m.crossed for m in marks):
        raise ValueError(
            f"{who}: loss_fn must use the scales of the groups, got one that leaves scales= alone. "
            "Put boostax.precision.scale_boundary(x, scales, outer, inner) on every edge between "
            "groups."
        )


def hand_on(old: jax.Array | None, new: jax.Array | None) -> None:
    """Make two arrays one to whoever asks: what marks either marks both.

    Of one outside all traces nothing was asked, and nothing is inside.
    """
    if not isinstance(new, Tracer):
        return
    mark = _mark(old)
    if not isinstance(old, Tracer) or any(m.loss for m in _enclosing(old)):
        mark.loss = mark.crossed = True
    _keep(new, mark)


def hand_on_state(old: PyTree, new: PyTree) -> None:
    """Make the scales in two states of one structure one to whoever asks."""
    for one, other in zip(_scales(old), _scales(new), strict=True):
        hand_on(one, other)


@contextlib.contextmanager
def scaling(opt_state: PyTree) -> Generator[None]:
    """Mark the scales in a state: a loss that is traced within is multiplied by them outside."""
    scales = _scales(opt_state)
    for scale in scales:
        _mark(scale).loss = True
    token = _INSIDE.set((*_INSIDE.get(), *scales))
    try:
        yield
    finally:
        _INSIDE.reset(token)


def scaled_once(loss: jax.Array, product: jax.Array, opt_state: PyTree) -> jax.Array:
    """Remember the product; refuse a loss that is one itself, or will be multiplied."""
    scales = _scales(opt_state)
    within = any(one is other for one in scales for other in _INSIDE.get())
    before = _SCALED.get(id(loss))
    if within or (scales and before is not None and before() is loss):
        raise ValueError(
            "scale_loss: loss must be multiplied by the scale once, got one that is multiplied "
            "already. boostax.value_and_grad does so by itself: return the plain loss there."
        )
    key = id(product)
    _SCALED[key] = weakref.ref(product, lambda _: _SCALED.pop(key, None))
    for scale in scales:
        _mark(scale).loss = True
    return product


def _scales(state: PyTree) -> list[Any]:
    """Return the array by which each scaler in a state is known."""
    return [node.known_by() for node in trees.telling(state, "known_by")]


def _mark(scale: Any) -> Mark:
    """Return the mark of a tracer; anything else gets one that nobody keeps."""
    found = _MARKS.get(id(scale))
    if found is not None and found[0]() is scale:
        return found[1]
    return _keep(scale, Mark()) if isinstance(scale, Tracer) else Mark()


def _keep(scale: Any, mark: Mark) -> Mark:
    key = id(scale)
    _MARKS[key] = weakref.ref(scale, lambda _: _MARKS.pop(key, None)), mark
    return mark


def _enclosing(scale: Any) -> list[Mark]:
    """Return the marks of the traces in which this one takes place.

    Where JAX does not say what surrounds a trace, more is refused, nothing passed.
    """
    around: set[int] = set()
    trace = getattr(getattr(scale, "_trace", None), "parent_trace", None)
    while trace is not None:
        around.add(id(trace))
        trace = getattr(trace, "parent_trace", None)
    alive = [(ref(), mark) for ref, mark in list(_MARKS.values())]
    return [mark for x, mark in alive if id(getattr(x, "_trace", None)) in around]
