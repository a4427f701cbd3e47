# SPDX-License-Identifier: Apache-2.0
"""The law of a loss: every way to train on a mesh gives the result of training on one device."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import boostax
from boostax._core.types import PyTree
from boostax.reduce.mean import all_reduce
from boostax.train.apply import apply_gradients, on_mesh
from boostax.train.oracle import value_and_grad
from boostax.train.step import make_train_step

Loss = Callable[[PyTree, PyTree], PyTree]
Trained = tuple[PyTree, list[float]]
_SGD = optax.sgd(0.05)
_REDUCED = optax.chain(all_reduce(), _SGD)


def check_loss(
    loss_fn: Loss, params: PyTree, batch: PyTree, *, rtol: float = 1e-5, only: str = ""
) -> None:
    """Check that every way to train a loss on a mesh gives the result of training on one device.

    The ways are ``step``, ``FSDP``, ``ZeRO-1``, ``HSDP``, ``another axis``, ``micro-batches``,
    ``own loop``, ``audit``, and ``nnx.Optimizer`` if Flax is installed. Each way runs two steps of
    gradient descent on four devices.

    Args:
      loss_fn: ``loss_fn(params, batch)``, the mean over the rows of the batch, or a dict of terms.
      params: tree of floating arrays.
      batch: tree of arrays ``[rows, ...]``; the number of rows is a multiple of eight.
      rtol: relative tolerance of the losses, and of each param relative to its largest element.
      only: the name of a single way to check; an empty name means all ways.

    Raises:
      AssertionError: the result of a way differs; the message names the way.

    Example:
      >>> import boostax.testing, jax, jax.numpy as jnp
      >>> def loss(w, x):  # a loop that starts from a constant
      ...   return jax.lax.fori_loop(0, 2, lambda i, total: total + jnp.mean((w - x) ** 2), 0.0)
      >>> boostax.testing.check_loss(loss, jnp.float32(1.0), jnp.arange(8.0), only="own loop")
    """
    expected = _in_steps({}, "", loss_fn, params, batch)
    for name, trial in ({only: TRIALS[only]} if only else TRIALS).items():
        result = trial(loss_fn, params, batch) or expected
        np.testing.assert_allclose(result[1], expected[1], rtol=rtol, err_msg=f"{name}: loss")
        for x, y in zip(jax.tree.leaves(result[0]), jax.tree.leaves(expected[0]), strict=True):
            worst, scale = (np.abs(z).max(initial=0) for z in (x - y, y))
            assert worst <= rtol * scale, f"{name}: params of magnitude {scale} differ by {worst}"


def _mesh(**sizes: int) -> Mesh:
    options: Any = {"axis_types": (AxisType.Auto,) * len(sizes), "devices": jax.devices()[:4]}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), **options)


def _spec(axis: str, size: int, x: jax.Array) -> PartitionSpec:
    """Return the spec that shards the first dimension that is a multiple of the axis size."""
    dims = [i for i, length in enumerate(jnp.shape(x)) if length and length % size == 0]
    return PartitionSpec(*[None] * dims[0], axis) if dims else PartitionSpec()


def _in_steps(
    sizes: dict[str, int], shard: str, loss_fn: Loss, params: PyTree, batch: PyTree, **options: Any
) -> Trained:
    """Run two train steps, and return the params and the losses.

    The mesh has axes of these sizes. The params are sharded over the axis ``shard``, or replicated
    if ``shard`` is empty. Without sizes, the steps run on one device.
    """
    if sizes:
        options = {"mesh": _mesh(**sizes), "axis_name": "data", **options}
    if shard:
        options["param_specs"] = jax.tree.map(partial(_spec, shard, sizes[shard]), params)
    step = make_train_step(loss_fn, _REDUCED if sizes else _SGD, **options)
    state, first = step(step.init(params), batch)
    state, second = step(state, batch)
    return jax.device_get(state.params), [float(x["loss"]) for x in (first, second)]


def _own_loop(loss_fn: Loss, params: PyTree, batch: PyTree) -> Trained:
    mesh = _mesh(data=4)
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    tx = on_mesh(_REDUCED, params)
    gradient = value_and_grad(loss_fn, mesh=mesh)

    @jax.jit
    def step(carry: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        params, state = carry
        loss, grads = gradient(params, state, batch)
        return apply_gradients(tx, grads, state, params), loss

    carry, first = step((params, tx.init(params)), batch)
    carry, second = step(carry, batch)
    return jax.device_get(carry[0]), [float(first), float(second)]


def _nnx(loss_fn: Loss, params: PyTree, batch: PyTree) -> Trained | None:
    if not importlib.util.find_spec("flax"):
        return None
    from flax import nnx

    from boostax.nnx import Optimizer

    leaves, tree = jax.tree.flatten(params)
    leaves = jax.device_put(leaves, NamedSharding(_mesh(data=4), PartitionSpec()))
    model = nnx.List([nnx.Param(x) for x in leaves])
    optimizer = Optimizer(model, _REDUCED, wrt=nnx.Param, axis_name="data")

    def values(model: PyTree) -> PyTree:
        return tree.unflatten([x[...] for x in model])

    @nnx.jit
    def step(model: PyTree, optimizer: PyTree, batch: PyTree) -> jax.Array:
        loss, grads = optimizer.value_and_grad(lambda m, b: loss_fn(values(m), b))(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, batch)) for _ in range(2)]
    return jax.device_get(values(model)), losses


def _audit(loss_fn: Loss, params: PyTree, batch: PyTree) -> None:
    """Require that an audit lists collectives, if ``boostax.audit`` exists; return ``None``."""
    if "audit" in dir(boostax):
        step = make_train_step(loss_fn, _REDUCED, mesh=_mesh(data=4))
        audit = boostax.audit(step, step.init(params), batch)
        assert audit.collectives, "audit: nothing is reduced"


TRIALS: dict[str, Callable[[Loss, PyTree, PyTree], Trained | None]] = {
    "step": partial(_in_steps, {"data": 4}, ""),
    "FSDP": partial(_in_steps, {"data": 4}, "data"),
    "ZeRO-1": partial(_in_steps, {"data": 4}, "", shard_optimizer=True),
    "HSDP": partial(_in_steps, {"data": 2, "fsdp": 2}, "fsdp", axis_name=("data", "fsdp")),
    "another axis": partial(_in_steps, {"data": 2, "model": 2}, "model"),
    "micro-batches": partial(_in_steps, {"data": 4}, "", microbatches=2),
    "own loop": _own_loop,
    "nnx.Optimizer": _nnx,
    "audit": _audit,
}
"""The trials of ``check_loss``, by name."""
