# SPDX-License-Identifier: Apache-2.0
r"""The auxiliary results of a loss, and how they are combined over micro-batches and replicas.

Means are weighted by one rule: sums and weights are added up, and divided once.

The slices :math:`i` of a batch are micro-batches, replicas, or the calls of a window. A mean over
slice :math:`i` is :math:`x_i`, and its weight :math:`w_i` is the number of tokens (say) that it was
taken over. The mean over all slices is

.. math:: \bar x = \sum_i w_i x_i \big/ \sum_i w_i.

Both sums are kept, and one is divided by the other once, at the end. A slice of weight zero is
dropped, whatever its mean is: a mean over nothing is 0/0.

============================ ================================ ===================================
slices                       a slice's weight                 divided
============================ ================================ ===================================
micro-batches of a step      local to the replica             by ``microbatch``, by the local sum
replicas of a step           local; then the mean over the    by ``value_and_grad``, which returns
                             replicas, equal on all           the mean weight in ``Aux.weight``
calls of a window            either of these                  by ``accumulate``, by ``factor``
============================ ================================ ===================================

A loss of several terms :math:`t`, each a sum :math:`s_{t,i}` with a count :math:`n_{t,i}` of its
own, is :math:`\sum_t \sum_i s_{t,i} / \sum_i n_{t,i}`. The counts of a call are added up before
its backward pass, so one pass is enough. Those of a window are known at its end, so it sums the
gradient of each term apart.

Gradients stay local to each replica: replica :math:`r` multiplies its own by
:math:`n\,w_r / \sum_r w_r`, so that a *mean* over the :math:`n` replicas is the mean over all
tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from boostax._core import axes, checks, trees

PyTree = Any
# Gradients that a scaler lets pass are below 2**48: their products with weights below MOST add up
# in f32, and the reciprocal of LEAST is finite.
LEAST, MOST = 2.0**-64, 2.0**64


class Aux(NamedTuple):
    """Auxiliary results of a loss function that boostax combines.

    Return ``(loss, Aux(...))`` with ``has_aux=True``. An ``Aux`` is combined over micro-batches and
    replicas; any other auxiliary tree passes through as in ``jax.value_and_grad``.

    Attributes:
      weight: scalar, the number of items (tokens, unmasked examples) over which the loss is a mean.
        Micro-batches, windows and replicas are averaged with these weights. ``None`` weighs all
        equally.
      model_state: the new state of the model (BatchNorm statistics), passed on from micro-batch to
        micro-batch and from step to step.
      metrics: tree of arrays to report; floating arrays are averaged like the loss, in f32 or
        wider, and integers are summed.
      means: metrics with counts of their own, ``{name: (sum, count)}``: an accuracy per row, a load
        per expert. Sums and counts, of any shapes that broadcast, are added up over micro-batches
        and replicas, and divided once; 0 where nothing is counted. The result has the quotients,
        with one for each term of a loss of terms.

    Example:
      >>> import boostax
      >>> boostax.Aux(weight=12.0).metrics
      {}
    """

    weight: jax.typing.ArrayLike | None = None
    model_state: PyTree = None
    metrics: PyTree = {}  # noqa: RUF012
    means: PyTree = {}  # noqa: RUF012


class Beside(NamedTuple):
    """An ``Aux`` together with another auxiliary tree that passes through."""

    told: Aux
    own: PyTree


def as_aux(aux: PyTree) -> Aux:
    """Return the ``Aux`` in ``aux``, or an empty one."""
    aux = aux.told if isinstance(aux, Beside) else aux
    return aux if isinstance(aux, Aux) else Aux()


def own_of(aux: PyTree) -> PyTree:
    """Return the part of ``aux`` that passes through."""
    return aux.own if isinstance(aux, Beside) else () if isinstance(aux, Aux) else aux


def as_given(told: Aux, own: PyTree, like: PyTree) -> PyTree:
    """Return both parts in the form of ``like``, which the loss returned."""
    both = Beside(told, own)
    return both if isinstance(like, Beside) else told if isinstance(like, Aux) else own


def as_metrics(aux: PyTree, who: str) -> Aux:
    """Return ``aux`` if it is an ``Aux``, else an ``Aux`` with its scalars as metrics."""
    if isinstance(aux, Aux):
        return aux
    hint = "boostax.Aux(metrics=...) averages arrays; boostax.value_and_grad returns any aux."
    for name, leaf in trees.named(aux):
        allowed = f"boostax.Aux, or a scalar to average at {name or 'the root'!r}"
        shape = jnp.shape(leaf)
        checks.require(who, "aux", shape, allowed, not shape, hint, TypeError)
    return Aux(metrics=aux)


def pairs(who: str, argument: str, tree: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return sums and counts by name, in f32 or wider."""
    allowed = "a dict of names to pairs (sum, count)"
    hint = "Return {'ce': (ce.sum(), tokens), 'z': (0.1 * z.sum(), rows)}."
    paired = lambda x: isinstance(x, tuple) and len(x) == 2  # noqa: E731
    fits = isinstance(tree, Mapping) and all(map(paired, tree.values()))
    checks.require(who, argument, tree, allowed, fits, hint, TypeError)
    wide = lambda x: trees.as_dtype(x, jnp.promote_types(jnp.result_type(x), jnp.float32))  # noqa: E731
    return {name: (wide(x), wide(count)) for name, (x, count) in sorted(tree.items())}


def reported(aux: PyTree, apart: Sequence[str], replicas: int) -> PyTree:
    """Return ``aux`` with quotients of the summed pairs, and the counts of terms of a window."""
    told = as_aux(aux)
    counts = {name: told.means[name][1] / replicas for name in apart if name in told.means}
    means = {name: drop_empty(divide(x, n), n) for name, (x, n) in told.means.items()}
    return as_given(told._replace(weight=counts or told.weight, means=means), own_of(aux), aux)


def weigh(tree: PyTree, weight: jax.Array) -> PyTree:
    """Multiply floating leaves by ``weight``, in f32 or wider; leave integers, which are counts.

    Weights are token counts: in f16 they overflow at 65504, and round from 2048 on.
    """
    tree = _map_floating(trees.at_least_float32, tree)
    return drop_empty(_map_floating(lambda x: x * weight.astype(x.real.dtype), tree), weight)


def drop_empty(tree: PyTree, weight: jax.Array) -> PyTree:
    """Replace floating leaves by zeros unless ``weight`` is positive."""
    return _map_floating(lambda x: jnp.where(weight > 0, x, jnp.zeros_like(x)), tree)


def divide(tree: PyTree, weight: jax.Array) -> PyTree:
    """Divide floating leaves of weighted sums by the sum of the weights; return 0 for 0/0.

    The quotient is computed in f32 or wider and rounded once, to the dtype of the sum.
    """
    safe = jnp.where(weight > 0, weight, 1)

    def quotient(x: jax.Array) -> jax.Array:
        wide = trees.at_least_float32(x)
        return (wide / safe.astype(wide.real.dtype)).astype(x.dtype)

    return _map_floating(quotient, tree)


def total(weight: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Return the sum of the replicas' local weights, equal on all of them."""
    return lax.psum(axes.to_varying(weight, names), names) if names else weight


def factor(weight: jax.Array, names: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    r"""Return whether a window's weights are a usable divisor, and the factor that divides by them.

    Each replica multiplies its local sum by :math:`n / \sum_r w_r`. The caller multiplies by this
    factor, because XLA:CPU writes a copy of the sums for a division. If there is a weight for each
    term, one must be usable, and the factor of a term without a count is 0.
    """
    summed, replicas = total(weight, names), axes.size(names) if names else 1
    usable = summed >= LEAST
    return usable.any() & (summed >= 0).all(), jnp.where(usable, replicas / summed, 0)


def _map_floating(fn: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    def on_leaf(leaf: jax.typing.ArrayLike) -> jax.Array:
        x = jnp.asarray(leaf)
        if jnp.issubdtype(x.dtype, jnp.bool_):
            x = x.astype(jnp.int32)
        return fn(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(on_leaf, tree)
