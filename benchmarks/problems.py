"""The sizes and the model that the benchmarks share."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
WIDTH, LAYERS = 1024, 10


def params() -> PyTree:
    """10.5M f32 params in ten square leaves."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {f"layer{i}": 0.03 * jax.random.normal(k, (WIDTH, WIDTH)) for i, k in enumerate(keys)}


def grads(dtype: Any = jnp.float32) -> PyTree:
    """Gradients of unit size for ``params``."""
    keys = jax.random.split(jax.random.key(1), LAYERS)
    return {
        f"layer{i}": jax.random.normal(k, (WIDTH, WIDTH)).astype(dtype) for i, k in enumerate(keys)
    }


def batch(rows: int) -> PyTree:
    """Inputs and targets for ``loss``."""
    x, y = jax.random.normal(jax.random.key(2), (2, rows, WIDTH))
    return {"x": x, "y": y}


def loss(params: PyTree, batch: PyTree) -> jax.Array:
    """A plain tanh MLP: mean squared error."""
    x = batch["x"]
    for i in range(LAYERS):
        x = jnp.tanh(x @ params[f"layer{i}"])
    return jnp.mean((x - batch["y"]) ** 2)


def nbytes(tree: PyTree) -> int:
    """Bytes of all leaves."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))
