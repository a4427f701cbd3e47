# SPDX-License-Identifier: Apache-2.0
"""Compute with stacked leaves one at a time, without flattening the whole.

Snapshots come as ``x`` of ``(m, *leaf.shape)``, with ``first``, the first, and ``mean``, the mean
of the differences to it, of ``(1, *leaf.shape)``.
"""

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
    """Return orthonormal rows of the same span, each the nearest to what it was; zeros stay zero.

    It takes the inverse root of the Gram matrix of the rows: unlike Cholesky's factor it exists,
    and is no NaN, when rows depend on each other. Once leaves an error of the square of what was
    there.
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
    """Turn each row so that its largest element is positive."""

    def ends(p: jax.Array) -> jax.Array:
        axes = tuple(range(1, p.ndim))
        low = jnp.minimum(p.real, p.imag).min(axes, initial=0.0)
        return jnp.stack([jnp.maximum(p.real, p.imag).max(axes, initial=0.0), -low])

    high, low = jnp.stack(jax.tree.leaves(jax.tree.map(ends, components))).max(0)
    sign = jnp.where(high >= low, 1.0, -1.0)
    return jax.tree.map(lambda p: p * along_rows(sign, p), components)


def finite(x: Any) -> Any:
    """Return ``x``; refuse it on the host if it is not finite."""
    good = numpy(x) is jnp or bool(np.isfinite(x).all())
    hint = "Look for the step at which the run broke down."
    checks.require("pca_basis", "snapshots", "a NaN or infinity", "finite", good, hint)
    return x


def total(parts: PyTree) -> Any:
    """Return the sum over leaves: on the host and in f64, unless this is being traced."""
    leaves = jax.tree.leaves(parts)
    if any(isinstance(x, Tracer) for x in leaves):
        return functools.reduce(jnp.add, leaves)
    return functools.reduce(np.add, [np.asarray(x, np.float64) for x in leaves])


def numpy(x: Any) -> Any:
    """Return the array library to which ``x`` belongs."""
    return np if isinstance(x, (np.ndarray, np.generic)) else jnp


def compute_dtype(x: Any) -> np.dtype[Any]:
    """Return the dtype in which a leaf is computed with: f32 or wider."""
    return trees.buffer_dtype(x, _F32)


def stored(tree: PyTree, dtype: Any) -> PyTree:
    """Return a copy with real leaves in ``dtype``, or all as they are if it is ``None``."""

    def copy(p: Any) -> jax.Array:
        kept = p.dtype if dtype is None or jnp.iscomplexobj(p) else dtype
        return jnp.array(p, kept, copy=True)

    return jax.tree.map(copy, tree)


def wide(x: Any) -> jax.Array:
    """Return a leaf in the dtype in which it is computed with."""
    return jnp.asarray(x).astype(compute_dtype(x))


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return real inner products of rows (k, ...) and (m, ...): (k, m)."""
    inner = tuple(range(1, x.ndim))
    dtype = jnp.promote_types(x.dtype, y.dtype)
    kinds = [kind for z in (x, y) for kind in jax.typeof(z).sharding.mesh.axis_types]
    # Explicit axes want to be told the sharding of a small result.
    where = PartitionSpec() if AxisType.Explicit in kinds else None
    return lax.dot_general(
        x.astype(dtype),
        y.conj().astype(dtype),
        ((inner, inner), ((), ())),
        precision=lax.Precision.HIGHEST,
        out_sharding=where,
    ).real


@jax.jit
def mix(turn: Any, rows: Any) -> jax.Array:
    """Return sums of rows (m, ...), weighted by the columns of ``turn`` (m, r): (r, ...)."""
    rows, over = wide(rows), (((0,), (0,)), ((), ()))
    turn = jnp.asarray(turn).astype(rows.dtype)
    return lax.dot_general(turn, rows, over, precision=lax.Precision.HIGHEST)


def along_rows(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return one number for each row of a stacked leaf."""
    return x.astype(like.dtype).reshape(-1, *[1] * (like.ndim - 1))


def centred(x: Any, first: Any, mean: Any) -> jax.Array:
    """Return snapshots less their mean; the first is taken off before, so that nothing cancels."""
    return wide(x) - wide(first) - mean


@jax.jit
def centred_gram(x: Any) -> jax.Array:
    """Return inner products of the centred snapshots: (m, m)."""
    gaps = wide(x) - wide(x[:1])
    gaps -= gaps.mean(0, keepdims=True)
    return dot(gaps, gaps)


@jax.jit
def spanned(u: Any, x: Any, first: Any, mean: Any) -> jax.Array:
    """Return combinations of the centred snapshots, by the columns of ``u`` (m, r): (r, ...)."""
    return mix(u, centred(x, first, mean))


@jax.jit
def coordinates(x: Any, first: Any, mean: Any, rows: jax.Array) -> jax.Array:
    """Return inner products of the centred snapshots with rows: (m, r)."""
    return dot(centred(x, first, mean), rows)


@jax.jit
def spread(x: Any, first: Any, mean: Any) -> jax.Array:
    """Return the sum of the squares of the centred snapshots."""
    return squares(centred(x, first, mean))


@jax.jit
def gap(x: Any, first: Any) -> jax.Array:
    """Return the sum of the differences of snapshots to the first."""
    return (wide(x) - wide(first)).sum(0, keepdims=True)


@jax.jit
def rounding(x: Any) -> jax.Array:
    """Return the square of what rounding makes of a snapshot."""
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    half = float(jnp.finfo(x.dtype).eps) / 2 if inexact else 0.0
    return squares(half * wide(x))


def squares(x: jax.Array) -> jax.Array:
    """Return the squared norm."""
    return jnp.sum(x.real**2 + x.imag**2)


@jax.jit
def distance(x: Any, y: Any) -> jax.Array:
    """Return the squared distance of two snapshots."""
    return squares(wide(x) - wide(y))


@functools.partial(jax.jit, donate_argnums=0)
def added(x: jax.Array, y: jax.Array) -> jax.Array:
    """Add, in the memory of the first."""
    return x + y
