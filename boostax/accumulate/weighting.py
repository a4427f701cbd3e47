# SPDX-License-Identifier: Apache-2.0
r"""The rule by which means are weighted: sums and weights are added up, and divided once.

The slices :math:`i` of a batch are micro-batches, replicas, or the calls of a window. A mean over
slice :math:`i` is :math:`x_i`, and its weight :math:`w_i` is the number of tokens (say) that it was
taken over. The mean over all slices is

.. math:: \bar x = \sum_i w_i x_i \big/ \sum_i w_i.

Both sums are kept, and one is divided by the other once, at the end. A slice of weight zero is
dropped, whatever its mean is: a mean over nothing is 0/0.

============================ ================================ ===================================
slices                       a slice's weight                 divided
============================ ================================ ===================================
micro-batches of a step      local to the replica             by ``microbatch``, by the local sum
replicas of a step           local; then the mean over the    by ``value_and_grad``, which returns
                             replicas, equal on all           the mean weight in ``Aux.weight``
calls of a window            either of these                  by ``accumulate``, by ``factor``
============================ ================================ ===================================

Gradients stay local to each replica: replica :math:`r` multiplies its own by
:math:`n\,w_r / \sum_r w_r`, so that a *mean* over the :math:`n` replicas is the mean over all
tokens.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from boostax._core import axes, trees

PyTree = Any
# Gradients that a scaler lets pass are below 2**48: their products with weights below MOST add up
# in f32, and the reciprocal of LEAST is finite.
LEAST, MOST = 2.0**-64, 2.0**64


def weigh(tree: PyTree, weight: jax.Array) -> PyTree:
    """Multiply floating leaves by ``weight``, in f32 or wider; leave integers, which are counts.

    Weights are token counts: in f16 they overflow at 65504, and round from 2048 on.
    """
    tree = _map_floating(trees.at_least_float32, tree)
    return drop_empty(_map_floating(lambda x: x * weight.astype(x.real.dtype), tree), weight)


def drop_empty(tree: PyTree, weight: jax.Array) -> PyTree:
    """Replace floating leaves by zeros unless ``weight`` is positive."""
    return _map_floating(lambda x: jnp.where(weight > 0, x, jnp.zeros_like(x)), tree)


def divide(tree: PyTree, weight: jax.Array) -> PyTree:
    """Divide floating leaves of weighted sums by the sum of the weights; return 0 for 0/0.

    The quotient is computed in f32 or wider and rounded once, to the dtype of the sum.
    """
    safe = jnp.where(weight > 0, weight, 1)

    def quotient(x: jax.Array) -> jax.Array:
        wide = trees.at_least_float32(x)
        return (wide / safe.astype(wide.real.dtype)).astype(x.dtype)

    return _map_floating(quotient, tree)


def total(weight: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Return the sum of the replicas' local weights, equal on all of them."""
    return lax.psum(axes.to_varying(weight, names), names) if names else weight


def factor(weight: jax.Array, names: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    r"""Return whether a window's weights are a usable divisor, and the factor that divides by them.

    Each replica multiplies its local sum by :math:`n / \sum_r w_r`. The caller multiplies by this
    factor, because XLA:CPU writes a copy of the sums for a division.
    """
    summed = total(weight, names)
    return summed >= LEAST, (axes.size(names) if names else 1) / summed


def _map_floating(fn: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    def on_leaf(leaf: jax.typing.ArrayLike) -> jax.Array:
        x = jnp.asarray(leaf)
        if jnp.issubdtype(x.dtype, jnp.bool_):
            x = x.astype(jnp.int32)
        return fn(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(on_leaf, tree)
