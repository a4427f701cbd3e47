# SPDX-License-Identifier: Apache-2.0
r"""Error feedback for all codecs: the unsent part of a gradient is added to the next gradient.

Let :math:`g_r` be the gradient and :math:`e_r` the residual of replica r, and let :math:`C(a)` be
the part of a leaf a that the codec sends:

.. math::
  a_r = g_r + e_r, \qquad u = \tfrac1n \sum_r C(a_r), \qquad e_r \leftarrow a_r - C(a_r)

Every replica receives the same u, and each residual is exactly the part that was not sent.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from boostax._core import axes, checks, norms, replicas, trees
from boostax._core.describe import Holds, Stepped, describe, first_line
from boostax._core.types import PyTree
from boostax.reduce import exchange
from boostax.reduce.codec import Arrays, Codec, Late, Message, Names, map_per_leaf
from boostax.reduce.mean import reduced, reduction
from boostax.reduce.on_shards import on_shards

Dense = Callable[[str, PyTree], bool] | PyTree | None


class CompressedState(NamedTuple):
    """State of every compressed reduction.

    Attributes:
      residual: a ``PerReplica`` of the part of the gradients that each replica has not sent yet: a
        tree like the params, in f32 or wider, with complex numbers as pairs. Residuals have the
        scale of the gradients that ``update`` receives; inside a loss scaler, these gradients are
        already unscaled. ``None`` for a leaf that is averaged without compression, or without error
        feedback.
      velocity: a ``PerReplica`` like ``residual`` with the velocity ``v`` of momentum correction;
        or ``None``.
      codec: state of the codec, the same on all replicas.
      unsent: f32 scalar, ``sqrt(sum_r |residual_r|**2 / sum_r |g_r + old residual_r|**2)``, the
        share that was not sent at the last step; 0 for an exact reduction, and -1 before the first
        step.
      capacity: f32 scalar, the share of elements for which the messages of the last step had room;
        1.0 for a dense step, and -1 before the first step. ``None`` if the share is fixed.
    """

    residual: replicas.PerReplica  # shapes of the params, float32 or wider, or None
    velocity: replicas.PerReplica  # shapes of the params, float32 or wider, or None
    codec: PyTree
    unsent: jax.Array  # [] float32
    capacity: PyTree = None  # [] float32, or None
    holds = Holds(())

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        metrics = {"unsent": self.unsent}
        return metrics if self.capacity is None else {**metrics, "capacity": self.capacity}


@reduction
def compress(
    codec: Codec,
    *,
    axis_name: axes.AxisName | None = None,
    error_feedback: bool = True,
    decay: float = 1.0,
    dense: Dense = None,
    momentum: float | None = None,
    name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Replace local gradients by the mean over the replicas of the parts that a codec sends.

    .. math::
      a_r = g_r + e_r, \qquad u = \tfrac1n \sum_r C(a_r), \qquad e_r \leftarrow a_r - C(a_r)

    ``top_k_reduce``, ``int8_reduce`` and the other compressed reductions call ``compress`` with a
    codec of boostax. A codec of your own has the same features: error feedback, leaves that are
    averaged without compression, sharded leaves, resharding, and a check for finite gradients that
    has one result on all replicas.

    Args:
      codec: a ``boostax.reduce.Codec``.
      axis_name: mesh axis, or a tuple of axes. ``None`` means the axis of the surrounding
        ``make_train_step`` or ``on_mesh``.
      error_feedback: whether to keep ``e``, the part that was not sent, for the next step.
      decay: the factor in ``a = g + decay * e``. With a factor below 1, old residuals decay.
        SparseLoCo uses 0.95, where each gradient is the change of the params over many steps.
      dense: leaves that are averaged without compression: a function of path
        (``"layers/0/bias"``) and leaf, or a tree of bools or a prefix of such a tree.
      momentum: coefficient of momentum correction (Deep Gradient Compression), which sends ``v =
        momentum * v + g`` instead of ``g``, and sets ``v`` to zero for sent elements. ``None`` for
        no correction.
      name: name of the factory in errors, traces and ``explain``; by default the name of the
        codec's class.

    Returns:
      A transformation with a ``CompressedState``. Cost: the codec's messages; a residual per
      replica, and with ``momentum`` a velocity; two all-reduces of 8 bytes.

    Raises:
      ValueError, TypeError: an argument out of range; at trace time, gradients that are already
        summed, or an axis that is not bound.

    Example:
      This codec sends half of the value of each element:

      >>> import boostax, jax, jax.numpy as jnp
      >>> class Half(boostax.reduce.Codec):
      ...   def reduce(self, leaves, state, names):
      ...     means = [jax.lax.pmean(x / 2, names) for x in leaves]
      ...     return boostax.reduce.Message(means, [x / 2 for x in leaves], state)
      >>> tx = boostax.reduce.compress(Half(), axis_name="data")
      >>> step = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data"))
      >>> step(jnp.array([[4.0], [8.0]]))[0].tolist()
      [3.0]

    References:
      Karimireddy et al., Error Feedback Fixes SignSGD, https://arxiv.org/abs/1901.09847, 2019.
      Sarfi et al., SparseLoCo, https://arxiv.org/abs/2508.15706, 2025, for the decay.
      Lin et al., Deep Gradient Compression, https://arxiv.org/abs/1712.01887, 2018.
    """
    who = name or type(codec).__name__
    names = axes.canonical(who, axis_name)
    fading = "1 keeps the residual; SparseLoCo uses 0.95."
    if momentum is not None:
        hint = "Pass the momentum here, not to the optimizer; 0.9 is usual."
        checks.number(who, "momentum", momentum, "in [0, 1)", hint, least=0, below=1)
    if not error_feedback:
        hint = "Only a residual needs this momentum. Pass momentum to the optimizer instead."
        checks.absent(who, "momentum", momentum, "None without feedback", hint)
        checks.number(who, "decay", decay, "1 without feedback", fading, least=1, most=1)
    else:
        checks.number(who, "decay", decay, "in (0, 1]", fading, above=0, most=1)
    for x in [] if callable(dense) else jax.tree.leaves(dense):
        hint = "For norms and biases, pass lambda path, leaf: leaf.ndim < 2."
        allowed = "a function of path and leaf, or a tree of bools"
        checks.require_type(isinstance(x, bool), who, "dense", got=x, allowed=allowed, hint=hint)
    feedback = _Feedback(who, codec, names, error_feedback, dense, momentum, decay)
    lossy = codec.lossy and not error_feedback
    description = describe(who, "compressed", names, what=first_line(codec), lossy=lossy)
    update = description(on_shards(who, names, feedback.update))
    return optax.GradientTransformationExtraArgs(feedback.init, update)


class _Feedback(NamedTuple):
    """The arguments of ``compress``."""

    who: str
    codec: Codec
    names: Names
    error_feedback: bool
    dense: Dense
    momentum: float | None
    decay: float | jax.Array

    def coded(self, tree: PyTree) -> list[int]:
        """Return the indices of the leaves that the codec sends."""
        if callable(self.dense):
            is_dense = [self.dense(name, leaf) for name, leaf in trees.named(tree)]
        else:
            dense = False if self.dense is None else self.dense
            is_dense = jax.tree.leaves(jax.tree.broadcast(dense, tree))
        leaves = enumerate(zip(jax.tree.leaves(tree), is_dense, strict=True))
        return [i for i, (x, plain) in leaves if x.size and not plain and self.codec.serves(x)]

    def init(self, params: PyTree) -> CompressedState:
        """Return the first state, in which residuals and velocities are zero."""
        trees.require_gradients(params, self.who)
        leaves, treedef = jax.tree.flatten(params)
        coded = self.coded(params)
        shapes = [jax.eval_shape(exchange.real, leaves[i]) for i in coded]
        spread = functools.partial(_spread, treedef, coded)
        stored: list[replicas.PerReplica] = []
        for is_stored in (self.error_feedback, self.momentum is not None):
            zeros = [jnp.zeros(x.shape, x.dtype) if is_stored else None for x in shapes]
            stored.append(replicas.PerReplica(axes.to_varying(spread(zeros), self.names)))
        return CompressedState(
            residual=stored[0],
            velocity=stored[1],
            codec=map_per_leaf(spread, self.codec.init(shapes)),
            unsent=jnp.full((), -1.0, jnp.float32),
            capacity=jnp.full((), -1.0, jnp.float32) if self.codec.chooses else None,
        )

    def update(self, updates: PyTree, state: PyTree, params: PyTree = None, **_: PyTree) -> Stepped:
        """Return the means over the replicas, and the new state."""
        names = self.names
        axes.require_local(updates, names, self.who)
        leaves, treedef = jax.tree.flatten(updates)
        coded = self.coded(updates)
        dense = [i for i in range(len(leaves)) if i not in coded]
        spread = functools.partial(_spread, treedef, coded)

        def leaves_of(tree: PyTree) -> list[PyTree]:
            return [treedef.flatten_up_to(tree)[i] for i in coded]

        # Without error feedback, the residuals are ``None``. Without momentum, the velocities are
        # ``None``.
        old, velocity = map(leaves_of, (state.residual.local, state.velocity.local))
        flow = [exchange.real(leaves[i]) for i in coded]
        if self.error_feedback:
            paths = [trees.names(updates)[i] for i in coded]
            pairs = (dict(zip(paths, x, strict=True)) for x in (old, flow))
            replicas.require_like(self.who, "the residual", *pairs)
        if self.momentum is not None:
            flow = [self.momentum * v + g for v, g in zip(velocity, flow, strict=True)]
        lasting = not isinstance(self.decay, jax.Array) and self.decay == 1
        faded = old if lasting or not self.error_feedback else [self.decay * e for e in old]
        target = [e + v for e, v in zip(faded, flow, strict=True)] if self.error_feedback else flow
        total = _square_sums(target + [exchange.real(leaves[i]) for i in dense], names)
        # The replicas agree on ``finite`` before they send. So one pass computes the residual,
        # selects the new or the old residual, writes the result and sums its squares.
        finite = jnp.isfinite(total[0])
        if_finite = functools.partial(jnp.where, finite)
        codec_state = map_per_leaf(leaves_of, state.codec)
        message = _reduced(self.codec, target, codec_state, names)
        residual = message.residuals
        if self.error_feedback:
            residual = [if_finite(*pair) for pair in zip(residual, old, strict=True)]
        corrected, growth = _with_late(residual, message.late, finite, names)
        norm = _square_sums(residual, names, growth)
        shares = jnp.sqrt(norm / jnp.where(total == 0, 1, total)).astype(jnp.float32)
        unsent = jnp.where(jnp.isfinite(total[1] + norm[1]), shares[1], shares[0])
        if self.momentum is not None:
            # An element whose residual equals ``target`` was not sent, so its velocity remains.
            # ``residual`` does not contain ``late`` in this comparison.
            flows = zip(residual, target, flow, velocity, strict=True)
            velocity = [if_finite(jnp.where(r == w, v, 0), old) for r, w, v, old in flows]
        means = {i: reduced(leaves[i], names, "after") for i in dense}
        for i, mean in zip(coded, message.means, strict=True):
            # A codec could encode an infinite or NaN gradient as finite numbers, so NaN replaces
            # the means.
            means[i] = exchange.like(jnp.where(finite, mean, jnp.nan), leaves[i])
        return treedef.unflatten([means[i] for i in range(len(leaves))]), CompressedState(
            residual=replicas.PerReplica(spread(corrected if self.error_feedback else old)),
            velocity=replicas.PerReplica(spread(velocity)),
            codec=map_per_leaf(spread, jax.tree.map(if_finite, message.state, codec_state)),
            unsent=if_finite(unsent, state.unsent),
            capacity=if_finite(message.capacity, state.capacity) if self.codec.chooses else None,
        )


def _reduced(codec: Codec, leaves: list[jax.Array], state: PyTree, names: Names) -> Message:
    """Run the codec once for each group of leaves with the same varying axes.

    If leaves with different varying axes were packed together, each leaf would vary over the axes
    of all the leaves. The state outside of a ``PerLeaf`` is not split between groups: every group
    receives the old state, and the last group returns the new state.
    """
    rows: dict[int, PyTree] = {}
    new_state = state
    # ``capacity`` becomes the largest capacity of all groups, or stays 0 without leaves.
    capacity = jnp.zeros((), jnp.float32)
    for kind in exchange.kinds(leaves, axes.varying):
        part = map_per_leaf(lambda values, kind=kind: [values[i] for i in kind], state)
        message = codec.reduce([leaves[i] for i in kind], part, names)
        columns = message.means, message.residuals, message.late or [None] * len(kind)
        rows |= zip(kind, zip(*columns, strict=True), strict=True)
        if codec.chooses:
            capacity = jnp.maximum(capacity, message.capacity)
        new_state = map_per_leaf(functools.partial(_merged, kind), new_state, message.state)
    means, residuals, late = ([rows[i][k] for i in range(len(leaves))] for k in range(3))
    return Message(means, residuals, new_state, late, capacity)


def _merged(kind: list[int], old: list[PyTree], new: list[PyTree]) -> list[PyTree]:
    """Return the old values, with new values for the leaves of a group."""
    return list((dict(enumerate(old)) | dict(zip(kind, new, strict=True))).values())


def _square_sums(leaves: Arrays, names: Names, growth: Arrays = ()) -> jax.Array:
    """Return the sum of ``norms.square_sums`` over all replicas, with ``growth`` added."""
    # An element of ``growth`` may be negative, so rounding may make the total slightly negative.
    squares = [*norms.square_sums(leaves), *growth]
    return jnp.maximum(axes.summed(squares, lambda x: axes.varying(x) - frozenset(names), names), 0)


def _with_late(
    residual: Arrays, late: Sequence[Late | None], finite: jax.Array, names: Names
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Add ``late`` to this replica's slices, in place; also return the growth of squared norms."""
    result = [*residual]
    growth: list[jax.Array] = []
    for i, (dim, more) in ((i, x) for i, x in enumerate(late) if x is not None):
        size = more.shape[dim]
        start = axes.index(names) * size
        old = lax.dynamic_slice_in_dim(result[i], start, size, dim)
        grown, before = norms.square_sums([old + more, old], jnp.result_type(*residual))
        growth.append(grown - before)
        new = old + jnp.where(finite, more, 0)
        result[i] = lax.dynamic_update_slice_in_dim(result[i], new, start, dim)
    return result, growth


def _spread(treedef: Any, indices: list[int], values: list[PyTree]) -> PyTree:
    """Return a tree with the values at the leaves of ``indices``, and ``None`` at other leaves."""
    by_index = dict(zip(indices, values, strict=True))
    return treedef.unflatten([by_index.get(i) for i in range(treedef.num_leaves)])
