# SPDX-License-Identifier: Apache-2.0
"""Explain wrong arguments of a call, such as the state of another chain or donated arrays.

A state is compared with the result of ``init`` only after a call has failed. So the check costs
nothing in other calls. A state of another structure is accepted if the call works, for example
``None`` in place of an empty state.
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
_OURS = re.compile(r"[\w.()]+: .+ must ", re.DOTALL)
_MOVES = "boostax.migrate_state(opt_state, tx, params) converts the state of another chain."


@contextlib.contextmanager
def explaining(look: Callable[..., None], *args: PyTree, **kwargs: PyTree) -> Generator[None]:
    """Replace an error raised in this context by the error that ``look(*args, **kwargs)`` raises.

    If the raised error is from boostax, it already names an argument. So only a ``TypeError`` of
    ``look`` replaces it.
    """
    try:
        yield
    except Exception as old:
        try:
            look(*args, **kwargs)
        except Exception as new:
            if _OURS.match(str(new)) and (isinstance(new, TypeError) or not _OURS.match(str(old))):
                raise new from old
        raise


def parts(state: PyTree) -> list[str]:
    """Return the names of the state classes of a chain, outer before inner."""
    names = (type(x).__name__ for x in trees.nodes(state) if hasattr(x, "_fields"))
    return [name for name in names if name not in _NO_PARTS]


def require_order(who: str, call: str, **arguments: PyTree) -> None:
    """Refuse donated arrays, and an optimizer state in another argument's position."""
    leaves = jax.tree_util.tree_leaves_with_path(arguments)
    untraced = [(path, x) for path, x in leaves if not isinstance(x, Tracer)]
    gone = [trees.path_name(path) for path, x in untraced if getattr(x, "is_deleted", bool)()]
    hint = "A call deletes the arrays it donates. Use the call's results, or copy the arrays."
    checks.require(not gone, who, "arguments", f"{gone[:4]} donated", "not yet donated", hint)
    allowed = "without an optimizer state"
    hint = f"The call is {call}."
    for what, tree in arguments.items():
        names = (f"{type(x).__module__}.{type(x).__name__}" for x in trees.nodes(tree))
        state = next((x for x in names if re.match(r"(optax|boostax)\..*State$", x)), "")
        got = f"one with {state}"
        checks.require_type("state" in what or not state, who, what, got, allowed, hint)


def require_state(who: str, call: str, tx: Any, opt_state: Any, params: Any, *grads: Any) -> None:
    """Refuse swapped arguments, and a state that differs from the result of ``tx.init``."""
    allowed = "an optax.GradientTransformation"
    hint = f"The call is {call}."
    checks.require_type(hasattr(tx, "init"), who, "tx", type(tx).__name__, allowed, hint)
    require_order(who, call, grads=grads, opt_state=opt_state, params=params)
    expected = jax.eval_shape(tx.init, trees.without_gradient(trees.aside(params), True))
    require_as_made(who, "opt_state", opt_state, expected)
    # Gradients on a mesh are per-replica, or contain per-replica gradients.
    while any(hasattr(x, "local") for x in grads):
        grads = tuple(getattr(x, "local", x) for x in grads)
    odd = {*trees.names([*grads])} - {*trees.names([params])}
    hint = "boostax.value_and_grad(loss_fn)(params, opt_state, batch) returns (loss, grads)."
    checks.require(not odd, who, "grads", sorted(odd)[:4], "at the paths of the params", hint)


def require_as_made(who: str, what: str, state: PyTree, expected: PyTree) -> PyTree:
    """Return a state in the containers of ``expected``; refuse other parts, leaves or shapes."""
    mine, theirs = (", ".join(parts(x)[:8]) for x in (state, expected))
    got = f"that of {mine or type(state).__name__}"
    hint, error = (_MOVES, ValueError) if mine else (trees.LOST, TypeError)
    checks.require(mine == theirs, who, what, got, f"that of {theirs}", hint, error)
    odd = sorted({*trees.names(state)} ^ {*trees.names(expected)})
    allowed = "a state with the leaves of tx.init(params)"
    hint = f"Pass the params with which the state was made. {_MOVES}"
    checks.require(not odd, who, what, f"others, {odd[:4]}", allowed, hint)
    state = jax.tree.unflatten(jax.tree.structure(expected), jax.tree.leaves(state))
    hint = "Use tx.init(params), or convert the state with boostax.reshard_state(state, n)."
    trees.require_shapes(who, what, state, expected, hint)
    return state
