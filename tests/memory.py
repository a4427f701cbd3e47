"""Temporary memory of compiled programs."""

import jax
import jax.numpy as jnp


def reduction_bytes(tree):
    """What the largest magnitudes take by themselves, and so in a program with nothing of ours.

    Nothing, but XLA:CPU before 0.10.2 writes out what a reduction reads.
    """
    largest = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.max(jnp.abs(x)), tree))
    return largest.lower(tree).compile().memory_analysis().temp_size_in_bytes
