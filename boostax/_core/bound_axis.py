# SPDX-License-Identifier: Apache-2.0
"""Name the replica axis once, for all parts of a chain that have no ``axis_name``.

``make_train_step`` and ``on_mesh`` bind their ``axis_name`` while they call a chain. A reduction
without an ``axis_name`` runs over the bound axis, and so does a gate around a reduction. A gate
after the reduction gets gradients that are equal on all replicas, so this gate needs no axis. Each
part reads the bound axis when the part is called, not when it is built.

Some windows themselves average the gradients of each call over the replicas (``Bound.averaged``).
Inside such a window, a reduction by the mean returns its input unchanged, other reductions are
refused, and gates ignore ``axis_name``.
"""

import contextvars
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from boostax._core import axes, checks
from boostax._core.describe import Stepped
from boostax._core.gate import Extended, Pending, gate_of, gated, init_inner
from boostax._core.types import PyTree

Factory = TypeVar("Factory", bound=Callable[..., Extended])

REDUCED: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("reduced", default=None)


def gate(factory: Factory) -> Factory:
    """Make ``axis_name`` optional for a gate; the default is the bound axis if a part reduces."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Extended:
        spec = checks.bind(factory, args, kwargs)
        alone: Any = factory(*args, **kwargs)
        by_axes: dict[tuple[str, ...], Extended] = {(): alone}

        def pick(params: PyTree) -> Extended:
            bound = axes.bound()
            if bound.averaged:
                return called(factory, spec, None)
            if spec.arguments.get("axis_name") is not None:
                return alone
            if bound.names not in by_axes:
                agreed = _agreed(alone, params, bound.names)
                by_axes[bound.names] = called(factory, spec, agreed) if agreed else alone
            return by_axes[bound.names]

        return delayed(alone, pick)

    return made  # type: ignore[return-value]


def _agreed(tx: Any, params: PyTree, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the bound axes over which parts inside reduce, as the ``init`` of each part reports.

    This function is not a closure, because cloudpickle copies the variables of a closure, and
    ``REDUCED`` cannot be copied.
    """
    reduced = set[str]()
    with axes.during(REDUCED, reduced):
        for inner in tx.update.description.inner.values():
            jax.eval_shape(functools.partial(init_inner, inner), params)
    bound = sorted(reduced, key=repr) if axes.UNNAMED in names else names
    return tuple(name for name in bound if name in reduced)


def called(factory: Callable[..., Extended], spec: Any, names: axes.AxisName | None) -> Extended:
    """Call a factory with the arguments of ``spec``, but with another ``axis_name``."""
    new = inspect.BoundArguments(spec.signature, spec.arguments | {"axis_name": names})
    return factory(*new.args, **new.kwargs)


def delayed(sample: Extended, pick: Callable[[PyTree], Any]) -> Extended:
    """Return a transformation that calls the result of ``pick``, described like ``sample``."""
    sampled = gate_of(sample)

    # The ``step`` of a gate gets a ``Pending`` and the argument ``apply``. The ``update`` of any
    # other part gets gradients.
    @functools.wraps(sampled.step if sampled else sample.update)
    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Stepped:
        raw = updates.raw if isinstance(updates, Pending) else updates
        chosen = pick(raw if params is None else params).update
        return (chosen.step if sampled else chosen)(updates, state, params, **extra)

    tx = Extended(lambda params: pick(params).init(params), update)
    if sampled is None:
        return tx
    return gated(tx.init, update, lambda state, p, **extra: pick(p).update.flush(state, p, **extra))
