"""The one interpreter of traced programs: a walk goes through every body or says no."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

import boostax
from boostax._core import interpret

PACKAGE = pathlib.Path(boostax.__file__).parent
X = jnp.arange(1.0, 5.0)


def test_no_other_module_iterates_the_equations_of_a_program():
    found = {path for path in PACKAGE.rglob("*.py") if re.search(r"\.eqns\b", path.read_text())}
    assert found == {PACKAGE / "_core/interpret.py"}


@jax.custom_jvp
def twice(x):
    return x + x


@jax.custom_batching.custom_vmap
def batched(a, b):
    return a * 2, b


twice.defjvp(lambda primals, tangents: (twice(*primals), 2 * tangents[0]))
batched.def_vmap(lambda size, mapped, a, b: ((a * 2, b), mapped))
BODIES = {
    "jit": jax.jit(lambda a, b: (a * 2, b)),
    "checkpoint": jax.checkpoint(lambda a, b: (a * 2, b)),
    "custom_jvp": lambda a, b: (twice(a), b),
    "custom_vmap": batched,
    "scan": lambda a, b: (lax.scan(lambda c, x: (c + x, x), a[0] * 0, a)[0], b),
    "while": lambda a, b: (lax.while_loop(lambda c: c[0] < 9, lambda c: c * 2, a), b),
    "cond": lambda a, b: (lax.cond(a[0] > 2, lambda a: a * 2, lambda a: a, a), b),
}


def named(facts):
    return frozenset[str]().union(*facts)


def flowing(fn, *, once=False):
    """The inputs that each result depends on, and the equations without a body."""
    program, met = jax.make_jaxpr(fn)(X, X), []

    def transfer(eqn, facts):
        met.append(eqn.primitive.name)
        return [named(facts)] * len(eqn.outvars)

    inputs = [frozenset("a"), frozenset("b")]
    return interpret.flow(program, inputs, transfer, named, frozenset(), once=once), met


@pytest.mark.parametrize("kind", BODIES)
def test_what_flows_into_a_body_flows_out_of_its_own_result(kind):
    found, met = flowing(BODIES[kind])
    assert found == [frozenset("a"), frozenset("b")]
    assert not set(met) & {*interpret.THROUGH, "scan", "while", "cond"}


def test_a_carry_reaches_its_fixed_point():
    """After two turns the first carry depends on what the third began with."""

    def fn(a, b):
        return lax.scan(lambda c, _: ((c[1], c[2], c[2]), None), (X * 0, X, b + 0 * X), None, 3)[0]

    assert flowing(fn)[0] == [frozenset("b")] * 3
    assert flowing(fn, once=True)[0] == [frozenset(), frozenset("b"), frozenset("b")]


def test_what_chooses_a_branch_or_ends_a_loop_counts():
    chosen = lambda a, b: lax.cond(a[0] > 0, lambda b: b, lambda b: -b, b)  # noqa: E731
    ended = lambda a, b: lax.while_loop(lambda c: c[0] < a[0], lambda c: c + 1, b)  # noqa: E731
    for fn in (chosen, ended):
        assert flowing(fn)[0] == [frozenset("ab")]
        assert flowing(fn, once=True)[0] == [frozenset("b")]


def test_an_equation_that_is_not_in_the_table_reaches_the_rule(monkeypatch):
    monkeypatch.setattr(interpret, "THROUGH", ())
    found, met = flowing(BODIES["jit"])
    assert found == [frozenset("ab")] * 2 and met == [eqn for eqn in met if eqn in interpret.JIT]


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("inline", [(), interpret.THROUGH], ids=["calls", "inlined"])
def test_a_replayed_program_gives_the_same_bits(kind, inline):
    program = jax.make_jaxpr(BODIES[kind])(X, X)
    found = interpret.evaluate(program, [X, X], interpret.replay, inline=inline)
    jax.tree.map(np.testing.assert_array_equal, found, list(BODIES[kind](X, X)))


def test_a_program_rewritten_by_no_rule_is_the_same():
    for fn in BODIES.values():
        program = jax.make_jaxpr(fn)(X, X)
        assert str(interpret.rewrite(program, lambda eqn: None)) == str(program)


def crossed(mesh, fn):
    """The axes over which gradients go in a function of params and rows."""
    seen = []

    def look(w, x):
        _, tangent = jax.linearize(lambda w: fn(w, x), w)
        seen.append(boostax.train.refusals.axes_of_gradients(jax.make_jaxpr(tangent)(w)))
        return x

    jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=P("data"), out_specs=P("data")), X2, X2)
    return seen[0]


X2 = jax.ShapeDtypeStruct((8, 4), "float32")


def test_only_collectives_of_gradients_cross_in_branches_and_loops(mesh):
    def loss(inside):
        def fn(w, x):
            branch = lambda w, x: jnp.sum(w) * lax.pmax(jnp.sum(x), "data") + inside(w)  # noqa: E731
            return lax.cond(jnp.sum(x) > 0, branch, lambda w, x: jnp.sum(w), w, x)

        return fn

    assert crossed(mesh, loss(jnp.sum)) == frozenset()
    assert crossed(mesh, loss(lambda w: lax.all_gather(w, "data").sum())) == {"data"}
    looped = lambda w: lax.fori_loop(0, 2, lambda _, c: lax.ppermute(c, "data", [(0, 1)]), w).sum()  # noqa: E731
    assert crossed(mesh, loss(looped)) == {"data"}
