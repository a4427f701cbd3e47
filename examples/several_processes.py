"""Train in several processes, save, and resume after a kill, even with another number of processes.

Run the program alone, or run each process in a terminal (or on a machine) of its own:

    python examples/several_processes.py runs/several
    python examples/several_processes.py runs/several --coordinator 10.0.0.1:9876 --processes 2 --index 0
    python examples/several_processes.py runs/several --coordinator 10.0.0.1:9876 --processes 2 --index 1

Under SLURM, Open MPI, an indexed Kubernetes job or on TPU pods, JAX finds all three options if you
start the program with ``--detect``. Killed at any moment and started again, the program continues
from its last checkpoint, and ends with the same bits if processes and devices are the same.
"""  # noqa: E501

import argparse
import os
import pathlib
import signal
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import boostax
from boostax.checkpoint import Checkpointer

BATCH, INPUTS, OUTPUTS = 48, 16, 8
WINDOW = 3
POLICY = "O2"  # the model computes in f16
# How params and the optimizer's state lie on the devices: any of them reads what another saved.
PLACEMENTS = {
    "whole": {},
    "zero": {"shard_optimizer": True},
    "fsdp": {"param_specs": {"w": P("data"), "b": P("data")}},
}


def init_params():
    """Return the params, equal in all processes since the seed is."""
    key = jax.random.key(0)
    return {"w": jax.random.normal(key, (INPUTS, OUTPUTS)) / 4, "b": jnp.zeros(OUTPUTS)}


def read(call, rows):
    """Return the rows that this process feeds to its devices, of a batch that the call decides."""
    x = np.random.default_rng(call).normal(size=(BATCH, INPUTS)).astype(np.float32)[rows]
    return {"x": x, "y": np.tanh(x[:, :OUTPUTS] - x[:, OUTPUTS:])}


def loss_fn(params, batch):
    """Return the loss of a device's rows; that of the batch is the mean over the devices."""
    found = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jnp.mean((found - batch["y"]) ** 2)


def make_optimizer():
    """Return a chain with a state of everything: a scale, a window, residuals, moments."""
    inner = optax.chain(boostax.top_k_reduce("data", 0.1), optax.adam(2e-2))
    window = boostax.accumulate(inner, WINDOW, axis_name="data")
    # It grows beyond f16 and is halved again: such a step never happened, before a kill and after.
    return boostax.dynamic_loss_scale(
        window, init_scale=2.0**12, growth_interval=4, axis_name="data"
    )


def make_step(devices, placement, tx):
    """Return the train step on a mesh of the devices."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), ("data",), auto, devices=devices)
    how = {"policy": POLICY, **PLACEMENTS[placement]}
    return boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name="data", **how)


def join(options):
    """Join the other processes, before JAX is asked for devices."""
    if options.device_count:
        jax.config.update("jax_num_cpu_devices", options.device_count)
    if options.detect:
        jax.distributed.initialize()
    elif options.processes > 1:
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.index,
            cluster_detection_method="deactivate",
        )


def make_stopping():
    """Return a function of the calls done: whether a SIGTERM has come, in all processes alike."""
    if jax.process_count() > 1:
        return multihost_utils.reached_preemption_sync_point  # JAX listens for all of them
    came = []
    signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    return lambda done: bool(came)


def train(options, tx):
    """Train so many calls in all, those of earlier runs included; return the params."""
    step = make_step(jax.devices(), options.placement, tx)
    state, rows = step.init(init_params()), step.rows(BATCH)
    say = print if jax.process_index() == 0 else lambda *_, **__: None
    stopping = make_stopping()
    with Checkpointer(options.folder) as checkpointer:
        done = checkpointer.latest() or 0
        if done:
            state, _ = checkpointer.restore(state, done, reshard=True)
            say(f"going on after call {done}", flush=True)
        while done < options.calls:
            state, metrics = step(state, read(done, rows))
            done += 1
            found = {name: f"{float(x):g}" for name, x in metrics.items()}
            say(f"call {done}: {found}", flush=True)
            stop = stopping(done)
            if stop or done % options.save_every == 0 or done == options.calls:
                checkpointer.save(done, state)
            if stop:
                say(f"stopped after call {done}, saved", flush=True)
                break
    return step.common_params(state)


def parse():
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", type=pathlib.Path, help="of the checkpoints, on a disk that all processes see")
    add("--calls", type=int, default=60, help="of the step in all")
    add("--save-every", type=int, default=10)
    add("--placement", choices=PLACEMENTS, default="whole")
    add("--device-count", type=int, help="devices that each process emulates on CPU")
    add("--detect", action="store_true", help="SLURM, Open MPI, Kubernetes or TPU started it")
    add("--coordinator", help="host:port of process 0")
    add("--processes", type=int, default=1)
    add("--index", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    join(options)
    try:
        train(options, make_optimizer())
    except Exception:
        if jax.process_count() == 1:
            raise
        # JAX's shutdown would wait for the process that is gone: say why and end at once.
        traceback.print_exc()
        os._exit(1)
