# SPDX-License-Identifier: Apache-2.0
"""Change one leaf, element by element, by one primitive with a form for each compiler.

In such a program each element of a result depends on one element of each array, on scalars, and on
the scales of its block. Then one pass over the leaf computes the scales, and a second pass computes
all results again from the stored arrays. So no f32 array is written to memory.
"""

from __future__ import annotations

import functools
import math
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
# Elementwise primitives, each with one result.
BY_ELEMENT = frozenset(
    "abs add add_any and bitcast_convert_type cbrt ceil clamp convert_element_type copy cos div eq "
    "erf exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne "
    "neg not or pow reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sqrt square sub tan tanh xor".split()
)


def aval_shape(var: Any) -> Shape:
    """Return the shape of a variable of a program."""
    return var.aval.shape


def shape_of(program: jaxprs.ClosedJaxpr) -> Shape:
    """Return the shape of a program's leaf, which is the shape of its largest result."""
    return max(map(aval_shape, program.jaxpr.outvars), key=math.prod)


def step_of(eqn: jaxprs.JaxprEqn) -> formats.Codec | None:
    """Return the step of encoding or decoding that an equation calls, if it calls one."""
    return formats.CODECS.get(eqn.params["name"]) if eqn.primitive.name in JIT else None


def is_elementwise(program: jaxprs.ClosedJaxpr) -> bool:
    """Return whether a program computes the arrays of a leaf element by element."""
    shape = shape_of(program)
    others = {*map(aval_shape, program.jaxpr.invars)} - {(), shape}
    if not shape or not others <= {formats.scales_of(shape)}:
        return False
    allowed = BY_ELEMENT.union(THROUGH, ["broadcast_in_dim"])
    # The bodies of steps are not searched.
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
        them, and the same scalars.
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
            # Pallas asks a device for the kind of TPU, so a kernel compiles only with a TPU
            # present. The product keeps NaN and -0, and flushes subnormals as the comparisons do.
            (x,) = operands
            return [jnp.where(x > 0, jnp.ones_like(x), jnp.where(x < 0, -jnp.ones_like(x), x * 0))]
        return [eqn.primitive.bind(*operands, **eqn.params)]

    return evaluate(program, operands, rule)


def _on_blocks(
    program: jaxprs.ClosedJaxpr, operands: Sequence[jax.Array], known: Sequence[jax.Array] = ()
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the results on arrays cut in blocks, and the scales unless they are ``known``."""
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
        # A dimension of size one gets another layout, and XLA:CPU copies between layouts.
        scales.append(jnp.squeeze(codec.compute(*formats.extremes(operands[0], inside)), inside))
        return scales[-1]

    return play(program, operands, shape, step), scales


def _in_two_passes(
    always: jax.Array, *args: jax.Array, program: jaxprs.ClosedJaxpr, loop: bool = False, **_: Any
) -> list[jax.Array]:
    """Compute the scales in one pass over the leaf, and all results in a second pass.

    With ``loop`` both passes are the one iteration of a loop, which writes in place, so that the
    leaf is finished before the next leaf starts. Without the loop XLA:CPU starts the operations of
    all leaves, and keeps all temporaries until all leaves are written.
    """
    count = len(program.jaxpr.outvars)
    shape = shape_of(program)
    blocked, inside = formats.blocked(shape)
    # Scales have one element for each block.
    blocks = [n for dim, n in enumerate(blocked) if dim not in inside]
    operands = [x.reshape(blocked if x.shape == shape else blocks) if x.ndim else x for x in args]

    def compute(old: list[jax.Array]) -> list[jax.Array]:
        args = [*old, *operands[count:]]
        _, scales = _on_blocks(program, args)
        # The barrier keeps XLA from reusing values of the first pass, which it would write to
        # memory.
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
    """Compute in a branch, because XLA:TPU would otherwise keep the temporaries of all leaves."""
    count = len(program.jaxpr.outvars)
    new = functools.partial(_in_two_passes, always, program=program)
    return lax.switch(always.astype(jnp.int32), [lambda *old: [*old[:count]], new], *args)


def _on_tpu(
    ctx: mlir.LoweringRuleContext, *values: Any, program: jaxprs.ClosedJaxpr, sharding: Sharding
) -> Any:
    """Compute in a kernel on one device, or on the shards of a known mesh.

    XLA cannot partition a kernel.
    """
    from boostax.precision import kernel

    env = ctx.module_context.axis_context
    shape = shape_of(program)
    names = frozenset(getattr(getattr(env, "mesh", None), "axis_names", ()))
    is_local = getattr(env, "manual_axes", names) == names and getattr(env, "num_devices", 1) == 1
    mesh, spec = (None, PartitionSpec()) if sharding is None or is_local else sharding
    part = shape if mesh is None else NamedSharding(mesh, spec).shard_shape(shape)

    def on_shard(start: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        return kernel.apply(program, operands, part, start.reshape(()))

    def on_device(always: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        if mesh is None:
            return on_shard(jnp.zeros((), jnp.int32), *operands)
        steps = [n * stride for n, stride in zip(part, formats.strides_of(shape), strict=True)]
        first = formats.index_in(tuple(n // k for n, k in zip(shape, part, strict=True)), steps)
        specs = (spec, *(spec if x.ndim else PartitionSpec() for x in operands))
        out = [spec] * len(program.jaxpr.outvars)
        mapped = jax.shard_map(on_shard, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        return mapped(first, *operands)

    ready = (is_local or mesh is not None) and kernel.ready(program, part)
    fn = on_device if ready else functools.partial(_in_branch, program=program)
    return mlir.lower_fun(fn, multiple_results=True)(ctx, *values)


@functools.cache
def primitive() -> Any:
    """Make the primitive of elementwise programs at its first use; its module is slow to load.

    ``bind(always, *operands, program=, sharding=)`` returns the results, written into the buffers
    of the first operands. ``always`` is True, but not a constant. ``program`` is the program of a
    leaf, and ``sharding`` the mesh and the spec of the leaf, if they are known.
    """
    from jax.extend.core import Primitive

    def compute(_: jax.Array, *operands: jax.Array, program: jaxprs.ClosedJaxpr, **__: Any) -> Any:
        return jaxprs.jaxpr_as_fun(program)(*operands)

    def derive(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
        changes = tuple(map(ad.instantiate_zeros, tangents))
        return jax.jvp(functools.partial(compute, **params), tuple(primals), changes)

    def batched(operands: Any, dims: Any, **params: Any) -> tuple[list[jax.Array], list[int]]:
        results = jax.vmap(functools.partial(_in_branch, **params), tuple(dims))(*operands)
        return results, [0] * len(results)

    made = Primitive("boostax_entries")
    made.multiple_results = True
    made.def_impl(compute)
    made.def_abstract_eval(lambda *_, program, **__: program.out_avals)
    lower = functools.partial(mlir.lower_fun, multiple_results=True)
    mlir.register_lowering(made, lower(_in_two_passes))
    mlir.register_lowering(made, lower(functools.partial(_in_two_passes, loop=True)), "cpu")
    mlir.register_lowering(made, _on_tpu, "tpu")
    batching.primitive_batchers[made] = batched
    ad.primitive_jvps[made] = derive
    return made
