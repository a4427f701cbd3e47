# SPDX-License-Identifier: Apache-2.0
"""Find directions in the space of the params, leaf by leaf, and compute coordinates along them.

Let the m snapshots be the rows of ``X`` (m, n). To find k directions, only matrices of m x m or m x
k are decomposed. All work of size n consists of products of ``X`` with thin matrices. These
products are sums over leaves, and keep each leaf's sharding. Training changes the params by much
less than their size, so one snapshot is subtracted before ``X`` is centred, which loses fewer
digits. The Gram matrix of ``X`` gives only the first approximation. The elements of the Gram matrix
are products, so in f32 the matrix loses directions in which the snapshots differ by less than 3e-4
of the largest difference. A product with ``X`` itself finds these directions.
"""

import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from boostax._core import axes, checks, norms, trees
from boostax._core.types import PyTree
from boostax.subspace import files

Dtype = DTypeLike | None
Names = tuple[str, ...]
_FEW = "n_components is the dimension of the subspace; 32 to 40 are usual."
# The number of directions that are computed in addition to ``k``, to find directions that the first
# product missed.
_SPARE = 2


class Basis(NamedTuple):
    """Orthonormal directions in the space of the params.

    Attributes:
      components: tree like the params, with leaves ``(k, *leaf.shape)``, the direction of largest
        variance first. Over all leaves together, a direction has norm 1, and its element of largest
        magnitude is positive.
      mean: tree like the params, f32 or wider: the mean of the snapshots.
      explained: f32 ``(k,)``, the share of the variance along each component.
    """

    components: PyTree  # (k, *leaf.shape), float32 or wider, or ``dtype``
    mean: PyTree  # shapes of the params, float32 or wider
    explained: jax.Array  # [k] float32

    def save(self, path: str | pathlib.Path) -> None:
        """Write the basis to a ``.npz`` file, by the names of the params.

        The arrays are ``components/layer/kernel``, ``mean/layer/kernel`` and ``explained``.

        Args:
          path: path of the file. An old file is replaced only when the new file is complete.

        Raises:
          ValueError, TypeError: another suffix, or a dtype that the format lacks. OSError:
            no such folder, no space.

        Example:
          >>> import boostax, jax.numpy as jnp, pathlib, tempfile
          >>> path = pathlib.Path(tempfile.mkdtemp()) / "basis.npz"
          >>> line = [{"w": jnp.array([3.0 * t, 4.0 * t])} for t in range(4)]
          >>> boostax.subspace.pca_basis(line, 1).save(path)
          >>> basis = boostax.subspace.Basis.load(path, line[0])
          >>> basis.components["w"].round(3).tolist()
          [[0.6000000238418579, 0.800000011920929]]
        """
        files.write("Basis.save", path, files.by_name("Basis.save", self))

    @classmethod
    def load(cls, path: str | pathlib.Path, params: PyTree) -> "Basis":
        """Read a basis that ``save`` wrote.

        Args:
          path: path of the file.
          params: a tree of arrays or shapes, with the names and shapes of the basis.

        Returns:
          The ``Basis``, bit for bit. Cost: one copy of the basis.

        Raises:
          ValueError: params of other names, shapes or kinds; a broken file, or a file without a
            basis.
          FileNotFoundError: no such file.
        """
        arrays = files.read("Basis.load", path, ".npz")
        k = np.size(arrays.get("explained", ()))
        mean = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), wide_dtype(x)), params)
        rows = jax.tree.map(lambda x: x.update(shape=(k, *x.shape)), mean)
        like = cls(rows, mean, jax.ShapeDtypeStruct((k,), jnp.float32))  # pyright: ignore[reportArgumentType]
        basis = jax.tree.map(jnp.asarray, files.tree_like("Basis.load", path, like, arrays))
        if not norms.all_finite(basis):
            allowed = "a file of finite numbers"
            hint = "Compute the basis from finite snapshots."
            raise ValueError(checks.message("Basis.load", "path", allowed, str(path), hint))
        return basis


def saved_basis(path: str | pathlib.Path, params: PyTree, n_components: int) -> Basis | PyTree:
    """Return the first components in a file, for params of the same names and shapes.

    Args:
      path: a file of ``Basis.save``; or an ``.npy`` file with an array ``(k, N)``, as MindSpore's
        DimReduce writes, with the leaves of the params concatenated in the order of
        ``jax.tree.leaves``.
      params: a tree of arrays or shapes.
      n_components: number of components.

    Returns:
      A ``Basis``; for an ``.npy`` file, a tree of the components.

    Raises:
      ValueError: the file has fewer components, or rows that are not orthonormal; errors of
        ``Basis.load``.
    """
    who = "saved_basis"
    basis = None if pathlib.Path(path).suffix == ".npy" else Basis.load(path, params)
    rows = _read_matrix(who, path, params) if basis is None else basis.components
    gram = _gram_of(jax.tree.map(wide, rows))
    k = len(gram)
    allowed = f"at most {k}, the number of components in {path}"
    hint = f"Pass n_components={k} or less."
    checks.require(n_components <= k, who, "n_components", n_components, allowed, hint)
    # Components that were rounded to bfloat16 have an error of half a percent.
    if not jnp.abs(gram - jnp.eye(k)).max() < 2e-2:
        allowed = "a file of orthonormal rows"
        hint = "Distances along rows that are not orthonormal would be wrong."
        raise ValueError(checks.message(who, "path", allowed, "rows that are not", hint))
    first = jax.tree.map(lambda x: x[:n_components], rows)
    return first if basis is None else Basis(first, basis.mean, basis.explained[:n_components])


def _read_matrix(who: str, path: str | pathlib.Path, params: PyTree) -> PyTree:
    """Return the components in the matrix of a file, split into leaves."""
    matrix = files.read(who, path, ".npy")
    leaves, treedef = jax.tree.flatten(params)
    ends = np.cumsum([np.size(x) for x in leaves])
    is_valid = matrix.shape[1:] == (ends[-1],) and matrix.dtype.kind == "f"
    is_valid = is_valid and not any(map(jnp.iscomplexobj, leaves))
    allowed = f"a file of shape (k, {ends[-1]}), with a real number for each param"
    hint = "The numbers are in the order of jax.tree.leaves."
    checks.require(is_valid, who, "path", f"{matrix.dtype} of {matrix.shape}", allowed, hint)
    parts = zip(np.split(matrix, ends[:-1], 1), leaves, strict=True)
    rows = [jnp.asarray(p.reshape(-1, *np.shape(x)), wide_dtype(x)) for p, x in parts]
    return treedef.unflatten(rows)


def random_basis(params: PyTree, n_components: int, *, seed: int = 0) -> PyTree:
    """Draw random orthonormal components, as a baseline for ``pca_basis``.

    Args:
      params: a tree of arrays.
      n_components: number of directions, at most the number of params.
      seed: seed of the draws.

    Returns:
      A tree with leaves ``(n_components, *leaf.shape)``. Cost: memory for twice the result.

    Raises:
      ValueError, TypeError: ``n_components`` out of range.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> boostax.subspace.random_basis({"w": jnp.zeros((3, 4))}, 2)["w"].shape
      (2, 3, 4)
    """
    who = "random_basis"
    checks.positive_int(who, "n_components", n_components, _FEW)
    leaves, treedef = jax.tree.flatten(params)
    size = sum(np.size(x) for x in leaves)
    allowed = f"at most the number of params, {size}"
    checks.require(n_components <= size, who, "n_components", n_components, allowed, _FEW)
    key = jax.random.key(seed)
    rows = [
        jax.random.normal(jax.random.fold_in(key, i), (n_components, *np.shape(x)), wide_dtype(x))
        for i, x in enumerate(leaves)
    ]
    return _orthonormal(treedef.unflatten(rows))


def pca_basis(
    snapshots: PyTree, n_components: int, *, dtype: Dtype = None, stacked: bool | None = None
) -> Basis:
    r"""Find the directions in which snapshots of the params differ most.

    For snapshots :math:`w_1 \dots w_m` with mean :math:`\bar w` the directions are the leading
    eigenvectors of the covariance, :math:`p_j = \sum_i v_{ij} (w_i - \bar w) / \sigma_j`. The
    numbers :math:`v_{ij}` and :math:`\sigma_j` are computed from a matrix of only m x m:

    .. math:: (w_i - \bar w) \cdot (w_l - \bar w) = \sum_j v_{ij} \sigma_j^2 v_{lj}

    Each of the ``n_components`` directions has the size of the params. Use snapshots from late in a
    run, because the first snapshots of a run differ most from all other snapshots, and would
    determine all directions.

    Args:
      snapshots: a tree like the params with leaves ``(m, *leaf.shape)``; or a list or an iterator
        of m trees like the params, which are stacked.
      n_components: number of directions, less than m.
      dtype: dtype of the components; ``None`` for f32 or wider.
      stacked: whether ``snapshots`` is one stacked tree; with ``None``, a list or an
        iterator contains many trees.

    Returns:
      A ``Basis``, orthonormal to 1e-5 before rounding to ``dtype``. Complex leaves count as pairs
      of reals. Cost for n params: ``2mn(m + 4k)`` operations, memory for ``2(k + 2)`` copies of the
      params and m centred copies of the largest leaf (under ``jit``, at worst of all leaves). For
      sharded leaves, devices communicate only matrices of ``m x m`` or ``m x k`` in f32.

    Raises:
      ValueError, TypeError: an argument out of range, or trees that do not match; outside ``jit``,
        snapshots that are not finite, or that differ in fewer than ``n_components`` directions
        beyond their rounding. Inside ``jit``, the missing components are zero.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> line = [{"w": jnp.array([5.0 + 3.0 * t, 4.0 * t])} for t in range(4)]
      >>> basis = boostax.subspace.pca_basis(line, 1)
      >>> basis.components["w"].round(3).tolist(), basis.mean["w"].tolist()
      ([[0.6000000238418579, 0.800000011920929]], [9.5, 6.0])

    References:
      Li et al., Low Dimensional Trajectory Hypothesis is True, https://arxiv.org/abs/2103.11154,
      2021.
    """
    if stacked is None:
        stacked = isinstance(snapshots, tuple) or not isinstance(snapshots, (Sequence, Iterator))
    if not stacked:
        listed = list(snapshots)
        # NumPy arrays stay on the host, and are copied to the device leaf by leaf.
        snapshots = listed and jax.tree.map(
            lambda *x: (np if all(isinstance(y, np.ndarray) for y in x) else jnp).stack(x), *listed
        )
    return principal(snapshots, n_components, dtype, complete=True, who="pca_basis")


def principal(snapshots: PyTree, k: int, dtype: Dtype, complete: bool, who: str) -> Basis:
    """Return ``pca_basis`` of stacked snapshots, with ``k`` components.

    With ``complete=False``, missing components are zero outside ``jit`` as well.
    """
    narrow = None if dtype is None else checks.floating_dtype(who, "dtype", dtype)
    m = _snapshot_count(who, snapshots, k)
    gram = jax.tree.reduce(jnp.add, jax.tree.map(_gram, snapshots))
    traced = isinstance(gram, Tracer)
    if not traced and not jnp.isfinite(gram).all():
        hint = "Find the step at which params became infinite or NaN."
        raise ValueError(checks.message(who, "snapshots", "finite", "a NaN or infinity", hint))
    u = jnp.linalg.eigh(gram)[1][:, ::-1][:, : min(k + _SPARE, m - 1)]
    rows = s = vh = u
    for _ in range(2):
        rows = _orthonormal(jax.tree.map(lambda x, u=u: _spanned(x, u), snapshots))
        along = jax.tree.reduce(jnp.add, jax.tree.map(_coordinates, snapshots, rows))
        u, s, vh = jnp.linalg.svd(along, full_matrices=False)
    eps = max(np.finfo(wide_dtype(x)).eps for x in jax.tree.leaves(snapshots))
    noise = jnp.sqrt(jax.tree.reduce(jnp.add, jax.tree.map(_rounding, snapshots)))
    significant = s > noise + eps * np.sqrt(m) * s[0]
    if complete and not traced:
        count = int(significant.sum())
        which = "in which these snapshots differ beyond their rounding"
        allowed = f"at most {count}, the number of directions {which}"
        hint = "Choose fewer components, or snapshots that differ more."
        checks.require(k <= count, who, "n_components", k, allowed, hint)
    vh = jnp.where(significant[:k, None], vh[:k], 0.0)
    rows = jax.tree.map(lambda z: mix(vh.T, z), rows)
    components = _signed(_polished(rows))
    variance = jnp.trace(gram)
    explained = jnp.where(significant[:k], s[:k] ** 2, 0.0) / jnp.where(variance > 0, variance, 1.0)
    components = components if narrow is None else stored(components, narrow)
    return Basis(components, jax.tree.map(_mean, snapshots), jnp.asarray(explained, jnp.float32))


def _snapshot_count(who: str, snapshots: PyTree, n_components: int) -> int:
    """Check and return the number of snapshots."""
    checks.positive_int(who, "n_components", n_components, _FEW)
    counts = sorted({np.shape(x)[:1] for x in jax.tree.leaves(snapshots)})
    if len(counts) != 1 or not counts[0]:
        allowed = "a tree of arrays with the same leading dimension"
        hint = "Stack the snapshots of each leaf, or pass a list of trees."
        raise ValueError(checks.message(who, "snapshots", allowed, counts, hint))
    m = counts[0][0]
    hint = "m snapshots differ from their mean in m - 1 directions at most."
    allowed = f"below the number of snapshots, {m}"
    checks.require(n_components < m, who, "n_components", n_components, allowed, hint)
    return m


# Products with a basis are computed leaf by leaf, so each leaf keeps its shape and sharding. Narrow
# components are widened inside the sum, so XLA makes no wide copy.


def project(components: PyTree, tree: PyTree, shards: Names = (), who: str = "") -> jax.Array:
    """Return the coordinates ``(k,)`` of a tree, its products with the components.

    Cost: one read of the components; for sharded leaves an all-reduce of ``4k`` bytes.
    """

    def part(p: jax.Array, g: ArrayLike) -> jax.Array:
        rows, vector = wide(p), wide(g)[None]
        if p.dtype == rows.dtype:
            return dot(rows, vector)[:, 0]
        return (rows * vector.conj()).real.sum(tuple(range(1, rows.ndim)))

    parts = jax.tree.leaves(jax.tree.map(part, components, tree))
    return axes.shard_total(parts, shards, who) if parts else jnp.zeros(1)


def lift(components: PyTree, columns: jax.Array) -> PyTree:
    """Return the c trees whose coordinates are the columns of ``(k, c)``, as ``(c, *leaf.shape)``.

    Leaves are f32 or wider. Cost: one read of the components; no communication.
    """

    def combine(p: jax.Array) -> jax.Array:
        rows = wide(p)
        if p.dtype == rows.dtype:
            return mix(columns, rows)
        return jnp.stack([(_along_rows(c, rows) * rows).sum(0) for c in columns.T])

    return jax.tree.map(combine, components)


def stored(tree: PyTree, dtype: Dtype) -> PyTree:
    """Return a copy with real leaves in ``dtype``, or in their own dtypes for ``None``."""
    kinds = jax.tree.map(lambda p: p.dtype if dtype is None or jnp.iscomplexobj(p) else dtype, tree)
    return jax.tree.map(lambda p, kind: jnp.array(p, kind, copy=True), tree, kinds)


# A stacked leaf x is (m, *leaf.shape). The functions below are compiled separately for each leaf,
# so that outside jit only the centred copy of one leaf exists at a time.


def wide_dtype(x: PyTree) -> np.dtype:
    """Return the dtype of computations with a leaf, f32 or wider."""
    return trees.buffer_dtype(x, np.dtype(np.float32))


def wide(x: ArrayLike) -> jax.Array:
    """Return a leaf in the dtype of computations with the leaf."""
    return jnp.asarray(x).astype(wide_dtype(x))


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return real inner products of rows (k, ...) and (m, ...): (k, m)."""
    dtype = jnp.promote_types(x.dtype, y.dtype)
    meshes = [jax.typeof(z).sharding.mesh for z in (x, y)]
    # With Explicit axes, JAX requires the sharding of the result.
    explicit = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
    where = NamedSharding(explicit[0], PartitionSpec()) if explicit else None
    inner = tuple(range(1, x.ndim))
    over = (inner, inner), ((), ())
    x, y = x.astype(dtype), y.conj().astype(dtype)
    return lax.dot_general(x, y, over, precision=lax.Precision.HIGHEST, out_sharding=where).real


@jax.jit
def mix(weights: ArrayLike, rows: ArrayLike) -> jax.Array:
    """Return sums of rows (m, ...), weighted by the columns of ``weights`` (m, r): (r, ...)."""
    rows = wide(rows)
    weights = jnp.asarray(weights).astype(rows.dtype)
    return lax.dot_general(weights, rows, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)


def _orthonormal(rows: PyTree) -> PyTree:
    """Return the nearest orthonormal rows of the same span; rows of zeros stay zero.

    The rows are multiplied by the inverse square root of their Gram matrix. Unlike Cholesky's
    factor, the square root has no NaN if rows are linearly dependent. Each of the two passes
    squares the error.
    """
    for _ in range(2):
        gram = _gram_of(rows)
        norms = jnp.sqrt(jnp.diagonal(gram))
        inverse = jnp.where(norms > 0, 1.0 / jnp.where(norms > 0, norms, 1.0), 0.0)
        values, vectors = jnp.linalg.eigh(gram * inverse * inverse[:, None])
        roots = jnp.where(values > 1e-6, 1.0 / jnp.sqrt(jnp.maximum(values, 1e-6)), 0.0)
        weights = inverse[:, None] * mix((vectors * roots).T, vectors.T)
        rows = jax.tree.map(functools.partial(mix, weights), rows)
    return _polished(rows)


def _polished(rows: PyTree) -> PyTree:
    """Return nearly orthonormal rows without the rounding errors of a decomposition.

    For a Gram matrix near the identity, ``(3 - gram) / 2`` approximates the inverse square root.
    """
    gram = _gram_of(rows)
    return jax.tree.map(functools.partial(mix, 1.5 * jnp.eye(len(gram)) - 0.5 * gram), rows)


def _gram_of(rows: PyTree) -> jax.Array:
    return jax.tree.reduce(jnp.add, jax.tree.map(lambda z: dot(z, z), rows))


@jax.jit
def _signed(components: PyTree) -> PyTree:
    """Choose the sign of each row so that the element of largest magnitude is positive."""
    extremes: list[jax.Array] = []
    for p in jax.tree.leaves(components):
        inner = tuple(range(1, p.ndim))
        low = jnp.minimum(p.real, p.imag).min(inner, initial=0.0)
        extremes.append(jnp.stack([jnp.maximum(p.real, p.imag).max(inner, initial=0.0), -low]))
    high, low = jnp.stack(extremes).max(0)
    sign = jnp.where(high >= low, 1.0, -1.0)
    return jax.tree.map(lambda p: p * _along_rows(sign, p), components)


def _along_rows(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return ``x``, one number per row, in a shape that broadcasts to a stacked leaf."""
    return x.astype(like.dtype).reshape(-1, *[1] * (like.ndim - 1))


# The mean of the snapshots, computed from differences to the first snapshot. The differences avoid
# cancellation.
_mean = jax.jit(lambda x: wide(x[0]) + (wide(x) - wide(x[:1])).mean(0))


@functools.partial(jax.jit, static_argnums=0)
def _of_gaps(product: Callable[..., jax.Array], x: jax.Array, *others: jax.Array) -> jax.Array:
    """Return a product of the centred snapshots."""
    gaps = wide(x) - wide(x[:1])
    return product(gaps - gaps.mean(0, keepdims=True), *others)


# Inner products of the snapshots: (m, m).
_gram = functools.partial(_of_gaps, lambda gaps: dot(gaps, gaps))
# Inner products of the snapshots with rows (r, ...): (m, r).
_coordinates = functools.partial(_of_gaps, dot)
# Combinations of the snapshots, by the columns of ``u`` (m, r): (r, ...).
_spanned = functools.partial(_of_gaps, lambda gaps, u: mix(u, gaps))


@jax.jit
def _rounding(x: jax.Array) -> jax.Array:
    """Return the squared norm of the rounding errors of a snapshot."""
    unit = float(jnp.finfo(x.dtype).eps) / 2 if trees.is_inexact(x.dtype) else 0.0
    first = unit * wide(x[0])
    return jnp.sum(first.real**2 + first.imag**2)
