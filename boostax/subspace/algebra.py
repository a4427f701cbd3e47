# SPDX-License-Identifier: Apache-2.0
"""What is computed of stacked leaves, one at a time and without flattening the whole."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, PartitionSpec

from boostax._core import checks, trees

PyTree = Any
_F32 = np.dtype(np.float32)


def orthonormal(rows: PyTree, times: int = 2) -> PyTree:
    """Orthonormal rows of the same span, each the nearest to what it was; zero rows stay zero.

    By the inverse root of the Gram matrix of the rows: unlike Cholesky's factor it exists, and is
    no NaN, when rows depend on each other. Once leaves an error of the square of what was there.
    """
    for _ in range(times):
        gram = total(jax.tree.map(lambda z: dot(z, z), rows))
        np_ = numpy(gram)
        norms = np_.sqrt(np_.diagonal(gram))
        inverse = np_.where(norms > 0, 1.0 / np_.where(norms > 0, norms, 1.0), 0.0)
        values, vectors = np_.linalg.eigh(gram * inverse * inverse[:, None])
        roots = np_.where(values > 1e-6, 1.0 / np_.sqrt(np_.maximum(values, 1e-6)), 0.0)
        turn = inverse[:, None] * ((vectors * roots) @ vectors.T)
        rows = jax.tree.map(lambda z, turn=turn: mix(turn, z), rows)
    return rows


@jax.jit
def signed(components: PyTree) -> PyTree:
    """Each row turned so that its largest element is positive."""

    def ends(p: jax.Array) -> jax.Array:
        axes = tuple(range(1, p.ndim))
        low = jnp.minimum(p.real, p.imag).min(axes, initial=0.0)
        return jnp.stack([jnp.maximum(p.real, p.imag).max(axes, initial=0.0), -low])

    high, low = jnp.stack(jax.tree.leaves(jax.tree.map(ends, components))).max(0)
    sign = jnp.where(high >= low, 1.0, -1.0)
    return jax.tree.map(lambda p: p * along_rows(sign, p), components)


def leading(gram: Any, count: int) -> Any:
    """Eigenvectors (m, count) of the largest eigenvalues."""
    return numpy(gram).linalg.eigh(finite(gram))[1][:, ::-1][:, :count]


def finite(x: Any) -> Any:
    """The same, refused on the host if it is not finite."""
    if isinstance(x, np.ndarray) and not np.isfinite(x).all():
        hint = "Look for the step at which the run broke down."
        raise ValueError(
            checks.message("pca_basis", "snapshots", "finite", "a NaN or infinity", hint)
        )
    return x


def total(parts: PyTree) -> Any:
    """The sum over leaves: on the host and in f64, unless this is being traced."""
    leaves = jax.tree.leaves(parts)
    if any(isinstance(x, Tracer) for x in leaves):
        return functools.reduce(jnp.add, leaves)
    return functools.reduce(np.add, [np.asarray(x, np.float64) for x in leaves])


def numpy(x: Any) -> Any:
    """The array library to which ``x`` belongs."""
    return np if isinstance(x, (np.ndarray, np.generic)) else jnp


def compute_dtype(x: Any) -> np.dtype[Any]:
    """In which a leaf is computed with: f32 or wider."""
    return trees.buffer_dtype(x, _F32)


def stored_dtype(x: Any, narrow: np.dtype[Any]) -> np.dtype[Any]:
    """``narrow`` for real leaves; complex ones stay so."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.complexfloating) else narrow


def wide(x: Any) -> jax.Array:
    """A leaf in that dtype."""
    return jnp.asarray(x).astype(compute_dtype(x))


def centred(x: Any) -> jax.Array:
    """Snapshots less their mean; the first is taken off before, so that nothing cancels."""
    gaps = wide(x) - wide(x)[:1]
    return gaps - gaps.mean(0, keepdims=True)


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Real inner products of rows (k, ...) and (m, ...): (k, m)."""
    inner = tuple(range(1, x.ndim))
    dtype = jnp.promote_types(x.dtype, y.dtype)
    dims = ((inner, inner), ((), ()))
    return lax.dot_general(
        x.astype(dtype),
        y.conj().astype(dtype),
        dims,
        precision=lax.Precision.HIGHEST,
        out_sharding=everywhere(x, y),
    ).real


def everywhere(*arrays: jax.Array) -> Any:
    """The sharding of a small result, which explicit axes want to be told."""
    kinds = [kind for x in arrays for kind in jax.typeof(x).sharding.mesh.axis_types]
    return PartitionSpec() if AxisType.Explicit in kinds else None


@jax.jit
def mix(turn: Any, rows: Any) -> jax.Array:
    """Sums of rows (m, ...), weighted by the columns of ``turn`` (m, r): (r, ...)."""
    rows = wide(rows)
    return lax.dot_general(
        jnp.asarray(turn).astype(rows.dtype),
        rows,
        (((0,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )


def along_rows(x: jax.Array, like: jax.Array) -> jax.Array:
    """One number for each row of a stacked leaf."""
    return x.astype(like.dtype).reshape(-1, *[1] * (like.ndim - 1))


@jax.jit
def centred_gram(x: Any) -> jax.Array:
    """Inner products of the centred snapshots: (m, m)."""
    gaps = centred(x)
    return dot(gaps, gaps)


@jax.jit
def spanned(u: Any, x: Any) -> jax.Array:
    """Combinations of the centred snapshots: (r, ...)."""
    return mix(u, centred(x))


@jax.jit
def coordinates(x: Any, rows: jax.Array) -> jax.Array:
    """Inner products of the centred snapshots with rows: (m, r)."""
    return dot(centred(x), rows)


@functools.partial(jax.jit, static_argnums=2)
def sketch(key: jax.Array, x: Any, count: int) -> jax.Array:
    """Products of the snapshots with random directions: (m, count)."""
    gaps = centred(x)
    draws = jax.random.normal(key, (count, *x.shape[1:]), gaps.real.dtype)
    if everywhere(x) is not None:
        # Else explicit axes take the draws to be whole everywhere, and gather the snapshots.
        draws = jax.sharding.reshard(draws, PartitionSpec(None, *jax.typeof(x).sharding.spec[1:]))
    return dot(gaps, draws)


@jax.jit
def spread(x: Any) -> jax.Array:
    """Squares of what rounding makes of a snapshot, and of all that is centred."""
    return jnp.stack([rounding(x[0]), squares(centred(x))])


@jax.jit
def rounding(x: Any) -> jax.Array:
    """The square of what rounding makes of a snapshot."""
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    half = float(jnp.finfo(x.dtype).eps) / 2 if inexact else 0.0
    return squares(half * wide(x))


@jax.jit
def squares(x: jax.Array) -> jax.Array:
    """The squared norm."""
    return jnp.sum(x.real**2 + x.imag**2)


@jax.jit
def distance(x: Any, y: Any) -> jax.Array:
    """The squared distance of two snapshots."""
    return squares(wide(x) - wide(y))


@jax.jit
def gap(x: Any, first: Any, mean: jax.Array) -> jax.Array:
    """A centred snapshot, from the mean of the differences to the first."""
    return wide(x) - wide(first) - mean


@functools.partial(jax.jit, donate_argnums=0)
def added(rows: jax.Array, weights: Any, x: jax.Array) -> jax.Array:
    """Rows, and of a leaf so much more to each."""
    return rows + along_rows(weights, rows) * x


@jax.jit
def inner(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Inner products of a leaf with rows: (r,)."""
    return dot(x[None], rows)[0]


@jax.jit
def mean(x: Any) -> jax.Array:
    """The mean snapshot, exact where all are equal."""
    rows = wide(x)
    return rows[0] + (rows - rows[:1]).mean(0)
