"""A state that moves: what was given is applied once, in the same units.

To another number of replicas in mid-window, and between windows to a chain in which the loss scaler
is elsewhere. The result is compared with the run that nothing disturbed.
"""

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lanes import lanes
from reducing import mesh_of
from training import own_step

import boostax

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


SGD = optax.sgd(1e-2, 0.9)


def reduced(op="mean"):
    return optax.chain(boostax.all_reduce(AXIS, op=op), SGD)


def by_loss(op="mean"):
    """Steps of the length of the loss."""

    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda g: jnp.full_like(g, -0.1 * value), updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    return optax.chain(boostax.all_reduce(AXIS, op=op), tx)


window = functools.partial(boostax.accumulate, every=scheduled, axis_name=AXIS)
weighed = functools.partial(window, normalize="weight")
scaled = functools.partial(boostax.dynamic_loss_scale, init_scale=2.0**10, axis_name=AXIS)
ZERO = {"has_aux": True, "shard_optimizer": True}
# Loss, transformation, and how the step is made.
REPLICAS = {
    "mean": (mean_loss, lambda: window(reduced()), {}),
    "by weight": (token_loss, lambda: weighed(reduced()), {"has_aux": True}),
    "by weight, scaled": (token_loss, lambda: weighed(scaled(reduced())), {"has_aux": True}),
    "by weight, on global arrays": (token_loss, lambda: scaled(weighed(reduced())), ZERO),
    "mean, in shards": (mean_loss, lambda: window(reduced(), sums="sharded"), {}),
    "by weight, in shards": (token_loss, lambda: weighed(scaled(reduced()), sums="sharded"), ZERO),
    "before a sum": (sum_loss, lambda: window(scaled(reduced("sum"))), {}),
    "mean of losses, before a sum": (mean_loss, lambda: window(by_loss("sum")), {}),
    "losses by weight": (token_loss, lambda: weighed(by_loss()), {"has_aux": True}),
    "losses, in shards": (token_loss, lambda: weighed(by_loss(), sums="sharded"), ZERO),
    "sum before a sum": (sum_loss, lambda: window(reduced("sum"), normalize="sum"), {}),
}


def run(kind, counts, move):
    """The params after each call."""
    loss, make, options = REPLICAS[kind]
    history, state = [], None
    for leg, count in enumerate(counts):
        step = boostax.make_train_step(loss, make(), mesh=mesh_of(data=count), **options)
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


@pytest.mark.parametrize("kind", lanes(REPLICAS, ("mean", "by weight, scaled")))
def test_a_window_moves_to_other_replicas_and_back(kind):
    wanted = run(kind, (1,) * len(COUNTS), lambda step, state, count: state)
    assert any(not np.array_equal(a["w"], b["w"]) for a, b in itertools.pairwise(wanted))
    assert_close(run(kind, COUNTS, by_hand), wanted, rtol=1e-5, atol=1e-6)


def test_replicas_that_do_not_divide_share_a_weighed_window():
    state = weighed(reduced()).init(initial())
    local = jax.tree.map(lambda x: jnp.arange(8.0).reshape(8, *[1] * x.ndim) + x, state.window)
    state = state._replace(window=local)
    for count in (3, 5, 1):
        moved = boostax.reshard_state(state, count).window
        totals = jax.tree.map(lambda x: x.sum(0), moved)
        assert_close(totals, jax.tree.map(lambda x: x.sum(0), local), rtol=1e-6)
        assert {x.shape[0] for x in jax.tree.leaves(moved)} == {count}


MESSAGE = r"state .* of {}, got \[\(.* \({},.*boostax\.reshard_state\(state, n\)"


@pytest.mark.parametrize(("counts", "shares"), [((4, 2), False), ((2, 4), True), ((4, 1), True)])
def test_a_step_refuses_a_state_of_other_replicas(counts, shares):
    make = functools.partial(boostax.make_train_step, mean_loss, window(reduced()))
    old, new = (make(mesh=mesh_of(data=n), shard_optimizer=shares) for n in counts)
    state, _ = old(old.init(initial()), batch(0))
    state = jax.tree.map(np.asarray, state)
    for refused in (lambda: new(state, batch(1)), lambda: new.flush(state)):
        with pytest.raises(ValueError, match=MESSAGE.format(*counts[::-1])):
            refused()
    state, _ = new(by_hand(new, state, counts[1]), batch(1))
    assert int(state.opt_state.micro_step) == 2


def test_on_mesh_refuses_a_state_of_other_replicas():
    whole = jax.P()
    place = lambda n: jax.device_put(initial(), jax.NamedSharding(mesh_of(data=n), whole))  # noqa: E731
    many, few = (boostax.on_mesh(window(reduced()), place(n), axis_name=AXIS) for n in (4, 2))
    state = jax.tree.map(np.asarray, many.init(place(4)))
    grads = boostax.PerReplica(jax.tree.map(lambda p: jnp.ones((2, *p.shape)), initial()))
    with pytest.raises(ValueError, match=MESSAGE.format(2, 4)):
        jax.jit(functools.partial(boostax.apply_gradients, few))(grads, state, place(2))


# The scale is another after every other call.
scaling = functools.partial(boostax.dynamic_loss_scale, init_scale=2.0**8, growth_interval=2)
accumulated = functools.partial(boostax.accumulate, every=scheduled)


def multi_steps(inner):
    return optax.MultiSteps(inner, scheduled).gradient_transformation()


CHAINS = {
    "window": accumulated(SGD),
    "scaler(window)": scaling(accumulated(SGD)),
    "window(scaler)": accumulated(scaling(SGD)),
    "MultiSteps": multi_steps(SGD),
    "scaler(MultiSteps)": scaling(multi_steps(SGD)),
    "MultiSteps(scaler)": multi_steps(scaling(SGD)),
    "partition(window)": optax.partition({"all": accumulated(SGD)}, {"w": "all", "b": "all"}),
}


def waves(params, call):
    return sum(jnp.sum(jnp.sin(3.0 * p + call) / 3 + 0.25 * p) for p in jax.tree.leaves(params))


@functools.cache
def chain(kind):
    """A transformation, and its calls in compiled steps."""
    tx = CHAINS[kind]
    step = own_step(tx, boostax.value_and_grad(waves))

    def run(params, state, numbers):
        for call in numbers:
            params, state, _ = step(params, state, jnp.float32(call))
        return params, state

    return tx, run


def opened(tx, table=8.0):
    """A state in mid-window on two replicas, of ones but for loss scales of 8."""
    values = {"scale": 8.0, "table": table}

    def put(path, x):
        return jnp.full_like(x, values.get(jax.tree_util.keystr(path[-1:], simple=True), 1))

    state = jax.tree_util.tree_map_with_path(put, tx.init(initial()))
    return boostax.states.stack_replicas(state, 2)


@pytest.fixture(scope="module")
def undisturbed():
    tx, run = chain("window")
    return run(initial(), tx.init(initial()), range(13))[0]


PAIRS = {f"{old} to {new}": (old, new) for old, new in itertools.product(CHAINS, CHAINS)}
SHORT = {"window(scaler) to MultiSteps", "MultiSteps to partition(window)"}
SHORT |= {"window to scaler(window)"}


@pytest.mark.filterwarnings("ignore:.*accumulate in (masked|partition)")
@pytest.mark.parametrize("pair", lanes(PAIRS, SHORT))
def test_a_state_moves_between_windows_to_another_chain_and_back(pair, undisturbed):
    """The windows are of 3, 5 and 5 calls."""
    old, new = PAIRS[pair]
    (old_tx, old_run), (new_tx, new_run) = chain(old), chain(new)
    params, state = old_run(initial(), old_tx.init(initial()), range(3))
    state, _ = boostax.migrate_state(state, new_tx, params)
    params, state = new_run(params, state, range(3, 8))
    state, _ = boostax.migrate_state(state, old_tx, params)
    params, state = old_run(params, state, range(8, 13))
    assert_close(params, undisturbed)


FLUSH = r"AccumulateState\. Call boostax\.flush\(old_tx, state, params\) first"
GO_ON = r"MultiStepsState\. Train with the old chain until mini_step is 0"


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("where", ["shared", "per replica"])
def test_an_open_window_is_refused(kind, where):
    tx = CHAINS[kind]
    tx = boostax.reduce.adasum_delta(tx, axis_name=AXIS) if where == "per replica" else tx
    message = "without an open window, got an open window of 1 micro-steps in "
    with pytest.raises(ValueError, match=message + (GO_ON if "MultiSteps" in kind else FLUSH)):
        boostax.migrate_state(opened(tx), tx, initial())


def test_a_flushed_window_moves_to_another_chain():
    """As in the run that was flushed at this call and kept its chain."""
    (old_tx, old_run), (new_tx, new_run) = chain("window(scaler)"), chain("scaler(window)")
    params, state = old_run(initial(), old_tx.init(initial()), range(5))
    params, state = boostax.flush(old_tx, state, params)
    expected, _ = old_run(params, state, range(5, 10))
    moved, _ = boostax.migrate_state(state, new_tx, params)
    assert_close(new_run(params, moved, range(5, 10))[0], expected)


around = functools.partial(boostax.static_loss_scale, scale=8.0)
by_groups = functools.partial(boostax.precision.group_loss_scale, labels={"w": 0, "b": 1})


def before(part, scaler=around):
    """``part`` outside of a scaler, and inside."""
    return optax.chain(part, scaler(SGD)), scaler(optax.chain(part, SGD))


TRACE, TOP_K = optax.trace(0.9), boostax.top_k_reduce(AXIS, 0.5)
SPLIT = [optax.partition({"w": w, "b": SGD}, {"w": "w", "b": "b"}) for w in (around(SGD), SGD)]
PARTS = [optax.chain(TRACE, x) for x in SPLIT]
GROUPS = before(TRACE, by_groups)
WHERE = "TraceState of gradients scaled by {} at 0, but by {} at {}. Put the loss scaler in"
INSIDE = WHERE.format("[[8.0]]", "[]", "inner_state/0")
REFUSED = {
    "residual": (*before(TOP_K), 8.0, INSIDE.replace("Trace", "Compressed")),
    "momentum": (*before(TRACE), 8.0, INSIDE),
    "momentum, out of it": (*before(TRACE)[::-1], 8.0, "gradients scaled by [] at inner_state/0"),
    "moments": (*before(optax.scale_by_adam()), 8.0, INSIDE.replace("Trace", "ScaleByAdam")),
    "groups": (*GROUPS, np.array([8.0, 4.0]), WHERE.format("[[4.0, 8.0]]", "[]", "inner_state/0")),
    "before a part": (*PARTS, 8.0, WHERE.format("[[8.0]]", "[]", "0")),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_sums_of_gradients_are_refused_under_another_scale(kind):
    old_tx, new_tx, table, message = REFUSED[kind]
    with pytest.raises(ValueError, match=re.escape(message)):
        boostax.migrate_state(opened(old_tx, table), new_tx, initial())
    state, _ = boostax.migrate_state(opened(old_tx, table), old_tx, initial())
    assert_close(state, opened(old_tx, table))


KEPT = {
    "window": lambda: window(reduced()),
    "residual": lambda: TOP_K,
    "residual and momentum": lambda: boostax.top_k_reduce(AXIS, 0.5, momentum=0.9),
    "moment": lambda: boostax.reduce.adasum_delta(SGD, axis_name=AXIS),
}


SHAPED = r"the {} must be shaped \(.*\) at '.*w', got \(.*\)"
STACKED = (
    *((stacked, enters, SHAPED) for stacked, enters in ((0, True), (0, False), (2, False))),
    (4, True, MESSAGE.format(1, 2)),
    (2, True, None),
)


@pytest.mark.parametrize(("stacked", "enters", "message"), STACKED)
@pytest.mark.parametrize("kind", KEPT)
def test_a_loop_by_hand_refuses_a_state_of_other_replicas(kind, stacked, enters, message):
    """The first dimension is the number of replicas: such params look like a state of them."""
    tx, params = KEPT[kind](), {"w": jnp.ones((2, 3))}
    spec, specs = jax.sharding.PartitionSpec, boostax.states.state_specs(tx, params, axis_name=AXIS)

    def local_step(params, state, grads):
        state = boostax.states.enter_replica(state) if enters else state
        return boostax.apply_gradients(tx, grads, state, params)[0]

    places = {"in_specs": (spec(), specs, spec()), "out_specs": spec()}
    step = jax.jit(jax.shard_map(local_step, mesh=mesh_of(data=2), check_vma=False, **places))
    state = tx.init(params)
    state = boostax.states.stack_replicas(state, stacked) if stacked else state
    refused = message and pytest.raises(ValueError, match=message.format(kind.split()[0]))
    with refused or contextlib.nullcontext():
        step(params, state, params)
