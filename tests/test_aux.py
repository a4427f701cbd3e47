"""What a loss returns beside itself: ``Aux`` is combined, anything else passes through."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from reducing import mesh_of

import boostax

PARAMS = {"w": jnp.float32([1.0, -2.0])}
ROWS = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)


def with_logits(params, x):
    logits = x @ params["w"]
    return jnp.mean(logits**2), {"logits": logits, "rows": jnp.int32(len(x))}


def with_scalars(params, x):
    loss, _ = with_logits(params, x)
    return loss, {"seen": {"mean": x.mean(), "rows": jnp.int32(len(x))}}


LOGITS = jax.jit(lambda x: x @ PARAMS["w"])(ROWS)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mapped", [None, "shard_map", "unchecked", "pmap", "mesh"])
def test_logits_are_each_rows_own(mapped, microbatches):
    """Averaged over micro-batches and replicas, those of one row were mixed with another's."""
    mesh = mesh_of(data=2)
    given = {"has_aux": True, "microbatches": microbatches}
    axis = {"axis_name": "data"} if mapped else {}
    axis |= {"mesh": mesh} if mapped == "mesh" else {}
    oracle = boostax.value_and_grad(with_logits, **axis, **given)

    def told(x):
        (_, aux), _ = oracle(PARAMS, (), x)
        return aux

    if mapped in ("shard_map", "unchecked"):
        lead = lambda x: jax.tree.map(lambda leaf: leaf[None], told(x))  # noqa: E731
        how = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data")}
        aux = jax.jit(jax.shard_map(lead, check_vma=mapped == "shard_map", **how))(ROWS)
    elif mapped == "pmap":
        devices = jax.devices()[:2]
        aux = jax.pmap(told, axis_name="data", devices=devices)(ROWS.reshape(2, 8, 2))
    else:
        aux = jax.jit(told)(ROWS)
        if mapped == "mesh":
            assert isinstance(aux, boostax.PerReplica)
            aux = aux.local
        else:
            aux = jax.tree.map(lambda leaf: leaf[None], aux)
    replicas = 2 if mapped else 1
    rows, logits = np.asarray(aux["rows"]), np.asarray(aux["logits"])
    each = (microbatches,) if microbatches > 1 else ()
    assert rows.shape == (replicas, *each)
    np.testing.assert_array_equal(rows, 16 // replicas // microbatches)
    assert logits.shape == (replicas, *each, 16 // replicas // microbatches)
    if microbatches > 1:
        logits = logits.swapaxes(1, 2)
    assert_close(logits.reshape(-1), LOGITS)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_step_reports_scalars_and_refuses_arrays(parallel):
    mesh = mesh_of(data=2)
    where = {"mesh": mesh, "axis_name": "data"} if parallel else {}
    tx = optax.chain(*([boostax.all_reduce("data")] if parallel else []), optax.sgd(0.1))
    make = functools.partial(boostax.make_train_step, tx=tx, has_aux=True, microbatches=2, **where)
    step = make(with_scalars)
    _, metrics = step(step.init(PARAMS), ROWS)
    assert_close(metrics["seen/mean"], ROWS.mean())
    assert int(metrics["seen/rows"]) == 16
    step = make(with_logits)
    with pytest.raises(TypeError, match=r"make_train_step: aux must be .*'logits'.*value_and_grad"):
        step(step.init(PARAMS), ROWS)


def test_any_tree_passes_one_micro_batch_as_in_jax():
    """Keys, bools, ``None`` and an aux that is no tree of floats at all."""

    def loss(w, x):
        return (w * x).sum(), (jax.random.key(3), x > 0, None, jnp.int8(4))

    x = jnp.float32([1.0, -1.0])
    expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(2.0, x)[0][1]
    oracle = boostax.value_and_grad(loss, has_aux=True)
    found = jax.jit(lambda w, x: oracle(w, (), x))(2.0, x)[0][1]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype and left.shape == right.shape and (left == right).all()
