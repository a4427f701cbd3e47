"""The formulas of ``docs/choose.md``: bytes that a device sends in a step, on a ring; and how."""

import collections
import functools
import math
import re

import costs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from lanes import spread
from reducing import mapped, sends, updating

import boostax
from boostax.reduce import local_updates, partial_average

AXIS, MILLION = "data", 2**20
MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
SHAPES = {"kernel": (2048, 512), "other": (1024, 1024), "bias": (4096,)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
P = sum(4 * x.size for x in PARAMS.values())


# The share of an array that a device sends in an all-gather or a reduce-scatter.
ring = lambda n: (n - 1) / n  # noqa: E731
half = lambda n: ring(n) * P  # noqa: E731
# A reduce-scatter and an all-gather.
both = lambda n: 2 * half(n)  # noqa: E731
# Codes of int8, and an f32 scale for each 256 of them.
blocks = lambda n: half(n) / 2 * (1 + 4 / 256)  # noqa: E731
# A value and a place, in so many bytes, of each element that is sent.
places = lambda size: lambda n: (n - 1) * P / 4 / 100 * size  # noqa: E731


def chunks(n):
    """Of 512 elements 18 numbers of 2 bytes, in whole tiles, and 16 codes; and two sums."""
    rows = P // 4 // 512
    return (n - 1) * (2 * 2048 * math.ceil(rows * 18 / 2048) + rows * 16 / 4) + 16 * 2 * ring(n)


long_rows = functools.partial(boostax.int8_reduce, AXIS, block=4096)
low_blocks = functools.partial(boostax.top_k_reduce, AXIS, block=1000, wire_dtype="bfloat16")
two_bits = functools.partial(boostax.top_k_reduce, AXIS, 1 / 32, block=512, bits=2)
SGD, LOCAL, PARTIAL = optax.sgd(1.0), "local updates, every 16", "partial average of bf16 params"
FORMULAS = {
    "mean": (lambda: boostax.all_reduce(AXIS), both, 1e-6),
    "mean in bf16": (lambda: boostax.all_reduce(AXIS, wire_dtype="bfloat16"), half, 1e-6),
    "int8": (lambda: boostax.int8_reduce(AXIS), blocks, 0.001),
    "int8, long rows": (long_rows, lambda n: half(n) / 2, 0.01),
    "top-k of 1%": (lambda: boostax.top_k_reduce(AXIS, 0.01), places(8), 0.01),
    "mean in f16": (lambda: boostax.all_reduce(AXIS, wire_dtype="float16"), half, 1e-4),
    "top-k of 1%, blocks": (lambda: boostax.top_k_reduce(AXIS, block=1000), places(6), 0.01),
    "top-k of 1%, blocks in bf16": (low_blocks, places(4), 0.01),
    "top-k of 1/32, blocks in 2 bits": (two_bits, chunks, 1e-9),
    "AdaSum": (lambda: boostax.adasum(AXIS), both, 0.01),
    "AdaSum in bf16": (lambda: boostax.adasum(AXIS, wire_dtype="bfloat16"), half, 0.01),
    "AdaSum in f16": (lambda: boostax.adasum(AXIS, wire_dtype="float16"), half, 0.01),
    LOCAL: (lambda: local_updates(SGD, 16, axis_name=AXIS), lambda n: both(n) / 16, 0.01),
    # One of the branches is taken in each step, and what is averaged travels in f32.
    PARTIAL: (lambda: partial_average(SGD, 3, axis_name=AXIS), lambda n: both(n) / 3, 1e-6),
}
LOW = jax.tree.map(lambda x: x.update(dtype=jnp.bfloat16), PARAMS)


@pytest.mark.parametrize(("name", "replicas"), spread(FORMULAS, [8, 2]))
def test_a_device_sends_what_the_formula_says(name, replicas):
    make, formula, rtol = FORMULAS[name]
    # The share of the steps in which each branch that sends is taken.
    share = 1 / 3 if name == PARTIAL else 1 / 16
    params = LOW if name == PARTIAL else PARAMS
    tx, mesh = make(), AbstractMesh((replicas,), (AXIS,), axis_types=(AxisType.Auto,))
    update = lambda grads: tx.update(grads, tx.init(grads), grads)[0]  # noqa: E731
    stacked = jax.tree.map(lambda x: x.update(shape=(replicas, *x.shape)), params)
    found = costs.collectives(mapped(update, mesh, out_specs=jax.P(AXIS), check_vma=False), stacked)
    sent = sum(c.wire_bytes * (share if c.conditional else 1) for c in found)
    assert sent == pytest.approx(formula(replicas), rel=rtol)


def test_collectives_do_not_grow_with_the_leaves():
    for make in (boostax.top_k_reduce, boostax.int8_reduce):
        counts = [len(sends(updating(make("data")), [(64, 64)] * n, MESH)) for n in (1, 9)]
        assert counts[0] == counts[1] <= 6


def test_a_fragment_is_all_that_is_sent_at_once():
    """Each in a branch of its own, and a step takes one of them."""
    tx = local_updates(SGD, 4, fragments=[0, 1, 1], axis_name="data")
    first = [jnp.zeros(shape) for shape in SHAPES.values()]
    sizes = collections.Counter()
    for c in sends(lambda p: tx.update(p, tx.init(first), p)[1].syncs, SHAPES.values(), MESH):
        sizes[c.branches] += c.bytes
    assert sorted(sizes.values()) == [4 * 2**20, 4 * (2**20 + 2**12)]


def test_every_stage_of_a_warm_up_sends_its_own_share():
    tx = boostax.top_k_reduce("data", {0: 0.5, 100: 0.1, 200: 0.01})
    # A value and a place of each element, in messages of their own.
    stages = sorted(c.bytes for c in sends(updating(tx), [MILLION], MESH) if c.conditional)[::2]
    # Padded to whole tiles.
    np.testing.assert_allclose(stages, [4 * MILLION * d for d in (0.01, 0.1, 0.5)], rtol=0.02)


NARROW = [
    (boostax.int8_reduce("data"), {"all-to-all": "s8", "all-gather": "s8"}),
    (boostax.top_k_reduce("data", block=1000), {"all-gather": "u16"}),
]


@pytest.mark.parametrize(("tx", "expected"), NARROW)
def test_the_compiler_keeps_narrow_types(mesh, tx, expected):
    """What is counted in the jaxpr is what XLA:CPU moves."""
    text = mapped(updating(tx), mesh).lower(jnp.zeros((8, 2**14))).compile().as_text()
    for operation, dtype in expected.items():
        lines = [line for line in text.splitlines() if re.search(rf" {operation}(-start)?\(", line)]
        assert any(re.search(rf"\b{dtype}\[", line.split("=", 1)[1]) for line in lines)
