"""A run saved on some devices goes on with others: 8, 4, 3 and 8 again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax.checkpoint import Checkpointer

AXIS = "data"
COUNTS = (8, 4, 3, 8)
CALLS = 7  # So many on each: no multiple of the windows below.
ROWS = 48


def adam():
    return optax.adam(2e-2)


def dense():
    return optax.chain(boostax.all_reduce(AXIS), adam())


# Every kind of state that a replica has to itself.
KINDS = {
    "residual": lambda: optax.chain(boostax.top_k_reduce(AXIS, 0.1), adam()),
    "momentum and residual": lambda: optax.chain(
        boostax.top_k_reduce(AXIS, 0.1, momentum=0.5), adam()
    ),
    "rounded both ways": lambda: optax.chain(boostax.int8_reduce(AXIS), adam()),
    "low rank": lambda: optax.chain(boostax.reduce.power_sgd_reduce(AXIS, 2), adam()),
    "window": lambda: boostax.accumulate(dense(), 3, axis_name=AXIS),
    "window in a scaler": lambda: boostax.dynamic_loss_scale(
        boostax.accumulate(dense(), 3, axis_name=AXIS), axis_name=AXIS
    ),
    "moments": lambda: boostax.reduce.adasum_delta(adam(), AXIS),
    "params": lambda: boostax.reduce.local_updates(adam(), AXIS, 3),
    "params by parts": lambda: boostax.reduce.partial_average(adam(), AXIS, 2),
    "shared out": dense,
}


def initial():
    random = np.random.default_rng(0)
    return {
        "w": jnp.asarray(random.normal(size=(24, 8)) / 5, jnp.float32),
        "b": jnp.zeros(8, jnp.float32),
    }


def loss_fn(params, batch):
    found = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jnp.mean((found - batch["y"]) ** 2)


def batch(index):
    x = np.random.default_rng(index).normal(size=(ROWS, 24)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, :8] - x[:, 8:16])}


def made(tx, count, share=False):
    some = jax.devices()[:count]
    mesh = jax.make_mesh((count,), (AXIS,), (jax.sharding.AxisType.Auto,), devices=some)
    return boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name=AXIS, shard_optimizer=share)


def trained(step, state, start):
    losses = []
    for index in range(start, start + CALLS):
        state, metrics = step(state, batch(index))
        losses.append(float(metrics["loss"]))
    return state, losses


def means(state):
    """Of what differs per replica, the mean over the replicas, where there is one."""
    return [
        np.asarray(x, np.float64).mean(0)
        for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, boostax.PerReplica))
        if isinstance(node, boostax.PerReplica)
        for x in jax.tree.leaves(node)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "window" else pytest.mark.long) for kind in KINDS],
)
def test_a_run_goes_on_with_another_number_of_devices(tmp_path, kind):
    whole = made(KINDS[kind](), 8, kind == "shared out")
    _, undisturbed = trained(whole, whole.init(initial()), 0)
    losses, saved = [], None
    for leg, count in enumerate(COUNTS):
        step = made(KINDS[kind](), count, kind == "shared out")
        state = step.init(initial())
        with Checkpointer(tmp_path) as checkpointer:
            if saved is not None:
                state, _ = checkpointer.restore(state, reshard=True)
                kept = means(saved)
                assert len(kept) == len(means(state))
                for was, now in zip(kept, means(state), strict=True):
                    # One rounding of a mean in f32, of numbers that may cancel.
                    np.testing.assert_allclose(now, was, rtol=1e-6, atol=1e-7)
                assert jax.tree.map(lambda x: x.sharding, state) == step.shardings(state)
            state, more = trained(step, state, leg * CALLS)
            checkpointer.save((leg + 1) * CALLS, state)
            saved = state
        losses += more
    assert losses[:CALLS] == undisturbed
    # It goes on downwards: no leg begins above where the one before it ended, but for the noise of
    # a batch, and the last is the best.
    legs = [np.mean(losses[i : i + CALLS]) for i in range(0, len(losses), CALLS)]
    assert legs == sorted(legs, reverse=True)


@pytest.mark.long
def test_the_curve_is_the_undisturbed_one_where_the_mathematics_allows(tmp_path):
    whole = made(dense(), 8)
    state, wanted = whole.init(initial()), []
    for leg in range(len(COUNTS)):
        state, losses = trained(whole, state, leg * CALLS)
        wanted += losses
    found = []
    with Checkpointer(tmp_path) as checkpointer:
        for leg, count in enumerate(COUNTS):
            step = made(dense(), count)
            state = step.init(initial())
            if leg:
                state, _ = checkpointer.restore(state, reshard=True)
            state, losses = trained(step, state, leg * CALLS)
            checkpointer.save((leg + 1) * CALLS, state)
            found += losses
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_without_leave_another_number_is_refused(tmp_path):
    state, _ = trained(
        made(KINDS["residual"](), 8), made(KINDS["residual"](), 8).init(initial()), 0
    )
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        other = made(KINDS["residual"](), 4).init(initial())
        with pytest.raises(ValueError, match="number of replicas differs, reshard=True"):
            checkpointer.restore(other)


def test_another_model_is_refused_with_leave(tmp_path):
    tx = KINDS["residual"]()
    step = made(tx, 4)
    state = step.init(initial())
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        wider = step.init({"w": jnp.zeros((24, 16)), "b": jnp.zeros(16)})
        with pytest.raises(ValueError, match="was float32"):
            checkpointer.restore(wider, reshard=True)
