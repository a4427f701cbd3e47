"""Section C: one to eight replicas, against NumPy in float64 and against each other, bit by bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import boostax
from boostax._core.replicas import PerReplica
from boostax.testing import drawn
from boostax.testing._case import even_params, example_grads
from cells.programs import AXIS, mesh_of
from cells.subject import Cell, Subject, require

PyTree = Any
TOLERANCE = 1e-5


def on_every_replica(subject: Subject, replicas: int) -> tuple[PyTree, Any, PyTree]:
    """Params and state of every replica, stacked, after one change; and the stacked gradients."""
    tx, params = subject.mapped(optax.sgd(1.0)), even_params()
    each = [example_grads(params, r) for r in range(replicas)]
    grads = jax.tree.map(lambda *x: jnp.stack(x), *each)

    def local(params: PyTree, grads: PyTree) -> Any:
        grads, state = jax.tree.map(lambda g: g[0], grads), tx.init(params)
        for _ in range(subject.calls):
            params, state = boostax.apply_gradients(drawn(tx), grads, state, params)
        return jax.tree.map(lambda x: x[None], (params, state))

    step = jax.shard_map(local, mesh=mesh_of(replicas), in_specs=(P(), P(AXIS)), out_specs=P(AXIS))
    return *jax.device_get(jax.jit(step)(params, grads)), jax.device_get(grads)


def with_replicas(replicas: int) -> Cell:
    def cell(subject: Subject) -> None:
        params, state, grads = on_every_replica(subject, replicas)
        differs = lambda node: isinstance(node, PerReplica)  # noqa: E731
        shared = jax.tree.map(lambda x: None if differs(x) else x, state, is_leaf=differs)
        for leaf in jax.tree.leaves((None if subject.own_params else params, shared)):
            equal = all(row.tobytes() == leaf[0].tobytes() for row in leaf)
            require(equal, "replicas differ in bits")
        wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
        waits: dict[str, Any] = {}
        if subject.accounts:
            found = jax.tree.leaves(
                state, is_leaf=lambda node: isinstance(node, boostax.states.CompressedState)
            )
            node = next(x for x in found if isinstance(x, boostax.states.CompressedState))
            # A leaf that travels as it is has none.
            held = node.residual.local.items()
            waits = {name: wide(x).mean(0) for name, x in held if x is not None}
        for name, start in even_params().items():
            rows = wide(grads[name])
            if subject.linear or subject.accounts:
                wanted = rows.mean(0) if subject.reference is None else subject.reference(rows)
                went = wide(start) - wide(params[name]).mean(0) + waits.get(name, 0.0)
                error = abs(went - wanted).max()
                require(error <= TOLERANCE, f"{name} is {error:.1e} from the float64 reference")

    return cell


CELLS: dict[str, Cell] = {f"{n} replicas": with_replicas(n) for n in range(1, 9)}
