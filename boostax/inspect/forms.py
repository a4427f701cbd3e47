# SPDX-License-Identifier: Apache-2.0
"""Compile the forms of an optimizer step with K micro-batches, and compare them.

All forms have the user's own loss and optimizer, and differ in where gradients are summed over the
replicas. The forms of other libraries reduce the gradients themselves, so the chain's
``all_reduce`` then does nothing.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
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
from boostax.train.apply import apply_gradients
from boostax.train.compiled import TrainStep
from boostax.train.on_mesh import specs_of
from boostax.train.stacks import Layers, cut_of, joined
from boostax.train.state import TrainState
from boostax.train.step import make_train_step

PyTree = Any
_LAYERS: dict[str, dict[str, Any]] = {
    "boostax without layers": {},
    "layers, once": {"weights": "once"},
    "layers, by layer": {"weights": "by layer"},
    "layers, release": {"release": True},
}


class Forms(NamedTuple):
    """The audits of a step's forms; ``print`` shows them in a table.

    N is the number of params, P their bytes on a device.

    Attributes:
      audits: the ``Audit`` of each form that compiles.
      refused: the reason why another form does not compile, by form.
    """

    audits: dict[str, Audit]
    refused: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"audits": {k: x.to_dict() for k, x in self.audits.items()}, "refused": self.refused}

    def __str__(self) -> str:
        heads = "reduced, N", "sent", "temporaries, P", "arguments, P"
        cells: tables.Cells = [("an optimizer step", *heads, "")]
        for name, x in self.audits.items():
            sizes = x.temporary_bytes, x.argument_bytes
            shares = (tables.number(y / x.params_bytes, 2) for y in sizes)
            sent = {dtype: x.per_step(ways) / 1e6 for dtype, ways in x.wire_dtypes.items()}
            said = ", ".join(f"{dtype} {tables.number(size, 2)} MB" for dtype, size in sent.items())
            cells.append((name, tables.number(x.reductions, 2), said, *shares, ""))
        cells += [(name, "", "", "", "", why) for name, why in self.refused.items()]
        return tables.aligned(cells)


class Program(NamedTuple):
    """The program of a form.

    Attributes:
      run: a ``TrainStep``, or a jitted ``(params, opt_state, batch) -> (params, opt_state)``.
      args: types of its arguments, with shardings. The batch is the step's batch ``[micro-batches,
        rows, ...]``, or one micro-batch.
      calls: calls per optimizer step.
    """

    run: Any
    args: tuple[PyTree, ...]
    calls: int = 1


def forms(step: TrainStep, state: PyTree, batch: PyTree, *, target: str | None = None) -> Forms:
    """Compile a step's own loss and optimizer in each form of an optimizer step.

    The forms are plain ``jit`` with a ``lax.scan`` over micro-batches, ``optax.MultiSteps``,
    ``optax.microbatch``, JAX's ``reduced=`` (params are marked as reduced on an Explicit mesh, and
    sums stay unreduced), a scan inside ``jax.shard_map``, and the step itself. A step with
    ``layers=`` is also compiled in each form of ``boostax.train.Layers``. The forms of other
    libraries need a loss of params and batch that returns a scalar, and a chain whose only
    reduction is a mean.

    Args:
      step: a step on a mesh, or one with ``layers=``.
      state: the step's state, or its types.
      batch: a batch, or its types.
      target: see ``boostax.audit``.

    Returns:
      A ``Forms``, with an audit of each form or the reason why it failed. Cost: a compilation of
      each form.

    Raises:
      ValueError, TypeError, RuntimeError: the step itself cannot be audited.

    Example:
      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = optax.chain(boostax.all_reduce(), optax.adam(0.1))
      >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> step = boostax.make_train_step(loss, tx, mesh=mesh, microbatches=2)
      >>> found = boostax.inspect.forms(step, step.init(jnp.ones((8, 8))), jnp.ones((4, 8)))
      >>> list(found.audits)  # doctest: +NORMALIZE_WHITESPACE
      ['boostax', 'jit and lax.scan', 'optax.MultiSteps', 'optax.microbatch', 'reduced=',
      'shard_map by hand']
    """
    hint, fits = "boostax.make_train_step(loss, tx) makes one.", hasattr(step, "oracle")
    checks.require("forms", "step", type(step).__name__, "a TrainStep", fits, hint, TypeError)
    audits, refused = dict[str, Audit](), dict[str, str]()
    for name, build in programs(step, state, batch).items():
        try:
            program = build()
            found = audit(program.run, *program.args, target=target, calls=program.calls)
            audits[name] = dataclasses.replace(found, text="")
        # JAX's errors here have no common class.
        except Exception as error:
            if name == "boostax":
                raise
            refused[name] = reason(error)
    return Forms(audits, refused)


def reason(error: Exception) -> str:
    """Return the first sentence of an error."""
    return re.split(r"\.?(?:\s*$|\n|\. )", str(error) or type(error).__name__)[0]


def programs(step: TrainStep, state: TrainState, batch: PyTree) -> dict[str, Callable[[], Program]]:
    """Return a builder for each form's program; a builder raises if its form fails."""
    oracle = step.oracle
    plan: Any = getattr(oracle, "plan", None)
    bare = lambda: step if plan is None else remade().run  # noqa: E731
    build = lambda make: make(_case(bare(), state, batch))  # noqa: E731
    found = {"boostax": functools.partial(Program, step, (state, batch))}
    found |= {name: functools.partial(build, make) for name, make in _OTHERS.items()}

    def remade(**options: Any) -> Program:
        how = {x: getattr(step, x) for x in ("mesh", "policy", "param_specs", "gather")}
        how |= {x: getattr(oracle, x) for x in ("has_aux", "accumulator_dtype")}
        how["microbatches"] = 1 if "release" in options else step.microbatches
        how["layers"] = Layers(plan.layers.path, **options) if options else None
        form = make_train_step(oracle.loss_fn, plan.tx, axis_name=step.names or None, **how)
        typed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)  # noqa: E731
        fresh = form.init(jax.tree.map(typed, state.params))
        return Program(form, (fresh._replace(model_state=state.model_state, key=state.key), batch))

    if plan is not None:
        found |= {name: functools.partial(remade, **how) for name, how in _LAYERS.items()}
    return found


class _Case(NamedTuple):
    """A step as the forms of other libraries get it.

    Attributes:
      step: the step, without ``layers=``.
      place: the placement of its params, on a mesh whose axes all have one type.
      params, specs, batch: the params, their specs and the batch.
    """

    step: TrainStep
    place: Placement
    params: PyTree
    specs: PyTree
    batch: PyTree

    def of(self, spec: PartitionSpec, whole: bool = True, **marks: Any) -> NamedSharding:
        """Return the sharding of a param or its gradient, by default equal on all replicas."""
        spec = without(spec, self.place.names) if whole else spec
        return NamedSharding(self.place.mesh, PartitionSpec(*spec, **marks))

    def summed(self, params: Any, batch: Any, gradient: Any = None, zeros: Any = None) -> PyTree:
        """Scan over micro-batches and add up their gradients."""
        gradient = gradient or jax.grad(self.step.oracle.computed)
        zeros = jax.tree.map(jnp.zeros_like, params) if zeros is None else zeros
        add = lambda sums, rows: (jax.tree.map(jnp.add, sums, gradient(params, rows)), None)  # noqa: E731
        return lax.scan(add, zeros, batch)[0]

    def gradient(self, params: PyTree, rows: PyTree) -> PyTree:
        """Differentiate a micro-batch in plain ``jit``, with gathered params.

        Without the gather XLA might shard the activations.
        """

        def whole(w: jax.Array, spec: PartitionSpec) -> jax.Array:
            cut = without(spec, self.place.names) != spec
            return lax.with_sharding_constraint(w, self.of(spec)) if cut else w

        loss = self.step.oracle.computed
        return jax.grad(lambda w: loss(jax.tree.map(whole, w, self.specs), rows))(params)

    def program(self, sums: Any, *lead: int, calls: int = 1, tx: Any = None) -> Program:
        """Return the program of a form.

        Args:
          sums: ``(params, batch) -> gradients``, summed over the micro-batches of a call.
          *lead: micro-batches on a leading dimension of the batch.
          calls: calls per optimizer step.
          tx: the optimizer; by default the step's optimizer.
        """
        step, place, count = self.step, self.place, self.step.microbatches
        tx, averaged = tx or step.tx, functools.partial(bound_axis.averaged, place.names)

        def rows(x: Any) -> jax.ShapeDtypeStruct:
            shape = *lead, x.shape[0] // math.prod((calls, *lead)), *x.shape[1:]
            spec = PartitionSpec(*[None] * len(lead), place.names)
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(place.mesh, spec))

        def update(grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            with averaged():
                return apply_gradients(tx, grads, opt_state, params)

        def run(params: PyTree, opt_state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            grads = jax.tree.map(lambda g: g * (calls / count), sums(params, batch))
            return place.pinned(update, specs)(grads, opt_state, params)

        with averaged():
            given = self.params, jax.eval_shape(tx.init, self.params)
        specs = specs_of(place, step.shard_optimizer, *given)
        where = place.shardings(specs)
        types = jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), given, where
        )
        jitted = jax.jit(run, donate_argnums=(0, 1), out_shardings=where)
        return Program(jitted, (*types, jax.tree.map(rows, self.batch)), calls)


def _case(step: TrainStep, state: TrainState, batch: PyTree) -> _Case:
    """Take a step apart; refuse features that other libraries' forms lack."""
    placing: Any = step.placing
    more = step.oracle.has_aux or any(x is not None for x in (state.model_state, state.key))
    fits = not (step.placing is None or more or is_per_replica(state.params))
    got, hint = "an aux, a key, a model state or no mesh", "Only boostax combines them."
    checks.require(
        "forms", "step", got, "on a mesh, with a loss of params and rows alone", fits, hint
    )
    place = placing.placement(state.params)
    place = dataclasses.replace(place, mesh=place.auto_mesh)
    return _Case(step, place, state.params, placing.of_params(state.params), batch)


def _multi_steps(case: _Case) -> Program:
    count = case.step.microbatches
    tx = optax.MultiSteps(case.step.tx, count).gradient_transformation()
    return case.program(case.gradient, calls=count, tx=tx)


def _microbatch(case: _Case) -> Program:
    rows = len(jax.tree.leaves(case.batch)[0]) // case.step.microbatches
    how = optax.microbatching.AccumulationType.SUM
    return case.program(optax.microbatching.microbatch(case.gradient, 1, rows, how))


def _reduced(case: _Case) -> Program:
    """Mark params as reduced, so that gradients and their sums stay unreduced."""
    mesh, over = case.place.mesh, frozenset(case.place.names)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * mesh.devices.ndim)
    case = case._replace(place=dataclasses.replace(case.place, mesh=mesh))
    of, each = case.of, jax.tree.map

    def sums(params: PyTree, batch: PyTree) -> PyTree:
        enter = lambda w, spec: reshard(w, of(spec, reduced=over))  # noqa: E731
        zeros = lambda w, spec: reshard(jnp.zeros_like(w), of(spec, unreduced=over))  # noqa: E731
        leave = lambda g, spec: reshard(g, of(spec, whole=False))  # noqa: E731
        start = each(zeros, params, case.specs)
        grads = case.summed(each(enter, params, case.specs), batch, zeros=start)
        return each(leave, grads, case.specs)

    return case.program(sums, case.step.microbatches)


def _shard_map(case: _Case) -> Program:
    """Sum the gradients of a replica's rows; params are gathered, and gradients scattered, once."""
    mesh, names = case.place.mesh, case.place.names
    others = [x for x in mesh.axis_names if x not in names]
    specs = jax.tree.map(lambda spec: without(spec, others), case.specs)
    cuts = jax.tree.map(lambda spec: cut_of(PartitionSpec(None, *spec), names), specs)

    def reduced(g: jax.Array, cut: Any) -> jax.Array:
        left = names
        for dim, over in cut:
            g, left = axes.scatter(g, over, dim), tuple(x for x in left if x not in over)
        return (lax.psum(g, left) if left else g) / case.place.replicas

    def sums(params: PyTree, batch: PyTree) -> PyTree:
        grads = case.summed(jax.tree.map(joined, params, cuts), batch)
        return jax.tree.map(reduced, grads, cuts)

    how: Any = {"in_specs": (specs, PartitionSpec(None, names)), "out_specs": specs}
    how |= {"mesh": mesh, "axis_names": {*names}, "check_vma": False}
    return case.program(jax.shard_map(sums, **how), case.step.microbatches)


_OTHERS: dict[str, Callable[[_Case], Program]] = {
    "jit and lax.scan": lambda case: case.program(
        functools.partial(case.summed, gradient=case.gradient), case.step.microbatches
    ),
    "optax.MultiSteps": _multi_steps,
    "optax.microbatch": _microbatch,
    "reduced=": _reduced,
    "shard_map by hand": _shard_map,
}
