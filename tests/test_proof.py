"""Never blind: what reads JAX's own types and programs proves that it sees them, or raises."""

import contextlib
import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import boostax
from boostax._core import axes, costs, interpret, jaxprs
from boostax.chain import parts
from boostax.chain.parts import UNKNOWN, rows
from boostax.model import less_bn as branches

PACKAGE = pathlib.Path(boostax.__file__).parent
READERS = (axes, interpret, costs, branches)


@pytest.fixture
def unproved():
    """As in a process in which nobody has read anything yet."""
    for reader in READERS:
        reader.require_readable.cache_clear()
    yield
    for reader in READERS:
        reader.require_readable.cache_clear()


def without(*names):
    return tuple(name for name in interpret.THROUGH if name not in names)


SUMS = {"psum", "psum_invariant"}
# What is read, under another name or with another meaning: where, its name here, what is seen.
BLIND = {
    "nothing varies": (axes, "_varying", lambda x: frozenset(), "axes over which values vary"),
    "all varies": (axes, "_varying", lambda x: {jaxprs.AXIS}, "axes over which values vary"),
    **{
        f"a {kind} of another name": (interpret, "THROUGH", without(*names), f"the name of {kind}")
        for kind, names in {
            "jit": interpret.JIT,
            "checkpoint": interpret.CHECKPOINT,
            "custom_jvp": interpret.CUSTOM[:1],
            "custom_vjp": interpret.CUSTOM[1:],
            "shard_map": ("shard_map",),
        }.items()
    },
    "no program inside": (interpret, "bodies", lambda eqns: [()] * len(eqns), "inside equations"),
    "a scan turned round": (
        interpret,
        "scan_operands",
        lambda scan, given: (given[1:2], given[:1], given[2:]),
        "the operands of scan",
    ),
    "a sum of another name": (axes, "_SENDING", axes._SENDING - SUMS, "or are sent"),
    "no transformation's name": (costs, "_stack", lambda eqn, place: "", "the collectives"),
    "another product": (branches, "_PRODUCTS", ("dot",), "the flow of data"),
    "no norm": (branches, "checkpoint_name", lambda x, name: x, "the flow of data"),
}


@pytest.mark.parametrize("case", BLIND)
def test_who_sees_nothing_says_so(unproved, monkeypatch, case):
    module, name, blind, words = BLIND[case]
    monkeypatch.setattr(module, name, blind)
    with pytest.raises(RuntimeError) as error:
        module.require_readable()
    assert words in str(error.value) and f"of JAX {jax.__version__} must be" in str(error.value)
    assert "pip install -c constraints.txt ." in str(error.value)
    monkeypatch.undo()
    module.require_readable()


SQUARE = jnp.ones((2, 2))
PARAMS = {"w": SQUARE}


def loss(params, x):
    return jnp.sum(params["w"] @ x)


def held_step():
    tx = boostax.dynamic_loss_scale(optax.sgd(0.1))
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def explained():
    return boostax.explain(boostax.all_reduce("data"), PARAMS, axis_sizes={"data": 2})


CALLED = lambda w, x, _: x[0]  # noqa: E731
WAYS_IN = [
    ("boostax._core.axes", held_step),
    ("boostax._core.costs", explained),
    ("boostax.freeze.order", lambda: boostax.freeze.forward_order(loss, PARAMS, SQUARE)),
    ("boostax.precision.policy", lambda: boostax.policy("O1").wrap(loss)(PARAMS, SQUARE)),
    ("boostax.model.less_bn", lambda: branches.examine(CALLED, SQUARE, ((SQUARE,), {}))),
]


@pytest.mark.parametrize("module, call", WAYS_IN)
def test_every_guard_and_count_asks_for_the_proof(monkeypatch, module, call):
    def refuse():
        raise RuntimeError("blind")

    call()
    monkeypatch.setattr(sys.modules[module], "require_readable", refuse)
    with pytest.raises(RuntimeError, match="blind"):
        call()


def at_first_use(x):
    """Reads everything there is to read, before anything was proved."""
    for reader in READERS:
        reader.require_readable.cache_clear()
    for reader in READERS:
        reader.require_readable()
    return x


def mapped(fn, mesh, **options):
    return jax.shard_map(fn, mesh=mesh, in_specs=P("data"), out_specs=P("data"), **options)


X = np.ones(8, np.float32)
PLACES = {
    "alone": lambda fn, mesh: fn,
    "jit": lambda fn, mesh: jax.jit(fn),
    "grad": lambda fn, mesh: jax.grad(lambda x: jnp.sum(fn(x))),
    "checkpoint": lambda fn, mesh: jax.checkpoint(fn),
    "scan": lambda fn, mesh: lambda x: jax.lax.scan(lambda c, y: (c, fn(y)), 0.0, x)[1],
    "vmap": lambda fn, mesh: jax.vmap(fn, axis_name="data"),
    "pmap": lambda fn, mesh: jax.pmap(fn, axis_name="data"),
    "shard_map": mapped,
    "shard_map without checking": lambda fn, mesh: mapped(fn, mesh, check_vma=False),
    "shard_map inside jit": lambda fn, mesh: jax.jit(mapped(fn, mesh)),
}
CONTEXTS = (
    contextlib.nullcontext,
    lambda: jax.enable_x64(True),
    jax.disable_jit,
    jax.checking_leaks,
    lambda: jax.numpy_dtype_promotion("strict"),
)


@pytest.mark.parametrize("place", PLACES)
def test_it_is_proved_wherever_it_is_first_asked_for(unproved, mesh, place):
    for context in CONTEXTS if place in ("alone", "jit", "shard_map") else CONTEXTS[:1]:
        with context():
            np.testing.assert_array_equal(PLACES[place](at_first_use, mesh)(X), X)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_it_is_proved_under_a_mesh_of_the_user(unproved, kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("data"))
        for fn in (at_first_use, jax.jit(at_first_use), mapped(at_first_use, None)):
            np.testing.assert_array_equal(fn(x), X)
        part = jax.jit(mapped(at_first_use, None, axis_names={"data"}))
        np.testing.assert_array_equal(part(x), X)


@pytest.mark.parametrize("place", ["jit", "scan", "shard_map", "shard_map without checking"])
def test_it_adds_nothing_to_the_program(unproved, mesh, place):
    plain = jax.make_jaxpr(PLACES[place](lambda x: x, mesh))(X)
    proved = jax.make_jaxpr(PLACES[place](at_first_use, mesh))(X)
    assert str(proved).replace("at_first_use", "<lambda>") == str(plain)


def test_it_is_proved_once(unproved):
    for _ in range(3):
        axes.varying(X)
    assert axes.require_readable.cache_info().misses == 1


def sizes(*counts):
    return types.SimpleNamespace(unpack=lambda: tuple((None,) * n for n in counts))


SCANS = [
    ({"num_consts": 1, "num_carry": 2}, True),
    ({"ft_in": sizes(1, 2, 3)}, True),
    ({}, False),
    ({"num_consts": 1}, False),
    ({"num_consts": 4, "num_carry": 9}, False),
    ({"ft_in": sizes(1, 2)}, False),
    ({"ft_in": sizes(1, 2, 4)}, False),
    ({"ft_in": None}, False),
]


@pytest.mark.parametrize(("params", "readable"), SCANS)
def test_the_operands_of_a_scan_are_read_by_what_is_there_or_refused(params, readable):
    scan = types.SimpleNamespace(params=params)
    refused = pytest.raises(RuntimeError, match="the parameters of scan of JAX")
    with contextlib.nullcontext() if readable else refused:
        found = interpret.scan_operands(scan, "cabxyz")
        assert found == (["c"], ["a", "b"], ["x", "y", "z"])


def test_a_call_without_its_program_is_refused():
    jit = types.SimpleNamespace(name="jit")
    eqn = types.SimpleNamespace(params={"body": 1}, primitive=jit, invars=(), outvars=())
    with pytest.raises(RuntimeError, match="one program of its operands, got \\['body'\\]"):
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
    assert UNKNOWN not in [row.role for row in rows(parts.read(OPTAX[name]))]
    original = parts.closure
    # Under other names, and no longer as they were.
    renamed = lambda fn: {f"new_{name}": [value] for name, value in original(fn).items()}  # noqa: E731
    monkeypatch.setattr(parts, "closure", renamed)
    found = rows(parts.read(OPTAX[name]))
    assert UNKNOWN in [row.role for row in found] and found[-1].part.name == "(hidden)"


def test_nothing_needs_what_jax_keeps_to_itself():
    for path in PACKAGE.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) (jax\._src|jaxlib)", path.read_text(), re.M), path


def test_an_excerpt_is_a_program_whatever_the_order_of_its_class():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) + jnp.cos(x))(1.0)
    (first, *_), jaxpr = closed.jaxpr.eqns, closed.jaxpr
    part = interpret.excerpt(jaxpr.invars, first.outvars, [first])
    (found,) = jaxprs.jaxpr_as_fun(part)(jnp.float32(0.5))
    np.testing.assert_array_equal(found, jnp.sin(jnp.float32(0.5)))
