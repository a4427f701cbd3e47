# SPDX-License-Identifier: Apache-2.0
"""Replicas that train separately between averages: local SGD, DiLoCo and partial averages.

Params differ per replica. Between calls, params are in a ``PerReplica`` with a leading axis of
replicas. Inside the mapped function, each replica has its own params, with a varying type.
"""

import bisect
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, gate, protocols, replicas, trees
from boostax._core.describe import Holds, Stepped, describe
from boostax._core.types import PyTree
from boostax.reduce import exchange
from boostax.reduce.mean import all_reduce, check_bytes, reduction

Extended = optax.GradientTransformationExtraArgs
# A flag for each fragment: whether a step synchronizes the fragment.
Due = list[jax.Array]


class LocalUpdatesState(NamedTuple):
    """State of ``local_updates``.

    Attributes:
      since_sync: i32, number of steps since all params were last synchronized together.
      syncs: i32, number of steps that synchronized params.
      anchor: the params after their last synchronization, a tree in the dtypes of the params.
        ``None`` without an outer optimizer.
      reduction_state: a tuple with a state of the reduction for each fragment, in which leaves of
        other fragments are ``None``.
      outer_state: a tuple of the same form with the outer optimizer's states, equal on all
        replicas.
      inner_state: a ``PerReplica`` of each replica's state of the inner optimizer.
    """

    since_sync: jax.Array  # [] int32
    syncs: jax.Array  # [] int32
    anchor: PyTree  # shapes and dtypes of the params, or None
    reduction_state: tuple[optax.OptState, ...]  # one for each fragment
    outer_state: tuple[optax.OptState, ...]  # one for each fragment, float32 or wider
    inner_state: replicas.PerReplica  # float32 or wider
    holds = Holds(params=True)

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        return {"since_sync": self.since_sync, "syncs": self.syncs}

    owns_params = protocols.yes


class _Rounds(NamedTuple):
    """The checked arguments of ``local_updates``, and its steps.

    Attributes:
      who: the factory, for errors.
      names: the axes of the replicas.
      inner: the optimizer of each replica.
      every: number of steps in a round; ``None`` for one step per fragment.
      members: a function that returns the indices of the leaves in each fragment of the params.
      reduce: the reduction.
      outer: the outer optimizer, or ``None`` for the mean of the params.
      warmup: see ``local_updates``.
    """

    who: str
    names: tuple[str, ...]
    inner: Extended
    every: int | None
    members: Callable[[PyTree], list[list[int]]]
    reduce: Extended
    outer: Extended | None
    warmup: int

    def init(self, params: PyTree) -> LocalUpdatesState:
        """Return the first state; refuse params that differ per replica."""
        is_valid = not any(kind & frozenset(self.names) for kind in axes.types(params))
        got = f"params that vary over {', '.join(self.names)}"
        hint = "Call init outside the mapped function, or before the replicas' params differ."
        checks.require(is_valid, self.who, "params", got, "equal on all replicas", hint)
        wide = trees.at_least_float32(params)
        parts = [_part(wide, group) for group in self.members(params)]
        outer = self.outer or optax.identity()
        inner = gate.init_optimizer(self.who, self.inner, params)
        return LocalUpdatesState(
            since_sync=jnp.zeros((), jnp.int32),
            syncs=jnp.zeros((), jnp.int32),
            anchor=jax.tree.map(_copy, params) if self.outer else None,
            reduction_state=tuple(self.reduce.init(part) for part in parts),
            outer_state=tuple(trees.unshared(outer.init(x), x) for x in parts),
            inner_state=replicas.PerReplica(axes.to_varying(inner, self.names)),
        )

    def step(
        self, grads: gate.Pending, state: PyTree, params: PyTree, *, apply: bool, **extra: PyTree
    ) -> Stepped:
        """Step the inner optimizer, and synchronize the fragments that are due."""
        axes.require_local(grads.raw, self.names, self.who)
        trees.require_params(params, self.who, f"{self.who} averages params.")
        local = axes.to_varying(params, self.names)
        old = state.inner_state.local
        # The optimizer gets params in f32 or wider, because the updates that it returns may be
        # terms of a sum in f32.
        wide = trees.at_least_float32(local)
        updates, inner = gate.call(self.inner, grads, old, wide, apply=False, extra=extra)
        inner = replicas.PerReplica(axes.unify(trees.cast_like(inner, old), old))
        value = axes.unify(updates, local)
        value = trees.applied(local, value) if apply else value
        # The branches that synchronize do not need the inner state.
        state = state._replace(inner_state=None)
        since = state.since_sync + 1
        warm, due = self._due(state, since)
        if self.warmup:
            mean = functools.partial(self._average, None)
            args = [range(len(jax.tree.leaves(local)))], [warm], mean, [(state.anchor, None, None)]
            value, ((anchor, *_),) = self._in_branches(*args, local, value, apply)
            state = state._replace(anchor=anchor, syncs=gate.counted(state.syncs, warm))
        value, state = self._synchronized(state, due, local, value, apply)
        since = jnp.where(warm | jnp.stack(due).all(), 0, since)
        return trees.as_updates(value, local), state._replace(since_sync=since, inner_state=inner)

    def flush(self, state: PyTree, params: PyTree, **extra: PyTree) -> Stepped:
        """Synchronize all fragments, except those that the last step synchronized by ``outer``."""
        axes.require_bound(self.names, self.who)
        local = axes.to_varying(params, self.names)
        since = state.since_sync
        due = [(since > 0) & ~x | (self.outer is None) for x in self._due(state, since)[1]]
        value, new = self._synchronized(state._replace(inner_state=None), due, local, local, True)
        return value, new._replace(since_sync=jnp.zeros_like(since), inner_state=state.inner_state)

    def _due(self, state: LocalUpdatesState, since: jax.Array) -> tuple[jax.Array, Due]:
        """Return whether step ``since`` synchronizes all params, and which fragments are due."""
        count = len(state.outer_state)
        every = self.every or count
        phase = since % every
        phase = jnp.where(state.syncs < self.warmup, -1, phase) if self.warmup else phase
        # All conditions compare ``phase`` with a constant, so an audit sees that a step runs only
        # one of the branches.
        return phase == -1, [phase == -(-k * every // count) % every for k in range(1, count + 1)]

    def _synchronized(self, state: LocalUpdatesState, due: Due, *step: PyTree) -> Stepped:
        """Synchronize the fragments that are due; see ``_in_branches``."""
        groups = self.members(step[0])
        anchors = [_part(state.anchor, group) for group in groups]
        parts = [*zip(anchors, state.reduction_state, state.outer_state, strict=True)]
        average = functools.partial(self._average, self.outer)
        value, parts = self._in_branches(groups, due, average, parts, *step)
        anchors, reduction_state, outer_state = zip(*parts, strict=True)
        state = state._replace(reduction_state=reduction_state, outer_state=outer_state)
        anchor = _joined(state.anchor, groups, anchors) if self.outer else None
        syncs = gate.counted(state.syncs, jnp.stack(due).any())
        return value, state._replace(anchor=anchor, syncs=syncs)

    def _in_branches(
        self, groups: PyTree, due: Due, mean: Callable[..., Stepped], states: PyTree, *step: PyTree
    ) -> Stepped:
        """Average the groups of leaves that are due, each group in its own branch.

        Args:
          groups: the indices of the leaves in each group.
          due: a bool scalar for each group, equal on all replicas.
          mean: a function of the state of a group and of its params after a step, which returns
            averaged params and a new state.
          states: the state of each group.
          step: the params of a replica before the step, ``local``; the result of the step,
            ``value``; and whether ``value`` is the new params (``apply``) or the updates.
        """
        local, value, apply = step

        def averaged(state: PyTree, before: PyTree, after: PyTree) -> Stepped:
            new, state = mean(state, after if apply else trees.applied(before, after))
            if not apply:
                new = jax.tree.map(jnp.subtract, *trees.at_least_float32((new, before)))
            return axes.unify(trees.cast_like(new, after), after), state

        results: list[Stepped] = []
        for group, is_due, state in zip(groups, due, states, strict=True):
            old = _part(value, group)
            heavy = functools.partial(averaged, state, _part(local, group), old)
            # Each group has a separate branch. In one switch over all leaves, XLA:CPU and XLA:GPU
            # would copy the leaves that do not change.
            results.append(gate.run_or_hold(is_due, heavy, old, state, apply=True, who=self.who))
        return _joined(value, groups, [x for x, _ in results]), [state for _, state in results]

    def _average(self, outer: Extended | None, state: PyTree, local: PyTree) -> Stepped:
        """Return the new params of a fragment, and its new anchor and states.

        The new params are the mean of the replicas' params if ``outer`` is ``None``.
        """
        anchor, reduction_state, outer_state = state
        if outer is None:
            mean = all_reduce(self.names).update(local, optax.EmptyState())[0]
            return mean, (mean if self.outer else None, reduction_state, outer_state)
        start = trees.at_least_float32(axes.unify(anchor, local))
        drift = jax.tree.map(jnp.subtract, start, trees.at_least_float32(local))
        drift, reduction_state = self.reduce.update(drift, reduction_state)
        args = gate.Pending(drift), outer_state, anchor
        anchor, outer_state = gate.call(outer, *args, apply=True, extra={})
        return anchor, (anchor, reduction_state, outer_state)

    def transformation(self) -> Extended:
        """Return the transformation with these steps; refuse gates in ``inner``."""
        gate.refuse_gates(self.who, [gate.gate_of(self.inner)])
        inner = {"inner_state": self.inner}
        step = describe(self.who, "own params", self.names, inner=inner)(self.step)
        return gate.gated(self.init, step, self.flush)


@reduction
def local_updates(
    inner: optax.GradientTransformation,
    every: int,
    outer: optax.GradientTransformation | None = optax.sgd(1.0),
    *,
    fragments: int | PyTree = 1,
    reduction: optax.GradientTransformation | None = None,
    warmup: int = 0,
    axis_name: axes.AxisName | None = None,
) -> Extended:
    r"""Train every replica separately for ``every`` steps, then synchronize: local SGD, DiLoCo.

    From a common anchor :math:`a`, each replica makes :math:`H` steps (``every``) of ``inner`` with
    its own gradients. The mean distance of the replicas from the anchor is the gradient that
    ``outer`` receives:

    .. math::
      \Delta = \tfrac1n \sum_{r=1}^{n} (a - p_r), \qquad
      a \leftarrow a + \text{outer}(\Delta), \qquad p_r \leftarrow a .

    ``outer=optax.sgd(1.0)`` averages the params (local SGD, the default);
    ``optax.sgd(0.7, momentum=0.9, nesterov=True)`` is DiLoCo. The state of ``inner`` is never
    averaged.

    Params differ per replica; ``docs/cards/local_updates.md`` shows a loop. Only gates may be
    around ``local_updates``: ``dynamic_loss_scale(local_updates(...), axis_name=...)``. Only
    applied steps count towards ``every``. ``boostax.flush`` synchronizes the replicas before the
    end of a round.

    Args:
      inner: an optimizer without collectives over ``axis_name`` and without a gate of boostax.
      every: number of steps from one synchronization to the next; with 1, every step synchronizes.
      outer: an optimizer for the anchor, without collectives, which computes in f32 or wider.
        ``None`` averages the params themselves, without ``reduction`` or an anchor.
      fragments: the parts of the params that are synchronized at different steps, evenly spaced,
        each fragment once in ``every`` steps (Streaming DiLoCo). A number divides the leaves, in
        their order, into this number of parts of about equal size. A tree has the fragment of each
        leaf, like ``partitions`` of ``partial_average``.
      reduction: the reduction that computes :math:`\Delta`, such as ``all_reduce(axis_name,
        wire_dtype="bfloat16")`` or ``adasum(axis_name)``. ``None`` uses ``all_reduce(axis_name)``.
      warmup: number of steps at the beginning of training; each of these steps averages all params,
        in f32 or wider. Later steps use ``every``, ``outer`` and ``reduction``.
      axis_name: mesh axis, or a tuple of axes, of the surrounding ``shard_map`` or ``pmap``.
        ``None`` means the axis of the surrounding ``make_train_step`` or ``on_mesh``.

    Returns:
      A transformation with a ``LocalUpdatesState``. With ``boostax.apply_gradients``, the params
      become bit-equal to the anchor. The pure ``update`` returns differences, so ``params +
      updates`` has a rounding error, in proportion to the larger of the old and the new param. The
      error changes the anchor only through the next :math:`\Delta`. Cost: one all-reduce of the
      params in f32 or wider per ``every`` steps, and no other collective; a copy of the params, and
      the outer state; with ``outer=None``, no copy and no outer state.

    Raises:
      ValueError, TypeError: an argument out of range; ``init`` with params that differ per
        replica; at trace time, an unbound axis, already reduced or integer gradients, no params.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.reduce.local_updates(optax.sgd(1.0), every=2, axis_name="data")
      >>> def train(grads, w):
      ...   state = tx.init(w)
      ...   for g in grads:
      ...     w, state = boostax.apply_gradients(tx, g, state, w)
      ...   return w
      >>> grads = jnp.array([[1.0, 1.0], [2.0, 4.0]])  # two replicas, two steps
      >>> jax.vmap(train, (0, None), axis_name="data")(grads, jnp.float32(0.0)).tolist()
      [-4.0, -4.0]

    References:
      Stich, Local SGD Converges Fast and Communicates Little, https://arxiv.org/abs/1805.09767,
      2019. Douillard et al., DiLoCo, https://arxiv.org/abs/2311.08105, 2023; Streaming DiLoCo,
      https://arxiv.org/abs/2501.18512, 2025. Sarfi et al., SparseLoCo,
      https://arxiv.org/abs/2508.15706, 2025.
    """
    who = "local_updates"
    steps = "every is a number of steps: local_updates(inner, every=16, axis_name='data')."
    every = checks.positive_int(who, "every", every, steps)
    members = partitioning(who, "fragments", fragments, "4 sends a quarter of the params at once.")
    if outer is None:
        hint = "reduction= needs an outer optimizer: outer=optax.sgd(1.0)."
        checks.absent(who, "reduction", reduction, "left out with outer=None", hint)
    warmup = checks.natural(who, "warmup", warmup, "warmup is in steps; 0 means no warm-up.")
    tx = checks.transformation(who, "inner", inner)
    names = axes.canonical(who, axis_name)
    outer_tx = None if outer is None else checks.transformation(who, "outer", outer)
    reduction = all_reduce(names) if reduction is None else reduction
    reduce = checks.transformation(who, "reduction", reduction)
    return _Rounds(who, names, tx, every, members, reduce, outer_tx, warmup).transformation()


def _part(tree: PyTree, group: Sequence[int]) -> PyTree:
    """Return the leaves of a group, with ``None`` for other leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([x if i in group else None for i, x in enumerate(leaves)])


def _joined(tree: PyTree, groups: Sequence[Sequence[int]], parts: Sequence[PyTree]) -> PyTree:
    """Return ``tree`` with the leaves of each group taken from the part of this group."""
    leaves, structure = jax.tree.flatten(tree)
    for group, part in zip(groups, parts, strict=True):
        for i, leaf in zip(sorted(group), jax.tree.leaves(part), strict=True):
            leaves[i] = leaf
    return structure.unflatten(leaves)


def _copy(p: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
    return p if isinstance(p, jax.ShapeDtypeStruct) else jnp.array(p, jnp.result_type(p), copy=True)


@reduction
def partial_average(
    inner: optax.GradientTransformation,
    partitions: int | PyTree = None,
    *,
    bucket_bytes: int | None = None,
    axis_name: axes.AxisName | None = None,
) -> Extended:
    r"""Train every replica on its own gradients; average one partition of the params per step.

    If the leaves are divided into :math:`K` partitions, step :math:`t` is

    .. math::
      p_r \leftarrow p_r + \text{inner}_r(g_r), \qquad
      p_r[k] \leftarrow \tfrac1n \sum_{s=1}^{n} p_s[k] \quad \text{for } k = t \bmod K .

    Every param is averaged once in :math:`K` steps; the state of ``inner`` is never averaged. The
    result equals the result of ``local_updates(inner, every=K, outer=None, fragments=partitions)``.

    Params differ per replica; ``docs/cards/local_updates.md`` shows a loop. Only gates may be
    around ``partial_average``: ``dynamic_loss_scale(partial_average(...), axis_name=...)``. A
    skipped step averages no params, so the next step averages the partition of the skipped step.
    ``boostax.flush`` averages all params, and the next step averages the first partition.

    Args:
      inner: an optimizer without collectives over ``axis_name`` and without a gate of boostax.
      partitions: the number of partitions, at most the number of leaves. A partition has
        neighbouring leaves, and the largest partition is as small as possible. Or the partition of
        each leaf, numbered from 0: a tree of integers like the params, or a prefix of such a tree.
      bucket_bytes: the size of a partition as in SINGA, instead of ``partitions``. Leaves are added
        to a partition, from the last leaf to the first, until the partition exceeds this number of
        bytes (of f32). A larger leaf is a partition by itself. ``2**23`` is SINGA's default.
      axis_name: mesh axis, or a tuple of axes, of the surrounding ``shard_map`` or ``pmap``.
        ``None`` means the axis of the surrounding ``make_train_step`` or ``on_mesh``.

    Returns:
      A transformation with a ``LocalUpdatesState``. With ``boostax.apply_gradients``, the averaged
      params become bit-equal on all replicas. The pure ``update`` returns differences, so ``params
      + updates`` has a rounding error, in proportion to the larger of the old and the new param.
      The next average removes this error. Cost: one all-reduce of a partition per step, in f32 or
      wider; no state besides that of ``inner``.

    Raises:
      ValueError, TypeError: an argument out of range; ``init`` with params that differ per replica,
        with more partitions than leaves, or with labels that do not match the params; at trace
        time, an unbound axis, already reduced or integer gradients, no params.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.reduce.partial_average(optax.sgd(1.0), 2, axis_name="data")
      >>> own = [jnp.array([1.0, 3.0]), jnp.array([1.0, 3.0])]  # two leaves, on two replicas
      >>> g = jax.tree.map(jnp.ones_like, own)
      >>> step = lambda g, w: boostax.apply_gradients(tx, g, tx.init(w), w)[0]
      >>> [x.tolist() for x in jax.vmap(step, axis_name="data")(g, own)]
      [[1.0, 1.0], [0.0, 2.0]]

    References:
      Apache SINGA's ``DistOpt.backward_and_partial_update``, which numbers the partitions in the
      order of the backward pass (``bucket_bytes``), and does not save the next partition in a
      checkpoint.
    """
    who = "partial_average"
    hint = "4 averages a quarter of the params per step. bucket_bytes= makes partitions by size."
    members = partitioning(who, "partitions", partitions, hint, bucket_bytes)
    tx = checks.transformation(who, "inner", inner)
    names = axes.canonical(who, axis_name)
    return _Rounds(who, names, tx, None, members, all_reduce(names), None, 0).transformation()


def partitioning(
    who: str, argument: str, partitions: PyTree, hint: str, bucket_bytes: int | None = None
) -> Callable[[PyTree], list[list[int]]]:
    """Return a function from params to the indices of the leaves in each partition."""
    bucket = check_bytes(who, bucket_bytes)
    is_count = jax.tree_util.all_leaves([partitions])
    count = 0
    if bucket is not None:
        why = "Pass only one: partial_average(inner, bucket_bytes=2**23, axis_name='data')."
        checks.absent(who, argument, partitions, "left out with bucket_bytes", why)
    elif is_count:
        count = checks.positive_int(who, argument, partitions, hint)
    else:
        allowed = "a positive integer or a tree of 0, 1, ... that is a prefix of the params"
        leaves = jax.tree.leaves(partitions)
        labels = {checks.integer(who, argument, x, allowed, hint) for x in leaves}
        count = len(labels)
        is_valid = count > 0 and labels == set(range(count))
        checks.require(is_valid, who, argument, got=partitions, allowed=allowed, hint=hint)

    def members(params: PyTree) -> list[list[int]]:
        leaves = jax.tree.leaves(params)
        if bucket is not None:
            return exchange.fused({i: 4 * x.size for i, x in enumerate(leaves)}, bucket) or [[]]
        if is_count:
            sizes = [x.size * trees.wide_dtype(x).itemsize for x in leaves]
            allowed = f"at most the number of param leaves, {len(sizes)}"
            is_valid = count <= len(sizes) or not sizes
            checks.require(is_valid, who, argument, got=count, allowed=allowed, hint=hint)
            labels = _even_runs(sizes, count) if sizes else []
        else:
            labels = jax.tree.leaves(jax.tree.broadcast(partitions, params))
        return [[i for i, label in enumerate(labels) if label == k] for k in range(count)]

    return members


def _even_runs(sizes: list[int], count: int) -> list[int]:
    """Split items into runs whose largest is as small as possible; return the run of each item."""

    def runs(limit: int) -> list[int]:
        labels = [0]
        filled = sizes[0]
        for i, size in enumerate(sizes[1:], 1):
            # Each later run needs at least one item.
            begins = len(sizes) - i < count - labels[-1] or filled + size > limit
            filled = size if begins else filled + size
            labels.append(labels[-1] + begins)
        return labels

    limits = range(max(sizes), sum(sizes) + 1)
    return runs(limits[bisect.bisect_left(limits, True, key=lambda limit: runs(limit)[-1] < count)])
