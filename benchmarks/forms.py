"""An optimizer step with K micro-batches in five forms, as one writes them without boostax.

The forms differ in where gradients are summed over the replicas.
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

import boostax

PyTree = Any


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


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss, an optimizer and a placement.

    Attributes:
      loss: ``(params, batch) -> scalar``.
      tx: an optimizer without a reduction.
      mesh: the mesh; the batch is split over its axes ``names``.
      params, specs, batch: types of the params, their specs, and the batch.
      count: micro-batches per optimizer step.
    """

    loss: Callable[[Any, Any], jax.Array]
    tx: optax.GradientTransformation
    mesh: Mesh
    names: tuple[str, ...]
    params: PyTree
    specs: PyTree
    batch: PyTree
    count: int

    def sharding(self, spec: PartitionSpec, gathered: bool = False, **marks: Any) -> NamedSharding:
        """Return the sharding of a param, or of a param that is gathered from the replicas."""
        kept = [None if gathered and name in self.names else name for name in spec]
        return NamedSharding(self.mesh, PartitionSpec(*kept, **marks))

    def gradient(self, params: PyTree, rows: PyTree) -> PyTree:
        """Differentiate a micro-batch in plain ``jit``, with gathered params.

        Without the gather XLA might shard the activations.
        """

        def gathered(w: jax.Array, spec: PartitionSpec) -> jax.Array:
            sharded = any(name in self.names for name in spec)
            return lax.with_sharding_constraint(w, self.sharding(spec, True)) if sharded else w

        return jax.grad(lambda w: self.loss(jax.tree.map(gathered, w, self.specs), rows))(params)

    def summed(self, gradient: Any, params: PyTree, batch: PyTree, zeros: Any = None) -> PyTree:
        """Scan over micro-batches and add up their gradients."""
        zeros = jax.tree.map(jnp.zeros_like, params) if zeros is None else zeros
        add = lambda sums, rows: (jax.tree.map(jnp.add, sums, gradient(params, rows)), None)  # noqa: E731
        return lax.scan(add, zeros, batch)[0]

    def program(self, sums: Any, *lead: int, calls: int = 1, tx: Any = None) -> Program:
        """Return the program of a form.

        Args:
          sums: ``(params, batch) -> gradients``, summed over the micro-batches of a call.
          *lead: micro-batches on a leading dimension of the batch.
          calls: calls per optimizer step.
          tx: the optimizer; by default the case's optimizer.
        """
        tx = tx or self.tx

        def rows(x: Any) -> jax.ShapeDtypeStruct:
            shape = *lead, x.shape[0] // math.prod((calls, *lead)), *x.shape[1:]
            spec = PartitionSpec(*[None] * len(lead), self.names)
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self.sharding(spec))

        def run(params: PyTree, opt_state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            grads = jax.tree.map(lambda g: g * (calls / self.count), sums(params, batch))
            return boostax.apply_gradients(tx, grads, opt_state, params)

        state = jax.eval_shape(tx.init, self.params)
        how: Any = {"axis_name": self.names, "param_specs": self.specs}
        of_state = boostax.states.state_specs(tx, self.params, **how)
        where = jax.tree.map(self.sharding, (self.specs, of_state))
        typed = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)  # noqa: E731
        types = jax.tree.map(typed, (self.params, state), where)
        jitted = jax.jit(run, donate_argnums=(0, 1), out_shardings=where)
        return Program(jitted, (*types, jax.tree.map(rows, self.batch)), calls)


def with_boostax(case: Case) -> Program:
    tx = optax.chain(boostax.all_reduce(), case.tx)
    how = {"mesh": case.mesh, "axis_name": case.names, "param_specs": case.specs}
    step = boostax.make_train_step(case.loss, tx, microbatches=case.count, **how)
    return Program(step, (step.init(case.params), case.batch))


def jit_and_scan(case: Case) -> Program:
    return case.program(functools.partial(case.summed, case.gradient), case.count)


def multi_steps(case: Case) -> Program:
    tx = optax.MultiSteps(case.tx, case.count).gradient_transformation()
    return case.program(case.gradient, calls=case.count, tx=tx)


def microbatch(case: Case) -> Program:
    rows = len(jax.tree.leaves(case.batch)[0]) // case.count
    how = optax.microbatching.AccumulationType.SUM
    return case.program(optax.microbatching.microbatch(case.gradient, 1, rows, how))


def reduced(case: Case) -> Program:
    """Mark params as reduced, so that gradients and their sums stay unreduced."""
    names, kinds = case.mesh.axis_names, (AxisType.Explicit,) * case.mesh.devices.ndim
    case = dataclasses.replace(case, mesh=Mesh(case.mesh.devices, names, axis_types=kinds))
    over = frozenset(case.names)

    def sums(params: PyTree, batch: PyTree) -> PyTree:
        enter = lambda w, spec: reshard(w, case.sharding(spec, True, reduced=over))  # noqa: E731
        zeros = lambda w, spec: reshard(  # noqa: E731
            jnp.zeros_like(w), case.sharding(spec, True, unreduced=over)
        )
        leave = lambda g, spec: reshard(g, case.sharding(spec))  # noqa: E731
        start, whole = (jax.tree.map(x, params, case.specs) for x in (zeros, enter))
        grads = case.summed(jax.grad(case.loss), whole, batch, start)
        return jax.tree.map(leave, grads, case.specs)

    return case.program(sums, case.count)


def by_shard_map(case: Case) -> Program:
    """Sum the gradients of a replica's rows; params are gathered, and gradients scattered, once."""
    names = case.names
    mine = lambda spec: PartitionSpec(*(x if x in names else None for x in spec))  # noqa: E731
    specs = jax.tree.map(mine, case.specs)

    def gathered(w: jax.Array, spec: PartitionSpec) -> jax.Array:
        for dim, name in enumerate(spec):
            w = w if name is None else lax.all_gather(w, name, axis=dim, tiled=True)
        return w

    def scattered(g: jax.Array, spec: PartitionSpec) -> jax.Array:
        for dim, name in enumerate(spec):
            if name is not None:
                g = lax.psum_scatter(g, name, scatter_dimension=dim, tiled=True)
        rest = tuple(name for name in names if name not in spec)
        replicas = math.prod(case.mesh.shape[name] for name in names)
        return (lax.psum(g, rest) if rest else g) / replicas

    def sums(params: PyTree, batch: PyTree) -> PyTree:
        whole = jax.tree.map(gathered, params, specs)
        return jax.tree.map(scattered, case.summed(jax.grad(case.loss), whole, batch), specs)

    how: Any = {"in_specs": (specs, PartitionSpec(None, names)), "out_specs": specs}
    how |= {"mesh": case.mesh, "axis_names": {*names}, "check_vma": False}
    return case.program(jax.shard_map(sums, **how), case.count)


FORMS: dict[str, Callable[[Case], Program]] = {
    "boostax": with_boostax,
    "jit and lax.scan": jit_and_scan,
    "optax.MultiSteps": multi_steps,
    "optax.microbatch": microbatch,
    "reduced=": reduced,
    "shard_map by hand": by_shard_map,
}


def reason(error: Exception) -> str:
    """Return the first sentence of an error."""
    return re.split(r"\.?(?:\s*$|\n|\. )", str(error) or type(error).__name__)[0]
