# SPDX-License-Identifier: Apache-2.0
"""Compare the devices' copies of replicated arrays.

JAX treats a replicated array as one array, even if the devices' copies differ, because a bit
flipped or one process used another seed. ``check_replicas`` and ``Checkpointer`` find such copies.
Every device reduces the words of its copy to two sums mod 2**32, a plain sum and a sum weighted by
odd numbers. Then the sums of all devices are compared. An odd factor is invertible mod 2**32, so
one altered word always changes the weighted sum. Integer sums are exact in any order.

Each device sends 8 bytes for each distinct sharding among the leaves. The sums of each leaf are
sent only if these 8 bytes differ between devices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax

from boostax._core import axes
from boostax._core.norms import add_both


class Copies(NamedTuple):
    """The result of a comparison, equal on all devices.

    Attributes:
      equal: bool scalar, whether the sums of every leaf agree on all copies.
      culprits: i32 ``[leaves]``, for each leaf the replica whose copy agrees with the fewest other
        copies (the last such replica); -1 if all copies of the leaf are equal.
    """

    equal: jax.Array  # [] bool
    culprits: jax.Array  # [leaves] int32


def words(leaf: jax.Array) -> jax.Array:
    """Return the bits of an array as unsigned integers of 32 bits."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    if floating or leaf.dtype.itemsize == 8:
        bits = jnp.finfo(leaf.dtype).bits if floating else 64
        leaf = lax.bitcast_convert_type(leaf, f"uint{min(bits, 32)}")
    return leaf.astype(jnp.uint32)


def weighted(words: jax.Array) -> jax.Array:
    """Multiply each word by an odd number, which differs for each position."""
    factor = jnp.uint32(1)
    stride = 2
    for axis in reversed(range(words.ndim)):
        factor += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    return words * factor


def sums(leaves: Sequence[jax.Array]) -> jax.Array:
    """Return the plain and the weighted sum of each leaf's words, ``[leaves, 2]``.

    Each leaf is read once. For a single read, XLA:CPU needs one reduction with two results, while a
    TPU and a GPU fuse two reductions of one operand.
    """
    zero = np.zeros((), np.uint32)
    pairs = [(bits := words(x), weighted(bits)) for x in leaves]
    reduced = lax.platform_dependent(
        pairs,
        cpu=lambda pairs: [lax.reduce(x, (zero, zero), add_both, range(x[0].ndim)) for x in pairs],
        default=lambda pairs: [tuple(x.sum(dtype=x.dtype) for x in pair) for pair in pairs],
    )
    return jnp.stack([jnp.stack(pair) for pair in reduced])


def on_mesh(
    mesh: jax.sharding.Mesh, order: tuple[str, ...], specs: tuple[P, ...], extra: Sequence[int] = ()
) -> Callable[[list[jax.Array], jax.Array], Copies]:
    """Return a function that compares leaves of these specs; the culprits are device indices."""
    entries = [[x if isinstance(x, tuple) else (x,) for x in spec] for spec in specs]
    sharded = [frozenset(name for names in entry for name in names if name) for entry in entries]
    groups, kinds = classes(order, [mesh.shape[name] for name in order], sharded)
    fn = functools.partial(compared, extra=extra, names=order, groups=groups, kinds=kinds)
    return jax.shard_map(fn, mesh=mesh, in_specs=([*specs], P()), out_specs=P(), check_vma=False)


def classes(
    order: tuple[str, ...], sizes: Sequence[int], sharded: Sequence[frozenset[str]]
) -> tuple[np.ndarray, list[int]]:
    """Return ``groups`` and ``kinds`` for ``compared``, from the axes that shard each leaf."""
    positions = np.stack(np.unravel_index(np.arange(np.prod(sizes)), tuple(sizes)))
    kinds = list(dict.fromkeys([frozenset[str](), *sharded]))
    shards = [np.array([[name in kind] for name in order]) * positions for kind in kinds]
    groups = np.stack([np.ravel_multi_index(tuple(x), tuple(sizes)) for x in shards])
    return groups, [kinds.index(x) for x in sharded]


def compared(
    leaves: list[jax.Array],
    due: jax.Array,
    extra: Sequence[int],
    names: tuple[str, ...],
    groups: np.ndarray,
    kinds: list[int],
) -> Copies:
    """Compare the leaves of this device with their copies on other devices.

    Args:
      leaves: the shards of this device.
      due: bool scalar, whether to compare now. Each device reads its own copy of ``due``, so a
        device with a different count of calls is found.
      extra: numbers of this process, such as checksums of its program. In ``culprits`` these
        numbers precede the leaves.
      names: the axes of all devices.
      groups: ``[classes, devices]``; devices with the same number have copies of the same shard.
      kinds: the class of each leaf.
    """
    numbers = jnp.asarray(np.repeat(np.array([extra], np.uint32).T, 2, 1))

    def compute() -> jax.Array:
        return jnp.concatenate([numbers, sums(leaves)])

    branches = [lambda: axes.zeros(jax.eval_shape(compute)), compute]
    local = lax.switch(due.astype(jnp.int32), branches)
    row_kinds = np.array([0] * len(extra) + kinds)
    odd = (2 * np.arange(len(row_kinds), dtype=np.uint32) + 1)[:, None]
    rows = [local * odd * (row_kinds == i)[:, None] for i in range(len(groups))]
    total = axes.to_varying(jnp.stack([x.sum(0, dtype=jnp.uint32) for x in rows]), names)
    totals = axes.gather(total, names)
    first = np.stack([np.argmax(x[:, None] == x, 1) for x in groups], 1)
    equal = jnp.all(totals == jnp.take_along_axis(totals, first[..., None], 0))

    def culprits() -> jax.Array:
        gathered = axes.gather(axes.to_varying(local, names), names)

        def culprit(row: tuple[jax.Array, jax.Array]) -> jax.Array:
            copies, kind = row
            group = jnp.asarray(groups)[kind]
            unlike = jnp.sum((group[:, None] == group) & jnp.any(copies[:, None] != copies, -1), 1)
            last = len(group) - 1 - jnp.argmax(unlike[::-1])
            return jnp.where(unlike.max() > 0, last, -1).astype(jnp.int32)

        return lax.map(culprit, (gathered.swapaxes(0, 1), jnp.asarray(row_kinds)))

    branches = [culprits, lambda: axes.zeros(jax.eval_shape(culprits)) - 1]
    return Copies(equal, lax.switch(equal.astype(jnp.int32), branches))
