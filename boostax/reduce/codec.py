# SPDX-License-Identifier: Apache-2.0
"""A codec says what travels in a compressed reduction; the rest is ``feedback.py``."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from boostax._core import axes, checks
from boostax._core.gate import alternatives

PyTree = Any
Arrays = Sequence[jax.Array]
Names = tuple[str, ...]


class Late(NamedTuple):
    """What a replica holds back besides, of its own slice of a leaf.

    Apart from the rest, so that the rest is computed, chosen and written in one pass over the leaf.

    Attributes:
      dim: the dimension along which the leaf is cut into a slice per replica.
      more: shaped like the slice.
    """

    dim: int
    more: jax.Array


class Message(NamedTuple):
    """What became of the leaves.

    Attributes:
      means: for each leaf the mean over the replicas of what they sent, equal on all.
      held: for each leaf what this replica has not sent, its residual: the mean over the replicas
        of ``leaf - held`` is ``means``, up to rounding.
      state: the codec's own state, the same on all replicas.
      late: for each leaf what is to be added to ``held``, or ``None``; nothing for none at all.
      capacity: f32 scalar, equal on all replicas: which share of the elements had a place;
        ``None`` where that is not chosen at each step.
    """

    means: list[jax.Array]
    held: list[jax.Array]
    state: PyTree
    late: list[Late | None] | tuple[()] = ()
    capacity: Any = None


class PerLeaf(NamedTuple):
    """Marks what a codec keeps for each leaf.

    Attributes:
      values: for the codec a list with one for each of its leaves; in the optimizer's state a tree
        like the params, so that what belongs to a leaf is known by its path.
    """

    values: Any


def map_per_leaf(fn: Callable[..., Any], state: PyTree, *others: PyTree) -> PyTree:
    """``fn`` of what every ``PerLeaf`` holds; the rest as it is in the last tree."""
    marked = lambda node: isinstance(node, PerLeaf)  # noqa: E731

    def inside(*nodes: Any) -> Any:
        return PerLeaf(fn(*(x.values for x in nodes))) if marked(nodes[0]) else nodes[-1]

    return jax.tree.map(inside, state, *others, is_leaf=marked)


class Codec:
    """What travels in a compressed reduction: a lossy mean over the replicas.

    Its leaves are real arrays of f32 or wider that are not empty; complex ones come as pairs. A
    subclass is as a rule a frozen dataclass of its settings. ``boostax.reduce.compress`` makes a
    transformation of it.

    Attributes:
      whole: it takes whole leaves, of which XLA shards what it computes; others take the shards of
        a device, each as a leaf by itself.
      lossy: without error feedback most of a gradient is lost, at every step the same.
      chooses: its messages say which share of the elements had one (``Message.capacity``).
    """

    whole: bool = False
    lossy: bool = False
    chooses: bool = False

    def serves(self, leaf: Any) -> bool:
        """Whether it can send such a leaf, as it comes; others take a plain mean."""
        del leaf
        return True

    def init(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> PyTree:
        """Its state, the same on all replicas; what it keeps for each leaf in a ``PerLeaf``."""
        del leaves
        return None

    def reduce(self, leaves: Arrays, state: PyTree, names: Names) -> Message:
        """Send the leaves over the axes, as far as it does."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Staged(Codec):
    """One codec after the other, such as a warm-up of the density.

    Every stage has shapes of its own, so the stages are branches of one ``lax.switch``: each step
    sends what its stage sends, and no more. All stages share the state of the widest.

    Attributes:
      starts: the step at which each begins, ascending from 0.
      codecs: the stages.
      widest: that with the largest state.
      whole: see ``Codec``; as all stages are.
      lossy: see ``Codec``.
    """

    starts: tuple[int, ...]
    codecs: tuple[Codec, ...]
    widest: Codec
    whole: bool
    lossy: bool

    def serves(self, leaf: Any) -> bool:
        """As the widest stage does."""
        return self.widest.serves(leaf)

    def init(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> PyTree:
        """The step and the state of the widest stage."""
        return jnp.zeros((), jnp.int32), self.widest.init(leaves)

    def reduce(self, leaves: Arrays, state: PyTree, names: Names) -> Message:
        """As the stage of this step does."""
        step, inner = state
        stage = jnp.searchsorted(jnp.array(self.starts), step, side="right") - 1
        sends = [functools.partial(c.reduce, leaves, inner, names) for c in self.codecs]
        message = switched(stage, sends, names)
        later = jnp.minimum(step, jnp.iinfo(jnp.int32).max - 1) + 1
        return message._replace(state=(later, message.state))


def switched(index: jax.Array, sends: Sequence[Callable[[], Message]], names: Names) -> Message:
    """Call the one at an index, which is equal on all replicas."""
    axes.require_invariant(index, "switched")

    def run(send: Callable[[], Message]) -> Message:
        message = send()
        # Branches must agree on the axes over which their results vary.
        held, late = axes.to_varying((message.held, list(message.late)), names)
        return message._replace(held=held, late=late)

    return alternatives(index, [functools.partial(run, send) for send in sends])


def staged(
    who: str,
    argument: str,
    value: Any,
    make: Callable[[Any], Codec],
    check: Callable[[str, str, Any], None],
) -> Codec:
    """The codec of a number, or the stages of a mapping from the step at which each begins."""
    if not isinstance(value, Mapping):
        check(who, argument, value)
        return make(value)
    starts = tuple(sorted(value))
    if not starts or starts[0] != 0 or any(isinstance(s, bool) for s in starts):
        allowed = "a mapping from steps, beginning with 0, to values"
        hint = "Such as {0: 0.25, 200: 0.01}."
        raise ValueError(checks.message(who, argument, allowed, dict(value), hint))
    for start in starts:
        check(who, f"{argument}[{start}]", value[start])
    codecs = tuple(make(value[start]) for start in starts)
    widest = make(max(value.values()))
    return Staged(starts, codecs, widest, widest.whole, widest.lossy)


def unsent(leaves: Arrays, sent: Arrays) -> list[jax.Array]:
    """What is held back of leaves of which so much was sent."""
    return [x - y for x, y in zip(leaves, sent, strict=True)]


def packed(leaves: Arrays, lead: int = 0) -> jax.Array:
    """All elements in one vector, behind the leading dimensions; dtypes meet in the widest."""
    return jnp.concatenate([x.reshape(*x.shape[:lead], -1) for x in leaves], -1)


def unpacked(flat: jax.Array, like: Arrays, lead: int = 0) -> list[jax.Array]:
    """The leaves from the beginning of vectors, behind whatever dimensions lead these."""
    ends = np.cumsum([math.prod(x.shape[lead:]) for x in like])
    pairs = zip(like, jnp.split(flat, ends, -1), strict=False)
    return [part.reshape(*flat.shape[:-1], *x.shape[lead:]).astype(x.dtype) for x, part in pairs]
