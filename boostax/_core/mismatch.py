# SPDX-License-Identifier: Apache-2.0
"""Explain wrong arguments of a call: another chain's state, swapped, donated, not trainable.

A state is compared with the result of ``init`` only after a call has failed. So the check costs
nothing, and a state that works in another structure passes, such as ``None`` for an empty state.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from boostax._core import bcoo, checks, trees

PyTree = Any
# NamedTuples in states that are not the state of a part.
_NO_PARTS = {"TrainState", "PerReplica", "EmptyState", "MaskedNode"}
_MOVES = "boostax.migrate_state(opt_state, tx, params) carries a state over to another chain."


_ROWS = "Let loss_fn take the batch: arrays that it closes over are not split over replicas."
# Hints for a loss that does not take an argument, by argument.
_TAKEN = {
    "scales": "Add scales=None to its arguments, and a boostax.precision.scale_boundary to every "
    "edge between groups.",
    "key": "Add key=None to its arguments, or start the state without a key.",
    "model_state": "Add model_state=None to its arguments, or start the state without one.",
}


@contextlib.contextmanager
def explaining(look: Callable[..., None], *args: Any, **given: Any) -> Generator[None]:
    """Replace an error raised in this context by the error that ``look(*args, **given)`` raises.

    An error of boostax already names an argument, so it is replaced only by a ``TypeError``.
    """
    ours = lambda error: re.match(r"[\w.()]+: .+ must ", str(error), re.DOTALL)  # noqa: E731
    try:
        yield
    except Exception as error:
        try:
            look(*args, **given)
        except Exception as said:
            if ours(said) and (isinstance(said, TypeError) or not ours(error)):
                raise said from error
        raise


def parts(state: PyTree) -> list[str]:
    """Return the names of the state classes of a chain, outer before inner."""
    names = (type(x).__name__ for x in trees.nodes(state) if hasattr(x, "_fields"))
    return [name for name in names if name not in _NO_PARTS]


def _is_donated(x: Any) -> bool:
    return not isinstance(x, Tracer) and getattr(x, "is_deleted", bool)()


def require_order(who: str, call: str, **given: PyTree) -> None:
    """Refuse donated arrays, and an optimizer state in another argument's position."""
    leaves = jax.tree_util.tree_leaves_with_path(given)
    gone = [trees.path_name(path) for path, x in leaves if _is_donated(x)]
    got, allowed = f"{gone[:4]} donated", "not yet donated"
    hint = "A call that donates takes its arrays: go on with what it returned, or copy before."
    checks.require(not gone, who, "arguments", got=got, allowed=allowed, hint=hint)
    for what, tree in given.items():
        names = (f"{type(x).__module__}.{type(x).__name__}" for x in trees.nodes(tree))
        found = (x for x in names if re.match(r"(optax|boostax)\..*State$", x))
        got, hint = "" if "state" in what else next(found, ""), f"The call is {call}."
        allowed = "without an optimizer state"
        checks.require_type(not got, who, what, got=f"one with {got}", allowed=allowed, hint=hint)


def require_state(who: str, call: str, tx: Any, opt_state: Any, params: Any, *grads: Any) -> None:
    """Refuse swapped arguments, and a state that differs from the result of ``tx.init``."""
    allowed, fits = "an optax.GradientTransformation", hasattr(tx, "init")
    got = type(tx).__name__
    checks.require_type(fits, who, "tx", got=got, allowed=allowed, hint=f"The call is {call}.")
    require_order(who, call, grads=grads, opt_state=opt_state, params=params)
    wanted = jax.eval_shape(tx.init, trees.without_gradient(trees.aside(params), True))
    require_as_made(who, "opt_state", opt_state, wanted)
    # Gradients on a mesh are per-replica, or contain per-replica gradients.
    local = lambda x: local(x.local) if hasattr(x, "local") else x  # noqa: E731
    odd = {*trees.names([local(x) for x in grads])} - {*trees.names([params])}
    hint = "boostax.value_and_grad(loss_fn)(params, opt_state, batch) returns (loss, grads)."
    allowed = "at the paths of the params"
    checks.require(not odd, who, "grads", got=sorted(odd)[:4], allowed=allowed, hint=hint)


def require_as_made(who: str, what: str, state: PyTree, wanted: PyTree) -> PyTree:
    """Return a state in the containers of ``wanted``; refuse other parts, leaves or shapes."""
    mine, theirs = (", ".join(parts(x)[:8]) for x in (state, wanted))
    got, allowed = f"that of {mine or type(state).__name__}", f"that of {theirs}"
    hint, error = (_MOVES, ValueError) if mine else (trees.LOST, TypeError)
    checks.require(mine == theirs, who, what, got=got, allowed=allowed, hint=hint, error=error)
    odd = sorted({*trees.names(state)} ^ {*trees.names(wanted)})
    got, hint = f"others at {odd[:4]}", f"Params and state come from the same init. {_MOVES}"
    allowed = "of the leaves that tx.init(params) makes"
    checks.require(not odd, who, what, got=got, allowed=allowed, hint=hint)
    state = jax.tree.unflatten(jax.tree.structure(wanted), jax.tree.leaves(state))
    hint = "tx.init(params) makes one; boostax.reshard_state(state, n) takes it to n replicas."
    trees.require_shapes(who, what, state, wanted, hint)
    return state


def require_taken(who: str, loss_fn: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Refuse a loss that does not take the arguments that it is called with."""
    try:
        # A wrapper may take arguments that the wrapped function does not.
        takes = inspect.signature(loss_fn, follow_wrapped=False)
    except (TypeError, ValueError):
        # Some callables have no signature that Python can read.
        return
    try:
        takes.bind(None, None, **kwargs)
    except TypeError as error:
        name = next((name for name in kwargs if repr(name) in str(error)), "")
        allowed = f"a function that takes {name}=" if name else "a function of (params, batch)"
        hint = _TAKEN.get(name, f"Leave {name}= out of the call.") if name else _ROWS
        if "missing" in str(error):
            allowed = f"given all that it takes ({error})"
            hint = "step.init takes key= and model_state=; others are keywords: step(s, b, beta=1)."
        raise TypeError(checks.message(who, "loss_fn", allowed, loss_fn, hint)) from error


def active_leaves(who: str, active: PyTree, params: PyTree) -> PyTree:
    """Return a bool for each leaf of the params, from a tree of bools or a prefix of one."""
    given, allowed = jax.tree.leaves(active), "a tree of bools like the params"
    bools = bool(given) and all(isinstance(x, (bool, np.bool_)) for x in given)
    hint = "tx.active(params, depth) of a scheduled_freeze is one."
    checks.require_type(bools, who, "active", got=active, allowed=allowed, hint=hint)

    def of_part(keep: Any, part: PyTree) -> Any:
        # A subtree without arrays needs no entry, so its entry may be None.
        trained = any(map(trees.is_array, jax.tree.leaves(part)))
        return True if keep is None and not trained else keep

    active = jax.tree.map(of_part, active, params, is_leaf=trees.is_none)
    return jax.tree.broadcast(active, params)


def require_trainable(who: str, trained: PyTree) -> None:
    """Refuse trained leaves without a gradient: integers, bools, PRNG keys."""
    if bcoo.MODULE in sys.modules:
        bcoo.require_dense(trained, who, "params")
    allowed = "floating or complex arrays where they are trained"
    hint = "Keep it apart (model_state, equinox.partition, nnx.split), or pass active= with False."
    if any(kind.__module__ == "flax.nnx.module" for kind in type(trained).__mro__):
        hint = "boostax.nnx.Optimizer(model, tx, wrt=nnx.Param, axis_name='data') takes a module: "
        hint += "optimizer.value_and_grad(loss)(model, batch)."
    for path, x in jax.tree_util.tree_leaves_with_path(trained):
        dtype = getattr(x, "dtype", None)
        if isinstance(x, (float, complex)) if dtype is None else trees.is_inexact(dtype):
            continue
        got = f"{dtype or type(x).__name__} at {trees.path_name(path) or 'the root'}"
        raise TypeError(checks.message(who, "params", allowed, got, hint))
