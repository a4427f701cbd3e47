# SPDX-License-Identifier: Apache-2.0
"""Laws of replicas, in all kinds of mapped functions and on params that XLA shards."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from boostax import states
from boostax._core import trees
from boostax._core.axes import local_params
from boostax._core.replicas import PerReplica, is_per_replica, without
from boostax._core.types import PyTree
from boostax.reduce.feedback import CompressedState
from boostax.testing import _arrays as arrays
from boostax.testing import _case
from boostax.testing._case import Carry, Case, drawn, follow, laws_in, raises, train
from boostax.train.apply import apply_gradients, on_mesh

Fn: TypeAlias = Callable[..., PyTree]
AXIS, _OTHER = "data", "other"
MODES = ("checked", "unchecked", "pmap", "vmap")


def replica_grads(seed: int, replicas: int) -> PyTree:
    """Make different gradients for each replica, stacked along a leading dimension."""
    return arrays.stack(arrays.draws(arrays.even_params(), replicas, 100 * seed))


def train_mapped(case: Case, mode: str, windows: list[PyTree], params: PyTree = None) -> Carry:
    """Train on stacked local gradients; results have a leading dimension of replicas."""
    return on_replicas(functools.partial(train, case.mapped(AXIS)), mode, windows, params)


def on_replicas(train: Callable[..., Any], mode: str, grads: PyTree, params: PyTree = None) -> Any:
    """Call ``train(params, local_gradients)`` on every replica and stack the results."""
    params = arrays.even_params() if params is None else params
    if mode == "pmap":
        return jax.pmap(train, axis_name=AXIS, in_axes=(None, 0))(params, grads)
    if mode == "vmap":
        return jax.jit(jax.vmap(train, axis_name=AXIS, in_axes=(None, 0)))(params, grads)

    def local(params: PyTree, grads: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x[None], train(params, jax.tree.map(lambda g: g[0], grads)))

    split = PartitionSpec(AXIS)
    sharded = over_devices(local, (PartitionSpec(), split), split, check_vma=mode == "checked")
    return jax.jit(sharded)(params, grads)


def over_devices(fn: Fn, in_specs: PyTree, out_specs: PyTree, check_vma: bool = True) -> Fn:
    """Map ``fn`` over all devices, on one data axis."""
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def assert_like(case: Case, params: PyTree, stacked: PyTree, what: str, tol: float = 1e-6) -> None:
    """Compare params from outside of a mapped function with every replica's params from inside."""
    actual = stacked if case.own_params else jax.tree.map(lambda x: x[0], stacked)
    arrays.assert_close(params.local if case.own_params else params, actual, what, tol)


def replicas_stay_equal_in_every_mode(case: Case) -> None:
    """Promise 6: params are bit-equal on all replicas, and all of ``MODES`` give the same params.

    Params that differ per replica by design need not be equal.
    """
    windows = [replica_grads(seed, jax.device_count()) for seed in range(2 * case.calls)]
    results = {mode: train_mapped(case, mode, windows) for mode in MODES}
    for mode, (params, state) in results.items():
        equal = [x for x in jax.tree.leaves(state, is_leaf=is_per_replica) if not is_per_replica(x)]
        for leaf in map(np.asarray, equal + jax.tree.leaves(() if case.own_params else params)):
            assert (leaf == leaf[:1]).all(), f"{mode}: replicas differ"
        arrays.assert_close(params, results["checked"][0], mode)


def results_are_typed_equal(case: Case) -> None:
    """Promise 6: ``check_vma`` accepts replicated params and the specs of ``state_specs``."""
    tx = case.mapped(AXIS)
    start = _case.start(case, tx, jax.device_count())
    specs = states.state_specs(tx, arrays.even_params(), axis_name=AXIS)
    assert jax.tree.structure(specs) == jax.tree.structure(start[1])

    def local(params: PyTree, state: PyTree, grads: PyTree) -> Carry:
        grad = jax.tree.map(lambda g: g[0], grads)
        return states.leave_replica(_case.applied(tx)(*states.enter_replica((params, state)), grad))

    spec = PartitionSpec(AXIS) if case.own_params else PartitionSpec()
    mapped = over_devices(local, (spec, specs, PartitionSpec(AXIS)), (spec, specs))
    windows = [replica_grads(seed, jax.device_count()) for seed in range(2 * case.calls)]
    params, state = follow(jax.jit(mapped, donate_argnums=(0, 1)), start, windows)
    assert_like(case, params, train_mapped(case, "checked", windows)[0], "params")
    for x in jax.tree.leaves(trees.find(state, PerReplica)):
        assert x.shape[0] == jax.device_count(), "leading dimension"


def skip_is_agreed_when_one_replica_is_bad(case: Case) -> None:
    """Promise 7: one NaN on one replica skips the step on all replicas, in all ``MODES``."""
    for mode in MODES:
        skips(case, functools.partial(train_mapped, case, mode), jax.device_count(), mode)


def skips(case: Case, train: Callable[..., Carry], replicas: int, what: str) -> None:
    """Require that bad gradients on one replica do not change the result of a run."""
    good = [replica_grads(seed, replicas) for seed in range(case.calls)]
    bad = arrays.poison(replica_grads(99, replicas), jnp.nan)
    skipped = [replica_grads(50 + i, replicas) for i in range(case.skip_calls - 1)]
    expected, result = train(good), train([*good, bad, *skipped])
    arrays.assert_same(result[0], expected[0], f"{what}: params")
    arrays.assert_same(case.skip_view(result[1]), case.skip_view(expected[1]), f"{what}: state")


def skip_holds_for_a_hundred_bad_steps_on_every_replica(case: Case) -> None:
    """Promise 5: a hundred steps of NaN on all replicas change nothing, in all ``MODES``."""
    tx = case.mapped(AXIS)
    nan = jax.tree.map(lambda g: jnp.full_like(g, jnp.nan), replica_grads(0, jax.device_count()))

    def train(params: PyTree, grads: PyTree) -> tuple[Carry, Carry]:
        start = local_params(params, axis_name=AXIS) if case.own_params else params, tx.init(params)
        return start, jax.lax.fori_loop(0, 100, lambda _, x: _case.applied(tx)(*x, grads), start)

    for mode in MODES:
        (params, state), (params_after, state_after) = on_replicas(train, mode, nan)
        arrays.assert_same(params_after, params, f"{mode}: params")
        arrays.assert_same(case.skip_view(state_after), case.skip_view(state), f"{mode}: state")


def reduced_gradients_are_refused(case: Case) -> None:
    """Promise 6: gradients that autodiff summed over replicas raise an error with the fix."""
    raises(lambda: _trace_step(case, lambda params: params), "local_params")


def local_params_give_local_gradients(case: Case) -> None:
    """Promise 6: with ``check_vma``, the gradient at ``local_params(params)`` is accepted."""
    _trace_step(case, lambda params: local_params(params, axis_name=AXIS))


def _trace_step(case: Case, prepare: Callable[[PyTree], PyTree]) -> None:
    """Trace a step in ``shard_map`` with ``check_vma`` and the gradient at ``prepare(params)``."""
    tx = case.mapped(AXIS)

    def local(params: PyTree, x: jax.Array) -> PyTree:
        gradient = jax.grad(lambda p: jnp.mean(x @ p["w"]) + jnp.sum(p["b"]) * x.mean())
        new = apply_gradients(tx, gradient(prepare(params)), tx.init(params), params)[0]
        return jax.tree.map(lambda x: x[None], new) if case.own_params else new

    split, replicated = PartitionSpec(AXIS), PartitionSpec()
    mapped = over_devices(local, (replicated, split), split if case.own_params else replicated)
    jax.eval_shape(mapped, arrays.even_params(), jnp.ones((jax.device_count(), 16)))


def what_is_not_sent_waits(case: Case) -> None:
    """Promise 15: the sent mean + the mean of new residuals = mean(gradients + old residuals)."""
    replicas, params = 4, arrays.even_params()
    tx = drawn(case.make(optax.identity(), AXIS))
    init = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)
    update = jax.jit(jax.vmap(tx.update, in_axes=(0, 0, None), axis_name=AXIS))
    state = arrays.with_scale(init(jnp.arange(replicas)), 1.0)
    for seed in range(4):
        grads = replica_grads(seed, replicas)
        sent, after = update(grads, state, params)
        compressed = trees.find((state, after), CompressedState)
        old, new = (x.residual.local for x in compressed)
        state = after
        for name, residual in new.items():
            # A leaf that is sent dense has no residual.
            total = np.float64(grads[name]) + np.float64(0 if residual is None else old[name])
            waiting = 0.0 if residual is None else np.float64(residual).mean(0)
            # The errors of rounding in f32 are relative to the sum over the replicas.
            scale = replicas * abs(total).max()
            error = abs(np.float64(sent[name]) + waiting - total.mean(0)).max() / scale
            assert error <= 2e-6, f"{name}: a share {error} of the gradients is lost at call {seed}"


def an_unbound_axis_is_named(case: Case) -> None:
    """Promise 9: outside of a mapped function, the error names the missing axis."""
    tx = case.mapped(AXIS)
    raises(lambda: train(tx, arrays.even_params(), [arrays.even_params()]), repr(AXIS))


MAPPED_LAWS = laws_in(globals())


# Params that XLA shards.


class Placed(NamedTuple):
    """A placement of ``even_params``.

    Attributes:
      name: the common name of the placement.
      specs: the specs of the params.
      mesh: a mesh whose first axis is the replica axis; there may be a second axis.
      shard_optimizer: see ``on_mesh``.
    """

    name: str
    specs: dict[str, PartitionSpec]
    mesh: Mesh
    shard_optimizer: bool

    def dim(self, name: str) -> int:
        """Return the dimension that is sharded within a replica, as a negative number."""
        spec = list(without(self.specs[name], (AXIS,)))
        return (spec.index(_OTHER) if _OTHER in spec else 0) - arrays.even_params()[name].ndim

    def place(self, params: PyTree) -> PyTree:
        """Place a tree like the params on the mesh."""
        shardings = {name: NamedSharding(self.mesh, spec) for name, spec in self.specs.items()}
        return jax.device_put(params, shardings)

    def stack(self, stacked: PyTree) -> PerReplica:
        """Place a stacked tree like the params, with each replica's part on its devices."""
        specs = {x: PartitionSpec(AXIS, *without(y, (AXIS,))) for x, y in self.specs.items()}
        return PerReplica(self._replace(specs=specs).place(stacked))


def placements(replicas: int, others: int, kind: AxisType) -> list[Placed]:
    """List placements over ``replicas`` with and without another axis of ``others`` devices."""
    replicated = dict.fromkeys(arrays.even_params(), PartitionSpec())
    columns = {"w": PartitionSpec(None, _OTHER), "b": PartitionSpec(_OTHER)}
    both = {"w": PartitionSpec(AXIS, _OTHER), "b": PartitionSpec((AXIS, _OTHER))}
    flat = jax.make_mesh((replicas * others,), (AXIS,), axis_types=(kind,))
    grid = jax.make_mesh((replicas, others), (AXIS, _OTHER), axis_types=(kind,) * 2)
    return [
        Placed("replicated", replicated, flat, False),
        Placed("ZeRO-1", replicated, flat, True),
        Placed("FSDP", dict.fromkeys(replicated, PartitionSpec(AXIS)), flat, False),
        Placed("HSDP", dict.fromkeys(replicated, PartitionSpec(_OTHER)), grid, False),
        Placed("tensor parallel", columns, grid, False),
        Placed("tensor parallel, ZeRO-1", columns, grid, True),
        Placed("tensor parallel, FSDP", both, grid, False),
    ]


def train_placed(case: Case, placed: Placed, windows: list[PyTree]) -> Carry:
    """Train in ``jit`` on stacked local gradients; require that all arrays keep their shardings."""
    params = placed.place(arrays.even_params())
    tx = on_mesh(case.mapped(AXIS), params, axis_name=AXIS, shard_optimizer=placed.shard_optimizer)
    stacked = placed.stack(arrays.stack([arrays.even_params()] * placed.mesh.shape[AXIS]))
    start = (stacked if case.own_params else params, tx.init(params))
    step = jax.jit(lambda p, s, g: apply_gradients(tx, g, s, p), donate_argnums=(0, 1))
    shardings = [x.sharding for x in jax.tree.leaves(start)]
    result = follow(step, start, list(map(placed.stack, windows)))
    for x, sharding in zip(jax.tree.leaves(result), shardings, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), f"{x.sharding}, not {sharding}"
    return result


def any_placement_means_the_same(case: Case) -> None:
    """Promise 11: all placements of the params, such as ZeRO and FSDP, give the same results."""
    _means_the_same(case, AxisType.Auto)


def any_placement_means_the_same_on_an_explicit_mesh(case: Case) -> None:
    """Promise 11: all placements of the params give the same results on an Explicit mesh."""
    _means_the_same(case, AxisType.Explicit)


def _means_the_same(case: Case, kind: AxisType) -> None:
    """Compare each placement with replicas under ``vmap``.

    The replicas train on unsharded params, or shard by shard if the case treats a shard as a leaf.
    """
    start = arrays.even_params()
    for placed in placements(jax.device_count() // 2, 2, kind):
        windows = [replica_grads(seed, placed.mesh.shape[AXIS]) for seed in range(2 * case.calls)]
        params, _ = train_placed(case, placed, windows)
        count = placed.mesh.shape.get(_OTHER, 1) if case.by_shard else 1
        dims = {k: placed.dim(k) for k in start}
        # The params and each window's gradients, split into the shards within a replica.
        cut = [{k: jnp.split(x[k], count, dims[k]) for k in x} for x in (start, *windows)]
        parts: list[PyTree] = []
        for i in range(count):
            shard, *grads = ({k: x[i] for k, x in tree.items()} for tree in cut)
            parts.append(train_mapped(case, "vmap", grads, shard)[0])
        expected = {k: jnp.concatenate([x[k] for x in parts], dims[k]) for k in start}
        assert_like(case, params, expected, placed.name, 2e-6)


def skip_is_agreed_in_any_placement(case: Case) -> None:
    """Promise 11: one NaN in one shard of one replica skips the step everywhere."""
    for placed in placements(jax.device_count() // 2, 2, AxisType.Auto)[-2:]:
        train = functools.partial(train_placed, case, placed)
        skips(case, train, placed.mesh.shape[AXIS], placed.name)


PLACED_LAWS = {k: law for k, law in laws_in(globals()).items() if k not in MAPPED_LAWS}
