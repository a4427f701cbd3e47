"""A gated transformation is an ordinary object: what others do with one keeps its gate."""

import copy
import functools

import chex
import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_cases import CASES
from flax import nnx
from reducing import mesh_of
from training import follow, walk

import boostax
from boostax._core.gate import GatedUpdate, gate_of
from boostax.testing import drawn

PARAMS = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
HALVES = {"a": 0, "b": 1}
GATES = {
    "dynamic_loss_scale": lambda: boostax.dynamic_loss_scale(optax.adam(0.1), init_scale=1.0),
    "accumulate": lambda: boostax.accumulate(optax.sgd(0.1), 2),
    "group_loss_scale": lambda: boostax.precision.group_loss_scale(optax.adam(0.1), HALVES),
    "scheduled_freeze": lambda: boostax.scheduled_freeze(optax.adam(0.1), HALVES, [0, 1]),
    "around a window": lambda: boostax.dynamic_loss_scale(boostax.accumulate(optax.sgd(0.1), 2)),
}


class Module(eqx.Module):
    """Holds an optimizer as a field."""

    tx: optax.GradientTransformation


# Python's own ways are a law of the contract.
WAYS = {
    "in an Equinox module": lambda tx: jax.tree.map(lambda x: x, Module(tx)).tx,
    "partitioned": lambda tx: eqx.combine(*eqx.partition(Module(tx), eqx.is_array)).tx,
    "in an NNX optimizer": lambda tx: (
        nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param).tx
    ),
}


# An NNX optimizer has params of its own, which these labels do not fit.
LABELLED = ("group_loss_scale", "scheduled_freeze")


PAIRS = [(n, w) for n in GATES for w in WAYS if n not in LABELLED or "NNX" not in w]


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_the_gate_goes_where_the_pair_goes(name, way):
    tx = GATES[name]()
    again = WAYS[way](tx)
    assert type(again) is type(tx) and isinstance(gate_of(again), GatedUpdate)
    run = lambda tx: boostax.apply_gradients(drawn(tx), GRADS, tx.init(PARAMS), PARAMS)  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, run(again), run(tx))
    close = lambda tx: boostax.flush(tx, tx.init(PARAMS), PARAMS)[0]  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, close(again), close(tx))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_part_pickles(case):
    """Defect guarded against: a closure of a codec held a context variable, which has no pickle."""
    tx = case.make(optax.adam(0.1), "data" if case.reduces else None)
    again = cloudpickle.loads(cloudpickle.dumps(tx))
    assert type(again) is type(tx) and (gate_of(again) is None) == (gate_of(tx) is None)


def test_a_function_around_update_is_no_gate():
    tx = GATES["accumulate"]()

    @functools.wraps(tx.update)
    def doubled(*args, **kwargs):
        updates, state = tx.update(*args, **kwargs)
        return jax.tree.map(lambda x: 2 * x, updates), state

    for around in (doubled, jax.jit(tx.update)):
        assert gate_of(tx._replace(update=around)) is None
    params, _ = walk(tx._replace(update=doubled), PARAMS, [GRADS] * 2)[-1]
    np.testing.assert_allclose(params["a"], 1.0 - 0.2, rtol=1e-6)


def test_a_gate_is_an_argument_of_filter_jit():
    tx = GATES["around a window"]()

    @eqx.filter_jit
    @chex.assert_max_traces(n=1)
    def step(tx, params, state, grads):
        return boostax.apply_gradients(drawn(tx), grads, state, params)

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(4):
        grads = jax.tree.map(lambda g, s=state: g * boostax.precision.loss_scale(s), GRADS)
        params, state = step(tx, params, state, grads)
    np.testing.assert_allclose(params["a"], 1.0 - 0.2, rtol=1e-6)


def test_a_rebuilt_schedule_still_freezes_and_another_update_is_refused():
    tx = GATES["scheduled_freeze"]()
    loss = lambda p, x: sum(jnp.sum(v) for v in p.values()) * jnp.mean(x)  # noqa: E731
    results = []
    for each in (tx, copy.deepcopy(tx)):
        step = boostax.make_train_step(loss, each)
        state, _ = follow(step, step.init(PARAMS), [jnp.ones(4)] * 2)
        assert step.depths == (0, 1)
        results.append(state.params)
    jax.tree.map(np.testing.assert_array_equal, *results)
    with pytest.raises(TypeError, match="scheduled_freeze: update must be the function"):
        tx._replace(update=jax.jit(tx.update)).active(PARAMS, 1)


MLP = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
BATCH = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)


def mlp_loss(model, batch):
    return jnp.mean(jax.vmap(model)(batch) ** 2)


class Net(eqx.Module):
    """With leaves that are no arrays: a function, a float, a bool."""

    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __call__(self, x):
        return self.dropout(self.mlp(x))


@pytest.mark.parametrize("chosen", ["active", "choice", "choice of the module"])
def test_layers_of_an_equinox_module_are_frozen(chosen):
    arrays = eqx.filter(MLP, eqx.is_inexact_array)
    tx = boostax.scheduled_freeze(optax.sgd(0.1), lambda path, leaf: int("layers/0" not in path), 1)
    oracle = boostax.value_and_grad(mlp_loss)

    @eqx.filter_jit
    def step(model, state):
        arrays = eqx.filter(model, eqx.is_inexact_array)
        active = {
            "active": lambda: tx.active(arrays, 1),
            "choice": lambda: tx.choice(arrays, state),
            "choice of the module": lambda: tx.choice(model, state),
        }[chosen]()
        _, grads = oracle(model, state, BATCH, active=active)
        return boostax.apply_gradients(tx, grads, state, model)

    model, _ = step(MLP, tx.init(arrays))
    np.testing.assert_array_equal(model.layers[0].weight, MLP.layers[0].weight)
    assert not np.array_equal(model.layers[1].weight, MLP.layers[1].weight)


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_flush_keeps_what_is_no_array(replicas):
    """Defect guarded against: the activation was gone with the open window."""
    mesh, net = mesh_of(data=replicas), Net(MLP, eqx.nn.Dropout(0.5, inference=True))
    model = eqx.filter_shard(net, jax.NamedSharding(mesh, jax.P()))
    parts = [boostax.all_reduce("data")] if replicas > 1 else []
    axis = {"axis_name": "data"} if replicas > 1 else {}
    tx = boostax.accumulate(optax.chain(*parts, optax.sgd(0.1)), 2, **axis)
    tx = boostax.on_mesh(tx, model, **axis) if axis else tx
    oracle = boostax.value_and_grad(mlp_loss, **axis, **({"mesh": mesh} if axis else {}))

    @eqx.filter_jit
    def step(model, state):
        _, grads = oracle(model, state, BATCH)
        return boostax.apply_gradients(tx, grads, state, model)

    held, state = step(model, tx.init(eqx.filter(model, eqx.is_inexact_array)))
    flushed, _ = eqx.filter_jit(lambda model, state: boostax.flush(tx, state, model))(held, state)
    for each in (held, flushed):
        assert each.mlp.activation is MLP.activation and each.dropout.p == 0.5
    np.testing.assert_array_equal(held.mlp.layers[0].weight, MLP.layers[0].weight)
    assert not np.array_equal(flushed.mlp.layers[0].weight, MLP.layers[0].weight)


def test_what_is_no_array_is_masked_where_it_is_said_to_be():
    oracle = boostax.value_and_grad(lambda p, x: jnp.mean(p["act"](p["w"] * p["v"] * x)))
    params = {"w": jnp.ones(2), "v": jnp.ones(2), "act": jnp.tanh, "dtype": jnp.float32}
    of = lambda **active: oracle(params, (), jnp.ones(2), active=active)[1]  # noqa: E731
    masked = of(w=True, v=False, act=False, dtype=True)
    assert isinstance(masked["v"], optax.MaskedNode) and isinstance(masked["act"], optax.MaskedNode)
    assert masked["dtype"] is None and masked["w"].shape == (2,)
    # What a filter left out is not to be trained unseen.
    assert of(w=True, v=True, act=None, dtype=None)["act"] is None
    with pytest.raises(ValueError, match="pytree"):
        of(w=True, v=None, act=None, dtype=None)
    with pytest.raises(TypeError, match="active must be a tree of bools"):
        oracle(params, (), jnp.ones(2), active=None)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_policy_leaves_what_is_no_array(level):
    """Defect guarded against: a number of the model came to the loss as a traced one."""
    model = Net(MLP, eqx.nn.Dropout(0.5, inference=True))

    def loss(model, x):
        assert isinstance(model.dropout.p, float) and model.dropout.inference is True
        return mlp_loss(model, x)

    oracle = boostax.value_and_grad(loss, policy=boostax.policy(level, dtype="bfloat16"))
    _, grads = eqx.filter_jit(lambda model: oracle(model, (), BATCH))(model)
    assert grads.dropout.p is None and grads.mlp.layers[0].weight.dtype == jnp.float32


def test_a_module_with_functions_is_refused_by_a_step():
    step = boostax.make_train_step(mlp_loss, GATES["dynamic_loss_scale"]())
    with pytest.raises(TypeError, match=r"got .*'activation', 'custom_jvp'"):
        step.init(MLP)


class Network(nnx.Module):
    """Layers in a list, in the order of the forward pass."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(12)])


@pytest.mark.parametrize("boxed", [True, False])
@pytest.mark.parametrize("name", ["group_loss_scale", "scheduled_freeze"])
def test_groups_of_an_nnx_state_fit_the_arrays_of_its_optimizer(name, boxed):
    variables = nnx.state(Network(), nnx.Param)
    pure = nnx.to_pure_dict(variables)
    groups = boostax.freeze.prefix_groups(variables if boxed else pure, 3)
    make = {
        "group_loss_scale": functools.partial(boostax.precision.group_loss_scale, init_scale=1),
        "scheduled_freeze": functools.partial(boostax.scheduled_freeze, schedule=1),
    }[name]
    optimizer = nnx.Optimizer(model := Network(), make(optax.sgd(0.1), groups), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))["layers"]
    moved = [bool((after[i]["kernel"] != pure["layers"][i]["kernel"]).any()) for i in range(12)]
    assert moved == [i >= 4 or name != "scheduled_freeze" for i in range(12)]


def test_a_state_on_a_mesh_is_made_of_shapes(mesh):
    where = jax.NamedSharding(mesh, jax.P("data"))
    params = jax.device_put({"w": jnp.zeros((8, 2), jnp.bfloat16)}, where)
    shapes = {"w": jax.ShapeDtypeStruct((8, 2), jnp.bfloat16, sharding=where)}
    tx = boostax.dynamic_loss_scale(optax.adam(0.1), axis_name="data")
    tx = boostax.on_mesh(tx, params, axis_name="data")
    kinds = lambda tree: [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(tree)]  # noqa: E731
    assert kinds(tx.init(shapes)) == kinds(tx.init(params))
