# SPDX-License-Identifier: Apache-2.0
"""AdaSum: a reduction that adds orthogonal gradients and averages parallel gradients.

``adasum`` combines gradients. ``adasum_delta`` combines the updates of independent optimizers: one
optimizer per replica, or one optimizer per server.
"""

import itertools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from boostax._core import axes, checks, gate, trees
from boostax._core.describe import Stepped, describe
from boostax._core.replicas import PerReplica, require_like
from boostax._core.types import PyTree
from boostax.reduce import collectives, exchange, pairwise
from boostax.reduce.codec import Arrays, Names
from boostax.reduce.mean import check_bytes, reduced, reduction
from boostax.reduce.on_shards import on_shards

Scope = Literal["leaf", "tree"]


class AdasumState(NamedTuple):
    """State of ``adasum``, which measures how parallel the replicas' last gradients were.

    Attributes:
      orthogonality: f32 scalar, ``|sum_r g_r|**2 / sum_r |g_r|**2`` over all leaves: 1 for
        orthogonal gradients, the number of replicas for parallel gradients, 0 for gradients that
        cancel, -1 before the first step.
      leaf_orthogonality: a tree like the params with the ``orthogonality`` of each leaf, or
        ``None``.
    """

    orthogonality: jax.Array  # [] float32
    leaf_orthogonality: PyTree  # a [] float32 for each param, or None

    def metrics(self) -> dict[str, jax.Array]:
        """Return named scalars for ``boostax.metrics``."""
        by_leaf = {f"orthogonality/{name}": x for name, x in trees.named(self.leaf_orthogonality)}
        return {"orthogonality": self.orthogonality, **by_leaf}


@reduction
def adasum(
    axis_name: axes.AxisName | None = None,
    *,
    within: axes.AxisName | None = None,
    shard_axes: axes.AxisName | None = None,
    scope: Scope = "leaf",
    wire_dtype: DTypeLike | None = None,
    bucket_bytes: int | None = None,
    leaf_metrics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Replace local gradients by their AdaSum over the replicas.

    Two gradients are combined by

    .. math::
      A(a, b) = \Bigl(1 - \frac{a \cdot b}{2 \|a\|^2}\Bigr) a
              + \Bigl(1 - \frac{a \cdot b}{2 \|b\|^2}\Bigr) b,

    leaf by leaf. Orthogonal gradients are added, parallel gradients are averaged, and the result of
    equal gradients is the same gradient bit for bit. More than two gradients are combined pairwise,
    in a tree that begins with neighbours: ``((0, 1), (2, 3))``. A gradient without a partner moves
    up to the next level of the tree. Because parallel gradients are averaged, not added, the
    learning rate of a single replica suits any number of replicas. The card
    ``docs/cards/adasum.md`` says when to use AdaSum.

    Use ``adasum`` instead of a mean, as the first part of the chain: ``chain(adasum("data"), clip,
    adamw)``.

    Args:
      axis_name: mesh axis, or a tuple of axes, of the surrounding ``shard_map`` or ``pmap``, over
        which gradients are combined. ``None`` means the axis of the surrounding ``make_train_step``
        or ``on_mesh``.
      within: axes over which gradients are averaged first, such as the axis of the devices in a
        node or a pod, which have fast links. Then each device sends only ``1 / size(within)`` of
        the bytes over ``axis_name``.
      shard_axes: axes over which leaves are sharded (FSDP, tensor parallel); dot products are
        summed over these axes. Some leaves may be unsharded, that is, equal over these axes.
      scope: ``"leaf"`` for a pair of coefficients per leaf, or ``"tree"`` for the same pair of
        coefficients for all leaves.
      wire_dtype: dtype on the wire; ``"bfloat16"`` or ``"float16"`` halves the bytes. The
        arithmetic remains in f32. In f16, every leaf is sent with its own power-of-two scale, so
        values do not overflow.
      bucket_bytes: leaves below this size in bytes (of f32) are packed, up to this size in a pack.
        ``None`` packs leaves below ``max(64 KiB, 4 KiB * replicas)``, up to 8 MiB in a pack with up
        to 128 replicas. Larger leaves are sent one by one, in their own shapes.
      leaf_metrics: whether to record the orthogonality of each leaf, too.

    Returns:
      A transformation with an ``AdasumState``. Gradients are combined in f32 or wider and cast back
      to their dtype. If a leaf has a NaN on any replica, the complete leaf becomes NaN. Integer
      leaves raise an error. With a single replica, gradients are unchanged. Cost: an all-to-all and
      an all-gather of each leaf, and of each pack of small leaves, which together send the bytes of
      a ring all-reduce; per step, one gather of 4 bytes per leaf, and ``ceil(log2 n)`` all-reduces
      of four scalars per leaf and pair of replicas. ``within`` or ``shard_axes`` adds a collective
      of 4 bytes per leaf. With f16, the result needs another such collective. A train step with 67
      M params, compiled for TPU v5e, takes 1.73 times the cycles of a step with a mean.

    Raises:
      ValueError, TypeError: an argument out of range; at trace time, an unbound axis, already
        reduced gradients, integer gradients.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> tx = boostax.adasum("data")
      >>> combine = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data"))
      >>> combine(jnp.array([[1.0, 0.0], [0.0, 1.0]]))[0].tolist()  # orthogonal: the sum
      [1.0, 1.0]
      >>> combine(jnp.array([[1.0, 0.0], [3.0, 0.0]]))[0].tolist()  # parallel: the mean
      [2.0, 0.0]

    References:
      Maleki et al., Scaling Distributed Training with Adaptive Summation,
      https://arxiv.org/abs/2006.02924, 2020. For a number of replicas that is a power of two, the
      results equal Horovod's.
    """
    who = "adasum"
    levels = Levels(axes.canonical(who, axis_name), axis_of_server(who, within))
    names = levels.across + levels.inside
    options = Options(shard_axes, scope, wire_dtype, bucket_bytes, leaf_metrics).checked(who, names)

    def update_fn(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Stepped:
        axes.require_local(updates, names, who)
        axes.require_bound(options.shards, who, "shard_axes")
        return combined(updates, levels, options)

    update = describe(who, "adasum", names)(on_shards(who, names, update_fn))
    return optax.GradientTransformationExtraArgs(options.init, update)


def axis_of_server(who: str, within: axes.AxisName | int | None) -> Names:
    """Return the axes ``within`` as a tuple; refuse a number of devices, and suggest a mesh."""
    if isinstance(within, int):
        mesh = f'jax.make_mesh((n // {within}, {within}), ("server", "data"))'
        hint = f'Write axis_name="server", within="data" on the mesh {mesh}.'
        allowed = "a mesh axis name or a tuple of axis names"
        raise ValueError(checks.message(who, "within", allowed, within, hint))
    return axes.canonical(who, within, "within")


class Options(NamedTuple):
    """The arguments of ``adasum`` except the axes of the replicas."""

    shards: Any
    scope: Scope
    wire: Any
    bucket_bytes: int | None
    leaf_metrics: bool

    def init(self, params: PyTree) -> AdasumState:
        """Return the state before the first step, in which all numbers are -1."""
        measured = params if self.leaf_metrics else None
        by_leaf = jax.tree.map(lambda _: jnp.full((), -1.0, jnp.float32), measured)
        return AdasumState(jnp.full((), -1.0, jnp.float32), by_leaf)

    def checked(self, who: str, names: Names) -> "Options":
        """Check the arguments, and return them with axes as a tuple and ``wire`` as a dtype.

        Args:
          who: the transformation, for errors.
          names: the axes of the replicas.
        """
        shards = axes.canonical(who, self.shards)
        checks.choice(who, "scope", self.scope, Scope, "The paper combines gradients leaf by leaf.")
        wire = None if self.wire is None else checks.floating_dtype(who, "wire_dtype", self.wire)
        axes.canonical(who, names + shards, "axis_name, within and shard_axes")
        is_valid = self.scope == "leaf" or not shards
        allowed = "'leaf' with shard_axes"
        hint = "Unsharded leaves would count once per shard. With check_vma=True, omit shard_axes."
        checks.require(is_valid, who, "scope", got=self.scope, allowed=allowed, hint=hint)
        bucket_bytes = check_bytes(who, self.bucket_bytes)
        return self._replace(shards=shards, wire=wire, bucket_bytes=bucket_bytes)


class Levels(NamedTuple):
    """The two levels of a reduction: AdaSum across servers, and a mean inside each server.

    Attributes:
      across: axes of the servers, or of the replicas if there are no servers.
      inside: axes of the replicas in one server.
      averaged: whether the replicas of a server already have the same updates.
    """

    across: Names
    inside: Names
    averaged: bool = False


def combined(updates: PyTree, levels: Levels, options: Options) -> Stepped:
    """Return the AdaSum of the replicas' ``updates``, and a state with the orthogonality."""
    leaves, treedef = jax.tree.flatten(updates)
    kinds = exchange.kinds(leaves)
    replicas = levels.across + levels.inside
    # If JAX tracks varying axes, the type of a leaf shows over which axes the leaf is sharded.
    types = (axes.varying(leaves[kind[0]]) for kind in kinds)
    over = [tuple(sorted(x - {*replicas})) or options.shards for x in types]
    every = {name for other in over for name in other}
    copies = [axes.size(tuple(every - set(other))) for other in over]
    reals = [[exchange.real(leaves[i]) for i in kind] for kind in kinds]
    sent = [_sent(x, levels, other, options) for x, other in zip(reals, over, strict=True)]

    def total(x: jax.Array) -> jax.Array:
        # With ``check_vma=False``, the varying axes are unknown, and the sum is over all ``names``.
        known = axes.varying(x)
        names = dict.fromkeys((*axes.with_shards(x, replicas), *options.shards))
        return lax.psum(x, tuple(name for name in names if not known or name in known))

    rows = [x for _, x in sent]
    together = options.scope == "tree" and bool(rows)
    groups = [pairwise.join_rows(rows, copies)] if together else rows
    sums = [pairwise.combine_replicas(x, total, together=together) for x in groups]
    parts = iter([x for row, _ in sums for x in row])
    fastest_first = tuple(filter(None, (levels.across, levels.inside)))
    # Empty leaves are equal on all replicas, and are not sent.
    result = [jnp.zeros(x.shape, x.dtype) for x in leaves]
    for kind, real, (chunks, _) in zip(kinds, reals, sent, strict=True):
        slices = [next(parts) for _ in chunks]
        gathered = exchange.delivered(chunks, slices, fastest_first, options.wire, real)
        for i, x in zip(kind, gathered, strict=True):
            result[i] = exchange.like(x, leaves[i])
    overall, ratios = _orthogonality(groups, [norms for _, norms in sums])
    by_index = dict(zip([i for kind in kinds for i in kind], ratios, strict=True))
    orthogonal = jnp.ones((), jnp.float32)
    ratios = treedef.unflatten([by_index.get(i, orthogonal) for i in range(len(leaves))])
    return treedef.unflatten(result), AdasumState(overall, ratios if options.leaf_metrics else None)


def _sent(
    leaves: Arrays, levels: Levels, shards: Names, options: Options
) -> tuple[list[exchange.Chunk], pairwise.Rows]:
    """Return the chunks of leaves, and this device's slice of every replica's chunks."""
    inside = levels.inside
    devices = axes.size(inside)
    chunks = exchange.chunks(leaves, axes.size(levels.across) * devices, options.bucket_bytes)
    arrays = [chunk.array(leaves) for chunk in chunks]
    if levels.averaged:
        # All devices of a server have the same arrays, so each device sends only its slice.
        cuts = ((x, x.shape[c.dim] // devices, c.dim) for c in chunks for x in [c.array(leaves)])
        arrays = [lax.dynamic_slice_in_dim(x, axes.index(inside) * n, n, dim) for x, n, dim in cuts]
    elif inside and options.wire is None:
        arrays = [collectives.scatter(x.array(leaves) / devices, inside, x.dim) for x in chunks]
    elif inside:
        near = exchange.exchange(chunks, arrays, inside, options.wire, shards, by_leaf=False)
        arrays = exchange.mean(near, "before")
    return chunks, exchange.exchange(chunks, arrays, levels.across, options.wire, inside + shards)


def _orthogonality(groups: list[pairwise.Rows], norms: Arrays) -> tuple[jax.Array, list[jax.Array]]:
    """Return the orthogonality of the tree and of every leaf, given norms of each leaf."""
    if not groups:
        return jnp.ones((), jnp.float32), []
    units = [rows.exponents.max(0) for rows in groups]
    top = jnp.stack([x.max() for x in units]).max()
    pairs = [wide.astype(jnp.float32) for wide in norms]
    overall = jnp.zeros(2, jnp.float32)
    for pair, unit in zip(pairs, units, strict=True):
        overall += (pair * pairwise.power_of_two(2 * (unit - top), pair.dtype)).sum(1)
    ratios: list[jax.Array] = []
    by_leaf = (norms for x in pairs for norms in zip(*x, strict=True))
    for of_sum, of_parts in itertools.chain([overall], by_leaf):
        # The orthogonality of zeros is 1.
        none = of_parts == 0
        ratios.append(jnp.where(none, 1, of_sum) / jnp.where(none, 1, of_parts))
    return ratios[0], ratios[1:]


class AdasumDeltaState(NamedTuple):
    """State of ``adasum_delta``.

    Attributes:
      inner_state: a ``PerReplica`` of the inner optimizer's state on each replica or server.
      adasum: the ``AdasumState`` of the updates.
    """

    inner_state: PerReplica  # the states of ``inner``, one for each replica or server
    adasum: AdasumState

    def server_parts(self) -> list[PerReplica]:
        """Return the parts that are equal on all devices of a server, for ``reshard_state``."""
        return [self.inner_state]


@reduction
def adasum_delta(
    inner: optax.GradientTransformation,
    *,
    axis_name: axes.AxisName | None = None,
    within: axes.AxisName | None = None,
    shard_axes: axes.AxisName | None = None,
    scope: Scope = "leaf",
    wire_dtype: DTypeLike | None = None,
    bucket_bytes: int | None = None,
    leaf_metrics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Run ``inner`` on every replica's own gradients, and combine the updates by AdaSum.

    .. math::
      \delta_s = \text{inner}_s\Bigl(\tfrac1w \sum_{r \in s} g_r\Bigr), \qquad
      u = \operatorname{AdaSum}(\delta_1, \dots, \delta_n)

    In ``chain(adasum("data"), adam)``, a single Adam receives the combined gradient. With
    ``adasum_delta``, each replica has its own Adam with its own moments, as in Horovod's
    ``DistributedOptimizer(op=Adasum)``. With ``within``, each server has one inner state for the
    mean gradient of its w devices, as in MindSpore's ``boost.adasum`` with ``device_number``. Use
    ``adasum_delta`` as the outermost part, around all parts that compute the update:
    ``adasum_delta(chain(clip, adamw(schedule)), axis_name="data")``. In short runs with momentum,
    the loss is higher than with ``adasum``, because the momenta of the replicas differ; see
    ``docs/cards/adasum.md``.

    Args:
      inner: an optimizer for a single replica, without collectives over the axes.
      axis_name: mesh axis, or a tuple of axes, over which updates are combined. ``None`` means the
        axis of the surrounding ``make_train_step`` or ``on_mesh``.
      within: the axes of a server's devices, over which gradients are averaged before ``inner``:
        ``adasum_delta(adam, axis_name="server", within="data")`` on ``jax.make_mesh((n // 8, 8),
        ("server", "data"))``.
      shard_axes: axes over which leaves are sharded.
      scope: see ``adasum``, also for the arguments below.
      wire_dtype: dtype of the updates on the wire.
      bucket_bytes: size below which leaves are packed.
      leaf_metrics: whether to record the orthogonality of each leaf, too.

    Returns:
      A transformation with an ``AdasumDeltaState``. Outside the mapped function, the inner state
      has a leading axis of replicas (see ``stack_replicas`` and ``state_specs``). The devices of a
      server have equal copies of the inner state. Cost: the cost of ``adasum``; a complete inner
      state on every replica, which cannot be sharded over the replicas. With ``within``, let w be
      the number of devices in each of n servers, and N the bytes of the f32 gradients. Every device
      sends ``2 N (w-1)/w`` bytes inside its server (an all-reduce), and ``N/w (n-1)/n`` bytes
      between servers. To gather the result, every device sends ``N/w (n-1)/n`` bytes between
      servers, and then ``N (w-1)/w`` bytes inside its server.

    Raises:
      ValueError, TypeError: as ``adasum``.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.reduce.adasum_delta(optax.sgd(0.5), axis_name="data")
      >>> combine = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data"))
      >>> combine(jnp.array([[1.0, 0.0], [0.0, 1.0]]))[0].tolist()
      [-0.5, -0.5]
      >>> tx = boostax.reduce.adasum_delta(optax.sgd(0.5), axis_name="server", within="data")
      >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")
      >>> servers = jnp.array([[[1.0, 0.0], [3.0, 0.0]], [[0.0, 2.0], [0.0, 4.0]]])  # two of two
      >>> jax.jit(jax.vmap(step, axis_name="server"))(servers)[0, 0].tolist()
      [-1.0, -1.5]

    References:
      Maleki et al., Scaling Distributed Training with Adaptive Summation,
      https://arxiv.org/abs/2006.02924, 2020. MindSpore 2.10, ``mindspore/boost/adasum.py``.
    """
    who = "adasum_delta"
    tx = checks.transformation(who, "inner", inner)
    replicas = axes.canonical(who, axis_name)
    inside = axis_of_server(who, within)
    levels = Levels(replicas, inside, averaged=bool(inside))
    names = replicas + inside
    options = Options(shard_axes, scope, wire_dtype, bucket_bytes, leaf_metrics).checked(who, names)

    def init_fn(params: PyTree) -> AdasumDeltaState:
        local = trees.unshared(tx.init(trees.at_least_float32(params)), params)
        return AdasumDeltaState(PerReplica(axes.to_varying(local, replicas)), options.init(params))

    described = describe("adasum", "adasum", names)
    mean = f"Run inner on the mean gradient over {', '.join(inside)}, "
    what = mean + "and combine the updates with AdaSum" if inside else ""

    @describe(who, "delta", names, inner={"inner_state": tx}, what=what)
    def update_fn(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Stepped:
        axes.require_local(updates, names, who)
        axes.require_bound(options.shards, who, "shard_axes")
        old = state.inner_state.local
        # A gate inside would apply different steps on different replicas.
        gate.refuse_gates(who, gate.gates_in(old))
        # If the devices of a server share one copy of the inner state, the type of the updates is
        # unvarying over the axes of the server.
        varies = frozenset[str]().union(*axes.types(old))
        over = (*replicas, *(name for name in inside if name in varies))
        # The inner optimizer computes in f32 or wider, as inside a gate.
        local = None if params is None else axes.to_varying(trees.at_least_float32(params), over)
        wide = trees.at_least_float32(updates)
        if inside:
            wide = axes.to_varying(jax.tree.map(lambda x: reduced(x, inside, "after"), wide), over)
        deltas, inner_state = tx.update(wide, old, local, **extra)
        require_like(who, "the moment", (old, deltas), (inner_state, updates))
        inner_state = axes.unify(trees.cast_like(inner_state, old), old)
        deltas = axes.unify(trees.cast_like(deltas, updates), updates)
        if inside and axes.vmapped(names):
            # Each replica needs a copy of leaves that are shared by the replicas of a server.
            deltas = jax.tree.map(lambda x: jnp.where(axes.index(names) >= 0, x, x), deltas)
        elif inside:
            deltas = axes.to_varying(deltas, names)
        combine = described(lambda deltas, *_: combined(deltas, levels, options))
        result, adasum_state = on_shards(who, names, combine)(deltas, state.adasum)
        return result, AdasumDeltaState(PerReplica(inner_state), adasum_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
