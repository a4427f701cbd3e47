"""Drop-in forms beside what they are forms of: step by step, on streams with NaN in them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_cases import around, each_law

import boostax
from boostax import compat
from boostax.testing import Case

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": jnp.float32(0.5)}
LARGE = functools.partial(optax.skip_large_updates, max_squared_norm=9.0)


def adam():
    return optax.adamw(optax.linear_schedule(0.1, 0.01, 5))


def stream(seed, count, bad=()):
    """Gradients like the params; those at some indices with a NaN or an infinity."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        grads = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), PARAMS)
        if i in bad:
            grads["w"][0, 1] = rng.choice([np.nan, np.inf, -np.inf])
        yield grads


def windows(inner, axis, *skip):
    """``MultiSteps`` with windows of two, as a transformation."""
    return compat.MultiSteps(inner, 2, True, *skip, axis_name=axis).gradient_transformation()


# States of Optax's optimizers are of the same classes in both.
assert_near = functools.partial(chex.assert_trees_all_close, rtol=2e-6, atol=1e-6)


def beside(ours, theirs, fields, grads):
    """Both on a stream, under jit; yields the states after each step."""
    steps = [jax.jit(tx.update) for tx in (ours, theirs)]
    params = [PARAMS, PARAMS]
    states = [tx.init(PARAMS) for tx in (ours, theirs)]
    for each in grads:
        for i in range(2):
            updates, states[i] = steps[i](each, states[i], params[i])
            params[i] = optax.apply_updates(params[i], updates)
        assert_near(*params)
        for field in fields:
            assert_near(getattr(states[0], field), getattr(states[1], field))
        yield states


WINDOW = ("mini_step", "gradient_step", "inner_opt_state", "acc_grads", "skip_state")
SKIPS = [(2, None), (3, optax.skip_not_finite), (3, LARGE)]
SKIPS += [(lambda step: jnp.where(step < 2, 1, 3), optax.skip_not_finite)]


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(("every", "skips"), SKIPS)
def test_windows_are_those_of_multisteps(every, skips, mean):
    args = adam(), every, mean, skips
    ours, theirs = compat.MultiSteps(*args), optax.MultiSteps(*args)
    grads = list(stream(0, 14, () if skips is None else (0, 4, 5, 8)))
    skipped = [skips is not None and bool(skips(g, jnp.zeros(()), None)[0]) for g in grads]
    assert any(skipped) == (skips is not None) and not all(skipped)
    for states, skip in zip(beside(ours, theirs, WINDOW, grads), skipped, strict=True):
        updated = bool(theirs.has_updated(states[1])) and not skip
        assert bool(ours.has_updated(states[0])) == updated


def test_a_window_of_one_keeps_no_sum():
    ours, theirs = compat.MultiSteps(adam(), 1), optax.MultiSteps(adam(), 1)
    fields = [field for field in WINDOW if field != "acc_grads"]
    for states in beside(ours, theirs, fields, stream(1, 4)):
        assert states[0].acc_grads is None and ours.has_updated(states[0])


@pytest.mark.parametrize("most", [0, 2])
def test_steps_are_those_of_apply_if_finite(most):
    """Until it gives in, which its documentation promises; then both hold a NaN."""
    ours, theirs = compat.apply_if_finite(adam(), most), optax.apply_if_finite(adam(), most)
    fields = ("notfinite_count", "last_finite", "total_notfinite", "inner_state")
    bad = (1, 3, 4, 6, 7, 8)
    *_, (state, _) = beside(ours, theirs, fields, stream(2, 9, bad[: 1 if most == 0 else None]))
    assert int(state.total_notfinite) == (1 if most == 0 else 6)
    assert not jnp.isfinite(state.inner_state[0].mu["w"]).all()


# What is gained.


def test_a_window_reduces_once_and_takes_the_memory_of_accumulate(mesh):
    """The renamed state is the same program: no copy of the params, one reduction in four calls."""
    params = {"w": jnp.ones((256, 256)), "v": jnp.ones((256, 256))}
    loss_fn = lambda p, x: jnp.mean((x @ p["w"] @ p["v"]) ** 2)  # noqa: E731
    inner, found = optax.chain(boostax.all_reduce("data"), optax.adam(0.1)), []
    for window in (compat.MultiSteps, boostax.accumulate):
        tx = window(inner, 4, axis_name="data")
        tx = getattr(tx, "gradient_transformation", lambda tx=tx: tx)()
        step = boostax.make_train_step(loss_fn, tx, mesh=mesh, axis_name="data")
        found.append(boostax.audit(step, step.init(params), jnp.ones((16, 256)), calls=4))
    ours, theirs = found
    for field in ("reduced", "temporary_bytes", "aliased_bytes"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.reduced == (1, 2 * 256 * 256 + 1, 1)


def test_a_window_can_be_flushed_and_saved_states_of_optax_move_in():
    old, zero = optax.MultiSteps(optax.sgd(1.0), 2), jnp.float32(0)
    saved = old.init(zero)
    for _ in range(2):
        _, saved = old.update(jnp.float32(2.0), saved, zero)
    tx = compat.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    state, report = boostax.migrate_state(saved, tx, zero)
    assert isinstance(state, compat.MultiStepsState) and not report.dropped
    _, state = tx.update(jnp.float32(2.0), state, zero)
    with pytest.raises(ValueError, match=r"AccumulateState\. Call boostax\.flush\(old_tx"):
        boostax.migrate_state(state, old.gradient_transformation(), zero)
    params, state = boostax.flush(tx, state, zero)
    assert params == -2.0 and int(state.gradient_step) == 2


def test_a_scaler_inside_says_which_windows_were_applied():
    tx = compat.MultiSteps(boostax.static_loss_scale(optax.sgd(1.0), 1.0), 2)
    state = tx.init(jnp.float32(0))
    for grad, applied in ((jnp.inf, 0), (1.0, 0), (1.0, 0), (1.0, 1)):
        _, state = tx.update(jnp.float32(grad), state, jnp.float32(0))
        assert (int(state.gradient_step), bool(tx.has_updated(state))) == (applied, applied == 1)


# The contract.

checked = lambda inner, axis: windows(inner, axis, optax.skip_not_finite)  # noqa: E731
CASES = [
    Case("MultiSteps", checked, calls=2, skips=True, skip_view=lambda state: state.window),
    Case("apply_if_finite", around(compat.apply_if_finite, 100), skips=True),
]
# As in Optax a finite gradient passes, however large its square is.
SQUARES = {"skip_inserted_anywhere_never_was"}
# What depends on how a state is wrapped; the rest is the gate's and the window's.
ALWAYS = set(
    "an_unbound_axis_is_named cut_anywhere_is_whole scan_eager_and_disabled_jit_agree "
    "results_are_typed_equal skip_is_agreed_when_one_replica_is_bad".split()
)


@each_law(CASES, lambda case, law: law not in ALWAYS, lambda case, law: law in SQUARES)
def test_contract(case, law):
    law(case)


def test_finite_gradients_with_infinite_squares_pass():
    """As with Optax, whose rules these are; a loss scaler around skips them."""
    for tx in (compat.apply_if_finite(optax.sgd(1.0), 3), windows(optax.sgd(1.0), None)):
        state = tx.init(jnp.zeros(()))
        for _ in range(2):
            updates, state = tx.update(jnp.float32(1e25), state, jnp.zeros(()))
        assert jnp.isfinite(updates)


# Refusals.


def updated(skip=None, **extra):
    skips = None if skip is None else lambda *_: (skip, ())
    tx = compat.MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=skips).gradient_transformation()
    boostax.apply_gradients(tx, jnp.ones(()), tx.init(jnp.ones(())), jnp.ones(()), **extra)


REFUSED = [
    (lambda: compat.MultiSteps(adam(), 0), ValueError, "accumulate: every must be"),
    (lambda: compat.MultiSteps(adam(), 1.5), TypeError, "accumulate: every must be"),
    (lambda: compat.MultiSteps(3.0, 2), TypeError, "MultiSteps: opt must be"),
    (lambda: updated(jnp.ones(2, bool)), TypeError, "update_fn: run must be a bool scalar"),
    (lambda: updated(jnp.int32(1)), TypeError, "update_fn: run must be a bool scalar"),
    (lambda: updated(weight=2.0), ValueError, "weight must be left out"),
]


@pytest.mark.parametrize(("make", "error", "match"), REFUSED)
def test_refusals(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_what_a_rule_keeps_keeps_its_type():
    """Defect guarded against: a gate made an i32 of a bool that its rule kept."""
    tx = boostax.gate(optax.sgd(1.0), lambda g, own, p: (own, own), init=lambda _: True)
    state = tx.init(jnp.ones(()))
    assert state.rule_state.dtype == bool and not state.inner_ran()
