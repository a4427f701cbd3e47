"""Each law of pairs of programs fails of a transformation, or a move, that breaks it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax.testing import LAWS, PAIR_LAWS, Case, _pairs, laws_for


def plain(inner, axis):
    return optax.chain(optax.scale(0.5), inner)


def skipping_by_hand(inner, axis):
    """Of a bad step it keeps the params, and lets the optimizer have zeros."""

    def update(grads, state, params=None, **extra):
        fine = boostax.precision.all_finite(grads)
        grads = jax.tree.map(lambda g: jnp.where(fine, g, 0), grads)
        updates, state = inner.update(grads, state, params, **extra)
        return jax.tree.map(lambda u: jnp.where(fine, u, 0), updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def clipping_scaled(inner, axis=None, **options):
    return optax.chain(optax.clip_by_global_norm(1.0), boostax.static_loss_scale(inner, 2.0))


def squashing(inner, axis=None, **options):
    bounded = optax.stateless(lambda grads, _: jax.tree.map(jnp.tanh, grads))
    return boostax.static_loss_scale(optax.chain(bounded, inner), 2.0)


class Forgetful(NamedTuple):
    """Starts anew when it is saved."""

    count: Any

    def __reduce__(self):
        return Forgetful, (np.zeros_like(self.count),)


def forgetting(inner, axis):
    """Larger steps from call to call."""

    def update(grads, state, params=None, **extra):
        count, inner_state = state
        grads, inner_state = inner.update(grads, inner_state, params, **extra)
        grads = jax.tree.map(lambda g: g * (1.0 + count.count), grads)
        return grads, (Forgetful(count.count + 1), inner_state)

    init = lambda params: (Forgetful(jnp.zeros(())), inner.init(params))  # noqa: E731
    return optax.GradientTransformationExtraArgs(init, update)


def by_type(inner, axis):
    """Twice as much where JAX says that a gradient varies."""

    def update(grads, state, params=None, **extra):
        return jax.tree.map(lambda g: g * 2 if boostax._core.axes.varying(g) else g, grads), state

    twice = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    return optax.chain(twice, boostax.all_reduce(axis), inner)


def summing(tx, every, *, axis_name):
    return boostax.accumulate(tx, every, normalize="sum", axis_name=axis_name)


def anew(state, tx, params, *, replicas=None):
    _, report = boostax.migrate_state(state, tx, params, replicas=replicas)
    return tx.init(params), report


def first_of_all(state, replicas):
    """The first replica's for everyone."""
    spread = lambda x: jnp.broadcast_to(x[:1], (replicas, *x.shape[1:]))  # noqa: E731
    own = lambda x: isinstance(x, boostax.PerReplica)  # noqa: E731
    return jax.tree.map(lambda x: jax.tree.map(spread, x) if own(x) else x, state, is_leaf=own)


def windows(inner, axis):
    return boostax.accumulate(inner, 2, axis_name=axis)


SKIPS = {"skips": True, "skip_view": lambda state: state}
# Of each law: what is held to it, more of its case, and what stands for a part of the law.
BROKEN = {
    "skip_inserted_anywhere_never_was": (skipping_by_hand, SKIPS, {}),
    "scale_changes_nothing": (clipping_scaled, {}, {}),
    "window_is_one_big_batch": (plain, {}, {"accumulate": summing}),
    "nestings_of_scaler_and_window_agree": (plain, {}, {"dynamic_loss_scale": squashing}),
    "cut_anywhere_is_whole": (forgetting, {}, {}),
    "migrated_there_and_back_never_moved": (plain, {}, {"migrate_state": anew}),
    "replicas_there_and_back_never_moved": (windows, {"calls": 2}, {"reshard_state": first_of_all}),
}


def test_every_law_of_pairs_is_shown_to_fail():
    assert BROKEN.keys() == PAIR_LAWS.keys() <= LAWS.keys()


@pytest.mark.parametrize("law", BROKEN)
def test_a_law_of_pairs_fails_of_what_breaks_it(law, monkeypatch):
    make, more, replaced = BROKEN[law]
    case = Case(law, make, distributed=make is windows, **more)
    assert law in laws_for(case)
    for name, stand_in in replaced.items():
        monkeypatch.setattr(_pairs, name, stand_in)
    with pytest.raises(AssertionError):
        for seed in range(3):
            PAIR_LAWS[law](case, seed)


def test_what_depends_on_types_is_not_the_same_in_every_mode():
    case = Case("by_type", by_type, reduces=True)
    with pytest.raises(AssertionError, match="unchecked"):
        LAWS["replicas_stay_equal_in_every_mode"](case)
