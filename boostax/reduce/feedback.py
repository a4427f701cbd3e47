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

from boostax._core import axes, checks, said, trees
from boostax._core.describe import Holds, Stepped, describe, first_line
from boostax._core.placement import on_shards
from boostax._core.replicas import PerReplica, require_like
from boostax.reduce import exchange
from boostax.reduce.codec import Arrays, Codec, Late, Message, Names, map_per_leaf
from boostax.reduce.mean import reduced

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
      capacity: f32 scalar, the share of the elements that had a place at the last step, 1.0 for a
        dense step; -1 before the first. ``None`` where it is not chosen at each step.
    """

    residual: PerReplica
    velocity: PerReplica
    codec: PyTree
    unsent: jax.Array
    capacity: Any = None
    holds = Holds((), sums=("residual", "velocity"))

    def metrics(self) -> dict[str, jax.Array]:
        """Named scalars for ``boostax.metrics``."""
        chosen = {} if self.capacity is None else {"capacity": self.capacity}
        return {"unsent": self.unsent} | chosen


@said.reduction
def compress(
    codec: Codec,
    axis_name: axes.AxisName | None = None,
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
        hint = "That of the optimizer, which then goes without: try 0.9."
        checks.number(who, "momentum", momentum, "in [0, 1)", lambda x: 0 <= x < 1, hint)
        hint = (
            "It is corrected for what the residual delays; without one, give it to the optimizer."
        )
        allowed = "None without error_feedback"
        checks.require(who, "momentum", momentum, allowed, error_feedback, hint)
    for rule in [] if callable(dense) else jax.tree.leaves(dense):
        hint = "Try lambda path, leaf: leaf.ndim < 2 for norms and biases."
        allowed = "a function of path and leaf, or a tree of bools"
        checks.require(who, "dense", rule, allowed, isinstance(rule, bool), hint, TypeError)
    how = _Feedback(who, codec, names, error_feedback, dense, momentum)

    def update_fn(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Stepped:
        del params, extra
        trees.require_gradients(updates, who)
        axes.require_local(updates, names, who)
        if codec.whole:
            hint = "boostax.on_mesh takes sharded params in plain jit."
            axes.require_whole(updates, names, who, hint)
        return how.update(updates, state)

    update = update_fn if codec.whole else on_shards(who, names, update_fn)
    lossy = codec.lossy and not error_feedback
    described = describe(who, "compressed", names, what=first_line(codec), lossy=lossy)
    return optax.GradientTransformationExtraArgs(how.init, described(update))


class _Feedback(NamedTuple):
    """The arguments of ``compress``."""

    who: str
    codec: Codec
    names: Names
    error_feedback: bool
    dense: Dense
    momentum: float | None

    def coded(self, tree: PyTree) -> list[int]:
        """Return the indices of the leaves that the codec sends."""
        leaves = zip(jax.tree.leaves(tree), _rules(self.who, self.dense, tree), strict=True)
        serves = self.codec.serves
        return [i for i, (x, rule) in enumerate(leaves) if x.size and not rule and serves(x)]

    def init(self, params: PyTree) -> CompressedState:
        """Return the first state: nothing waits."""
        trees.require_gradients(params, self.who)
        leaves, treedef = jax.tree.flatten(params)
        chosen = self.coded(params)
        shapes = [jax.eval_shape(exchange.real, leaves[i]) for i in chosen]
        spread = functools.partial(_spread, treedef, chosen)

        def zeros(wanted: bool) -> PerReplica:
            made = [jnp.zeros(x.shape, x.dtype) if wanted else None for x in shapes]
            return PerReplica(axes.to_varying(spread(made), self.names))

        return CompressedState(
            residual=zeros(self.error_feedback),
            velocity=zeros(self.momentum is not None),
            codec=map_per_leaf(spread, self.codec.init(shapes)),
            unsent=jnp.full((), -1.0, jnp.float32),
            capacity=jnp.full((), -1.0, jnp.float32) if self.codec.chooses else None,
        )

    def update(self, updates: PyTree, state: CompressedState) -> tuple[PyTree, CompressedState]:
        """Return the means over the replicas, and what waits then."""
        names = self.names
        leaves, treedef = jax.tree.flatten(updates)
        chosen = self.coded(updates)
        rest = [i for i in range(len(leaves)) if i not in chosen]
        spread = functools.partial(_spread, treedef, chosen)
        coded = lambda tree: [treedef.flatten_up_to(tree)[i] for i in chosen]  # noqa: E731
        # ``None`` where nothing is kept.
        held, moving = coded(state.residual.local), coded(state.velocity.local)
        flow = [exchange.real(leaves[i]) for i in chosen]
        if self.error_feedback:
            paths = [trees.names(updates)[i] for i in chosen]
            pairs = (dict(zip(paths, x, strict=True)) for x in (held, flow))
            require_like(self.who, "the residual", *pairs)
        if self.momentum is not None:
            flow = [self.momentum * v + g for v, g in zip(moving, flow, strict=True)]
        wanted = flow
        if self.error_feedback:
            wanted = [e + v for e, v in zip(held, flow, strict=True)]
        total = _squared_norm(wanted + [exchange.real(leaves[i]) for i in rest], names)
        # Agree on ``finite`` before sending, so that one pass computes the residual, selects new or
        # old, writes it and sums its squares.
        finite = jnp.isfinite(total)
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        codec_state = map_per_leaf(coded, state.codec)
        message = _reduced(self.codec, wanted, codec_state, names)
        residual = message.held
        if self.error_feedback:
            residual = [keep(new, old) for new, old in zip(residual, held, strict=True)]
        waiting, growth = _with_late(residual, message.late, finite, names)
        norm = _squared_norm(residual, names, growth)
        unsent = jnp.sqrt(norm / jnp.where(total == 0, 1, total)).astype(jnp.float32)
        held = waiting if self.error_feedback else held
        if self.momentum is not None:
            # Residual equals wanted: nothing of this element was sent, so its velocity stays.
            # Compared before ``late`` is added.
            flows = zip(residual, wanted, flow, moving, strict=True)
            moving = [keep(jnp.where(r == w, v, 0), old) for r, w, v, old in flows]
        result = {i: reduced(leaves[i], names, "after") for i in rest}
        for i, mean in zip(chosen, message.means, strict=True):
            # Explicitly: a codec could encode a gradient that is not finite as finite numbers.
            result[i] = exchange.like(jnp.where(finite, mean, jnp.nan), leaves[i])
        return treedef.unflatten([result[i] for i in range(len(leaves))]), CompressedState(
            residual=PerReplica(spread(held)),
            velocity=PerReplica(spread(moving)),
            codec=map_per_leaf(spread, jax.tree.map(keep, message.state, codec_state)),
            unsent=keep(unsent, state.unsent),
            capacity=keep(message.capacity, state.capacity) if self.codec.chooses else None,
        )


def _reduced(codec: Codec, leaves: list[jax.Array], state: PyTree, names: Names) -> Message:
    """Run the codec once per group of leaves with the same varying axes.

    Packed together, leaves of different types would all get the union of those axes. State
    that is not marked ``PerLeaf`` is computed from the same old state for each group, and the last
    group's wins.
    """
    rows: dict[int, tuple[Any, ...]] = {}
    kept = state
    # The largest of all kinds; 0 without leaves.
    capacity: Any = jnp.zeros((), jnp.float32)
    for kind in exchange.kinds(leaves, axes.varying):
        own = map_per_leaf(lambda values, kind=kind: [values[i] for i in kind], state)
        message = codec.reduce([leaves[i] for i in kind], own, names)
        columns = message.means, message.held, message.late or [None] * len(kind)
        rows |= zip(kind, zip(*columns, strict=True), strict=True)
        if codec.chooses:
            capacity = jnp.maximum(capacity, message.capacity)
        kept = map_per_leaf(functools.partial(_merged, kind), kept, message.state)
    means, held, late = ([rows[i][k] for i in range(len(leaves))] for k in range(3))
    return Message(means, held, kept, late, capacity)


def _merged(kind: list[int], old: list[Any], new: list[Any]) -> list[Any]:
    """Return the old values with the new ones of the leaves of a kind."""
    return list((dict(enumerate(old)) | dict(zip(kind, new, strict=True))).values())


def _squared_norm(leaves: Arrays, names: Names, growth: Arrays = ()) -> jax.Array:
    """Return the sum of squares over all replicas, with the ``growth`` of single leaves.

    Not finite if any element is not, or if a square overflows.
    """
    dtype = jnp.result_type(jnp.float32, *leaves)
    parts = [x.astype(dtype) for x in (*map(_square, leaves), *growth)]
    # The growth cancels; rounding may make the total slightly negative.
    return jnp.maximum(axes.sum_over_shards(parts, names, dtype), 0)


def _square(x: jax.Array) -> jax.Array:
    return jnp.sum(x * x)


def _with_late(
    residual: Arrays, late: Sequence[Late | None], finite: jax.Array, names: Names
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Add to this replica's slices, in place; return by how much the squares of each grow, too."""
    held, growth = list(residual), list[jax.Array]()
    for i, each in enumerate(late):
        if each is not None:
            size = each.more.shape[each.dim]
            start = axes.index(names) * size
            old = lax.dynamic_slice_in_dim(held[i], start, size, each.dim)
            growth.append(_square(old + each.more) - _square(old))
            new = old + jnp.where(finite, each.more, 0)
            held[i] = lax.dynamic_update_slice_in_dim(held[i], new, start, each.dim)
    return held, growth


def _spread(treedef: Any, chosen: list[int], values: list[Any]) -> PyTree:
    """A tree of the chosen leaves, ``None`` in the place of the others."""
    kept = dict(zip(chosen, values, strict=True))
    return treedef.unflatten([kept.get(i) for i in range(treedef.num_leaves)])


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
        return jax.tree.leaves(jax.tree.broadcast(dense, tree))
    except ValueError as error:
        raise ValueError(
            f"{who}: dense must be a tree of bools that fits the gradients, got one that does not: "
            f"{error}. A function such as lambda path, leaf: leaf.ndim < 2 fits every tree."
        ) from error
