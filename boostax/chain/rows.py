# SPDX-License-Identifier: Apache-2.0
"""List the parts of a chain in the order in which a gradient passes them."""

import dataclasses

from boostax.chain.parts import Part, Route
from boostax.chain.roles import COMBINATOR, role

# Optax's combinators that hand only some of the params on.
_MASKS = ("masked", "partition")


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A part at its position.

    Attributes:
      part: the part.
      role: see ``roles``.
      holders: the rows around it, outermost first, without those that only combine.
      routes: the path to its state from that of the whole chain, wrapper by wrapper.
      sides: for each partition around it, the partition and the side on which the part stands.
      masks: the names of the wrappers that pass it only some of the params, outermost first.
    """

    part: Part
    role: str
    holders: tuple["Row", ...]
    routes: tuple[Route | None, ...]
    sides: tuple[tuple[int, int], ...]
    masks: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which it reduces or agrees."""
        return () if self.part.description is None else self.part.description.axes

    def inside(self, other: "Row") -> bool:
        """Return whether it is inside the other."""
        return other in self.holders

    def meets(self, other: "Row") -> bool:
        """Return whether both get the same params."""
        mine, others = dict(self.sides), dict(other.sides)
        return all(others.get(which, side) == side for which, side in mine.items())


def rows(part: Part) -> list[Row]:
    """List all parts, each before the parts inside it; parts that only combine are left out."""
    found: list[Row] = []

    def visit(row: Row) -> None:
        part, holders, masks = row.part, row.holders, row.masks
        # A combinator whose parts are hidden gets a row in their place.
        if row.role != COMBINATOR or not part.inner:
            found.append(row)
            holders = (*holders, row)
        masks = (*masks, part.name) if part.name in _MASKS else masks
        for i, (route, inner) in enumerate(part.inner):
            sides = (*row.sides, (id(part), i)) if part.apart else row.sides
            visit(Row(inner, role(inner), holders, (*row.routes, route), sides, masks))

    visit(Row(part, role(part), (), (), ()))
    return found
