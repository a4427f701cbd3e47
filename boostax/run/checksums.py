"""What identifies a saved leaf: shape, dtype, and a checksum that sharding does not change."""

import json
import zlib
from typing import Any

import jax
import jax.numpy as jnp

Leaves = dict[str, dict[str, Any]]

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def describe(leaves: dict[str, Any]) -> Leaves:
    """Shape, dtype and checksum of each leaf, the sums computed where the leaf is."""
    sums = jax.device_get(_checksums(leaves))
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "checksum": int(sums[name])}
        for name, leaf in leaves.items()
    }


@jax.jit
def _checksums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _checksum(leaf) for name, leaf in leaves.items()}


def _checksum(leaf: jax.Array) -> jax.Array:
    """Sum of all words, each times an odd number of its own, mod 2**32.

    An odd factor is invertible, so one altered word always shows; integer sums do not depend on
    how the leaf is sharded.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _checksum(jax.random.key_data(leaf))
    if jnp.iscomplexobj(leaf):
        return _checksum(leaf.real) + 3 * _checksum(leaf.imag)
    if jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize == 8:
        leaf = jax.lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize])
    words = leaf.astype(jnp.uint32)
    factor, stride = jnp.uint32(1), 2
    for axis in reversed(range(words.ndim)):
        count = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        factor = factor + count * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    return jnp.sum(words * factor, dtype=jnp.uint32)


def text_checksum(record: dict[str, Any]) -> int:
    """Checksum of a JSON record."""
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
