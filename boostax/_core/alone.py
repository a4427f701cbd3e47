# SPDX-License-Identifier: Apache-2.0
"""What one device of a mapped program computes: the program, run without its network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from boostax._core import interpret, jaxprs
from boostax._core.costs import RING, kind

_CASTS = ("pvary", "pcast")


def run_alone(traced: jaxprs.ClosedJaxpr, args: Sequence[Any], real: jax.Array) -> list[Any]:
    """What one device of a ``shard_map`` computes, a local copy in the place of what it receives.

    The arguments, and so the results, may have the shapes they have inside the mapped function;
    ``fit`` gives them.

    Args:
      traced: of a function mapped over devices that need not exist.
      args: its arguments, flat.
      real: true, and an argument of what is compiled: the compiler can then neither see through
        what is received nor drop what is sent.
    """

    def run(body: jaxprs.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        inside: list[Any] = [var.aval for var in body.jaxpr.invars]
        fitted = [fit(x, aval.shape) for x, aval in zip(args, inside, strict=True)]
        return interpret.evaluate(body, fitted, rule)

    def rule(eqn: Any, args: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in _CASTS:
            return args
        if name == "axis_index":
            return [jnp.where(real, 0, 1).astype(jnp.int32)]
        if kind(name) in RING:
            return [_received(x, v.aval, real) for x, v in zip(args, eqn.outvars, strict=True)]
        found = interpret.opened(eqn, args, run, _Arrays)
        if found is not None:
            return found
        outs = eqn.primitive.bind(*args, **eqn.params)
        return outs if eqn.primitive.multiple_results else [outs]

    return interpret.evaluate(traced, args, rule)


def fit(x: Any, shape: tuple[int, ...]) -> Any:
    """One device's part of a value that has the shape outside the mapped function, or has it."""
    if jnp.shape(x) == shape:
        return x
    return x[None] if (1, *x.shape) == shape else x[tuple(slice(d) for d in shape)]


class _Arrays:
    """Branches and loops of arrays."""

    @staticmethod
    def choose(index: Any, branches: Sequence[Callable[..., Any]], operands: list[Any]) -> Any:
        return lax.switch(index, branches, *operands)

    @staticmethod
    def scan(eqn: Any, body: Callable[..., Any], carry: list[Any], xs: list[Any]) -> Any:
        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = body(*carry, *x)
            return outs[: len(carry)], outs[len(carry) :]

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, stacked = lax.scan(step, carry, xs, **options)
        return [*carry, *stacked]

    @staticmethod
    def loop(test: Callable[..., Any], body: Callable[..., Any], carry: list[Any]) -> Any:
        return lax.while_loop(lambda carry: test(*carry)[0], lambda carry: body(*carry), carry)


def _received(x: jax.Array, aval: Any, real: jax.Array) -> jax.Array:
    """What a collective brings: its operand, as often as it takes to fill the shape."""
    copies = lambda: jnp.resize(x, aval.shape)  # noqa: E731
    return lax.cond(real, copies, lambda: jnp.zeros(aval.shape, aval.dtype))
