"""One process of several: trains a small model by every technique that communicates.

Usage: techniques.py OUT DEVICES [NAME ...], with the variables that boostax.run.cluster.initialize
reads; process 0 writes the params of each technique, or of those named, to OUT.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from boostax.run.cluster import ending_at_once, initialize
from boostax.run.loop import fit

import boostax

AXIS = "data"
CALLS = 12
ROWS = 48


def optimizer():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-2))


def chained(reduction):
    return lambda: optax.chain(reduction, optimizer())


def frozen():
    groups = boostax.freeze.prefix_groups(initial(), 3, order=["first", "second", "last"])
    schedule = boostax.freeze_schedule("continuous", total_steps=CALLS, frozen_fraction=0.5)
    inner = optax.chain(boostax.all_reduce(AXIS), optax.adamw(3e-2))
    return boostax.scheduled_freeze(inner, groups, schedule)


def subspace():
    basis = boostax.subspace.random_basis(initial(), 6)
    return boostax.dynamic_loss_scale(boostax.dim_reduce(basis, axis_name=AXIS), axis_name=AXIS)


TECHNIQUES = {
    "mean": chained(boostax.all_reduce(AXIS)),
    "adasum": chained(boostax.adasum(AXIS)),
    "int8": chained(boostax.int8_reduce(AXIS)),
    "top-k": chained(boostax.top_k_reduce(AXIS, 0.1)),
    "delta": lambda: boostax.reduce.adasum_delta(optimizer(), AXIS),
    "local updates": lambda: boostax.reduce.local_updates(optimizer(), AXIS, 3),
    "freezing": frozen,
    "dim_reduce": subspace,
    "window": lambda: boostax.dynamic_loss_scale(
        boostax.accumulate(chained(boostax.all_reduce(AXIS))(), 3, axis_name=AXIS), axis_name=AXIS
    ),
    "shared out": chained(boostax.all_reduce(AXIS)),
}


def initial():
    random = np.random.default_rng(0)
    layer = lambda n, m: {  # noqa: E731
        "kernel": jnp.asarray(random.normal(size=(n, m)) / n**0.5, jnp.float32),
        "bias": jnp.zeros(m, jnp.float32),
    }
    return {"first": layer(8, 16), "second": layer(16, 16), "last": layer(16, 4)}


def loss_fn(params, batch):
    hidden = batch["inputs"]
    for name in ("first", "second"):
        hidden = jnp.tanh(hidden @ params[name]["kernel"] + params[name]["bias"])
    found = hidden @ params["last"]["kernel"] + params["last"]["bias"]
    return jnp.mean((found - batch["targets"]) ** 2)


def batch(index, rows):
    inputs = np.random.default_rng(index).normal(size=(ROWS, 8)).astype(np.float32)[rows]
    targets = np.stack([inputs[:, 0], inputs[:, 1] ** 2, inputs[:, :3].sum(1), inputs[:, 4]], 1)
    return {"inputs": inputs, "targets": targets}


def main(out, devices, names):
    jax.config.update("jax_num_cpu_devices", devices)
    processes = initialize(heartbeat=20, patience=60)
    mesh = jax.make_mesh((processes.count * devices,), (AXIS,), (jax.sharding.AxisType.Auto,))
    found = {}
    for name in names or TECHNIQUES:
        share = name == "shared out"
        step = boostax.make_train_step(
            loss_fn, TECHNIQUES[name](), mesh=mesh, axis_name=AXIS, shard_optimizer=share
        )
        rows = step.rows(ROWS)
        read = functools.partial(batch, rows=rows)
        result = fit(step, step.init(initial()), read, steps=CALLS)
        params = jax.tree.map(np.asarray, step.common_params(result.state))
        found |= {f"{name}/{i}": leaf for i, leaf in enumerate(jax.tree.leaves(params))}
        found[f"{name}/loss"] = np.float32(result.history[-1]["loss"])
    if processes.first:
        np.savez(out, **found)


if __name__ == "__main__":
    with ending_at_once():
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
