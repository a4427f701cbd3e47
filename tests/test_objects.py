"""A gated transformation is an ordinary object: what others do with one keeps its gate."""

import copy
import functools
import pickle

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import boostax
from boostax._core.gate import GatedUpdate, gate_of

PARAMS = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
GATES = {
    "dynamic_loss_scale": lambda: boostax.dynamic_loss_scale(optax.adam(0.1), init_scale=1.0),
    "accumulate": lambda: boostax.accumulate(optax.sgd(0.1), 2),
    "group_loss_scale": lambda: boostax.group_loss_scale(optax.adam(0.1), {"a": 0, "b": 1}),
    "scheduled_freeze": lambda: boostax.scheduled_freeze(optax.adam(0.1), {"a": 0, "b": 1}, [0, 1]),
    "around a window": lambda: boostax.dynamic_loss_scale(boostax.accumulate(optax.sgd(0.1), 2)),
}


class Module(eqx.Module):
    """Holds an optimizer as a field."""

    tx: optax.GradientTransformation


class Tracked:
    """Rebuilds NamedTuples among its attributes from their fields, as Keras does."""

    def __setattr__(self, name, value):
        super().__setattr__(name, type(value)(*(x for x in value)))


def tracked(tx):
    holder = Tracked()
    holder.tx = tx
    return holder.tx


WAYS = {
    "mapped": lambda tx: jax.tree.map(lambda f: f, tx),
    "copied": copy.copy,
    "deeply copied": copy.deepcopy,
    "replaced": lambda tx: tx._replace(init=tx.init),
    "pickled": lambda tx: cloudpickle.loads(cloudpickle.dumps(tx)),
    "in an Equinox module": lambda tx: jax.tree.map(lambda x: x, Module(tx)).tx,
    "partitioned": lambda tx: eqx.combine(*eqx.partition(Module(tx), eqx.is_array)).tx,
    "in a Keras object": tracked,
    "in an NNX optimizer": lambda tx: (
        nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param).tx
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GATES)
def test_the_gate_goes_where_the_pair_goes(name, way):
    if name in ("group_loss_scale", "scheduled_freeze") and "NNX" in way:
        pytest.skip("its labels are those of other params")
    tx = GATES[name]()
    again = WAYS[way](tx)
    assert type(again) is type(tx)
    assert isinstance(gate_of(again), GatedUpdate)
    run = lambda tx: jax.make_jaxpr(  # noqa: E731
        lambda p, g: boostax.apply_gradients(tx, g, tx.init(p), p)
    )(PARAMS, GRADS)
    assert str(run(again)) == str(run(tx))
    close = lambda tx: boostax.flush(tx, tx.init(PARAMS), PARAMS)[0]  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, close(again), close(tx))


def test_a_function_around_update_is_no_gate():
    tx = GATES["accumulate"]()

    @functools.wraps(tx.update)
    def doubled(*args, **kwargs):
        updates, state = tx.update(*args, **kwargs)
        return jax.tree.map(lambda x: 2 * x, updates), state

    for around in (doubled, jax.jit(tx.update)):
        assert gate_of(tx._replace(update=around)) is None
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(2):
        params, state = boostax.apply_gradients(tx._replace(update=doubled), GRADS, state, params)
    np.testing.assert_allclose(params["a"], 1.0 - 0.2, rtol=1e-6)


def _init(params):
    return ()


def _step(grads, state, params, *, apply, **extra):
    return (params if apply else grads.raw), state


def test_a_gate_pickles_where_its_functions_do():
    tx = optax.GradientTransformationExtraArgs(_init, GatedUpdate(_step, None))
    assert gate_of(pickle.loads(pickle.dumps(tx))).step is _step


def test_a_gate_is_an_argument_of_filter_jit():
    tx, traces = GATES["around a window"](), []

    @eqx.filter_jit
    def step(tx, params, state, grads):
        traces.append(1)
        return boostax.apply_gradients(tx, grads, state, params)

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(4):
        grads = jax.tree.map(lambda g, s=state: g * boostax.loss_scale(s), GRADS)
        params, state = step(tx, params, state, grads)
    assert len(traces) == 1
    np.testing.assert_allclose(params["a"], 1.0 - 0.2, rtol=1e-6)


def test_a_rebuilt_schedule_still_freezes_and_another_update_is_refused():
    tx = GATES["scheduled_freeze"]()
    loss = lambda p, x: sum(jnp.sum(v) for v in p.values()) * jnp.mean(x)  # noqa: E731
    results = []
    for each in (tx, copy.deepcopy(tx), jax.tree.map(lambda f: f, tx)):
        step = boostax.make_train_step(loss, each)
        state = step.init(PARAMS)
        for _ in range(2):
            state, _ = step(state, jnp.ones(4))
        assert step.depths == (0, 1)
        results.append(state.params)
    jax.tree.map(np.testing.assert_array_equal, results[0], results[1])
    jax.tree.map(np.testing.assert_array_equal, results[0], results[2])
    with pytest.raises(TypeError, match="scheduled_freeze: update must be the one"):
        tx._replace(update=jax.jit(tx.update)).active(PARAMS, 1)
