"""Sparse gradients (BCOO) are made dense where any part of boostax is entered."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO, BCSR

import boostax
from boostax.testing import drawn

SHAPE = (8, 2)
# 3 twice, 8 and 9 out of range.
IDS = np.array([3, 2, 8, 3, 7, 9])
SGD = optax.sgd(0.5, momentum=0.5)
MEAN, AXIS = optax.chain(boostax.all_reduce("data"), SGD), {"axis_name": "data"}
PARTS = {
    "all_reduce": MEAN,
    "int8_reduce": optax.chain(boostax.int8_reduce("data"), SGD),
    "a scaler": boostax.dynamic_loss_scale(MEAN, init_scale=4.0, **AXIS),
    "a window": boostax.accumulate(optax.chain(boostax.adasum("data"), SGD), 2, **AXIS),
    "a carry": boostax.carry(MEAN, {"bias": "last"}, **AXIS),
}


@pytest.mark.parametrize("name", PARTS)
def test_rows_are_their_dense_array(name):
    """Rows of one index are added, those out of range dropped: by NumPy, row by row."""
    data = np.random.default_rng(0).normal(size=(2, 2, len(IDS), SHAPE[1])).astype("f4")
    dense = np.zeros((2, 2, *SHAPE), np.float32)
    for row, index in enumerate(IDS):
        if index < SHAPE[0]:
            dense[:, :, index] += data[:, :, row]
    tx, params = PARTS[name], {"embed": jnp.ones(SHAPE), "bias": jnp.ones(3)}

    def trained(every, form):
        w, state = params, tx.init(params)
        for x in every:
            grads = {"embed": form(x), "bias": jnp.full(3, 0.5)}
            w, state = boostax.apply_gradients(drawn(tx), grads, state, w)
        return w

    def run(every, form=lambda x: x):
        return jax.jit(jax.vmap(lambda x: trained(x, form), axis_name="data"))(every)

    sparse = run(data, lambda x: BCOO((x, jnp.asarray(IDS)[:, None]), shape=SHAPE))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), sparse, run(dense))


def test_rows_of_one_index_are_rounded_once():
    """Two of 1/2048 and one of 1 are 1 in f16, one after the other."""
    data, ids = jnp.float16([[1.0], [2.0**-11], [2.0**-11]]), jnp.zeros((3, 1), jnp.int32)
    tx = boostax.static_loss_scale(optax.sgd(1.0), 1.0)
    w = jnp.zeros((2, 1))
    w, _ = boostax.apply_gradients(tx, BCOO((data, ids), shape=w.shape), tx.init(w), w)
    np.testing.assert_array_equal(w, -np.float32([[1 + 2.0**-10], [0.0]]))


def test_other_sparse_arrays_are_refused_by_name():
    kinds = {
        "BCSR": BCSR((jnp.ones(1), jnp.array([2]), jnp.array([0, 1, 1, 1, 1])), shape=(4, 3)),
        "BCOO": BCOO((jnp.ones((2, 1, 3)), jnp.zeros((2, 1, 1), jnp.int32)), shape=(2, 4, 3)),
    }
    tx = boostax.all_reduce("data")
    for name, grads in kinds.items():
        match = f"must be dense or BCOO with n_batch=0, got \\('{name}', 'w'\\)"
        with pytest.raises(TypeError, match=match):
            tx.update({"w": grads}, ())
    params = {"w": BCOO((jnp.ones((1, 2)), jnp.zeros((1, 1), jnp.int32)), shape=(4, 2))}
    with pytest.raises(TypeError, match=r"value_and_grad: params must be dense arrays, got .*BCOO"):
        boostax.value_and_grad(lambda p, x: jnp.sum(x))(params, (), jnp.ones(3))
