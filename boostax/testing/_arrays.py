# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays that laws use: params and gradients, and how results are compared."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import trees
from boostax.config.leaves import holds

PyTree = Any


class Pair(NamedTuple):
    """A NamedTuple node."""

    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    """A dataclass node."""

    scale: Any


def example_params(dtype: Any = jnp.float32) -> PyTree:
    """Dict, list, NamedTuple, dataclass, None, a scalar and an empty leaf."""
    return {
        "dense": {"kernel": _wave((3, 4), 1.0, dtype), "bias": _wave((4,), 2.0, dtype)},
        "list": [jnp.asarray(0.5, dtype), jnp.zeros((0, 2), dtype)],
        "pair": Pair(_wave((5,), 3.0, dtype), None),
        "block": Block(_wave((2, 1), 4.0, dtype)),
    }


def even_params() -> PyTree:
    """Leaves whose first dimension divides by eight devices."""
    return {"w": _wave((16, 4), 1.0, jnp.float32), "b": _wave((8,), 2.0, jnp.float32)}


def example_grads(params: PyTree, seed: int) -> PyTree:
    """Gradients of moderate size, different for every seed, in the params' dtypes."""
    leaves, treedef = jax.tree.flatten(params)
    return jax.tree.unflatten(
        treedef, [_wave(p.shape, 7.0 + seed + 0.3 * i, p.dtype) for i, p in enumerate(leaves)]
    )


def draws(params: PyTree, count: int, first: int = 0) -> list[PyTree]:
    """Return so many gradients, by the seeds from the first on."""
    return [example_grads(params, first + i) for i in range(count)]


def _wave(shape: tuple[int, ...], phase: float, dtype: Any) -> jax.Array:
    size = int(np.prod(shape))
    return jnp.asarray(np.sin(phase + 1.7 * np.arange(size)).reshape(shape), dtype)


def poison(grads: PyTree, value: float) -> PyTree:
    """One element of one leaf replaced."""
    leaves, treedef = jax.tree.flatten(grads)
    leaves[0] = leaves[0].at[(0,) * leaves[0].ndim].set(value)
    return jax.tree.unflatten(treedef, leaves)


def assert_same(left: PyTree, right: PyTree, what: str) -> None:
    """Bit for bit: structure, dtypes, values."""
    assert jax.tree.structure(left) == jax.tree.structure(right), f"{what}: structure differs"
    for (name, a), b in zip(trees.named(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=f"{what} at {name}", strict=True)


def assert_close(left: PyTree, right: PyTree, what: str, tolerance: float = 1e-6) -> None:
    """Within a relative tolerance that compilation in another context explains."""
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=what)


def with_scale(state: Any, scale: float) -> Any:
    """A state whose scalers have this scale."""

    def node(x: Any) -> Any:
        name = holds(type(x)).scale
        return x._replace(**{name: jnp.full_like(getattr(x, name), scale)}) if name else x

    return jax.tree.map(node, state, is_leaf=lambda x: bool(holds(type(x)).scale))


def stack(grads: Sequence[PyTree]) -> PyTree:
    """Stack trees on a leading dimension."""
    return jax.tree.map(lambda *x: jnp.stack(x), *grads)


def types_of(tree: PyTree) -> list[Any]:
    """Shape, dtype and weak type of every leaf."""
    return [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
