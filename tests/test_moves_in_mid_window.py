"""A state that moves while a window is open: what was given is applied once, in the same units.

To another number of replicas, and to a chain in which the loss scaler stands elsewhere. What comes
out is compared with the run that nothing disturbed.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax.train.checkpoint import Checkpointer

AXIS = "data"
ROWS = 16
COUNTS = (4, 2, 4, 8)
# Two calls on each: no multiple of the windows of 3, then 5.
CALLS = 2


def scheduled(steps):
    return jnp.where(steps < 1, 3, 5)


def initial():
    return {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.float32(0.25)}


def errors(params, batch):
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


def mean_loss(params, batch):
    return jnp.mean(errors(params, batch))


def sum_loss(params, batch):
    return jnp.sum(errors(params, batch))


def token_loss(params, batch):
    """The mean over rows that count; how many those are differs from replica to replica."""
    tokens = batch["mask"].sum()
    loss = jnp.sum(errors(params, batch) * batch["mask"]) / jnp.maximum(tokens, 1)
    return loss, boostax.Aux(weight=tokens)


def batch(call):
    random = np.random.default_rng(call)
    x = random.normal(size=(ROWS, 3)).astype(np.float32)
    mask = (random.random(ROWS) < 0.6).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1) + call), "mask": mask}


def mesh_of(count):
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((count,), (AXIS,), auto, devices=jax.devices()[:count])


def reduced(op="mean"):
    return optax.chain(boostax.all_reduce(AXIS, op=op), optax.sgd(1e-2, 0.9))


def window(inner, **options):
    return boostax.accumulate(inner, scheduled, axis_name=AXIS, **options)


def scaled(inner):
    return boostax.dynamic_loss_scale(inner, init_scale=2.0**10, axis_name=AXIS)


# Loss, transformation, and how the step is made.
REPLICAS = {
    "mean": (mean_loss, lambda: window(reduced()), {}),
    "by weight": (token_loss, lambda: window(reduced(), normalize="weight"), {"has_aux": True}),
    "by weight, scaled": (
        token_loss,
        lambda: window(scaled(reduced()), normalize="weight"),
        {"has_aux": True},
    ),
    "by weight, on global arrays": (
        token_loss,
        lambda: scaled(window(reduced(), normalize="weight")),
        {"has_aux": True, "shard_optimizer": True},
    ),
    "before a sum": (sum_loss, lambda: window(scaled(reduced("sum"))), {}),
    "sum before a sum": (sum_loss, lambda: window(reduced("sum"), normalize="sum"), {}),
}


def run(kind, counts, move):
    """The params after each call."""
    loss, make, options = REPLICAS[kind]
    history, state = [], None
    for leg, count in enumerate(counts):
        step = boostax.make_train_step(loss, make(), mesh=mesh_of(count), axis_name=AXIS, **options)
        state = step.init(initial()) if state is None else move(step, state, count)
        for call in range(leg * CALLS, (leg + 1) * CALLS):
            state, _ = step(state, batch(call))
            history.append(jax.tree.map(np.asarray, state.params))
    return history


def by_hand(step, state, count):
    state = boostax.reshard_state(state, count)
    return jax.device_put(state, step.shardings(state))


def assert_close(found, wanted, **tolerance):
    compare = functools.partial(np.testing.assert_allclose, **{"rtol": 2e-6} | tolerance)
    jax.tree.map(compare, found, wanted)


@pytest.mark.parametrize("kind", REPLICAS)
def test_a_window_moves_to_other_replicas_and_back(kind):
    wanted = run(kind, (1,) * len(COUNTS), lambda step, state, count: state)
    assert any(not np.array_equal(a["w"], b["w"]) for a, b in itertools.pairwise(wanted))
    assert_close(run(kind, COUNTS, by_hand), wanted, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_a_weighed_window_moves_to_other_replicas(tmp_path):
    def through_disk(step, state, count):
        with Checkpointer(tmp_path / str(count)) as checkpointer:
            checkpointer.save(1, state)
            return checkpointer.restore(step.init(initial()), reshard=True)[0]

    wanted = run("by weight", (1, 1, 1), lambda step, state, count: state)
    assert_close(run("by weight", (4, 2, 8), through_disk), wanted, rtol=1e-5, atol=1e-6)


def test_replicas_that_do_not_divide_share_a_weighed_window():
    state = window(reduced(), normalize="weight").init(initial())
    local = jax.tree.map(lambda x: jnp.arange(8.0).reshape(8, *[1] * x.ndim) + x, state.window)
    state = state._replace(window=local)
    for count in (3, 5, 1):
        moved = boostax.reshard_state(state, count).window
        totals = jax.tree.map(lambda x: x.sum(0), moved)
        assert_close(totals, jax.tree.map(lambda x: x.sum(0), local), rtol=1e-6)
        assert {x.shape[0] for x in jax.tree.leaves(moved)} == {count}


def step_of(count, **options):
    tx = window(reduced())
    return boostax.make_train_step(mean_loss, tx, mesh=mesh_of(count), axis_name=AXIS, **options)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["mapped", "global"])
@pytest.mark.parametrize("counts", [(4, 2), (2, 4), (4, 1)])
def test_a_step_refuses_a_state_of_other_replicas(counts, options):
    old, new = (step_of(count, **options) for count in counts)
    state, _ = old(old.init(initial()), batch(0))
    state = jax.tree.map(np.asarray, state)
    message = (
        rf"make_train_step: state must have a leading dimension of {counts[1]} in what differs per "
        rf"replica, got shape \({counts[0]}.*window/local/grads.*boostax\.reshard_state\(state, n\)"
    )
    with pytest.raises(ValueError, match=message):
        new(state, batch(1))
    with pytest.raises(ValueError, match=message):
        new.flush(state)
    state, _ = new(by_hand(new, state, counts[1]), batch(1))
    assert int(state.opt_state.micro_step) == 2


def test_a_loop_by_hand_refuses_a_state_of_other_replicas():
    tx, params = window(reduced()), initial()
    mesh, spec = mesh_of(2), jax.sharding.PartitionSpec
    specs = boostax.state_specs(tx, params, AXIS)

    def local_step(params, state, given):
        state = boostax.enter_replica(state)
        _, grads = boostax.value_and_grad(mean_loss, axis_name=AXIS)(params, state, given)
        params, state = boostax.apply_gradients(tx, grads, state, params)
        return params, boostax.leave_replica(state)

    step = jax.jit(
        jax.shard_map(
            local_step,
            mesh=mesh,
            in_specs=(spec(), specs, spec(AXIS)),
            out_specs=(spec(), specs),
        )
    )
    state = boostax.stack_replicas(tx.init(params), 4)
    with pytest.raises(ValueError, match=r"enter_replica: state .* of 1 .* got shape \(2,.*resha"):
        step(params, state, batch(0))
    params, state = step(params, boostax.reshard_state(state, 2), batch(0))
    assert int(state.micro_step) == 1


def test_on_mesh_refuses_a_state_of_other_replicas():
    place = lambda count: jax.device_put(  # noqa: E731
        initial(), jax.NamedSharding(mesh_of(count), jax.sharding.PartitionSpec())
    )
    many, few = (boostax.on_mesh(window(reduced()), place(n), axis_name=AXIS) for n in (4, 2))
    params = place(2)
    state = jax.tree.map(np.asarray, many.init(place(4)))
    grads = boostax.PerReplica(jax.tree.map(lambda p: jnp.ones((2, *p.shape)), params))
    with pytest.raises(ValueError, match=r"on_mesh: state .* of 2 .* got shape \(4,"):
        jax.jit(functools.partial(boostax.apply_gradients, few))(grads, state, params)
