"""Leaves that are large enough to travel in their own shape: cut along a dimension, or cut flat."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from lanes import lanes, spread
from reducing import at_once, the_one

import boostax
from boostax.reduce import exchange

SHAPES = {
    "rows": (256, 256),
    "columns": (3, 130, 512),
    "a kernel": (3, 3, 64, 256),
    "padded": (331, 257),
    "odd": (129, 131),
    "short rows": (4096, 10),
    "long rows": (16, 4100),
    "a vector": (20000,),
    "small": (7, 5),
}
REDUCTIONS = {
    "bf16": functools.partial(boostax.all_reduce, wire_dtype="bfloat16"),
    "f16": functools.partial(boostax.all_reduce, wire_dtype="float16"),
    "int8": boostax.int8_reduce,
    "int8 by blocks": functools.partial(boostax.int8_reduce, block=48),
    "int8 by chance": functools.partial(boostax.int8_reduce, rounding="stochastic"),
}


HALVES = ("float16", "bfloat16")
QUICK = ((8, None), (3, "bfloat16"))


@functools.cache
def gradients(replicas, seed=0):
    """With a part in common, and rows of different magnitude."""
    rng = np.random.default_rng(seed)

    def draw(shape):
        noise = rng.normal(size=shape) + rng.normal(size=(replicas, *shape))
        return np.float32(noise * 10.0 ** rng.uniform(-3, 3, (shape[0], *[1] * (len(shape) - 1))))

    return {name: draw(shape) for name, shape in SHAPES.items()}


@functools.cache
def reduced(name, replicas):
    """Results of every replica, and the state."""
    return at_once(REDUCTIONS[name]("data"))(gradients(replicas))


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_leaves_travel_in_their_own_shape_where_they_can(replicas):
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES.values()]
    found = exchange.chunks(leaves, replicas)
    names = list(SHAPES)
    alone = {names[p.indices[0]]: p.dim for p in found if p.block is None}
    packs = [{names[i] for i in p.indices} for p in found if p.block is not None]
    always = {"rows": 0, "columns": {3: 0}.get(replicas, 1), "a kernel": {3: 0}.get(replicas, 2)}
    sometimes = {
        2: {"padded": 0, "odd": 0, "short rows": 0, "long rows": 0},
        3: {"padded": 0, "odd": 0, "short rows": 0, "long rows": 1, "rows": 0},
        8: {"short rows": 0, "long rows": 0, "columns": 2},
    }[replicas]
    assert alone == always | sometimes
    assert sum(map(len, packs)) == len(SHAPES) - len(alone) and len(packs) == 1


@pytest.mark.parametrize("replicas", lanes([2, 3, 8], [3]))
@pytest.mark.parametrize("name", REDUCTIONS)
def test_what_is_sent_and_what_is_held_back_is_all(name, replicas):
    means, state = reduced(name, replicas)
    for leaf, rows in gradients(replicas).items():
        mean = np.asarray(means[leaf])
        assert mean.dtype == np.float32 and all(np.array_equal(x, mean[0]) for x in mean)
        whole, scale = reference.mean(rows), abs(rows).max()
        if hasattr(state, "residual"):
            held = np.float64(state.residual.local[leaf]).mean(0)
            np.testing.assert_allclose((mean[0] + held) / scale, whole / scale, rtol=0, atol=3e-6)
        else:
            # Two roundings, each relative to the largest of what shares a power of two.
            narrow = float(jnp.finfo({"bf16": jnp.bfloat16}.get(name, jnp.float16)).eps)
            np.testing.assert_allclose(mean[0], whole, rtol=0, atol=2 * narrow * scale)


@pytest.mark.parametrize("replicas", lanes([2, 3, 8], [3]))
def test_a_row_has_a_scale_of_its_own(replicas):
    """Rows of 1e-3 beside rows of 1e3 keep their digits."""
    means, _ = reduced("int8", replicas)
    for leaf in ("rows", "a kernel", "long rows"):
        rows = gradients(replicas)[leaf]
        step = 2 * abs(rows).max((0, -1)) / 127
        assert (abs(np.asarray(means[leaf][0]) - reference.mean(rows)).max(-1) <= step).all()


@pytest.mark.parametrize("case", lanes(itertools.product((2, 3, 8), (None, *HALVES)), QUICK))
def test_adasum_is_that_of_the_leaves(case):
    replicas, wire = case
    found = at_once(boostax.adasum("data", wire_dtype=wire))(gradients(replicas))[0]
    tolerance = 2e-6 if wire is None else 8 * float(jnp.finfo(wire).eps)
    found = [the_one(found[leaf]) for leaf in SHAPES]
    reference.assert_adasum(found, gradients(replicas).values(), tolerance)


def test_a_step_that_is_not_finite_leaves_the_residual():
    """Also what the second rounding would have added to a replica's slice."""
    tx, grads = REDUCTIONS["int8"]("data"), gradients(8)
    _, state = reduced("int8", 8)
    bad = {leaf: rows.copy() for leaf, rows in grads.items()}
    bad["small"][3, 0, 0] = np.nan
    means, after = jax.jit(jax.vmap(tx.update, axis_name="data"))(bad, state)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(means))
    chex.assert_trees_all_equal(after, state)


def test_leaves_of_different_dtypes_travel_together():
    with jax.enable_x64(True):
        grads = {name: rows[:2].astype("float64") for name, rows in gradients(2).items()}
        grads["rows"] = grads["rows"].astype("float32")
        means, state = jax.device_get(at_once(boostax.int8_reduce("data"))(grads))
    for leaf, rows in grads.items():
        assert means[leaf].dtype == rows.dtype == state.residual.local[leaf].dtype
        held = np.float64(state.residual.local[leaf]).mean(0)
        scale = abs(rows).max()
        whole = rows.astype("float64").mean(0)
        np.testing.assert_allclose((means[leaf][0] + held) / scale, whole / scale, atol=3e-6)


before = functools.partial(boostax.all_reduce, divide="before")
LARGEST = {
    **{str(x): (before, {"wire_dtype": x}) for x in (None, *HALVES)},
    **{f"AdaSum in {x}": (boostax.adasum, {"wire_dtype": x}) for x in HALVES},
}


@pytest.mark.parametrize(("name", "replicas"), spread(LARGEST, [3, 2, 8]))
def test_the_largest_gradients_stay_finite(name, replicas):
    """Rounded to half they may grow, but not beyond the range of f32."""
    make, options = LARGEST[name]
    largest = float(np.finfo(np.float32).max)
    rows = np.float32([[largest, -largest, 3.4e38, 1.0]] * replicas)
    result = np.asarray(at_once(make("data", **options))(rows)[0][0])
    np.testing.assert_allclose(result / largest, rows[0] / largest, rtol=0, atol=0.01)
