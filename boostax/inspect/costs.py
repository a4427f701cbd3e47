# SPDX-License-Identifier: Apache-2.0
"""What each part of a chain keeps and sends, on one device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from boostax._core import axes, costs, jaxprs, replicas
from boostax._core.extras import asked
from boostax._core.handshake import assume_scaled
from boostax._core.variants import variants_of
from boostax.chain.parts import follow
from boostax.chain.roles import UNKNOWN
from boostax.chain.rows import Row

PyTree = Any


class PartCost(NamedTuple):
    """What a part of a chain does and costs, on each device.

    Attributes:
      name: of the factory.
      depth: how many others it stands in.
      role: what kind of part it is; ``"unknown"`` if boostax does not know it.
      what: the first line of its documentation.
      state_bytes: what it keeps, beside what is kept by the parts in it; ``None`` if its state
        could not be told from that of the part around it, which then counts it.
      copies: the same in multiples of the params' bytes.
      own_bytes: of these, what each replica has to itself.
      collectives: how many it sends per step, by kind.
      wire_bytes: what it sends per step, as the formula of a ring counts; ``None`` if an earlier
        part has the same name in the same place, which then counts both. Where it acts once in
        several calls (a window, local updates), of a call that sends; with ``scheduled_freeze``, at
        the least depth.
    """

    name: str
    depth: int
    role: str
    what: str
    state_bytes: float | None
    copies: float | None
    own_bytes: float
    collectives: Mapping[str, float]
    wire_bytes: float | None


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Bytes of an array on one device."""

    bytes: float
    own: bool


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a chain runs.

    Attributes:
      names: axes over which state is each replica's own.
      sizes: of all axes of the mesh.
      param_specs: how params are sharded, or ``None``.
      shard_optimizer: see ``make_train_step``.
    """

    names: tuple[str, ...] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    param_specs: PyTree = None
    shard_optimizer: bool = False

    @property
    def replicas(self) -> int:
        """How many there are."""
        return math.prod(self.sizes[name] for name in self.names)


def part_costs(
    tx: optax.GradientTransformation,
    found: Sequence[Row],
    params: PyTree,
    place: Place,
    program: jaxprs.ClosedJaxpr | None,
) -> tuple[PartCost, ...]:
    """One for each row, and one more for what a program sends beside them."""
    kept = _kept_bytes(tx, params, place)
    # The part of the whole state that is each row's; ``None`` if it cannot be told.
    states = [functools.reduce(follow, row.routes, kept) for row in found]
    whole = params_bytes(params, place)
    sent = [] if program is None else costs.collectives(program)
    paths = [tuple(x.part.name for x in (*row.holders, row) if x.part.description) for row in found]
    # The first row on the longest way into the scopes of each; others may hide in it.
    ways = ([c.scopes[:n] for n in range(len(c.scopes), 0, -1)] for c in sent)
    senders = [next((paths.index(way) for way in each if way in paths), None) for each in ways]
    # Of nested parts the innermost keeps an array.
    keepers = {id(x): i for i, state in enumerate(states) for x in jax.tree.leaves(state)}
    result: list[PartCost] = []

    def sends(sender: int | None) -> tuple[dict[str, float], float]:
        """How many collectives by kind, and bytes."""
        mine = [c for c, other in zip(sent, senders, strict=True) if other == sender]
        counts = by_kind(sent, lambda c: c.count, mine)
        return counts, sum(by_kind(sent, among=mine).values(), 0.0)

    for i, (row, state) in enumerate(zip(found, states, strict=True)):
        mine = [x for x in jax.tree.leaves(state) if keepers[id(x)] == i]
        total = sum(x.bytes for x in mine)
        first = row.part.description is None or paths.index(paths[i]) == i
        counts, wire_bytes = sends(i) if first else ({}, None)
        known = (None, None) if state is None else (total, total / whole if whole else 0.0)
        own = sum(x.bytes for x in mine if x.own)
        said = row.part.name, len(row.holders), row.role, row.part.what
        result.append(PartCost(*said, *known, own, counts, wire_bytes))
    if None in senders:
        name, what = "(the step)", "Averages the loss and what is reported with it"
        if any(row.role == UNKNOWN for row in found):
            name, what = "(unknown parts)", "What they send, and a step for its loss and metrics"
        result.append(PartCost(name, 0, "step", what, 0.0, 0.0, 0.0, *sends(None)))
    return tuple(result)


def params_bytes(params: PyTree, place: Place) -> float:
    """Of the params, on one device."""
    params = jax.eval_shape(lambda p: p, params)
    found = _on_device(params, place.param_specs, place.sizes)
    return sum(x.bytes for x in jax.tree.leaves(found))


def traced(
    tx: optax.GradientTransformation, params: PyTree, place: Place, *, returns_state: bool = False
) -> jaxprs.ClosedJaxpr:
    """The update of one device among others, which need not exist: see ``mapped_update``."""
    types = (AxisType.Auto,) * len(place.sizes)
    mesh = AbstractMesh(tuple(place.sizes.values()), tuple(place.sizes), axis_types=types)
    update, given, _ = mapped_update(tx, params, mesh, place.names, returns_state=returns_state)
    return jax.make_jaxpr(update)(*given)


def mapped_update(
    tx: optax.GradientTransformation,
    params: PyTree,
    mesh: Mesh | AbstractMesh,
    names: tuple[str, ...],
    *,
    returns_state: bool,
) -> tuple[Callable[..., Any], tuple[PyTree, ...], tuple[PyTree, ...]]:
    """The update as a train step runs it: mapped over replicas, each with gradients of its own.

    Args:
      tx: a transformation.
      params: arrays or types.
      mesh: its devices need not exist.
      names: the axes over which gradients differ.
      returns_state: whether the state comes back as it came, so that it can be donated and given
        again. Otherwise that of each replica does, and none is refused that differs from another's.

    Returns:
      The mapped function of gradients, state and params, the types to call it with, their specs.
    """
    extra_tx = optax.with_extra_args_support(tx)
    count = math.prod(mesh.shape[name] for name in names)
    each = PartitionSpec(names)
    specs = replicas.state_specs(tx, params, names, replicas=count)
    state = jax.eval_shape(lambda p: replicas.stack_replicas(tx.init(p), count), params)
    own = lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype)  # noqa: E731
    # Whatever it is, equal on all or not.
    stacked = lambda tree: jax.tree.map(lambda x: x[None], axes.to_varying(tree, names))  # noqa: E731

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        grads = jax.tree.map(lambda x: x[0], grads)
        value = axes.to_varying(jnp.zeros(()), names)
        given: dict[str, Any] = {"value": value, "value_fn": lambda _: value}
        given |= {"grad": grads} if asked(tx).get("grad") else {}
        if (variants := variants_of(tx)) is not None:
            given["depth"] = variants.drawn(params)[0]
        state = replicas.enter_replica(state)
        updates, state = extra_tx.update(assume_scaled(grads, state), state, params, **given)
        return stacked(updates), replicas.leave_replica(state) if returns_state else stacked(state)

    in_specs = each, specs, PartitionSpec()
    out_specs = each, specs if returns_state else each
    mapped = jax.shard_map(update, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return mapped, (jax.tree.map(own, params), state, params), in_specs


def by_kind(
    found: Sequence[costs.Collective],
    of: Callable[[costs.Collective], float] = lambda c: c.wire_bytes,
    among: Sequence[costs.Collective] | None = None,
) -> dict[str, float]:
    """What a call sends by kind of collective: ``costs.expected`` of those ``among`` all found."""
    chosen = found if among is None else among
    # All at once, so that the branches of a cond stay alternatives.
    return {
        kind: costs.expected(
            found,
            lambda c, kind=kind: of(c) * (c.primitive == kind and any(c is x for x in chosen)),
        )
        for kind in dict.fromkeys(c.primitive for c in chosen)
    }


def _kept_bytes(tx: optax.GradientTransformation, params: PyTree, place: Place) -> PyTree:
    """The state, with the bytes of each array in its place."""
    state = jax.eval_shape(lambda p: replicas.stack_replicas(tx.init(p), place.replicas), params)
    specs = None
    if place.names:
        how: dict[str, Any] = {"replicas": place.replicas, "param_specs": place.param_specs}
        how["shard_optimizer"] = place.shard_optimizer
        specs = replicas.state_specs(tx, params, place.names, **how)
    return _on_device(state, specs, place.sizes)


def _on_device(tree: PyTree, specs: PyTree | None, sizes: Mapping[str, int]) -> PyTree:
    """Each array as what is kept of it, by its spec; without specs all of it."""
    specs = jax.tree.map(lambda _: PartitionSpec(), tree) if specs is None else specs

    def node(x: Any, spec: Any) -> Any:
        def kept(x: Any, spec: PartitionSpec) -> _Kept:
            axes = itertools.chain(*(y if isinstance(y, tuple) else (y,) for y in spec))
            shards = math.prod(sizes[name] for name in axes if name is not None)
            return _Kept(math.prod(x.shape) * x.dtype.itemsize / shards, own)

        own = replicas.is_per_replica(x)
        return jax.tree.map(kept, x, spec)

    return jax.tree.map(node, tree, specs, is_leaf=replicas.is_per_replica)
