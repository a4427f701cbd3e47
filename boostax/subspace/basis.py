# SPDX-License-Identifier: Apache-2.0
"""Principal components of snapshots of the params, leaf by leaf: no matrix of all params squared.

With the m snapshots as rows of ``X`` (m, n), all that is decomposed is m x m or m x k; the n-sized
work are products of ``X`` with thin matrices, which sum over leaves and leave each one its
sharding. The params are far larger than what training moves them by, so ``X`` is centred through
differences to one snapshot, and its Gram matrix is only where the search begins: it holds squares,
so in f32 it loses directions below 3e-4 of the largest, which a product with ``X`` itself finds.
"""

import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import axes, checks
from boostax.subspace import algebra, files

PyTree = Any
Method = Literal["gram", "randomized"]
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

    def save(self, path: str | pathlib.Path) -> None:
        """Write it to a ``.npz`` or ``.safetensors`` file, by the names of the params.

        The arrays are ``components/layer/kernel``, ``mean/layer/kernel`` and ``explained``.

        Args:
          path: of the file, whose suffix is the format. What was there stays until all is written.

        Raises:
          ValueError, TypeError: another suffix, or a dtype that the format lacks. OSError: no such
            folder, no space.

        Example:
          >>> import boostax, jax.numpy as jnp, pathlib, tempfile
          >>> path = pathlib.Path(tempfile.mkdtemp()) / "basis.safetensors"
          >>> line = [{"w": jnp.array([3.0 * t, 4.0 * t])} for t in range(4)]
          >>> boostax.subspace.pca_basis(line, 1).save(path)
          >>> basis = boostax.subspace.Basis.load(path, line[0])
          >>> basis.components["w"].round(3).tolist()
          [[0.6000000238418579, 0.800000011920929]]
        """
        files.write("Basis.save", path, files.named("Basis.save", self))

    @classmethod
    def load(cls, path: str | pathlib.Path, params: PyTree) -> "Basis":
        """Read what ``save`` wrote.

        Args:
          path: of the file.
          params: a tree of arrays or shapes: those of which the basis was made, by name and shape.

        Returns:
          A ``Basis``, to the bit. Cost: one copy of it.

        Raises:
          ValueError: params of other names, shapes or kinds; a file that is broken or none of a
            basis. FileNotFoundError: no such file.
        """
        who = "Basis.load"
        found = files.read(who, path)
        k = np.size(found.get("explained", ()))
        explained: Any = jax.ShapeDtypeStruct((k,), jnp.float32)
        like = cls(params, params, explained)

        def array(name: str, x: Any) -> jax.Array:
            rows = (k,) if name.startswith("components") else ()
            shape, dtype = (*rows, *np.shape(x)), algebra.compute_dtype(x)
            return jnp.asarray(files.required(who, path, name, shape, dtype, found))

        arrays = [array(name, x) for name, x in files.named(who, like).items()]
        return jax.tree.unflatten(jax.tree.structure(like), arrays)


def saved_basis(path: str | pathlib.Path, params: PyTree, n_components: int) -> Any:
    """The first components in a file, made of the same params.

    Args:
      path: what ``Basis.save`` wrote; or an ``.npy`` of ``(k, N)``, as MindSpore's DimReduce keeps
        them: the leaves of the params, in the order of ``jax.tree.leaves``, one behind the other.
      params: a tree of arrays or shapes.
      n_components: how many of them.

    Returns:
      A ``Basis``; of an ``.npy`` a tree of the components.

    Raises:
      ValueError: fewer of them there, rows that are not orthonormal, or as ``Basis.load``.
    """
    who = "saved_basis"
    read = _matrix if pathlib.Path(path).suffix == ".npy" else Basis.load
    basis: Any = read(path, params)
    rows = basis.components if isinstance(basis, Basis) else basis
    gram = algebra.total(jax.tree.map(lambda x: algebra.dot(*[algebra.wide(x)] * 2), rows))
    k = len(gram)
    if n_components > k:
        allowed, hint = f"at most {k}, the components in {path}", "Take so many."
        raise ValueError(checks.message(who, "n_components", allowed, n_components, hint))
    # Half a percent is what storage in bfloat16 leaves.
    if not np.abs(gram - np.eye(k)).max() < 2e-2:
        got, hint = "rows that are not", "Distances along them would be other ones."
        raise ValueError(checks.message(who, "path", "a file of orthonormal rows", got, hint))
    first = jax.tree.map(lambda x: x[:n_components], rows)
    if not isinstance(basis, Basis):
        return first
    return Basis(first, basis.mean, basis.explained[:n_components])


def _matrix(path: str | pathlib.Path, params: PyTree) -> PyTree:
    """Components in a matrix, cut into leaves."""
    who, matrix = "saved_basis", files.matrix("saved_basis", path)
    leaves, treedef = jax.tree.flatten(params)
    ends = np.cumsum([np.size(x) for x in leaves])
    real = not any(jnp.iscomplexobj(x) for x in leaves)
    if matrix.ndim != 2 or matrix.shape[1:] != (ends[-1],) or matrix.dtype.kind != "f" or not real:
        allowed = f"a file of (k, {ends[-1]}), a real number for each param"
        got, hint = f"{matrix.dtype} of {matrix.shape}", "They are in the order of jax.tree.leaves."
        raise ValueError(checks.message(who, "path", allowed, got, hint))
    parts = zip(np.split(matrix, ends[:-1], 1), leaves, strict=True)
    return treedef.unflatten(
        [jnp.asarray(part.reshape(-1, *np.shape(x)), algebra.compute_dtype(x)) for part, x in parts]
    )


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

    A ``Sequence`` that is no list, such as ``checkpoint_snapshots``, is not stacked but read again
    and again, at most two snapshots being in memory at any time. ``"gram"`` compares them in pairs,
    with ``m(m + 1) / 2`` reads and six for each; ``"randomized"`` reads each of them nine times.

    Args:
      snapshots: a tree like the params of ``(m, *leaf.shape)``; or a list or an iterator of m trees
        like the params, which is stacked; or a ``Sequence`` that reads such trees when asked.
      n_components: how many directions, less than m.
      method: ``"gram"`` or ``"randomized"``.
      seed: of the random directions.
      dtype: in which components are stored; ``None`` for f32 or wider.
      stacked: whether ``snapshots`` is one tree; ``None`` takes a list to be many.

    Returns:
      A ``Basis``, orthonormal to 1e-5 before it is rounded to ``dtype``. Complex leaves count as
      pairs of reals. Cost: ``2mn(m + 4k)`` operations (``"randomized"``: ``14mn(k + 10)``), memory
      for ``k + 2`` (``k + 10``) params twice and m centred copies of the largest leaf (under
      ``jit`` of all leaves, at worst); of a ``Sequence`` instead of these and of the stack for two
      snapshots, the mean and one difference to it. Of sharded leaves only matrices of ``m x m`` or
      ``m x k`` cross the devices, in f32. Outside ``jit`` those are decomposed on the host in f64.

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
    source = _source(snapshots, stacked)
    m = _require(_WHO, source.counts(), n_components)
    width = min(n_components + _SPARE[method], m - 1)
    if method == "gram":
        start = algebra.leading(source.gram(), width)
    else:
        start = source.sketch(jax.random.key(seed), width)
        start = algebra.numpy(start).linalg.qr(algebra.finite(start))[0]
    return _refined(source, start, n_components, _ROUNDS[method], dtype)


def pca_from_gram(
    gram: Gram, snapshots: PyTree, n_components: int, *, dtype: Any = None, complete: bool = True
) -> Basis:
    r"""``pca_basis`` where all distances between the snapshots are known already.

    Centred inner products are :math:`-\tfrac12 J D J` with :math:`J = I - \tfrac1m 1 1^\top`.

    Args:
      gram: the distances, kept by ``updated_gram``.
      snapshots: the tree of ``(m, *leaf.shape)`` that they belong to; the order does not matter.
      n_components: how many directions, less than m.
      dtype: in which components are stored.
      complete: whether it is an error if the snapshots differ in fewer directions; ``False`` leaves
        those that are missing zero, as inside ``jit``.

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
    source = _Stacked(snapshots)
    m = _require("pca_from_gram", source.counts(), n_components)
    if gram.distances.shape != (m, m):
        hint = "Both come from the same ring buffer."
        raise ValueError(
            checks.message("pca_from_gram", "gram", f"{m} x {m}", gram.distances.shape, hint)
        )
    centred = _from_distances(algebra.total([gram.distances]))
    start = algebra.leading(centred, min(n_components + _SPARE["gram"], m - 1))
    return _refined(source, start, n_components, _ROUNDS["gram"], dtype, complete)


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


class _Stacked(NamedTuple):
    """Snapshots in one tree of ``(m, *leaf.shape)``."""

    tree: PyTree

    def counts(self) -> list[Any]:
        """How many there are, of each leaf."""
        return sorted({np.shape(x)[:1] for x in jax.tree.leaves(self.tree)})

    def leaves(self) -> list[Any]:
        """Arrays of the dtypes that there are."""
        return jax.tree.leaves(self.tree)

    def gram(self) -> Any:
        """Inner products of the centred snapshots: (m, m)."""
        return algebra.total(jax.tree.map(algebra.centred_gram, self.tree))

    def sketch(self, key: jax.Array, width: int) -> Any:
        """Their products with random directions: (m, width)."""
        leaves = enumerate(jax.tree.leaves(self.tree))
        return algebra.total(
            [algebra.sketch(jax.random.fold_in(key, i), x, width) for i, x in leaves]
        )

    def spanned(self, u: Any) -> PyTree:
        """Combinations of them, by the columns of ``u`` (m, r): a tree of (r, *leaf.shape)."""
        return jax.tree.map(lambda x: algebra.spanned(u, x), self.tree)

    def coordinates(self, rows: PyTree) -> Any:
        """Inner products with rows: (m, r)."""
        return algebra.total(jax.tree.map(algebra.coordinates, self.tree, rows))

    def spread(self) -> Any:
        """Squares of what rounding makes of a snapshot, and of all that is centred."""
        return algebra.total(jax.tree.map(algebra.spread, self.tree))

    def mean(self) -> PyTree:
        """The mean snapshot."""
        return jax.tree.map(algebra.mean, self.tree)


class _Streamed:
    """The same of snapshots that are read when they are needed: at most two are in memory.

    These are the first, from which differences are taken, and the one that is just looked at; or a
    pair. Each result is waited for, as a computation under way holds on to its arguments.
    """

    def __init__(self, snapshots: Sequence[PyTree]):
        self._snapshots = snapshots
        self._like: Any = None

    def counts(self) -> list[Any]:
        return [(len(self._snapshots),)]

    def leaves(self) -> list[Any]:
        return jax.tree.leaves(self._first)

    def gram(self) -> Any:
        m = len(self._snapshots)
        distances = np.zeros((m, m))
        for i in range(m):
            one = self._read(i)
            for j in range(i):
                distances[i, j] = distances[j, i] = algebra.total(
                    jax.tree.map(algebra.distance, one, self._read(j))
                )
        return _from_distances(distances)

    def sketch(self, key: jax.Array, width: int) -> Any:
        leaves, treedef = jax.tree.flatten(self._gap)
        rows = [
            jax.random.normal(jax.random.fold_in(key, i), (width, *x.shape), x.real.dtype)
            for i, x in enumerate(leaves)
        ]
        return self.coordinates(jax.tree.unflatten(treedef, rows))

    def spanned(self, u: Any) -> PyTree:
        rows = jax.tree.map(lambda x: jnp.zeros((u.shape[1], *x.shape), x.dtype), self._gap)
        for weights, gap in zip(u, self._centred(self._gap), strict=True):
            add = lambda z, x, weights=weights: algebra.added(z, weights, x)  # noqa: E731
            rows = jax.block_until_ready(jax.tree.map(add, rows, gap))
        return rows

    def coordinates(self, rows: PyTree) -> Any:
        inner = lambda gap: jax.tree.map(algebra.inner, gap, rows)  # noqa: E731
        return np.stack([algebra.total(inner(gap)) for gap in self._centred(self._gap)])

    def spread(self) -> Any:
        squares = lambda gap: algebra.total(jax.tree.map(algebra.squares, gap))  # noqa: E731
        rounding = algebra.total(jax.tree.map(algebra.rounding, self._first))
        return np.stack([rounding, sum(map(squares, self._centred(self._gap)))])

    def mean(self) -> PyTree:
        return jax.tree.map(lambda x, gap: algebra.wide(x) + gap, self._first, self._gap)

    @functools.cached_property
    def _first(self) -> PyTree:
        return self._read(0)

    @functools.cached_property
    def _gap(self) -> PyTree:
        """The mean of the differences to the first."""
        mean = jax.tree.map(lambda x: jnp.zeros_like(x, algebra.compute_dtype(x)), self._first)
        share = np.full(1, 1 / len(self._snapshots))
        rows = jax.tree.map(lambda x: x[None], mean)
        for gap in self._centred(mean):
            rows = jax.tree.map(lambda z, x: algebra.added(z, share, x), rows, gap)
        return jax.tree.map(lambda z: z[0], rows)

    def _centred(self, mean: PyTree) -> Iterator[PyTree]:
        """Each less the first and the mean of such differences."""
        for i in range(len(self._snapshots)):
            yield jax.block_until_ready(jax.tree.map(algebra.gap, self._read(i), self._first, mean))

    def _read(self, i: int) -> PyTree:
        tree = self._snapshots[i]
        now = jax.tree.structure(tree), [np.shape(x) for x in jax.tree.leaves(tree)]
        self._like = now if self._like is None else self._like
        if now != self._like:
            raise ValueError(_other(i))
        # Copies: JAX lets go of a NumPy array that it has been given at some later call of its own.
        return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


def _source(snapshots: Any, stacked: bool | None) -> _Stacked | _Streamed:
    reads = isinstance(snapshots, Sequence) and not isinstance(snapshots, (list, tuple))
    if stacked is None and reads:
        return _Streamed(snapshots)
    if stacked is None:
        stacked = not isinstance(snapshots, (list, Iterator))
    return _Stacked(snapshots if stacked else _stack(snapshots))


def _from_distances(distances: Any) -> Any:
    """Inner products of what is centred, from squared distances."""
    d = distances
    return -0.5 * (d - d.mean(0) - d.mean(1)[:, None] + d.mean())


def _other(number: int) -> str:
    return (
        f"{_WHO}: snapshots must be trees of one structure and equal shapes, got others at number "
        f"{number}. If this is one stacked tree whose root is a list, pass stacked=True."
    )


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
            raise ValueError(_other(len(columns[0]) if columns else 0))
        for column, x in zip(columns, leaves, strict=True):
            column.append(x)
    stacks: list[Any] = []
    for column in columns:
        # NumPy's stay on the host, and go to the device a leaf at a time.
        host = all(isinstance(x, np.ndarray) for x in column)
        stacks.append(np.stack(column) if host else jnp.stack(column))
        column.clear()
    return None if treedef is None else jax.tree.unflatten(treedef, stacks)


def _require(who: str, counts: list[Any], n_components: int) -> int:
    """Check and return the number of snapshots."""
    hint = "It is the dimension of the subspace; 32 to 40 are usual."
    checks.positive_int(who, "n_components", n_components, hint)
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


def _refined(
    source: _Stacked | _Streamed, u: Any, k: int, rounds: int, dtype: Any, complete: bool = True
) -> Basis:
    """The components, from ``u`` (m, r) that spans about the right combinations of snapshots."""
    narrow = None if dtype is None else checks.floating_dtype(_WHO, "dtype", dtype)
    rows: PyTree = None
    s = turn = u
    for _ in range(rounds):
        rows = algebra.orthonormal(source.spanned(u))
        along = source.coordinates(rows)
        u, s, turn = algebra.numpy(along).linalg.svd(along, full_matrices=False)
    np_ = algebra.numpy(s)
    rounding, total = source.spread()
    eps = max(np.finfo(algebra.compute_dtype(x)).eps for x in source.leaves())
    found = s > np_.sqrt(rounding) + eps * np_.sqrt(u.shape[0]) * s[0]
    if complete and np_ is np and not found[:k].all():
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
    return Basis(components, source.mean(), jnp.asarray(explained, jnp.float32))
