# SPDX-License-Identifier: Apache-2.0
"""Leaves as rows: those of a leaf's last dimension if they are long, else its elements in order."""

import math
from typing import NamedTuple

import jax

from boostax.reduce import exchange

# The lanes of a TPU's vector register, and the least width of rows of elements in order.
LANES, WIDTH = 128, 256


class Grid(NamedTuple):
    """The way in which slices of a leaf are cut into rows.

    Attributes:
      shape: ``(slices, *shape of one)``.
      own: whether rows are those of the leaf's last dimension, or elements in order.
      parts: the number of parts of each row of the leaf.
      width: elements of a row.
      multiple: the number of rows is padded to a multiple of this.
    """

    shape: tuple[int, ...]
    own: bool
    parts: int
    width: int
    multiple: int

    @classmethod
    def of(cls, shape: tuple[int, ...], block: int, multiple: int) -> "Grid":
        """Choose rows of up to ``block`` elements, and of up to 1024 if not the leaf's own."""
        size, last = math.prod(shape[1:]), shape[-1]
        parts = math.ceil(last / block)
        height = size // last * parts
        if last >= LANES and 16 * (-height % multiple) <= height:
            return cls(shape, True, parts, math.ceil(last / parts), multiple)
        width, most = WIDTH, min(block, 4 * WIDTH)
        while 2 * width <= most and size >= 64 * multiple * width:
            width *= 2
        return cls(shape, False, 1, min(width, most), multiple)

    @property
    def one(self) -> tuple[int, int]:
        """Return the number of rows of a slice and their width."""
        size = math.prod(self.shape[1:])
        rows = size // self.shape[-1] * self.parts if self.own else math.ceil(size / self.width)
        return math.ceil(rows / self.multiple) * self.multiple, self.width

    def rows(self, x: jax.Array) -> jax.Array:
        """Return ``(slices, rows, width)``, padded with zeros."""
        lines = x.reshape(len(x), -1, x.shape[-1]) if self.own else x.reshape(len(x), 1, -1)
        lines = exchange.padded(lines, 2, self.parts if self.own else self.width)
        return exchange.padded(lines.reshape(len(x), -1, self.width), 1, self.multiple)

    def slices(self, rows: jax.Array) -> jax.Array:
        """Invert ``rows`` for any number of slices."""
        shape = (len(rows), *self.shape[1:])
        if not self.own:
            return rows.reshape(len(rows), -1)[:, : math.prod(shape[1:])].reshape(shape)
        height = math.prod(shape[1:-1])
        lines = rows[:, : height * self.parts].reshape(len(rows), height, -1)
        return lines[..., : shape[-1]].reshape(shape)
