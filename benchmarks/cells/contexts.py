"""Section B: wherever a step may run."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding

import boostax
from boostax.testing import drawn
from boostax.testing._case import assert_close, assert_same, even_params
from cells.programs import (
    P,
    Program,
    alone,
    eager,
    mapped,
    on_devices,
    on_global_arrays,
    usual,
)
from cells.subject import (
    AXIS,
    Cell,
    NoMeaning,
    Subject,
    default,
    finite,
    moved,
    require,
    same_kind,
)

PyTree = Any
REPLICAS = 4


def expected(subject: Subject) -> tuple[Program, Any, list[PyTree]]:
    """The usual program, where it ends after two changes of the params, and on what gradients."""
    params = even_params()
    program = usual(subject, params)
    grads = [program.grads(params, seed) for seed in range(2 * subject.calls)]
    return program, program.run(params, range(2 * subject.calls)), grads


def in_jit(subject: Subject) -> None:
    program, carry, _ = expected(subject)
    same_kind(program.start(even_params()), carry, "params and state")
    params, _ = program.common(carry)
    finite(params, "params")
    moved(even_params(), params)


def eagerly(subject: Subject) -> None:
    without_jit(subject)


def disabled(subject: Subject) -> None:
    with jax.disable_jit():
        without_jit(subject)


def without_jit(subject: Subject) -> None:
    """One change of the params, step by step, as the jitted program makes it."""
    params, program = even_params(), eager(subject)
    carry, usually = program.start(params), usual(subject, params)
    for seed in range(subject.calls):
        carry = program.step(carry, program.grads(params, seed))
    with jax.disable_jit(False):
        jitted = usually.run(params, range(subject.calls))
    assert_close(program.common(carry)[0], usually.common(jitted)[0], "params")


def donated(subject: Subject) -> None:
    program, end, grads = expected(subject)
    step = jax.jit(program.step, donate_argnums=0)
    # Without the copy the first call would take the caller's params.
    carry = program.start(jax.tree.map(jnp.copy, even_params()))
    for g in grads:
        old = [x for x in jax.tree.leaves(carry) if isinstance(x, jax.Array)]
        carry = step(carry, g)
        kept = {id(x) for x in jax.tree.leaves(carry)}
        gone = all(x.is_deleted() or id(x) in kept or not x.ndim for x in old)
        require(gone, "a donated buffer was not taken")
    assert_same(carry, end, "donated")


def in_scan(subject: Subject) -> None:
    program, end, grads = expected(subject)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    body = lambda carry, g: (program.step(carry, g), None)  # noqa: E731
    carry, _ = jax.jit(lambda c, g: jax.lax.scan(body, c, g))(program.start(even_params()), stacked)
    assert_close(program.common(carry)[0], program.common(end)[0], "scan")


def in_cond(subject: Subject) -> None:
    """Both branches agree in dtype, shape, sharding and varying axes."""
    program, end, grads = expected(subject)

    @jax.jit
    def maybe(go: jax.Array, carry: Any, g: PyTree) -> Any:
        return jax.lax.cond(go, lambda: program.step(carry, g), lambda: carry)

    carry = program.start(even_params())
    for g in grads:
        arrays = jax.tree.map(jnp.asarray, carry)
        assert_same(maybe(jnp.asarray(False), carry, g), arrays, "not taken")
        carry = maybe(jnp.asarray(True), carry, g)
    assert_close(program.common(carry)[0], program.common(end)[0], "cond")


def ensemble(subject: Subject) -> None:
    """The members of an ensemble under ``jax.vmap`` go their own ways."""
    program, end, grads = expected(subject)
    members = [even_params(), jax.tree.map(lambda p: 2 * p, even_params())]
    stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    carry = stack(*(program.start(p) for p in members))
    step = jax.jit(jax.vmap(program.step))
    for g in grads:
        carry = step(carry, stack(g, jax.tree.map(jnp.negative, g)))
    first = jax.tree.map(lambda x: x[0], carry)
    assert_close(program.common(first)[0], program.common(end)[0], "member 0")


def differentiated(subject: Subject) -> None:
    params = even_params()
    program = usual(subject, params, optax.sgd(0.1))
    start = program.start(params)

    def after(grads: PyTree) -> jax.Array:
        carry = start
        for _ in range(subject.calls):
            carry = program.step(carry, grads)
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(program.common(carry)[0]))

    gradient = jax.jit(jax.grad(after))(program.grads(params, 0))
    finite(gradient, "meta-gradient")
    if subject.linear:
        require(any(bool((x != 0).any()) for x in jax.tree.leaves(gradient)), "all zero")


def of_the_checked(subject: Subject, replicas: int, kind: Any = AxisType.Auto) -> Any:
    program = on_devices(subject, even_params(), replicas, kind=kind)
    return program, program.run(even_params(), range(2 * subject.calls))


def checked(subject: Subject) -> None:
    program, carry = of_the_checked(subject, REPLICAS)
    same_kind(program.start(even_params()), carry, "params and state")
    finite(program.common(carry)[0], "params")
    moved(even_params(), program.common(carry)[0])


def unchecked(subject: Subject) -> None:
    program, carry = of_the_checked(subject, REPLICAS)
    other = on_devices(subject, even_params(), REPLICAS, check=False)
    after = other.run(even_params(), range(2 * subject.calls))
    assert_close(other.common(after)[0], program.common(carry)[0], "check_vma=False")


def in_pmap(subject: Subject) -> None:
    program, carry = of_the_checked(subject, REPLICAS)
    tx, params = subject.mapped(), even_params()

    def train(params: PyTree, grads: list[PyTree]) -> Any:
        state = tx.init(params)
        for g in grads:
            params, state = boostax.apply_gradients(drawn(tx), g, state, params)
        return params

    windows = [program.grads(params, seed) for seed in range(2 * subject.calls)]
    devices = jax.devices()[:REPLICAS]
    new = jax.pmap(train, AXIS, in_axes=(None, 0), devices=devices)(params, windows)
    first = jax.tree.map(lambda x: x[0], jax.device_get(new))
    assert_close(first, program.common(carry)[0], "pmap")


def sharded(subject: Subject, kind: Any) -> None:
    """Params and moments sharded under plain jit; no axis is named."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    program = alone(subject.alone())
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("x"))
        params = jax.device_put(even_params(), sharding)
        carry, step = program.start(params), jax.jit(program.step)
        for seed in range(2 * subject.calls):
            grads = jax.device_put(program.grads(even_params(), seed), sharding)
            carry = step(carry, grads)
            for leaf in jax.tree.leaves(carry[0]):
                require(leaf.sharding.is_equivalent_to(sharding, leaf.ndim), "resharded")
    plain = program.run(even_params(), range(2 * subject.calls))
    assert_close(carry[0], plain[0], str(kind))


def auto(subject: Subject) -> None:
    if not subject.reduces:
        return sharded(subject, AxisType.Auto)
    # The mistake to expect: a reduction over a named axis where none is.
    tx, params = subject.mapped(), even_params()
    program = alone(tx)
    program.run(params, range(subject.calls))


def explicit(subject: Subject) -> None:
    if not subject.reduces:
        return sharded(subject, AxisType.Explicit)
    program, carry = of_the_checked(subject, REPLICAS)
    other, after = of_the_checked(subject, REPLICAS, AxisType.Explicit)
    assert_close(other.common(after)[0], program.common(carry)[0], "Explicit")


def fsdp(**specs: Any) -> Cell:
    """Leaves sharded over one axis, their gradients averaged over another."""

    def cell(subject: Subject) -> None:
        both = (AXIS, "fsdp")
        mesh = jax.make_mesh((2, 4), both, axis_types=(AxisType.Auto,) * 2)
        params = even_params()
        if subject.fsdp is not None:
            inner = default(None)
            own = subject.reduces or subject.averages
            reduced = inner if own else optax.chain(boostax.all_reduce(AXIS), inner)
            tx = optax.with_extra_args_support(subject.fsdp(reduced, specs))
        else:
            tx = subject.mapped(axis=AXIS)
        program = mapped(tx, params, mesh, own=subject.own_params, param_specs=specs)
        carry = program.run(params, range(2 * subject.calls))
        finite(program.common(carry)[0], "params")
        if subject.linear:
            alike = on_devices(subject, params, 2)
            end = alike.run(params, range(2 * subject.calls))
            assert_close(program.common(carry)[0], alike.common(end)[0], "FSDP")

    return cell


def placed(specs: PyTree, **options: Any) -> Cell:
    """Global arrays in plain jit; a step means what it means where params are whole."""

    def cell(subject: Subject) -> None:
        if subject.peer:
            raise NoMeaning(
                "boostax.on_mesh takes transformations with a replica axis of boostax's"
            )
        program = on_global_arrays(subject, even_params(), REPLICAS, specs, **options)
        carry = program.run(even_params(), range(2 * subject.calls))
        same_kind(program.start(even_params()), carry, "params and state")
        other, end = of_the_checked(subject, REPLICAS)
        assert_close(program.common(carry)[0], other.common(end)[0], "on_mesh")

    return cell


def nan_checks(subject: Subject) -> None:
    program, end, grads = expected(subject)
    with jax.debug_nans(True):
        carry = program.start(even_params())
        step = jax.jit(program.step)
        for g in grads:
            carry = step(carry, g)
    assert_close(program.common(carry)[0], program.common(end)[0], "debug_nans")


CELLS: dict[str, Cell] = {
    "eager": eagerly,
    "jit": in_jit,
    "jit with donation": donated,
    "scan": in_scan,
    "cond": in_cond,
    "vmap over an ensemble": ensemble,
    "gradient through a step": differentiated,
    "pmap": in_pmap,
    "shard_map, check_vma on": checked,
    "shard_map, check_vma off": unchecked,
    "Auto sharding under jit": auto,
    "Explicit mesh": explicit,
    "FSDP": fsdp(w=P("fsdp"), b=P("fsdp")),
    "FSDP, one leaf whole": fsdp(w=P("fsdp"), b=P()),
    "on_mesh, params whole": placed({"w": P(), "b": P()}),
    "on_mesh, params sharded over the replicas": placed({"w": P(AXIS), "b": P(AXIS)}),
    "on_mesh, optimizer state sharded": placed({"w": P(), "b": P()}, shard_optimizer=True),
    "on_mesh, Explicit mesh": placed({"w": P(AXIS), "b": P()}, kind=AxisType.Explicit),
    "debug_nans": nan_checks,
    "disable_jit": disabled,
}
