# SPDX-License-Identifier: Apache-2.0
"""Run the program of a leaf on a TPU as one Pallas kernel, which reads and writes each array once.

Each step of the grid loads 32 rows into the vector memory, because a tile of 8-bit codes has 32
rows. The step loops over the blocks of 128 elements, and runs the program on one block of each row
at a time.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from boostax._core import jaxprs
from boostax.precision import entries, formats

ROWS, LANES = _PART = 32, formats.BLOCK
# A step of the grid uses at most this many bytes; the vector memory of a TPU v4 has 16 MB.
_MEMORY = 10 * 2**20
# Primitives that Pallas cannot compile for TPUs.
LACKING = frozenset({"cbrt", "expm1", "nextafter"})


def apply(
    program: jaxprs.ClosedJaxpr,
    shape: entries.Shape,
    start: jax.Array,
    *operands: jax.Array,
    interpret: bool = False,
) -> list[jax.Array]:
    """Return the results of a program on a leaf's shard, written into the first operands' buffers.

    Args:
      program: the program of the complete leaf.
      shape: the shape of the shard.
      start: an array of one element: the index, in the leaf, of the shard's first element.
      operands: the shards of the operands.
      interpret: whether to run the kernel without a TPU.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    count = len(program.jaxpr.outvars)
    # ``width`` is the number of elements of a row in one step of the grid. The pipeline has the
    # arrays of two steps in memory, so the bytes of a column count twice.
    arrays: Any = [*program.in_avals, *program.out_avals]
    leaf_shape = entries.shape_of(program)
    column = 2 * ROWS * sum(x.dtype.itemsize for x in arrays if x.shape == leaf_shape)
    counts = range(max(1, _MEMORY // column // LANES), 0, -1)
    width = LANES * next(n for n in counts if shape[-1] % (n * LANES) == 0)
    # SMEM can contain integers but not bools.
    args = start.reshape(()), *operands
    numbers = (x if x.ndim or x.dtype != bool else x.astype(jnp.int32) for x in args)
    flat = [x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1) for x in numbers]

    specs = list[pl.BlockSpec]()
    for x in flat:
        if x.ndim == 1:
            specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
        elif x.shape[1] == shape[-1]:
            specs.append(pl.BlockSpec((ROWS, width), lambda i, j: (i, j)))
        else:
            # The scales of complete rows are passed, because on a TPU, Pallas splits rows only at
            # multiples of 128 columns.
            specs.append(pl.BlockSpec((ROWS, x.shape[1]), lambda i, _: (i, 0)))
    results = pl.pallas_call(
        functools.partial(_step, program, shape, width, [x.dtype == bool for x in operands]),
        grid=(math.prod(shape[:-1]) // ROWS, shape[-1] // width),
        in_specs=specs,
        out_specs=specs[1 : count + 1],
        # With ``check_vma=True``, the types of the results must contain the axes over which the
        # results vary.
        out_shape=jax.eval_shape(lambda *arrays: [*arrays], *flat[1 : count + 1]),
        input_output_aliases={i + 1: i for i in range(count)},
        interpret=interpret,
    )(*flat)
    return [x.reshape(y.shape) for x, y in zip(results, operands, strict=False)]


def _step(
    program: jaxprs.ClosedJaxpr, shape: entries.Shape, width: int, flags: list[bool], *refs: Any
) -> None:
    """Compute the rows of one step of the grid, block after block."""
    from jax.experimental import pallas as pl

    start, *inputs = refs[: len(flags) + 1]
    strides = formats.strides_of(entries.shape_of(program))
    row = pl.program_id(0) * ROWS
    column = pl.program_id(1) * width
    index = start[0] + column + formats.index_in(_PART, strides[-2:])
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        index, row = index + lax.rem(row, size) * formats.int32(stride), lax.div(row, size)
    first = lax.div(column, LANES)

    def block(b: jax.Array, _: None) -> None:
        at = slice(None), pl.ds(pl.multiple_of(b * LANES, LANES), LANES)

        def in_column(ref: Any) -> jax.Array:
            return lax.broadcasted_iota(jnp.int32, ref.shape, 1) == first + b

        operands = list[jax.Array]()
        for ref, flag in zip(inputs, flags, strict=True):
            if len(ref.shape) == 1:
                x = ref[0] != 0 if flag else ref[0]
            elif ref.shape[-1] == width:
                x = ref[at]
            else:
                # A masked sum reads one column, because a TPU cannot slice a vector at an arbitrary
                # element.
                x = jnp.sum(jnp.where(in_column(ref), ref[...], 0), 1, keepdims=True)
            operands.append(x)

        def step(codec: formats.Codec, operands: list[jax.Array]) -> jax.Array:
            if codec.work == "draw":
                return codec.compute(index + b * LANES, *operands)
            if codec.work == "measure":
                # A TPU's vector unit cannot reduce i32, so the extremes of rows are computed in
                # f32.
                (x,) = operands
                size = jnp.max(jnp.where(x != x, jnp.inf, jnp.abs(x)), 1, keepdims=True)
                signs = jnp.where(lax.bitcast_convert_type(x, jnp.int32) < 0, -1.0, 1.0)
                operands = [size, jnp.min(signs, 1, keepdims=True)]
            return codec.compute(*operands)

        results = entries.play(program, operands, _PART, step)
        for ref, x in zip(refs[len(flags) + 1 :], results, strict=True):
            if ref.shape[-1] == width:
                ref[at] = x
            else:
                ref[...] = jnp.where(in_column(ref), x, ref[...])

    lax.fori_loop(0, width // LANES, block, None)
