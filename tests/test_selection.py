"""The largest elements, found by counting: the same as by sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reducing import at_once

import boostax
from boostax.reduce import selection, sparse


def drawn(kind, shape, seed):
    """Distinct, with many equal magnitudes, all of one, mostly zero, or of every size."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape).astype(np.float32)
    if kind == "rounded":
        return np.round(x, 1)
    if kind == "one magnitude":
        return np.where(x > 0, np.float32(0.5), np.float32(-0.5))
    if kind == "sparse":
        return np.where(np.abs(x) > 2.5, x, 0)
    return x * np.exp2(rng.integers(-100, 100, shape)).astype(np.float32) if kind == "wide" else x


@pytest.mark.parametrize("kind", ["distinct", "rounded", "one magnitude", "sparse", "wide"])
@pytest.mark.parametrize("shape", [(32, 1), (32, 128), (96, 40), (1024, 33)])
def test_the_largest_are_chosen_in_order(kind, shape):
    size = np.prod(shape)
    find = jax.jit(selection.largest, static_argnums=1)
    for seed, count in enumerate({1, 2, int(size // 100) or 1, int(size) - 1, int(size)}):
        x = drawn(kind, shape, seed)
        places, mask = map(np.asarray, find(x, count))
        word, column, bit = map(np.asarray, selection.at(places, shape[1]))
        chosen = np.zeros(shape, bool)
        chosen[word * selection.BITS + bit, column] = True
        assert (np.diff(places.astype(np.int64)) > 0).all()
        assert chosen.sum() == count
        np.testing.assert_array_equal(chosen, mask)
        largest = np.sort(np.abs(x), axis=None)[size - count :]
        np.testing.assert_array_equal(np.sort(np.abs(x[chosen])), largest)
        # Of equal ones the first.
        cells = np.abs(x).reshape(-1, selection.BITS, shape[1]).transpose(0, 2, 1).ravel()
        taken = chosen.reshape(-1, selection.BITS, shape[1]).transpose(0, 2, 1).ravel()
        assert (np.diff(taken[cells == largest[0]].astype(np.int8)) <= 0).all()


def test_in_double_precision():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(64, 20))
        x[3, 4] = x[40, 2] * (1 + 1e-12)
        _, mask = jax.jit(selection.largest, static_argnums=1)(jnp.asarray(x), 100)
        found = np.sort(np.abs(x[np.asarray(mask)]))
        np.testing.assert_array_equal(found, np.sort(np.abs(x), None)[-100:])


def test_places_and_shape_belong_together():
    x = jnp.arange(64.0 * 6).reshape(64, 6)
    places, mask = jax.jit(selection.largest, static_argnums=1)(x, 50)
    word, column, bit = selection.at(places, 6)
    chosen = x[word * selection.BITS + bit, column]
    cells = jnp.zeros((1, 2, 6, selection.BITS)).at[0, word, column, bit].set(chosen)
    np.testing.assert_array_equal(sparse.cells(cells)[0], jnp.where(mask, x, 0))


@pytest.mark.parametrize("block", [7, 64, 1000, 4096])
def test_of_each_run_the_largest_are_chosen_and_put_back(block):
    x = drawn("rounded", (129, 300), 4)
    view = sparse.Runs.of(x.shape, block, lambda size: sparse.share(0.1, size))
    positions, mask = map(np.asarray, jax.jit(view.largest)(x))
    assert positions.dtype == np.uint16 and positions.shape == (view.cells[0], view.sent)
    assert (np.diff(positions.astype(np.int64)) > 0).all()
    sizes = (np.asarray(view.rows(jnp.abs(y))) for y in (x, np.where(mask, x, 0)))
    runs, chosen = (np.sort(y.reshape(len(positions), -1)) for y in sizes)
    np.testing.assert_array_equal(chosen[:, -view.sent :], runs[:, -view.sent :])
    assert not chosen[:, : -view.sent].any()
    into = jnp.zeros((view.cells[0], view.cells[1] // 32, view.cells[2], 32))
    back = sparse.cells(sparse.add_at(into, positions, sparse.elements_at(view.rows(x), positions)))
    np.testing.assert_array_equal(view.leaf(back), np.where(mask, x, 0))


SHAPED = {
    "rows of the leaf": (300, 130),
    "three dimensions": (7, 50, 260),
    "short rows": (9000, 3),
    "a vector": (40_000,),
    "rows that are no multiple": (129, 300),
}


@pytest.mark.parametrize("shape", SHAPED.values(), ids=SHAPED)
@pytest.mark.parametrize("block", [None, 1000])
def test_top_k_of_a_large_leaf_is_that_of_sorting(shape, block):
    """One replica: what is sent is the mean, and the rest is held back."""
    x = jnp.asarray(drawn("distinct", shape, 1))
    sent, state = at_once(boostax.top_k_reduce("data", 0.01, block=block))({"w": x[None]})
    sent, held = np.asarray(sent["w"][0]), np.asarray(state.residual.local["w"][0])
    np.testing.assert_array_equal(sent + held, x)
    assert not ((sent != 0) & (held != 0)).any()
    count = np.count_nonzero(sent)
    assert abs(count - 0.01 * x.size) <= (1 if block is None else 0.2 * 0.01 * x.size)
    if block is None:
        assert np.abs(sent[sent != 0]).min() >= np.abs(held).max()


@pytest.mark.parametrize("shape", [SHAPED["rows that are no multiple"], SHAPED["a vector"]])
def test_a_count_beyond_a_leaf_is_all_of_it(shape):
    x = jnp.asarray(drawn("distinct", shape, 2))
    sent, state = at_once(boostax.top_k_reduce("data", count=100_000))(x[None])
    np.testing.assert_array_equal(sent[0], x)
    assert not np.asarray(state.residual.local).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("share", [1e-4, 1.0])
def test_what_is_not_finite_moves_nothing(bad, share):
    """However much of a large leaf it is: places are then beyond the leaf."""
    x = drawn("distinct", (200, 130), 3)
    x[np.random.default_rng(0).random(x.shape) < share] = bad
    x[0, 0] = bad
    sent, state = at_once(boostax.top_k_reduce("data", 0.01))(x[None])
    assert np.isnan(sent).all() and not np.asarray(state.residual.local).any()


def test_equal_magnitudes_do_not_starve():
    """All of one size: as many are sent as travel, and over the steps each of them."""
    tx = optax.chain(boostax.top_k_reduce("data", 0.1), optax.identity())
    ones = jnp.ones((200, 130))

    def step(state, _):
        sent, state = tx.update({"w": ones}, state)
        return state, sent["w"]

    steps = lambda _: jax.lax.scan(step, tx.init({"w": ones}), length=12)[1]  # noqa: E731
    sent = np.asarray(jax.jit(jax.vmap(steps, axis_name="data"))(jnp.zeros(1)))[0]
    assert (np.count_nonzero(sent, axis=(1, 2)) == 2600).all() and (sent.sum(0) > 0).all()
