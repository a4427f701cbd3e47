# SPDX-License-Identifier: Apache-2.0
"""Copies between the host and devices, which may belong to several processes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

PyTree = Any


def place(tree: PyTree, shardings: PyTree) -> PyTree:
    """Place a tree that is equal in every process on devices.

    ``jax.device_put`` to devices of several processes first compares every leaf across processes.
    Here each process slices its own copy, without communication.

    Args:
      tree: arrays on the host or on this process's devices, equal in all processes; or arrays that
        are already sharded over the processes.
      shardings: a sharding for each leaf.

    Returns:
      The placed tree. Cost: if the devices belong to several processes, one copy through the host
      of each leaf that is not on those devices yet.
    """
    return jax.tree.map(_put, tree, shardings)


def place_rows(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """Place a batch of which each process has the rows of its own devices, in device order.

    Args:
      tree: arrays whose first dimension holds the rows of this process; or placed arrays.
      sharding: the sharding of the global batch, over its first dimension.

    Returns:
      The global batch, each row on its device. Cost: no communication between processes.
    """

    def put(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.device_put(x, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    return jax.tree.map(put, tree)


def own_rows(sharding: NamedSharding, size: int) -> np.ndarray[Any, Any]:
    """Return the rows of a batch of ``size`` on this process's devices, ascending."""
    indices = sharding.addressable_devices_indices_map((size,)).values()
    rows = [np.arange(size)[index] for index in indices if index is not None]
    return np.unique(np.concatenate(rows))


def on_host(tree: PyTree) -> PyTree:
    """Copy this process's arrays to NumPy; PRNG keys and arrays of several processes stay."""

    def fetch(x: Any) -> Any:
        return x if not x.is_fully_addressable or _is_key(x) else np.asarray(x)

    return jax.tree.map(fetch, tree)


def _is_key(x: object) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _put(x: Any, sharding: Sharding) -> jax.Array:
    if sharding.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
        return jax.device_put(x, sharding)
    if _is_key(x):
        data = _put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    # Each device gets a copy: CPU devices would otherwise share memory, and the state is donated.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))
