"""Clipping by the global norm: Optax's where leaves are whole, right where they are shards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from reducing import mesh_of

import boostax

GRADS = {
    "w": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32),
    "b": np.random.default_rng(1).normal(size=(6,)).astype(np.float32),
    "c": np.array([1 + 2j, 3 - 1j], np.complex64),
}
SPECS = {"w": P("fsdp"), "b": P(), "c": P("fsdp")}


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_leaves_are_clipped_as_by_optax(max_norm, dtype):
    cast = lambda x: x if np.iscomplexobj(x) else jnp.asarray(x, dtype)  # noqa: E731
    grads = jax.tree.map(cast, GRADS)
    ours, theirs = (
        tx(max_norm).update(grads, optax.EmptyState())[0]
        for tx in (boostax.model.clip_by_global_norm, optax.clip_by_global_norm)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
@pytest.mark.parametrize("shards", [2, 1])
def test_shards_are_clipped_by_the_norm_of_the_whole(max_norm, shards):
    mesh = mesh_of(fsdp=shards)

    def clipped(tx, names=tuple(GRADS), grads=GRADS):
        update = lambda g: tx.update(g, optax.EmptyState())[0]  # noqa: E731
        specs = {name: SPECS[name] for name in names}
        mapped = jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=specs)
        return jax.jit(mapped)({name: grads[name] for name in names})

    expected = optax.clip_by_global_norm(max_norm).update(GRADS, optax.EmptyState())[0]
    found = clipped(boostax.model.clip_by_global_norm(max_norm, shard_axes="fsdp"))
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6)
    # A norm that is not finite shows in every leaf.
    tx = boostax.model.clip_by_global_norm(max_norm, shard_axes="fsdp")
    spoiled = GRADS | {"b": np.full(6, np.nan, np.float32)}
    assert all(np.isnan(x).all() for x in jax.tree.leaves(clipped(tx, grads=spoiled)))
    if shards > 1 and max_norm < 1:
        # The trap: Optax's norm is that of the shards of each device.
        wrong = clipped(boostax.model.clip_by_global_norm(max_norm), ("w", "c"))
        assert abs(np.asarray(wrong["w"]) / np.asarray(expected["w"]) - 1).max() > 0.1


def test_shards_need_types():
    mesh = mesh_of(fsdp=2)
    tx = boostax.model.clip_by_global_norm(1.0, shard_axes="fsdp")
    update = lambda g: tx.update(g, optax.EmptyState())[0]  # noqa: E731
    mapped = jax.shard_map(update, mesh=mesh, in_specs=(SPECS,), out_specs=SPECS, check_vma=False)
    with pytest.raises(ValueError, match="Leave check_vma on"):
        mapped(GRADS)
