# SPDX-License-Identifier: Apache-2.0
"""Leaves as rows: those of a leaf's last dimension where they are long, else what there is."""

import math
from typing import NamedTuple

import jax

from boostax.reduce import exchange

# Of a TPU's vector register, and rows of what is written anew.
LANES, WIDTH = 128, 256


class Grid(NamedTuple):
    """How slices of a leaf are made into rows.

    Attributes:
      shape: ``(slices, *shape of one)``.
      own: whether they are the rows of the leaf; else what there is, in order.
      parts: into which each of those is cut.
      width: elements of a row.
      multiple: of which their number is one.
    """

    shape: tuple[int, ...]
    own: bool
    parts: int
    width: int
    multiple: int

    @classmethod
    def of(cls, shape: tuple[int, ...], block: int, multiple: int) -> "Grid":
        """Rows of up to ``block`` elements; of others than the leaf's own, up to 1024."""
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
        """Of a slice, how many rows and how long."""
        size = math.prod(self.shape[1:])
        rows = size // self.shape[-1] * self.parts if self.own else math.ceil(size / self.width)
        return math.ceil(rows / self.multiple) * self.multiple, self.width

    def rows(self, x: jax.Array) -> jax.Array:
        """``(slices, rows, width)``, zeros where they are longer."""
        lines = x.reshape(len(x), -1, x.shape[-1]) if self.own else x.reshape(len(x), 1, -1)
        lines = exchange.padded(lines, 2, self.parts if self.own else self.width)
        return exchange.padded(lines.reshape(len(x), -1, self.width), 1, self.multiple)

    def slices(self, rows: jax.Array) -> jax.Array:
        """The inverse of ``rows``, of any number of slices."""
        shape = (len(rows), *self.shape[1:])
        if not self.own:
            return rows.reshape(len(rows), -1)[:, : math.prod(shape[1:])].reshape(shape)
        height = math.prod(shape[1:-1])
        lines = rows[:, : height * self.parts].reshape(len(rows), height, -1)
        return lines[..., : shape[-1]].reshape(shape)
