# SPDX-License-Identifier: Apache-2.0
"""Run the program of a leaf as one Pallas kernel on TPUs, which reads and writes each array once.

Each step of the grid has 32 rows in the vector memory, as many as a tile of 8-bit codes. The step
loops over the blocks of 128 elements, and runs the program on one block of each row at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from boostax._core import jaxprs
from boostax._core.interpret import equations
from boostax.precision import entries, formats

Shape = tuple[int, ...]
_ROWS, _LANES = _PART = 32, formats.BLOCK
# The maximum of bytes for a step of the grid; the vector memory of a TPU v4 has 16 MB.
_MEMORY = 10 * 2**20
# Primitives that Pallas cannot compile for TPUs.
_LACKING = frozenset({"cbrt", "expm1", "nextafter"})


def ready(program: jaxprs.ClosedJaxpr, shape: Shape) -> bool:
    """Return whether a leaf, or a shard of this shape, can be computed by a kernel."""
    if len(shape) < 2 or shape[-1] % _LANES or shape[-2] % _ROWS:
        return False
    return _LACKING.isdisjoint(eqn.primitive.name for eqn, _ in equations(program.jaxpr))


def _width(program: jaxprs.ClosedJaxpr, size: int) -> int:
    """Return how many elements of a row of this size a step of the grid takes."""
    arrays: Any = [x.aval for x in (*program.jaxpr.invars, *program.jaxpr.outvars)]
    whole = entries.shape_of(program)
    # The pipeline has the arrays of two steps in memory.
    column = 2 * _ROWS * sum(x.dtype.itemsize for x in arrays if x.shape == whole)
    counts = range(max(1, _MEMORY // column // _LANES), 0, -1)
    return _LANES * next(n for n in counts if size % (n * _LANES) == 0)


def run(
    program: jaxprs.ClosedJaxpr,
    operands: Sequence[jax.Array],
    shape: Shape,
    start: jax.Array,
    *,
    interpret: bool = False,
) -> list[jax.Array]:
    """Return the results of a program on a leaf's shard, in its first operands' buffers.

    Args:
      program: the program of the whole leaf.
      operands: the shards of the operands.
      shape: the shape of the shard.
      start: the index in the leaf of the shard's first element.
      interpret: whether to run the kernel without a TPU.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    count, width = len(program.jaxpr.outvars), _width(program, shape[-1])

    def flat(x: jax.Array) -> jax.Array:
        if x.ndim:
            return x.reshape(-1, x.shape[-1])
        return (x.astype(jnp.int32) if x.dtype == bool else x).reshape(1)

    def spec(x: jax.Array) -> Any:
        if x.ndim == 1:
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        if x.shape[1] == shape[-1]:
            return pl.BlockSpec((_ROWS, width), lambda i, j: (i, j))
        # Scales are passed for complete rows, because blocks of memory have 128 columns.
        return pl.BlockSpec((_ROWS, x.shape[1]), lambda i, j: (i, 0))

    given = [flat(x) for x in (start, *operands)]
    written = given[1 : count + 1]
    found = pl.pallas_call(
        functools.partial(_step, pl, program, shape, [x.dtype == bool for x in operands]),
        grid=(math.prod(shape[:-1]) // _ROWS, shape[-1] // width),
        in_specs=[spec(x) for x in given],
        out_specs=[spec(x) for x in written],
        # With ``check_vma=True`` the types must have the axes over which arrays vary.
        out_shape=jax.eval_shape(lambda *arrays: [*arrays], *written),
        input_output_aliases={i + 1: i for i in range(count)},
        interpret=interpret,
    )(*given)
    return [x.reshape(y.shape) for x, y in zip(found, operands, strict=False)]


def _step(
    pl: Any, program: jaxprs.ClosedJaxpr, shape: Shape, flags: list[bool], start: Any, *refs: Any
) -> None:
    """Compute the rows of one step of the grid, block after block."""
    whole, width = entries.shape_of(program), _width(program, shape[-1])
    taken, made = refs[: len(flags)], refs[len(flags) :]
    row, *strides = pl.program_id(0) * _ROWS, *formats.strides_of(whole)
    column = pl.program_id(1) * width
    index = start[0] + column + formats.index_in(_PART, strides[-2:])
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        index, row = index + lax.rem(row, size) * formats.int32(stride), lax.div(row, size)

    first = lax.div(column, _LANES)

    def block(b: jax.Array, _: None) -> None:
        at = slice(None), pl.ds(pl.multiple_of(b * _LANES, _LANES), _LANES)
        here = lambda x: lax.broadcasted_iota(jnp.int32, x.shape, 1) == first + b  # noqa: E731

        def read(ref: Any, flag: bool) -> jax.Array:
            if len(ref.shape) == 1:
                return ref[0] != 0 if flag else ref[0]
            if ref.shape[-1] == width:
                return ref[at]
            # A column is read by a masked sum, because vectors cannot be sliced at any element.
            return jnp.sum(jnp.where(here(ref), ref[...], 0), 1, keepdims=True)

        def step(codec: formats.Codec, given: list[Any]) -> jax.Array:
            if codec.work == "draw":
                return codec.run(index + b * _LANES, *given)
            return codec.run(*(_extremes(*given) if codec.work == "measure" else given))

        found = entries.play(program, list(map(read, taken, flags)), _PART, step)
        for ref, x in zip(made, found, strict=True):
            if ref.shape[-1] == width:
                ref[at] = x
            else:
                ref[...] = jnp.where(here(ref), x, ref[...])

    lax.fori_loop(0, width // _LANES, block, None)


def _extremes(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ``formats.extremes`` of rows in f32, because TPU vectors cannot reduce i32."""
    size = jnp.max(jnp.where(x != x, jnp.inf, jnp.abs(x)), 1, keepdims=True)
    signed = lax.bitcast_convert_type(x, jnp.int32) < 0
    return size, jnp.min(jnp.where(signed, -1.0, 1.0), 1, keepdims=True)
