# SPDX-License-Identifier: Apache-2.0
"""The state of a training run, its metrics, and the placement of states and batches."""

import dataclasses
import functools
import itertools
import re
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from boostax._core import checks, protocols, trees, types
from boostax._core.gate import gates_in, passed
from boostax._core.placement import Placement
from boostax._core.replicas import PerReplica, owns_params, stack_replicas
from boostax._core.transfer import is_key, place
from boostax._core.types import PyTree
from boostax.accumulate.microbatch import require_even
from boostax.train.apply import specs_of

_WHO = "make_train_step"


class TrainState(NamedTuple, Generic[types.Params]):
    """State of a training run, which a step updates and a checkpoint saves.

    For a type checker, the state is a ``TrainState[Params]`` before and after each step.

    Attributes:
      step: i32 scalar, number of calls so far; with ``accumulate``, each micro-step is a call.
      params: the params.
      opt_state: state of the transformation; its ``PerReplica`` parts have a leading dimension of
        replicas.
      model_state: state of the model, which the loss returns in ``Aux.model_state``; or ``None``.
      key: constant PRNG key, or ``None``; each call derives its keys by folding in ``step`` and the
        replica.
    """

    step: jax.Array  # [] int32
    params: types.Params  # shapes and dtypes of the model
    opt_state: PyTree
    model_state: PyTree  # shapes and dtypes of the model
    key: jax.Array | None  # [] PRNG key


@dataclasses.dataclass(frozen=True, eq=False)
class Placing:
    """The mesh of a step, and the shardings of states and batches.

    Attributes:
      mesh: mesh over devices of one process or of several processes.
      names: replica axes.
      microbatches: micro-batches per replica and call.
      param_specs: see ``make_train_step``.
      shard_optimizer: see ``make_train_step``.
      replicas: number of replicas.
      rows_sharding: sharding of a batch.
      spans_processes: whether the mesh has devices of several processes.
    """

    mesh: Mesh
    names: tuple[str, ...]
    microbatches: int
    param_specs: PyTree
    shard_optimizer: bool
    replicas: int
    rows_sharding: NamedSharding
    spans_processes: bool

    def state(self, state: TrainState) -> TrainState:
        """Place the state of one replica on all replicas; for a state of types, add shardings."""
        specs = self.of_params(state.params)
        got = len(jax.tree.leaves(specs))
        count = len(jax.tree.leaves(state.params))
        allowed = f"a tree with one PartitionSpec for each of the {count} params"
        hint = "Use PartitionSpec() for a replicated param, not None."
        checks.require(got == count, _WHO, "param_specs", got, allowed, hint)
        for (name, x), spec in zip(trees.named(state.params), jax.tree.leaves(specs), strict=True):
            self._require_shardable(name, x, spec)
        placing = dataclasses.replace(self, param_specs=specs)
        if owns_params(state.opt_state):
            state = state._replace(params=PerReplica(state.params))
        stack = functools.partial(stack_replicas, replicas=self.replicas)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
            state = jax.eval_shape(stack, state)
            return jax.tree.map(lambda x, s: x.update(sharding=s), state, placing.shardings(state))
        if self.spans_processes:
            # On the host, the stacked replicas are views of one array.
            state = jax.tree.map(
                lambda x: np.asarray(x) if x.is_fully_addressable and not is_key(x) else x, state
            )
        state = stack(state)
        return place(state, placing.shardings(state))

    def shardings(self, state: TrainState) -> TrainState:
        """Return the sharding of each leaf of a placed state."""
        replicated: PyTree = PartitionSpec()
        placement = self.placement(state.params)
        specs = specs_of(placement, self.shard_optimizer, state.params, state.opt_state)
        specs = TrainState(replicated, *specs, replicated, replicated)
        return placement.shardings(jax.tree.broadcast(specs, state))

    def of_params(self, params: PyTree) -> PyTree:
        """Return the spec of each param, from ``param_specs`` or from the param's sharding."""
        if self.param_specs is not None:
            return self.param_specs
        is_stacked = isinstance(params, PerReplica)

        def spec_of(path: tuple[PyTree, ...], x: PyTree) -> PartitionSpec:
            sharding = getattr(x, "sharding", None)
            if not isinstance(sharding, NamedSharding):
                return PartitionSpec()
            if sharding.mesh != self.mesh:
                self._require_shardable(trees.path_name(path), x, sharding.spec)
            return PartitionSpec(*sharding.spec[1:]) if is_stacked else sharding.spec

        return jax.tree_util.tree_map_with_path(spec_of, params.local if is_stacked else params)

    def _require_shardable(self, name: str, x: PyTree, spec: PartitionSpec) -> None:
        """Refuse a spec that is invalid for a param, with an error that names the param."""
        try:
            NamedSharding(self.mesh, spec).shard_shape(x.shape)
        except Exception as error:
            allowed = f"sharded over axes of the step's mesh, {dict(self.mesh.shape)}, "
            allowed += "each used once, with a size that divides the dimension"
            got = f"{spec!r} for shape {tuple(x.shape)}"
            hint = "In param_specs, shard another dimension, or use PartitionSpec() to replicate."
            raise ValueError(checks.message(_WHO, f"param {name}", allowed, got, hint)) from error

    def placement(self, params: PyTree) -> Placement:
        """Return the placement of params."""
        specs = jax.tree_util.tree_leaves_with_path(self.of_params(params))
        by_path = {trees.plain_path(path): spec for path, spec in specs}
        return Placement(self.mesh, self.names, by_path)

    def own_rows(self, size: int) -> np.ndarray:
        """Return the indices of a batch's ``size`` rows on this process's devices, ascending."""
        indices = self.rows_sharding.addressable_devices_indices_map((size,)).values()
        rows = [np.arange(size)[index] for index in indices if index is not None]
        return np.unique(np.concatenate(rows))

    def batch(self, batch: PyTree) -> PyTree:
        """Place a batch, or this process's rows of a batch; if these are types, add shardings."""
        rows = self.rows_sharding
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        for path, leaf in leaves:
            is_global = not self.spans_processes or not getattr(leaf, "is_fully_addressable", True)
            count = self.replicas if is_global else len(self.own_rows(self.replicas))
            of = "replicas" if is_global else "this process's replicas"
            by = f"{of} x microbatches = {count} x {self.microbatches}"
            require_even(_WHO, path, getattr(leaf, "shape", ()), count * self.microbatches, by)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for _, leaf in leaves):
            batch = jax.eval_shape(lambda x: x, batch)
            return jax.tree.map(lambda x: x.update(sharding=rows), batch)
        if all(getattr(leaf, "sharding", None) == rows for _, leaf in leaves):
            return batch
        if self.spans_processes:
            # Each process has the rows of its devices, in device order.
            joined = functools.partial(jax.make_array_from_process_local_data, rows)
            batch = jax.tree.map(
                lambda x: joined(np.asarray(x)) if getattr(x, "is_fully_addressable", True) else x,
                batch,
            )
        return jax.device_put(batch, rows)

    def common(self, kwargs: PyTree, batch: PyTree) -> PyTree:
        """Replicate arrays that are not split over replicas; if these are types, add shardings."""
        sharding = NamedSharding(self.mesh, PartitionSpec())
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((kwargs, batch))):
            kwargs = jax.eval_shape(lambda x: x, kwargs)
            return jax.tree.map(lambda x: x.update(sharding=sharding), kwargs)
        leaves, tree = jax.tree.flatten(kwargs)
        for i, x in enumerate(leaves):
            # XLA gathers arrays where the loss reads the arrays, except on an Explicit mesh.
            is_free = isinstance(x, jax.Array) and AxisType.Explicit not in self.mesh.axis_types
            if isinstance(x, Tracer) or (is_free and x.sharding.device_set == sharding.device_set):
                continue
            leaves[i] = place(x, sharding)
        return tree.unflatten(leaves)


def metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """Return the named scalars of every boostax state in an optimizer state, in one dictionary.

    Args:
      opt_state: any tree. A node with a method ``metrics()`` that returns a dict adds its scalars.

    Returns:
      The scalars by name. If several parts report the same name, ``_1`` is added to the second name
      in the order of the chain, ``_2`` to the third, and so on. Cost: an addition for each gate.
      With gates, the dictionary contains

      * ``applied``: bool, whether the last call was applied: no gate skipped the call, and the call
        closed the window, if there is a window. False before the first call.
      * ``skipped``: i32, the number of calls that a gate skipped, since the start. Each call is
        either applied, skipped, or added to a window that is still open. A call that closes a
        window without applying the window is one skipped call. Gates in different branches of
        ``optax.partition`` count the same call separately.
      * with several gates also ``loss_scale_applied`` and ``loss_scale_skipped`` for a
        ``LossScaleState``, and so on for each gate. ``..._applied`` is about the last call that
        reached the gate. ``accumulate_skipped`` includes windows that a gate inside skipped.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.accumulate(optax.sgd(0.1), every=4)
      >>> sorted(boostax.metrics(tx.init(jnp.zeros(3))))
      ['applied', 'micro_step', 'optimizer_steps', 'skipped']
    """
    gates = gates_in(opt_state)
    # A window also counts the calls that gates inside it skipped, so these gates are left out.
    windows = trees.telling(opt_state, protocols.Window)
    inside = {id(x) for window in windows for x in gates_in(window) if id(x) != id(window)}
    outer = (getattr(x, "skipped", None) for x in gates if id(x) not in inside)
    skips = [x for x in outer if x is not None]
    pairs = [("applied", passed(opt_state))] if gates else []
    pairs += [("skipped", functools.reduce(jnp.add, skips))] if skips else []
    for gate, name in itertools.product(gates if len(gates) > 1 else (), ("applied", "skipped")):
        part = re.sub(r"\B([A-Z])", r"_\1", type(gate).__name__.removesuffix("State")).lower()
        pairs += [(f"{part}_{name}", getattr(gate, name))] if hasattr(gate, name) else []
    for node in trees.telling(opt_state, protocols.HasMetrics):
        pairs += node.metrics().items()
    scalars: dict[str, jax.Array] = {}
    for name, scalar in pairs:
        numbered = itertools.chain((name,), (f"{name}_{i}" for i in itertools.count(1)))
        scalars[next(x for x in numbered if x not in scalars)] = scalar
    return scalars
