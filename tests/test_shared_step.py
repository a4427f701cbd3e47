"""``make_train_step(shard_optimizer=True)``: ZeRO-1 by one argument, for chains that allow it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax._core.costs import collectives, expected, wire_bytes
from boostax._core.entrywise import across_entries

AXIS = "data"
DEVICES = 8
GROUPS = {"embed": 0, "layer": 1, "head": 2}


def initial():
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) / 8, jnp.float32)  # noqa: E731
    return {
        "embed": {"kernel": normal(64, 64)},
        "layer": {"kernel": normal(64, 128), "bias": jnp.zeros(128), "odd": jnp.ones(3)},
        # Cut along its second dimension: 3 does not divide.
        "head": {"kernel": normal(3, 128), "scale": jnp.float32(1.0)},
    }


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["embed"]["kernel"])
    hidden = jnp.tanh(hidden @ params["layer"]["kernel"] + params["layer"]["bias"])
    hidden = hidden.at[:, :3].multiply(params["layer"]["odd"])
    found = params["head"]["scale"] * hidden @ params["head"]["kernel"].T
    return jnp.mean((found - batch["y"]) ** 2)


def batch(index, scale=1.0):
    x = np.random.default_rng(index).normal(size=(32, 64)).astype(np.float32)
    return {"x": x, "y": scale * np.tanh(x[:, :3] - x[:, 3:6])}


def mesh(devices=DEVICES):
    some = jax.devices()[:devices]
    return jax.make_mesh((devices,), (AXIS,), (jax.sharding.AxisType.Auto,), devices=some)


def made(tx, share, **options):
    return boostax.make_train_step(
        loss_fn, tx, mesh=mesh(), axis_name=AXIS, shard_optimizer=share, **options
    )


def rest():
    return (boostax.clip_by_global_norm(0.3), optax.adamw(1e-2, weight_decay=0.1))


def mean():
    return boostax.all_reduce(AXIS)


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def frozen(inner):
    def groups(path, leaf):
        del leaf
        return GROUPS[path.split("/")[0]]

    schedule = boostax.freeze_schedule("continuous", total_steps=6, frozen_fraction=0.5)
    return boostax.scheduled_freeze(inner, groups, schedule)


CHAINS = {
    "mean": lambda: optax.chain(mean(), *rest()),
    "top-k": lambda: optax.chain(boostax.top_k_reduce(AXIS, 0.1), *rest()),
    # Without clipping, whose last bit a coarser rounding would make large.
    "int8": lambda: optax.chain(boostax.int8_reduce(AXIS), optax.adamw(1e-2)),
    "low rank": lambda: optax.chain(boostax.power_sgd_reduce(AXIS, 2), *rest()),
    "centralized": lambda: optax.chain(mean(), boostax.centralize_gradients(), *rest()),
    "lion": lambda: optax.chain(mean(), optax.lion(1e-3)),
    "momentum": lambda: optax.chain(mean(), optax.sgd(1e-2, momentum=0.9, nesterov=True)),
    "average of params": lambda: optax.chain(mean(), optax.adam(1e-2), optax.ema(0.9)),
    "injected": lambda: optax.chain(
        mean(), optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2, weight_decay=0.1)
    ),
    "masked": lambda: optax.chain(
        mean(),
        boostax.clip_by_global_norm(0.3),
        optax.masked(
            optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
        ),
        optax.adam(1e-2),
    ),
    "partitioned": lambda: optax.chain(
        mean(),
        optax.partition(
            {"a": optax.adam(1e-2), "b": optax.sgd(1e-1)},
            lambda p: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", p),
        ),
    ),
    "scaler": lambda: boostax.dynamic_loss_scale(CHAINS["mean"](), axis_name=AXIS),
    "scaler around a window": lambda: boostax.dynamic_loss_scale(
        boostax.accumulate(CHAINS["mean"](), 2, axis_name=AXIS), axis_name=AXIS
    ),
    "window around a scaler": lambda: boostax.accumulate(CHAINS["scaler"](), 2, axis_name=AXIS),
    "peer window": lambda: optax.chain(mean(), optax.MultiSteps(optax.adam(1e-2), 2)),
    "frozen": lambda: frozen(optax.chain(mean(), optax.adamw(1e-2))),
    "frozen and scaled": lambda: frozen(CHAINS["scaler"]()),
    "recorded": lambda: optax.chain(boostax.record_trajectory(3), mean(), optax.adam(1e-2)),
}
SHORT = ("centralized", "scaler around a window")


def trained(tx, share, steps=6, **options):
    step = made(tx, share, **options)
    state = step.init(initial())
    losses = []
    for index in range(steps):
        # One batch overflows: a scaler skips it.
        state, metrics = step(state, batch(index, 1e38 if index == 3 and "scale" in str(tx) else 1))
        losses.append(float(metrics["loss"]))
    return step, step.flush(state) if hasattr(tx, "step") else state, losses


def assert_near(x, y, where=""):
    """Within 1e-6 of its norm: sums in another order change the last bits."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert np.linalg.norm(x - y) <= 1e-6 * np.linalg.norm(y), where


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x in SHORT else pytest.mark.long) for x in CHAINS],
)
def test_it_trains_what_the_whole_does(name):
    step, shared, losses = trained(CHAINS[name](), True)
    _, whole, wanted = trained(CHAINS[name](), False)
    np.testing.assert_allclose(losses, wanted, rtol=1e-6, atol=1e-6)
    assert jax.tree.structure(shared) == jax.tree.structure(whole)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(shared), jax.tree.leaves(whole), strict=True
    ):
        where = jax.tree_util.keystr(path)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), where
        assert_near(x, y, where)
    # The programs keep what the specs say.
    assert jax.tree.map(lambda x: x.sharding, shared) == step.shardings(shared)
    assert {program._cache_size() for program in step._compiled.values()} == {1}


@pytest.mark.parametrize("checked", [True, False])
def test_the_state_takes_an_nth_and_the_wire_no_more(checked):
    tx = boostax.dynamic_loss_scale(optax.chain(mean(), optax.adamw(1e-2)), axis_name=AXIS)
    sizes, wires, memory = {}, {}, {}
    for share in (True, False):
        loss = lambda p, b: jnp.mean((b @ p["w"] @ p["v"]) ** 2)  # noqa: E731
        step = boostax.make_train_step(
            loss, tx, mesh=mesh(), axis_name=AXIS, shard_optimizer=share, check_vma=checked
        )
        state = step.init({"w": jnp.zeros((512, 64)), "v": jnp.zeros((64, 256))})
        x = jnp.ones((16, 512))
        sizes[share] = sum(
            leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(state.opt_state)
        )
        found = collectives(step.jaxpr(state, x))
        wires[share] = expected(found)
        memory[share] = step.lower(state, x).compile().memory_analysis().argument_size_in_bytes
    assert sizes[True] <= 1.1 / DEVICES * sizes[False], sizes
    assert wires[True] <= wires[False], wires
    assert memory[True] < 0.5 * memory[False]
    print(
        f"bytes of the optimizer's state per device {sizes[True]:,} of {sizes[False]:,} "
        f"({sizes[True] / sizes[False]:.4f}, 1/n = {1 / DEVICES}); on the wire "
        f"{wires[True]:,.0f} of {wires[False]:,.0f}"
    )


def test_nothing_is_gathered_inside_a_window():
    tx = boostax.accumulate(optax.chain(mean(), optax.adam(1e-2)), 4, axis_name=AXIS)
    step = made(tx, True)
    state = step.init(initial())
    found = collectives(step.jaxpr(state, batch(0)))
    assert wire_bytes(found, conditional=False) < 100
    assert wire_bytes(found, conditional=True) > 1000


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            lambda: optax.chain(mean(), optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
            "reduce_sum",
        ),
        (lambda: optax.chain(mean(), optax.lamb(1e-2)), "reduce_sum"),
        (lambda: optax.chain(mean(), optax.contrib.muon(1e-2)), "across the entries"),
        (lambda: optax.chain(mean(), optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), "random_bits"),
        (
            lambda: optax.apply_if_finite(optax.chain(mean(), optax.sgd(0.1)), 3),
            "with shard_optimizer=True, params",
        ),
        (lambda: boostax.local_updates(optax.sgd(0.1), AXIS, 2), "local_updates: shard_optimizer"),
        (lambda: boostax.adasum_delta(optax.sgd(0.1), AXIS), "adasum_delta: shard_optimizer"),
        (
            lambda: optax.chain(mean(), boostax.shard_optimizer(optax.sgd(0.1), AXIS)),
            "shard_optimizer: shard_optimizer",
        ),
        (lambda: boostax.dim_reduce(boostax.random_basis(initial(), 2), axis_name=AXIS), "dim_red"),
    ],
)
def test_what_looks_across_a_leaf_is_refused(tx, message):
    step = made(tx(), True)
    state = step.init(initial())
    with pytest.raises((ValueError, TypeError), match=message):
        step.lower(state, batch(0))


@pytest.mark.parametrize(
    ("across", "primitive"),
    [
        (lambda g: jnp.zeros_like(g).at[jnp.zeros(len(g), int)].add(g), "scatter_add"),
        (lambda g: g - jnp.flip(jnp.sort(g, 0), 0), "sort"),
        (lambda g: jax.lax.fori_loop(0, 2, lambda _, x: x / jnp.sum(x), g), "reduce_sum"),
        (lambda g: jax.lax.cond(g[0, 0] > 0, lambda: g / g.max(), lambda: g), "reduce_max"),
    ],
)
def test_it_is_found_in_loops_and_branches(across, primitive):
    jaxpr = jax.make_jaxpr(across)(jnp.ones((8, 4)))
    found = across_entries(jaxpr, [True], frozenset({(8, 4)}), frozenset())
    assert (primitive, ()) in found
    assert not across_entries(jaxpr, [False], frozenset({(8, 4)}), frozenset())


def test_the_transformation_refuses_them_too():
    tx = optax.chain(mean(), boostax.shard_optimizer(optax.lamb(1e-2), AXIS))
    step = made(tx, False)
    with pytest.raises(ValueError, match="shard_optimizer: inner must work entry by entry, got"):
        step.lower(step.init(initial()), batch(0))


def test_a_reduction_over_other_axes_is_refused():
    some = np.array(jax.devices()[:4]).reshape(2, 2)
    two = jax.sharding.Mesh(some, ("slow", "fast"))
    tx = optax.chain(boostax.all_reduce("fast"), boostax.adasum("slow"), optax.sgd(0.1))
    step = boostax.make_train_step(
        loss_fn, tx, mesh=two, axis_name=("slow", "fast"), shard_optimizer=True
    )
    with pytest.raises(ValueError, match="all_reduce: axis_name must be"):
        step.lower(step.init(initial()), batch(0))


def test_it_needs_a_mesh_and_whole_params():
    with pytest.raises(ValueError, match="shard_optimizer must be False without a mesh"):
        boostax.make_train_step(loss_fn, optax.sgd(0.1), shard_optimizer=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("reduction", "steps"),
    [
        # Whole gradients would be rounded once more on their way back; and from the second step on
        # a last bit flips roundings.
        (lambda **how: boostax.all_reduce(AXIS, dtype="bfloat16", **how), 1),
        # Scattered ones are summed in another order, whose last bits Adam makes large.
        (lambda **how: boostax.adasum(AXIS, **how), 3),
    ],
)
def test_scattered_reductions_are_those_of_the_chain_by_hand(reduction, steps):
    adam = optax.adamw(1e-2, weight_decay=0.1)
    by_hand = optax.chain(reduction(scatter=True), boostax.shard_optimizer(adam, AXIS))
    _, shared, losses = trained(optax.chain(reduction(), adam), True, steps)
    _, wanted, expected_losses = trained(by_hand, False, steps)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(shared), jax.tree.leaves(wanted), strict=True):
        assert_near(x, y)


@pytest.mark.long
def test_two_levels():
    some = np.array(jax.devices()).reshape(4, 2)
    two = jax.sharding.Mesh(some, ("slow", "fast"))
    found = []
    for share in (True, False):
        tx = optax.chain(boostax.adasum("slow", within="fast"), *rest())
        step = boostax.make_train_step(
            loss_fn, tx, mesh=two, axis_name=("slow", "fast"), shard_optimizer=share
        )
        state = step.init(initial())
        for index in range(3):
            state, _ = step(state, batch(index))
        found.append(state)
    for x, y in zip(*map(jax.tree.leaves, found), strict=True):
        assert_near(x, y)
