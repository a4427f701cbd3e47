# SPDX-License-Identifier: Apache-2.0
"""Codecs, which compress and send leaves; ``feedback.py`` adds error feedback to any codec."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import axes
from boostax._core.types import PyTree

Arrays = Sequence[jax.Array]
Names = tuple[str, ...]
# The type of ``Codec.reduce``.
Send = Callable[[Arrays, PyTree, Names], "Message"]


# A late correction changes the residual in this replica's slice of a leaf. A correction is the
# dimension along which the leaf is cut into a slice per replica, and an array in the shape of the
# slice. Corrections are separate from residuals, so that one pass computes, selects and writes the
# residual.
Late = tuple[int, jax.Array]


class Message(NamedTuple):
    """The result of ``Codec.reduce``.

    Attributes:
      means: for each leaf, the mean of the sent parts over the replicas, equal on all replicas.
      residuals: for each leaf, the part that this replica did not send. Up to rounding, ``means``
        is the mean of ``leaf - residual`` over the replicas.
      state: the codec's new state, the same on all replicas.
      late: corrections of ``residuals``, which only codecs of boostax return; empty for a codec of
        your own.
      capacity: f32 scalar, equal on all replicas, the share of elements for which this message had
        room; ``None`` if the share is fixed.
    """

    means: list[jax.Array]  # shapes and dtypes of the leaves
    residuals: list[jax.Array]  # shapes and dtypes of the leaves
    state: PyTree
    late: list[Late | None] | tuple[()] = ()
    capacity: Any = None  # [] float32, or None


class PerLeaf(NamedTuple):
    """The state of a codec for each leaf.

    Attributes:
      values: inside the codec, a list with an entry for each leaf; in the optimizer's state, a
        tree like the params, in which each value has the path of its leaf.
    """

    values: PyTree


def map_per_leaf(fn: Callable[..., PyTree], state: PyTree, *others: PyTree) -> PyTree:
    """Apply ``fn`` to the values of every ``PerLeaf``; take all other nodes from the last tree."""

    def mapped(*args: PyTree) -> PyTree:
        return PerLeaf(fn(*(x.values for x in args))) if isinstance(args[0], PerLeaf) else args[-1]

    return jax.tree.map(mapped, state, *others, is_leaf=lambda x: isinstance(x, PerLeaf))


class Codec:
    """A lossy mean over the replicas: the part of a compressed reduction that sends leaves.

    A codec receives real, nonempty leaves in f32 or wider, and complex leaves as pairs of real
    numbers. If leaves are sharded, the codec receives the shards of one device, each shard as a
    leaf. A subclass is usually a frozen dataclass of its settings. ``boostax.reduce.compress``
    makes a transformation from a codec.

    Attributes:
      lossy: whether most of a gradient is lost without error feedback, and the same part is lost at
        every step.
      chooses: whether the codec's messages have a ``Message.capacity``.
    """

    lossy: bool = False
    chooses: bool = False

    def serves(self, leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
        """Return whether the codec can send a leaf; other leaves are averaged uncompressed."""
        return True

    def init(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> PyTree:
        """Return the state, equal on all replicas; the state of each leaf is in a ``PerLeaf``."""
        return None

    def reduce(self, leaves: Arrays, state: PyTree, names: Names) -> Message:
        """Send the leaves, or parts of the leaves, over the axes."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Staged(Codec):
    """A warm-up of the density: a sequence of sparse codecs without state.

    Messages of different stages have different shapes, so the stages are branches of one
    ``lax.switch``. Each step sends only the elements of its stage.

    Attributes:
      starts: the step at which each stage begins, ascending from 0.
      codecs: the stages.
      lossy: see ``Codec``.
    """

    starts: tuple[int, ...]
    codecs: tuple[Codec, ...]
    lossy: bool = True

    def init(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> PyTree:
        """Return the number of steps so far, which is 0, and the state of a stage."""
        return jnp.zeros((), jnp.int32), None

    def reduce(self, leaves: Arrays, state: PyTree, names: Names) -> Message:
        """Send the leaves with the codec of the current stage."""
        now, inner = state
        stage = jnp.searchsorted(jnp.array(self.starts), now, side="right") - 1
        sent = switched(stage, [codec.reduce for codec in self.codecs], leaves, inner, names)
        return sent._replace(state=(jnp.minimum(now, jnp.iinfo(jnp.int32).max - 1) + 1, sent.state))


def switched(
    index: jax.Array, sends: Sequence[Send], leaves: Arrays, state: PyTree, names: Names
) -> Message:
    """Send leaves by the function ``sends[index]``; ``index`` is equal on all replicas."""
    axes.require_invariant(index, "switched")

    def branch(send: Send) -> Message:
        message = send(leaves, state, names)
        # All branches must return values that vary over the same axes.
        residuals, late = axes.to_varying((message.residuals, list(message.late)), names)
        return message._replace(residuals=residuals, late=late)

    return jax.lax.switch(index, [functools.partial(branch, send) for send in sends])


def packed(leaves: Arrays, lead: int = 0) -> jax.Array:
    """Concatenate leaves, flattened after their first ``lead`` dimensions, in the widest dtype."""
    return jnp.concatenate([x.reshape(*x.shape[:lead], -1) for x in leaves], -1)


def unpacked(flat: jax.Array, like: Arrays, lead: int = 0) -> list[jax.Array]:
    """Invert ``packed`` for leaves like ``like``; ``flat`` may have other leading dimensions."""
    ends = np.cumsum([math.prod(x.shape[lead:]) for x in like])
    pairs = zip(like, jnp.split(flat, ends, -1), strict=False)
    return [part.reshape(*flat.shape[:-1], *x.shape[lead:]).astype(x.dtype) for x, part in pairs]
