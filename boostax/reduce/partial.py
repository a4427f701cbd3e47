# SPDX-License-Identifier: Apache-2.0
"""Rotating averages: replicas train on their own and average one partition of the params a step."""

import bisect
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, trees
from boostax._core.describe import Stepped, first_line
from boostax._core.gate import run_or_hold
from boostax._core.replicas import PerReplica
from boostax.reduce import exchange
from boostax.reduce.mean import all_reduce
from boostax.reduce.own import Own, through

PyTree = Any


class PartialAverageState(NamedTuple):
    """State of ``partial_average``.

    Attributes:
      partition: i32, the partition that the next step averages.
      inner_state: a ``PerReplica`` of the inner optimizer's state: each replica's own.
    """

    partition: jax.Array
    inner_state: PerReplica

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        return {"partition": self.partition}

    def own_params(self) -> None:
        """Mark a state whose params differ per replica."""


def partial_average(
    inner: optax.GradientTransformation,
    axis_name: axes.AxisName,
    partitions: int | PyTree = None,
    *,
    bucket_bytes: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Train every replica on its own gradients; average one partition of the params per step.

    With the leaves shared out among :math:`K` partitions, step :math:`t` is

    .. math::
      p_r \leftarrow p_r + \text{inner}_r(g_r), \qquad
      p_r[k] \leftarrow \tfrac1n \sum_{s=1}^{n} p_s[k] \quad \text{for } k = t \bmod K .

    Every parameter is averaged once in :math:`K` steps; the state of ``inner`` never is.

    Params differ per replica: see ``docs/cards/local_updates.md`` for the loop. It stands
    outermost, inside gates only: ``dynamic_loss_scale(partial_average(...), axis_name=...)``.
    A skipped step averages nothing and does not move the rotation. ``boostax.flush`` averages all.

    Args:
      inner: an optimizer without collectives over ``axis_name`` and without a gate of boostax.
      axis_name: mesh axis, or a tuple of axes, of the surrounding ``shard_map`` or ``pmap``.
      partitions: the number of partitions, at most one for each leaf: each is a run of consecutive
        leaves, and the largest run is as small as it can be. Or the partition of each leaf,
        numbered from 0: a tree of integers like the params, or a prefix of one.
      bucket_bytes: instead of ``partitions``, the size of a partition, as SINGA cuts them: leaves
        are added from the last to the first until they exceed this many bytes (of f32); a larger
        leaf is a partition by itself. ``2**23`` is SINGA's default.

    Returns:
      A transformation with a ``PartialAverageState``. Through ``boostax.apply_gradients`` the
      averaged params become bit-equal on all replicas. The pure ``update`` returns differences, so
      ``params + updates`` is off by a rounding of the larger of old and new value, which the next
      average removes. Cost: one all-reduce of a partition per step, in f32 or wider; no state
      beyond the inner one.

    Raises:
      ValueError, TypeError: an argument out of range; more partitions than leaves, or labels that
        do not match the params; at trace time, an unbound axis, already reduced or integer
        gradients, no params.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.reduce.partial_average(optax.sgd(1.0), "data", partitions=2)
      >>> own = [jnp.array([1.0, 3.0]), jnp.array([1.0, 3.0])]  # two leaves, on two replicas
      >>> g = jax.tree.map(jnp.ones_like, own)
      >>> step = lambda g, w: boostax.apply_gradients(tx, g, tx.init(w), w)[0]
      >>> [x.tolist() for x in jax.vmap(step, axis_name="data")(g, own)]
      [[1.0, 1.0], [0.0, 2.0]]

    References:
      Apache SINGA's ``DistOpt.backward_and_partial_update``, which numbers the partitions in the
      order of the backward pass (``bucket_bytes``) and loses their state in a checkpoint.
    """
    who = "partial_average"
    replica = Own.of(who, inner, axis_name)
    members = partitioning(who, partitions, bucket_bytes)
    mean = all_reduce(replica.names)

    def averaged(params: PyTree) -> Stepped:
        return mean.update(params, optax.EmptyState())

    def init_fn(params: PyTree) -> PartialAverageState:
        members(params)
        return PartialAverageState(jnp.zeros((), jnp.int32), replica.init(params))

    def average(state: PartialAverageState, own: PyTree, value: PyTree, apply: bool) -> Stepped:
        leaves, (values, treedef) = jax.tree.leaves(own), jax.tree.flatten(value)
        groups = members(own)
        for k, group in enumerate(groups):
            part, old = [leaves[i] for i in group], [values[i] for i in group]
            heavy = functools.partial(through, averaged, part, old, apply)
            none, due = optax.EmptyState(), state.partition == k
            # Not a switch over all leaves: XLA:CPU and XLA:GPU copy those that only pass through.
            new, _ = run_or_hold(due, heavy, old, none, apply=True, who=who)
            for i, x in zip(group, new, strict=True):
                values[i] = x
        following = (state.partition + 1) % max(len(groups), 1)
        return treedef.unflatten(values), state._replace(partition=following)

    def close(state: PartialAverageState, own: PyTree) -> Stepped:
        return through(averaged, own, own, True)[0], state

    return replica.gated(first_line(partial_average), init_fn, average, close)


def partitioning(
    who: str, partitions: Any, bucket_bytes: int | None
) -> Callable[[PyTree], list[list[int]]]:
    """Return a function from params to the indices of the leaves in each partition."""
    hint = "4 averages a quarter of the params per step; {'head': 0, 'body': 1} names them."
    bucket = exchange.check_bytes(who, bucket_bytes)
    if bucket is not None:
        why = "One of the two says what a partition is."
        checks.absent(who, "partitions", partitions, "left out beside bucket_bytes", why)
        sizes = lambda params: enumerate(4 * x.size for x in jax.tree.leaves(params))  # noqa: E731
        return lambda params: exchange.fused(dict(sizes(params)), bucket)
    known = partitions is not None
    checks.require(who, "partitions", partitions, "given, or bucket_bytes", known, hint)
    if jax.tree_util.all_leaves([partitions]):
        count = checks.positive_int(who, "partitions", partitions, hint)

        def label(params: PyTree) -> list[int]:
            sizes = [x.size * trees.wide_dtype(x).itemsize for x in jax.tree.leaves(params)]
            allowed = f"at most the number of param leaves, {len(sizes)}"
            fits = count <= len(sizes) or not sizes
            checks.require(who, "partitions", count, allowed, fits, hint)
            return _even_runs(sizes, count) if sizes else []
    else:
        numbers = jax.tree.leaves(partitions)
        integers = all(hasattr(x, "__index__") for x in numbers)
        found = {int(x) for x in numbers} if integers else set[int]()
        allowed = "a positive integer or a tree of the integers 0, 1, ... without a gap"
        fits = bool(found) and found == set(range(len(found)))
        error = ValueError if integers else TypeError
        checks.require(who, "partitions", partitions, allowed, fits, hint, error)
        count, label = len(found), functools.partial(_labels, who, partitions)

    def members(params: PyTree) -> list[list[int]]:
        labels = label(params)
        return [[i for i, mine in enumerate(labels) if mine == k] for k in range(count)]

    return members


def _labels(who: str, partitions: PyTree, params: PyTree) -> list[int]:
    """Return the partition of each leaf."""
    try:
        return jax.tree.leaves(jax.tree.broadcast(partitions, params))
    except ValueError as error:
        allowed = f"a tree like the params, or a prefix of one, {jax.tree.structure(params)}"
        message = checks.message(who, "partitions", allowed, partitions, f"{error}")
        raise ValueError(message) from error


def _even_runs(sizes: list[int], count: int) -> list[int]:
    """Cut items into runs of neighbours, the largest run as small as can be; number each item's."""

    def runs(limit: int) -> list[int]:
        labels, filled = [0], sizes[0]
        for i, size in enumerate(sizes[1:], 1):
            # Leave one leaf for each run to come.
            begins = len(sizes) - i < count - labels[-1] or filled + size > limit
            filled = size if begins else filled + size
            labels.append(labels[-1] + begins)
        return labels

    limits = range(max(sizes), sum(sizes) + 1)
    fits = bisect.bisect_left(limits, True, key=lambda limit: runs(limit)[-1] < count)
    return runs(limits[fits])
