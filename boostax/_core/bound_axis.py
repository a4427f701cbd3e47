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
from boostax._core.gate import Extended, gate_of, gated, init_inner
from boostax._core.types import PyTree

Factory = TypeVar("Factory", bound=Callable[..., Extended])

REDUCED: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("reduced", default=None)


def gate(factory: Factory) -> Factory:
    """Make ``axis_name`` optional for a gate: the default is the bound axis if a part reduces."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Extended:
        given, alone = checks.bind(factory, args, kwargs), factory(*args, **kwargs)
        named = given.arguments.get("axis_name") is not None
        known: dict[tuple[str, ...], Any] = {(): alone}

        def bound(params: PyTree) -> Extended:
            over, averaged = axes.bound().names, axes.bound().averaged
            if named or averaged:
                return called(factory, given, None) if averaged else alone
            if over not in known:
                # The axes over which parts inside reduce, as their ``init`` reports them.
                reduced = set[str]()
                with axes.during(REDUCED, reduced):
                    for inner in known[()].update.description.inner.values():
                        jax.eval_shape(functools.partial(init_inner, inner), params)
                wanted = sorted(reduced, key=repr) if axes.UNNAMED in over else over
                agreed = tuple(name for name in wanted if name in reduced)
                known[over] = called(factory, given, agreed) if agreed else alone
            return known[over]

        return delayed(alone, bound)

    return made  # type: ignore[return-value]


def called(factory: Callable[..., Extended], given: Any, over: axes.AxisName | None) -> Extended:
    told = inspect.BoundArguments(given.signature, given.arguments | {"axis_name": over})
    return factory(*told.args, **told.kwargs)


def delayed(sample: Extended, pick: Callable[[PyTree], Extended]) -> Extended:
    """Return a transformation that is chosen at each call, with the description of ``sample``."""

    def init(params: PyTree) -> Any:
        return pick(params).init(params)

    own = gate_of(sample)
    if own is None:

        @functools.wraps(sample.update)
        def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Any:
            chosen = pick(updates if params is None else params)
            return chosen.update(updates, state, params, **extra)

        return Extended(init, update)

    @functools.wraps(own.step)
    def step(grads: Any, state: Any, params: PyTree, **how: Any) -> Any:
        chosen: Any = gate_of(pick(grads.raw if params is None else params))
        return chosen.step(grads, state, params, **how)

    def flush(state: Any, params: PyTree, **extra: Any) -> Any:
        chosen: Any = gate_of(pick(params))
        return chosen.flush(state, params, **extra)

    return gated(init, step, flush)
