"""A run saved on some devices goes on with others: 8, 4, 3 and 8 again."""

import functools

import jax
import numpy as np
import optax
import pytest
import several_processes as example
from reducing import mesh_of, own_means
from training import follow, losses_of

import boostax
from boostax.reduce import local_updates

AXIS = "data"
COUNTS = (8, 4, 3, 8)
CALLS = 7  # Calls on each number of devices: no multiple of the windows below.


# Residuals, windows, moments and params of each replica; the law of replicas there and back holds
# the other kinds of state. The last one is sharded and has no such state.
ADAM = optax.adam(2e-2)
DENSE = optax.chain(boostax.all_reduce(AXIS), ADAM)
WINDOW = boostax.accumulate(DENSE, 3, axis_name=AXIS)
TOP_K = boostax.top_k_reduce(AXIS, 0.1, block=64, bits=2, decay=0.9)
KINDS = {
    "residual": optax.chain(boostax.top_k_reduce(AXIS, 0.1, momentum=0.5), ADAM),
    "window": boostax.dynamic_loss_scale(WINDOW, axis_name=AXIS),
    "moments": boostax.reduce.adasum_delta(ADAM, axis_name=AXIS),
    "params": boostax.reduce.partial_average(ADAM, 2, axis_name=AXIS),
    "fragments": local_updates(ADAM, 4, fragments=2, reduction=TOP_K, axis_name=AXIS),
    "sharded": DENSE,
}
batch = functools.partial(example.read, rows=slice(None))


def made(kind, count):
    how = {"mesh": mesh_of(data=count), "axis_name": AXIS, "shard_optimizer": kind == "sharded"}
    return boostax.make_train_step(example.loss_fn, KINDS[kind], **how)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_with_another_number_of_devices(tmp_path, kind):
    whole, exact = made(kind, 8), kind == "sharded"
    calls = range(CALLS * len(COUNTS) if exact else CALLS)
    undisturbed = losses_of(follow(whole, whole.init(example.init_params()), map(batch, calls))[1])
    found, saved = [], None
    for leg, count in enumerate(COUNTS):
        step = made(kind, count)
        state = step.init(example.init_params())
        with boostax.checkpoint.Checkpointer(tmp_path) as checkpointer:
            if saved is not None:
                state, _ = checkpointer.restore(state, reshard=True)
                for was, now in zip(own_means(saved), own_means(state), strict=True):
                    # One rounding of a mean in f32, of numbers that may cancel.
                    np.testing.assert_allclose(now, was, rtol=1e-6, atol=1e-7)
                assert jax.tree.map(lambda x: x.sharding, state) == step.shardings(state)
            state, told = follow(step, state, map(batch, range(leg * CALLS, (leg + 1) * CALLS)))
            checkpointer.save((leg + 1) * CALLS, state)
            saved = state
        found += losses_of(told)
    assert found[:CALLS] == undisturbed[:CALLS]
    # Without state of each replica the curve is the undisturbed one; else each leg is lower.
    if exact:
        np.testing.assert_allclose(found, undisturbed, rtol=1e-5)
    legs = [np.mean(found[i : i + CALLS]) for i in range(0, len(found), CALLS)]
    assert legs == sorted(legs, reverse=True)


def test_another_number_without_leave_is_refused(tmp_path):
    with boostax.checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, made("residual", 8).init(example.init_params()))
        with pytest.raises(ValueError, match="another number of replicas, pass reshard=True"):
            checkpointer.restore(made("residual", 4).init(example.init_params()))


def test_a_state_of_a_mesh_is_refused_by_a_step_without_one(tmp_path):
    """The message says how it is moved."""
    params = example.init_params()
    tx = boostax.dynamic_loss_scale(boostax.accumulate(optax.chain(optax.identity(), ADAM), 3))
    with boostax.checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, made("window", 4).init(params))
        with pytest.raises(ValueError, match=r"reshard=True on a mesh of one device\. Then call"):
            state = boostax.make_train_step(example.loss_fn, tx).init(params)
            checkpointer.restore(state, reshard=True)
