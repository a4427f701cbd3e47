# SPDX-License-Identifier: Apache-2.0
"""The forms of an optimizer step with K micro-batches, compiled and side by side.

Each form has the user's own loss and optimizer; they differ in where the gradients are summed over
the replicas. The forms of others get gradients that are reduced where the form reduces them, so
that the ``all_reduce`` of the chain has nothing left to do.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, reshard

from boostax._core import axes, bound_axis, checks
from boostax._core.placement import Placement
from boostax._core.replicas import is_per_replica, without
from boostax.inspect import tables
from boostax.inspect.audit import Audit, audit
from boostax.inspect.targets import target_devices
from boostax.train.apply import apply_gradients
from boostax.train.compiled import TrainStep
from boostax.train.layered import LayeredOracle
from boostax.train.on_mesh import specs_of
from boostax.train.stacks import Layers
from boostax.train.state import TrainState
from boostax.train.step import make_train_step

PyTree = Any
_LAYERS: dict[str, dict[str, Any]] = {
    "layers, once": {"weights": "once"},
    "layers, by layer": {"weights": "by layer"},
    "layers, release": {"release": True},
    "layers, release, host": {"release": True, "host": True},
}


class Forms(NamedTuple):
    """The audits of a step's forms; ``print`` shows them in a table.

    N is the number of params, P their bytes on a device.

    Attributes:
      audits: an ``Audit`` of each form that the step can take.
      refused: for each other form the reason.
    """

    audits: dict[str, Audit]
    refused: dict[str, str]

    def __str__(self) -> str:
        heads = "reduced, N", "sent", "temporaries, P", "arguments, P", "host, P"
        cells: tables.Cells = [("an optimizer step", *heads, "")]
        for name, x in self.audits.items():
            sizes = x.temporary_bytes, x.argument_bytes, x.host_bytes or 0
            shares = (tables.number(size / x.params_bytes, 2) for size in sizes)
            cells.append((name, tables.number(x.reductions, 2), _sent(x), *shares, ""))
        cells += [(name, "", "", "", "", "", why) for name, why in self.refused.items()]
        return tables.aligned(cells)


class Program(NamedTuple):
    """The program of a form.

    Attributes:
      run: a ``TrainStep``, or a jitted ``(params, opt_state, batch) -> (params, opt_state)``.
      args: types of its arguments, with shardings. The batch is that of the step,
        ``[micro-batches, rows, ...]``, or one micro-batch.
      calls: calls per optimizer step.
    """

    run: Any
    args: tuple[PyTree, ...]
    calls: int = 1


def forms(step: TrainStep, state: PyTree, batch: PyTree, *, target: str | None = None) -> Forms:
    """Compile a step's own loss and optimizer in each form of an optimizer step.

    The forms are plain ``jit`` with a ``lax.scan`` over micro-batches, ``optax.MultiSteps``,
    ``optax.microbatch``, JAX's ``reduced=`` (params are marked as reduced on an Explicit mesh, and
    sums stay unreduced), a scan inside ``jax.shard_map``, and the step itself; if it has
    ``layers=``, also each form of ``boostax.train.Layers``. Forms of others need a loss of params
    and batch that returns a number, and a chain whose only reduction is a mean.

    Args:
      step: a step on a mesh, or one with ``layers=``.
      state: its state, or one of types.
      batch: a batch, or types.
      target: see ``boostax.audit``.

    Returns:
      A ``Forms``: for each form the reductions and bytes sent of an optimizer step, and what a
      device holds, or why it fails. Cost: an audit of each form.

    Raises:
      TypeError: ``step`` is no ``TrainStep``.
      ValueError, RuntimeError: an unknown target, or one whose compiler is not installed.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = optax.chain(boostax.all_reduce(), optax.adam(0.1))
      >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> step = boostax.make_train_step(loss, tx, mesh=mesh, microbatches=2)
      >>> found = boostax.inspect.forms(step, step.init(jnp.ones((8, 8))), jnp.ones((4, 8)))
      >>> list(found.audits)
      ['jit and lax.scan', 'optax.MultiSteps', 'optax.microbatch', 'reduced=', 'shard_map', 'boostax']
    """
    hint, fits = "boostax.make_train_step(loss, tx) makes one.", isinstance(step, TrainStep)
    checks.require("forms", "step", type(step).__name__, "a TrainStep", fits, hint, TypeError)
    if target is not None:
        target_devices(target)
    audits, refused = dict[str, Audit](), dict[str, str]()
    for name, build in programs(step, state, batch).items():
        try:
            program = build()
            found = audit(program.run, *program.args, target=target, calls=program.calls)
            audits[name] = dataclasses.replace(found, text="")
        # JAX has no common class for what it refuses.
        except Exception as error:  # noqa: BLE001
            lines = str(error).splitlines() or [type(error).__name__]
            refused[name] = re.split(r"[.:;](?:\s|$)", lines[0])[0]
    return Forms(audits, refused)


def programs(step: TrainStep, state: TrainState, batch: PyTree) -> dict[str, Callable[[], Program]]:
    """Return the builders of all forms, by name; each raises what JAX raises."""
    typed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)  # noqa: E731
    params = jax.tree.map(typed, state.params)
    plan: Any = getattr(step.oracle, "plan", None)
    rival = functools.partial(_Rival.of, step, state, batch, params)
    found = {name: functools.partial(lambda f: f(rival()), make) for name, make in _OTHERS.items()}
    found["boostax"] = lambda: Program(step, (state, batch))

    def layered(options: Mapping[str, Any] | None) -> Program:
        how: dict[str, Any] = {"microbatches": 1 if options and "release" in options else step.microbatches}
        if options is not None:
            how["layers"] = Layers(plan.layers.path, **options)
        if step.mesh is not None:
            how |= {"mesh": step.mesh, "axis_name": step.names, "gather": step.gather}
            how["param_specs"] = step.param_specs
        how |= {"policy": step.policy, "has_aux": step.oracle.has_aux}
        how["accumulator_dtype"] = step.oracle.accumulator_dtype
        form = make_train_step(step.oracle.loss_fn, plan.tx, **how)
        fresh = form.init(params)._replace(model_state=state.model_state, key=state.key)
        return Program(form, (fresh, batch))

    if isinstance(step.oracle, LayeredOracle):
        options = {"boostax without layers": None, **_LAYERS}
        found |= {name: functools.partial(layered, x) for name, x in options.items()}
    return found


@dataclasses.dataclass(frozen=True)
class _Rival:
    """What the forms of others have of a step.

    Attributes:
      loss: ``(params, batch) -> scalar``.
      tx: the optimizer.
      place: the placement of the params.
      count: micro-batches.
      params: types of the params.
      specs: the spec of each param.
      batch: types of the batch.
      shard_optimizer: see ``make_train_step``.
    """

    loss: Callable[[PyTree, PyTree], jax.Array]
    tx: optax.GradientTransformation
    place: Placement
    count: int
    params: PyTree
    specs: PyTree
    batch: PyTree
    shard_optimizer: bool

    @classmethod
    def of(cls, step: TrainStep, state: TrainState, batch: PyTree, params: PyTree) -> "_Rival":
        """Take a step apart; refuse one that reads or reports more."""
        more = {"has_aux": step.oracle.has_aux, "model_state": state.model_state is not None}
        more |= {"key": state.key is not None, "params per replica": is_per_replica(params)}
        got = [name for name, there in more.items() if there] + ["no mesh"] * (step.mesh is None)
        hint = "boostax alone knows how to combine them."
        checks.require("forms", "step", ", ".join(got), "of a mesh, params and rows", not got, hint)
        placing: Any = step.placing
        tx = getattr(step.oracle, "plan", step).tx
        where = placing.placement(params), step.microbatches, params, placing.of_params(params)
        return cls(step.oracle.computed, tx, *where, step.place(batch), step.shard_optimizer)

    @property
    def names(self) -> tuple[str, ...]:
        """The replica axes."""
        return self.place.names

    def on(self, kind: AxisType) -> "_Rival":
        """Return it on a mesh whose axes all have this type."""
        old = self.place.mesh
        mesh = Mesh(old.devices, old.axis_names, axis_types=(kind,) * len(old.axis_names))
        return dataclasses.replace(self, place=dataclasses.replace(self.place, mesh=mesh))

    def sharded(self, spec: PartitionSpec) -> NamedSharding:
        """Return the sharding of a spec."""
        return NamedSharding(self.place.mesh, spec)

    def rows(self, lead: int | None) -> PyTree:
        """Return types of micro-batches: ``lead`` of them stacked, or, of ``None``, one."""

        def typed(x: Any) -> jax.ShapeDtypeStruct:
            shape, spec = (x.shape[0] // self.count, *x.shape[1:]), (self.names,)
            if lead is not None:
                shape, spec = (lead, *shape), (None, *spec)
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self.sharded(PartitionSpec(*spec)))

        return jax.tree.map(typed, self.batch)

    def summed(self, gradient: Any, params: PyTree, zeros: PyTree, batch: PyTree) -> PyTree:
        """Scan over micro-batches and add up their gradients."""
        add = lambda sums, rows: (jax.tree.map(jnp.add, sums, gradient(params, rows)), None)  # noqa: E731
        return lax.scan(add, zeros, batch)[0]

    def program(self, gradient: Any, batch: PyTree, calls: int = 1) -> Program:
        """Return the program that gives mean gradients to the optimizer."""
        tx, place = self.tx, self.place

        def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            with bound_axis.averaged(place.names):
                return apply_gradients(tx, grads, state, params)

        with bound_axis.averaged(place.names):
            state = jax.eval_shape(tx.init, self.params)
        specs = specs_of(place, self.shard_optimizer, self.params, state)
        where = place.shardings(specs)

        def step(params: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            return place.pinned(update, specs)(gradient(params, batch), state, params)

        placed = jax.tree.map(lambda x, at: x.update(sharding=at), (self.params, state), where)
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=where)
        return Program(jitted, (*placed, batch), calls)


def _gradient(case: _Rival) -> Callable[[PyTree, PyTree], PyTree]:
    """Return the gradient of a micro-batch in plain ``jit``.

    Params that are sharded over the batch's axes are gathered, as XLA may cut activations
    otherwise.
    """

    def whole(w: jax.Array, spec: PartitionSpec) -> jax.Array:
        rest = without(spec, case.names)
        return w if rest == spec else lax.with_sharding_constraint(w, case.sharded(rest))

    return jax.grad(lambda params, rows: case.loss(jax.tree.map(whole, params, case.specs), rows))


def _plain(given: _Rival) -> Program:
    case = given.on(AxisType.Auto)

    def mean(params: PyTree, batch: PyTree) -> PyTree:
        zeros = jax.tree.map(jnp.zeros_like, params)
        sums = case.summed(_gradient(case), params, zeros, batch)
        return jax.tree.map(lambda g: g / case.count, sums)

    return case.program(mean, case.rows(case.count))


def _multi_steps(given: _Rival) -> Program:
    tx = optax.MultiSteps(given.tx, given.count).gradient_transformation()
    case = dataclasses.replace(given.on(AxisType.Auto), tx=tx)
    return case.program(_gradient(case), case.rows(None), case.count)


def _microbatch(given: _Rival) -> Program:
    case = given.on(AxisType.Auto)
    rows = jax.tree.leaves(case.batch)[0].shape[0] // case.count
    how = optax.microbatching.AccumulationType.SUM
    split = optax.microbatching.microbatch(_gradient(case), 1, rows, how)
    mean = lambda *args: jax.tree.map(lambda g: g / case.count, split(*args))  # noqa: E731
    flat = lambda x: x.update(sharding=case.sharded(PartitionSpec(case.names)))  # noqa: E731
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch)
    return case.program(mean, jax.tree.map(flat, types))


def _reduced(given: _Rival) -> Program:
    """Params are marked as reduced, so that gradients and their sums stay unreduced."""
    case = given.on(AxisType.Explicit)
    marked = lambda spec, **how: case.sharded(  # noqa: E731
        PartitionSpec(*without(spec, case.names), **how)
    )

    def mean(params: PyTree, batch: PyTree) -> PyTree:
        over = frozenset(case.names)
        whole = jax.tree.map(lambda w, s: reshard(w, marked(s, reduced=over)), params, case.specs)
        zeros = lambda w, s: jnp.zeros_like(w, out_sharding=marked(s, unreduced=over))  # noqa: E731
        start = jax.tree.map(zeros, params, case.specs)
        sums = case.summed(jax.grad(case.loss), whole, start, batch)
        return jax.tree.map(lambda g, s: reshard(g, case.sharded(s)) / case.count, sums, case.specs)

    return case.program(mean, case.rows(case.count))


def _shard_map(given: _Rival) -> Program:
    """Each replica sums the gradients of its rows; shards are gathered and scattered once."""
    case = given.on(AxisType.Auto)
    others = [x for x in case.place.mesh.axis_names if x not in case.names]
    specs = jax.tree.map(lambda spec: without(spec, others), case.specs)

    def cuts(spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
        entries = [x if isinstance(x, tuple) else (x,) for x in spec]
        return [(dim, over) for dim, over in enumerate(entries) if any(over)]

    def gathered(w: jax.Array, spec: PartitionSpec) -> jax.Array:
        for dim, over in cuts(spec):
            w = lax.all_gather(w, over, axis=dim, tiled=True)
        return w

    def reduced(g: jax.Array, spec: PartitionSpec) -> jax.Array:
        left = case.names
        for dim, over in cuts(spec):
            g, left = axes.scatter(g, over, dim), tuple(x for x in left if x not in over)
        return (lax.psum(g, left) if left else g) / (case.count * case.place.replicas)

    def mean(params: PyTree, batch: PyTree) -> PyTree:
        whole = jax.tree.map(gathered, params, specs)
        zeros = jax.tree.map(jnp.zeros_like, whole)
        sums = case.summed(jax.grad(case.loss), whole, zeros, batch)
        return jax.tree.map(reduced, sums, specs)

    how: Any = {"in_specs": (specs, PartitionSpec(None, case.names)), "out_specs": specs}
    how |= {"mesh": case.place.mesh, "axis_names": {*case.names}, "check_vma": False}
    return case.program(jax.shard_map(mean, **how), case.rows(case.count))


_OTHERS: dict[str, Callable[[_Rival], Program]] = {
    "jit and lax.scan": _plain,
    "optax.MultiSteps": _multi_steps,
    "optax.microbatch": _microbatch,
    "reduced=": _reduced,
    "shard_map": _shard_map,
}


def _sent(found: Audit) -> str:
    """Return the bytes that a device sends in an optimizer step, by dtype."""
    sizes = Counter[str]()
    for c in found.collectives:
        # What stands in a branch runs in one of the calls.
        sizes["+".join(c.dtypes)] += round(c.wire_bytes) * (1 if c.branches else found.calls)
    return ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in sizes.most_common())
