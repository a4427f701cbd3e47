"""A program to audit, of shapes alone: ``boostax audit audited:program --cpu-devices 8``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import boostax


def loss_fn(params, batch):
    """Any loss of whole params and a batch."""
    hidden = jnp.tanh(batch["x"] @ params["first"])
    return jnp.mean((hidden @ params["last"] - batch["y"]) ** 2)


def program(devices):
    """The step, and what it is called with."""
    mesh = Mesh(np.array(devices), ("data",))
    tx = optax.chain(boostax.all_reduce("data"), optax.adamw(1e-3))
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name="data", microbatches=8)
    params = {
        "first": jax.ShapeDtypeStruct((64, 256), "f"),
        "last": jax.ShapeDtypeStruct((256, 1), "f"),
    }
    rows = 16 * len(devices)
    batch = {"x": jax.ShapeDtypeStruct((rows, 64), "f"), "y": jax.ShapeDtypeStruct((rows, 1), "f")}
    return step, step.init(params), batch
