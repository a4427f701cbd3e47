# SPDX-License-Identifier: Apache-2.0
"""Copies between the host and devices, which may belong to several processes."""

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core.types import PyTree


def place(tree: PyTree, shardings: PyTree) -> PyTree:
    """Place on devices a tree that is equal in every process.

    ``jax.device_put`` to devices of several processes first compares every leaf across processes.
    This function slices each process's own copy instead, without communication.

    Args:
      tree: arrays on the host or on this process's devices, equal in all processes; or arrays that
        are already sharded over the processes.
      shardings: a sharding for each leaf.

    Returns:
      The placed tree. Cost: for devices of several processes, one copy through the host for each
      leaf that is not on these devices yet.
    """

    def placed(x: PyTree, sharding: jax.sharding.Sharding) -> jax.Array:
        if sharding.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
            return jax.device_put(x, sharding)
        if is_key(x):
            data = placed(jax.random.key_data(x), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        host = np.asarray(x)
        # Each device gets a copy, because the state is donated. Without copies, CPU devices would
        # share the memory of ``host``.
        return jax.make_array_from_callback(host.shape, sharding, lambda i: np.array(host[i]))

    return jax.tree.map(placed, tree, shardings)


def is_key(x: object) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
