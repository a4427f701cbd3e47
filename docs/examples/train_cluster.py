"""Train by a loop of your own, in one process or in several on any number of machines.

Usage: python train_cluster.py OUTPUT [CALLS]; run it again to go on where it stopped.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from boostax.run.checkpoint import Checkpointer
from boostax.run.cluster import ending_at_once, initialize
from boostax.run.loop import fit

import boostax

BATCH = 48


def read(index, rows):
    """The rows that this process feeds to its own devices, of a batch that the index decides."""
    x = np.random.default_rng(index).normal(size=(BATCH, 8)).astype(np.float32)[rows]
    return {"x": x, "y": np.sin(x[:, :1])}


def loss_fn(params, batch):
    """The loss of this device's rows; that of the batch is the mean over the devices."""
    hidden = jnp.tanh(batch["x"] @ params["first"])
    return jnp.mean((hidden @ params["last"] - batch["y"]) ** 2)


def main(output, calls):
    """Train so many calls in all, those of earlier runs included."""
    processes = initialize()  # before JAX is asked for devices
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
    tx = optax.chain(boostax.all_reduce("data"), optax.adam(1e-2))
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name="data")
    # The same seed everywhere: params start equal in all processes.
    first = jax.random.normal(jax.random.key(0), (8, 32)) / 3
    params = {"first": first, "last": jnp.zeros((32, 1))}
    state, rows = step.init(params), step.rows(BATCH)
    with Checkpointer(output) as checkpointer:
        start = checkpointer.latest() or 0
        if start:
            state, _ = checkpointer.restore(state, start, reshard=True)
        result = fit(
            step,
            state,
            lambda index: read(index, rows),
            steps=calls,
            start=start,
            checkpointer=checkpointer,
            checkpoint_every=20,
            limit=600.0 if processes.count > 1 else None,
        )
    if processes.first and result.history:
        print(f"call {result.step}: loss {result.history[-1]['loss']:.4f}")


if __name__ == "__main__":
    with ending_at_once():
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60)
