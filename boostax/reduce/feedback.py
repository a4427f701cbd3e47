# SPDX-License-Identifier: Apache-2.0
r"""Error feedback, once for all codecs: what is not sent now is sent later.

With the gradient :math:`g_r` and the residual :math:`e_r` of replica r, and a codec that sends
:math:`C(a)` of a leaf a:

.. math::
  a_r = g_r + e_r, \qquad u = \tfrac1n \sum_r C(a_r), \qquad e_r \leftarrow a_r - C(a_r)

Every replica gets the same u; what waits in residuals is exactly what has not been sent.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from boostax._core import axes, checks, trees
from boostax._core.describe import Holds, Stepped, describe, first_line
from boostax._core.placement import on_shards
from boostax._core.replicas import PerReplica, require_like
from boostax.reduce import exchange
from boostax.reduce.codec import Codec, Late, Message, PerLeaf, map_per_leaf

PyTree = Any
Rule = Callable[[str, Any], bool]
Dense = Rule | PyTree | None


class CompressedState(NamedTuple):
    """State of every compressed reduction.

    Attributes:
      residual: a ``PerReplica`` of what each replica has not sent yet: a tree like the params, in
        f32 or wider, in the units of the gradients that ``update`` receives (inside a loss scaler
        these are already unscaled), complex ones as pairs; ``None`` where a leaf travels dense, or
        without error feedback.
      velocity: a ``PerReplica`` like it, of the momentum that is corrected for; or ``None``.
      codec: what the codec keeps, the same on all replicas.
      unsent: f32 scalar, ``sqrt(sum_r |residual_r|**2 / sum_r |g_r + old residual_r|**2)``: the
        share that was held back last time, 0 for an exact reduction. -1 before the first.
      over_capacity: f32 scalar, over all replicas, the number of elements that reached the
        threshold at the last step and did not fit into the largest capacity below 1.0; -1 before
        the first. ``None`` without a threshold.
      capacity: f32 scalar, the share of the elements that had a place at the last step, 1.0 for a
        dense step; -1 before the first. ``None`` where it is not chosen at each step.
    """

    residual: PerReplica
    velocity: PerReplica
    codec: PyTree
    unsent: jax.Array
    over_capacity: Any = None
    capacity: Any = None
    holds = Holds((), sums=("residual", "velocity"))

    def metrics(self) -> dict[str, jax.Array]:
        """Named scalars for ``boostax.metrics``."""
        optional = {"over_capacity": self.over_capacity, "capacity": self.capacity}
        kept = {name: value for name, value in optional.items() if value is not None}
        return {"unsent": self.unsent} | kept


def compress(
    codec: Codec,
    axis_name: axes.AxisName,
    *,
    error_feedback: bool = True,
    dense: Dense = None,
    momentum: float | None = None,
    name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Replace local gradients by the mean over the replicas of what a codec sends of them.

    .. math::
      a_r = g_r + e_r, \qquad u = \tfrac1n \sum_r C(a_r), \qquad e_r \leftarrow a_r - C(a_r)

    ``top_k_reduce``, ``int8_reduce`` and the other compressed reductions are this with a codec of
    boostax's; a codec of your own gets the same: error feedback, warm-ups
    (``boostax.reduce.staged``), dense leaves, shards, agreement on what is finite, resharding.

    Args:
      codec: a ``boostax.reduce.Codec``.
      axis_name: mesh axis, or a tuple of axes.
      error_feedback: keep what was not sent, ``e``, for the next step.
      dense: leaves that take a plain mean instead: a function of the leaf's path
        (``"layers/0/bias"``) and the leaf, or a tree of bools, which may stand for whole branches.
      momentum: coefficient of momentum correction (Deep Gradient Compression):
        ``v = momentum * v + g`` is sent in place of ``g``; ``v`` is zeroed where an element was
        sent. Or ``None``.
      name: of the factory, in errors, traces and ``explain``; the codec's class by default.

    Returns:
      A transformation with a ``CompressedState``. Cost: what the codec sends; a residual per
      replica, with ``momentum`` a velocity too; two sums of 4 bytes.

    Raises:
      ValueError, TypeError: an argument out of range; at trace time, gradients that are summed
        already, or an axis that is not bound.

    Example:
      A codec that sends half of each element, exactly:

      >>> import boostax, jax, jax.numpy as jnp
      >>> class Half(boostax.reduce.Codec):
      ...   def reduce(self, leaves, state, names):
      ...     means = [jax.lax.pmean(x / 2, names) for x in leaves]
      ...     return boostax.reduce.Message(means, [x / 2 for x in leaves], state)
      >>> tx = boostax.reduce.compress(Half(), "data")
      >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")
      >>> step(jnp.array([[4.0], [8.0]]))[0].tolist()
      [3.0]

    References:
      Karimireddy et al., Error Feedback Fixes SignSGD, https://arxiv.org/abs/1901.09847, 2019.
      Lin et al., Deep Gradient Compression, https://arxiv.org/abs/1712.01887, 2018.
    """
    who = name or type(codec).__name__
    names = axes.required(who, axis_name)
    if momentum is not None:
        _check_momentum(who, momentum, error_feedback)
    if dense is not None and not callable(dense):
        jax.tree.map(lambda x: _check_rule(who, x), dense)
    whole, overflows = codec.whole, codec.counts_over

    def coded(tree: PyTree) -> list[int]:
        """Which leaves the codec sends."""
        leaves = zip(jax.tree.leaves(tree), _rules(who, dense, tree), strict=True)
        return [i for i, (x, rule) in enumerate(leaves) if x.size and not rule and codec.serves(x)]

    def init_fn(params: PyTree) -> CompressedState:
        trees.require_gradients(params, who)
        leaves, treedef = jax.tree.flatten(params)
        chosen = coded(params)
        shapes = [exchange.real_shape(leaves[i]) for i in chosen]

        spread = functools.partial(_spread, treedef, chosen)

        def zeros(wanted: bool) -> PerReplica:
            made = [jnp.zeros(x.shape, x.dtype) if wanted else None for x in shapes]
            return PerReplica(axes.to_varying(spread(made), names))

        return CompressedState(
            residual=zeros(error_feedback),
            velocity=zeros(momentum is not None),
            codec=map_per_leaf(spread, codec.init(shapes)),
            unsent=jnp.full((), -1.0, jnp.float32),
            over_capacity=jnp.full((), -1.0, jnp.float32) if overflows else None,
            capacity=jnp.full((), -1.0, jnp.float32) if codec.chooses else None,
        )

    def update_fn(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Stepped:
        del params, extra
        trees.require_gradients(updates, who)
        axes.require_local(updates, names, who)
        if whole:
            hint = "boostax.on_mesh takes sharded params in plain jit."
            axes.require_whole(updates, names, who, hint)
        leaves, treedef = jax.tree.flatten(updates)
        chosen = coded(updates)
        # ``None`` where nothing is kept.
        held = treedef.flatten_up_to(state.residual.local)
        moving = treedef.flatten_up_to(state.velocity.local)
        flow = [exchange.real(leaves[i]) for i in chosen]
        if error_feedback:
            paths = trees.names(updates)
            kept = {paths[i]: held[i] for i in chosen}
            require_like(who, "the residual", kept, dict(zip(kept, flow, strict=True)))
        if momentum is not None:
            flow = [momentum * moving[i] + g for i, g in zip(chosen, flow, strict=True)]
        wanted = flow
        if error_feedback:
            wanted = [held[i] + v for i, v in zip(chosen, flow, strict=True)]
        spread = functools.partial(_spread, treedef, chosen)
        gathered = lambda tree: [treedef.flatten_up_to(tree)[i] for i in chosen]  # noqa: E731
        codec_state = map_per_leaf(gathered, state.codec)
        rest = [i for i in range(len(leaves)) if i not in chosen]
        total = _squared_norm(wanted + [exchange.real(leaves[i]) for i in rest], names)
        # Agree on ``finite`` before sending, so that one pass computes the residual, selects new or
        # old, writes it and sums its squares.
        finite = jnp.isfinite(total)
        message = _reduced(codec, wanted, codec_state, names)
        means, residual, new_codec_state, late, over, capacity = message
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        if error_feedback:
            residual = [keep(new, held[i]) for i, new in zip(chosen, residual, strict=True)]
        norm = _squared_norm(residual, names, late, over if overflows else ())
        over_capacity = state.over_capacity
        if overflows:
            # With no coded leaves ``_squared_norm`` returns one scalar instead of a pair.
            norm, lost = norm if over else (norm, jnp.zeros_like(norm))
            over_capacity = keep(lost.astype(jnp.float32), over_capacity)
        unsent = jnp.sqrt(norm / jnp.where(total == 0, 1, total))
        result: list[Any] = list(leaves)
        for i, mean in zip(chosen, means, strict=True):
            # Explicitly: a codec could encode a gradient that is not finite as finite numbers.
            result[i] = exchange.like(jnp.where(finite, mean, jnp.nan), leaves[i])
        for i in rest:
            wide = leaves[i].astype(trees.wide_dtype(leaves[i]))
            result[i] = trees.saturate(lax.pmean(wide, names), leaves[i].dtype)
        for i, new, more, v, all_of_it in zip(chosen, residual, late, flow, wanted, strict=True):
            if error_feedback:
                held[i] = _with_late(new, more, finite, names)
            if momentum is not None:
                # Residual equals wanted: nothing of this element was sent, so its velocity stays.
                # Compared before ``late`` is added.
                moving[i] = keep(jnp.where(new == all_of_it, v, 0), moving[i])
        return jax.tree.unflatten(treedef, result), CompressedState(
            residual=PerReplica(jax.tree.unflatten(treedef, held)),
            velocity=PerReplica(jax.tree.unflatten(treedef, moving)),
            codec=map_per_leaf(spread, jax.tree.map(keep, new_codec_state, codec_state)),
            unsent=keep(unsent.astype(jnp.float32), state.unsent),
            over_capacity=over_capacity,
            capacity=keep(capacity, state.capacity) if codec.chooses else None,
        )

    update = update_fn if whole else on_shards(who, names, update_fn)
    lossy = codec.lossy and not error_feedback
    described = describe(who, "compressed", names, what=first_line(codec), lossy=lossy)
    return optax.GradientTransformationExtraArgs(init_fn, described(update))


def _reduced(
    codec: Codec, leaves: list[jax.Array], state: PyTree, names: tuple[str, ...]
) -> Message:
    """Run the codec once per group of leaves with the same varying axes.

    Packed together, leaves of different types would all get the union of those axes. State
    that is not marked ``PerLeaf`` is computed from the same old state for each group, and the last
    group's wins.
    """
    kinds: dict[frozenset[str], list[int]] = {}
    for i, x in enumerate(leaves):
        kinds.setdefault(axes.varying(x), []).append(i)
    rows: dict[int, tuple[Any, ...]] = {}
    # Of leaves apart, the largest; of none, none had a place.
    capacity: Any = jnp.zeros((), jnp.float32)
    marked = lambda node: isinstance(node, PerLeaf)  # noqa: E731
    kept, structure = jax.tree.flatten(state, is_leaf=marked)
    for kind in kinds.values():
        own = map_per_leaf(lambda values, kind=kind: [values[i] for i in kind], state)
        message = codec.reduce([leaves[i] for i in kind], own, names)
        none = [None] * len(kind)
        columns = message.means, message.held, message.late or none, message.over or none
        rows |= zip(kind, zip(*columns, strict=True), strict=True)
        if codec.chooses:
            capacity = jnp.maximum(capacity, message.capacity)
        for j, new in enumerate(jax.tree.leaves(message.state, is_leaf=marked)):
            if marked(new):
                all_of_them = list(kept[j].values)
                for i, value in zip(kind, new.values, strict=True):
                    all_of_them[i] = value
                new = PerLeaf(all_of_them)
            kept[j] = new
    means, held, late, over = ([rows[i][k] for i in range(len(leaves))] for k in range(4))
    return Message(means, held, structure.unflatten(kept), late, over, capacity)


def _squared_norm(
    leaves: list[jax.Array],
    names: tuple[str, ...],
    late: Sequence[Late | None] = (),
    over: Sequence[jax.Array] = (),
) -> jax.Array:
    """Sum of squares over all replicas, including what ``late`` will add.

    Not finite if any element is not, or if a square overflows. With ``over``, returns the pair
    ``(sum, elements without a place)``, from one collective.
    """
    dtype = jnp.result_type(jnp.float32, *leaves)
    square = lambda x: jnp.sum(x * x).astype(dtype)  # noqa: E731
    parts = [square(x) for x in leaves]
    # ``late`` may be empty.
    for x, more in zip(leaves, late, strict=False):
        if more is not None:
            own = _own_slice(x, more, names)
            parts.append(square(own + more.more) - square(own))
    if over:
        parts = [jnp.stack([x, n.astype(dtype)]) for x, n in zip(parts, over, strict=True)]
    # The difference of squares above cancels; rounding may make the total slightly negative.
    return jnp.maximum(axes.sum_over_shards(parts, names, dtype), 0)


def _own_slice(x: jax.Array, late: Late, names: tuple[str, ...]) -> jax.Array:
    size = late.more.shape[late.dim]
    return lax.dynamic_slice_in_dim(x, axes.index(names) * size, size, late.dim)


def _with_late(
    x: jax.Array, late: Late | None, finite: jax.Array, names: tuple[str, ...]
) -> jax.Array:
    """A residual and what is added to this replica's slice of it, in place."""
    if late is None:
        return x
    more = _own_slice(x, late, names) + jnp.where(finite, late.more, 0)
    start = axes.index(names) * late.more.shape[late.dim]
    return lax.dynamic_update_slice_in_dim(x, more, start, late.dim)


def _spread(treedef: Any, chosen: list[int], values: list[Any]) -> PyTree:
    """A tree of the chosen leaves, ``None`` in the place of the others."""
    kept: list[Any] = [None] * treedef.num_leaves
    for i, value in zip(chosen, values, strict=True):
        kept[i] = value
    return treedef.unflatten(kept)


def _rules(who: str, dense: Dense, tree: PyTree) -> list[bool]:
    """For each leaf, whether it travels dense.

    ``dense`` is a function of the leaf's path (``"layers/0/bias"``) and the leaf, or a tree of
    bools, which may stand for whole branches.
    """
    if dense is None:
        return [False] * len(jax.tree.leaves(tree))
    if callable(dense):
        return [bool(dense(name, leaf)) for name, leaf in trees.named(tree)]
    try:
        spread = jax.tree.map(lambda rule, part: [rule] * len(jax.tree.leaves(part)), dense, tree)
    except ValueError as error:
        raise ValueError(
            f"{who}: dense must be a tree of bools that fits the gradients, got one that does not: "
            f"{error}. A function such as lambda path, leaf: leaf.ndim < 2 fits every tree."
        ) from error
    return jax.tree.leaves(spread)


def _check_rule(who: str, rule: Any) -> None:
    if not isinstance(rule, bool):
        hint = "Try lambda path, leaf: leaf.ndim < 2 for norms and biases."
        allowed = "a function of path and leaf, or a tree of bools"
        raise TypeError(checks.message(who, "dense", allowed, rule, hint))


def _check_momentum(who: str, momentum: float, error_feedback: bool) -> None:
    hint = "That of the optimizer, which then goes without: try 0.9."
    checks.number(who, "momentum", momentum, "in [0, 1)", lambda x: 0 <= x < 1, hint)
    if not error_feedback:
        raise ValueError(
            f"{who}: momentum must be None without error_feedback, got {momentum!r}. It is "
            "corrected for what the residual delays; without one, give it to the optimizer."
        )
