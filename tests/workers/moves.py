"""The example in f32 with another reduction, and the sum of all that came out of it."""

import os
from typing import NamedTuple

import jax
import optax
import several_processes as example

import boostax

# The sums of gradients are compared with float64.
example.POLICY = "O0"


class Within(boostax.checkpoint.Checkpointer):
    """Saves with so many micro-batches in the open window alone; with any if that is 0."""

    def save(self, step, state, meta=None):
        if int(os.environ["OPEN"]) in (0, step % example.WINDOW):
            super().save(step, state, meta)


class Ledger(NamedTuple):
    """The sum of all that came out of the reduction."""

    reduced: dict[str, jax.Array]


REDUCTIONS = {
    "mean": lambda: boostax.all_reduce("data"),
    "top-k": lambda: boostax.top_k_reduce("data", 0.1),
    "int8": lambda: boostax.int8_reduce("data"),
}


def optimizer(reduction):
    def update(updates, state, params=None):
        return updates, Ledger(jax.tree.map(jax.numpy.add, state.reduced, updates))

    init = lambda params: Ledger(jax.tree.map(jax.numpy.zeros_like, params))  # noqa: E731
    ledger = optax.GradientTransformation(init, update)
    inner = optax.chain(REDUCTIONS[reduction](), ledger, optax.adam(2e-2))
    window = boostax.accumulate(inner, example.WINDOW, axis_name="data")
    return boostax.dynamic_loss_scale(window, axis_name="data")


if __name__ == "__main__":
    options = example.parse()
    example.join(options)
    example.Checkpointer = Within
    example.train(options, optimizer(os.environ["REDUCTION"]))
