"""What compressed reductions send and hold back: conservation, contraction, chance, bad steps."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import draws
from hypothesis import given, strategies
from reducing import at_once, correlated, in_turn, repeated

import boostax

seeds = strategies.integers(0, 2**32 - 1)
over = functools.partial(boostax.reduce.threshold_reduce, "data")
SPARSE = {
    "top_k": lambda **o: boostax.top_k_reduce("data", 0.2, **o),
    "top_k_count": lambda **o: boostax.top_k_reduce("data", count=3, **o),
    "top_k_blocks": lambda **o: boostax.top_k_reduce("data", 0.2, block=7, **o),
    "threshold": lambda **o: over(0.8, capacity=0.3, **o),
    "threshold_relative": lambda **o: over(1.5, capacity=0.9, relative=True, **o),
}
ROUNDED = {
    "top_k_bf16": lambda **o: boostax.top_k_reduce("data", 0.2, wire_dtype="bfloat16", **o),
    "top_k_f16": lambda **o: boostax.top_k_reduce("data", 0.2, wire_dtype="float16", **o),
    "top_k_2_bits": lambda **o: boostax.top_k_reduce("data", 0.2, block=30, bits=2, **o),
    "int8": lambda **o: boostax.int8_reduce("data", block=16, **o),
    "int8_stochastic": lambda **o: boostax.int8_reduce("data", rounding="stochastic", **o),
    "in_turn": lambda **o: in_turn("data", **o),
}
ALL = SPARSE | ROUNDED
SHAPES = {"kernel": (12, 9), "bias": (9,), "scalar": ()}
SHARP = at_once(boostax.top_k_reduce("data", 0.05))


def normal(seed, replicas, magnitude=1.0):
    return correlated(SHAPES, replicas, seed, magnitude)


@functools.cache
def compiled(name):
    """The start and the update of all replicas."""
    tx = ALL[name]()
    return tuple(jax.jit(jax.vmap(fn, axis_name="data")) for fn in (tx.init, tx.update))


def stepped(name, *rounds):
    """The states before the last step, its gradients, results and the states after."""
    start, update = compiled(name)
    state = start(rounds[0])
    for grads in rounds[:-1]:
        state = update(grads, state)[1]
    means, after = update(rounds[-1], state)
    return state, means, after


def residual(state):
    """By leaf; ``None`` of one that travels dense."""
    return {k: v if v is None else np.asarray(v) for k, v in state.residual.local.items()}


@pytest.mark.parametrize("name", SPARSE)
@draws(15)
@given(seed=seeds, replicas=strategies.sampled_from([2, 3, 8]))
def test_sparse_reductions_hold_back_exactly_what_they_do_not_send(name, seed, replicas):
    """Entry by entry either all of gradient plus residual is sent, or all of it stays."""
    rounds = normal(seed, replicas), normal(seed + 1, replicas)
    before, means, after = stepped(name, *rounds)
    for leaf in SHAPES:
        wanted = residual(before)[leaf] + rounds[-1][leaf]
        kept = residual(after)[leaf]
        assert np.all((kept == wanted) | (kept == 0))
        sent = np.float64(wanted - kept).mean(0)
        np.testing.assert_allclose(means[leaf][0], sent, rtol=0, atol=1e-6)
        assert all(np.array_equal(row, means[leaf][0]) for row in means[leaf])


@pytest.mark.parametrize("name", ROUNDED)
@draws(15)
@given(seed=seeds, replicas=strategies.sampled_from([2, 3, 8]), power=strategies.integers(-20, 15))
def test_nothing_is_lost(name, seed, replicas, power):
    """The mean of what is wanted is the mean sent and the mean held back."""
    magnitude = 10.0**power
    rounds = normal(seed, replicas, magnitude), normal(seed + 1, replicas, magnitude)
    before, means, after = stepped(name, *rounds)
    for leaf in SHAPES:
        sent = np.float64(means[leaf][0])
        assert all(np.array_equal(row, means[leaf][0]) for row in means[leaf])
        if residual(after)[leaf] is None:
            # A sum in f32, in whatever order, and its division: each rounds by eps / 2 of what is
            # added up, and a mean of opposite signs may be any share of that.
            values = np.float64(rounds[-1][leaf])
            rounding = (replicas + 2) * np.finfo(np.float32).eps / 2 * abs(values).mean(0)
            assert (abs(sent - values.mean(0)) <= rounding).all()
            continue
        wanted = np.float64(residual(before)[leaf]) + rounds[-1][leaf]
        found = sent + np.float64(residual(after)[leaf]).mean(0)
        scale = abs(wanted).max() * replicas
        np.testing.assert_allclose(found / scale, wanted.mean(0) / scale, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ALL)
@draws(15)
@given(seed=seeds)
def test_what_is_held_back_is_smaller_than_what_was_wanted(name, seed):
    """Each codec contracts; the top k hold back no more than their share of the energy."""
    grads = normal(seed, 2)
    _, _, after = stepped(name, grads)
    for leaf in ("kernel", "bias"):
        kept = residual(after)[leaf]
        if kept is None:
            continue
        for own, held in zip(grads[leaf], kept, strict=True):
            energy = np.sum(np.float64(own) ** 2)
            assert np.sum(np.float64(held) ** 2) <= energy * (1 + 1e-6)
            if name == "top_k":
                assert np.sum(np.float64(held) ** 2) <= energy * (1 - 0.2) + 1e-9


@draws(10)
@given(seed=seeds)
def test_the_truly_largest_are_sent(seed):
    """Also of magnitudes below one, where SINGA's comparison takes the first."""
    grads = {"w": np.float32(np.random.default_rng(seed).normal(size=(2, 500)) / 10)}
    _, state = SHARP(grads)
    for own, held in zip(grads["w"], np.asarray(state.residual.local["w"]), strict=True):
        assert set(np.flatnonzero(held != own)) == set(np.argsort(-abs(own), kind="stable")[:25])


@jax.jit
def by_chance(grads):
    """The mean that each of 400 keys leads to."""
    tx = boostax.int8_reduce("data", rounding="stochastic", error_feedback=False)

    def mean(seed):
        state = tx.init(grads[0])._replace(codec=jax.random.PRNGKey(seed))
        return jax.vmap(lambda g: tx.update(g, state)[0], axis_name="data")(grads)[0]

    return jax.vmap(mean)(np.arange(400))


@draws(5)
@given(seed=seeds)
def test_stochastic_rounding_is_right_on_average(seed):
    grads = np.float32(np.random.default_rng(seed).normal(size=(2, 64)))
    found = np.float64(by_chance(grads))
    step = abs(grads).max() / 127
    # Two roundings, each with a standard deviation of half a step at most.
    np.testing.assert_allclose(found.mean(0), grads.mean(0), rtol=0, atol=5 * step / np.sqrt(400))
    assert found.std(0).max() > 0


@pytest.mark.parametrize("replicas", [2, 3, 7, 8, 64])
def test_integers_never_wrap(replicas):
    """All replicas at the limit, in both directions, and of any magnitude."""
    signs = np.where(np.arange(32) % 3, 1.0, -1.0)
    step = at_once(ALL["int8"]())
    for magnitude in (1e-30, 1.0, 127.0, 32767.0, 1e17):
        grads = {"w": np.float32(np.tile(signs * magnitude, (replicas, 1)))}
        np.testing.assert_allclose(np.asarray(step(grads)[0]["w"][0]), grads["w"][0], rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_step_of_one_replica_leaves_every_state_untouched(name, bad):
    """Though no gate stands outside; and the result shows it on all replicas."""
    start, update = compiled(name)
    grads = normal(0, 3)
    _, state = update(grads, start(grads))
    broken = jax.tree.map(np.copy, grads)
    broken["kernel"][1, 2, 3] = bad
    means, after = update(broken, state)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    assert all(np.all(~np.isfinite(row)) for row in means["kernel"])


# An absolute threshold is not the same at another size, and f16 has no such range.
@pytest.mark.parametrize("name", [x for x in ALL if x not in ("threshold", "top_k_f16")])
@pytest.mark.parametrize("power", [64, 122, -80])
def test_finite_gradients_of_any_size_are_reduced_like_usual_ones(name, power):
    """From 1e19 on a sum of squares overflowed, and the means were NaN."""
    usual, scaled = (stepped(name, normal(0, 3, size))[1:] for size in (1.0, 2.0**power))
    for found, wanted in zip(*(jax.tree.leaves(x[0]) for x in (scaled, usual)), strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found / np.float64(2.0**power), wanted, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(scaled[1].unsent, usual[1].unsent, rtol=1e-4, atol=1e-6)


def test_a_relative_threshold_is_in_units_of_the_leaf_not_of_its_padding():
    """Ten entries in blocks of eight: six zeros behind them change nothing."""
    grads = jnp.array([[3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    # The root mean square is 1.34: 3 is 2.24 of them. With the padding it would be 2.83.
    for threshold, first in ((2.2, 3.0), (2.3, 0.0)):
        tx = over(threshold, relative=True, capacity=1.0, block=8)
        assert repeated(tx, grads)[0].tolist() == [[first, *[0.0] * 9]]


def test_leaves_left_dense_take_the_mean_and_keep_nothing():
    grads = normal(2, 3)
    for rule in (lambda path, leaf: leaf.ndim < 2, {"kernel": False, "bias": True, "scalar": True}):
        means, state = repeated(boostax.top_k_reduce("data", 0.1, dense=rule), grads)
        for leaf in ("bias", "scalar"):
            np.testing.assert_allclose(means[leaf][0], grads[leaf].mean(0), atol=1e-6)
            assert state.residual.local[leaf] is None
        assert state.residual.local["kernel"].shape == (3, 12, 9)


def test_a_rule_that_does_not_fit_is_refused():
    tx = boostax.top_k_reduce("data", dense={"kernel": True})
    with pytest.raises(ValueError, match="pytree structure error"):
        tx.init({"kernel": jnp.ones(3), "bias": jnp.ones(3)})


def test_without_feedback_nothing_is_kept():
    for make in ALL.values():
        step = functools.partial(repeated, make(error_feedback=False))
        assert not jax.tree.leaves(jax.eval_shape(step, normal(3, 2))[1].residual)


def test_the_share_held_back_is_recorded():
    grads = {"w": jnp.array([[3.0, 4.0], [0.0, 0.0]])}
    _, state = repeated(boostax.top_k_reduce("data", 0.5), grads)
    assert state.metrics()["unsent"].tolist() == pytest.approx([0.6, 0.6])


@pytest.mark.parametrize("name", ALL)
def test_what_is_held_back_fades(name):
    """A step goes by a residual that is smaller by the decay."""
    grads, (start, update) = normal(5, 2), compiled(name)
    fading = jax.jit(jax.vmap(ALL[name](decay=0.5).update, axis_name="data"))
    # The first step has no residual, and so nothing that could fade.
    _, state = update(grads, start(grads))
    faded = state._replace(residual=jax.tree.map(lambda x: x / 2, state.residual))
    chex.assert_trees_all_close(fading(grads, state), update(grads, faded), rtol=1e-6, atol=1e-6)


def test_warming_up_goes_by_steps_that_were_not_skipped():
    """The density of each step, from the entries that came."""
    tx = boostax.top_k_reduce("data", {0: 1.0, 2: 0.5, 3: 0.1})
    grads = np.float32(np.random.default_rng(0).normal(size=(2, 40)))
    grads[1] = grads[0]
    update = jax.jit(jax.vmap(tx.update, axis_name="data"))
    state = jax.vmap(tx.init, axis_name="data")(grads)
    counts = []
    for step in range(6):
        means, state = update(np.where(step == 1, np.nan, grads), state)
        counts.append(int(np.sum(np.isfinite(means[0]) & (means[0] != 0))))
    assert counts == [40, 0, 40, 20, 4, 4]


def test_momentum_correction_stops_where_an_entry_has_been_sent():
    """Deep gradient compression in float64: velocity and residual are zero there."""
    tx = boostax.top_k_reduce("data", 0.1, momentum=0.9)
    grads = np.random.default_rng(0).normal(size=(6, 3, 40)).astype(np.float32)
    state = jax.vmap(tx.init, axis_name="data")(grads[0])
    velocity = rest = np.zeros((3, 40))
    update = jax.jit(jax.vmap(tx.update, axis_name="data"))
    for rows in grads:
        means, state = update(rows, state)
        velocity = 0.9 * velocity + rows
        rest = rest + velocity
        chosen = abs(rest) >= np.sort(abs(rest), 1)[:, [-4]]
        np.testing.assert_allclose(means[0], np.where(chosen, rest, 0).mean(0), rtol=0, atol=2e-6)
        velocity, rest = np.where(chosen, 0, velocity), np.where(chosen, 0, rest)
