# SPDX-License-Identifier: Apache-2.0
"""Update 1/n of the matrices on each of n replicas, and gather all updates."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from boostax._core import axes, checks, gate, trees
from boostax._core.describe import Stepped, describe
from boostax._core.replicas import PerReplica
from boostax._core.types import PyTree
from boostax.order import findings
from boostax.reduce import collectives
from boostax.reduce.codec import Arrays, Names
from boostax.reduce.mean import all_reduce, reduction
from boostax.reduce.on_shards import Path, on_rows

_WHO = "by_shape"


class Distributed(NamedTuple):
    """The params that the inner optimizer of ``by_shape`` receives on a replica, or their moments.

    Attributes:
      by_shape: for each shape, the matrices that the replica owns; in a state, the stack of these
        matrices in a ``PerReplica``.
      rest: a tree like the params with all other leaves, and ``optax.MaskedNode`` for the matrices.
    """

    by_shape: tuple[PyTree, ...]
    rest: PyTree


_is_distributed: Callable[[object], bool] = Distributed.__instancecheck__


class ByShapeState(NamedTuple):
    """State of ``by_shape``.

    Attributes:
      order: for each shape, u32 ``[matrices]``, CRC-32 of the matrices' paths, for
        ``migrate_state``. If each replica owns ``k`` matrices of a shape, matrix ``i`` is number
        ``i % k`` on replica ``i // k``.
      inner_state: the state of the inner optimizer. A moment has the structure of the params, but
        the ``k`` matrices of a shape that a replica owns are stacked, ``[k, ...]``.
    """

    order: tuple[jax.Array, ...]  # each [matrices] uint32
    inner_state: PyTree  # float32 or wider, [slots, m, n] for the matrices of a shape

    def distributed_items(self) -> list[tuple[PerReplica, int]]:
        """Return each distributed part, and the number of its matrices, for ``reshard_state``."""
        views = trees.find(self.inner_state, Distributed)
        return [pair for x in views for pair in zip(x.by_shape, map(len, self.order), strict=True)]


class _Shape(NamedTuple):
    """The matrices of one shape, which are distributed over the replicas.

    Attributes:
      indices: indices of the matrices among the leaves.
      path: the path of the first matrix.
      names: the replica axes; empty if no axis is bound, which means a single replica.
      replicas: the number of replicas.
      slots: the number of matrices that each replica owns.
    """

    indices: list[int]
    path: Path
    names: Names
    replicas: int
    slots: int

    def chosen(self, leaves: Arrays | Mapping[int, jax.Array]) -> Arrays:
        """Select this replica's matrices from leaves that are equal on all replicas."""
        matrices = [leaves[i] for i in self.indices]
        if self.replicas == 1:
            return matrices
        replica = axes.index(self.names)
        matrices = axes.to_varying(matrices, self.names)
        matrices += [matrices[-1]] * (self.slots * self.replicas - len(matrices))
        return [lax.select_n(replica, *matrices[i :: self.slots]) for i in range(self.slots)]

    def means(self, leaves: Arrays) -> Arrays:
        """Return the means, over the replicas, of the matrices that this replica owns."""
        if 2 * len(self.indices) < self.slots * self.replicas:
            # Padding to ``slots * replicas`` matrices would more than double the bytes that are
            # sent.
            return self.chosen({i: lax.pmean(leaves[i], self.names) for i in self.indices})
        matrices = [leaves[i] for i in self.indices]
        padding = self.slots * self.replicas - len(matrices)

        def scattered(xs: Arrays) -> jax.Array:
            stack = jnp.stack([*xs, *[jnp.zeros_like(xs[0])] * padding])
            return collectives.scatter(stack, self.names, 0) / self.replicas

        return list(on_rows(_WHO, self.names, self.path, scattered, matrices, scatter=True))

    def gathered(self, rows: Arrays, dtype: jax.typing.DTypeLike) -> Arrays:
        """Gather each replica's matrices; the result is equal on all replicas."""
        rows = [x.astype(dtype) for x in rows]
        count = len(self.indices)
        if 2 * count < self.slots * self.replicas:
            replica = axes.index(self.names)
            matrices = [jnp.where(replica == i, rows[0], 0) for i in range(count)]
            return [lax.psum(x, self.names) for x in matrices]

        def gather(x: jax.Array) -> list[jax.Array]:
            return list(collectives.gather_along(x, self.names, 0)[:count])

        return on_rows(_WHO, self.names, self.path, gather, jnp.stack(rows), scatter=False)


def _shapes(tree: PyTree, names: Names) -> tuple[list[_Shape], PyTree]:
    """Return groups of matrices with equal shape and dtype, and a mask of all other leaves.

    If only one matrix has a shape, this matrix is one of the other leaves.
    """
    replicas = axes.size(names) if names else 1
    groups: dict[object, dict[int, Path]] = {}
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    for i, (path, x) in enumerate(leaves):
        if jnp.ndim(x) == 2 and x.size and jnp.issubdtype(x.dtype, jnp.floating):
            groups.setdefault((x.shape, trees.wide_dtype(x)), {})[i] = path
    several = [[*zip(*paths.items(), strict=True)] for paths in groups.values() if len(paths) > 1]
    shapes = [_Shape([*i], x[0], names, replicas, -(-len(i) // replicas)) for i, x in several]
    if leaves and not shapes:
        findings.of_part(_WHO, "not_distributed", tree)
    matrices = {i for shape in shapes for i in shape.indices}
    return shapes, treedef.unflatten([i not in matrices for i in range(len(leaves))])


def _view(params: PyTree, shapes: Sequence[_Shape], others: PyTree) -> Distributed:
    """Return the params that the inner optimizer of this replica receives."""
    chosen = (tuple(x.chosen(jax.tree.leaves(params))) for x in shapes)
    return Distributed(tuple(chosen), trees.masked(params, others))


def _packed(state: PyTree, names: Names) -> PyTree:
    """Stack the arrays of all matrices of a shape, and put the stack in a ``PerReplica``."""
    nodes, treedef = jax.tree.flatten(state, is_leaf=_is_distributed)
    for k, node in enumerate(nodes):
        if _is_distributed(node):
            stacks = [jax.tree.map(lambda *slots: jnp.stack(slots), *x) for x in node.by_shape]
            parts = (PerReplica(axes.to_varying(x, names)) for x in stacks)
            nodes[k] = node._replace(by_shape=tuple(parts))
    return treedef.unflatten(nodes)


def _unpacked(state: PyTree, shapes: Sequence[_Shape]) -> PyTree:
    """Invert ``_packed``; refuse a state for another number of replicas."""
    slots = [shape.slots for shape in shapes]
    nodes, treedef = jax.tree.flatten(state, is_leaf=_is_distributed)
    for k, parts in ((k, x.by_shape) for k, x in enumerate(nodes) if _is_distributed(x)):
        got = [[len(x) for x in jax.tree.leaves(part)] for part in parts]
        if len(got) != len(slots) or any({*g} - {n} for g, n in zip(got, slots, strict=True)):
            allowed = f"a state with {slots} matrices of each shape on a replica"
            hint = "Use stack_replicas(tx.init(params), n) or reshard_state(state, n)."
            raise ValueError(checks.message(_WHO, "state", allowed, got, hint))
        pairs = zip(parts, slots, strict=True)
        by_slot = [tuple(jax.tree.map(itemgetter(i), x.local) for i in range(n)) for x, n in pairs]
        nodes[k] = nodes[k]._replace(by_shape=tuple(by_slot))
    return treedef.unflatten(nodes)


def _require_independent(
    tx: gate.Extended, params: PyTree, state: PyTree, view: Distributed, shapes: Sequence[_Shape]
) -> None:
    """Refuse an optimizer if the update of a matrix depends on its path or on other matrices."""
    # ``params`` and ``view`` have the same params at different paths. So a comparison of the states
    # for both trees shows whether a part depends on paths.
    by_path = _parts_of_params(jax.eval_shape(tx.init, params), params) if shapes else {}
    by_slot = _parts_of_params(state, view)
    slot_of = {i: f"by_shape/{n}/0" for n, shape in enumerate(shapes) for i in shape.indices}
    allowed = "an optimizer that does not choose params by their paths"
    hint = "Choose params around by_shape: optax.partition({'muon': by_shape(muon), ...}, labels)."
    for i, (name, parts) in enumerate(by_path.items()):
        got = f"an optimizer that treats {name!r} according to this path"
        is_valid = parts == by_slot.get(slot_of.get(i, f"rest/{name}"))
        checks.require(is_valid, _WHO, "inner", got=got, allowed=allowed, hint=hint)
    # Two matrices of a shape are enough for this test, even if a replica owns only one matrix.
    two = view._replace(by_shape=tuple((slots[0], slots[0]) for slots in view.by_shape))
    matrices = {*range(len(jax.tree.leaves(two.by_shape)))}
    mixed = False
    for x in jax.tree.leaves(gate.sources(tx, two), is_leaf=_is_distributed):
        slots = [slot for shape in x.by_shape for slot in shape] if _is_distributed(x) else []
        facts = [(i, sources) for i, slot in enumerate(slots) for sources in jax.tree.leaves(slot)]
        rest = jax.tree.leaves(x.rest if _is_distributed(x) else x)
        mixed |= any(sources - {i} for i, sources in facts) or any(matrices & x for x in rest)
    got = "an optimizer that reads several gradients"
    allowed = "an optimizer that computes the update of a matrix from the gradient of this matrix"
    hint = "Clip each tensor: use boostax.model.adagc() instead of optax.clip_by_global_norm."
    checks.require(not mixed, _WHO, "inner", got=got, allowed=allowed, hint=hint)


def _parts_of_params(state: PyTree, params: PyTree) -> dict[str, set[str]]:
    """Map the path of each param to the parts of the state that have an array for this param."""
    parts: dict[str, set[str]] = {name: set() for name in trees.names(params)}
    for name in trees.names(state):
        # The name of a moment ends with the path of its param. The longest such path counts.
        ends = (name[i:] for i in range(len(name)) if i == 0 or name[i - 1] == "/")
        end = next(filter(parts.__contains__, ends), None)
        if end is not None:
            parts[end].add(name.removesuffix(end))
    return parts


@reduction
def by_shape(
    inner: optax.GradientTransformation, *, axis_name: axes.AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Run ``inner`` (Muon) for each matrix on only one replica, and gather the updates.

    With ``chain(all_reduce("data"), muon)``, every replica orthogonalises every matrix. Instead,
    ``by_shape`` stacks the local gradients of all matrices with the same shape. A reduce-scatter
    returns the mean of each gradient to the replica that owns the matrix. Each replica runs
    ``inner`` on the matrices that it owns, and one all-gather collects all updates of a shape:

    .. math::
      u_i = \text{inner}\Bigl(\tfrac1n \sum_{s=1}^{n} g_{s,i}\Bigr)
      \text{ on replica } \lfloor i / \lceil c/n \rceil \rfloor, \quad i = 0 \dots c-1 .

    The updates equal those of ``chain(all_reduce("data"), muon)``. Use ``by_shape`` in place of
    both parts of this chain, inside gates:
    ``dynamic_loss_scale(accumulate(by_shape(optax.contrib.muon(0.02)), 8))``.

    Floating-point leaves of two dimensions are distributed if at least two such leaves have the
    same shape and, after promotion to at least f32, the same dtype. All other leaves, including
    stacks of layers ``[layers, m, n]``, are averaged as by ``all_reduce``, and updated by every
    replica. One warning reports that no matrix is distributed.

    Args:
      inner: an optimizer without collectives or gates that computes the update of a matrix only
        from the gradient of this matrix: ``optax.contrib.muon``, ``lamb``, ``adafactor``. The
        optimizer receives matrices without their paths, so a mask or partition by path must be
        around ``by_shape``.
      axis_name: mesh axis, or a tuple of axes, of the surrounding ``shard_map`` or ``pmap``.
        ``None`` means the axis of the surrounding ``make_train_step`` or ``on_mesh``.

    Returns:
      A transformation with a ``ByShapeState``. ``stack_replicas`` and ``reshard_state`` distribute
      the moments without rounding. Cost for c matrices of a shape on n replicas: the arithmetic and
      the moments of ``ceil(c/n)`` matrices; a reduce-scatter in f32 or wider, and an all-gather in
      the dtype of the updates; two temporary copies of the matrices, one after the other. The two
      collectives together send the bytes of a ring all-reduce times ``n ceil(c/n) / c``, because
      the ``c`` matrices are padded with zeros to ``n ceil(c/n)`` matrices. If this factor is above
      2, gradients and updates are all-reduced instead, with a factor of 2. If params are sharded
      over the replicas (FSDP) and ``inner`` reads params, the params are also gathered. If params
      are sharded over another axis (tensor parallel), XLA shards or repeats the arithmetic.

    Raises:
      ValueError, TypeError: an argument out of range; ``init`` with an ``inner`` that reads several
        gradients for one update, such as a clip by the global norm, or whose state for a param
        depends on the param's path; at trace time, an unbound axis, already reduced or integer
        gradients, a state for another number of replicas.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.by_shape(optax.contrib.muon(1.0), axis_name="data")
      >>> params = {"q": jnp.eye(4), "k": jnp.eye(4), "bias": jnp.zeros(4)}
      >>> step = jax.vmap(lambda g: tx.update(g, tx.init(params), params), axis_name="data")
      >>> updates, state = jax.jit(step)(jax.tree.map(lambda x: jnp.ones((2, *x.shape)), params))
      >>> updates["q"].shape, state.distributed_items()[-1][0].local.shape  # of both; of its own
      ((2, 4, 4), (2, 1, 4, 4))

    References:
      Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/, 2024. Ahn et al., Dion,
      https://arxiv.org/abs/2504.05295, 2025, whose code distributes matrices of one shape in
      the same way.
    """
    tx = checks.transformation(_WHO, "inner", inner)
    gate.refuse_gates(_WHO, [gate.gate_of(inner)])
    names = axes.canonical(_WHO, axis_name)

    def init_fn(params: PyTree) -> ByShapeState:
        try:
            axes.require_bound(names, _WHO)
            shapes, others = _shapes(params, names)
        except ValueError:
            # Outside the mapped function, a single replica has all matrices.
            shapes, others = _shapes(params, ())
        wide = trees.at_least_float32(params)
        view = _view(wide, shapes, others)
        state = gate.init_optimizer(_WHO, tx, view)
        _require_independent(tx, wide, state, view, shapes)
        paths = [zlib.crc32(name.encode()) for name in trees.names(params)]
        order = [jnp.array([paths[i] for i in shape.indices], jnp.uint32) for shape in shapes]
        return ByShapeState(tuple(order), _packed(state, names))

    @describe(_WHO, "delta", names, inner={"inner_state": tx})
    def update_fn(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Stepped:
        axes.require_local(updates, names, _WHO)
        leaves, treedef = jax.tree.flatten(updates)
        shapes, others = _shapes(updates, names)
        wide = trees.at_least_float32(updates)
        means = all_reduce(names).update(trees.masked(wide, others), optax.EmptyState())[0]
        owned = tuple(tuple(x.means(jax.tree.leaves(wide))) for x in shapes)
        params = trees.at_least_float32(params)
        local = None if params is None else _view(params, shapes, others)
        # These arguments describe all params, but a replica's optimizer receives only some params.
        extra = {name: x for name, x in extra.items() if name not in ("value_fn", "obj_fn", "grad")}
        old = _unpacked(state.inner_state, shapes)
        deltas, inner_state = tx.update(Distributed(owned, means), old, local, **extra)
        inner_state = axes.unify(trees.cast_like(inner_state, old), old)
        by_index = dict[int, jax.Array]()
        for shape, rows in zip(shapes, deltas.by_shape, strict=True):
            dtype = jnp.result_type(*[leaves[i] for i in shape.indices])
            by_index |= zip(shape.indices, shape.gathered(rows, dtype), strict=True)
        rest = iter(jax.tree.leaves(deltas.rest))
        result = [by_index[i] if i in by_index else next(rest) for i in range(len(leaves))]
        result = trees.cast_like(treedef.unflatten(result), updates)
        return result, ByShapeState(state.order, _packed(inner_state, names))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
