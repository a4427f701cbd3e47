# SPDX-License-Identifier: Apache-2.0
"""The Gauss-Newton matrix in a few coordinates, by one forward-mode product for each."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from boostax._core import axes
from boostax.subspace import components
from boostax.subspace.components import Components

PyTree = Any


def curvature(
    basis: Components,
    wide: PyTree,
    params: PyTree,
    outputs_fn: Callable[[PyTree], PyTree],
    output_loss: Callable[[PyTree], jax.Array],
    names: tuple[str, ...],
) -> jax.Array:
    r"""The matrix :math:`P J^\top H_z J P^\top`, the mean over replicas: exact, ``(k, k)``.

    :math:`J` is the Jacobian of the model's outputs :math:`z` in the params and :math:`H_z` the
    Hessian of the loss in the outputs, positive where that is convex. One column is one product
    with each, and one at a time is in memory beside the k products of outputs.
    """
    rows = components.count(basis)

    def outputs(w: PyTree) -> PyTree:
        return outputs_fn(jax.tree.map(lambda x, p: x.astype(p.dtype), w, params))

    z, tangent = jax.linearize(outputs, axes.to_varying(wide, names))

    def column(i: jax.Array) -> PyTree:
        along = jax.tree.map(lambda d, w: d.astype(w.dtype), components.row(basis, i), wide)
        return tangent(axes.to_varying(along, names))

    products = lax.map(column, jnp.arange(rows))

    def weighed(v: PyTree) -> PyTree:
        return jax.jvp(jax.grad(output_loss), (z,), (v,))[1]

    heavy = lax.map(weighed, products)
    flat = lambda x: x.reshape(rows, -1).astype(jnp.float32)  # noqa: E731
    parts = jax.tree.map(lambda a, b: flat(a) @ flat(b).T, products, heavy)
    return axes.mean(functools.reduce(jnp.add, jax.tree.leaves(parts)), names)


def damped_inverse(matrix: jax.Array, damping: float = 1e-4) -> jax.Array:
    """The inverse of the matrix plus ``damping`` of its largest eigenvalue on the diagonal."""
    matrix = (matrix + matrix.T) / 2
    values, vectors = jnp.linalg.eigh(matrix)
    values = jnp.maximum(values, 0.0)
    return (vectors / (values + damping * values.max() + jnp.finfo(values.dtype).tiny)) @ vectors.T
