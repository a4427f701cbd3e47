# SPDX-License-Identifier: Apache-2.0
"""Apply gradients: update and apply in one call, and an optimizer on global arrays.

In one call, a skipped step writes no params. On global arrays, params have any placement, and
gradients are local to replicas.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from boostax._core import axes, checks, handshake, replicas, trees, types
from boostax._core.describe import Stepped
from boostax._core.gate import GatedUpdate, Pending, flush_inner, gate_of, gated
from boostax._core.placement import Placement, settled
from boostax._core.replicas import PerReplica, is_per_replica
from boostax._core.trees import is_array, is_masked
from boostax._core.types import PyTree
from boostax.accumulate.window import require_weighted, terms_of
from boostax.order import findings
from boostax.precision.policy import Policy
from boostax.train import refusals
from boostax.train.oracle import Backward, Gradients, Oracle, planned

_WHO = "on_mesh"


@checks.arguments
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: PyTree,
    opt_state: types.State,
    params: types.Params,
    **extra_args: PyTree,
) -> tuple[types.Params, types.State]:
    """Run ``tx.update`` and ``optax.apply_updates`` in one call, with a branch for skipped steps.

    A skipped step, or a micro-step inside an accumulation window, writes no params. With donated
    buffers, the compilers for CPU, TPU v5e and H100 do not copy the params. A gate inside an Optax
    wrapper, such as ``optax.chain``, is not found. In this case, ``update`` and ``apply_updates``
    are called one after the other. Over independent runs in ``jax.vmap(..., axis_name="seeds")``, a
    branch runs only in calls in which any run needs the branch; see ``docs/seeds.md``.

    Args:
      tx: any Optax transformation. A skipped step writes no params only if the gate of boostax is
        outermost.
      grads: the gradients that ``tx`` needs: scaled if ``tx`` has a loss scaler, local to the
        replica if ``tx`` has a reduction.
      opt_state: state of ``tx``.
      params: the params. A leaf without a gradient (``None``), such as a function in an Equinox
        module, is returned unchanged.
      **extra_args: arguments of ``tx.update``, such as ``weight=`` and ``value=``.

    Returns:
      ``(params, opt_state)``; the dtypes of the params do not change.

    Raises:
      ValueError: a ``weight`` for ``optax.MultiSteps``, which weighs all micro-steps alike.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = boostax.static_loss_scale(optax.sgd(0.5), 2.0)
      >>> w = jnp.float32(1.0)
      >>> w, state = boostax.apply_gradients(tx, jnp.float32(2.0), tx.init(w), w)
      >>> float(w)
      0.5
    """
    who, call = "apply_gradients", "boostax.apply_gradients(tx, grads, opt_state, params)"
    with trees.explaining(trees.require_state, who, call, tx, opt_state, params, grads):
        findings.of_chain(who, tx, (), opt_state)
        require_weighted(opt_state, extra_args.get("weight"))
        return applied(tx, grads, opt_state, params, extra_args)


def applied(
    tx: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    extra_args: dict[str, PyTree],
    counted: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
    """Apply gradients like ``apply_gradients``, without explanations of errors.

    For ``counted``, see ``Pending``.
    """
    like = grads.local if isinstance(grads, Gradients) else grads
    like = like.local if is_per_replica(like) and not is_per_replica(params) else like
    trained = params
    has_holes = any(map(trees.is_none, jax.tree.leaves(like, is_leaf=trees.is_none)))
    if has_holes:
        # Equinox's filters return None as the gradient of a function in a module.
        trained = jax.tree.map(
            lambda g, p: None if g is None else p,
            like,
            params,
            is_leaf=lambda x: x is None or is_masked(x),
        )
    if (gate := gate_of(tx)) is not None:
        pending = Pending(grads, counted=counted)
        new, opt_state = gate.step(pending, opt_state, trained, apply=True, **extra_args)
    else:
        tx = optax.with_extra_args_support(tx)
        updates, new_state = tx.update(grads, opt_state, trained, **extra_args)
        # The f32 gradients of micro-batches would widen the moments of bf16 params.
        is_alike = jax.tree.structure(opt_state) == jax.tree.structure(new_state)
        opt_state = trees.cast_like(new_state, opt_state) if is_alike else new_state
        new = trees.applied(trained, updates)
    new = axes.placed_like(new, trained)
    return (trees.put_back(new, params) if has_holes else new), opt_state


@checks.arguments
def on_mesh(
    tx: optax.GradientTransformation,
    params: PyTree,
    *,
    axis_name: axes.AxisName | None = None,
    shard_optimizer: bool = False,
    layers: Backward | str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Run ``tx`` in plain ``jit`` on params with any sharding over a mesh.

    Use ``on_mesh`` in your own loop if params are global arrays: replicated, or sharded over the
    axis of the batch (FSDP), another axis (HSDP), a model axis (tensor parallel), or several axes.
    ``boostax.value_and_grad(mesh=, axis_name=)`` returns gradients that are local to each replica,
    stacked in a ``PerReplica``. The parts of ``tx`` need no ``axis_name``, because reductions, and
    gates around reductions, use the ``axis_name`` of ``on_mesh``. Before the reduction, every
    replica has different gradients. After the reduction, gradients, params and state are ordinary
    global arrays, so any optimizer is correct for any sharding. A reduction other than the mean
    receives each device's shards, not whole leaves.

    Args:
      tx: the optimizer, with a reduction first in the innermost chain.
      params: arrays, or ``jax.ShapeDtypeStruct``, with a ``NamedSharding`` on one mesh. Only the
        mesh and the shardings are read. A leaf that is not an array has no state and no update.
      axis_name: the replica axis, or axes, over which the batch is split; by default the only axis
        of the mesh.
      shard_optimizer: whether to shard over the replicas all optimizer state that is equal on all
        replicas (ZeRO). Each leaf is sharded along its first unsharded dimension that the number of
        replicas divides. One warning reports that no leaf has such a dimension.
      layers: options for stacked layers that the loss scans with ``boostax.train.scan_layers``; see
        ``boostax.train.Layers``. Pass the resulting optimizer to
        ``boostax.value_and_grad(layers=)``.

    Returns:
      A gate, used like the other gates of boostax. ``init`` makes a placed state: an array shaped
      like a param is sharded like the param, and per-replica state has a leading dimension of
      replicas. ``update`` accepts ``PerReplica`` gradients, or the stacked arrays that a
      ``PerReplica`` contains. On an Explicit mesh, ``update`` also accepts gradients of the mean
      loss if their type is unreduced over the replica axes. Cost: as ``tx``. With
      ``shard_optimizer``, each device has ``1/n`` of the state and of the arithmetic, and changed
      params are all-gathered.

    Raises:
      ValueError, TypeError: the params are not on one mesh, or an axis is not in the mesh; at trace
        time, gradients are already reduced, or updates are not reduced.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> w = jax.device_put(jnp.ones(4), NamedSharding(mesh, P("data")))
      >>> tx = boostax.on_mesh(optax.chain(boostax.all_reduce(), optax.adam(0.1)), w)
      >>> loss = lambda w, x: jnp.mean((w - x) ** 2)
      >>> grad_fn = boostax.value_and_grad(loss, mesh=mesh)
      >>> @jax.jit
      ... def step(w, state, x):
      ...   value, grads = grad_fn(w, state, x)
      ...   return boostax.apply_gradients(tx, grads, state, w)
      >>> w, state = step(w, tx.init(w), jnp.zeros((8, 4)))
      >>> float(w[0]).__round__(3)
      0.9

    References:
      Rajbhandari et al., ZeRO, https://arxiv.org/abs/1910.02054, 2020; Xu et al., Automatic
      Cross-Replica Sharding of Weight Update, https://arxiv.org/abs/2004.13336, 2020.
    """
    checks.transformation(_WHO, "tx", tx)
    place = placement_of(_WHO, params, axis_name)
    findings.of_chain(_WHO, tx, place.names)
    if layers is None:
        return placed_on(tx, place, shard_optimizer)
    tx, layered = planned(tx, layers, shard_optimizer)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays_alone(params))

    def around(oracle: Oracle, policy: Policy | None) -> Oracle:
        got, mesh = (oracle.mesh, oracle.names), (place.mesh, place.names)
        hint = "Use the mesh and axis of on_mesh: value_and_grad(loss, mesh=mesh, axis_name=...)."
        checks.require(got == mesh, "value_and_grad", "mesh", got, f"{mesh}", hint)
        return layered(oracle, policy).placed(shapes, place, None)

    gate = placed_on(tx, place, shard_optimizer)
    return gate._replace(update=MeshUpdate(**vars(gate.update), around=around))


@dataclasses.dataclass(frozen=True, eq=False)
class MeshUpdate(GatedUpdate):
    """The ``update`` of an optimizer on a mesh with ``layers=``.

    Attributes:
      around: makes the gradient function of a step, from the gradient function of the loss and a
        policy.
    """

    around: Callable[[Oracle, Policy | None], Oracle]


def placed_on(
    tx: optax.GradientTransformation, place: Placement, shard_optimizer: bool
) -> optax.GradientTransformationExtraArgs:
    """Return ``on_mesh`` for a known placement."""
    inner = optax.with_extra_args_support(tx)
    specs = functools.partial(specs_of, place, shard_optimizer)

    def init_fn(params: PyTree) -> PyTree:
        params = arrays_alone(params)

        def stacked(params: PyTree) -> PyTree:
            with axes.binding(place.names):
                return replicas.stack_replicas(tx.init(params), place.replicas)

        like = jax.eval_shape(stacked, params)
        state_specs = specs(params, like)[1]
        shardings = place.shardings(state_specs)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
            return jax.tree.map(lambda x, y: x.update(sharding=y), like, shardings)
        return jax.jit(place.pinned(stacked, state_specs), out_shardings=shardings)(params)

    def step_fn(grads: Pending, state: Any, params: Any, *, apply: bool, **extra: Any) -> Stepped:
        trees.require_params(params, _WHO, "Call tx.update(grads, state, params).")
        parts = grads.raw if isinstance(grads.raw, Gradients) else Gradients(grads.raw)
        local = _stacked(parts.local, place)
        refusals.require_dense(local.local, _WHO)
        if handshake.scales_in(state):
            handshake.require_linear(_WHO, parts.local, params)
        terms = terms_of(state)
        lead = (place.replicas, len(terms)) if terms else (place.replicas,)
        _require_stacked(local, arrays_alone(params), lead)
        outside = state

        def update(params: PyTree, state: PyTree, grads: Pending, arrays: PyTree) -> Stepped:
            handshake.hand_on(outside, state)
            pending = grads._replace(raw=grads.raw.unwrapped())
            if (gate := gate_of(tx)) is not None:
                return gate.step(pending, state, params, apply=apply, **arrays, **fixed)
            local = pending.value() if pending.factors else pending.raw
            x, new = inner.update(local, state, params, **arrays, **fixed)
            # The f32 gradients of micro-batches would widen the moments of bf16 params.
            return (settled(trees.applied(params, x)) if apply else x), trees.cast_like(new, state)

        arrays, fixed = dict(extra), dict[str, PyTree]()
        for name, x in extra.items():
            if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)):
                fixed[name] = arrays.pop(name)
        # Gradients are pinned to the params' shardings, so that XLA computes sharded gradients.
        local = place.pinned(lambda g: g, specs(local, ())[0])(local)
        pending = grads._replace(raw=parts._replace(local=local))
        new, state = per_replica(update, params, state, pending, arrays)
        return (trees.put_back(new, params) if apply else new), state

    def flush_fn(state: PyTree, params: PyTree, **extra: PyTree) -> Stepped:
        new, state = per_replica(lambda p, s: flush_inner(inner, s, p, extra), params, state)
        return trees.put_back(new, params), state

    def per_replica(fn: Any, params: PyTree, state: PyTree, *args: PyTree) -> Stepped:
        """Call ``fn`` for all replicas at once; return the new params or updates, and the state."""
        params = arrays_alone(params)
        replicas.require_replicas(_WHO, (params, state), place.replicas)
        is_local = is_per_replica(params)

        def of_replica(params: PyTree, *args: PyTree) -> Stepped:
            value, state = fn(params.local if is_local else params, *args)
            return (PerReplica(value) if is_local else value), state

        placement = dataclasses.replace(place, owns_params=is_local, shared_out=shard_optimizer)
        mapped = functools.partial(placement.map_replicas, of_replica)
        return place.pinned(mapped, specs(params, state))(params, state, *args)

    return gated(init_fn, step_fn, flush_fn)


def specs_of(
    place: Placement, shard_optimizer: bool, params: PyTree, state: PyTree
) -> tuple[PyTree, PyTree]:
    """Return the specs of stacked params and of an optimizer state; both may be types."""
    owners: dict[tuple[PyTree, ...], tuple[tuple[int, ...], PartitionSpec]] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(local_types(params)):
        spec = place.spec(path)
        if spec is None:
            allowed = "at the paths of the params that on_mesh received"
            got = f"another path, {trees.path_name(path) or 'the root'!r}"
            hint = "Convert Python numbers in params with jnp.asarray, or use equinox.filter_jit."
            raise ValueError(checks.message(_WHO, "params", allowed, got, hint))
        owners[path] = x.shape, spec
    local = is_per_replica
    params, state = jax.tree.map(
        lambda x: PerReplica(local_types(x)) if local(x) else x, (params, state), is_leaf=local
    )
    count = place.replicas * shard_optimizer
    specs = replicas.specs_like(owners, state, place.names, count, sizes=place.mesh.shape)
    if count and place.keeps_whole(state, specs):
        findings.of_part("shard_optimizer", "not_sharded", state)
    return replicas.specs_like(owners, params, place.names), specs


def placement_of(who: str, params: PyTree, axis_name: axes.AxisName | None) -> Placement:
    """Return the mesh of the params, the replica axes, and the spec of each param by path."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays_alone(params))
    shardings: dict[PyTree, PyTree] = {path: getattr(x, "sharding", None) for path, x in leaves}
    mesh: PyTree = next((x.mesh for x in shardings.values() if isinstance(x, NamedSharding)), None)
    hint = "Use jax.device_put(params, NamedSharding(mesh, P())), ShapeDtypeStruct(..., sharding=)."
    hint += " In NNX, use nnx.update(model, jax.device_put(nnx.state(model), sharding))."
    allowed = "placed on one mesh with NamedSharding"
    checks.require(bool(leaves), who, "params", type(params).__name__, allowed, hint)
    for path, sharding in shardings.items():
        got = f"{sharding} at {trees.path_name(path) or 'the root'}"
        is_valid = isinstance(sharding, NamedSharding) and sharding.mesh == mesh
        checks.require(is_valid, who, "params", got, allowed, hint)
    names = axes.of_mesh(who, axis_name, mesh)
    return Placement(mesh, names, {trees.plain_path(path): s.spec for path, s in shardings.items()})


def _stacked(grads: PyTree, place: Placement) -> PerReplica:
    """Return stacked gradients; stack gradients whose type is unreduced.

    An unreduced gradient is a sum over ``n`` replicas, and each device has one term of the sum:
    ``1/n`` of the gradient of its replica's mean loss.
    """

    def stacked(x: jax.Array) -> jax.Array:
        spec = getattr(jax.typeof(x).sharding, "spec", PartitionSpec())
        if not spec.unreduced:
            return x
        allowed = f"unreduced over all axes {place.names}, or over no axis"
        hint = "Reduce over the other axes with jax.reshard first."
        checks.require({*spec.unreduced} == {*place.names}, _WHO, "gradients", spec, allowed, hint)
        # In JAX 0.10.0, a spec has no ``partitions``, but is itself a sequence of the partitions.
        parts = spec.partitions if hasattr(spec, "partitions") else tuple(spec)
        specs: PyTree = {"in_specs": spec, "out_specs": PartitionSpec(place.names, *parts)}
        # With ``check_vma=True``, JAX has no type for an unreduced value.
        mapped = functools.partial(jax.shard_map, mesh=place.mesh, check_vma=False, **specs)
        return mapped(lambda part: place.replicas * part[None])(x)

    return grads if is_per_replica(grads) else PerReplica(jax.tree.map(stacked, grads))


def _require_stacked(grads: PerReplica, params: PyTree, lead: tuple[int, ...]) -> None:
    """Refuse gradients without the leading dimensions ``lead``, such as reduced gradients."""
    shapes = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(local_types(params))}
    hint = "Use boostax.value_and_grad(loss, mesh=mesh), or optimizer.value_and_grad(loss)(model, "
    hint += "batch) in NNX. The gradients of jax.grad are already reduced."
    other = f"The mesh of the params has {lead[0]} replicas: use value_and_grad(mesh=mesh)."
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads.local):
        shape = shapes.get(path, leaf.shape[len(lead) :])
        expected = *lead, *shape
        allowed = f"local to each replica, shaped {expected} for a param of {shape}"
        fix = other if leaf.shape[:1] and leaf.shape[1:] == expected[1:] else hint
        checks.require(leaf.shape == expected, _WHO, "gradients", leaf.shape, allowed, fix)


def local_types(params: PyTree) -> PyTree:
    """Return the types of the params in a ``PerReplica``; other params are returned unchanged."""
    if is_per_replica(params):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params.local)
    return params


def arrays_alone(params: PyTree) -> PyTree:
    """Replace leaves that are not arrays by ``None``, as ``equinox.filter`` does."""
    return jax.tree.map(lambda x: x if is_array(x) else None, params)
