"""The formulas of ``docs/choose.md``: bytes that a device sends in a step, on a ring."""

import jax
import jax.numpy as jnp
import optax
import pytest
from replica_runs import AXIS, wire_bytes

import boostax

SHAPES = {"kernel": (2048, 512), "other": (1024, 1024), "bias": (4096,)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
P = sum(4 * x.size for x in PARAMS.values())


def ring(n):
    """The share of an array that a device sends in an all-gather or a reduce-scatter."""
    return (n - 1) / n


def half(n):
    return ring(n) * P


def places(size):
    """A value and a place, in so many bytes, of each element that is sent."""
    return lambda n: (n - 1) * P / 4 / 100 * size


def factors(n):
    """One factor of each matrix, of rank 1, and the vector as it is."""
    return 2 * ring(n) * 4 * ((2048 + 512 + 1024 + 1024) / 2 + 4096)


FORMULAS = {
    "mean": (lambda: boostax.all_reduce(AXIS), lambda n: 2 * ring(n) * P, 1e-6),
    "mean in bf16": (lambda: boostax.all_reduce(AXIS, dtype="bfloat16"), half, 1e-6),
    "int8": (lambda: boostax.int8_reduce(AXIS), lambda n: ring(n) * P / 2, 0.01),
    "int8, blocks of 256": (
        lambda: boostax.int8_reduce(AXIS, block=256),
        lambda n: ring(n) * P / 2 * (1 + 4 / 256),
        0.01,
    ),
    "top-k of 1%": (
        lambda: boostax.top_k_reduce(AXIS, 0.01),
        lambda n: 2 * (n - 1) * P / 100,
        0.01,
    ),
    "mean in f16": (lambda: boostax.all_reduce(AXIS, dtype="float16"), half, 1e-4),
    "top-k of 1%, blocks": (lambda: boostax.top_k_reduce(AXIS, block=1000), places(6), 0.01),
    "top-k of 1%, blocks in bf16": (
        lambda: boostax.top_k_reduce(AXIS, block=1000, value_dtype="bfloat16"),
        places(4),
        0.01,
    ),
    "PowerSGD": (lambda: boostax.reduce.power_sgd_reduce(AXIS, 1), factors, 1e-3),
    "AdaSum": (lambda: boostax.adasum(AXIS), lambda n: 2 * ring(n) * P, 0.01),
    "AdaSum in bf16": (lambda: boostax.adasum(AXIS, wire_dtype="bfloat16"), half, 0.01),
    "AdaSum in f16": (lambda: boostax.adasum(AXIS, wire_dtype="float16"), half, 0.01),
    "local updates, every 16": (
        lambda: boostax.reduce.local_updates(optax.sgd(1.0), AXIS, 16),
        lambda n: 2 * ring(n) * P / 16,
        0.01,
    ),
}


@pytest.mark.parametrize("replicas", [2, 8])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_device_sends_what_the_formula_says(name, replicas):
    make, formula, rtol = FORMULAS[name]
    found = wire_bytes(make(), PARAMS, share=1 / 16, replicas=replicas)
    assert found == pytest.approx(formula(replicas), rel=rtol)
