# SPDX-License-Identifier: Apache-2.0
"""Refuse arguments of the gradient function, and losses whose gradients would be wrong.

An argument is refused before the loss is traced. A loss is refused if its traced program shows that
a gradient would be wrong.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import jax
import numpy as np

from boostax._core import axes, bcoo, checks, interpret, jaxprs, trees
from boostax._core.types import PyTree

_WHO = "value_and_grad"
# For each argument, the hint for a loss that does not accept the argument; "" is the batch.
_HINTS = {
    "": "Let loss_fn accept the batch: arrays in its closure are not split over replicas.",
    "scales": "Add scales=None to the arguments of loss_fn, and a boostax.precision.scale_boundary "
    "to every edge between groups.",
    "key": "Add key=None to the arguments of loss_fn, or pass no key=.",
    "model_state": "Add model_state=None to the arguments of loss_fn, or pass no model_state=.",
}


def require_signature(loss_fn: Callable[..., PyTree], kwargs: dict[str, PyTree]) -> None:
    """Refuse a loss that does not accept the arguments of its call."""
    try:
        # A wrapper may accept arguments that the wrapped function does not accept.
        signature = inspect.signature(loss_fn, follow_wrapped=False)
    except (TypeError, ValueError):
        # Some callables have no signature that Python can read.
        return
    try:
        signature.bind(None, None, **kwargs)
    except TypeError as error:
        name = next((name for name in kwargs if repr(name) in str(error)), "")
        allowed = f"a function that accepts {name}=" if name else "a function of (params, batch)"
        hint = _HINTS.get(name, f"Leave {name}= out of the call.")
        if "missing" in str(error):
            allowed = f"called with all its arguments ({error})"
            hint = "Pass key= and model_state= to step.init, and keywords to step(s, b, beta=1)."
        raise TypeError(checks.message(_WHO, "loss_fn", allowed, loss_fn, hint)) from error


def active_leaves(active: PyTree, params: PyTree) -> PyTree:
    """Return a bool for each leaf of the params; ``active`` may be a prefix of such a tree."""
    entries = jax.tree.leaves(active)
    is_valid = bool(entries) and all(isinstance(x, (bool, np.bool_)) for x in entries)
    hint = "Use tx.active(params, depth) of a scheduled_freeze."
    checks.require_type(is_valid, _WHO, "active", active, "a tree of bools like the params", hint)

    def entry(is_active: bool | None, part: PyTree) -> bool | None:
        # A subtree without arrays needs no entry, so its entry may be None.
        has_arrays = any(map(trees.is_array, jax.tree.leaves(part)))
        return True if is_active is None and not has_arrays else is_active

    active = jax.tree.map(entry, active, params, is_leaf=trees.is_none)
    return jax.tree.broadcast(active, params)


def require_trainable(trained: PyTree) -> None:
    """Refuse trained leaves that have no gradient: integers, bools, PRNG keys."""
    require_dense(trained, _WHO, "params")
    allowed = "floating or complex arrays if they are trained"
    hint = "Use model_state, eqx.partition or nnx.split for the leaf, or freeze it with active=."
    if any(kind.__module__ == "flax.nnx.module" for kind in type(trained).__mro__):
        hint = "Use boostax.nnx.Optimizer(model, tx, wrt=nnx.Param, axis_name='data') for modules: "
        hint += "optimizer.value_and_grad(loss)(model, batch)."
    for path, x in jax.tree_util.tree_leaves_with_path(trained):
        dtype = getattr(x, "dtype", None)
        if isinstance(x, (float, complex)) if dtype is None else trees.is_inexact(dtype):
            continue
        got = f"{dtype or type(x).__name__} at {trees.path_name(path) or 'the root'}"
        raise TypeError(checks.message(_WHO, "params", allowed, got, hint))


def require_dense(tree: PyTree, who: str, what: str = "gradients") -> None:
    """Refuse sparse leaves."""
    if bcoo.MODULE not in sys.modules:
        return
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=bcoo.is_sparse)
    got = [(type(x).__name__, trees.path_name(path)) for path, x in leaves if bcoo.is_sparse(x)]
    checks.require_type(not got, who, what, got[:6], "dense arrays", bcoo.DENSE)


def require_no_inner_sums(program: jaxprs.ClosedJaxpr, names: tuple[str, ...]) -> None:
    """Refuse a loss with ``jax.grad`` of a sum over the replicas, if ``check_vma=False``."""
    # With ``check_vma=False``, the gradient of a sum over the replicas is again a sum over the
    # replicas. This second sum is correct for a gradient that is computed outside of the mapped
    # function and averaged over the replicas. It is wrong for a gradient of one replica that is
    # computed inside.
    eqns = [eqn for eqn, _ in interpret.equations(program.jaxpr)]
    backward = [eqn for eqn in eqns if "transpose(" in str(eqn.source_info.name_stack)]
    inner = [eqn for eqn, _ in interpret.equations(backward)]
    kinds = "psum", "reduce_scatter"
    sums = [x for x in inner if x.primitive.name.removesuffix("_invariant") in kinds]
    if inside := axes.named(sums) & frozenset(names):
        raise ValueError(
            "value_and_grad: loss_fn must not differentiate a sum or mean over the replicas "
            "itself (jax.grad of lax.psum or lax.pmean), got a sum over "
            f"{', '.join(sorted(inside))}. Average the gradient, not the differentiated function: "
            "lax.pmean(jax.grad(local)(x), axis)."
        )


def require_uncrossed(fn: Callable[..., PyTree], trained: PyTree, names: tuple[str, ...]) -> None:
    """Refuse ``Aux.weight`` for a loss whose gradients pass from replica to replica.

    A part of such a gradient belongs to another replica's loss, which has another weight.
    """
    programs: list[jaxprs.ClosedJaxpr] = []

    def trace(trained: PyTree) -> None:
        _, tangent = jax.linearize(fn, trained)
        value, pullback = jax.vjp(fn, trained)
        # With ``check_vma=True``, a sum communicates nothing in the backward pass, so the tangent
        # program is read. A tangent program does not show a custom backward rule, so the backward
        # program is also read.
        programs.extend((jax.make_jaxpr(tangent)(trained), jax.make_jaxpr(pullback)(value)))

    jax.eval_shape(trace, trained)
    crossed = frozenset().union(*map(axes_of_gradients, programs)) & frozenset(names)
    allowed = "left out of a loss that communicates gradients between replicas"
    got = f"a weight and a collective over {', '.join(sorted(crossed))}"
    hint = "Return the mean over all replicas: lax.psum(sum, axis) / lax.psum(count, axis)."
    checks.require(not crossed, _WHO, "Aux.weight", got, allowed, hint)


def axes_of_gradients(tangent: jaxprs.ClosedJaxpr) -> frozenset[str]:
    """Return the axes over which a tangent program communicates values that depend on its inputs.

    The constants of a tangent program are values of the forward pass, or values that a checkpoint
    recomputes. So the values that depend on the inputs are tangents, and the backward pass
    communicates gradients over the returned axes.
    """
    names: set[str] = set()

    def transfer(eqn: jaxprs.JaxprEqn, depends: list[bool]) -> list[bool]:
        if any(depends):
            # ``eqn`` may have an unknown body, which could sum operands over any axes that it
            # names. So all these axes are counted.
            names.update(axes.named([inner for inner, _ in interpret.equations([eqn])]))
        return [any(depends)] * len(eqn.outvars)

    interpret.flow(tangent, [True] * len(tangent.jaxpr.invars), transfer, any, nothing=False)
    return frozenset(names)
