"""A codec: TernGrad's three levels, in one byte an element."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from boostax.reduce import Codec, Message, compress


class Ternary(Codec):
    """The largest magnitude of a leaf with a sign, or zero: the nearest of the three."""

    def reduce(self, leaves: Sequence[jax.Array], state: Any, names: tuple[str, ...]) -> Message:
        """One maximum and one sum of int8 for each leaf; for up to 127 replicas."""
        means, held = [], []
        for x in leaves:
            unit = lax.pmax(lax.stop_gradient(jnp.abs(x).max()), names)
            codes = jnp.round(x / jnp.where(unit > 0, unit, 1)).astype(jnp.int8)
            total = lax.psum(codes, names).astype(x.dtype)
            means.append(total * unit / lax.axis_size(names))
            held.append(x - codes.astype(x.dtype) * unit)
        return Message(means, held, state)


def ternary_reduce(axis_name: Any) -> Any:
    """Send a sign or nothing of every element."""
    return compress(Ternary(), axis_name, name="ternary_reduce")
