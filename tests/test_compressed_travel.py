"""What compressed reductions put on the wire, counted from the jaxpr and read in compiled text."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import boostax
from boostax._core import costs

MILLION = 2**20
MLP = {
    "0": {"kernel": (64, 128), "bias": (128,)},
    "1": {"kernel": (128, 128), "bias": (128,)},
    "2": {"kernel": (128, 10), "bias": (10,)},
}


def traced(update, shapes, replicas, **options):
    """The jaxpr of an update by so many devices, which need not be there."""
    mesh = AbstractMesh((replicas,), ("data",), axis_types=(AxisType.Auto,))
    leaf = lambda shape: jax.ShapeDtypeStruct((replicas, *shape), jnp.float32)  # noqa: E731
    grads = jax.tree.map(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple))
    inside = lambda g: update(jax.tree.map(lambda x: x[0], g))  # noqa: E731
    mapped = jax.shard_map(inside, mesh=mesh, in_specs=P("data"), out_specs=P(), **options)
    return jax.make_jaxpr(mapped)(grads)


def share_of_a_mean(tx, replicas=8, shapes=None):
    """Wire bytes, per step, over those of a mean in f32. Two branches take turns."""
    shapes = [(MILLION,)] if shapes is None else shapes
    found = costs.collectives(traced(updating(tx), shapes, replicas))
    sent = sum(c.wire_bytes / (1 + c.conditional) for c in found)
    sizes = jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))
    entries = sum(math.prod(shape) for shape in sizes)
    return sent / (2 * (replicas - 1) / replicas * 4 * entries)


def updating(tx):
    return lambda grads: tx.update(grads, tx.init(grads))[0]


@pytest.mark.parametrize(
    ("tx", "how", "least", "most"),
    [
        (boostax.all_reduce("data"), {}, 1.0, 1.0),
        (boostax.all_reduce("data", dtype="bfloat16"), {}, 0.49, 0.505),
        (boostax.all_reduce("data", dtype="float16"), {}, 0.49, 0.505),
        (
            boostax.all_reduce("data", dtype="float16"),
            {"shapes": [(MILLION // 8,)] * 8},
            0.49,
            0.505,
        ),
        (boostax.int8_reduce("data"), {}, 0.24, 0.27),
        # Two shots cost the same with any number of replicas.
        *((boostax.int8_reduce("data"), {"replicas": n}, 0.0, 0.27) for n in (2, 4, 16, 64)),
        (boostax.top_k_reduce("data", 0.01), {}, 0.07, 0.085),
        (boostax.top_k_reduce("data", 0.01, block=1000), {}, 0.05, 0.065),
        (boostax.top_k_reduce("data", block=1000, value_dtype="bfloat16"), {}, 0.03, 0.045),
        (boostax.reduce.power_sgd_reduce("data", 1), {"shapes": MLP}, 0.02, 0.04),
    ],
)
def test_bytes_on_the_wire(tx, how, least, most):
    assert least <= share_of_a_mean(tx, **how) <= most


def test_a_mask_before_a_dense_sum_saves_nothing():
    """The count is not taken in by zeros."""

    def masked(grads):
        rule = lambda g: jnp.where(jnp.abs(g) > 0.5, g, 0)  # noqa: E731
        return jax.tree.map(lambda g: jax.lax.pmean(rule(g), "data"), grads)

    found = costs.collectives(traced(masked, [(MILLION,)], 8))
    assert sum(c.wire_bytes for c in found) == 2 * 7 / 8 * 4 * MILLION


def test_collectives_do_not_grow_with_the_leaves():
    for make in (
        boostax.top_k_reduce,
        boostax.int8_reduce,
        boostax.reduce.power_sgd_reduce,
    ):
        few, many = (
            costs.collectives(traced(updating(make("data")), [(64, 64)] * count, 8))
            for count in (1, 9)
        )
        assert len(few) == len(many) <= 6


def test_every_stage_of_a_warm_up_sends_its_own_share():
    tx = boostax.top_k_reduce("data", {0: 0.5, 100: 0.1, 200: 0.01})
    found = costs.collectives(traced(updating(tx), [(MILLION,)], 8))
    # A value and a place of each element, in messages of their own.
    stages = sorted(c.bytes for c in found if c.conditional)[::2]
    # Padded to whole tiles.
    np.testing.assert_allclose(stages, [4 * MILLION * d for d in (0.01, 0.1, 0.5)], rtol=0.02)


@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (boostax.int8_reduce("data"), {"all-to-all": "s8", "all-gather": "s8"}),
        (boostax.top_k_reduce("data", block=1000), {"all-gather": "u16"}),
    ],
)
def test_the_compiler_keeps_narrow_types(tx, expected):
    """What is counted in the jaxpr is what XLA:CPU moves."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    local = lambda g: tx.update(g[0], tx.init(g[0]))[0]  # noqa: E731
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P()))
    text = mapped.lower(jnp.zeros((8, 2**14))).compile().as_text()
    for operation, dtype in expected.items():
        lines = [line for line in text.splitlines() if re.search(rf" {operation}(-start)?\(", line)]
        assert any(re.search(rf"\b{dtype}\[", line.split("=", 1)[1]) for line in lines)
