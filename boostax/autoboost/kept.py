"""States that wait on the host while other candidates have the device."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


class Kept(NamedTuple):
    """An array on the host, and what it takes to make it one of the device's again."""

    data: Any
    sharding: Any
    key: Any


def fetched(tree: PyTree) -> PyTree:
    """A copy on the host, where it takes none of the device's memory from the other candidates."""

    def fetch(x: jax.Array) -> Kept:
        typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(x) if typed else x
        return Kept(np.array(data), x.sharding, jax.random.key_impl(x) if typed else None)

    return jax.tree.map(fetch, tree)


def placed(tree: PyTree) -> PyTree:
    """A new copy on the device, to be donated."""

    def place(x: Kept) -> jax.Array:
        if x.key is not None:
            return jax.device_put(jax.random.wrap_key_data(x.data, impl=x.key), x.sharding)
        return jax.device_put(x.data, x.sharding, may_alias=False)

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, Kept))
