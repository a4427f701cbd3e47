# SPDX-License-Identifier: Apache-2.0
"""What a run's step sends, beside the same optimizer step as one writes it in plain ``jit``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import boostax
from boostax.inspect.audit import Audit
from boostax.inspect.tables import aligned, units
from boostax.run.cli.build import AXIS, Built, optimizer

PyTree = Any


def beside(built: Built, state: boostax.train.TrainState) -> str:
    """Reductions, bytes and temporaries of an optimizer step, compiled for the devices at hand."""
    calls, batch = built.recipe.accumulate, built.workload.batch(0)
    found = {
        "jit, lax.scan over the batches": _scanned(built, state, batch),
        "jit, optax.MultiSteps": _multi_steps(built, state, batch),
        "this run": boostax.audit(built.step, state, batch, calls=calls),
    }
    rows = [("per optimizer step", "reduced", "bytes sent", "temporaries")]
    for name, each in found.items():
        reduced, held = f"{each.reductions:.2f} N", f"{each.temporaries:.2f} P"
        rows.append((name, reduced, units(_sent(each), "B"), held))
    device = jax.devices()[0].device_kind
    kind = f"{built.recipe.devices} x {device}, {calls} batches of {built.workload.batch_size}"
    return (
        f"The step of this run, as compiled for {kind}:\n{aligned(rows)}\n"
        "N: params; P: their bytes on a device. Of a step of yours: boostax audit module:function"
    )


def _sent(audit: Audit) -> float:
    """Bytes of all calls of an optimizer step, of which one applies it."""
    return (audit.calls - 1) * audit.wire_bytes.least + audit.wire_bytes.most


def _plain(built: Built, tx: optax.GradientTransformation, body: Callable[..., PyTree]) -> Any:
    """A step on global arrays, whose gradients come from ``body(gradient, params, batch)``."""

    def step(params: PyTree, state: PyTree, batch: PyTree, given: PyTree) -> PyTree:
        def loss(params: PyTree, batch: PyTree) -> jax.Array:
            return built.workload.loss_fn(params, batch, **given)[0]

        grads = body(jax.grad(loss), params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def _typed(built: Built, tree: PyTree, *spec: Any) -> PyTree:
    mesh = built.step.mesh
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec(*spec))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def _audited(
    built: Built,
    state: boostax.train.TrainState,
    tx: optax.GradientTransformation,
    body: Callable[..., PyTree],
    batch: PyTree,
    calls: int,
) -> Audit:
    params = jax.eval_shape(lambda: built.step.common_params(state))
    given = {"key": state.key, "model_state": state.model_state}
    given = _typed(built, {name: x for name, x in given.items() if x is not None})
    opt_state = jax.eval_shape(tx.init, params)
    whole = (_typed(built, params), _typed(built, opt_state))
    return boostax.audit(_plain(built, tx, body), *whole, batch, given, calls=calls)


def _multi_steps(built: Built, state: boostax.train.TrainState, batch: PyTree) -> Audit:
    calls = built.recipe.accumulate
    tx: Any = optax.MultiSteps(optimizer(built.recipe), calls).gradient_transformation()
    body = lambda gradient, params, batch: gradient(params, batch)  # noqa: E731
    return _audited(built, state, tx, body, _typed(built, batch, AXIS), calls)


def _scanned(built: Built, state: boostax.train.TrainState, batch: PyTree) -> Audit:
    calls = built.recipe.accumulate

    def body(gradient: Any, params: PyTree, batches: PyTree) -> PyTree:
        def add(grads: PyTree, batch: PyTree) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, grads, gradient(params, batch)), None

        total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
        return jax.tree.map(lambda g: g / calls, total)

    stacked = lambda x: jax.ShapeDtypeStruct((calls, *x.shape), x.dtype)  # noqa: E731
    batches = _typed(built, jax.tree.map(stacked, batch), None, AXIS)
    return _audited(built, state, optimizer(built.recipe), body, batches, 1)
