# SPDX-License-Identifier: Apache-2.0
"""The auxiliary results of a loss, and how they are combined over micro-batches and replicas."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from boostax._core import trees

PyTree = Any


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

    Example:
      >>> import boostax
      >>> boostax.Aux(weight=12.0).metrics
      {}
    """

    weight: jax.typing.ArrayLike | None = None
    model_state: PyTree = None
    metrics: PyTree = {}  # noqa: RUF012


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
    for name, leaf in trees.named(aux):
        if jnp.shape(leaf):
            raise TypeError(
                f"{who}: aux must be boostax.Aux or a tree of scalars, which are averaged, got "
                f"shape {jnp.shape(leaf)} at {name or 'the root'!r}. "
                "boostax.Aux(metrics=...) averages arrays too; boostax.value_and_grad returns any "
                "aux unchanged."
            )
    return Aux(metrics=aux)
