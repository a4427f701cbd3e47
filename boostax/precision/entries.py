# SPDX-License-Identifier: Apache-2.0
"""Change one leaf, element by element, by one primitive with a form for each compiler.

A program *fits* if each result's element depends on one element of each array, on scalars, and on
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
Cut = tuple[Mesh, PartitionSpec] | None
# Elementwise primitives, each with one result.
BY_ELEMENT = frozenset(
    "abs add add_any and bitcast_convert_type cbrt ceil clamp convert_element_type copy cos div eq "
    "erf exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne "
    "neg not or pow reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sqrt square sub tan tanh xor".split()
)


def _shape(var: Any) -> Shape:
    return var.aval.shape


def step_of(eqn: jaxprs.JaxprEqn) -> formats.Codec | None:
    """Return the step of encoding or decoding that an equation calls, if it calls one."""
    return formats.CODECS.get(eqn.params["name"]) if eqn.primitive.name in JIT else None


def fits(program: jaxprs.ClosedJaxpr) -> bool:
    """Return whether a program computes the arrays of a leaf element by element."""
    shape = shape_of(program)
    whole = {(), shape}

    def fit(eqn: jaxprs.JaxprEqn) -> bool:
        step, name = step_of(eqn), eqn.primitive.name
        if step is not None:
            return step.work == "draw" or _shape(eqn.invars[0]) == shape
        alike = {*map(_shape, (*eqn.invars, *eqn.outvars))} <= whole
        return alike and (name in THROUGH or name in BY_ELEMENT or name == "broadcast_in_dim")

    enter = lambda eqn, _: () if step_of(eqn) else (None,) * 9  # noqa: E731
    given = {*map(_shape, program.jaxpr.invars)} - whole
    known = given <= {formats.scales_of(shape)} and bool(shape)
    return known and all(fit(eqn) for eqn, _ in equations(program.jaxpr, enter=enter))


def play(
    program: jaxprs.ClosedJaxpr,
    operands: Sequence[Any],
    shape: Shape,
    step: Callable[[formats.Codec, list[Any]], Any],
) -> list[Any]:
    """Return the results of a program that fits, on arrays of another shape.

    Args:
      program: the program of a leaf.
      operands: arrays of the new shape in place of the leaf's arrays, scales that broadcast over
        them, and the same scalars.
      shape: the new shape.
      step: ``step(codec, operands)`` encodes or decodes.
    """

    def rule(eqn: jaxprs.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        found = step_of(eqn)
        if found is not None:
            return [step(found, operands)]
        if eqn.primitive.name in THROUGH:
            return evaluate(body_of(eqn), operands, rule)
        if eqn.primitive.name == "broadcast_in_dim":
            return [jnp.broadcast_to(operands[0], shape if _shape(eqn.outvars[0]) else ())]
        if eqn.primitive.name == "sign":
            # Pallas asks a device for the kind of TPU, so a kernel compiles only with a TPU
            # present. The product keeps NaN and -0, and flushes subnormals as the comparisons do.
            (x,) = operands
            return [jnp.where(x > 0, jnp.ones_like(x), jnp.where(x < 0, -jnp.ones_like(x), x * 0))]
        return [eqn.primitive.bind(*operands, **eqn.params)]

    return evaluate(program, operands, rule)


def shape_of(program: jaxprs.ClosedJaxpr) -> Shape:
    """Return the shape of a program's leaf, which is the shape of its largest result."""
    return max(map(_shape, program.jaxpr.outvars), key=math.prod)


def change(
    program: jaxprs.ClosedJaxpr, cut: Cut, always: jax.Array, operands: Sequence[Any]
) -> list[jax.Array]:
    """Return the results of a program that fits, written into its first operands' buffers.

    Args:
      program: the program of a leaf.
      cut: the mesh and the spec of the leaf, if they are known.
      always: True, but not a constant.
      operands: the operands of the program.
    """
    return _primitive().bind(always, *operands, program=program, cut=cut)


def _whole(always: Any, *operands: Any, program: jaxprs.ClosedJaxpr, **_: Any) -> list[Any]:
    return jaxprs.jaxpr_as_fun(program)(*operands)


def _played(
    program: jaxprs.ClosedJaxpr, operands: Sequence[Any], known: Sequence[Any] = ()
) -> tuple[list[Any], list[Any]]:
    """Return the results on arrays cut in blocks, and the scales, which may be given."""
    shape, inside = formats.cut(shape_of(program))
    outside = [dim for dim in range(len(shape)) if dim not in inside]
    ready, scales = iter(known), list[Any]()

    def wide(x: Any) -> Any:
        return lax.broadcast_in_dim(x, shape, outside) if x.ndim == len(outside) else x

    def step(codec: formats.Codec, given: list[Any]) -> Any:
        if codec.work == "draw":
            return codec.run(formats.index_in(shape), *given)
        if codec.work != "measure":
            return codec.run(*map(wide, given))
        found = next(ready, None)
        if found is None:
            # A dimension of size one gets another layout, and XLA:CPU copies between layouts.
            found = jnp.squeeze(codec.run(*formats.extremes(given[0], inside)), inside)
        scales.append(found)
        return found

    return play(program, operands, shape, step), scales


def _twice(program: jaxprs.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Compute the scales in one pass over the leaf, and all results in a second pass."""
    _, scales = _played(program, operands)
    # The barrier keeps XLA from reusing values of the first pass, which it would write to memory.
    operands, scales = lax.optimization_barrier((operands, scales))
    return _played(program, operands, scales)[0]


def _cut(program: jaxprs.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Cut the arrays of a leaf in blocks; scales have one element for each block."""
    shape = shape_of(program)
    whole, inside = formats.cut(shape)
    blocks = [n for dim, n in enumerate(whole) if dim not in inside]
    return [x.reshape(whole if x.shape == shape else blocks) if x.ndim else x for x in operands]


def _uncut(program: jaxprs.ClosedJaxpr, results: Sequence[Any]) -> list[Any]:
    return [x.reshape(_shape(var)) for x, var in zip(results, program.jaxpr.outvars, strict=True)]


def _staged(always: Any, *operands: Any, program: jaxprs.ClosedJaxpr, **_: Any) -> list[Any]:
    return _uncut(program, _twice(program, _cut(program, operands)))


def _looped(always: Any, *operands: Any, program: jaxprs.ClosedJaxpr, **_: Any) -> list[Any]:
    """Compute in a loop of one iteration, so that the leaf is finished before the next leaf starts.

    The loop writes in place. Without it XLA:CPU starts the operations of all leaves, and keeps all
    temporaries until all leaves are written.
    """
    count, given = len(program.jaxpr.outvars), _cut(program, operands)

    def turn(carry: list[Any]) -> list[Any]:
        return [jnp.zeros_like(always), *_twice(program, [*carry[1:], *given[count:]])]

    found = lax.while_loop(lambda carry: carry[0], turn, [always, *given[:count]])
    return _uncut(program, found[1:])


def _branched(always: Any, *operands: Any, program: jaxprs.ClosedJaxpr, **_: Any) -> list[Any]:
    """Compute in a branch, because XLA:TPU would otherwise keep the temporaries of all leaves."""
    old = lambda *operands: [*operands[: len(program.jaxpr.outvars)]]  # noqa: E731
    new = functools.partial(_staged, always, program=program)
    return lax.switch(always.astype(jnp.int32), [old, new], *operands)


def _on_tpu(ctx: Any, *values: Any, program: jaxprs.ClosedJaxpr, cut: Cut) -> Any:
    """Compute in a kernel on one device, or on the shards of a known mesh.

    XLA cannot partition a kernel.
    """
    from boostax.precision import kernel

    context, shape = ctx.module_context.axis_context, shape_of(program)
    names = frozenset(getattr(getattr(context, "mesh", None), "axis_names", ()))
    mapped = getattr(context, "manual_axes", names) == names
    alone = mapped and getattr(context, "num_devices", 1) == 1
    mesh, spec = cut or (None, PartitionSpec())
    part = shape if alone or mesh is None else NamedSharding(mesh, spec).shard_shape(shape)

    def run(always: Any, *operands: Any) -> list[Any]:
        on_shard = lambda start, *x: kernel.run(program, x, part, start.reshape(()))  # noqa: E731
        if alone or mesh is None:
            return on_shard(jnp.zeros((), jnp.int32), *operands)
        steps = [n * stride for n, stride in zip(part, formats.strides_of(shape), strict=True)]
        first = formats.index_in(tuple(n // k for n, k in zip(shape, part, strict=True)), steps)
        specs = [spec if x.ndim else PartitionSpec() for x in operands]
        how: Any = {"in_specs": (spec, *specs), "out_specs": [spec] * len(program.jaxpr.outvars)}
        return jax.shard_map(on_shard, mesh=mesh, check_vma=False, **how)(first, *operands)

    ready = (alone or mesh is not None) and kernel.ready(program, part)
    fn = run if ready else functools.partial(_branched, program=program)
    return mlir.lower_fun(fn, multiple_results=True)(ctx, *values)


def _batched(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    found = jax.vmap(functools.partial(_branched, **params), tuple(dims))(*operands)
    return found, [0] * len(found)


def _differentiated(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    whole = tuple(ad.instantiate_zeros(x) for x in tangents)
    return jax.jvp(functools.partial(_whole, **params), tuple(primals), whole)


@functools.cache
def _primitive() -> Any:
    """Make the primitive at its first use, because its module is slow to load."""
    from jax.extend.core import Primitive

    made = Primitive("boostax_entries")
    made.multiple_results = True
    made.def_impl(_whole)
    made.def_abstract_eval(lambda *_, program, **__: program.out_avals)
    lower = functools.partial(mlir.lower_fun, multiple_results=True)
    mlir.register_lowering(made, lower(_staged))
    mlir.register_lowering(made, lower(_looped), platform="cpu")
    mlir.register_lowering(made, _on_tpu, platform="tpu")
    batching.primitive_batchers[made] = _batched
    ad.primitive_jvps[made] = _differentiated
    return made
