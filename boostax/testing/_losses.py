# SPDX-License-Identifier: Apache-2.0
"""The law of a loss: every way to train on a mesh gives the same result as one device."""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import boostax
from boostax._core.types import PyTree
from boostax.reduce.mean import all_reduce
from boostax.train.apply import apply_gradients
from boostax.train.on_mesh import on_mesh
from boostax.train.oracle import value_and_grad
from boostax.train.step import make_train_step

Loss = Callable[[PyTree, PyTree], Any]
Trained = tuple[PyTree, list[float]]
_STEPS, _RATE = 2, 0.05


def check_loss(
    loss_fn: Loss, params: PyTree, batch: PyTree, *, rtol: float = 1e-5, only: str = ""
) -> None:
    """Check that every way to train a loss on a mesh gives the same result as one device.

    The ways are ``step``, ``FSDP``, ``ZeRO-1``, ``HSDP``, ``another axis``, ``micro-batches``,
    ``own loop``, ``audit``, and ``nnx.Optimizer`` if Flax is installed. Each takes two
    steps of gradient descent over four devices.

    Args:
      loss_fn: ``loss_fn(params, batch)``, the mean over the rows of the batch, or a dict of terms.
      params: tree of floating arrays.
      batch: tree of arrays ``[rows, ...]``; the number of rows is a multiple of eight.
      rtol: relative tolerance of the losses, and of each param relative to its largest element.
      only: the name of a single way to check; all ways if empty.

    Raises:
      AssertionError: training differs; the message names the way.

    Example:
      >>> import boostax.testing, jax, jax.numpy as jnp
      >>> def loss(w, x):  # a loop that starts from a constant
      ...   return jax.lax.fori_loop(0, 2, lambda i, total: total + jnp.mean((w - x) ** 2), 0.0)
      >>> boostax.testing.check_loss(loss, jnp.float32(1.0), jnp.arange(8.0), only="own loop")
    """
    expected = _in_steps(loss_fn, params, batch, optax.sgd(_RATE))
    for name, trial in ({only: TRIALS[only]} if only else TRIALS).items():
        found = trial(loss_fn, params, batch)
        if found is None:
            continue
        np.testing.assert_allclose(found[1], expected[1], rtol=rtol, err_msg=f"{name}: loss")
        for x, y in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True):
            worst, scale = np.abs(x - y).max(initial=0), np.abs(y).max(initial=0)
            assert worst <= rtol * scale, f"{name}: params differ by {worst}, of up to {scale}"


def _in_steps(loss_fn: Loss, params: PyTree, batch: PyTree, tx: Any, **how: Any) -> Trained:
    """Return the params after some calls of a train step, and the losses."""
    step = make_train_step(loss_fn, tx, **how)
    state, losses = step.init(params), list[float]()
    for _ in range(_STEPS):
        state, reported = step(state, batch)
        losses.append(float(reported["loss"]))
    return jax.device_get(state.params), losses


def _reduced() -> optax.GradientTransformation:
    return optax.chain(all_reduce(), optax.sgd(_RATE))


def _mesh(**sizes: int) -> Mesh:
    how: Any = {"axis_types": (AxisType.Auto,) * len(sizes), "devices": jax.devices()[:4]}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), **how)


def _spec(axis: str, size: int, x: jax.Array) -> PartitionSpec:
    """Return the spec that shards a param's first dimension that is a multiple of the axis size."""
    fits = [i for i, length in enumerate(jnp.shape(x)) if length and length % size == 0]
    return PartitionSpec(*[None] * fits[0], axis) if fits else PartitionSpec()


def _step(sizes: Mapping[str, int], shard: str = "", **more: Any) -> Callable[..., Trained]:
    def trial(loss_fn: Loss, params: PyTree, batch: PyTree) -> Trained:
        how = {"mesh": _mesh(**sizes), "axis_name": "data", **more}
        if shard:
            how["param_specs"] = jax.tree.map(functools.partial(_spec, shard, sizes[shard]), params)
        return _in_steps(loss_fn, params, batch, _reduced(), **how)

    return trial


def _own_loop(loss_fn: Loss, params: PyTree, batch: PyTree) -> Trained:
    mesh = _mesh(data=4)
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    tx, gradient = on_mesh(_reduced(), params), value_and_grad(loss_fn, mesh=mesh)

    @jax.jit
    def step(params: PyTree, state: PyTree, batch: PyTree) -> Any:
        loss, grads = gradient(params, state, batch)
        return *apply_gradients(tx, grads, state, params), loss

    state, losses = tx.init(params), list[float]()
    for _ in range(_STEPS):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return jax.device_get(params), losses


def _nnx(loss_fn: Loss, params: PyTree, batch: PyTree) -> Trained | None:
    if not importlib.util.find_spec("flax"):
        return None
    from flax import nnx

    from boostax.nnx import Optimizer

    leaves, tree = jax.tree.flatten(params)
    placed = jax.device_put(leaves, NamedSharding(_mesh(data=4), PartitionSpec()))
    model = nnx.List([nnx.Param(x) for x in placed])
    optimizer = Optimizer(model, _reduced(), wrt=nnx.Param, axis_name="data")
    values = lambda model: tree.unflatten([x[...] for x in model])  # noqa: E731

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: PyTree) -> jax.Array:
        of_model = lambda model, batch: loss_fn(values(model), batch)  # noqa: E731
        loss, grads = optimizer.value_and_grad(of_model)(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, batch)) for _ in range(_STEPS)]
    return jax.device_get(values(model)), losses


def _audit(loss_fn: Loss, params: PyTree, batch: PyTree) -> None:
    """Audit a step, where the audit is installed; there is no result to compare."""
    step = make_train_step(loss_fn, _reduced(), mesh=_mesh(data=4))
    if "audit" in dir(boostax):
        found = boostax.audit(step, step.init(params), batch).collectives
        assert found, "audit: nothing is reduced"


TRIALS: dict[str, Callable[[Loss, PyTree, PyTree], Trained | None]] = {
    "step": _step({"data": 4}),
    "FSDP": _step({"data": 4}, "data"),
    "ZeRO-1": _step({"data": 4}, shard_optimizer=True),
    "HSDP": _step({"data": 2, "fsdp": 2}, "fsdp", axis_name=("data", "fsdp")),
    "another axis": _step({"data": 2, "model": 2}, "model"),
    "micro-batches": _step({"data": 4}, microbatches=2),
    "own loop": _own_loop,
    "nnx.Optimizer": _nnx,
    "audit": _audit,
}
"""The trials of ``check_loss``, by name."""
