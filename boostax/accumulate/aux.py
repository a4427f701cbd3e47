# SPDX-License-Identifier: Apache-2.0
"""What a loss returns beside itself, and how it is averaged over micro-batches and replicas."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from boostax._core import trees

PyTree = Any


class Aux(NamedTuple):
    """What a loss function may return beside the loss, understood by boostax.

    Return ``(loss, Aux(...))`` with ``has_aux=True``. It is combined over micro-batches and
    replicas; any other auxiliary tree passes through as in ``jax.value_and_grad``.

    Attributes:
      weight: scalar, what the loss is a mean over (tokens, unmasked examples): micro-batches,
        windows and replicas are then averaged by it. ``None`` weighs all alike.
      model_state: the new state of the model (BatchNorm statistics), threaded through
        micro-batches and steps.
      metrics: tree of arrays to report; floating ones are averaged like the loss, in f32 or wider,
        integers summed.

    Example:
      >>> import boostax
      >>> boostax.Aux(weight=12.0).metrics
      {}
    """

    weight: Any = None
    model_state: PyTree = None
    metrics: PyTree = {}  # noqa: RUF012


class Beside(NamedTuple):
    """An ``Aux``, and beside it what passes through as any other aux does."""

    told: Aux
    own: PyTree


def as_aux(aux: PyTree) -> Aux:
    """``aux`` itself, or one that says nothing."""
    aux = aux.told if isinstance(aux, Beside) else aux
    return aux if isinstance(aux, Aux) else Aux()


def own_of(aux: PyTree) -> PyTree:
    """What of it passes through."""
    return aux.own if isinstance(aux, Beside) else () if isinstance(aux, Aux) else aux


def as_given(told: Aux, own: PyTree, given: PyTree) -> PyTree:
    """The two of them in the form of what was given."""
    if isinstance(given, Beside):
        return Beside(told, own)
    return told if isinstance(given, Aux) else own


def as_metrics(aux: PyTree, who: str) -> Aux:
    """``aux`` itself, or one with its scalars as metrics: what a step can report of a loss."""
    if isinstance(aux, Aux):
        return aux
    for name, leaf in trees.named(aux):
        if jnp.shape(leaf):
            raise TypeError(
                f"{who}: aux must be boostax.Aux or a tree of scalars, which are averaged, got "
                f"shape {jnp.shape(leaf)} at {name or 'the root'!r}. "
                "boostax.Aux(metrics=...) averages arrays too; boostax.value_and_grad hands out "
                "any aux as it is."
            )
    return Aux(metrics=aux)
