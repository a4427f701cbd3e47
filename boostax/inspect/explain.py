# SPDX-License-Identifier: Apache-2.0
"""Explain a chain or a train step: its parts, their costs, and errors in their order."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from boostax._core import axes, checks, costs, handshake, interpret, jaxprs, replicas, trees
from boostax._core.describe import PyTree, Reduction, asked, variants_of
from boostax._core.groups import few
from boostax.accumulate.window import Window, terms_of
from boostax.chain.findings import Finding, finding, findings, scales
from boostax.chain.parts import UNKNOWN, Row, follow, read, rows
from boostax.inspect.tables import Cells, aligned
from boostax.precision.loss_scale import loss_scale
from boostax.train.compiled import TrainStep
from boostax.train.layered import LayeredOracle
from boostax.train.state import TrainState

_WHO = "explain"


class PartCost(NamedTuple):
    """A part of a chain and its costs, on each device.

    Attributes:
      name: the name of its factory.
      depth: the number of parts around it.
      role: the kind of part; ``"unknown"`` if boostax does not know it.
      what: the first line of its docstring.
      state_bytes: bytes of its state, without the parts inside; ``None`` if the state could not be
        separated from the state of the part around it, which then includes it.
      copies: ``state_bytes`` in multiples of the bytes of the params.
      own_bytes: the ``state_bytes`` that differ from replica to replica.
      collectives: number of collectives per step, by kind.
      wire_bytes: bytes that the part sends per step, by the formula of a ring; ``None`` if an
        earlier part with the same name and position includes them. For a part that sends once in
        several calls (a window, local updates), the bytes of a call that sends; with
        ``scheduled_freeze``, the bytes at the smallest depth.
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
class Explanation:
    """The parts of a chain and their costs; ``print`` shows a table.

    Attributes:
      parts: the parts, in the order in which a gradient passes them.
      findings: parts in a wrong order or with a wrong setting, with the reason and a fix.
      params_bytes: bytes of the params on each device.
      problem: the reason why sent bytes could not be counted, else empty: no batch for a step over
        a mesh, no axis sizes for a chain with a reduction, sharded params, or a wrong order that
        cannot be traced.
    """

    parts: tuple[PartCost, ...]
    findings: tuple[Finding, ...]
    params_bytes: float
    problem: str = ""

    @property
    def state_bytes(self) -> float:
        """Bytes of the chain's state on each device."""
        return sum(part.state_bytes or 0.0 for part in self.parts)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per step, including loss and metrics of a train step."""
        return sum(part.wire_bytes or 0.0 for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data for JSON."""
        parts, found = ([x._asdict() for x in listed] for listed in (self.parts, self.findings))
        summed = {"state_bytes": self.state_bytes, "wire_bytes": self.wire_bytes}
        return vars(self) | {"parts": parts, "findings": found} | summed

    def __str__(self) -> str:
        sent = "not counted" if self.problem else f"{self.wire_bytes:,.0f}"
        kept = f"{self.state_bytes:,.0f} bytes beside {self.params_bytes:,.0f} of params"
        notes = [f"Kept on each device: {kept}; sent per step: {sent}."]
        notes += [f"The bytes sent could not be counted: {self.problem}"] * bool(self.problem)
        if any(part.own_bytes for part in self.parts):
            notes.append("Own bytes differ from replica to replica.")
        if any(part.role == UNKNOWN for part in self.parts):
            notes.append("An unknown part is counted, but its position is not judged.")
        wrong = "\n".join(f"! {finding}" for finding in self.findings)
        return "\n\n".join(filter(None, (aligned(_cells(self.parts)), wrong, "\n".join(notes))))


@checks.arguments
def explain(
    tx: optax.GradientTransformation | TrainStep,
    params: PyTree,
    batch: PyTree = None,
    *,
    axis_sizes: Mapping[str, int] | None = None,
    **given: PyTree,
) -> Explanation:
    """List the parts of a chain or a train step, their costs, and errors in their order.

    Parts are listed in the order in which a gradient passes them, each with the bytes of its state
    and the bytes it sends per device, counted from types and from the traced program. Known errors
    of order, such as a clip outside the scaler or a mean before AdaSum, are reported with the
    reason and a fix. A part of another package is called unknown, and its position is not judged.

    With a batch and a train step that scales the loss, ``explain`` also reports backward rules
    (``jax.custom_vjp``) that are not linear in the cotangent, and params whose unscaled gradients
    differ between the scale in the state and a scale near 1. A policy's f16 is replaced by f32 for
    this comparison. Gradients are not compared if the loss itself computes in f16, with keywords,
    or with ``boostax.carry``.

    With a train step and a batch, sent bytes include those of the loss. ``boostax.audit`` counts
    the compiled program instead: FLOPs, memory and bytes, at each freeze depth.

    Args:
      tx: a transformation, or the result of ``make_train_step``.
      params: arrays or ``jax.ShapeDtypeStruct``; with a step, its ``TrainState`` or params.
      batch: a batch of the step, as arrays or as ``jax.ShapeDtypeStruct``.
      axis_sizes: sizes of the mesh axes that a transformation names, such as ``{"data": 8}``; not
        with a step. The devices need not exist. Without sizes, sent bytes are not counted.
      **given: keyword arguments of a step's call, which it passes to the loss.

    Returns:
      An ``Explanation``. Cost: a trace; with arrays as batch and a loss scale, two gradients.

    Raises:
      ValueError, TypeError: ``tx`` is neither a transformation nor a step; errors of ``init`` and
        ``update``. If a known error of order explains such an error, it is reported instead, and
        ``problem`` has the error.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> inner = optax.chain(boostax.adasum("data"), optax.adam(1e-3))
      >>> tx = optax.chain(optax.clip(1.0), boostax.dynamic_loss_scale(inner, axis_name="data"))
      >>> found = boostax.explain(tx, jnp.zeros(256), axis_sizes={"data": 8})
      >>> for part in found.parts:
      ...   print("  " * part.depth + part.name, int(part.state_bytes), int(part.wire_bytes))
      clip 0 0
      dynamic_loss_scale 33 7
        adasum 4 3822
        scale_by_adam 2052 0
        scale 0 0
      >>> found.findings[0].what
      'dynamic_loss_scale after clip'
    """
    if isinstance(tx, TrainStep):
        allowed, hint = "left out with a train step", "The step's mesh has sizes."
        checks.absent(_WHO, "axis_sizes", axis_sizes, allowed, hint)
        return _of_step(tx, params, batch, given)
    fits = isinstance(cast(Any, tx), optax.GradientTransformation)
    allowed = "a transformation or a TrainStep"
    hint = "boostax.make_train_step(loss_fn, tx) makes the latter."
    checks.require(_WHO, "tx", tx, allowed, fits, hint, TypeError)
    hint = "boostax.make_train_step makes one."
    for name, value in {"batch": batch, **given}.items():
        checks.absent(_WHO, name, value, "left out without a train step", hint)
    sizes = {
        name: checks.positive_int(_WHO, f"axis_sizes[{name!r}]", size, "8 is eight devices.")
        for name, size in (axis_sizes or {}).items()
    }
    place = _Place(axes.canonical(_WHO, tuple(sizes) or None), sizes)
    reduces = any(row.role in get_args(Reduction) for row in rows(read(tx)))
    missing = "axis_sizes was not given." if reduces and not sizes else ""
    return _explained(tx, params, place, list, missing)


def _of_step(step: TrainStep, state: PyTree, batch: PyTree, given: Any) -> Explanation:
    if not isinstance(state, TrainState):
        state = step.init(jax.eval_shape(lambda p: p, state))
    params = jax.eval_shape(step.common_params, state)
    more = _of_scales(step, state, batch, given) if batch is not None and scales(step.tx) else []
    if step.placing is None:
        return _explained(step.tx, params, _Place(), list, "", step, more)
    specs, mesh = step.placing.of_params(state.params), step.placing.mesh
    device = mesh.abstract_mesh.abstract_device
    place = _Place(step.names, dict(mesh.shape), specs, step.shard_optimizer, device)
    sharded = step.shard_optimizer or any(map(any, jax.tree.leaves(specs)))
    missing = "on global arrays XLA places it: boostax.audit counts it." if sharded else ""
    if isinstance(step.oracle, LayeredOracle):
        missing = "layers send it: boostax.inspect.forms counts it for each form."
    missing = missing if batch is not None else "batch was not given."
    variants = variants_of(step.tx)
    depth = None if variants is None else variants.plan(params).drawn[0]

    def of_loss() -> list[costs.Collective]:
        # The step is copied, because tracing adds to its list of built depths.
        program = dataclasses.replace(step, _programs={}).jaxpr(state, batch, depth=depth, **given)
        return [x for x in costs.collectives(program) if not x.scopes]

    return _explained(step.tx, params, place, of_loss, missing, step, more)


def _of_scales(step: TrainStep, state: TrainState, batch: PyTree, given: Any) -> list[Finding]:
    """Find backward rules that are not linear, and leaves whose gradients depend on the scale."""
    rules: list[str] = []
    oracle: Any = dataclasses.replace(step.oracle, watch=rules.extend)
    if step.policy is not None:
        wide = dataclasses.replace(step.policy, compute_dtype=jnp.float32)
        oracle = dataclasses.replace(oracle, computed=wide.compute(oracle.computed.__wrapped__))

    def unscaled(factor: float, state: TrainState, batch: PyTree, given: Any) -> list[jax.Array]:
        own = [x.known_by() for x in trees.telling(state.opt_state, "known_by")]
        put = lambda x: x * factor if any(x is y for y in own) else x  # noqa: E731
        more = {**given, "key": state.key, "model_state": state.model_state}
        _, grads = oracle(state.params, jax.tree.map(put, state.opt_state), batch, **more)
        return [g / factor for g in jax.tree.leaves(trees.at_least_float32(grads))]

    def apart(*args: Any) -> list[jax.Array]:
        pairs = zip(unscaled(1.0, *args), unscaled(factor, *args), strict=True)
        largest = lambda x: jnp.max(jnp.abs(x), initial=0)  # noqa: E731
        return [largest(x - y) > tolerance * largest(x) for x, y in pairs]

    args = state, step.place(batch), given
    program: Any = jax.make_jaxpr(functools.partial(unscaled, 1.0))(*args).jaxpr
    found = [finding("not_linear", rule=rule) for rule in dict.fromkeys(rules)]
    values: Any = [x.aval for eqn, _ in interpret.equations(program) for x in eqn.outvars]
    limits = [jnp.finfo(x.dtype) for x in values if jnp.issubdtype(x.dtype, jnp.floating)]
    shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args))
    # Scaling by a power of two is exact unless a value underflows or overflows, as in f16.
    if given or shapes or any(x.tiny > 1e-30 for x in limits):
        return found
    factor = 2.0 ** -(round(math.log2(loss_scale(state.opt_state))) or 8)
    # On a GPU the order of a sum may differ from run to run.
    tolerance = max(float(x.eps) for x in limits) ** 0.5
    leaves = few([*itertools.compress(trees.names(state.params), jax.jit(apart)(*args))])
    return [*found, finding("depends_on_scale", leaves=leaves)] if leaves else found


def _explained(
    tx: optax.GradientTransformation,
    params: PyTree,
    place: _Place,
    of_loss: Callable[[], list[costs.Collective]],
    missing: str,
    step: TrainStep | None = None,
    more: Sequence[Finding] = (),
) -> Explanation:
    """Explain a chain; count the bytes that the chain and its loss send, if possible."""
    found, sent = rows(read(tx)), list[costs.Collective]()
    wrong, problem = (*findings(found, step), *more), missing
    try:
        if place.names and not missing:
            with axes.binding(place.names):
                chain = costs.collectives(_traced(tx, params, place))
            sent = [*of_loss(), *chain]
    except (ValueError, TypeError) as error:
        # A chain in a wrong order often cannot be traced; the wrong order is then reported.
        if not wrong:
            raise
        problem = str(error).partition("\n")[0]
    params = jax.eval_shape(lambda p: p, params)
    kept = _on_device(params, place.param_specs, place.sizes)
    params_bytes = sum(x.bytes for x in jax.tree.leaves(kept))
    state = _on_device(*_state(tx, params, place), place.sizes)
    parts = _part_costs(found, state, params_bytes, sent)
    return Explanation(parts, wrong, params_bytes, problem)


def _cells(parts: tuple[PartCost, ...]) -> Cells:
    """Return the table of the parts, without empty columns."""
    sends, owns = any(x.collectives for x in parts), any(x.own_bytes for x in parts)
    heads = ("part", "state bytes", "copies", "own bytes")
    table: Cells = [(*heads, "collectives", "sent bytes", "what it does")]
    for part in parts:
        kept = ("in the row above", "")
        if part.state_bytes is not None:
            kept = (f"{part.state_bytes:,.0f}", f"{part.copies:.2f}")
        kinds = ", ".join(f"{n:g} {kind}" for kind, n in part.collectives.items())
        sent = "above" if part.wire_bytes is None else f"{part.wire_bytes:,.0f}"
        name = "  " * part.depth + part.name + " (unknown)" * (part.role == "unknown")
        cells = (name, *kept, f"{part.own_bytes:,.0f}", kinds, sent, part.what.replace("`", ""))
        table.append(cells)
    shown = (True, True, True, owns, sends, sends, True)
    return [tuple(itertools.compress(row, shown)) for row in table]


@dataclasses.dataclass(frozen=True)
class _Place:
    """The mesh that a chain runs on.

    Attributes:
      names: the axes of the replicas.
      sizes: the sizes of all axes of the mesh.
      param_specs: the specs of sharded params, or ``None``.
      shard_optimizer: see ``make_train_step``.
      device: the kind of its devices, on which a codec's defaults may depend; ``None`` for the
        default.
    """

    names: tuple[str, ...] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    param_specs: PyTree = None
    shard_optimizer: bool = False
    device: Any = None

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return math.prod(self.sizes[name] for name in self.names)


@dataclasses.dataclass(frozen=True, eq=False)
class _Kept:
    """The bytes of an array on one device, and whether they differ from replica to replica."""

    bytes: float
    own: bool


def _part_costs(
    found: Sequence[Row], kept: PyTree, params_bytes: float, sent: Sequence[costs.Collective]
) -> tuple[PartCost, ...]:
    """Return the costs of each row, and the costs of collectives that belong to no row."""
    # The state of each row within the chain's state; ``None`` if it cannot be found.
    states = [functools.reduce(follow, row.routes, kept) for row in found]
    # In nested parts an array counts for the innermost part.
    keepers = {id(x): i for i, state in enumerate(states) for x in jax.tree.leaves(state)}
    paths = [tuple(x.part.name for x in (*row.holders, row) if x.part.description) for row in found]
    # Collectives by the innermost row around them.
    by_row: dict[int | None, list[costs.Collective]] = collections.defaultdict(list)
    for c in sent:
        scopes = (c.scopes[:n] for n in range(len(c.scopes), 0, -1))
        by_row[next((paths.index(x) for x in scopes if x in paths), None)].append(c)
    result: list[PartCost] = []
    for i, (row, state) in enumerate(zip(found, states, strict=True)):
        mine = [x for x in jax.tree.leaves(state) if keepers[id(x)] == i]
        total = sum(x.bytes for x in mine)
        counts, wire_bytes = _summed(by_row.pop(i, ()))
        counted = row.part.description is not None and paths.index(paths[i]) < i
        copies = total / params_bytes if params_bytes else 0.0
        known = (None, None) if state is None else (total, copies)
        own = sum(x.bytes for x in mine if x.own)
        said = row.part.name, len(row.holders), row.role, row.part.what
        result.append(PartCost(*said, *known, own, counts, None if counted else wire_bytes))
    if by_row:
        name, what = "(the step)", "Averages the loss and its metrics"
        if any(row.role == UNKNOWN for row in found):
            name, what = "(unknown parts)", "Their bytes, and those of a step's loss and metrics"
        result.append(PartCost(name, 0, "step", what, 0.0, 0.0, 0.0, *_summed(by_row[None])))
    return tuple(result)


def _summed(sent: Sequence[costs.Collective]) -> tuple[dict[str, float], float]:
    """Count collectives by kind, and add up their bytes on the wire."""
    counts: dict[str, float] = collections.defaultdict(float)
    for c in sent:
        counts[c.primitive] += c.share * c.count
    return dict(counts), sum((c.share * c.wire_bytes for c in sent), 0.0)


def _traced(tx: optax.GradientTransformation, params: PyTree, place: _Place) -> jaxprs.ClosedJaxpr:
    """Trace the update as in a train step, mapped over replicas that need not exist."""
    extra_tx, names, count = optax.with_extra_args_support(tx), place.names, place.replicas
    auto, each = (AxisType.Auto,) * len(place.sizes), PartitionSpec(names)
    how: dict[str, Any] = {"axis_types": auto, "abstract_device": place.device}
    mesh = AbstractMesh(tuple(place.sizes.values()), tuple(place.sizes), **how)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> jax.Array:
        grads = jax.tree.map(lambda x: x[0], grads)
        value = axes.to_varying(jnp.zeros(()), names)
        given: dict[str, Any] = {"value": value, "value_fn": lambda _: value}
        given |= {"grad": grads} if asked(tx).get("grad") else {}
        if (variants := variants_of(tx)) is not None:
            given["depth"] = variants.plan(params).drawn[0]
        state = replicas.enter_replica(state)
        # The window is called with weights of the same structure as in its state.
        weights = [x.weight for x in trees.find(state, lambda x: isinstance(x, Window))]
        given |= {"weight": weights[0]} if weights and weights[0] is not None else {}
        extra_tx.update(handshake.assume_scaled(grads, state), state, params, **given)
        return jnp.zeros(())

    state, specs = _state(tx, params, place)
    lead = count, *[len(terms) for terms in [terms_of(state)] if terms]
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), params)
    # Results are not returned, because some are equal on all replicas and others are not.
    how = {"in_specs": (each, specs, PartitionSpec()), "out_specs": PartitionSpec()}
    return jax.make_jaxpr(jax.shard_map(update, mesh=mesh, **how))(grads, state, params)


def _state(tx: optax.GradientTransformation, params: PyTree, place: _Place) -> tuple[PyTree, Any]:
    """Return the shapes of the state on all replicas, and the specs with which a step shards it."""
    count, specs = place.replicas, None
    with axes.binding(place.names or axes.UNNAMED):
        state = jax.eval_shape(lambda p: replicas.stack_replicas(tx.init(p), count), params)
        if place.names:
            how: dict[str, Any] = {"replicas": count, "param_specs": place.param_specs}
            how["shard_optimizer"] = place.shard_optimizer
            specs = replicas.state_specs(tx, params, place.names, **how)
    return state, specs


def _on_device(tree: PyTree, specs: PyTree | None, sizes: Mapping[str, int]) -> PyTree:
    """Replace each array by its bytes on a device; without specs every device holds all of it."""
    specs = jax.tree.map(lambda _: PartitionSpec(), tree) if specs is None else specs

    def kept(own: bool, x: Any, spec: PartitionSpec) -> _Kept:
        names = itertools.chain(*(y if isinstance(y, tuple) else (y,) for y in spec))
        shards = math.prod(sizes[name] for name in names if name is not None)
        return _Kept(math.prod(x.shape) * x.dtype.itemsize / shards, own)

    def node(x: Any, spec: Any) -> Any:
        return jax.tree.map(functools.partial(kept, replicas.is_per_replica(x)), x, spec)

    return jax.tree.map(node, tree, specs, is_leaf=replicas.is_per_replica)
