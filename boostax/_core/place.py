# SPDX-License-Identifier: Apache-2.0
"""Arrays over the devices of several processes, each of which holds its own part."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

PyTree = Any


def place(tree: PyTree, shardings: PyTree) -> PyTree:
    """``jax.device_put`` of a tree that is the same in every process.

    Over devices of several processes ``device_put`` compares every leaf across all of them first;
    here each process cuts its own part out of its own copy, without a word to the others.

    Args:
      tree: arrays of the host or of this process's devices, equal in all processes; or arrays that
        are spread over the processes already.
      shardings: one for each leaf.

    Returns:
      The placed tree. Cost: of each leaf that is new to the devices, a copy through the host where
      they belong to several processes.
    """
    return jax.tree.map(_put, tree, shardings)


def place_rows(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """A batch of which each process has its own rows, in the order of its devices.

    Args:
      tree: arrays whose first dimension are this process's rows; or placed arrays.
      sharding: of the whole batch, over its first dimension.

    Returns:
      The whole batch, each row on the device it belongs to. Nothing travels.
    """

    def put(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.device_put(x, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    return jax.tree.map(put, tree)


def own_rows(sharding: NamedSharding, size: int) -> np.ndarray[Any, Any]:
    """Which rows of a batch of ``size`` lie on this process's devices, ascending."""
    indices = sharding.addressable_devices_indices_map((size,)).values()
    rows = [np.arange(size)[index] for index in indices if index is not None]
    return np.unique(np.concatenate(rows))


def on_host(tree: PyTree) -> PyTree:
    """Arrays of this process's devices as NumPy's; keys and what is spread stay as they are."""

    def fetch(x: Any) -> Any:
        stays = not x.is_fully_addressable or _is_key(x)
        return x if stays else np.asarray(x)

    return jax.tree.map(fetch, tree)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _put(x: Any, sharding: Sharding) -> jax.Array:
    if sharding.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
        return jax.device_put(x, sharding)
    if _is_key(x):
        data = _put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    # A copy for each device: on CPU they would share this memory, and the state is donated.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))
