# SPDX-License-Identifier: Apache-2.0
"""Change one leaf, element by element, with one primitive that has a lowering for each compiler.

In the program of such a leaf, each element of a result depends on one element of each array, on
scalars, and on the scales of the element's block. One pass over the leaf computes the scales, and a
second pass computes all results from the stored arrays. So no f32 array is written to memory.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from boostax._core import jaxprs
from boostax._core.interpret import JIT, THROUGH, body_of, equations, evaluate
from boostax.precision import formats

Shape = tuple[int, ...]
Sharding = tuple[Mesh, PartitionSpec] | None
Step = Callable[[formats.Codec, list[jax.Array]], jax.Array]
# Elementwise primitives that have one result.
BY_ELEMENT = frozenset(
    "abs add add_any and bitcast_convert_type cbrt ceil clamp convert_element_type copy cos div eq "
    "erf exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne "
    "neg not or pow reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sqrt square sub tan tanh xor".split()
)
# The shape of a variable in a program.
aval_shape: Callable[[Any], Shape] = operator.attrgetter("aval.shape")


def shape_of(program: jaxprs.ClosedJaxpr) -> Shape:
    """Return the shape of a program's leaf, which is the shape of its largest result."""
    return max(map(aval_shape, program.jaxpr.outvars), key=math.prod)


def step_of(eqn: jaxprs.JaxprEqn) -> formats.Codec | None:
    """Return the step that an equation calls to encode or decode; ``None`` for other equations."""
    return formats.CODECS.get(eqn.params["name"]) if eqn.primitive.name in JIT else None


def is_elementwise(program: jaxprs.ClosedJaxpr) -> bool:
    """Return whether a program computes the arrays of a leaf element by element."""
    shape = shape_of(program)
    others = {*map(aval_shape, program.jaxpr.invars)} - {(), shape}
    if not shape or not others <= {formats.scales_of(shape)}:
        return False
    allowed = BY_ELEMENT.union(THROUGH, ["broadcast_in_dim"])
    # A step of a codec counts as one operation, so its equations are not checked.
    for eqn, _ in equations(program.jaxpr, enter=lambda x, _: () if step_of(x) else (None,) * 9):
        step = step_of(eqn)
        shapes = {*map(aval_shape, (*eqn.invars, *eqn.outvars))}
        if step is None and not (shapes <= {(), shape} and eqn.primitive.name in allowed):
            return False
        if step is not None and step.work != "draw" and aval_shape(eqn.invars[0]) != shape:
            return False
    return True


def play(
    program: jaxprs.ClosedJaxpr, operands: Sequence[jax.Array], shape: Shape, step: Step
) -> list[jax.Array]:
    """Return the results of an elementwise program on arrays of another shape.

    Args:
      program: the program of a leaf.
      operands: arrays of the new shape in place of the leaf's arrays, scales that broadcast over
        these arrays, and the same scalars.
      shape: the new shape.
      step: ``step(codec, operands)`` encodes or decodes.
    """

    def rule(eqn: jaxprs.JaxprEqn, operands: list[jax.Array]) -> Sequence[jax.Array]:
        codec = step_of(eqn)
        if codec is not None:
            return [step(codec, operands)]
        if eqn.primitive.name in THROUGH:
            return evaluate(body_of(eqn), operands, rule)
        if eqn.primitive.name == "broadcast_in_dim":
            return [jnp.broadcast_to(operands[0], shape if aval_shape(eqn.outvars[0]) else ())]
        if eqn.primitive.name == "sign":
            # To lower ``sign``, Pallas reads the kind of TPU from a device, so the kernel would not
            # compile without a TPU. ``x * 0`` preserves NaN and -0, and flushes subnormal numbers
            # as the comparisons do.
            (x,) = operands
            return [jnp.where(x > 0, jnp.ones_like(x), jnp.where(x < 0, -jnp.ones_like(x), x * 0))]
        return [eqn.primitive.bind(*operands, **eqn.params)]

    return evaluate(program, operands, rule)


def _on_blocks(
    program: jaxprs.ClosedJaxpr, operands: Sequence[jax.Array], known: Sequence[jax.Array] = ()
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the results on arrays that are cut into blocks, and scales that are not ``known``."""
    shape, inside = formats.blocked(shape_of(program))
    outside = [dim for dim in range(len(shape)) if dim not in inside]
    n = len(outside)
    unused = iter(known)
    scales = list[jax.Array]()

    def step(codec: formats.Codec, operands: list[jax.Array]) -> jax.Array:
        if codec.work == "draw":
            return codec.compute(formats.index_in(shape), *operands)
        if codec.work != "measure":
            wide = [x if x.ndim != n else lax.broadcast_in_dim(x, shape, outside) for x in operands]
            return codec.compute(*wide)
        if known:
            return next(unused)
        # XLA:CPU would copy arrays with dimensions of size one to another layout, so these
        # dimensions are removed from the scales.
        scales.append(jnp.squeeze(codec.compute(*formats.extremes(operands[0], inside)), inside))
        return scales[-1]

    return play(program, operands, shape, step), scales


def _in_two_passes(
    always: jax.Array, *args: jax.Array, program: jaxprs.ClosedJaxpr, loop: bool = False, **_: Any
) -> list[jax.Array]:
    """Compute the scales in one pass over the leaf, and all results in a second pass.

    With ``loop``, both passes are in a loop of one iteration. The loop writes in place, and ends
    before the loop of the next leaf starts. Without the loop, XLA:CPU starts the operations of all
    leaves, and frees no temporary until all leaves are written.
    """
    count = len(program.jaxpr.outvars)
    shape = shape_of(program)
    blocked, inside = formats.blocked(shape)
    # An array of scales has one element for each block.
    blocks = [n for dim, n in enumerate(blocked) if dim not in inside]
    operands = [x.reshape(blocked if x.shape == shape else blocks) if x.ndim else x for x in args]

    def compute(old: list[jax.Array]) -> list[jax.Array]:
        args = [*old, *operands[count:]]
        _, scales = _on_blocks(program, args)
        # Without the barrier, XLA would write values of the first pass to memory, and reuse the
        # values in the second pass.
        args, scales = lax.optimization_barrier((args, scales))
        return _on_blocks(program, args, scales)[0]

    results = operands[:count]
    if loop:
        results = lax.while_loop(
            lambda x: x[0], lambda x: [jnp.zeros_like(always), *compute(x[1:])], [always, *results]
        )[1:]
    else:
        results = compute(results)
    return [*map(jnp.reshape, results, map(aval_shape, program.jaxpr.outvars))]


def _in_branch(always: jax.Array, *args: Any, program: jaxprs.ClosedJaxpr, **_: Any) -> Any:
    """Compute in a branch, so that XLA:TPU frees the temporaries of a leaf before the next leaf."""
    count = len(program.jaxpr.outvars)
    new = functools.partial(_in_two_passes, always, program=program)
    return lax.switch(always.astype(jnp.int32), [lambda *old: [*old[:count]], new], *args)


def _on_tpu(
    ctx: mlir.LoweringRuleContext, *values: Any, program: jaxprs.ClosedJaxpr, sharding: Sharding
) -> Any:
    """Compute in a kernel on one device, or on the shards of a known mesh; otherwise in a branch.

    If the mesh is unknown, a branch is needed, because XLA cannot partition a kernel.
    """
    from boostax.precision import kernel

    env = ctx.module_context.axis_context
    shape = shape_of(program)
    names = frozenset(getattr(getattr(env, "mesh", None), "axis_names", ()))
    is_local = getattr(env, "manual_axes", names) == names and getattr(env, "num_devices", 1) == 1
    mesh, spec = (None, PartitionSpec()) if sharding is None or is_local else sharding
    part = shape if mesh is None else NamedSharding(mesh, spec).shard_shape(shape)
    apply = functools.partial(kernel.apply, program, part)

    def on_device(always: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        if mesh is None:
            return apply(jnp.zeros((), jnp.int32), *operands)
        steps = [n * stride for n, stride in zip(part, formats.strides_of(shape), strict=True)]
        first = formats.index_in(tuple(n // k for n, k in zip(shape, part, strict=True)), steps)
        specs = (spec, *(spec if x.ndim else PartitionSpec() for x in operands))
        out = [spec] * len(program.jaxpr.outvars)
        mapped = jax.shard_map(apply, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        return mapped(first, *operands)

    is_tiled = len(part) > 1 and not (part[-1] % kernel.LANES or part[-2] % kernel.ROWS)
    compiles = kernel.LACKING.isdisjoint(x.primitive.name for x, _ in equations(program.jaxpr))
    ready = (is_local or mesh is not None) and is_tiled and compiles
    fn = on_device if ready else functools.partial(_in_branch, program=program)
    return mlir.lower_fun(fn, multiple_results=True)(ctx, *values)


@functools.cache
def primitive() -> Any:
    """Make the primitive of elementwise programs when it is first used.

    ``bind(always, *operands, program=, sharding=)`` returns the results, written into the buffers
    of the first operands. ``always`` is an array that is True, but not a constant of the program.
    ``program`` is the program of a leaf, and ``sharding`` is the mesh and the spec of the leaf, or
    ``None`` if unknown.
    """
    # Loading this module is slow, so ``import boostax`` does not load it.
    from jax.extend.core import Primitive

    made = Primitive("boostax_entries")
    made.multiple_results = True
    made.def_impl(lambda _, *args, program, **__: jaxprs.jaxpr_as_fun(program)(*args))
    made.def_abstract_eval(lambda *_, program, **__: program.out_avals)
    lower = functools.partial(mlir.lower_fun, multiple_results=True)
    mlir.register_lowering(made, lower(_in_two_passes))
    mlir.register_lowering(made, lower(functools.partial(_in_two_passes, loop=True)), "cpu")
    mlir.register_lowering(made, _on_tpu, "tpu")
    batching.primitive_batchers[made] = lambda operands, dims, **params: (
        jax.vmap(functools.partial(_in_branch, **params), tuple(dims))(*operands),
        [0] * len(params["program"].out_avals),
    )
    ad.primitive_jvps[made] = lambda primals, tangents, **params: jax.jvp(
        functools.partial(made.impl, **params),
        tuple(primals),
        tuple(map(ad.instantiate_zeros, tangents)),
    )
    return made
