"""The example in f32, by every technique that communicates, as one process of several.

Usage: as the example's; FOLDER gets the params of each technique in the variable NAMES.
"""

import os

import jax
import numpy as np
import optax
import several_processes as example

import boostax

example.POLICY = "O0"


def optimizer():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-2))


def chained(reduction):
    return lambda: optax.chain(reduction, optimizer())


def frozen():
    schedule = boostax.freeze_schedule("continuous", total_steps=12, frozen_fraction=0.4)
    inner = optax.chain(boostax.all_reduce("data"), optax.adamw(3e-2))
    return boostax.scheduled_freeze(inner, {"w": 0, "b": 1}, schedule)


def subspace():
    basis = boostax.subspace.random_basis(example.init_params(), 6)
    return boostax.dynamic_loss_scale(boostax.dim_reduce(basis, axis_name="data"), axis_name="data")


def windowed():
    inner = boostax.accumulate(chained(boostax.all_reduce("data"))(), 3, axis_name="data")
    return boostax.dynamic_loss_scale(inner, axis_name="data")


TECHNIQUES = {
    "mean": chained(boostax.all_reduce("data")),
    "adasum": chained(boostax.adasum("data")),
    "int8": chained(boostax.int8_reduce("data")),
    "top-k": chained(boostax.top_k_reduce("data", 0.1)),
    "delta": lambda: boostax.reduce.adasum_delta(optimizer(), axis_name="data"),
    "local updates": lambda: boostax.reduce.local_updates(optimizer(), 3, axis_name="data"),
    "freezing": frozen,
    "dim_reduce": subspace,
    "window": windowed,
    "shared out": chained(boostax.all_reduce("data")),
}

if __name__ == "__main__":
    options = example.parse()
    example.join(options)
    folder = options.folder
    for name in os.environ["NAMES"].split(","):
        options.folder = folder / name
        options.placement = "zero" if name == "shared out" else "whole"
        params = jax.tree.map(np.asarray, example.train(options, TECHNIQUES[name]()))
        if jax.process_index() == 0:
            np.savez(folder / f"{name}.npz", **params)
