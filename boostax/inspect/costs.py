# SPDX-License-Identifier: Apache-2.0
"""Count the bytes that each part of a chain keeps and sends, on one device."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from boostax._core import axes, costs, jaxprs, replicas
from boostax._core.extras import asked
from boostax._core.handshake import assume_scaled
from boostax._core.variants import variants_of
from boostax.chain.parts import follow
from boostax.chain.roles import UNKNOWN
from boostax.chain.rows import Row

PyTree = Any


class PartCost(NamedTuple):
    """A part of a chain and its costs, on each device.

    Attributes:
      name: of the factory.
      depth: the number of parts around it.
      role: the kind of part; ``"unknown"`` if boostax does not know it.
      what: the first line of its documentation.
      state_bytes: bytes that it keeps, beside those of the parts in it; ``None`` if its state
        could not be told from that of the part around it, which then counts it.
      copies: the same in multiples of the params' bytes.
      own_bytes: of these, what each replica has to itself.
      collectives: how many it sends per step, by kind.
      wire_bytes: bytes that it sends per step, as the formula of a ring counts; ``None`` if an
        earlier part has the same name in the same place, which then counts both. Where it acts
        once in several calls (a window, local updates), of a call that sends; with
        ``scheduled_freeze``, at the least depth.
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
class Place:
    """The mesh that a chain runs on.

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
        """The number of replicas."""
        return math.prod(self.sizes[name] for name in self.names)


@dataclasses.dataclass(frozen=True, eq=False)
class _Kept:
    """Bytes of an array on one device, and whether they are its own."""

    bytes: float
    own: bool


def part_costs(
    tx: optax.GradientTransformation,
    found: Sequence[Row],
    params: PyTree,
    place: Place,
    program: jaxprs.ClosedJaxpr | None,
) -> tuple[PartCost, ...]:
    """Return one for each row, and one more for what a program sends beside them."""
    # The part of the whole state that is each row's; ``None`` if it cannot be told.
    kept, whole = _kept_bytes(tx, params, place), params_bytes(params, place)
    states = [functools.reduce(follow, row.routes, kept) for row in found]
    # An array inside nested parts is kept by the innermost.
    keepers = {id(x): i for i, state in enumerate(states) for x in jax.tree.leaves(state)}
    paths = [tuple(x.part.name for x in (*row.holders, row) if x.part.description) for row in found]
    sent = _sent_by(paths, program)
    result: list[PartCost] = []
    for i, (row, state) in enumerate(zip(found, states, strict=True)):
        mine = [x for x in jax.tree.leaves(state) if keepers[id(x)] == i]
        total = sum(x.bytes for x in mine)
        counts, wire_bytes = _summed(sent.pop(i, ()))
        again = row.part.description is not None and paths.index(paths[i]) < i
        known = (None, None) if state is None else (total, total / whole if whole else 0.0)
        own = sum(x.bytes for x in mine if x.own)
        said = row.part.name, len(row.holders), row.role, row.part.what
        result.append(PartCost(*said, *known, own, counts, None if again else wire_bytes))
    if sent:
        name, what = "(the step)", "Averages the loss and what is reported with it"
        if any(row.role == UNKNOWN for row in found):
            name, what = "(unknown parts)", "What they send, and a step for its loss and metrics"
        result.append(PartCost(name, 0, "step", what, 0.0, 0.0, 0.0, *_summed(sent[None])))
    return tuple(result)


_Sent = Sequence[tuple[costs.Collective, float]]


def _sent_by(
    paths: Sequence[tuple[str, ...]], program: jaxprs.ClosedJaxpr | None
) -> dict[int | None, _Sent]:
    """Group collectives, each with its share of calls, by the first innermost row around them."""
    listed = [] if program is None else costs.collectives(program)
    sent: dict[int | None, list[Any]] = collections.defaultdict(list)
    for each in zip(listed, costs.shares(listed), strict=True):
        scopes = each[0].scopes
        ways = (scopes[:n] for n in range(len(scopes), 0, -1))
        sent[next((paths.index(way) for way in ways if way in paths), None)].append(each)
    return dict(sent)


def _summed(sent: _Sent) -> tuple[dict[str, float], float]:
    """Return the number of collectives by kind, and their bytes on the wire."""
    counts: dict[str, float] = collections.defaultdict(float)
    for c, share in sent:
        counts[c.primitive] += share * c.count
    return dict(counts), sum((share * c.wire_bytes for c, share in sent), 0.0)


def params_bytes(params: PyTree, place: Place) -> float:
    """Return the bytes of the params on one device."""
    params = jax.eval_shape(lambda p: p, params)
    found = _on_device(params, place.param_specs, place.sizes)
    return sum(x.bytes for x in jax.tree.leaves(found))


def traced(tx: optax.GradientTransformation, params: PyTree, place: Place) -> jaxprs.ClosedJaxpr:
    """Trace the update as a train step runs it: mapped over replicas that need not exist."""
    extra_tx, names, count = optax.with_extra_args_support(tx), place.names, place.replicas
    auto, each = (AxisType.Auto,) * len(place.sizes), PartitionSpec(names)
    mesh = AbstractMesh(tuple(place.sizes.values()), tuple(place.sizes), axis_types=auto)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> jax.Array:
        grads = jax.tree.map(lambda x: x[0], grads)
        value = axes.to_varying(jnp.zeros(()), names)
        given: dict[str, Any] = {"value": value, "value_fn": lambda _: value}
        given |= {"grad": grads} if asked(tx).get("grad") else {}
        if (variants := variants_of(tx)) is not None:
            given["depth"] = variants.drawn(params)[0]
        state = replicas.enter_replica(state)
        extra_tx.update(assume_scaled(grads, state), state, params, **given)
        return jnp.zeros(())

    specs = replicas.state_specs(tx, params, names, replicas=count)
    state = jax.eval_shape(lambda p: replicas.stack_replicas(tx.init(p), count), params)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), params)
    # Results are left out: they may be equal on all replicas, or not.
    how: dict[str, Any] = {"in_specs": (each, specs, PartitionSpec()), "out_specs": PartitionSpec()}
    return jax.make_jaxpr(jax.shard_map(update, mesh=mesh, **how))(grads, state, params)


def _kept_bytes(tx: optax.GradientTransformation, params: PyTree, place: Place) -> PyTree:
    """Return the state with the bytes of each array in its position."""
    count, specs = place.replicas, None
    state = jax.eval_shape(lambda p: replicas.stack_replicas(tx.init(p), count), params)
    if place.names:
        how: dict[str, Any] = {"replicas": count, "param_specs": place.param_specs}
        how["shard_optimizer"] = place.shard_optimizer
        specs = replicas.state_specs(tx, params, place.names, **how)
    return _on_device(state, specs, place.sizes)


def _on_device(tree: PyTree, specs: PyTree | None, sizes: Mapping[str, int]) -> PyTree:
    """Return each array's bytes on a device, by its spec; without specs all of them."""
    specs = jax.tree.map(lambda _: PartitionSpec(), tree) if specs is None else specs

    def kept(own: bool, x: Any, spec: PartitionSpec) -> _Kept:
        names = itertools.chain(*(y if isinstance(y, tuple) else (y,) for y in spec))
        shards = math.prod(sizes[name] for name in names if name is not None)
        return _Kept(math.prod(x.shape) * x.dtype.itemsize / shards, own)

    def node(x: Any, spec: Any) -> Any:
        return jax.tree.map(functools.partial(kept, replicas.is_per_replica(x)), x, spec)

    return jax.tree.map(node, tree, specs, is_leaf=replicas.is_per_replica)
