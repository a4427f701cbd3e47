"""A state that moves while a window is open: what was given is applied once, in the same units.

To another number of replicas, and to a chain in which the loss scaler stands elsewhere. What comes
out is compared with the run that nothing disturbed.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import boostax
from boostax.checkpoint import Checkpointer

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


QUICK = ("mean", "by weight, scaled")


@pytest.mark.parametrize(
    "kind", [x if x in QUICK else pytest.param(x, marks=pytest.mark.long) for x in REPLICAS]
)
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
    specs = boostax.states.state_specs(tx, params, AXIS)

    def local_step(params, state, given):
        state = boostax.states.enter_replica(state)
        _, grads = boostax.value_and_grad(mean_loss, axis_name=AXIS)(params, state, given)
        params, state = boostax.apply_gradients(tx, grads, state, params)
        return params, boostax.states.leave_replica(state)

    step = jax.jit(
        jax.shard_map(
            local_step,
            mesh=mesh,
            in_specs=(spec(), specs, spec(AXIS)),
            out_specs=(spec(), specs),
        )
    )
    state = boostax.states.stack_replicas(tx.init(params), 4)
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


def scaling(inner):
    """Its scale is another after every other call."""
    return boostax.dynamic_loss_scale(inner, init_scale=2.0**8, growth_interval=2)


def multi_steps(inner):
    return optax.MultiSteps(inner, scheduled).gradient_transformation()


def accumulated(inner, **options):
    return boostax.accumulate(inner, scheduled, **options)


def optimizer():
    return optax.sgd(1e-2, 0.9)


CHAINS = {
    "window": lambda: accumulated(optimizer()),
    "scaler(window)": lambda: scaling(accumulated(optimizer())),
    "window(scaler)": lambda: accumulated(scaling(optimizer())),
    "half window(scaler)": lambda: accumulated(scaling(optimizer()), accumulator_dtype="bfloat16"),
    "MultiSteps": lambda: multi_steps(optimizer()),
    "scaler(MultiSteps)": lambda: scaling(multi_steps(optimizer())),
    "MultiSteps(scaler)": lambda: multi_steps(scaling(optimizer())),
    "partition(window)": lambda: optax.partition(
        {"all": accumulated(optimizer())}, {"w": "all", "b": "all"}
    ),
}


def waves(params, call):
    return sum(jnp.sum(jnp.sin(3.0 * p + call) / 3 + 0.25 * p) for p in jax.tree.leaves(params))


def calls(tx, params, state, numbers, **extra):
    oracle = boostax.value_and_grad(waves)
    for call in numbers:
        grads = oracle(params, state, jnp.float32(call))[1]
        params, state = boostax.apply_gradients(tx, grads, state, params, **extra)
    return params, state


@functools.cache
def chain(kind):
    """A transformation, and its calls in compiled steps."""
    tx = CHAINS[kind]()
    step = jax.jit(lambda params, state, call: calls(tx, params, state, [call]))

    def run(params, state, numbers):
        for call in numbers:
            params, state = step(params, state, jnp.float32(call))
        return params, state

    return tx, run


@pytest.fixture(scope="module")
def undisturbed():
    tx, run = chain("window")
    return run(initial(), tx.init(initial()), range(9))[0]


@pytest.mark.parametrize("new", CHAINS)
@pytest.mark.parametrize("old", CHAINS)
def test_an_open_window_moves_to_another_chain_and_back(old, new, undisturbed):
    (old_tx, old_run), (new_tx, new_run) = chain(old), chain(new)
    params, state = old_run(initial(), old_tx.init(initial()), range(2))
    state, _ = boostax.migrate_state(state, new_tx, params)
    params, state = new_run(params, state, range(2, 5))
    state, report = boostax.migrate_state(state, old_tx, params)
    assert not any(re.search(r"\b(window|acc_grads)\b", line) for line in report.dropped)
    params, state = old_run(params, state, range(5, 9))
    assert_close(params, undisturbed, rtol=1e-3 if "half" in old + new else 2e-6)


def test_the_report_says_what_was_converted():
    old_tx, new_tx = CHAINS["window(scaler)"](), CHAINS["window"]()
    params, state = calls(old_tx, initial(), old_tx.init(initial()), range(2))
    state, report = boostax.migrate_state(state, new_tx, params)
    assert report.notes == (
        "AccumulateState at the root of gradients times 256, which at the root come times 1: "
        "converted.",
    )


def test_a_window_takes_the_scale_that_another_library_hands_on():
    old_tx = CHAINS["MultiSteps"]()
    params, state = calls(old_tx, initial(), old_tx.init(initial()), range(2))
    saved = {"opt": state, "scaler": DynamicScale(fin_steps=0, scale=512.0)}
    new_tx = CHAINS["window(scaler)"]()
    moved, _ = boostax.migrate_state(saved, new_tx, params)
    assert_close(moved.window.grads, jax.tree.map(lambda x: 1024 * x, state.acc_grads))
    back, report = boostax.migrate_state(moved, old_tx, params)
    assert_close(back.acc_grads, state.acc_grads)
    assert any("its windows must be longer than 2" in note for note in report.notes)


@pytest.mark.parametrize("factor", [jnp.inf, 2.0**80])
def test_a_window_that_a_scaler_would_have_skipped_is_dropped_with_it(factor):
    old_tx, new_tx = CHAINS["window(scaler)"](), CHAINS["scaler(window)"]()
    params, state = calls(old_tx, initial(), old_tx.init(initial()), range(1))
    bad = jax.tree.map(lambda p: p * factor, params)
    params, state = boostax.apply_gradients(old_tx, bad, state, params)
    moved, report = boostax.migrate_state(state, new_tx, params)
    assert int(moved.inner_state.micro_step) == 0
    assert "cannot be used and is dropped" in report.notes[-1]
    params, _ = calls(new_tx, params, moved, range(3))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(params))
    # Where a scaler is still to come it skips the window itself.
    again, _ = boostax.migrate_state(state, old_tx, params)
    assert int(again.micro_step) == 2


LOST = {
    "no window": (CHAINS["window"], optimizer),
    "every call": (CHAINS["window"], lambda: boostax.accumulate(optimizer(), 1)),
    "no weights": (lambda: accumulated(optimizer(), normalize="weight"), CHAINS["window"]),
    "weights": (CHAINS["window"], lambda: accumulated(optimizer(), normalize="weight")),
    "MultiSteps for weights": (
        lambda: accumulated(optimizer(), normalize="weight"),
        CHAINS["MultiSteps"],
    ),
    "no MultiSteps": (CHAINS["MultiSteps"], optimizer),
    "of a part": (
        CHAINS["window"],
        lambda: optax.masked(CHAINS["window"](), {"w": True, "b": False}),
    ),
}


@pytest.mark.parametrize("kind", LOST)
def test_an_open_window_is_never_lost(kind):
    old_tx, new_tx = (make() for make in LOST[kind])
    params, state = initial(), old_tx.init(initial())
    extra = {"weight": 2.0} if "weight" in kind and kind != "weights" else {}
    params, state = calls(old_tx, params, state, range(2), **extra)
    message = r"no open window that does not fit new_tx, got one of 2 micro-steps at the root\. App"
    with pytest.raises(ValueError, match=message):
        boostax.migrate_state(state, new_tx, params)
    params, state = calls(old_tx, params, state, [2], **extra)
    boostax.migrate_state(state, new_tx, params)  # It is closed now.


def test_a_window_out_of_the_range_of_its_new_precision_is_refused():
    old_tx = CHAINS["window"]()
    params, state = calls(old_tx, initial(), old_tx.init(initial()), range(2))
    new_tx = accumulated(
        boostax.static_loss_scale(optimizer(), 2.0**20), accumulator_dtype="float16"
    )
    with pytest.raises(ValueError, match=r"new_tx must be able to hold the open window.*float16"):
        boostax.migrate_state(state, new_tx, params)


def by_groups(**options):
    return functools.partial(boostax.precision.group_loss_scale, labels={"w": 0, "b": 1}, **options)


def test_scales_by_group_convert_where_they_are_one_and_are_refused_otherwise():
    scale = by_groups(init_scale=8.0)
    old_tx, new_tx = accumulated(scale(optimizer())), scale(accumulated(optimizer()))
    params, state = initial(), old_tx.init(initial())
    sums = jax.tree.map(jnp.ones_like, state.window)
    state = state._replace(window=sums, micro_step=jnp.int32(2))
    moved, _ = boostax.migrate_state(state, new_tx, params)
    assert_close(moved.inner_state.window.grads["w"] * 8, state.window.grads["w"])
    inner = state.inner_state._replace(table=jnp.array([8.0, 4.0]))
    state = state._replace(inner_state=inner)
    with pytest.raises(
        ValueError, match=r"alike in new_tx, got .*\[8\.0, 4\.0\] of .*boostax\.flush"
    ):
        boostax.migrate_state(state, new_tx, params)
    assert_close(boostax.migrate_state(state, old_tx, params)[0].window, state.window)


def test_a_scaler_of_a_part_is_not_taken_for_one_of_the_whole():
    def make(part):
        parts = {"w": part(optimizer()), "b": optimizer()}
        return accumulated(optax.partition(parts, {"w": "w", "b": "b"}))

    old_tx = make(functools.partial(boostax.static_loss_scale, scale=8.0))
    _, state = initial(), old_tx.init(initial())
    state = state._replace(micro_step=jnp.int32(1))
    with pytest.raises(ValueError, match=r"8\.0 of inner_state/inner_states/w/inner_state"):
        boostax.migrate_state(state, make(lambda tx: tx), initial())
    assert int(boostax.migrate_state(state, old_tx, initial())[0].micro_step) == 1


def test_momentum_outside_of_a_scaler_is_converted_and_squares_are_refused():
    scale = functools.partial(boostax.static_loss_scale, scale=8.0)
    around = lambda first: optax.chain(first, scale(optax.sgd(1e-2)))  # noqa: E731
    inside = lambda first: scale(optax.chain(first, optax.sgd(1e-2)))  # noqa: E731
    old_tx, new_tx = (make(optax.trace(0.9)) for make in (around, inside))
    params, state = calls(old_tx, initial(), old_tx.init(initial()), range(3))
    wanted = calls(old_tx, params, state, range(3, 6))[0]
    moved, _ = boostax.migrate_state(state, new_tx, params)
    assert_close(calls(new_tx, params, moved, range(3, 6))[0], wanted)
    back, _ = boostax.migrate_state(moved, old_tx, params)
    assert_close(back, state)
    old_tx, new_tx = (make(optax.scale_by_adam()) for make in (around, inside))
    params, state = calls(old_tx, initial(), old_tx.init(initial()), range(3))
    with pytest.raises(
        ValueError, match=r"got ScaleByAdamState at 0 .* times 8.*Put the loss scal"
    ):
        boostax.migrate_state(state, new_tx, params)


def test_residuals_outside_of_a_scaler_are_converted():
    scale = functools.partial(boostax.static_loss_scale, scale=8.0)
    codec = boostax.top_k_reduce(AXIS, 0.5)
    old_tx, new_tx = optax.chain(codec, scale(optimizer())), scale(optax.chain(codec, optimizer()))
    old = boostax.states.stack_replicas(jax.tree.map(jnp.ones_like, old_tx.init(initial())), 2)
    old = (old[0], old[1]._replace(scale=jnp.float32(8.0)))
    moved, _ = boostax.migrate_state(old, new_tx, initial())
    assert moved.inner_state[0].residual.local["w"].tolist() == [[0.125] * 3] * 2


SHARED = {
    "by weight": (token_loss, "mean", {"normalize": "weight"}, {"has_aux": True}),
    "mean": (mean_loss, "mean", {}, {}),
    "before a sum": (sum_loss, "sum", {}, {}),
}


@pytest.mark.parametrize("kind", SHARED)
def test_a_window_of_one_device_is_shared_out_among_replicas(kind):
    loss, op, normalize, options = SHARED[kind]
    alone = boostax.make_train_step(loss, accumulated(optimizer(), **normalize), **options)
    state = alone.init(initial())
    for call in range(2):
        state, _ = alone(state, batch(call))
    tx = window(scaled(reduced(op)), **normalize)
    step = boostax.make_train_step(loss, tx, mesh=mesh_of(4), axis_name=AXIS, **options)
    if kind != "mean":
        with pytest.raises(ValueError, match="migrate_state: replicas must be given, got None"):
            boostax.migrate_state(state.opt_state, tx, state.params)
    opt_state, _ = boostax.migrate_state(state.opt_state, tx, state.params, replicas=4)
    moved = jax.tree.map(jnp.copy, state._replace(opt_state=opt_state))
    moved = jax.device_put(moved, step.shardings(moved))
    with pytest.raises(ValueError, match=r"boostax\.reshard_state\(old_state, 1\)"):
        boostax.migrate_state(moved.opt_state, alone.tx, state.params)
    moved, _ = step(moved, batch(2))
    moved, _ = step(moved, batch(3))
    one = boostax.reshard_state(moved.opt_state, 1)
    opt_state, _ = boostax.migrate_state(one, alone.tx, moved.params)
    moved = jax.tree.map(np.asarray, moved._replace(opt_state=opt_state))
    for call in range(2, 9):
        state, _ = alone(state, batch(call))
    for call in range(4, 9):
        moved, _ = alone(moved, batch(call))
    assert_close(moved.params, state.params, rtol=1e-5, atol=1e-6)


KEPT = {
    "window": lambda: window(reduced()),
    "residual": lambda: optax.chain(boostax.top_k_reduce(AXIS, 0.5), optimizer()),
    "residual and momentum": lambda: optax.chain(
        boostax.top_k_reduce(AXIS, 0.5, momentum=0.9), optimizer()
    ),
    "moment": lambda: boostax.reduce.adasum_delta(optimizer(), AXIS),
}
FORGOTTEN = {"stack": (0, True), "stack and enter": (0, False), "enter": (2, False)}


@pytest.mark.parametrize("forgotten", FORGOTTEN)
@pytest.mark.parametrize("kind", KEPT)
def test_a_forgotten_dimension_of_replicas_does_not_broadcast(kind, forgotten):
    """Its first dimension is the number of replicas: such params look like a state of them."""
    tx, params, (stacked, enters) = KEPT[kind](), {"w": jnp.ones((2, 3))}, FORGOTTEN[forgotten]
    spec, specs = jax.sharding.PartitionSpec, boostax.states.state_specs(tx, params, AXIS)

    def local_step(params, state, grads):
        state = boostax.states.enter_replica(state) if enters else state
        return boostax.apply_gradients(tx, grads, state, params)[0]

    step = jax.shard_map(
        local_step,
        mesh=mesh_of(2),
        in_specs=(spec(), specs, spec()),
        out_specs=spec(),
        check_vma=False,
    )
    state = tx.init(params)
    state = boostax.states.stack_replicas(state, stacked) if stacked else state
    kept = kind.split()[0]
    message = rf"the {kept} must be shaped \(.*\) at '.*w', got \(.*\)"
    with pytest.raises(ValueError, match=message):
        jax.jit(step)(params, state, params)
