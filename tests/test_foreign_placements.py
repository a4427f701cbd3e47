"""Loops that others would write, with params that XLA shards, before and after boostax."""

import difflib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reducing import mesh_of

import boostax
from boostax import all_reduce, on_mesh, value_and_grad

MICRO = 8
# Adam's own eps makes 1e-3 of a gradient's last bit, where the gradient is next to zero.
OPTIMIZER = optax.adamw(1e-3, eps=1e-4)


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["x"]) ** 2)


def placed(mesh):
    """Params of a layer, sharded over the batch's axis and the model's."""
    random = np.random.default_rng(0)
    specs = {"up": P("data", "model"), "down": P("model", "data")}
    arrays = {
        "up": random.normal(size=(512, 1024)).astype("f") / 32,
        "down": random.normal(size=(1024, 512)).astype("f") / 32,
    }
    return {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in arrays.items()}


def batches(mesh):
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=(8 * MICRO, 512)).astype("f")
        yield {"x": jax.device_put(x, NamedSharding(mesh, P("data")))}


# A train step with a function for gradient accumulation, in the manner of large-model trainers: a
# scan over micro-batches that adds up gradients with the shardings of the params.


def accumulating(mesh, params):
    tx = OPTIMIZER
    state = tx.init(params)
    shardings = jax.tree.map(lambda x: x.sharding, params)

    def gradient_accumulation(params, batch):
        def micro(carry, data):
            total, grads = carry
            loss, new = jax.value_and_grad(loss_fn)(params, data)
            grads = jax.tree.map(jnp.add, grads, new)
            grads = jax.lax.with_sharding_constraint(grads, shardings)
            return (total + loss, grads), None

        split = lambda x: x.reshape(len(x) // MICRO, MICRO, *x.shape[1:]).swapaxes(0, 1)  # noqa: E731
        zeros = jax.tree.map(jnp.zeros_like, params)
        (loss, grads), _ = jax.lax.scan(micro, (0.0, zeros), jax.tree.map(split, batch))
        return loss / MICRO, jax.tree.map(lambda g: g / MICRO, grads)

    def step(params, state, batch):
        loss, grads = gradient_accumulation(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step, state


def accumulating_with_boostax(mesh, params):
    tx = optax.chain(boostax.all_reduce("data"), OPTIMIZER)
    tx = boostax.on_mesh(tx, params, axis_name="data")
    state = tx.init(params)
    oracle = boostax.value_and_grad(loss_fn, mesh=mesh, axis_name="data", microbatches=MICRO)

    def step(params, state, batch):
        loss, grads = oracle(params, state, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step, state


# A loop of NNX whose model is sharded.


class Layer(nnx.Module):
    def __init__(self, params):
        self.up, self.down = nnx.Param(params["up"]), nnx.Param(params["down"])


def loss_of(model, batch):
    return loss_fn({"up": model.up[...], "down": model.down[...]}, batch)


def of_nnx(mesh, model):
    tx = OPTIMIZER
    oracle = nnx.value_and_grad(loss_of)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = oracle(model, batch)
        optimizer.update(model, grads)
        return loss

    return step, optimizer


def of_nnx_with_boostax(mesh, model):
    tx = on_mesh(optax.chain(all_reduce("data"), OPTIMIZER), model, axis_name="data")
    oracle = value_and_grad(loss_of, mesh=mesh, axis_name="data")
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, (grads,) = oracle(model, optimizer.opt_state, batch)
        optimizer.update(model, grads)
        return loss

    return step, optimizer


def added(before, after):
    """Lines of the second that the first has not."""
    one, other = (inspect.getsource(x).splitlines()[1:] for x in (before, after))
    return [x for x in difflib.ndiff(one, other) if x.startswith("+ ")]


def run(make):
    mesh = mesh_of(data=4, model=2)
    params = placed(mesh)
    step, state = make(mesh, params)
    program = jax.jit(step)
    found = boostax.audit(program, params, state, next(batches(mesh)))
    losses = []
    for batch in batches(mesh):
        params, state, loss = program(params, state, batch)
        losses.append(float(loss))
    return losses, params, found


def run_nnx(make):
    mesh = mesh_of(data=2, model=4)
    model = Layer(placed(mesh))
    step, optimizer = make(mesh, model)
    losses = [float(step(model, optimizer, batch)) for batch in batches(mesh)]
    return losses, {key: getattr(model, key)[...] for key in ("up", "down")}, None


def over_the_batch(found):
    """How many params' worth is reduced over the batch's axis."""
    sums = [
        x.elements * x.executions
        for x in found.collectives
        if x.does in ("all-reduce", "reduce-scatter") and "data" in x.axes and x.elements > 1000
    ]
    return sum(sums) / found.params


@pytest.mark.parametrize(
    ("before", "after", "train", "lines"),
    [
        (accumulating, accumulating_with_boostax, run, 20),
        (of_nnx, of_nnx_with_boostax, run_nnx, 3),
    ],
    ids=["accumulating", "nnx"],
)
def test_few_lines_and_the_same_training(before, after, train, lines):
    assert len(added(before, after)) <= lines, "\n".join(added(before, after))
    (wanted, whole, old), (losses, params, new) = train(before), train(after)
    np.testing.assert_allclose(losses, wanted, rtol=2e-6)
    for key, x in params.items():
        np.testing.assert_allclose(np.asarray(x), np.asarray(whole[key]), atol=3e-6)
        assert x.sharding.is_equivalent_to(whole[key].sharding, 2)
    if new is not None:
        # Once instead of once a micro-batch.
        assert over_the_batch(new) <= 0.51 and over_the_batch(old) >= MICRO / 2
