"""Programs of abstract arguments: an update alone or on replicas, and a step of training.

The model is a chain of square layers, so its gradients are a backward pass where one is needed;
elsewhere gradients are arguments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scaling_formulas import Model

import boostax
from boostax._core.replicas import (
    PerReplica,
    enter_replica,
    leave_replica,
    owns_params,
    stack_replicas,
    state_specs,
)
from boostax.testing import drawn

PyTree = Any
AXIS, ROWS = "data", 8


class Point(NamedTuple):
    """Where something is measured.

    Attributes:
      params: about how many.
      leaves: half of them kernels, half biases.
      replicas: devices, each with gradients of its own; 0 for a program of one device alone.
      window: calls, slices, snapshots or directions.
      groups: of layers, or partitions.
    """

    params: int = 3_200_000
    leaves: int = 8
    replicas: int = 4
    window: int = 8
    groups: int = 4


class Program(NamedTuple):
    """A function and the shapes it is compiled for.

    Attributes:
      run: of the arguments; returns what takes the place of the donated ones.
      args: trees of ``jax.ShapeDtypeStruct``.
      donated: how many of the first arguments are.
      init: from params to the state, if the second argument is one.
    """

    run: Callable[..., Any]
    args: tuple[PyTree, ...]
    donated: int = 0
    init: Callable[[PyTree], PyTree] | None = None


def model(point: Point) -> list[Any]:
    """Kernels and biases in turn; the width a multiple of 8, so that replicas divide it."""
    kernels = point.leaves // 2
    width = max(16, round((point.params / kernels) ** 0.5 / 8) * 8)
    shapes = [(width, width), (width,)] * kernels
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def shapes_of(point: Point) -> Model:
    return [x.shape for x in model(point)]


def loss(params: list[Any], x: jax.Array) -> jax.Array:
    """Of rows through all layers."""
    for kernel, bias in zip(params[::2], params[1::2], strict=True):
        x = jnp.tanh(x @ kernel + bias)
    return jnp.mean(x * x)


def step_of(tx: Any, point: Point, **given: Any) -> Program:
    """An update with gradients that are given, on one device or on all replicas of a mesh."""
    params = model(point)
    if not point.replicas:

        def alone(params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
            return boostax.apply_gradients(drawn(tx), grads, state, params, **given)

        return Program(alone, (params, jax.eval_shape(tx.init, params), params), 2, tx.init)
    n = point.replicas
    mesh = jax.make_mesh((n,), (AXIS,), devices=jax.devices()[:n], axis_types=(AxisType.Auto,))
    init = lambda p: stack_replicas(tx.init(p), n)  # noqa: E731
    state = jax.eval_shape(init, params)
    own = owns_params(state)
    specs = state_specs(tx, params, AXIS, replicas=n)
    kept = P(AXIS) if own else P()

    def local(params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        grads = jax.tree.map(lambda x: x[0], grads)
        mine = enter_replica(PerReplica(params)).local if own else params
        new, state = boostax.apply_gradients(drawn(tx), grads, enter_replica(state), mine, **given)
        new = leave_replica(PerReplica(new)).local if own else new
        return new, leave_replica(state)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(kept, specs, P(AXIS)), out_specs=(kept, specs)
    )
    stacked = [jax.ShapeDtypeStruct((n, *x.shape), x.dtype) for x in params]

    def on_mesh(tree: PyTree, specs: PyTree) -> PyTree:
        one = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))  # noqa: E731
        specs = jax.tree.map(lambda _: specs, tree) if isinstance(specs, P) else specs
        return jax.tree.map(one, tree, specs)

    args = (
        on_mesh(stacked if own else params, kept),
        on_mesh(state, specs),
        on_mesh(stacked, P(AXIS)),
    )
    return Program(mapped, args, 2, init)


def training(
    tx: Any, point: Point, *, slices: int = 1, boundaries: Any = None, switch: bool = False
) -> Program:
    """A step with its backward pass, on one device."""
    params = model(point)
    scaled = loss if boundaries is None else boostax.precision.group_boundaries(loss, boundaries)
    oracle = boostax.value_and_grad(scaled, microbatches=slices)

    def step(params: PyTree, state: PyTree, x: jax.Array) -> tuple[PyTree, PyTree]:
        active = tx.choice(params, state) if switch else True
        _, grads = oracle(params, state, x, active=active)
        return boostax.apply_gradients(tx, grads, state, params)

    batch = jax.ShapeDtypeStruct((ROWS * slices, params[0].shape[0]), jnp.float32)
    return Program(step, (params, jax.eval_shape(tx.init, params), batch), 2, tx.init)
