"""``make_train_step(shard_optimizer=True)``: ZeRO-1 by one argument, for any optimizer.

And reductions inside a step: over two axes, of params that each replica has for itself.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_cases import two
from jax.sharding import PartitionSpec as P
from reducing import mesh_of
from training import follow, losses_of

import boostax

AXIS = "data"
DEVICES = 8


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


def made(tx, share, loss=loss_fn, **options):
    how = {"mesh": mesh_of(data=DEVICES), "axis_name": AXIS, "shard_optimizer": share} | options
    return boostax.make_train_step(loss, tx, **how)


MEAN = boostax.all_reduce(AXIS)
REST = boostax.model.clip_by_global_norm(0.3), optax.adamw(1e-2, weight_decay=0.1)


def frozen(inner):
    schedule = boostax.freeze_schedule("continuous", total_steps=6, frozen_fraction=0.5)
    return boostax.scheduled_freeze(inner, {"embed": 0, "layer": 1, "head": 2}, schedule)


decay = optax.add_decayed_weights(0.1, lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
# The laws of placements hold each technique to this, test_on_mesh.py each optimizer.
CHAINS = {
    "adasum": lambda: optax.chain(boostax.adasum(AXIS), optax.adamw(1e-2)),
    "centralized": lambda: optax.chain(MEAN, boostax.centralize_gradients(), *REST),
    "masked": lambda: optax.chain(MEAN, REST[0], decay, optax.adam(1e-2)),
    "scaler around a window": lambda: boostax.dynamic_loss_scale(
        boostax.accumulate(optax.chain(MEAN, *REST), 2)
    ),
    "peer window": lambda: optax.chain(MEAN, optax.MultiSteps(optax.adam(1e-2), 2)),
    "frozen": lambda: frozen(optax.chain(MEAN, optax.adamw(1e-2))),
    "subspace": lambda: boostax.dim_reduce(two, axis_name=AXIS),
}


def trained(tx, share, steps=6, **options):
    step = made(tx, share, **options)
    # One batch overflows: a scaler skips it, which leaves a window open.
    sizes = (1e38 if i == 3 and "scale" in str(tx) else 1 for i in range(steps))
    state, told = follow(step, step.init(initial()), [batch(*x) for x in enumerate(sizes)])
    return step, step.flush(state) if boostax._core.gate.gate_of(tx) else state, losses_of(told)


def assert_near(left, right):
    """Within 1e-6 of a leaf's norm: sums in another order change the last bits."""
    chex.assert_trees_all_equal_shapes_and_dtypes(left, right)
    for (path, x), y in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= 1e-6 * np.linalg.norm(y), jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.filterwarnings("ignore:make_train_step. MultiSteps after all_reduce")
def test_it_trains_what_the_whole_does(name):
    step, shared, seen = trained(CHAINS[name](), True)
    _, whole, wanted = trained(CHAINS[name](), False)
    np.testing.assert_allclose(seen, wanted, rtol=1e-6, atol=1e-6)
    assert_near(shared, whole)
    # The programs keep what the specs say.
    assert jax.tree.map(lambda x: x.sharding, shared) == step.shardings(shared)
    compiled = [x for each in step._programs.values() for x in each.compiled.values()]
    assert {program._cache_size() for program in compiled} == {1}


def test_the_state_takes_an_nth_and_gradients_are_reduced_once():
    """An all-reduce of which each replica uses its part is a reduce-scatter on a TPU and a GPU."""
    tx = boostax.dynamic_loss_scale(optax.chain(MEAN, optax.adamw(1e-2)), axis_name=AXIS)
    sizes, audits = {}, {}
    for share in (True, False):
        step = made(tx, share, lambda p, b: jnp.mean((b @ p["w"] @ p["v"]) ** 2))
        state = step.init({"w": jnp.zeros((512, 64)), "v": jnp.zeros((64, 256))})
        sizes[share] = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(state.opt_state))
        audits[share] = boostax.audit(step, state, jnp.ones((16, 512)))
    shared, whole = audits[True], audits[False]
    assert sizes[True] <= 1.1 / DEVICES * sizes[False], sizes
    assert shared.argument_bytes < 0.5 * whole.argument_bytes
    # The loss's mean and the agreement on its scale besides.
    assert shared.reduced == whole.reduced == (2, *[shared.params + 2] * 2)
    assert (shared.gathered.most, whole.gathered.most) == (shared.params, 0)
    assert shared.donated_in_vain == whole.donated_in_vain


def test_nothing_but_scalars_is_sent_inside_a_window():
    step = made(boostax.accumulate(optax.chain(MEAN, optax.adam(1e-2)), 4, axis_name=AXIS), True)
    found = boostax.audit(step, step.init(initial()), batch(0), calls=4)
    # The loss's mean.
    assert found.reduced == (1, found.params + 1, 1)
    # But for the scalar and a leaf of three, which are whole on every replica.
    assert found.gathered == (0, found.params - 4, 0)
    assert found.wire_bytes.least < 100


def test_a_part_that_decides_for_each_replica_is_refused():
    tx = optax.apply_if_finite(optax.chain(MEAN, optax.sgd(0.1)), 3)
    with pytest.raises(ValueError, match="all_reduce inside apply_if_finite: apply_if_f"):
        made(tx, True)
    # A transformation in which nobody can read what it holds.
    step = made(optax.GradientTransformation(tx.init, lambda *args: tx.update(*args)), True)
    with pytest.raises(ValueError, match=r"must be the same on all replicas, got .* differ"):
        step.lower(step.init(initial()), batch(0))


TWO_LEVELS = {"mesh": mesh_of(slow=4, fast=2), "axis_name": ("slow", "fast")}


def test_two_levels():
    make = lambda: optax.chain(boostax.adasum("slow", within="fast"), *REST)  # noqa: E731
    assert_near(*(trained(make(), share, 3, **TWO_LEVELS)[1] for share in (True, False)))


def test_two_axes_are_one_or_are_named_as_two_levels():
    both = optax.chain(boostax.adasum(("slow", "fast")), optax.sgd(0.1, momentum=0.9))
    flat = optax.chain(boostax.adasum(AXIS), optax.sgd(0.1, momentum=0.9))
    step, found, _ = trained(both, False, 4, **TWO_LEVELS)
    assert step.replicas == DEVICES
    assert_near(found.params, trained(flat, False, 4)[1].params)
    apart = optax.chain(boostax.all_reduce("fast"), boostax.adasum("slow"), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"must be all replica axes .*For two levels, use adasum"):
        trained(apart, False, 1, **TWO_LEVELS)


def test_specs_of_a_sharded_state():
    shapes = {"w": (16, 8), "v": (8, 5), "b": (5,), "s": (6, 16), "t": (16, 8)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    given = dict.fromkeys(shapes, P()) | {"t": P("fsdp")}
    tx = optax.chain(boostax.top_k_reduce("data"), optax.adam(0.1))
    how = {"param_specs": given, "replicas": 8, "shard_optimizer": True}
    specs = boostax.states.state_specs(tx, params, **how, axis_name="data")
    expected = {"w": P("data", None), "v": P("data", None), "b": P(), "t": P("fsdp", "data")}
    # Along the first dimension that they divide and that is whole.
    assert specs[1][0].mu == expected | {"s": P(None, "data")}
    assert (specs[1][0].count, specs[0].residual.local["w"]) == (P(), P("data"))
    with pytest.raises(ValueError, match="replicas must be the size"):
        boostax.states.state_specs(tx, params, shard_optimizer=True, axis_name="data")


def test_params_of_each_replica_meet_when_they_should():
    """DiLoCo through the train step: apart between meetings, equal after one and after a flush."""
    inner = boostax.reduce.local_updates(optax.adam(1e-2), every=2, axis_name="data")
    step = made(boostax.accumulate(inner, 2, axis_name="data"), False)
    state, apart = step.init(initial()), []
    own = lambda state: np.asarray(state.params.local["embed"]["kernel"])  # noqa: E731
    common = lambda state: step.common_params(state)["embed"]["kernel"]  # noqa: E731
    assert own(state).shape == (8, 64, 64)
    for index in range(6):
        state, metrics = step(state, batch(index))
        apart.append(bool(np.any(own(state) != own(state)[:1])))
    assert apart == [False, True, True, False, False, True]
    assert np.isfinite(float(metrics["loss"]))
    np.testing.assert_allclose(common(state), own(state).mean(0), atol=1e-6)
    state = step.flush(state)
    assert np.all(own(state) == own(state)[:1])
    np.testing.assert_array_equal(common(state), own(state)[0])
