"""Reductions of stacked gradients: under ``vmap``, in ``shard_map``, and what they send."""

import dataclasses
import functools
import math

import costs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import boostax

# How the two matrices of each layer of ``loss_fn`` are sharded.
PLACEMENTS = {
    "replicated": {"up": P(), "down": P()},
    "FSDP": {"up": P("data"), "down": P("data")},
    "HSDP": {"up": P("model"), "down": P("model")},
    "tensor parallel": {"up": P(None, "model"), "down": P("model")},
    "tensor parallel, FSDP": {"up": P("data", "model"), "down": P("model", "data")},
}


def loss_fn(params, x):
    """Two matrices a layer, whose output is added to its input."""
    for layer in params:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return jnp.mean(x**2)


def correlated(shapes, replicas=8, seed=0, magnitude=1.0):
    """A tree of gradients ``(replicas, *shape)`` in f32, with a part in common."""
    draw = np.random.default_rng(seed).normal
    rows = lambda x: np.float32(magnitude * (draw(size=x) + draw(size=(replicas, *x))))  # noqa: E731
    return jax.tree.map(rows, shapes, is_leaf=lambda x: isinstance(x, tuple))


@dataclasses.dataclass(frozen=True)
class InTurn(boostax.reduce.Codec):
    """Send one row of every matrix, row after row: each matrix counts its own steps."""

    lossy = True

    def serves(self, leaf):
        return leaf.ndim == 2

    def init(self, leaves):
        return boostax.reduce.PerLeaf([jnp.zeros((), jnp.int32) for _ in leaves])

    def reduce(self, leaves, state, names):
        pairs = zip(leaves, state.values, strict=True)
        sent = [jnp.where(jnp.arange(len(x))[:, None] == n % len(x), x, 0) for x, n in pairs]
        residuals = [x - y for x, y in zip(leaves, sent, strict=True)]
        state = boostax.reduce.PerLeaf([n + 1 for n in state.values])
        return boostax.reduce.Message([jax.lax.pmean(x, names) for x in sent], residuals, state)


def in_turn(axis_name, **options):
    """A codec with state for each leaf, which cannot send some leaves."""
    return boostax.reduce.compress(InTurn(), **options, axis_name=axis_name)


def updating(tx):
    """A first update, without its state."""
    return lambda grads: tx.update(grads, tx.init(grads))[0]


@functools.cache
def reducer(make, **options):
    """The first update of a reduction on all replicas, by gradients ``(replicas, ...)``."""
    return jax.jit(jax.vmap(updating(make("data", **options)), axis_name="data"))


def reduced(make, grads, **options):
    """The reduced leaves, once it is seen that all replicas got the same."""
    return jax.tree.map(the_one, jax.device_get(reducer(make, **options)(grads)))


def at_once(tx):
    """First updates and states of all replicas, by gradients ``(replicas, ...)``."""
    return jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data"))


def the_one(copies):
    """What all replicas have, once it is seen that they have the same."""
    for copy in copies[1:]:
        np.testing.assert_array_equal(copy, copies[0], strict=True)
    return copies[0]


def repeated(tx, grads, steps=1):
    """The means of the last of some steps with the same gradients, and the state."""
    state = jax.vmap(tx.init, axis_name="data")(grads)
    update, means = jax.jit(jax.vmap(tx.update, axis_name="data")), None
    for _ in range(steps):
        means, state = update(grads, state)
    return means, state


def own_means(state):
    """Means over the replicas of what each holds for itself, where there is one."""
    nodes = boostax._core.trees.find(state, boostax.PerReplica)
    floating = [x for x in jax.tree.leaves(nodes) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return [np.asarray(x, np.float64).mean(0) for x in floating]


def mesh_of(kind=jax.sharding.AxisType.Auto, **axes):
    """A mesh over the first devices, by the sizes of its axes."""
    devices = jax.devices()[: math.prod(axes.values())]
    kinds = (kind,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)


def mapped(update, mesh, in_specs=P("data"), out_specs=P(), **options):
    """The update inside ``shard_map``; leaves ``(replicas, ...)`` lose their first dimension."""
    drop = functools.partial(jax.tree.map, lambda x: x[0])
    specs = {"in_specs": (in_specs,), "out_specs": out_specs}
    return jax.jit(jax.shard_map(lambda g: update(drop(g)), mesh=mesh, **specs, **options))


def sends(update, shapes, mesh, in_specs=P("data")):
    """Collectives of an update of leaves of these sizes or shapes; the mesh may be abstract."""
    replicas = math.prod(mesh.shape[x] for x in jax.tree.leaves(tuple(in_specs)))
    stacked = [jax.ShapeDtypeStruct((replicas, *np.ravel(x)), jnp.float32) for x in shapes]
    return costs.collectives(mapped(update, mesh, in_specs), stacked)
