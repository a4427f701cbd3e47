"""The ways to run a step: alone, under a named vmap, and mapped over devices with real specs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import boostax
from boostax._core.place import place as spread
from boostax.testing import drawn
from boostax.testing._case import example_grads
from cells.subject import AXIS, Subject, strong

PyTree = Any
P = PartitionSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """How to start and to step.

    Attributes:
      start: from params to what is carried, params and state.
      step: from that and gradients to the next; pure.
      replicas: how many gradients a step takes, stacked; 0 for a single one as it is.
      common: the params that all replicas have in common (or the first's), and the state.
      spread: puts stacked gradients where a step takes them, over several processes.
    """

    start: Callable[[PyTree], Any]
    step: Callable[[Any, PyTree], Any]
    replicas: int
    common: Callable[[Any], tuple[PyTree, PyTree]]
    spread: Callable[[PyTree], PyTree] = lambda grads: grads

    @functools.cached_property
    def jitted(self) -> Callable[[Any, PyTree], Any]:
        """The step, compiled once for all cells that take it as it is."""
        return jax.jit(self.step)

    def feed(self, trees: list[PyTree]) -> PyTree:
        """Gradients as a step takes them; the last tree serves all replicas that are left."""
        if not self.replicas:
            return trees[0]
        trees = (trees + [trees[-1]] * self.replicas)[: self.replicas]
        return jax.tree.map(lambda *x: jnp.stack(x), *trees)

    def grads(self, params: PyTree, seed: int) -> PyTree:
        """Different ones for every replica and seed."""
        count = max(self.replicas, 1)
        return self.feed([example_grads(params, 100 * seed + r) for r in range(count)])

    def run(self, params: PyTree, seeds: Any, step: Any = None) -> Any:
        """Jitted steps from fresh params."""
        carry, step = self.start(params), step or self.jitted
        for seed in seeds:
            carry = step(carry, self.grads(params, seed))
        return carry


def alone(tx: Any) -> Program:
    """One device."""

    def step(carry: Any, grads: PyTree) -> Any:
        return boostax.apply_gradients(drawn(tx), grads, carry[1], carry[0])

    return Program(lambda params: (params, tx.init(params)), step, 0, lambda carry: carry)


def under_vmap(tx: Any, replicas: int = 2) -> Program:
    """Replicas under ``jax.vmap`` with a name: runs eagerly and with jit disabled."""

    def start(params: PyTree) -> Any:
        stacked = jax.tree.map(lambda x: jnp.stack([x] * replicas), params)
        return stacked, jax.vmap(tx.init, axis_name=AXIS)(stacked)

    def local(params: PyTree, state: Any, grads: PyTree) -> Any:
        return boostax.apply_gradients(drawn(tx), grads, state, params)

    def step(carry: Any, grads: PyTree) -> Any:
        return jax.vmap(local, axis_name=AXIS)(*carry, grads)

    def first(carry: Any) -> Any:
        return jax.tree.map(lambda x: x[0], carry)

    return Program(start, step, replicas, first)


def stacked(tx: Any, replicas: int = 2) -> Program:
    """All per replica and nothing checked: for wrappers that declare none of their state."""
    loose = under_vmap(tx, replicas)

    def local(carry: Any, grads: PyTree) -> Any:
        (params, state), grads = jax.tree.map(lambda x: x[0], (carry, grads))
        new = boostax.apply_gradients(drawn(tx), grads, state, params)
        return jax.tree.map(lambda x: x[None], new)

    specs = {"in_specs": P(AXIS), "out_specs": P(AXIS), "check_vma": False}
    step = jax.shard_map(local, mesh=mesh_of(replicas), **specs)
    return Program(loose.start, step, replicas, loose.common)


def mesh_of(replicas: int, kind: Any = AxisType.Auto) -> Mesh:
    """One data axis over the first devices."""
    devices = jax.devices()[:replicas]
    return jax.make_mesh((replicas,), (AXIS,), axis_types=(kind,), devices=devices)


def mapped(
    tx: Any,
    params: PyTree,
    mesh: Mesh,
    *,
    own: bool = False,
    check: bool = True,
    whole: bool = False,
    param_specs: PyTree = None,
) -> Program:
    """``jax.shard_map`` with replicated (or sharded) params and the state's own specs.

    ``whole`` says that no part of the state differs per replica: one spec then serves it all.
    """
    replicas = mesh.shape[AXIS]
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    if whole:
        specs: PyTree = P()
    else:
        specs = boostax.states.state_specs(
            tx, params, AXIS, replicas=replicas, param_specs=param_specs
        )
    kept: PyTree = P() if param_specs is None else param_specs
    if own:
        by_replica = jax.tree.map(lambda s: P(AXIS, *s), kept, is_leaf=is_spec)
        kept = P(AXIS) if param_specs is None else boostax.PerReplica(by_replica)

    def place(tree: PyTree, specs: PyTree) -> PyTree:
        shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)
        if jax.process_count() == 1:
            return jax.device_put(tree, shardings)
        # Leaf by leaf: there are peers whose states cannot hold anything but numbers.
        leaves, treedef = jax.tree.flatten(tree)
        each = jax.tree.leaves(shardings)
        each = each * len(leaves) if is_spec(specs) else each
        return jax.tree.unflatten(
            treedef, [spread(x, s) for x, s in zip(leaves, each, strict=True)]
        )

    def start(params: PyTree) -> Any:
        state = boostax.states.stack_replicas(tx.init(params), replicas)
        held = (
            boostax.states.stack_replicas(boostax.PerReplica(params), replicas) if own else params
        )
        return place(held, kept), place(state, specs)

    def local(params: PyTree, state: Any, grads: PyTree) -> Any:
        grads = jax.tree.map(lambda g: g[0], grads)
        inside = boostax.states.enter_replica(params).local if own else params
        new, state = boostax.apply_gradients(
            drawn(tx), grads, boostax.states.enter_replica(state), inside
        )
        new = boostax.states.leave_replica(boostax.PerReplica(new)) if own else new
        return new, boostax.states.leave_replica(state)

    fed = P(AXIS)
    if param_specs is not None:
        fed = jax.tree.map(lambda s: P(AXIS, *s), param_specs, is_leaf=is_spec)
    inner = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(kept, specs, fed),
        out_specs=(kept, specs),
        check_vma=check,
    )

    def step(carry: Any, grads: PyTree) -> Any:
        if AxisType.Explicit in mesh.axis_types:
            grads = place(grads, fed)
        return inner(*carry, grads)

    def common(carry: Any) -> Any:
        held = jax.tree.map(first_row, carry[0].local) if own else carry[0]
        return held, carry[1]

    return Program(start, step, replicas, common, lambda grads: place(grads, fed))


def usual(
    subject: Subject,
    params: PyTree,
    inner: Any = None,
    *,
    guard: bool = False,
    wrap: Callable[[Any], Any] | None = None,
) -> Program:
    """Alone where that has a meaning, mapped over two devices otherwise."""
    if inner is None and wrap is None:
        leaves, treedef = jax.tree.flatten(params)
        return _plain(
            subject.name, treedef, tuple(map(strong, leaves)), Held(subject, params, guard)
        )
    return _usual(subject, params, inner, guard, wrap or (lambda tx: tx))


class Held(NamedTuple):
    """What a cache must not compare: the names and types beside it say all."""

    subject: Subject
    params: PyTree
    guard: bool

    def __hash__(self) -> int:
        return hash(self.guard)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.guard == other.guard


@functools.lru_cache(8)
def _plain(name: str, treedef: Any, types: Any, held: Held) -> Program:
    del name, treedef, types
    return _usual(held.subject, held.params, None, held.guard, lambda tx: tx)


def _usual(
    subject: Subject, params: PyTree, inner: Any, guard: bool, wrap: Callable[[Any], Any]
) -> Program:
    if not subject.reduces:
        return alone(wrap(subject.alone(inner, guard=guard)))
    return on_devices(subject, params, 2, inner, guard=guard, wrap=wrap)


def on_devices(
    subject: Subject,
    params: PyTree,
    replicas: int,
    inner: Any = None,
    *,
    guard: bool = False,
    wrap: Callable[[Any], Any] = lambda tx: tx,
    kind: Any = AxisType.Auto,
    check: bool = True,
) -> Program:
    """Mapped over so many devices."""
    return mapped(
        wrap(subject.mapped(inner, guard=guard)),
        params,
        mesh_of(replicas, kind),
        own=subject.own_params,
        check=check,
        whole=subject.peer,
    )


def on_global_arrays(
    subject: Subject,
    params: PyTree,
    replicas: int,
    specs: PyTree,
    *,
    shard_optimizer: bool = False,
    kind: Any = AxisType.Auto,
) -> Program:
    """``boostax.on_mesh``: params where ``specs`` says, gradients stacked, plain jit."""
    mesh = mesh_of(replicas, kind)
    where = jax.tree.map(
        lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P)
    )
    rows = NamedSharding(mesh, P(AXIS))
    tx = boostax.on_mesh(
        subject.mapped(),
        jax.device_put(params, where),
        axis_name=AXIS,
        shard_optimizer=shard_optimizer,
    )

    def start(params: PyTree) -> Any:
        own = boostax.states.stack_replicas(boostax.PerReplica(params), replicas)
        state = tx.init(jax.device_put(params, where))
        held = jax.device_put(own, rows) if subject.own_params else jax.device_put(params, where)
        return held, state

    def step(carry: Any, grads: PyTree) -> Any:
        grads = boostax.PerReplica(jax.device_put(grads, rows))
        return boostax.apply_gradients(drawn(tx), grads, carry[1], carry[0])

    def common(carry: Any) -> Any:
        own = subject.own_params
        return (jax.tree.map(first_row, carry[0].local) if own else carry[0]), carry[1]

    return Program(start, step, replicas, common)


def first_row(x: Any) -> Any:
    """Of what may be sharded, whatever the mesh says of indexing."""
    return x[0] if isinstance(x, Tracer) else jnp.asarray(np.asarray(x)[0])


def eager(subject: Subject) -> Program:
    """A program without jit and without shard_map."""
    return under_vmap(subject.mapped()) if subject.reduces else alone(subject.alone())
