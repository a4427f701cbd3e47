"""Principal components of snapshots of the params, leaf by leaf: no matrix of all params squared.

With the m snapshots as rows of ``X`` (m, n), all that is decomposed is m x m or m x k; the n-sized
work are products of ``X`` with thin matrices, which sum over leaves and leave each one its
sharding. The params are far larger than what training moves them by, so ``X`` is centred through
differences to one snapshot, and its Gram matrix is only where the search begins: it holds squares,
so in f32 it loses directions below 3e-4 of the largest, which a product with ``X`` itself finds.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import axes, checks
from boostax.subspace import algebra

PyTree = Any
Method = Literal["gram", "randomized"]
_F32 = np.dtype(np.float32)
_WHO = "pca_basis"
# Rows beyond k that carry what the first product missed, and products that follow it.
_SPARE = {"gram": 2, "randomized": 10}
_ROUNDS = {"gram": 2, "randomized": 3}


class Basis(NamedTuple):
    """Orthonormal directions in the space of the params.

    Attributes:
      components: tree like the params of ``(k, *leaf.shape)``, the widest first. Together a row of
        all leaves has norm 1, and its largest element is positive.
      mean: tree like the params, f32 or wider: the mean of the snapshots.
      explained: f32 ``(k,)``, the share of the variance along each.
    """

    components: PyTree
    mean: PyTree
    explained: jax.Array


class Gram(NamedTuple):
    """All pairs of snapshots in a ring buffer: what their inner products say, without an origin.

    Attributes:
      distances: ``(m, m)``, squared distances, f32 or wider. Inner products of anything centred
        follow from them, and they are exact where inner products of params would cancel.
    """

    distances: jax.Array


def pca_basis(
    snapshots: PyTree,
    n_components: int,
    *,
    method: Method = "gram",
    seed: int = 0,
    dtype: Any = None,
    stacked: bool | None = None,
) -> Basis:
    r"""The directions in which snapshots of the params differ most.

    For snapshots :math:`w_1 \dots w_m` and their mean these are the leading eigenvectors of the
    covariance, :math:`p_j = \sum_i v_{ij} (w_i - \bar w) / \sigma_j`, where

    .. math:: (w_i - \bar w) \cdot (w_l - \bar w) = \sum_j v_{ij} \sigma_j^2 v_{lj}

    is only m x m. ``"randomized"`` takes products with ``k + 10`` random directions instead, and
    three rounds of the power method, for snapshots by the hundred.

    The axis that is reduced is that of the params: ``n_components`` directions, each as large as
    they. Snapshots from late in a run give directions worth training in; the first ones differ by
    far the most, and use them up.

    Args:
      snapshots: a tree like the params of ``(m, *leaf.shape)``; or a list or an iterator of m trees
        like the params, which is stacked.
      n_components: how many directions, less than m.
      method: ``"gram"`` or ``"randomized"``.
      seed: of the random directions.
      dtype: in which components are stored; ``None`` for f32 or wider.
      stacked: whether ``snapshots`` is one tree; ``None`` takes a list to be many.

    Returns:
      A ``Basis``, orthonormal to 1e-5 before it is rounded to ``dtype``. Complex leaves count as
      pairs of reals. Cost: ``2mn(m + 4k)`` operations (``"randomized"``: ``14mn(k + 10)``), memory
      for ``k + 2`` (``k + 10``) params twice and m centred copies of the largest leaf (under
      ``jit`` of all leaves, at worst). Of sharded leaves only matrices of ``m x m`` or ``m x k``
      cross the devices, in f32. Outside ``jit`` those are decomposed on the host in f64.

    Raises:
      ValueError, TypeError: an argument out of range, or trees that do not match; outside ``jit``,
        snapshots that are not finite, or that differ in fewer than ``n_components`` directions
        beyond their rounding. Inside ``jit`` the components that are missing are zero.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> line = [{"w": jnp.array([5.0 + 3.0 * t, 4.0 * t])} for t in range(4)]
      >>> basis = boostax.subspace.pca_basis(line, 1)
      >>> basis.components["w"].round(3).tolist(), basis.mean["w"].tolist()
      ([[0.6000000238418579, 0.800000011920929]], [9.5, 6.0])

    References:
      Li et al., Low Dimensional Trajectory Hypothesis is True, https://arxiv.org/abs/2103.11154,
      2021. Halko et al., Finding structure with randomness, https://arxiv.org/abs/0909.4061, 2009.
    """
    checks.choice(_WHO, "method", method, ("gram", "randomized"), "'gram' is exact.")
    if stacked is None:
        stacked = not isinstance(snapshots, (list, Iterator))
    snapshots = snapshots if stacked else _stack(snapshots)
    m = _require(_WHO, snapshots, n_components)
    width = min(n_components + _SPARE[method], m - 1)
    if method == "gram":
        gram = algebra.total(jax.tree.map(algebra.centred_gram, snapshots))
        start = algebra.leading(gram, width)
    else:
        leaves, key = jax.tree.leaves(snapshots), jax.random.key(seed)
        start = algebra.total(
            [algebra.sketch(jax.random.fold_in(key, i), x, width) for i, x in enumerate(leaves)]
        )
        start = algebra.numpy(start).linalg.qr(algebra.finite(start))[0]
    return _refined(snapshots, start, n_components, _ROUNDS[method], dtype)


def pca_from_gram(gram: Gram, snapshots: PyTree, n_components: int, *, dtype: Any = None) -> Basis:
    r"""``pca_basis`` where all distances between the snapshots are known already.

    Centred inner products are :math:`-\tfrac12 J D J` with :math:`J = I - \tfrac1m 1 1^\top`.

    Args:
      gram: the distances, kept by ``updated_gram``.
      snapshots: the tree of ``(m, *leaf.shape)`` that they belong to; the order does not matter.
      n_components: how many directions, less than m.
      dtype: in which components are stored.

    Returns:
      The same as ``pca_basis``. Cost: ``8mnk`` operations.

    Raises:
      ValueError, TypeError: as ``pca_basis``.

    Example:
      >>> import jax.numpy as jnp
      >>> from boostax.subspace.basis import Gram, pca_from_gram, updated_gram
      >>> w, gram = jnp.array([[5.0, 0.0], [8.0, 4.0], [11.0, 8.0]]), Gram(jnp.zeros((3, 3)))
      >>> for slot in range(3):
      ...   gram = updated_gram(gram, w, w[slot], slot)
      >>> pca_from_gram(gram, w, 1).explained.round(3).tolist()
      [1.0]
    """
    m = _require("pca_from_gram", snapshots, n_components)
    if gram.distances.shape != (m, m):
        hint = "Both come from the same ring buffer."
        raise ValueError(
            checks.message("pca_from_gram", "gram", f"{m} x {m}", gram.distances.shape, hint)
        )
    d = algebra.total([gram.distances])
    centred = -0.5 * (d - d.mean(0) - d.mean(1)[:, None] + d.mean())
    start = algebra.leading(centred, min(n_components + _SPARE["gram"], m - 1))
    return _refined(snapshots, start, n_components, _ROUNDS["gram"], dtype)


def updated_gram(
    gram: Gram,
    snapshots: PyTree,
    snapshot: PyTree,
    slot: jax.Array | int,
    shard_axes: tuple[str, ...] = (),
) -> Gram:
    """The distances after ``snapshot`` was written to ``slot``: one row, and one column.

    Overwriting the oldest is how a window moves. Cost: one read of the buffer, no copy of it.
    """

    def row(x: jax.Array, new: jax.Array) -> jax.Array:
        # Not x[slot], which XLA would take from the buffer as it was before the write, and keep a
        # copy of it for that.
        gap = algebra.wide(x) - algebra.wide(new)[None]
        return jnp.sum(gap.real**2 + gap.imag**2, axis=tuple(range(1, x.ndim)))

    rows = jax.tree.leaves(jax.tree.map(row, snapshots, snapshot))
    new = axes.shard_total(rows, shard_axes, "record_trajectory").astype(gram.distances.dtype)
    return Gram(gram.distances.at[slot, :].set(new).at[:, slot].set(new))


def _stack(snapshots: Any) -> PyTree:
    """Trees read one at a time, stacked a leaf at a time."""
    columns: list[list[Any]] = []
    treedef = None
    for tree in snapshots:
        leaves, structure = jax.tree.flatten(tree)
        columns = [[] for _ in leaves] if treedef is None else columns
        treedef = structure if treedef is None else treedef
        fits = structure == treedef and all(
            not column or np.shape(x) == np.shape(column[0])
            for x, column in zip(leaves, columns, strict=True)
        )
        if not fits:
            raise ValueError(
                f"{_WHO}: snapshots must be trees of one structure and equal shapes, got others at "
                f"number {len(columns[0]) if columns else 0}. If this is one stacked tree whose "
                "root is a list, pass stacked=True."
            )
        for column, x in zip(columns, leaves, strict=True):
            column.append(x)
    stacks: list[Any] = []
    for column in columns:
        # NumPy's stay on the host, and go to the device a leaf at a time.
        host = all(isinstance(x, np.ndarray) for x in column)
        stacks.append(np.stack(column) if host else jnp.stack(column))
        column.clear()
    return None if treedef is None else jax.tree.unflatten(treedef, stacks)


def _require(who: str, snapshots: PyTree, n_components: int) -> int:
    """Check and return the number of snapshots."""
    hint = "It is the dimension of the subspace; 32 to 40 are usual."
    checks.positive_int(who, "n_components", n_components, hint)
    counts = sorted({np.shape(x)[:1] for x in jax.tree.leaves(snapshots)})
    if len(counts) != 1 or not counts[0]:
        allowed = "a tree of arrays with one leading dimension"
        hint = "Stack the snapshots of each leaf, or pass a list of trees."
        raise ValueError(checks.message(who, "snapshots", allowed, counts, hint))
    (m,) = counts[0]
    if n_components >= m:
        allowed = f"below the number of snapshots, {m}"
        hint = "m snapshots differ from their mean in m - 1 directions at most."
        raise ValueError(checks.message(who, "n_components", allowed, n_components, hint))
    return m


def _refined(snapshots: PyTree, u: Any, k: int, rounds: int, dtype: Any) -> Basis:
    """The components, from ``u`` (m, r) that spans about the right combinations of snapshots."""
    narrow = None if dtype is None else checks.floating_dtype(_WHO, "dtype", dtype)
    rows: PyTree = None
    s = turn = u
    for _ in range(rounds):
        start = u
        rows = algebra.orthonormal(
            jax.tree.map(lambda x, start=start: algebra.spanned(start, x), snapshots)
        )
        along = algebra.total(jax.tree.map(algebra.coordinates, snapshots, rows))
        u, s, turn = algebra.numpy(along).linalg.svd(along, full_matrices=False)
    np_ = algebra.numpy(s)
    rounding, total = algebra.total(jax.tree.map(algebra.spread, snapshots))
    eps = max(np.finfo(algebra.compute_dtype(x)).eps for x in jax.tree.leaves(snapshots))
    found = s > np_.sqrt(rounding) + eps * np_.sqrt(u.shape[0]) * s[0]
    if np_ is np and not found[:k].all():
        raise ValueError(
            f"{_WHO}: n_components must be at most {int(found.sum())}, the number of directions in "
            f"which these snapshots differ beyond their rounding, got {k}. Take fewer, or "
            "snapshots that lie further apart."
        )
    turn = np_.where(found[:k, None], turn[:k], 0.0)
    components = algebra.signed(
        algebra.orthonormal(jax.tree.map(lambda z: algebra.mix(turn.T, z), rows), times=1)
    )
    if narrow is not None:
        components = jax.tree.map(lambda p: p.astype(algebra.stored_dtype(p, narrow)), components)
    explained = np_.where(found[:k], s[:k] ** 2, 0.0) / np_.where(total > 0, total, 1.0)
    mean = jax.tree.map(algebra.mean, snapshots)
    return Basis(components, mean, jnp.asarray(explained, jnp.float32))
