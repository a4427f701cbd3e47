# SPDX-License-Identifier: Apache-2.0
r"""Combine the auxiliary results of a loss over micro-batches, replicas and calls.

All means follow one rule: the sum of the weighted values is divided once by the sum of the weights.

The slices :math:`i` of a batch are micro-batches, replicas, or the calls of a window. Slice
:math:`i` has the mean :math:`x_i` over :math:`w_i` tokens, and :math:`w_i` is the weight of the
slice. The mean over all slices is

.. math:: \bar x = \sum_i w_i x_i \big/ \sum_i w_i.

Numerator and denominator are summed separately and divided once, at the end. A slice of weight zero
is ignored, because its mean is 0/0.

The sums are divided at different places:

- For micro-batches of a step, the weights are local to the replica, and ``microbatch`` divides by
  the local sum of the weights.
- For replicas of a step, ``value_and_grad`` divides by the sum of the replicas' weights. It returns
  the mean weight, equal on all replicas, in ``Aux.weight``.
- For calls of a window, ``accumulate`` divides at the end of the window. The weights are local to
  each replica, or are the mean weights of ``value_and_grad``.

If term :math:`t` of a loss has the sum :math:`s_{t,i}` and the count :math:`n_{t,i}` in slice
:math:`i`, the loss is :math:`\sum_t \sum_i s_{t,i} / \sum_i n_{t,i}`. The counts of one call are
summed before the backward pass, so one backward pass is enough. The counts of a window are known
only at the end of the window, so a window stores a separate gradient sum for each term.

Gradients stay local to each replica: replica :math:`r` multiplies its gradient by :math:`n\,w_r /
\sum_r w_r`, so that a *mean* over the :math:`n` replicas is the mean over all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from boostax._core import axes, checks, trees
from boostax._core.types import PyTree

_WHO = "value_and_grad"


class Aux(NamedTuple):
    """Auxiliary results of a loss function, which boostax combines over micro-batches and replicas.

    Return ``(loss, Aux(...))`` with ``has_aux=True``. An aux of another class is returned
    uncombined, as by ``jax.value_and_grad``.

    Attributes:
      weight: scalar, the number of items (tokens, unmasked examples) over which the loss is a mean.
        Means over micro-batches, windows and replicas use these weights, or equal weights for
        ``None``.
      model_state: the new state of the model (BatchNorm statistics), which the next micro-batch or
        step receives.
      metrics: tree of arrays to report. Floating arrays are averaged like the loss, in f32 or
        wider, and integers are summed.
      means: metrics with their own counts, ``{name: (sum, count)}``, such as a load per expert. The
        sums and the counts are added over micro-batches and replicas, and then divided once. The
        shapes of ``sum`` and ``count`` must broadcast. A count of 0 gives 0. The gradient function
        returns the quotients in ``means``, and adds the mean of each term of the loss.

    Example:
      >>> import boostax
      >>> boostax.Aux(weight=12.0).metrics
      {}
    """

    weight: jax.typing.ArrayLike | None = None
    model_state: PyTree = None
    metrics: PyTree = {}  # noqa: RUF012
    means: PyTree = {}  # noqa: RUF012


class Joint(NamedTuple):
    """An ``Aux``, and another auxiliary tree that is returned unchanged."""

    combined: Aux
    other: PyTree


def as_aux(aux: PyTree) -> Aux:
    """Return the ``Aux`` in ``aux``, or an empty ``Aux``."""
    aux = aux.combined if isinstance(aux, Joint) else aux
    return aux if isinstance(aux, Aux) else Aux()


def own_of(aux: PyTree) -> PyTree:
    """Return the part of ``aux`` that is returned unchanged."""
    return aux.other if isinstance(aux, Joint) else () if isinstance(aux, Aux) else aux


def as_given(aux: Aux, other: PyTree, like: PyTree) -> PyTree:
    """Return ``aux`` and ``other`` in the form of ``like``, the aux that the loss returned."""
    return Joint(aux, other) if isinstance(like, Joint) else aux if isinstance(like, Aux) else other


def as_metrics(aux: PyTree, who: str) -> Aux:
    """Return ``aux`` if it is an ``Aux``; otherwise return its scalars as metrics of an ``Aux``."""
    if isinstance(aux, Aux):
        return aux
    hint = "Return arrays in boostax.Aux(metrics=...). boostax.value_and_grad accepts any aux."
    for name, leaf in trees.named(aux):
        allowed = f"a boostax.Aux, or a tree with a scalar at {name or 'the root'!r}"
        shape = jnp.shape(leaf)
        checks.require_type(not shape, who, "aux", got=shape, allowed=allowed, hint=hint)
    return Aux(metrics=aux)


def pairs(who: str, argument: str, tree: PyTree) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return sums and counts by name, in f32 or wider."""
    allowed = "a dict from names to pairs (sum, count)"
    hint = "Return {'ce': (ce.sum(), tokens), 'z': (0.1 * z.sum(), rows)}."
    entries = [*tree.values()] if isinstance(tree, Mapping) else [None]
    is_valid = all(isinstance(x, tuple) and len(x) == 2 for x in entries)
    checks.require_type(is_valid, who, argument, got=tree, allowed=allowed, hint=hint)

    def wide(x: jax.typing.ArrayLike) -> jax.Array:
        return trees.as_dtype(x, jnp.promote_types(jnp.result_type(x), jnp.float32))

    return {name: (wide(x), wide(count)) for name, (x, count) in sorted(tree.items())}


def reported(aux: PyTree, terms: Sequence[str], replicas: int) -> PyTree:
    """Return ``aux`` with quotients in place of pairs, and with the terms' counts as the weight."""
    combined = as_aux(aux)
    weight = {name: combined.means[name][1] / replicas for name in terms} or combined.weight
    means = {name: drop_empty(divide(x, n), n) for name, (x, n) in combined.means.items()}
    return as_given(combined._replace(weight=weight, means=means), own_of(aux), aux)


def weigh(tree: PyTree, weight: jax.Array) -> PyTree:
    """Multiply floating leaves by ``weight``, in f32 or wider; return integers unchanged.

    Integers are counts. In f16, token counts would overflow at 65504, and counts above 2048 would
    be rounded.
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
    """Return the sum of the replicas' local weights, which is equal on all replicas."""
    return lax.psum(axes.to_varying(weight, names), names) if names else weight


def any_items(weight: PyTree) -> jax.Array:
    """Return whether a call has items: its weight, or the count of a term, is positive."""
    return jnp.stack([jnp.asarray(x) > 0 for x in jax.tree.leaves(weight)]).any()


class UncountedError(Exception):
    """Signal that ends the first trace of a loss with terms, before the counts are known."""


def of_slice(
    result: PyTree, counts: PyTree, window: tuple[str, ...] | None = None, least: float = 1.0
) -> tuple[PyTree, PyTree, PyTree]:
    """Return the loss of a slice, the same loss as an array of terms, and the aux.

    The mean of this loss over all slices is the loss of the batch. ``window`` has the names of the
    terms that a window in the state sums, or is ``None`` without a window. In the array of terms, a
    term with count 0 is divided by ``least``, because the gradient of this term must reach the
    window, which divides by the count of all calls at its end.
    """
    loss, aux = result
    by_term = loss
    known = as_aux(aux)
    terms = loss if isinstance(loss, dict) else {}
    got = tuple(terms)
    allowed = f"{window or 'none'}, as in the window; a window in carry or a mask has no terms"
    hint = f"Pass accumulate(..., normalize={got or 'mean'!r})."
    checks.require(window in (None, got), _WHO, "the terms of the loss", got, allowed, hint)
    means = pairs(_WHO, "Aux.means", known.means)
    if terms:
        twice = [*means.keys() & terms, *["weight"] * (known.weight is not None)]
        allowed, hint = "without weight=, and without terms in means=", "Each term has its count."
        checks.require(not twice, _WHO, "Aux with terms", got=twice, allowed=allowed, hint=hint)
        if counts is None:
            raise UncountedError
        sums, n = jnp.stack([x for x, _ in terms.values()]), jnp.stack([*counts.values()])
        by_term = sums / jnp.where(n == 0, least, n).astype(sums.dtype)
        loss = jnp.where(n == 0, 0, by_term).sum()
        means = means | terms
    return loss, by_term, as_given(known._replace(means=means), own_of(aux), aux) if means else aux


def loss_and_aux(result: PyTree, has_aux: bool) -> tuple[PyTree, PyTree]:
    """Return the loss (a scalar in f32 or wider, or a dict of terms) and the aux."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    loss, aux = cast(PyTree, result if has_aux and is_pair else (result, Aux()))
    checks.require_scalar(_WHO, "Aux.weight", as_aux(aux).weight)
    if is_pair == has_aux and hasattr(loss, "items") and loss:
        terms = pairs(_WHO, "the terms of the loss", loss)
        return {name: (x.sum(), n.sum()) for name, (x, n) in terms.items()}, aux
    is_scalar = getattr(loss, "shape", None) == () and jnp.issubdtype(loss.dtype, jnp.floating)
    valid = isinstance(loss, float) or (is_scalar and is_pair == has_aux)
    allowed = "(loss, aux) with a floating scalar loss" if has_aux else "a floating scalar"
    got = jax.tree.map(lambda x: getattr(x, "aval", x), result)
    hint = "Return the mean over the batch, and an aux if and only if has_aux=True."
    checks.require_type(valid, _WHO, "the result of loss_fn", got=got, allowed=allowed, hint=hint)
    return trees.at_least_float32(jnp.asarray(loss)), aux


def over_replicas(
    loss: jax.Array, aux: PyTree, grads: PyTree, names: tuple[str, ...]
) -> tuple[jax.Array, PyTree, PyTree]:
    """Average loss and ``Aux`` by the replicas' weights; weight the gradients, which stay local."""
    combined = as_aux(aux)
    weight = combined.weight
    local = jnp.asarray(1.0 if weight is None else weight, jnp.float32)
    summed = jnp.float32(axes.size(names)) if weight is None else total(local, names)
    if weight is not None:
        # Each replica returns the mean of the weights over the replicas. So the sum of these
        # weights over the calls and replicas of a window is the number of all tokens.
        weight = summed / axes.size(names)
        grads = trees.cast_like(divide(weigh(grads, local), weight), grads)
    loss, metrics = divide(lax.psum(weigh((loss, combined.metrics), local), names), summed)
    means = jax.tree.map(lambda x: total(x, names), combined.means)

    def mean(x: jax.Array) -> jax.Array:
        # Floats are averaged. Integers, such as counters, become the maximum over the replicas.
        # PRNG keys do not change.
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return lax.pmean(x, names) if jnp.issubdtype(x.dtype, jnp.inexact) else lax.pmax(x, names)

    combined = Aux(weight, jax.tree.map(mean, combined.model_state), metrics, means)
    return loss, as_given(combined, own_of(aux), aux), grads


def _map_floating(fn: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    counted = {jnp.dtype(bool): jnp.int32}
    tree = jax.tree.map(lambda x: jnp.asarray(x, counted.get(jnp.result_type(x))), tree)
    return jax.tree.map(lambda x: fn(x) if trees.is_inexact(x.dtype) else x, tree)


def addends(tree: PyTree, narrow: jnp.dtype) -> PyTree:
    """Cast gradients to f32, or to the dtype of the sum if that dtype is wider.

    So a sum in a narrower dtype than f32 is rounded once per addition. If the gradient were rounded
    before its weight is applied, the weight would multiply the rounding error, and small values
    would underflow before they are weighted.
    """
    return jax.tree.map(lambda g: g.astype(jnp.promote_types(trees.wide_dtype(g), narrow)), tree)
