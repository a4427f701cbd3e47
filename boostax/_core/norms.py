# SPDX-License-Identifier: Apache-2.0
"""Reductions over gradients: largest magnitudes, sums of squares, counts, finiteness.

Each reduction reads its operand once and writes no array of the operand's size. The compilers for
CPU and TPU need different forms of a reduction for this.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax._core import axes, checks, trees
from boostax._core.types import PyTree


# The reducers are defined in the module and not in a function, so that JAX traces each reducer only
# once for all leaves.
def add_both(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Add two tuples of sums, as ``jax.lax.reduce`` of several operands requires."""
    return lax.add(a[0], b[0]), lax.add(a[1], b[1])


def _extremes(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return lax.max(a[0], b[0]), lax.min(a[1], b[1])


def largest_magnitudes(tree: PyTree) -> list[jax.Array]:
    """Return ``max |x|`` of each inexact leaf, NaN and infinities included; 0 for empty leaves.

    A reduction of the leaf itself fuses with the operation that made the leaf. For an elementwise
    ``isfinite``, or a test of the unscaled gradient, XLA:CPU writes a temporary as large as a leaf.
    A maximum of floats may lose a NaN: XLA:CPU loses it in the all-reduce that combines the maxima
    of the shards of a leaf, and on other backends the result is undefined. Leaves are widened
    because XLA:CPU needs twice as long for f16 on a processor without f16 vectors.
    """
    wide: list[jax.Array] = []
    for x in [x for x in jax.tree.leaves(tree) if trees.is_inexact(jnp.result_type(x))]:
        is_real = not jnp.iscomplexobj(x)
        # The modulus of a finite complex number can overflow, so the larger of its real and
        # imaginary part replaces the modulus.
        size = lax.abs(x) if is_real else jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag))
        wide.append(trees.at_least_float32(size))
    in_pairs = functools.partial(_maxima, in_pairs=True)
    return lax.platform_dependent(wide, cpu=in_pairs, default=_maxima) if wide else []


def _maxima(leaves: list[jax.Array], in_pairs: bool = False) -> list[jax.Array]:
    """Return the largest magnitude of each leaf, or NaN if the leaf contains NaN.

    By default, the bits of magnitudes are compared as unsigned integers, among which NaN is
    largest. XLA:CPU would write these integers to memory. With ``in_pairs``, one reduction computes
    both maximum and minimum of the floats instead. XLA does not turn this reduction into an
    all-reduce, but gathers and compares the results of all shards. A TPU would read a gradient
    twice for this reduction.
    """
    if not in_pairs:
        bits = [lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for x in leaves]
        most = [lax.reduce_max(x, tuple(range(x.ndim))) for x in bits]
        return [lax.bitcast_convert_type(x, y.dtype) for x, y in zip(most, leaves, strict=True)]
    # ``pairs`` is a generator, so that the operations of each leaf stay together in the program.
    pairs = (lax.reduce((x, x), (x.dtype.type(0),) * 2, _extremes, range(x.ndim)) for x in leaves)
    return [lax.select(lax.ne(least, least), least, most) for most, least in pairs]


def square_sums(leaves: Sequence[jax.Array], dtype: str | np.dtype = "float32") -> list[jax.Array]:
    """Return the sum of squares of each gradient in two units, from which ``root`` computes a norm.

    In f32, the square of a number below 1e-19 is zero, and the square of a number above 1e19 is
    infinite. The first sum is in a unit in which the squares of up to 2**31 finite numbers have a
    finite sum. The second sum is in a unit for gradients of usual size. Both units are powers of
    two, so scaling does not round. To combine leaves or replicas, add the first sums, and add the
    second sums.

    Returns:
      An array ``[2]`` for each leaf, in the widest dtype of the leaves, ``dtype`` or wider; one
      array of zeros if there are no leaves. Both sums show NaN and infinities. Cost: one read of
      each leaf.
    """
    wides = trees.at_least_float32(list(leaves))
    parts = [(x.real, x.imag) if jnp.iscomplexobj(x) else (x,) for x in wides]
    wide = jnp.result_type(dtype, *(x for pair in parts for x in pair))
    if not parts:
        return [jnp.zeros(2, wide)]
    cast = [[x.astype(wide) for x in pair] for pair in parts]
    return lax.platform_dependent(cast, cpu=lambda x: _sums(x, in_pairs=True), default=_sums)


def _sums(leaves: list[list[jax.Array]], in_pairs: bool = False) -> list[jax.Array]:
    """Return the two sums of squares of leaves, each given by its real and imaginary part.

    A TPU fuses two reductions with the operation that made the operand. With ``in_pairs``, one
    reduction computes both sums, so XLA:CPU does not write the operand to memory. This reduction
    adds term by term, which rounds more than a plain sum, so the longest dimension is reduced by a
    plain sum.
    """
    sums: list[jax.Array] = []
    for parts in leaves:
        # Without the maximum, XLA would compute ``x * x * (y * y)``. In f32, ``y * y`` is 0 for the
        # smaller unit.
        units = _units(parts[0].dtype)
        pair = tuple(sum(jnp.square(jnp.maximum(jnp.abs(x) * y, 0)) for x in parts) for y in units)
        if in_pairs:
            zero = np.zeros((), parts[0].dtype)
            inner = tuple(i for i in range(parts[0].ndim) if i != np.argmax(parts[0].shape))
            pair = lax.reduce(pair, (zero, zero), add_both, inner)
        sums.append(jnp.stack([jnp.sum(x) for x in pair]))
    return sums


def _units(dtype: np.dtype) -> tuple[float, float]:
    """Return the factors that multiply elements in ``square_sums``: 2**-80 and 2**30 for f32."""
    octaves = int(jnp.finfo(dtype).maxexp)
    return 2.0 ** (-5 * octaves // 8), 2.0 ** (15 * octaves // 64)


def root(sums: jax.Array) -> jax.Array:
    """Return the norm from its ``square_sums``; in f32, a norm above 1e-28 is accurate."""
    large, usual = _units(sums.dtype)
    first, second = jnp.sqrt(sums)
    return jnp.where(jnp.isfinite(sums[1]), second / usual, first / large)


def all_true(flags: list[jax.Array]) -> jax.Array:
    """Return the conjunction of bool scalars; True if there are none."""
    return jnp.stack(flags).all() if flags else jnp.asarray(True)


@checks.arguments
def all_finite(tree: PyTree, *, axis_name: axes.AxisName | None = None) -> jax.Array:
    """Return whether all leaves are free of NaN and infinities, on all replicas.

    Args:
      tree: arrays of any dtype. Integers, ``None`` and empty leaves count as finite.
      axis_name: mesh axis, or a tuple of axes, over which the replicas combine their results.
        ``None``: each replica has its own result, also inside a step.

    Returns:
      Bool scalar, equal on all replicas when ``axis_name`` is given. Cost: one read of the tree,
      and one all-reduce of 4 bytes with ``axis_name``.

    Raises:
      ValueError: the axis is not bound.

    Example:
      >>> import boostax, jax.numpy as jnp
      >>> bool(boostax.precision.all_finite({"w": jnp.array([1.0, jnp.inf])}))
      False
    """
    names = axes.canonical("all_finite", axis_name)
    axes.require_bound(names, "all_finite")
    return axes.agree(all_true([jnp.isfinite(m) for m in largest_magnitudes(tree)]), names)


def stays_finite(old: PyTree, new: PyTree) -> jax.Array:
    """Return whether every element that is finite in ``old`` is also finite in ``new``."""
    leaves: list[jax.Array] = []
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if trees.is_inexact(jnp.result_type(after)):
            leaves.append(jnp.where(jnp.isfinite(before), after, jnp.zeros_like(after)))
        else:
            leaves.append(jnp.zeros(()))
    return all_finite(leaves)
