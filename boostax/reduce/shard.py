"""A sharded optimizer state: every replica keeps and updates its part of each leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from boostax._core import axes, checks, jaxprs, trees
from boostax._core.about import described
from boostax._core.entrywise import across_entries, require_entrywise
from boostax._core.replicas import Sharded, split_dim
from boostax._core.share import own_part, refuse

PyTree = Any


class ShardOptimizerState(NamedTuple):
    """State of ``shard_optimizer``.

    Attributes:
      inner_state: a ``Sharded`` of the inner optimizer's state.
    """

    inner_state: Sharded


def shard_optimizer(
    inner: optax.GradientTransformation,
    axis_name: axes.AxisName,
) -> optax.GradientTransformationExtraArgs:
    """Share ``inner``'s state and work out among the replicas (ZeRO, stage 1).

    Each leaf is cut along its first dimension that the number of replicas divides. A replica runs
    ``inner`` on its part of gradients and params alone, and the updates are gathered. Adam's
    moments take ``1 / n`` of the memory, its arithmetic ``1 / n`` of the time. Leaves without such
    a dimension (small biases) are updated by every replica alike.

    With a reduction that scatters, gradients are never whole::

      chain(adasum("data", scatter=True), shard_optimizer(adamw(1e-3), "data"))

    ``inner`` sees parts of leaves, so it must work entry by entry, as SGD, Adam, AdamW and Lion
    do. A norm over a leaf or over all of them (clipping, LAMB, Adafactor) would be that of the
    part, and is found in the trace and refused. Clipping stands before it:
    ``chain(adasum("data"), clip, shard_optimizer(adamw, "data"))``.
    Params must be replicated: those sharded by FSDP have a sharded optimizer state as it is.

    Args:
      inner: the optimizer.
      axis_name: the replica axis, or a tuple of axes, in the order in which ``make_train_step`` or
        ``state_specs`` has them; with ``adasum(a, within=b, scatter=True)`` that is ``(a, b)``.

    Returns:
      A transformation with a ``ShardOptimizerState``. Outside a mapped function its leaves have the
      params' shapes; ``state_specs`` says how they are cut. Cost: an all-gather of the updates;
      scattered gradients save as much.

    Raises:
      ValueError, TypeError: at trace time, an unbound axis, no params, gradients that are neither
        whole nor scattered, an ``inner`` that looks across the entries of a leaf.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.shard_optimizer(optax.adam(0.1), "data")
      >>> w = jnp.arange(4.0)
      >>> step = lambda g: tx.update(g, tx.init(w), w)
      >>> updates, state = jax.vmap(step, axis_name="data", axis_size=2, in_axes=None)(w + 1)
      >>> updates[0].shape, state.inner_state.local[0].mu[0].shape
      ((4,), (2,))

    References:
      Rajbhandari et al., ZeRO, https://arxiv.org/abs/1910.02054, 2020.
    """
    who = "shard_optimizer"
    checks.transformation(who, "inner", inner)
    names = axes.required(who, axis_name)
    tx = optax.with_extra_args_support(inner)

    def part(x: jax.Array) -> jax.Array:
        return own_part(x, names)

    def own_gradient(g: jax.Array, p: jax.Array) -> jax.Array:
        if g.shape == p.shape:
            return part(g)
        wanted = jax.eval_shape(part, p).shape
        if g.shape != wanted:
            raise ValueError(
                f"{who}: gradients must be whole like the params or scattered over {names}, got "
                f"shape {g.shape} for a parameter of shape {p.shape}, whose part is {wanted}. Put "
                "a reduction over the same axes before it, with or without scatter=True."
            )
        return g

    def init_fn(params: PyTree) -> ShardOptimizerState:
        own = jax.tree.map(part, params) if axes.bound(names) else params
        return ShardOptimizerState(Sharded(tx.init(own)))

    @described(who, names, inner_state=tx)
    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, ShardOptimizerState]:
        axes.require_bound(names, who)
        refuse(who, extra_args, "The step shares out everything behind the reduction itself.")
        if params is None:
            raise ValueError(
                f"{who}: params must be given to update, got None. They say how leaves are cut."
            )
        hint = "The optimizer state of params that are sharded is sharded as it is."
        axes.require_whole(params, names, who, hint)
        grads = jax.tree.map(own_gradient, updates, params)
        own = jax.tree.map(part, params)
        given = grads, state.inner_state.local, own
        replay, _ = trees.trace_once(
            lambda *x: tx.update(*x, **extra_args), *given, check=_entrywise(own, params)
        )
        updates, inner_state = replay(*given)
        inner_state = trees.cast_like(inner_state, state.inner_state.local)
        whole = gathered(updates, params, names)
        return whole, ShardOptimizerState(Sharded(inner_state))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _entrywise(own: PyTree, params: PyTree) -> Callable[[jaxprs.ClosedJaxpr], None]:
    """Refuse an optimizer that would take a part of a leaf for the whole."""
    pairs = zip(jax.tree.leaves(own), jax.tree.leaves(params), strict=True)
    parts = frozenset(x.shape for x, p in pairs if x.shape != p.shape)
    hint = "Clipping stands before it; make_train_step(shard_optimizer=True) knows of more."

    def check(traced: jaxprs.ClosedJaxpr) -> None:
        cut = [x.aval.shape in parts for x in traced.jaxpr.invars]
        found = across_entries(traced, cut, parts, frozenset())
        require_entrywise("shard_optimizer: inner", found, hint)

    return check


def gathered(parts: PyTree, like: PyTree, names: tuple[str, ...]) -> PyTree:
    """Whole leaves of the replicas' parts, equal on all; ``like`` has the shapes of the whole."""
    replicas = axes.size(names)

    def whole(x: jax.Array, p: jax.Array) -> jax.Array:
        dim = split_dim(p.shape, replicas)
        return x if dim is None else axes.gather_along(x, names, dim)

    return jax.tree.map(whole, parts, like)
