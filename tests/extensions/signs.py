"""A codec: the sign of each element in one bit, and a magnitude; or a vote of the signs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from boostax.reduce import Codec, Message, compress


def gathered(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Stack what every replica holds: a sum, because JAX types that as equal on all."""
    slots = jnp.zeros((lax.axis_size(names), *x.shape), x.dtype)
    return lax.psum(slots.at[lax.axis_index(names)].set(x), names)


@dataclasses.dataclass(frozen=True)
class Signs(Codec):
    """The mean of each replica's signs times its mean magnitude; or the sign of most."""

    majority: bool = False
    lossy = True

    def reduce(self, leaves: Sequence[jax.Array], state: Any, names: tuple[str, ...]) -> Message:
        """Send eight signs in a byte, and a number for each leaf."""
        means, residuals = [], []
        for x in leaves:
            size = jnp.ones((), x.dtype) if self.majority else jnp.abs(x).mean()
            bits = gathered(jnp.packbits(x.ravel() >= 0), names)
            signs = jnp.unpackbits(bits, axis=1, count=x.size).astype(x.dtype) * 2 - 1
            total = (gathered(size, names)[:, None] * signs).sum(0).reshape(x.shape)
            means.append(jnp.sign(total) if self.majority else total / len(bits))
            residuals.append(x - jnp.where(x >= 0, size, -size))  # not sent: the residual
        return Message(means, residuals, state)


def sign_reduce(axis_name: Any, majority: bool = False) -> Any:
    """Send a bit of every element; a majority (signSGD) has no magnitude to hold back."""
    how: Any = {"axis_name": axis_name, "error_feedback": not majority}
    return compress(Signs(majority), name="sign_reduce", **how)
