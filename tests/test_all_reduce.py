"""The mean and the sum over the replicas: plain, in buckets, on a half wire, clipped."""

import functools
import inspect
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from drawing import draws
from hypothesis import given
from hypothesis import strategies as st
from reducing import correlated, mapped, mesh_of, reduced, sends, updating

import boostax

PACKAGE = pathlib.Path(boostax.__file__).parent
WIDTH = 24
SHAPES = [(16, 3), (5,), (), (3, 8)]
HALVES = ("float16", "bfloat16")
seeds = st.integers(0, 2**32 - 1)
reduce = functools.partial(reduced, boostax.all_reduce)


def normal(seed, replicas=8):
    return np.random.default_rng(seed).normal(size=(replicas, WIDTH))


def rounded(dtype, times, rows):
    """So many roundings to the dtype, relative to the largest input."""
    return times * float(jnp.finfo(dtype).eps) / 2 * abs(reference.wide(rows)).max()


# In f32.


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 100}, {"bucket_bytes": 2**20}])
def test_mean_and_sum_equal_those_of_jax(mesh, options, check):
    """With and without buckets; a bucket changes no sum."""
    for op, own in (("mean", jax.lax.pmean), ("sum", jax.lax.psum)):
        update = updating(boostax.all_reduce("data", op=op, **options))
        both = lambda g, update=update, own=own: (update(g), own(g, "data"))  # noqa: E731
        result, expected = mapped(both, mesh, check_vma=check)(correlated(SHAPES))
        for actual, peer in zip(result, expected, strict=True):
            np.testing.assert_array_equal(actual, peer)


def test_several_axes_are_reduced_together():
    mesh, leaves = mesh_of(a=4, b=2), correlated(SHAPES)
    for names in (("a", "b"), ("b", "a")):
        for options in ({}, {"wire_dtype": "bfloat16"}):
            update = updating(boostax.all_reduce(names, **options))
            result = mapped(update, mesh, jax.P(("a", "b")))(leaves)
            for actual, rows in zip(result, leaves, strict=True):
                bound = rounded(options.get("wire_dtype", "float32"), 4, rows)
                np.testing.assert_allclose(actual, reference.mean(rows), rtol=0, atol=bound)


def test_a_bucket_is_one_collective(mesh):
    counts = {}
    for limit in (None, 4 * 250, 4 * 1000):
        found = sends(updating(boostax.all_reduce("data", bucket_bytes=limit)), [100] * 10, mesh)
        assert {c.primitive for c in found} == {"psum"}
        counts[limit] = len(found)
    # Two leaves of 400 bytes fit into a bucket of 1000, ten into one of 4000.
    assert counts == {None: 10, 4 * 250: 5, 4 * 1000: 1}


def test_dividing_before_the_sum_keeps_what_it_would_overflow():
    """Eight gradients of 3e38 have a mean of 3e38, and no sum."""
    rows = np.full((8, 3), 3e38, np.float32)
    np.testing.assert_allclose(reduce(rows, divide="before"), 3e38, rtol=1e-6)
    assert np.isinf(reduce(rows)).all() and np.isinf(reduce(rows, op="sum")).all()
    spread = np.float32(normal(0))
    bound = rounded("float32", 4, spread)
    before = reduce(spread, divide="before")
    np.testing.assert_allclose(before, reference.mean(spread), rtol=0, atol=bound)


def test_low_gradients_are_summed_in_f32():
    """1 + 2**-12 seven times would stay 1 in f16; and the mean of the largest does not overflow."""
    small = np.float16([[1.0, 60000.0]] + [[2.0**-10, 60000.0]] * 7)
    total, large = reduce(small, op="sum")
    assert total == np.float16(1 + 7 * 2.0**-10) and large == np.finfo(np.float16).max
    assert reduce(small)[1] == 60000.0


# On a half wire.


@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_wire_is_an_all_to_all_and_an_all_gather_of_each_leaf_and_of_a_pack(mesh, dtype):
    """Kernels go in their own shapes, vectors in a pack; powers of two of f16 in two gathers."""
    shapes = [(64, 512), (512,), (32, 2048), (512,)]
    found = sends(updating(boostax.all_reduce("data", wire_dtype=dtype)), shapes, mesh)
    half = [c for c in found if c.dtypes == (dtype,)]
    for primitive, share in (("all_to_all", 1), ("all_gather", 8)):
        sent = sorted(c.bytes for c in half if c.primitive == primitive)
        assert sent == [2 * n // share for n in (2 * 512, 64 * 512, 32 * 2048)]
    rest = [(c.primitive, c.bytes) for c in found if c.dtypes != (dtype,)]
    assert rest == ([("all_gather", 4 * 4)] * 2 if dtype == "float16" else [])


@pytest.mark.parametrize("kind", ["whole", "ZeRO", "FSDP", "HSDP"])
def test_what_gloo_would_send_leaf_by_leaf_is_one_message(kind, monkeypatch):
    """Whole leaves are packed, and shards go to their owners in the messages of a ring."""
    sizes = {"replica": 2, "data": 4} if kind == "HSDP" else {"data": 8}
    mesh = mesh_of(jax.sharding.AxisType.Auto, **sizes)
    params = {f"w{i}": jnp.full((16, 16), 0.1 * i) for i in range(4)}
    specs = jax.tree.map(lambda _: jax.P(None, "data") if "S" in kind else jax.P(), params)
    loss = lambda params, x: sum(jnp.mean((x @ w) ** 2) for w in params.values())  # noqa: E731
    tx = optax.chain(boostax.all_reduce(), optax.sgd(0.1))

    def trained():
        how = {"axis_name": tuple(sizes), "param_specs": specs, "shard_optimizer": kind == "ZeRO"}
        step = boostax.make_train_step(loss, tx, mesh=mesh, **how)
        state, batch = step.init(params), jax.random.normal(jax.random.key(0), (16, 16))
        program = str(step.jaxpr(state, batch))
        state, _ = step(state, batch)
        words = "f32[8,1024]", "ppermute", "all_gather"
        return jax.device_get(state.params), *(word in program for word in words)

    expected, *found = trained()
    assert found == [False, False, False]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    new, *found = trained()
    assert found == [kind == "whole", kind in ("ZeRO", "FSDP"), kind == "ZeRO"]
    for name, w in expected.items():
        np.testing.assert_allclose(new[name], w, rtol=2e-6)
    # In a mapped function of one's own no step says where params are.
    np.testing.assert_array_equal(reduce(np.ones((8, 2), np.float32)), np.ones(2))


SPREADS = st.sampled_from([0, 1, 10, 60])


@pytest.mark.parametrize("dtype", HALVES)
@draws(60)
@given(seed=seeds, replicas=st.sampled_from([2, 3, 8]), base=st.floats(-30, 30), spread=SPREADS)
def test_a_half_wire_rounds_twice_at_any_magnitude(dtype, seed, replicas, base, spread):
    """On the way there and on the way back, whatever the range of the wire's dtype."""
    offsets = np.random.default_rng(seed).uniform(-spread, spread, (replicas, 1))
    rows = np.float32(normal(seed, replicas) * 10 ** np.clip(base + offsets, -30, 30))
    for op, expected in (("mean", reference.mean(rows)), ("sum", reference.wide(rows).sum(0))):
        result = reduce(rows, wire_dtype=dtype, op=op)
        bound = rounded(dtype, 2 if op == "mean" else 1 + replicas, rows)
        np.testing.assert_allclose(result, expected, rtol=0, atol=bound * (1 + 1e-3))


@pytest.mark.parametrize("dtype", [None, *HALVES])
@draws(60)
@given(data=st.data())
def test_finite_stays_finite_and_the_rest_does_not(dtype, data):
    """The mean of what is finite; a NaN or an infinity is still seen, clipped or not."""
    lists = st.lists(st.floats(width=32, allow_subnormal=False), min_size=WIDTH, max_size=WIDTH)
    rows = np.float32(data.draw(st.lists(lists, min_size=3, max_size=3)))
    for options in ({}, {"clip": 1.0}):
        result = reduce(rows, wire_dtype=dtype, divide="before", **options)
        finite = np.isfinite(rows).all(0)
        if dtype is None:
            np.testing.assert_array_equal(np.isfinite(result), finite)
        else:
            # They share a power of two: one bad entry may take its leaf along.
            assert not np.isfinite(result[~finite]).any()
            assert np.isfinite(result).all() or not finite.all()


# Clipping.


@draws(40)
@given(seed=seeds, clip=st.sampled_from([0.25, 1.0, 100.0]), magnitude=st.integers(-3, 3))
def test_gradients_are_clipped_before_they_are_reduced(seed, clip, magnitude):
    rows = np.float32(normal(seed) * 10.0**magnitude)
    clipped = np.clip(rows, -clip, clip)
    bound = rounded("float32", 8, clipped)
    expected = reference.mean(clipped)
    np.testing.assert_allclose(reduce(rows, clip=clip), expected, rtol=0, atol=bound)
    half = reduce(rows, clip=clip, wire_dtype="float16")
    np.testing.assert_allclose(half, expected, rtol=0, atol=rounded("float16", 2.01, clipped))
    # Not after: the bound is on every replica's own gradient.
    assert reduce(np.float32([[10.0], [-1.0]]), clip=1.0) == 0.0


def test_clipping_complex_gradients_is_refused():
    tx = boostax.all_reduce("data", clip=1.0)
    grads = jnp.ones((2, 3), jnp.complex64)
    with pytest.raises(ValueError, match="Clip received a complex value"):
        jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)


def followed(fn):
    """Return the functions of boostax that a call enters, and which file calls which."""
    ways, begun, inside, pairs = [], {}, [None], set()

    def watch(frame, event, arg):
        code, path = frame.f_code, pathlib.Path(frame.f_code.co_filename)
        if event in ("call", "return") and path.is_relative_to(PACKAGE):
            pairs.add((inside[-1], path))
            inside.append(path) if event == "call" else inside.pop()
        # A generator is listed once.
        if event == "call" and path.is_relative_to(PACKAGE) and code.co_name[0] != "<":
            generator = code.co_flags & inspect.CO_GENERATOR
            if not generator or begun.setdefault(code, frame.f_lasti) == frame.f_lasti:
                ways.append((path.relative_to(PACKAGE), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        return fn(), ways, pairs
    finally:
        sys.setprofile(before)


def require_short(ways, calls, files):
    print(f"{len(ways)} calls in {len({file for file, _ in ways})} files")
    assert len(ways) <= calls and len({file for file, _ in ways}) <= files, ways


@pytest.mark.parametrize("how", ["vmap", "shard_map"])
def test_the_way_of_a_gradient_is_short(how, monkeypatch):
    """Two leaves of f32 take a dozen calls of boostax's at most, in four of its files."""
    monkeypatch.delitem(sys.modules, "jax.experimental.sparse", raising=False)
    tx, ways = boostax.all_reduce("data"), []

    def update(grads):
        state = tx.init(grads)
        (reduced, _), ways[:], _ = followed(lambda: tx.update(grads, state))
        return reduced

    grads = {"w": jnp.ones((2, 3)), "b": jnp.ones(2)}
    run = jax.vmap(update, axis_name="data")
    if how == "shard_map":
        run = jax.shard_map(update, mesh=mesh_of(data=2), in_specs=jax.P("data"), out_specs=jax.P())
    for _ in range(2):  # The first proves that types are read aright.
        jax.make_jaxpr(lambda grads, run=run: run(grads))(grads)
    require_short(ways, 12, 4)


def test_the_way_through_a_step_is_short(mesh, monkeypatch):
    """Scaler, window, reduction and AdamW in a step of a new object, traced once more."""
    monkeypatch.delitem(sys.modules, "jax.experimental.sparse", raising=False)
    tx = optax.chain(boostax.all_reduce("data"), optax.adamw(1e-3))
    tx = boostax.dynamic_loss_scale(boostax.accumulate(tx, 4, axis_name="data"), axis_name="data")
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["a"]["w"]) @ p["b"]["w"]) ** 2)  # noqa: E731
    make = lambda: boostax.make_train_step(loss, tx, mesh=mesh, axis_name="data")  # noqa: E731
    state = make().init({"a": {"w": jnp.ones((16, 16))}, "b": {"w": jnp.ones((16, 4))}})
    trace = lambda: make().jaxpr(state, jnp.ones((16, 16)))  # noqa: E731
    trace()
    _, ways, pairs = followed(trace)
    require_short(ways, 900, 23)
    both = {(a, b) for a, b in pairs if (b, a) in pairs and str(a) < str(b)}
    assert len(both) <= 6, both
