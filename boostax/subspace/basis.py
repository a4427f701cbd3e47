# SPDX-License-Identifier: Apache-2.0
"""Find principal components of snapshots of the params, leaf by leaf.

There is no matrix of all params squared.

With the m snapshots as rows of ``X`` (m, n), all that is decomposed is m x m or m x k; the n-sized
work are products of ``X`` with thin matrices, which sum over leaves and leave each one its
sharding. The params are far larger than what training moves them by, so ``X`` is centred through
differences to one snapshot, and its Gram matrix is only where the search begins: it holds squares,
so in f32 it loses directions below 3e-4 of the largest, which a product with ``X`` itself finds.
"""

import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import axes, checks
from boostax.subspace import algebra, files

PyTree = Any
Method = Literal["gram", "randomized"]
_WHO = "pca_basis"
_OTHER = (
    f"{_WHO}: snapshots must be trees of one structure and equal shapes, got others at "
    "number {}. If this is one stacked tree whose root is a list, pass stacked=True."
)
# Rows beyond k that carry what the first product missed, and products that follow it.
_SPARE = {"gram": 2, "randomized": 10}
_ROUNDS = {"gram": 2, "randomized": 3}


class Basis(NamedTuple):
    """Holds orthonormal directions in the space of the params.

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
        found = files.read("Basis.load", path)
        k = np.size(found.get("explained", ()))
        wide = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), algebra.compute_dtype(x)), params
        )
        like = cls(wide, wide, jax.ShapeDtypeStruct((k,), jnp.float32))  # pyright: ignore[reportArgumentType]

        def array(name: str, x: Any) -> jax.Array:
            rows = (k,) if name.startswith("components") else ()
            return jnp.asarray(files.required("Basis.load", path, name, x, found, rows))

        arrays = [array(name, x) for name, x in files.named("Basis.load", like).items()]
        return jax.tree.unflatten(jax.tree.structure(like), arrays)


def saved_basis(path: str | pathlib.Path, params: PyTree, n_components: int) -> Any:
    """Return the first components in a file, made of the same params.

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
    matrix = pathlib.Path(path).suffix == ".npy"
    basis: Any = _matrix(who, path, params) if matrix else Basis.load(path, params)
    rows = basis if matrix else basis.components
    gram = algebra.total(jax.tree.map(lambda x: algebra.dot(*[algebra.wide(x)] * 2), rows))
    k = len(gram)
    allowed = f"at most {k}, the components in {path}"
    fits = n_components <= k
    checks.require(who, "n_components", n_components, allowed, fits, "Take so many.")
    # Half a percent is what storage in bfloat16 leaves.
    got, hint = "rows that are not", "Distances along them would be other ones."
    skew = np.abs(gram - np.eye(k)).max()
    checks.require(who, "path", got, "a file of orthonormal rows", bool(skew < 2e-2), hint)
    first = jax.tree.map(lambda x: x[:n_components], rows)
    return first if matrix else Basis(first, basis.mean, basis.explained[:n_components])


def _matrix(who: str, path: str | pathlib.Path, params: PyTree) -> PyTree:
    """Return components in a matrix, cut into leaves."""
    matrix = files.read(who, path)
    leaves, treedef = jax.tree.flatten(params)
    ends = np.cumsum([np.size(x) for x in leaves])
    fits = matrix.shape[1:] == (ends[-1],) and matrix.dtype.kind == "f"
    fits = fits and not any(map(jnp.iscomplexobj, leaves))
    allowed = f"a file of (k, {ends[-1]}), a real number for each param"
    got, hint = f"{matrix.dtype} of {matrix.shape}", "They are in the order of jax.tree.leaves."
    checks.require(who, "path", got, allowed, fits, hint)
    parts = zip(np.split(matrix, ends[:-1], 1), leaves, strict=True)
    return treedef.unflatten(
        [jnp.asarray(part.reshape(-1, *np.shape(x)), algebra.compute_dtype(x)) for part, x in parts]
    )


class Gram(NamedTuple):
    """Holds the distances of all pairs of snapshots in a ring buffer.

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
    r"""Find the directions in which snapshots of the params differ most.

    For snapshots :math:`w_1 \dots w_m` and their mean these are the leading eigenvectors of the
    covariance, :math:`p_j = \sum_i v_{ij} (w_i - \bar w) / \sigma_j`, where

    .. math:: (w_i - \bar w) \cdot (w_l - \bar w) = \sum_j v_{ij} \sigma_j^2 v_{lj}

    is only m x m. ``"randomized"`` starts from ``k + 10`` random combinations instead and takes
    three rounds of the power method, for snapshots by the hundred.

    The axis that is reduced is that of the params: ``n_components`` directions, each as large as
    they. Snapshots from late in a run give directions worth training in; the first ones differ by
    far the most, and use them up.

    A ``Sequence`` that is no list, such as ``checkpoint_snapshots``, is not stacked but read again
    and again, at most two snapshots being in memory at any time. ``"gram"`` compares them in pairs,
    with ``m(m + 1) / 2`` reads and six for each; ``"randomized"`` reads each of them eight times.

    Args:
      snapshots: a tree like the params of ``(m, *leaf.shape)``; or a list or an iterator of m trees
        like the params, which is stacked; or a ``Sequence`` that reads such trees when asked.
      n_components: how many directions, less than m.
      method: ``"gram"`` or ``"randomized"``.
      seed: of the random combinations.
      dtype: in which components are stored; ``None`` for f32 or wider.
      stacked: whether ``snapshots`` is one tree; ``None`` takes a list to be many.

    Returns:
      A ``Basis``, orthonormal to 1e-5 before it is rounded to ``dtype``. Complex leaves count as
      pairs of reals. Cost: ``2mn(m + 4k)`` operations (``"randomized"``: ``12mn(k + 10)``), memory
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
    blocks = _blocks(snapshots, stacked)
    m = _require(_WHO, blocks, n_components)
    width = min(n_components + _SPARE[method], m - 1)
    if method == "gram":
        start = _leading(_gram(blocks), width)
    else:
        start = np.linalg.qr(np.random.default_rng(seed).normal(size=(m, width)))[0]
    return _refined(_centred(blocks, m), start, n_components, _ROUNDS[method], dtype)


def _leading(gram: Any, count: int) -> Any:
    """Return the eigenvectors (m, count) of the largest eigenvalues."""
    return algebra.numpy(gram).linalg.eigh(algebra.finite(gram))[1][:, ::-1][:, :count]


def pca_from_gram(
    gram: Gram, snapshots: PyTree, n_components: int, *, dtype: Any = None, complete: bool = True
) -> Basis:
    r"""Return ``pca_basis`` where all distances between the snapshots are known already.

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
    blocks = [snapshots]
    m = _require("pca_from_gram", blocks, n_components)
    shape, hint = gram.distances.shape, "Both come from the same ring buffer."
    checks.require("pca_from_gram", "gram", shape, f"{m} x {m}", shape == (m, m), hint)
    centred = _from_distances(algebra.total([gram.distances]))
    start = _leading(centred, min(n_components + _SPARE["gram"], m - 1))
    return _refined(_centred(blocks, m), start, n_components, _ROUNDS["gram"], dtype, complete)


def updated_gram(
    gram: Gram,
    snapshots: PyTree,
    snapshot: PyTree,
    slot: jax.Array | int,
    shard_axes: tuple[str, ...] = (),
) -> Gram:
    """Return the distances after ``snapshot`` was written to ``slot``: one row, and one column.

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


class _Read(Sequence[PyTree]):
    """Reads snapshots, as trees of ``(1, *leaf.shape)``, when they are asked for."""

    def __init__(self, snapshots: Sequence[PyTree]):
        self._snapshots = snapshots
        self._like: Any = None

    def __len__(self) -> int:
        return len(self._snapshots)

    def __iter__(self) -> Iterator[PyTree]:
        # That of a Sequence would hold one while the next is read.
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, i: Any) -> PyTree:
        tree = self._snapshots[i]
        now = _kind(tree)
        self._like = now if self._like is None else self._like
        if now != self._like:
            raise ValueError(_OTHER.format(i))
        # Copies: JAX lets go of a NumPy array that it has been given at some later call of its own.
        return jax.tree.map(lambda x: jnp.array(x, copy=True, ndmin=np.ndim(x) + 1), tree)


class _Centred(NamedTuple):
    """Holds snapshots in blocks, to be taken less their mean.

    Attributes:
      blocks: trees of ``(rows, *leaf.shape)``: one of all snapshots, or one for each. While one of
        several is read, the first and the mean are in memory, and no other.
      first: the first snapshot, a tree of ``(1, *leaf.shape)``.
      mean: the mean of the differences to it.
    """

    blocks: Sequence[PyTree]
    first: PyTree
    mean: PyTree

    def map(self, fn: Callable[..., Any], *rows: PyTree) -> Iterator[PyTree]:
        # Not a comprehension, whose variable would hold a block while the next one is read.
        return map(lambda block: jax.tree.map(fn, block, *self[1:], *rows), self.blocks)

    def spanned(self, u: Any) -> PyTree:
        """Return combinations of them, by the columns of ``u`` (m, r): a tree of (r, ...)."""
        cut = np.split(u, len(u)) if len(self.blocks) > 1 else [u]

        def turned(part: Any, block: PyTree) -> PyTree:
            return jax.tree.map(functools.partial(algebra.spanned, part), block, *self[1:])

        return _added(map(turned, cut, self.blocks))

    def coordinates(self, rows: PyTree) -> Any:
        """Return inner products with rows: (m, r)."""
        parts = list(map(algebra.total, self.map(algebra.coordinates, rows)))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def spread(self) -> Any:
        """Return the sum of their squares."""
        return sum(map(algebra.total, self.map(algebra.spread)))


def _centred(blocks: Sequence[PyTree], m: int) -> _Centred:
    first = jax.tree.map(lambda x: x[:1], blocks[0])
    gaps = _added(map(lambda block: jax.tree.map(algebra.gap, block, first), blocks))
    return _Centred(blocks, first, jax.tree.map(lambda x: x / m, gaps))


def _added(parts: Iterator[PyTree]) -> PyTree:
    """Return the sum of trees, each waited for: a computation under way holds its arguments."""

    def add(x: PyTree, y: PyTree) -> PyTree:
        return jax.block_until_ready(jax.tree.map(algebra.added, x, y))

    return functools.reduce(add, parts)


def _gram(blocks: Sequence[PyTree]) -> Any:
    """Return inner products of the centred snapshots: (m, m)."""
    if len(blocks) == 1:
        return algebra.total(jax.tree.map(algebra.centred_gram, blocks[0]))
    distances = np.zeros((len(blocks), len(blocks)))
    for i in range(len(blocks)):
        one = blocks[i]
        for j in range(i):
            pair = algebra.total(jax.tree.map(algebra.distance, one, blocks[j]))
            distances[i, j] = distances[j, i] = pair
    return _from_distances(distances)


def _from_distances(d: Any) -> Any:
    """Return inner products of what is centred, from squared distances."""
    return -0.5 * (d - d.mean(0) - d.mean(1)[:, None] + d.mean())


def _blocks(snapshots: Any, stacked: bool | None) -> Sequence[PyTree]:
    if stacked is None:
        if isinstance(snapshots, Sequence) and not isinstance(snapshots, (list, tuple)):
            return _Read(snapshots)
        stacked = not isinstance(snapshots, (list, Iterator))
    return [snapshots if stacked else _stack(snapshots)]


def _kind(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, list(map(np.shape, leaves))


def _stack(snapshots: Iterable[PyTree]) -> PyTree:
    """Stack trees a leaf at a time."""
    found = list(snapshots)
    for i, tree in enumerate(found):
        if _kind(tree) != _kind(found[0]):
            raise ValueError(_OTHER.format(i))

    def stacked(*leaves: Any) -> Any:
        # NumPy's stay on the host, and go to the device a leaf at a time.
        return (np if all(isinstance(x, np.ndarray) for x in leaves) else jnp).stack(leaves)

    return jax.tree.map(stacked, *found) if found else None


def _require(who: str, blocks: Sequence[PyTree], n_components: int) -> int:
    """Check and return the number of snapshots."""
    hint = "It is the dimension of the subspace; 32 to 40 are usual."
    checks.positive_int(who, "n_components", n_components, hint)
    if len(blocks) == 1:
        counts = sorted({np.shape(x)[:1] for x in jax.tree.leaves(blocks[0])})
    else:
        counts = [(len(blocks),)]
    allowed = "a tree of arrays with one leading dimension"
    hint = "Stack the snapshots of each leaf, or pass a list of trees."
    fits = len(counts) == 1 and bool(counts[0])
    checks.require(who, "snapshots", counts, allowed, fits, hint)
    m = counts[0][0]
    hint = "m snapshots differ from their mean in m - 1 directions at most."
    allowed = f"below the number of snapshots, {m}"
    checks.require(who, "n_components", n_components, allowed, n_components < m, hint)
    return m


def _refined(
    source: _Centred, u: Any, k: int, rounds: int, dtype: Any, complete: bool = True
) -> Basis:
    """Return the components, from ``u`` (m, r) that spans about the right combinations."""
    narrow = None if dtype is None else checks.floating_dtype(_WHO, "dtype", dtype)
    total = algebra.finite(source.spread())
    rows: PyTree = None
    s = turn = u
    for _ in range(rounds):
        rows = algebra.orthonormal(source.spanned(u))
        along = source.coordinates(rows)
        u, s, turn = algebra.numpy(along).linalg.svd(along, full_matrices=False)
    np_ = algebra.numpy(s)
    eps = max(np.finfo(algebra.compute_dtype(x)).eps for x in jax.tree.leaves(source.first))
    noise = np_.sqrt(algebra.total(jax.tree.map(algebra.rounding, source.first)))
    found = s > noise + eps * np_.sqrt(len(u)) * s[0]
    if complete and np_ is np and not found[:k].all():
        raise ValueError(
            f"{_WHO}: n_components must be at most {int(found.sum())}, the number of directions in "
            f"which these snapshots differ beyond their rounding, got {k}. Take fewer, or "
            "snapshots that lie further apart."
        )
    turn = np_.where(found[:k, None], turn[:k], 0.0)
    rows = jax.tree.map(lambda z: algebra.mix(turn.T, z), rows)
    components = algebra.signed(algebra.orthonormal(rows, times=1))
    if narrow is not None:
        components = algebra.stored(components, narrow)
    explained = np_.where(found[:k], s[:k] ** 2, 0.0) / np_.where(total > 0, total, 1.0)
    mean = jax.tree.map(lambda x, gap: (algebra.wide(x) + gap)[0], source.first, source.mean)
    return Basis(components, mean, jnp.asarray(explained, jnp.float32))
