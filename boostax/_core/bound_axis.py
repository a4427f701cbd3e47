# SPDX-License-Identifier: Apache-2.0
"""Name the replica axis once, for all parts of a chain that have no ``axis_name``.

``make_train_step`` and ``on_mesh`` bind their ``axis_name`` while they call a chain. A reduction
without an ``axis_name`` runs over the bound one, and so does a gate inside which something reduces;
a gate behind the reduction sees gradients that are equal on all replicas, and needs none. Each part
reads the bound axis when it is called, so it does not matter which wrapper built the part, or when.
"""

import contextvars
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from boostax._core import axes, checks
from boostax._core.describe import PyTree
from boostax._core.gate import Extended, gate_of, gated, init_inner

Factory = TypeVar("Factory", bound=Callable[..., Extended])

_REDUCED: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("reduced", default=None)


def reduction(factory: Factory) -> Factory:
    """Make ``axis_name`` optional for a reduction, and tell gates around it its axes."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Extended:
        given = checks.bind(factory, args, kwargs)
        who = given.arguments.get("name") or factory.__name__
        if given.arguments.get("axis_name") is not None:
            tx = factory(*args, **kwargs)
            named = tx._replace(init=lambda params: _reducing(tx, who).init(params))
            return _unless_reduced(named)
        within = given.arguments.get("within")
        inside = within if isinstance(within, tuple) else (within,)
        known: dict[tuple[str, ...], Extended] = {}

        def bound(params: PyTree) -> Extended:
            over = axes.bound()
            hint = f"Name it, {who}('data'), or leave it to make_train_step or on_mesh around it."
            checks.require(who, "axis_name", None, "a mesh axis", bool(over), hint)
            if over not in known:
                known[over] = _called(factory, given, [x for x in over if x not in inside])
            return _reducing(known[over], who)

        return _unless_reduced(_delayed(_called(factory, given, axes.UNNAMED), bound))

    return made  # type: ignore[return-value]


def _unless_reduced(tx: Extended) -> Extended:
    """Return a reduction that passes gradients on where they are reduced already."""
    if gate_of(tx) is not None:
        return tx

    @functools.wraps(tx.update)
    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Any:
        passing = axes.bound() == axes.REDUCED
        return (updates, state) if passing else tx.update(updates, state, params, **extra)

    return tx._replace(update=update)


def gate(factory: Factory) -> Factory:
    """Make ``axis_name`` optional for a gate: the bound axis, if a part inside reduces."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Extended:
        given, alone = checks.bind(factory, args, kwargs), factory(*args, **kwargs)
        if given.arguments.get("axis_name") is not None:
            return alone
        known: dict[tuple[str, ...], Extended] = {(): alone}

        def bound(params: PyTree) -> Extended:
            over = axes.bound()
            if over not in known:
                reduced = _reduced_inside(alone, params)
                wanted = sorted(reduced) if over == axes.UNNAMED else over
                agreed = [name for name in wanted if name in reduced]
                known[over] = _called(factory, given, agreed) if agreed else alone
            return known[over]

        return _delayed(alone, bound)

    return made  # type: ignore[return-value]


def _called(factory: Callable[..., Extended], given: Any, over: Sequence[str]) -> Extended:
    told = inspect.BoundArguments(given.signature, given.arguments | {"axis_name": tuple(over)})
    return factory(*told.args, **told.kwargs)


def _delayed(sample: Extended, pick: Callable[[PyTree], Extended]) -> Extended:
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


def _reducing(tx: Any, who: str) -> Extended:
    """Tell the gates around a reduction over which axes it reduces; refuse axes not bound."""
    bound, reduced, over = axes.bound(), _REDUCED.get(), tx.update.description.axes
    fits, hint = set(over) <= set(bound), "Leave it out: the step names its own."
    allowed, free = f"among the axes of the step around it, {bound}", bound in ((), axes.UNNAMED)
    checks.require(who, "axis_name", over, allowed, free or fits, hint)
    if reduced is not None:
        reduced.update(over)
    return tx


def _reduced_inside(tx: Any, params: PyTree) -> set[str]:
    """Return the axes over which something inside a gate reduces, as its ``init`` reports them."""
    reduced = set[str]()
    token = _REDUCED.set(reduced)
    try:
        for inner in tx.update.description.inner.values():
            jax.eval_shape(functools.partial(init_inner, inner), params)
    finally:
        _REDUCED.reset(token)
    return reduced
