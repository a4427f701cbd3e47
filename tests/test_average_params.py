"""Averages of params move on applied steps alone, by the formulas, in place."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from memory import temporary_bytes
from reducing import mesh_of
from training import walk

import boostax
from boostax._core import trees
from boostax.model import average_params, averaged_params
from boostax.testing import drawn
from boostax.testing._arrays import assert_same, example_grads, poison

RNG = np.random.default_rng(0)
SGD = optax.sgd(0.1)
PARAMS = {"w": jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32), "b": jnp.float32(0.5)}
KINDS = {"ema": {"decay": 0.9}, "window": {}, "lawa": {"size": 3}}


def follow(tx, steps, grads=None):
    """Params after every call, and the states."""
    return walk(tx, PARAMS, grads or [example_grads(PARAMS, i) for i in range(steps)])


def reference(kind, path, decay=0.9, size=3, every=1, start=0):
    """In float64, from its definition: weights of the params that are taken in."""
    taken = path[start::every]
    if not taken:
        return path[-1] if path else None
    taken = taken[-size:] if kind == "lawa" else taken
    weights = (decay if kind == "ema" else 1.0) ** np.arange(len(taken))[::-1]
    return np.tensordot(weights / weights.sum(), np.stack(taken), 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", [{}, {"every": 3, "start": 4}])
def test_the_average_is_that_of_its_definition_in_float64(kind, when):
    found = follow(average_params(optax.adam(0.1), kind, **KINDS[kind], **when), 16)
    for count in range(1, 17):
        params, state = found[count - 1]
        for name, value in averaged_params(params, state).items():
            path = [np.asarray(p[name], np.float64) for p, _ in found[:count]]
            np.testing.assert_allclose(value, reference(kind, path, **when), rtol=2e-6, atol=1e-6)
    taken = len(range(when.get("start", 0), 16, when.get("every", 1)))
    assert boostax.metrics(state) == {"averaged": taken}


def test_a_decay_may_be_a_hyperparameter_of_the_state():
    make = lambda decay: average_params(optax.sgd(0.1), decay=decay)  # noqa: E731
    params, state = follow(optax.inject_hyperparams(make)(decay=0.9), 4)[-1]
    expected = averaged_params(params, follow(make(0.9), 4)[-1][1])
    chex.assert_trees_all_close(averaged_params(params, state), expected, rtol=2e-6, atol=1e-6)


def test_params_that_stand_still_are_their_own_average_for_good():
    params, state = follow(average_params(optax.sgd(0.0), decay=0.9999), 300)[-1]
    assert_same(averaged_params(params, state), PARAMS, "average")


# What holds steps back, and where.
SCALED = functools.partial(boostax.dynamic_loss_scale, init_scale=4.0)
FORMS = {
    "around a scaler": lambda tx, average: average(SCALED(tx)),
    "inside a scaler": lambda tx, average: SCALED(average(tx)),
    "around a scaler and a window": lambda tx, average: average(SCALED(boostax.accumulate(tx, 2))),
    "between them": lambda tx, average: SCALED(average(boostax.accumulate(tx, 2))),
    "inside both": lambda tx, average: SCALED(boostax.accumulate(average(tx), 2)),
    "around a check": lambda tx, average: average(boostax.precision.check_updates(tx)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_held_call_leaves_the_average_bit_for_bit(form, kind):
    tx = FORMS[form](optax.adam(0.1), functools.partial(average_params, kind=kind, **KINDS[kind]))
    grads = [example_grads(PARAMS, i) for i in range(9)]
    for bad in (2, 5):
        grads[bad] = poison(grads[bad], np.nan)
    if form == "around a check":
        grads = [g if i in (2, 5) else jax.tree.map(jnp.nan_to_num, g) for i, g in enumerate(grads)]
    params, moved, path = PARAMS, [], follow(tx, 9, grads=grads)
    old = kept(tx.init(PARAMS))
    for new, state in path:
        if any(np.any(new[name] != params[name]) for name in params):
            moved.append(new)
        else:
            assert_same(kept(state), old, "held")
        params, old = new, kept(state)
    assert 2 < len(moved) < 9 and int(old.steps) == int(old.averaged) == len(moved)
    for name, value in averaged_params(params, state).items():
        expected = reference(kind, [np.asarray(p[name], np.float64) for p in moved])
        np.testing.assert_allclose(value, expected, rtol=2e-6, atol=1e-6)


def kept(state):
    """The state of the average, without what is inside."""
    return trees.find(state, STATE)[0]._replace(inner_state=())


STATE = boostax.states.AverageParamsState


@pytest.mark.parametrize("form", ["around a scaler and a window", "between them", "inside both"])
def test_what_a_flush_applies_is_taken_in_and_no_flush_is_taken_in_twice(form):
    tx = FORMS[form](optax.sgd(0.1), functools.partial(average_params, kind="window"))
    *_, (first, _), (params, state) = follow(tx, 3)
    before = kept(state)
    params, state = boostax.flush(drawn(tx), state, params)
    assert int(kept(state).averaged) == int(before.averaged) + 1 == 2
    expected = (np.float64(first["w"]) + np.float64(params["w"])) / 2
    np.testing.assert_allclose(averaged_params(params, state)["w"], expected, rtol=1e-6)
    _, again = boostax.flush(drawn(tx), state, params)
    assert_same(kept(again), kept(state), "an empty flush")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", ["alone", "around a scaler"])
def test_the_pure_update_averages_the_params_that_its_updates_lead_to(form, dtype, kind):
    average = functools.partial(average_params, kind=kind, **KINDS[kind])
    tx = FORMS.get(form, lambda tx, average: average(tx))(optax.adam(0.1), average)
    params, path = jax.tree.map(lambda x: x.astype(dtype), PARAMS), []
    state, update = tx.init(params), jax.jit(drawn(tx).update)
    for index in range(5):
        updates, state = update(example_grads(params, index), state, params)
        params = optax.apply_updates(params, updates)
        path.append(np.float64(params["w"]))
    found = averaged_params(jax.tree.map(jnp.float32, params), state)["w"]
    assert kept(state).averages["w"].dtype == jnp.float32
    assert averaged_params(params, state)["w"].dtype == dtype
    # XLA need not round to bf16 what it does not store: half a unit in the last place.
    limit = 2e-6 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(found, reference(kind, path), rtol=limit, atol=limit)


def test_snapshots_in_bfloat16_cost_their_rounding_alone():
    path = follow(average_params(optax.sgd(0.3), "lawa", size=4, dtype="bfloat16"), 6)
    params, state = path[-1]
    kept = [np.float64(jnp.bfloat16(p["w"])) for p, _ in path[-4:]]
    assert state.averages["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(averaged_params(params, state)["w"], np.mean(kept, 0), rtol=1e-6)


BIG = {f"layer{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(4)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["alone", *FORMS])
def test_a_donated_step_holds_nothing_more_than_without_the_average(form, kind):
    average = functools.partial(average_params, kind=kind, **KINDS[kind], every=2)
    build = FORMS.get(form, lambda tx, average: average(tx))
    forms = (build(optax.adam(0.1), around) for around in (lambda tx: tx, average))
    plain, averaging = (temporary_bytes(tx, BIG) for tx in forms)
    # Between two branches XLA:CPU copies the params that the inner one hands to the average.
    assert averaging - plain <= (1.02 if form == "between them" else 0.02) * 4 * 2**20


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_sharded_as_the_params_are(kind):
    mesh = mesh_of(fsdp=4)
    tx = average_params(optax.adam(0.1), kind, **KINDS[kind])
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(3)}
    specs = {"w": jax.P("fsdp"), "b": jax.P()}
    found = boostax.states.state_specs(tx, params, param_specs=specs, axis_name="data").averages
    expected = jax.P(None, "fsdp") if kind == "lawa" else jax.P("fsdp")
    assert found == {"w": expected, "b": jax.P()}
    placed = jax.device_put(params, {k: jax.NamedSharding(mesh, s) for k, s in specs.items()})
    assert tx.init(placed).averages["w"].sharding.spec == expected


def test_it_averages_around_freezing_and_is_refused_inside():
    frozen = boostax.scheduled_freeze(optax.sgd(0.1), {"b": 0, "w": 1}, (0, 1, 0))
    tx, batches = average_params(frozen, "window"), [example_grads(PARAMS, i) for i in range(3)]
    path = follow(tx, 3, batches)
    mean = jax.tree.map(lambda *xs: np.mean(np.float64(xs), 0), *(p for p, _ in path))
    chex.assert_trees_all_close(averaged_params(PARAMS, path[-1][1]), mean, rtol=1e-6)
    loss = lambda params, batch: sum(jnp.sum(params[k] * batch[k]) for k in params)  # noqa: E731
    for driver in ("host", "switch"):
        step = boostax.make_train_step(loss, tx, freeze_driver=driver)
        state = functools.reduce(lambda state, x: step(state, x)[0], batches, step.init(PARAMS))
        chex.assert_trees_all_close((state.params, state.opt_state), path[-1], rtol=1e-6)
    with pytest.raises(ValueError, match=r"not store all params .* Put average_params around"):
        boostax.scheduled_freeze(average_params(SGD), {"b": 0, "w": 1}, (0, 1)).init(PARAMS)


def test_carried_leaves_are_given_as_they_are():
    tx = boostax.carry(average_params(optax.sgd(0.1), "window"), {"b": "last"})
    state = tx.init(PARAMS)
    params, state = boostax.apply_gradients(tx, {"w": PARAMS["w"], "b": 7.0}, state, PARAMS)
    assert averaged_params(params, state)["b"] == params["b"] == 7.0


@pytest.mark.parametrize("form", ["step", "update", "window", "flush"])
def test_around_stored_params_the_masters_are_averaged(form):
    """The average was one of the params rounded to bf16."""
    tx = boostax.precision.store(optax.sgd(1.0), params="remainder")
    every = {"window": 2, "flush": 3}.get(form)
    tx = average_params(tx if every is None else boostax.accumulate(tx, every), "window")
    w, wanted = jnp.ones(3, jnp.bfloat16), []
    state, whole = tx.init(w), np.float32(1)
    for i in range(4):
        grads = jnp.full(3, 2.0**-11)
        if form == "update":
            updates, state = tx.update(grads, state, w)
            w = optax.apply_updates(w, updates)
        else:
            w, state = boostax.apply_gradients(tx, grads, state, w)
        if (i + 1) % (every or 1) == 0:
            whole -= np.float32(2.0**-11)
            wanted.append(whole)
    if form == "flush":
        w, state = boostax.flush(tx, state, w)
        wanted.append(whole - np.float32(2.0**-11))
    masters = boostax.precision.masters(w, state)
    assert (masters == wanted[-1]).all() and masters.dtype == jnp.float32
    found = averaged_params(masters, state)
    np.testing.assert_allclose(found, np.mean(wanted, dtype=np.float64), rtol=1e-7)


def test_a_whole_module_is_averaged_where_it_has_params():
    """Defect guarded against: ``pytree structure error`` for functions beside the params."""
    tx = average_params(SGD, "lawa", size=2)
    net, norm = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    for module, given in ((net, eqx.filter(net, eqx.is_array)), (norm, nnx.state(norm, nnx.Param))):
        params = trees.arrays(given)
        new, state = boostax.apply_gradients(tx, params, tx.init(params), params)
        found = averaged_params(module, state)
        assert jax.tree.structure(found) == jax.tree.structure(trees.arrays(module))
        wanted = trees.named(averaged_params(new, state))
        assert all(np.array_equal(dict(trees.named(found))[name], x) for name, x in wanted)
        with pytest.raises(ValueError, match="params must be those of the optimizer, got none at"):
            averaged_params({"other": jnp.ones(2)}, state)


def test_what_cannot_be_averaged_or_read_is_refused():
    tx, inner = average_params(SGD), boostax.reduce.local_updates(SGD, 2, axis_name="data")
    gated = average_params(boostax.dynamic_loss_scale(inner, axis_name="data"))
    for match, call in {
        "average_params: inner must be an optimizer that keeps": lambda: gated.init(PARAMS),
        "average_params: params must be given": lambda: tx.update(PARAMS, tx.init(PARAMS)),
        "averaged_params: opt_state must be a tree": lambda: averaged_params(0, SGD.init(PARAMS)),
        r"averaged_params: params must be shaped \(4, 3\) at 'w'": (
            lambda: averaged_params(PARAMS | {"w": jnp.zeros((4, 1))}, tx.init(PARAMS))
        ),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
