"""JAX is what boostax believes it is: its types and traced programs are read as they are."""

import contextlib
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax

import boostax
from boostax._core import axes, interpret, jaxprs
from boostax.order.parts import UNKNOWN, rows

MESH = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
X, DATA = jax.ShapeDtypeStruct((2,), jnp.float32), frozenset(["data"])


def test_types_tell_varying_from_equal_values():
    varying, equal = [], []

    def read(same, mine):
        cast, kind = lax.pcast(same, "data", to="varying"), jax.eval_shape(jnp.abs, mine)
        varying.append({*jax.sharding.get_abstract_mesh().manual_axes})
        varying.extend(map(axes.varying, (mine, cast, kind)))
        equal.extend(map(axes.varying, (same, lax.psum(mine, "data"))))
        return mine

    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    jax.make_jaxpr(jax.shard_map(read, mesh=MESH, **specs))(X, X)
    assert varying == [DATA] * 4 and equal == [frozenset()] * 2


@pytest.mark.parametrize("check_vma", [True, False])
def test_each_collective_is_recognised(check_vma):
    """Also a gather that is typed as equal."""

    def send(x):
        over = "data"
        sent = [lax.psum(x, over), lax.pmax(x, over), lax.pmin(x, over), lax.all_gather(x, over)]
        sent += [lax.psum_scatter(x, over, tiled=True), lax.all_to_all(x, over, 0, 0)]
        sent += [lax.ppermute(x, over, [(0, 1), (1, 0)]), lax.all_gather(x, over, to="invarying")]
        return x

    how = {"mesh": MESH, "in_specs": P("data"), "out_specs": P("data"), "check_vma": check_vma}
    program = jax.make_jaxpr(jax.shard_map(send, **how))(jax.ShapeDtypeStruct((4,), jnp.float32))
    sent = axes.sent_over(eqn for eqn, _ in interpret.equations(program.jaxpr))
    assert sent.count(("data",)) == len(axes.COLLECTIVES) + 1


def kinds(x):
    """One equation of each kind, with a sine in each body."""
    by_jvp, by_vjp = jax.custom_jvp(lax.sin), jax.custom_vjp(lax.sin)
    by_jvp.defjvp(lambda primals, tangents: (lax.sin(*primals), *tangents))
    by_vjp.defvjp(lambda x: (lax.sin(x), None), lambda _, cotangent: (cotangent,))
    step = lambda carry, each: (carry + each + lax.sin(x)[0], None)  # noqa: E731
    return {
        "jit": jax.jit(lax.sin)(x),
        "checkpoint": jax.checkpoint(lax.sin)(x),
        "custom_jvp": by_jvp(x),
        "custom_vjp": by_vjp(x),
        "scan": lax.scan(step, x[0], jnp.ones(3))[0],
        "while": lax.while_loop(lambda carry: carry[0] < 1, lax.sin, x),
        "cond": lax.cond(x[0] < 1, lax.sin, lax.cos, x),
        "shard_map": jax.shard_map(lax.sin, mesh=MESH, in_specs=P(), out_specs=P())(x),
    }


def test_the_body_of_each_kind_of_equation_is_read():
    """The rule sees no body of an equation that is not in the table, and so no sine."""
    program, results = jax.make_jaxpr(kinds, return_shape=True)(X)
    unite = lambda names: frozenset().union(*names)  # noqa: E731
    noted = lambda eqn, found: [unite([*found, [eqn.primitive.name]])] * len(eqn.outvars)  # noqa: E731
    found = interpret.flow(program, [frozenset()], noted, unite, frozenset())
    assert all("sin" in met for met in found)
    names = [eqn.primitive.name for eqn, _ in interpret.equations(program.jaxpr)]
    assert names.count("sin") == len(results)


def test_of_two_residual_blocks_the_inner_norm_is_removed():
    convolved = lambda x, w: lax.conv(x[None, None], w[None, None], (1, 1), "SAME")[0, 0]  # noqa: E731
    stacked = lambda x, y: lax.concatenate([x, y], 0)  # noqa: E731

    def model(w, x):
        for product, end in ((lax.dot, lax.add), (convolved, stacked)):
            y = boostax.model.less_bn.mark("norm", product(x, w), "inner")
            x = end(x, boostax.model.less_bn.mark("norm", product(y, w), "last"))
        return boostax.model.less_bn.mark("dense", lax.dot(x, w), "head")

    x = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    found = boostax.model.less_bn.examine(lambda _, *args: model(*args), (), ((x, x), {}))
    assert (found.removed, found.kept, found.head) == (("inner",), ("last",), "head")


def sizes(*counts):
    return types.SimpleNamespace(unpack=lambda: tuple((None,) * n for n in counts))


SCANS = [({"num_consts": 1, "num_carry": 2}, True), ({"ft_in": sizes(1, 2, 3)}, True)]
SCANS += [(x, False) for x in ({}, {"num_consts": 1}, {"num_consts": 4, "num_carry": 9})]
SCANS += [({"ft_in": x}, False) for x in (sizes(1, 2), sizes(1, 2, 4), None)]


@pytest.mark.parametrize(("params", "readable"), SCANS)
def test_the_operands_of_a_scan_are_read_by_what_is_there_or_refused(params, readable):
    scan = types.SimpleNamespace(params=params, primitive=types.SimpleNamespace(name="scan"))
    refused = pytest.raises(RuntimeError, match="the parameters of scan of JAX")
    with contextlib.nullcontext() if readable else refused:
        assert interpret.scan_operands(scan, "cabxyz") == (["c"], ["a", "b"], ["x", "y", "z"])


def test_a_call_without_its_program_is_refused():
    jit = types.SimpleNamespace(name="jit")
    eqn = types.SimpleNamespace(params={"body": 1}, primitive=jit, invars=(), outvars=())
    with pytest.raises(RuntimeError, match="one program of the operands, got \\['body'\\]"):
        interpret.body_of(eqn)


def test_scans_of_jax_are_divided_as_they_were_written():
    def fn(w, v, a, b, xs, ys):
        step = lambda carry, each: ((carry[0] * w, carry[1] + v @ each[1]), each[0])  # noqa: E731
        return jax.lax.scan(step, (a, b), (xs, ys))

    shapes = [(2,), (3,), (2,), (), (5, 4), (5, 3)]
    jaxpr = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes))
    for program in (jaxpr, jax.make_jaxpr(lambda *args: jax.vjp(fn, *args)[0])(*jaxpr.in_avals)):
        (eqn,) = (eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan")
        consts, carry, xs = interpret.scan_operands(eqn, [x.aval.shape for x in eqn.invars])
        assert set(consts) <= {(2,), (3,)} and carry == [(2,), ()]
        assert xs and all(shape[0] == 5 for shape in xs)


OPTAX = {
    "chain": optax.chain(optax.adam(0.1), optax.clip(1.0)),
    "named_chain": optax.named_chain(("a", optax.adam(0.1))),
    "partition": optax.partition({"a": optax.adam(0.1)}, {"w": "a"}),
    "masked": optax.masked(optax.adam(0.1), {"w": True}),
}


@pytest.mark.parametrize("name", OPTAX)
def test_what_optax_no_longer_shows_is_unknown_and_not_nothing(monkeypatch, name):
    assert UNKNOWN not in [row.role for row in rows(boostax.order.parts.read(OPTAX[name]))]
    original = boostax.order.parts.closure
    # Under other names, and no longer as they were.
    renamed = lambda fn: {f"new_{name}": [value] for name, value in original(fn).items()}  # noqa: E731
    monkeypatch.setattr(boostax.order.parts, "closure", renamed)
    found = rows(boostax.order.parts.read(OPTAX[name]))
    assert UNKNOWN in [row.role for row in found] and found[-1].part.name == "(hidden)"


def test_nothing_needs_what_jax_keeps_to_itself():
    for path in pathlib.Path(boostax.__file__).parent.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) (jax\._src|jaxlib)", path.read_text(), re.M), path


def test_an_excerpt_is_a_program_whatever_the_order_of_its_class():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) + jnp.cos(x))(1.0)
    (first, *_), jaxpr = closed.jaxpr.eqns, closed.jaxpr
    part = interpret.excerpt(jaxpr.invars, first.outvars, [first])
    (found,) = jaxprs.jaxpr_as_fun(part)(jnp.float32(0.5))
    np.testing.assert_array_equal(found, jnp.sin(jnp.float32(0.5)))
