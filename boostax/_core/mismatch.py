# SPDX-License-Identifier: Apache-2.0
"""Explain wrong arguments of a call: another chain's state, swapped, donated, not trainable.

A state is compared with the result of ``init`` only after a call has failed. So the check costs
nothing, and a state that works in another structure passes, such as ``None`` for an empty state.
"""

import contextlib
import re
from collections.abc import Callable, Generator
from typing import Any

import jax
from jax.core import Tracer

from boostax._core import checks, trees
from boostax._core.types import PyTree

# NamedTuples in states that are not the state of a part.
_NO_PARTS = {"TrainState", "PerReplica", "EmptyState", "MaskedNode"}
_MOVES = "boostax.migrate_state(opt_state, tx, params) carries a state over to another chain."


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


def require_order(who: str, call: str, **given: PyTree) -> None:
    """Refuse donated arrays, and an optimizer state in another argument's position."""
    leaves = jax.tree_util.tree_leaves_with_path(given)
    untraced = [(path, x) for path, x in leaves if not isinstance(x, Tracer)]
    gone = [trees.path_name(path) for path, x in untraced if getattr(x, "is_deleted", bool)()]
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
