"""Ten full-batch steps at the end of a run: dim_reduce beside optax.lbfgs and Adam."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from workloads import digits

import boostax

PyTree = Any
Loss = Callable[[PyTree, PyTree], jax.Array]
Finish = tuple[PyTree, float]
COMPONENTS, BEFORE = 20, 300
# Made when first used: it starts JAX, which must know the number of devices by then.
workload = functools.cache(digits)


def loss(params: PyTree, batch: PyTree) -> jax.Array:
    return workload().loss_fn(params, batch)


def run_before(seed: int) -> tuple[PyTree, boostax.subspace.Basis]:
    """Params after a run of Adam, and the directions of its last part."""
    start = workload().init(jax.random.key(seed))
    recorder = boostax.subspace.record_trajectory(COMPONENTS + 1, every=4, start=200)
    step = boostax.make_train_step(loss, optax.chain(optax.adam(1e-3), recorder))
    state = step.init(start)
    for index in range(BEFORE):
        state, _ = step(state, workload().batch(index))
    basis = boostax.subspace.trajectory_basis(state.opt_state, COMPONENTS, params=state.params)
    return state.params, basis


def trained(tx: Any, at: PyTree, batch: PyTree, steps: int) -> Finish:
    """Steps of any transformation, and how often it asked for the loss."""
    step = boostax.make_train_step(loss, tx)
    state, asked = step.init(at), 0.0
    for _ in range(steps):
        state, told = step(state, batch)
        asked += 1 + float(told.get("subspace_tries", 0.0))
    return state.params, asked


def lbfgs(at: PyTree, batch: PyTree, steps: int) -> Finish:
    """As Optax's documentation has it, with its zoom line search."""
    tx = optax.lbfgs()

    def value_fn(params: PyTree) -> jax.Array:
        return loss(params, batch)

    value_and_grad = optax.value_and_grad_from_state(value_fn)

    @jax.jit
    def step(params: PyTree, state: Any) -> tuple[PyTree, Any]:
        value, grad = value_and_grad(params, state=state)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    state, asked = tx.init(at), 1.0
    for _ in range(steps):
        at, state = step(at, state)
        # The accepted point's loss and gradient serve the next step.
        asked += float(optax.tree.get(state[-1].info, "num_linesearch_steps"))
    return at, asked


def finishing(steps: int = 10, seeds: int = 3) -> list[dict[str, Any]]:
    """A row for each finish: means over the seeds."""
    # All rows of an epoch at once.
    parts = [workload().batch(index) for index in range(1437 // workload().batch_size)]
    batch = jax.tree.map(lambda *each: jnp.concatenate(each), *parts)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(seeds):
        at, basis = run_before(seed)
        ends = {
            "no finish": (at, 0.0),
            "optax.adam": trained(optax.adam(1e-3), at, batch, steps),
            "optax.lbfgs": lbfgs(at, batch, steps),
            "boostax.dim_reduce": trained(boostax.dim_reduce(basis), at, batch, steps),
        }
        for name, (params, asked) in ends.items():
            held_out = workload().evaluate(params)["loss"]
            found.setdefault(name, []).append((float(loss(params, batch)), held_out, asked))
    figures = "train loss", "held-out loss", "losses asked for"
    means = {name: np.mean(rows, axis=0).tolist() for name, rows in found.items()}
    return [
        {"finish": name} | dict(zip(figures, values, strict=True)) for name, values in means.items()
    ]
