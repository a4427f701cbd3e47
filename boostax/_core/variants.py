"""Variants: a step that is compiled several times, once for each static choice of what it does.

``scheduled_freeze`` is the one there is: its variant is the depth, the number of frozen groups. A
train step asks its transformation for variants, and knows nothing else of freezing.
"""

from typing import Any, Protocol

import optax

PyTree = Any


class Coming(Protocol):
    """Follows one run on the host, from call to call."""

    def __call__(self, state: Any) -> int:
        """The variant of a call with this optimizer state."""
        ...

    def follow(self, state: Any) -> None:
        """Take note of what the call returned."""
        ...


class Variants(Protocol):
    """What a transformation with variants says of them; the ``variants`` of its ``update``.

    A variant is a Python integer, given to ``update`` by the keyword ``depth``. The state has a
    method ``coming()``: the variant of the next call, an i32 scalar.
    """

    def summary(self) -> str:
        """When which occurs, in a few words."""
        ...

    def drawn(self, params: PyTree) -> tuple[int, ...]:
        """All that can occur, ascending."""
        ...

    def active(self, params: PyTree, variant: int) -> PyTree:
        """Which leaves are differentiated: a tree of bools."""
        ...

    def choice(self, params: PyTree, state: Any) -> Any:
        """The same, found out in the program: ``active`` of ``value_and_grad``."""
        ...

    def shares(self, params: PyTree, steps: int | None = None) -> dict[int, float] | None:
        """How often each occurs, as shares of the applied steps: of all, or of the first ``steps``.

        In the order in which they occur. ``None`` if the run decides.
        """
        ...

    def resumed(self, params: PyTree, state: Any) -> Any:
        """A state of another such transformation, with the variant that comes next here."""
        ...

    def part(self, params: PyTree, state: Any, variant: int) -> Any:
        """The state without what this variant neither reads nor writes."""
        ...

    def on_host(self, params: PyTree) -> Coming:
        """Who knows the variant of the coming call."""
        ...


def variants_of(tx: optax.GradientTransformation) -> Any:
    """Its ``Variants``; ``None`` if a step of it is compiled once."""
    return getattr(tx.update, "variants", None)
