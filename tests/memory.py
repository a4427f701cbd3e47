"""Temporary memory of compiled programs."""

import jax

import boostax
from boostax.testing import drawn


def reduction_bytes(tree):
    """What the largest magnitudes take by themselves, and so in a program with nothing of ours.

    Nothing, but XLA:CPU before 0.10.2 writes out what a reduction reads.
    """
    largest = jax.jit(lambda tree: jax.tree.map(lambda x: jax.numpy.max(jax.numpy.abs(x)), tree))
    return largest.lower(tree).compile().memory_analysis().temp_size_in_bytes


def compiled_step(tx, params, grads=None):
    """Compile ``apply_gradients`` for shapes, with params and state donated."""
    step = lambda p, s, g: boostax.apply_gradients(drawn(tx), g, s, p)  # noqa: E731
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
        params, jax.eval_shape(tx.init, params), params if grads is None else grads
    )
    return lowered.compile()


def temporary_bytes(*args):
    """Return the temporary memory of ``compiled_step``."""
    return compiled_step(*args).memory_analysis().temp_size_in_bytes
