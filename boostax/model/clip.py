# SPDX-License-Identifier: Apache-2.0
"""Clipping by the global norm, right on shards."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from boostax._core import axes, checks, trees
from boostax._core.describe import Stepped, describe

PyTree = Any


def clip_by_global_norm(
    max_norm: float, *, shard_axes: axes.AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""``optax.clip_by_global_norm`` that knows of shards.

    .. math:: u = g \cdot \min\left(1, \frac{c}{\lVert g \rVert}\right), \quad
              \lVert g \rVert^2 = \sum_{\text{leaves, shards}} \lVert g_s \rVert^2

    Inside ``jax.shard_map`` a leaf that is sharded over an axis is there as one shard, and Optax's
    norm is that of the shards of one device: every device would clip by another factor. Here the
    squares are summed over the axes that a leaf is sharded over, those of whole leaves count once.
    Behind the reduction, whose result is equal on all replicas. In plain ``jit`` Optax's own is
    right however params are sharded.

    Args:
      max_norm: the largest norm that stays.
      shard_axes: axes over which leaves are sharded (FSDP, tensor parallel); needs JAX's tracking
        of varying types (``check_vma``).

    Returns:
      A stateless transformation. Without shards its results are Optax's, to the bit. Cost: one
      scalar collective for each set of axes that leaves are sharded over.

    Raises:
      ValueError, TypeError: ``max_norm`` is not greater than 0; at trace time, an unbound axis.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> tx = boostax.model.clip_by_global_norm(1.0)
      >>> g = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> [x.tolist() for x in tx.update(g, tx.init(g))[0].values()]
      [[0.6000000238418579], [0.800000011920929]]
    """
    who = "clip_by_global_norm"
    checks.number(who, "max_norm", max_norm, "greater than 0", lambda x: x > 0, "1.0 is usual.")
    names = axes.canonical(who, shard_axes)

    @describe(who, "norm clip", names)
    def update_fn(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Stepped:
        del params, extra
        trees.require_gradients(updates, who)
        squares = [jnp.sum((g * g.conj()).real) for g in jax.tree.leaves(updates)]
        norm = jnp.sqrt(axes.shard_total(squares, names, who))

        def clipped(g: jax.Array) -> jax.Array:
            scaled = (g / norm.astype(g.dtype)) * max_norm
            # A norm that is not finite shows in every leaf, as with Optax.
            return jnp.where(norm < max_norm, g, scaled).astype(g.dtype)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)
