# SPDX-License-Identifier: Apache-2.0
"""The finiteness of a tree, from its largest magnitudes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import axes, trees
from boostax._core.gate import Pending

PyTree = Any


def largest_magnitudes(tree: PyTree) -> list[jax.Array]:
    """Return ``max |x|`` of each inexact leaf: NaN and infinities stay, empty leaves give 0.

    A reduction of the leaf itself fuses with the operation that made it. With an elementwise
    ``isfinite``, or a test of the unscaled gradient, XLA:CPU writes a temporary as large as a leaf.
    """
    inexact = [x for x in jax.tree.leaves(tree) if trees.is_inexact(jnp.result_type(x))]
    return [_largest(magnitude(x)) for x in inexact]


def _largest(x: jax.Array) -> jax.Array:
    """Return the maximum of magnitudes, in f32 or wider.

    The minimum is computed with it. For a leaf that XLA shards, an all-reduce of maxima loses the
    NaN of a shard on XLA:CPU, and is not defined elsewhere. A reduction with two results becomes no
    all-reduce: the results of all shards are gathered and compared. The leaf is widened because
    XLA:CPU takes twice as long over f16 on a processor without vectors of f16.
    """
    x = trees.at_least_float32(x)
    zero = np.zeros((), x.dtype)
    most, least = lax.reduce((x, x), (zero, zero), _extremes, tuple(range(x.ndim)))
    return lax.select(lax.ne(least, least), least, most)


# JAX traces a module's function once for all leaves.
def _extremes(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return lax.max(a[0], b[0]), lax.min(a[1], b[1])


def magnitude(x: jax.Array) -> jax.Array:
    """Return the magnitude of each element; for a complex element, of its larger part."""
    if jnp.iscomplexobj(x):
        # The modulus of a finite number can overflow; its parts cannot.
        return jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag))
    return jnp.abs(x)


def counts(*marks: jax.Array) -> jax.Array:
    """Return in f32 how many elements of each array are true.

    One reduction counts them all: XLA:CPU writes the operand of a plain sum to memory, which takes
    5 times as long.
    """
    ones, zeros = tuple(mark.astype(jnp.int32) for mark in marks), (jnp.int32(0),) * len(marks)
    add = lambda a, b: tuple(map(jnp.add, a, b))  # noqa: E731
    return jnp.stack(lax.reduce(ones, zeros, add, tuple(range(marks[0].ndim)))).astype(jnp.float32)


def all_true(flags: list[jax.Array]) -> jax.Array:
    """Return the conjunction of bool scalars, which is True for none."""
    return jnp.stack(flags).all() if flags else jnp.asarray(True)


def all_finite(tree: PyTree, axis_name: axes.AxisName | None = None) -> jax.Array:
    """Return whether no leaf holds a NaN or an infinity, on any replica.

    Args:
      tree: arrays of any dtype. Integers, ``None`` and empty leaves count as finite.
      axis_name: mesh axis (or tuple of axes) over which the replicas must agree.

    Returns:
      Bool scalar, equal on all replicas when ``axis_name`` is given. Cost: one read of the tree,
      and one 4-byte collective with ``axis_name``.

    Raises:
      ValueError: the axis is not bound.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> bool(boostax.precision.all_finite({"w": jnp.array([1.0, jnp.inf])}))
      False
    """
    names = axes.canonical("all_finite", axis_name)
    axes.require_bound(names, "all_finite")
    return axes.agree(all_true([jnp.isfinite(m) for m in largest_magnitudes(tree)]), names)


def stays_finite(old: PyTree, new: PyTree) -> jax.Array:
    """Return whether no finite element became NaN or infinite, in trees of the same types."""

    def news(before: jax.Array, after: jax.Array) -> jax.Array:
        if not jnp.issubdtype(jnp.result_type(after), jnp.inexact):
            return jnp.zeros(())
        return jnp.where(jnp.isfinite(before), after, jnp.zeros_like(after))

    return all_finite(jax.tree.map(news, old, new))


def usable(grads: Pending) -> jax.Array:
    """Return whether gradients are finite, and the sum of their squares as well.

    Adam squares gradients and clipping sums the squares, so a finite f32 gradient of 1e25 makes the
    second moment of Adam infinite for good. Below ``2**((maxexp - 32) / 2)`` (2**48 in f32) the
    squares of up to 2**32 elements add up without overflow. Sparse gradients are judged by their
    data, before rows of one index are added.
    """
    by_dtype: dict[Any, list[jax.Array]] = {}
    for largest in largest_magnitudes(grads.raw):
        by_dtype.setdefault(largest.dtype, []).append(largest)
    flags: list[jax.Array] = []
    for dtype, found in by_dtype.items():
        limit = 2.0 ** ((jnp.finfo(dtype).maxexp - 32) / 2)
        flags.append((grads._replace(raw=jnp.stack(found)).value() < limit).all())
    return all_true(flags)
