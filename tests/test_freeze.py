"""Scheduled freezing: what is frozen keeps its bits, costs nothing, and goes on where it was."""

import functools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from lanes import lanes, spread
from memory import temporary_bytes
from reducing import in_turn, mesh_of
from training import fit, follow, losses_of

import boostax
from boostax._core import trees
from boostax.freeze.schedules import HostDepth
from boostax.freeze.stages import NEVER, staged

LAYERS, WIDTH, ROWS = 4, 16, 16
GROUPS = list(range(LAYERS))
DEPTHS = [0, 2, 1, 3, 3, 0, 1, 2]


def start(width=WIDTH, layers=LAYERS):
    kernels = width**-0.5 * np.random.default_rng(0).normal(size=(layers, width, width))
    return [{"k": jnp.asarray(k, jnp.float32), "b": jnp.zeros(width)} for k in kernels]


def loss_fn(params, batch):
    x, y = batch
    for layer in params:
        x = jnp.tanh(x @ layer["k"] + layer["b"])
    return jnp.mean((x - y) ** 2)


def batches(count, rows=ROWS, width=WIDTH):
    for i in range(count):
        x = np.random.default_rng(100 + i).normal(size=(rows, width))
        yield jnp.asarray(x, jnp.float32), jnp.asarray(np.sin(3 * x), jnp.float32)


def clipped(*more):
    return optax.chain(optax.clip_by_global_norm(0.5), *more)


def adamw():
    return clipped(optax.adamw(optax.linear_schedule(3e-2, 1e-3, 20), weight_decay=0.1))


def wrap(name, axis=None):
    """The optimizer with other techniques around, and calls per applied step."""
    reduce = boostax.adasum if name == "adasum" else boostax.all_reduce
    inner = optax.chain(*([reduce(axis)] if axis else []), adamw())
    scaled = functools.partial(boostax.dynamic_loss_scale, axis_name=axis)
    window = functools.partial(boostax.accumulate, every=2, axis_name=axis)
    return {
        "adamw": (inner, 1),
        "adasum": (scaled(window(inner)), 2),
        "scaled": (scaled(inner), 1),
        "accumulated": (window(inner), 2),
        "scaled(accumulated)": (scaled(window(inner)), 2),
        "accumulated(scaled)": (window(scaled(inner)), 2),
    }[name]


def frozen_leaves(state, depth):
    """Everything in a state that belongs to the first groups: params, moments, sums."""
    leaves = jax.tree_util.tree_leaves_with_path((state.params, state.opt_state.inner_state))
    parts = ["/" + jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in leaves]
    ends = tuple(f"/{i}/{leaf}" for i in range(depth) for leaf in "kb")
    return {p: np.asarray(x) for p, (_, x) in zip(parts, leaves, strict=True) if p.endswith(ends)}


def run(tx, calls, mesh=None, axis=None, **options):
    """``(state, metrics)`` before the first call (metrics None) and after each."""
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name=axis, **options)
    state = step.init(start())
    yield step, jax.tree.map(np.asarray, state), None
    for batch in batches(calls):
        state, told = step(state, batch)
        yield step, jax.tree.map(np.asarray, state), jax.device_get(told)


WRAPPED = ["adamw", "scaled", "accumulated", "scaled(accumulated)", "accumulated(scaled)"]


@pytest.mark.parametrize("moments", ["shared", "per_group"])
def test_states_are_traced_as_often_as_there_are_depths(moments):
    traced = []

    def init(params):
        traced.append(len(jax.tree.leaves(params)))
        return adam.init(params)

    adam, count = optax.adam(1e-2), 12
    params = {f"{index:02}": jnp.ones(2) for index in range(count)}
    inner = optax.GradientTransformation(init, adam.update)
    groups = boostax.freeze.prefix_groups(params, count)
    tx = boostax.scheduled_freeze(inner, groups, list(range(count)), moments=moments)
    jax.jit(tx.update).lower(params, tx.init(params), params)
    assert len(traced) <= 6 * count


KEPT = [(name, 1, "host") for name in WRAPPED] + [("scaled(accumulated)", 1, "switch")]
KEPT += [("accumulated(scaled)", 8, "host"), ("adasum", 8, "host"), ("adasum", 8, "switch")]


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_frozen_leaves_keep_their_bits_and_the_others_move(mesh, case):
    """Params, both moments, decay and half-full windows; Adam does not coast on a frozen leaf."""
    name, replicas, driver = case
    axis = "data" if replicas > 1 else None
    inner, window = wrap(name, axis)
    tx = boostax.scheduled_freeze(inner, GROUPS, DEPTHS)
    place = {"mesh": mesh, "axis": axis} if axis else {}
    before = None
    calls = run(tx, window * len(DEPTHS), **place, freeze_driver=driver)
    for call, (_, state, told) in enumerate(calls):
        if told is not None:
            # A change waits for the end of the window.
            depth = DEPTHS[(call - 1) // window]
            assert told["frozen_groups"] == depth
            old, new = frozen_leaves(before, depth), frozen_leaves(state, depth)
            assert len(old) >= 6 * depth
            for path in old:
                np.testing.assert_array_equal(old[path], new[path], err_msg=path)
            if told["applied"]:
                for i in range(depth, LAYERS):
                    assert np.any(before.params[i]["k"] != state.params[i]["k"])
        before = state
    assert state.opt_state.trained_steps.tolist() == [sum(d <= g for d in DEPTHS) for g in GROUPS]


@pytest.mark.long
def test_a_scan_over_a_step_takes_the_steps_of_the_host():
    tx = boostax.scheduled_freeze(wrap("scaled")[0], GROUPS, DEPTHS)
    *_, (step, host, _) = run(tx, len(DEPTHS))
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *batches(len(DEPTHS)))
    scanned = jax.jit(lambda carry: jax.lax.scan(step, carry, stacked)[0])(step.init(start()))
    chex.assert_trees_all_close(scanned.params, host.params, rtol=1e-6, atol=1e-7)


BY_HAND = spread([3, 0, 1], ["averaged", "scaled", "accumulated(scaled)"])


@pytest.mark.parametrize(("depth", "wrapped"), BY_HAND)
def test_flops_are_those_of_a_step_written_for_the_depth(depth, wrapped):
    """Clipping, finiteness and windows keep no dead backward pass alive."""
    batch, params = next(batches(1, 128, 128)), start(128)
    plain = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))
    scaled = boostax.dynamic_loss_scale(plain)
    inner = boostax.accumulate(scaled, 2) if "accumulated" in wrapped else scaled
    tx = boostax.scheduled_freeze(inner, GROUPS, DEPTHS)
    tx = boostax.model.average_params(tx) if wrapped == "averaged" else tx

    @jax.jit
    def by_hand(trained, held, state):
        grads = jax.grad(lambda trained: loss_fn(held + trained, batch))(trained)
        updates, state = plain.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state

    held, trained = params[:depth], params[depth:]
    hand = by_hand.lower(trained, held, plain.init(trained)).compile()
    step = boostax.make_train_step(loss_fn, tx)
    ours = step.lower(step.init(params), batch, depth=depth).compile()
    assert ours.cost_analysis()["flops"] / hand.cost_analysis()["flops"] <= 1.05
    full = step.lower(step.init(params), batch, depth=0).compile()
    temps = [p.memory_analysis().temp_size_in_bytes for p in (ours, full)]
    assert temps[0] < temps[1] or depth == 0


def test_frozen_params_and_moments_are_not_copied():
    """Donated and passed through: every output of the program shares its input's memory."""
    params = start(256)
    step = boostax.make_train_step(loss_fn, boostax.scheduled_freeze(adamw(), GROUPS, DEPTHS))
    state = step.init(params)
    for depth in (0, 3):
        program = step.lower(state, next(batches(1, 16, 256)), depth=depth).compile()
        memory = program.memory_analysis()
        # What is frozen of the moments is not even handed over. The depths themselves are set.
        moments = sum(x.nbytes for x in jax.tree.leaves(state.params[:depth])) * 2
        whole = sum(x.nbytes for x in jax.tree.leaves(state))
        assert whole - moments - 16 <= memory.alias_size_in_bytes <= whole - moments
    # Nothing of the size of a kernel but what the one active layer needs.
    assert memory.temp_size_in_bytes <= 2.1 * params[0]["k"].nbytes


REDUCTIONS = {
    "mean": lambda: boostax.all_reduce("data"),
    "adasum": lambda: boostax.adasum("data"),
    "top-k": lambda: boostax.top_k_reduce("data", 0.1),
    "int8": lambda: boostax.int8_reduce("data"),
}


@pytest.mark.parametrize("name", lanes(REDUCTIONS, ["int8"]))
def test_frozen_leaves_do_not_travel(mesh, name):
    """With half the layers frozen, about half the bytes are sent; and it trains."""
    tx = boostax.scheduled_freeze(optax.chain(REDUCTIONS[name](), adamw()), GROUPS, DEPTHS)
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name="data")
    # Wide enough that buckets and blocks are full.
    state, (batch, *_) = jax.eval_shape(step.init, start(256)), batches(1, width=256)

    def sent(depth):
        return boostax.audit(step, state, batch, depth=depth).wire_bytes.most

    # Beside the gradients travel the loss and a few scalars.
    assert sent(2) <= 0.52 * sent(0) + 200
    state = step.init(start())
    after, told = follow(step, state, batches(2))
    assert np.isfinite(losses_of(told)).all()
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_a_resumed_run_equals_the_uninterrupted_one():
    """With a new step, whose host knows nothing of the run so far; the rest is in the contract."""
    inner, window = wrap("scaled(accumulated)")
    depths = [0, 2, 2, 0, 2]
    tx = boostax.scheduled_freeze(inner, GROUPS, depths)
    *seen, (step, whole, _) = run(tx, window * len(depths))
    cut, again = window * 2 + 1, boostax.make_train_step(loss_fn, tx)
    state = jax.tree.map(jnp.asarray, seen[cut][1])
    state, _ = follow(again, state, list(batches(window * len(depths)))[cut:])
    chex.assert_trees_all_equal(whole, jax.tree.map(np.asarray, state))
    assert step.depths == (0, 2)


def test_one_compilation_for_each_depth_drawn():
    compiled = []
    depths = [0, 0, 2, 0, 2, 2, 0]
    step = boostax.make_train_step(loss_fn, boostax.scheduled_freeze(adamw(), GROUPS, depths))
    state = step.init(start())
    for batch in batches(len(depths)):
        state, _ = step(state, batch)
        found = (x for each in step._programs.values() for x in each.compiled.values())
        compiled.append([program._cache_size() for program in found])
    assert compiled[0] == compiled[1] == [1] and compiled[-1] == [1, 1] and step.depths == (0, 2)


def test_a_skipped_step_is_taken_again_at_its_depth():
    """The schedule waits; that an overflow leaves all else is a law of the contract."""
    tx = boostax.scheduled_freeze(boostax.dynamic_loss_scale(adamw()), GROUPS, [0, 2, 0])
    calls = list(batches(3))
    calls.insert(1, (calls[1][0].at[0, 0].set(jnp.nan), calls[1][1]))
    for driver in ("host", "switch"):
        _, told = fit(loss_fn, tx, start(), calls, freeze_driver=driver)
        seen = [(int(x["frozen_groups"]), bool(x["applied"])) for x in told]
        assert seen == [(0, True), (2, False), (2, True), (0, True)]


def test_never_trained_leaves_have_no_moments():
    """A fixed depth is a static mask: the state is that of the rest alone."""
    params = start()
    tx = boostax.scheduled_freeze(optax.adamw(1e-2), GROUPS, 3)
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
    assert count(tx.init(params).inner_state) == count(optax.adamw(1e-2).init(params[3:]))
    *_, (step, state, told) = run(tx, 3)
    assert step.depths == (3,) and told["frozen_groups"] == 3
    chex.assert_trees_all_equal(state.params[:3], params[:3])


def test_what_trains_is_told():
    tx = boostax.scheduled_freeze(adamw(), GROUPS, [1, 3])
    told = boostax.freeze.active_groups
    state = tx.init(start())
    assert int(state.depth) == 1 and told(state).tolist() == [False, True, True, True]
    _, state = tx.update(jax.tree.map(jnp.ones_like, start()), state, start())
    assert told((state,)).tolist() == [False, False, False, True]
    found = boostax.metrics(state)
    assert found["frozen_groups"] == 1 and found["freeze_steps"] == 1


def test_moments_of_each_depth():
    """MindSpore's: the counter and the moments of a depth move in its own steps only."""
    tx = boostax.scheduled_freeze(optax.adam(1e-2), GROUPS, DEPTHS, moments="per_group")
    *_, (_, state, _) = run(tx, len(DEPTHS))
    counts = [int(inner[0].count) for inner in state.opt_state.inner_state]
    assert counts == [DEPTHS.count(depth) for depth in range(4)]
    sizes = [len(jax.tree.leaves(inner[0].mu)) for inner in state.opt_state.inner_state]
    assert sizes == [8, 6, 4, 2]


SCHEDULE = optax.linear_schedule(0.5, 0.0, 8)


BY_SCHEDULE = [
    optax.sgd(SCHEDULE),
    optax.inject_hyperparams(optax.sgd)(SCHEDULE),
    optax.chain(optax.add_decayed_weights(SCHEDULE), optax.sgd(0.5)),
]


@pytest.mark.parametrize("optimizer", BY_SCHEDULE, ids=["sgd", "injected", "decay"])
def test_schedules_of_each_depth_go_by_the_steps_of_the_run(optimizer):
    """Without moments, as if all depths shared one state."""
    found = []
    for moments in ("shared", "per_group"):
        tx = boostax.scheduled_freeze(optimizer, [0, 1], [0, 1, 1, 0], moments=moments)
        step = jax.jit(lambda w, state, tx=tx: boostax.apply_gradients(tx, w, state, w))
        w = [jnp.ones(()), jnp.ones(())]
        state = tx.init(w)
        for _ in range(4):
            w, state = step(w, state)
        found.append([*map(float, w)])
    assert found[0] == found[1]


RESTS = {"adam": optax.adam(0.1), "schedule": optax.sgd(SCHEDULE)}


@pytest.mark.parametrize("driver", ["host", "switch"])
@pytest.mark.parametrize("wrap", [lambda tx: tx, boostax.dynamic_loss_scale])
@pytest.mark.parametrize("name", RESTS)
def test_a_part_of_a_partition_rests_with_its_count_while_nothing_in_it_trains(name, wrap, driver):
    """Defect guarded against: the first step of a thawed layer was two learning rates long."""
    params, loss = {"a": jnp.ones(2), "b": jnp.ones(2)}, lambda p, x: x * (p["a"] * p["b"]).sum()
    inner = optax.partition({x: RESTS[name] for x in params}, lambda p: {x: x for x in p})
    tx = boostax.scheduled_freeze(wrap(inner), {"a": 0, "b": 1}, [1, 1, 1, 0])
    states = [fit(loss, tx, params, [1.0] * n, freeze_driver=driver)[0] for n in (0, 3, 4)]
    parts = [trees.find(x, optax.PartitionState)[0].inner_states for x in states]
    chex.assert_trees_all_equal(parts[0]["a"], parts[1]["a"])
    assert [int(optax.tree.get(parts[2][x], "count")) for x in "ab"] == [1, 4]


def test_a_function_of_the_step_is_a_schedule_for_so_many_steps_and_no_more():
    """On the host and in one program."""
    plan = boostax.scheduled_freeze(adamw(), GROUPS, lambda step: step % 4).freezing.plan(start())
    assert [plan.known(step) for step in (0, 5, 65535)] == [0, 1, 3]
    assert plan.at(jnp.int32([0, 5, 65535, 65536])).tolist() == [0, 1, 3, 3]
    with pytest.raises(ValueError, match=r"got a schedule of 65536 steps .* total_steps"):
        plan.known(65536)
    tx = boostax.scheduled_freeze(adamw(), GROUPS, lambda step: step)
    with pytest.raises(ValueError, match=r"depth at step 4 must be an integer in \[0, 4\), got"):
        tx.init(start())


IN_PLACE = [("adamw", "shared"), ("adamw", "per_group"), ("scaled(accumulated)", "shared")]


@pytest.mark.parametrize("name, moments", IN_PLACE)
def test_the_optimizer_finds_the_depth_out_in_place(name, moments):
    """No copy of anything, active or frozen: temporary memory is that of the optimizer alone."""
    inner, params = wrap(name)[0], start(width=256)
    tx = boostax.scheduled_freeze(inner, GROUPS, DEPTHS, moments=moments)
    assert temporary_bytes(tx, params) < 1.02 * temporary_bytes(inner, params)


class Counter:
    """A count of steps on the device that notes how often it is read."""

    asked = 0

    def __init__(self, value):
        self.value = value

    def __int__(self):
        Counter.asked += 1
        return self.value


ASKED = [(False, (), 1), (True, (), 2), (True, (3, 7), 6)]


@pytest.mark.parametrize(("gated", "skip", "most"), ASKED)
def test_the_host_asks_only_where_the_schedule_could_change(gated, skip, most):
    Counter.asked, applied, depths = 0, 0, []
    plan = boostax.scheduled_freeze(adamw(), GROUPS, [0] * 10 + [1] * 10).freezing.plan(start())
    inner = boostax.dynamic_loss_scale(adamw()).init(start()) if gated else ()
    host, state = HostDepth(plan), SimpleNamespace(steps=Counter(0), inner_state=inner)
    while applied < 20:
        depths.append(host(state))
        applied += len(depths) not in skip
        state = SimpleNamespace(steps=Counter(applied), inner_state=inner)
        host.follow(state)
    assert depths == [0] * (10 + len(skip)) + [1] * 10 and Counter.asked <= most


def test_a_look_at_another_state_does_not_lead_the_host_astray():
    """Lowering, a jaxpr, a call that fails, another run in between: the depths go on as planned."""
    depths = [0] * 3 + [3] * 5
    for inner in (adamw(), boostax.dynamic_loss_scale(adamw())):
        step = boostax.make_train_step(loss_fn, boostax.scheduled_freeze(inner, GROUPS, depths))
        state, other, seen = step.init(start()), step.init(start()), []
        for i, batch in enumerate(batches(8)):
            if i == 4:
                step.jaxpr(step.init(start()), batch)
                step.lower(step.init(start()), batch)
            if i == 5:
                with pytest.raises((TypeError, ValueError)):
                    step(step.init(start()), batch[0])
            if i == 6:
                other, told = step(other, batch)
                assert told["frozen_groups"] == 0
            state, told = step(state, batch)
            seen.append(int(told["frozen_groups"]))
        assert seen == depths
        with pytest.raises(ValueError, match="at least as long as the run"):
            step(state, batch)


def test_one_step_serves_params_of_several_structures():
    tx = boostax.scheduled_freeze(adamw(), lambda path, leaf: int(path[0]), [0, 1])
    step = boostax.make_train_step(loss_fn, tx)
    for layers in (4, 2):
        _, told = follow(step, step.init(start(layers=layers)), batches(2))
        assert told[-1]["frozen_groups"] == 1


@pytest.mark.parametrize("depths", [[0], [0, 1], [0, 0, 1], [1, 0, 1, 1]])
def test_a_codec_counts_the_steps_of_each_leaf_whatever_the_period(depths):
    """A leaf that is active in every second step only still sends all of its rows in turn."""
    groups = {"b": 0, "a": 1}  # not the order of the leaves
    inner = optax.chain(in_turn("data"), optax.sgd(1.0))
    tx = boostax.scheduled_freeze(inner, groups, depths, repeat=True)
    params = {"a": jnp.zeros((4, 3)), "b": jnp.zeros((4, 3))}
    grads = jax.tree.map(jnp.ones_like, params)

    def run(index):
        def step(state, _):
            return tx.update(grads, state, params)[1], None

        return jax.lax.scan(step, tx.init(params), None, 60)[0]

    state = jax.vmap(run, axis_name="data")(jnp.arange(1)).inner_state[0]
    steps = [depths[i % len(depths)] for i in range(60)]
    for name, group in groups.items():
        assert state.codec.values[name] == sum(depth <= group for depth in steps), name
        # Of four rows each waits for at most three of the leaf's own steps.
        assert state.residual.local[name].max() <= 3, name


def test_a_jitted_loss_is_cut_into_stages_too():
    width, text = 32, {}
    for name, fn in {"plain": loss_fn, "jitted": jax.jit(loss_fn)}.items():
        tx = boostax.scheduled_freeze(optax.sgd(0.1), GROUPS, DEPTHS)
        step = boostax.make_train_step(fn, tx, freeze_driver="switch")
        jaxpr = step.jaxpr(step.init(start(width)), next(batches(1, 8, width)))
        inner = jaxpr.jaxpr.eqns[0].params["jaxpr"].jaxpr
        text[name] = [str(eqn).count("dot_general") for eqn in inner.eqns if "cond" in str(eqn)]
    assert text["plain"] == text["jitted"] and sum(text["plain"]) >= 6


def test_stages_run_what_is_wanted_and_compile_it_once():
    w = jax.random.normal(jax.random.key(0), (4, 8, 8))

    def results(x):
        out = []
        for i in range(4):
            x = jnp.sin(x @ w[i])
            out.append(x)
        return out

    levels = [3, 1, 0, NEVER]
    x = jnp.ones((8, 8))
    both = lambda x, index: staged(functools.partial(results, x), levels, index)  # noqa: E731
    program = jax.jit(both).lower(x, jnp.int32(0)).compile()
    assert program.as_text().count(" dot(") == 3
    for index in range(4):
        for level, a, b in zip(levels, program(x, jnp.int32(index)), results(x), strict=True):
            np.testing.assert_allclose(a, b if index <= level else jnp.zeros_like(b), rtol=1e-6)


def test_what_does_not_fit_is_refused():
    params, grads = start(), jax.tree.map(jnp.ones_like, start())
    tx = boostax.scheduled_freeze(adamw(), GROUPS, [0, 1])
    state = tx.init(params)
    update = functools.partial(tx.update, grads, state, params)
    masked = [jax.tree.map(lambda _: optax.MaskedNode(), grads[0]), *grads[1:]]
    hidden = optax.GradientTransformation(tx.init, lambda *args: tx.update(*args))
    init = lambda inner, *rest, **kw: boostax.scheduled_freeze(inner, *rest, **kw).init(params)  # noqa: E731
    make = functools.partial(boostax.make_train_step, loss_fn)
    oracle, batch = boostax.value_and_grad(loss_fn), next(batches(1))
    window = boostax.accumulate(adamw(), 2)
    local = boostax.reduce.local_updates(adamw(), 2, axis_name="data")
    recorded = optax.chain(boostax.subspace.record_trajectory(3), adamw())
    for call, match in (
        (lambda: update(depth=3), r"depth must be .*\[0, 1\].* got 3"),
        (lambda: update(depth=jnp.ones(2)), "depth must be .* as a Python integer"),
        (lambda: tx.update(grads, state), "params must be given"),
        (lambda: tx.update(masked, state, params, depth=0), "must be those that depth 0 trains"),
        (lambda: init(adamw(), GROUPS, 4), r"an integer in \[0, 4\), got 4. Depth d freezes"),
        (lambda: init(adamw(), GROUPS, [1, -1]), r"schedule must be .*, got \[1, -1\]"),
        (lambda: init(adamw(), GROUPS, "3"), "schedule must be"),
        (lambda: init(window, GROUPS, 1, moments="per_group"), "without a loss scaler or a window"),
        (lambda: init(optax.flatten(adamw()), GROUPS, [0, 1]), "keeps its state leaf by leaf"),
        (lambda: init(local, GROUPS, [0, 1]), "params equal on all replicas"),
        (lambda: init(recorded, GROUPS, [0, 1]), "not store all params for a schedule that"),
        (lambda: init(optax.MultiSteps(adamw(), 2), GROUPS, [0, 1]), "optax.MultiSteps"),
        (lambda: make(boostax.dynamic_loss_scale(tx)), "scheduled_freeze outermost"),
        (lambda: make(hidden).init(params), "scheduled_freeze must be outermost"),
        (lambda: boostax.freeze.active_groups(adamw().init(params)), "ScheduledFreezeState"),
        (lambda: oracle(params, (), batch, active=[1, 2]), "active must be"),
        (lambda: oracle(params, (), batch, active=[True]), "pytree"),
        (lambda: make(tx, freeze_driver="scan"), "freeze_driver"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            call()


def test_a_schedule_shorter_than_the_run_is_an_error_and_not_silent():
    tx = boostax.scheduled_freeze(adamw(), GROUPS, [0, 1])
    too_short = "at least as long as the run, got a schedule of 2 steps for a longer run"
    with pytest.raises(ValueError, match=too_short):
        list(run(tx, 3))
    # Depths may come from an iterator.
    tx = boostax.scheduled_freeze(adamw(), GROUPS, iter([0, 1]), repeat=True)
    assert [int(s.opt_state.depth) for _, s, told in run(tx, 4) if told] == [0, 1, 0, 1]


def test_a_partial_window_is_applied_at_its_depth():
    tx = boostax.scheduled_freeze(boostax.accumulate(adamw(), 2), GROUPS, [2, 0])
    for options in ({}, {"freeze_driver": "switch"}):
        step = boostax.make_train_step(loss_fn, tx, **options)
        state, _ = step(step.init(start()), next(batches(1)))
        state = step.flush(state)
        assert int(state.opt_state.steps) == 1 and int(state.opt_state.next_depth) == 0
        pairs = zip(start(), state.params, strict=True)
        assert [bool((a["k"] != b["k"]).any()) for a, b in pairs] == [False, False, True, True]
        before = jax.tree.map(np.asarray, state)
        chex.assert_trees_all_equal(before.params, step.flush(state).params)


@pytest.mark.parametrize("kind", lanes([AxisType.Auto, AxisType.Explicit], [AxisType.Auto]))
def test_a_chain_freezes_in_one_program_over_sharded_params_and_state(kind):
    """Defect guarded against: zeros of a stage that does not run had not the shards' types."""
    mesh = mesh_of(kind, data=2, model=2)
    wave = lambda *shape: jnp.sin(jnp.arange(float(np.prod(shape)))).reshape(shape) / 10  # noqa: E731
    params = {"a": wave(16, 16), "b": wave(16, 16), "c": wave(16, 4)}
    params = jax.device_put(params, NamedSharding(mesh, jax.P(None, "model")))
    loss = lambda p, x: jnp.mean((jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]) ** 2)  # noqa: E731
    chain = optax.chain(boostax.all_reduce("data"), optax.clip_by_global_norm(1.0), optax.adam(0.1))
    tx = boostax.scheduled_freeze(chain, {"a": 0, "b": 1, "c": 2}, [0, 1, 2])
    found = []
    for sharded, driver in ((False, "host"), (False, "switch"), (True, "switch")):
        place = {"mesh": mesh, "axis_name": "data", "shard_optimizer": sharded}
        step = boostax.make_train_step(loss, tx, **place, freeze_driver=driver)
        _, told = follow(step, step.init(params), [wave(8, 16) + i for i in range(3)])
        found.append(losses_of(told))
    np.testing.assert_allclose(found, [found[0]] * 3, rtol=1e-4)


# One program that finds the depth out does what the program of each depth does.


def small():
    return [layer | {"s": jnp.ones(())} for layer in start(8)]


def gradients(step):
    normal = np.random.default_rng(1 + step).normal
    draw = lambda x: jnp.asarray(normal(size=x.shape) * (1 + step), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, small())


@optax.stateless
def mixing(updates, params):
    """Adds to each leaf the sum of the leaves of its shape."""
    alike = lambda x: [y for y in jax.tree.leaves(updates) if y.shape == x.shape]  # noqa: E731
    return jax.tree.map(lambda x: x + sum(alike(x)), updates)


def looking(seen):
    """Tells what it is given."""

    def update(updates, state, params=None):
        jax.debug.callback(lambda *x: seen.append(len(x)), *jax.tree.leaves(updates))
        return updates, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


INNER = {
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "clipped adamw": lambda: clipped(optax.adamw(optax.linear_schedule(3e-2, 1e-3, 20))),
    "lamb": lambda: optax.lamb(1e-2),
    "lion": lambda: clipped(optax.lion(1e-3)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "centralized": lambda: clipped(boostax.centralize_gradients(), optax.adam(1e-2)),
    "masked decay": lambda: optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "noise": lambda: optax.noisy_sgd(1e-2, key=0),
    "mixing": lambda: clipped(mixing, optax.sgd(1e-2)),
    "printing": lambda: clipped(looking([]), optax.sgd(1e-2)),
}


def trajectory(inner, told):
    """Params and states of a run through all depths, which the program is told or finds out."""
    tx = boostax.scheduled_freeze(inner, GROUPS, DEPTHS)
    params, seen = small(), []
    state = tx.init(params)
    step = jax.jit(functools.partial(boostax.apply_gradients, tx), static_argnames="depth")
    for i, depth in enumerate(DEPTHS):
        params, state = step(gradients(i), state, params, depth=depth if told else None)
        seen.append((params, state))
    jax.effects_barrier()
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, seen)


# With sums over leaves, factored moments, leaves that are mixed, and effects.


@pytest.mark.parametrize("name", lanes(INNER, ("clipped adamw", "adafactor", "mixing", "printing")))
def test_one_program_for_all_depths_does_what_each_of_them_does(name):
    found, expected = (trajectory(INNER[name](), told) for told in (False, True))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_step_outside_any_program():
    """Equal leaves are told apart, and their values are not read."""
    params = [jnp.zeros(()) for _ in GROUPS]
    tx = boostax.scheduled_freeze(INNER["clipped adamw"](), GROUPS, [0, 2])
    ends = []
    for step in (boostax.apply_gradients, jax.jit(boostax.apply_gradients, static_argnums=0)):
        now, state = params, tx.init(params)
        for _ in range(2):
            now, state = step(tx, jax.tree.map(jnp.ones_like, params), state, now)
        ends.append((now, state))
    chex.assert_trees_all_close(*ends, rtol=1e-6, atol=0)
    values = [float(x) for x in ends[0][0]]
    assert values[0] == values[1] > values[2] == values[3]


def test_what_an_inner_transformation_tells_is_told_once_a_step():
    seen = []
    trajectory(clipped(looking(seen), optax.sgd(1e-2)), False)
    assert seen == [3 * (len(GROUPS) - depth) for depth in DEPTHS]
