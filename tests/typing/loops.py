# pyright: strict, reportMissingTypeStubs=false, reportUnnecessaryTypeIgnoreComment=true
"""Loops of a strict user: params keep their class, and a misspelt word is an error.

`make lint` checks them against the package; nothing here is run.
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, assert_type, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import boostax
from boostax.checkpoint import Checkpointer
from boostax.nnx import Optimizer
from boostax.train import TrainState

Step = TypeVar("Step", bound=Callable[..., Any])


class Params(NamedTuple):
    w: jax.Array
    b: jax.Array


class Batch(NamedTuple):
    x: jax.Array
    y: jax.Array


def jit(step: Step) -> Step:
    """JAX's own forgets the types of its function."""
    return cast(Step, jax.jit(step))  # pyright: ignore[reportUnknownMemberType]


def loss_fn(params: Params, batch: Batch) -> jax.Array:
    return jnp.mean((batch.x @ params.w + params.b - batch.y) ** 2)


def counted(params: Params, batch: Batch) -> tuple[jax.Array, boostax.Aux]:
    return loss_fn(params, batch), boostax.Aux(weight=len(batch.y))


def in_plain_optax(params: Params, batches: list[Batch]) -> Params:
    window = boostax.accumulate(optax.adamw(1e-3), every=4, sums="local", normalize="weight")
    scaled = boostax.dynamic_loss_scale(boostax.model.average_params(window, "ema"))
    tx = boostax.scheduled_freeze(scaled, [["b"]], 1, moments="shared")
    grad_fn = boostax.value_and_grad(counted, has_aux=True, policy="O1", microbatches="stacked")

    @jit
    def step(params: Params, opt_state: optax.OptState, batch: Batch):
        (loss, aux), grads = grad_fn(params, opt_state, batch, active=tx.choice(params, opt_state))
        assert_type((loss, aux, grads), tuple[jax.Array, boostax.Aux, Params])
        new = boostax.apply_gradients(tx, grads, opt_state, params, weight=aux.weight)
        assert_type(new, tuple[Params, optax.OptState])
        return new

    opt_state = tx.init(params)
    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    assert_type(boostax.flush(tx, opt_state, params)[0], Params)
    assert_type(boostax.precision.masters(params, opt_state), Params)
    return assert_type(boostax.model.averaged_params(params, opt_state), Params)


def in_a_train_step(params: Params, batch: Batch, folder: pathlib.Path) -> TrainState[Params]:
    boost = boostax.auto({"accumulate": 4}, level="O0")
    step = boost.make_train_step(loss_fn, optax.sgd(0.1), params, freeze_driver="switch")
    state, metrics = step(step.init(params), batch)
    assert_type((state, state.params), tuple[TrainState[Params], Params])
    assert_type((step, metrics), tuple[boostax.train.TrainStep, dict[str, jax.Array]])
    assert boostax.audit(step, state, batch).calls == 4
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state)
        state, _ = checkpointer.restore(state)
    assert_type(step.common_params(step.flush(state)), Params)
    return assert_type(boostax.reshard_state(state, 4), TrainState[Params])


def mean_of(model: nnx.Linear, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x))


def in_place(model: nnx.Linear, x: jax.Array) -> jax.Array:
    optimizer = Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    assert_type(optimizer, Optimizer[nnx.Linear])
    loss, grads = optimizer.value_and_grad(mean_of)(model, x)
    optimizer.update(model, grads)
    return loss


def on_a_mesh(params: Params, mesh: jax.sharding.Mesh, batch: Batch) -> Params:
    tx = boostax.on_mesh(optax.chain(boostax.all_reduce(), optax.sgd(0.1)), params)
    opt_state = tx.init(params)
    gather = boostax.train.gather_params(params, "int8", axis_name="data")
    seen = assert_type(gather(params), Params)
    _, grads = boostax.value_and_grad(loss_fn, mesh=mesh)(seen, opt_state, batch)
    # The gradients of each replica, or what the backward pass made of them.
    return boostax.apply_gradients(tx, assert_type(grads, Any), opt_state, params)[0]


def refused(tx: optax.GradientTransformation, batch: Batch) -> None:
    """What a checker has to find."""
    boostax.value_and_grad(loss_fn)(batch, (), batch)  # pyright: ignore[reportArgumentType]
    boostax.value_and_grad(loss_fn, policy="O5")  # pyright: ignore[reportCallIssue, reportArgumentType]
    boostax.make_train_step(loss_fn, tx, policy="O5")  # pyright: ignore[reportArgumentType]
    boostax.accumulate(tx, 4, sums="shard")  # pyright: ignore[reportArgumentType]
    boostax.precision.store(tx, params="stochastics")  # pyright: ignore[reportArgumentType]
    Optimizer(batch, tx, wrt=nnx.Param).value_and_grad(loss_fn)  # pyright: ignore[reportArgumentType]
    boostax.auto({}, level="O3")  # pyright: ignore[reportArgumentType]
