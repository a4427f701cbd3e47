"""Clipping by the global norm, Optax's where leaves are whole and right on shards; and AdaGC."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import NamedSharding, P
from lanes import spread
from reducing import mesh_of

import boostax

GRADS = {
    "w": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32),
    "b": np.random.default_rng(1).normal(size=(6,)).astype(np.float32),
    "c": np.array([1 + 2j, 3 - 1j], np.complex64),
}
SPECS = {"w": P("fsdp"), "b": P(), "c": P("fsdp")}


@pytest.mark.parametrize(("max_norm", "dtype"), spread([0.5, 3.0, 1e3], ["float32", "bfloat16"]))
def test_whole_leaves_are_clipped_as_by_optax(max_norm, dtype):
    grads = jax.tree.map(lambda x: x if np.iscomplexobj(x) else jnp.asarray(x, dtype), GRADS)
    ours, theirs = (
        tx(max_norm).update(grads, optax.EmptyState())[0]
        for tx in (boostax.model.clip_by_global_norm, optax.clip_by_global_norm)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize(("max_norm", "shards"), spread([0.5, 1e3], [2, 1]))
def test_shards_are_clipped_by_the_norm_of_the_whole(max_norm, shards):
    mesh = mesh_of(fsdp=shards)

    def clipped(tx, names=tuple(GRADS), grads=GRADS, **how):
        update = lambda g: tx.update(g, optax.EmptyState())[0]  # noqa: E731
        specs = {name: SPECS[name] for name in names}
        mapped = jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=specs, **how)
        return jax.jit(mapped)({name: grads[name] for name in names})

    expected = optax.clip_by_global_norm(max_norm).update(GRADS, optax.EmptyState())[0]
    found = clipped(boostax.model.clip_by_global_norm(max_norm, shard_axes="fsdp"))
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6)
    # A norm that is not finite shows in every leaf.
    tx = boostax.model.clip_by_global_norm(max_norm, shard_axes="fsdp")
    spoiled = GRADS | {"b": np.full(6, np.nan, np.float32)}
    assert all(np.isnan(x).all() for x in jax.tree.leaves(clipped(tx, grads=spoiled)))
    with pytest.raises(ValueError, match="Leave check_vma on"):
        clipped(tx, check_vma=False)
    if shards > 1 and max_norm < 1:
        # The trap: Optax's norm is that of the shards of each device.
        wrong = clipped(boostax.model.clip_by_global_norm(max_norm), ("w", "c"))
        assert abs(np.asarray(wrong["w"]) / np.asarray(expected["w"]) - 1).max() > 0.1


# AdaGC: every leaf to its own running norm.


SHAPES = {"a": (3,), "b": (8, 2)}
OPTIONS = {"factor": 1.1, "decay": 0.9, "warmup": 5, "max_norm": 1.5}


def gradients(steps=20):
    rng = np.random.default_rng(0)
    draw = lambda: {k: np.float32(rng.normal(size=s)) for k, s in SHAPES.items()}  # noqa: E731
    grads = [draw() for _ in range(steps)]
    grads[11]["a"] *= 30
    grads[14]["b"][0, 0] = np.nan
    return grads


def reference(grads):
    """Clipped gradients and running norms in float64; ``None`` for what is not finite."""
    norms, steps, clipped = dict.fromkeys(SHAPES, np.inf), 0, []
    for given in grads:
        size = {k: np.linalg.norm(np.float64(g)) for k, g in given.items()}
        total, early = np.hypot(*size.values()), steps < OPTIONS["warmup"]
        if not np.isfinite(total):
            clipped.append(None)
            continue
        bound = {k: min(size[k], 1.1 * norms[k]) for k in SHAPES}
        if early:
            bound = {k: size[k] * min(1, 1.5 / total) for k in SHAPES}
        clipped.append({k: np.float64(g) * bound[k] / size[k] for k, g in given.items()})
        later = {k: 0.9 * norms[k] + 0.1 * bound[k] for k in SHAPES}
        norms = {k: min(norms[k], bound[k]) for k in SHAPES} if early else later
        steps += 1
    return clipped, norms, steps


def test_leaves_are_clipped_to_their_running_norms_as_in_float64():
    """Global clipping first; what is not finite is seen and leaves the state unchanged."""
    clipped, norms, steps = reference(gradients())
    for placed in (False, True):
        params = {k: jnp.zeros(s) for k, s in SHAPES.items()}
        if placed:
            mesh = mesh_of(fsdp=4)
            specs = {"a": NamedSharding(mesh, P()), "b": NamedSharding(mesh, P("fsdp"))}
            params = jax.device_put(params, specs)
        tx = boostax.model.adagc(**OPTIONS)
        state, update = tx.init(params), jax.jit(tx.update)
        for given, wanted in zip(gradients(), clipped, strict=True):
            given = jax.tree.map(lambda g, p: jax.device_put(g, p.sharding), given, params)
            updates, state = update(given, state)
            if wanted is None:
                assert not jnp.isfinite(updates["b"]).all()
            else:
                wanted = jax.tree.map(np.float32, wanted)
                chex.assert_trees_all_close(updates, wanted, rtol=2e-5, atol=1e-7)
        chex.assert_trees_all_close(state.norms, jax.tree.map(np.float32, norms), rtol=2e-5)
        assert int(state.steps) == steps == 19


def test_a_leaf_without_a_gradient_at_first_is_not_held_at_zero():
    """Defect guarded against: the running norm of such a leaf is zero, and a share of it too."""
    tx = boostax.model.adagc(warmup=2)
    state = tx.init({"a": jnp.zeros(()), "late": jnp.zeros(())})
    for late in (0.0, 0.0, 0.0, 1.0):
        updates, state = tx.update({"a": jnp.float32(1), "late": jnp.float32(late)}, state)
    assert updates["late"] == 1


@pytest.mark.parametrize("power", [70, 100, -80])
def test_adagc_clips_finite_gradients_of_any_size(power):
    """The square of a norm above 1e19 is infinite; a finite gradient became NaN."""
    tx = boostax.model.adagc(warmup=1)
    g = {"w": jnp.array([0.6, 0.8]) * 2.0**power, "b": jnp.zeros(2)}
    updates, state = tx.update(g, tx.init(g))
    np.testing.assert_allclose(updates["w"], g["w"] / max(2.0**power, 1), rtol=1e-6)
    assert state.steps == 1 and (updates["b"] == 0).all()
