# SPDX-License-Identifier: Apache-2.0
"""Name the replica axis once, for all parts of a chain that have no ``axis_name``.

``make_train_step`` and ``on_mesh`` bind their ``axis_name`` while they call a chain. A reduction
without an ``axis_name`` runs over the bound one, and so does a gate with a reduction inside. A gate
behind the reduction gets gradients that are equal on all replicas, so it needs no axis. Each part
reads the bound axis when it is called, not when it is built.

Inside a window that averages the gradients of each call itself (``averaged``), a mean returns its
input unchanged, other reductions are refused, and gates ignore their ``axis_name``.
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
    """Make ``axis_name`` optional for a gate: the default is the bound axis if a part reduces."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Extended:
        spec = checks.bind(factory, args, kwargs)
        alone: Any = factory(*args, **kwargs)
        by_axes: dict[tuple[str, ...], Extended] = {(): alone}

        def pick(params: PyTree) -> Extended:
            names = axes.bound().names
            if axes.bound().averaged:
                return called(factory, spec, None)
            if spec.arguments.get("axis_name") is not None:
                return alone
            if names not in by_axes:
                reduced = _reduced_inside(alone, params)
                bound = sorted(reduced, key=repr) if axes.UNNAMED in names else names
                agreed = tuple(name for name in bound if name in reduced)
                by_axes[names] = called(factory, spec, agreed) if agreed else alone
            return by_axes[names]

        return delayed(alone, pick)

    return made  # type: ignore[return-value]


def _reduced_inside(tx: Any, params: PyTree) -> set[str]:
    """Return the axes over which parts inside reduce, as their ``init`` reports them.

    It is no closure, because cloudpickle copies the variables of one, and REDUCED has no copy.
    """
    reduced = set[str]()
    with axes.during(REDUCED, reduced):
        for inner in tx.update.description.inner.values():
            jax.eval_shape(functools.partial(init_inner, inner), params)
    return reduced


def called(factory: Callable[..., Extended], spec: Any, names: axes.AxisName | None) -> Extended:
    """Call a factory with the same arguments and another ``axis_name``."""
    new = inspect.BoundArguments(spec.signature, spec.arguments | {"axis_name": names})
    return factory(*new.args, **new.kwargs)


def delayed(sample: Extended, pick: Callable[[PyTree], Any]) -> Extended:
    """Return a transformation that is chosen at each call, with the description of ``sample``."""

    def init(params: PyTree) -> PyTree:
        return pick(params).init(params)

    if (gate := gate_of(sample)) is None:

        @functools.wraps(sample.update)
        def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Stepped:
            tx = pick(updates if params is None else params)
            return tx.update(updates, state, params, **extra)

        return Extended(init, update)

    @functools.wraps(gate.step)
    def step(grads: Pending, state: PyTree, params: PyTree, **kwargs: PyTree) -> Stepped:
        tx = pick(grads.raw if params is None else params)
        return tx.update.step(grads, state, params, **kwargs)

    def flush(state: PyTree, params: PyTree, **extra: PyTree) -> Stepped:
        return pick(params).update.flush(state, params, **extra)

    return gated(init, step, flush)
