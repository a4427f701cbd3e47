"""AdaSum computes what its definition says: recorded runs of its peers, a reference, and laws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from drawing import draws
from hypothesis import given
from hypothesis import strategies as st
from lanes import lanes, spread
from reducing import correlated, reduced, reducer, the_one

import boostax

WIDTH = 24
seeds = st.integers(0, 2**32 - 1)
combine = functools.partial(reduced, boostax.adasum)


def assert_same(actual, expected):
    """Bit for bit, but for the sign of a zero and the payload of a NaN."""
    np.testing.assert_array_equal(actual, expected, strict=True)


def assert_near(actual, expected, rows, tolerance=1e-6):
    """Within a tolerance relative to the largest input."""
    largest = abs(reference.wide(rows)).max()
    actual, expected = reference.wide(actual) / largest, np.asarray(expected) / largest
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


# Recorded runs.


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("replicas", [2, 4])
def test_equals_horovod(arrays, replicas, dtype):
    """Every case; zeros behind a gradient change no dot product, so one program does them all."""
    run = arrays(f"horovod_adasum_n{replicas}.npz")
    cases = [name[3:] for name in run if name.startswith("in_") and dtype in name]
    assert len(cases) == (17 if dtype == "float32" else 14)
    eps, levels = np.finfo(dtype).eps, (replicas - 1).bit_length()
    pad = lambda rows: np.pad(rows, [(0, 0), (0, 4097 - rows.shape[1])])  # noqa: E731
    rows = np.stack([pad(run[f"in_{case}"]) for case in cases])
    with jax.enable_x64(dtype == "float64"):
        results = jax.device_get(jax.jit(jax.vmap(reducer(boostax.adasum)))(rows))
    assert results.dtype == dtype
    for case, copies, given_rows in zip(cases, results, rows, strict=True):
        result, expected = the_one(copies), pad(run[f"out_{case}"][None])[0]
        if "nan" in case:
            # One bad element makes the whole leaf NaN.
            assert np.isnan(run[f"out_{case}"]).all() and np.isnan(result).all()
        elif "zeros" in case:
            assert not expected.any() and not result.any()
        elif dtype == "float16":
            # Horovod rounds to f16 at each level, and boostax once.
            assert_near(result, expected, given_rows, (levels + 1) * eps / 2)
        else:
            limit = min(4 if dtype == "float32" else 9, reference.ROUNDINGS * levels / 2) * eps
            assert_near(result, expected, given_rows, limit)


@pytest.mark.parametrize("replicas", [2, 4])
def test_leaves_sent_together_equal_horovods_fused_ones(arrays, replicas):
    """Each has its own coefficients."""
    run = arrays(f"horovod_adasum_n{replicas}.npz")
    fused = [run[f"in_fused{i}"] for i in range(4)]
    for i, result in enumerate(combine(fused)):
        assert_near(result, run[f"out_fused{i}"], fused[i], 5e-7)


OPTIMIZERS = {"sgd": optax.sgd(0.1), "sgdm": optax.sgd(0.05, 0.9), "adam": optax.adam(0.05)}


@pytest.mark.parametrize(("name", "replicas"), spread(OPTIMIZERS, [4, 2]))
def test_delta_optimizer_equals_horovods(arrays, replicas, name):
    """Every replica has its own momenta; the updates are combined."""
    run = arrays(f"horovod_adasum_n{replicas}.npz")
    # Optax's Adam computes 1 - 0.999**t in the dtype of the params: in f32 that alone is worth
    # 2e-6 here, whatever the reduction.
    dtype = "float64" if name == "adam" else "float32"
    parts = ("X", "Y", "w0", "b0", "W", "B")
    x, y, w, b, ws, bs = (run[f"opt_{name}_{part}"].astype(dtype) for part in parts)
    tx = boostax.reduce.adasum_delta(OPTIMIZERS[name], axis_name="data")

    def loss(params, x, y):
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    def step(carry, batch):
        params, state = carry
        params, state = boostax.apply_gradients(tx, jax.grad(loss)(params, *batch), state, params)
        return (params, state), params

    def train(x, y):
        start = {"w": jnp.asarray(w), "b": jnp.asarray(b)}
        return jax.lax.scan(step, (start, tx.init(start)), (x, y))

    with jax.enable_x64(dtype == "float64"):
        (_, state), after = jax.jit(jax.vmap(train, in_axes=1, axis_name="data"))(x, y)
        state, after = jax.device_get((state, after))
    np.testing.assert_allclose(the_one(after["w"]), ws, rtol=0, atol=1e-6)
    np.testing.assert_allclose(the_one(after["b"]), bs, rtol=0, atol=1e-6)
    # The optimizers are independent: the replicas' momenta differ.
    for moment in jax.tree.leaves(state.inner_state):
        assert moment.ndim == 1 or (moment[0] != moment[1]).any()


def test_equals_mindspores_boost(arrays):
    """Params minus the AdaSum of two ranks' deltas; one leaf has a single element."""
    run = arrays("adasum_boost_2ranks.npz")
    deltas = [np.stack([run[f"delta_r{r}_p{i}"] for r in range(2)]) for i in range(4)]
    for i, result in enumerate(combine(deltas)):
        np.testing.assert_allclose(run[f"old{i}"] - result, run[f"result_p{i}"], rtol=0, atol=1e-6)


# The reference.

SHAPES = [(3, 5), (), (1, 700)]


def unlike(replicas):
    """Leaves of odd sizes whose rows have a part in common, and norms from 0.1 to 10."""
    norms = np.float32(10 ** np.random.default_rng(0).uniform(-1, 1, replicas))
    return [np.einsum("r...,r->r...", x, norms) for x in correlated(SHAPES, replicas)]


@pytest.mark.parametrize("replicas", lanes([*range(1, 9), 16], [1, 2, 3, 5, 7, 8]))
def test_equals_the_reference_for_any_number_of_replicas(replicas):
    """By leaf; in scope "tree" with one pair of coefficients for all."""
    leaves = unlike(replicas)
    reference.assert_adasum(combine(leaves, scope="leaf"), leaves)
    result = combine(leaves, scope="tree")
    for each in zip(result, reference.adasum_tree(leaves), leaves, strict=True):
        assert_near(*each)


# Laws.


@draws(50)
@given(seed=seeds, exponent=st.integers(-40, 40), factor=st.floats(-1e3, 1e3))
def test_a_pair_is_symmetric_and_homogeneous(seed, exponent, factor):
    rows = np.float32(normal(seed, 2, WIDTH) * 10 ** normal([seed, 1], 2, 1))
    result = combine(rows)
    assert_near(combine(rows[::-1]), result, rows, 2 * reference.EPS)
    assert_same(combine(rows * np.float32(2.0**exponent)), result * np.float32(2.0**exponent))
    scaled = rows * np.float32(factor)
    if abs(factor) > 1e-20:
        assert_near(combine(scaled), factor * reference.wide(result), scaled)


@draws(60)
@given(seed=seeds, replicas=st.integers(2, 9), spread=st.integers(0, 30))
def test_orthogonal_gradients_add(seed, replicas, spread):
    rng = np.random.default_rng(seed)
    magnitudes = 2.0 ** rng.integers(-spread, spread, replicas, endpoint=True)
    rows = np.float32(np.linalg.qr(rng.normal(size=(WIDTH, replicas)))[0].T * magnitudes[:, None])
    assert_near(combine(rows), rows.sum(0, dtype=np.float64), rows)
    # Without an entry in common nothing is rounded.
    owner = rng.integers(replicas, size=WIDTH)
    rows = np.where(owner == np.arange(replicas)[:, None], np.float32(rng.normal(size=WIDTH)), 0)
    rows *= np.float32(magnitudes)[:, None]
    assert_same(combine(rows), rows.sum(0))


@draws(60)
@given(seed=seeds, replicas=st.sampled_from([2, 4, 8]), data=st.data())
def test_parallel_gradients_average(seed, replicas, data):
    """Of whatever length and sign; and a leaf of one element is always parallel."""
    limit = data.draw(st.sampled_from([2.0, 2.0**10]), "limit")
    factor = st.floats(1 / limit, limit, width=32).flatmap(lambda x: st.sampled_from([x, -x]))
    factors = data.draw(st.lists(factor, min_size=replicas, max_size=replicas), "factors")
    factors = np.float32(factors)
    # Few bits, so that the products are exact and the rows exactly parallel.
    direction = np.random.default_rng(seed).integers(1, 2**8, WIDTH)
    rows = np.float32(np.frexp(factors)[0] * 2**12 // 1)[:, None] * np.float32(direction)
    rows = np.ldexp(rows, np.frexp(factors)[1][:, None])
    for result, given_rows in zip(combine([rows, factors]), [rows, factors], strict=True):
        error = np.linalg.norm(np.ravel(result - reference.mean(given_rows)))
        assert error <= reference.adasum_error(given_rows.reshape(replicas, -1))


@draws(60)
@given(seed=seeds, replicas=st.integers(2, 9), magnitude=st.integers(-30, 30))
def test_identical_gradients_come_back_bit_for_bit(seed, replicas, magnitude):
    x = np.float32(normal(seed, WIDTH) * 10.0**magnitude)
    assert_same(combine(np.stack([x] * replicas)), x)


@pytest.mark.parametrize("scope", ["leaf", "tree"])
@pytest.mark.parametrize("replicas", [2, 3, pytest.param(8, marks=pytest.mark.long)])
def test_identical_trees_come_back_bit_for_bit(replicas, scope):
    """In every dtype; what the sums of several leaves round to is equal too."""
    dtypes = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float64)
    for seed in range(20):
        x = normal(seed, WIDTH)
        with jax.enable_x64(True):
            leaves = [*(np.asarray(x, dtype) for dtype in dtypes), np.complex64(x + 1j * x[::-1])]
            result = combine([np.stack([leaf] * replicas) for leaf in leaves], scope=scope)
        jax.tree.map(assert_same, result, leaves)


@draws(30)
@given(seed=seeds, swaps=st.lists(st.booleans(), min_size=7, max_size=7))
def test_the_order_within_a_level_does_not_matter(seed, swaps):
    """Members of a pair, pairs of a level: whatever leaves the tree the same."""
    order = np.arange(8)
    for level, first in ((1, 0), (2, 4), (4, 6)):
        blocks = order.reshape(-1, 2, level)
        flips = np.array(swaps[first : first + len(blocks)])
        order = np.where(flips[:, None, None], blocks[:, ::-1], blocks).ravel()
    rows = np.float32(normal(seed, 8, WIDTH))
    assert_near(combine(rows[order]), combine(rows), rows, 5e-7)
    # But the tree itself does.
    assert abs(combine(rows[[0, 2, 1, 3, 4, 6, 5, 7]]) - combine(rows)).max() > 1e-4


SPREADS = st.sampled_from([0, 1, 10, 50])


@draws(80)
@given(seed=seeds, replicas=st.integers(2, 9), base=st.floats(-30, 20), spread=SPREADS)
def test_magnitudes_from_1e_minus_30_to_1e20(seed, replicas, base, spread):
    """Where the squares leave the range of f32, and one replica's gradients that of another."""
    rng = np.random.default_rng(seed)
    offsets = rng.uniform(-spread, spread, (replicas, 1))
    rows = np.float32(rng.normal(size=(replicas, WIDTH)) * 10 ** np.clip(base + offsets, -30, 20))
    assert_near(combine(rows), reference.adasum(rows), rows)


@draws(30)
@given(seed=seeds, replicas=st.sampled_from([2, 5]), base=st.floats(-25, 18), gap=st.floats(0, 20))
def test_a_tree_of_leaves_of_different_magnitude(seed, replicas, base, gap):
    """In scope "tree" each is as exact as its own entries are."""
    magnitudes = enumerate((10**base, 10 ** max(base - gap, -30)))
    leaves = [np.float32(normal([seed, i], replicas, 5) * size) for i, size in magnitudes]
    result = combine(leaves, scope="tree")
    for actual, expected, rows in zip(result, reference.adasum_tree(leaves), leaves, strict=True):
        assert_near(actual, expected, rows)


@draws(40)
@given(seed=seeds, replicas=st.sampled_from([2, 5]), magnitude=st.integers(-3, 4))
def test_low_gradients_are_combined_in_f32(seed, replicas, magnitude):
    """Off by the rounding of the result, and nothing else; what f16 cannot hold saturates."""
    x = normal(seed, replicas, WIDTH) * 10.0**magnitude
    rows = {dtype: jnp.asarray(x, dtype) for dtype in (jnp.float16, jnp.bfloat16)}
    for actual, given_rows in zip(combine(list(rows.values())), rows.values(), strict=True):
        limits = jnp.finfo(given_rows.dtype)
        largest = float(limits.max)
        expected = np.clip(reference.adasum(given_rows), -largest, largest)
        rounding = abs(expected) * float(limits.eps) / 2 + float(limits.smallest_subnormal) / 2
        slack = 1e-6 * abs(reference.wide(given_rows)).max()
        assert (abs(reference.wide(actual) - expected) <= rounding + slack).all()
        assert actual.dtype == given_rows.dtype


@draws(30)
@given(seed=seeds, replicas=st.integers(2, 9), data=st.data())
def test_zero_gradients_leave_the_others(seed, replicas, data):
    rows = np.float32(normal(seed, replicas, WIDTH))
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=replicas, max_size=replicas)))
    some = np.where(keep[:, None], rows, np.float32(0))
    assert_near(combine(some), reference.adasum(some), rows)
    if keep.sum() < 2:
        assert_same(combine(some), some.sum(0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_stays_in_its_leaf(bad):
    """A whole leaf goes; in scope "tree" all of them."""
    for replicas in (2, 3, 8):
        leaves = unlike(replicas)
        leaves[0][replicas - 1, 1, 1] = bad
        bad_leaf, *others = combine(leaves)
        assert not np.isfinite(bad_leaf).any() and all(np.isfinite(x).all() for x in others)
        assert not any(np.isfinite(x).any() for x in combine(leaves, scope="tree"))


@pytest.mark.long
def test_it_can_be_differentiated():
    """As an outer loop that learns the optimizer does: against a difference quotient."""
    rows = np.float32(normal(3, 4, 600))
    direction = np.float32(normal(4, 4, 600))
    square = lambda x: jnp.sum(reducer(boostax.adasum)(x)[0] ** 2)  # noqa: E731
    slope = (square(rows + 1e-2 * direction) - square(rows - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose(np.sum(jax.grad(square)(rows) * direction), slope, rtol=1e-2)


def test_delta_optimizer_computes_wide():
    """Its moments are those of the widened gradients, not squares rounded in bf16."""
    grads = jnp.asarray(normal(3, 2, WIDTH), jnp.bfloat16)
    tx = boostax.reduce.adasum_delta(optax.scale_by_adam(), axis_name="data")

    def moments(g):
        return tx.update(g, tx.init(g))[1].inner_state.local.nu

    found = jax.jit(jax.vmap(moments, axis_name="data"))(grads)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 0.001 * reference.wide(grads) ** 2, rtol=1e-5)
