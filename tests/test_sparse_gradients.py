"""Sparse gradients (BCOO): as their dense arrays, or refused by name."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_cases import CASES
from jax.experimental.sparse import BCOO, BCSR
from jax.experimental.sparse import value_and_grad as sparse_value_and_grad
from jax.sharding import PartitionSpec as P

import boostax
from boostax._core.bcoo import coalesced
from boostax._core.costs import collectives
from boostax._core.gate import Pending
from boostax.testing import drawn
from boostax.testing._case import assert_close, assert_same, even_params

SHAPE = (64, 4)
PARAMS = {"embed": jnp.ones(SHAPE), "bias": jnp.ones(3)}
# 7 twice, 64 and 99 out of range.
IDS = np.array([7, 2, 64, 7, 63, 99])
SCALE = 128.0


def rows(seed, dtype=jnp.float32, ids=IDS):
    data = jax.random.normal(jax.random.key(seed), (len(ids), SHAPE[1]), dtype)
    return {
        "embed": BCOO((data, jnp.asarray(ids)[:, None]), shape=SHAPE),
        "bias": jnp.full(3, 0.5 + seed, dtype),
    }


def as_dense(grads):
    """By NumPy, row by row: the definition."""
    sparse = grads["embed"]
    dense = np.zeros(sparse.shape, np.float32)
    for row, (index,) in zip(np.asarray(sparse.data), np.asarray(sparse.indices), strict=True):
        if index < len(dense):
            dense[index] += row
    return grads | {"embed": jnp.asarray(dense)}


def spoilt(grads, value=jnp.nan):
    sparse = grads["embed"]
    data = sparse.data.at[1, 2].set(value)
    return grads | {"embed": BCOO((data, sparse.indices), shape=sparse.shape)}


def trained(tx, every, form=lambda grads: grads, **extra):
    """Params and state after all gradients, in one program for each form."""

    @jax.jit
    def step(params, state, grads, **extra):
        return boostax.apply_gradients(drawn(tx), grads, state, params, **extra)

    params, state = PARAMS, tx.init(PARAMS)
    for i, grads in enumerate(every):
        given = {name: x[i] for name, x in extra.items()}
        params, state = step(params, state, form(grads), **given)
    return params, state


# Momentum, so that a skipped step would show; its rounding does not depend on the program.
SGD = optax.sgd(0.5, momentum=0.5)
GATES = {
    "dynamic": lambda tx: boostax.dynamic_loss_scale(tx, init_scale=SCALE),
    "static": lambda tx: boostax.static_loss_scale(tx, SCALE),
    "unchecked": lambda tx: boostax.static_loss_scale(tx, SCALE, skip_nonfinite=False),
    "check_updates": boostax.precision.check_updates,
    "mean": lambda tx: boostax.accumulate(tx, 2),
    "sum": lambda tx: boostax.accumulate(tx, 2, normalize="sum"),
    "one": lambda tx: boostax.accumulate(tx, 1),
    "bfloat16": lambda tx: boostax.accumulate(tx, 2, accumulator_dtype="bfloat16"),
    "scaler around window": lambda tx: boostax.dynamic_loss_scale(boostax.accumulate(tx, 2)),
    "window around scaler": lambda tx: boostax.accumulate(boostax.dynamic_loss_scale(tx), 2),
}


@pytest.mark.parametrize("name", GATES)
def test_a_gate_takes_rows_as_it_takes_their_dense_array(name):
    tx = GATES[name](SGD)
    every = [rows(seed) for seed in range(4)]
    assert_close(trained(tx, every), trained(tx, every, as_dense), name, 2e-6)


@pytest.mark.parametrize("name", ["dynamic", "mean", "bfloat16"])
def test_rows_of_different_indices_in_range_give_the_same_bits(name):
    tx = GATES[name](SGD)
    every = [rows(seed, ids=np.array([5, 0, 63])) for seed in range(4)]
    assert_same(trained(tx, every), trained(tx, every, as_dense), name)


def test_a_weighted_window_weighs_rows():
    tx = boostax.accumulate(SGD, 2, normalize="weight")
    every, weight = [rows(seed) for seed in range(4)], jnp.float32([3, 1, 0, 2])
    found = trained(tx, every, weight=weight)
    assert_close(found, trained(tx, every, as_dense, weight=weight), "weights", 2e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**66])
@pytest.mark.parametrize("name", ["dynamic", "static", "scaler around window"])
def test_a_bad_row_skips_the_step(name, value):
    tx = GATES[name](SGD)
    every = [rows(0), spoilt(rows(1), value), rows(2), rows(3)]
    params, state = trained(tx, every)
    assert int(boostax.metrics(state)["skipped_steps"]) == 1
    expected = trained(tx, every, as_dense)
    assert_close((params, state), expected, name, 2e-6)


def test_a_skipped_step_leaves_every_bit():
    tx = GATES["dynamic"](optax.adam(0.1))
    before = trained(tx, [rows(0)])
    after = trained(tx, [rows(0), spoilt(rows(1))])
    assert_same((before[0], before[1].inner_state), (after[0], after[1].inner_state), "skipped")
    assert float(after[1].scale) == SCALE / 2


def test_all_finite_looks_at_the_data():
    assert bool(boostax.precision.all_finite(rows(0)))
    assert not bool(boostax.precision.all_finite(spoilt(rows(0))))


def test_half_rows_are_unscaled_and_added_in_f32():
    """Two of 1/2048 and one of 1 are 1 in f16."""
    data, ids = jnp.float16([[1.0], [2.0**-11], [2.0**-11]]), jnp.zeros((3, 1), jnp.int32)
    found = Pending(BCOO((data, ids), shape=(2, 1))).times(jnp.float32(0.5)).value()
    np.testing.assert_array_equal(found, np.float32([[0.5 + 2.0**-11], [0.0]]))
    w = jnp.zeros((2, 1))
    tx = boostax.static_loss_scale(optax.sgd(1.0), 2.0)
    w, _ = boostax.apply_gradients(tx, BCOO((data, ids), shape=(2, 1)), tx.init(w), w)
    np.testing.assert_array_equal(w, -found)


def test_elements_of_a_sparse_gradient_of_jax_are_taken():
    """``jax.experimental.sparse.value_and_grad``: no dense dimension, two indices an element."""
    w = BCOO((jnp.arange(3.0), jnp.array([[0, 0], [3, 1], [0, 0]])), shape=(4, 3))
    dense = jnp.zeros(w.shape)

    @jax.jit
    def step(w):
        _, grad = sparse_value_and_grad(lambda w: jnp.sum(w.data**3))(w)
        tx = boostax.dynamic_loss_scale(boostax.accumulate(SGD, 1), init_scale=2.0)
        return boostax.apply_gradients(drawn(tx), grad, tx.init(dense), dense)[0]

    np.testing.assert_array_equal(step(w), -0.25 * dense.at[3, 1].set(3.0).at[0, 0].set(12.0))


# Replicas

REPLICAS = 4


class Arrays(NamedTuple):
    """What a replica makes its gradients of: ``jax.vmap`` takes a stacked BCOO for a batch."""

    data: jax.Array
    ids: jax.Array
    bias: jax.Array

    def grads(self):
        sparse = BCOO((self.data, self.ids[:, None]), shape=SHAPE)
        return {"embed": sparse, "bias": self.bias}


def stacked(seed):
    draw = np.random.default_rng(seed)
    return Arrays(
        jnp.asarray(draw.normal(size=(REPLICAS, 6, SHAPE[1])), jnp.float32),
        jnp.asarray(draw.integers(0, SHAPE[0] + 8, (REPLICAS, 6))).at[:, 5].set(7),
        jnp.asarray(draw.normal(size=(REPLICAS, 3)), jnp.float32),
    )


def pmapped(step, *args):
    return jax.pmap(step, axis_name="data", in_axes=(0, None), out_axes=None)(*args)


def mapped(check, step, grads, params):
    mesh = jax.make_mesh((REPLICAS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    each = lambda g, p: step(jax.tree.map(lambda x: x[0], g), p)  # noqa: E731
    how = {"mesh": mesh, "in_specs": (P("data"), P()), "out_specs": P(), "check_vma": check}
    return jax.jit(jax.shard_map(each, **how))(grads, params)


def vmapped(step, *args):
    run = jax.vmap(step, axis_name="data", in_axes=(0, None), out_axes=None)
    return jax.jit(run)(*args)


MODES = {
    "checked": functools.partial(mapped, True),
    "unchecked": functools.partial(mapped, False),
    "pmap": pmapped,
    "vmap": vmapped,
}


def reduced(mode, tx, every, form=lambda grads: grads):
    """Params after a step for each gradient, and then those of a flushed window."""

    def step(every, params):
        state = tx.init(params)
        for grads in every:
            given = form(grads.grads())
            params, state = boostax.apply_gradients(drawn(tx), given, state, params)
        return params

    return MODES[mode](step, every, PARAMS)


def todense(grads):
    add = lambda x: jnp.zeros(x.shape, x.dtype).at[x.indices[:, 0]].add(x.data)  # noqa: E731
    return grads | {"embed": add(grads["embed"])}


OPTIONS = [
    {},
    *(
        pytest.param(x, marks=pytest.mark.long)
        for x in ({"op": "sum", "divide": "before"}, {"clip": 0.5})
    ),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_mean_of_rows_is_that_of_their_dense_arrays(mode, options):
    tx = optax.chain(boostax.all_reduce("data", **options), optax.sgd(0.5))
    every = [stacked(0)]
    found = reduced(mode, tx, every)
    assert_close(found, reduced(mode, tx, every, todense), mode, 2e-6)


QUICK = [("checked", "scaler"), ("vmap", "scaler"), ("checked", "window in scaler")]
NESTS = [
    pytest.param(mode, nest, marks=() if (mode, nest) in QUICK else pytest.mark.long)
    for mode in MODES
    for nest in ("scaler", "window in scaler", "scaler in window")
]


@pytest.mark.parametrize(("mode", "nest"), NESTS)
def test_gates_hand_rows_to_the_mean(mode, nest):
    optimizer = optax.chain(boostax.all_reduce("data"), SGD)
    window = functools.partial(boostax.accumulate, every=2, axis_name="data")
    scaler = functools.partial(boostax.dynamic_loss_scale, axis_name="data")
    every = [stacked(seed) for seed in range(2)]
    tx = {
        "scaler": lambda: scaler(optimizer),
        "window in scaler": lambda: scaler(window(optimizer)),
        "scaler in window": lambda: window(scaler(optimizer)),
    }[nest]()
    found = reduced(mode, tx, every)
    assert_close(found, reduced(mode, tx, every, todense), mode, 2e-6)


def test_a_mean_of_half_rows_is_taken_in_f32():
    """1 + 2**-11 three times would stay 1 in f16; and the sum of the largest does not overflow."""
    data = jnp.float16([[[1.0], [6e4]], *[[[2.0**-11], [6e4]]] * 3])
    ids = jnp.tile(jnp.array([[0, 70]]), (REPLICAS, 1))

    def total(data, ids, op):
        grads = BCOO((data, ids[:, None] % 64), shape=(64, 1))
        return boostax.all_reduce("data", op=op).update(grads, ())[0]

    run = lambda op: vmapped(lambda x, _: total(*x, op), (data, ids), ())  # noqa: E731
    found = run("sum")
    assert found.dtype == jnp.float16 and found[0, 0] == np.float16(1 + 3 * 2.0**-11)
    assert found[6, 0] == np.finfo(np.float16).max and run("mean")[6, 0] == np.float16(6e4)


def test_one_bad_row_makes_all_replicas_skip():
    tx = boostax.static_loss_scale(
        optax.chain(boostax.all_reduce("data"), SGD), SCALE, axis_name="data"
    )
    grads = stacked(0)
    grads = grads._replace(data=grads.data.at[2, 3, 1].set(jnp.nan))
    assert_same(reduced("checked", tx, [grads]), PARAMS, "skipped")


def test_replicas_may_share_their_indices():
    tx = optax.chain(boostax.all_reduce("data"), optax.sgd(0.5))
    every = stacked(0)._replace(ids=jnp.broadcast_to(IDS, (REPLICAS, 6)))

    def step(grads, params):
        grads = grads._replace(ids=jnp.asarray(IDS)).grads()
        return boostax.apply_gradients(tx, grads, tx.init(params), params)[0]

    expected = reduced("checked", tx, [every], todense)
    assert_close(MODES["checked"](step, every, PARAMS), expected, "shared indices", 2e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_rows_travel_where_they_are_fewer_bytes(scaled):
    tx = optax.chain(boostax.all_reduce("data"), SGD)
    if scaled:
        tx = boostax.dynamic_loss_scale(tx, axis_name="data")

    def sent(count):
        def step(params):
            grads = {"embed": rows(0, ids=np.arange(count))["embed"]}
            return drawn(tx).update(grads, tx.init(params), params)[0]

        params = {"embed": PARAMS["embed"]}
        traced = jax.make_jaxpr(step, axis_env=[("data", REPLICAS)])(params)
        return [(c.primitive, c.bytes) for c in collectives(traced) if c.primitive != "pmin"]

    # Of 4 replicas 20 bytes a row: fewer than twice 1024 bytes for up to 25.
    assert sent(25) == [("all_gather", 25 * 16), ("all_gather", 25 * 4)]
    assert sent(26) == [("psum", SHAPE[0] * 16)]


def test_what_a_replica_sends_adds_no_two_rows_to_one_element():
    """A GPU adds such in no fixed order, and the replicas would part by rounding."""
    sparse = rows(0)["embed"]
    data, indices = coalesced(sparse.data, sparse.indices)
    filled = np.asarray(indices)[np.any(np.asarray(data) != 0, axis=1), 0]
    assert len(set(filled)) == len(filled) == 5
    found = BCOO((data, indices), shape=SHAPE)
    np.testing.assert_array_equal(found.todense(), sparse.todense())


# What the compiled program holds

BIG = {"embed": jax.ShapeDtypeStruct((2**16, 64), jnp.float32)}
BIG_BYTES = 2**16 * 64 * 4
BIG_ROWS = {
    "embed": jax.eval_shape(
        lambda: BCOO((jnp.zeros((64, 64)), jnp.zeros((64, 1), jnp.int32)), shape=(2**16, 64))
    )
}


def temporary(tx, grads=BIG_ROWS, step=None):
    def apply(params, state, grads):
        return boostax.apply_gradients(drawn(tx), grads, state, params)

    state = jax.eval_shape(tx.init, BIG)
    program = jax.jit(step or apply, donate_argnums=(0, 1)).lower(BIG, state, grads).compile()
    return program.memory_analysis().temp_size_in_bytes / BIG_BYTES


def test_a_scaler_makes_no_dense_array_beyond_that_of_the_optimizer():
    """One, in the branch that is skipped with it; and where no step is taken, none at all."""
    tx = optax.adam(0.1)

    def bare(params, state, grads):
        updates, state = tx.update({"embed": grads["embed"].todense()}, state, params)
        return optax.apply_updates(params, updates), state

    alone = temporary(tx, step=bare)
    assert alone <= 1.01
    assert temporary(boostax.dynamic_loss_scale(tx)) <= alone + 0.01


def test_a_window_adds_rows_in_place():
    for tx in (
        boostax.accumulate(optax.adam(0.1), 4),
        boostax.dynamic_loss_scale(boostax.accumulate(optax.adam(0.1), 4)),
    ):
        assert temporary(tx) <= 0.01


# Refusals

CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# All others refuse. What is inside a gate is given dense arrays.
TAKEN = {
    "dynamic_loss_scale",
    "static_loss_scale",
    "static_loss_scale_without_check",
    "check_updates",
    "accumulate",
    "accumulate_every_one",
    "accumulate_by_schedule",
    "accumulate_with_noise",
    "accumulate_in_bfloat16",
    "store",
    "accumulate_inside_the_scaler",
    "accumulate_around_the_scaler",
    "average_params",
    "average_params_around_scaler_and_window",
    "all_reduce",
    "all_reduce_half",
    "all_reduce_with_noise_inside_gates",
    "all_reduce_in_buckets",
    "adasum_half_inside_the_scaler",
    "top_k_reduce_inside_gates",
    "int8_reduce",
    "local_updates",
    "dim_reduce_in_bfloat16_inside_the_scaler",
}


def stepped(case, data, form=lambda grads: grads):
    """Params of two replicas after the calls of one change."""
    tx = case.mapped("data") if case.distributed else case.single()

    def step(data):
        params = even_params()
        w = BCOO((data, jnp.array([[3], [0], [9]])), shape=params["w"].shape)
        state = tx.init(params)
        for _ in range(case.calls):
            updates, state = tx.update(form({"w": w, "b": jnp.ones(8)}), state, params)
            params = optax.apply_updates(params, updates)
        return params

    return jax.vmap(step, axis_name="data")(data)


TWO = jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)


@CASE
def test_a_transformation_takes_rows_or_refuses_them_by_name(case):
    run = functools.partial(stepped, case)
    if case.name in TAKEN:
        jax.eval_shape(run, TWO)
        return
    with pytest.raises(TypeError, match=r"gradients must be dense arrays, got BCOO at 'w'\. "):
        jax.eval_shape(run, TWO)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(TAKEN))
def test_what_takes_rows_takes_them_as_dense_arrays(name):
    (case,) = [case for case in CASES if case.name == name]
    dense = lambda grads: grads | {"w": grads["w"].todense()}  # noqa: E731
    data = jax.random.normal(jax.random.key(0), TWO.shape)
    run = lambda form: jax.jit(functools.partial(stepped, case, form=form))(data)  # noqa: E731
    assert_close(run(lambda grads: grads), run(dense), name, 2e-6)


def test_other_parts_refuse_rows_by_name():
    grads, match = rows(0), r"must be dense arrays, got BCOO at 'embed'\. Convert with .todense\(\)"
    gates = {
        "carry": boostax.carry(SGD, {"bias": "last"}),
        "gate": boostax.gate(SGD, lambda grads, own, params: (jnp.asarray(True), own)),
    }
    for tx in gates.values():
        with pytest.raises(TypeError, match=match):
            boostax.apply_gradients(tx, grads, tx.init(PARAMS), PARAMS)
    both = boostax.train.microbatch(lambda params, batch: (jnp.sum(batch), rows(0)), 2)
    with pytest.raises(TypeError, match=f"microbatch: gradients {match}"):
        both(PARAMS, jnp.ones(4))


def test_on_mesh_refuses_rows_by_name():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, P()))
    tx = boostax.on_mesh(optax.chain(boostax.all_reduce("data"), SGD), params, axis_name="data")
    grads = boostax.PerReplica(jax.tree.map(lambda x: x[None], rows(0)))
    with pytest.raises(TypeError, match="on_mesh: gradients must be dense arrays, got BCOO"):
        tx.update(grads, tx.init(params), params)


def test_sparse_params_are_refused_by_name():
    params = rows(0)
    with pytest.raises(TypeError, match="value_and_grad: params must be dense arrays, got BCOO"):
        boostax.value_and_grad(lambda p, x: jnp.sum(p["bias"] * x))(params, (), jnp.ones(3))
    tx = boostax.static_loss_scale(SGD, 2.0)
    with pytest.raises(TypeError, match="scale: params must be dense arrays, got BCOO at 'embed'"):
        tx.update(rows(0), tx.init(PARAMS), params)


@pytest.mark.parametrize("name", ["static", "mean", "all_reduce"])
def test_rows_of_another_shape_are_refused(name):
    tx = boostax.all_reduce("data") if name == "all_reduce" else GATES[name](SGD)
    grads = rows(0)
    grads["embed"] = BCOO((grads["embed"].data, grads["embed"].indices), shape=(65, 4))
    step = lambda grads: tx.update(grads, tx.init(PARAMS), PARAMS)[0]  # noqa: E731
    match = r"gradients must be shaped \(64, 4\) at 'embed', got \(65, 4\)"
    with pytest.raises(ValueError, match=match):
        jax.make_jaxpr(step, axis_env=[("data", REPLICAS)])(grads)


def test_other_sparse_arrays_are_refused():
    w = jnp.ones((2, 4, 3))
    kinds = {
        "BCSR": (
            w[0],
            BCSR((jnp.ones(1), jnp.array([2]), jnp.array([0, 1, 1, 1, 1])), shape=(4, 3)),
        ),
        "BCOO": (w, BCOO((jnp.ones((2, 1, 3)), jnp.zeros((2, 1, 1), jnp.int32)), shape=w.shape)),
    }
    tx = boostax.static_loss_scale(SGD, 2.0)
    for name, (params, grads) in kinds.items():
        match = f"must be dense arrays or BCOO with n_batch=0, got {name} at 'the root'"
        with pytest.raises(TypeError, match=match):
            tx.update(grads, tx.init(params), params)
    whole = BCOO((jnp.ones((1, 2), jnp.int32), jnp.zeros((1, 1), jnp.int32)), shape=(4, 2))
    with pytest.raises(TypeError, match="gradients must be floating or complex arrays, got int32"):
        tx.update(whole, tx.init(jnp.ones((4, 2))), jnp.ones((4, 2)))


def test_a_part_of_your_own_may_take_rows():
    @boostax.describe("rows_first", sparse=True)
    def update(updates, state, params=None):
        assert isinstance(updates["embed"], BCOO)
        return updates | {"embed": updates["embed"].todense()}, state

    own = optax.GradientTransformation(lambda params: (), update)
    every = [rows(0)]
    found = trained(GATES["dynamic"](optax.chain(optax.chain(own), SGD)), every)
    assert_close(found[0], trained(GATES["dynamic"](SGD), every)[0], "own", 2e-6)
