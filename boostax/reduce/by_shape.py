# SPDX-License-Identifier: Apache-2.0
"""Distribute matrices over replicas: each orthogonalises 1/n of them, and gathers all updates."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from boostax._core import axes, checks, gate, trees
from boostax._core.describe import Stepped, describe
from boostax._core.replicas import PerReplica
from boostax._core.types import PyTree
from boostax.reduce import collectives
from boostax.reduce.codec import Arrays, Names
from boostax.reduce.mean import all_reduce, reduction
from boostax.reduce.on_shards import on_rows

_WHO = "by_shape"
# Extra arguments about all params, while a replica's optimizer gets a part of the params.
_OF_PARAMS = "value_fn", "obj_fn", "grad"


class Dealt(NamedTuple):
    """The tree of params that ``by_shape``'s inner optimizer gets on a replica, or of its moments.

    Attributes:
      by_shape: for each shape the matrices that the replica owns; in a state, a ``PerReplica`` of
        their stack.
      rest: the other leaves at their own paths, with ``optax.MaskedNode`` for the matrices.
    """

    by_shape: tuple[Any, ...]
    rest: PyTree


class ByShapeState(NamedTuple):
    """State of ``by_shape``.

    Attributes:
      order: for each shape, u32 ``[matrices]``, CRC-32 of the matrices' paths, for
        ``migrate_state``: matrix ``i`` is in slot ``i % slots`` of replica ``i // slots``.
      inner_state: the state of the inner optimizer. Its moments, where shaped like the params, are
        a tree with arrays ``[slots, ...]`` for the matrices that the replica owns.
    """

    order: tuple[jax.Array, ...]
    inner_state: PyTree

    def distributed_items(self) -> list[tuple[PerReplica, int]]:
        """Return the distributed parts and the number of their items, for ``reshard_state``."""
        views, counts = trees.find(self.inner_state, _is_dealt), [*map(len, self.order)]
        return [pair for x in views for pair in zip(x.by_shape, counts, strict=True)]


class _Shape(NamedTuple):
    """The matrices of one shape, and the replicas that share them.

    Attributes:
      indices: their indices among the leaves.
      path: the path of the first matrix.
      names: the replica axes; empty for a single replica, if no axis is bound.
    """

    indices: list[int]
    path: tuple[Any, ...]
    names: Names

    @property
    def slots(self) -> int:
        """The number of matrices that each replica owns."""
        return -(-len(self.indices) // self.replicas)

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return axes.size(self.names) if self.names else 1

    @property
    def few(self) -> bool:
        """Whether padding to full slots would more than double the bytes."""
        return 2 * len(self.indices) < self.slots * self.replicas

    def chosen(self, leaves: Any) -> Arrays:
        """Select this replica's matrices from leaves that are equal on all replicas."""
        mine = [leaves[i] for i in self.indices]
        if self.replicas == 1:
            return mine
        here, mine = axes.index(self.names), axes.to_varying(mine, self.names)
        mine += [mine[-1]] * (self.slots * self.replicas - len(mine))
        return [lax.select_n(here, *mine[i :: self.slots]) for i in range(self.slots)]

    def means(self, leaves: Arrays) -> Arrays:
        """Return the means of the matrices that this replica owns."""
        if self.few:
            return self.chosen({i: lax.pmean(leaves[i], self.names) for i in self.indices})
        mine = [leaves[i] for i in self.indices]
        spare = self.slots * self.replicas - len(mine)

        def deal(mine: Arrays) -> jax.Array:
            stack = jnp.stack([*mine, *[jnp.zeros_like(mine[0])] * spare])
            return collectives.scatter(stack, self.names, 0) / self.replicas

        return list(on_rows(_WHO, self.names, self.path, deal, mine, scatter=True))

    def gathered(self, rows: Arrays, dtype: Any) -> Arrays:
        """Gather each replica's matrices; the result is equal on all replicas."""
        rows = [x.astype(dtype) for x in rows]
        if self.few:
            here = axes.index(self.names)
            mine = [jnp.where(here == i, rows[0], 0) for i, _ in enumerate(self.indices)]
            return [lax.psum(x, self.names) for x in mine]
        count = len(self.indices)
        call = lambda rows: list(collectives.gather_along(rows, self.names, 0)[:count])  # noqa: E731
        return on_rows(_WHO, self.names, self.path, call, jnp.stack(rows), scatter=False)


def _is_dealt(node: Any) -> bool:
    return isinstance(node, Dealt)


def _shapes(tree: PyTree, names: Names) -> list[_Shape]:
    """Group the matrices by shape and dtype; a single matrix of a shape is not distributed."""
    found: dict[Any, dict[int, Any]] = {}
    for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        if jnp.ndim(x) == 2 and x.size and jnp.issubdtype(x.dtype, jnp.floating):
            found.setdefault((x.shape, trees.wide_dtype(x)), {})[i] = path
    several = [x for x in found.values() if len(x) > 1]
    return [_Shape([*x], next(iter(x.values())), names) for x in several]


def _rest(tree: PyTree, shapes: Sequence[_Shape]) -> PyTree:
    """Return the leaves that are not distributed."""
    leaves, treedef = jax.tree.flatten(tree)
    taken = {i for shape in shapes for i in shape.indices}
    return trees.masked(tree, treedef.unflatten([i not in taken for i, _ in enumerate(leaves)]))


def _chosen(tree: PyTree, shapes: Sequence[_Shape]) -> Dealt:
    """Return this replica's matrices of a tree that is equal on all replicas, and the rest."""
    leaves = jax.tree.leaves(tree)
    return Dealt(tuple(tuple(x.chosen(leaves)) for x in shapes), _rest(tree, shapes))


def _changed(change: Callable[[Any], Sequence[Any]], state: PyTree) -> PyTree:
    """Apply ``change`` to the arrays of the distributed matrices in a state."""
    new = lambda x: x._replace(by_shape=tuple(change(x.by_shape))) if _is_dealt(x) else x  # noqa: E731
    return jax.tree.map(new, state, is_leaf=_is_dealt)


def _packed(state: PyTree, names: Names) -> PyTree:
    """Stack the arrays of one shape's matrices in a ``PerReplica``."""
    stack = lambda *slots: axes.to_varying(jnp.stack(slots), names)  # noqa: E731
    return _changed(lambda parts: [PerReplica(jax.tree.map(stack, *x)) for x in parts], state)


def _unpacked(state: PyTree, shapes: Sequence[_Shape]) -> PyTree:
    """Invert ``_packed``; refuse a state for another number of replicas."""

    def unpack(parts: Any) -> list[Any]:
        slots = [shape.slots for shape in shapes]
        got = [[len(x) for x in jax.tree.leaves(part)] for part in parts]
        fits = len(got) == len(slots) and all({*g} <= {n} for g, n in zip(got, slots, strict=True))
        hint = "Use stack_replicas(tx.init(params), n) or boostax.reshard_state(state, n)."
        allowed = f"one with {slots} matrices of each shape on a replica"
        checks.require(fits, _WHO, "state", got=got, allowed=allowed, hint=hint)
        one = lambda part, i: jax.tree.map(lambda x: x[i], part.local)  # noqa: E731
        return [tuple(one(x, i) for i in range(n)) for x, n in zip(parts, slots, strict=True)]

    return _changed(unpack, state)


def _require_apart(tx: gate.Extended, view: Dealt) -> None:
    """Refuse an optimizer whose update of a matrix depends on other matrices."""
    # Two matrices of a shape are enough for this test, even if a replica owns only one.
    two = view._replace(by_shape=tuple((slots[0], slots[0]) for slots in view.by_shape))
    matrices = {*range(len(jax.tree.leaves(two.by_shape)))}
    mixed = False
    for x in jax.tree.leaves(gate.sources(tx, two), is_leaf=_is_dealt):
        slots = [slot for shape in x.by_shape for slot in shape] if _is_dealt(x) else []
        own = [facts <= {i} for i, slot in enumerate(slots) for facts in jax.tree.leaves(slot)]
        rest = jax.tree.leaves(x.rest if _is_dealt(x) else x)
        mixed |= not all(own) or not all(map(matrices.isdisjoint, rest))
    allowed = "an optimizer that computes the update of a matrix from its own gradient"
    hint = "Clip each tensor by its own norm: boostax.model.adagc() for optax.clip_by_global_norm."
    got = "one that reads several gradients"
    checks.require(not mixed, _WHO, "inner", got=got, allowed=allowed, hint=hint)


def _require_pathless(
    tx: gate.Extended, params: PyTree, state: PyTree, view: Dealt, shapes: Sequence[_Shape]
) -> None:
    """Refuse an optimizer that chooses params by their paths, which are others in a ``Dealt``."""
    own = _kept(jax.eval_shape(tx.init, params), params) if shapes else {}
    dealt = _kept(state, view)
    slots = {i: f"by_shape/{n}/0" for n, shape in enumerate(shapes) for i in shape.indices}
    allowed = "an optimizer that chooses params without their paths"
    hint = "Put the choice outside: optax.partition({'muon': by_shape(muon), ...}, labels)."
    for i, (name, kept) in enumerate(own.items()):
        got = f"one that treats {name!r} otherwise where it has its path"
        fits = kept == dealt.get(slots.get(i, f"rest/{name}"))
        checks.require(fits, _WHO, "inner", got=got, allowed=allowed, hint=hint)


def _kept(state: PyTree, params: PyTree) -> dict[str, set[str]]:
    """Return for the path of each param the parts of the state that have an array for it."""
    found: dict[str, set[str]] = {name: set() for name in trees.names(params)}
    for name in trees.names(state):
        # The longest end that is the path of a param.
        ends = (name[at:] for at in range(len(name)) if at == 0 or name[at - 1] == "/")
        end = next(filter(found.__contains__, ends), None)
        if end is not None:
            found[end].add(name.removesuffix(end))
    return found


@reduction
def by_shape(
    inner: optax.GradientTransformation, axis_name: axes.AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Run ``inner`` (Muon) for each matrix on only one replica, and gather the updates.

    ``chain(all_reduce("data"), muon)`` orthogonalises every matrix on every replica. ``by_shape``
    stacks the local gradients of the matrices of one shape and reduce-scatters them, which gives
    each owner the mean. Each replica runs ``inner`` on the matrices that it owns, and one
    all-gather collects all updates of a shape:

    .. math::
      u_i = \text{inner}\Bigl(\tfrac1n \sum_{s=1}^{n} g_{s,i}\Bigr)
      \text{ on replica } \lfloor i / \lceil c/n \rceil \rfloor, \quad i = 0 \dots c-1 .

    The result equals that of the chain. Put ``by_shape`` in place of reduction and optimizer,
    inside gates: ``dynamic_loss_scale(accumulate(by_shape(optax.contrib.muon(0.02)), 8))``.

    Floating-point leaves of two dimensions are distributed if at least two have the same shape, and
    the same dtype in f32 or wider. All other leaves, including stacks of layers ``[layers, m, n]``,
    are averaged as by ``all_reduce``, and every replica updates them.

    Args:
      inner: an optimizer without collectives or gates that computes the update of a matrix from its
        own gradient: ``optax.contrib.muon``, ``lamb``, ``adafactor``. It gets matrices without
        their paths, so put a mask or partition by path around ``by_shape``.
      axis_name: mesh axis, or a tuple of axes, of the surrounding ``shard_map`` or ``pmap``.
        ``None`` means the axis of the surrounding ``make_train_step`` or ``on_mesh``.

    Returns:
      A transformation with a ``ByShapeState``. ``stack_replicas`` and ``reshard_state``
      distribute its moments without rounding. Cost for c matrices of a shape on n replicas: the
      arithmetic and the moments of ``ceil(c/n)`` matrices; a reduce-scatter in f32 or wider and an
      all-gather in the dtype of the updates, together the bytes of a ring all-reduce times ``n
      ceil(c/n) / c``, because the last replicas' slots are padded with zeros; two temporary copies
      of the matrices, one after the other. If that factor is above 2, gradients and updates are
      all-reduced instead, which is a factor of 2. Params that are sharded over the replicas (FSDP)
      are also gathered if ``inner`` reads them; for another axis (tensor parallel), XLA shards or
      repeats the arithmetic.

    Raises:
      ValueError, TypeError: an argument out of range; ``init`` with an ``inner`` that reads several
        gradients for one update, such as a clip by the global norm, or whose state of a param
        depends on its path; at trace time, an unbound axis, already reduced or integer gradients, a
        state for another number of replicas.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = boostax.by_shape(optax.contrib.muon(1.0), "data")
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
        shapes = _shapes(params, names if collectives.are_bound(names) else ())
        view = _chosen(trees.at_least_float32(params), shapes)
        state = gate.init_optimizer(_WHO, tx, view)
        _require_pathless(tx, trees.at_least_float32(params), state, view, shapes)
        _require_apart(tx, view)
        paths = [zlib.crc32(name.encode()) for name in trees.names(params)]
        order = [jnp.array([paths[i] for i in shape.indices], jnp.uint32) for shape in shapes]
        return ByShapeState(tuple(order), _packed(state, names))

    @describe(_WHO, "delta", names, inner={"inner_state": tx})
    def update_fn(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Stepped:
        axes.require_local(updates, names, _WHO)
        leaves, treedef = jax.tree.flatten(updates)
        shapes, wide = _shapes(updates, names), trees.at_least_float32(updates)
        means = all_reduce(names).update(_rest(wide, shapes), optax.EmptyState())[0]
        owned = tuple(tuple(x.means(jax.tree.leaves(wide))) for x in shapes)
        own = None if params is None else _chosen(trees.at_least_float32(params), shapes)
        extra = {name: x for name, x in extra.items() if name not in _OF_PARAMS}
        kept = _unpacked(state.inner_state, shapes)
        made, new = tx.update(Dealt(owned, means), kept, own, **extra)
        new = axes.unify(trees.cast_like(new, kept), kept)
        found = dict[int, jax.Array]()
        for shape, rows in zip(shapes, made.by_shape, strict=True):
            dtype = jnp.result_type(*[leaves[i] for i in shape.indices])
            found |= zip(shape.indices, shape.gathered(rows, dtype), strict=True)
        others = iter(jax.tree.leaves(made.rest))
        result = [found[i] if i in found else next(others) for i, _ in enumerate(leaves)]
        result = trees.cast_like(treedef.unflatten(result), updates)
        return result, ByShapeState(state.order, _packed(new, names))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
