# SPDX-License-Identifier: Apache-2.0
"""How the directions of a subspace are stored, and the two products in which they are used.

Both go leaf by leaf, so that no leaf loses its sharding and nothing is flattened. Narrow storage is
decoded inside the sum that reads it: XLA fuses the two, and no wide copy of the components exists.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax._core import axes, checks, trees
from boostax.subspace import algebra
from boostax.subspace.basis import Basis

PyTree = Any
BLOCK = 64


class Int8Components(NamedTuple):
    """Components in one byte an element.

    Attributes:
      codes: tree like the params of i8 ``(k, *leaf.shape)``.
      scales: the same of f32 ``(k, *leaf.shape[:-1], blocks)``: what 1 stands for in each block of
        64 elements of the last dimension.
    """

    codes: PyTree
    scales: PyTree


Components = PyTree | Int8Components


def stored(components: PyTree, dtype: Any) -> Components:
    """A copy of components in a floating dtype, in ``"int8"`` blocks, or (``None``) as they are."""
    if isinstance(components, Int8Components) or dtype is None:
        return jax.tree.map(lambda p: jnp.array(p, copy=True), components)
    if dtype != "int8":
        narrow = jnp.dtype(dtype)
        return jax.tree.map(
            lambda p: jnp.array(p, algebra.stored_dtype(p, narrow), copy=True), components
        )
    for name, leaf in trees.named(components):
        if jnp.iscomplexobj(leaf):
            raise TypeError(
                "dim_reduce: dtype must be a floating one with complex components, got 'int8' at "
                f"{name or 'the root'!r}. Blocks are of real numbers."
            )
    scales = jax.tree.map(_scales, components)
    return Int8Components(jax.tree.map(_codes, components, scales), scales)


def shapes(components: Components) -> PyTree:
    """A tree like the params of the arrays that have the shape ``(k, *leaf.shape)``."""
    return components.codes if isinstance(components, Int8Components) else components


def restricted(components: Components, params: PyTree) -> Components:
    """Components without what is masked in the params."""
    hidden = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731

    def cut(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda p, x: p if hidden(p) else x, params, tree, is_leaf=hidden)

    if isinstance(components, Int8Components):
        return Int8Components(cut(components.codes), cut(components.scales))
    return cut(components)


def project(
    components: Components, tree: PyTree, shard_axes: tuple[str, ...] = (), who: str = "project"
) -> jax.Array:
    """Coordinates ``(k,)`` of a tree like the params: its inner products with the components.

    Cost: one read of the components; of sharded leaves ``4k`` bytes are summed over the devices.
    """

    def part(p: jax.Array, narrow: bool, g: Any) -> jax.Array:
        rows = algebra.wide(g)[None]
        if not narrow:
            return algebra.dot(p, rows)[:, 0]
        product = p * rows.conj()
        return product.real.sum(tuple(range(1, product.ndim)))

    parts = jax.tree.leaves(_map(part, components, tree))
    return axes.shard_total(parts, shard_axes, who) if parts else jnp.zeros(1)


def lift(components: Components, coefficients: jax.Array) -> PyTree:
    """The tree like the params, f32 or wider, that has those coordinates: a sum of components.

    Coefficients of ``(k, c)`` give ``c`` sums at once, in leaves of ``(c, *leaf.shape)``. Cost: one
    read of the components; nothing crosses the devices.
    """
    columns = coefficients.reshape(coefficients.shape[0], -1)

    def total(p: jax.Array, narrow: bool) -> jax.Array:
        if not narrow:
            sums = algebra.mix(columns, p)
        else:
            each = columns.T.astype(p.dtype)
            sums = jnp.stack([(algebra.along_rows(c, p) * p).sum(0) for c in each])
        return sums[0] if coefficients.ndim == 1 else sums

    return _map(total, components)


def row(components: Components, index: jax.Array) -> PyTree:
    """One of the components, f32 or wider."""
    one = jax.tree.map(lambda p: jax.lax.dynamic_index_in_dim(p, index), components)
    return _map(lambda rows, narrow: jnp.squeeze(rows, 0), one)


def count(components: Components) -> int:
    """How many there are; of no params one, whose coordinate stays 0."""
    return next((x.shape[0] for x in jax.tree.leaves(shapes(components))), 1)


def random_basis(params: PyTree, n_components: int, *, seed: int = 0) -> PyTree:
    """Orthonormal components drawn at random: what a basis must be better than to be of use.

    Args:
      params: a tree of arrays.
      n_components: how many directions, at most the number of params.
      seed: of the draws.

    Returns:
      A tree of ``(n_components, *leaf.shape)``. Cost: twice as many params.

    Raises:
      ValueError, TypeError: ``n_components`` out of range.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> boostax.subspace.random_basis({"w": jnp.zeros((3, 4))}, 2)["w"].shape
      (2, 3, 4)
    """
    who, hint = "random_basis", "It is the dimension of the subspace; 32 to 40 are usual."
    checks.positive_int(who, "n_components", n_components, hint)
    leaves, treedef = jax.tree.flatten(params)
    size = sum(np.size(x) for x in leaves)
    if n_components > size:
        allowed = f"at most the number of params, {size}"
        raise ValueError(checks.message(who, "n_components", allowed, n_components, hint))
    key = jax.random.key(seed)

    def draw(i: int, x: Any) -> jax.Array:
        shape, dtype = (n_components, *np.shape(x)), algebra.compute_dtype(x)
        return jax.random.normal(jax.random.fold_in(key, i), shape, dtype)

    rows = [draw(i, x) for i, x in enumerate(leaves)]
    return algebra.orthonormal(jax.tree.unflatten(treedef, rows))


class Opened(NamedTuple):
    """What there is in what a caller calls a basis.

    Attributes:
      rows: the components.
      explained: the share of the variance in their span; ``None`` if nobody said.
      mean: a tree like the params; ``None`` likewise.
    """

    rows: Components
    explained: Any
    mean: PyTree


def given(who: str, basis: Any, params: PyTree, dtype: Any) -> Opened:
    """From what the caller calls a basis: what to keep, the components as they are to be stored.

    Raises:
      ValueError: they do not fit the params.
    """
    if not jax.tree.leaves(params):
        # optax.tree.map_params asks with no params for the structure of the state.
        rows, explained, _ = _opened(params if callable(basis) else basis)
        coded = isinstance(rows, Int8Components)
        rows = Int8Components(params, params) if coded else stored(params, dtype)
        return Opened(rows, explained, None)
    rows, explained, mean = _opened(basis(params) if callable(basis) else basis)
    hidden = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    if any(map(hidden, jax.tree.leaves(params, is_leaf=hidden))):
        rows, mean = restricted(rows, params), None if mean is None else restricted(mean, params)
    _check(who, rows, params)
    return Opened(stored(rows, dtype), explained, mean)


def exchanged(who: str, old: Components, basis: Any) -> tuple[Components, Any]:
    """The same of a basis that takes the place of another, stored as that is.

    Raises:
      ValueError: it has another shape.
    """
    rows, explained, _ = _opened(basis)
    shaped = lambda tree: jax.tree.map(jnp.shape, shapes(tree))  # noqa: E731
    was, now = shaped(old), shaped(rows)
    if was != now:
        hint = "A compiled step serves both only if they are alike."
        raise ValueError(checks.message(who, "basis", f"of the shapes {was}", now, hint))
    if isinstance(old, Int8Components):
        return stored(rows, "int8"), explained
    if isinstance(rows, Int8Components):
        rows = jax.tree.map(_decoded, rows.codes, rows.scales)
    return jax.tree.map(lambda p, q: jnp.array(p, q.dtype, copy=True), rows, old), explained


def _opened(basis: Any) -> Opened:
    if isinstance(basis, Basis):
        return Opened(basis.components, jnp.sum(basis.explained), basis.mean)
    return Opened(basis, None, None)


def replace_basis(opt_state: PyTree, basis: Any) -> PyTree:
    """The state with another basis in it: what was learnt of the curvature belongs to the old one.

    Args:
      opt_state: any state that holds one of ``dim_reduce`` or ``subspace_params``.
      basis: ``pca_basis(...)`` or its components, as many as before. They are stored as the old
        ones are.

    Returns:
      The state, of the same shapes and dtypes, so that a compiled step serves both; counters and
      the residual optimizer's state stay. It can be called inside ``jit``. Cost: one copy of the
      basis.

    Raises:
      ValueError: nothing in the state has a basis, or the new one does not fit.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> state = boostax.dim_reduce(jnp.eye(2, 4)).init(jnp.zeros(4))
      >>> boostax.subspace.replace_basis(state, jnp.eye(4)[2:]).basis.tolist()
      [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    """
    who = "replace_basis"
    has_basis = lambda node: isinstance(node, tuple) and hasattr(node, "with_basis")  # noqa: E731
    if not trees.find(opt_state, has_basis):
        raise ValueError(
            f"{who}: opt_state must hold a state of dim_reduce or subspace_params, got none. Put "
            "boostax.dim_reduce into the chain."
        )
    put = lambda node: node.with_basis(basis) if has_basis(node) else node  # noqa: E731
    return jax.tree.map(put, opt_state, is_leaf=has_basis)


def check_dtype(who: str, dtype: Any, shard_axes: tuple[str, ...]) -> Any:
    """``None``, ``"int8"`` or a floating dtype."""
    if isinstance(dtype, str) and dtype == "int8" and shard_axes:
        hint = "Blocks would lie across shards; 'bfloat16' has none."
        raise ValueError(
            checks.message(who, "dtype", "a floating one with shard_axes", dtype, hint)
        )
    if dtype is None or (isinstance(dtype, str) and dtype == "int8"):
        return dtype
    return checks.floating_dtype(who, "dtype", dtype)


def coordinate_dtype(components: Components) -> np.dtype[Any]:
    """In which coordinates are: f32, or f64 with such components."""
    wide = [jnp.finfo(algebra.compute_dtype(x)).dtype for x in jax.tree.leaves(shapes(components))]
    return jnp.result_type(jnp.float32, *wide)


def _map(fn: Callable[..., Any], components: Components, *rest: PyTree) -> PyTree:
    """``fn`` of each stacked leaf in f32 or wider, and whether it is stored in less."""
    if isinstance(components, Int8Components):
        decoded = lambda q, s, *others: fn(_decoded(q, s), True, *others)  # noqa: E731
        return jax.tree.map(decoded, *components, *rest)

    def on_leaf(p: jax.Array, *others: Any) -> Any:
        return fn(algebra.wide(p), p.dtype != algebra.compute_dtype(p), *others)

    return jax.tree.map(on_leaf, components, *rest)


def _blocks(p: jax.Array) -> jax.Array:
    """The last dimension (of 1 if there is none) in blocks, filled up with zeros."""
    p = p[..., None] if p.ndim == 1 else p
    last = p.shape[-1]
    wide = min(BLOCK, max(last, 1))
    fill = -last % wide
    padded = jnp.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, fill)])
    return padded.reshape(*p.shape[:-1], (last + fill) // wide, wide)


def _scales(p: Any) -> jax.Array:
    blocks = _blocks(algebra.wide(p))
    return jnp.abs(blocks).max(-1, initial=0.0).astype(jnp.float32) / 127.0


def _codes(p: Any, scales: jax.Array) -> jax.Array:
    unit = jnp.where(scales > 0, scales, 1.0)
    codes = jnp.round(algebra.wide(p) / _spread(unit, p).astype(algebra.compute_dtype(p)))
    return jnp.clip(codes, -127, 127).astype(jnp.int8)


def _decoded(codes: jax.Array, scales: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32) * _spread(scales, codes)


def _spread(scales: jax.Array, like: Any) -> jax.Array:
    """The scale of each element."""
    if like.ndim == 1:
        return scales[..., 0]
    last = like.shape[-1]
    each = jnp.broadcast_to(scales[..., None], (*scales.shape, min(BLOCK, max(last, 1))))
    return each.reshape(*scales.shape[:-1], -1)[..., :last]


def _check(who: str, components: Components, params: PyTree) -> None:
    """Refuse components that do not fit the params."""
    hint = "boostax.subspace.pca_basis(snapshots, k) of the same params is one."
    tree = shapes(components)
    if jax.tree.structure(tree) != jax.tree.structure(params):
        raise ValueError(
            f"{who}: basis must be a tree like the params, got {jax.tree.structure(tree)} for "
            f"{jax.tree.structure(params)}. {hint}"
        )
    counts: set[int] = set()
    for (name, rows), leaf in zip(trees.named(tree), jax.tree.leaves(params), strict=True):
        if not np.ndim(rows) or np.shape(rows)[1:] != np.shape(leaf):
            raise ValueError(
                f"{who}: basis must have the shape (k, {', '.join(map(str, np.shape(leaf)))}) at "
                f"{name or 'the root'!r}, got {np.shape(rows)}. {hint}"
            )
        counts.add(np.shape(rows)[0])
    if len(counts) != 1:
        raise ValueError(
            f"{who}: basis must have the same number of rows in each leaf, got {sorted(counts)}. "
            + hint
        )
