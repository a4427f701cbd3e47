# SPDX-License-Identifier: Apache-2.0
"""Take quasi-Newton directions and a backtracking line search in a few coordinates."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class SubspaceRule:
    r"""Says how directions are made and steps accepted.

    Attributes:
      tries: lengths tried, 1, shrink, shrink**2, ...
      shrink: in (0, 1).
      slope: the share of the decrease promised by the slope that suffices (Armijo's constant).
      slack: of the loss, how much worse still counts as equal: rounding.
      curvature: a pair (s, y) is used if ``y.s > curvature * |y| * |s|``.
      least_curvature: and if ``y.s`` is above this.
      scaled: whether the first matrix is ``y.s / y.y`` times the identity.
      failure: what becomes of the matrix when no length suffices: ``"reset"`` to the identity times
        the last length tried, or ``"rollback"`` to what it was before the step.
      towards_mean: whether the first step goes to the mean of the snapshots, where that is known
        and the way leads downhill.
    """

    tries: int = 10
    shrink: float = 0.5
    slope: float = 1e-4
    slack: float = 1e-6
    curvature: float = 1e-4
    least_curvature: float = 0.0
    scaled: bool = True
    failure: Literal["reset", "rollback"] = "reset"
    towards_mean: bool = True


# MindSpore 2.10: two lengths, the identity to begin with, everything back when both fail.
MINDSPORE = SubspaceRule(2, 0.55, 0.4, 0.0, 0.0, 1e-20, False, "rollback", False)
RULES = {"boostax": SubspaceRule(), "mindspore": MINDSPORE}


class Memory(NamedTuple):
    """Holds what is known of the curvature in k coordinates.

    Attributes:
      inverse: f32 or wider ``(k, k)``, the inverse Hessian as it is believed to be.
      gradient: ``(k,)``, the last one.
      step: ``(k,)``, the last one taken.
      started: bool, whether there is a last gradient.
      paired: bool, whether any pair has been used.
    """

    inverse: jax.Array
    gradient: jax.Array
    step: jax.Array
    started: jax.Array
    paired: jax.Array


class Search(NamedTuple):
    """Holds what a line search found.

    Attributes:
      length: scalar of the loss's dtype, 0 if none suffices.
      accepted: bool scalar.
      tries: i32 scalar, losses computed.
      last: the last length tried.
    """

    length: jax.Array
    accepted: jax.Array
    tries: jax.Array
    last: jax.Array


def empty(k: int, dtype: Any) -> Memory:
    """Return a memory of nothing: the identity."""
    zeros, no = lambda: jnp.zeros(k, dtype), lambda: jnp.zeros((), bool)
    return Memory(jnp.eye(k, dtype=dtype), zeros(), zeros(), no(), no())


def learn(memory: Memory, gradient: jax.Array, rule: SubspaceRule) -> Memory:
    r"""Update the inverse Hessian by BFGS with a new gradient, where the pair can be trusted.

    .. math:: H \leftarrow V^\top H V + \rho s s^\top, \quad V = I - \rho y s^\top, \quad
      \rho = 1 / y^\top s
    """
    s, y = memory.step, gradient - memory.gradient
    product = y @ s
    lengths = jnp.sqrt((y @ y) * (s @ s))
    trusted = (product > rule.curvature * lengths) & (product > rule.least_curvature)
    use = memory.started & trusted
    rho = 1.0 / jnp.where(use, product, 1.0)
    inverse = memory.inverse
    if rule.scaled:
        first = jnp.eye(s.size, dtype=inverse.dtype) * product / jnp.where(use, y @ y, 1.0)
        inverse = jnp.where(memory.paired, inverse, first)
    v = jnp.eye(s.size, dtype=inverse.dtype) - rho * jnp.outer(y, s)
    updated = v.T @ inverse @ v + rho * jnp.outer(s, s)
    return memory._replace(
        inverse=jnp.where(use, updated, memory.inverse),
        gradient=gradient,
        started=jnp.ones((), bool),
        paired=memory.paired | use,
    )


def search(
    loss: Callable[[jax.Array], jax.Array], value: jax.Array, slope: jax.Array, rule: SubspaceRule
) -> Search:
    r"""Return the first of the lengths :math:`t` that decreases the loss enough (Armijo).

    .. math:: L(t) < L(0) + \text{rule.slope} \cdot t\,L'(0) + \text{rule.slack} \cdot |L(0)|

    A loss that is not finite never suffices.

    Args:
      loss: :math:`L`, of a length along the direction.
      value: :math:`L(0)`.
      slope: :math:`L'(0)`, the gradient times the direction.
      rule: its constants.
    """
    shrink = jnp.asarray(rule.shrink, value.dtype)
    slack = rule.slack * jnp.abs(value)

    def go_on(carry: tuple[Any, ...]) -> jax.Array:
        tried, _, accepted = carry
        return ~accepted & (tried < rule.tries)

    def attempt(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        tried, _, _ = carry
        t = shrink ** tried.astype(value.dtype)
        found = loss(t).astype(value.dtype)
        enough = found < value + rule.slope * t * slope + slack
        return tried + 1, t, enough & jnp.isfinite(found)

    start = (jnp.zeros((), jnp.int32), jnp.zeros((), value.dtype), jnp.zeros((), bool))
    tries, last, accepted = lax.while_loop(go_on, attempt, start)
    return Search(jnp.where(accepted, last, 0.0), accepted, tries, last)


def conclude(
    before: Memory, memory: Memory, direction: jax.Array, found: Search, rule: SubspaceRule
) -> Memory:
    """Return the memory after a line search: with its step, or as ``rule.failure`` says."""
    ok, step = found.accepted, found.length * direction
    if rule.failure == "rollback":
        moved = memory._replace(step=step)
        back = before._replace(started=memory.started, paired=memory.paired)
        return jax.tree.map(lambda new, old: jnp.where(ok, new, old), moved, back)
    # Too long by as much as the search went back: the next direction is shorter.
    size = jnp.trace(memory.inverse) / step.size
    shorter = jnp.eye(step.size, dtype=step.dtype) * size * found.last
    return memory._replace(
        inverse=jnp.where(ok, memory.inverse, shorter),
        step=jnp.where(ok, step, 0.0),
        paired=memory.paired & ok,
    )
