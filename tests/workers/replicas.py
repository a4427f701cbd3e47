"""Two processes that differ in one thing, each with the example's model, under ``check_replicas``.

Usage: as the example's; DIFFERENCES names what the last process has of its own.
"""

import importlib.metadata
import os

import jax
import numpy as np
import optax
import several_processes as example

import boostax

CALLS = 10


def train(differs, odd):
    """Train, and print the table of the replicas that differ, with the call that found them."""
    rate = 3e-2 if odd and differs == "rate" else 2e-2
    rows = 96 if odd and differs == "rows" else example.BATCH
    factor = 0.5 if odd and differs == "code" else 1.0
    version = importlib.metadata.version
    if odd and differs == "version":
        importlib.metadata.version = lambda name: "0.0" if name == "optax" else version(name)
    inner = optax.chain(boostax.all_reduce("data"), optax.adam(rate))
    tx = boostax.precision.check_replicas(boostax.dynamic_loss_scale(inner), every=2)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
    loss_fn = lambda params, batch: factor * example.loss_fn(params, batch)  # noqa: E731
    step = boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name="data")
    params = example.init_params()
    if odd and differs == "seed":
        params["w"] = jax.random.normal(jax.random.key(1), params["w"].shape) / 4
    state = step.init(params)
    local = rows // jax.process_count()
    for call in range(CALLS):
        batch = example.read(call, np.arange(local) % example.BATCH)
        state, metrics = step(state, batch)
        try:
            boostax.precision.raise_if_diverged(state)
        except RuntimeError as error:
            print(f"{differs}: after call {call + 1}, applied {int(metrics['applied'])}: {error}")
            break
    else:
        print(f"{differs}: nothing was found")
    importlib.metadata.version = version


if __name__ == "__main__":
    options = example.parse()
    example.join(options)
    odd = jax.process_index() == jax.process_count() - 1
    for differs in os.environ["DIFFERENCES"].split(","):
        train(differs, odd)
