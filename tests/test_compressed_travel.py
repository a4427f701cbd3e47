"""What compressed reductions put on the wire, counted from the jaxpr and read in compiled text."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from reducing import mapped, sends, updating

import boostax

MILLION = 2**20
MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))


def test_collectives_do_not_grow_with_the_leaves():
    for make in (boostax.top_k_reduce, boostax.int8_reduce, boostax.reduce.power_sgd_reduce):
        counts = [len(sends(updating(make("data")), [(64, 64)] * n, MESH)) for n in (1, 9)]
        assert counts[0] == counts[1] <= 6


def test_every_stage_of_a_warm_up_sends_its_own_share():
    tx = boostax.top_k_reduce("data", {0: 0.5, 100: 0.1, 200: 0.01})
    found = sends(updating(tx), [MILLION], MESH)
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
def test_the_compiler_keeps_narrow_types(mesh, tx, expected):
    """What is counted in the jaxpr is what XLA:CPU moves."""
    text = mapped(updating(tx), mesh).lower(jnp.zeros((8, 2**14))).compile().as_text()
    for operation, dtype in expected.items():
        lines = [line for line in text.splitlines() if re.search(rf" {operation}(-start)?\(", line)]
        assert any(re.search(rf"\b{dtype}\[", line.split("=", 1)[1]) for line in lines)
