"""Section A: whatever a gradient may be."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax.testing._case import assert_same, even_params, example_grads
from cells.programs import Program, usual
from cells.subject import Cell, Subject, finite, moved, require, same_kind

PyTree = Any
TINY, HUGE, LEAVES, PATIENCE = 1e-40, 3.4e38, 2000, 20.0


def train(
    subject: Subject, params: PyTree, *, grads: Any = None, inner: Any = None, still: bool = False
) -> Any:
    """A few steps: what is finite stays so, and all keeps its kind. The params at the end."""
    program = usual(subject, params, inner)
    carry, step = program.start(params), program.jitted
    before = carry
    for seed in range(2 * subject.calls):
        given = program.grads(params, seed) if grads is None else program.feed([grads])
        carry = step(carry, given)
    same_kind(before, carry, "params and state")
    finite(program.common(carry)[0], "params")
    if still:
        assert_same(program.common(carry)[0], params, "params with zero gradients")
    elif jax.tree.leaves(params):
        moved(params, program.common(carry)[0])
    return program.common(carry)[0]


def guarded(subject: Subject) -> tuple[Program, PyTree]:
    """With whatever stands against gradients that are not finite."""
    params = even_params()
    return usual(subject, params, guard=True), params


def withstands(subject: Subject, values: list[float]) -> None:
    """Bad gradients on all replicas leave params and state alone, and the run goes on."""
    program, params = guarded(subject)
    step = program.jitted
    carry = program.run(params, range(subject.calls), step)
    after = carry
    for call in range(subject.calls):
        grads = example_grads(params, call)
        leaves, treedef = jax.tree.flatten(grads)
        if len(values) == 1:
            leaves[0] = leaves[0].at[(0,) * leaves[0].ndim].set(values[0])
        else:
            leaves = [jnp.full_like(x, values[0]) for x in leaves]
        after = step(after, program.feed([jax.tree.unflatten(treedef, leaves)]))
    assert_same(after[0], carry[0], "params after bad gradients")
    assert_same(subject.guarded(after[1]), subject.guarded(carry[1]), "state after bad gradients")
    for call in range(2 * subject.calls):
        after = step(after, program.grads(params, 7 + call))
    finite(after[0], "params afterwards")
    moved(carry[0], after[0])


def ordinary(subject: Subject) -> None:
    train(subject, even_params())


def zeros(subject: Subject) -> None:
    params = even_params()
    train(subject, params, grads=jax.tree.map(jnp.zeros_like, params), still=True)


def denormal(subject: Subject) -> None:
    params = even_params()
    program = usual(subject, params)
    carry, step = program.start(params), program.jitted
    tiny = jax.tree.map(lambda p: jnp.full_like(p, TINY), params)
    for _ in range(2 * subject.calls):
        carry = step(carry, program.feed([tiny]))
    finite(program.common(carry)[0], "params")


def largest(subject: Subject) -> None:
    program, params = guarded(subject)
    carry, step = program.start(params), program.jitted
    huge = jax.tree.map(lambda p: jnp.full_like(p, HUGE), params)
    for _ in range(2 * subject.calls):
        carry = step(carry, program.feed([huge]))
    finite(carry[0], "params")
    # What is measured of a step is NaN before the first one that was taken.
    kept = jax.tree.leaves(subject.guarded(program.start(params)[1]))
    for old, new in zip(kept, jax.tree.leaves(subject.guarded(carry[1])), strict=True):
        if bool(jnp.isfinite(old).all()):
            finite(new, "state")


def in_dtype(dtype: Any) -> Cell:
    def cell(subject: Subject) -> None:
        train(subject, jax.tree.map(lambda p: p.astype(dtype), even_params()))

    return cell


def float64(subject: Subject) -> None:
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: p.astype(jnp.float64), even_params())
        third = jax.tree.map(lambda p: jnp.full_like(p, 1 / 3), params)
        # Signs that differ, so that no mean over a leaf is taken for the leaf.
        grads = jax.tree.map(lambda g: g.at[0].multiply(-3), third)
        new = train(subject, params, grads=grads, inner=optax.sgd(1.0))
        if subject.linear and subject.reference is None:
            step = jax.tree.map(lambda p, q: p - q, params, new)
            ratio = float(step["b"][1] / step["b"][0])
            require(abs(ratio + 1 / 3) < 1e-14, f"rounded to f32: {ratio} for -1/3")


def mixed(subject: Subject) -> None:
    params = even_params()
    train(subject, params | {"b": params["b"].astype(jnp.bfloat16), "h": jnp.ones(8, jnp.float16)})


def complex64(subject: Subject) -> None:
    params = jax.tree.map(lambda p: (p + 0.5j * p).astype(jnp.complex64), even_params())
    # What sends some of the parts may come to the imaginary ones first.
    train(subject, params, grads=jax.tree.map(lambda p: p * (1 - 2j), params))


def number(leaf: Any) -> Any:
    """The leaf if it is of numbers to compute with, zeros otherwise."""
    return leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.zeros(leaf.shape)


def no_numbers(leaf: Any) -> Cell:
    """Gradients of integers are none: to pass them on or to refuse them by dtype is right."""

    def with_leaf(tx: Any) -> Any:
        # float0 is no array that could be handed to a mapped function.
        def update(grads: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Any:
            return tx.update(grads | {"n": leaf}, state, params, **extra)

        return optax.GradientTransformationExtraArgs(tx.init, update)

    def cell(subject: Subject) -> None:
        params = {"w": jnp.ones((8, 2)), "n": jnp.ones(8)}
        # What the transformation passes on is not for an optimizer to see.
        inner = optax.chain(optax.stateless(lambda g, _: jax.tree.map(number, g)), optax.sgd(0.1))
        program = usual(subject, params, inner, wrap=with_leaf)
        carry = program.start(params)
        after = program.step(carry, program.grads(params, 0))
        same_kind(carry[0], after[0], "params")

    return cell


def containers(subject: Subject) -> None:
    params = {
        "w": jnp.ones((8, 2)),
        "b": [jnp.ones(8), None, optax.MaskedNode(), {}, ()],
        "none": None,
    }
    train(subject, params)


def odd_sizes(subject: Subject) -> None:
    train(subject, {"w": jnp.float32(0.5), "b": jnp.ones((8,)), "z": jnp.zeros((0, 2))})


def many_leaves(subject: Subject) -> None:
    seconds = {}
    for count in (1, LEAVES):
        leaves = [jnp.ones((2, 2)) for _ in range(count)]
        params = {"w": leaves[0], "b": leaves[1:]} if count > 1 else {"w": leaves[0]}
        program = usual(subject, params, optax.sgd(0.1))
        shapes = jax.eval_shape(lambda p: p, params)
        carry = jax.eval_shape(program.start, shapes)
        grads = jax.eval_shape(lambda p, program=program: program.feed([p]), shapes)
        begun = time.thread_time()
        jax.eval_shape(program.step, carry, grads)
        seconds[count] = time.thread_time() - begun
    require(seconds[LEAVES] < PATIENCE, f"{LEAVES} leaves take {seconds[LEAVES]:.0f} s to trace")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Callable_:
    """A module of arrays that must not be called."""

    w: Any
    b: Any

    def __call__(self) -> None:
        """Called in place of being read."""
        raise RuntimeError("the params were called")


def callable_params(subject: Subject) -> None:
    params = even_params()
    train(subject, Callable_(params["w"], {"inside": params["b"]}))


NAN, INF = float("nan"), float("inf")
CELLS: dict[str, Cell] = {
    "ordinary f32": ordinary,
    "zeros": zeros,
    "+inf": lambda s: withstands(s, [INF]),
    "-inf": lambda s: withstands(s, [-INF]),
    "NaN in one leaf": lambda s: withstands(s, [NAN]),
    "NaN in all leaves": lambda s: withstands(s, [NAN, NAN]),
    "denormal": denormal,
    "largest finite": largest,
    "f16": in_dtype(jnp.float16),
    "bf16": in_dtype(jnp.bfloat16),
    "f64": float64,
    "mixed dtypes": mixed,
    "complex64": complex64,
    "integer leaf": no_numbers(np.arange(8, dtype=np.int32)),
    "float0 leaf": no_numbers(np.zeros(8, jax.dtypes.float0)),
    "None, MaskedNode, empty containers": containers,
    "0-d and size-0 leaves": odd_sizes,
    "1 and 2000 leaves": many_leaves,
    "callable params": callable_params,
}
