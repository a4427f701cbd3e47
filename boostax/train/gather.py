# SPDX-License-Identifier: Apache-2.0
"""All-gathers of sharded params in a lower precision than that of the stored shards."""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from boostax._core import axes, checks, trees, types
from boostax._core.placement import Placement
from boostax._core.replicas import is_per_replica, without
from boostax._core.types import PyTree
from boostax.precision.formats import FORMATS
from boostax.train.apply import placement_of

Gather = Literal["bfloat16", "int8"]
_WHO = "gather_params"


@checks.arguments
def gather_params(
    params: types.Params, wire_dtype: Gather, *, axis_name: axes.AxisName | None = None
) -> Callable[[types.Params], types.Params]:
    r"""All-gather sharded params (FSDP) in bf16 or int8, while the shards stay exact.

    The loss and its gradient use rounded params, :math:`Q(w)`. The optimizer updates :math:`w`, so
    rounding errors do not accumulate. With ``"int8"`` each block of at least 128 elements of a
    shard has its own scale, :math:`Q(w) = s\,\mathrm{round}(w / s)` with :math:`s = \max|w| / 127`
    over the block, rounded to nearest. If an element is not finite, the whole block becomes NaN.
    Params that are not sharded over the replica axes, and leaves that are not floating arrays, are
    returned unchanged.

    Call ``gather_params`` in plain ``jit``, where params are global arrays. With
    ``make_train_step(gather=)``, the step gathers the params; do not call ``gather_params``.

    Args:
      params: as in ``on_mesh``; only the mesh and the shardings are read.
      wire_dtype: ``"bfloat16"`` or ``"int8"``.
      axis_name: the replica axis, or axes, over which the batch is split; by default the only axis
        of the mesh.

    Returns:
      A function from params to params that are replicated over the replica axes, for
      ``boostax.value_and_grad(mesh=)``. Cost: a copy of the gathered params, and one all-gather per
      sharded leaf. An all-gather sends 2 bytes per element in bf16. In int8, it sends 1 byte per
      element and one f32 per block.

    Raises:
      ValueError, TypeError: an argument is out of range, or no param is sharded over the replica
        axes.

    Example:
      >>> import boostax, jax, jax.numpy as jnp
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> w = jax.device_put(jnp.linspace(0.0, 1.0, 128), NamedSharding(mesh, P("data")))
      >>> gather = boostax.train.gather_params(w, "int8", axis_name="data")
      >>> oracle = boostax.value_and_grad(lambda w, x: jnp.sum(w * x), mesh=mesh, axis_name="data")
      >>> loss, grads = jax.jit(lambda w, x: oracle(gather(w), (), x))(w, jnp.ones((1, 128)))
      >>> bool(abs(loss - w.sum()) < 0.5)
      True

    References:
      Wang et al., ZeRO++, https://arxiv.org/abs/2306.10209, 2023 (all-gathers of weights in int8
      blocks).
    """
    return gathering(_WHO, wire_dtype, placement_of(_WHO, params, axis_name))


def gathering(
    who: str, dtype: Gather, place: Placement, exact: Collection[str] = ()
) -> Callable[[PyTree], PyTree]:
    """Return ``gather_params`` for a known placement; leaves with names in ``exact`` stay exact."""
    checks.choice(who, "wire_dtype", dtype, Gather, "Full precision needs no gather_params.")
    sharded = {k: spec for k, spec in place.specs.items() if spec != without(spec, place.names)}
    allowed = f"sharded over {', '.join(place.names)} to be gathered as {dtype}"
    hint = "Shard params (FSDP), or use boostax.precision.store(optimizer, params='remainder')."
    checks.require(bool(sharded), who, "params", {*place.specs.values()}, allowed, hint)

    def leaf(path: tuple[PyTree, ...], x: jax.Array) -> jax.Array:
        spec = None if trees.path_name(path) in exact else sharded.get(trees.plain_path(path))
        if spec is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        entries = [*spec, *(None for _ in range(x.ndim - len(spec)))]
        names = [x if isinstance(x, tuple) else (x,) if x else () for x in entries]
        shards = [math.prod(place.mesh.shape[name] for name in dim) for dim in names]
        unsharded = without(spec, place.names)
        # The first constraint shards the encoded param like the param, so that XLA gathers the
        # encoded param and not the param.
        specs = PartitionSpec(*entries), unsharded
        shardings = [NamedSharding(place.auto_mesh, spec) for spec in specs]
        send = functools.partial(functools.reduce, lax.with_sharding_constraint, shardings)
        return place.pinned(lambda x: rounded(x, shards, dtype, send), unsharded)(x)

    return lambda x: x if is_per_replica(x) else jax.tree.map_with_path(leaf, x)


def rounded(
    x: jax.Array, shards: Sequence[int], dtype: Gather, send: Callable[..., PyTree] = lambda x: x
) -> jax.Array:
    """Return ``x`` as replicas receive it, if dimension ``i`` is split into ``shards[i]`` shards.

    ``send`` sends an array and returns the received array. The array is ``x`` in bf16, or the codes
    or the scales, of shape ``[*shards, ...]``.
    """
    if dtype == "bfloat16":
        # XLA may remove a pair of conversions and gather in the wide dtype, but XLA does not remove
        # this rounding.
        low = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return send(low.astype(jnp.bfloat16)).astype(x.dtype)
    # The shape is ``[*shards, *shard]``, so that no block spans two shards.
    sizes = [size for n, shard in zip(x.shape, shards, strict=True) for size in (shard, n // shard)]
    to_shards = (*range(0, 2 * x.ndim, 2), *range(1, 2 * x.ndim, 2))
    parts = x.astype(jnp.float32).reshape(sizes).transpose(to_shards)
    encode = functools.partial(FORMATS[dtype].encode, noise=None)
    decode = FORMATS[dtype].decode
    for _ in shards:
        encode, decode = jax.vmap(encode), jax.vmap(decode)
    array = decode(*map(send, encode(parts))).transpose([*map(to_shards.index, range(2 * x.ndim))])
    return array.reshape(x.shape).astype(x.dtype)
