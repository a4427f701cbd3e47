# SPDX-License-Identifier: Apache-2.0
"""The params and gradients that laws use, and comparisons of results."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import trees
from boostax._core.types import PyTree
from boostax.config.migrate import holds


class Pair(NamedTuple):
    """A NamedTuple node."""

    left: PyTree  # any shapes and dtypes
    right: PyTree  # any shapes and dtypes


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    """A dataclass node."""

    scale: PyTree


def example_params(dtype: jax.typing.DTypeLike = jnp.float32) -> PyTree:
    """Make params with all kinds of nodes: containers, None, a scalar and an empty leaf."""
    return {
        "dense": {"kernel": _wave((3, 4), 1.0, dtype), "bias": _wave((4,), 2.0, dtype)},
        "list": [jnp.asarray(0.5, dtype), jnp.zeros((0, 2), dtype)],
        "pair": Pair(_wave((5,), 3.0, dtype), None),
        "block": Block(_wave((2, 1), 4.0, dtype)),
    }


def even_params() -> PyTree:
    """Make params whose first dimension is a multiple of eight."""
    return {"w": _wave((16, 4), 1.0, jnp.float32), "b": _wave((8,), 2.0, jnp.float32)}


def example_grads(params: PyTree, seed: int) -> PyTree:
    """Make gradients of moderate size in the params' dtypes, different for each seed."""
    index = itertools.count()
    return jax.tree.map(lambda p: _wave(p.shape, 7.0 + seed + 0.3 * next(index), p.dtype), params)


def draws(params: PyTree, count: int, first: int = 0) -> list[PyTree]:
    """Make ``count`` gradients with consecutive seeds from ``first`` on."""
    return [example_grads(params, first + i) for i in range(count)]


def _wave(shape: tuple[int, ...], phase: float, dtype: jax.typing.DTypeLike) -> jax.Array:
    return jnp.asarray(np.sin(phase + 1.7 * np.arange(int(np.prod(shape)))).reshape(shape), dtype)


def poison(grads: PyTree, value: float, at: tuple[int, ...] | None = None) -> PyTree:
    """Replace one element of the first leaf by ``value``, by default the first element."""
    leaves, treedef = jax.tree.flatten(grads)
    leaves[0] = leaves[0].at[at or (0,) * leaves[0].ndim].set(value)
    return jax.tree.unflatten(treedef, leaves)


def assert_same(left: PyTree, right: PyTree, what: str) -> None:
    """Require equal structures, dtypes and values, bit for bit."""
    assert jax.tree.structure(left) == jax.tree.structure(right), f"{what}: structure differs"
    for (name, a), b in zip(trees.named(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=f"{what} at {name}", strict=True)


def assert_close(left: PyTree, right: PyTree, what: str, tolerance: float = 1e-6) -> None:
    """Require close values; XLA may compile the programs of ``left`` and ``right`` differently."""
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=what)


def with_scale(state: PyTree, scale: float) -> PyTree:
    """Set the scale of all scalers in a state."""
    nodes, treedef = jax.tree.flatten(state, is_leaf=lambda x: bool(holds(type(x)).scale))
    for i, node in enumerate(nodes):
        name = holds(type(node)).scale
        if name:
            nodes[i] = node._replace(**{name: jnp.full_like(getattr(node, name), scale)})
    return treedef.unflatten(nodes)


def stack(grads: Sequence[PyTree]) -> PyTree:
    """Stack trees along a new leading dimension."""
    return jax.tree.map(lambda *x: jnp.stack(x), *grads)


def types_of(tree: PyTree) -> list[tuple[tuple[int, ...], np.dtype, bool]]:
    """Return shape, dtype and weak type of every leaf."""
    return [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
