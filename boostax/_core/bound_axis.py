# SPDX-License-Identifier: Apache-2.0
"""Name the replica axis once, for all parts of a chain that have no ``axis_name``.

``make_train_step`` and ``on_mesh`` bind their ``axis_name`` while they call a chain. A reduction
without an ``axis_name`` runs over the bound one, and so does a gate with a reduction inside. A gate
behind the reduction gets gradients that are equal on all replicas, so it needs no axis. Each part
reads the bound axis when it is called, not when it is built.

Inside a window that averages the gradients of each call itself (``averaged``), a mean returns its
input unchanged, other reductions are refused, and gates ignore their ``axis_name``.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import jax

from boostax._core import axes, checks
from boostax._core.describe import PyTree
from boostax._core.gate import Extended, gate_of, gated, init_inner

Factory = TypeVar("Factory", bound=Callable[..., Extended])

_REDUCED: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("reduced", default=None)


@contextlib.contextmanager
def averaged(names: tuple[str, ...]) -> Generator[None]:
    """Call inner parts on gradients averaged over these axes; report the axes to outer gates."""
    reduced = _REDUCED.get()
    if reduced is not None:
        reduced.update(names)
    with axes.binding(names, averaged=True) if names else contextlib.nullcontext():
        yield


def reduction(factory: Factory) -> Factory:
    """Make ``axis_name`` optional for a reduction, and report its axes to outer gates."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Extended:
        given = checks.bind(factory, args, kwargs)
        who = given.arguments.get("name") or factory.__name__
        if given.arguments.get("axis_name") is not None:
            tx = factory(*args, **kwargs)
            return tx._replace(init=lambda params: _reducing(tx, who, given).init(params))
        call = f"{who}({'inner, ' * ('inner' in given.arguments)}'data')"
        sample = _called(factory, given, axes.UNNAMED)
        within = given.arguments.get("within")
        inside = within if isinstance(within, tuple) else (within,)
        known: dict[tuple[str, ...], Extended] = {axes.UNNAMED: sample}

        def bound(params: PyTree) -> Extended:
            over = axes.UNNAMED if axes.bound().averaged else axes.bound().names
            hint = f"Leave it to make_train_step or on_mesh around it, or name it, {call}; "
            hint += "in NNX boostax.nnx.Optimizer(model, tx, wrt=nnx.Param, axis_name='data')."
            checks.require(bool(over), who, "axis_name", got=None, allowed="a mesh axis", hint=hint)
            if over not in known:
                known[over] = _called(factory, given, tuple(x for x in over if x not in inside))
            return _reducing(known[over], who, given)

        return _delayed(sample, bound)

    return made  # type: ignore[return-value]


def gate(factory: Factory) -> Factory:
    """Make ``axis_name`` optional for a gate: the default is the bound axis if a part reduces."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Extended:
        given, alone = checks.bind(factory, args, kwargs), factory(*args, **kwargs)
        named = given.arguments.get("axis_name") is not None
        known: dict[tuple[str, ...], Extended] = {(): alone}

        def bound(params: PyTree) -> Extended:
            over, averaged = axes.bound().names, axes.bound().averaged
            if named or averaged:
                return _called(factory, given, None) if averaged else alone
            if over not in known:
                reduced = _reduced_inside(alone, params)
                wanted = sorted(reduced) if over == axes.UNNAMED else over
                agreed = tuple(name for name in wanted if name in reduced)
                known[over] = _called(factory, given, agreed) if agreed else alone
            return known[over]

        return _delayed(alone, bound)

    return made  # type: ignore[return-value]


def _called(factory: Callable[..., Extended], given: Any, over: axes.AxisName | None) -> Extended:
    told = inspect.BoundArguments(given.signature, given.arguments | {"axis_name": over})
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


def _require_mean(tx: Any, who: str, given: inspect.BoundArguments) -> None:
    """Refuse reductions other than a plain mean inside a window that averages gradients itself."""
    default, asked = given.signature.parameters, given.arguments.items()
    options = {name for name, x in asked if x != default[name].default} - {"axis_name", "divide"}
    options |= {*tx.update.description.axes} - {*axes.bound().names, *axes.UNNAMED}
    mean, allowed = tx.update.description.role == "mean", "'local' around all but all_reduce()"
    got = f"'sharded' around {who}" + f"({', '.join(sorted(options))})" * mean
    hint = "optax.chain(reduction, accumulate(optimizer, every)) reduces each call's gradients too."
    checks.require(mean and not options, "accumulate", "sums", got=got, allowed=allowed, hint=hint)


def _reducing(tx: Any, who: str, given: inspect.BoundArguments) -> Extended:
    """Report the axes of a reduction to outer gates; refuse axes that are not bound."""
    if axes.bound().averaged:
        _require_mean(tx, who, given)
        return tx
    bound, reduced, over = axes.bound().names, _REDUCED.get(), tx.update.description.axes
    fits, hint = set(over) <= set(bound), "Leave it out: the step binds its own axis."
    allowed, free = f"among the axes of the step around it, {bound}", bound in ((), axes.UNNAMED)
    checks.require(free or fits, who, "axis_name", got=over, allowed=allowed, hint=hint)
    if reduced is not None:
        reduced.update(over)
    return tx


def _reduced_inside(tx: Any, params: PyTree) -> set[str]:
    """Return the axes over which parts inside a gate reduce, as their ``init`` reports them."""
    reduced = set[str]()
    with axes.during(_REDUCED, reduced):
        for inner in tx.update.description.inner.values():
            jax.eval_shape(functools.partial(init_inner, inner), params)
    return reduced
